"""A pad token that is also the stop token, as most fine-tuned checkpoints have it: what is padding
comes from the lengths of rows, never from ids."""

import copy

import pytest
import torch
from datasets import Dataset
from ppo_fixtures import PROMPTS, STOP, untimed
from small_models import small_model
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rlhf_nb.masks import response_mask
from rlhf_nb.models import scorer_from
from rlhf_nb.reward import RewardConfig, RewardTrainer
from rlhf_nb.scoring import score_texts
from rlhf_nb.sft import SFTConfig, SFTTrainer
from rlhf_nb.training.prompts import read_prompts

TEXTS = dict(prompt=["abc", "b", "cde"] * 4, completion=["jj", "fefe", "a"] * 4)
PAIRS = dict(chosen=["jj", "fefef", "a"] * 4, rejected=["abab", "d", "ghi"] * 4)
PAIRS["prompt"] = TEXTS["prompt"]


def words_of(letters, pad):
    "The tokenizer of letters, with another pad token."
    words = copy.deepcopy(letters)
    words.pad_token = pad
    return words


def small(family, pad):
    "The same weights whatever the pad id, which torch's embedding is told, as in a saved model."
    model = small_model(family, pad_token_id=None, initializer_range=0.3, num_key_value_heads=2)
    model.config.pad_token_id = model.get_input_embeddings().padding_idx = pad
    return model


def supervised(kind, config, data, small_args, words, model):
    sizes = dict(max_steps=3, per_device_train_batch_size=4, num_train_epochs=1)
    args = small_args(config, learning_rate=1e-2, seed=0, **sizes)
    return kind(model, args, Dataset.from_dict(data), processing_class=words)


@pytest.fixture
def trained(letters, small_args, ppo):
    "Runs one of the three trainers for three updates with a pad token; the trainer."

    def run(stage, pad, family="llama"):
        words = words_of(letters, pad)
        model = small(family, words.pad_token_id)
        if stage == "sft":
            trainer = supervised(SFTTrainer, SFTConfig, TEXTS, small_args, words, model)
        elif stage == "reward":
            scorer = scorer_from(model, seed=0)
            scorer.get_input_embeddings().padding_idx = words.pad_token_id
            trainer = supervised(RewardTrainer, RewardConfig, PAIRS, small_args, words, scorer)
        else:
            how = dict(share_value_trunk=family == "youtu", parts=dict(processing_class=words))
            trainer = ppo(model=model, learning_rate=1e-2, **how)
        trainer.train()
        return trainer

    return run


def apart(one, other):
    "The largest difference of two runs, in what they logged."
    logs = zip(one.state.log_history, other.state.log_history, strict=True)
    pairs = [(untimed(a), untimed(b)) for a, b in logs]
    assert len(pairs) >= 3 and all(a.keys() == b.keys() for a, b in pairs)
    names = {"loss", "grad_norm", "loss/policy_avg", "loss/value_avg", "objective/rlhf_reward"}
    numbers = [abs(a[name] - b[name]) for a, b in pairs for name in names & a.keys()]
    assert len(numbers) >= 6
    return max(numbers)


# catches: labels, masks or scores that take the stop token for padding; an embedding whose stop
# token never learns since it is the padding_idx
@pytest.mark.parametrize("stage", ["sft", "reward", "ppo"])
def test_training_is_the_same_with_a_pad_token_of_its_own_and_without(trained, stage):
    assert apart(trained(stage, "<pad>"), trained(stage, "<eos>")) <= 1e-6


# ---- Saved, and read by transformers alone ----


# catches: a folder that scores one token early without a word
def test_a_saved_reward_model_is_read_at_the_stop_token(trained, tmp_path):
    trainer = trained("reward", "<eos>")
    trainer.save_model(str(tmp_path / "saved"))
    words, pairs = trainer.processing_class, list(zip(PAIRS["prompt"], PAIRS["rejected"]))[:3]
    right = score_texts(trainer.model, words, *zip(*pairs))
    alone = AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved")
    center = getattr(alone.config, "reward_center", 0.0)
    rows = [[*words(a + b)["input_ids"], STOP] for a, b in pairs]
    with torch.no_grad():
        scores = [alone(torch.tensor([row])).logits.item() - center for row in rows]
    assert scores == pytest.approx(right.tolist(), abs=1e-5)
    with pytest.raises(ValueError, match="no padding token"):
        alone(torch.tensor([rows[0], rows[0]]))
    assert "one row at a time" in (tmp_path / "saved" / "README.md").read_text()
    assert trainer.model.config.pad_token_id == STOP  # of the model that goes on training


# catches: the row of a stop token that is 0 in a folder that is read, or gone from the run's config
@pytest.mark.parametrize("stage", ["sft", "ppo"])
def test_the_row_of_a_pad_token_comes_back(stage, trained, tmp_path):
    trainer = trained(stage, "<eos>", "youtu")
    trainer.save_model(str(tmp_path / "saved"))
    model = trainer.model if stage == "sft" else trainer.policy
    alone = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert model.config.pad_token_id == STOP and model.lm_head.weight[STOP].all()
    for name, x in alone.state_dict().items():
        assert torch.equal(x, model.state_dict()[name]), name


# ---- Prompts and stops ----


# catches: stop tokens between the turns of a prompt that are dropped as padding
def test_given_ids_without_a_mask_are_all_real_where_the_pad_token_is_the_stop_token(letters):
    ids = [[2, STOP, 3], [STOP, 4]]
    _, rows = read_prompts(dict(input_ids=ids), words_of(letters, "<eos>"))
    assert rows == ids
    masked = dict(input_ids=[[STOP, STOP, 4]], attention_mask=[[0, 1, 1]])
    assert read_prompts(masked, words_of(letters, "<eos>"))[1] == [[STOP, 4]]
    assert read_prompts(dict(input_ids=[[0, 2, 3]]), letters)[1] == [[2, 3]]


STOPS = [{}, dict(stop_token="eos"), dict(stop_token_id=5), dict(stop_token_id=0)]
STOPS += [dict(stop_strings=["b"])]


# catches: a mask from ids, which loses the stop token, or counts the padding behind it
@pytest.mark.parametrize("how", STOPS, ids=str)
def test_a_rollout_ends_at_its_first_stop_token_whatever_pads(ppo, letters, how):
    pad = "<pad>" if how.get("stop_token_id") == 0 else "<eos>"
    trainer = ppo(parts=dict(processing_class=words_of(letters, pad)), **how)
    r = trainer.rollout(PROMPTS)
    if "stop_strings" in how:
        ends = [row.index(3) + 1 if 3 in row else len(row) for row in r.response_ids.tolist()]
        expected = torch.arange(5) < torch.tensor(ends)[:, None]
    else:
        expected = response_mask(r.response_ids, [*trainer.sampling_settings.stop_ids])
    assert torch.equal(r.mask, expected) and 0 < r.stopped.sum() < len(r.stopped)
    assert all(value == value for value in untimed(trainer.step()).values())


# catches: a tokenizer whose only pad token is outside the model, taken for one that may be added
def test_a_stop_token_outside_the_model_is_refused_though_it_pads(ppo, letters):
    words = copy.deepcopy(letters)
    words.add_special_tokens({"eos_token": "<end>", "pad_token": "<end>"})
    with pytest.raises(ValueError, match="resize_embeddings=True"):
        ppo(parts=dict(processing_class=words))
