"""What trains is trained, and nothing else moves: optimizers, heads, adapters and warm-ups, and
what a saved folder gives the next stage."""

import re
import tempfile
from functools import partial

import pytest
import torch
from accelerate.optimizer import AcceleratedOptimizer
from datasets import Dataset
from marks import crossed
from peft import (
    FourierFTConfig,
    LoHaConfig,
    LoraConfig,
    PrefixTuningConfig,
    VeraConfig,
    get_peft_model,
)
from ppo_fixtures import PROMPTS, begin, likes_c, unlike, weights
from small_models import small_model
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import ConstantLR
from transformers import AutoModelForCausalLM, TrainerCallback

from rlhf_nb.diagnose.preflight import LADDER
from rlhf_nb.diagnose.rungs_update import find_misplaced
from rlhf_nb.diagnose.subject import Subject, changes, weights_of
from rlhf_nb.fast_logprobs import response_logprobs
from rlhf_nb.judges import load_judge
from rlhf_nb.models import scorer_from, token_scores
from rlhf_nb.reward import RewardConfig, RewardTrainer
from rlhf_nb.sft import SFTConfig, SFTTrainer
from rlhf_nb.trainer import PPOConfig, PPOTrainer
from rlhf_nb.training.model_loading import load_policy, load_scorer

IDS = torch.arange(12)[None]


def lora(**changes) -> LoraConfig:
    return LoraConfig(**dict(r=2, target_modules=["q_proj"]) | changes)


def llama(tied: bool = True, rows: int = 12):
    how = dict(vocab_size=rows, tie_word_embeddings=tied, initializer_range=0.3)
    return small_model("llama", **how)


@pytest.fixture
def saved(letters, tmp_path):
    "Saves a model with its tokenizer; returns the folder's name."

    def save(model) -> str:
        folder = tempfile.mkdtemp(dir=tmp_path)
        model.save_pretrained(folder)
        letters.save_pretrained(folder)
        return folder

    return save


@pytest.fixture
def stages(letters, small_args, tmp_path, imports):
    "Two steps of SFT or of a reward model: `stages.sft(model, peft_config=)`, its folder saved."
    rows = dict(
        sft=dict(completion=["abc"] * 24), reward=dict(chosen=["abc"] * 24, rejected=["ja"] * 24)
    )
    kinds = dict(sft=(SFTTrainer, SFTConfig), reward=(RewardTrainer, RewardConfig))

    def make(kind, model, seed=42, **given):
        trainer, config = kinds[kind]
        args = small_args(config, max_steps=2, learning_rate=5e-2, seed=seed)
        data = Dataset.from_dict(dict(prompt=PROMPTS) | rows[kind])
        return trainer(model, args, data, processing_class=letters, **given)

    def folder(trainer) -> str:
        trainer.train()
        where = tempfile.mkdtemp(dir=tmp_path)
        trainer.save_model(where)
        trainer.model.eval()
        return where

    make.folder = folder
    return make


class Gradients(TrainerCallback):
    "Weights and gradients before the first optimizer step, by name."

    def __init__(self):
        self.before, self.grads = {}, {}

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        if not self.before:
            learn = {k: p for k, p in model.named_parameters() if p.grad is not None}
            self.before = {k: p.detach().clone() for k, p in learn.items()}
            self.grads = {k: p.grad.clone() for k, p in learn.items()}


ONE_STEP = dict(num_ppo_epochs=1, max_grad_norm=0.0, lr_scheduler_type="constant")

# ---- The optimizer ----


# catches: a value model, a head or an adapter that no optimizer has, whose gradients pile up
def test_an_optimizer_must_hold_all_that_learns(ppo, letters, stages, saved):
    policy = begin(letters)
    made = dict(optimizers=(AdamW(policy.parameters(), lr=1e-3), None))
    n = len([*policy.parameters()])
    with pytest.raises(ValueError, match=rf"lacks {n} of {2 * n} tensors .* such as value\."):
        ppo(model=policy, parts=made)
    late = ppo()
    late.optimizer = AdamW(late.policy.parameters())
    with pytest.raises(ValueError, match="set trainer.optimizer once the trainer is made"):
        late.step()
    for kind, left in (("sft", "lora_A"), ("reward", "lora_A")):
        model = llama()
        with pytest.raises(ValueError, match=f"such as .*{left}"):
            stages(kind, model, peft_config=lora(), optimizers=(AdamW(model.parameters()), None))
    with pytest.raises(ValueError, match="such as model.embed_tokens"):  # the body was copied
        stages("reward", model := llama(), optimizers=(AdamW(model.parameters()), None))


# catches: a rate of the value model that is left out without a word
def test_a_value_rate_needs_an_optimizer_of_the_trainers_own(ppo):
    policy, value = llama(), scorer_from(llama())
    optimizer = AdamW([*policy.parameters(), *value.parameters()], lr=1e-3)
    named = "value_learning_rate is 0.5 and an optimizer is given"
    with pytest.raises(ValueError, match=named):
        parts = dict(value_model=value, optimizers=(optimizer, None))
        ppo(model=policy, value_learning_rate=0.5, parts=parts)
    trainer = ppo(value_learning_rate=0.5)
    trainer.optimizer = AdamW(trainer.model.parameters(), lr=1e-3)
    with pytest.raises(ValueError, match=named):
        trainer.step()
    trainer = ppo(value_learning_rate=0.5)
    trainer.step()
    rates = lambda x: [(group["lr"], len(group["params"])) for group in x.optimizer.param_groups]
    beside = Subject(trainer).beside()  # of preflight, with a copy of that optimizer
    assert rates(beside) == rates(trainer) and len({rate for rate, _ in rates(beside)}) == 2
    beside.step()


# catches: a message about padding, once everything was loaded
def test_virtual_tokens_are_named_before_anything_is_loaded(ppo):
    config = PrefixTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
    named = "PrefixTuningConfig, which puts virtual tokens .* LoraConfig"
    with pytest.raises(ValueError, match=named):
        ppo("no/such/judge", model="no/such/policy", parts=dict(peft_config=config))
    with pytest.raises(ValueError, match=named):
        ppo(model=get_peft_model(llama(), config))
    native = llama()
    native.add_adapter(lora())
    with pytest.raises(ValueError, match="an adapter of transformers' own.*get_peft_model"):
        ppo(model=native)


# catches: a message that recommends the call that leaves the value model out
def test_the_call_that_the_message_recommends_trains_both(ppo):
    with pytest.raises(TypeError, match=re.escape("optimizer_cls_and_kwargs=(torch.optim.AdamW")):
        ppo(parts=dict(optimizer=None))
    seen = Gradients()
    trainer = ppo(
        parts=dict(optimizer_cls_and_kwargs=(SGD, dict(lr=0.1)), callbacks=[seen]),
        value_learning_rate=0.5,
        **ONE_STEP,
    )
    trainer.step()
    now = dict(trainer.model.named_parameters())
    assert {name.split(".")[0] for name in seen.before} == {"policy", "value"}
    for name, p in seen.before.items():
        wanted = p - (0.1 if name.startswith("policy") else 0.5) * seen.grads[name]
        torch.testing.assert_close(now[name].detach(), wanted, atol=1e-7, rtol=1e-6)
    assert all((seen.before[name] != p).any() for name, p in now.items() if "score" in name)


# catches: a schedule that moves another optimizer's rate, or that ended in an earlier run
def test_a_schedule_is_that_of_the_optimizer(ppo, letters):
    policy = begin(letters)
    other = ConstantLR(SGD(policy.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="the lr_scheduler is of another optimizer"):
        ppo(model=policy, parts=dict(optimizers=(None, other)))
    first = ppo.trained()
    models = dict(model=first.policy, ref_model=policy, value_model=first.pair.value)
    given = lambda schedule: (
        {k: v for k, v in models.items() if k != "model"}
        | dict(optimizers=(first.optimizer, schedule))
    )
    with pytest.raises(ValueError, match="the lr_scheduler is at its end, after 3 steps"):
        ppo(model=first.policy, parts=given(first.lr_scheduler))
    second = ppo(model=first.policy, parts=given(None))
    before = weights(second)
    second.train()
    assert len(unlike(before, weights(second))) == len(before)


# catches: a trainer that is not wrapped for its layout since both were given
def test_both_may_be_set_once_the_trainer_is_made(ppo):
    trainer = ppo()
    trainer.optimizer = SGD(trainer.model.parameters(), lr=0.1)
    trainer.lr_scheduler = ConstantLR(trainer.optimizer, factor=0.5)
    before = weights(trainer)
    assert trainer.step()["lr"] == pytest.approx(0.05)
    assert isinstance(trainer.optimizer, AcceleratedOptimizer)
    assert len(unlike(before, weights(trainer))) == len(before)


# ---- The warm-up of the value model ----


# catches: weight decay on the policy, momentum of a run before, a step of Adam that was counted
@pytest.mark.parametrize("trunk", [False, True])
def test_a_warm_up_leaves_the_policy_out(ppo, trunk):
    seen, lr, decay, eps = Gradients(), 1e-2, 0.1, 1e-8
    learning = dict(weight_decay=decay, learning_rate=lr, adam_epsilon=eps)
    trainer = ppo(value_warmup_updates=2, share_value_trunk=trunk, **ONE_STEP, **learning)
    before = weights(trainer)
    for _ in range(2):
        trainer.step(PROMPTS[:8])
    moved = unlike(before, weights(trainer))
    assert moved and all(name.startswith("value.") for name in moved)
    assert not any(p in trainer.optimizer.state for p in trainer.policy.parameters())
    trainer.add_callback(seen)
    trainer.step(PROMPTS[:8])
    decayed = {
        id(p): g["weight_decay"] for g in trainer.optimizer.param_groups for p in g["params"]
    }
    for name, p in trainer.policy.named_parameters():  # the first step of AdamW, by hand
        old, g = seen.before[f"policy.{name}"], seen.grads[f"policy.{name}"]
        wanted = old * (1 - lr * decayed[id(p)]) - lr * g / (g.abs() + eps)
        torch.testing.assert_close(p.detach(), wanted, atol=1e-6, rtol=1e-5)
    assert {*decayed.values()} == {0.0, decay}


def test_a_warm_up_ignores_the_momentum_of_a_run_before(ppo, letters):
    first = ppo.trained(parts=dict(optimizer_cls_and_kwargs=(SGD, dict(lr=0.1, momentum=0.9))))
    parts = dict(value_model=first.pair.value, ref_model=begin(letters))
    second = ppo(
        model=first.policy,
        parts=parts | dict(optimizers=(first.optimizer, None)),
        value_warmup_updates=1,
    )
    before = weights(second)
    second.step()
    moved = unlike(before, weights(second))
    assert moved and all(name.startswith("value.") for name in moved)


# catches: the first run's length, or a setting that only the first trainer needs, in the second one
@pytest.mark.parametrize(
    "trainer, config, columns",
    [
        (PPOTrainer, partial(PPOConfig, response_length=2), {}),
        (SFTTrainer, SFTConfig, dict(completion=["abc"] * 24)),
        (RewardTrainer, RewardConfig, dict(chosen=["abc"] * 24, rejected=["ja"] * 24)),
    ],
)
def test_one_set_of_arguments_serves_two_trainers(
    letters, small_args, imports, trainer, config, columns
):
    data = Dataset.from_dict(dict(prompt=PROMPTS) | columns)
    args = small_args(config, per_device_train_batch_size=8, num_train_epochs=1)
    given = dict(args=args, model=llama(), processing_class=letters)
    if trainer is PPOTrainer:
        given["reward_model"] = likes_c
    before = dict(vars(args))
    runs = [trainer(train_dataset=data.select(range(rows)), **given) for rows in (24, 8)]
    for run in runs:
        run.train()
    assert [run.state.global_step for run in runs] == [3, 1] and vars(args) == before


# ---- Heads ----

HEADS = dict(
    layers=dict(target_modules=["q_proj"]),
    all=dict(target_modules="all-linear"),
    embedding=dict(target_modules=["embed_tokens"]),
    others=dict(modules_to_save=["embed_tokens"]),
    named=dict(task_type="SEQ_CLS"),
    as_saved=dict(target_modules=["q_proj"], inference_mode=True),
)


# catches: a value or reward model whose adapter learns under a head that doesn't
@pytest.mark.parametrize("config", HEADS)
def test_the_head_learns_whatever_the_adapter(ppo, stages, config):
    given = LoraConfig(r=2, **HEADS[config])
    value = ppo(model=llama(), learning_rate=1e-2, parts=dict(value_peft_config=given))
    reward = stages("reward", llama(), peft_config=given)
    for trainer, part in ((value, value.pair.value), (reward, reward.model)):
        learn = {name: p.detach().clone() for name, p in part.named_parameters() if p.requires_grad}
        trainer.train()
        now = dict(part.named_parameters())
        assert any("score" in name for name in learn) and any("score" not in name for name in learn)
        assert not [name for name, p in learn.items() if torch.equal(p, now[name])]
    assert given.task_type == HEADS[config].get("task_type")


def adapted(**how):
    return get_peft_model(scorer_from(llama()), lora(**how))


def with_own_adapter():
    model = scorer_from(llama())
    model.add_adapter(lora())  # of transformers
    return model


FROZEN = dict(
    adapter=lambda: adapted(),
    other_task=lambda: adapted(task_type="FEATURE_EXTRACTION"),
    not_saved=lambda: adapted().requires_grad_(True),
    own=with_own_adapter,
)


# catches: a head that never learns inside an adapter without a task, or that learns and is missing
# from the folder of the adapter
@pytest.mark.parametrize("kind", FROZEN)
def test_an_adapter_that_leaves_the_head_is_refused(ppo, stages, kind):
    named = r"model's head does not learn .* modules_to_save=\['score'\]"
    with pytest.raises(ValueError, match=f"the value {named}"):
        ppo(model=llama(), parts=dict(value_model=FROZEN[kind]()))
    with pytest.raises(ValueError, match=f"the reward {named}"):
        stages("reward", FROZEN[kind]())


class OwnHead(nn.Module):
    "A value model of one's own whose head has a name of one's own."

    base_model_prefix = "body"

    def __init__(self):
        super().__init__()
        self.body, self.points = llama().base_model, nn.Linear(16, 1)
        self.config = self.body.config

    def score(self, hidden):
        return self.points(hidden)


# catches: a head looked for under the names of sequence classifiers alone, an adapter inside a
# module of one's own that nobody sees, advice that does not help
@pytest.mark.parametrize("inside", [True, False])
def test_a_module_of_ones_own_learns_with_its_head(ppo, inside):
    def trained(**more):
        config = LoraConfig(r=2, target_modules=["q_proj"], **more)
        value = get_peft_model(OwnHead(), config) if inside else OwnHead()
        given = dict(value_model=value) | ({} if inside else dict(value_peft_config=config))
        trainer = ppo(model=llama(), parts=given)
        before = weights(trainer)
        trainer.train()
        return {name for name, x in weights(trainer).items() if not torch.equal(x, before[name])}

    with pytest.raises(ValueError, match=r"head does not learn .* modules_to_save=\['points'\]"):
        trained()
    moved = [name for name in trained(modules_to_save=["points"]) if name.startswith("value")]
    assert all(any(part in name for name in moved) for part in ("points", "lora_A", "lora_B"))


# catches: weights beside an adapter that learn and are missing from its folder
def test_weights_that_learn_beside_an_adapter_are_refused(ppo, stages):
    named = "weights learn outside its adapter .*embed_tokens.weight.*modules_to_save"
    both = lambda: get_peft_model(llama(), lora()).requires_grad_(True)
    with pytest.raises(ValueError, match=f"the policy's {named}"):
        ppo(model=both())
    with pytest.raises(ValueError, match=f"the model's {named}"):
        stages("sft", both()).train()


# catches: a run in which an adapter that was merged for an evaluation never learns; a RuntimeError
def test_a_merged_adapter_is_refused(ppo, stages):
    def merged(model, **how):
        adapted = get_peft_model(model, lora(init_lora_weights=False, **how))
        adapted.merge_adapter()
        return adapted

    named = r"'s adapter is merged .*: call {}model.unmerge_adapter\(\)"
    with pytest.raises(ValueError, match="policy" + named.format("")):
        ppo(model=merged(llama()))
    with pytest.raises(ValueError, match="value model" + named.format("value_")):
        ppo(
            model=llama(), parts=dict(value_model=merged(scorer_from(llama()), task_type="SEQ_CLS"))
        )
    with pytest.raises(ValueError, match="the model" + named.format("")):
        stages("sft", merged(llama())).train()


# catches: an adapter for a value model that is not made, without a word
def test_a_value_head_has_no_adapter(ppo):
    with pytest.raises(ValueError, match="share_value_trunk is set and a value_peft_config is"):
        ppo(model=llama(), share_value_trunk=True, parts=dict(value_peft_config=lora()))


def test_a_frozen_value_model_is_refused(ppo):
    with pytest.raises(ValueError, match="none of the value model's weights .*value_peft_config"):
        ppo(model=llama(), parts=dict(value_model=scorer_from(llama()).requires_grad_(False)))


LEARN = dict(
    task=dict(task_type="SEQ_CLS"),
    named=dict(modules_to_save=["score"]),
    inside=dict(target_modules=["q_proj", "score"]),
    all=dict(target_modules="all-linear"),
)


# catches: a head inside the adapter that is taken for no head at all
@pytest.mark.parametrize("how", LEARN)
def test_a_head_in_an_adapter_is_trained_and_saved(stages, saved, how):
    base = saved(scorer_from(llama()))
    trainer = stages("reward", get_peft_model(load_scorer(base), lora(**LEARN[how])))
    again, plain = load_judge(stages.folder(trainer)), load_scorer(base)
    wanted = trainer.model(IDS).logits
    torch.testing.assert_close(again(IDS).logits, wanted, atol=1e-5, rtol=0)
    assert not torch.equal(again.score.weight, plain.score.weight)


# catches: a reward model grown from the weights without what the adapter has learned
def test_a_reward_model_grows_from_what_an_adapter_learned(stages):
    policy = get_peft_model(llama(), lora(init_lora_weights=False))
    before = policy(IDS).logits
    body = stages("reward", policy).model.base_model.state_dict()
    assert torch.equal(policy(IDS).logits, before)  # it is not changed itself
    assert not unlike(policy.merge_and_unload().base_model.state_dict(), body)
    with pytest.raises(ValueError, match="adapter of PeftModelForCausalLM cannot be merged"):
        stages(
            "reward", get_peft_model(llama(), PrefixTuningConfig("CAUSAL_LM", num_virtual_tokens=2))
        )


def test_an_adapter_for_another_task_is_named(ppo, stages):
    for given, named in (
        (
            lora(task_type="CAUSAL_LM"),
            r"task_type='CAUSAL_LM'\): LlamaFor.* of task_type='SEQ_CLS'",
        ),
        (PrefixTuningConfig(num_virtual_tokens=2), "no virtual tokens"),
    ):
        with pytest.raises(ValueError, match=named):
            ppo(model=llama(), parts=dict(value_peft_config=given))
        with pytest.raises(ValueError, match=named):
            stages("reward", llama(), peft_config=given)


# ---- Evaluations ----


# catches: last rows that are left out of an evaluation, predictions that are of other rows
@pytest.mark.parametrize("kind", ["sft", "reward"])
def test_an_evaluation_reads_all_rows_in_their_order(letters, small_args, imports, kind):
    texts = ["a" * n for n in (3, 1, 6, 2, 5, 4, 7)]
    columns = dict(sft=dict(completion=texts), reward=dict(chosen=texts, rejected=["jj"] * 7))
    data = Dataset.from_dict(dict(prompt=["b"] * 7) | columns[kind])
    trainer, config = dict(sft=(SFTTrainer, SFTConfig), reward=(RewardTrainer, RewardConfig))[kind]
    seen, losses = [], []
    for settings in (dict(dataloader_drop_last=True), dict(train_sampling_strategy="random"), {}):
        own = lambda output: seen.append(output.predictions) or {}
        args = small_args(config, per_device_eval_batch_size=2, **settings)
        given = dict(eval_dataset=data, processing_class=letters, compute_metrics=own)
        made = trainer(llama(), args, data, **given)
        losses.append(made.evaluate()["eval_loss"])
        assert made.args.dataloader_drop_last == bool(settings.get("dataloader_drop_last"))
    predicted = made.predict(data).predictions
    assert len(predicted) == 7 and losses == pytest.approx(losses[:1] * 3, abs=1e-6)
    for x in seen:
        torch.testing.assert_close(torch.tensor(x), torch.tensor(predicted))


# ---- Adapters ----

TIED = dict(
    head=dict(target_modules=["lm_head"]),
    embedding=dict(target_modules=["q_proj", "embed_tokens"]),
    both=dict(target_modules=["embed_tokens", "lm_head"]),
    head_and_tied=dict(target_modules=["lm_head"], ensure_weight_tying=True),
    copied=dict(modules_to_save=["embed_tokens"]),
    copied_and_tied=dict(modules_to_save=["embed_tokens"], ensure_weight_tying=True),
    tokens=dict(trainable_token_indices=[3, 4]),
    repeated=dict(layer_replication=[(0, 1), (0, 1)]),
)


# catches: a difference for the head that is merged into the embedding too, or for one copy of a layer
# into all; a layer of peft in place of an embedding
@pytest.mark.parametrize("config, tied", crossed(list(TIED), [True, False]))
def test_an_adapter_on_embedding_or_head_is_saved_as_trained(
    ppo, saved, stages, tmp_path, config, tied
):
    base = saved(llama(tied))
    trainer = ppo.trained(
        model=load_policy(base), learning_rate=5e-2, parts=dict(peft_config=lora(**TIED[config]))
    )
    wanted = trainer.policy(IDS).logits
    assert (wanted - load_policy(base)(IDS).logits).abs().max() > 0.1
    trainer.save_model(str(tmp_path / "adapter"))
    trainer.args.save_merged = True
    trainer.save_model(str(tmp_path / "merged"))
    sft = stages("sft", base, peft_config=lora(**TIED[config]))
    for logits, again in (
        (wanted, load_policy(str(tmp_path / "adapter"))),
        (wanted, AutoModelForCausalLM.from_pretrained(tmp_path / "merged")),
        (lambda: sft.model(IDS).logits, load_policy(stages.folder(sft))),
    ):
        logits = logits() if callable(logits) else logits
        torch.testing.assert_close(again(IDS).logits, logits, atol=1e-4, rtol=0)


# catches: the second stage's adapter on the first stage's base, without the first stage's adapter
def test_an_adapter_on_an_adapter_is_loaded_as_trained(ppo, stages, saved, tmp_path):
    base = saved(llama())
    sft = stages.folder(stages("sft", base, peft_config=lora()))
    trainer = ppo.trained(
        load_judge(stages.folder(stages("reward", base, peft_config=lora()))),
        model=load_policy(sft),
        learning_rate=5e-2,
        save_value_model=True,
        parts=dict(peft_config=lora(), value_peft_config=lora()),
    )
    trainer.save_model(str(tmp_path / "saved"))
    again = load_policy(str(tmp_path / "saved"))
    torch.testing.assert_close(again(IDS).logits, trainer.policy(IDS).logits, atol=1e-4, rtol=0)
    value = load_scorer(str(tmp_path / "saved" / "value"))
    scores = [token_scores(x, IDS, IDS >= 0) for x in (value, trainer.pair.value)]
    torch.testing.assert_close(*scores, atol=1e-4, rtol=0)


# catches: a merged model whose weights stay frozen as peft left them: an error for a policy, and a
# value model that nobody trains
def test_a_model_from_an_adapters_folder_learns(ppo, stages, saved):
    base = saved(llama())
    sft = stages.folder(stages("sft", base, peft_config=lora()))
    judge = stages.folder(stages("reward", base, peft_config=lora()))
    trainer = ppo(model=sft, parts=dict(value_model=judge))
    before = weights(trainer)
    trainer.step()
    assert len(unlike(before, weights(trainer))) == len(before)
    from_sft = stages("reward", sft)  # a language model's adapter, and a new head
    with pytest.raises(ValueError, match="no reward head"):
        load_judge(sft)
    body = from_sft.model.base_model.state_dict()
    merged = load_policy(sft).base_model.state_dict()
    assert not unlike(body, merged) and all(p.requires_grad for p in from_sft.model.parameters())


# catches: an adapter's folder that its own next stage cannot load, since rows had grown
@pytest.mark.parametrize("kind", ["sft", "reward"])
def test_rows_that_grew_for_the_pad_token_are_loaded(stages, saved, kind):
    trainer = stages(kind, saved(llama(False, rows=11)), peft_config=lora())
    again = (load_policy if kind == "sft" else load_scorer)(stages.folder(trainer))
    torch.testing.assert_close(again(IDS).logits, trainer.model(IDS).logits, atol=1e-4, rtol=0)
    assert again.get_input_embeddings().num_embeddings == 12


def test_a_load_that_fails_says_why(saved, tmp_path):
    get_peft_model(load_policy(saved(llama())), lora(r=4)).save_pretrained(tmp_path / "adapter")
    config = tmp_path / "adapter" / "adapter_config.json"
    config.write_text(config.read_text().replace('"r": 4', '"r": 2'))
    with pytest.raises(ValueError, match="size mismatch for .*lora_A"):
        load_policy(str(tmp_path / "adapter"))


@pytest.mark.parametrize("kind", ["sft", "reward"])
def test_the_seed_decides_how_an_adapter_starts(stages, kind):
    starts = []
    for seed, noise in ((0, 1), (0, 2), (1, 1)):
        torch.manual_seed(noise)
        model = stages(kind, llama(), seed=seed, peft_config=lora()).model
        starts.append({k: p.detach().clone() for k, p in model.named_parameters() if "lora_A" in k})
    assert not unlike(*starts[:2]) and unlike(starts[0], starts[2])


# ---- The reference ----


# catches: a KL of 1.7 before any step, a reference that moves with a bias that learns
@pytest.mark.parametrize(
    "kind, config, off",
    [
        (LoraConfig, dict(r=2), True),
        (LoraConfig, dict(r=2, init_lora_weights=False), False),
        (LoraConfig, dict(r=2, bias="all"), False),
        (LoHaConfig, dict(r=2), True),
        (LoHaConfig, dict(r=2, init_weights=False), False),
        (VeraConfig, dict(r=2), True),
        (FourierFTConfig, dict(n_frequency=8), False),
    ],
)
@pytest.mark.parametrize("brought", [True, False])
def test_the_reference_is_the_policy_as_it_starts(ppo, letters, kind, config, off, brought):
    config = kind(target_modules=["query_key_value"], **config)
    policy, parts = begin(letters), dict(peft_config=config)
    if brought:
        policy, parts = get_peft_model(policy, config), {}
    trainer = ppo(model=policy, parts=parts, learning_rate=5e-2)
    r = trainer.rollout(PROMPTS[:8])
    start = r.ref_logprobs
    torch.testing.assert_close(start, r.logprobs, atol=1e-6, rtol=0)
    assert (trainer.ref_model is None) == off
    named = "the policy, its adapter off" if off else "a frozen copy of the policy as it starts"
    assert f"reference: {named}" in trainer.describe()
    trainer.step(PROMPTS[:8])
    rows = r.prompt_ids, r.prompt_mask, r.response_ids, r.mask
    now = trainer.reference(lambda model: response_logprobs(model, *rows).logprobs)
    torch.testing.assert_close(now, start, atol=1e-6, rtol=0)
    assert (response_logprobs(trainer.policy, *rows).logprobs - start).abs().max() > 1e-3


# ---- The value model, saved ----


# catches: a critic that is lost with the run, a folder that starts another critic than it saved
@pytest.mark.parametrize("kind", ["whole", "head", "adapter"])
def test_a_saved_value_model_starts_another_run(ppo, saved, letters, tmp_path, kind):
    base, parts = saved(begin(letters)), {}
    if kind == "adapter":
        parts = dict(value_peft_config=LoraConfig(r=2, target_modules=["query_key_value"]))
    how = dict(share_value_trunk=kind == "head")
    trainer = ppo.trained(
        model=load_policy(base), parts=parts, save_value_model=True, learning_rate=1e-2, **how
    )
    trainer.save_model(str(tmp_path / "saved"))
    r = trainer.rollout(PROMPTS[:8])
    given = dict(value_model=str(tmp_path / "saved" / "value"))
    again = ppo(model=str(tmp_path / "saved"), parts=given, **how)
    with torch.no_grad():
        values, wanted = again.pair.values(r), trainer.pair.values(r)
    assert wanted.abs().max() > 1e-3
    if kind == "adapter":  # merged
        torch.testing.assert_close(values, wanted, atol=1e-5, rtol=0)
    else:
        assert torch.equal(values, wanted)
        assert not unlike(weights(trainer), weights(again))


# catches: the policy's folder given for value/ beside it: a random critic, another one each time
def test_a_language_models_folder_is_a_value_model_with_a_new_head(ppo, saved, caplog):
    folder, heads = saved(llama()), []
    for noise in (1, 2):
        torch.manual_seed(noise)
        heads.append(ppo(parts=dict(value_model=folder)).pair.value.score.weight.detach().clone())
    torch.manual_seed(0)
    assert torch.equal(heads[0], torch.empty(1, 16).normal_(std=17**-0.5))
    assert torch.equal(*heads) and f"{folder} has no head of a reward or value model" in caplog.text


def test_a_value_model_is_saved_on_request_alone(ppo, tmp_path, letters):
    ppo().save_model(str(tmp_path / "saved"))
    assert not (tmp_path / "saved" / "value").exists()
    with pytest.raises(ValueError, match="or give the folder of a value head"):
        ppo(share_value_trunk=True, parts=dict(value_model=scorer_from(begin(letters))))
    with pytest.raises(FileNotFoundError, match="has no model.safetensors: give the folder that a"):
        ppo(share_value_trunk=True, parts=dict(value_model=str(tmp_path)))


# ---- Preflight: after one update ----


def weights_move(trainer) -> str:
    (rung,) = (rung for rung in LADDER if rung.name == "learning: weights move")
    found = rung.measure(Subject(trainer))
    assert not found.passed
    return found.measured


# catches: what learns and is read by no forward pass, a head that an adapter froze, a frozen
# weight that something else moves
def test_preflight_names_what_does_not_learn_and_what_should_not(ppo, letters):
    policy, frozen = begin(letters), scorer_from(begin(letters))
    policy.unread = nn.Linear(2, 2)
    assert "2 tensors learn and had no gradient, such as policy.unread.weight" in weights_move(
        ppo(model=policy)
    )
    frozen.score.requires_grad_(False)
    trainer = ppo(parts=dict(value_model=frozen))
    assert "the value model's head does not learn" in weights_move(trainer)
    before = weights_of(trainer.pair)
    with torch.no_grad():
        frozen.score.weight.add_(1.0)
    strayed, _ = find_misplaced(trainer.pair, changes(before, trainer.pair), before)
    assert strayed == "1 frozen tensors moved, such as value.score.weight"
