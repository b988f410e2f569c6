"""The settings of `rlhf-nb demo`, and the folder of a run: its stages, its metrics."""

from __future__ import annotations

import json
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from rlhf_nb.base.fields import Count, Index, NotNegative, Positive, Seed, check_fields, setting
from rlhf_nb.base.files import DEMO_MARK, append_jsonl, read_jsonl, read_object, write_text_atomic
from rlhf_nb.base.terminal import terminal_text


@dataclass(frozen=True)
class DemoSettings:
    "Where the run goes, and the numbers behind it."

    output_dir: str = setting(
        "runs/mini_tldr", "Folder of the run. Stages that are finished there are reused."
    )
    seed: Seed = setting(0, "Seed of the world, the models, the sampling and every shuffle.")
    kl_coef: NotNegative = setting(
        0.05,
        "Weight of the KL penalty. Try 0: the policy follows the learned reward alone, and gold "
        "may fall while it rises.",
    )
    posts: Count = setting(24_000, "Posts to imitate, and to label.")
    sample_pairs: Count = setting(6_000, "Pairs of two samples of the SFT model.")
    fact_pairs: Count = setting(
        16_000,
        "Pairs of a summary and the same with one fact wrong: hard to learn, so they come first.",
    )
    edit_pairs: Count = setting(
        8_000,
        "Pairs of a summary and the same with one thing changed: a fact dropped, an opening, a "
        "repeat.",
    )
    starting_model: str = setting(
        "",
        "Folder of a fine-tuned model and its tokenizer to start from; 'kept' is the one that "
        "comes with the package. Empty: one is trained.",
    )
    temperature: Positive = setting(0.7, "Temperature at which PPO samples.")
    episodes: Count = setting(6_144, "Summaries that PPO samples.")
    batch: Count = setting(256, "Episodes of one update.")
    eval_posts: Count = setting(2_000, "Test posts that the gold judge reads.")
    validation_posts: Count = setting(
        500, "Posts judged now and then while PPO runs; training does not see the verdicts."
    )
    evaluations: Count = setting(8, "How often they are judged.")
    save_steps: Index = setting(
        0,
        "Keep PPO's state after each so many updates, and before the first; 0: keep none. With 1, "
        "rlhf-nb replay RUN does any update again with other settings.",
    )


QUICK: dict[str, Any] = dict(  # from a kept model, with fewer labels and answers
    starting_model="kept",
    posts=6_000,
    sample_pairs=3_000,
    fact_pairs=500,
    edit_pairs=3_000,
    episodes=1_280,
    batch=128,
    temperature=1.0,
    kl_coef=0.2,
    eval_posts=400,
    validation_posts=100,
    evaluations=2,
)
SIZES = ("posts", "sample_pairs", "fact_pairs", "edit_pairs", "episodes", "eval_posts")
STARTING_MODEL = Path(__file__).with_name("starting_model")  # by benchmarks/starting_model.py


def kind_of(s: DemoSettings) -> str:
    "The usual run, the quick one, or one with settings of its own (empty), whatever the seed."
    usual = DemoSettings(s.output_dir, s.seed, save_steps=s.save_steps)
    return {usual: "usual", replace(usual, **QUICK): "quick"}.get(s, "")


def check_settings(s: DemoSettings) -> None:
    "Raises ValueError with the option and how to fix it."
    check_fields(s, "--")
    if s.batch % 2 or s.episodes < s.batch or s.posts < s.batch:
        raise ValueError(
            f"--batch is {s.batch}: give an even number no larger than --episodes ({s.episodes}) "
            f"and --posts ({s.posts})."
        )
    if s.starting_model not in ("", "kept") and not Path(s.starting_model).is_dir():
        raise ValueError(
            f"--starting_model is {s.starting_model}, and there is no such folder: give one that "
            "rlhf-nb sft wrote, or 'kept'."
        )


STAGES = ("sft", "pairs", "reward", "ppo")  # each a folder
FILES = ("settings.json", "metrics.jsonl", "results.json", "rollouts.html")


class DemoRun:
    "A run folder, the settings that it belongs to, and its stages."

    def __init__(self, settings: DemoSettings, console: Console | None = None, fresh: bool = False):
        self.settings, self.folder = settings, Path(settings.output_dir)
        self.metrics, self.console = self.folder / "metrics.jsonl", console or Console()
        self.check_own()
        if fresh:
            self.clear()
        self.folder.mkdir(parents=True, exist_ok=True)
        if not self.name:
            write_text_atomic(self.folder / DEMO_MARK, json.dumps(dict(demo=uuid.uuid4().hex)))
        path, kept = self.folder / "settings.json", self.kept_settings()
        before = read_object(path, kept)
        if before != kept:
            differ = [k for k, x in kept.items() if before.get(k) != x and k != "quick"]
            changed = ", ".join(f"--{k} {before.get(k)}" for k in differ)
            raise ValueError(
                f"{self.folder} holds a run with {changed}: give the same, another "
                "--output_dir, or --fresh to start over."
            )
        write_text_atomic(path, json.dumps(kept, indent=1))

    @property
    def name(self) -> str:
        "What marks this folder as a demo's; empty where nothing does."
        return read_object(self.folder / DEMO_MARK, {}).get("demo", "")

    def stage_of(self, name: str) -> tuple[str, dict[str, Any]]:
        "The demo that wrote a stage, and its files; nothing where no demo did."
        sealed = read_object(self.folder / name / "manifest.json", {})
        return sealed.get("run", {}).get("demo", ""), sealed.get("files", {})

    def check_own(self) -> None:
        "Raises ValueError where the folder holds something under a name that the demo uses."
        names = () if self.name else (*FILES, "completions", *(f"{s}.partial" for s in STAGES))
        others = [name for name in names if (self.folder / name).exists()]
        others += ["metrics.jsonl"] * any(self.name and "stage" not in x for x in self.logs())
        others += [s for s in STAGES if (self.folder / s).exists() and not self.stage_of(s)[0]]
        if others:
            raise ValueError(
                f"{self.folder} holds {', '.join(others)}, which no demo wrote: move it, or give "
                "another --output_dir."
            )

    @contextmanager
    def stage_folder(self, stage: str) -> Iterator[Path]:
        "The folder of a stage, which appears when all is in it, marked as this demo's."
        from rlhf_nb.checkpoint import seal, stage_folder

        with stage_folder(self.folder / stage) as folder:
            yield folder
            seal(folder, demo=self.name, stage=stage)

    def kept_settings(self) -> dict[str, Any]:
        "The settings as settings.json keeps them, with a mark for a run that is small."
        kept = {k: value for k, value in asdict(self.settings).items() if k != "output_dir"}
        return kept | dict(quick=all(kept[name] <= QUICK[name] for name in SIZES))

    def clear(self) -> None:
        """Delete what the run in this folder wrote, by its marks, and print it. Raises ValueError,
        and deletes nothing, where a stage holds something else."""
        from rlhf_nb.checkpoint import MANIFEST

        stages = [self.folder / name for name in STAGES if (self.folder / name).exists()]
        for path in stages:
            if Path(self.settings.starting_model or ".").resolve().is_relative_to(path.resolve()):
                raise ValueError(
                    f"--starting_model {self.settings.starting_model} is in {path}, which --fresh "
                    "deletes: give another --output_dir, or a copy."
                )
            demo, known = self.stage_of(path.name)
            inside = [p.relative_to(path).as_posix() for p in path.rglob("*") if p.is_file()]
            cached = {p.relative_to(path).as_posix() for p in path.rglob("cache-*.arrow")}
            sealed = {p.relative_to(path).as_posix() for p in path.rglob(MANIFEST)}
            others = [x for x in inside if x not in {*known} | sealed | cached]  # of datasets
            if others or demo != self.name or path.is_symlink():
                what = path / others[0] if others else path
                raise ValueError(
                    f"{what} was not written by the run in {self.folder}, so --fresh leaves it: "
                    "move it, or give another --output_dir."
                )
        tables = [self.folder / "completions" / f"{name}.csv" for name in ("sft", "ppo")]
        files = [p for p in (*(self.folder / name for name in FILES), *tables) if p.is_file()]
        if found := [*stages, *files]:
            names = ", ".join(path.relative_to(self.folder).as_posix() for path in found)
            line = f"--fresh: deletes {names} in {self.folder}"
            self.console.print(terminal_text(line, self.console), soft_wrap=True)
        for path in files:
            path.unlink()
        for path in stages:
            shutil.rmtree(path)

    def logs(self) -> list[dict[str, Any]]:
        "Every whole line of metrics.jsonl."
        return read_jsonl(self.metrics) if self.metrics.is_file() else []

    def log(self, stage: str, **values: Any) -> None:
        "Add one line to metrics.jsonl."
        append_jsonl(self.metrics, dict(stage=stage, **values))

    @contextmanager
    def stage(self, name: str, title: str) -> Iterator[None]:
        "Print a stage's name, forget what it logged before, and log how long it takes."
        self.console.print(f"[bold]{name}[/bold]  {title}")
        kept = [log for log in self.logs() if log["stage"] != name]
        write_text_atomic(self.metrics, "".join(json.dumps(log) + "\n" for log in kept))
        start = time.perf_counter()
        yield
        seconds = time.perf_counter() - start
        self.log(name, event="done", seconds=round(seconds, 2))
        self.console.print(f"       [dim]{seconds:.0f} s[/dim]")
