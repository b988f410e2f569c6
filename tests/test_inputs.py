"What people bring to PPOTrainer: prompts in three forms, and judges of several kinds."

import pytest
import torch
from datasets import Dataset
from ppo_fixtures import PROMPTS, SIZES
from small_runs import RUN

from rlhf_nb.models import scorer_from
from rlhf_nb.scoring import score_texts
from rlhf_nb.trainer import PPOConfig, PPOTrainer, collate_prompts
from rlhf_nb.training.model_loading import tiny_policy, train_tokenizer
from rlhf_nb.training.prompts import as_batch

TEMPLATE = (
    "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt "
    "%}j{% endif %}"
)


def small(tokenizer, seed=0, positions=24):
    return tiny_policy(tokenizer, seed, **SIZES | dict(max_position_embeddings=positions))


@pytest.fixture
def ppo(letters, tmp_path, small_args):
    def make(reward, data=None, tokenizer=None, **parts) -> PPOTrainer:
        settings = parts.pop("settings", {})
        args = small_args(PPOConfig, **RUN | dict(total_episodes=16) | settings)
        data = Dataset.from_dict(dict(prompt=PROMPTS)) if data is None else data
        parts |= dict(reward_model=reward, train_dataset=data)
        return PPOTrainer(args, tokenizer or letters, small(letters), **parts)

    return make


def count_c(prompts, responses, **columns):
    return [float(r.count("c")) for r in responses]


def brevity(prompts, responses, **columns):
    return [-float(len(r)) for r in responses]


def policy_of(trainer):
    return torch.cat([p.detach().flatten() for p in trainer.model.policy.parameters()])


# ---- Prompts ----


# catches: another order, another shuffle or another padding for one of the forms
def test_the_three_forms_train_the_same_policy(ppo, letters):
    letters.chat_template = TEMPLATE
    try:
        text = Dataset.from_dict(dict(prompt=[p + "j" for p in PROMPTS]))
        talk = Dataset.from_dict(dict(prompt=[[dict(role="user", content=p)] for p in PROMPTS]))
        ids = Dataset.from_dict(dict(input_ids=[letters(p + "j")["input_ids"] for p in PROMPTS]))
        found = []
        for data in (text, talk, ids):
            trainer = ppo(count_c, data, eval_dataset=data.select(range(3)))
            trainer.train()
            assert set(trainer.evaluate()) == {"eval_score", "eval_length", "eval_stopped"}
            found.append(policy_of(trainer))
        assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    finally:
        letters.chat_template = None


# catches: the trainer's own tensors leaking to reward functions, or a user's column lost on the way
def test_other_columns_reach_the_function(ppo, letters):
    seen = []

    def judge(prompts, responses, **columns):
        seen.append(columns)
        return [0.0] * len(responses)

    ids = [letters(p)["input_ids"] for p in PROMPTS]
    rows = dict(input_ids=ids, attention_mask=[[1] * len(row) for row in ids], topic=[*range(24)])
    ppo(judge, Dataset.from_dict(rows)).train()
    assert all(set(columns) == {"topic"} for columns in seen) and len(seen) == 2


# ---- Judges ----


# catches: weights ignored or in the wrong order, parts that are not kept, a mean where a sum is
# meant
def test_several_judges_are_added_up_by_weight(ppo):
    trainer = ppo([count_c, brevity], settings=dict(reward_weights=[2.0, 0.5]))
    r = trainer.score(trainer.rollout(PROMPTS[:8]))
    want = [2.0 * text.count("c") - 0.5 * len(text) for text in r.responses]
    assert r.raw_scores.tolist() == pytest.approx(want)
    assert r.columns["score/brevity"] == [-float(len(t)) for t in r.responses]
    trainer.train()
    log = next(log for log in trainer.state.log_history if "objective/raw_scores" in log)
    assert log["objective/raw_scores"] == pytest.approx(
        2 * log["objective/raw_scores/count_c"] + 0.5 * log["objective/raw_scores/brevity"],
        abs=1e-5,
    )


def test_a_model_beside_a_function(ppo, letters):
    model = scorer_from(small(letters, 3), 3)
    both, alone = ppo([model, brevity], settings=dict(reward_weights=[1.0, 0.0])), ppo(model)
    rollouts = []
    for trainer in (both, alone):
        torch.manual_seed(0)
        rollouts.append(trainer.score(trainer.rollout(PROMPTS[:8])))
    assert torch.equal(rollouts[0].raw_scores, rollouts[1].raw_scores)
    assert set(both.evaluate(Dataset.from_dict(dict(prompt=PROMPTS[:2])))) == {
        "eval_score",
        "eval_length",
        "eval_stopped",
    }


# catches: a value model that is one of several judges: a frozen one that learns nothing, or a judge
# that moves
def test_a_judge_as_value_model_is_named(ppo, letters):
    model = scorer_from(small(letters, 3), 3)
    with pytest.raises(ValueError, match="same object"):
        ppo([count_c, model], value_model=model)


# catches: a reward model that is fed the policy's ids, which mean other words to it
def test_a_reward_model_with_a_tokenizer_of_its_own(ppo, letters):
    other = train_tokenizer(
        ["a b c d e f g h i j", *(" ".join(p) for p in PROMPTS), "".join("jihgfedcba")]
    )
    model = scorer_from(small(other, 1, positions=64), 1)
    trainer = ppo(model, reward_processing_class=other)
    r = trainer.score(trainer.rollout(PROMPTS[:8]))
    want = score_texts(model, other, r.prompts, r.responses, stopped=r.stopped.tolist())
    torch.testing.assert_close(r.raw_scores, want)
    trainer.train()


def test_collated_columns_are_those_that_came():
    letters = train_tokenizer(["a b c"])
    batch = collate_prompts([dict(prompt="a b", place=1), dict(prompt="c", place=2)], letters)
    assert batch["columns"] == dict(place=[1, 2])
    assert batch["prompt"] == ["a b", "c"]
    assert batch["prompt_mask"].tolist() == [[True, True], [False, True]]


# catches: prompts or columns in another order than the ids, so that a reward function gets the facts
# of another prompt
def test_what_belongs_to_a_prompt_is_repeated_beside_it(letters):
    found = as_batch(dict(prompt=["ab", "c"], fact=[1, 2]), letters, times=2)
    assert found["prompt"] == ["ab", "ab", "c", "c"]
    assert found["columns"]["fact"] == [1, 1, 2, 2]
    ids = [row[real].tolist() for row, real in zip(found["prompt_ids"], found["prompt_mask"])]
    assert ids == [letters(text)["input_ids"] for text in found["prompt"]]
