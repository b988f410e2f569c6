"""One side of `ppo_vs_trl.py`: a PPO trainer, ours or the peer, that does one update each time a
command asks for it.

Run by `ppo_vs_trl.py` with the Python of either environment. Commands come as JSON lines on stdin,
answers go as JSON lines to stdout; what the trainers print goes to stderr. Measured from outside:
- a whole update: from where the training loop asks for its batch to where it asks for the next one;
- its update phase: from the first forward with gradients to the end of the last optimizer step;
- optimizer steps, by a hook; tokens, by a hook on the policy's embedding in forwards with gradients
  (`computed` positions, and `real` ones, not padding, whose id is 0 on both sides);
- memory: the largest resident set of the process, or on a GPU what torch had allocated at most.
`Dice` (common.py) make tokens equal, and never draw the pad token, the peer's end.
"""

import gc
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from common import (
    PAD,
    Dice,
    described_parser,
    dice,
    make_prompts,
    peak_mib,
    rate,
    settings,
    wait_for,
)
from torch.optim.optimizer import register_optimizer_step_post_hook


class Counts:
    "What happened since `begin`."

    def __init__(self, policy: torch.nn.Module, device: str):
        self.device = device
        policy.get_input_embeddings().register_forward_pre_hook(self.saw)
        register_optimizer_step_post_hook(self.stepped)
        self.begin()

    def begin(self) -> None:
        self.steps = self.real = self.computed = 0
        self.first = self.last = None
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        self.start = self.now()

    def now(self) -> float:
        wait_for(self.device)
        return time.perf_counter()

    def saw(self, _, args: tuple) -> None:
        if not torch.is_grad_enabled():
            return
        if self.first is None:
            self.first = self.now()
        self.computed += args[0].numel()
        self.real += int((args[0] != PAD).sum())

    def stepped(self, *_) -> None:
        self.steps, self.last = self.steps + 1, self.now()

    def told(self) -> dict:
        now = self.now()
        peak = torch.cuda.max_memory_allocated() / 2**20 if self.device == "cuda" else peak_mib()
        return dict(
            seconds=now - self.start,
            update_seconds=self.last - self.first,
            steps=self.steps,
            real=self.real,
            computed=self.computed,
            peak_mib=peak,
        )


class Gate:
    "The batches of a training loop; before each, `between()` is called."

    def __init__(self, inner: Any, between: Callable[[], None]):
        self.inner, self.between = inner, between

    def __iter__(self) -> Iterator[Any]:
        for batch in self.inner:
            self.between()
            yield batch

    def __len__(self) -> int:
        return len(self.inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class Desk:
    "Where commands come in and answers go out."

    def __init__(self, counts: Counts, dice: Dice, answers, collect=None):
        self.counts, self.dice, self.answers, self.collect = counts, dice, answers, collect
        self.running = False

    def answer(self, **what) -> None:
        print(json.dumps(what), file=self.answers, flush=True)

    def between(self) -> None:
        "After one update and before the next."
        if self.running:
            found = self.counts.told()
            if not self.dice.calls:
                raise SystemExit("Dice were never thrown: this trainer draws somewhere else")
            self.answer(**found, drawn=self.dice.drawn)
        else:
            import transformers

            versions = dict(torch=torch.__version__, transformers=transformers.__version__)
            self.answer(ready=versions | dict(threads=torch.get_num_threads()))
        for line in sys.stdin:
            word = json.loads(line)
            if "rate" in word:
                device, seconds = self.counts.device, word["seconds"]
                self.answer(rate=[rate(shapes, seconds, device) for shapes in word["rate"]])
            else:
                break
        else:
            os._exit(0)
        if self.collect is not None:
            self.collect(word.get("gc", True))
        self.running, self.dice.drawn = True, 0
        self.counts.begin()


def lora(s: dict, task: str):
    "The same adapters on both sides."
    from peft import LoraConfig

    return LoraConfig(task_type=task, **s["adapters"])


def ours(s: dict, folder: Path, parts: dict, tokenizer: Any, data: Any, desk: Any, **more) -> None:
    "This project's trainer; `more` goes into its config."
    from rlhf_nb.trainer import PPOConfig, PPOTrainer

    class Gated(PPOTrainer):
        def get_train_dataloader(self):
            return Gate(super().get_train_dataloader(), desk.between)

    trunk = s.get("trunk", False)
    args = PPOConfig(**settings(s, folder), stop_token="eos", share_value_trunk=trunk, **more)
    if "adapters" in s:
        parts |= dict(ref_model=None, peft_config=lora(s, "CAUSAL_LM"))
        parts |= dict(value_model=None) if trunk else dict(value_peft_config=lora(s, "SEQ_CLS"))
    Gated(args, tokenizer, train_dataset=data, **parts).train()


def peer(s: dict, folder: Path, parts: dict, tokenizer: Any, data: Any, desk: Any) -> None:
    "The published trainer; where a command says so, without `gc` in its module: no collection."
    from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer

    # its word for recomputed activations
    own = dict(gradient_checkpointing=False, stop_token=None if s["mean_length"] is None else "eos")
    args = PPOConfig(**settings(s, folder), **own)
    if "adapters" in s:
        from peft import inject_adapter_in_model

        parts |= dict(ref_model=None, peft_config=lora(s, "CAUSAL_LM"))
        inject_adapter_in_model(lora(s, "SEQ_CLS"), parts["value_model"])
        parts["value_model"].score.requires_grad_(True)
    trainer = PPOTrainer(args, tokenizer, train_dataset=data, **parts)

    def collect(on: bool) -> None:
        ppo_trainer.gc = gc if on else SimpleNamespace(collect=lambda: 0)

    desk.collect = collect
    trainer.dataloader = Gate(trainer.dataloader, desk.between)
    trainer.train()


TRAINERS = dict(ours=ours, peer=peer)


def main() -> None:
    "Load what both sides load, make the trainer, and do what is asked."
    parser = described_parser(__doc__)
    add = parser.add_argument
    add("--side", choices=TRAINERS, required=True)
    add("--folder", type=Path, required=True, help="with policy/, reward/, value/, setting.json")
    add("--threads", type=int, default=1)
    asked = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.set_num_threads(asked.threads)
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    s, folder = json.loads((asked.folder / "setting.json").read_text()), asked.folder
    load = lambda kind, name: kind.from_pretrained(folder / name, dtype=torch.float32)
    parts = dict(
        model=load(AutoModelForCausalLM, "policy"),
        ref_model=load(AutoModelForCausalLM, "policy"),
        reward_model=load(AutoModelForSequenceClassification, "reward"),
        value_model=load(AutoModelForSequenceClassification, "value"),
    )
    counts = Counts(parts["model"], s.get("device", "cpu"))
    tokenizer, data = AutoTokenizer.from_pretrained(folder / "policy"), make_prompts(s)
    with dice(s, 0, asked.side) as thrown:
        desk = Desk(counts, thrown, answers)
        TRAINERS[asked.side](s, folder / asked.side, parts, tokenizer, data, desk)


if __name__ == "__main__":
    main()
