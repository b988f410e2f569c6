"""`rlhf-nb judge`: how often a model's answers beat the references, or another model's."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from datasets import Dataset
from rich.console import Console
from rich.markup import escape
from rich.progress import track
from transformers import PreTrainedTokenizerBase

from rlhf_nb.base.encoding import marked_pair, strip_stop, template_settings
from rlhf_nb.base.fields import Count, NotNegative, Positive, Seed, setting
from rlhf_nb.base.files import OVERWRITE, writable, write_text_atomic
from rlhf_nb.base.terminal import harmless
from rlhf_nb.cli.arguments import TRAINER_HELP, DataArguments, ModelArguments
from rlhf_nb.cli.data import check_prompt_column, check_template, drop_long, load_rows, take
from rlhf_nb.cli.help import About
from rlhf_nb.cli.models import load_options, load_run_tokenizer, require_name
from rlhf_nb.cli.parsing import Parser
from rlhf_nb.cli.quick import check_there
from rlhf_nb.judges import load_judge
from rlhf_nb.judging import GoldPairJudge, RewardModelJudge, judge_pairs
from rlhf_nb.training.completions import Completions, complete
from rlhf_nb.training.endpoint_judge import EndpointJudge
from rlhf_nb.training.model_loading import load_policy, load_tokenizer
from rlhf_nb.training.prompts import prompt_columns, read_prompts, turns_text

HEADS = "query", "model response", "compared with", "verdict"  # of --output


@dataclass
class JudgeArguments:
    "Who judges what."

    judge_model: str = setting(
        "gpt-4o-mini",
        "gold (the judge of mini_tldr), the folder of a reward model, or a model's name at an "
        "OpenAI-compatible endpoint.",
    )
    judge_base_url: str | None = setting(
        None,
        "URL of the endpoint, up to and with /v1. None: OPENAI_BASE_URL, or else api.openai.com. "
        "The key is read from OPENAI_API_KEY.",
    )
    opponent_name_or_path: str | None = setting(
        None, "Compare with this model's answers instead of the references."
    )
    num_examples: Count | None = setting(None, "The first so many of the test split. None: all.")
    response_length: Count = setting(53, "Maximum tokens of an answer.")
    temperature: Positive = setting(0.01, "Temperature of the sampling; 0.01 is near-greedy.")
    batch_size: Count = setting(64, "Prompts that are answered at a time.")
    seed: Seed = setting(0, "Seed of the sampling, and of the interval.")
    one_order: bool = setting(False, "Show each pair in one random order, not both: half the cost.")
    cache: str | None = setting(
        "judgings.jsonl", "File that keeps every verdict of an endpoint. None: keep none."
    )
    concurrency: Count = setting(8, "Requests to the endpoint at a time.")
    timeout: Positive = setting(60.0, "Seconds for a request, until its whole reply is here.")
    attempts: Count = setting(5, "How often to try a request that fails for a passing reason.")
    prices: list[NotNegative] | None = setting(
        None, "Prices of a million tokens in, and out: the cost is printed."
    )
    output: str | None = setting(None, "CSV file for every pair and its verdict.")
    overwrite: bool = setting(False, OVERWRITE)
    use_cpu: bool = setting(False, "Do not use the GPU.")


ABOUT = About(
    usage="judge [--config FILE] [--OPTION VALUE ...]",
    text="Pairwise win rate with its interval: the model answers the prompts of the test split "
    "near-greedily, and the judge compares each answer with the reference, or with another "
    "model's answer, in both orders. It needs the columns prompt and completion, and a judge. "
    "Verdicts of an endpoint are kept in --cache and never paid for twice; --output writes every "
    "pair with its verdict.",
    examples=(
        "rlhf-nb judge --model_name_or_path runs/ppo --dataset_name mini_tldr --judge_model gold",
        "rlhf-nb judge --model_name_or_path runs/ppo --dataset_name trl-lib/tldr "
        "--dataset_test_split validation --judge_model gpt-4o-mini --num_examples 1000",
    ),
    options={
        "data and model": ("config", *(f.name for f in fields(DataArguments))),
        "the model that answers": tuple(f.name for f in fields(ModelArguments)),
        "judging": tuple(f.name for f in fields(JudgeArguments)),
        "help": ("help", "help_all"),
    },
    required={"dataset_name": "required", "model_name_or_path": "required"},
    help=TRAINER_HELP
    | {
        "model_name_or_path": "The model to judge: a name on the hub, or a folder.",
        "seed": "Seed of the sampling, and of the interval.",
    },
)


def judge_parser() -> Parser:
    "Every option of `rlhf-nb judge`."
    return Parser(ABOUT, DataArguments, ModelArguments, JudgeArguments)


def make_judge(options: JudgeArguments) -> Any:
    "The judge of that name. Raises ValueError or FileNotFoundError where there is none."
    name, path = options.judge_model, Path(options.judge_model)
    if name == "gold":
        return GoldPairJudge()
    if path.is_dir():
        with require_name("--judge_model", name):
            model = on_device(load_judge(name), options).eval()
            return RewardModelJudge(model, load_tokenizer(name), options.batch_size)
    check_there("--judge_model", name)
    return EndpointJudge(
        name,
        options.judge_base_url,
        timeout=options.timeout,
        attempts=options.attempts,
        cache=options.cache,
        concurrency=options.concurrency,
        prices=None if options.prices is None else (options.prices[0], options.prices[1]),
    )


def on_device(model: Any, options: JudgeArguments) -> Any:
    "The model on the GPU, where there is one and it may be used."
    return model.to("cuda" if torch.cuda.is_available() and not options.use_cpu else "cpu")


def read_answers(
    name: str | None,  # of the model
    flag: str,  # the option that named it
    models: ModelArguments,
    options: JudgeArguments,
    rows: Dataset,  # with prompts, and what their chat template needs
) -> tuple[PreTrainedTokenizerBase, Completions]:
    """The model's tokenizer, and its completions of the prompts as its template writes them. They
    end where its generation config says."""
    with require_name(flag, name) as known:
        model = on_device(load_policy(known, **load_options(models)), options)
        own = models.tokenizer_name_or_path if flag == "--model_name_or_path" else None
        tokenizer = load_tokenizer(own or known)
    ends = model.generation_config.eos_token_id
    ids = sorted({"input_ids", "attention_mask"} & {*rows.column_names})  # of another tokenizer
    batches = iter(
        track(
            range(-(-len(rows) // options.batch_size)),
            escape(f"answers of {name}"),
            transient=True,
            console=Console(stderr=True),
            disable=not sys.stderr.isatty(),
        )
    )

    return tokenizer, complete(
        model,
        tokenizer,
        read_prompts(prompt_columns(rows.remove_columns(ids)), tokenizer)[0],
        options.response_length,
        options.temperature,
        [ends] if isinstance(ends, int) else ends,
        options.batch_size,
        options.seed,
        on_batch=lambda: next(batches, None),
    )


def rows_to_judge(data: DataArguments, options: JudgeArguments) -> Dataset:
    "Rows with a prompt and something to compare with. Raises ValueError where columns are missing."
    name = data.dataset_test_split
    splits = load_rows(data.dataset_name, data.dataset_config, data.dataset_seed, (name,))
    if name == "test" and list(splits) == ["train"]:
        name = "train"  # a file has one split
    rows = take(splits, name, "--dataset_test_split")
    needed = {"prompt"} if options.opponent_name_or_path else {"prompt", "completion"}
    if missing := sorted(needed - set(rows.column_names)):
        raise ValueError(
            f"the data set has columns {rows.column_names} and lacks {missing}: judging needs "
            "prompt, and completion or --opponent_name_or_path."
        )
    check_prompt_column(data.dataset_name, rows)
    if options.judge_model == "gold" and "facts" not in rows.column_names:
        raise ValueError(
            "--judge_model gold needs the column facts: --dataset_name mini_tldr has it."
        )
    if options.num_examples is None:
        return rows
    if options.num_examples > len(rows):
        raise ValueError(
            f"--num_examples is {options.num_examples} and the split has {len(rows)} rows: give a "
            f"number from 1 to {len(rows)}."
        )
    return rows.select(range(options.num_examples))


def judge_command(words: Sequence[str]) -> None:
    "`rlhf-nb judge`."
    data, models, options = judge_parser().settings(words)
    if options.prices is not None and len(options.prices) != 2:
        raise ValueError(f"--prices is {options.prices}: give two, of a million tokens in and out.")
    if options.output is not None:
        writable(options.output, "--output", options.overwrite, ",".join(HEADS).encode())
    rows = rows_to_judge(data, options)
    tokenizer = load_run_tokenizer(models)
    check_template(data.dataset_name, rows, tokenizer)
    judge = make_judge(options)
    rows = drop_long(rows, tokenizer, data.max_prompt_length)
    name = models.model_name_or_path
    tokenizer, ours = read_answers(name, "--model_name_or_path", models, options, rows)
    columns: dict[str, list] = dict(facts=rows["facts"][:]) if "facts" in rows.column_names else {}
    talks = isinstance(judge, RewardModelJudge) and not isinstance(rows[0]["prompt"], str)
    if talks:  # it reads them through its own template
        columns |= dict(conversations=rows["prompt"][:], settings=[*map(template_settings, rows)])
    if other := options.opponent_name_or_path:
        _, found = read_answers(other, "--opponent_name_or_path", models, options, rows)
        theirs, stopped = found.texts, list(found.stopped)
    else:
        theirs, stopped = [reference(row, tokenizer) for row in rows], [True] * len(rows)
    # conversations turn by turn, but for a reward model that may know the policy's markup
    shown = replace(ours, prompts=[turns_text(row["prompt"]) for row in rows])
    report = judge_pairs(
        judge,
        (ours if isinstance(judge, RewardModelJudge) else shown).prompts,
        ours.texts,
        theirs,
        columns,
        list(zip(ours.stopped, stopped)),
        both_orders=not options.one_order,
        seed=options.seed,
    )
    try:
        if options.output is not None:
            judged = zip(shown.prompts, shown.texts, theirs, report.scores)
            frame = pd.DataFrame(judged, columns=[*HEADS])
            write_text_atomic(options.output, frame.to_csv(index=False))  # it appears whole
            where = harmless(options.output)
            print(f"rlhf-nb judge: {len(frame):,} pairs and their verdicts in {where}")
    finally:  # also where the file cannot be written
        print(harmless(str(report)))


def reference(row: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> str:
    "What the reference answers, as the model's template writes it, without what ends it."
    given = row["prompt"], row["completion"]
    found = marked_pair(*given, tokenizer, ends=False, **template_settings(row))
    return strip_stop(found.text[found.answers[0][0] :], tokenizer)
