"""SmolLM2-135M-Instruct learns to guess a number from 1 to 7 in three turns of its own words.

    python benchmarks/talk.py        # 20 updates of 16 games: half an hour beside other work
    python benchmarks/talk.py 1 60   # seed 1, 60 updates

The first number of a turn is the guess. Games before and after are sampled at temperature 1, 30 of
each secret, and counted from the numbers guessed. What is found is kept in results/talk.json.
"""

import json
import re
import sys
import tempfile
import time
from collections import Counter

import torch
from common import HERE
from datasets import Dataset
from peft import LoraConfig

from rlhf_nb.environments import GuessNumber
from rlhf_nb.evaluate import win_rate_interval
from rlhf_nb.trainer import PPOConfig, PPOTrainer
from rlhf_nb.training.engines import synced
from rlhf_nb.training.model_loading import load_policy, load_tokenizer
from rlhf_nb.training.prompts import as_batch

N, TURNS, KEPT = 7, 3, HERE / "results" / "talk.json"
ASK = "Guess my number from 1 to 7. Answer with one number only. I say Higher or Lower."
LORA = dict(r=16, lora_alpha=32, target_modules=r".*layers\.(1[89]|2\d)\..*_proj")
LEARN = dict(learning_rate=5e-4, lr_scheduler_type="constant", num_ppo_epochs=4, kl_coef=0.01)
PLAY = dict(per_device_train_batch_size=16, response_length=8, temperature=1.0, use_cpu=True)
QUIET = dict(report_to="none", save_strategy="no", num_sample_generations=0)


class Talk(GuessNumber):
    "The first number in the policy's words is its guess."

    def step(self, action: str) -> tuple:
        found = re.search(r"\d+", action)
        self.said = [*getattr(self, "said", ()), found and int(found.group())]
        return super().step(found.group() if found else "")


def rows(count: int) -> Dataset:
    asked = [dict(role="user", content=ASK)]
    return Dataset.from_list([dict(prompt=asked, secret=i % N + 1) for i in range(N * count)])


@torch.no_grad()
def play(trainer: PPOTrainer, data: Dataset, temperature: float) -> dict:
    "Win rate, its 95 % interval, the share of turns with a guess from 1 to 7, the commonest games."
    with trainer.sampling(), synced(trainer.engine, trainer.policy) as engine:
        given = as_batch(data, trainer.processing_class), [0] * len(data), 1, "cpu", temperature
        worlds = trainer.player(engine, *given)[1]["environments"]
    wins, said = sum(w.secret in w.said for w in worlds), [x for w in worlds for x in w.said]
    interval = win_rate_interval(wins, 0, len(worlds) - wins)
    legal = sum(x in range(1, N + 1) for x in said) / len(said)
    common = Counter(" ".join(map(str, w.said)) for w in worlds).most_common(10)
    return dict(rate=wins / len(worlds), interval=interval, legal=legal, games=common)


def look(trainer: PPOTrainer) -> dict:
    return dict(sampled=play(trainer, rows(30), 1.0), greedy=play(trainer, rows(1), 0.01))


def main(seed: int = 0, updates: int = 20) -> None:
    torch.manual_seed(seed)
    settings = LEARN | PLAY | QUIET | dict(share_value_trunk=True, total_episodes=16 * updates)
    trainer = PPOTrainer(
        PPOConfig(tempfile.mkdtemp(), seed=seed, local_rollout_forward_batch_size=128, **settings),
        load_tokenizer("smollm2"),
        load_policy("smollm2"),
        train_dataset=rows(16),
        peft_config=LoraConfig(**LORA, task_type="CAUSAL_LM"),
        environment_factory=lambda: Talk(N, TURNS, 10, ("Higher.", "Lower.", "Right.")),
        max_turns=TURNS,
    )
    before, start = look(trainer), time.time()
    logs = [trainer.step() for _ in range(updates)]
    minutes = (time.time() - start) / 60
    curve = {k: [round(float(m[k]), 4) for m in logs] for k in ("turns/info/won", "objective/kl")}
    found = dict(minutes=minutes, before=before, after=look(trainer), curve=curve)
    results = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    results[f"seed {seed}, {updates} updates"] = found
    KEPT.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
