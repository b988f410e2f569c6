"""Weights in parts, or cast by the layout: precision, ranks that stop at other lengths, and what is
refused: python parts_worker.py FOLDER."""

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import torch
import transformers.training_args
from accelerate.utils import gather_object
from datasets import Dataset
from small_runs import OF_RANKS, TOLD
from worker_runs import DEEPSPEED, FSDP, RANK, STAGE, arguments, leave

from rlhf_nb.trainer import PPOConfig, PPOTrainer
from rlhf_nb.training.folders import check_shared_disk

folder = Path(sys.argv[1])
# without use_cpu, transformers wants to see a GPU first
transformers.training_args.is_torch_bf16_gpu_available = lambda: True
prompts = TOLD[:8]


def make(out: str, bf16: bool = False, world: type | None = None, **changes) -> PPOTrainer:
    settings = OF_RANKS | dict(num_ppo_epochs=2, total_episodes=16, learning_rate=0.0)
    args = arguments(PPOConfig, folder / out, bf16=bf16, **settings | changes)
    data = Dataset.from_dict(dict(prompt=prompts))
    return PPOTrainer(
        args,
        model=str(folder / "base"),
        reward_model=str(folder / "scorer"),
        train_dataset=data,
        eval_dataset=data.select(range(3)),
        environment_factory=world,
    )


class Ends:
    "After one turn on rank 0, after four on rank 1."

    def reset(self) -> None:
        self.left = 1 + 3 * RANK

    def step(self, action: str) -> tuple:
        self.left -= 1
        return "tell", 1.0, not self.left, False, dict(left=self.left)


def turns() -> None:
    "Ranks play other numbers of turns; none waits for ever, and all have the same update."
    trainer = make("turns", world=Ends, response_length=2, learning_rate=1e-2)
    trainer.prepare()
    first = trainer.step(prompts[RANK * 4 : RANK * 4 + 4])
    assert first["turns/per_episode"] == first["turns/return"] == 2.5, first
    seen = trainer.step(prompts[RANK * 4 : RANK * 4 + 4]) | trainer.evaluate()
    assert seen["eval_turns"] >= 1 and seen["objective/kl"] != 0  # under ZeRO-3, of each rank
    known = {k: x for k, x in seen.items() if not k.startswith(("time/", "tokens/per", "eval_"))}
    assert len({str(x) for x in gather_object([known])}) == 1


def uneven(gather: bool) -> tuple[PPOTrainer, torch.Tensor]:
    "Rank 0 stops after one token, rank 1 never; what rank wrote what."
    trainer = make(f"uneven-{gather}", ds3_gather_for_generation=gather, learning_rate=1e-2)
    trainer.prepare()
    trainer.sampling_settings = replace(
        trainer.sampling_settings, stop_ids=tuple(range(64)) if RANK == 0 else ()
    )
    torch.manual_seed(RANK)
    calls, policy = [], trainer.accelerator.unwrap_model(trainer.model).policy
    handle = policy.register_forward_hook(lambda *_: calls.append(1))
    drawn, _ = trainer.sample(
        *(
            trainer.get_train_dataloader().collate_fn(
                [dict(prompt=prompt) for prompt in prompts[RANK : RANK + 3]]
            )[name]
            for name in ("prompt_ids", "prompt_mask")
        )
    )
    handle.remove()
    assert drawn.mask.sum(1).tolist() == [1 if RANK == 0 else 6] * 3
    tried = 6  # with a cache, and each row alone, before the first token
    assert len(calls) == tried + (6 if RANK or not gather else 1), "a rank went ahead"
    torch.manual_seed(RANK)
    metrics = trainer.step(prompts[RANK * 4 : RANK * 4 + 4])
    assert metrics["tokens/response_length"] == 3.5
    asked = trainer.evaluate()  # three rows on two ranks, of other lengths
    return drawn.response_ids, {
        name: value
        for name, value in (metrics | asked).items()
        if not name.startswith(("time/", "tokens/per"))
    }


turns()
if not (FSDP or DEEPSPEED):
    leave("right")
trainer = make("bf16", bf16=True)
try:
    trainer.rollout(prompts[:1])
except RuntimeError as error:
    assert "call trainer.prepare()" in str(error)
else:
    raise AssertionError("a policy sampled that was not sharded yet")
trainer.prepare()
r = trainer.rollout(prompts[RANK * 4 : RANK * 4 + 4])
assert int(r.response_ids.max()) < len(trainer.processing_class)
assert torch.equal(r.logprobs, r.ref_logprobs) and not r.kl.any(), (
    f"a policy differs from its own copy by {(r.logprobs - r.ref_logprobs).abs().max()}"
)
assert r.logprobs.dtype == r.values.dtype == torch.float32 and not torch.equal(
    r.logprobs, r.logprobs.bfloat16().float()
), "log-probs were rounded"
# each rank draws for itself, and the same again for the same update
twice = [trainer.rollout(prompts[:4]).response_ids.tolist() for _ in range(2)]
assert twice[0] == twice[1], "another response for the same prompt, seed and update"
of_ranks = gather_object([twice[0]])
assert of_ranks[0] != of_ranks[1], "two ranks gave the same responses to the same prompts"
plain = None
if not STAGE:  # one engine to a process is enough
    other = make("float32")
    other.prepare()
    plain = other.rollout(prompts[RANK * 4 : RANK * 4 + 4])
assert plain is None or not torch.equal(plain.logprobs[:, :1], r.logprobs[:, :1]), "not bf16"
if STAGE:
    assert (
        {p.dtype for p in trainer.ref_model.parameters()}
        == {p.dtype for p in trainer.reward_model.parameters()}
        == {torch.bfloat16}
    )
metrics = trainer.update(trainer.advantages(trainer.score(r)))
assert metrics["policy/approxkl_avg"] < 1e-8 and abs(metrics["val/ratio"] - 1) < 1e-6, metrics
if STAGE == "3":
    try:
        make("refused", offload_frozen=True)
    except ValueError as error:
        assert "offload_param_device" in str(error)
    else:
        raise AssertionError("offload_frozen had no effect, and nobody said so")
if STAGE != "2":
    whole, parts = uneven(True), uneven(False)
    assert torch.equal(whole[0], parts[0])
    for name, value in whole[1].items():
        assert abs(value - parts[1][name]) < 1e-5, name
here = dict(local_process_index=0, save_strategy="steps")  # on a machine of its own
for out, more, said in (
    (folder, {}, None),
    (folder / f"machine-{RANK}", {}, "which the machines of this run do not share"),
    (folder / f"machine-{RANK}", dict(save_strategy="no"), None),
    (folder, dict(save_on_each_node=True), "Leave save_on_each_node out"),
):
    out.mkdir(exist_ok=True)
    settings = dict(output_dir=out, save_on_each_node=False) | here | more
    try:
        check_shared_disk(SimpleNamespace(**settings))
    except ValueError as error:
        assert said and said in str(error), error
    else:
        assert said is None, said
    assert not [*out.glob(".*")]
leave("right")
