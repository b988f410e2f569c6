"""One of two ranks dies by SIGKILL: the other ends soon and says so, and the run goes on from its
last checkpoint to the weights of a run that was left alone."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import forks
import pytest
import torch
from marks import marked
from ppo_fixtures import TOLD, saved_base

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="torchrun with gloo on one machine")
WORKER = str(Path(__file__).with_name("killed_worker.py"))
CPU = dict(ACCELERATE_USE_CPU="true")


def by_torchrun(folder: Path, out: str, moment: str) -> tuple[list[int], str]:
    "Exit codes, and everything that was written to stderr."
    words = ["--standalone", "--nproc_per_node", "2", WORKER, str(folder), out, moment]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *words],
        capture_output=True,
        text=True,
        timeout=900,
        env=os.environ | CPU | dict(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES=""),
    )
    return [done.returncode], done.stderr


def by_hand(folder: Path, out: str, moment: str) -> tuple[list[int], str]:
    "The same two processes with nobody above them, as two terminals would start them."
    done = forks.run(WORKER, str(folder), out, moment, folder=folder, ranks=2, **CPU)
    return done.args, done.stdout


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    "A folder with the models, and a run that was left alone."
    folder = tmp_path_factory.mktemp("killed")
    saved_base(folder, TOLD)
    (folder / "alone").mkdir()
    codes, said = by_hand(folder, "alone", "never")
    assert codes == [0, 0], said[-3000:]
    return folder


TORCHRUN = (by_torchrun, "update-3", ["checkpoint-2"], ("SIGKILL", "local_rank: 1"))
LOST = ("rank 0 of 2 lost the others after step", "The last whole checkpoint is")
BY_HAND = (by_hand, "rollout-4", ["checkpoint-2", "checkpoint-4"], LOST)


# catches: a rank that waits for ever (or for gloo's half hour) for one that is gone, a checkpoint
# that one rank's death tears, an error that does not say what happened and what is safe, a state that the ranks do not share after it
@pytest.mark.slow
@pytest.mark.parametrize(("out", "kills"), [("twice", [TORCHRUN, BY_HAND]), ("turns", [BY_HAND])])
def test_a_rank_that_dies_ends_the_run_and_the_run_goes_on(alone, out, kills):
    (alone / out).mkdir()
    whole = "alone"
    if out == "turns":
        whole = "whole-turns"
        (alone / whole).mkdir()
        assert by_hand(alone, whole, "never")[0] == [0, 0]
    for launch, moment, kept, words in kills:
        codes, said = launch(alone, out, moment)
        ended = time.time()
        assert 0 not in codes and (launch is by_torchrun or codes[1] == -9), (
            f"{moment}: somebody came to an end as if nothing had been, {codes}"
        )
        assert ended - float((alone / out / f"killed-{moment}").read_text()) < 60, (
            f"{moment}: the other rank went on waiting"
        )
        assert all(word in said for word in words), said[-3000:]
        assert sorted(path.name for path in (alone / out).glob("checkpoint-*")) == kept
    codes, said = by_hand(alone, out, "never")
    assert codes == [0, 0], said[-3000:]
    one, two = (torch.load(alone / name / "weights.pt") for name in (whole, out))
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    told = [json.loads((alone / name / "done.json").read_text()) for name in (whole, out)]
    assert told[0] == told[1] and len(told[0]) >= 6


# catches: a signal to one rank that the others wait for, and a checkpoint that wants as many ranks
@pytest.mark.parametrize("kind", ["sft", *marked("slow", "ppo")])
def test_a_signal_to_one_rank_stops_all_and_one_process_goes_on(tmp_path, kind):
    worker, folder = Path(WORKER).with_name("stopped_worker.py"), tmp_path / "run"
    done = forks.run(worker, str(folder), kind, "stop", folder=tmp_path, ranks=2, **CPU)
    assert done.args == [143, 143], done.stdout[-3000:]
    assert "SIGTERM: stopped after step 3. The last whole checkpoint is" in done.stdout
    assert [path.name for path in folder.glob("checkpoint-*")] == ["checkpoint-3"]
    done = forks.run(worker, str(folder), kind, "never", folder=tmp_path, ranks=1, **CPU)
    assert done.args == [0], done.stdout[-3000:]
    told = json.loads((folder / "done.json").read_text())
    assert told["steps"] == [1, 2, 3, 4, 5]
    assert "world_size 1 (was 2); not bit for bit" in told["changes"]["after step 3"]
