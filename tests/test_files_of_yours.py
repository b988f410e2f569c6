"""Nothing of the user's is overwritten, and a signal or a reader that goes costs no update."""

from __future__ import annotations

import datetime
import errno
import os
import pty
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from unittest.mock import Mock

import pytest
from ppo_fixtures import SIZES, likes_c
from transformers import TrainerCallback

from rlhf_nb.base.files import from_json, to_json, writable, write_text_atomic
from rlhf_nb.checkpoint import save_policy, seal, stage_folder
from rlhf_nb.models import scorer_from
from rlhf_nb.rollout import Rollout
from rlhf_nb.training.folders import run_lock, what_is_safe
from rlhf_nb.training.model_loading import load_policy, load_scorer, tiny_policy


# catches: a run that writes over the model that it begins with, or that judges it
@pytest.mark.parametrize("part", ["model", "ref_model", "reward", "checkpoint", "link"])
def test_the_folder_of_an_input_is_refused(ppo, letters, tmp_path, part):
    policy, folder = tiny_policy(letters, 0, **SIZES), tmp_path / "M"
    saved = folder / "checkpoint-1" if part == "checkpoint" else folder
    (scorer_from(policy, 1) if part == "reward" else policy).save_pretrained(saved)
    letters.save_pretrained(saved)
    if part == "link":
        (tmp_path / "L").symlink_to(folder)
    given = dict(output_dir=str(tmp_path / "L" if part == "link" else folder))
    given |= dict(overwrite_output_dir=True) if part == "checkpoint" else {}
    with pytest.raises(ValueError, match=f"output_dir is {folder}, and .* was loaded from {saved}"):
        if part == "reward":
            ppo(load_scorer(str(saved)), **given)
        elif part == "ref_model":
            ppo(parts=dict(ref_model=load_policy(str(saved))), **given)
        else:
            ppo(model=load_policy(str(saved)), **given)


# catches: a finished model under another run's weights, a mixed log of two trainers, a README of
# somebody's replaced by a card
def test_what_others_wrote_is_moved_aside(ppo, letters, caplog):
    first = ppo(total_episodes=8)
    second = ppo(total_episodes=8, model=tiny_policy(letters, 5, **SIZES))
    folder = Path(first.args.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "README.md").write_text("mine")
    first.train()
    first.save_model()
    assert (folder / "earlier-1" / "README.md").read_text() == "mine"
    before = {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}
    second.train()  # it was made before the first one trained
    second.save_model()
    second.save_model()  # its own
    aside = folder / "earlier-2"
    assert {p.name: p.read_bytes() for p in aside.iterdir()} == before
    assert f"now in {aside}" in caplog.text and not (folder / "earlier-3").exists()
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 2


# catches: a new config beside old weights, a rest of a save that failed, a line without folder or size
def test_a_final_save_without_room_leaves_the_earlier_model(ppo, monkeypatch):
    trainer = ppo.trained(total_episodes=8)
    trainer.save_model()
    folder = Path(trainer.args.output_dir)
    before = {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}

    full = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    monkeypatch.setattr("transformers.modeling_utils.safe_save_file", full)
    with pytest.raises(OSError, match=rf"could not be written .* {folder} needs \d\.\d MiB"):
        trainer.save_model()
    assert {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()} == before
    assert not [*folder.glob("_save*")]


# catches: two runs in threads of one process, neither of which draws what it draws alone
@pytest.mark.parametrize("how", ["train", "step"])
def test_one_thread_trains_at_a_time(ppo, tmp_path, how):
    ended = []

    def beside():
        with pytest.raises(RuntimeError, match=f"{tmp_path}/b cannot train .* in {tmp_path}/a:"):
            getattr(second, how)()
        ended.append(how)

    def judge(prompts, responses, **columns):
        hand = threading.Thread(target=beside)
        hand.start()
        hand.join()
        return likes_c(prompts, responses)

    first = ppo(judge, output_dir=str(tmp_path / "a"), total_episodes=8)
    second = ppo(output_dir=str(tmp_path / "b"), total_episodes=8)
    getattr(first, how)()
    assert set(ended) == {how}
    getattr(second, how)()


# catches: rollouts or completions of another trainer, replaced by those of one that does not train
def test_steps_and_evaluations_by_hand_keep_what_others_wrote(ppo, letters, caplog):
    def texts(place):
        return [Rollout.load(p).responses for p in sorted((folder / place).glob("update-*"))]

    first, second = (ppo(save_rollouts=True, seed=seed) for seed in (1, 2))
    folder = Path(first.args.output_dir)
    for _ in range(2):
        first.step()
    kept = texts("rollouts")
    second.step()
    assert texts("earlier-1/rollouts") == kept and f"now in {folder / 'earlier-1'}" in caplog.text
    theirs = texts("rollouts")
    first.step()
    assert texts("earlier-2/rollouts") == theirs and texts("earlier-1/rollouts") == kept
    assert len(texts("rollouts")) == 1 and theirs[0] != kept[0]
    with run_lock(folder), pytest.raises(ValueError, match=f"another run is in {folder}"):
        ppo(save_rollouts=True).step()
    first.train()  # what it has stepped before is its own
    assert len(texts("rollouts")) == 4 and not (folder / "earlier-3").exists()
    first.evaluate()
    (table,) = (folder / "completions").iterdir()
    theirs = table.read_bytes()
    ppo(model=tiny_policy(letters, 5, **SIZES)).evaluate()
    assert (folder / "earlier-3/completions" / table.name).read_bytes() == theirs


# catches: a run that ends with a bare error of Python's
@pytest.mark.parametrize("name", ["metrics.jsonl", "rollouts", "completions", ""])
def test_a_file_that_something_else_replaces_is_named(ppo, name):
    def replaces(prompts, responses, **columns):
        path = Path(trainer.args.output_dir) / name
        if (path.parent if name else path / "metrics.jsonl").is_file() or path.exists():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
            path.mkdir() if name == "metrics.jsonl" else path.write_text("mine")
        return likes_c(prompts, responses)

    trainer = ppo(replaces, save_rollouts=True, num_sample_generations=3)
    complaint = "could not be written .* at what is there, or give another path. There is no"
    with pytest.raises(OSError, match=f"^a file {complaint} whole checkpoint"):
        trainer.train()


# catches: weights that only their owner may read
def test_what_is_saved_has_the_mode_of_any_file(ppo, letters, tmp_path):
    before = os.umask(0o027)
    try:
        settings = dict(save_strategy="steps", save_steps=1, save_rollouts=True)
        trainer = ppo.trained(total_episodes=8, save_value_model=True, **settings)
        trainer.save_model()
        save_policy(trainer.pair.policy, letters, tmp_path / "policy")
    finally:
        os.umask(before)
    folders = Path(trainer.args.output_dir), tmp_path / "policy"
    modes = {p: oct(p.stat().st_mode) for x in folders for p in x.rglob("*") if p.is_file()}
    assert {*modes.values()} == {"0o100640"} and len(modes) > 20, modes


# catches: checkpoints and a model in another folder
def test_a_reward_that_changes_folder_changes_nothing(ppo, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "else").mkdir()

    def moves(prompts, responses, **columns):
        os.chdir(tmp_path / "else")
        return likes_c(prompts, responses)

    trainer = ppo(moves, output_dir="run", total_episodes=8, save_strategy="steps", save_steps=1)
    trainer.train()
    trainer.save_model()
    assert not [*(tmp_path / "else").iterdir()]
    assert {"checkpoint-1", "model.safetensors"} <= {p.name for p in (tmp_path / "run").iterdir()}


# catches: a run that trains first; a bare error of shutil
def test_odd_folders_are_refused_at_the_start(ppo, tmp_path):
    with pytest.raises(ValueError, match="no UTF-8: give another name"):
        ppo(output_dir=os.fsdecode(os.fsencode(tmp_path) + b"/\xe9"))
    elsewhere, run = tmp_path / "elsewhere", tmp_path / "run"
    elsewhere.mkdir()
    run.mkdir()
    (elsewhere / "manifest.json").write_text("{}")
    (run / "checkpoint-1").symlink_to(elsewhere)
    with pytest.raises(ValueError, match="checkpoint-1 was not written by this package"):
        ppo(output_dir=str(run), overwrite_output_dir=True).train()
    with stage_folder(run / "checkpoint-1") as folder:
        (folder / "new").touch()
    assert [p.name for p in (run / "checkpoint-1").iterdir()] == ["new"] and elsewhere.is_dir()


# catches: a row that comes back as something else, a file that cannot be read
@pytest.mark.parametrize(
    "value",
    [
        {"$date": "2020-01-01T00:00:00Z"},
        {"$date": "2020-01-01"},
        {"$date": {"$numberLong": "3"}},
        {"$$date": 1, "a": 2},
        {"a": 1, "$set": [{"$bytes": "zz"}]},
        {"$Tensor": [1], "dtype": "int64"},
        {"$": None},
        {"$set": {"$date": datetime.date(2020, 1, 2), "b": b"x"}},
    ],
)
def test_any_json_comes_back(value):
    assert from_json(to_json([value])) == [value]


def test_a_file_of_an_earlier_version_is_read():
    assert from_json('{"$date": "2020-01-01T00:00:00Z"}') == {"$date": "2020-01-01T00:00:00Z"}
    assert from_json('{"$date": "2020-01-01"}') == datetime.date(2020, 1, 1)


# catches: a device, a pipe or a link that becomes a file, somebody's file that is replaced
def test_an_output_replaces_only_what_is_ours(tmp_path):
    csv, page, link, pipe = (tmp_path / name for name in ("a.csv", "b.html", "link", "pipe"))
    csv.write_text("theirs")
    page.write_text("<p>theirs")
    link.symlink_to(csv)
    for path in (csv, page, link):
        with pytest.raises(ValueError, match="rlhf-nb did not write it: give another name, or"):
            writable(path, "--output")
        writable(path, "--output", overwrite=True)
    write_text_atomic(link, "<style>.rlhf")
    assert link.is_symlink() and csv.read_text() == "<style>.rlhf"
    writable(link, "--output")
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    for path in (pipe, Path(os.devnull)):
        writable(path, "--output")
        write_text_atomic(path, "text")
    assert os.read(reader, 9) == b"text" and pipe.is_fifo() and not os.path.isfile(os.devnull)
    os.close(reader)


# catches: a demo that is told that nothing is left of its stages
def test_a_demo_names_its_command(tmp_path):
    (tmp_path / "demo.json").touch()
    assert "the same rlhf-nb demo command goes on" in what_is_safe(tmp_path / "ppo.partial")


# catches: a closed terminal that ends a run without a checkpoint
def test_a_hangup_saves(ppo):
    class HungUp(TrainerCallback):
        def on_substep_end(self, args, state, control, **_):
            os.kill(os.getpid(), signal.SIGHUP)

    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        settings = dict(total_episodes=24, save_strategy="steps", save_steps=99)
        trainer = ppo(**settings, parts=dict(callbacks=[HungUp()]))
        with pytest.raises(SystemExit) as ended:
            trainer.train()
        assert ended.value.code == 129 and (Path(trainer.args.output_dir) / "checkpoint-1").is_dir()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)


# catches: a command that ends with the reader or the terminal of its output
@pytest.mark.parametrize("what", ["pipe", "terminal"])
def test_a_command_goes_on_without_a_reader(tmp_path, what):
    done = tmp_path / "done"
    code = (
        "import sys, rlhf_nb.cli as c; c.main(['--version']); sys.stdout.flush(); sys.stdin.readline()\n"
        "for i in range(9): print('x' * 9000, flush=True)\n"
        f"print('said', file=sys.stderr, flush=True); open({str(done)!r}, 'w').write('done')"
    )
    ours, theirs = os.pipe() if what == "pipe" else pty.openpty()
    ignore = dict(preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    errors = subprocess.PIPE if what == "pipe" else theirs
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=theirs, stderr=errors, **ignore
    )
    os.close(theirs)
    assert os.read(ours, 6) == b"rlhf-n"
    os.close(ours)
    said = child.communicate(b"\n")[1]
    assert child.returncode == 0 and done.read_text() == "done"
    assert what == "terminal" or (b"nobody reads" in said and b"said" in said)


# catches: weights that changed on the disk, loaded as if they had not; an edited card that is refused
@pytest.mark.parametrize("load", [load_policy, load_scorer])
def test_what_has_a_manifest_is_verified_by_every_door(ppo, tmp_path, load):
    trainer = ppo.trained(total_episodes=8)
    trainer.save_model()
    folder = Path(trainer.args.output_dir)
    seal(folder)
    (folder / "README.md").write_text("mine")
    load(str(folder))
    data = (weights := folder / "model.safetensors").read_bytes()
    weights.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(ValueError, match="model.safetensors is not as it was written"):
        load(str(folder))
