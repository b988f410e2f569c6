"""browse: what is read of a run's files and when, what it shows of them, and that every control and
suspect leads somewhere."""

import json
import os
import re
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_viewer import HOSTILE, Reader, boxes, make, read_page, write_run

from rlhf_nb.evaluate import repetition
from rlhf_nb.rollout import SIGNALS, Rollout
from rlhf_nb.ui import run_files
from rlhf_nb.ui.browser import browse
from rlhf_nb.ui.run_files import RunFolder
from rlhf_nb.ui.suspects import Suspect, episode_suspects, run_suspects
from rlhf_nb.ui.what_if import Recipe, what_if

WORDS = "a b c d e f".split()


def update_of(u, n=6, width=7, seed=0, prompts=None, **changes):
    "A whole rollout of one update."
    r = make(
        [width - i % 3 for i in range(n)],
        width,
        seed=100 * seed + u,
        prompts=prompts or [f"prompt {i}" for i in range(n)],
        responses=[" ".join(WORDS[(i + t) % 6] for t in range(width)) for i in range(n)],
        info=dict(update=u, episode=n * u, kl_coef=0.05),
    )
    return what_if(r, Recipe()).with_(**changes)


def write(folder: Path, updates=5, log=True, under="rollouts", **more) -> Path:
    "A run: rollouts and a log."
    (folder / under).mkdir(parents=True, exist_ok=True)
    for u in range(updates):
        update_of(u, **more).save(folder / under / f"update-{u:05d}.safetensors")
    if log:
        (folder / "metrics.jsonl").write_text(
            "\n".join(json.dumps(line(u)) for u in range(updates))
        )
    return folder


def line(u, **more):
    return {
        "stage": "ppo",
        "step": u + 1,
        "episode": 6 * (u + 1),
        "objective/raw_scores": float(u),
        "objective/kl": 2.0 * u,
        "tokens/response_length": 7.0,
        "policy/entropy_avg": 2.0,
        **more,
    }


@pytest.fixture
def run(tmp_path):
    return write(tmp_path / "run")


def check(markup):
    "Tags that nest, header scopes, nothing that runs or fetches, no invisible character."
    markup.encode()
    assert not set("\u202e\x00") & set(markup)
    reader = Reader(re.sub(r"<(polyline|circle|path)([^>]*)/>", r"<\1\2></\1>", markup))
    assert not {tag for tag, _ in reader.seen} & {
        "script",
        "img",
        "iframe",
        "link",
        "style",
        "input",
    }
    assert not any(
        name.startswith("on") or name in ("href", "src")
        for _, attributes in reader.seen
        for name in attributes
    )
    assert all(
        attributes["scope"] in ("row", "col") for tag, attributes in reader.seen if tag == "th"
    )
    return reader


def settle(path, seconds=600):
    "A file that was written a while ago."
    os.utime(path, (time.time() - seconds,) * 2)


# ---------------------------------------------------------------- what is read
def test_where_rollouts_lie(tmp_path):
    # catches: one of the two places forgotten; a folder that is empty taken for the other
    assert (
        list(RunFolder(write(tmp_path / "a")).files)
        == list(RunFolder(write(tmp_path / "b", under="ppo/rollouts")).files)
        == [0, 1, 2, 3, 4]
    )
    (tmp_path / "a" / "ppo" / "rollouts").mkdir(parents=True)
    assert len(RunFolder(tmp_path / "a").files) == 5
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(ValueError, match="keeps no rollouts.*save_rollouts=True"):
            browse(folder)


def test_files_that_are_being_written_are_skipped(run):
    # catches: a half file that stops everything, a .partial that is listed, ranks that are not all
    # there
    folder = run / "rollouts"
    whole = (folder / "update-00004.safetensors").read_bytes()
    (folder / "update-00005.safetensors").write_bytes(whole[:-40])
    (folder / "update-00006.safetensors").write_bytes(b"")
    (folder / "update-00007.safetensors.partial").write_bytes(whole)
    (folder / "notes.txt").write_text("x")
    seen = browse(run)
    assert list(seen.run.files) == [0, 1, 2, 3, 4] and "Update 4," in seen.desk.view.value
    (folder / "update-00005.safetensors").write_bytes(whole)
    press(seen, "refresh")
    assert (
        seen.controls["update"].options == (0, 1, 2, 3, 4, 5)
        and seen.controls["update"].value == 4
        and "1 updates are new" in seen.desk.view.value
    )


def test_an_old_file_that_is_damaged_is_told(run):
    # catches: damage passed over in silence
    path = run / "rollouts" / "update-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-40])
    settle(path)
    seen = browse(run)
    with pytest.raises(ValueError, match="update-00002.*damaged"):
        seen.controls["update"].value = 2
    assert 'role="alert"' in seen.desk.view.value and "update-00002" in seen.desk.view.value
    seen.controls["update"].value = 3
    assert "Update 3," in seen.desk.view.value


def test_several_processes(tmp_path):
    # catches: one rank for the whole, ranks in the order of the folder, other widths that do not
    # fit, an update whose ranks are not all there
    folder = tmp_path / "rollouts"
    folder.mkdir()
    parts = {}
    for u in range(2):
        for rank in range(11 if u == 0 else 10):
            parts[u, rank] = update_of(
                u, n=2, width=4 + rank % 3, seed=rank, prompts=[f"of rank {rank}", "x"]
            )
            parts[u, rank].save(folder / f"update-{u:05d}-rank{rank}.safetensors")
    seen = RunFolder(tmp_path)
    assert list(seen.files) == [0]
    whole = seen.rollout(0)
    assert (
        len(whole) == 22
        and whole.prompts[::2] == [f"of rank {rank}" for rank in range(11)]
        and whole.mask.shape == (22, 6)
    )
    for rank in (0, 2, 10):
        one = parts[0, rank]
        for name in ("kl", "advantages", "mask"):
            assert (
                torch.equal(
                    getattr(whole, name)[2 * rank : 2 * rank + 2, : one.mask.shape[1]],
                    getattr(one, name),
                )
                and not getattr(whole, name)[2 * rank, one.mask.shape[1] :].any()
            )
    assert seen.numbers()["kl"].tolist() == pytest.approx(
        [x for rank in range(11) for x in parts[0, rank].kl.sum(1).tolist()]
    )
    parts[0, 10].save(folder / "update-00001-rank10.safetensors")
    seen.refresh()
    assert list(seen.files) == [0, 1]
    assert "exactly" not in browse(tmp_path).desk.view.value  # each rank whitened by itself here


def test_files_are_read_by_need(run, monkeypatch):
    # catches: all files read to open one; a file read twice; texts read for a table of numbers; a
    # file that was written anew shown as it was
    read = []
    original = Rollout.load.__func__
    monkeypatch.setattr(
        Rollout,
        "load",
        classmethod(lambda cls, path: read.append(Path(path).name) or original(cls, path)),
    )
    seen = browse(run)
    assert seen.controls
    assert set(read) == {"update-00004.safetensors"} and len(read) == 1
    seen.controls["update"].value = 1
    seen.controls["place"].value = 3
    seen.controls["update"].value = 4
    assert read == ["update-00004.safetensors", "update-00001.safetensors"]
    press(seen, "search every update")
    assert len(read) == 2 and "30 episodes of 5 updates were searched" in seen.desk.view.value
    time.sleep(0.01)
    update_of(1, prompts=["other words"] * 6).save(run / "rollouts" / "update-00001.safetensors")
    seen.controls["update"].value = 1
    assert "other words" in seen.desk.view.value


def test_numbers_are_those_of_the_rollout(run):
    # catches: padding counted, the raw score for the penalised one, rows of another update
    seen = RunFolder(run)
    frame, r = seen.numbers([3]), seen.rollout(3)
    assert frame["update"].tolist() == [3] * 6 and frame["episode"].tolist() == list(range(6))
    for name, wanted in dict(
        score=r.scores, kl=r.kl.sum(1), length=r.mask.sum(1), stopped=r.stopped
    ).items():
        assert frame[name].tolist() == pytest.approx(wanted.tolist())


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 2), min_size=0, max_size=9), min_size=1, max_size=4),
    st.integers(0, 2),
)
def test_repetition_is_that_of_evaluate(rows, junk):
    # against evaluate.repetition on the same words; catches: padding counted, runs of two, the
    # first of a kind counted as a repeat
    width = max(map(len, rows)) + 1
    ids = torch.tensor([row + [junk] * (width - len(row)) for row in rows])
    mask = torch.arange(width) < torch.tensor([[len(row)] for row in rows])
    assert run_files.repeated(ids, mask).tolist() == pytest.approx(
        [repetition(" ".join(f"w{i}" for i in row)) for row in rows]
    )


@pytest.mark.parametrize(
    "where",
    [
        "metrics.jsonl",
        "trainer_state.json",
        "ppo/trainer_state.json",
        "checkpoint-5/trainer_state.json",
    ],
)
def test_logs_are_found_wherever_they_lie(tmp_path, where):
    # catches: a step taken for an update (one later), a place that is not looked at
    run = write(tmp_path, log=False)
    path = run / where
    path.parent.mkdir(exist_ok=True)
    lines = [line(u) for u in range(5)]
    path.write_text(
        "\n".join(map(json.dumps, lines))
        if where.endswith("l")
        else json.dumps(dict(log_history=lines))
    )
    log = RunFolder(run).log
    assert log["update"].tolist() == [0, 1, 2, 3, 4] and log["objective/kl"].tolist() == [
        0,
        2,
        4,
        6,
        8,
    ]


def test_a_run_without_a_log_is_drawn_from_its_rollouts(tmp_path):
    seen = browse(write(tmp_path, log=False))
    assert set(seen.metrics()) == {"score", "KL", "length"} and "<polyline" in seen.desk.view.value
    wanted = seen.run.rollout(4).scores.mean().item()
    assert f"{wanted:.4g} at update 4" in seen.desk.view.value


# ---------------------------------------------------------------- suspects
def test_odd_episodes_are_found():
    # catches: odd but badly paid, well paid but ordinary, a mean over all updates in which the last
    # looks odd as a whole
    base = pd.DataFrame(
        dict(
            update=np.repeat([0, 1], 30),
            episode=[*range(30)] * 2,
            score=0.0,
            kl=1.0,
            length=10,
            repetition=0.0,
        )
    )
    base.loc[30:, ["score", "kl"]] = [5.0, 20.0]
    assert episode_suspects(base) == []
    rich_and_far, rich, far = base.copy(), base.copy(), base.copy()
    rich_and_far.loc[7, ["score", "kl"]] = [3.0, 9.0]
    rich.loc[7, "score"] = 3.0
    far.loc[7, ["score", "kl"]] = [-3.0, 9.0]
    assert [(s.update, s.episode) for s in episode_suspects(rich_and_far)] == [
        (0, 7)
    ] and episode_suspects(rich) == episode_suspects(far) == []
    for name, value in dict(length=40, repetition=0.9).items():
        odd = base.copy()
        odd.loc[37, ["score", name]] = [9.0, value]
        (found,) = episode_suspects(odd)
        assert (
            (found.update, found.episode) == (1, 7)
            and name in found.sentence
            and "KL" not in found.sentence
        )
    many = base.copy()
    many.loc[[1, 2, 3], "score"] = 9.0
    many.loc[[1, 2, 3], "kl"] = [20.0, 60.0, 40.0]
    assert [s.episode for s in episode_suspects(many, most=2, far=1.0)] == [2, 3]


def test_alarms_and_jumps():
    # catches: a slope taken for a jump, the update before or after, an alarm that is lost
    slope = pd.DataFrame(
        [
            dict(
                update=u, **{"objective/kl": 0.5 * u + 0.01 * (u % 2), "objective/raw_scores": 0.0}
            )
            for u in range(20)
        ]
    )
    assert run_suspects(slope) == []
    jump = slope.copy()
    jump.loc[12:, "objective/kl"] += 30
    assert [(s.update, s.episode) for s in run_suspects(jump)] == [
        (12, None)
    ] and "Jump. Update 12: KL went from 5.51 to 36" in run_suspects(jump)[0].sentence
    hacked = pd.DataFrame(
        [
            dict(update=u, **{"objective/kl": 1.5 * u, "objective/raw_scores": u + 0.1 * (u % 2)})
            for u in range(20)
        ]
    )
    assert [s.sentence[:6] for s in run_suspects(hacked)] == ["Alarm."]
    assert run_suspects(pd.DataFrame()) == []


def press(seen, name):
    "What a hand on a button does; what was wrong in its handler is raised."
    next(
        one
        for one in boxes(seen.desk.box)
        if getattr(one, "description", "") == name and one._model_name == "ButtonModel"
    ).click()


def test_every_suspect_leads_to_its_place(run):
    # catches: a button that goes to the episode's place in another order, or leaves a filter that
    # hides it
    r = update_of(2).with_(
        scores=torch.tensor([0.0, 0, 0, 9, 0, 0]),
        kl=torch.zeros(6, 7).index_fill(0, torch.tensor([3]), 5.0),
    )
    r.save(run / "rollouts" / "update-00002.safetensors")
    seen = browse(run)
    assert seen.controls
    seen.suspects = []
    viewer_far = episode_suspects(seen.run.numbers(), far=1.9)
    seen._show_suspects(
        [
            next(s for s in viewer_far if s.update == 2),
            Suspect(1, None, "the update as a whole"),
            Suspect(99, None, "later"),
        ],
        "",
    )
    seen.controls["find"].value = "zebra"
    seen.controls["sort"].value = "score"
    press(seen, "1: update 2, episode 3")
    assert "Update 2, after" in seen.desk.view.value and "Episode 3 of 6" in seen.desk.view.value
    press(seen, "2: update 1")
    best = int(seen.run.rollout(1).scores.argmax())
    assert (
        "Update 1, after" in seen.desk.view.value and f"Episode {best} of 6" in seen.desk.view.value
    )
    press(seen, "3: update 99")
    assert seen.controls["update"].value == 4


def test_a_fault_in_a_button_is_seen(run, monkeypatch):
    # ipywidgets logs what a button raises and goes on; catches: an old picture that stays
    seen = browse(run)
    assert seen.controls
    monkeypatch.setattr(run_files, "numbers_of", lambda path: 1 / 0)
    seen.run._numbers.clear()
    press(seen, "search every update")
    assert 'role="alert"' in seen.desk.view.value and "ZeroDivisionError" in seen.desk.view.value


# ---------------------------------------------------------------- what is shown
def test_every_control_moves_the_view(run, tmp_path):
    # catches: a control that nobody observes
    seen = browse(run, write(tmp_path / "other", seed=5))
    seen.controls["signal"].value = "advantages"
    moves = dict(
        update=1,
        metric="objective/kl",
        same_prompt=True,
        place=2,
        signal="values",
        sort="score",
        descending=True,
        find="prompt",
        only="no stop token",
        above=-5.0,
        kl_coef=0.4,
        estimator="k3",
        gamma=0.5,
        lam=0.3,
        missing_eos_penalty=2.0,
    )
    assert set(moves) == set(seen.controls) and all(
        one.description for one in seen.controls.values()
    )
    for name, value in moves.items():
        if name == "above":
            seen.controls["only"].value = "score above"
        before = seen.desk.view.value
        seen.controls[name].value = value
        assert seen.desk.view.value != before, name
        check(seen.desk.view.value)
    for button in (
        "◀ update",
        "update ▶",
        "◀ previous",
        "next ▶",
        "as it was",
        "refresh",
        "search every update",
    ):
        before = seen.desk.view.value
        press(seen, button)
        assert seen.desk.view.value != before, button


def test_moving_keeps_the_place(run):
    seen = browse(run)
    seen.controls["place"].value = 5
    seen.controls["update"].value = 2
    assert seen.controls["place"].value == 5 and "Episode 4 of 6" in seen.desk.view.value
    press(seen, "update ▶")
    press(seen, "update ▶")
    press(seen, "update ▶")
    assert seen.controls["update"].value == 0


def test_the_same_prompt_through_training(tmp_path):
    # catches: the same row for the same prompt, another prompt's completion, strips on scales of
    # their own
    run = write(tmp_path, updates=0, log=False)
    for u in range(4):
        prompts = [f"other {u}/{i}" for i in range(6)]
        if u != 1:
            prompts[u] = "the same"
        update_of(u, prompts=prompts).save(run / "rollouts" / f"update-{u:05d}.safetensors")
    (run / "completions").mkdir()
    pd.DataFrame(
        {
            "query": ["the same", "other"],
            "model response": ["a <b>answer</b>", "no"],
            "score": [1.5, 2],
        }
    ).to_csv(run / "completions" / "update-00002.csv", index=False)
    seen = browse(run)
    seen.controls["place"].value, seen.controls["same_prompt"].value = 4, True
    reader = check(seen.desk.view.value)
    through = reader.text.split("The same prompt through training")[1]
    assert re.findall(r"Update (\d)\. Episode (\d) of 6", through) == [
        ("0", "0"),
        ("2", "2"),
        ("3", "3"),
    ]
    assert (
        "a <b>answer</b>" in through
        and "update-00002" in through
        and "no" not in [row[1] for row in reader.tables[-1]]
    )
    scales = re.findall(
        r"kl: full colour at (\S+?)</caption>", seen.desk.view.value.split("The same prompt")[1]
    )
    assert len(set(scales)) == 1
    seen.controls["place"].value = 1
    assert "asked once" in seen.desk.view.value


def test_two_runs_side_by_side(run, tmp_path):
    # catches: the first run shown twice, another prompt beside it without a word, one line for two
    # runs
    other = write(
        tmp_path / "other", updates=3, seed=7, prompts=["x", "prompt 0", "y", "z", "v", "w"]
    )
    seen = browse(run, other)
    view = seen.desk.view.value
    assert (
        len(
            set(
                re.findall(
                    r"full colour at (\S+?)</caption>",
                    view.split("the same prompt")[1].split("<h4>")[0],
                )
            )
        )
        == 1
    )  # one scale for both
    assert (
        "other, update 2: the same prompt" in view
        and "Episode 1 of 6, update 2" in view
        and view.count("<polyline") == 2
        and "other (dashed)" in view
    )
    seen.controls["place"].value = 4
    assert (
        "the same row, another prompt" in seen.desk.view.value
        and "Episode 3 of 6, update 2" in seen.desk.view.value
    )


def test_the_ring_is_where_one_is(run):
    seen = browse(run)
    for u in (0, 3):
        seen.controls["update"].value = u
        ring = re.search(r'<circle cx="(\S+)"', seen.desk.view.value)
        assert (
            float(ring[1]) == pytest.approx(60 + 560 * u / 4)
            and f"{u} at update {u}" in seen.desk.view.value
        )


def test_what_if_follows_the_price_of_each_update(tmp_path):
    # catches: the price of the newest update used for all under an adaptive controller
    run = write(tmp_path, updates=0, log=False)
    for u, kl_coef in enumerate((0.2, 0.1, 0.05)):
        r = what_if(update_of(u), Recipe(kl_coef=kl_coef))
        r.with_(info=dict(r.info, kl_coef=kl_coef)).save(
            run / "rollouts" / f"update-{u:05d}.safetensors"
        )
    seen = browse(run)
    for u in (0, 1, 2):
        seen.controls["update"].value = u
        assert (
            "nothing is changed" in seen.desk.view.value
            and "come out exactly" in seen.desk.view.value
        )
    seen.controls["kl_coef"].value = 0.0
    assert "kl coef 0.05 → 0" in seen.desk.view.value


def test_hostile_runs(tmp_path):
    # catches: one place that forgets to escape
    word = HOSTILE + "a" * 10_000
    run = write(
        tmp_path / "<b>evil",
        updates=2,
        prompts=[word] * 6,
        tokens=[[word] * 7] * 6,
        responses=[word] * 6,
        columns={word[:80]: [word] * 6},
    )
    seen = browse(run, run)
    seen.controls["same_prompt"].value = True
    reader = check(seen.desk.view.value)
    assert "b" not in {tag for tag, _ in reader.seen} and "<script>alert(1)</script>" in reader.text
    _, data = read_page(seen.save_html(tmp_path / "x.html", episodes=2))
    assert "<script>" in data["shelves"][0]["episodes"][0]["tokens"][0]


def test_a_static_file_of_a_run(tmp_path):
    # catches: an update left out that an alarm names, a jump to another episode, a file that grows
    # with the run
    run = write(tmp_path / "run", updates=30, n=12)
    (run / "metrics.jsonl").write_text(
        "\n".join(
            json.dumps(line(u, **{"objective/kl": 0.1 * (u % 2) + (90.0 if u >= 17 else 0.0)}))
            for u in range(30)
        )
    )
    seen = browse(run)
    path = seen.save_html(tmp_path / "run.html", updates=4, episodes=3)
    page, data = read_page(path)
    names = [shelf["name"] for shelf in data["shelves"]]
    assert (
        path.stat().st_size < 2_000_000
        and {"Update 0", "Update 29", "Update 17"} <= set(names)
        and len(names) <= 7
        and data["start"] == len(names) - 1
    )
    for jump in data["jumps"]:
        assert re.search(r"pdate (\d+)", jump["name"])[1] == names[jump["shelf"]].split()[1]
        if "episode" in jump["name"]:
            assert data["shelves"][jump["shelf"]]["episodes"][jump["place"]]["columns"][
                "episode"
            ] == int(re.search(r"episode (\d+)", jump["name"])[1])
    assert [tag for tag, _ in page.seen].count(
        "polyline"
    ) == 4 and "Episode 0 of 12, update 29" in "".join(page.words)
    assert all(len(a["aria-label"]) > 20 for tag, a in page.seen if tag == "svg")


def test_what_a_notebook_keeps(run):
    bundle = browse(str(run))._repr_mimebundle_()
    assert (
        "Update 4, after" in bundle["text/html"]
        and bundle["text/plain"] == "RunBrowser(run: 5 updates, 0 to 4)"
        and "application/vnd.jupyter.widget-view+json" in bundle
    )


def test_half_filled_rollouts(tmp_path):
    # a run whose rollouts were kept before they were scored
    run = write(
        tmp_path,
        updates=2,
        log=False,
        **{name: None for name in SIGNALS if name != "logprobs"},
        scores=None,
        raw_scores=None,
    )
    seen = browse(run)
    assert "kl_coef" not in seen.controls and "logprobs" in check(seen.desk.view.value).text
    read_page(seen.save_html(tmp_path / "x.html"))


def test_a_run_of_demo(tmp_path):
    # the folder that rlhf-nb demo leaves
    run = write_run(tmp_path / "demo", curves=True)
    seen = browse(run)
    assert list(seen.run.files) == [0, 1, 2, 3, 4] and {"score", "KL", "gold wins"} <= set(
        seen.metrics()
    )
    read_page(seen.save_html(tmp_path / "x.html"))
