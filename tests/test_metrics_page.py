"""The metrics page and the log have the same names: a metric without a row fails, and so does a row
without a metric."""

from __future__ import annotations

import ast
import json
import re
import sys
from collections import Counter

import pytest
import vllm_stand_in
from datasets import Dataset
from notebooks import NOTEBOOKS

from rlhf_nb.models import scorer_from, tiny_policy
from rlhf_nb.reward import RewardConfig, RewardTrainer
from rlhf_nb.runtime.ranges import RANGES
from rlhf_nb.trainer import PPOConfig, PPOTrainer

PAGE = NOTEBOOKS["47_metrics"]
HEADER = ("name", "formula", "healthy", "if not")
TRANSFORMERS = re.compile(
    r"(epoch|step|total_flos|train_.*|loss|grad_norm|learning_rate|eval_(runtime|samples_per_second|steps_per_second))"
)
PAIR = ("accuracy", "margin", "min_reward", "mean_reward", "max_reward")


def sources(kind: str) -> list[str]:
    return [
        "".join(cell["source"])
        for cell in json.loads(PAGE.read_text(encoding="utf-8"))["cells"]
        if cell["cell_type"] == kind
    ]


def rows_of(markdown: str) -> list[tuple[str, ...]]:
    """The rows of every table with this page's header; a bar inside a cell would make a row too
    long."""
    found, inside = [], False
    for line in markdown.splitlines():
        cells = (
            tuple(cell.strip() for cell in line.strip().strip("|").split("|"))
            if line.startswith("|")
            else ()
        )
        if cells == HEADER:
            inside = True
        elif not cells:
            inside = False
        elif inside and not set("".join(cells)) <= set("-: "):
            found.append(cells)
    return found


def names_of(rows: list[tuple[str, ...]]) -> list[str]:
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row[0])]


@pytest.fixture(scope="module")
def rows() -> list[tuple[str, ...]]:
    return [row for text in sources("markdown") for row in rows_of(text)]


def ours(logs: list[dict]) -> set[str]:
    return {name for log in logs for name in log if not TRANSFORMERS.fullmatch(name)}


def likes_c(prompts, responses, **columns):
    return [float(response.count("c")) for response in responses]


def brevity(prompts, responses, **columns):
    return [-float(len(response)) for response in responses]


QUIET = dict(
    use_cpu=True,
    report_to="none",
    save_strategy="no",
    disable_tqdm=True,
    logging_steps=1,
    per_device_train_batch_size=4,
    seed=0,
)


@pytest.fixture(scope="module")
def policy(letters):
    return tiny_policy(
        letters,
        0,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=32,
    )


@pytest.fixture(scope="module")
def ppo_logs(letters, policy, tmp_path_factory) -> list[dict]:
    args = PPOConfig(
        str(tmp_path_factory.mktemp("ppo")),
        total_episodes=8,
        response_length=4,
        num_sample_generations=1,
        **QUIET,
    )
    prompts = Dataset.from_dict(dict(prompt=["abc", "b", "cde", "ja"]))
    trainer = PPOTrainer(
        args,
        letters,
        policy,
        reward_model=[likes_c, brevity],
        train_dataset=prompts,
        eval_dataset=prompts,
    )
    trainer.train()
    return trainer.state.log_history


@pytest.fixture(scope="module")
def reward_logs(letters, policy, tmp_path_factory) -> list[dict]:
    pairs = Dataset.from_dict(
        dict(prompt=["ab"] * 8, chosen=["ccc", "cc"] * 4, rejected=["d", "dd"] * 4)
    )
    args = RewardConfig(str(tmp_path_factory.mktemp("reward")), max_steps=2, **QUIET)
    trainer = RewardTrainer(scorer_from(policy), args, pairs, pairs, letters)
    trainer.train()
    trainer.evaluate()
    return trainer.state.log_history


@pytest.fixture(scope="module")
def engine_logs(letters, policy, tmp_path_factory) -> list[dict]:
    "Of a run whose answers a stand-in for vLLM wrote, and whose loss holds a KL."
    args = PPOConfig(
        str(tmp_path_factory.mktemp("engine")),
        total_episodes=4,
        response_length=4,
        num_sample_generations=0,
        use_vllm=True,
        kl_in="loss",
        kl_estimator="k3",
        **QUIET,
    )
    with pytest.MonkeyPatch.context() as patch:
        for name, module in vllm_stand_in.modules().items():
            patch.setitem(sys.modules, name, module)
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "")
        trainer = PPOTrainer(
            args,
            letters,
            policy,
            reward_model=likes_c,
            train_dataset=Dataset.from_dict(dict(prompt=["abc", "b", "cde", "ja"])),
        )
        trainer.train()
    return trainer.state.log_history


# catches: a metric added to the trainer and not to the page; a row for a name that is never logged,
# or misspelt, or renamed
def test_the_page_has_every_name_and_no_other(rows, ppo_logs, engine_logs, reward_logs):
    logged = {
        re.sub(r"^objective/raw_scores/.*", "objective/raw_scores/NAME", name)
        for name in ours(ppo_logs + engine_logs)
    }
    logged |= {name for name in ours(reward_logs) if name not in PAIR}
    on_page = set(names_of(rows))
    assert on_page - logged == set(), "rows for names that nothing logs"
    assert logged - on_page == set(), "names that are logged and have no row"


# catches: a judge's own score that goes missing, so that the row with NAME describes nothing
def test_each_judge_has_its_own_raw_score(ppo_logs):
    assert {f"objective/raw_scores/{judge}" for judge in ("likes_c", "brevity")} <= ours(ppo_logs)


# catches: the page's promise that the reward model logs the same five while it trains, without
# `eval_`
def test_training_of_the_reward_model_logs_the_same(rows, reward_logs):
    assert {f"eval_{name}" for name in PAIR} <= set(names_of(rows))
    assert {name for name in ours(reward_logs) if not name.startswith("eval_")} == set(PAIR)


# catches: a name with two rows that may say different things; a formula with a bar in it, which
# splits its cell; an empty cell
def test_each_name_has_one_whole_row(rows):
    assert [name for name, n in Counter(names_of(rows)).items() if n > 1] == []
    for row in rows:
        assert len(row) == 4, f"{row[0]} has {len(row)} cells: is there a bar in its formula?"
        assert all(row[:3]) and (row[3] or row[0] == "`episode`"), f"{row[0]} has an empty cell"


# catches: an explorer with words of its own for a range
def test_the_explorer_says_what_the_table_says():
    shown = [
        ast.literal_eval(node.value)
        for code in sources("code")
        for node in ast.parse(code).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "SHOWN"
    ]
    assert len(shown) == 1 and len(shown[0]) > 3 and set(shown[0]) <= set(RANGES)
    assert any("RANGES[metric][:2]" in code for code in sources("code"))


# ---- The reader of tables itself ----

GOOD = (
    "Text.\n\n| name | formula | healthy | if not |\n|---|---|---|---|\n| `a/b`, `c` | $x$ | "
    "up | `learning_rate` |\n\n| name | what |\n|---|---|\n| `d` | no |"
)


# catches: a reader that takes names from another column, or from another table, or stops at the
# first row
def test_names_are_read_from_the_first_column_alone():
    assert names_of(rows_of(GOOD)) == ["a/b", "c"]
    assert len(rows_of(GOOD.replace("$x$", "$|x|$"))[0]) == 6
