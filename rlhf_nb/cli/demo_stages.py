"""The stages of `rlhf-nb demo`: each trains or measures, and leaves its folder in the run."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pandas as pd
from datasets import Dataset, DatasetDict, concatenate_datasets, load_from_disk
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PrinterCallback,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    TrainerState,
)

from rlhf_nb.base.files import write_text_atomic
from rlhf_nb.base.loading import no_bars
from rlhf_nb.checkpoint import save_policy
from rlhf_nb.cli.demo_run import STARTING_MODEL, DemoRun, DemoSettings, kind_of
from rlhf_nb.evaluate import outcomes, paired_interval
from rlhf_nb.judging import judge_completions
from rlhf_nb.models import scorer_from, zero_head
from rlhf_nb.reward import RewardConfig, RewardTrainer
from rlhf_nb.scoring import center_rewards, pair_accuracy, score_texts
from rlhf_nb.sft import SFTConfig, SFTTrainer, quiet_bars
from rlhf_nb.tldr import gold_judge
from rlhf_nb.trainer import PPOConfig, PPOTrainer
from rlhf_nb.training.completions import Completions, complete, completions_table
from rlhf_nb.training.model_loading import (
    load_policy,
    load_scorer,
    load_tokenizer,
    tiny_policy,
    train_tokenizer,
)
from rlhf_nb.world import edit_pairs, mini_tldr, preference_pairs, probe_pairs


@contextmanager
def quiet() -> Iterator[None]:
    "datasets and transformers show no bars and no warnings meanwhile."
    with no_bars(quiet=True), quiet_bars(True):
        yield


class StageCallback(TrainerCallback):
    "A progress bar, and a line of metrics.jsonl for every log."

    def __init__(self, run: DemoRun, stage: str, metric: str):  # the one that the bar shows
        self.run, self.stage, self.metric = run, stage, metric
        self.bar = Progress(
            TextColumn("      "),
            BarColumn(30),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
            TextColumn("[bold]{task.fields[metric]}"),
            console=run.console,
            disable=run.console.quiet,
        )
        self.task = self.bar.add_task("", start=False, rate="", metric="")

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **given: Any) -> None:
        self.bar.reset(self.task, total=state.max_steps)
        self.bar.start()
        self.start = time.perf_counter()

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **given: Any) -> None:
        rate = state.global_step / (time.perf_counter() - self.start)
        self.bar.update(self.task, completed=state.global_step, rate=f"{rate:.1f} steps/s")

    def on_log(self, args: Any, state: TrainerState, control: Any, **given: Any) -> None:
        logs = {k: float(v) for k, v in given["logs"].items() if isinstance(v, int | float)}
        self.run.log(self.stage, **{"step": state.global_step} | logs)
        if self.metric in logs:
            self.bar.update(self.task, metric=f"{self.metric} {logs[self.metric]:.3f}")

    def on_train_end(self, args: Any, state: TrainerState, control: Any, **given: Any) -> None:
        self.bar.stop()


def train(trainer: Trainer, run: DemoRun, stage: str, metric: str) -> None:
    "Train with the stage's bar; an interrupt leaves the terminal as it was."
    for callback in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(callback)
    shown = StageCallback(run, stage, metric)
    trainer.add_callback(shown)
    try:
        trainer.train()
    finally:
        shown.bar.stop()


def starting_folder(s: DemoSettings) -> str:
    "Folder of the model that the run starts from; empty where it trains one."
    return str(STARTING_MODEL) if s.starting_model == "kept" else s.starting_model


def world_of(s: DemoSettings) -> tuple[DatasetDict, PreTrainedTokenizerBase]:
    "Posts, references and the tokenizer: each run makes them, from the settings alone."
    world = mini_tldr(s.seed, s.posts, max(s.validation_posts, 500), s.eval_posts)
    if start := starting_folder(s):
        return world, load_tokenizer(start)
    texts = zip(world["train"]["prompt"], world["train"]["completion"])
    return world, train_tokenizer(prompt + completion for prompt, completion in texts)


def common(s: DemoSettings, folder: Path, **more: Any) -> dict[str, Any]:
    "Arguments that all three trainers get."
    shared = dict(
        output_dir=str(folder),
        seed=s.seed,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        optim="adamw_torch_fused",
        weight_decay=0.0,
        max_grad_norm=1.0,
        lr_scheduler_type="linear",
    )
    return shared | more


def sft_args(s: DemoSettings, folder: Path, epochs: float = 1.5) -> SFTConfig:
    "How the demo imitates the references."
    return SFTConfig(
        **common(
            s,
            folder,
            learning_rate=3e-3,
            warmup_steps=min(50, int(epochs * s.posts) // 128),  # a quarter of a short run
            per_device_train_batch_size=32,
            num_train_epochs=epochs,
            logging_steps=20,
        )
    )


def sft_stage(run: DemoRun, world: DatasetDict, tokenizer: PreTrainedTokenizerBase) -> None:
    "Imitate the references; or take a model that has done so."
    s = run.settings
    with run.stage_folder("sft") as folder:
        if start := starting_folder(s):
            save_policy(load_policy(start), tokenizer, folder)
            return
        policy = tiny_policy(tokenizer, s.seed)
        trainer = SFTTrainer(
            policy,
            sft_args(s, folder),
            world["train"].select_columns(["prompt", "completion"]),
            processing_class=tokenizer,
        )
        train(trainer, run, "sft", "loss")
        save_policy(policy, tokenizer, folder)


def sampled_pairs(
    policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, posts: Dataset, seed: int
) -> Dataset:
    "Two samples of the policy for every post, labelled; equal ones are left out."
    first, second = (
        complete(policy, tokenizer, posts["prompt"], 32, 1.0, seed=2 * seed + i) for i in range(2)
    )
    differ = [i for i in range(len(posts)) if first.texts[i] != second.texts[i]]
    answers = [(" " + first.texts[i], " " + second.texts[i], "sample") for i in differ]
    stopped = [(first.stopped[i], second.stopped[i]) for i in differ]
    return preference_pairs(posts.select(differ), answers, stopped, seed)


def pairs_stage(run: DemoRun, world: DatasetDict, tokenizer: PreTrainedTokenizerBase) -> None:
    """Labelled sample pairs and edit pairs: wrong facts first, then everything mixed. The held-out
    pairs come from the test split."""
    s, policy = run.settings, load_policy(str(run.folder / "sft"))
    posts = world["train"].shuffle(seed=s.seed)
    cycle = lambda start, n: posts.select([i % len(posts) for i in range(start, start + n)])
    half = len(world["test"]) // 2
    held_out_posts = [world["test"].select(x) for x in (range(half), range(half, 2 * half))]
    kinds = ("swap", "drop", "drop", "opening", "repeat")
    facts_first = edit_pairs(cycle(0, s.fact_pairs), s.seed, kinds=("swap",))
    mixed = [
        sampled_pairs(policy, tokenizer, cycle(0, s.sample_pairs), s.seed),
        edit_pairs(cycle(s.sample_pairs, s.edit_pairs), s.seed + 1, kinds=kinds),
    ]
    held_out = [
        sampled_pairs(policy, tokenizer, held_out_posts[0], s.seed + 1),
        edit_pairs(held_out_posts[1], s.seed + 2),
    ]
    shuffled = concatenate_datasets(mixed).shuffle(seed=s.seed)
    train = concatenate_datasets([facts_first, shuffled])
    pairs = DatasetDict(train=train, test=concatenate_datasets(held_out))
    with run.stage_folder("pairs") as folder:
        pairs.save_to_disk(str(folder))
    run.log("pairs", train=len(pairs["train"]), test=len(pairs["test"]))


def reward_stage(run: DemoRun, world: DatasetDict, tokenizer: PreTrainedTokenizerBase) -> None:
    "Learn what was preferred; centre; measure on held-out pairs and on the probe."
    s, pairs = run.settings, load_from_disk(str(run.folder / "pairs"))
    with run.stage_folder("reward") as folder:
        args = RewardConfig(
            **common(
                s,
                folder,
                learning_rate=1e-3,
                warmup_steps=min(50, len(pairs["train"]) // 32),
                per_device_train_batch_size=8,
                num_train_epochs=1,
                logging_steps=50,
                train_sampling_strategy="sequential",
            )
        )
        model = scorer_from(load_policy(str(run.folder / "sft")), s.seed)
        trainer = RewardTrainer(
            model,
            args,
            pairs["train"].select_columns(["prompt", "chosen", "rejected"]),
            processing_class=tokenizer,
        )
        train(trainer, run, "reward", "accuracy")
        center_rewards(model, tokenizer, world["validation"])
        report = reward_report(model, tokenizer, pairs["test"], world["test"], s.seed)
        run.log("reward", **{k: value for k, value in report.items() if isinstance(value, float)})
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        (folder / "report.json").write_text(json.dumps(report))


def reward_report(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    pairs: Dataset,
    posts: Dataset,
    seed: int,
) -> dict[str, Any]:
    "Accuracy on held-out pairs by the gold order, and on the probe: overall, and by kind."

    def measure(data: Dataset) -> tuple[float, dict[str, float]]:
        share = lambda part: pair_accuracy(model, tokenizer, part).float().mean().item()
        rows = pd.Series(range(len(data))).groupby(list(data["kind"]))
        return share(data), {str(kind): share(data.select(its.tolist())) for kind, its in rows}

    wrong = probe_pairs(posts, seed)
    (accuracy, by_kind), (probe, by_slot) = measure(pairs), measure(wrong)
    return dict(
        accuracy=accuracy,
        by_kind=by_kind,
        probe=probe,
        probe_by_slot=by_slot,
        probe_pairs={slot: wrong["kind"].count(slot) for slot in by_slot},
    )


def with_scores(
    made: Completions, reward_model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> Completions:
    "A policy's summaries with the reward model's scores."
    texts = made.prompts, made.texts
    scores = score_texts(reward_model, tokenizer, *texts, stopped=made.stopped)
    return replace(made, scores=scores.tolist())


class GoldCallback(TrainerCallback):
    "Now and then the gold judge reads validation posts, for metrics.jsonl, not for the trainer."

    def __init__(
        self,
        run: DemoRun,
        policy: PreTrainedModel,  # the one that is trained
        reward_model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        posts: Dataset,
    ):
        self.run, self.posts = run, posts
        self.policy, self.reward_model, self.tokenizer = policy, reward_model, tokenizer

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **given: Any) -> None:
        every = max(1, state.max_steps // self.run.settings.evaluations)
        if state.global_step % every == 0 or state.global_step in (1, state.max_steps):
            self.look(state.global_step)

    def look(self, step: int) -> None:
        "Judge near-greedy summaries of the validation posts."
        made = complete(self.policy, self.tokenizer, self.posts["prompt"], 32, seed=0)
        gold, _ = judge_completions(made, self.posts, 0.01)
        scores = with_scores(made, self.reward_model, self.tokenizer).scores
        names = dict(win_rate="win_rate", points="gold", covered="covered", invented="invented")
        figures = {f"gold/{name}": getattr(gold, field) for name, field in names.items()}
        figures["gold/reward"] = sum(scores) / len(scores)
        self.run.log("ppo", step=step, episode=step * self.run.settings.batch, **figures)


def ppo_args(s: DemoSettings, folder: Path, **more: Any) -> PPOConfig:
    "How the demo does PPO."
    settings: dict[str, Any] = dict(
        learning_rate=6e-4,
        value_learning_rate=1e-3,
        total_episodes=s.episodes,
        num_ppo_epochs=4,
        num_mini_batches=2,
        per_device_train_batch_size=s.batch // 2,
        gradient_accumulation_steps=2,
        response_length=32,
        temperature=s.temperature,
        kl_coef=s.kl_coef,
        missing_eos_penalty=1.0,
        normalize_scores=True,
        value_warmup_updates=min(2, s.episodes // s.batch // 4),
        local_rollout_forward_batch_size=256,
        save_rollouts=True,
        num_sample_generations=0,
        logging_steps=1,
    )
    return PPOConfig(**common(s, folder, **settings | more))


def ppo_stage(run: DemoRun, world: DatasetDict, tokenizer: PreTrainedTokenizerBase) -> None:
    "PPO on the reward model. The trainer gets prompts, and nothing else of the world."
    s, kept = run.settings, dict[str, Any]()
    if run.settings.save_steps:
        kept = dict(save_strategy="steps", save_steps=s.save_steps, save_start=True)
    with run.stage_folder("ppo") as folder:
        args = ppo_args(s, folder, **kept)
        policy = load_policy(str(run.folder / "sft"))
        reward_model = load_scorer(str(run.folder / "reward"))
        trainer = PPOTrainer(
            args,
            tokenizer,
            policy,
            None,
            reward_model,
            world["train"].select_columns(["prompt"]),
            zero_head(load_scorer(str(run.folder / "reward"))),
        )
        posts = world["validation"].select(range(s.validation_posts))
        gold = GoldCallback(run, policy, reward_model, tokenizer, posts)
        gold.look(0)
        trainer.add_callback(gold)
        train(trainer, run, "ppo", "objective/raw_scores")
        trainer.save_model(str(folder))


def paired_row(ppo: list[float], sft: list[float], temperature: float) -> dict[str, float]:
    "The win rate of PPO less that of SFT on the same posts, with its paired interval."
    low, high = paired_interval(ppo, sft)
    difference = (sum(ppo) - sum(sft)) / len(ppo)
    return dict(temperature=temperature, difference=difference, low=low, high=high, posts=len(ppo))


def judge_stage(run: DemoRun, world: DatasetDict, tokenizer: PreTrainedTokenizerBase) -> None:
    "SFT and PPO on the same test posts, near-greedy and at temperature 1, by the gold judge."
    s, posts, rows = run.settings, world["test"], []
    truths = [json.loads(facts) for facts in posts["facts"]]
    theirs = [gold_judge(text, truth).gold for text, truth in zip(posts["completion"], truths)]
    won: dict[tuple[str, float], list[float]] = {}
    reward_model = load_scorer(str(run.folder / "reward"))
    (run.folder / "completions").mkdir(exist_ok=True)
    for name in ("sft", "ppo"):
        policy = load_policy(str(run.folder / name))
        for temperature in (0.01, 1.0):
            made = complete(policy, tokenizer, posts["prompt"], 32, temperature, seed=s.seed)
            verdict, golds = judge_completions(made, posts, temperature)
            rows.append(dict(model=name, **asdict(verdict)))
            won[name, temperature] = outcomes([one.gold for one in golds], theirs)
            if temperature == 0.01:
                frame = completions_table(with_scores(made, reward_model, tokenizer))
                frame["gold"] = [v.gold for v in golds]
                frame["reference"] = list(posts["completion"])
                table = run.folder / "completions" / f"{name}.csv"
                write_text_atomic(table, frame.to_csv(index=False))
    paired = [paired_row(won["ppo", t], won["sft", t], t) for t in (0.01, 1.0)]
    results = dict(
        kind=kind_of(s),
        reward=json.loads((run.folder / "reward" / "report.json").read_text()),
        verdict=rows,
        paired=paired,
    )
    write_text_atomic(run.folder / "results.json", json.dumps(results, indent=1))
