"""What people bring: reward functions that misbehave, modules of their own, and a pad token one row
outside the embedding."""

from __future__ import annotations

import bz2
import copy
import gzip
import json
import lzma
import shutil
import sys
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from ppo_fixtures import PROMPTS, SIZES, Runs, begin, likes_c, weights
from safetensors.torch import load_file, save_file
from small_models import WIDTHS, small_model
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertLMHeadModel,
    LlamaConfig,
    LlamaForTokenClassification,
    T5Config,
    T5ForConditionalGeneration,
)

from rlhf_nb.base.custom import CustomScorer
from rlhf_nb.cli.data import load_rows
from rlhf_nb.cli.models import require_name
from rlhf_nb.cli.recipes import read_recipe
from rlhf_nb.judges import load_judge
from rlhf_nb.models import scorer_from, scorer_head
from rlhf_nb.reward import RewardConfig, RewardTrainer
from rlhf_nb.reward_functions import call_reward
from rlhf_nb.rollout import Rollout
from rlhf_nb.sampling import goes_on
from rlhf_nb.scoring import score_texts
from rlhf_nb.sft import SFTConfig, SFTTrainer
from rlhf_nb.training.model_loading import (
    load_policy,
    load_reward_model,
    load_scorer,
    load_tokenizer,
    tiny_policy,
)
from rlhf_nb.ui.episodes import shown_of, when
from rlhf_nb.ui.reader import objective_for
from rlhf_nb.ui.viewer import view

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
NO_SCORES = {  # what is said -> lists that are none
    "0 scores for 2": [[]],
    "1 scores for 2": [[1.0]],
    "3 scores for 2": [[1.0, 2.0, 3.0]],
    "for response 0": [[True, 1.0], [torch.tensor(float("nan")), 1.0], [[1.0], 2.0]],
    "inf for response 0": [[float("inf"), 1.0]],
    "nan for response 1": [[1.0, float("nan")]],
    "None for response 1": [[1.0, None]],
    "'2' for response 1": [[1.0, "2"]],
    ": return ": [[1.0, [2.0]], [torch.zeros(2)] * 2, [1e300, 0.0]],
    "finite number": [
        [1.0, 10**400],
        [1.0, Fraction(10**400, 3)],
        [1 + 0j, 2.0],
        np.array([1 + 0j, 2]),
        torch.tensor([1 + 0j, 2 + 0j]),
        torch.tensor([1 + 2j, 2 + 0j]),
        torch.zeros(2, device="meta"),
        [torch.zeros((), device="meta")] * 2,
    ],
}


# catches: a dict whose keys are taken for scores, a set in any order, a string of digits, a complex
# number whose imaginary part is 0, a tensor without numbers
def test_what_is_no_list_of_scores_is_refused():
    cases = [(": return ", x) for x in NO_LIST]
    cases += [(said, x) for said, several in NO_SCORES.items() for x in several]
    for said, returned in cases:
        with pytest.raises(ValueError, match=f"^reward function judge returned .*{said}") as error:
            call_reward(named(lambda prompts, responses: returned), TEXTS, TEXTS, {})  # noqa: B023
        assert len(str(error.value).splitlines()) == 1 or isinstance(returned, pd.DataFrame)


# catches: isinstance(x, float), which numpy's float64 passes and float32 and integers do not
def test_lists_of_any_kind_are_taken():
    mixed = [torch.tensor(1), np.float64(2)], [np.float32(1), torch.tensor(2)], (1, 2), [1, 2.0]
    kinds = [np.array([1, 2], kind) for kind in (np.float64, np.float32, np.int64, np.float16)]
    tensors = torch.tensor([1.0, 2]), torch.tensor([[1], [2]]), pd.Series([1, 2])
    for returned in (*mixed, *kinds, *tensors):
        scores = call_reward(named(lambda prompts, responses: returned), TEXTS, TEXTS, {})  # noqa: B023
        assert scores.tolist() == [1.0, 2.0], returned


# catches: prompts scored for responses, in the order of another signature
def test_a_function_of_trl_or_of_another_order_gets_the_responses():
    for function in (
        lambda completions, **columns: [len(x) for x in completions],
        lambda completions, extra, **columns: [len(x) for x in completions],
        lambda extra, prompts, completions: [len(x) for x in completions],
        lambda responses, prompts, extra: [len(x) for x in responses],
        lambda p, *answers, **columns: [len(x) for x in answers[0]],
        lambda posts, completions, /, **completion: [len(x) for x in completions],
    ):
        scores = call_reward(function, TEXTS, ["a", "abc"], dict(extra=[0, 0]))
        assert scores.tolist() == [1, 3]
    assert call_reward(lambda completions: completions, TEXTS, [1, 3], {}).tolist() == [1, 3]


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
    model = scorer_from(begin(letters), 3)
    model.config._name_or_path = model.name_or_path = "people/judge"
    trainer = ppo(model, parts=dict(reward_processing_class=letters) if own_tokenizer else {})
    nn.init.constant_(model.score.weight, float("nan"))  # what is saved so is refused before
    before = weights(trainer)
    with pytest.raises(ValueError, match="reward model people/judge gave nan for response 0"):
        trainer.step()
    with pytest.raises(ValueError, match="reward model people/judge gave nan"):
        trainer.generate_completions()
    now = weights(trainer)
    assert all(torch.equal(x.nan_to_num(), before[name].nan_to_num()) for name, x in now.items())


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
    value, judge = Head(begin(letters, 1)), Head(begin(letters, 2).base_model)
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
    assert not torch.equal(value.state_dict()["score.0.weight"], before["score.0.weight"])
    assert all(torch.equal(x, frozen[name]) for name, x in judge.state_dict().items())
    again = ppo(judge, parts=dict(value_model=Head(begin(letters, 1))))
    again.train(resume_from_checkpoint=str(tmp_path / "run/checkpoint-2"))
    assert all(torch.equal(x, weights(again)[name]) for name, x in weights(trainer).items())


# catches: a body that is copied, stepped twice, or lost where it is saved
def test_a_value_module_may_share_the_policys_body(ppo, letters):
    policy = begin(letters)
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

    for module in (Nothing(), NoScore(begin(letters)), begin(letters)):
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


# catches: an error that a published script cannot pass without one more line; a row in the policy
# alone; a saved model that does not load
def test_the_embedding_grows_for_the_pad_token_alone(
    ppo, letters, padded_outside, tmp_path, monkeypatch
):
    lines = []
    monkeypatch.setattr("rlhf_nb.training.model_loading.logger.warning", lines.append)
    scorer = scorer_from(begin(letters), 3)
    parts = dict(
        processing_class=padded_outside, ref_model=begin(letters), value_model=copy.deepcopy(scorer)
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


# ---- Models that cannot be used ----


@pytest.fixture
def saved(letters, tmp_path):
    "Folders: a policy and what can be wrong with one."
    model = begin(letters)
    for name in "whole none cut empty less shape broken unknown locked pickle".split():
        model.save_pretrained(tmp_path / name)
    weights = load_file(tmp_path / "whole/model.safetensors")
    body = next(name for name in weights if "mlp" in name)
    for name in ("none", "pickle", "locked"):
        (tmp_path / name / "model.safetensors").unlink()
    (tmp_path / "locked/model.safetensors").symlink_to("/proc/self/mem")  # no file to be read
    torch.save(dict(a=Runs()), tmp_path / "pickle/pytorch_model.bin")
    data = (tmp_path / "whole/model.safetensors").read_bytes()
    (tmp_path / "cut/model.safetensors").write_bytes(data[:-100])
    (tmp_path / "empty/model.safetensors").write_bytes(b"")
    for name, changed in dict(less={}, shape={body: torch.zeros(3)}).items():
        others = {key: x for key, x in weights.items() if key != body}
        save_file(others | changed, tmp_path / name / "model.safetensors", dict(format="pt"))
    tiny_policy(letters, 0, **SIZES | dict(num_hidden_layers=2)).save_pretrained(tmp_path / "more")
    shutil.copy(tmp_path / "whole/config.json", tmp_path / "more")
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
    more=r"has 12 weights that GPTNeoX\w+ has no place for, such as gpt_neox.layers.1.*, .*, ",
    broken="cannot be loaded: .*not a valid JSON",
    unknown="cannot be loaded: .*no such",
    locked="cannot be loaded: No such .* saved to and you may read",
    pickle="a file in .* runs code when it is read: do not read it by other means, but remove it",
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
    with (
        pytest.raises((ValueError, OSError), match=f"^--model {saved / what}: .*{WRONG[what]}"),
        require_name("--model", str(saved / what)) as name,
    ):
        load(name)


# catches: a reward model of fewer layers than it was trained with, a bias or an adapter left out; a
# head, a buffer or a pooler beside the model that is refused
@pytest.mark.parametrize("load", [load_policy, load_scorer, load_reward_model])
def test_weights_without_a_place_are_named_and_extras_are_not(saved, letters, load):
    deep = tiny_policy(letters, 0, **SIZES | dict(num_hidden_layers=2))
    for name, model in dict(scorer=scorer_from(deep, 0), body=deep.base_model).items():
        model.save_pretrained(saved / name)
        shutil.copy(saved / "reward/config.json", saved / name)
    get_peft_model(deep, LoraConfig(target_modules=["dense"])).save_pretrained(saved / "adapter")
    adapter = json.loads((saved / "adapter/adapter_config.json").read_text())
    adapter |= dict(base_model_name_or_path=str(saved / "whole"))
    (saved / "adapter/adapter_config.json").write_text(json.dumps(adapter))
    for name in ("adapter", *["scorer", "body"] * (load is not load_policy)):
        with pytest.raises(ValueError, match=f"{saved / name} has .* no place for, .*layers.1"):
            load(str(saved / name))

    small_model("llama").save_pretrained(saved / "llama")
    file = saved / "llama/model.safetensors"
    layer, weights = "model.layers.0.self_attn", load_file(file)
    extras = ("rotary_emb.inv_freq", "masked_bias", "k_proj.weight_scale")
    names = "v_head.bias", "score.bias", "model.pooler.weight", *(f"{layer}.{x}" for x in extras)
    save_file(weights | {name: torch.zeros(1) for name in names}, file, dict(format="pt"))
    load(str(saved / "llama"))
    save_file(weights | {f"{layer}.q_proj.bias": torch.zeros(16)}, file, dict(format="pt"))
    with pytest.raises(ValueError, match="has 1 weights .*q_proj.bias. Put back the config.json"):
        load(str(saved / "llama"))


# catches: a language model's folder that judges by a random head; a trained one that is refused
def test_a_new_head_judges_only_when_it_was_trained(ppo, saved):
    for load in (load_scorer, load_reward_model):
        scorer = load(str(saved / "whole"))
        with pytest.raises(ValueError, match=f"{saved / 'whole'} has no reward head, so its"):
            ppo(copy.deepcopy(scorer))
        ppo(likes_c, parts=dict(value_model=copy.deepcopy(scorer)))
        nn.init.ones_(scorer_head(scorer).weight)
        ppo(scorer)


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
# or whose classifier reads a pooler; a head that is not there in the words of torch
@pytest.mark.parametrize("family", ["granite", "bert", "electra"])
def test_a_policy_without_a_classifier_is_told_of_the_value_head(ppo, letters, family):
    make = lambda: small_model(family, is_decoder=True)
    with pytest.raises(ValueError, match=f"{family}, which has no .*set share_value_trunk=True"):
        ppo(likes_c, model=make())
    ppo(likes_c, model=make(), share_value_trunk=True).step()


# catches: ids of a check that a small embedding does not have
@pytest.mark.parametrize("rows", [2, 3, 4])
def test_a_vocabulary_may_be_tiny(rows):
    model = small_model("gpt_neox", vocab_size=rows)
    assert load_scorer(scorer_from(model)) and goes_on(model)


# ---- Models in the wrong place ----

SMALL = dict(**WIDTHS, max_position_embeddings=32, vocab_size=12, pad_token_id=0, num_labels=1)
PAIRS = Dataset.from_dict(dict(prompt=["a"] * 4, chosen=["b"] * 4, rejected=["c"] * 4))
DEMONSTRATIONS = Dataset.from_dict(dict(prompt=["a"] * 4, completion=["b"] * 4))


# catches: a class that fits by its shape: a classifier of tokens, an encoder whose score is a pooler's
@pytest.mark.parametrize(
    "kind, config, said",
    [
        (LlamaForTokenClassification, LlamaConfig(**SMALL), "is a classifier of tokens"),
        (BertForTokenClassification, BertConfig(**SMALL), "is a classifier of tokens"),
        (BertForSequenceClassification, BertConfig(**SMALL), "it is an encoder, which reads both"),
        (BertForSequenceClassification, BertConfig(**SMALL, is_decoder=True), "its head gives"),
    ],
)
def test_what_is_no_judge_is_refused_everywhere(ppo, letters, small_args, kind, config, said):
    torch.manual_seed(0)
    model = kind(config)
    nn.init.normal_(scorer_head(model).weight)
    args = small_args(RewardConfig, max_steps=1)
    for make in (
        lambda: ppo(model),
        lambda: ppo(parts=dict(value_model=model)),
        lambda: RewardTrainer(model, args, PAIRS, processing_class=letters),
        lambda: load_scorer(model),
    ):
        with pytest.raises(ValueError, match=said):
            make()
    if "head" not in said:
        with pytest.raises(ValueError, match=said):
            score_texts(model, letters, ["a"], ["b"])


@pytest.mark.parametrize(
    "model, said",
    [
        (BertForMaskedLM(BertConfig(**SMALL)), "reads both ways"),
        (BertLMHeadModel(BertConfig(**SMALL)), "reads both ways"),
        (LlamaForTokenClassification(LlamaConfig(**SMALL)), "writes no tokens"),
        (AutoModelForSequenceClassification.from_config(LlamaConfig(**SMALL)), "writes no tokens"),
    ],
)
def test_what_is_no_language_model_is_refused_everywhere(ppo, letters, small_args, model, said):
    args = small_args(SFTConfig, max_steps=1)
    with pytest.raises(ValueError, match=said):
        ppo(model=model)
    with pytest.raises(ValueError, match=said):
        SFTTrainer(model, args, DEMONSTRATIONS, processing_class=letters)


# catches: NaN in a file that is blamed on the learning rate, after the first update
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_named_as_they_are_loaded(ppo, letters, tmp_path, bad):
    policy = begin(letters)
    policy.gpt_neox.layers[0].mlp.dense_h_to_4h.weight.data[3, 2] = bad
    for model, folder in ((policy, "policy"), (scorer_from(policy), "scorer")):
        model.save_pretrained(tmp_path / folder)
        letters.save_pretrained(tmp_path / folder)
    said = r"1 of 1024 numbers in gpt_neox\.layers\.0\.mlp\.dense_h_to_4h\.weight"
    name = str(tmp_path / "scorer")
    for make in (
        lambda: ppo(model=str(tmp_path / "policy")),
        lambda: ppo(model=policy),
        lambda: ppo(name),
        lambda: ppo(parts=dict(value_model=name)),
        lambda: load_reward_model(name),
    ):
        with pytest.raises(ValueError, match=said):
            make()


# catches: another vocabulary that fits into the embedding, and scores that mean nothing
def test_a_reward_model_with_far_more_ids_needs_its_tokenizer(ppo, letters, caplog):
    judge = lambda rows: AutoModelForSequenceClassification.from_config(
        LlamaConfig(**SMALL | dict(vocab_size=rows))
    )
    with pytest.raises(ValueError, match="embedding for 300 ids .* policy for 12.*reward_proc"):
        ppo(judge(300))
    ppo(judge(300), parts=dict(reward_processing_class=letters))
    assert "taken for the same vocabulary" not in caplog.text
    ppo(judge(128))
    assert "128 ids and the policy for 12" in caplog.text


# catches: the older name of a setting that is dropped without a word
@pytest.mark.parametrize("load", [load_policy, load_reward_model])
def test_torch_dtype_is_dtype(letters, tmp_path, load):
    begin(letters).save_pretrained(tmp_path)
    letters.save_pretrained(tmp_path)
    name = str(tmp_path)
    for given in (torch.bfloat16, "bfloat16"):
        assert load(name, torch_dtype=given).dtype == torch.bfloat16
        assert load(name, dtype=given).dtype == torch.bfloat16
    assert load(name, dtype=torch.float16, torch_dtype="float16").dtype == torch.float16
    assert load(name, dtype="torch.bfloat16").dtype == torch.bfloat16
    assert load(name).dtype == load(name, torch_dtype=None).dtype == torch.float32
    with pytest.raises(ValueError, match="dtype is float16 and torch_dtype is bfloat16"):
        load(name, dtype="float16", torch_dtype="bfloat16")
    for odd in ("bf16", "Tensor"):
        with pytest.raises(ValueError, match=f"dtype is '{odd}': give float32"):
            load(name, dtype=odd)


def test_model_init_kwargs_may_name_it_either_way(letters, small_args, tmp_path):
    begin(letters).save_pretrained(tmp_path / "lm")
    letters.save_pretrained(tmp_path / "lm")
    for name in ("dtype", "torch_dtype"):
        args = small_args(SFTConfig, model_init_kwargs={name: "bfloat16"})
        made = SFTTrainer(str(tmp_path / "lm"), args, DEMONSTRATIONS)
        assert made.model.dtype == torch.bfloat16


# ---- Files ----


# catches: settings of a rollout that came as text, on which a page computes
@pytest.mark.parametrize(
    "kl_coef, right", [("0.3", 0.3), ("none", 0.05), (None, 0.05), ([1], 0.05)]
)
def test_a_rollout_whose_info_is_text_is_shown(ppo, tmp_path, kl_coef, right):
    trainer = ppo()
    r = trainer.advantages(trainer.score(trainer.rollout(PROMPTS[:8])))
    info = dict(update="3", episode="1048", kl_coef=kl_coef, seed="x")
    r = r.with_(objective=None, info=info)
    view(r).save_html(tmp_path / "page.html")
    assert when(r) == "Update 3, after 1,048 episodes" + ", kl_coef 0.3" * (right == 0.3)
    assert objective_for(shown_of(r))[1].kl_coef == right


# catches: a TypeError, or a page that computes with a setting that cannot be, where a rollout's own
# settings are odd; a page of a rollout without episodes
@pytest.mark.parametrize(
    "odd, named",
    [
        (dict(kl_coef="0.1"), "kl_coef is '0.1': give a finite number of at least 0"),
        (dict(cliprange=float("nan")), "cliprange is nan: give a finite number above 0"),
        (dict(advantage_estimator=["gae"]), r"advantage_estimator is \['gae'\]: give one of gae"),
        (dict(gamma=None), "gamma is None"),
        (None, "there is no episode 0: this rollout has 0"),
    ],
)
def test_a_rollout_that_cannot_be_shown_is_named(ppo, tmp_path, odd, named):
    trainer = ppo()
    r = trainer.advantages(trainer.score(trainer.rollout(PROMPTS[:8])))
    r = r.select([]) if odd is None else r.with_(objective=r.objective | odd)
    with pytest.raises(ValueError, match=named):
        view(Rollout.load(r.save(tmp_path / "rollout"))).save_html(tmp_path / "page.html")


# catches: a packed file refused, bytes of it taken for text
@pytest.mark.parametrize("end, pack", [(".gz", gzip.open), (".bz2", bz2.open), (".xz", lzma.open)])
def test_packed_files_are_read(tmp_path, end, pack):
    for name, text in (("a.jsonl", '{"prompt": "é"}\n'), ("a.csv", "prompt\né\n")):
        path = tmp_path / f"{name}{end}"
        with pack(path, "wt", encoding="utf-8") as file:
            file.write(text)
        assert load_rows(str(path))["train"]["prompt"][:] == ["é"]
    with pack(tmp_path / f"bad.jsonl{end}", "wb") as file:
        file.write(b'{"prompt": "a"}\n{"prompt": "\xe9"}\n')
    with pytest.raises(ValueError, match="line 2: the text is not UTF-8"):
        load_rows(str(tmp_path / f"bad.jsonl{end}"))
    (tmp_path / f"a.txt{end}").touch()
    with pytest.raises(ValueError, match="is not read"):
        load_rows(str(tmp_path / f"a.txt{end}"))


# catches: a cache that cannot be written, blamed on the file
def test_a_cache_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "file").touch()
    cache = tmp_path / "file" / "cache"
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", cache)
    with pytest.raises(ValueError, match=f"kept in {cache}, which cannot be written.*HF_HOME"):
        load_rows(str(tmp_path / "a.jsonl"))


# catches: a traceback of a list as a key, at any depth
@pytest.mark.parametrize(
    "text",
    ["kl_coef: 1\n[a, b]: 2\n", "? {a: 1}\n: 2\n", "ppo:\n  [a]: 1\n", "optim_args:\n  [a]: 1\n"],
)
def test_a_key_of_a_recipe_is_a_name(tmp_path, text):
    (tmp_path / "r.yaml").write_text(text)
    with pytest.raises(ValueError, match=r"r\.yaml: line \d: a list or a mapping is the name"):
        read_recipe(str(tmp_path / "r.yaml"), "ppo")


# catches: minutes in which a table of a hundred thousand columns is read, whatever its form; a list of
# many rows in one line, or a first row that is broken, taken for one
def test_a_table_that_is_too_wide_is_named(tmp_path):
    wide = {f"c{i}": i for i in range(10_001)}
    texts = dict(jsonl=json.dumps(wide), json=json.dumps([wide]), csv=",".join(wide) + "\n")
    for kind, text in texts.items():
        (tmp_path / f"w.{kind}").write_text(text)
        with pytest.raises(ValueError, match=f"w.{kind} has 10,001 columns: keep those"):
            load_rows(str(tmp_path / f"w.{kind}"))
    (tmp_path / "long.json").write_text(json.dumps([dict(prompt="a")] * 10_001))
    assert load_rows(str(tmp_path / "long.json"))["train"].num_rows == 10_001
