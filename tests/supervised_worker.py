"""SFT and reward model as a script would train them, on as many processes as the launcher starts:
python supervised_worker.py FOLDER KIND."""

import sys
from collections import Counter
from pathlib import Path

import torch
from datasets import Dataset
from worker_runs import DEEPSPEED, FSDP, RANK, RANKS, adapter, arguments, everything, leave

# of several lengths: ranks with other numbers of tokens
ANSWERS = [f"{'a b ' * (i % 5)}c {i}" for i in range(22)]
PROMPTS = [f"{'so ' * (i % 4)}tell {i}" for i in range(22)]
SFT = Dataset.from_dict(dict(prompt=PROMPTS, completion=ANSWERS))
PAIRS = Dataset.from_dict(
    dict(
        prompt=PROMPTS,
        chosen=ANSWERS,
        rejected=[f"{'d ' * (i % 3)}e" for i in range(22)],
        margin=[0.1 * (i % 3) for i in range(22)],
    )
)


def make(folder: Path, what: str, out: str, data: Dataset, lora=False, dropout=0.0, **changes):
    "A trainer of the one kind or the other; models by name, as the command line's user gives them."
    from rlhf_nb.reward import RewardConfig, RewardTrainer
    from rlhf_nb.sft import SFTConfig, SFTTrainer

    config, trainer = (RewardConfig, RewardTrainer) if what == "reward" else (SFTConfig, SFTTrainer)
    if what == "packed":
        changes["packing"] = True
    settings = dict(
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4 // RANKS,
        max_steps=6,
        save_steps=4,
        learning_rate=1e-2,
        seed=5,
    )
    args = arguments(config, folder / out, **settings | changes)
    parts = dict(peft_config=adapter(lora_dropout=dropout)) if lora else {}
    return trainer(str(folder / "base"), args, data, data.select(range(5)), **parts)


def watched(trainer) -> list[tuple]:
    "Every training row that this rank reads from now on."
    rows, collate = [], trainer.data_collator

    def watch(batch):
        rows.extend(tuple(row.get("input_ids") or row["chosen_ids"]) for row in batch)
        return collate(batch)

    trainer.data_collator = watch
    return rows


def told(trainer) -> list[dict]:
    "What was logged, but for the times."
    return [
        {
            k: v
            for k, v in log.items()
            if not k.endswith(("_runtime", "_per_second"))
            and not k.startswith(("train_", "total_flos"))
        }
        for log in trainer.state.log_history
    ]


def one_step(folder: Path, what: str, micro: int, lora: bool) -> dict:
    "The same eight rows for any number of processes: weights, logs, what five rows measure."
    trainer = make(
        folder,
        what,
        f"step-{what}",
        (PAIRS if what == "reward" else SFT).select(range(8, 16)),
        lora,
        optim="sgd",
        learning_rate=0.1,
        max_steps=1,
        save_strategy="no",
        per_device_train_batch_size=micro,
        per_device_eval_batch_size=micro if RANKS > 1 else 8,
        gradient_accumulation_steps=8 // RANKS // micro,
        train_sampling_strategy="sequential",
        **(dict(center_rewards_coefficient=0.1) if what == "reward" else {}),
    )
    start = everything(trainer.model)
    trainer.train()
    trainer.evaluate()
    return dict(start=start, weights=everything(trainer.model), told=told(trainer))


def resumed(folder: Path, what: str, lora: bool) -> None:
    """A run at once, and one that takes up its checkpoint: equal, and equal on every rank. The
    model is saved, a reward model with its centre."""
    from accelerate.utils import gather_object

    from rlhf_nb.scoring import center_rewards

    data = SFT if what == "sft" else PAIRS
    how = dict(dropout=0.1, logging_steps=3)  # one log is over steps before and after a checkpoint
    whole = make(folder, what, f"whole-{what}", data, lora, **how)
    start, rows = everything(whole.model), watched(whole)
    whole.train()
    # Two epochs of 22 rows; Accelerate fills a last batch that does not divide with the first rows.
    seen = gather_object(rows)
    assert min(Counter(seen).values()) == 2 and len(set(seen)) == 22, (
        "rows were left out: the ranks drew other orders"
    )
    assert whole.accelerator.num_processes == RANKS
    assert whole.is_deepspeed_enabled == DEEPSPEED
    assert whole.is_fsdp_enabled == FSDP
    assert (everything(whole.model) - start).abs().max() > 1e-3
    for other in whole.accelerator.gather(everything(whole.model)[None]) if RANKS > 1 else []:
        assert torch.equal(other, everything(whole.model)), "the ranks went apart"
    again = make(folder, what, f"again-{what}", data, lora, **how)
    again.train(resume_from_checkpoint=str(folder / f"whole-{what}" / "checkpoint-4"))
    assert torch.equal(everything(again.model), everything(whole.model)), "resumed is another run"
    assert told(again) == told(whole), "a rank went on from another one's losses"
    if what == "reward":
        references = SFT.select(range(7))
        inner = whole.accelerator.unwrap_model(whole.model)
        center_rewards(inner, whole.processing_class, references)
    whole.save_model(str(folder / f"saved-{what}"))
    if RANK == 0:
        torch.save(everything(whole.model), folder / f"weights-{what}.pt")
    else:
        everything(whole.model)


def main(folder: Path, kind: str) -> None:
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    for what in ("sft", "reward"):
        for step, micro in [(what, 2), (what, 1), *([("packed", 2)] if what == "sft" else [])]:
            found = one_step(folder, step, micro, kind == "lora")
            if RANK == 0:
                torch.save(found, folder / f"step-{step}-{micro}.pt")
        resumed(folder, what, kind == "lora")
    leave(f"right: {kind}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
