"""PPOTrainer on two real processes (gloo), DDP, FSDP2, DeepSpeed ZeRO-2 and ZeRO-3: equal weights
on both, saving, LoRA, resume, and the numbers of one process on the same rollout."""

import io
import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pandas as pd
import pytest
import torch
from ppo_fixtures import need_deepspeed
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf_nb.rollout import Rollout

WORKER = textwrap.dedent(
    """
    "Both the two processes and, alone, the one that they are compared with: python worker.py FOLDER KIND."
    import contextlib, json, os, sys, time
    from pathlib import Path
    import torch
    from accelerate import PartialState
    from accelerate.utils import DistributedType
    from datasets import Dataset
    from peft import LoraConfig
    from rlhf_nb.models import load_policy, load_tokenizer
    from rlhf_nb.rollout import Rollout
    from rlhf_nb.trainer import PPOConfig, PPOTrainer

    folder, kind, fsdp = Path(sys.argv[1]), sys.argv[2], "ACCELERATE_USE_FSDP" in os.environ
    ranks, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    lora = lambda task: LoraConfig(r=2, target_modules=["query_key_value", "dense_h_to_4h"], task_type=task)
    parts = dict(plain={}, lora=dict(peft_config=lora("CAUSAL_LM"), value_peft_config=lora("SEQ_CLS")), trunk={},
                 named={}, away={})[kind]  # the reward model comes by its name too: under ZeRO-3 nothing can be copied, so reference and value model are loaded once more
    prompts = [f"tell {i} of {chr(97 + i % 20)}" for i in range(24)]
    likes_a = lambda prompts, responses, **columns: [response.count("a") - 0.1 * len(response) for response in responses]

    def make(out, **changes):
        device = dict(use_cpu=False, ddp_backend="gloo") if "ACCELERATE_USE_DEEPSPEED" in os.environ else dict(use_cpu=True)  # use_cpu would turn DeepSpeed off, without a word
        settings = dict(**device, report_to="none", disable_tqdm=True, logging_steps=1, per_device_train_batch_size=2, gradient_accumulation_steps=4 // ranks, num_mini_batches=2, total_episodes=24,
                        response_length=6, temperature=1.0, learning_rate=1e-2, num_sample_generations=1, save_rollouts=True, save_strategy="steps", save_steps=1, seed=5, share_value_trunk=kind == "trunk", offload_frozen=kind == "away")
        data, tests = Dataset.from_dict(dict(prompt=prompts)), Dataset.from_dict(dict(prompt=prompts[:5]))
        args = PPOConfig(str(folder / out), **settings | changes)
        if fsdp:  # Accelerate takes FSDP for a matter of GPUs, and gives DDP on a CPU: told that these are some
            args.device
            PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        return PPOTrainer(args, load_tokenizer(str(folder / "base")), str(folder / "base"), reward_model=str(folder / "scorer") if kind in ("named", "away") else likes_a, train_dataset=data, eval_dataset=tests, **parts)

    def gathered(model):
        if os.environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE") != "3": return contextlib.nullcontext()
        import deepspeed
        return deepspeed.zero.GatheredParameters(list(model.parameters()))
    def everything(trainer):
        whole = lambda p: p.full_tensor() if hasattr(p, "full_tensor") else p
        with gathered(trainer.model): return torch.cat([whole(p.detach()).flatten() for p in trainer.model.parameters()])
    def told(trainer): return [{k: v for k, v in log.items() if not k.startswith(("time/", "tokens/per", "eps", "train_"))} for log in trainer.state.log_history]

    whole = make("whole")
    whole.train()
    whole.save_model(str(folder / "saved"))
    assert whole.accelerator.num_processes == ranks and whole.state.global_step == 3
    assert whole.is_deepspeed_enabled == ("ACCELERATE_USE_DEEPSPEED" in os.environ) and (f"; {ranks} processes, {os.environ['SAYS']}, cpu, float32" if ranks > 1 else "; one process, cpu, float32") in whole.describe()
    assert ("in host memory" in whole.describe()) == (kind == "away")
    if fsdp:  # nobody named the layers: the pair tells Accelerate which they are, and each is a group of its own
        from torch.distributed.fsdp import FSDPModule
        assert {type(m).__mro__[2].__name__ for m in whole.model_wrapped.modules() if isinstance(m, FSDPModule)} == {"PolicyAndValue", "GPTNeoXLayer"}
        for frozen in (whole.ref_model, whole.reward_model):  # in parts as well, and nothing stayed whole after it was asked
            assert all(hasattr(p, "full_tensor") for p in frozen.parameters())
            assert 0.45 < sum(p.to_local().nbytes for p in frozen.parameters()) / sum(p.nbytes for p in frozen.parameters()) < 0.55
            assert {type(m).__mro__[2].__name__ for m in frozen.modules() if isinstance(m, FSDPModule)} == {"GPTNeoXLayer"}
        lies = lambda model: {hasattr(p.data, "full_tensor") for p in model.layers.parameters()}
        with whole._writing(): assert lies(whole.model.policy.base_model) == {False} and lies(whole.model.value.base_model) == {True}
    start = everything(make("unused"))
    assert (everything(whole) - start).abs().max() > 1e-3
    if ranks > 1:
        for other in whole.accelerator.gather(everything(whole)[None]): assert torch.equal(other, everything(whole)), "the ranks went apart"
    again = make("again")
    again.train(resume_from_checkpoint=str(folder / "whole" / "checkpoint-1"))
    assert torch.equal(everything(again), everything(whole)) and told(again) == told(whole), "resumed is another run"

    # The same rollout, whatever the number of processes: the numbers of the update must be the same.
    alone = make("alone", optim="sgd", learning_rate=0.1, num_mini_batches=1, num_ppo_epochs=2, kl_coef=0.3, entropy_coef=0.1, normalize_scores=True, whiten_rewards=True, save_strategy="no",
                 per_device_train_batch_size=int(os.environ.get("MICRO", 2)), gradient_accumulation_steps=8 // ranks // int(os.environ.get("MICRO", 2)))
    if ranks == 1: alone.rollout(prompts[:8]).save(folder / "replay.safetensors")
    r = Rollout.load(folder / "replay.safetensors").select(range(rank * 8 // ranks, (rank + 1) * 8 // ranks))
    ready = alone.advantages(alone.score(r))
    metrics = alone.update(ready)
    ready.save(folder / f"ready-{kind}-{ranks}-{rank}-{os.environ.get('MICRO', 2)}.safetensors")
    looked = alone.evaluate()  # five rows, which do not divide
    table = (folder / "alone" / "completions" / "update-00000.csv").read_text() if rank == 0 else ""
    found = dict(weights=everything(alone), start=start, metrics=metrics, looked=looked, table=table)
    with torch.no_grad(), whole._gathered(): logits = whole.model.policy.eval()(torch.arange(3, 12)[None]).logits
    if rank == 0:
        torch.save(found, folder / f"found-{kind}-{ranks}-{os.environ.get('MICRO', 2)}.pt")
        torch.save(logits, folder / f"logits-{kind}-{ranks}.pt")
        print("right:", kind, flush=True)
    if ranks > 1:
        whole.accelerator.wait_for_everyone()
        os._exit(0)  # all is asserted; gloo's threads now and then abort a process that takes itself apart
    """
)


DEEPSPEED = dict(ACCELERATE_USE_DEEPSPEED="true", DS_ACCELERATOR="cpu")
SAYS = dict(
    ddp="DDP (MULTI_CPU)",
    zero2="DeepSpeed ZeRO-2 (DEEPSPEED)",
    zero3="DeepSpeed ZeRO-3 (DEEPSPEED)",
    fsdp2="FSDP2 (FSDP)",
)
LAYOUTS = dict(
    ddp=dict(ACCELERATE_USE_CPU="true"),
    zero2=DEEPSPEED | dict(ACCELERATE_DEEPSPEED_ZERO_STAGE="2"),
    fsdp2=dict(
        ACCELERATE_USE_FSDP="true",
        FSDP_VERSION="2",
        FSDP_AUTO_WRAP_POLICY="TRANSFORMER_BASED_WRAP",
        FSDP_STATE_DICT_TYPE="FULL_STATE_DICT",
        FSDP_RESHARD_AFTER_FORWARD="true",
    ),
    zero3=DEEPSPEED
    | dict(
        ACCELERATE_DEEPSPEED_ZERO_STAGE="3",
        ACCELERATE_DEEPSPEED_ZERO3_INIT="true",
        ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL="true",
    ),
)


def run(folder: Path, kind: str, ranks: int, micro: int = 2, layout: str = "ddp") -> None:
    (folder / "worker.py").write_text(WORKER)
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
        if ranks > 1
        else []
    )
    env = (
        dict(
            os.environ,
            OMP_NUM_THREADS="1",
            CUDA_VISIBLE_DEVICES="",
            MICRO=str(micro),
            SAYS=SAYS[layout],
        )
        | LAYOUTS[layout if ranks > 1 else "ddp"]
    )
    done = subprocess.run(
        [sys.executable, *launcher, str(folder / "worker.py"), str(folder), kind],
        capture_output=True,
        text=True,
        timeout=900,
        env=env,
    )
    assert done.returncode == 0 and f"right: {kind}" in done.stdout, done.stderr[-4000:]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Makes, once for each kind of model, a folder in which one process has trained: `alone(kind)`.
    With it every layout is compared."""
    from rlhf_nb.models import scorer_from, tiny_policy, train_tokenizer

    made = {}

    def make(kind: str) -> Path:
        if kind in made:
            return made[kind]
        made[kind] = folder = tmp_path_factory.mktemp(f"alone-{kind}")
        tokenizer = train_tokenizer([f"tell {i} of {chr(97 + i % 20)}" for i in range(24)])
        policy = tiny_policy(
            tokenizer,
            0,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=16,
        )
        with torch.no_grad():
            policy.gpt_neox.final_layer_norm.bias += (
                8 * policy.get_output_embeddings().weight[1]
            )  # now and then it stops
        policy.save_pretrained(folder / "base")
        scorer_from(policy, 3).save_pretrained(folder / "scorer")
        tokenizer.save_pretrained(folder / "base")
        run(folder, kind, 1)
        for name in ("whole", "again", "saved"):
            (folder / name).rename(folder / f"{name}-1")
        return folder

    return make


@pytest.fixture(
    scope="module",
    params=[
        "plain",
        "lora",
        "trunk",
        "plain-zero2",
        "lora-zero2",
        "named-zero3",
        "named-fsdp2",
        "away-zero2",
        "away-fsdp2",
    ],
)
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
    assert (
        AutoTokenizer.from_pretrained(folder / "saved").pad_token_id == 0 and "README.md" in names
    )
    names = {path.name for path in (folder / "whole" / "checkpoint-3").iterdir()}
    assert {
        "rng_state_0.pth",
        "rng_state_1.pth",
        "manifest.json",
        "ppo_state.json",
    } <= names and not list((folder / "whole").glob("*.partial"))


# catches: rows written twice or not at all, both ranks drawing the same prompts
@pytest.mark.skipif(sys.platform != "linux", reason="torchrun with gloo on one machine")
def test_rollouts_and_completions_are_written_once(both):
    folder, _ = both
    files = sorted((folder / "whole" / "rollouts").iterdir())
    assert [path.stem for path in files] == [
        f"update-{n:05d}-rank{rank}" for n in range(3) for rank in range(2)
    ]
    prompts = [prompt for path in files for prompt in Rollout.load(path).prompts]
    assert len(prompts) == 24 and len(set(prompts)) == 24
    tables = list((folder / "whole" / "completions").glob("*.csv"))
    assert len(tables) == 1 and len(tables[0].read_text().strip().splitlines()) >= 6
    state = json.loads((folder / "whole" / "checkpoint-3" / "trainer_state.json").read_text())
    one = json.loads((folder / "whole-1" / "checkpoint-3" / "trainer_state.json").read_text())
    assert (
        [log["episode"] for log in state["log_history"] if "episode" in log]
        == [log["episode"] for log in one["log_history"] if "episode" in log]
        == [8, 16, 24]
    )


# catches: a loss divided per rank, whitening per rank, running moments per rank, a metric of one
# rank alone, a gradient averaged once too often, a row of an evaluation completed twice or not at
# all
@pytest.mark.skipif(sys.platform != "linux", reason="torchrun with gloo on one machine")
@pytest.mark.parametrize("micro", [2, 1])
def test_two_processes_compute_what_one_does(both, micro):
    folder, kind = both
    if micro != 2:
        if folder.name != "plain0":
            pytest.skip("one kind of model is enough for half the micro-batch")
        for name in ("whole", "again"):
            (folder / name).rename(folder / f"{name}-2")
        run(folder, kind, 2, micro)
    one, two = (
        torch.load(folder / f"found-{kind}-{n}-{m}.pt", weights_only=False)
        for n, m in ((1, 2), (2, micro))
    )
    assert (
        torch.equal(one["start"], two["start"])
        and (one["weights"] - one["start"]).abs().max() > 1e-3
    )
    torch.testing.assert_close(two["weights"], one["weights"], atol=1e-5, rtol=0)
    assert (
        two["metrics"] == pytest.approx(one["metrics"], abs=1e-5, rel=1e-5)
        and len(one["metrics"]) > 15
    )
    tables = [pd.read_csv(io.StringIO(found["table"])) for found in (two, one)]
    pd.testing.assert_frame_equal(*tables, check_exact=False, atol=1e-5, rtol=0)
    assert one["table"].count("tell") == 5 and two["looked"] == pytest.approx(
        one["looked"], abs=1e-5
    )
    whole = Rollout.load(folder / f"ready-{kind}-1-0-2.safetensors")
    parts = [
        Rollout.load(folder / f"ready-{kind}-2-{rank}-{micro}.safetensors") for rank in range(2)
    ]
    assert {int(part.mask.sum()) for part in parts} != {
        int(whole.mask.sum()) // 2
    }  # ranks with other numbers of tokens
    for name in ("scores", "rewards", "advantages", "returns"):
        torch.testing.assert_close(
            torch.cat([getattr(part, name) for part in parts]),
            getattr(whole, name),
            atol=1e-5,
            rtol=0,
        )
