"""Faults that a run would not have shown: it went on, or ended well, and what it left was wrong."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from datasets import Dataset
from ppo_fixtures import SIZES, likes_c
from small_models import IDS, WIDTHS, letter_tokenizer, small_model
from tokenizers import processors
from transformers import (
    Adafactor,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GPT2Config,
    TrainerCallback,
)

from rlhf_nb.base.encoding import encode_prompts
from rlhf_nb.cli.arguments import PPOModelArguments
from rlhf_nb.cli.ppo_models import scorers
from rlhf_nb.models import scorer_from, sequence_scores
from rlhf_nb.reward import RewardConfig, RewardTrainer, encode_pairs
from rlhf_nb.scoring import score_texts
from rlhf_nb.sft import SFTConfig, SFTTrainer, encode_rows
from rlhf_nb.trainer import PPOConfig
from rlhf_nb.training.completions import complete
from rlhf_nb.training.model_loading import tiny_policy

PAIRS = dict(prompt=["ab"] * 4, chosen=["c"] * 4, rejected=["d"] * 4)


# ---- Runs that diverge ----


def sft(letters, small_args, **changes):
    policy = tiny_policy(letters, 0, **SIZES)
    rows = Dataset.from_dict(dict(prompt=["ab"] * 4, completion=["c"] * 4))
    args = small_args(SFTConfig, max_steps=3, **changes)
    return SFTTrainer(policy, args, rows, processing_class=letters)


def reward(letters, small_args, **changes):
    scorer = scorer_from(tiny_policy(letters, 0, **SIZES), 0)
    args = small_args(RewardConfig, max_steps=3, **changes)
    return RewardTrainer(scorer, args, Dataset.from_dict(PAIRS), processing_class=letters)


def refused(trainer, what: str) -> None:
    "It ends with an error that names the step; the weights are what they were."
    before = copy.deepcopy(trainer.model.state_dict())
    with pytest.raises(FloatingPointError, match=rf"step 1: the {what}.*was not taken"):
        trainer.train()
    assert all(torch.equal(x, before[name]) for name, x in trainer.model.state_dict().items())
    assert not any(p.grad is not None and p.grad.any() for p in trainer.model.parameters())


# catches: a loss that is not a number and is logged as 0.0; a run that saves NaN and ends well
def test_a_coefficient_that_is_not_a_number_ends_reward_training(letters, small_args):
    trainer = reward(letters, small_args, center_rewards_coefficient=0.1)
    trainer.args.center_rewards_coefficient = math.nan
    refused(trainer, "loss is nan")


# catches: a check of the loss alone, which is finite here; one that only looks at the first
# micro-batch
@pytest.mark.parametrize("make", [sft, reward])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_gradient_that_is_not_finite_ends_the_run(letters, small_args, make, accumulate):
    changes = dict(per_device_train_batch_size=2, gradient_accumulation_steps=accumulate)
    trainer = make(letters, small_args, **changes)
    weight = next(p for p in trainer.model.parameters() if p.requires_grad)
    weight.register_hook(lambda grad: grad * 1e30 * 1e30)
    refused(trainer, "gradient has norm (inf|nan)")


# catches: a loss that is not finite and changes weights; a gradient that is left behind, and spoils
# the next step of someone who steps by hand
def test_what_ppo_refuses_leaves_no_gradient(ppo):
    trainer = ppo(likes_c)
    r = trainer.advantages(trainer.score(trainer.rollout(["ab", "c", "de", "f"] * 2)))
    before = copy.deepcopy(trainer.model.state_dict())
    spoilt = r.with_(advantages=r.advantages.masked_fill(r.mask, math.nan))
    with pytest.raises(FloatingPointError, match="update 0, micro-batch 1 of 2 is nan: nothing"):
        trainer.update(spoilt)
    assert all(torch.equal(x, before[name]) for name, x in trainer.model.state_dict().items())
    assert math.isfinite(trainer.update(r)["policy/grad_norm"])


# ---- Several end tokens ----


def chat_policy(letters):
    "As chat models: two tokens end a turn, one of them the tokenizer's EOS."
    policy = tiny_policy(letters, 0, **SIZES)
    policy.generation_config.eos_token_id = [5, letters.eos_token_id]
    return policy


# catches: sampling that goes on after the second end token; a saved model that has lost it
def test_all_end_tokens_of_a_chat_model_end_a_response(ppo, letters, tmp_path):
    trainer = ppo(likes_c, model=chat_policy(letters))
    assert trainer.sampling_settings.stop_ids == (letters.eos_token_id, 5)
    r = trainer.rollout(["ab", "c", "de", "f"] * 8)
    ends = r.response_ids.gather(1, r.mask.sum(1, keepdim=True) - 1)[:, 0]
    assert {1, 5} <= set(ends[r.stopped].tolist())
    inside = r.mask.clone().scatter(1, r.mask.sum(1, keepdim=True) - 1, False)
    assert not torch.isin(r.response_ids[inside], torch.tensor([1, 5])).any()
    trainer.save_model(str(tmp_path))
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.generation_config.eos_token_id == [1, 5]


# catches: a class's own default id (2 in Llama's config) taken for an end token of this tokenizer
def test_an_end_token_of_another_tokenizer_is_none(ppo, letters):
    for other in (7, [7, 8], None):
        policy = tiny_policy(letters, 0, **SIZES)
        policy.generation_config.eos_token_id = other
        assert ppo(likes_c, model=policy).sampling_settings.stop_ids == (letters.eos_token_id,)


def test_stop_token_id_may_be_several(ppo, letters):
    assert ppo(likes_c, stop_token_id=[5, 6]).sampling_settings.stop_ids == (5, 6)
    chat = ppo(likes_c, stop_token_id=5, model=chat_policy(letters))
    assert chat.sampling_settings.stop_ids == (5,)
    for bad in ([5, 12], [-1], []):
        with pytest.raises(ValueError, match="stop_token_id is"):
            ppo(likes_c, stop_token_id=bad)


# ---- Positions ----


# catches: the policy's positions checked alone: GPT-2 raises IndexError in the middle of a run,
# GPT-NeoX says nothing
@pytest.mark.parametrize("what", ["reward model", "value model"])
@pytest.mark.parametrize("family", ["neox", "gpt2"])
def test_every_model_that_reads_has_the_positions(ppo, letters, what, family):
    short = tiny_policy(letters, 0, **SIZES | dict(max_position_embeddings=7))
    if family == "gpt2":
        sizes = dict(vocab_size=12, n_embd=16, n_layer=1, n_head=2, n_positions=7)
        short = AutoModelForCausalLM.from_config(GPT2Config(**sizes, pad_token_id=0))
    model = scorer_from(short, 0)
    given = dict(reward=model) if what == "reward model" else dict(parts=dict(value_model=model))
    with pytest.raises(ValueError, match=f"more than the 7 positions of the {what}"):
        ppo(**given)


# ---- A token in front of every text ----


def with_bos(letters):
    "As Llama's tokenizer: BOS in front of every text. Here the letter j, id 11, plays the part."
    tokenizer = copy.deepcopy(letters)
    tokenizer.bos_token = "j"
    front = processors.TemplateProcessing(single="j $A", special_tokens=[("j", 11)])
    tokenizer.backend_tokenizer.post_processor = front
    return tokenizer


# catches: prompts without the token that their model has always seen first, in one of the trainers
# or in the evaluation; the same token twice, where a text brings it; one put behind the prompt
def test_prompts_begin_as_their_tokenizer_says(ppo, letters, small_args):
    words = with_bos(letters)
    assert encode_prompts(["ab", "jab", ""], words) == [[11, 2, 3], [11, 2, 3], [11]]
    assert encode_prompts(["ab", ""], letters) == [[2, 3], []]
    without = with_bos(letters)
    without.add_bos_token = False
    assert encode_prompts(["ab"], without) == [[2, 3]]
    r = ppo(likes_c, parts=dict(processing_class=words)).rollout(["ab", "jc", "de", "f"])
    rows = [ids[keep].tolist() for ids, keep in zip(r.prompt_ids, r.prompt_mask)]
    assert rows == [[11, 2, 3], [11, 4], [11, 5, 6], [11, 7]]
    rows = Dataset.from_dict(dict(prompt=["ab"], completion=["c"]))
    assert encode_rows(rows, words)["input_ids"] == [[11, 2, 3, 4, 1]]
    explicit, implicit = (
        encode_pairs(Dataset.from_dict(columns), words)[0]
        for columns in (
            dict(prompt=["ab"], chosen=["c"], rejected=["d"]),
            dict(chosen=["abc"], rejected=["abd"]),
        )
    )
    assert explicit["chosen_ids"] == implicit["chosen_ids"] == [11, 2, 3, 4, 1]
    assert explicit["rejected_ids"] == implicit["rejected_ids"] == [11, 2, 3, 5, 1]


# catches: a prompt that max_length cuts on its left, and its BOS with it
@pytest.mark.parametrize("most, left", [(3, []), (4, [3]), (5, [2, 3]), (6, [5, 2, 3])])
def test_a_prompt_that_is_cut_keeps_its_bos(letters, most, left):
    words = with_bos(letters)
    texts = dict(prompt=["dab"], completion=["c"], chosen=["c"], rejected=["e"])
    data, wanted = Dataset.from_dict(texts), [11, *left]
    assert encode_rows(data, words, most)["input_ids"] == [[*wanted, 4, 1]]
    pair = encode_pairs(data, words, most)[0]
    assert (pair["chosen_ids"], pair["rejected_ids"]) == ([*wanted, 4, 1], [*wanted, 6, 1])
    whole = dict(chosen=["dabc"], rejected=["dabe"])
    assert encode_pairs(Dataset.from_dict(whole), words, most)[0] == pair
    scorer = scorer_from(tiny_policy(letters, 0, **SIZES), 0)
    ids = torch.tensor([[*wanted, 4, 1]])
    scores = score_texts(scorer, words, ["dab"], ["c"], max_length=most)
    torch.testing.assert_close(scores, sequence_scores(scorer, ids, torch.ones_like(ids)))


# catches: an evaluation, or a reward model with a tokenizer of its own, that reads something else
# than what was trained
def test_what_is_read_at_the_end_begins_alike(letters, monkeypatch):
    words, seen = with_bos(letters), []
    policy = tiny_policy(letters, 0, **SIZES)
    policy.register_forward_pre_hook(
        lambda model, args, given: seen.append(given["input_ids"][0].tolist()), with_kwargs=True
    )
    complete(policy, words, ["ab"], response_length=1)
    assert seen[-1] == [11, 2, 3]  # before it, the model was tried once with and without a cache
    scorer = scorer_from(tiny_policy(letters, 0, **SIZES), 0)
    ids = torch.tensor([[11, 2, 3, 4, 1]])
    wanted = sequence_scores(scorer, ids, torch.ones_like(ids))
    torch.testing.assert_close(score_texts(scorer, words, ["ab"], ["c"]), wanted)


# ---- The wrong judge ----


def saved(model, tokenizer, folder) -> str:
    "Its folder, with the tokenizer beside it if there is one."
    model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return str(folder)


# catches: a policy that is trained against a head of random numbers, from Python or from the
# command line
def test_a_language_model_is_no_judge(ppo, letters, tmp_path):
    policy = tiny_policy(letters, 0, **SIZES)
    folder = saved(policy, letters, tmp_path / "sft")
    with pytest.raises(ValueError, match="has no reward head.*rlhf-nb reward"):
        ppo(folder)
    args = PPOConfig(str(tmp_path / "run"), use_cpu=True, reward_model_path=folder)
    with pytest.raises(ValueError, match="has no reward head"):
        scorers(PPOModelArguments(), args)
    assert ppo(saved(scorer_from(policy, 3), letters, tmp_path / "reward")).reward_model is not None


# catches: a reward model that reads the policy's ids as other letters; one that is refused though
# its tokenizer is the same, or is not there, or has its own pad token alone
def test_a_judge_of_another_tokenizer_is_refused(ppo, letters, tmp_path):
    scorer = scorer_from(tiny_policy(letters, 0, **SIZES), 3)
    for i, words in enumerate(("jihgfedcba", "klmnopqrst")):
        folder = saved(scorer, letter_tokenizer(words), tmp_path / str(i))
        with pytest.raises(ValueError, match="tokenizer of its own.*reward_processing_class"):
            ppo(folder)
        reader = AutoTokenizer.from_pretrained(folder)
        ppo(folder, parts=dict(reward_processing_class=reader)).rollout(["ab"])
    padded = copy.deepcopy(letters)
    padded.pad_token = "j"
    for i, tokenizer in enumerate((letters, None, padded)):
        ppo(saved(scorer, tokenizer, tmp_path / f"fine{i}"))


# ---- Runs that do nothing ----


# catches: a run that ends well and has learned nothing, or goes on without what was asked for
@pytest.mark.parametrize(
    "settings, complaint",
    [
        (dict(stop_token="eos", stop_token_id=5), "stop_token is 'eos': set one of stop_token, st"),
        (dict(missing_eos_penalty=1.0, non_eos_penalty=True), "non_eos_penalty is True"),
        (dict(stop_token_id=12), "stop_token_id is 12"),
        (dict(torch_compile=True), "torch_compile is True: every batch .* Leave it out"),
        (dict(value_warmup_updates=3), "value_warmup_updates is 3 and the run has 3 updates"),
        (dict(kl_target=2.0), "kl_target is 2.0: it needs kl_controller='adaptive'"),
        (dict(stop_strings=[""]), "stop_strings is "),
        (dict(stop_strings=["a", ""]), "stop_strings is "),
        (
            dict(response_length=1, per_device_train_batch_size=1, gradient_accumulation_steps=1),
            "an update is one token",
        ),
    ],
)
def test_a_run_that_would_do_nothing_is_refused(ppo, settings, complaint):
    with pytest.raises(ValueError, match=complaint):
        ppo(likes_c, **settings)


def test_a_frozen_policy_is_refused(ppo, letters):
    policy = tiny_policy(letters, 0, **SIZES).requires_grad_(False)
    with pytest.raises(ValueError, match="none of the policy's weights learns"):
        ppo(likes_c, model=policy)


def test_what_is_little_work_is_taken(ppo):
    ppo(likes_c, value_warmup_updates=2, kl_controller="adaptive", kl_target=2.0, max_grad_norm=0.0)


# ---- Runs that depend on what should have no say ----


# catches: a router's loss added once for each micro-batch of a step
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_a_router_learns_alike_however_a_step_is_split(letters, small_args, family):
    seen, rows = [], Dataset.from_dict(dict(prompt=["ab"] * 8, completion=["cde"] * 8))
    experts = dict(num_local_experts=4, num_experts_per_tok=2, num_key_value_heads=2, head_dim=8)
    for size in (8, 2):
        model = small_model(family, output_router_logits=True, router_aux_loss_coef=0.5, **experts)
        sizes = dict(per_device_train_batch_size=size, gradient_accumulation_steps=8 // size)
        args = small_args(SFTConfig, max_steps=1, learning_rate=0.0, max_grad_norm=1e9, **sizes)
        trainer = SFTTrainer(model, args, rows, processing_class=letters)
        trainer.train()
        seen.append(trainer.state.log_history[0])
    for name in ("loss", "grad_norm"):
        assert seen[0][name] == pytest.approx(seen[1][name], rel=1e-5)


# catches: experts that nothing balances, where the settings say that a loss does
def test_a_router_without_its_loss_is_named(letters, small_args, caplog):
    sizes = dict(n_routed_experts=4, num_experts_per_tok=2, num_key_value_heads=2, head_dim=8)
    sizes |= dict(moe_intermediate_size=8, first_k_dense_replace=0, output_router_logits=True)
    rows = Dataset.from_dict(dict(prompt=["ab"] * 8, completion=["cde"] * 8))
    args, model = small_args(SFTConfig, max_steps=1), small_model("glm4_moe", **sizes)
    SFTTrainer(model, args, rows, processing_class=letters).train()
    assert "Glm4MoeForCausalLM returns no aux_loss: nothing balances its experts" in caplog.text


# catches: an evaluation that draws from the generator of dropout and of the order of the rows
@pytest.mark.parametrize("make", [sft, reward])
def test_an_evaluation_changes_no_run(letters, small_args, make):
    class Looks(TrainerCallback):
        def on_step_end(self, args, state, control, **given):
            control.should_evaluate = True

    ends = []
    for looks in ([], [Looks()]):
        trainer = make(letters, small_args, per_device_train_batch_size=1)
        trainer.eval_dataset = trainer.train_dataset
        for callback in looks:
            trainer.add_callback(callback)
        trainer.train()
        ends.append(torch.get_rng_state())
    assert any("eval_loss" in log for log in trainer.state.log_history)
    assert torch.equal(*ends)


# catches: a rate that rises again, or goes on falling, beyond the updates it was planned for
@pytest.mark.parametrize("kind", ["cosine", "inverse_sqrt", "cosine_with_min_lr"])
def test_a_schedule_stays_at_its_end(ppo, kind, caplog):
    more = dict(lr_scheduler_kwargs=dict(min_lr=1e-4)) if kind == "cosine_with_min_lr" else {}
    trainer, rates = ppo(total_episodes=16, lr_scheduler_type=kind, **more), []
    for _ in range(4):
        trainer.step()
        rates.append(trainer.learning_rate())
    assert rates[0] > rates[1] == rates[2] == rates[3]
    assert caplog.text.count(f"stays at {rates[1]:.3g}") == 1
    own = ppo(total_episodes=8)
    own.optimizer = torch.optim.SGD(own.model.parameters(), lr=1.0)
    own.lr_scheduler = torch.optim.lr_scheduler.ExponentialLR(own.optimizer, 0.5)
    for _ in range(3):
        own.step()
    assert own.learning_rate() == 0.125


# ---- Models and settings that no trainer takes ----

ENCODERS = dict(
    distilbert=dict(dim=16, hidden_dim=32, n_layers=1, n_heads=2),
    longformer=WIDTHS | dict(attention_window=4),
    modernbert=WIDTHS | dict(cls_token_id=1, sep_token_id=1),
    **{"deberta-v2": WIDTHS, "albert": WIDTHS},
    t5=dict(d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0),
)


# catches: an AttributeError for is_decoder, an encoder that trains as a reward model
@pytest.mark.parametrize("family", ENCODERS)
def test_an_encoder_is_refused_at_every_door(ppo, letters, small_args, family):
    config = AutoConfig.for_model(family, **IDS | dict(bos_token_id=1) | ENCODERS[family])
    writes = (AutoModelForSeq2SeqLM if family == "t5" else AutoModelForMaskedLM).from_config(config)
    config.num_labels = 1
    scorer = AutoModelForSequenceClassification.from_config(config)
    args, pairs = small_args(RewardConfig), Dataset.from_dict(PAIRS)
    why = "reads? .*both ways|encoder-decoder|no reward model and no value model"
    for door in (
        lambda: ppo(likes_c, model=writes),
        lambda: ppo(scorer),
        lambda: ppo(likes_c, parts=dict(value_model=scorer)),
        lambda: RewardTrainer(writes, args, pairs, processing_class=letters),
        lambda: RewardTrainer(scorer, args, pairs, processing_class=letters),
        lambda: score_texts(scorer, letters, ["ab"], ["c"]),
        lambda: score_texts(writes, letters, ["ab"], ["c"]),
    ):
        with pytest.raises(ValueError, match=why):
            door()


def test_three_labels_are_no_score(letters):
    config = copy.deepcopy(tiny_policy(letters, 0, **SIZES).config)
    config.num_labels = 3
    scorer = AutoModelForSequenceClassification.from_config(config)
    with pytest.raises(ValueError, match="num_labels=3: load it with num_labels=1"):
        score_texts(scorer, letters, ["ab"], ["c"])


# catches: metrics of other columns than the labels; a failure in torch's or transformers' own code
def test_settings_without_a_label_or_a_rate_are_named(letters, small_args):
    for names in (["label"], ["input_ids"], []):
        with pytest.raises(ValueError, match="label_names is .*: give None"):
            sft(letters, small_args, label_names=names)
    trainer = sft(letters, small_args)
    trainer.optimizer = Adafactor(trainer.model.parameters(), lr=None)
    with pytest.raises(ValueError, match="the optimizer's lr is None"):
        trainer.train()
