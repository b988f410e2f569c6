"""What trl's own tests of its trainers hold (PPO, reward, and fine-tuning on texts, conversations and
completions), tried here by the names that the tests have there, on models made here.

Not here: images; what needs a GPU or a library that is not there; the classes of trl's collators
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
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GPTNeoXConfig,
    LlamaConfig,
    Qwen2Config,
    Qwen3MoeConfig,
    TrainingArguments,
)

import rlhf_nb
from rlhf_nb import PPOConfig, PPOTrainer
from rlhf_nb.engines import CachedEngine
from rlhf_nb.forward import ValueHead
from rlhf_nb.masks import masked_mean, masked_var, whiten
from rlhf_nb.models import scorer_from
from rlhf_nb.reward import RewardConfig, RewardTrainer
from rlhf_nb.sampling import Sampling
from rlhf_nb.sft import SFTConfig, SFTTrainer
from rlhf_nb.training.model_loading import load_policy, train_bpe_tokenizer

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


def turn(role, content):
    return dict(role=role, content=content)


def zen(config_name: str, rows: int = 5) -> Dataset:
    "A few rows of each form that there is."
    form, kind = config_name.split("_", 1)
    made = []
    for i in range(rows):
        prompt, good, bad = f"what is better than {'bad' * (i + 1)}?", f" good {i}.", f" ugly {i}!"
        if form == "conversational":
            prompt, good, bad = (
                [turn("user", prompt)],
                [turn("assistant", good)],
                [turn("assistant", bad)],
            )
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
        "test_train_dataset_format": [dict(data=form) for form in forms],
        "test_train_model_dtype": [dict(model_init_kwargs=dict(dtype=torch.float16))],
        "test_train_from_sequence_classification_model": [dict(model="scorer")],
        "test_train_dense_with_peft_config": [dict(parts=adapter())],
        "test_train_dense_with_peft_config_lora": [dict(parts=adapter())],
        "test_train_moe_with_peft_config": [dict(model="qwen3moe", parts=adapter(**experts))],
        "test_train_with_peft_config_and_gradient_checkpointing": [
            dict(parts=adapter(), gradient_checkpointing=True)
        ],
        "test_train_with_peft_config_and_gradient_checkpointing_reentrant": [
            dict(parts=adapter(), model="qwen2", **how) for how in checkpointing
        ],
        "test_train_with_gradient_checkpointing": [dict(gradient_checkpointing=True)],
        "test_train_with_gradient_checkpointing_reentrant": checkpointing,
        "test_train_with_iterable_dataset": [dict(data=zen(first).to_iterable_dataset())],
        "test_train_with_set_chat_template_from_model": [
            dict(model="gptneox", data=talks, chat_template_path="qwen2")
        ],
        "test_train_with_set_chat_template_from_path": [
            dict(model="gptneox", data=talks, chat_template_path="template.jinja")
        ],
        "test_train_toolcall_data": [dict(data=with_tools(json.dumps(tools)), max_length=512)],
        "test_train_toolcall_data_as_json": [dict(data=with_tools(tools), max_length=512)],
        "test_train_with_center_rewards_coefficient": [dict(center_rewards_coefficient=0.01)],
        "test_train_with_margin": [
            dict(data=zen(first).map(lambda row: dict(margin=len(row["chosen"]))))
            if kind is RewardTrainer
            else {}
        ],
        "test_train_with_formatting_func": [
            dict(
                data=IMPLICIT[0],
                parts=dict(formatting_func=lambda row: f"{row['chosen']}\n### {row['rejected']}"),
            )
        ],
        "test_train_assistant_only": [dict(data=LANGUAGE[1], assistant_only_loss=True)],
        "test_train_assistant_only_iterable_dataset": [
            dict(data=zen(LANGUAGE[1]).to_iterable_dataset(), assistant_only_loss=True)
        ],
        "test_train_completion_only": [dict(data=COMPLETION[1], completion_only_loss=True)],
        "test_train_assistant_only_and_completion_only": [
            dict(
                data=zen(COMPLETION[1]).map(
                    lambda row: dict(completion=row["completion"] * 2 + row["prompt"])
                ),
                assistant_only_loss=True,
                completion_only_loss=True,
            )
        ],
        "test_train_with_non_chatml_conversational_data": [
            dict(
                data=zen(LANGUAGE[1]).map(
                    lambda row: dict(
                        conversations=[
                            {"from": t["role"], "value": t["content"]} for t in row["messages"]
                        ]
                    ),
                    remove_columns="messages",
                )
            )
        ],
    }[name]


BOTH = """test_train_model_dtype test_train_with_peft_config_and_gradient_checkpointing
test_train_with_peft_config_and_gradient_checkpointing_reentrant
test_train_with_iterable_dataset test_train_with_set_chat_template_from_model
test_train_toolcall_data test_train_toolcall_data_as_json
test_train_with_gradient_checkpointing test_train_with_gradient_checkpointing_reentrant"""
RUNS = {  # names of trl's tests, each with the trainers of `runs`
    RewardTrainer: f"""{BOTH}
test_train test_train_dataset_types test_train_from_sequence_classification_model
test_train_dense_with_peft_config test_train_moe_with_peft_config test_train_with_margin
test_train_with_center_rewards_coefficient""".split(),
    SFTTrainer: f"""{BOTH}
test_train_dataset_format test_train_with_formatting_func
test_train_dense_with_peft_config_lora test_train_with_non_chatml_conversational_data
test_train_assistant_only test_train_assistant_only_iterable_dataset
test_train_completion_only test_train_assistant_only_and_completion_only""".split(),
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


# ---- Families of models ----

SMALL = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2)
HEADS = dict(num_key_value_heads=1, head_dim=8)
EXPERTS = dict(num_experts_per_tok=2, moe_intermediate_size=8)
STATE = dict(n_groups=1, chunk_size=8, mamba_num_heads=4, mamba_head_dim=8, ssm_state_size=4)
FAMILIES = dict(
    Cohere2=SMALL,
    FalconMamba=dict(hidden_size=16, num_hidden_layers=2, state_size=4, intermediate_size=32),
    Glm4Moe=SMALL | HEADS | EXPERTS | dict(n_routed_experts=2, first_k_dense_replace=1),
    GptOss=SMALL | HEADS | dict(num_local_experts=2, num_experts_per_tok=2),
    Qwen2=SMALL | dict(num_key_value_heads=1),
    Qwen3Moe=SMALL | HEADS | EXPERTS | dict(num_experts=2),
    NemotronH=SMALL
    | HEADS
    | STATE
    | dict(layers_block_type=["mamba", "attention"])
    | dict(n_routed_experts=2, num_experts_per_tok=1, moe_intermediate_size=8),
    Olmo3=SMALL,
    Lfm2=SMALL | dict(num_key_value_heads=1, layer_types=["conv", "full_attention"]),
)


@pytest.fixture
def family(hub, tmp_path):
    "Saves a model of a family beside the tokenizer; returns the folder."
    import transformers

    def make(name):
        ids = dict(vocab_size=270, pad_token_id=0, bos_token_id=None, eos_token_id=1)
        config = getattr(transformers, f"{name}Config")(**FAMILIES[name], **ids)
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / name)
        transformers.AutoTokenizer.from_pretrained(hub / "qwen2").save_pretrained(tmp_path / name)
        return str(tmp_path / name)

    return make


# catches: a family whose own forward is not the one that the trainer calls
@pytest.mark.parametrize("name", FAMILIES)
def test_train(made, family, name):
    check_changed(made(SFTTrainer, model=family(name)))


@pytest.mark.parametrize("form", [LANGUAGE[1], COMPLETION[1]])
def test_train_gpt_oss(made, family, form):
    thought = lambda turns: [turn | dict(thinking=None) for turn in turns]
    data = zen(form).map(lambda row: {name: thought(turns) for name, turns in row.items()})
    check_changed(made(SFTTrainer, data, family("GptOss")))


def test_train_moe_with_peft_config(made, family):
    experts = ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]
    config = LoraConfig(target_parameters=experts)
    check_changed(made(SFTTrainer, model=family("GptOss"), parts=dict(peft_config=config)))


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


def test_peft_init_is_seeded(made):
    weights = []
    for seed in range(2):
        torch.manual_seed(seed)
        model = made(SFTTrainer, parts=dict(peft_config=LoraConfig())).model
        weights.append([p for name, p in model.named_parameters() if "lora_A" in name])
    assert weights[0] and all(torch.equal(a, b) for a, b in zip(*weights))


@pytest.mark.parametrize("kind", [RewardTrainer, SFTTrainer])
def test_train_peft_model(made, hub, kind):
    auto = AutoModelForCausalLM if kind is SFTTrainer else AutoModelForSequenceClassification
    model = auto.from_pretrained(hub / ("qwen2" if kind is SFTTrainer else "scorer"))
    task = None if kind is SFTTrainer else "SEQ_CLS"  # without, peft leaves the head: refused here
    check_changed(made(kind, model=get_peft_model(model, LoraConfig(task_type=task))))


# ---- Models, tokenizers, settings ----


# catches: an object that came from a folder, asked for the tokenizer that is in that folder
@pytest.mark.parametrize("kind", [RewardTrainer, SFTTrainer])
def test_train_model(made, hub, kind):
    auto = AutoModelForCausalLM if kind is SFTTrainer else AutoModelForSequenceClassification
    model = auto.from_pretrained(hub / ("qwen2" if kind is SFTTrainer else "scorer"))
    check_changed(made(kind, model=model))


def test_raises_error_when_model_num_labels_not_one(made, hub):
    model = AutoModelForSequenceClassification.from_pretrained(hub / "qwen2", num_labels=2)
    with pytest.raises(ValueError, match="num_labels=1"):
        made(RewardTrainer, model=model)


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
    saved = tmp_path / "run" / "checkpoint-2" / "chat_template.jinja"
    assert saved.read_text() == TEMPLATE


@pytest.mark.parametrize("kind", [RewardTrainer, SFTTrainer])
def test_train_with_chat_template_kwargs(made, kind):
    data = zen(IMPLICIT[1] if kind is RewardTrainer else LANGUAGE[1])
    settings = [dict(role_capital=bool(i % 2)) for i in range(len(data))]
    trainer = made(kind, data.add_column("chat_template_kwargs", settings))
    column = "chosen_ids" if kind is RewardTrainer else "input_ids"
    decode = trainer.processing_class.decode
    for i in range(2):
        start = "[USER]" if i else "[user]"
        assert decode(trainer.train_dataset[i][column]).startswith(start)
    check_changed(trainer)


# ---- Rows of ids, labels, masks ----


@pytest.mark.parametrize(
    "kind, columns",
    [
        (RewardTrainer, ("chosen_ids", "rejected_ids")),
        (RewardTrainer, ("chosen_input_ids", "rejected_input_ids")),
        (SFTTrainer, ("input_ids",)),
    ],
)
def test_train_with_pretokenized_data(made, hub, kind, columns):
    encode = made(kind).processing_class
    texts = ("chosen", "rejected") if kind is RewardTrainer else ("text",)
    data = zen(IMPLICIT[0] if kind is RewardTrainer else LANGUAGE[0])
    rows = data.map(
        lambda row: {c: encode(row[text])["input_ids"] for c, text in zip(columns, texts)},
        remove_columns=data.column_names,
    )
    trainer = made(kind, rows)
    kept = [column.replace("_input_ids", "_ids") for column in columns]
    assert (
        set(kept) < set(trainer.train_dataset.column_names)
        and trainer.train_dataset[kept[0]][:] == (rows[columns[0]][:])
    )
    assert not {"chosen_input_ids", "rejected_input_ids"} & set(trainer.train_dataset.column_names)
    check_changed(trainer)


def rows(*each):
    return Dataset.from_list(list(each))


def test_dataset_preparation_builds_labels_for_assistant_only_loss(made):
    talk = [turn("user", "a"), turn("assistant", "b"), turn("user", "c"), turn("assistant", "d")]
    trainer = made(SFTTrainer, rows(dict(messages=talk)), assistant_only_loss=True)
    row, decode = trainer.train_dataset[0], trainer.processing_class.decode
    assert decode(row["input_ids"]) == "[user]a[assistant]b<eos>\n[user]c[assistant]d<eos>"
    assert decode([i for i in row["labels"] if i != -100]) == "b<eos>d<eos>"
    plain = made(SFTTrainer, rows(dict(messages=talk))).train_dataset[0]
    assert plain["labels"] == plain["input_ids"] == row["input_ids"]


def test_dataset_preparation_builds_labels_for_completion_only(made):
    for setting in (None, True, False):
        trainer = made(SFTTrainer, COMPLETION[0], completion_only_loss=setting)
        for row in trainer.train_dataset:
            ids, labels = row["input_ids"], row["labels"]
            assert all(a in (b, -100) for a, b in zip(labels, ids, strict=True))
            assert (-100 in labels[1:]) == (setting is not False) and labels[-1] == 1


def test_dataset_preparation_respects_existing_labels(made):
    given = dict(input_ids=[1, 2, 3, 4], labels=[1, -100, 3, -100], assistant_masks=[1] * 4)
    assert made(SFTTrainer, rows(given)).train_dataset["labels"][:] == [given["labels"]]


def test_dataset_preparation_builds_labels_for_pretokenized_with_masks(made):
    first = dict(input_ids=[1, 2, 3, 4], assistant_masks=[0, 0, 1, 1])
    second = dict(input_ids=[5, 6, 7], assistant_masks=[0, 1, 0])
    assert made(SFTTrainer, rows(first, second)).train_dataset["labels"][:] == [
        [-100, -100, 3, 4],
        [-100, 6, -100],
    ]


def test_dataset_truncated_to_max_length(made):
    for row in made(SFTTrainer, max_length=4).train_dataset:
        assert len(row["input_ids"]) == len(row["labels"]) == 4


def test_train_packing(made):
    check_changed(made(SFTTrainer, packing=True, packing_strategy="bfd", max_length=10))


def test_packing_carries_labels(made):
    trainer = made(SFTTrainer, COMPLETION[0], packing=True, max_length=64)
    columns = trainer.train_dataset.column_names
    assert "labels" in columns and "completion_mask" not in columns
    batch = next(iter(trainer.get_train_dataloader()))
    assert batch["labels"].shape == batch["input_ids"].shape and (batch["labels"] != -100).any()


# ---- Data in containers, evaluations ----


@pytest.mark.parametrize("kind", [RewardTrainer, SFTTrainer])
@pytest.mark.parametrize("how", ["dataset", "iterable_dataset", "unsupported_dataset_dict"])
def test_init_with_train_dataset(made, kind, how):
    data = zen(IMPLICIT[0] if kind is RewardTrainer else LANGUAGE[0])
    if how == "unsupported_dataset_dict":
        with pytest.raises(TypeError, match="train_dataset is a DatasetDict: give .*'train'"):
            made(kind, DatasetDict(train=data))
        return
    row = next(iter(made(kind, contained(data, how)).train_dataset))
    assert "chosen_ids" in row or "input_ids" in row


@pytest.mark.parametrize("kind", [RewardTrainer, SFTTrainer])
def test_init_with_eval_dataset(made, kind):
    data = zen(IMPLICIT[0] if kind is RewardTrainer else LANGUAGE[0])
    assert made(kind).eval_dataset is None
    for how in CONTAINERS:
        given = contained(data, how)
        kept = made(kind, parts=dict(eval_dataset=given)).eval_dataset
        assert isinstance(kept, dict) == isinstance(given, dict), how
        for part in kept.values() if isinstance(kept, dict) else [kept]:
            assert {"chosen_ids", "input_ids"} & set(next(iter(part))), how


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


@pytest.mark.parametrize("kind", [RewardTrainer, SFTTrainer])
def test_train_with_eval(made, kind):
    data = zen(IMPLICIT[0] if kind is RewardTrainer else LANGUAGE[0])
    trainer = made(kind, parts=dict(eval_dataset=data), eval_strategy="steps", eval_steps=1)
    trainer.train()
    assert trainer.state.log_history[0]["eval_loss"] is not None


@pytest.mark.parametrize("kind", [RewardTrainer, SFTTrainer])
def test_train_with_multiple_eval_dataset(made, kind):
    data = zen(IMPLICIT[0] if kind is RewardTrainer else LANGUAGE[0])
    parts = dict(eval_dataset=dict(data1=data, data2=data))
    trainer = made(kind, parts=parts, eval_strategy="steps", eval_steps=2)
    trainer.train()
    assert trainer.state.log_history[-3]["eval_data1_loss"] is not None
    assert trainer.state.log_history[-2]["eval_data2_loss"] is not None


@pytest.mark.parametrize("kind", [RewardTrainer, SFTTrainer])
def test_train_with_compute_metrics(made, kind):
    seen = []

    def own(found):
        seen.append((found.predictions.shape, found.label_ids.shape))
        return dict(my_metric=0.123)

    data = zen(IMPLICIT[0] if kind is RewardTrainer else LANGUAGE[0])
    parts = dict(eval_dataset=data, compute_metrics=own)
    trainer = made(kind, parts=parts, eval_strategy="steps", eval_steps=2)
    trainer.train()
    assert trainer.state.log_history[-2]["eval_my_metric"] == 0.123
    assert seen[0][0][-1] == (
        2 if kind is RewardTrainer else trainer.model.config.vocab_size
    ) and seen[0][1][0] == len(data)
    if kind is RewardTrainer:
        assert "eval_accuracy" in trainer.state.log_history[-2]


def test_predict_returns_logits(made):
    trainer = made(SFTTrainer)
    assert (
        trainer.predict(trainer.train_dataset).predictions.shape[-1]
        == trainer.model.config.vocab_size
    )


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


# ---- PPO ----

LORA = dict(r=4, lora_alpha=8, lora_dropout=0.05, bias="none", task_type="CAUSAL_LM")


def qwen(tokenizer, seed: int = 0):
    torch.manual_seed(seed)
    ids = dict(eos_token_id=tokenizer.eos_token_id, bos_token_id=None)
    sizes = SMALL | dict(num_key_value_heads=1, max_position_embeddings=64)
    config = Qwen2Config(vocab_size=len(tokenizer) + 4, **sizes, **ids)
    return AutoModelForCausalLM.from_config(config)


@pytest.fixture
def ppo(tmp_path, letters):
    def make(peft_config=None, model=None, rows=17, **settings):
        ids = [[2 + i % 8, 3 + i % 5, 1] for i in range(rows)]  # a prompt ends with EOS there
        data = Dataset.from_dict(dict(input_ids=ids, attention_mask=[[1] * 3] * rows))
        model = model or qwen(letters)
        reference = None if peft_config or isinstance(model, PeftModel) else qwen(letters)
        args = PPOConfig(
            output_dir=str(tmp_path / "run"),
            per_device_eval_batch_size=2,
            **dict(per_device_train_batch_size=4, num_ppo_epochs=2, response_length=6) | settings,
            report_to="none",
            use_cpu=True,
            bf16=False,
            disable_tqdm=True,
            save_strategy="no",
        )
        return PPOTrainer(
            args=args,
            processing_class=letters,
            model=model,
            ref_model=reference,
            reward_model=scorer_from(qwen(letters, 1), 1),
            value_model=scorer_from(qwen(letters, 2), 2),
            train_dataset=data,
            eval_dataset=data.select(range(3)),
            peft_config=peft_config,
        )

    return make


def copies(model) -> dict[str, torch.Tensor]:
    return {name: x.detach().clone() for name, x in model.named_parameters()}


def moved(model, before: dict[str, torch.Tensor]) -> list[str]:
    after = dict(model.named_parameters())
    return [name for name, x in before.items() if name in after and not torch.equal(x, after[name])]


# TestBatchGeneration


@pytest.mark.parametrize("rows", [3, 64])
def test_mini_batch_generation_and_test_single_batch_generation(rows, letters):
    prompts = torch.randint(2, 10, (7, 4))
    engine = CachedEngine(rows)
    engine.sync(qwen(letters).eval())
    how = Sampling(9, letters.pad_token_id, (1,), 0.5)
    sampled, _ = engine.generate(prompts, torch.ones_like(prompts, dtype=torch.bool), how)
    assert len(sampled.response_ids) == 7 and 0 < sampled.response_ids.shape[1] <= 9
    assert sampled.mask.shape == sampled.response_ids.shape and sampled.mask[:, 0].all()


# TestCore

X, MASK = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([0, 1, 1, 0])


def test_masked_mean():
    assert masked_mean(X, MASK) == X[1:3].mean()


def test_masked_var():
    assert masked_var(X, MASK) == X[1:3].var()


def test_masked_whiten():
    white = (X[1:3] - X[1:3].mean()) * torch.rsqrt(X[1:3].var() + 1e-8)
    torch.testing.assert_close(whiten(X, MASK)[1:3], white)


# ---- Statistics ----


# catches: micro-batches of 4 and 2 rows whose means count the same
def test_uneven_micro_batch_stats_are_pooled(ppo):
    same = dict(num_mini_batches=2, num_ppo_epochs=1, total_episodes=12, response_length=4)
    uneven = ppo(per_device_train_batch_size=4, gradient_accumulation_steps=3, **same)
    whole = ppo(per_device_train_batch_size=12, **same)
    for trainer in (uneven, whole):
        trainer.train()
    logged = [trainer.state.log_history[0] for trainer in (uneven, whole)]
    for name in logged[0]:
        if name.startswith(("loss/", "policy/", "val/")):
            assert logged[0][name] == pytest.approx(logged[1][name], rel=1e-4, abs=1e-6), name


def test_ratio_var_ignores_unwritten_stats(ppo):
    trainer = ppo(
        learning_rate=0.0,
        gradient_accumulation_steps=3,
        num_mini_batches=2,
        num_ppo_epochs=1,
        total_episodes=12,
        response_length=4,
        num_sample_generations=0,
    )
    trainer.train()
    assert trainer.state.log_history[0]["val/ratio_var"] == pytest.approx(0.0, abs=1e-12)


# TestPPOTrainer


def test_basic_training(ppo):
    trainer = ppo(num_train_epochs=1.0)
    policy, value = copies(trainer.model.policy), copies(trainer.model.value_model)
    trainer.train()
    assert moved(trainer.model.policy, policy) and moved(trainer.model.value_model, value)
    assert list((trainer.output_dir / "completions").iterdir())


def test_peft_training(ppo, letters):
    trainer = ppo(LoraConfig(**LORA), num_train_epochs=1.0)
    policy, value = copies(trainer.model.policy), copies(trainer.model.value_model)
    trainer.train()
    changed = moved(trainer.model.policy, policy)
    assert changed and all("lora" in name for name in changed)
    assert moved(trainer.model.value_model, value)
    assert any(x.any() for name, x in trainer.model.policy.named_parameters() if "lora_B" in name)


# ---- TestPeftModel and TestReferenceModel: what of them is not the wrapper's ----


def test_check_peft_model_nb_trainable_params(ppo, letters):
    policy = get_peft_model(qwen(letters), LoraConfig(**LORA))
    count = sum(p.numel() for p in policy.parameters() if p.requires_grad)
    trained = [p for p in ppo(model=policy).policy.parameters() if p.requires_grad]
    assert sum(p.numel() for p in trained) == count > 0
    whole = ppo().policy
    assert all(p.requires_grad for p in whole.parameters())


def test_save_pretrained_peft_and_test_load_pretrained_peft(ppo, letters, tmp_path):
    trainer = ppo(LoraConfig(**LORA), total_episodes=4)
    trainer.train()
    trainer.save_model(str(tmp_path / "adapter"))
    names = {path.name for path in (tmp_path / "adapter").iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json"} <= names
    again = PeftModel.from_pretrained(qwen(letters), tmp_path / "adapter")
    saved = {n: x for n, x in again.named_parameters() if "lora" in n}
    for name, x in trainer.policy.named_parameters():
        if "lora" in name:
            torch.testing.assert_close(x, saved[name])


def test_continue_training_peft_model(ppo, letters, tmp_path):
    get_peft_model(qwen(letters), LoraConfig(**LORA)).save_pretrained(tmp_path / "adapter")
    policy = PeftModel.from_pretrained(qwen(letters), tmp_path / "adapter", is_trainable=True)
    trainer = ppo(model=policy, total_episodes=8)
    before = copies(trainer.policy)
    trainer.train()
    assert any("lora" in name for name in moved(trainer.policy, before))


def test_independent_reference(ppo, letters):
    model = qwen(letters)
    reference = rlhf_nb.create_reference_model(model)
    before = copies(reference)
    assert not moved(model, before) and not any(p.requires_grad for p in reference.parameters())
    trainer = ppo(model=model, total_episodes=4, learning_rate=1e-2)
    trainer.ref_model, kept = reference, copies(reference)
    trainer.train()
    assert moved(trainer.policy, before) and not moved(reference, kept)


# ---- A head for values, as far as ours has one ----


def test_value_head_shape_and_start(letters):
    head = ValueHead(qwen(letters))
    assert head.score.weight.shape == (1, 16) and not head.score.weight.any()


def test_transformers_bf16_kwargs(letters, tmp_path):
    qwen(letters).to(torch.bfloat16).save_pretrained(tmp_path)
    assert load_policy(str(tmp_path), dtype=torch.bfloat16).dtype == torch.bfloat16
    assert load_policy(str(tmp_path)).dtype == torch.float32  # what trains
