"""Training processes killed with SIGKILL, again and again, and resumed: weights, logs, metrics and
rollouts are those of a run that was left alone. And what a signal that can be heard does."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import sys
import time
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import kills
from kills import (
    KINDS,
    SAVE_STEPS,
    STEPS,
    at_moment,
    in_write,
    killed_and_resumed,
    left_alone,
    main,
    processes,
    result,
    start,
)
from transformers import TrainerCallback

from rlhf_nb.checkpoint import MANIFEST
from rlhf_nb.training.folders import AGAIN

SHARES = (0.15, 0.3, 0.5, 0.7, 0.9)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    "Of each trainer, the run that was left alone, the seconds of its training, and its folder."
    first = processes.Process(target=print)  # the server imports before it forks
    first.start()
    first.join()
    made: dict[str, tuple] = {}

    def of(kind: str) -> tuple:
        if kind not in made:
            folder = tmp_path_factory.mktemp("alone") / kind
            made[kind] = (*left_alone(kind, folder), folder)
        return made[kind]

    return of


def moments(kind: str, seconds: float, few: bool) -> list:
    "Some at a moment of training, some in a write."
    rng, every = random.Random(os.environ.get("KILL_SEED", "2024")), SAVE_STEPS[kind]
    if few:
        return [at_moment(0.45 * seconds), in_write(2 * every)]
    at = [at_moment(seconds * (share + rng.uniform(-0.1, 0.05))) for share in SHARES]
    steps = [every * rng.randint(1, STEPS[kind] // every) for _ in range(5)]
    return at + [in_write(step, rng.uniform(0, 0.02)) for step in steps]


# catches: a state that no checkpoint holds (random numbers, controller, moments, place in the data,
# half a log), half a checkpoint taken for a whole one, a lock that a dead process holds
@pytest.mark.parametrize(
    ("kind", "few"),
    [
        *[(kind, True) for kind in ("ppo", "sft")],
        *[pytest.param(kind, False, marks=pytest.mark.slow) for kind in KINDS],
    ],
)
def test_a_killed_run_goes_on_as_if_nothing_had_been(alone, tmp_path, kind, few):
    expected, seconds, _ = alone(kind)
    waits = moments(kind, seconds, few)
    found = [
        killed_and_resumed(kind, tmp_path / str(i), wait, expected, victim=i)
        for i, wait in enumerate(waits)
    ]
    assert not [wrong for wrong in found if wrong]
    assert found.count("") >= len(waits) * 0.5, "too few were caught alive: the moments are late"


# catches: one update more for a run that was finished
def test_a_finished_run_that_is_resumed_does_nothing_more(alone):
    expected, _, folder = alone("ppo")
    (child,) = start("ppo", folder)
    child.join()
    assert child.exitcode == 0 and result("ppo", folder)["weights"] == expected["weights"]


# catches: the command that counts them, which no other test runs
@pytest.mark.slow
def test_the_command_counts_the_kills(tmp_path, capsys):
    words = ["--kinds", "sft", "--kills", "1", "--output", str(tmp_path / "kills.json")]
    assert main(words) == 0
    counted = json.loads((tmp_path / "kills.json").read_text())
    assert (counted["kills"], counted["bit_for_bit"]) == (1, 1)
    assert "1 of 1" in capsys.readouterr().out


# ---- Signals that are heard ----


class Watched(TrainerCallback):
    "Steps that take their time, and a file after the first; `full`: then no file of over 8 KB."

    def __init__(self, folder: str, full: bool):
        self.folder, self.full = folder, full

    def on_step_end(self, args, state, control, **_):
        Path(self.folder, "stepped").touch()
        time.sleep(0.1)

    def on_save(self, args, state, control, **_):
        if self.full:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))


def run(kind: str, folder: str, how: str) -> None:
    "In a process of its own, with its stderr in a file: the same run, and `how` it is different."
    os.dup2(os.open(f"{folder}.said", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def sleeps(prompts, responses, **_):
        Path(folder, "asleep").touch()
        time.sleep(60)

    if "hangs" in how:
        kills.likes_a = sleeps
    if "saves none" in how:
        kills.SHARED["save_strategy"] = "no"
    if "saves late" in how:
        kills.SAVE_STEPS = dict.fromkeys(KINDS, 99)
    name = "ppo_trainer" if kind == "ppo" else "supervised_trainer"
    make = getattr(kills, name)

    def watched(*given):
        trainer = make(*given)
        trainer.add_callback(Watched(folder, "full" in how))
        return trainer

    setattr(kills, name, watched)
    kills.train(kind, folder, False, rank=0, port=0)


def begun(kind: str, folder: Path, how: str, there: str = "stepped"):
    "Such a process, when that file is there."
    folder.mkdir(exist_ok=True)
    child = processes.Process(target=run, args=(kind, str(folder), how))
    child.start()
    while not (folder / there).exists():
        child.join(0.01)
        assert child.is_alive(), Path(f"{folder}.said").read_text()
    return child


def ended(child, folder: Path) -> list[str]:
    "The lines that it wrote, after its end."
    child.join()
    return Path(f"{folder}.said").read_text().strip().splitlines()


# catches: a scheduler's signal that ends a run without a checkpoint, a checkpoint in the middle of
# a step or of a log, which resumes to another run
@pytest.mark.parametrize(
    ("kind", "number"),
    [
        ("ppo", signal.SIGTERM),
        ("sft", signal.SIGINT),
        pytest.param("ppo", signal.SIGINT, marks=pytest.mark.slow),
        pytest.param("reward", signal.SIGTERM, marks=pytest.mark.slow),
    ],
)
def test_a_signal_saves_where_it_stops(alone, tmp_path, kind, number):
    expected, folder = alone(kind)[0], tmp_path / "run"
    child = begun(kind, folder, "saves late")
    os.kill(child.pid, number)
    said = "\n".join(ended(child, folder))
    assert child.exitcode == (143 if number == signal.SIGTERM else 1)
    assert f"{number.name}: stopping after this step, with a checkpoint; again: at once." in said
    (last,) = folder.glob("checkpoint-*")
    assert (last / MANIFEST).is_file()
    assert f"The last whole checkpoint is {last}: train(resume_from_checkpoint=True)" in said
    (again,) = start(kind, folder)
    again.join()
    assert again.exitcode == 0 and result(kind, folder) == expected


# catches: a promise of checkpoints that are not there, a second Ctrl-C that waits too
@pytest.mark.parametrize("how", ["hangs", "hangs, saves none"])
def test_without_a_checkpoint_it_says_so(tmp_path, how):
    folder = tmp_path / "run"
    child = begun("ppo", folder, how, "asleep")
    os.kill(child.pid, signal.SIGINT)
    if how == "hangs":
        while "again: at once" not in Path(f"{folder}.said").read_text():
            child.join(0.02)
            assert child.is_alive()
        time.sleep(AGAIN + 0.1)  # what comes sooner is the same Ctrl-C, heard twice
        os.kill(child.pid, signal.SIGINT)
    last = ended(child, folder)[-1]
    assert f"There is no whole checkpoint in {folder}, so there is nothing to resume" in last
    assert ("since save_strategy is 'no'" in last) == ("saves none" in how)


# catches: two runs that write into the same files, a lock that outlives its process
def test_a_second_run_in_the_folder_is_refused(tmp_path):
    folder = tmp_path / "run"
    child = begun("ppo", folder, "hangs", "_run.owner")
    second = processes.Process(target=run, args=("ppo", str(folder), "hangs"))
    second.start()
    last = ended(second, folder)[-1]
    assert second.exitcode == 1
    assert last.startswith(f"ValueError: another run is in {folder} (process {child.pid} on ")
    child.kill()
    child.join()
    assert (folder / "_run.lock").exists()
    (third,) = start("ppo", folder)
    third.join()
    assert third.exitcode == 0 and not [*folder.glob("_run.*")]


# catches: a traceback through torch's file writer, with no word on what is left
@pytest.mark.parametrize("kind", ["ppo", pytest.param("sft", marks=pytest.mark.slow)])
def test_a_disk_that_takes_no_more_is_one_line(tmp_path, kind):
    folder = tmp_path / "run"
    child = begun(kind, folder, "full")
    last = ended(child, folder)[-1]
    first = folder / f"checkpoint-{SAVE_STEPS[kind]}"
    assert child.exitcode == 1 and last.startswith("OSError: a file could not be written (")
    assert f"The last whole checkpoint is {first}: " in last
    assert not [*folder.glob("*.partial")]
