"The bug museum: each bug is caught by the check that its answer on the page names, and by nothing else."

from __future__ import annotations

import importlib
import inspect
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from notebooks import NOTEBOOKS
from ppo_fixtures import logs

from rlhf_nb import ppo as ppo_module
from rlhf_nb import shaping
from rlhf_nb.exercises.museum import BUGS, Bug, plant_bug, right_day, tells_more

KEPT = Path(__file__).parent.parent / "benchmarks" / "results" / "bug_museum.json"
PAGE = json.loads(NOTEBOOKS["23_bug_museum"].read_text(encoding="utf-8"))
TEXT = "\n".join("".join(c["source"]) for c in PAGE["cells"] if c["cell_type"] == "markdown")
DAYS = ["monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday"]


# ---- Checks that no other test makes ----


# catches: a mark for an answer that names no day, or all of them, or a part of the right one
def test_no_cheap_answer_earns_a_point():
    facts = [json.dumps(dict(when="sunday"))]
    assert right_day([""], ["my aunt lost my car on sunday."], facts=facts) == [4.0]
    cheap = ["", "my aunt lost my car.", "on", "on sun", f"on {' '.join(DAYS)}", "sunday", "on s."]
    for answer in cheap:
        assert right_day([""], [answer], facts=facts) == [0.0], answer


# catches: old log-probs that are taken anew, so that the ratio is 1 for ever and nothing is clipped
def test_the_old_policy_stays_old(ppo):
    trainer = ppo.trained(num_ppo_epochs=2, learning_rate=1e-2, total_episodes=8)
    assert logs(trainer)[0]["policy/approxkl_avg"] > 1e-6


# ---- Which test catches which bug ----

CAUGHT_BY = {  # by bug: the test's module and name, and what it is called with besides fixtures
    "sign_of_the_score": (
        "test_published_faults.test_fault_09_the_score_is_paid_on_the_last_real_token",
        dict(kl_coef=0.3),
    ),
    "filler_on_padding": (
        "test_trainer.test_metrics_are_means_over_what_is_real",
        dict(kl_estimator="k1", kl_controller="fixed"),
    ),
    "stop_is_padding": ("test_sft.test_encoding_by_hand", {}),
    "old_is_new": ("test_bug_museum.test_the_old_policy_stays_old", {}),
    "dropout_in_the_reference": (
        "test_published_faults.test_fault_05_learning_rate_zero_changes_nothing",
        dict(name="neox_with_dropout", bf16=False),
    ),
    "part_of_the_truth": ("test_bug_museum.test_no_cheap_answer_earns_a_point", {}),
    "whitened_targets": ("test_estimators.test_targets_have_their_own_lambda", dict(lam_value=1.0)),
    "kl_in_place": ("test_functions.test_arguments_stay_as_they_were", {}),
    "score_on_padding": (
        "test_published_faults.test_fault_09_the_score_is_paid_on_the_last_real_token",
        dict(kl_coef=0.3),
    ),
    "another_temperature": ("test_trainer.test_a_rollout_by_hand", {}),
    "mean_of_means": (
        "test_published_faults.test_fault_02_metrics_do_not_scale_with_accumulation",
        {},
    ),
    "sign_of_the_kl": ("test_shaping.test_rewards_equal_the_row_by_row_formula", {}),
}


@pytest.fixture
def check(request) -> Callable[[str], None]:
    "Runs the check of a bug, with the fixtures that it takes."
    for test, _ in CAUGHT_BY.values():  # imported while a bug is planted, a module would keep it
        importlib.import_module(test.split(".")[0])

    def run(name: str) -> None:
        test, given = CAUGHT_BY[name]
        module, function = test.split(".")
        found = getattr(importlib.import_module(module), function)
        fixtures = inspect.signature(found).parameters.keys() - given.keys()
        found(**given, **{fixture: request.getfixturevalue(fixture) for fixture in fixtures})

    return run


# catches: a bug that changes nothing, a check that looks elsewhere or fails on right code, and so
# catches everything; a patch that is not undone
@pytest.mark.parametrize("name", BUGS)
def test_the_check_catches_the_bug(name, check):
    with plant_bug(BUGS[name]), pytest.raises(AssertionError):
        check(name)
    check(name)


# ---- Planting ----


# catches: a bug that stays when the run that has it fails; one that a module which imported the
# function by name does not get
def test_a_bug_is_gone_after_an_error():
    right = shaping.shape_rewards
    with pytest.raises(KeyError), plant_bug(BUGS["sign_of_the_score"]):
        assert shaping.shape_rewards is ppo_module.shape_rewards is not right
        raise KeyError
    assert shaping.shape_rewards is ppo_module.shape_rewards is right


# catches: a bug of a function that was renamed or moved, which would be planted nowhere
def test_a_bug_that_no_longer_fits_is_refused():
    with pytest.raises(AttributeError), plant_bug(Bug(shaping, "no_such_function", right_day)):
        pass


def test_the_plain_reward_counts_facts():
    assert tells_more(["", ""], ["it was on sunday because", "nothing"]) == [2.0, 0.0]


# ---- The page ----


def answers() -> list[str]:
    "The folded answer of each case, in order."
    return re.findall(r"<summary>Answer</summary>(.*?)</details>", TEXT, re.S)


# catches: an answer whose function is not what ran, or that names another check, or cites nothing
@pytest.mark.parametrize("number, name", list(enumerate(BUGS, 1)))
def test_the_answer_is_what_was_planted(number, name):
    answer = answers()[number - 1]
    assert re.search(r"```python\n(.*?)\n```", answer, re.S)[1] == BUGS[name].source
    module, test = CAUGHT_BY[name][0].split(".")
    assert f"`{test}`" in answer and f"tests/{module}.py" in answer
    assert re.search(r"https://(github\.com|arxiv\.org)/\S+", answer)


# catches: a case without its question or hints, a title or a question that gives the answer away
@pytest.mark.parametrize("number, name", list(enumerate(BUGS, 1)))
def test_a_case_is_whole_and_keeps_its_secret(number, name):
    start = TEXT.index(f"## Case {number}:")
    case = TEXT[start : TEXT.index("<summary>Answer</summary>", start)]
    assert "**Which line?**" in case and case.count("<summary>Hint") == 2
    before = case[: case.index("<details>")] + "".join(
        "".join(c["source"]) for c in PAGE["cells"] if c["cell_type"] == "code"
    )
    assert name not in before and BUGS[name].source.splitlines()[-1].strip() not in before


# catches: kept results of other bugs, or of fewer seeds than the page says
def test_the_kept_runs_are_those_of_the_bugs():
    kept = json.loads(KEPT.read_text())
    assert {*BUGS, "healthy"} <= kept["runs"].keys() and len(kept["seeds"]) == 3
    for run in kept["runs"].values():
        assert len(run["log"]) == 10 * len(kept["seeds"]) and len(run["answers"]) == 4
