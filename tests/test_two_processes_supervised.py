"""SFTTrainer and RewardTrainer on two real processes (gloo), DDP, FSDP2, DeepSpeed ZeRO-2 and
ZeRO-3: one process's numbers, equal ranks, resume, and folders that plain transformers loads."""

import sys

import forks
import pytest
import supervised_worker as worker
import torch
from marks import marked
from ppo_fixtures import need_deepspeed, saved_base
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from worker_runs import everything

from rlhf_nb.base.opened import unwrap
from rlhf_nb.scoring import score_texts

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="torchrun with gloo on one machine")


SLOW, WEEKLY = ("lora-ddp", "plain-fsdp2"), ("plain-zero2", "plain-zero3")


@pytest.fixture(
    scope="module", params=["plain-ddp", *marked("slow", *SLOW), *marked("weekly", *WEEKLY)]
)
def trained(request, tmp_path_factory):
    "A folder in which two processes have trained both kinds of model, and whether with an adapter."
    folder, (kind, name) = tmp_path_factory.mktemp(request.param), request.param.split("-")
    if "zero" in name:
        need_deepspeed()
    saved_base(folder, [*worker.PROMPTS, *worker.ANSWERS, *worker.PAIRS["rejected"]], 32)
    done = forks.run(
        worker.__file__, str(folder), kind, folder=folder, ranks=2, **forks.layout(name)
    )
    assert done.returncode == 0 and f"right: {kind}" in done.stdout, done.stdout[-4000:]
    return folder, kind == "lora"


# catches (with the assertions in the worker: equal ranks, every row read, resumed as
# uninterrupted): a loss divided per rank, a mean of means (of batches, of ranks), lines of a packed
# batch that count as rows, metrics of one rank alone, a new head that ZeRO-3 leaves at random, a rank
# that goes on from another one's losses
@pytest.mark.parametrize("what", ["sft", "packed", "reward"])
def test_two_processes_take_the_step_of_one(trained, what):
    folder, lora = trained
    # packed or not, alone or not: one and the same step
    one = worker.one_step(folder, what.replace("packed", "sft"), 2, lora)
    for two in (
        torch.load(path, weights_only=False) for path in sorted(folder.glob(f"step-{what}-*.pt"))
    ):
        assert torch.equal(two["start"], one["start"])
        assert (one["weights"] - one["start"]).abs().max() > 1e-4
        torch.testing.assert_close(two["weights"], one["weights"], atol=1e-5, rtol=0)
        for ours, theirs in zip(two["told"], one["told"], strict=True):
            assert ours == pytest.approx(theirs, abs=1e-5, rel=1e-5)
    assert {"loss", "eval_loss"} <= {name for log in one["told"] for name in log}


# catches: a prefix of a wrapper in the names, one rank's part saved as the whole, a centre measured
# on weights in parts, or lost
@pytest.mark.parametrize("what", ["sft", "reward"])
def test_what_two_processes_saved_loads_in_one(trained, what):
    folder, lora = trained
    saved = folder / f"saved-{what}"
    plain = dict(sft=AutoModelForCausalLM, reward=AutoModelForSequenceClassification)[what]
    more = {} if what == "sft" else dict(num_labels=1)
    if lora:
        import peft

        plain = dict(
            sft=peft.AutoPeftModelForCausalLM, reward=peft.AutoPeftModelForSequenceClassification
        )[what]
        assert (saved / "adapter_model.safetensors").is_file()
        assert not (saved / "model.safetensors").exists()
    model = plain.from_pretrained(saved, **more).eval()
    tokenizer = AutoTokenizer.from_pretrained(saved)
    assert torch.equal(everything(model), torch.load(folder / f"weights-{what}.pt"))
    if what == "sft":
        return
    from rlhf_nb.training.model_loading import load_scorer

    scorer, references = load_scorer(str(saved)).eval(), worker.SFT.select(range(7))
    assert scorer.config.reward_center != 0
    assert (
        abs(score_texts(scorer, tokenizer, references["prompt"], references["completion"]).mean())
        < 1e-5
    )
    assert lora or unwrap(model).config.reward_center == scorer.config.reward_center
