"""Both the two processes and, alone, the one that they are compared with:
python ppo_worker.py FOLDER KIND."""

import os
import sys
from pathlib import Path

import torch
from datasets import Dataset
from small_runs import OF_RANKS, SAVED, TOLD, likes_a, untimed
from worker_runs import DEEPSPEED, FSDP, RANK, RANKS, adapter, arguments, everything, leave

from rlhf_nb.rollout import Rollout
from rlhf_nb.trainer import PPOConfig, PPOTrainer
from rlhf_nb.training.model_loading import load_tokenizer
from rlhf_nb.training.pretraining import pretrain_values

folder, kind = Path(sys.argv[1]), sys.argv[2]
METHODS = dict(  # kinds without a value model
    grpo=dict(
        advantage_estimator="grpo",
        num_generations=2,
        kl_in="loss",
        kl_estimator="k3",
        loss_aggregation="sequence_mean",
    ),
    reinforce_pp=dict(advantage_estimator="reinforce_pp", loss_aggregation="constant"),
)
adapters = dict(peft_config=adapter("CAUSAL_LM"), value_peft_config=adapter("SEQ_CLS"))


def make(out, **changes):
    settings = OF_RANKS | SAVED
    settings |= dict(
        gradient_accumulation_steps=4 // RANKS,
        num_mini_batches=2,
        num_ppo_epochs=2,
        total_episodes=24,
        num_sample_generations=1,
        share_value_trunk=kind == "trunk",
        offload_frozen=kind == "away",
    )
    data = Dataset.from_dict(dict(prompt=TOLD))
    return PPOTrainer(
        arguments(PPOConfig, folder / out, **settings | METHODS.get(kind, {}) | changes),
        load_tokenizer(str(folder / "base")),
        str(folder / "base"),
        # Under ZeRO-3 nothing can be copied: these kinds load every model by its name.
        reward_model=str(folder / "scorer") if kind in ("named", "away") else likes_a,
        train_dataset=data,
        eval_dataset=data.select(range(5)),
        **(adapters if kind == "lora" else {}),
    )


def told(trainer):
    return [untimed(log) for log in trainer.state.log_history]


whole = make("whole")
start = everything(whole.model)
whole.train()
whole.save_model(str(folder / "saved"))
assert whole.accelerator.num_processes == RANKS and whole.state.global_step == 3
assert whole.is_deepspeed_enabled == DEEPSPEED
assert (
    f"; {RANKS} processes, {os.environ['SAYS']}, cpu, float32"
    if RANKS > 1
    else "; one process, cpu, float32"
) in whole.describe()
assert ("in host memory" in whole.describe()) == (kind == "away")
# Nobody named the layers: the pair tells Accelerate which they are, and each is its own group.
if FSDP:
    from torch.distributed.fsdp import FSDPModule

    assert {
        type(m).__mro__[2].__name__
        for m in whole.model_wrapped.modules()
        if isinstance(m, FSDPModule)
    } == {"PolicyAndValue", "GPTNeoXLayer"}
    # In parts as well, and nothing stayed whole after it was used.
    for frozen in (whole.ref_model, *whole.judges.models):
        assert all(hasattr(p, "full_tensor") for p in frozen.parameters())
        assert (
            0.45
            < sum(p.to_local().nbytes for p in frozen.parameters())
            / sum(p.nbytes for p in frozen.parameters())
            < 0.55
        )
        assert {
            type(m).__mro__[2].__name__ for m in frozen.modules() if isinstance(m, FSDPModule)
        } == {"GPTNeoXLayer"}
    lies = lambda model: {hasattr(p.data, "full_tensor") for p in model.layers.parameters()}
    pair = whole.pair
    with whole.layout.sampling(pair.policy, pair.value, whole.model_wrapped):
        assert lies(whole.model.policy.base_model) == {False}
        assert pair.value is None or lies(whole.model.value.base_model) == {True}
# A warm-up moves the value model alone, whatever the layout (of one process: test_trained.py).
if kind not in METHODS and RANKS > 1:
    settings = dict(value_warmup_updates=2, weight_decay=0.1, save_strategy="no")
    if whole.is_deepspeed_enabled:
        try:
            raise AssertionError(make("warm", **settings))
        except ValueError as error:
            assert "DeepSpeed steps all weights together" in str(error)
        settings["weight_decay"] = 0.0
    warm = make("warm", **settings)
    pair = warm.pair
    before = [everything(model) for model in (pair.policy, pair.value)]
    warm.step()
    pair = warm.pair
    after = [everything(model) for model in (pair.policy, pair.value)]
    assert [torch.equal(a, b) for a, b in zip(before, after)] == [True, False]
assert (everything(whole.model) - start).abs().max() > 1e-3
if RANKS > 1:
    for other in whole.accelerator.gather(everything(whole.model)[None]):
        assert torch.equal(other, everything(whole.model)), "the RANKS went apart"
    again = make("again")
    again.train(resume_from_checkpoint=str(folder / "whole" / "checkpoint-2"))
    assert torch.equal(everything(again.model), everything(whole.model)) and told(again) == told(
        whole
    ), "resumed is another run"

pair = whole.pair
with torch.no_grad(), whole.layout.sampling(pair.policy, pair.value, whole.model_wrapped):
    logits = whole.model.policy.eval()(torch.arange(3, 12)[None]).logits
if RANK == 0:
    torch.save(logits, folder / f"logits-{kind}-{RANKS}.pt")

# The same rollout, whatever the number of processes: the numbers of the update must be the same.
# Half the micro-batch as well, for one kind of model.
half = kind == "plain" and RANKS > 1 and os.environ["SAYS"].startswith("DDP")
for micro in (2, 1) if half else (2,):
    learning = dict(optim="sgd", learning_rate=0.1)
    sizes = dict(
        num_mini_batches=1,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=8 // RANKS // micro,
    )
    objective = dict(
        kl_coef=0.3, entropy_coef=0.1, normalize_scores=True, whiten_rewards=kind not in METHODS
    )
    alone = make(f"alone-{micro}", save_strategy="no", **learning, **sizes, **objective)
    if RANKS == 1 and micro == 2:
        alone.rollout(TOLD[: 8 // alone.args.num_generations]).save(folder / "replay.safetensors")
    mine = range(RANK * 8 // RANKS, (RANK + 1) * 8 // RANKS)
    r = Rollout.load(folder / "replay.safetensors").select(mine)
    ready = alone.advantages(alone.score(r))
    metrics = alone.update(ready)
    ready.save(folder / f"ready-{kind}-{RANKS}-{RANK}-{micro}.safetensors")
    if kind not in METHODS:  # a value model fitted to 16 saved episodes in one step
        kept = dict(value_pretrain_rollouts=str(folder / ("whole" if RANKS == 1 else "whole-1")))
        sizes |= dict(gradient_accumulation_steps=16 // RANKS // micro)
        fitted = make(
            "fitted", save_strategy="no", value_pretrain_epochs=1, **learning | sizes | kept
        )
        policy = everything(fitted.policy)
        pretrain_values(fitted)
        assert torch.equal(policy, everything(fitted.policy))
        metrics |= {k: x for k, x in fitted.state.log_history[0].items() if "pretrain/" in k}
        assert metrics["pretrain/explained_before"] != metrics["pretrain/explained_after"]
    looked = alone.evaluate()  # five rows, which do not divide
    weights = everything(alone.model)
    if RANK == 0:
        table = (folder / f"alone-{micro}" / "completions" / "update-00000-eval.csv").read_text()
        torch.save(
            dict(weights=weights, start=start, metrics=metrics, looked=looked, table=table),
            folder / f"found-{kind}-{RANKS}-{micro}.pt",
        )
leave(f"right: {kind}")
