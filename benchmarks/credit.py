"""A fact paid where it is told, or all facts at the end: the runs of the lab on credit.

    python benchmarks/credit.py --output benchmarks/results/credit.json
    python benchmarks/credit.py --output benchmarks/results/credit.json --show

The mini world's posts and facts, told in about 10, 20 or 40 words. For each length one policy is
fine-tuned on writers who leave out most of what they need not tell; then PPO trains it with both
rewards: at 20 words by every estimator, at 10 and 40 with lambda 0.95 and half as many updates.
"""

from __future__ import annotations

import copy
import json
import random
import re
import tempfile
import time
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from common import described_parser, environment
from datasets import Dataset

from rlhf_nb.exercises.museum import QUIET, imitate, train_silently
from rlhf_nb.gae import gae
from rlhf_nb.losses import explained_variance
from rlhf_nb.tldr import EXTRA, SLOT, gold_judge
from rlhf_nb.trainer import PPOConfig, PPOTrainer
from rlhf_nb.training.model_loading import tiny_policy, train_tokenizer
from rlhf_nb.world import TOLD, draw_facts

CLAUSES = {  # core, when, why, feeling, question: the same seven facts in 10, 20 and 40 words
    10: ("so my {who} {did} my {what}", " {when}", " {why}", " {feeling}", " {question}"),
    20: (
        "my {who} {did} my {what}",
        " on {when}",
        " because they were {why}",
        ", and now i feel {feeling}",
        ". so should i {question}?",
    ),
    40: (
        "what happened is that my {who} {did} my {what}",
        ", all of it was on {when}",
        ", they did it because i think they were {why}",
        ", to be honest now i really feel {feeling}",
        ". so what do you think, should i {question}?",
    ),
}
EPISODES = {10: 1280, 20: 2560, 40: 1280}
SETTINGS: dict[str, Any] = dict(
    per_device_train_batch_size=128,
    num_generations=4,
    num_ppo_epochs=1,
    num_mini_batches=8,
    temperature=1.0,
    kl_coef=0.05,
    missing_eos_penalty=2.0,
    learning_rate=1e-3,
    lr_scheduler_type="constant",
    num_sample_generations=0,
    save_strategy="no",
)
CRITIC: dict[str, Any] = dict(
    value_learning_rate=2e-3, value_warmup_updates=2, vf_coef=1.0, cliprange_value=1.0
)
ESTIMATORS: dict[str, dict[str, Any]] = {
    **{f"critic, lambda {lam:g}": CRITIC | dict(lam=lam) for lam in (0.0, 0.5, 0.95, 1.0)},
    "RLOO": dict(advantage_estimator="rloo"),
    "REINFORCE++": dict(advantage_estimator="reinforce_pp"),
}
BATCHES = 8  # whose gradients are compared at the first update of the policy


# ---- The rewards ----


def points(text: str, facts: dict[str, str]) -> float:
    "Of the gold judge, without its opinion on form and length: these texts have other forms."
    seen = gold_judge(text, facts)
    return seen.covered - 2.0 * seen.invented - seen.repeated


def mentions(text: str, facts: dict[str, str]) -> list[tuple[int, float]]:
    "A point for each right fact, whether or not it was told before."
    stated = [x for x in re.finditer(r"\w+", text) if x[0] in SLOT]
    return [(x.end(), 1.0 if facts[SLOT[x[0]]] == x[0] else -2.0) for x in stated]


def progress(text: str, facts: dict[str, str]) -> list[tuple[int, float]]:
    "What each word adds to the points of the text so far."
    ends = [0, *(end for end, _ in mentions(text, facts))]
    totals = [points(text[:end], facts) for end in ends]
    return [(end, b - a) for end, a, b in zip(ends[1:], totals, totals[1:])]


REWARDS = {"at the end": points, "where earned": progress, "each mention": mentions}


def reward(kind: str) -> Any:
    "Named and made for the trainer."

    def judge(prompts: list[str], responses: list[str], facts: list[str], **columns: Any) -> list:
        return [REWARDS[kind](text, json.loads(x)) for text, x in zip(responses, facts)]

    return judge


# ---- A start for each length ----


def told(facts: dict[str, str], keep: list[str], words: int) -> str:
    clauses = zip(("core", *EXTRA), CLAUSES[words])
    return " " + "".join(x for slot, x in clauses if slot in ("core", *keep)).format(**facts)


def post(facts: dict[str, str], rng: random.Random) -> str:
    "The world's sentences of fact alone, so that a run takes seconds: no distractor, no title."
    order = ("core", *rng.sample(EXTRA[:3], 3), "question")
    return " ".join(rng.choice(TOLD[kind]) for kind in order).format(**facts) + "\n\nTL;DR:"


def start(words: int) -> dict[str, Any]:
    "A tokenizer, posts, and a policy whose writers tell each extra fact one time in four."
    rng = random.Random(0)
    stories = [draw_facts(rng, "train") for _ in range(12_000)]
    kept = ([slot for slot in EXTRA if rng.random() < 0.25] for _ in stories)
    columns = dict(
        prompt=[post(facts, rng) for facts in stories],
        completion=[told(facts, keep, words) for facts, keep in zip(stories, kept)],
        facts=[json.dumps(facts) for facts in stories],
    )
    every = (told(facts, [*EXTRA], words) for facts in stories)
    tokenizer = train_tokenizer(p + c for p, c in zip(columns["prompt"], every))
    policy = tiny_policy(tokenizer, num_attention_heads=4)
    policy = imitate(policy, tokenizer, Dataset.from_dict(columns), 800, 3e-3)
    posts = Dataset.from_dict({name: columns[name][:2000] for name in ("prompt", "facts")})
    return dict(policy=policy, tokenizer=tokenizer, posts=posts)


# ---- A run ----


class Kept(PPOTrainer):
    "Keeps gold, what the critic explains of the rewards to go, and the first gradients' noise."

    seen: dict[str, Any]

    def update(self, r: Any) -> Any:
        if self.update_count == self.args.value_warmup_updates:
            self.seen["noise"] = self.noise()
        told = list(zip(r.responses, map(json.loads, r.columns["facts"])))
        gold = torch.tensor([points(*one) for one in told]) - 2.0 * ~r.stopped
        self.seen["gold"].append(gold.mean().item())
        self.seen["repeated"].append(sum(gold_judge(*x).repeated for x in told) / len(told))
        if r.values is not None:
            to_go = gae(r.rewards, torch.zeros_like(r.values), r.mask, 1.0, 1.0)
            self.seen["explained"].append(float(explained_variance(r.values, to_go, r.mask)))
        self.seen["text"] = r.responses[0]
        return super().update(r)

    def noise(self) -> float:
        "Variance of the policy's gradient over batches, in squares of its mean's length."
        seed, weights, grads = self.args.seed, [*self.policy.parameters()], []
        model = self.prepare()
        for i in range(BATCHES):
            self.args.seed = 1000 * (i + 1) + seed  # answers of their own
            r = self.advantages(self.score(self.rollout(self.next_batch())))
            self.gradients(model, r, torch.arange(len(r)))
            grads.append(torch.cat([p.grad.flatten() for p in weights]))
            model.zero_grad()
        self.args.seed = seed
        all_of = torch.stack(grads)
        variance = all_of.var(0).sum()
        return float(variance / (all_of.mean(0).square().sum() - variance / BATCHES))


def run(given: dict[str, Any], words: int, where: str, estimator: str, seed: int) -> dict:
    "What a run from the start of this length was, and what was seen of it."
    begun = time.process_time()
    settings = QUIET | SETTINGS | ESTIMATORS[estimator]
    settings |= dict(total_episodes=EPISODES[words], response_length=words * 3 // 2, seed=seed)
    trainer = Kept(
        PPOConfig(tempfile.mkdtemp(), **settings),
        given["tokenizer"],
        copy.deepcopy(given["policy"]).requires_grad_(True),
        reward_model=reward(where),
        train_dataset=given["posts"],
    )
    trainer.seen = dict(gold=[], repeated=[], explained=[])
    paid = [log["objective/raw_scores"] for log in train_silently(trainer)]
    what = dict(words=words, where=where, estimator=estimator, seed=seed)
    return what | trainer.seen | dict(paid=paid, seconds=time.process_time() - begun)


# ---- The grid ----


def cells(lengths: list[int], seeds: list[int]) -> list[tuple[int, str, str, int]]:
    "What is run. RLOO takes the sum, wherever it was paid: once is enough."
    every = [name for name in ESTIMATORS if name != "RLOO"]
    made = []
    for words in lengths:
        compared = every if words == 20 else ["critic, lambda 0.95"]
        pairs = [(x, y) for y in compared for x in ("at the end", "where earned")]
        if words == 20:
            pairs += [("at the end", "RLOO"), ("each mention", "critic, lambda 0.95")]
        made += [(words, *pair, seed) for seed in seeds for pair in pairs]
    return made


def show(runs: list[dict]) -> None:
    "Means over the seeds: gold of the last three updates, noise of the first gradient."
    frame = pd.DataFrame(runs)
    frame["final"] = [sum(x[-3:]) / 3 for x in frame.gold]
    index = ["words", "estimator", "where"]
    print(frame.pivot_table(["final", "noise"], index, aggfunc=["mean", "count"], sort=False))


def main() -> None:
    parser = described_parser(__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[20, 10, 40])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--under_load", action="store_true", help="say that other work ran beside")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--show", action="store_true", help="print what the file has, run nothing")
    args = parser.parse_args()
    torch.set_num_threads(1)
    kept = json.loads(args.output.read_text()) if args.output.exists() else {}
    runs = kept.get("runs", [])
    if args.show:
        return show(runs)
    done = {(x["words"], x["where"], x["estimator"], x["seed"]) for x in runs}
    starts: dict[int, dict[str, Any]] = {}
    for cell in cells(args.lengths, args.seeds):
        if cell in done:
            continue
        words, *rest = cell
        starts[words] = starts.get(words) or start(words)
        found = run(starts[words], words, *rest)
        runs.append(json.loads(json.dumps(found), parse_float=lambda x: round(float(x), 3)))
        print(*cell, [round(x, 2) for x in found["gold"][::4]], round(found["seconds"]), flush=True)
        what = dict(episodes=EPISODES, settings=SETTINGS, estimators=ESTIMATORS, batches=BATCHES)
        lines = ",\n".join(json.dumps(x) for x in runs)
        head = json.dumps(dict(environment=environment(args.under_load), **what))
        args.output.write_text(f'{head[:-1]},\n"runs": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
