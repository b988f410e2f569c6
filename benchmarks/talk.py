"""SmolLM2-135M-Instruct learns to guess a number from 1 to 7 in three turns of its own words.

    python benchmarks/talk.py                             # seed 0, 20 updates of 16 games, one core
    python benchmarks/talk.py --seeds 0 1 2 --updates 60

Three guesses by halves win every game, three different blind ones 3 of 7, one number 1 of 7. Games
before and after are sampled at temperature 1 and counted from the numbers guessed, 30 of each
secret. The first number of a turn is the guess. What is found is kept in results/talk.json.
"""

import json
import re
import tempfile
import time
from collections import Counter

import torch
from common import HERE, described_parser
from datasets import Dataset
from peft import LoraConfig

from rlhf_nb.environments import GuessNumber
from rlhf_nb.evaluate import win_rate_interval
from rlhf_nb.trainer import PPOConfig, PPOTrainer
from rlhf_nb.training.engines import synced
from rlhf_nb.training.model_loading import load_policy, load_tokenizer
from rlhf_nb.training.prompts import as_batch

N, TURNS, ANSWERS = 7, 3, ("Higher.", "Lower.", "Right.")
ASK = "Guess my number from 1 to 7. Answer with one number only. I say Higher or Lower."
LORA = dict(r=16, lora_alpha=32, target_modules=r".*layers\.(1[89]|2\d)\..*_proj")


class Talk(GuessNumber):
    "The first number in the policy's words is its guess."

    def step(self, action: str) -> tuple:
        found = re.search(r"\d+", action)
        self.said = [*getattr(self, "said", ()), found and int(found.group())]
        return super().step(found.group() if found else "")


@torch.no_grad()
def play(trainer: PPOTrainer, rows: Dataset, temperature: float) -> dict:
    "Win rate with its 95 % interval, turns with a guess from 1 to 7, the commonest games."
    with trainer.sampling(), synced(trainer.engine, trainer.policy) as engine:
        batch, seeds = as_batch(rows, trainer.processing_class), [0] * len(rows)
        worlds = trainer.player(engine, batch, seeds, 1, "cpu", temperature)[1]["environments"]
    wins, said = sum(w.secret in w.said for w in worlds), [x for w in worlds for x in w.said]
    low, high = win_rate_interval(wins, 0, len(worlds) - wins)
    legal = sum(x is not None and 1 <= x <= N for x in said) / len(said)
    common = Counter(" ".join(map(str, w.said)) for w in worlds).most_common(10)
    return dict(rate=wins / len(worlds), interval=[low, high], legal=legal, games=common)


def main() -> None:
    parser = described_parser(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--games", type=int, default=30, help="of each secret, before and after")
    given, kept = parser.parse_args(), HERE / "results" / "talk.json"
    results = json.loads(kept.read_text()) if kept.exists() else {}
    secret = lambda i: dict(prompt=[dict(role="user", content=ASK)], secret=i % N + 1)
    judged, greedy = (
        Dataset.from_list([secret(i) for i in range(N * n)]) for n in (given.games, 1)
    )
    for seed in given.seeds:
        torch.manual_seed(seed)
        args = PPOConfig(
            tempfile.mkdtemp(),
            total_episodes=16 * given.updates,
            per_device_train_batch_size=16,
            num_ppo_epochs=4,
            response_length=8,
            temperature=1.0,
            learning_rate=5e-4,
            lr_scheduler_type="constant",
            kl_coef=0.01,
            share_value_trunk=True,
            seed=seed,
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            num_sample_generations=0,
            local_rollout_forward_batch_size=128,
        )
        trainer = PPOTrainer(
            args,
            load_tokenizer("smollm2"),
            load_policy("smollm2"),
            train_dataset=[secret(i) for i in range(N * 16)],
            peft_config=LoraConfig(**LORA, task_type="CAUSAL_LM"),
            environment_factory=lambda: Talk(N, TURNS, 10, ANSWERS),
            max_turns=TURNS,
        )
        both = lambda: dict(sampled=play(trainer, judged, 1.0), greedy=play(trainer, greedy, 0.01))
        found, start, curve = dict(before=both()), time.time(), []
        print(found, flush=True)
        for update in range(given.updates):
            m = trainer.step()
            curve.append({k: round(float(m[k]), 4) for k in ("turns/info/won", "objective/kl")})
            print(update, f"{time.time() - start:.0f} s", curve[-1], flush=True)
        found |= dict(minutes=(time.time() - start) / 60, after=both(), curve=curve)
        results[f"seed {seed}, {given.updates} updates"] = found
        print(found["after"], found["minutes"], flush=True)
        kept.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
