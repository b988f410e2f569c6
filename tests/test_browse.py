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
from packs import unpacked
from test_viewer import HOSTILE, ask, check, make, read_page

from rlhf_nb.cli.view import view_command
from rlhf_nb.diagnose.replay import find_checkpoint
from rlhf_nb.rollout import SIGNALS, Rollout
from rlhf_nb.training.kept import left_out
from rlhf_nb.ui import run_files
from rlhf_nb.ui.run_files import RunFolder, ranges_of
from rlhf_nb.ui.suspects import Suspect, episode_suspects, run_suspects
from rlhf_nb.ui.viewer import browse, view
from rlhf_nb.ui.what_if import what_if
from rlhf_nb.update import Objective

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
    return what_if(r, Objective()).with_(**changes)


def write(folder: Path, updates=5, log=True, under="rollouts", make=update_of, **more) -> Path:
    "A run: rollouts and a log."
    (folder / under).mkdir(parents=True, exist_ok=True)
    for u in range(updates):
        make(u, **more).save(folder / under / f"update-{u:05d}.safetensors")
    if log:
        lines = [json.dumps(line(u)) for u in range(updates)]
        (folder / "metrics.jsonl").write_text("\n".join(lines))
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


# catches: a run's folder taken for a file of another trainer, its first update, one it hasn't
def test_view_of_a_run_is_its_last_update(run):
    assert view(run).name == f"Update {max(RunFolder(run).files)}"
    assert view(run, update=min(RunFolder(run).files)).name == f"Update {min(RunFolder(run).files)}"
    with pytest.raises(ValueError, match="there is no update 99"):
        view(run, update=99)


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
    # there; a button that reads the folder and tells nobody
    folder = run / "rollouts"
    whole = (folder / "update-00004.safetensors").read_bytes()
    (folder / "update-00005.safetensors").write_bytes(whole[:-40])
    (folder / "update-00006.safetensors").write_bytes(b"")
    (folder / "update-00007.safetensors.partial").write_bytes(whole)
    (folder / "notes.txt").write_text("x")
    seen = browse(run)
    assert list(seen.run.files) == [0, 1, 2, 3, 4] and "Update 4," in seen._repr_html_()
    (folder / "update-00005.safetensors").write_bytes(whole)
    ask(seen.reader, act="refresh")
    assert [one["update"] for one in seen.reader.head["updates"]] == [0, 1, 2, 3, 4, 5]
    assert seen.reader.head["said"] == "New updates: 1." and seen.reader.head["actions"]


def test_an_update_that_is_left_out_is_named(run, capsys):
    # catches: "keeps 0 to 4: give one of them" where a damaged file of update 2 is there
    path = run / "rollouts" / "update-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-40])
    said = "update-00002.safetensors is left out: it is damaged, or not yet written"
    with pytest.raises(SystemExit):
        view_command([str(run), "--update", "2"])
    err = " ".join(capsys.readouterr().err.split())
    assert "keeps 0, 1, 3, 4: give one of them" in err and said in err
    with pytest.raises(ValueError, match=f"no rollout of update 2. {said}"):
        find_checkpoint(run, 2)
    assert left_out(run, 1) == left_out(run, 7) == left_out(run / "nowhere", 1) == ""


def test_options_that_a_run_folder_does_not_need_are_refused(run, capsys):
    # catches: --columns and --tokenizer that are ignored in silence
    for option in ("--columns", "--tokenizer"):
        with pytest.raises(SystemExit):
            view_command([str(run), option, "prompt=x"])
        assert f"{option} is for files of other trainers" in capsys.readouterr().err


def test_a_folder_that_is_not_there(tmp_path):
    # catches: a misspelt folder told as a run that kept nothing
    for columns in (None, dict(prompt="x")):
        with pytest.raises(ValueError, match="nowhere.* is not there|no file .*nowhere"):
            browse(tmp_path / "nowhere", columns=columns)


def test_ranges():
    # catches: a gap that is hidden, a list of a thousand numbers
    assert ranges_of([2, 0, 1, 5, 7, 8]) == "0 to 2, 5, 7, 8" and ranges_of([]) == ""
    assert ranges_of(range(0, 1000, 10)) == "0, 10, 20, 30, 40, 50, 60, …, 990"


def test_an_old_file_that_is_damaged_is_told(run):
    # catches: damage passed over in silence
    path = run / "rollouts" / "update-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-40])
    settle(path)
    seen = browse(run)
    sent = []
    seen.reader.send = lambda content, buffers=None: sent.append(content)
    with pytest.raises(ValueError, match="update-00002.*damaged"):
        seen.reader._answer(None, dict(load=2, number=1), [])
    assert "update-00002" in sent[0]["error"]
    assert unpacked(ask(seen.reader, load=3))[0]["update"] == 3


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
    assert len(whole) == 22 and whole.prompts[::2] == [f"of rank {rank}" for rank in range(11)]
    assert whole.mask.shape == (22, 6)
    for rank in (0, 2, 10):
        one = parts[0, rank]
        for name in ("kl", "advantages", "mask"):
            assert torch.equal(
                getattr(whole, name)[2 * rank : 2 * rank + 2, : one.mask.shape[1]],
                getattr(one, name),
            )
            assert not getattr(whole, name)[2 * rank, one.mask.shape[1] :].any()
    assert seen.numbers()["kl"].tolist() == pytest.approx(
        [x for rank in range(11) for x in parts[0, rank].kl.sum(1).tolist()]
    )
    parts[0, 10].save(folder / "update-00001-rank10.safetensors")
    seen.refresh()
    assert list(seen.files) == [0, 1]
    told = unpacked(ask(browse(tmp_path).reader, load=0))[0]["told"]
    assert "exactly" not in told  # each rank whitened by itself here


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
    assert read == ["update-00004.safetensors"] and seen.reader.head["start"] == 4
    for u in (1, 1, 4):
        ask(seen.reader, load=u)
    assert read == ["update-00004.safetensors", "update-00001.safetensors"]
    ask(seen.reader, act="search every update")
    assert len(read) == 2
    time.sleep(0.01)
    update_of(1, prompts=["other words"] * 6).save(run / "rollouts" / "update-00001.safetensors")
    before = seen.reader.head
    ask(seen.reader, act="refresh")
    assert seen.reader.head != before  # so the page asks again
    assert unpacked(ask(seen.reader, load=1))[0]["prompts"] == [dict(text="other words")]


def test_numbers_are_those_of_the_rollout(run):
    # catches: padding counted, the raw score for the penalised one, rows of another update
    seen = RunFolder(run)
    frame, r = seen.numbers([3]), seen.rollout(3)
    assert frame["update"].tolist() == [3] * 6 and frame["episode"].tolist() == list(range(6))
    for name, wanted in dict(
        score=r.scores, kl=r.kl.sum(1), length=r.mask.sum(1), stopped=r.stopped
    ).items():
        assert frame[name].tolist() == pytest.approx(wanted.tolist())


def repeated(grams: list) -> float:
    return 1 - len({*grams}) / len(grams) if grams else 0.0


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 2), min_size=0, max_size=9), min_size=1, max_size=4),
    st.integers(0, 2),
)
def test_repetition_is_the_share_of_three_tokens_that_came_before(rows, junk):
    # catches: padding counted, runs of two, the first of a kind counted as a repeat
    width = max(map(len, rows)) + 1
    ids = torch.tensor([row + [junk] * (width - len(row)) for row in rows])
    mask = torch.arange(width) < torch.tensor([[len(row)] for row in rows])
    assert run_files.repetition_shares(ids, mask).tolist() == pytest.approx(
        [repeated([*zip(row, row[1:], row[2:])]) for row in rows]
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
    assert log["update"].tolist() == [0, 1, 2, 3, 4]
    assert log["objective/kl"].tolist() == [0, 2, 4, 6, 8]


def test_a_run_without_a_log_is_drawn_from_its_rollouts(tmp_path):
    seen = browse(write(tmp_path, log=False))
    curves = {one["name"]: one["lines"][0]["points"] for one in seen.reader.head["curves"]}
    assert set(curves) == {"raw score", "KL", "length"}
    assert curves["raw score"][4] == [
        4,
        pytest.approx(seen.run.rollout(4).raw_scores.mean().item()),
    ]
    kl = torch.full((6, 7), -1.0)  # and alarmed by them: a mean KL below 0 that nobody logged
    seen = browse(write(tmp_path / "below", log=False, kl=kl))
    assert any("nats. If that is not the noise" in one.sentence for one in seen.suspects)


# ---------------------------------------------------------------- suspects
def test_odd_episodes_are_found():
    # catches: odd but badly paid, well paid but ordinary, a mean over all updates in which the last
    # looks odd as a whole
    episodes = dict(update=np.repeat([0, 1], 30), episode=[*range(30)] * 2)
    base = pd.DataFrame(dict(**episodes, score=0.0, kl=1.0, length=10, repetition=0.0))
    base.loc[30:, ["score", "kl"]] = [5.0, 20.0]
    assert episode_suspects(base) == []
    rich_and_far, rich, far = base.copy(), base.copy(), base.copy()
    rich_and_far.loc[7, ["score", "kl"]] = [3.0, 9.0]
    rich.loc[7, "score"] = 3.0
    far.loc[7, ["score", "kl"]] = [-3.0, 9.0]
    assert [(s.update, s.episode) for s in episode_suspects(rich_and_far)] == [(0, 7)]
    assert episode_suspects(rich) == episode_suspects(far) == []
    for name, value in dict(length=40, repetition=0.9).items():
        odd = base.copy()
        odd.loc[37, ["score", name]] = [9.0, value]
        (found,) = episode_suspects(odd)
        assert (found.update, found.episode) == (1, 7) and name in found.sentence
        assert "KL" not in found.sentence
    # catches: an update in which nearly all are alike, whose tiny spread makes a little thing the oddest
    calm = base.copy()
    calm.loc[30:, "repetition"] = np.linspace(0, 0.2, 30)
    calm.loc[7, ["score", "repetition"]] = [9.0, 0.05]
    assert episode_suspects(calm) == []
    many = base.copy()
    many.loc[[1, 2, 3], "score"] = 9.0
    many.loc[[1, 2, 3], "kl"] = [20.0, 60.0, 40.0]
    assert [s.episode for s in episode_suspects(many, most=2, far=1.0)] == [2, 3]


def test_alarms_and_jumps():
    # catches: a slope taken for a jump, the update before or after, an alarm that is lost
    slope = pd.DataFrame(
        [
            dict(update=u, **{"objective/kl": u / 2 + 0.01 * (u % 2), "objective/raw_scores": 0.0})
            for u in range(20)
        ]
    )
    assert run_suspects(slope) == []
    jump = slope.copy()
    jump.loc[12:, "objective/kl"] += 30
    assert [(s.update, s.episode) for s in run_suspects(jump)] == [(12, None)]
    assert "Jump. Update 12: KL went from 5.51 to 36" in run_suspects(jump)[0].sentence
    hacked = pd.DataFrame(
        [
            dict(update=u, **{"objective/kl": 1.5 * u, "objective/raw_scores": u + 0.1 * (u % 2)})
            for u in range(20)
        ]
    )
    assert [s.sentence[:6] for s in run_suspects(hacked)] == ["Alarm."]
    assert run_suspects(pd.DataFrame()) == []


def test_every_suspect_leads_to_its_place(run):
    # catches: a place in another order, or a filter that hides the episode
    update_of(2).with_(
        scores=torch.tensor([0.0, 0, 0, 9, 0, 0]),
        kl=torch.zeros(6, 7).index_fill(0, torch.tensor([3]), 5.0),
    ).save(run / "rollouts" / "update-00002.safetensors")
    seen = browse(run)
    far = next(s for s in episode_suspects(seen.run.numbers(), far=1.9) if s.update == 2)
    seen.suspects = [far, Suspect(1, None, "the update as a whole"), Suspect(99, None, "later")]
    head = seen.head(seen.updates(), seen.suspects)
    assert [(x["update"], x["row"]) for x in head["suspects"]] == [(2, 3), (1, None), (4, None)]
    seen.reader.place = dict(find="zebra", sort="score", down=True, signal="kl")
    wanted = dict(find="", only="all", signal="kl")
    seen.go(seen.suspects[0])
    assert seen.reader.place == dict(wanted, update=2, row=3, sort="episode", down=False)
    seen.go(seen.suspects[2])  # the best paid of the newest update
    assert seen.reader.place == dict(wanted, update=4, row=-1, sort="score", down=True)
    r = seen.run.rollout(1)  # with a KL below what pads it no token is named
    for sign, told in ((-1, ""), (1, " (KL +1.00)")):
        seen.run.rollout = lambda _, sign=sign: r.with_(kl=sign * r.mask.float())
        for one in (seen.with_token(Suspect(1, e, "")) for e in range(len(r))):
            assert one.sentence.endswith(told) and bool(one.sentence) == bool(told)


def test_a_search_says_what_it_found(run, monkeypatch):
    # catches: a button that seems dead; a second search, which would find the same
    seen = browse(run)
    found = [Suspect(2, row, "odd") for row in (0, 1)]
    monkeypatch.setattr("rlhf_nb.ui.viewer.suspects_of", lambda *_: found)
    ask(seen.reader, act="search every update")
    assert seen.reader.head["said"] == "Every update was searched, unusual episodes: 2."
    assert seen.reader.head["actions"] == ["refresh"]
    ask(seen.reader, act="refresh")
    assert "search every update" in seen.reader.head["actions"]


def test_the_same_prompt_through_training(tmp_path):
    # catches: the same row for the same prompt, another prompt's completion
    run = write(tmp_path, updates=0, log=False)
    for u in range(4):
        prompts = [f"other {u}/{i}" for i in range(6)]
        if u != 1:
            prompts[u] = "the same"
        update_of(u, prompts=prompts).save(run / "rollouts" / f"update-{u:05d}.safetensors")
    (run / "completions").mkdir()
    table = "query,model response,score\nthe same,a <b>answer</b>,1.5\nother,no,2\n"
    (run / "completions" / "update-00002.csv").write_text(table)
    seen = browse(run)
    told = ask(seen.reader, again=[3, 3])["value"]
    assert told["found"] == [(0, 0), (2, 2), (3, 3)]
    row = dict(table="update-00002", answer="a <b>answer</b>", score="1.5")
    assert told["completed"] == [row]
    assert ask(seen.reader, again=[1, 0])["value"] == dict(found=[(1, 0)], completed=[])


def test_two_runs_side_by_side(run, tmp_path):
    # catches: the first run shown twice, a row of another prompt, one line for two runs
    other = write(
        tmp_path / "other", updates=3, seed=7, prompts=["x", "prompt 0", "y", "z", "v", "w"]
    )
    seen = browse(run, other)
    assert [(one["update"], one.get("runName")) for one in seen.reader.head["updates"][5:]] == [
        (u, "other") for u in range(3)
    ]
    found = ask(seen.reader, again=[4, 0])["value"]["found"]
    assert found == [(u, 0) for u in range(5)] + [(5 + u, 1) for u in range(3)]
    header, _ = unpacked(ask(seen.reader, load=6))
    assert header["prompts"][1]["text"] == "prompt 0" and header["update"] == 1
    curves = {curve["name"]: curve["lines"] for curve in seen.reader.head["curves"]}
    assert {line["run"]: len(line["points"]) for line in curves["KL"]} == dict(run=5, other=3)
    _, data = read_page(seen.save_html(tmp_path / "x.html", updates=[0, 4]))
    names = [(one["update"], one.get("run", 0)) for one in data["updates"]]
    assert names == [(0, 0), (4, 0), (0, 1), (2, 1)] and data["start"] == 1
    assert unpacked(data["updates"][3]["packed"])[0]["update"] == 2


def test_curves_are_what_was_logged(run):
    # catches: a metric under another's name, an update that is counted from one
    curves = {curve["name"]: curve for curve in browse(run).reader.head["curves"]}
    svg = curves["KL"].pop("svg")
    assert curves["KL"] == dict(
        name="KL",
        about="KL to the reference, nats per response",
        unit="nats",
        lines=[dict(run="run", which=0, points=[[float(u), 2.0 * u] for u in range(5)])],
    )
    corners = "4.00,58.00 57.00,45.00 110.00,32.00 163.00,19.00 216.00,6.00"
    assert f'points="{corners}" class="line0"' in svg and 'cx="216.00" cy="6.00"' in svg
    assert "KL to the reference, nats per response, updates 0 to 4: 0.00 nats to 8.00 nats" in svg
    assert set(curves) == {"raw score", "KL", "length", "token entropy"}
    assert "of a token, over the vocabulary" in curves["token entropy"]["about"]  # not the other


def test_hostile_runs(tmp_path):
    # catches: one place that forgets to escape; in files: tests/browser/test_static.py
    word = HOSTILE + "a" * 10_000
    run = write(
        tmp_path / "<b>evil",
        updates=2,
        prompts=[word] * 6,
        tokens=[[word] * 7] * 6,
        responses=[word] * 6,
        columns={word[:80]: [word] * 6},
    )
    reader = check(browse(run, run)._repr_html_())
    assert "b" not in {tag for tag, _ in reader.seen} and "<script>alert(1)</script>" in reader.text


def test_a_static_file_of_a_run(tmp_path):
    # catches: an update left out that an alarm names, a jump to another episode, a suspect that is
    # not in the file, a file that grows with the run
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
    names = [one["name"] for one in data["updates"]]
    assert path.stat().st_size < 2_000_000 and {"0", "29", "17"} <= set(names) and len(names) <= 7
    assert data["start"] == len(names) - 1
    kept = [unpacked(one["packed"])[0]["episodes"] for one in data["updates"]]
    assert data["suspects"] and all(len(rows) >= 3 for rows in kept)
    for jump in data["suspects"]:
        assert re.search(r"pdate (\d+)", jump["sentence"])[1] == names[jump["update"]]
        if jump["row"] is not None:
            assert int(re.search(r"episode (\d+)", jump["sentence"])[1]) == jump["row"]
            assert jump["row"] in kept[jump["update"]]
    assert len(data["curves"]) == 4 and "Episode 0 of 12, update 29" in "".join(page.words)
    whole = read_page(seen.save_html(path, updates=[3]))[1]
    header, rows = unpacked(whole["updates"][0]["packed"])
    assert len(header["episodes"]) == 12 and header["recipe"] and "advantages" not in rows


# catches: a file that grows with the answers, updates left out without a word, or against one's wish
def test_what_is_too_much_for_a_file_is_said_and_cut(tmp_path, monkeypatch):
    seen = browse(write(tmp_path / "run", updates=6, n=12))
    tokens = int(seen.run.numbers()["length"].sum())
    data = lambda **how: read_page(seen.save_html(tmp_path / "run.html", **how))[1]
    assert len(data()["updates"]) == 6 and data()["said"] == ""
    monkeypatch.setattr("rlhf_nb.ui.viewer.MOST_TOKENS", tokens // 2)
    cut = data()
    assert [one["name"] for one in cut["updates"]] == ["0", "2", "5"]
    assert f"3 of 6 updates are in this file: 6 hold {tokens:,} tokens" in cut["said"]
    assert len(data(updates=[0, 1, 2, 3, 4, 5])["updates"]) == 6
    assert len(data(episodes=2)["updates"]) == 6


def test_what_a_notebook_keeps(run):
    bundle = browse(str(run))._repr_mimebundle_()
    assert "Update 4, after" in bundle["text/html"]
    assert bundle["text/plain"] == "RunBrowser(run: 5 updates, 0 to 4)"
    assert "application/vnd.jupyter.widget-view+json" in bundle


def test_half_filled_rollouts(tmp_path):
    # a run whose rollouts were kept before they were scored
    absent = [name for name in SIGNALS if name != "logprobs"] + ["scores", "raw_scores"]
    seen = browse(write(tmp_path, updates=2, log=False, **dict.fromkeys(absent)))
    header, rows = unpacked(ask(seen.reader, load=0))
    assert header["recipe"] is None and set(rows) == {"widths", "logprobs"}
    assert "scores" not in header
    assert "kept before" in header["told"] and "logprobs" in check(seen._repr_html_()).text
    read_page(seen.save_html(tmp_path / "x.html"))
