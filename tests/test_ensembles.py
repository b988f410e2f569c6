"""Several reward models that give one score: the formulas, their centres, and runs that use
them."""

import numpy as np
import pytest
import torch
from datasets import Dataset
from ppo_fixtures import PROMPTS, SIZES, likes_c

from rlhf_nb.cli import main
from rlhf_nb.cli.plan import plan_of
from rlhf_nb.cli.ppo import ppo_command, ppo_parser
from rlhf_nb.judges import Answers, Ensemble, Judges, group_centers, load_judge
from rlhf_nb.models import scorer_from
from rlhf_nb.rollout import Rollout
from rlhf_nb.scoring import score_texts
from rlhf_nb.trainer import PPOConfig
from rlhf_nb.training.model_loading import tiny_policy

ANSWERS = ["a", "cc", "dab", "e"] * 6


def by_numpy(scores, how, coef, centers=None):
    "The formulas, member by member."
    moved = []
    for m, member in enumerate(scores):
        shift = 0.0 if centers is None else np.mean(centers, axis=0) - centers[m]
        moved.append(member + shift)
    mean = sum(moved) / len(moved)
    if how == "mean":
        return mean
    if how == "min":
        return np.min(moved, axis=0)
    return mean - coef * sum((x - mean) ** 2 for x in moved) / len(moved)


# catches: an unbiased variance, a charge of the wrong sign, a minimum over responses, centres added
@pytest.mark.parametrize("how", ["mean", "min", "mean_minus_variance"])
@pytest.mark.parametrize("centred", [False, True])
def test_formulas(how, centred):
    draw = np.random.default_rng(3)
    scores, centers = draw.normal(size=(3, 8)), draw.normal(size=(3, 8)) if centred else None
    one = Ensemble(how, variance_coef=0.7)
    given = None if centers is None else torch.tensor(centers)
    found = one(torch.tensor(scores), given).numpy()
    np.testing.assert_allclose(found, by_numpy(scores, how, 0.7, centers), atol=1e-12)


def moved_by_prompt(scores):
    "The same opinions on other scales: an offset for each member and each group of four."
    offsets = torch.tensor([[0.0, 7.0], [-3.0, 0.0], [1.0, 2.0]], dtype=scores.dtype)
    return scores + offsets.repeat_interleave(4, 1), offsets.repeat_interleave(4, 1).mean(0)


# catches: a minimum or a variance that takes a member's arbitrary zero for an opinion
@pytest.mark.parametrize("how", ["min", "mean_minus_variance"])
def test_an_offset_for_a_prompt_is_no_opinion(how):
    torch.manual_seed(0)
    scores = torch.randn(3, 8, dtype=torch.float64)
    moved, by = moved_by_prompt(scores)
    one = Ensemble(how)
    centred = [one(x, group_centers(x, 4)) for x in (scores, moved)]
    torch.testing.assert_close(centred[1], centred[0] + by)
    raw = [one(x) for x in (scores, moved)]  # the wrong program: nothing is centred
    assert (raw[1] - raw[0] - by).abs().max() > 0.5


def test_centres_are_means_of_groups():
    scores = torch.tensor([[1.0, 3.0, 10.0, 0.0], [0.0, 0.0, 5.0, 7.0]])
    assert group_centers(scores, 2).tolist() == [[2, 2, 5, 5], [0, 0, 6, 6]]
    for group in (1, 3):
        with pytest.raises(ValueError, match="Set num_generations, or name a column"):
            group_centers(scores, group)


# ---- In a run ----


@pytest.fixture
def members(letters):
    return [scorer_from(tiny_policy(letters, seed, **SIZES), seed) for seed in (3, 4, 5)]


def data() -> Dataset:
    return Dataset.from_dict(dict(prompt=PROMPTS, answer=ANSWERS))


def some(r, *names):
    return np.array([r.columns[f"score/{name}"] for name in names])


NAMES = ("model", "model_1", "model_2")


# catches: responses of other prompts in a group, members that are added up, a function among the
# members
def test_a_group_is_the_responses_to_a_prompt(ppo, members):
    trainer = ppo(
        [*members, likes_c],
        data=data(),
        num_generations=4,
        reward_aggregation="min",
        reward_weights=[1.0, 1.0, 1.0, 0.5],
    )
    r = trainer.score(trainer.rollout(PROMPTS[:2]))
    scores = some(r, *NAMES)
    centers = np.repeat(scores.reshape(3, 2, 4).mean(2), 4, axis=1)
    wanted = by_numpy(scores, "min", 0, centers) + 0.5 * some(r, "likes_c")[0]
    np.testing.assert_allclose(r.raw_scores.numpy(), wanted, atol=1e-5)
    trainer.train()
    log = next(log for log in trainer.state.log_history if "objective/raw_scores" in log)
    assert {f"objective/raw_scores/{name}" for name in (*NAMES, "likes_c")} <= log.keys()


# catches: a centre read from the response, another prompt's answer, an answer without its stop
def test_a_known_answer_is_a_centre(ppo, members, letters):
    settings = dict(reward_aggregation="mean_minus_variance", reward_variance_coef=0.3)
    trainer = ppo(members, data=data(), parts=parts(), reward_center="answer", **settings)
    r = trainer.score(trainer.rollout(dict(prompt=PROMPTS[:8], answer=ANSWERS[:8])))
    known = [score_texts(m, letters, PROMPTS[:8], ANSWERS[:8]).numpy() for m in members]
    wanted = by_numpy(some(r, *NAMES), "mean_minus_variance", 0.3, np.array(known))
    np.testing.assert_allclose(r.raw_scores.numpy(), wanted, atol=1e-5)
    texts, stops = ["ca", "b", "", "ddd"] * 2, [True, False] * 4
    found = trainer.judges.score_answers(
        Answers(PROMPTS[:8], texts, stops, dict(answer=ANSWERS[:8])), letters
    )
    scores = [score_texts(m, letters, PROMPTS[:8], texts, stopped=stops).numpy() for m in members]
    wanted = by_numpy(np.array(scores), "mean_minus_variance", 0.3, np.array(known))
    np.testing.assert_allclose(found.numpy(), wanted, atol=1e-5)


def parts() -> dict:
    return dict(eval_dataset=data().select(range(5)))


# catches: a minimum over members that nothing has centred, where evaluation has one response only
def test_without_a_group_evaluation_takes_the_mean(members, letters):
    judges = Judges(members, ensemble=Ensemble("min", center="group", group=4))
    found = judges.score_answers(Answers(PROMPTS[:4], ["a", "b", "c", "d"], [True] * 4), letters)
    scores = [score_texts(m, letters, PROMPTS[:4], ["a", "b", "c", "d"]) for m in members]
    torch.testing.assert_close(found, torch.stack(scores).mean(0))


# catches: an identity that does not know how the members became one score
def test_another_aggregation_is_another_run(ppo, members):
    saved = dict(max_steps=1, save_strategy="steps", save_steps=1)
    run = ppo.trained(members, num_generations=4, reward_aggregation="min", **saved)
    folder = f"{run.args.output_dir}/checkpoint-1"
    other = ppo(members, num_generations=4, reward_aggregation="mean", max_steps=2)
    with pytest.raises(ValueError, match="its ensemble is"):
        other.train(resume_from_checkpoint=folder)


@pytest.mark.parametrize(
    "how, named",
    [
        (dict(count=1), "'min' needs two reward models or more, and there is 1: give a list"),
        (dict(count=0), "needs two reward models or more, and there is none"),
        (dict(reward_weights=[1.0, 2.0]), "under reward_aggregation='min' they count alike"),
        (dict(num_generations=1), "^reward_center is 'group': with one response to a prompt"),
        (dict(reward_center="reference"), "'reference' is no column of texts: the columns beside"),
        (dict(reward_variance_coef=2.0), "^reward_variance_coef is 2.0: it needs reward_aggreg"),
        (dict(reward_aggregation="median"), "^reward_aggregation is 'median': give"),
    ],
)
def test_bad_input_is_named(ppo, members, how, named):
    settings = dict(num_generations=4, reward_aggregation="min") | how
    count = settings.pop("count", 2)
    with pytest.raises(ValueError, match=named):
        ppo(members[:count] or [likes_c], **settings)


# catches: a mean that asks for centres which change nothing
def test_a_mean_needs_no_centre(ppo, members):
    trainer = ppo(members, reward_aggregation="mean")
    r = trainer.score(trainer.rollout(PROMPTS[:8]))
    np.testing.assert_allclose(r.raw_scores.numpy(), some(r, *NAMES).mean(0), atol=1e-5)
    assert PPOConfig.reward_aggregation == "sum" and ppo(members).judges.ensemble is None


# ---- The command line ----


@pytest.fixture
def folder(letters, members, tmp_path, monkeypatch):
    "A policy, three reward models and prompts with answers, in the present folder."
    monkeypatch.chdir(tmp_path)
    named = dict(zip(("reward", "other", "third"), members), sft=tiny_policy(letters, 0, **SIZES))
    for name, model in named.items():
        model.save_pretrained(name)
        letters.save_pretrained(name)
    data().to_json("rows.jsonl")
    return tmp_path


WORDS = (
    "--dataset_name rows.jsonl --model_name_or_path sft --reward_model_path reward "
    "--reward_ensemble other third --reward_aggregation min --reward_center answer --use_cpu "
    "--output_dir run --per_device_train_batch_size 8 --gradient_accumulation_steps 1 --max_steps "
    "1 --response_length 4 --save_rollouts --num_sample_generations 0 --report_to none"
)


# catches: members that the command line loads and does not count, or counts and does not load
def test_an_ensemble_from_the_command_line(folder, letters):
    assert not ppo_command(WORDS.split())
    [path] = (folder / "run" / "rollouts").iterdir()
    r = Rollout.load(path)
    models = [load_judge(name) for name in ("reward", "other", "third")]
    known = [score_texts(m, letters, r.prompts, r.columns["answer"]).numpy() for m in models]
    wanted = by_numpy(some(r, *NAMES), "min", 0, np.array(known))
    np.testing.assert_allclose(r.raw_scores.numpy(), wanted, atol=1e-5)


def test_the_plan_counts_every_member(folder):
    read = lambda words: plan_of(ppo_parser().read(f"{words} --dry_run".split()))
    alone = WORDS.split(" --reward_ensemble")[0] + " --use_cpu" + WORDS.split("--use_cpu")[1]
    three, one = read(WORDS), read(alone)
    frozen = lambda plan: plan.phases["rollout"]["frozen"]
    weights = 4 * sum(p.numel() for p in load_judge("other").parameters())
    assert frozen(three) - frozen(one) == pytest.approx(2 * weights, rel=0.02)


# catches: a plan that the run refuses, members that nothing belongs to
@pytest.mark.parametrize(
    "old, new, named",
    [
        ("--reward_ensemble other third", "", "needs two reward models or more, and there is 1"),
        ("--reward_center answer", "", "reward_center is 'group'"),
        ("--reward_model_path reward", "--reward_function gold", "adds to --reward_model_path"),
        ("--reward_center", "--reward_weights 1 2 1 --reward_center", "they count alike"),
    ],
)
@pytest.mark.parametrize("plan", ["", " --dry_run"])
def test_bad_members_are_named_before_they_are_loaded(
    tmp_path, monkeypatch, capsys, old, new, named, plan
):
    monkeypatch.chdir(tmp_path)  # where none of the models is
    words = WORDS.replace(old, new).replace("rows.jsonl", "mini_tldr")
    assert main(f"ppo {words}{plan}".split()) == 2
    assert named in capsys.readouterr().err and not [*tmp_path.iterdir()]
