"""`rlhf-nb demo`: the whole of RLHF on embedded data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from rlhf_nb.base.fields import Index, setting
from rlhf_nb.base.files import read_object
from rlhf_nb.cli.demo_run import QUICK, DemoRun, DemoSettings, check_settings
from rlhf_nb.cli.help import About
from rlhf_nb.cli.parsing import Parser
from rlhf_nb.training.folders import run_lock

KEPT = (
    "no training: the fine-tuned model that comes with the package, which imitated 48,000 "
    "training posts"
)
STAGES = {
    "sft": "learn to write as the references do",
    "pairs": "show two summaries, ask which is better",
    "reward": "learn what was preferred",
    "ppo": "write what is preferred, and stay near the starting point",
}


@dataclass
class DemoArguments:
    "How the demo runs."

    quick: bool = setting(
        False,
        "In about a minute: from a fine-tuned model that comes with the package, with fewer labels "
        "and answers, at temperature 1 and kl_coef 0.2. What you give yourself stays.",
    )
    fresh: bool = setting(False, "Start over: delete what an earlier demo wrote in the folder.")
    threads: Index | None = setting(
        None,
        "CPU threads of torch. None: two, or fewer where torch would take fewer; models this small "
        "gain nothing from a third. On a busy machine take 1. 0: torch's choice.",
    )


ABOUT = About(
    usage="demo [--OPTION VALUE ...]",
    text="Supervised fine-tuning, a reward model and PPO on a small world of posts, and the "
    "verdict of a judge who knows the truth. It needs nothing, and writes the models, results.json "
    "and one page with the result and the rollouts into its folder. Run it again and it reuses "
    "finished stages.",
    examples=(
        "rlhf-nb demo --quick",
        "rlhf-nb demo --kl_coef 0 --output_dir runs/no_kl",
        "rlhf-nb demo --quick --save_steps 1, then "
        "rlhf-nb replay runs/mini_tldr --update 5 --learning_rate 1e-3",
    ),
)


def demo_parser() -> Parser:
    "Every option of `rlhf-nb demo`."
    return Parser(ABOUT, DemoSettings, DemoArguments)


def demo(
    settings: DemoSettings,
    fresh: bool = False,  # start over
    console: Console | None = None,
) -> dict[str, Any]:  # what results.json holds
    "The whole pipeline. Stages that are finished in the folder are reused."
    check_settings(settings)
    with run_lock(Path(settings.output_dir)):
        return stages(DemoRun(settings, console, fresh))


def stages(run: DemoRun) -> dict[str, Any]:
    "Each that is not finished, and what they came to."
    settings = run.settings
    from transformers import set_seed  # seconds that a mistake in the settings does not wait for

    from rlhf_nb.cli import demo_stages
    from rlhf_nb.cli.demo_log import print_end
    from rlhf_nb.ui.verdict import completions_of_run
    from rlhf_nb.ui.viewer import browse

    with demo_stages.quiet():
        with run.stage("world", f"{settings.posts:,} posts with references, seed {settings.seed}"):
            world, tokenizer = demo_stages.world_of(settings)
        for name, title in STAGES.items():
            if (run.folder / name).is_dir():
                run.console.print(f"[bold]{name}[/bold]  finished before, reused")
                continue
            if name == "sft" and settings.starting_model:
                kept = settings.starting_model == "kept"
                title = KEPT if kept else f"no training: the model in {settings.starting_model}"
            set_seed(settings.seed)
            with run.stage(name, title):
                getattr(demo_stages, f"{name}_stage")(run, world, tokenizer)
        with run.stage("judge", f"the gold judge reads {settings.eval_posts:,} test posts"):
            demo_stages.judge_stage(run, world, tokenizer)
    results = read_object(run.folder / "results.json")
    logs, folder = run.logs(), run.folder
    page = browse(folder).save_html(folder / "rollouts.html")
    seconds = sum(line["seconds"] for line in logs if line.get("event") == "done")
    quick, frame = run.kept_settings()["quick"], completions_of_run(folder)
    print_end(run.console, results, frame, quick, seconds, folder, page)
    return results


def demo_command(words: Sequence[str]) -> None:
    "`rlhf-nb demo`."
    parser = demo_parser()
    settings, options = parser.settings(words)
    if options.quick:  # what was typed stays
        parser.set_defaults(**QUICK)
        settings = parser.settings(words)[0]
    check_settings(settings)
    if options.threads != 0:
        import torch

        torch.set_num_threads(options.threads or min(2, torch.get_num_threads()))
    demo(settings, options.fresh)
