"""PPOTrainer on two real processes (gloo), DDP, FSDP2, DeepSpeed ZeRO-2 and ZeRO-3: equal weights
on both, saving, LoRA, resume, and the numbers of one process on the same rollout."""

import io
import json
import shutil
import sys
from pathlib import Path

import forks
import pandas as pd
import pytest
import torch
from marks import marked
from ppo_fixtures import TOLD, need_deepspeed, saved_base
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf_nb.rollout import Rollout

WORKER = Path(__file__).with_name("ppo_worker.py")
SAYS = dict(
    ddp="DDP (MULTI_CPU)",
    zero2="DeepSpeed ZeRO-2 (DEEPSPEED)",
    zero3="DeepSpeed ZeRO-3 (DEEPSPEED)",
    fsdp2="FSDP2 (FSDP)",
)


def run(folder: Path, kind: str, ranks: int, layout: str = "ddp") -> None:
    env = dict(SAYS=SAYS[layout]) | forks.layout(layout if ranks > 1 else "ddp")
    done = forks.run(WORKER, str(folder), kind, folder=folder, ranks=ranks, **env)
    assert done.returncode == 0 and f"right: {kind}" in done.stdout, done.stdout[-4000:]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Makes, once for each kind of model, a folder in which one process has trained: `alone(kind)`.
    With it every layout is compared."""
    from rlhf_nb.models import scorer_from

    made = {}

    def make(kind: str) -> Path:
        if kind in made:
            return made[kind]
        made[kind] = folder = tmp_path_factory.mktemp(f"alone-{kind}")
        policy = saved_base(folder, TOLD)
        with torch.no_grad():
            # now and then it stops
            policy.gpt_neox.final_layer_norm.bias += 8 * policy.get_output_embeddings().weight[1]
        policy.save_pretrained(folder / "base")
        scorer_from(policy, 3).save_pretrained(folder / "scorer")
        run(folder, kind, 1)
        for name in ("whole", "saved"):
            (folder / name).rename(folder / f"{name}-1")
        return folder

    return make


KINDS = ["plain", "lora", "named-fsdp2"]
SLOW = "named-zero3 grpo plain-zero2 trunk grpo-zero3 away-fsdp2".split()
WEEKLY = "reinforce_pp lora-zero2 away-zero2 grpo-zero2 grpo-fsdp2".split()


@pytest.fixture(scope="module", params=KINDS + marked("slow", *SLOW) + marked("weekly", *WEEKLY))
def both(request, tmp_path_factory, alone):
    "A folder in which one process and two have trained, and the kind of the model."
    folder, (kind, *layout) = tmp_path_factory.mktemp(request.param), request.param.split("-")
    if "zero" in "".join(layout):
        need_deepspeed()
    shutil.copytree(alone(kind), folder, dirs_exist_ok=True)
    run(folder, kind, 2, layout=layout[0] if layout else "ddp")
    return folder, kind


# catches (with the assertions in the worker): ranks that go apart, a save by both ranks at once or
# by a wrapped model, a resume that forgets a rank's random state
@pytest.mark.skipif(sys.platform != "linux", reason="torchrun with gloo on one machine")
def test_fault_13_saving_and_lora_under_two_processes(both):
    folder, kind = both
    names, ids = {path.name for path in (folder / "saved").iterdir()}, torch.arange(3, 12)[None]
    if kind == "lora":
        from peft import AutoPeftModelForCausalLM as Loader

        assert "adapter_model.safetensors" in names and "model.safetensors" not in names
    else:
        Loader = AutoModelForCausalLM
    assert torch.equal(
        Loader.from_pretrained(folder / "saved")(ids).logits,
        torch.load(folder / f"logits-{kind}-2.pt"),
    )
    assert AutoTokenizer.from_pretrained(folder / "saved").pad_token_id == 0
    assert "README.md" in names
    names = {path.name for path in (folder / "whole" / "checkpoint-3").iterdir()}
    assert {*"rng_state_0.pth rng_state_1.pth manifest.json ppo_state.json".split()} <= names
    assert not list((folder / "whole").glob("*.partial"))


# catches: rows written twice or not at all, both ranks drawing the same prompts
@pytest.mark.skipif(sys.platform != "linux", reason="torchrun with gloo on one machine")
def test_rollouts_and_completions_are_written_once(both):
    folder, kind = both
    files = sorted((folder / "whole" / "rollouts").iterdir())
    assert [path.stem for path in files] == [
        f"update-{n:05d}-rank{rank}" for n in range(3) for rank in range(2)
    ]
    prompts = [prompt for path in files for prompt in Rollout.load(path).prompts]
    assert len(prompts) == 24 and len(set(prompts)) == (12 if kind == "grpo" else 24)
    tables = list((folder / "whole" / "completions").glob("*.csv"))
    assert len(tables) == 1 and len(tables[0].read_text().strip().splitlines()) >= 6
    state = json.loads((folder / "whole" / "checkpoint-3" / "trainer_state.json").read_text())
    one = json.loads((folder / "whole-1" / "checkpoint-3" / "trainer_state.json").read_text())
    assert (
        [log["episode"] for log in state["log_history"] if "episode" in log]
        == [log["episode"] for log in one["log_history"] if "episode" in log]
        == [8, 16, 24]
    )


def check_same_numbers(folders: list[Path], kind: str, micro: int = 2) -> None:
    "The update, the metrics and the completions of two ranks, each in its folder, and of one."
    folder = folders[0]
    one, two = (
        torch.load(folder / f"found-{kind}-{n}-{m}.pt", weights_only=False)
        for n, m in ((1, 2), (2, micro))
    )
    assert torch.equal(one["start"], two["start"])
    assert (one["weights"] - one["start"]).abs().max() > 1e-3
    torch.testing.assert_close(two["weights"], one["weights"], atol=1e-5, rtol=0)
    assert two["metrics"] == pytest.approx(one["metrics"], abs=1e-5, rel=1e-5)
    assert len(one["metrics"]) > 15
    tables = [pd.read_csv(io.StringIO(found["table"])) for found in (two, one)]
    pd.testing.assert_frame_equal(*tables, check_exact=False, atol=1e-5, rtol=0)
    assert one["table"].count("tell") == 5
    assert two["looked"] == pytest.approx(one["looked"], abs=1e-5)
    whole = Rollout.load(folder / f"ready-{kind}-1-0-2.safetensors")
    parts = [
        Rollout.load(folders[rank] / f"ready-{kind}-2-{rank}-{micro}.safetensors")
        for rank in range(2)
    ]
    # ranks with other numbers of tokens
    assert {int(part.mask.sum()) for part in parts} != {int(whole.mask.sum()) // 2}
    assert (whole.returns is None) == (kind in ("grpo", "reinforce_pp"))  # of a value model
    for name in ("scores", "rewards", "advantages", *["returns"] * (whole.returns is not None)):
        torch.testing.assert_close(
            torch.cat([getattr(part, name) for part in parts]),
            getattr(whole, name),
            atol=1e-5,
            rtol=0,
        )


# catches: a loss divided per rank, whitening per rank, running moments per rank, a metric of one
# rank alone, a gradient averaged once too often, a row of an evaluation completed twice or not at
# all
@pytest.mark.skipif(sys.platform != "linux", reason="torchrun with gloo on one machine")
@pytest.mark.parametrize("micro", [2, 1])
def test_two_processes_compute_what_one_does(both, micro):
    folder, kind = both
    if micro != 2 and folder.name != "plain0":
        pytest.skip("one kind of model is enough for half the micro-batch")
    check_same_numbers([folder, folder], kind, micro)
