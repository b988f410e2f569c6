"""Labelling, its file and the refit: what a page cannot show, such as a torn line at every byte."""

from __future__ import annotations

import copy
import json
import math
import random
import re

import numpy as np
import pandas as pd
import pytest
import torch
from datasets import Dataset, load_dataset
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_nb.judging import judge_pairs
from rlhf_nb.models import scorer_from
from rlhf_nb.reward import RewardConfig, RewardTrainer, encode_pairs
from rlhf_nb.ui import preference_labels as L
from rlhf_nb.ui import preferences as P
from rlhf_nb.ui import refit as R
from rlhf_nb.ui.preference_labels import (
    Labelling,
    draw_pairs,
    load_preferences,
    read_labels,
    showings,
)
from rlhf_nb.ui.preferences import label_preferences
from rlhf_nb.ui.refit import is_held_out, refit_reward_model

ROWS = [dict(prompt=f"post {i}", answer_1=f"one {i}", answer_2=f"two {i}") for i in range(20)]
HOSTILE = '<script>alert(1)</script><img src=x onerror=alert(2)>"\u202e'


def label(path, keys: str, rows=ROWS, **more) -> Labelling:
    work = Labelling(rows, path, **more)
    for key in keys:
        work.undo() if key == "u" else work.choose(key)
    return work


class Clock:
    "Moves on when it is told to."

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def desk(tmp_path):
    made = label_preferences(ROWS, tmp_path / "a.jsonl")
    made.work.clock = clock = Clock()

    def wait(seconds=1.0):
        clock.now += seconds

    made.wait = wait
    assert made.box
    wait()
    return made


# ---- The order ----


# catches: sides that go by turns or stay, a repeat on the same side, too soon, twice, or of a pair
# that was not yet shown
@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 60), st.sampled_from([0, 4, 5, 8, 13]), st.integers(0, 99), st.integers(0, 20)
)
def test_showings(n, every, seed, more):
    order = showings(n, every, seed)
    assert [s.pair for s in order if not s.again] == list(range(n))
    assert sum(s.again for s in order) == (n // every if every else 0)
    assert showings(n + more, every, seed)[: len(order)] == order
    for place, one in enumerate(order):
        if not one.again:
            continue
        first = [i for i, s in enumerate(order[:place]) if s.pair == one.pair]
        assert len(first) == 1 and place - first[0] > 3 and order[first[0]].left == 1 - one.left


# ---- The file ----


# catches: a torn line that stops the reading, swallows the line before it, or is glued to the next
# one
def test_a_file_torn_at_any_byte_goes_on(tmp_path):
    label(tmp_path / "a.jsonl", "1201")
    whole = (tmp_path / "a.jsonl").read_bytes()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == 10]
    for cut in range(0, len(whole) + 1, 7):
        path = tmp_path / "torn.jsonl"
        path.write_bytes(whole[:cut])
        kept = sum(end <= cut for end in ends)
        work = Labelling(ROWS, path)
        assert [row["choice"] for row in work.rows] == list("1201"[:kept])
        work.choose("2")
        assert [row["choice"] for row in read_labels(path).rows] == [*"1201"[:kept], "2"]


# catches: zeros or half a character of a power failure at the end that end the reading
@pytest.mark.parametrize(
    "tail", [b"\0" * 9, b'{"choice": "1", "x": "\xc3', b"\xff\n", b"{}{}\n", b"7\n"]
)
def test_rubbish_at_the_end_is_passed_over(tmp_path, tail):
    label(tmp_path / "a.jsonl", "12")
    with open(tmp_path / "a.jsonl", "ab") as file:
        file.write(tail)
    assert len(read_labels(tmp_path / "a.jsonl").rows) == 2
    assert read_labels(tmp_path / "a.jsonl").torn == len(tail)


# catches: a damaged line in the middle that is dropped in silence
def test_rubbish_in_the_middle_is_refused(tmp_path):
    label(tmp_path / "a.jsonl", "12")
    lines = (tmp_path / "a.jsonl").read_text().splitlines()
    (tmp_path / "a.jsonl").write_text("\n".join([lines[0], "{", lines[1]]) + "\n")
    with pytest.raises(ValueError, match="line 2 is no JSON"):
        read_labels(tmp_path / "a.jsonl")
    (tmp_path / "b.jsonl").write_text('{"prompt": "p", "chosen": "a", "rejected": "b"}\n')
    with pytest.raises(ValueError, match="line 1 is no choice"):
        read_labels(tmp_path / "b.jsonl")
    with pytest.raises(FileNotFoundError):
        load_preferences(tmp_path / "none.jsonl")


# catches: a choice that waits in a buffer, and one that is shown as made before it is on the disk
def test_every_choice_is_synced_before_the_next_pair(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(
        L.os, "fsync", lambda f: synced.append((tmp_path / "a.jsonl").read_bytes().count(b"\n"))
    )
    work = label(tmp_path / "a.jsonl", "12u0")
    assert synced == [1, 2, 3, 4]

    def fail(f):
        raise OSError("the disk is full")

    monkeypatch.setattr(L.os, "fsync", fail)
    before = work.rows
    with pytest.raises(OSError):
        work.choose("1")
    assert work.rows == before
    monkeypatch.undo()
    work.choose("2")
    assert [row["choice"] for row in read_labels(tmp_path / "a.jsonl").rows] == ["1", "0", "2"]


# catches: two windows on one file, each of which writes as though it were alone, even where the
# bytes are as many
def test_a_file_that_is_open_elsewhere(tmp_path):
    one, two = label(tmp_path / "a.jsonl", "1"), Labelling(ROWS, tmp_path / "a.jsonl")
    two.choose("1")
    with pytest.raises(ValueError, match="open elsewhere"):
        one.choose("2")
    assert len(read_labels(tmp_path / "a.jsonl").rows) == 2 and len(one.rows) == 1


# catches: a file that goes on with other data, another seed, another rhythm, or fewer rows
@pytest.mark.parametrize(
    "change",
    [
        dict(seed=1),
        dict(repeat_every=4),
        dict(rows=ROWS[1:]),
        dict(rows=ROWS[:3]),
        dict(rows=[row | dict(answer_2=row["answer_2"] + "!") for row in ROWS]),
    ],
)
def test_a_file_of_other_pairs_is_refused(tmp_path, change):
    label(tmp_path / "a.jsonl", "12012")
    with pytest.raises(ValueError, match="a path that is new"):
        label(tmp_path / "a.jsonl", "", **change)
    assert len(label(tmp_path / "a.jsonl", "", rows=[*ROWS, dict(ROWS[0], prompt="new")]).rows) == 5


# ---- What was said ----


# catches: chosen and rejected the wrong way round, a side that decides instead of the answer, a
# repeat or a tie that is trained on, an undo that is not
def test_what_training_gets(tmp_path):
    work, rng = Labelling(ROWS, tmp_path / "a.jsonl", seed=3), random.Random(0)
    likes_two = lambda: "2" if work.answers()[1][1].startswith("two") else "1"
    while work.showing:
        if rng.random() < 0.4:
            work.choose(rng.choice("12"))
            work.undo()
        work.choose("0" if work.showing.pair % 5 == 0 else likes_two())
    data = load_preferences(tmp_path / "a.jsonl")
    assert data.column_names == ["prompt", "chosen", "rejected", "pair"] and len(data) == 16
    assert all(
        row["chosen"] == f"two {row['pair']}"
        and row["rejected"] == f"one {row['pair']}"
        and row["prompt"] == f"post {row['pair']}"
        for row in data
    )
    labels = read_labels(tmp_path / "a.jsonl")
    assert (
        labels.agreement() == (2, 2)
        and labels.undone > 0
        and 0
        < labels.first_taken()[0]
        < labels.first_taken()[1]
        == len(work.order) - sum(r["choice"] == "0" for r in labels.rows)
    )


# catches: an agreement that compares keys instead of answers, and a bias towards the side that
# nobody is told of
def test_somebody_who_always_takes_the_left(tmp_path):
    labels = label(tmp_path / "a.jsonl", "1" * 22).labels
    assert labels.agreement() == (0, 2) and labels.first_taken() == (22, 22)
    assert "the place seems to decide" in repr(P.label_report(labels))


# catches: a raw file that is read as training rows, with ties or choices that were taken back;
# texts without choices that pass in silence
def test_the_raw_file_is_known(tmp_path, letters):
    rows = [dict(prompt="abc", answer_1="de" + "a" * i, answer_2="fg") for i in range(6)]
    label(tmp_path / "a.jsonl", "1212", rows=rows)
    raw = lambda: load_dataset(
        "json", data_files=str(tmp_path / "a.jsonl"), cache_dir=str(tmp_path / "c")
    )["train"]
    assert len(encode_pairs(raw(), letters)) == 4
    label(tmp_path / "a.jsonl", "0", rows=rows)
    assert (
        encode_pairs(raw(), letters)[:]
        == encode_pairs(load_preferences(tmp_path / "a.jsonl"), letters)[:]
        and len(raw()) == 5
    )
    with pytest.raises(ValueError, match="row 4: chosen is missing"):
        encode_pairs(raw().select_columns(["prompt", "chosen", "rejected"]), letters)


# catches: rows without an answer, equal answers, and an empty set that are noticed when somebody
# has labelled for an hour
@pytest.mark.parametrize(
    "rows, said",
    [
        ([], "0 pairs"),
        ([dict(prompt="p", chosen="a", rejected="b")], "lack"),
        ([ROWS[0], dict(ROWS[1], answer_1=" a", answer_2=" a")], "row 1: both"),
        ([dict(ROWS[0], answer_2=None)], "row 0: answer_2"),
        ([dict(ROWS[0], prompt="")], "row 0: prompt"),
        ([dict(ROWS[0], answer_1=[1])], "row 0: answer_1"),
    ],
)
def test_rows_that_nobody_can_label(tmp_path, rows, said):
    with pytest.raises(ValueError, match=said):
        label_preferences(rows, tmp_path / "a.jsonl")
    assert not (tmp_path / "a.jsonl").exists()


# catches: conversations and whole texts that the file cannot give back as they were
def test_conversations_and_whole_texts(tmp_path):
    turn = lambda text: [dict(role="assistant", content=text)]
    rows = [dict(prompt=[dict(role="user", content="hi")], a=turn("yes"), b=turn("no"))]
    work = label(tmp_path / "chat.jsonl", "1", rows=Dataset.from_list(rows), answers=("a", "b"))
    row = load_preferences(tmp_path / "chat.jsonl")[0]
    assert {row["chosen"][0]["content"], row["rejected"][0]["content"]} == {"yes", "no"}
    assert row["prompt"] == rows[0]["prompt"]
    assert "assistant: yes" in repr(
        P.render_labelling(Labelling(rows, tmp_path / "x.jsonl", ("a", "b")))
    )
    assert work.showing is None
    label(tmp_path / "whole.jsonl", "1", rows=[dict(answer_1="all of it", answer_2="all of that")])
    assert "prompt" not in load_preferences(tmp_path / "whole.jsonl").column_names


# catches: a fixed order that gives the model away, a choice put on the wrong answer, a pair that
# counts twice because it was shown twice, a pair that nobody judged counted as a tie
def test_a_person_as_a_judge(tmp_path):
    rows = [dict(prompt=f"p{i}", answer_1=f"o{i}", answer_2=f"t{i}") for i in range(40)]
    work = Labelling(rows, tmp_path / "a.jsonl")
    assert 8 < sum(one.left for one in work.order if not one.again) < 32
    while len(work.labels.fresh) < 30:
        pair, again = work.showing.pair, work.showing.again
        ours = "1" if work.answers()[1][0].startswith("o") else "2"
        work.choose("1" if again else "0" if pair % 3 == 0 else ours)
    prompts, pairs = [row["prompt"] for row in rows], [(f"o{i}", f"t{i}") for i in range(40)]
    for both in (True, False):
        judge = L.PersonJudge(tmp_path / "a.jsonl")
        found = judge_pairs(judge, prompts, *zip(*pairs), both_orders=both)
        assert (found.wins, found.ties, found.losses, found.invalid) == (20, 10, 0, 10)
        assert "30 pairs" in found.usage and found.judge == "a person"
    assert judge(["p0", "p99", "p99"], [("t0", "o0"), ("a", "a"), ("a", "b")]) == [0.5, 0.5, None]
    for key in ("x", "u", ""):
        with pytest.raises(ValueError, match="give 1, 2 or 0"):
            work.choose(key)


# ---- Keys and buttons ----


# catches: a Backspace that chooses, a digit that is lost behind the last one, a note or a file that
# disagrees with the field
def test_the_field(desk):
    typed = {"1": "1", "12": "12", "x2": "122", "": "12", "20": "120", "0U": "12", "2q": "12"}
    for text, want in typed.items():
        desk.wait()
        desk.field.value = text
        assert "".join(row["choice"] for row in desk.work.rows) == want
        assert desk.field.value == want[-1:]
    assert "is no key here" in desk.view.value
    assert [
        json.loads(line)["choice"] for line in desk.work.file.path.read_text().splitlines()
    ] == ["1", "2", "2", "undo", "0", "undo"]


# catches: a held key or a double click that labels pairs which nobody saw
def test_what_comes_at_once_is_not_counted(desk):
    for _ in range(5):
        desk.buttons["1"].click()
        desk.wait(0.1)
    assert len(desk.work.rows) == 1 and "not counted" in desk.view.value
    desk.wait()
    desk.buttons["0"].click()
    assert len(desk.work.rows) == 2


# catches: a failure to save that nobody sees, or a view that goes on to the next pair after it
def test_a_failure_is_shown(desk, monkeypatch):
    def fail(f):
        raise OSError("the disk is full <b>")

    monkeypatch.setattr(L.os, "fsync", fail)
    for act in (desk.buttons["1"].click, lambda: setattr(desk.field, "value", "2")):
        desk.wait()
        try:
            act()  # ipywidgets logs what a button raises, and goes on
        except OSError:
            assert "1" not in desk.field.value
        assert 'role="alert"' in desk.view.value
        assert "full &lt;b&gt;" in desk.view.value
        assert not desk.work.rows
    monkeypatch.undo()
    desk.wait()
    desk.buttons["2"].click()
    assert len(desk.work.rows) == 1 and "alert" not in desk.view.value


# catches: a key held down that labels pairs which nobody saw, on a machine that draws slowly: the
# time since the last key was pressed is no time of reading
def test_a_key_right_after_a_slow_drawing_is_not_counted(tmp_path, monkeypatch):
    desk = label_preferences(ROWS, tmp_path / "a.jsonl")
    desk.work.clock = clock = Clock()
    plain = P.render_labelling

    def slowly(*given):
        clock.now += 5
        return plain(*given)

    monkeypatch.setattr(P, "render_labelling", slowly)
    assert desk.box
    clock.now += 1
    desk.field.value = "1"
    clock.now += 0.1
    desk.field.value += "1"
    assert len(desk.work.rows) == 1 and "was not counted" in desk.view.value
    clock.now += 1
    desk.field.value += "2"
    assert [row["choice"] for row in desk.work.rows] == ["1", "2"]


# catches: an undo before the first choice or after the last one that fails, or a key that writes
# when all is done
def test_both_ends(tmp_path):
    desk = label_preferences(ROWS[:1], tmp_path / "a.jsonl")
    desk.work.clock = iter(range(99)).__next__
    for key, rows in (("u", 0), ("1", 1), ("2", 1), ("u", 0), ("0", 1)):
        desk.press(key)
        assert len(desk.work.rows) == rows
    assert "All 1 choices" in desk.draw()


# catches: texts, paths or notes that become markup, live or static
def test_hostile_texts_are_escaped(tmp_path, letters, tiny):
    rows = [dict(prompt=HOSTILE, answer_1=HOSTILE + "a", answer_2=HOSTILE + "b")]
    seen = label_preferences(rows, tmp_path / "<b>.jsonl")._repr_mimebundle_()["text/html"]
    assert not re.search(r"<(script|img|b>\.)", seen) and "\u202e" not in seen and "U+202E" in seen


# ---- The refit ----


@pytest.fixture
def labels(tokenizer, world):
    posts = world["train"].select(range(40))
    rows = [
        dict(prompt=row["prompt"], chosen=" well, my car.", rejected=" my car broke.", pair=i)
        for i, row in enumerate(posts)
    ]
    return Dataset.from_list(rows)


def args(tmp_path, **more):
    return RewardConfig(
        str(tmp_path / "r"),
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        learning_rate=1e-2,
        per_device_train_batch_size=8,
        **more,
    )


# catches: an accuracy on pairs that were trained on, a split that moves as labels come in, and
# prompts on both sides of it
def test_held_out_labels_are_never_trained_on(tmp_path, labels, tokenizer, tiny, monkeypatch):
    seen = []

    class Watching(RewardTrainer):
        def __init__(self, model, args, train_dataset=None, **more):
            seen.extend(train_dataset["pair"])
            super().__init__(model, args, train_dataset, **more)

    monkeypatch.setattr(R, "RewardTrainer", Watching)
    found = refit_reward_model(labels, tiny(), tokenizer, args(tmp_path, num_train_epochs=1))
    held = found.table[found.table.held_out]
    assert sorted([*seen, *held.pair]) == list(range(40)) and found.right()[1] == len(held) > 3
    assert [is_held_out(p) for p in labels["prompt"][:10]] == found.table.held_out[:10].tolist()


def numpy_state() -> np.ndarray:
    return np.random.get_state()[1].copy()  # noqa: NPY002 (the global state is what is tested)


# catches: a model that is trained on from refit to refit, and a button that changes the random
# numbers of the notebook
def test_a_refit_leaves_all_as_it_was(tmp_path, labels, tokenizer, tiny):
    model = scorer_from(tiny())
    before = copy.deepcopy(model.state_dict())
    states = (torch.get_rng_state(), random.getstate(), numpy_state())
    one, two = (
        refit_reward_model(labels, model, tokenizer, args(tmp_path, num_train_epochs=2))
        for _ in range(2)
    )
    assert all(torch.equal(before[name], x) for name, x in model.state_dict().items())
    assert one.table.margin.tolist() == two.table.margin.tolist()
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == random.getstate()
    assert (states[2] == numpy_state()).all()
    assert one.table.margin.mean() > 0


# catches: disagreements in the wrong order, a tie that counts as right, chance that is not told
# from skill
def test_disagreements_come_most_confident_first():
    table = pd.DataFrame(
        dict(
            pair=range(5),
            chosen=HOSTILE,
            rejected="b",
            margin=[-1.0, 2.0, -3.0, 0.0, -0.5],
            held_out=[True, True, False, True, False],
        )
    )
    found = R.Refit(None, table, 1.0)
    assert found.disagreements().pair.tolist() == [2, 0, 4]
    assert math.isclose(found.disagreements().sure.iloc[0], 1 / (1 + math.exp(-3)))
    assert found.right() == (1, 3)
    assert "not to be told from a coin" in found.verdict()
    assert "<script" not in R.render_refit(found)
    sure = R.Refit(
        None,
        pd.DataFrame(dict(pair=range(20), chosen="a", rejected="b", margin=1.0, held_out=True)),
        1.0,
    )
    assert "better than a coin" in sure.verdict()


# catches: a refit on nothing, and one that is asked for without a model
def test_a_refit_that_cannot_be(tmp_path, labels, tokenizer, tiny):
    with pytest.raises(ValueError, match="may be trained on"):
        refit_reward_model(labels.select([0]), tiny(), tokenizer)
    with pytest.raises(ValueError, match="no model to refit"):
        label_preferences(ROWS, tmp_path / "a.jsonl", refit_every=5)
    desk = label_preferences(ROWS, tmp_path / "a.jsonl", model=tiny(), processing_class=tokenizer)
    desk.learn()
    assert "too few" in desk.note and desk.refitted is None


# catches: a refit that comes too early, too often or never, and its seconds on the person's clock
def test_refits_come_by_themselves(tmp_path):
    clock, calls = Clock(), []

    def refit():
        clock.now += 100
        calls.append(len(desk.work.rows))
        return R.Refit(
            None,
            pd.DataFrame(dict(pair=[0], chosen="a", rejected="b", margin=[1.0], held_out=[True])),
            1.0,
        )

    desk = P.PreferenceDesk(
        Labelling(ROWS, tmp_path / "a.jsonl", clock=clock), refit, refit_every=9
    )
    for _ in range(20):
        clock.now += 2
        desk.press("1")
    assert calls == [9, 18] and {row["seconds"] for row in desk.work.rows} == {2}


# catches: pairs that cannot be labelled: equal, empty, or cut off before their end
def test_drawn_pairs_end_and_differ(tokenizer, tiny, world):
    posts = world["train"].select(range(12)).select_columns(["prompt", "facts"])
    try:
        data = draw_pairs(tiny(), tokenizer, posts, response_length=50)
    except ValueError as error:
        assert "none got two different answers" in str(error)
    else:
        assert all(
            row["answer_1"] != row["answer_2"]
            and row["answer_1"]
            and row["answer_2"]
            and "facts" in row
            for row in data
        )
    with pytest.raises(ValueError, match="none got two"):
        draw_pairs(tiny(), tokenizer, posts, response_length=1, temperature=0.01)
