"What the benchmarks on the mini world share: the models of `rlhf-nb demo`."

from __future__ import annotations

import time

from datasets import DatasetDict
from rich.console import Console
from transformers import PreTrainedTokenizerBase, set_seed

from rlhf_nb.cli import demo_stages
from rlhf_nb.cli.demo_run import DemoRun, DemoSettings


def up_to_reward(
    settings: DemoSettings,
) -> tuple[DemoRun, DatasetDict, PreTrainedTokenizerBase, dict[str, float]]:
    "A demo's run, world, tokenizer, stages up to the reward model; and seconds of new stages."
    run, seconds = DemoRun(settings, Console(quiet=True)), {}
    world, tokenizer = demo_stages.world_of(settings)
    for stage in ("sft", "pairs", "reward"):
        if not (run.folder / stage).is_dir():
            set_seed(settings.seed)
            start = time.process_time()
            getattr(demo_stages, f"{stage}_stage")(run, world, tokenizer)
            seconds[stage] = round(time.process_time() - start, 1)
    return run, world, tokenizer, seconds
