"""What trl's own tests of its reward trainer and of its fine-tuning hold (on texts, conversations and
completions), tried here by the names that the tests have there, on models made here.

Not here: what test_sft.py and test_families.py show of ours; images; what needs a GPU or a library that is not there; the classes of trl's collators
and of AutoModelForCausalLMWithValueHead; its tags on cards; mean_token_accuracy, for which the logits
of a batch would have to be whole; ids of model and generation that are aligned before training
begins; and what is refused by name (test_compat.py): the dft loss, router_aux_loss_coef,
padding_free, packing that cuts rows."""

from __future__ import annotations

import json
import shutil
import sys

import forks
import peft
import pytest
import torch
from datasets import Dataset, DatasetDict, IterableDatasetDict
from peft import LoraConfig
from small_runs import turn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GPTNeoXConfig,
    LlamaConfig,
    Qwen2Config,
    Qwen3MoeConfig,
    TrainingArguments,
)

from rlhf_nb.reward import RewardConfig, RewardTrainer
from rlhf_nb.sft import SFTConfig, SFTTrainer
from rlhf_nb.training.model_loading import train_bpe_tokenizer

# What another library's tests hold is looked at once a week: a change here that breaks one of
# them breaks a test of our own first (test_sft.py, test_reward.py, test_scripts.py).
pytestmark = pytest.mark.weekly

PREFERENCE = ("standard_preference", "conversational_preference")
IMPLICIT = ("standard_implicit_prompt_preference", "conversational_implicit_prompt_preference")
LANGUAGE = ("standard_language_modeling", "conversational_language_modeling")
COMPLETION = ("standard_prompt_completion", "conversational_prompt_completion")
CONTAINERS = ("dataset", "iterable_dataset", "dataset_dict", "iterable_dataset_dict")
CONTAINERS += ("dict_of_dataset", "dict_of_iterable_dataset")
TEMPLATE = (
    "{% for t in tools or [] %}[tool]{{ t | tojson }}{% endfor %}{% for m in messages %}"
    "{{ '[' + (m.role | upper if role_capital else m.role) + ']' + m.content }}"
    "{{ eos_token + '\\n' if m.role == 'assistant' }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


# ---- Stand-ins for models and data of the hub ----


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    "Folders by name: a model, and a tokenizer of bytes beside it."
    root = tmp_path_factory.mktemp("hub")
    tokenizer = train_bpe_tokenizer(["what is better than ugly? beautiful."] * 4, 270)
    ids = dict(vocab_size=len(tokenizer), pad_token_id=0, bos_token_id=None, eos_token_id=1)
    sizes = dict(
        hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, **ids
    )
    grouped = dict(num_key_value_heads=1, max_position_embeddings=512)
    configs = dict(
        qwen2=Qwen2Config(**sizes, **grouped),
        llama=LlamaConfig(**sizes, **grouped),
        qwen3moe=Qwen3MoeConfig(
            **sizes, **grouped, num_experts=2, num_experts_per_tok=2, moe_intermediate_size=8
        ),
        gptneox=GPTNeoXConfig(**sizes, max_position_embeddings=512),
    )
    torch.manual_seed(0)
    for name, config in configs.items():
        AutoModelForCausalLM.from_config(config).save_pretrained(root / name)
        tokenizer.chat_template = None if name == "gptneox" else TEMPLATE
        tokenizer.save_pretrained(root / name)
    configs["qwen2"].num_labels = 1
    scorer = AutoModelForSequenceClassification.from_config(configs["qwen2"])
    scorer.save_pretrained(root / "scorer")
    tokenizer.save_pretrained(root / "scorer")
    (root / "template.jinja").write_text(TEMPLATE)
    return root


def zen(config_name: str, rows: int = 5) -> Dataset:
    "A few rows of each form that there is."
    form, kind = config_name.split("_", 1)
    made = []
    for i in range(rows):
        prompt, good, bad = f"what is better than {'bad' * (i + 1)}?", f" good {i}.", f" ugly {i}!"
        if form == "conversational":
            prompt = [turn("user", prompt)]
            good = [turn("assistant", good)]
            bad = [turn("assistant", bad)]
        key = "messages" if form == "conversational" else "text"
        made.append(
            dict(
                preference=dict(prompt=prompt, chosen=good, rejected=bad),
                implicit_prompt_preference=dict(chosen=prompt + good, rejected=prompt + bad),
                language_modeling={key: prompt + good},
                prompt_completion=dict(prompt=prompt, completion=good),
            )[kind]
        )
    return Dataset.from_list(made)


def contained(data: Dataset, how: str):
    "The data set, streamed or in a dictionary."
    data = data.to_iterable_dataset() if "iterable" in how else data
    both = dict(data1=data, data2=data)
    if how.startswith("dict_of"):
        return both
    if how.endswith("dict"):
        return (IterableDatasetDict if "iterable" in how else DatasetDict)(both)
    return data


@pytest.fixture
def made(hub, tmp_path):
    "Makes a trainer: `made(kind, data=..., model=..., parts=..., ...settings)`."

    def make(kind, data=None, model="qwen2", parts=None, **settings):
        config = {RewardTrainer: RewardConfig, SFTTrainer: SFTConfig}[kind]
        usual = dict(output_dir=str(tmp_path / "run"), use_cpu=True, report_to="none", max_steps=2)
        usual |= dict(disable_tqdm=True, learning_rate=1e-2, save_strategy="no")
        if isinstance(data, (str, type(None))):
            forms = {RewardTrainer: IMPLICIT, SFTTrainer: LANGUAGE}
            data = zen(data or forms[kind][0])
        model = str(hub / model) if isinstance(model, str) else model
        return kind(model, config(**usual | settings), train_dataset=data, **(parts or {}))

    return make


def changed(trainer) -> dict[str, bool]:
    "Train; which parameters are others than before."
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    assert trainer.state.log_history[-1]["train_loss"] is not None
    after = dict(trainer.model.named_parameters())
    return {name: not torch.equal(before[name], after[name]) for name in before}


def check_changed(trainer, still: tuple = ()) -> None:
    "All parameters learn but those whose names contain one of `still`; with an adapter, it alone."
    adapted = hasattr(trainer.model, "peft_config")
    for name, moved in changed(trainer).items():
        own = any(part in name for part in ("lora_", "modules_to_save", "prompt_encoder"))
        if not any(part in name for part in still):
            assert moved == (own or not adapted), name


# ---- Runs that differ in a setting or in the data ----

FREE = ("final_layer_norm.bias",)  # the loss does not see a shift of all scores
REENTRANT = {f"reentrant={x}": dict(use_reentrant=x) for x in (True, False)}


def runs(kind, name):
    "The trainers of one of trl's tests, each as arguments of `made`."
    first = (IMPLICIT if kind is RewardTrainer else LANGUAGE)[0]
    talks = "conversational_preference" if kind is RewardTrainer else LANGUAGE[1]
    checkpointing = [
        dict(gradient_checkpointing=True, gradient_checkpointing_kwargs=how)
        for how in REENTRANT.values()
    ]
    tools = [dict(name="clock", parameters=dict(zone="text"))]
    called = zen("conversational_preference" if kind is RewardTrainer else talks)
    with_tools = lambda tools: called.add_column("tools", [tools] * len(called))
    models = ("qwen2", "qwen3moe", "llama") if kind is RewardTrainer else ("qwen2", "qwen3moe")
    forms = (*PREFERENCE, *IMPLICIT) if kind is RewardTrainer else (*LANGUAGE, *COMPLETION)
    adapter = lambda **how: dict(peft_config=LoraConfig(**how))
    experts = dict(target_modules=["gate_proj", "up_proj", "down_proj", "q_proj"])
    return {
        "test_train": [dict(model=model) for model in models],
        "test_train_dataset_types": [dict(data=form) for form in forms],
        "test_train_model_dtype": [dict(model_init_kwargs=dict(dtype=torch.float16))],
        "test_train_from_sequence_classification_model": [dict(model="scorer")],
        "test_train_dense_with_peft_config": [dict(parts=adapter())],
        "test_train_dense_with_peft_config_lora": [dict(parts=adapter())],
        "test_train_moe_with_peft_config": [dict(model="qwen3moe", parts=adapter(**experts))],
        "test_train_with_peft_config_and_gradient_checkpointing_reentrant": [
            dict(parts=adapter(), model="qwen2", **how) for how in checkpointing
        ],
        "test_train_with_gradient_checkpointing_reentrant": checkpointing,
        "test_train_with_iterable_dataset": [dict(data=zen(first).to_iterable_dataset())],
        "test_train_with_set_chat_template_from_path": [
            dict(model="gptneox", data=talks, chat_template_path="template.jinja")
        ],
        "test_train_toolcall_data": [dict(data=with_tools(json.dumps(tools)), max_length=512)],
        "test_train_with_formatting_func": [
            dict(
                data=IMPLICIT[0],
                parts=dict(formatting_func=lambda row: f"{row['chosen']}\n### {row['rejected']}"),
            )
        ],
        "test_train_assistant_only_iterable_dataset": [
            dict(data=zen(LANGUAGE[1]).to_iterable_dataset(), assistant_only_loss=True)
        ],
        "test_train_assistant_only_and_completion_only": [
            dict(
                data=zen(COMPLETION[1]).map(
                    lambda row: dict(completion=row["completion"] * 2 + row["prompt"])
                ),
                assistant_only_loss=True,
                completion_only_loss=True,
            )
        ],
    }[name]


BOTH = """test_train_model_dtype test_train_with_iterable_dataset test_train_toolcall_data
test_train_with_peft_config_and_gradient_checkpointing_reentrant
test_train_with_gradient_checkpointing_reentrant"""
RUNS = {  # names of trl's tests, each with the trainers of `runs`
    RewardTrainer: f"""{BOTH}
test_train test_train_dataset_types test_train_from_sequence_classification_model
test_train_dense_with_peft_config test_train_moe_with_peft_config""".split(),
    SFTTrainer: f"""{BOTH}
test_train_with_formatting_func test_train_dense_with_peft_config_lora
test_train_assistant_only_iterable_dataset test_train_assistant_only_and_completion_only""".split(),
}


# catches: a form of data or a setting that raises, or trains nothing of a part of the model
@pytest.mark.parametrize("kind, name", [(kind, name) for kind in RUNS for name in RUNS[kind]])
def test_it_trains(made, hub, kind, name):
    for settings in runs(kind, name):
        if path := settings.get("chat_template_path"):
            settings["chat_template_path"] = str(hub / path)
        still = FREE if kind is RewardTrainer and settings.get("model") == "gptneox" else ()
        if dtype := settings.get("model_init_kwargs", {}).get("dtype"):
            still = ("norm",)
        trainer = made(kind, **settings)
        check_changed(trainer, still)
        assert {p.dtype for p in trainer.model.parameters()} == {dtype or torch.float32}


# ---- Adapters ----


# catches: losses and labels one virtual token off
@pytest.mark.parametrize("name", ["PromptTuning", "PrefixTuning", "PromptEncoder"])
def test_train_with_peft_config_prompt_tuning(made, name):
    config = getattr(peft, f"{name}Config")(task_type="CAUSAL_LM", num_virtual_tokens=4)
    parts = dict(peft_config=config, eval_dataset=zen(COMPLETION[0]))
    trainer = made(SFTTrainer, COMPLETION[0], parts=parts)
    learned = {name for name, p in trainer.model.named_parameters() if p.requires_grad}
    assert {name for name, moved in changed(trainer).items() if moved} == learned
    row = trainer.eval_dataset[0]
    ids, labels = (torch.tensor([row[name]]) for name in ("input_ids", "labels"))
    loss = trainer.model.eval()(input_ids=ids, labels=labels).loss.item()
    assert trainer.evaluate(trainer.eval_dataset.select([0]))["eval_loss"] == pytest.approx(loss)


# ---- Models, tokenizers, settings ----


# catches: an object that came from a folder, asked for the tokenizer that is in that folder
@pytest.mark.parametrize("kind", [RewardTrainer, SFTTrainer])
def test_train_model(made, hub, kind):
    auto = AutoModelForCausalLM if kind is SFTTrainer else AutoModelForSequenceClassification
    model = auto.from_pretrained(hub / ("qwen2" if kind is SFTTrainer else "scorer"))
    check_changed(made(kind, model=model))


@pytest.mark.parametrize("kind", [RewardTrainer, SFTTrainer])
def test_init_with_training_arguments(hub, tmp_path, kind):
    args = TrainingArguments(str(tmp_path), report_to="none", use_cpu=True, learning_rate=0.5)
    data = zen(IMPLICIT[0] if kind is RewardTrainer else LANGUAGE[0])
    trainer = kind(str(hub / "qwen2"), args, train_dataset=data)
    assert trainer.args.learning_rate == 0.5 and trainer.args.max_length is None
    assert kind(str(hub / "qwen2"), train_dataset=data).args.logging_steps == 10


# catches: the tokenizer of another revision than the model's
def test_init_auto_processing_class_uses_model_revision(made, monkeypatch):
    from transformers import AutoTokenizer

    seen, load = [], AutoTokenizer.from_pretrained
    spy = lambda *name, **how: seen.append(how.pop("revision")) or load(*name, **how)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", spy)
    made(SFTTrainer, model_init_kwargs='{"revision": "main"}')
    assert seen == ["main"]


REMOTE = """
from transformers import Qwen2Config, Qwen2ForCausalLM
class RemoteConfig(Qwen2Config):
    model_type = "remote"
class Remote(Qwen2ForCausalLM):
    config_class = RemoteConfig
"""


def test_trust_remote_code(made, hub, tmp_path, monkeypatch):
    modules = str(tmp_path / "modules")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", modules)
    monkeypatch.syspath_prepend(modules)
    folder = shutil.copytree(hub / "qwen2", tmp_path / "remote")
    (folder / "remote.py").write_text(REMOTE)
    config = json.loads((folder / "config.json").read_text()) | dict(
        model_type="remote",
        auto_map=dict(AutoModelForCausalLM="remote.Remote", AutoConfig="remote.RemoteConfig"),
    )
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="custom code"):
        made(SFTTrainer, model=str(folder))
    model = made(SFTTrainer, model=str(folder), trust_remote_code=True).model
    assert type(model).__name__ == "Remote"


@pytest.mark.parametrize("kind", [RewardTrainer, SFTTrainer])
def test_train_with_set_chat_template_from_path(made, hub, tmp_path, kind):
    data = PREFERENCE[1] if kind is RewardTrainer else LANGUAGE[1]
    path = str(hub / "template.jinja")
    trainer = made(kind, data, "gptneox", chat_template_path=path, save_strategy="steps")
    check_changed(trainer, FREE if kind is RewardTrainer else ())
    assert (tmp_path / "run" / "checkpoint-2" / "chat_template.jinja").read_text() == TEMPLATE


def rows(*each):
    return Dataset.from_list(list(each))


# ---- Data in containers, evaluations ----


# catches: a data set given to evaluate that is taken for an encoded one, or encoded otherwise
@pytest.mark.parametrize("kind", [RewardTrainer, SFTTrainer])
def test_evaluate_with_eval_dataset(made, kind):
    data = zen(IMPLICIT[0] if kind is RewardTrainer else LANGUAGE[0])
    trainer = made(kind, parts=dict(eval_dataset=data))
    before = trainer.evaluate()["eval_loss"]
    for how in CONTAINERS:
        metrics = trainer.evaluate(contained(data, how))
        names = ("eval_data1_loss", "eval_data2_loss") if "dict" in how else ("eval_loss",)
        losses = {name: x for name, x in metrics.items() if name.endswith("_loss")}
        assert losses == {name: pytest.approx(before) for name in names}, how


def test_train_with_compute_loss_func(made):
    seen = []

    def own(outputs, labels, num_items_in_batch=None):
        seen.append(outputs.logits.shape[-1])
        return torch.nn.functional.cross_entropy(
            outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        )

    trainer = made(SFTTrainer, parts=dict(compute_loss_func=own))
    check_changed(trainer)
    assert set(seen) == {trainer.model.config.vocab_size}


# ---- Streams ----

STREAM = """
import os, sys, torch
from datasets import Dataset
from rlhf_nb.training.model_loading import tiny_policy, train_tokenizer
from rlhf_nb.reward import RewardConfig, RewardTrainer
from rlhf_nb.sampling import Sampling
from rlhf_nb.sft import SFTConfig, SFTTrainer
tokenizer = train_tokenizer(["a b c d e"] * 3)
ranks, found = int(os.environ.get("WORLD_SIZE", 1)), []
longer = lambda text, most: [text * (1 + i % most) for i in range(32)]
rows = dict(prompt=longer("a b ", 5), completion=longer("c ", 3), chosen=longer("c ", 4), rejected=longer("d ", 3))
for kind, config, columns in ((SFTTrainer, SFTConfig, ("prompt", "completion")), (RewardTrainer, RewardConfig, ("prompt", "chosen", "rejected"))):
    stream = Dataset.from_dict({name: rows[name] for name in columns}).to_iterable_dataset()
    folder = os.path.join(sys.argv[1], kind.__name__)
    args = config(folder, use_cpu=True, report_to="none", disable_tqdm=True, max_steps=3, save_steps=2, learning_rate=1e-2, optim="sgd", max_grad_norm=0, per_device_train_batch_size=8 // ranks)
    for resume in (None, os.path.join(folder, "checkpoint-2")):
        model = tiny_policy(tokenizer, 0, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
        trainer = kind(model, args, stream, stream, tokenizer)
        trainer.train(resume_from_checkpoint=resume)
        found.append((trainer.evaluate()["eval_loss"], [p.detach() for p in trainer.model.parameters()]))
if trainer.is_world_process_zero():
    torch.save(found, sys.argv[1] + ".pt")
"""


# catches: one rank that reads for all, whose batches of pairs are then cut in the middle; rows read
# twice, or skipped after a resume
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="torchrun with gloo on one machine")
def test_two_processes_read_a_stream_as_one_does(tmp_path):
    (tmp_path / "worker.py").write_text(STREAM)
    made = []
    for name, ranks in dict(one=1, two=2).items():
        given = dict(folder=tmp_path, ranks=ranks, ACCELERATE_USE_CPU="true")
        done = forks.run(tmp_path / "worker.py", str(tmp_path / name), **given)
        assert (tmp_path / f"{name}.pt").exists(), done.stdout[-3000:]
        made.append(torch.load(tmp_path / f"{name}.pt"))
    for one, two in zip(*made):
        assert one[0] == pytest.approx(two[0], abs=1e-6)
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(one[1], two[1]))
    for found in made:
        for whole, resumed in (found[:2], found[2:]):
            assert all(torch.equal(a, b) for a, b in zip(whole[1], resumed[1]))
