"""The registry of metrics: it has the names of the log, no more and no fewer, and whatever shows a
metric has it from there."""

from __future__ import annotations

import inspect
import json
import math
import re
import sys
from dataclasses import replace

import pandas as pd
import pytest
import vllm_stand_in
from datasets import Dataset
from notebooks import NOTEBOOKS
from ppo_fixtures import SIZES
from small_runs import QUIET, likes_c

from rlhf_nb.environments import guess_number
from rlhf_nb.models import scorer_from
from rlhf_nb.reward import RewardConfig, RewardTrainer
from rlhf_nb.trainer import PPOConfig, PPOTrainer
from rlhf_nb.training.alarms import hacking_alarms
from rlhf_nb.training.metrics import (
    LOG_NAMES,
    METRICS,
    RANGES,
    TABLES,
    Metric,
    healthy,
    in_order,
    metric_of,
    metrics_table,
    ranges_table,
)
from rlhf_nb.training.model_loading import tiny_policy
from rlhf_nb.ui.run_view import Run, curve_figure
from rlhf_nb.ui.viewer import curves_of

PAGE = NOTEBOOKS["47_metrics"]
TRANSFORMERS = re.compile(
    r"(epoch|step|total_flos|train_.*|loss|grad_norm|learning_rate|eval_(runtime|samples_per_second|steps_per_second))"
)
PAIR = ("accuracy", "margin", "min_reward", "mean_reward", "max_reward")


def shown_tables() -> dict[str, str]:
    "What the page's cells that print a table kept, by the call."
    page = json.loads(PAGE.read_text(encoding="utf-8"))
    cells = [cell for cell in page["cells"] if cell["cell_type"] == "code"]
    found = {}
    for cell in cells:
        if call := re.search(r"Markdown\((.*_table\(.*\))\)$", "".join(cell["source"])):
            found[call[1]] = "".join(cell["outputs"][0]["data"]["text/markdown"])
    return found


ON_PAGE = {metric.name for table in TABLES if table != "other" for metric in TABLES[table]}


def ours(logs: list[dict]) -> set[str]:
    return {name for log in logs for name in log if not TRANSFORMERS.fullmatch(name)}


def brevity(prompts, responses, response_ids, **columns):
    return [[-1.0] * len(ids) for ids in response_ids]


SHORT_RUN = QUIET | dict(save_strategy="no", per_device_train_batch_size=4, seed=0)


@pytest.fixture(scope="module")
def policy(letters):
    return tiny_policy(letters, 0, **SIZES | dict(max_position_embeddings=32))


@pytest.fixture(scope="module")
def ran(letters, policy, tmp_path_factory):
    "The log of a run of PPO and of an evaluation after it."

    def run(rewards=None, parts=(), **settings) -> list[dict]:
        own = SHORT_RUN | dict(response_length=4, num_sample_generations=1) | settings
        args = PPOConfig(str(tmp_path_factory.mktemp("ppo")), **own)
        prompts = Dataset.from_dict(dict(prompt=["abc", "b", "cde", "ja"]))
        parts = dict(parts, reward_model=rewards, train_dataset=prompts, eval_dataset=prompts)
        trainer = PPOTrainer(args, letters, policy, **parts)
        trainer.train()
        trainer.evaluate()
        return trainer.state.log_history

    return run


@pytest.fixture(scope="module")
def ppo_logs(ran) -> list[dict]:
    return ran([likes_c, brevity], total_episodes=8)


@pytest.fixture(scope="module")
def reward_logs(letters, policy, tmp_path_factory) -> list[dict]:
    pairs = Dataset.from_dict(
        dict(prompt=["ab"] * 8, chosen=["ccc", "cc"] * 4, rejected=["d", "dd"] * 4)
    )
    args = RewardConfig(str(tmp_path_factory.mktemp("reward")), max_steps=2, **SHORT_RUN)
    trainer = RewardTrainer(scorer_from(policy), args, pairs, pairs, letters)
    trainer.train()
    trainer.evaluate()
    return trainer.state.log_history


@pytest.fixture(scope="module")
def engine_logs(ran) -> list[dict]:
    "Of a run in groups, whose answers a stand-in for vLLM wrote, and whose loss holds a KL."
    how = dict(kl_in="loss", kl_estimator="k3", advantage_estimator="rloo", num_generations=2)
    with pytest.MonkeyPatch.context() as patch:
        for name, module in vllm_stand_in.modules().items():
            patch.setitem(sys.modules, name, module)
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "")
        return ran(likes_c, total_episodes=4, use_vllm=True, **how)


@pytest.fixture(scope="module")
def turn_logs(ran) -> list[dict]:
    "Of a run in which a world answers."
    world = dict(environment_factory=guess_number(9, 3, 36, ("a", "b", "c")), max_turns=2)
    return ran(parts=world, total_episodes=4, response_length=2)


# catches: a metric added to the trainer and not to the registry; a name that is never logged, or
# misspelt, or renamed
def test_the_registry_has_every_name_and_no_other(ppo_logs, engine_logs, turn_logs, reward_logs):
    logged = {
        re.sub(r"^(objective/raw_scores|turns/info)/.*", r"\1/NAME", name)
        for name in ours(ppo_logs + engine_logs + turn_logs)
    }
    logged |= {name for name in ours(reward_logs) if name not in PAIR}
    assert {f"objective/raw_scores/{judge}" for judge in ("likes_c", "brevity")} <= ours(ppo_logs)
    assert metric_of("turns/info/won") == replace(METRICS["turns/info/NAME"], name="turns/info/won")
    assert ON_PAGE - logged == set(), "metrics that nothing logs"
    assert logged - ON_PAGE == set(), "names that are logged and not in a table"


# catches: the page's promise that the reward model logs the same five while it trains, without
# `eval_`
def test_training_of_the_reward_model_logs_the_same(reward_logs):
    assert {f"eval_{name}" for name in PAIR} <= ON_PAGE
    assert {name for name in ours(reward_logs) if not name.startswith("eval_")} == set(PAIR)


# catches: a name in two tables, a short name of two metrics, a metric without formula or health, a
# range without its source or with its ends exchanged, one that is drawn without title or unit, a
# bar in a formula, which splits its cell
def test_each_metric_is_whole():
    names = [metric.name for table in TABLES.values() for metric in table]
    assert len(names) == len(METRICS) and len(RANGES) >= 8
    assert len(LOG_NAMES) == sum(len(metric.short) for metric in METRICS.values())
    for metric in METRICS.values():
        on_page, drawn = metric.name in ON_PAGE, metric.viewer
        assert not on_page or (metric.formula and metric.healthy), metric
        assert not on_page or metric.otherwise or metric.name == "episode", metric
        assert not drawn or (metric.title and metric.unit), metric
        assert not metric.viewer or metric.short, metric
        assert bool(metric.term) == bool(metric.meaning), metric
        assert bool(metric.low is None) == bool(metric.high is None), metric
        assert metric.low is None or (metric.source and metric.low < metric.high), metric
    for table, columns in ((ranges_table(), 4), *((metrics_table(t), 4) for t in TABLES)):
        assert {line.count("|") for line in table.splitlines()} == {columns + 1}
    order = [metric.viewer for metric in in_order()]
    assert order == list(range(1, len(order) + 1))


# catches: a page that shows another table than the registry has, or leaves one out
def test_the_page_shows_the_tables_as_they_are():
    wanted = {f'metrics_table("{table}")': metrics_table(table) for table in TABLES}
    del wanted['metrics_table("other")']
    assert shown_tables() == wanted | {"ranges_table()": ranges_table()}


# catches: a glossary that says something else about a metric
def test_the_glossary_has_each_term_in_the_same_words():
    page = json.loads(NOTEBOOKS["glossary"].read_text(encoding="utf-8"))
    text = "".join(line for cell in page["cells"] for line in cell["source"])
    said = dict(re.findall(r"^\| \*\*(.+?)\*\* \| (.+?) \| .+\|$", text, re.M))
    terms = {metric.term: metric.meaning for metric in METRICS.values() if metric.term}
    assert len(terms) >= 5 and {term: said.get(term) for term in terms} == terms


# catches: a place that has a list of its own, so that one more metric is not seen there
def test_a_new_metric_is_one_entry(monkeypatch):
    places = dict(short=("new",), viewer=14)
    new = Metric("val/new", "new thing", "share of tokens", "$x$", "rises", **places)
    monkeypatch.setitem(METRICS, "val/new", new)
    monkeypatch.setitem(TABLES, "value", (*TABLES["value"], new))
    rows = [{"episode": 8.0 * i, "update": i, "val/new": i / 10} for i in (1, 2)]
    curve = curves_of(dict(run=pd.DataFrame(rows)))[-1]
    assert (curve["name"], curve["unit"]) == ("new", "%")
    assert curve["about"] == "new thing, share of tokens"
    figure = curve_figure("val/new", [(1, 0.1), (2, 0.2)], Run())
    assert "new thing, % of tokens: 20.00 after update 2" in figure
    assert "| `val/new` | $x$ | rises |" in metrics_table("value")


# catches: an alarm at another threshold than the registry has
def test_alarms_have_the_thresholds_of_the_registry():
    default = {
        name: parameter.default
        for name, parameter in inspect.signature(hacking_alarms).parameters.items()
    }
    assert default["kl_most"] == RANGES["objective/kl"].high
    assert f"{default['length_ratio']:g} times" in RANGES["tokens/response_length"].healthy
    assert f"{default['stopped_ratio']:g} of" in RANGES["val/num_eos_tokens"].healthy
    assert default["entropy_ratio"] == 0.25 and "quarter" in RANGES["policy/entropy_avg"].healthy


# catches: an open end that excludes, NaN taken for health, ends that do not belong to the range
@pytest.mark.parametrize(
    "metric, value, wanted",
    [
        ("policy/clipfrac_avg", 0.15, True),
        ("policy/clipfrac_avg", 0.151, False),
        ("val/explained_variance", -0.02, False),
        ("objective/kl", -1.9, False),
        ("objective/kl", math.nan, False),
        ("policy/entropy_avg", 1e9, True),
    ],
)
def test_healthy(metric, value, wanted):
    assert healthy(metric, value) == wanted
