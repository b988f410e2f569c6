"""Over-optimisation of learned rewards on the mini world, and what helps: the runs of lab 21.

    python benchmarks/goodhart.py --seeds 60 --only base rewards "2000 labels"    # the tuning seed
    python benchmarks/goodhart.py                                # seeds 61, 62 and 63
    python benchmarks/goodhart.py --size small --seeds 5 --runs runs/goodhart_small --output my.json

For each seed: one SFT model; reward models on 500, 2,000 and 8,000 labels, with the labels as the
world's people give them and with 25 % of them flipped; best-of-n from one pool of samples, for
every reward model and every way to combine several; PPO on each reward model, without and with a
KL penalty; remedies at one number of labels; and a reward of length alone. Every job is a process
with one torch thread and leaves a small JSON: the same command resumes. The judge is the gold one,
which training never sees. Writes benchmarks/results/goodhart.json.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import HERE, described_parser, peak_mib, run_logged
from datasets import Dataset, concatenate_datasets, load_from_disk
from rich.console import Console

from rlhf_nb.cli.demo_run import DemoRun, DemoSettings
from rlhf_nb.cli.demo_stages import (
    common,
    ppo_args,
    quiet,
    reward_report,
    sampled_pairs,
    sft_stage,
    world_of,
)
from rlhf_nb.evaluate import outcomes
from rlhf_nb.exercises.museum import train_silently
from rlhf_nb.fast_logprobs import response_logprobs
from rlhf_nb.frontier import best_of_n_kl, best_of_n_reward
from rlhf_nb.judges import Ensemble
from rlhf_nb.models import scorer_from, zero_head
from rlhf_nb.reward import RewardConfig, RewardTrainer
from rlhf_nb.rollout import Rollout, sample, texts_of
from rlhf_nb.sampling import Sampling
from rlhf_nb.scoring import center_rewards, score_texts
from rlhf_nb.tldr import gold_judge
from rlhf_nb.trainer import PPOTrainer
from rlhf_nb.training.model_loading import load_policy, load_scorer, load_tokenizer
from rlhf_nb.world import edit_pairs

TEMPERATURE, TOKENS = 0.7, 32  # of every answer, of PPO and of the pool
TUNING = 60  # the seed on which sizes and the limit of early stopping were chosen
FLIPPED = 0.25
TARGET = 20  # words that the reward of length pays for
BUCKETS = (8, 11, 14, 17, 20)  # edges of the length buckets, in words
LAST = 6  # updates whose answers are counted in the buckets


@dataclass(frozen=True)
class Size:
    "How much of everything."

    posts: int = 24_000  # that SFT imitates
    labels: tuple[int, ...] = (500, 2_000, 8_000)  # each also with flipped ones
    remedy: int = 2_000  # labels of each reward model of the remedies
    members: int = 3  # more reward models for the remedies
    held_out: int = 200  # posts that pairs to measure the reward models are made of
    pool_posts: int = 96
    pool: int = 256  # answers to each
    episodes: int = 1_632
    length_episodes: int = 960
    batch: int = 96
    runs: tuple[str, ...] = ()  # of PPO; none: all


SIZES = dict(
    full=Size(),
    small=Size(
        posts=6_000, labels=(2_000,), members=0, pool_posts=32, pool=64, runs=("2000 labels",)
    ),
    tiny=Size(
        posts=64,
        labels=(16, 32),
        members=1,
        remedy=32,
        held_out=8,
        pool_posts=2,
        pool=8,
        episodes=48,
        length_episodes=48,
        batch=16,
        runs=("32 labels", "min", "length"),
    ),
)


def ppo_runs(size: Size) -> dict[str, dict[str, Any]]:
    "Settings of the PPO runs, by name, in the order in which they are made."
    single = {f"{n} labels": dict(reward=[f"{n}"]) for n in size.labels}
    penalty = {f"{n} labels, kl": dict(reward=[f"{n}"], kl_coef=0.05) for n in size.labels}
    members = [f"{size.remedy}", *(f"member {i + 1}" for i in range(size.members))]
    centred = dict(reward=members, reward_center="completion")
    remedies: dict[str, dict[str, Any]] = dict(
        mean=centred | dict(reward_aggregation="mean"),
        min=centred | dict(reward_aggregation="min"),
        variance=centred | dict(reward_aggregation="mean_minus_variance"),
        warm=dict(reward=["warm"]),
    )
    flipped = {f"{n} labels, flipped": dict(reward=[f"{n} flipped"]) for n in size.labels}
    length: dict[str, dict[str, Any]] = dict(length=dict(reward="length"))
    bare = {
        "min, not centred": dict(reward=members, reward_aggregation="min", reward_center="none")
    }
    every = single | penalty | remedies | flipped | length | bare
    return {name: every[name] for name in size.runs or every}


# ---- The measures ----


def log_ratios(
    score: np.ndarray,  # [N] of the answers to one prompt
    n: int,
    logprob: np.ndarray,  # [N] of the answers, from the policy that wrote them
) -> np.ndarray:  # [N]
    """log(q/p) of each answer: q its probability as the best of n, p the policy's own. A score of
    probability P, with F that of all scores up to it, is the best with F^n - (F - P)^n. P and F add
    up the policy's probabilities of the answers in the pool; the rest, which the pool has not seen,
    is spread like the answers that it has seen once."""
    both, counts = np.unique(np.stack([score, logprob]), axis=1, return_counts=True)
    levels, place = np.unique(both[0], return_inverse=True)
    seen = np.bincount(place, np.exp(both[1]))
    once = np.bincount(place, counts == 1)
    unseen = max(0.0, 1 - seen.sum()) / max(1, once.sum())
    here = seen + unseen * np.maximum(once - 1, 0)  # the answer itself is no unseen one
    upto = np.append(0, np.cumsum(seen + unseen * once)[:-1]) + here
    with np.errstate(divide="ignore"):  # log1p(-1): nothing is below
        chance = -np.expm1(n * np.log1p(-here / upto))
    ratio = n * np.log(np.minimum(upto, 1)) + np.log(chance) - np.log(here)
    return ratio[np.searchsorted(levels, score)]


def pool_kl(
    scores: np.ndarray,  # [P, N] of N answers to each of P prompts
    n: int,
    logprobs: np.ndarray,  # [P, N] of the answers, from the policy that wrote them
) -> float:  # nats
    "KL of the best of n from the policy, from a pool of its answers."
    ratios = [log_ratios(score, n, logprob) for score, logprob in zip(scores, logprobs)]
    return best_of_n_reward(scores, n, of=np.stack(ratios))


def length_reward(prompts: list[str], responses: list[str], **columns: list) -> list[float]:
    "1 for an answer of TARGET words, less in proportion to the distance (Singhal et al. 2023)."
    return [1 - abs(len(text.split()) / TARGET - 1) for text in responses]


def by_length(words: np.ndarray, reward: np.ndarray, gold: np.ndarray) -> list[list[float]]:
    "Answers, mean reward and mean gold points of each length bucket; empty ones too."
    place = np.digitize(words, BUCKETS)
    of = lambda values, i: round(float(values[place == i].mean()), 3) if (place == i).any() else 0.0
    counts = np.bincount(place, minlength=len(BUCKETS) + 1)
    return [[int(count), of(reward, i), of(gold, i)] for i, count in enumerate(counts)]


def golds_of(
    texts: list[str], facts: list[dict[str, str]], stopped: list[bool]
) -> tuple[np.ndarray, np.ndarray]:
    "Gold points, and invented facts."
    verdicts = [gold_judge(*three) for three in zip(texts, facts, stopped)]
    return np.array([v.gold for v in verdicts]), np.array([v.invented for v in verdicts], float)


# ---- The jobs ----


def base_job(run: DemoRun, size: Size) -> dict[str, Any]:
    "World, SFT model, labelled pairs in one shuffled order, and held-out pairs."
    folder, seed = run.folder, run.settings.seed
    world, tokenizer = world_of(run.settings)
    world.save_to_disk(str(folder / "world"))
    if not (folder / "sft").is_dir():
        sft_stage(run, world, tokenizer)
    policy, posts = load_policy(str(folder / "sft")), world["train"].shuffle(seed=seed)
    of_edits, most = max(size.labels) // 4, max(size.labels)
    cycle = lambda start, n: posts.select([i % len(posts) for i in range(start, start + n)])
    kinds = ("swap", "swap", "swap", "drop", "drop", "opening", "repeat")
    some = [
        edit_pairs(cycle(0, of_edits), seed, kinds=kinds),
        sampled_pairs(policy, tokenizer, cycle(of_edits, most), seed),
    ]
    some[1] = some[1].select(range(min(len(some[1]), most - of_edits)))
    pairs = concatenate_datasets(some).shuffle(seed=seed)
    rng = random.Random(f"flips/{seed}")
    flips = [rng.random() < FLIPPED for _ in pairs]
    pairs.add_column("flip", flips).save_to_disk(str(folder / "labelled"))
    tests = world["test"].select(range(2 * size.held_out))
    held_out = concatenate_datasets(
        [
            sampled_pairs(policy, tokenizer, tests.select(range(size.held_out)), seed + 1),
            edit_pairs(tests.select(range(size.held_out, 2 * size.held_out)), seed + 2),
        ]
    )
    held_out.save_to_disk(str(folder / "held_out"))
    gaps = np.array(pairs["gold_chosen"]) - np.array(pairs["gold_rejected"])
    return dict(
        pairs=len(pairs),
        held_out=len(held_out),
        labels_in_gold_order=round(float((gaps > 0).sum() / (gaps != 0).sum()), 4),
        ties=round(float((gaps == 0).mean()), 4),
    )


def flipped(pairs: Dataset) -> Dataset:
    "The same pairs, with the choices of the marked ones turned round."
    turned = lambda row: dict(chosen=row["rejected"], rejected=row["chosen"])
    return pairs.map(lambda row: turned(row) if row["flip"] else row)


def train_reward(
    folder: Path, name: str, pairs: Dataset, seed: int, head: int, settings: DemoSettings
) -> dict[str, Any]:
    "One epoch over the pairs, in their order."
    start = time.process_time()
    tokenizer, world = load_tokenizer(str(folder / "sft")), load_from_disk(str(folder / "world"))
    args = RewardConfig(
        **common(
            settings,
            folder / "rewards" / name,
            learning_rate=1e-3,
            warmup_steps=min(50, len(pairs) // 80),
            per_device_train_batch_size=8,
            num_train_epochs=1,
            logging_steps=50,
            train_sampling_strategy="sequential",
        )
    )
    model = scorer_from(load_policy(str(folder / "sft")), head)
    columns = pairs.select_columns(["prompt", "chosen", "rejected"])
    train_silently(RewardTrainer(model, args, columns, processing_class=tokenizer))
    seconds = time.process_time() - start
    return finished_reward(folder, name, model, world, seed) | dict(seconds=round(seconds, 1))


def finished_reward(folder: Path, name: str, model: Any, world: Any, seed: int) -> dict[str, Any]:
    "Centre, save and measure a reward model."
    tokenizer = load_tokenizer(str(folder / "sft"))
    center_rewards(model, tokenizer, world["validation"])
    model.save_pretrained(folder / "rewards" / name)
    tokenizer.save_pretrained(folder / "rewards" / name)
    held_out = load_from_disk(str(folder / "held_out"))
    posts = world["test"].select(range(len(held_out) // 2))
    found = reward_report(model, tokenizer, held_out, posts, seed)
    return dict(
        accuracy=round(found["accuracy"], 4),
        samples=round(found["by_kind"].get("sample", math.nan), 4),
        probe=round(found["probe"], 4),
    )


def averaged(models: list[Any]) -> Any:
    "The first model, with the mean of all their weights (WARM, 2401.12187)."
    states = [model.state_dict() for model in models]
    names = [name for name, x in states[0].items() if x.is_floating_point()]
    mean = {name: torch.stack([state[name] for state in states]).mean(0) for name in names}
    models[0].load_state_dict(states[0] | mean)
    return models[0]


def rewards_job(run: DemoRun, size: Size) -> dict[str, Any]:
    "Every reward model of the seed. One that is saved is not trained again."
    folder, seed, found = run.folder, run.settings.seed, {}
    pairs = load_from_disk(str(folder / "labelled"))
    plan = {}
    for n in size.labels:
        plan[f"{n}"] = (pairs.select(range(n)), seed)
        plan[f"{n} flipped"] = (flipped(pairs.select(range(n))), seed)
    some = pairs.select(range(size.remedy))
    # another head and order; for WARM, the same head and another order
    for i in range(1, size.members + 1):
        plan[f"member {i}"] = (some.shuffle(seed=1000 * i + seed), seed + 1000 * i)
        plan[f"order {i}"] = (some.shuffle(seed=2000 * i + seed), seed)
    for name, (data, head) in plan.items():
        path = folder / "rewards" / name / "figures.json"
        if not path.is_file():
            figures = train_reward(folder, name, data, seed, head, run.settings)
            path.write_text(json.dumps(figures))
        found[name] = json.loads(path.read_text())
        print(name, found[name], flush=True)
    alike = [f"{size.remedy}", *(f"order {i + 1}" for i in range(size.members))]
    warm = averaged([load_scorer(str(folder / "rewards" / name)) for name in alike])
    world = load_from_disk(str(folder / "world"))
    found["warm"] = finished_reward(folder, "warm", warm, world, seed)
    return dict(rewards=found)


@dataclass(frozen=True)
class Pool:
    "N answers of the SFT model to each of P posts."

    prompts: list[str]  # P
    references: list[str]  # P
    texts: list[list[str]]  # [P][N]
    stopped: np.ndarray  # [P, N]
    logprobs: np.ndarray  # [P, N]
    gold: np.ndarray  # [P, N]
    wins: np.ndarray  # [P, N] against the reference
    invented: np.ndarray  # [P, N]

    def scores(self, model: Any, tokenizer: Any) -> tuple[np.ndarray, np.ndarray]:
        "Of the answers [P, N], each text of a post read once; and of the references [P, 1]."
        rows = []
        for prompt, texts, stopped in zip(self.prompts, self.texts, self.stopped):
            different = list(dict.fromkeys(zip(texts, stopped.tolist())))
            answers, ends = map(list, zip(*different))
            some = score_texts(model, tokenizer, [prompt] * len(answers), answers, stopped=ends)
            of = dict(zip(different, some.tolist()))
            rows.append([of[answer] for answer in zip(texts, stopped.tolist())])
        known = score_texts(model, tokenizer, self.prompts, self.references)
        return np.array(rows), known.double().numpy()[:, None]


def drawn_pool(run: DemoRun, size: Size) -> Pool:
    "Sample, and ask the gold judge."
    folder, world = run.folder, load_from_disk(str(run.folder / "world"))
    tokenizer, policy = load_tokenizer(str(folder / "sft")), load_policy(str(folder / "sft")).eval()
    posts = world["test"].select(range(size.pool_posts))
    how = Sampling(TOKENS, tokenizer.pad_token_id, (tokenizer.eos_token_id,), TEMPERATURE)
    generator, rows = torch.Generator().manual_seed(run.settings.seed), []
    for post in posts:
        ids = torch.tensor([tokenizer(post["prompt"])["input_ids"]] * size.pool)
        real = torch.ones_like(ids).bool()
        some = sample(policy, ids, real, how, generator)
        ids_drawn = some.response_ids.numpy()
        _, first, place = np.unique(ids_drawn, axis=0, return_index=True, return_inverse=True)
        columns = [x[first] for x in (ids, real, some.response_ids, some.mask)]
        with torch.no_grad():
            logprobs, _ = response_logprobs(policy, *columns, TEMPERATURE, entropy=None)
        texts, _ = texts_of(tokenizer, some, (tokenizer.eos_token_id,))
        facts, ends = [json.loads(post["facts"])] * size.pool, some.stopped.tolist()
        gold, invented = golds_of(texts, facts, ends)
        theirs = [gold_judge(post["completion"], facts[0]).gold] * size.pool
        wins = outcomes(gold.tolist(), theirs)
        of_all = logprobs.sum(1).double().numpy()[place.ravel()]
        rows.append((texts, some.stopped.numpy(), of_all, gold, np.array(wins), invented))
    texts, *arrays = zip(*rows)
    stacked = (np.stack(x) for x in arrays)
    return Pool(posts["prompt"][:], posts["completion"][:], list(texts), *stacked)


def best_of(pool: Pool, scores: np.ndarray) -> dict[str, Any]:
    "Best of 1, 2, 4, .. N by these scores."
    sizes = [2**i for i in range(scores.shape[1].bit_length())]
    mean = lambda n, of=None: round(best_of_n_reward(scores, n, of=of), 4)
    rows = [
        dict(
            n=n,
            bound=round(best_of_n_kl(n), 4),
            kl=round(pool_kl(scores, n, pool.logprobs), 4),
            proxy=mean(n),
            gold=mean(n, pool.gold),
            wins=mean(n, pool.wins),
            invented=mean(n, pool.invented),
        )
        for n in sizes
    ]
    words = np.array([[len(text.split()) for text in row] for row in pool.texts])
    return dict(
        within=round(float(scores.std(1).mean()), 4),  # of a post's answers
        best_of=rows,
        buckets=by_length(words.ravel(), scores.ravel(), pool.gold.ravel()),
    )


def pool_job(run: DemoRun, size: Size) -> dict[str, Any]:
    "Best-of-n from one pool, by every reward model, by their ensembles, and by the gold judge."
    pool, tokenizer = drawn_pool(run, size), load_tokenizer(str(run.folder / "sft"))
    scores, known, found = {}, {}, {}
    names = [*map(str, size.labels), *(f"{n} flipped" for n in size.labels)]
    members = [f"{size.remedy}", *(f"member {i + 1}" for i in range(size.members))]
    for name in dict.fromkeys([*names, *members, "warm"]):
        model = load_scorer(str(run.folder / "rewards" / name))
        scores[name], known[name] = pool.scores(model, tokenizer)
        found[name] = best_of(pool, scores[name])
    four = torch.tensor(np.stack([scores[name].ravel() for name in members]))
    centers = np.stack(
        [np.broadcast_to(known[name], scores[name].shape).ravel() for name in members]
    )
    for how in ("mean", "min", "mean_minus_variance"):
        for more, of in (("", torch.tensor(centers.copy())), (", not centred", None)):
            together = Ensemble(how)(four, of).numpy().reshape(pool.gold.shape)
            found[how + more] = best_of(pool, together)
    found["gold"] = best_of(pool, pool.gold)
    lowest = {}
    for more, values in (("centred", four.numpy() - centers), ("not centred", four.numpy())):
        by_post = values.argmin(0).reshape(pool.gold.shape)  # the member that the minimum takes
        counts = np.stack([(by_post == m).mean(1) for m in range(len(members))])
        lowest[more] = round(float(counts.max(0).mean()), 4)
    different = [len(set(zip(*row))) for row in zip(pool.texts, pool.stopped)]
    return dict(
        best_of=found,
        same_lowest_member=lowest,
        different=round(float(np.mean(different)), 1),
        gold_within=round(float(pool.gold.std(1).mean()), 4),
    )


def updates_of(folder: Path, world: Any) -> tuple[list[dict[str, float]], list[list[float]]]:
    "A row for each rollout, and the length buckets of the last; then the rollouts are deleted."
    posts = {row["prompt"]: (json.loads(row["facts"]), row["completion"]) for row in world}
    rows, last = [], []
    files = sorted((folder / "rollouts").iterdir())
    for path in files:
        r = Rollout.load(path)
        facts = [posts[prompt][0] for prompt in r.prompts]
        gold, invented = golds_of(r.responses, facts, r.stopped.bool().tolist())
        theirs = [gold_judge(posts[prompt][1], posts[prompt][0]).gold for prompt in r.prompts]
        words, raw = np.array([len(text.split()) for text in r.responses]), r.raw_scores.numpy()
        figures = dict(
            kl=r.kl.sum(1).mean().item(),
            proxy=raw.mean(),
            gold=gold.mean(),
            wins=float(np.mean(outcomes(gold.tolist(), theirs))),
            invented=invented.mean(),
            words=words.mean(),
            stopped=r.stopped.float().mean().item(),
        )
        of_members = {name: np.mean(x) for name, x in r.columns.items() if "score/" in name}
        figures |= {f"member/{i}": mean for i, mean in enumerate(of_members.values())}
        rows.append({name: round(float(value), 4) for name, value in figures.items()})
        if path in files[-LAST:]:
            last.append((words, raw, gold))
    shutil.rmtree(folder / "rollouts")
    return rows, by_length(*(np.concatenate(x) for x in zip(*last)))


def ppo_job(run: DemoRun, size: Size, name: str) -> dict[str, Any]:
    "One PPO run, and what the gold judge says about each of its rollouts."
    settings = dict(ppo_runs(size)[name])
    rewards, s = settings.pop("reward"), run.settings
    folder = run.folder / "policies" / name
    world = load_from_disk(str(run.folder / "world"))["train"]
    shutil.rmtree(folder, ignore_errors=True)
    of_length = rewards == "length"
    episodes = size.length_episodes if of_length else size.episodes
    s = replace(s, episodes=episodes, batch=size.batch, temperature=TEMPERATURE, kl_coef=0.0)
    args = ppo_args(s, folder, **settings)
    paths = [] if of_length else [str(run.folder / "rewards" / one) for one in rewards]
    value = load_scorer(paths[0]) if paths else scorer_from(load_policy(str(run.folder / "sft")))
    trainer = PPOTrainer(
        args,
        load_tokenizer(str(run.folder / "sft")),
        load_policy(str(run.folder / "sft")),
        None,
        length_reward if of_length else paths if len(paths) > 1 else paths[0],
        world.select_columns(["prompt", "completion"]),
        zero_head(value),
    )
    train_silently(trainer)
    seconds = time.process_time()
    updates, buckets = updates_of(folder, world)
    return dict(training_seconds=round(seconds, 1), updates=updates, buckets=buckets)


# ---- The whole ----


def do(folder: Path, seed: int, size: Size, job: str) -> None:
    "One job, in this process."
    torch.set_num_threads(1)
    made = DemoSettings(
        output_dir=str(folder), seed=seed, posts=size.posts, eval_posts=max(1000, 2 * size.held_out)
    )
    with quiet():
        run = DemoRun(made, Console(quiet=True))
        jobs = dict(base=base_job, rewards=rewards_job, pool=pool_job)
        found = jobs[job](run, size) if job in jobs else ppo_job(run, size, job)
    found["seconds"] = round(time.process_time(), 1)
    found["peak_mib"] = round(peak_mib())
    kept = folder / "figures" / f"{job}.json"
    kept.parent.mkdir(exist_ok=True)
    kept.write_text(json.dumps(found))


def collected(root: Path, seeds: list[int], jobs: list[str]) -> dict[str, Any]:
    "What the finished jobs wrote, by seed and job."
    found = {}
    for seed in seeds:
        files = {job: root / f"seed{seed}" / "figures" / f"{job}.json" for job in jobs}
        if some := {job: json.loads(f.read_text()) for job, f in files.items() if f.is_file()}:
            found[seed] = some
    return found


def summary(found: dict[str, Any]) -> str:
    "The PPO runs of a seed, a line each."
    lines = [f"{'run':26s} gold: start  best  last   proxy: start  last   KL: at best  last"]
    for name, run in found.items():
        if "updates" not in run:
            continue
        rows = run["updates"]
        best = max(rows, key=lambda row: row["gold"])
        lines.append(
            f"{name:26s} {rows[0]['gold']:12.2f} {best['gold']:5.2f} {rows[-1]['gold']:5.2f}"
            f"{rows[0]['proxy']:16.2f} {rows[-1]['proxy']:5.2f} {best['kl']:14.2f}"
            f"{rows[-1]['kl']:6.2f}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = described_parser(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[61, 62, 63])
    parser.add_argument("--runs", type=Path, default=Path("runs/goodhart"))
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument("--only", nargs="*", help="these jobs: base, rewards, pool, or PPO runs")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "goodhart.json")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    options = parser.parse_args()
    size = SIZES[options.size]
    if options.job:
        return do(options.runs / f"seed{options.seeds[0]}", options.seeds[0], size, options.job)
    jobs = ["base", "rewards", "pool", *ppo_runs(size)]
    for seed in options.seeds:
        for job in jobs if options.only is None else options.only:
            folder = options.runs / f"seed{seed}"
            if (folder / "figures" / f"{job}.json").is_file():
                continue
            folder.mkdir(parents=True, exist_ok=True)
            words = ["--seeds", str(seed), "--runs", str(options.runs), "--size", options.size]
            log, name = folder / "log.txt", f"seed {seed}, {job}"
            run_logged([__file__, *words, "--job", job], log, name, OMP_NUM_THREADS="1")
        print(summary(collected(options.runs, [seed], jobs)[seed]), flush=True)
    seeds = sorted({TUNING, *options.seeds})
    whole = dict(size=options.size, seeds=collected(options.runs, seeds, jobs))
    options.output.write_text(json.dumps(whole, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
