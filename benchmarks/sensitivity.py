"""One setting of PPO at a time, over seeds: what moves the gold win rate on the mini world.

    OMP_NUM_THREADS=1 python benchmarks/sensitivity.py           # 90 runs; they resume
    OMP_NUM_THREADS=1 python benchmarks/sensitivity.py --collect # only gather what is finished

Around the recipe of `rlhf-nb demo --quick`, half as long: the kept starting model, one reward model
for all, 640 answers in ten updates. Ten settings are changed one at a time, each to two to four
other values, on three seeds of sampling and shuffling that no setting was chosen on; the recipe
itself runs on six. The judge is the gold judge on 400 test posts, near-greedy and at temperature 1;
training never sees it. Each finished run is a JSON in the runs' folder, and the same command goes
on where it stopped, seed after seed. Writes benchmarks/results/sensitivity.json.
"""

from __future__ import annotations

import json
import math
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from common import HERE, described_parser, environment
from datasets import DatasetDict
from demo_runs import up_to_reward
from transformers import PreTrainedTokenizerBase

from rlhf_nb.base.files import write_text_atomic
from rlhf_nb.cli import demo_stages
from rlhf_nb.cli.demo_run import QUICK, DemoRun, DemoSettings
from rlhf_nb.exercises.museum import train_silently
from rlhf_nb.frontier import response_kl
from rlhf_nb.judging import judge_completions
from rlhf_nb.models import zero_head
from rlhf_nb.rollout import Rollout
from rlhf_nb.trainer import PPOConfig, PPOTrainer
from rlhf_nb.training.completions import complete
from rlhf_nb.training.model_loading import load_policy, load_scorer

TOKENS = 32
EPISODES = 640  # of a run: half of the quick demo's, in ten updates like it
SEEDS = (300, 301, 302)  # of every value
MORE_SEEDS = (303, 304, 305)  # of the recipe alone: how much a seed does
RECIPE: dict[str, Any] = dict(
    learning_rate=6e-4,
    kl_coef=0.2,
    lam=0.95,
    cliprange=0.2,
    num_ppo_epochs=4,
    num_mini_batches=2,
    batch=64,
    temperature=1.0,
    vf_coef=0.1,
    whitening="advantages",
)
VALUES: dict[str, tuple[Any, ...]] = dict(  # in order, the recipe's among them
    learning_rate=(6e-5, 2e-4, 6e-4, 2e-3, 6e-3),
    kl_coef=(0.0, 0.05, 0.2, 0.8),
    lam=(0.0, 0.7, 0.95, 1.0),
    cliprange=(0.02, 0.2, 1.0),
    num_ppo_epochs=(1, 2, 4, 8),
    num_mini_batches=(1, 2, 4, 8),
    batch=(16, 32, 64, 128),
    temperature=(0.4, 0.7, 1.0, 1.3),
    vf_coef=(0.01, 0.1, 1.0),
    whitening=("none", "advantages", "advantages and rewards"),
)


class Job(NamedTuple):
    "A run: the recipe with one setting changed."

    setting: str  # empty: the recipe
    value: Any
    seed: int

    @property
    def name(self) -> str:
        "Of its file."
        what = f"{self.setting}={self.value}" if self.setting else "recipe"
        return f"{what}_seed{self.seed}".replace(" ", "_")


def plan() -> list[Job]:
    "Every run, in the order that gives the whole picture early."
    jobs = [Job("", None, seed) for seed in (*SEEDS, *MORE_SEEDS)]
    for seed in SEEDS:
        for setting, values in VALUES.items():
            jobs += [Job(setting, v, seed) for v in values if v != RECIPE[setting]]
    return jobs


class NotWhitened(PPOTrainer):
    "Advantages as GAE gives them: what is left of the returns without the values."

    def advantages(self, r: Rollout) -> Rollout:
        r = super().advantages(r)
        return r.with_(advantages=(r.returns - r.values) * r.mask)


def config(s: dict[str, Any], seed: int, episodes: int, folder: str) -> PPOConfig:
    "The arguments of the demo's PPO stage, with these settings."
    own = {k: v for k, v in s.items() if k not in ("batch", "whitening")}
    own |= dict(whiten_rewards=s["whitening"] == "advantages and rewards", save_rollouts=False)
    demo = DemoSettings(folder, seed, episodes=episodes, batch=s["batch"])
    return demo_stages.ppo_args(demo, Path(folder), **own)


def rounded(value: float) -> float | None:
    "To four digits; null where it is not finite, which JSON does not know."
    return float(f"{value:.4g}") if math.isfinite(value) else None


def judged(policy: Any, tokenizer: Any, posts: Any, seed: int) -> list[dict[str, float | None]]:
    "The gold judge near-greedy and at temperature 1."
    rows = []
    for temperature in (0.01, 1.0):
        completions = complete(policy, tokenizer, posts["prompt"], TOKENS, temperature, seed=seed)
        report = asdict(judge_completions(completions, posts, temperature)[0])
        rows.append({name: rounded(value) for name, value in report.items()})
    return rows


def by_update(history: list[dict[str, float]]) -> dict[str, list[float | None]]:
    "Every logged metric, a value an update."
    logs = [log for log in history if "objective/kl" in log]
    return {
        name: [rounded(log.get(name, math.nan)) for log in logs]
        for name in logs[0]
        if name not in ("epoch", "step")
    }


def one(job: Job, run: DemoRun, world: DatasetDict, tokenizer: PreTrainedTokenizerBase) -> dict:
    "Train, judge, and what it took."
    s = RECIPE | ({job.setting: job.value} if job.setting else {})
    start, cpu = time.perf_counter(), time.process_time()
    kind = NotWhitened if s["whitening"] == "none" else PPOTrainer
    policy, reward = load_policy(str(run.folder / "sft")), str(run.folder / "reward")
    with tempfile.TemporaryDirectory() as folder:
        trainer = kind(
            config(s, job.seed, EPISODES, folder),
            tokenizer,
            policy,
            None,
            load_scorer(reward),
            world["train"].select_columns(["prompt"]),
            zero_head(load_scorer(reward)),
        )
        failed = ""
        try:
            train_silently(trainer)
        except (ValueError, RuntimeError, FloatingPointError) as error:  # part of the result
            failed = f"{type(error).__name__}: {error}"
    seconds, trained = time.perf_counter() - start, time.process_time() - cpu
    reference = load_policy(str(run.folder / "sft"))
    kl = response_kl(policy, reference, tokenizer, world["test"]["prompt"][:200], TOKENS)
    return dict(
        setting=job.setting,
        value=job.value,
        seed=job.seed,
        failed=failed,
        verdict=judged(policy, tokenizer, world["test"], job.seed),
        kl=rounded(kl.mean().item()),
        seconds=round(seconds, 1),
        processor_seconds=round(trained, 1),
        log=by_update(trainer.state.log_history),
    )


def collect(folder: Path, output: Path) -> None:
    "Every finished run, in one file."
    files = [folder / "runs" / f"{job.name}.json" for job in plan()]
    runs = [json.loads(path.read_text()) for path in files if path.is_file()]
    total = lambda name: round(sum(run[name] for run in runs) / 3600, 2)
    kept = dict(
        command="OMP_NUM_THREADS=1 python benchmarks/sensitivity.py",
        recipe=f"rlhf-nb demo --quick --episodes {EPISODES} --batch {RECIPE['batch']}",
        demo=QUICK | dict(episodes=EPISODES, batch=RECIPE["batch"]),
        settings=RECIPE,
        values=VALUES,
        planned=len(plan()),
        hours=dict(training=total("seconds"), processor=total("processor_seconds")),
        environment=json.loads((folder / "environment.json").read_text()),
        start=json.loads((folder / "start.json").read_text()),
        runs=runs,
    )
    output.write_text(json.dumps(kept, separators=(",", ":")) + "\n")
    print(f"{len(runs)} of {len(plan())} runs, {kept['hours']['training']} hours, in {output}")


def main(words: list[str] | None = None) -> None:
    parser = described_parser(__doc__)
    parser.add_argument("--runs", type=Path, default=Path("runs/sensitivity"))
    parser.add_argument("--output", type=Path, default=HERE / "results" / "sensitivity.json")
    parser.add_argument("--collect", action="store_true", help="train nothing")
    parser.add_argument("--only", type=int, help="no more new runs than this")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes: a test of the benchmark")
    options = parser.parse_args(words)
    (options.runs / "runs").mkdir(parents=True, exist_ok=True)
    if not options.collect:
        train(options.runs, options.only, options.tiny)
    collect(options.runs, options.output)


TINY = dict(posts=300, sample_pairs=32, fact_pairs=8, edit_pairs=32, episodes=256, eval_posts=8)


def train(folder: Path, only: int | None, tiny: bool) -> None:
    "The runs of the plan that are not finished."
    torch.set_num_threads(1)
    with demo_stages.quiet():
        # the quick demo's of seed 0, made once
        quick = QUICK | (TINY if tiny else {})
        run, world, tokenizer, _ = up_to_reward(DemoSettings(str(folder / "shared"), **quick))
        if not (folder / "start.json").is_file():
            policy = load_policy(str(run.folder / "sft"))
            rows = judged(policy, tokenizer, world["test"], run.settings.seed)
            write_text_atomic(folder / "start.json", json.dumps(rows))
        if not (folder / "environment.json").is_file():
            write_text_atomic(folder / "environment.json", json.dumps(environment(True)))
        left = [job for job in plan() if not (folder / "runs" / f"{job.name}.json").is_file()]
        for job in left[:only]:
            found = one(job, run, world, tokenizer)
            write_text_atomic(folder / "runs" / f"{job.name}.json", json.dumps(found))
            rates = [row["win_rate"] for row in found["verdict"]]
            print(job.name, rates, f"KL {found['kl']}", f"{found['seconds']} s", flush=True)


if __name__ == "__main__":
    main()
