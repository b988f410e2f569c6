"""PPO beside its successors on the mini world, on equal episodes.

    python benchmarks/after_ppo.py                      # all runs, then the results
    python benchmarks/after_ppo.py --runs /tmp/runs     # where the runs are kept

SFT, preference pairs and reward model of a seed are those of `rlhf-nb demo`, made once and shared.
Then PPO, RLOO, GRPO, Dr. GRPO and REINFORCE++, each on as many episodes, 4 answers to a prompt, in
the same loop; DPO on the pairs of which the reward model was made; and the best of n answers of the
SFT model. Each trained method has three learning rates on the tuning seed; the gold judge's win
rate on that seed's validation posts chooses. The fresh seeds use the chosen rate, and training
never sees the judge. The methods of the loop run once more on as many episodes as the demo has.
A run is a process with one thread; the same command goes on where it stopped.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from contextlib import contextmanager
from itertools import groupby
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
from common import HERE, described_parser, peak_mib
from datasets import load_from_disk
from demo_runs import up_to_reward
from torch.nn.functional import logsigmoid
from transformers import TrainerCallback, set_seed

from rlhf_nb.base.encoding import encode_prompts
from rlhf_nb.cli.demo_run import DemoSettings
from rlhf_nb.cli.demo_stages import ppo_args, quiet
from rlhf_nb.estimators import ESTIMATORS
from rlhf_nb.evaluate import outcomes
from rlhf_nb.exercises.museum import train_silently
from rlhf_nb.fast_logprobs import response_logprobs
from rlhf_nb.frontier import best_of_n_kl, best_of_n_reward
from rlhf_nb.judging import judge_completions
from rlhf_nb.kl_control import response_full_kl
from rlhf_nb.masks import left_pad, right_pad
from rlhf_nb.models import zero_head
from rlhf_nb.rollout import sample, texts_of
from rlhf_nb.sampling import Sampling
from rlhf_nb.scoring import score_texts
from rlhf_nb.tldr import gold_judge
from rlhf_nb.trainer import PPOTrainer
from rlhf_nb.training.completions import Completions
from rlhf_nb.training.model_loading import load_policy, load_scorer, load_tokenizer

matplotlib.use("Agg")
TEMPERATURE = 0.7  # of all sampling, as in the demo; 0.01 besides, at the end
KL_COEF, BETA, RESPONSE = 0.05, 0.1, 32
RATES = (3e-4, 6e-4, 1.2e-3)

LOSS_KL = dict(kl_in="loss", kl_estimator="k3")
CRITIC = dict(value_learning_rate=1e-3, value_warmup_updates=2)
METHODS: dict[str, dict[str, Any]] = {  # what differs in the one loop
    "PPO": dict(advantage_estimator="gae", **CRITIC),
    "RLOO": dict(advantage_estimator="rloo"),
    "GRPO": dict(advantage_estimator="grpo", loss_aggregation="sequence_mean", **LOSS_KL),
    "Dr. GRPO": dict(advantage_estimator="dr_grpo", loss_aggregation="constant", **LOSS_KL),
    "REINFORCE++": dict(advantage_estimator="reinforce_pp"),
}
TRIED = dict.fromkeys(METHODS, RATES) | {"DPO": (1e-4, 3e-4, 1e-3)}
SIZES: dict[str, dict[str, Any]] = {
    "full": dict(
        demo=dict(),
        episodes=2560,
        long=6144,  # the demo's, once more for each method of the loop, at the same learning rate
        batch=256,
        pairs=10_240,  # as many answers through the backward pass as PPO's two models have
        posts=500,  # that the judge reads: of the validation and of the test split
        pool=32,  # of which the best of n is taken
        n=(1, 2, 4, 8, 16, 32),
        looks=5,  # along a run of a fresh seed
    ),
    "tiny": dict(  # a test of this file; it measures nothing
        demo=dict(posts=256, sample_pairs=16, fact_pairs=32, edit_pairs=32, eval_posts=16),
        episodes=24,
        long=32,
        batch=8,
        pairs=32,
        posts=8,
        pool=4,
        n=(1, 2, 4),
        looks=1,
    ),
}


# ---- The seed's world, SFT model and reward model ----


def base(folder: Path, size: dict[str, Any], seed: int) -> dict[str, Any]:
    "The demo's stages up to the reward model, and how the SFT model does."
    settings = DemoSettings(seed=seed, output_dir=str(folder), **size["demo"])
    _, world, _, seconds = up_to_reward(settings)
    if not (folder / "world").is_dir():
        world.save_to_disk(str(folder / "world"))
    m = models(folder)
    report = json.loads((folder / "reward" / "report.json").read_text())
    return dict(
        seconds=seconds,
        reward={name: round(report[name], 4) for name in ("accuracy", "probe")},
        validation=look(m, m["sft"], "validation", size, seed, TEMPERATURE),
        test=tested(m, m["sft"], size, seed),
    )


def models(folder: Path) -> dict[str, Any]:
    "What every run of a seed starts from."
    return dict(
        sft=load_policy(str(folder / "sft")),
        reward=load_scorer(str(folder / "reward")),
        tokenizer=load_tokenizer(str(folder / "sft")),
        world=load_from_disk(str(folder / "world")),
        folder=folder,
    )


# ---- Measuring ----


def answers(
    policy: Any, tokenizer: Any, prompts: list[str], temperature: float, seed: int, sft: Any
):
    "An answer to each prompt, and the exact KL to the SFT model along it, nats."
    rows = encode_prompts(prompts, tokenizer)
    order, found = sorted(range(len(rows)), key=lambda i: len(rows[i])), {}
    pad, stop = tokenizer.pad_token_id, tokenizer.eos_token_id
    generator = torch.Generator().manual_seed(seed)
    how = Sampling(RESPONSE, pad, (stop,), temperature)
    training = policy.training
    policy.eval()
    for start in range(0, len(order), 256):
        part = order[start : start + 256]
        ids, mask = left_pad([rows[i] for i in part], pad)
        with torch.no_grad():
            drawn = sample(policy, ids, mask, how, generator)
        kl = [None] * len(part)
        if sft is not None:
            of_tokens = response_full_kl(
                policy, sft, ids, mask, drawn.response_ids, drawn.mask, temperature=temperature
            )
            kl = of_tokens.sum(1).tolist()
        texts, _ = texts_of(tokenizer, drawn, [stop])
        each = zip(texts, drawn.stopped.tolist(), drawn.mask.sum(1).tolist(), kl)
        found |= dict(zip(part, each))
    policy.train(training)
    *columns, kl = zip(*(found[i] for i in range(len(rows))))
    return Completions(list(prompts), *map(list, columns)), list(kl)


def look(
    m: dict[str, Any],
    policy: Any,
    split: str,
    size: dict[str, Any],
    seed: int,
    temperature: float,
    times: int = 1,  # answers to each post
) -> dict[str, float]:
    "What the gold judge and the reward model make of a policy's answers, and their KL to the SFT."
    posts = m["world"][split].select(range(size["posts"]))
    posts = posts.select([i for _ in range(times) for i in range(len(posts))])
    sft = m["sft"] if temperature == TEMPERATURE else None  # near-greedy: no KL worth a name
    done, kl = answers(policy, m["tokenizer"], list(posts["prompt"]), temperature, seed, sft)
    gold, _ = judge_completions(done, posts, temperature)
    scores = score_texts(
        m["reward"], m["tokenizer"], done.prompts, done.texts, stopped=done.stopped
    )
    report = dict(
        win_rate=gold.win_rate,
        covered=gold.covered,
        invented=gold.invented,
        length=gold.length,
        stopped=gold.stopped,
        reward=scores.mean().item(),
    )
    if sft is not None:
        report["kl"] = sum(kl) / len(kl)
    return {name: round(float(x), 4) for name, x in report.items()}


def tested(m: dict[str, Any], policy: Any, size: dict[str, Any], seed: int) -> dict[str, Any]:
    "On the test posts, at the temperature of the training and near-greedy; three answers to read."
    posts = m["world"]["test"].select(range(3))
    shown, _ = answers(policy, m["tokenizer"], posts["prompt"], 0.01, seed, None)
    return dict(
        sampled=look(m, policy, "test", size, seed, TEMPERATURE),
        greedy=look(m, policy, "test", size, seed, 0.01),
        texts=shown.texts,
    )


class Watch:
    "Processor seconds of training, without what the looks at validation posts took, and the looks."

    def __init__(self, m: dict[str, Any], policy: Any, size: dict[str, Any], seed: int):
        self.given, self.trace = (m, policy, "validation", size, seed, TEMPERATURE), []
        self.seconds, self.since = 0.0, time.process_time()

    def look(self, share: float) -> None:
        self.seconds += time.process_time() - self.since
        self.trace.append(dict(share=round(share, 3), **look(*self.given)))
        self.since = time.process_time()

    def stop(self) -> float:
        return self.seconds + time.process_time() - self.since


def weights(*held: Any) -> int:
    return sum(p.numel() for model in held if model is not None for p in model.parameters())


@contextmanager
def measured(m: dict[str, Any], policy: Any, size: dict[str, Any], seed: int, report: dict):
    """Training, measured: a tuning run is judged at its end on validation posts, two answers to
    each; a run of a fresh seed along the way, and at its end on test posts."""
    watch = Watch(m, policy, size, seed)
    yield watch
    report |= dict(seconds=round(watch.stop(), 1), memory=round(peak_mib(), 1), trace=watch.trace)
    if size["looks"]:
        report["test"] = tested(m, policy, size, seed)
    else:
        report["validation"] = look(m, policy, "validation", size, seed, TEMPERATURE, times=2)


# ---- Training ----


def reinforce(
    folder: Path, size: dict[str, Any], seed: int, method: str, rate: float
) -> dict[str, Any]:
    "One run of the trainer. Only `METHODS` and the learning rate differ between two of them."
    m, out, report = models(folder), tempfile.mkdtemp(), {}
    policy = load_policy(str(folder / "sft"))
    critic = ESTIMATORS[METHODS[method]["advantage_estimator"]].critic
    value = zero_head(load_scorer(str(folder / "reward"))) if critic else None
    set_seed(seed)
    sizes: dict[str, Any] = dict(episodes=size["episodes"], batch=size["batch"])
    demo = DemoSettings(seed=seed, temperature=TEMPERATURE, kl_coef=KL_COEF, **sizes)
    alike = dict(num_generations=4, save_rollouts=False)
    alike |= dict(value_learning_rate=None, value_warmup_updates=0)  # but for PPO's critic
    args = ppo_args(demo, Path(out), **alike | METHODS[method], learning_rate=rate)
    prompts = m["world"]["train"].select_columns(["prompt"])
    with quiet(), measured(m, policy, size, seed, report) as watch:
        trainer = PPOTrainer(args, m["tokenizer"], policy, None, m["reward"], prompts, value)
        updates = size["episodes"] // size["batch"]

        class Look(TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
                if size["looks"] and state.global_step % (updates // size["looks"]) == 0:
                    watch.look(state.global_step / updates)

        trainer.add_callback(Look())
        logs = train_silently(trainer)
    shutil.rmtree(out)
    report["weights"] = weights(policy, trainer.ref_model, m["reward"], value)
    report["trained"] = weights(policy, value)
    kept = dict(kl="objective/kl", reward="objective/raw_scores", step="policy/approxkl_avg")
    report["log"] = {name: [round(log[key], 4) for log in logs] for name, key in kept.items()}
    return report


def dpo_loss(margins: Any, of_reference: Any, beta: float) -> Any:
    """Minus the log of the chance that the chosen answer is preferred, if the score of an answer is
    beta times its log-ratio to the reference. Rafailov et al. 2023 (2305.18290), eq. 7."""
    return -logsigmoid(beta * (margins - of_reference)).mean()


def margins_of(policy: Any, pairs: dict[str, list], rows: Any, pad: int) -> Any:
    "Log-prob of the chosen answer less that of the rejected one [B]."
    prompts = [pairs["prompt"][i] for i in rows] * 2
    both = [pairs[name][i] for name in ("chosen", "rejected") for i in rows]
    batch = *left_pad(prompts, pad), *right_pad(both, pad)
    chosen, rejected = (
        response_logprobs(policy, *batch, entropy=None, align=16).logprobs.sum(1).chunk(2)
    )
    return chosen - rejected


def encoded(tokenizer: Any, data: Any) -> dict[str, list]:
    "Prompts and answers as ids, the stop token after each answer."
    ids = dict(prompt=encode_prompts(list(data["prompt"]), tokenizer))
    for name in ("chosen", "rejected"):
        plain = tokenizer(list(data[name]), add_special_tokens=False)["input_ids"]
        ids[name] = [[*row, tokenizer.eos_token_id] for row in plain]
    return ids


def dpo(folder: Path, size: dict[str, Any], seed: int, rate: float) -> dict[str, Any]:
    "One epoch over the shuffled pairs of which the reward model was made."
    m, report, batch = models(folder), {}, 32
    data = load_from_disk(str(folder / "pairs"))["train"].shuffle(seed=seed)
    data = data.select(range(min(size["pairs"], len(data))))
    policy = load_policy(str(folder / "sft"))
    with measured(m, policy, size, seed, report) as watch:
        pairs, pad = encoded(m["tokenizer"], data), m["tokenizer"].pad_token_id
        parts = torch.arange(len(data)).split(batch)
        with torch.no_grad():
            theirs = torch.cat([margins_of(m["sft"], pairs, part.tolist(), pad) for part in parts])
        optimizer = torch.optim.AdamW(policy.parameters(), lr=rate, weight_decay=0.0, fused=True)
        decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, len(parts))
        policy.train()
        right = []
        for step, part in enumerate(parts, 1):
            ours = margins_of(policy, pairs, part.tolist(), pad)
            dpo_loss(ours, theirs[part], BETA).backward()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
            decay.step()
            optimizer.zero_grad()
            right.append((ours > theirs[part]).float().mean().item())
            if size["looks"] and step % (len(parts) // size["looks"]) == 0:
                watch.look(step / len(parts))
    report["weights"], report["trained"] = weights(policy, m["sft"]), weights(policy)
    report["log"] = dict(accuracy=[round(sum(x) / len(x), 3) for x in in_parts(right, 16)])
    return report


def in_parts(values: list[float], parts: int) -> list[list[float]]:
    size = max(1, len(values) // parts)
    return [values[i : i + size] for i in range(0, len(values), size)]


def best_of_n(folder: Path, size: dict[str, Any], seed: int) -> dict[str, Any]:
    "The answer with the best score among n of the SFT model: nothing is trained."
    m, count = models(folder), size["pool"]
    posts = m["world"]["test"].select(range(size["posts"]))
    posts = posts.select([i for i in range(len(posts)) for _ in range(count)])
    start = time.process_time()
    done, _ = answers(m["sft"], m["tokenizer"], posts["prompt"], TEMPERATURE, seed, None)
    scores = score_texts(
        m["reward"], m["tokenizer"], done.prompts, done.texts, stopped=done.stopped
    )
    seconds = time.process_time() - start
    _, golds = judge_completions(done, posts, TEMPERATURE)
    truths = [json.loads(facts) for facts in posts["facts"]]
    theirs = [gold_judge(text, truth).gold for text, truth in zip(posts["completion"], truths)]
    won = outcomes([v.gold for v in golds], theirs)
    pool = lambda values: np.asarray(values, dtype=float).reshape(-1, count)
    ranked = pool(scores.tolist()).round(4)  # equal answers of two batches differ in the last digit
    mean = lambda values, n: round(best_of_n_reward(ranked, n, pool(values)), 4)
    of_n = [
        dict(
            n=n,
            bound=round(best_of_n_kl(n), 4),
            kl=round(float(np.mean([pool_kl(row, n) for row in ranked])), 4),
            win_rate=mean(won, n),
            invented=mean([v.invented for v in golds], n),
            covered=mean([v.covered for v in golds], n),
            reward=mean(scores.tolist(), n),
        )
        for n in size["n"]
    ]
    return dict(
        of_n=of_n,
        seconds_an_answer=round(seconds / len(posts), 5),
        memory=round(peak_mib(), 1),
        weights=weights(m["sft"], m["reward"]),
        trained=0,
        different=round(float(np.mean([len(np.unique(row)) for row in ranked])), 2),
    )


def pool_kl(scores: Any, n: int) -> float:
    "KL of the best of n draws to their pool: equal scores are one answer. Too small for large n."
    _, counts = np.unique(scores, return_counts=True)
    p, at_most = counts / counts.sum(), counts.cumsum() / counts.sum()
    best = np.diff(at_most**n, prepend=0.0)
    real = best > 0
    return float((best[real] * np.log(best[real] / p[real])).sum())


# ---- All of it ----

COLOURS = ("#777777", "#1f5fa8", "#c25a00", "#e0a030", "#2e8b57", "#8e44ad")


def plot(results: dict[str, Any], path: Path) -> None:
    "Gold win rate against the KL, and the answers sampled: means, and a dot for a seed's end."
    starts = {base["seed"]: base["validation"] for base in results["bases"]}
    looks = pd.DataFrame(
        dict(method=run["method"], seed=run["seed"], **look)
        for run in results["runs"]
        for look in (dict(share=0.0, **starts[run["seed"]]), *run["trace"])
    )
    looks["gold"] = 100 * looks["win_rate"]
    looks["answers"] = looks["share"] * results["size"]["episodes"]
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.4), layout="constrained", sharey=True)
    for (method, part), colour in zip(looks.groupby("method", sort=False), COLOURS):
        mean = part.groupby("share").mean(numeric_only=True)
        last = part[part["share"] == part["share"].max()]
        for axis, x in ((left, "kl"), (right, "answers")):
            if method == "DPO" and axis is right:
                continue  # it samples none
            label = method if axis is left else None
            axis.plot(mean[x], mean["gold"], color=colour, lw=2, label=label)
            axis.scatter(last[x], last["gold"], color=colour, s=18)
    best = pd.DataFrame([line for seed in results["best_of_n"] for line in seed["of_n"]])
    best = best.groupby("n").mean()
    left.plot(best["kl"], 100 * best["win_rate"], "k--x", ms=5, lw=1, label="best of n")
    for n in best.index[1:]:
        at = (best["kl"][n], 100 * best["win_rate"][n])
        left.annotate(f"{n}", at, xytext=(4, -10), textcoords="offset points", fontsize=8)
    left.set(title="What a nat buys", xlabel="KL to the SFT model, nats a response")
    left.set_ylabel("gold win rate, % (temperature 0.7)")
    right.set(title="What an answer buys", xlabel="answers sampled in training")
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=7, frameon=False)
    seeds = len({run["seed"] for run in results["runs"]})
    title = "Gold against distance and against effort"
    figure.suptitle(f"{title}: means over {seeds} seeds, dots at the end")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def one(job: dict[str, Any], runs: Path, size: dict[str, Any]) -> dict[str, Any]:
    "A job, in this process."
    torch.set_num_threads(1)
    seed, method = job["seed"], job["method"]
    folder = runs / f"seed{seed}"
    if method == "base":
        return base(folder, size, seed)
    if method == "best of n":
        return best_of_n(folder, size, seed)
    if method == "DPO":
        return dpo(folder, size, seed, job["rate"])
    return reinforce(folder, size, seed, method, job["rate"])


def keep(job: dict[str, Any], runs: Path, size: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(one(job, runs, size)) + "\n")


def kept(job: dict[str, Any], runs: Path, size: dict[str, Any]) -> dict[str, Any]:
    "A job's results: of the file where it has run before, else of a process of its own."
    name = "_".join(str(x).replace(" ", "_").replace(".", "") for x in job.values())
    path = runs / "results" / f"{name}.json"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        start = time.perf_counter()
        process = get_context("fork").Process(target=keep, args=(job, runs, size, path))
        process.start()
        process.join()
        if process.exitcode:
            raise SystemExit(f"{name} ended with exit code {process.exitcode}")
        print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)
    return job | json.loads(path.read_text())


def chosen(tuning: list[dict[str, Any]]) -> dict[str, float]:
    "By method, the learning rate with the best gold win rate on validation posts."
    wins = lambda run: run["validation"]["win_rate"]
    tried = groupby(tuning, key=lambda run: run["method"])
    return {method: max(runs, key=wins)["rate"] for method, runs in tried}


def main(words: list[str] | None = None) -> None:
    parser = described_parser(__doc__)
    parser.add_argument("--tuning_seed", type=int, default=40)
    parser.add_argument("--seeds", type=int, nargs="*", default=[41, 42, 43])
    parser.add_argument("--methods", nargs="*", choices=list(TRIED), default=list(TRIED))
    parser.add_argument("--runs", type=Path, default=Path("runs/after_ppo"))
    parser.add_argument("--size", choices=list(SIZES), default="full")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "after_ppo.json")
    asked = parser.parse_args(words)
    size = SIZES[asked.size]
    run = lambda size=size, **job: kept(job, asked.runs, size)
    bases = [run(method="base", seed=asked.tuning_seed)]
    tuning = [
        run(method=method, seed=asked.tuning_seed, rate=rate, size=size | dict(looks=0))
        for method in asked.methods
        for rate in TRIED[method]
    ]
    rates = chosen(tuning)
    results: dict[str, Any] = dict(tuning_seed=asked.tuning_seed, rates=rates, size=size)
    results |= dict(methods=METHODS, tuning=tuning, bases=bases, runs=[], best_of_n=[], long=[])
    for seed in asked.seeds:
        bases.append(run(method="base", seed=seed))
        results["runs"] += [run(method=m, seed=seed, rate=rates[m]) for m in asked.methods]
        results["best_of_n"].append(run(method="best of n", seed=seed))
        asked.output.write_text(json.dumps(results) + "\n")
    longer = size | dict(episodes=size["long"])
    for seed in asked.seeds:
        results["long"] += [
            run(method=m, seed=seed, rate=rates[m], episodes=size["long"], size=longer)
            for m in METHODS
            if m in asked.methods
        ]
        asked.output.write_text(json.dumps(results) + "\n")
    plot(results, asked.output.with_suffix(".png"))


if __name__ == "__main__":
    main()
