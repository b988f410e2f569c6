"""What people bring: reward functions that misbehave, modules of their own, and a pad token one row
outside the embedding."""

from __future__ import annotations

import copy
import sys
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from datasets import Dataset
from ppo_fixtures import PROMPTS, SIZES, likes_c, weights
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    GraniteConfig,
    T5Config,
    T5ForConditionalGeneration,
)

from rlhf_nb.base.custom import CustomScorer
from rlhf_nb.models import load_policy, load_scorer, load_tokenizer, scorer_from, tiny_policy
from rlhf_nb.reward import call_reward, load_judge

TEXTS = ["abc", "de"]


# ---- Reward functions ----


# catches: a function that sorts, empties or rewrites what it reads, and with it what is trained on
def test_a_function_reads_copies(ppo):
    def vandal(prompts, responses, word, notes):
        scores = [float(len(response)) for response in responses]
        for column in (prompts, responses, word):
            column.clear()
        for note in notes:
            note["seen"] = note["deep"].append(1)
        return scores

    rows = dict(prompt=PROMPTS, word=list("abcdef") * 4, notes=[dict(deep=[i]) for i in range(24)])
    trainer = ppo([vandal, vandal], data=Dataset.from_dict(rows))
    batch = next(iter(trainer.get_train_dataloader()))
    before = copy.deepcopy(batch)
    r = trainer.rollout(batch)
    kept = copy.deepcopy((r.prompts, r.responses, r.columns))
    scored = trainer.score(r)
    assert (r.prompts, r.responses, r.columns) == kept
    assert {name: scored.columns[name] for name in kept[2]} == kept[2]
    assert batch["prompt"] == before["prompt"] and batch["columns"] == before["columns"]


NO_LIST = [
    dict(a=1.0, b=2.0),
    {1.0, 2.0},
    frozenset([1.0, 2.0]),
    "12",
    b"12",
    (float(x) for x in "12"),
    map(float, "12"),
    iter([1.0, 2.0]),
    None,
    1.0,
    np.float64(1.0),
    np.array(1.0),
    torch.tensor(1.0),
    object(),
    pd.DataFrame(dict(a=[1.0, 2.0])),
]
NO_SCORES = [[1.0], [1.0, 2.0, 3.0], [1.0, None], [1.0, "2"], [1.0, float("nan")], [1.0, [2.0]]]


# catches: a dict whose keys are taken for scores, a set in any order, a string of digits
@pytest.mark.parametrize("returned", [*NO_LIST, *NO_SCORES], ids=lambda x: type(x).__name__)
def test_what_is_no_list_of_scores_is_refused(returned):
    with pytest.raises(ValueError, match="^reward function judge returned .*: return ") as error:
        call_reward(named(lambda prompts, responses: returned), TEXTS, TEXTS, {})
    assert len(str(error.value).splitlines()) == 1 or isinstance(returned, pd.DataFrame)


@pytest.mark.parametrize(
    "returned",
    [
        [1, 2.5],
        (1, 2.5),
        np.array([1, 2.5]),
        torch.tensor([1, 2.5]),
        torch.tensor([[1], [2.5]]),
        pd.Series([1, 2.5]),
        [np.float32(1), torch.tensor(2.5)],
    ],
    ids=lambda x: type(x).__name__,
)
def test_lists_of_any_kind_are_taken(returned):
    scores = call_reward(named(lambda prompts, responses: returned), TEXTS, TEXTS, {})
    assert scores.tolist() == [1.0, 2.5]


def named(function):
    function.__name__ = "judge"
    return function


# catches: a run that ends well, in silence, at the first score; Ctrl-C taken for an error
@pytest.mark.parametrize("code", [0, None, 1, "enough"])
def test_a_function_may_not_end_the_program(ppo, code):
    def leaves(prompts, responses):
        sys.exit(code)

    with pytest.raises(RuntimeError, match=r"reward function leaves .*sys.exit\("):
        ppo(leaves).train()


def test_an_interrupt_in_a_function_stays_one():
    def interrupted(prompts, responses):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        call_reward(interrupted, TEXTS, TEXTS, {})


# catches: NaN from a reward model that is blamed on the policy's learning rate, a phase later
@pytest.mark.parametrize("own_tokenizer", [False, True])
def test_nan_from_a_reward_model_names_the_model(ppo, letters, own_tokenizer):
    model = scorer_from(tiny_policy(letters, 0, **SIZES), 3)
    model.config._name_or_path = model.name_or_path = "people/judge"
    nn.init.constant_(model.score.weight, float("nan"))
    trainer = ppo(model, parts=dict(reward_processing_class=letters) if own_tokenizer else {})
    before = weights(trainer)
    with pytest.raises(ValueError, match="reward model people/judge gave nan for response 0"):
        trainer.step()
    with pytest.raises(ValueError, match="reward model people/judge gave nan"):
        trainer.generate_completions()
    now = weights(trainer)
    assert all(torch.equal(x.nan_to_num(), before[name].nan_to_num()) for name, x in now.items())


# catches: an encoder's head read at the last token, without its pooler: other scores than its own
def test_an_encoder_as_a_judge_is_refused(ppo, letters):
    sizes = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    config = BertConfig(vocab_size=12, num_labels=1, max_position_embeddings=32, **sizes)
    model = AutoModelForSequenceClassification.from_config(config)
    nn.init.normal_(model.classifier.weight)
    with pytest.raises(
        ValueError, match="BertForSequenceClassification does not read its score at"
    ):
        ppo(model)


# ---- Modules of one's own ----


class Rule(nn.Module):
    "As people wrote rules for the published trainer: no weights, a body that returns the ids."

    base_model_prefix = "model"

    def __init__(self, letter: int = 4):
        super().__init__()
        self.letter, self.model, self.config = letter, self.body, SimpleNamespace()

    def body(self, input_ids, attention_mask, position_ids, return_dict, output_hidden_states, **_):
        assert return_dict and output_hidden_states
        assert (position_ids == (attention_mask.cumsum(1) - 1) * attention_mask).all()
        hits = ((input_ids == self.letter) * attention_mask).cumsum(1)
        return SimpleNamespace(hidden_states=(hits[..., None].float(),))

    def score(self, hidden_states):
        return hidden_states


class Head(nn.Module):
    "A body of transformers and a head of two layers."

    base_model_prefix = "backbone"

    def __init__(self, backbone, width: int = 16):
        super().__init__()
        self.backbone = backbone
        self.score = nn.Sequential(nn.Linear(width, 8), nn.Tanh(), nn.Linear(8, 1))


def neox(letters, seed: int = 0):
    return tiny_policy(letters, seed, **SIZES)


# catches: a rule that is told to be a function though it has the published form; one read at another
# token than the last
@pytest.mark.parametrize("own_tokenizer", [False, True])
def test_a_rule_in_the_published_form_judges(ppo, letters, own_tokenizer):
    trainer = ppo(Rule(), parts=dict(reward_processing_class=letters) if own_tokenizer else {})
    r = trainer.score(trainer.rollout(["ac", "c", "deccc", "f"] * 2))
    wanted = [p.count("c") + s.count("c") for p, s in zip(r.prompts, r.responses)]
    assert r.raw_scores.tolist() == wanted
    trainer.step()
    assert trainer.generate_completions()["eval_score"] >= 0
    assert not isinstance(trainer.pair.value, CustomScorer)  # a rule would not learn


def test_a_module_is_judge_and_value_model(ppo, letters, tmp_path):
    value, judge = Head(neox(letters, 1)), Head(neox(letters, 2).base_model)
    with torch.no_grad():
        ids = torch.tensor([[2, 3, 4]])
        body = judge.backbone(input_ids=ids, output_hidden_states=True)
        wanted = judge.score(body.hidden_states[-1])[0, -1, 0]
    trainer = ppo(judge, parts=dict(value_model=value), save_strategy="steps", save_steps=1)
    r = trainer.rollout(["ab"] * 8)
    row = r.with_(response_ids=ids[:, 2:].expand(8, -1), mask=torch.ones(8, 1, dtype=torch.bool))
    torch.testing.assert_close(trainer.score(row).raw_scores, wanted.expand(8))
    before, frozen = copy.deepcopy(value.state_dict()), copy.deepcopy(judge.state_dict())
    trainer.train()
    moved = value.state_dict()
    assert not torch.equal(moved["score.0.weight"], before["score.0.weight"])
    assert all(torch.equal(x, frozen[name]) for name, x in judge.state_dict().items())
    again = ppo(judge, parts=dict(value_model=Head(neox(letters, 1))))
    again.train(resume_from_checkpoint=str(tmp_path / "run/checkpoint-2"))
    assert all(torch.equal(x, weights(again)[name]) for name, x in weights(trainer).items())


# catches: a body that is copied, stepped twice, or lost where it is saved
def test_a_value_module_may_share_the_policys_body(ppo, letters):
    policy = neox(letters)
    value = Head(policy)
    trainer = ppo(likes_c, model=policy, parts=dict(value_model=value), save_strategy="epoch")
    assert trainer.pair.value.base_model.given.backbone is trainer.policy
    before = weights(trainer)
    trainer.train()
    after = weights(trainer)
    body = "gpt_neox.layers.0.attention.dense.weight"
    assert not torch.equal(after[f"policy.{body}"], before[f"policy.{body}"])
    shared = [name for name in after if name.endswith(body)]
    assert len(shared) == 2 and torch.equal(after[shared[0]], after[shared[1]])


# catches: an AttributeError about config or num_labels for whatever is no classifier
@pytest.mark.parametrize("slot", ["reward_model", "value_model"])
def test_another_module_is_told_to_be_a_function(ppo, letters, slot):
    class Nothing(nn.Module):
        def forward(self, x):
            return x

    class NoScore(Head):
        score = None

        def __init__(self, backbone):
            nn.Module.__init__(self)
            self.backbone = backbone

    for module in (Nothing(), NoScore(neox(letters)), neox(letters)):
        given = dict(reward=module) if slot == "reward_model" else {}
        with pytest.raises(
            ValueError, match=r"give a function f\(prompts, responses, \*\*columns\)"
        ):
            ppo(**given, parts={} if given else dict(value_model=module))


def test_a_score_of_another_shape_is_refused(ppo):
    rule = Rule()
    rule.score = lambda hidden: hidden[..., 0]
    with pytest.raises(ValueError, match="score of Rule returned .* return a number for each"):
        ppo(rule).step()


# ---- A pad token outside ----


def without_pad(letters):
    "The letters, whose pad token is one id outside a policy of 12: Llama 3, GPT-2."
    tokenizer = copy.deepcopy(letters)
    tokenizer.add_special_tokens(dict(pad_token="[PAD]"))
    assert tokenizer.pad_token_id == 12
    return tokenizer


# catches: an error that a published script cannot pass without one more line; a row in the policy
# alone; a saved model that does not load
def test_the_embedding_grows_for_the_pad_token_alone(ppo, letters, tmp_path, monkeypatch):
    lines = []
    monkeypatch.setattr("rlhf_nb.models.logger.warning", lines.append)
    scorer = scorer_from(neox(letters), 3)
    parts = dict(
        processing_class=without_pad(letters),
        ref_model=neox(letters),
        value_model=copy.deepcopy(scorer),
    )
    trainer = ppo(scorer, parts=parts)
    models = (trainer.policy, trainer.ref_model, trainer.reward_model, trainer.pair.value)
    assert {model.get_input_embeddings().num_embeddings for model in models} == {13}
    assert len(lines) == 4 and all("the pad token's id 12 is" in line for line in lines)
    assert not trainer.rollout(["ab", "c"]).kl.any()
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert model.config.vocab_size == 13 and tokenizer.pad_token_id == 12
    inputs = tokenizer(["abc", "d"], return_tensors="pt", padding=True)
    assert model.generate(**inputs, max_new_tokens=2).shape == (2, 5)


def test_other_ids_outside_stay_an_error(ppo, letters):
    tokenizer = without_pad(letters)
    tokenizer.add_tokens(["<think>"])
    with pytest.raises(ValueError, match="set resize_embeddings=True"):
        ppo(likes_c, parts=dict(processing_class=tokenizer))
    ppo(likes_c, parts=dict(processing_class=tokenizer), resize_embeddings=True)


# ---- Models that cannot be used ----


@pytest.fixture
def saved(letters, tmp_path):
    "Folders: a policy and what can be wrong with one."
    model = neox(letters)
    for name in ("whole", "none", "cut", "empty", "less", "shape", "broken", "unknown"):
        model.save_pretrained(tmp_path / name)
    weights = load_file(tmp_path / "whole/model.safetensors")
    body = next(name for name in weights if "mlp" in name)
    (tmp_path / "none/model.safetensors").unlink()
    data = (tmp_path / "whole/model.safetensors").read_bytes()
    (tmp_path / "cut/model.safetensors").write_bytes(data[:-100])
    (tmp_path / "empty/model.safetensors").write_bytes(b"")
    for name, changed in dict(less={}, shape={body: torch.zeros(3)}).items():
        others = {key: x for key, x in weights.items() if key != body}
        save_file(others | changed, tmp_path / name / "model.safetensors", dict(format="pt"))
    (tmp_path / "broken/config.json").write_text("{")
    (tmp_path / "unknown/config.json").write_text('{"model_type": "no such"}')
    (tmp_path / "nothing").mkdir()
    scorer_from(model, 0).save_pretrained(tmp_path / "reward")
    AutoModel.from_config(model.config).save_pretrained(tmp_path / "body")
    T5ForConditionalGeneration(
        T5Config(vocab_size=12, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    ).save_pretrained(tmp_path / "t5")
    return tmp_path


WRONG = dict(
    none="cannot be loaded: .*model.safetensors",
    cut="damaged: copy it again",
    empty="damaged: copy it again",
    less="lacks 1 weights of GPTNeoX.*mlp.*would be random",
    shape="lacks 1 weights of GPTNeoX.*another shape",
    broken="cannot be loaded: .*not a valid JSON",
    unknown="cannot be loaded: .*no such",
    nothing="has no config.json",
    t5="is no decoder: t5 is an encoder-decoder",
    absent="there is no folder",
)


# catches: layers that are random because their weights were not there; traces of twenty lines
@pytest.mark.parametrize("load", [load_policy, load_scorer, load_judge])
@pytest.mark.parametrize("what", WRONG)
def test_what_is_no_model_is_told_in_one_line(saved, load, what):
    with pytest.raises((ValueError, OSError), match=WRONG[what]) as error:
        load(str(saved / what))
    assert len(str(error.value).splitlines()) == 1 and str(saved / what) in str(error.value)


@pytest.mark.parametrize("what", ["reward", "body"])
def test_a_policy_without_its_head_is_refused(saved, what):
    with pytest.raises(ValueError, match="reward or value model|would be random"):
        load_policy(str(saved / what))


def test_folders_may_be_paths_and_must_hold_a_tokenizer(saved, letters):
    assert load_policy(saved / "whole").config.vocab_size == 12
    with pytest.raises(FileNotFoundError, match="has no tokenizer"):
        load_tokenizer(saved / "whole")
    for nothing in (None, 3, ["a"]):
        with pytest.raises(TypeError, match="give a model, a name on the hub, or a folder"):
            load_policy(nothing)


# catches: the list of all classes that transformers knows, for a policy that can have a value head
def test_a_policy_without_a_classifier_is_told_of_the_value_head(ppo, letters):
    config = GraniteConfig(
        **dict(vocab_size=12, hidden_size=16, intermediate_size=16, num_hidden_layers=1),
        **dict(num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=16),
        **dict(pad_token_id=0, bos_token_id=None, eos_token_id=1),
    )
    make = lambda: AutoModelForCausalLM.from_config(config)
    with pytest.raises(ValueError, match="granite, which has no .*set share_value_trunk=True"):
        ppo(likes_c, model=make())
    ppo(likes_c, model=make(), share_value_trunk=True).step()
