"""What people bring from trl's PPO trainers: its arguments and attributes work here, or the error
names what took their place."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
from functools import partial
from pathlib import Path

import pytest
import torch
import yaml
from datasets import Dataset
from ppo_fixtures import PROMPTS, SIZES, likes_c
from transformers import TrainerCallback, TrainingArguments

import rlhf_nb
from rlhf_nb import PPOConfig, PPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer
from rlhf_nb.estimators import ESTIMATORS
from rlhf_nb.models import scorer_from
from rlhf_nb.training.compat import CONFIG, IMPORTS, METHODS, REFUSED, TRAINER
from rlhf_nb.training.compat import SIZES as COMPUTED
from rlhf_nb.training.model_loading import tiny_policy, train_bpe_tokenizer

ROWS = [dict(prompt=prompt) for prompt in PROMPTS]
FAST = dict(use_cpu=True, report_to="none", disable_tqdm=True, save_strategy="no")


def made(folder, letters, train=ROWS, evaluation=None, callbacks=None, parts=None, **settings):
    small = dict(per_device_train_batch_size=4, response_length=3, total_episodes=8)
    args = PPOConfig(str(folder / "run"), **FAST | small | settings)
    usual = dict(
        model=tiny_policy(letters, 0, **SIZES | dict(max_position_embeddings=32)),
        reward_model=likes_c,
        train_dataset=train,
        eval_dataset=evaluation,
        callbacks=callbacks,
    )
    return PPOTrainer(args, letters, **usual | (parts or {}))


@pytest.fixture
def ppo(tmp_path, letters):
    return partial(made, tmp_path, letters)


class Episodes(TrainerCallback):
    "What other callbacks see in `state.episode`."

    def __init__(self):
        self.counts = []

    def on_train_begin(self, args, state, control, **_):
        self.counts.append(state.episode)

    on_step_end = on_train_begin


@pytest.fixture(scope="module")
def run(tmp_path_factory, letters):
    "A trainer after a run of two updates with a checkpoint after each, and what a callback saw."
    seen = Episodes()
    saves = dict(save_strategy="steps", save_steps=1)
    trainer = made(tmp_path_factory.mktemp("ppo"), letters, callbacks=[seen], **saves)
    trainer.train()
    return trainer, seen.counts


# ---- Old names ----


def test_an_old_import_names_the_new_one():
    for name, new in IMPORTS.items():
        with pytest.raises(ImportError, match=rf"rlhf_nb has no {name}: ") as caught:
            exec(f"from rlhf_nb import {name}")
        assert new in str(caught.value) and "\n" not in str(caught.value)


# catches: a table that sends people to a name that is not there either
def test_new_names_exist():
    fields = {field.name for field in dataclasses.fields(PPOConfig)}
    arguments = set(PPOTrainer.__init__.__wrapped__.__annotations__)
    for table, known in ((CONFIG, fields), (TRAINER, arguments)):
        for old, new in table.items():
            assert old not in known
            first = new.replace(",", " ").replace(":", " ").replace("=", " ").split()[0].rstrip(";")
            of_other = new in (f"{first} of PPOConfig", f"{first} of PPOTrainer")
            of_other |= first in fields and new.startswith(f"{first} of PPOConfig")
            assert first in known or first in ("leave", "a") or of_other, (old, new)
    for old in ("PPOv2Trainer", "PPOv2Config", "SIMPLE_QUERY_CHAT_TEMPLATE"):
        assert getattr(rlhf_nb, IMPORTS[old])
    assert {IMPORTS[f"{name}Trainer"].split("'")[1] for name in ("GRPO", "RLOO")} <= {*ESTIMATORS}


def test_an_old_field_or_keyword_names_the_new_one(tmp_path):
    args = PPOConfig(str(tmp_path), **FAST)
    for name, new in CONFIG.items():
        with pytest.raises(TypeError, match=f"PPOConfig has no {name}: ") as caught:
            PPOConfig(str(tmp_path), **{name: 1})
        assert new in str(caught.value)
    for name, new in TRAINER.items():
        with pytest.raises(TypeError, match=f"PPOTrainer has no {name}: ") as caught:
            PPOTrainer(args, **{name: None})
        assert new in str(caught.value)


def test_a_misspelt_keyword_gets_its_neighbour(tmp_path):
    with pytest.raises(TypeError, match=r"PPOConfig has no kl_coeff\. Did you mean kl_coef\?"):
        PPOConfig(str(tmp_path), kl_coeff=0.1)
    with pytest.raises(TypeError, match=r"no train_data.* Did you mean train_dataset"):
        PPOTrainer(PPOConfig(str(tmp_path), **FAST), train_data=[])


# catches: a subclass that no longer may have arguments of its own
def test_a_subclass_may_add_arguments(tmp_path):
    @dataclasses.dataclass
    class Mine(PPOConfig):
        curriculum: str = "none"

    class Trainer(PPOTrainer):
        def __init__(self, *given, note=None, **named):
            self.note = note
            super().__init__(*given, **named)

    assert Mine(str(tmp_path), curriculum="x", kl_coef=0.1, **FAST).kl_coef == 0.1
    with pytest.raises(TypeError, match="use processing_class"):
        Trainer(Mine(str(tmp_path), **FAST), note=1, tokenizer=None)


def test_an_old_method_names_the_new_one(ppo):
    trainer = ppo()
    for name, new in METHODS.items():
        with pytest.raises(AttributeError, match=f"PPOTrainer has no {name}: ") as caught:
            getattr(trainer, name)
        assert new in str(caught.value)
    assert not hasattr(trainer, "nonsense")
    with pytest.raises(TypeError, match=r"step\(prompts\) .* f\(prompts, responses"):
        trainer.step([torch.tensor([1])], [torch.tensor([2])], [torch.tensor(1.0)])


# ---- Sizes that are computed ----


# catches: a computed size that scripts read and that is not there, or counts something else
def test_computed_sizes_may_be_given_and_are_checked(ppo):
    same = dict(per_device_train_batch_size=2, gradient_accumulation_steps=6)
    same |= dict(num_mini_batches=3, total_episodes=25)
    right = ppo(**same).args
    values = {size: getattr(right, size) for size in COMPUTED}
    assert values == dict(
        world_size=1,
        micro_batch_size=2,
        local_batch_size=12,
        batch_size=12,
        local_mini_batch_size=4,
        mini_batch_size=4,
        num_total_batches=3,
    )
    for given in (values, dict.fromkeys(COMPUTED)):
        args = ppo(**same, **given).args
        assert {size: getattr(args, size) for size in COMPUTED} == values
    for name in COMPUTED:
        with pytest.raises(ValueError, match=f"{name} is 96 and follows from other settings"):
            ppo(**same, **{name: 96})


# ---- Every field of TrainingArguments ----

# What a run of PPO does with it: the same as for any Trainer.
WORKS = """output_dir per_device_train_batch_size num_train_epochs max_steps learning_rate
lr_scheduler_type lr_scheduler_kwargs warmup_steps optim optim_args weight_decay adam_beta1 adam_beta2
adam_epsilon optim_target_modules gradient_accumulation_steps max_grad_norm bf16 fp16 tf32
activation_checkpointing activation_checkpointing_kwargs gradient_checkpointing
gradient_checkpointing_kwargs logging_strategy logging_steps logging_first_step log_on_each_node
log_level log_level_replica disable_tqdm report_to run_name project trackio_space_id
trackio_bucket_id trackio_static_space_id eval_strategy eval_steps eval_delay eval_on_start
save_only_model save_strategy save_steps save_on_each_node save_total_limit enable_jit_checkpoint
push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision
load_best_model_at_end metric_for_best_model greater_is_better
restore_callback_states_from_checkpoint full_determinism seed data_seed use_cpu accelerator_config
dataloader_drop_last dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers
dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order
train_sampling_strategy length_column_name ddp_find_unused_parameters ddp_bucket_cap_mb
ddp_broadcast_buffers ddp_static_graph ddp_backend ddp_timeout fsdp fsdp_config deepspeed
skip_memory_metrics resume_from_checkpoint""".split()
# Of labels, compute_metrics, an evaluation loop of batches, or the launcher: PPO has none of it.
MEANINGLESS = """average_tokens_across_devices logging_nan_inf_filter per_device_eval_batch_size
prediction_loss_only eval_do_concat_batches eval_use_gather_object eval_accumulation_steps
include_for_metrics batch_eval_metrics remove_unused_columns label_names use_cache do_train do_eval
do_predict local_rank""".split()
NOT = dict(  # a value that PPO cannot honour
    neftune_noise_alpha=5.0,
    label_smoothing_factor=0.1,
    use_liger_kernel=True,
    liger_kernel_config=dict(rope=True),
    auto_find_batch_size=True,
    include_num_input_tokens_seen="all",
    torch_empty_cache_steps=1,
    bf16_full_eval=True,
    fp16_full_eval=True,
    ignore_data_skip=True,
    parallelism_config="anything",
    debug="underflow_overflow",
    torch_compile=True,
    torch_compile_backend="inductor",
    torch_compile_mode="default",
)


def test_every_training_argument_has_its_place():
    fields = {field.name for field in dataclasses.fields(TrainingArguments)}
    places = [*WORKS, *MEANINGLESS, *NOT]
    assert len(places) == len(set(places)) and fields == set(places), fields ^ set(places)
    assert {name for names in REFUSED.values() for name in names.split()} <= set(NOT)


def test_what_ppo_cannot_do_is_refused_by_name(tmp_path):
    for name, value in NOT.items():
        with pytest.raises(ValueError, match=name.removesuffix("_backend").removesuffix("_mode")):
            PPOConfig(str(tmp_path), **FAST, **{name: value})
    for optim in ("galore_adamw_layerwise", "lomo", "schedule_free_adamw"):  # step in the backward
        with pytest.raises(ValueError, match=f"optim is '{optim}'"):
            PPOConfig(str(tmp_path), optim=optim, **FAST)
    for name in ("split_batches", "dispatch_batches"):  # shared batches
        with pytest.raises(ValueError, match=name):
            PPOConfig(str(tmp_path), accelerator_config={name: True}, **FAST)


# What trl's configurations have and ours refuse.
OF_TRL = dict(
    packing_strategy="wrapped",
    eval_packing=True,
    padding_free=True,
    truncation_mode="keep_end",
    shuffle_dataset=True,
    dataset_kwargs=dict(skip_prepare_dataset=True),
    loss_type="dft",
    router_aux_loss_coef=0.5,
    activation_offloading=True,
)


# catches: a setting of trl's that is taken and then has no effect
def test_settings_of_trl_without_a_meaning_are_refused_by_name():
    for name, value in OF_TRL.items():
        for kind in (SFTConfig, RewardConfig)[: 1 + (name == "activation_offloading")]:
            wanted = f"^{name} is .*: give (False|bfd|None|keep|one of)"
            with pytest.raises(ValueError, match=wanted):
                kind("run", **{name: value})


def test_what_is_no_adapter_is_refused(ppo):
    for config in (dict(r=4), "lora"):
        with pytest.raises(TypeError, match="peft_config is (dict|str): give one of peft"):
            ppo(parts=dict(peft_config=config))


# ---- Rows that SFT and reward training cannot read ----

TALK = [dict(role="user", content="a"), dict(role="assistant", content="b")]
AS_MODEL = [TALK[0], dict(role="model", content="b")]
TEXT, CHOSEN = dict(text="abc"), dict(chosen="abc", rejected="abd")
ASSISTANT, COMPLETION = dict(assistant_only_loss=True), dict(completion_only_loss=True)


@pytest.fixture(scope="module")
def supervised(tmp_path_factory):
    "Makes a trainer of texts or pairs: `supervised(kind, rows, **settings)`."
    tokenizer = train_bpe_tokenizer(["what is better than ugly? beautiful."] * 4, 270)
    tokenizer.chat_template = "{% for m in messages %}{{ m.role + m.content }}{% endfor %}"
    policy = tiny_policy(tokenizer, 0, **SIZES | dict(max_position_embeddings=64))
    models = {SFTTrainer: policy, RewardTrainer: scorer_from(policy, 0)}
    configs = {SFTTrainer: SFTConfig, RewardTrainer: RewardConfig}
    folder = str(tmp_path_factory.mktemp("supervised"))

    def make(kind, rows, evaluation=None, **settings):
        args = configs[kind](folder, **FAST | settings)
        return kind(copy.deepcopy(models[kind]), args, rows, evaluation, tokenizer)

    return make


def ids(*rows):
    return [dict(input_ids=list(row)) for row in rows]


def test_rows_that_cannot_be_trained_on_are_named(supervised):
    for rows, settings, message in (
        ([dict(question="a")], {}, r"columns \['question'\].*messages"),
        ([TEXT, dict(text=None)], {}, "row 1: its text is None: drop"),
        ([TEXT, dict(text="")], {}, "row 1: its text is ''"),
        ([dict(messages=[])], {}, "row 0: its text is"),
        ([dict(messages=["a"])], {}, "row 0: the text is .*give text, or turns"),
        (ids([3], [5, 6]), {}, "row 0: no token of it counts"),
        (ids([5, 6], [5, 900]), {}, "row 1: it has the id 900"),
        (ids([5, 6], [5, -1]), {}, "row 1: it has the id -1"),
        (ids([5, 6], []), {}, "row 1: it has the id None"),
        (
            [dict(input_ids=[5, 6, 7], assistant_masks=[0, 0, 1])],
            dict(max_length=2),
            "row 0: no token of it counts",
        ),
        ([dict(messages=AS_MODEL)], ASSISTANT, r"row 0: no turn of it \(user, model\) is the ass"),
        ([TEXT], ASSISTANT, "row 0: it is no conversation, and assistant_only_loss"),
        ([TEXT], COMPLETION, "completion_only_loss is True: give prompt and completion"),
        ([TEXT], dict(eos_token="<none>"), "eos_token is '<none>': give a token"),
    ):
        with pytest.raises(ValueError, match=message):
            supervised(SFTTrainer, Dataset.from_list(rows), **settings)
    for rows, settings, message in (
        (dict(chosen_ids=[5, 6], rejected_ids=[900]), {}, "row 0: it has the id 900"),
        (
            dict(chosen_ids=[5, 6], rejected_ids=[5, 7, 8]),
            dict(max_length=2),
            "row 0: it has 3 tokens, max_length is 2: drop",
        ),
        (CHOSEN, dict(pad_token="<none>"), "pad_token is '<none>': give"),
    ):
        with pytest.raises(ValueError, match=message):
            supervised(RewardTrainer, Dataset.from_list([rows]), **settings)


# catches: an evaluation of broken weights that reports NaN as if it were a number
def test_what_is_no_data_set_is_named_and_no_number_no_evaluation(supervised):
    for kind, row in ((SFTTrainer, TEXT), (RewardTrainer, CHOSEN)):
        with pytest.raises(ValueError, match=r"columns \['prompt'\]"):
            supervised(kind, [row], dict(test=["a"]))
        trainer = supervised(kind, [row] * 5, Dataset.from_list([row]))
        assert len(trainer.train_dataset) == 5
        torch.nn.init.constant_(next(trainer.model.parameters()), float("nan"))
        with pytest.raises(FloatingPointError, match="eval_loss is nan"):
            trainer.evaluate()


# ---- A run with what other tests do not use ----

# Each with a value that is no default.
USED = dict(
    lr_scheduler_kwargs=dict(num_cycles=2),
    optim="adafactor",
    weight_decay=0.1,
    warmup_steps=0.5,
    logging_first_step=True,
    log_level="info",
    eval_on_start=True,
    full_determinism=False,
    data_seed=3,
    dataloader_num_workers=1,
    dataloader_pin_memory=False,
    train_sampling_strategy="sequential",
    skip_memory_metrics=False,
    activation_checkpointing=True,
    enable_jit_checkpoint=False,
    use_cache=True,
    per_device_eval_batch_size=2,
    prediction_loss_only=True,
    remove_unused_columns=True,
    label_names=["labels"],
    average_tokens_across_devices=False,
    gradient_checkpointing_kwargs=dict(use_reentrant=False),
    eval_delay=1,
)


def test_a_run_with_those_settings(ppo):
    trainer = ppo(evaluation=ROWS[:2], lr_scheduler_type="cosine_with_restarts", **USED)
    trainer.train()
    assert trainer.state.global_step == 2


# ---- Data ----


class Torch(torch.utils.data.Dataset):
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


IDS = [dict(input_ids=torch.tensor([3 + i % 4, 4]), attention_mask=torch.ones(2)) for i in range(8)]


def test_lists_and_torch_data_sets_are_data(ppo):
    part = torch.utils.data.Subset(Torch(ROWS), range(1, 20))
    for rows in (ROWS, Torch(ROWS), IDS, part, Dataset.from_list(ROWS)):
        trainer = ppo(train=rows, evaluation=rows)
        assert trainer.step()["episode"] == 4 and len(trainer.eval_dataset) == len(rows)


# catches: the last of several sets overwriting the others' table or metrics
def test_several_evaluation_sets_by_name(ppo):
    sets = dict(first=ROWS[:5], second=Dataset.from_list(ROWS[:2]))
    trainer = ppo(evaluation=sets, eval_strategy="steps", eval_steps=2, num_sample_generations=0)
    trainer.train()
    logged = {name: x for log in trainer.state.log_history for name, x in log.items()}
    assert {"eval_first_score", "eval_second_score"} <= set(logged) and "eval_score" not in logged
    tables = sorted(p.name for p in (trainer.output_dir / "completions").iterdir())
    assert tables == ["update-00002-eval-first.csv", "update-00002-eval-second.csv"]
    assert trainer.evaluate(ROWS[:3]).keys() == {"eval_score", "eval_length", "eval_stopped"}
    assert "evaluation first" in trainer.card(trainer.output_dir)


# ---- What the published trainer has ----


def test_stepping_by_hand_needs_no_data(ppo, caplog):
    trainer = ppo(train=None, total_episodes=None)
    first, second = trainer.step(["ab", "c", "d", "e"]), trainer.step(["ab", "c", "d", "e"])
    assert trainer.update_count == 2 and first["lr"] == second["lr"] == trainer.args.learning_rate
    falling = ppo(train=None, total_episodes=8)
    assert falling.step(["a", "b", "c", "d"])["lr"] > falling.step(["a", "b", "c", "d"])["lr"] > 0
    for wanted in (trainer.step, trainer.train):
        with pytest.raises(
            ValueError, match=r"no train_dataset: give one, or call step\(prompts\)"
        ):
            wanted()


def test_a_schedule_of_ones_own_by_hand(letters, tmp_path):
    args = PPOConfig(str(tmp_path), per_device_train_batch_size=4, response_length=3, **FAST)
    policy = tiny_policy(letters, 0, **SIZES)
    trainer = PPOTrainer(args, letters, policy, reward_model=likes_c, train_dataset=ROWS)
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.25)
    assert trainer.step()["lr"] == 0.25


def test_the_last_line_of_a_script_needs_no_evaluation_set(ppo, run):
    trainer, _ = run
    assert trainer.generate_completions() == {}
    assert trainer.generate_completions(sampling=True) == {}
    with pytest.raises(ValueError, match="give the trainer an eval_dataset"):
        trainer.evaluate()
    whole = ppo(evaluation=ROWS * 4)
    whole.generate_completions()
    table = next((whole.output_dir / "completions").iterdir()).read_text()
    assert table.count("\n") == 1 + 4 * len(ROWS)  # not a sample


def test_attributes_of_the_published_trainer(ppo, run):
    trainer, counts = run
    assert counts == [0, 4, 8] and trainer.state.episode == 8
    assert trainer.model.policy is trainer.policy_model is trainer.pair.policy
    assert trainer.model.value_model is trainer.value_model is trainer.pair.value
    assert trainer.stop_token_id == trainer.processing_class.eos_token_id
    assert trainer.train_dataset_len == len(ROWS) and not trainer.is_peft_model
    assert len(next(iter(trainer.dataloader))["prompt"]) == 4
    assert ppo(stop_token_id=[4, 5]).stop_token_id == [4, 5]


# ---- The hub ----


@pytest.fixture
def hub(monkeypatch):
    "What is uploaded, instead of an upload."
    pushed = []

    class Api:
        def upload_folder(self, *, folder_path, **more):
            card = (Path(folder_path) / "README.md").read_text()
            pushed.append((sorted(p.name for p in Path(folder_path).iterdir()), card))
            return "done"

    def repository(self, token=None, private=None):
        self.hub_model_id, self.push_in_progress = "someone/something", None

    monkeypatch.setattr("transformers.trainer.hf_api", Api)
    monkeypatch.setattr("transformers.Trainer.init_hf_repo", repository)
    return pushed


PAIRS = [dict(prompt="ab", chosen="c", rejected="d"), dict(prompt="e", chosen="c", rejected="h")]


@pytest.mark.parametrize("kind", ["ppo", "reward", "sft"])
def test_a_card_with_a_data_set_and_tags(kind, ppo, hub, letters, tmp_path):
    if kind == "ppo":
        trainer = ppo()
    elif kind == "reward":
        args = RewardConfig(str(tmp_path / "run"), **FAST)
        model = scorer_from(tiny_policy(letters, 0, **SIZES), 0)
        trainer = RewardTrainer(model, args, Dataset.from_list(PAIRS), processing_class=letters)
    else:
        args = SFTConfig(str(tmp_path / "run"), **FAST)
        rows = Dataset.from_list([dict(prompt="ab", completion="c")])
        model = tiny_policy(letters, 0, **SIZES)
        trainer = SFTTrainer(model, args, rows, processing_class=letters)
    trainer.push_to_hub(dataset_name="someone/prompts", tags="polite")
    files, card = hub[0]
    assert "model.safetensors" in files
    metadata = yaml.safe_load(card.split("---")[1])
    assert "polite" in metadata["tags"] and "someone/prompts" in str(metadata)
    trainer.create_model_card(model_name="a-name", dataset_name="d/d", tags=["one", "two"])
    card = (Path(trainer.args.output_dir) / "README.md").read_text()
    assert "# a-name" in card and "d/d" in card and "two" in card
    if kind != "sft":  # which has Trainer's card
        assert "rlhf_nb" in card


def test_the_card_stays_ours(run):
    trainer, _ = run
    plain = trainer.card(trainer.output_dir)
    trainer.create_model_card("mine", ["d/one", "d/two"], ["ppo", "new"])
    head, body = (trainer.output_dir / "README.md").read_text().split("---\n", 2)[1:]
    assert body.split("\n")[2:] == plain.split("---\n", 2)[2].split("\n")[2:]
    metadata = yaml.safe_load(head)
    assert metadata["datasets"] == ["d/one", "d/two"]
    assert metadata["tags"] == ["rlhf", "ppo", "rlhf_nb", "new"]
    assert json.dumps(metadata)  # plain text and lists


# ---- What scripts parse ----


def test_a_parser_reads_yaml_below_what_is_typed(tmp_path, monkeypatch):
    (tmp_path / "c.yaml").write_text(
        "env: {MY_VARIABLE: 7}\nkl_coef: 0.5\nlearning_rate: 3e-4\nuse_peft: true\n"
        "lora_target_modules: [a, b]\nstop_token: null\nnum_mini_batches: 2\n"
    )
    monkeypatch.setenv("MY_VARIABLE", "1")
    parser = rlhf_nb.TrlParser((rlhf_nb.ScriptArguments, PPOConfig, rlhf_nb.ModelConfig))
    words = ["--kl_coef", "0.25", "--config", str(tmp_path / "c.yaml"), "--output_dir", "o"]
    script, args, model = parser.parse_args_and_config([*words, "--use_cpu", "--dataset_name", "d"])
    assert (args.kl_coef, args.learning_rate, args.num_mini_batches) == (0.25, 3e-4, 2)
    assert (script.dataset_name, model.use_peft) == ("d", True)
    assert model.lora_target_modules == ["a", "b"]
    assert os.environ["MY_VARIABLE"] == "7"
    (tmp_path / "c.yaml").write_text("kl_coeff: 0.5\n")
    with pytest.raises(ValueError, match="kl_coeff=0.5"):
        parser.parse_args_and_config(words)
    *_, left = parser.parse_args_and_config(words, return_remaining_strings=True)
    assert left == ["--kl_coeff=0.5"]
    for text, said in (("- a\n", "expected lines such as"), ("a: &a [*a]", "its aliases")):
        (tmp_path / "c.yaml").write_text(text)
        with pytest.raises(ValueError, match=f"c.yaml: .*{said}"):
            parser.parse_args_and_config(words)


def test_an_adapter_and_a_quantisation_from_a_model_config():
    make = rlhf_nb.ModelConfig
    assert rlhf_nb.get_peft_config(make()) is None
    config = rlhf_nb.get_peft_config(
        make(use_peft=True, lora_r=4, lora_target_modules=["all-linear"], use_rslora=True)
    )
    assert (config.r, config.target_modules, config.use_rslora) == (4, "all-linear", True)
    assert rlhf_nb.get_quantization_config(make()) is None
    four = rlhf_nb.get_quantization_config(make(load_in_4bit=True, dtype="bfloat16"))
    assert four.load_in_4bit and four.bnb_4bit_compute_dtype == torch.bfloat16
    assert rlhf_nb.get_quantization_config(make(load_in_8bit=True)).load_in_8bit
    with pytest.raises(ValueError, match="keep one of them"):
        make(load_in_4bit=True, load_in_8bit=True)
    assert make(dtype="float16").torch_dtype == "float16"
    assert torch.cuda.is_available() or rlhf_nb.get_kbit_device_map() is None


def test_the_chat_template_for_tokenizers_without_one(letters):

    tokenizer = copy.deepcopy(letters)
    tokenizer.chat_template = rlhf_nb.SIMPLE_CHAT_TEMPLATE
    turns = [dict(role="user", content="ab"), dict(role="assistant", content="c")]
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert text == "User: ab\nAssistant: c\nAssistant:"


# catches: an episode count that starts again, or is missing, after a resume
def test_episodes_after_a_resume(run, letters):
    first, _ = run
    seen = Episodes()
    again = made(first.output_dir.parent, letters, callbacks=[seen])
    again.train(resume_from_checkpoint=str(first.output_dir / "checkpoint-1"))
    assert seen.counts == [4, 8] and again.state.episode == 8
