"""Files of other trainers: what is read of each format, that what is missing stays missing, and what
broken and hostile files do."""

from __future__ import annotations

import json
import re
from pathlib import Path

import datasets
import foreign_files as files
import numpy as np
import pandas as pd
import pytest
import torch
from markup import Reader
from packs import pieces, unpacked
from test_browse import update_of
from test_viewer import HOSTILE, ask, check, make, read_page

from rlhf_nb.cli.view import view_command
from rlhf_nb.rollout import SIGNALS, Rollout
from rlhf_nb.ui.episodes import prompt_of, shown_of
from rlhf_nb.ui.foreign import TARGETS, ForeignRun, parse_columns, text_of, words_of
from rlhf_nb.ui.reader import packed_update
from rlhf_nb.ui.viewer import browse, view
from rlhf_nb.update import Objective

MINE = dict(prompt="question", response="answer", scores="reward")
ROWS = [
    dict(question="q 0", answer="one two three", reward=0.5, uid="a", group=7),
    dict(question="q 1", answer="four", reward=-1.0, uid="b", group=7),
]


def rollout(source, update=None, **how) -> Rollout:
    run = ForeignRun(source, **how)
    return run.rollout(max(run.files) if update is None else update)


def notes(r: Rollout) -> str:
    return " | ".join(r.info["notes"])


# ---------------------------------------------------------------- the formats
def test_verl(tmp_path):
    # catches: updates in the order 1, 10, 2; prompt and answer exchanged; columns that are lost
    seen = browse(files.verl(tmp_path / "rollouts", updates=11))
    assert list(seen.run.files) == list(range(1, 12))
    r = seen.run.rollout(10)
    assert r.prompts[1] == "user\nWhat is 1 + 10?\nassistant\n" and r.responses[1] == "It is 11 ."
    assert r.scores.tolist() == [0, 1, 0, 1] and r.raw_scores is None
    assert r.columns["gts"] == ["10", "11", "12", "13"] and r.columns["acc"][1] is True
    assert r.tokens[1] == ["It", " is", " 11", " ."] and r.mask.sum(1).tolist() == [4] * 4
    assert "Read as verl" in notes(r) and r.info["update"] == 10


def test_trl(tmp_path):
    # catches: a chat as its repr; a reward function that did not answer counted as 0 for all; a
    # number that is no reward added to the score; other runs' files found in the parent's place
    folder = files.trl(tmp_path / "out")
    r = rollout(folder, 1)
    assert list(ForeignRun(folder).files) == [1, 2]
    assert r.prompts == ["sum 0", "sum 0", "sum 1", "sum 1"] and r.responses[2] == "well 2 I think"
    assert r.scores.tolist() == [0.5, 1.5, 0.25, 1.0]
    assert "sum of 'accuracy_reward', 'format_reward'" in notes(r)
    assert set(r.columns) == {"accuracy_reward", "format_reward", "answer_length", "advantage"}
    assert r.columns["advantage"] == [-1.0, 1.0, 0.0, 0.0] and r.advantages is None
    one = rollout(files.trl(tmp_path / "plain", chat=False, rewards=1), 2)
    assert one.prompts[0] == "sum 0" and one.scores[:2].tolist() == [0, 1]
    assert one.scores[2].isnan() and "not shown in episode 2" in notes(one)


def test_rewards_of_trl_that_no_name_tells():
    # catches: a length taken for a reward; a part of the score that is shown as the whole
    rows = [dict(step="4", prompt="p", completion="c", good=1.0, long=9, advantage=0.0)]
    r = rollout(rows)
    assert r.scores is None and r.info["update"] == 4
    for given, wanted in (("good", [1.0]), ("good+long", [10.0])):
        assert rollout(rows, columns=dict(scores=given)).scores.tolist() == wanted
    assert rollout(rows, columns=dict(step="")).info["update"] == 0
    r = rollout([dict(step=1, prompt="p", completion="c", accuracy=1.0, format_reward=0.5)])
    assert r.scores.tolist() == [0.5] and "scores from 'format_reward'" in notes(r)
    assert r.columns == dict(accuracy=[1.0])  # what is not in the score is beside the prompt


def test_tables_of_ppo_and_openrlhf(tmp_path):
    # catches: quotes and line ends of CSV; an empty answer taken for a missing number; taken for
    # verl; the samples of Weights & Biases read as one object
    r = rollout(files.trl_ppo(tmp_path / "completions_12.csv"))
    assert r.responses == ['say "hi"\nthere', ""] and r.prompts == ["a, b", "c"]
    assert r.scores.tolist() == [0.5, -1.25] and r.info["update"] == 12
    assert r.mask.sum(1).tolist() == [3, 0]
    r = rollout(files.openrlhf(tmp_path / "out.jsonl"))
    assert "OpenRLHF (batch inference)" in notes(r) and r.responses[2] == "say 2</s>"
    assert r.scores.tolist() == [0.0, 0.5, 1.0]
    run = ForeignRun(files.openrlhf_samples(tmp_path / "samples.table.json"))
    assert list(run.files) == [1, 2, 3] and run.rollout(2).responses == ["ask 2 say 2"]
    assert run.rollout(2).prompts == [] and run.rollout(2).scores.tolist() == pytest.approx([0.2])


def test_nemo(tmp_path):
    # catches: validation among the updates; log-probs of the prompt or the padding on the answer;
    # engine and policy exchanged; words that are taken for tokens
    folder = files.nemo(tmp_path / "logs")
    run = ForeignRun(folder, tokenizer=files.Tokenizer())
    assert list(run.files) == [1, 2]
    r = run.rollout(1)
    assert r.prompts == ["user asks"] * 3 and r.responses[1] == "w30 w31 w32"
    assert r.tokens[1] == [" w30", " w31", " w32"] and r.info["unit"] == "tokens"
    assert r.response_ids[1].tolist() == [30, 31, 32, 0] and r.scores.tolist() == [0, 1, 2]
    assert r.logprobs[1, :3].tolist() == pytest.approx([-0.2, -0.3, -0.4])
    assert r.engine_logprobs[0, :2].tolist() == pytest.approx([-0.21, -0.31])
    assert r.advantages[2, :4].tolist() == [0.5] * 4 and r.kl is None
    assert "idx" in r.columns and "content" not in r.columns
    val = rollout(folder / "val_data_step1.jsonl")
    assert (val.prompts, val.responses) == (["asks"], ["says"])
    talk = [dict(role="user", content="a"), dict(role="assistant", content="b")]
    one = rollout([dict(talk=talk)], columns=dict(messages="talk"))
    assert (one.prompts, one.responses) == (["a"], ["b"])


def test_what_a_mask_leaves_out_within_an_answer(tmp_path):
    # catches: an answer of two turns that is its last one, the output of a tool that is drawn as
    # if the policy had written it, or that costs KL; padding as part of the answer
    row = dict(input="ask", output="a <out> b", score=1.0, step=1)
    row |= dict(responses=[5, 6, 7, 8, 0], response_mask=[1, 0, 0, 1, 0])
    more = dict(logprobs=[-1.0] * 5, ref_logprobs=[-3.0] * 5)
    r = ForeignRun([row | more], {name: name for name in more}, files.Tokenizer()).rollout(1)
    assert r.tokens == [[" w5", " w6", " w7", " w8"]] and r.kl.tolist() == [[2, 0, 0, 2]]
    assert r.info["masked"] == [[False, True, True, False]] and "masked: nothing" in notes(r)
    whole = row | dict(response_mask=[1, 1, 1, 1, 0])
    plain = ForeignRun([whole], None, files.Tokenizer()).rollout(1)
    assert "masked" not in plain.info and "masked" not in notes(plain)
    assert dict(map(tuple, unpacked(packed_update(shown_of(r)))[0]["arrays"]))["masked"] == 4
    assert "masked" not in dict(map(tuple, unpacked(packed_update(shown_of(plain)))[0]["arrays"]))


def test_a_chat_keeps_its_roles(tmp_path):
    # catches: "user" that is lost where there is one turn; a chat that is one text on the page
    talk = [dict(role="user", content="hi")]
    r = rollout([dict(prompt=talk, response="yes"), dict(prompt="plain", response="no")])
    assert r.prompts == ["hi", "plain"] and prompt_of(r, 0) == "user: hi"
    first, second = unpacked(packed_update(shown_of(r)))[0]["prompts"]
    assert first["turns"] == [["user", "hi"]] and "turns" not in second


def test_nemo_without_a_tokenizer(tmp_path):
    # catches: numbers of tokens laid on words that only chance made as many
    folder = files.nemo(tmp_path)
    rows = [json.loads(x) for x in (folder / "train_data_step1.jsonl").read_text().splitlines()]
    rows[1]["content"][0][1] = "other words than tokens, and many more"
    r = rollout(files.write_lines(tmp_path / "x" / "train_data_step1.jsonl", rows))
    assert r.info["unit"] == "words" and not any(getattr(r, name) is not None for name in SIGNALS)
    assert "--tokenizer" in notes(r) and "logprobs: not shown in episodes 0, 1, 2: give" in notes(r)


def test_any_table_by_a_mapping(tmp_path):
    # catches: a kind of table that loses types, columns or order
    frame, path = pd.DataFrame(ROWS), lambda kind: tmp_path / f"mine 3.{kind}"
    frame.to_parquet(path("parquet"))
    frame.to_csv(path("csv"), index=False)
    path("json").write_text(json.dumps(ROWS))
    files.write_lines(path("jsonl"), ROWS)
    tables = [path(kind) for kind in ("jsonl", "parquet", "csv", "json")]
    for source in (*tables, ROWS, frame, datasets.Dataset.from_list(ROWS)):
        r = view(source, columns=MINE).shown.rollout
        assert r.prompts == ["q 0", "q 1"] and r.responses == ["one two three", "four"], source
        group = ["7", "7"] if str(source).endswith("csv") else [7, 7]
        assert r.scores.tolist() == [0.5, -1.0] and r.columns == dict(uid=["a", "b"], group=group)
        assert r.info["update"] == (3 if isinstance(source, Path) else 0)
        assert browse(source, columns=MINE).run.rollout(r.info["update"]).responses == r.responses
        assert "your mapping" in notes(r)


def test_signals_by_a_mapping_are_a_rollout_again():
    # catches: a signal in another's place, a what-if on numbers that are not those of the file
    whole = update_of(3)
    n = whole.mask.sum(1).tolist()
    cut = lambda x: [row[:k] for row, k in zip(x.tolist(), n)]
    rows = dict(
        prompt=whole.prompts,
        response=["".join(t) for t in whole.tokens],
        tokens=[t[:k] for t, k in zip(whole.tokens, n)],
        scores=whole.scores.tolist(),
        finish=["stop" if x else "length" for x in whole.stopped],
        **{name: cut(getattr(whole, name)) for name in SIGNALS if name != "engine_logprobs"},
    )
    r = rollout(pd.DataFrame(rows), columns=dict(stopped="finish"))
    assert torch.equal(r.stopped, whole.stopped) and r.tokens == rows["tokens"]
    for name in SIGNALS[:7]:
        got, wanted = (getattr(x, name).masked_fill(~whole.mask, 0) for x in (r, whole))
        assert torch.allclose(got, wanted, atol=1e-6), name
    seen = view(pd.DataFrame(rows), columns=dict(stopped="finish"))
    header, _ = unpacked(packed_update(seen.shown))  # no other trainer says how it was made
    assert header["recipe"] is None and header["asks"] and "does not say" in header["told"]
    header, _ = unpacked(packed_update(seen.shown, None, Objective()))
    assert header["recipe"]["kl_coef"] == 0.05 and "(chosen by you)" in header["told"]


# ---------------------------------------------------------------- what is missing, and what does not fit
def test_what_is_missing_is_absent_and_not_zero(tmp_path):
    # catches: a KL, a stop or a score of 0 that no file told
    seen = view([dict(prompt="p", response="a b")])
    r = seen.shown.rollout
    absent = ("stopped", "scores", "raw_scores", *SIGNALS)
    assert all(getattr(r, name) is None for name in absent)
    header, _ = unpacked(packed_update(seen.shown))
    assert header["stopped"] is None and header["unit"] == "words"
    assert not {"scores", "raw_scores"} & set(header) and header["arrays"] == [["widths", 2]]
    assert "stopped" not in r.episodes() and "kl" not in r.episodes()
    facts = Reader(str(seen)).text.split("Prompt")[0]
    assert "2 words" in facts and not re.search("KL|score|stopped|cut off", facts)
    assert "no stopped, logprobs, ref_logprobs, kl, values, scores" in header["told"]
    again = Rollout.load(r.save(tmp_path / "r.safetensors"))
    assert again.stopped is None and again.info["notes"] == r.info["notes"]


def test_a_signal_of_another_length_is_named_by_episode():
    # catches: numbers on the wrong tokens, a row that takes all others with it; a KL of the other
    # sign, or of zero where one of the two log-probs is missing
    rows = [dict(tokens=["a", "b"], values=x) for x in ([1, 2], [1, 2, 3], None, [None, "2"])]
    seen = view(rows, 2)
    x = seen.shown.rollout.values
    assert x[0].tolist() == [1, 2] and x[1:3].isnan().all() and x[3, 0].isnan() and x[3, 1] == 2
    assert "values: not shown in episodes 1, 2: give a list" in notes(seen.shown.rollout)
    check(str(seen))
    row = dict(response="a b", logprobs=[-1.0, -2.0])
    r = rollout([row | dict(ref_logprobs=[-1.5, -1.0])])
    assert r.kl.tolist() == [[0.5, -1.0]] and "(k1)" in notes(r) and rollout([row]).kl is None


def test_suspects_and_alarms_run_on_what_is_there(tmp_path):
    # catches: alarms that need a log; words that are called tokens; suspects without a KL
    rows = []
    for u in range(12):
        for i in range(20):
            text = " ".join(f"w{u}x{i}x{k}" for k in range(6 + 3 * u + (i * 7) % 3))
            rows.append(dict(prompt="p", response=text, scores=u + 0.1 * ((i * 3) % 5), step=u))
    rows[-1] |= dict(response=" ".join(f"z{k}" for k in range(200)), scores=30.0)
    seen = browse(rows)
    told = [one.sentence for one in seen.suspects]
    assert any("answers grew from" in one and "words." in one for one in told)
    assert any(one.startswith("Update 11, episode 19: score +30.00") for one in told)
    curves = {curve["name"]: curve for curve in seen.reader.head["curves"]}
    assert set(curves) == {"raw score", "length"} and curves["length"]["unit"] == "words"
    assert curves["length"]["about"] == "length, words per response"
    assert len(seen.again(3, 0)["found"]) == 8 and seen.again(3, 0)["found"][0] == (0, 0)


def test_the_same_step_in_two_files(tmp_path):
    # catches: the second file over the first; scores and columns of one file lost with the other's;
    # padding that is nan, a number for an episode that has none
    one = dict(tokens=["x", " y"], step=5, values=[1, 2], stopped=True, seed=3)
    two = dict(prompt="q", tokens=["z"], step=5, scores=1.0, more="m")
    files.write_lines(tmp_path / "a1.jsonl", [one])
    files.write_lines(tmp_path / "a2.jsonl", [two, dict(two, values=[3])])
    r = browse(tmp_path).run.rollout(5)
    assert r.responses == ["x y", "z", "z"] and r.prompts == ["", "q", "q"]
    assert r.scores[0].isnan() and r.scores[1:].tolist() == [1, 1] and r.stopped is None
    assert r.columns == dict(seed=[3, None, None], more=[None, "m", "m"])
    assert ForeignRun(tmp_path).again("q") == [(5, 1)]
    assert str(r.values.tolist()) == "[[1.0, 2.0], [nan, 0.0], [3.0, 0.0]]"
    told = " ".join(r.info["notes"])
    assert "values: not shown in episode 1:" in told and "scores: not shown in episode 0:" in told
    assert "stopped: not shown in episodes 1, 2:" in told and "Not in this file: logprobs" in told
    header, _ = unpacked(packed_update(view(r).shown))
    assert header["scores"] == [None, 1, 1] and header["columns"]["more"] == ["", "m", "m"]


def test_a_file_that_is_being_written(tmp_path):
    # catches: a run that cannot be read while it goes on; a damaged file before the last one passed
    # over; the last one left out without a note
    folder = files.verl(tmp_path, 2)
    (folder / "3.jsonl").write_text('{"input": "a", "outp')
    assert list(ForeignRun(folder).files) == [1, 2]
    assert "'3.jsonl' cannot be read and is left out" in notes(rollout(folder))
    files.write_lines(folder / "4.jsonl", [dict(input="a", output="b", score=1.0, step=4)])
    with pytest.raises(ValueError, match=r"3.jsonl cannot be read .line 1 is not JSON"):
        ForeignRun(folder)


def test_files_of_another_name_are_named(tmp_path, capsys):
    # catches: files of a folder that nobody reads, without a word
    for name in ("a1.jsonl", "a2.jsonl", "c3.csv", "completions/d.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"response": "x"}\n')
    (tmp_path / "notes.txt").write_text("no table")
    said = "Only files named like 'a1.jsonl' are read, not 2 more."
    for how in ("--terminal", "--no_browser"):
        view_command([str(tmp_path), how])
        assert said in capsys.readouterr().out
    header, _ = unpacked(read_page(tmp_path / "rollouts.html")[1]["updates"][0]["packed"])
    assert said in header["notes"]
    assert "Only" not in notes(rollout(files.verl(tmp_path / "verl")))


def test_a_folder_that_goes_on(tmp_path):
    # catches: a file that is read once and for all; a mapping that takes a run for a table
    seen = browse(files.verl(tmp_path, 2))
    files.verl(tmp_path, 3)
    ask(seen.reader, act="refresh")
    assert [one["update"] for one in seen.reader.head["updates"]] == [1, 2, 3]
    assert seen.run.rollout(1).responses[0] == "It is 1 ."
    files.write_lines(tmp_path / "1.jsonl", [dict(input="a", output="anew", score=1.0, step=1)])
    seen.run.refresh()
    assert seen.run.rollout(1).responses == ["anew"]
    (tmp_path / "run" / "rollouts").mkdir(parents=True)
    update_of(1).save(tmp_path / "run" / "rollouts" / "update-00001.safetensors")
    seen = browse(ROWS, tmp_path / "run", columns=MINE)
    assert seen.other.rollout(1).kl is not None and len(seen.updates()) == 2


def test_texts():
    # catches: a chat as a Python repr, a missing text as "None" or "nan"; blanks that are lost; a
    # stack that overflows
    said = lambda role, content: dict(role=role, content=content)
    parts = [dict(type="text", text="a"), dict(type="image")]
    for given, wanted in (
        ("text", "text"),
        (None, ""),
        (float("nan"), ""),
        ([said("user", "hi")], "hi"),
        ([said("user", "a"), said("assistant", "b")], "user: a\n\nassistant: b"),
        ([said("user", parts)], 'a\n{"type": "image"}'),
        (said("tool", "a") | dict(tool_calls=[1]), "a\n[1]"),
        (np.array([said("user", "x")], dtype=object), "x"),
        (said("tool", "out"), "out"),
        (["a", "b"], "a\n\nb"),
        (3, "3"),
    ):
        assert text_of(given) == wanted
    for text in ("a b  c\n\n d ", "", "  ", "\n", "x", "日本 語", "a\x00b\u202e c"):
        assert "".join(words_of(text)) == text


# ---------------------------------------------------------------- bad input
def test_what_is_refused(tmp_path):
    # catches: a KeyError; an error that does not list the columns, or names no option
    (tmp_path / "empty").mkdir()
    path = str(files.write_lines(tmp_path / "x.jsonl", [dict(token_ids=[1])]))
    steps = [dict(response="a", step=1), dict(response="a", step="x")]
    for act, told in (
        (lambda: view(None), "records are no episodes: give a list"),
        (lambda: view(dict(response="a")), "records are no episodes: give a list"),
        (lambda: browse(tmp_path / "empty", columns=MINE), "has no file that ends in .jsonl"),
        (lambda: view(ROWS, columns=dict(MINE, prompt="questoin")), "'questoin'.*'question', 'ans"),
        (lambda: view(ROWS, columns=dict(anser="answer")), "called 'anser'.*of prompt, response"),
        (lambda: view(ROWS), r"columns 'question', 'answer'.*--columns prompt="),
        (lambda: parse_columns(["question"]), "write what it is"),
        (lambda: parse_columns(["prompt=a,prompt=b"]), "given twice"),
        (lambda: view(steps), "row 1: its step is 'x'.*step="),
        (lambda: view([dict(response="a")], update=7), r"no update 7.*\[0\]"),
        (
            lambda: view_command([path, "--tokenizer", "./nowhere"]),
            r"--tokenizer \./nowhere: .*there is no folder \./nowhere",
        ),
        (lambda: ForeignRun(path, tokenizer="./nowhere"), "there is no folder ./nowhere"),
    ):
        with pytest.raises((ValueError, OSError), match=told):
            act()
    run = ForeignRun(iter([dict(response="a")]))  # a generator is empty the second time
    run.refresh()
    assert run.numbers()["length"].tolist() == [1]


# catches: a page of 40 MB that is written cell by cell for one answer
def test_an_answer_of_a_million_characters(tmp_path):
    text = "ab " * 333_333
    (tmp_path / "a.jsonl").write_text(json.dumps(dict(prompt="p", completion=text)))
    shown = view(tmp_path / "a.jsonl")
    assert len(shown._repr_html_()) < 10**6 and shown.shown.rollout.responses == [text]


BROKEN = (
    ("empty.jsonl", b"", "no episodes"),
    ("empty.csv", b"", ""),
    ("empty.parquet", b"", ""),
    ("middle.jsonl", b'{"response": "a"}\n{"resp\n{"response": "b"}\n', ".*line 2"),
    ("torn.jsonl", b'{"respo', ".*line 1"),
    ("scalars.json", b"[1, 2]", "no episodes"),
    ("deep.json", b"[" * 100_000, ""),
    ("wide.json", json.dumps([{f"c{i}": 1 for i in range(10_001)}]).encode(), "10,001 columns"),
    ("pickle.pkl", b"\x80\x04.", "not one of .jsonl"),
    ("fields.csv", b"prompt,response\na,b\nc,d,e\n", "line 3"),
)


def test_broken_files_are_named(tmp_path):
    # catches: a traceback of a library, an error without the file, a pickle that is opened; half a
    # table that is read as a whole one
    whole = next(files.trl(tmp_path / "run", updates=1).glob("*/*.parquet")).read_bytes()
    for name, raw, told in (*BROKEN, ("half.parquet", whole[:-30], "")):
        (tmp_path / name).write_bytes(raw)
        for opened in (view, browse):
            with pytest.raises(ValueError, match=f"{name} cannot be read .*{told}"):
                opened(tmp_path / name)


def test_what_is_read_all_the_same(tmp_path):
    # catches: an update lost for its last line; bytes that stop it all; an array in a .JSONL
    # refused; a megabyte of \\x00 beside each prompt; blanks of a mapping or a header that belong
    # to no name
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"response": "a \xff\xfe b"}\n{"response": "c"}\n{"respon')
    r = rollout(path)
    assert r.responses == ["a \ufffd\ufffd b", "c"] and "Line 3, the last, is cut off" in notes(r)
    path = tmp_path / "loud" / "1.JSONL"
    path.parent.mkdir()
    path.write_text('[{"response": "a"},\n {"response": "b"}]')
    assert rollout(path).responses == rollout(path.parent).responses == ["a", "b"]
    (tmp_path / "x.csv").write_bytes(b"answer, b\ncaf\xe9,2.0\n")
    r = rollout(tmp_path / "x.csv", columns=parse_columns([" response = answer , scores= b"]))
    assert r.responses == ["caf\ufffd"] and r.scores.tolist() == [2.0]
    pd.DataFrame(dict(response=["a"], image=[b"\x00" * 9999])).to_parquet(tmp_path / "x.parquet")
    assert len(rollout(tmp_path / "x.parquet").columns["image"][0]) < 2_100


def test_mixed_types(tmp_path):
    # catches: one odd value that takes the whole column with it
    scores = [1, "0.5", True, [1], None, "many", {"a": 1}]
    rows = [dict(response=["a"], prompt=3, scores=x, note=x) for x in scores]
    path = files.write_lines(tmp_path / "x.jsonl", rows)
    seen = view(path)
    r = seen.shown.rollout
    assert r.scores[:4].tolist() == [1.0, 0.5, 1.0, 1.0] and r.scores[4:].isnan().all()
    assert "scores: not shown in episodes 4, 5, 6: no number" in notes(r)
    header, _ = unpacked(packed_update(seen.shown))
    assert header["scores"] == [1.0, 0.5, 1.0, 1.0, None, None, None]
    check(browse(path)._repr_html_())


def test_a_run_of_this_package_stays_one(tmp_path):
    # catches: a run without rollouts that is taken for a table of completions
    (tmp_path / "run" / "completions").mkdir(parents=True)
    files.trl_ppo(tmp_path / "run" / "completions" / "completions_1.csv")
    (tmp_path / "run" / "metrics.jsonl").write_text('{"episode": 1}\n')
    with pytest.raises(ValueError, match="keeps no rollouts.*save_rollouts=True"):
        browse(tmp_path / "run")
    path = make(info=dict(update=1)).save(tmp_path / "one.safetensors")
    assert view(path).shown.rollout.info["update"] == 1
    with pytest.raises(ValueError, match=r"one.safetensors.*damaged"):
        path.write_bytes(path.read_bytes()[:-9])
        view(path)


def test_what_is_no_token_id(letters):
    # catches: a TypeError or an OverflowError in the place of a note; ids that are cut to numbers
    good = dict(response="a b", token_ids=["3", 4.0], values=[1, 2])
    for ids in ([5, 99_999_999], [1, None], [float("inf"), 2], [-5, 2], ["x", 2], [1, 2.5], None):
        r = rollout([good, dict(good, token_ids=ids)], tokenizer=letters)
        assert "token_ids: not shown in episode 1: give whole numbers" in notes(r)
        assert r.values.tolist() == [[1, 2], [1, 2]] and r.response_ids[0].tolist() == [3, 4]
        assert r.tokens[1] == ["a", " b"]


def test_texts_of_a_csv_are_as_they_were_written(tmp_path):
    # catches: 02 as 2.0, TRUE as True, NA as nothing
    path = tmp_path / "x.csv"
    answers = ["02", "1.50", "1e3", "TRUE", "NA", "null", "nan", "7"]
    rows = [f"{x},{x},TRUE,,0{i}\n" for i, x in enumerate(answers)]
    path.write_text("prompt,response,scores,stopped,id\n" + "".join(rows))
    r = rollout(path)
    assert r.responses == r.prompts == answers and r.scores.tolist() == [1.0] * 8
    assert r.columns["id"][1] == "01" and r.stopped is None


# ---------------------------------------------------------------- hostile texts
EVIL = HOSTILE + "\x1b[31mred\x1b]0;title\x07"


def hostile_rows(n=3):
    word = EVIL + "a" * 2_000
    return [
        {
            "prompt": [dict(role=EVIL, content=word), dict(role="user", content=EVIL)],
            "response": f"{word} <b>{EVIL}</b>",
            "scores": [1.0, EVIL, None][i % 3],
            "step": 1,
            "values": EVIL,
            "stopped": EVIL,
            EVIL: EVIL,
            "length": EVIL,
            "<script>alert(1)</script>": [EVIL],
        }
        for i in range(n)
    ]


@pytest.mark.parametrize("kind", ["jsonl", "csv", "records"])
def test_hostile_texts_are_shown_as_text(tmp_path, kind):
    # catches: one place that forgets to escape: a field, a column's name, a note, a file's name
    name = "<img src=x onerror=alert(1)>\u202e 1"
    rows, path = hostile_rows(), tmp_path / f"{name}.{kind}"
    if kind == "csv":
        safe = lambda x: x.replace("\ud800", "") if isinstance(x, str) else x
        frame = pd.DataFrame([{safe(k): safe(str(v)) for k, v in row.items()} for row in rows])
        frame.to_csv(path, index=False)
    source = rows if kind == "records" else path
    if kind == "jsonl":
        files.write_lines(path, rows)
    seen = browse(source)
    reader = check(seen._repr_html_())
    check(str(view(source, 1)))
    assert not {"b", "script", "img"} & {tag for tag, _ in reader.seen}
    assert "<script>alert(1)</script>" in reader.text
    page, data = read_page(seen.save_html(tmp_path / "x.html"))
    assert "img" not in {tag for tag, _ in page.seen}
    header, _ = unpacked(data["updates"][0]["packed"])
    assert any("<script>" in piece for piece in pieces(data["updates"][0]["packed"])[0])
    text = json.dumps(header, ensure_ascii=False)
    assert not set("\u202e\x1b\x00\x07") & set(text + data["title"]) and "⟨U+001B⟩" in text


def test_hostile_texts_in_the_terminal(tmp_path, capsys):
    # catches: colours and titles that a file sets in the terminal
    path = files.write_lines(tmp_path / "evil\x1b[31m.jsonl", hostile_rows())
    view_command([str(path), "--terminal"])
    view_command([str(path), "--no-browser"])
    out = capsys.readouterr().out
    assert "\x1b]0" not in out and "\x1b[31m" not in out and "\u202e" not in out
    assert "evil" in out and "alert(1)" in out
    with pytest.raises(ValueError) as error:
        view(path, columns={"prompt": EVIL + "!"})
    assert not set("\u202e\x1b\x00") & set(str(error.value).replace(str(path), ""))


# ---------------------------------------------------------------- the command
def test_the_command(tmp_path, capsys):
    # catches: a file written elsewhere, zeros or +nan in the place of what is absent; a page in a
    # folder of somebody else's
    path = files.write_lines(tmp_path / "mine.jsonl", ROWS)
    columns = ["--columns", "prompt=question,response=answer,scores=reward"]
    view_command([str(path), *columns, "--terminal"])
    out = capsys.readouterr().out
    assert "words" in out and "+0.50" in out and "+0.00" not in out and "cut off" not in out
    assert "Not in this file: logprobs" in out and list(tmp_path.iterdir()) == [path]
    view_command([str(path), *columns, "--no-browser"])
    assert (tmp_path / "mine-rollouts.html").is_file()
    assert "Read as your mapping" in capsys.readouterr().out
    view_command([str(files.verl(tmp_path / "verl")), "--no-browser", "--update", "2"])
    _, data = read_page(tmp_path / "verl" / "rollouts.html")
    assert [one["name"] for one in data["updates"]] == ["2"]
    run, page = files.verl(tmp_path / "other"), tmp_path / "new" / "page.html"
    before = sorted(run.iterdir())
    view_command([str(run), "--no_browser", "--output", str(page)])
    assert read_page(page)[1]["updates"] and sorted(run.iterdir()) == before
    assert str(page) in capsys.readouterr().out.replace("\n", "")
    rows = [dict(response="a", scores=1.0, kl=[None]), dict(response="b", kl=[2.0])]
    view_command([str(files.write_lines(tmp_path / "x.jsonl", rows)), "--terminal"])
    out = capsys.readouterr().out
    assert "nan" not in out and "+1.00" in out and "+2.00" in out


def test_a_page_that_cannot_be_written_is_refused_before_the_work(tmp_path, capsys, monkeypatch):
    # catches: an input that is overwritten, an error once every rollout was read
    monkeypatch.setattr("rlhf_nb.ui.viewer.browse", lambda *given: pytest.fail("it was read"))
    files.verl(tmp_path / "verl")
    file = files.write_lines(tmp_path / "x.jsonl", ROWS)
    for output, more, said in (
        ("verl", [], "--output {}/verl is a folder: give a file, such as"),
        ("x.jsonl/page.html", [], "x.jsonl is no folder that can be written to"),
        ("x.jsonl", [], "is the file that is read: give another one"),
        ("verl/1.jsonl", [], "1.jsonl exists, and rlhf-nb did not write it: give another name, or"),
        ("page.html", ["--terminal"], "--terminal writes nothing: leave out --output"),
    ):
        with pytest.raises((SystemExit, ValueError)) as error:
            view_command([str(file), "--output", str(tmp_path / output), *more])
        told = capsys.readouterr().err + str(error.value)
        assert said.format(tmp_path) in " ".join(told.split())
    assert file.read_text().count("\n") == len(ROWS)


def test_updates_that_are_not_there(tmp_path, capsys):
    # catches: "1 to 10: give one of them" where 3 is not there
    folder = files.verl(tmp_path / "verl", 4)
    (folder / "3.jsonl").rename(folder / "9.jsonl")
    (folder / "9.jsonl").write_text(
        (folder / "9.jsonl").read_text().replace('step": 3', 'step": 9')
    )
    with pytest.raises(SystemExit):
        view_command([str(folder), "--update", "3"])
    assert "--update is 3 and" in (err := capsys.readouterr().err)
    assert "keeps 1, 2, 4, 9: give one of them" in " ".join(err.split())


def test_every_target_is_a_name_of_a_rollout():
    # catches: a name that can be mapped and ends nowhere
    no_field = {"step", "token_ids", "token_mask", "prompt", "response", "messages"}
    assert {*TARGETS} - no_field <= set(vars(make()))
