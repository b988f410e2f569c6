"""One of two ranks dies by SIGKILL: the other ends soon and says so, and the run goes on from its
last checkpoint to the weights of a run that was left alone."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from rlhf_nb.models import tiny_policy, train_tokenizer

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="torchrun with gloo on one machine")
WORKER = str(Path(__file__).with_name("killed_worker.py"))
ENV = dict(os.environ, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", ACCELERATE_USE_CPU="true")


def by_torchrun(folder: Path, out: str, moment: str) -> tuple[list[int], str, float]:
    "Exit codes, everything that was said, and when the last process ended."
    (folder / out).mkdir(exist_ok=True)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc_per_node",
            "2",
            WORKER,
            str(folder),
            out,
            moment,
        ],
        capture_output=True,
        text=True,
        timeout=900,
        env=ENV,
    )
    return [done.returncode], done.stderr, time.time()


def by_hand(folder: Path, out: str, moment: str) -> tuple[list[int], str, float]:
    """The same two processes with nobody above them, as two terminals or a batch system would start
    them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [
        dict(
            ENV,
            RANK=str(r),
            LOCAL_RANK=str(r),
            WORLD_SIZE="2",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
        )
        for r in range(2)
    ]
    files = [open(folder / f"said-{r}", "w") for r in range(2)]
    both = [
        subprocess.Popen(
            [sys.executable, WORKER, str(folder), out, moment], stdout=file, stderr=file, env=env
        )
        for env, file in zip(ranks, files)
    ]
    codes = [process.wait(300) for process in both]
    for file in files:
        file.close()
    return codes, "".join((folder / f"said-{r}").read_text() for r in range(2)), time.time()


# catches: a rank that waits for ever (or for gloo's half hour) for one that is gone, a checkpoint
# that one rank's death tears, a state that the ranks do not share after it
def test_a_rank_that_dies_ends_the_run_and_the_run_goes_on(tmp_path):
    tokenizer = train_tokenizer([f"tell {i} of {chr(97 + i % 20)}" for i in range(24)])
    tiny_policy(
        tokenizer,
        0,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=16,
    ).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    codes, said, _ = by_torchrun(tmp_path, "alone", "never")
    assert codes == [0], said[-3000:]
    for launch, moment, kept, words in (
        (by_torchrun, "update-3", ["checkpoint-2"], ("SIGKILL", "local_rank: 1")),
        (by_hand, "rollout-4", ["checkpoint-2", "checkpoint-4"], ("onnection",)),
    ):
        codes, said, ended = launch(tmp_path, "killed", moment)
        assert 0 not in codes and (launch is by_torchrun or codes[1] == -9), (
            f"{moment}: somebody came to an end as if nothing had been, {codes}"
        )
        assert ended - float((tmp_path / "killed" / f"killed-{moment}").read_text()) < 60, (
            f"{moment}: the other rank went on waiting"
        )
        assert all(word in said for word in words), said[-3000:]
        assert sorted(path.name for path in (tmp_path / "killed").glob("checkpoint-*")) == kept
    codes, said, _ = by_torchrun(tmp_path, "killed", "never")
    assert codes == [0], said[-3000:]
    one, two = (torch.load(tmp_path / out / "weights.pt") for out in ("alone", "killed"))
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    told = [json.loads((tmp_path / out / "done.json").read_text()) for out in ("alone", "killed")]
    assert told[0] == told[1] and len(told[0]) >= 6
