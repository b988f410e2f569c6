"A preflight: what it returns and shows, what it leaves alone, what it refuses."

from __future__ import annotations

import json
import random
from dataclasses import replace
from io import StringIO
from pathlib import Path
from subprocess import TimeoutExpired
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from datasets import Dataset
from marks import slow_but
from ppo_fixtures import PROMPTS, SIZES, logs, unlike, untimed, weights
from rich.console import Console

from rlhf_nb.cli import main
from rlhf_nb.diagnose import rungs_update
from rlhf_nb.diagnose.checks import Check, Checks, Finding, Rung, climb, not_here
from rlhf_nb.diagnose.preflight import LADDER, check_pairs, preflight
from rlhf_nb.diagnose.subject import RARE, Subject, by_chance, text_in
from rlhf_nb.environments import guess_number
from rlhf_nb.models import scorer_from
from rlhf_nb.trainer import PPOTrainer
from rlhf_nb.training.engines import CachedEngine
from rlhf_nb.training.model_loading import tiny_policy

QUICK = ("data: ", "log-probs: ", "rewards: ", "learning: weights")


def rungs(*names: str) -> list[Rung]:
    "Those whose names begin so."
    return [rung for rung in LADDER if rung.name.startswith(names or QUICK)]


# ---- The ladder ----


def rung(name: str, found: Finding, *needs: str) -> Rung:
    return Rung(name, lambda subject: found, "expected", "advice", needs)


# catches: a check that does not apply counted as passed or failed, or one that skips others
def test_a_check_that_does_not_apply_is_neither_passed_nor_failed_nor_in_the_way():
    done = climb([rung("a", not_here("no value model")), rung("b", Finding(True, "1"), "a")], None)
    assert [x.state for x in done.checks] == ["not measured", "passed"] and done.passed
    assert done["a"].passed is None and not done["a"].skipped
    assert done["a"].measured == "not measured here: no value model"


# catches: a skipped check that lets the whole pass, that is measured all the same, or after which
# what needs it is measured
def test_a_check_that_needs_a_failed_one_is_skipped_and_says_so():
    calls = []
    after = Rung("b", lambda subject: calls.append(1), "", "", ("a",))
    fine = Finding(True, "1")
    done = climb([rung("a", Finding(False, "0")), after, rung("c", fine, "b"), rung("d", fine)], 0)
    assert [x.state for x in done.checks] == ["failed", "skipped", "skipped", "passed"]
    assert not done["b"].passed and not done.passed and not calls
    assert done["b"].measured == "skipped: it needs a"
    assert done.summary == "1 passed, 1 failed, 2 skipped"


def test_the_names_differ_and_each_need_comes_before():
    seen: set[str] = set()
    for x in LADDER:
        assert x.name not in seen and {*x.needs} <= seen and x.expected and x.advice
        seen.add(x.name)


# catches: an error that takes the other checks along, of a kind that a ladder does not know
@pytest.mark.parametrize(
    "error, said",
    [
        (ValueError("two\nlines"), "ValueError: two lines"),
        (AttributeError("no group"), "AttributeError: no group"),
        (AssertionError(), "AssertionError"),
        (TimeoutExpired("python", 600), "TimeoutExpired: Command 'python' timed out"),
    ],
)
def test_an_error_of_any_kind_is_what_a_rung_found(error, said):
    def breaks() -> Finding:
        raise error

    rungs = [Rung("a", lambda subject: breaks(), "", ""), rung("b", Finding(True, "1"))]
    done = climb(rungs, None)
    assert done["b"].passed and done["a"].measured.startswith(f"stopped by {said}")
    assert "(in breaks, test_preflight.py line" in done["a"].measured


# ---- What it shows ----

SHOWN = Checks(
    (
        Check("a", True, False, "fine", "why", "advice of a"),
        Check("b", False, False, "<script>\x1b[31m", "why not", "advice of b"),
        Check("c", False, True, "skipped: it needs b", "", ""),
        Check("d", None, False, "not measured here: x", "", ""),
    ),
    "Title",
    "Note",
)


# catches: markup of a model's text that reaches the page, a state told by colour alone
def test_the_page_and_the_notebook_show_every_check(tmp_path):
    page = SHOWN.save_html(tmp_path / "new" / "page.html").read_text()
    for text in (page, SHOWN._repr_html_()):
        assert "&lt;script&gt;" in text and "<script>" not in text
        for sign in ("✓ passed", "✗ failed", "↷ skipped", "– not measured"):
            assert sign in text
        assert "advice of b" in text and "1 passed, 1 failed, 1 skipped, 1 not measured" in text
    assert "Not passed: look at b first" in page
    assert page.index("advice of b") < page.index("advice of a")  # what failed comes first


# catches: a terminal that a model's text steers
def test_the_table_shows_every_check():
    console = Console(file=StringIO(), width=120, force_terminal=True)
    console.print(SHOWN)
    text = console.file.getvalue()
    assert "advice of b" in text and "advice of a" not in text and "<script>\x1b[31m" not in text


def test_json_has_the_fields_that_are_promised():
    told = json.loads(json.dumps(SHOWN.as_json()))
    assert told["passed"] is False
    assert [x["passed"] for x in told["checks"]] == [True, False, False, None]
    fields = {"name", "passed", "skipped", "measured", "expected", "advice"}
    assert all(x.keys() == fields for x in told["checks"])


# ---- What it leaves alone ----


def states() -> tuple:
    _, of_numpy, *rest = np.random.get_state()  # noqa: NPY002
    return random.getstate(), of_numpy.tolist(), rest, torch.get_rng_state().tolist()


def modes(trainer: PPOTrainer) -> list[tuple[bool, bool]]:
    return [
        (part.training, p.requires_grad)
        for model in [trainer.pair, trainer.ref_model, *trainer.judges.models]
        if model is not None
        for part in model.modules()
        for p in part.parameters(recurse=False)
    ]


RUNS = dict(
    plain={},
    moments=dict(normalize_scores=True, kl_controller="adaptive", kl_target=1.0),
    shared=dict(share_value_trunk=True),
)


# catches: a preflight that draws from the run's random numbers, moves its running moments, steps its
# optimizer, sets a mode, takes a batch of its prompts, or writes into its folder
@pytest.mark.parametrize("name", slow_but(("moments", "shared"), RUNS))
def test_a_run_after_a_preflight_is_bit_for_bit_the_run_without(name, ppo, tmp_path):
    alone = ppo(**RUNS[name], max_steps=2)
    before = modes(alone)
    alone.train()
    looked_at = ppo(**RUNS[name], max_steps=2, output_dir=str(tmp_path / "other"))
    seen, files = (states(), weights(looked_at)), [*Path(looked_at.args.output_dir).rglob("*")]
    some = rungs(*QUICK, "value model: values", "state: resume")
    assert preflight(looked_at, rungs=some, quiet=True).passed
    assert states() == seen[0] and not unlike(seen[1], weights(looked_at))
    assert modes(looked_at) == before and looked_at.optimizer is None
    assert [*Path(looked_at.args.output_dir).rglob("*")] == files
    looked_at.train()
    assert not unlike(weights(alone), weights(looked_at))
    assert [*map(untimed, logs(alone))] == [*map(untimed, logs(looked_at))]


# catches: a preflight in the middle of a run by hand that takes its next batch or its optimizer's state
def test_a_preflight_between_two_updates_changes_neither(ppo):
    seen = []
    for look in (False, True):
        trainer = ppo(reward=scorer_from(ppo().policy, 1), normalize_scores=True)
        trainer.step()
        if look:
            preflight(trainer, rungs=rungs("data: ", "learning: weights"), quiet=True)
        seen.append((untimed(trainer.step()), weights(trainer)))
    assert seen[0][0] == seen[1][0] and not unlike(seen[0][1], seen[1][1])


# ---- What it finds ----


def pairs(good: str, bad: str) -> list[dict[str, str]]:
    return [dict(prompt="abc", chosen=good, rejected=bad)] * 4


# catches: a preflight of an engine of the user's own that looks at the package's sampler
def test_the_engine_that_samples_is_what_is_looked_at(ppo):
    class Greedy(CachedEngine):
        def generate(self, ids, mask, settings):
            return super().generate(ids, mask, replace(settings, temperature=0.01))

    trainer = ppo()
    looked_at = rungs("data: ", "log-probs: sampling")
    assert preflight(trainer, rungs=looked_at, quiet=True)["log-probs: sampling"].passed
    trainer.engine = Greedy(8)
    assert not preflight(trainer, rungs=looked_at, quiet=True)["log-probs: sampling"].passed


# catches: pairs that are not read, or the wrong way round
def test_pairs_in_the_wrong_order_are_reported(ppo):
    some = rungs("rewards: judges", "rewards: pairs")
    right = preflight(ppo(), pairs("ccc", "aaa"), some, quiet=True)
    wrong = preflight(ppo(), pairs("aaa", "ccc"), some, quiet=True)
    assert right.passed and "4 of 4 pairs" in right["rewards: pairs"].measured
    assert not wrong.passed and "0 of 4 pairs" in wrong["rewards: pairs"].measured


# catches: noise of a healthy judge reported as a fault, and a fault taken for noise
def test_what_a_fair_coin_may_do_is_no_fault(ppo):
    assert by_chance(35, 29) > 0.2 and by_chance(46, 18) > RARE > by_chance(48, 16)
    right, wrong, some = (
        pairs("ccc", "aaa"),
        pairs("aaa", "ccc"),
        rungs("rewards: judges", "rewards: pa"),
    )
    for given, passed in ((right[:3] + wrong, None), (right[:1] + wrong * 5, False)):
        assert preflight(ppo(), given, some, quiet=True)["rewards: pairs"].passed is passed


# catches: a reward that is rarely earned taken for one that is always the same
def test_a_reward_that_no_sample_earns_and_references_do_is_not_measured(ppo):
    rare = ppo(lambda p, r, **c: [float("j j j" in x) for x in r], data=with_answers("j j j"))
    done = preflight(rare, rungs=rungs("rewards: spread"), quiet=True)
    assert done["rewards: spread"].passed is None and "32 resp" in done["rewards: spread"].measured


# catches: one try that chance spoils; a learner that is right as often as not
@pytest.mark.parametrize("tries, passed", [("+", 1), ("-++", 1), ("----", 0), ("-+----", 0)])
def test_a_trivial_reward_is_tried_until_it_is_clear(tries, passed, monkeypatch):
    found = iter([Finding(x == "+", "") for x in tries])
    monkeypatch.setattr(rungs_update, "wanted_token", lambda subject: 1)
    monkeypatch.setattr(rungs_update, "learns", lambda *given: next(found))
    subject = SimpleNamespace(args=SimpleNamespace(seed=0))
    assert rungs_update.trivial(subject).passed == passed and not [*found]


# catches: an error of somebody's reward that ends the program, a score that depends on the batch,
# a reward that is always the same
@pytest.mark.parametrize(
    "reward, name, said",
    [
        (lambda p, r, **c: [x.count("c") / len(x) for x in r], "odd answers", "ZeroDivisionError"),
        (lambda p, r, **c: [float(sum(len(x) > len(y) for y in r)) for x in r], "judges", "apart"),
        (lambda p, r, **c: [1.0] * len(r), "spread", ""),
    ],
    ids=["breaks on an empty answer", "looks at its neighbours", "always the same"],
)
def test_a_reward_with_a_fault_is_reported(reward, name, said, ppo):
    done = preflight(ppo(reward), rungs=rungs(f"rewards: {name}"), quiet=True)
    assert not done.passed and said in done[f"rewards: {name}"].measured


# catches: an error in the first rollout that leaves nothing to read
def test_a_reward_that_breaks_at_once_is_a_failed_check(ppo):
    def no_column(prompts, responses, **columns):
        return columns["reference"]

    done = preflight(ppo(no_column), rungs=rungs("data: "))
    assert "KeyError: 'reference' (in no_column" in done["data: episodes"].measured
    assert done["data: prompts"].passed and "Took " in done.note


def with_answers(*answers) -> Dataset:
    return Dataset.from_dict(dict(prompt=PROMPTS, answer=[*answers] * len(PROMPTS)))


# catches: a column of several references each, which is common, taken for a conversation
def test_of_several_references_the_first_is_compared(ppo):
    data = with_answers(["ccc", "aaa"])
    done = preflight(ppo(data=data), rungs=rungs("rewards: judges", "rewards: pairs"), quiet=True)
    assert done.passed and "24 references" in done["rewards: pairs"].measured
    subject = Subject(ppo(data=data))
    assert {text for _, text in subject.answers} == {"ccc"}
    subject.close()
    turns = [dict(role="user", content="a"), dict(role="assistant", content="b")]
    assert [text_in(x) for x in ("a", ["a", "b"], turns, [], None, [["a"]])] == [*"aab", "", "", ""]


# catches: a tie that is reported as an empty answer's victory
@pytest.mark.parametrize(
    "reward, passed",
    [
        (lambda p, r, **c: [float("j" in x) for x in r], None),  # a format that no reference has
        (lambda p, r, **c: [-float(x.count("j")) for x in r], None),  # a fault that none has
        (lambda p, r, **c: [-float("f c" in x) for x in r], True),  # a repetition
        (lambda p, r, **c: [float(x in ("", "c d e f")) for x in r], False),  # "" is as good
        (lambda p, r, **c: [-float(len(x)) for x in r], False),
        (lambda p, r, **c: [float(len(x)) for x in r], True),
    ],
    ids=["format", "penalty", "repeated", "shuffled", "empty preferred", "reference preferred"],
)
def test_references_that_tie_with_empty_answers_are_no_fault(reward, passed, ppo):
    some = rungs("rewards: judges", "rewards: pairs")
    done = preflight(ppo(reward, data=with_answers("c d e f")), rungs=some, quiet=True)
    assert done["rewards: pairs"].passed is passed


# catches: copies that should learn nothing and learn at the rate of the user's optimizer
@pytest.mark.parametrize("middle", [False, True], ids=["given", "in the middle of a run"])
def test_an_optimizer_that_is_there_keeps_its_rate_to_itself(middle, ppo, letters):
    if middle:
        trainer = ppo(total_episodes=640)
        trainer.step()
    else:
        policy = tiny_policy(letters, 0, **SIZES)
        value = scorer_from(policy, 1)
        both = torch.optim.AdamW([*policy.parameters(), *value.parameters()], lr=1e-3)
        parts = dict(value_model=value, optimizers=(both, None))
        trainer = ppo(model=policy, parts=parts, total_episodes=640)
    names = "log-probs: ratio", "learning: loss", "learning: gradient", "learning: schedule"
    done = preflight(trainer, rungs=rungs(*names), quiet=True)
    assert [(x.name, x.measured) for x in done.checks if not x.passed] == []
    assert trainer.optimizer.param_groups[0]["lr"] > 0


# catches: sixteen episodes whose chance is reported as a policy that does not learn
def test_a_trivial_reward_on_few_episodes_is_not_measured(ppo):
    small = dict(per_device_train_batch_size=1, gradient_accumulation_steps=1)
    done = preflight(ppo(**small), rungs=rungs("learning: trivial"), quiet=True)
    assert done["learning: trivial reward"].passed is None
    assert "16 updates of 1 are too few episodes" in done["learning: trivial reward"].measured


# catches: a learning rate that breaks the policy and is waved through
def test_a_learning_rate_that_is_far_too_high_is_reported(ppo):
    names = "learning: weights", "learning: trivial"
    assert not preflight(ppo(learning_rate=1e4), rungs=rungs(*names), quiet=True).passed


# ---- What it refuses ----


# catches: episodes of several turns checked as if the policy had written all of them
def test_a_trainer_that_plays_is_refused(ppo):
    trainer = ppo(parts=dict(environment_factory=guess_number(), max_turns=2))
    with pytest.raises(ValueError, match="does not play"):
        preflight(trainer, rungs=rungs())


def test_a_trainer_without_prompts_is_refused(ppo):
    trainer = ppo(max_steps=1)
    trainer.train_dataset = None
    with pytest.raises(ValueError, match="no train_dataset.*give it one"):
        preflight(trainer)


@pytest.mark.parametrize(
    "given, said",
    [
        ([], "pairs has no rows: give at least one, with prompt, chosen, rejected"),
        ([dict(prompt="a", good="b")], "row 0: chosen is missing.*columns prompt, good"),
        ([dict(prompt="a", chosen="b", rejected=1)], "row 0: rejected is missing or no text"),
        (["a"], "row 0: prompt is missing.*columns none"),
        ([dict(prompt=None, chosen="b", rejected="c")], "row 0: prompt is None: give text, or tur"),
        ([dict(prompt=[1], chosen="b", rejected="c")], r"row 0: prompt is \[1\]: give text"),
    ],
)
def test_pairs_with_other_columns_are_refused(given, said):
    with pytest.raises(ValueError, match=said):
        check_pairs(given)


def test_the_prompt_of_a_pair_may_be_a_conversation():
    row = dict(prompt=[dict(role="user", content="a")], chosen="b", rejected="c")
    assert check_pairs([row]) == [row]


@pytest.fixture
def run_of(ppo, tmp_path, letters, monkeypatch):
    "The words of a tiny run on the command line, in an empty folder."
    monkeypatch.chdir(tmp_path)
    ppo().policy.save_pretrained("policy")
    letters.save_pretrained("policy")
    texts = [a + b for a in sorted(set(PROMPTS)) for b in ("", "a", "cd", "g")]
    Dataset.from_dict(dict(prompt=texts)).to_json("rows.jsonl")
    Path("likes.py").write_text(
        "def likes_c(prompts, responses, **columns):\n"
        "    return [x.count('c') - 0.1 * len(x) for x in responses]\n"
    )
    words = (
        "preflight --model_name_or_path policy --dataset_name rows.jsonl --use_cpu --report_to none "
        "--reward_function likes.py:likes_c --output_dir out --response_length 5 --temperature 1 "
        "--per_device_train_batch_size 4 --gradient_accumulation_steps 2 --learning_rate 1e-3"
    )
    return words.split()


@pytest.mark.parametrize(
    "text, said",
    [
        ('{"prompt": "a", "good": "b"}', "row 0: chosen is missing or no text"),
        ("", "--preflight_pairs bad.jsonl: the file has no rows"),
        (None, "--preflight_pairs bad.jsonl: there is no such file"),
    ],
)
def test_a_file_of_pairs_that_is_wrong_is_one_line(text, said, run_of, capsys):
    if text is not None:
        Path("bad.jsonl").write_text(text)
    assert main([*run_of, "--preflight_pairs", "bad.jsonl"]) == 2
    err = capsys.readouterr().err.strip().splitlines()
    assert err[-1].startswith("rlhf-nb preflight: --preflight_pairs bad.jsonl") and said in err[-1]
    assert not Path("out").exists()


# catches: a page that cannot be written, found out after the whole ladder
def test_a_page_that_is_a_folder_is_refused_before_the_work(run_of, capsys):
    assert main([*run_of, "--output", "policy"]) == 2
    told = capsys.readouterr()
    assert "--output policy is a folder: give a file" in told.err and not told.out
    assert not Path("policy.partial").exists()


# catches: exit code 2 and one line, where a table names what is wrong
def test_a_reward_that_breaks_at_once_is_exit_code_1_and_a_table(run_of, capsys):
    Path("likes.py").write_text(
        "def likes_c(prompts, responses, **columns):\n    return [columns['x'] for x in responses]\n"
    )
    assert main([*run_of, "--json", "--output", "none"]) == 1
    checks = {x["name"]: x for x in json.loads(capsys.readouterr().out)["checks"]}
    assert len(checks) == len(LADDER)
    assert "likes_c failed: KeyError: 'x' (" in checks["data: episodes"]["measured"]


# catches: a recipe whose section ppo is not read, an exit code that is always 0, a folder left behind
@pytest.mark.slow
def test_the_command_prints_writes_and_returns_what_it_found(run_of, capsys):
    assert main([*run_of, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["passed"] and [x["name"] for x in told["checks"]] == [x.name for x in LADDER]
    assert "Every check" in Path("preflight.html").read_text() and not Path("out").exists()
    bad = dict(prompt="abc", chosen="a", rejected="c")
    Path("pairs.jsonl").write_text(json.dumps(bad))
    assert main([*run_of, "--preflight_pairs", "pairs.jsonl", "--output", "none"]) == 1
    assert "✗ failed" in capsys.readouterr().out
