"""Bytes that `moved` of the lab 26_tldr_pythia says an update moves, against what two processes
exchange."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import forks
import pytest
from ppo_fixtures import need_deepspeed, saved_base
from small_runs import TOLD
from test_plans import page
from transformers import AutoConfig

from rlhf_nb.diagnose.memory import MemoryPlan

WORKER = Path(__file__).with_name("network_worker.py")


# catches: micro-batches that are exchanged and not counted, or the reverse; a model left out; half
# of a ring; gathering for the rollout, for scoring or for the backward pass forgotten
@pytest.mark.skipif(sys.platform != "linux", reason="gloo on one machine")
@pytest.mark.slow
@pytest.mark.parametrize("layout", ["ddp", "zero2", "fsdp2"])
def test_an_update_sends_what_the_formula_says(layout, tmp_path):
    if layout == "zero2":
        need_deepspeed()
    saved_base(tmp_path, TOLD, hidden_size=32, num_hidden_layers=2)
    done = forks.run(WORKER, str(tmp_path), folder=tmp_path, ranks=2, **forks.layout(layout))
    assert done.returncode == 0, done.stdout[-4000:]
    seen = json.loads((tmp_path / "numbers.json").read_text())
    setup = MemoryPlan(
        AutoConfig.from_pretrained(tmp_path / "base"),
        AutoConfig.from_pretrained(tmp_path / "base"),
        layout=layout,
        num_processes=2,
        prompt_length=8,
        response_length=6,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
        num_mini_batches=2,
        local_rollout_forward_batch_size=4,
        precision="float32",
    )
    epochs, half = 3, 1 / 2  # each of two gathers the other's half
    steps = epochs * setup.num_mini_batches
    # DeepSpeed sums the gradients of every micro-batch, on each process: twice as far
    sums = dict(ddp=2 * steps, zero2=2 * steps * setup.micro_batches, fsdp2=steps)[layout]
    gradients = half * 4 * sums * sum(model.trained for model in setup.trained)
    # without a GPU, FSDP2 adds up everywhere and then keeps its part: here it counts as scattered
    twice = 1 if layout == "fsdp2" else 2
    close = pytest.approx if layout != "fsdp2" else lambda x: pytest.approx(x, rel=0.02)  # padding
    assert twice * half * 4 * seen["gloo:all_reduce"] == close(gradients)
    others = sum(page.moved(setup, epochs).values()) - gradients
    assert half * 4 * seen.get("gloo:all_gather", 0) == close(others)
