"""PPOTrainer on two processes whose weights lie in parts or are cast: reference and policy in one
precision, sampling that never gathers a model, what is refused."""

import sys
from pathlib import Path

import forks
import pytest
from marks import marked
from ppo_fixtures import need_deepspeed, saved_base
from small_runs import TOLD

WORKER = Path(__file__).with_name("parts_worker.py")


# catches: a reference in float32 beside a policy in bf16, log-probs that FSDP2 rounds on their way
# out, a rank that stops early, or plays fewer turns, and leaves the others waiting for its parts, an
# offload that is asked for and not done, ids without a token that are drawn, machines that write parts of a checkpoint on their own disks
@pytest.mark.skipif(sys.platform != "linux", reason="torchrun with gloo on one machine")
@pytest.mark.parametrize("layout", ["fsdp2", *marked("slow", "ddp", "zero2", "zero3")])
def test_weights_in_parts_and_their_precision(layout, tmp_path):
    if "zero" in layout:
        need_deepspeed()
    policy = saved_base(tmp_path, TOLD, positions=32, num_hidden_layers=2)
    policy.resize_token_embeddings(policy.config.vocab_size + 300, mean_resizing=False)
    policy.save_pretrained(tmp_path / "base")  # more ids than the tokenizer has tokens
    done = forks.run(WORKER, str(tmp_path), folder=tmp_path, ranks=2, **forks.layout(layout))
    assert done.returncode == 0 and "right" in done.stdout, done.stdout[-4000:]
