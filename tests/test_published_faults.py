"""The twenty proven faults of the published PPO trainer, one number each: none of them is here.

At the end the faults that are a few lines are put back, one at a time: the checks refuse them.
"""

import copy
import inspect
import itertools
import math
import sys
import textwrap
import time
from functools import partial
from pathlib import Path

import forks
import ppo_fixtures
import pytest
import torch
from datasets import Dataset
from pairs import pairwise
from ppo_fixtures import (
    PROMPTS,
    SIZES,
    STOP,
    Events,
    likes_c,
    logs,
    loss_now,
    rollouts,
    scored,
    unlike,
    untimed,
    weights,
)
from small_models import small_config, small_model
from torch.nn import Linear
from transformers import AutoModelForCausalLM, DataCollatorWithPadding, TrainerCallback

import rlhf_nb.ppo
import rlhf_nb.rollout
import rlhf_nb.trainer
from rlhf_nb.fast_logprobs import response_logprobs
from rlhf_nb.forward import PolicyAndValue
from rlhf_nb.models import response_values, scorer_from
from rlhf_nb.rollout import Rollout, Sample, sample
from rlhf_nb.sampling import Sampling
from rlhf_nb.trainer import PPOTrainer
from rlhf_nb.training.model_loading import tiny_policy


def nothing(prompts, responses, **columns):
    return [0.0] * len(responses)


def gradient(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten().double() for p in model.parameters() if p.grad is not None])


def assert_alike(a: dict, b: dict, within: float) -> None:
    a, b = untimed(a), untimed(b)
    assert a.keys() == b.keys()
    for name in a:
        assert a[name] == pytest.approx(b[name], rel=within, abs=within), name


# ---- 1: optimizer steps ----


def check_steps(ppo, steps, rows, accumulation, mini_batches, epochs):
    steps.clear()
    trainer = ppo(
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=accumulation,
        num_mini_batches=mini_batches,
        num_ppo_epochs=epochs,
        total_episodes=rows * accumulation,
        response_length=3,
    )
    changed, last = [], weights(trainer)

    class Watch(TrainerCallback):
        def on_optimizer_step(self, args, state, control, **_):
            nonlocal last
            now = weights(trainer)
            changed.append({name.split(".")[0] for name in unlike(last, now)})
            last = now

    trainer.add_callback(Watch())
    trainer.train()
    assert len(steps) == epochs * mini_batches
    assert changed == [{"policy", "value"}] * len(steps)
    assert trainer.state.global_step == 1


# rows of a micro-batch, micro-batches, mini-batches, epochs
SIZES_OF_AN_UPDATE = pairwise(
    (1, 2, 3),
    (1, 2, 4),
    (1, 2, 3, 4),
    (1, 2),
    allowed=lambda rows, accumulation, parts, epochs: rows * accumulation % parts == 0,
)


# catches: mini-batches whose gradients are added up and stepped once, a step that is counted and
# not taken (or taken with an empty gradient)
@pytest.mark.parametrize("sizes", SIZES_OF_AN_UPDATE, ids=str)
def test_fault_01_mini_batches_step(ppo, steps, sizes):
    check_steps(ppo, steps, *sizes)


# ---- 2: metrics and accumulation ----


# catches: losses, entropy, clipfrac, KL, ratio or gradient norm that grow or shrink with the number
# of micro-batches; fault 18: a loss divided by the tokens of the micro-batch, by their number, or by
# both
def test_fault_02_metrics_do_not_scale_with_accumulation(ppo):
    found = []
    for rows, accumulation in ((8, 1), (4, 2), (2, 4), (1, 8)):
        trainer = ppo.trained(
            per_device_train_batch_size=rows,
            gradient_accumulation_steps=accumulation,
            num_mini_batches=2,
            num_ppo_epochs=2,
            total_episodes=8,
            optim="sgd",
            learning_rate=0.05,
            entropy_coef=0.1,
            cliprange=0.01,
        )
        found.append((logs(trainer)[0], weights(trainer)))
        (metrics, learned), (other, same) = found[0], found[-1]
        assert_alike(metrics, other, 1e-5)
        for name, x in learned.items():
            torch.testing.assert_close(same[name], x, atol=1e-6, rtol=0)
        assert metrics["policy/clipfrac_avg"] > 0 and metrics["policy/approxkl_avg"] > 0
        assert metrics["policy/grad_norm"] > 0.1


# ---- 3: the last batch, an evaluation, sizes ----


# catches: chunk(), which makes fewer parts than it was asked for; a flag for the end of the data
# that makes a step too many or too few (a last batch without a row for each: test_your_own.py)
@pytest.mark.parametrize(
    "prompts, drop_last, per_epoch", [(20, True, 2), (13, False, 2), (12, False, 2), (24, True, 3)]
)
def test_fault_03_the_last_batch_is_like_the_others(ppo, steps, prompts, drop_last, per_epoch):
    trainer = ppo.trained(
        num_mini_batches=4,
        num_ppo_epochs=1,
        max_steps=per_epoch + 1,
        data=Dataset.from_dict(dict(prompt=PROMPTS[:prompts])),
        dataloader_drop_last=drop_last,
        save_rollouts=True,
    )
    sizes = [len(r) for r in rollouts(trainer)]
    last = 8 if drop_last else prompts % 8
    assert len(steps) == 4 * (per_epoch + 1) and sizes == [8] * (per_epoch - 1) + [last, 8]


# catches: an evaluation that leaves its mark: on the random state, on the accumulation, on the mode
# of the model
def test_fault_03_an_evaluation_of_one_batch_changes_nothing(ppo, steps):
    found = []
    for settings in ({}, dict(eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=5)):
        steps.clear()
        trainer = ppo.trained(num_mini_batches=2, total_episodes=16, **settings)
        assert len(steps) == 2 * 2 * 2
        found.append((weights(trainer), [untimed(log) for log in logs(trainer)]))
    assert not unlike(found[0][0], found[1][0]) and found[0][1] == found[1][1]


# catches: gradients that are no longer synchronised after someone has read a prepared loader to its
# end
def test_fault_03_a_loader_that_was_read_to_its_end_changes_no_count(ppo, steps):
    class Reads(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            assert len(list(trainer.get_eval_dataloader())) == 1

    how = dict(per_device_eval_batch_size=5, num_mini_batches=2, total_episodes=16)
    trainer = ppo(parts=dict(callbacks=[Reads()]), **how)
    trainer.train()
    assert len(steps) == 2 * 2 * 2 and all(log["policy/grad_norm"] > 0 for log in logs(trainer))


@pytest.mark.parametrize("mini_batches", [3, 5, 16])
def test_fault_03_sizes_that_do_not_divide_are_refused(ppo, mini_batches):
    with pytest.raises(ValueError, match=f"num_mini_batches is {mini_batches}: .*8 rows do not"):
        ppo(num_mini_batches=mini_batches)


# ---- 4: gradient checkpointing ----


def forwards(trainer: PPOTrainer) -> dict[str, int]:
    "Counts, from now on, the forward passes with gradient of each model's first layer."
    seen = dict(policy=0, value=0)
    for name in seen:

        def count(module, args, name=name):
            seen[name] += torch.is_grad_enabled()

        getattr(trainer.model, name).base_model.layers[0].mlp.register_forward_pre_hook(count)
    return seen


# catches: checkpointing that is asked for and never reaches the models, or one of the two, or that
# changes the gradient
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("how", ["gradient_checkpointing", "activation_checkpointing"])
def test_fault_04_checkpointing_recomputes_in_both_models(ppo, how):
    found, r = [], None
    for on in (False, True):
        trainer = ppo(total_episodes=8, num_ppo_epochs=1, learning_rate=0.0, **{how: on})
        seen = forwards(trainer)
        trainer.train()
        found.append(dict(seen))
        r = r or scored(trainer)
        loss_now(trainer, r)[0].backward()
        found.append(gradient(trainer.model))
    once, plain, twice, same = found
    assert once == dict(policy=2, value=2) and twice == dict(policy=4, value=4)
    assert (plain - same).norm() < 1e-6 * plain.norm()


# catches: a sampler without its cache: under checkpointing a model in training mode drops it, and
# each token is drawn from the token before it alone
def test_fault_04_checkpointing_does_not_change_what_is_sampled(ppo):
    found = []
    for on in (False, True):
        trainer = ppo.trained(
            learning_rate=0.0, total_episodes=16, activation_checkpointing=on, save_rollouts=True
        )
        found.append([r.response_ids.tolist() for r in rollouts(trainer)])
    assert found[0] == found[1]


# catches: a setting that takes effect under train() and not for someone who steps by hand
def test_fault_04_checkpointing_by_hand(ppo):
    trainer = ppo(num_ppo_epochs=1, activation_checkpointing=True)
    seen = forwards(trainer)
    trainer.step(PROMPTS[:8])
    assert seen == dict(policy=4, value=4)


# ---- 5: precision ----

_small = dict(num_hidden_layers=2, max_position_embeddings=16)
_drops = dict(resid_pdrop=0.3, embd_pdrop=0.3, attn_pdrop=0.3)
MODELS = dict(
    neox=small_config("gpt_neox", **_small, initializer_range=0.3),
    llama=small_config("llama", **_small, initializer_range=0.3),
    gpt2_with_dropout=small_config("gpt2", **_small, **_drops),
    neox_with_dropout=small_config("gpt_neox", **_small, hidden_dropout=0.3, attention_dropout=0.3),
    llama_with_dropout=small_config("llama", **_small, attention_dropout=0.3),
)


def check_ratio_is_one(ppo, name="neox", bf16=False, **settings):
    "Learning rate 0: every token of every epoch has the probability that it was sampled with."
    found, measure = [], rlhf_nb.ppo.policy_diagnostics
    updates = 1 if bf16 else 2  # after an update, what it left behind has its turn

    def watch(logprobs, old, advantages, mask, *more):
        sums = measure(logprobs, old, advantages, mask, *more)
        found.append(
            {key: x.item() for key, x in sums.items()}
            | dict(worst=(logprobs.double() - old.double()).exp().sub(1)[mask].abs().max().item())
        )
        return sums

    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rlhf_nb.ppo, "policy_diagnostics", watch)
        trainer = ppo.trained(
            model=AutoModelForCausalLM.from_config(copy.deepcopy(MODELS[name])),
            learning_rate=0.0,
            bf16=bf16,
            temperature=0.7,
            num_mini_batches=2,
            local_rollout_forward_batch_size=3,
            num_ppo_epochs=2,
            total_episodes=8 * updates,
            **settings,
        )
    assert len(found) == updates * 2 * 2
    for seen in found:
        assert seen["approxkl"] / seen["tokens"] < (1e-8 if bf16 else 1e-12)
        assert seen["clipfrac"] == 0
        if not bf16:
            assert seen["worst"] <= 1e-6 and abs(seen["ratio"] / seen["tokens"] - 1) <= 1e-6
    for log in logs(trainer):
        assert abs(log["objective/kl"]) < (1e-2 if bf16 else 1e-5)
        assert abs(log["val/ratio"] - 1) <= (1e-4 if bf16 else 1e-6)
        assert log["policy/approxkl_avg"] < 1e-8
        assert log["policy/clipfrac_avg"] == log["val/clipfrac_avg"] == 0
        assert log["val/ratio_var"] < 1e-8


# catches: temperature in one place and not in the other, dropout, a sampler's own log-probs, a
# reference of another precision, another padding
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_fault_05_learning_rate_zero_changes_nothing(ppo, name, bf16):
    check_ratio_is_one(ppo, name, bf16)


# catches: a first rollout by hand in float32 and an update in bfloat16, or log-probs of another
# precision than the update's
@pytest.mark.parametrize(
    "settings", [{}, dict(bootstrap_truncated=True), dict(kl_estimator="full")]
)
def test_fault_05_by_hand_under_bf16_the_ratio_starts_at_one(ppo, settings):
    trainer = ppo(learning_rate=0.0, bf16=True, **settings)
    found = trainer.update(trainer.advantages(trainer.score(trainer.rollout(PROMPTS[:8]))))
    assert found["policy/approxkl_avg"] < 1e-8 and trainer.update_count == 1


# catches: bf16 that is accepted and ignored, in one model or in one phase; weights or gradients
# that lose their digits
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("by_hand", [False, True])
def test_fault_05_bf16_takes_effect(ppo, letters, bf16, by_hand):
    trainer = ppo(scorer_from(tiny_policy(letters, 5, **SIZES), 5), bf16=bf16, total_episodes=8)
    models = dict(
        policy=trainer.model.policy,
        value=trainer.model.value,
        reference=trainer.ref_model,
        reward=trainer.reward_model,
    )
    seen = {(name, False): set() for name in models} | {
        (name, True): set() for name in ("policy", "value")
    }
    for name, model in models.items():
        for layer in model.base_model.modules():
            if isinstance(layer, Linear):
                layer.register_forward_hook(
                    lambda layer, args, output, name=name: seen[name, torch.is_grad_enabled()].add(
                        output.dtype
                    )
                )
    metrics = trainer.step(PROMPTS[:8]) if by_hand else (trainer.train(), logs(trainer)[0])[1]
    assert seen == dict.fromkeys(seen, {torch.bfloat16 if bf16 else torch.float32})
    assert math.isfinite(metrics["loss/policy_avg"])
    assert (
        {p.dtype for p in trainer.model.parameters()}
        == {torch.float32}
        == {
            x.dtype
            for state in trainer.optimizer.state.values()
            for x in state.values()
            if torch.is_tensor(x)
        }
    )
    r = trainer.rollout(PROMPTS[:8])
    assert r.logprobs.dtype == r.ref_logprobs.dtype == r.values.dtype == torch.float32


# ---- 6: clipping ----


# catches: a max_grad_norm that nobody reads, a norm that is logged after clipping
def test_fault_06_max_grad_norm_clips_and_the_norm_is_logged(ppo):
    norms = {}
    for limit in (1e-3, 1e3, 0.0):  # SGD at a learning rate of 1 moves by the gradient itself
        learning = dict(max_grad_norm=limit, optim="sgd", learning_rate=1.0)
        trainer = ppo(num_ppo_epochs=1, total_episodes=8, **learning)
        before = weights(trainer)
        trainer.train()
        moved = math.sqrt(
            sum(
                ((weights(trainer)[name].double() - x.double()) ** 2).sum().item()
                for name, x in before.items()
            )
        )
        norms[limit] = logs(trainer)[0]["policy/grad_norm"]
        assert moved == pytest.approx(1e-3 if limit == 1e-3 else norms[limit], rel=1e-3)
        assert norms[limit] == norms[1e-3] > 0.1


# ---- 7: seeds ----


# catches: global random state, set order, workers: anything but the seed that has a say; and a seed
# that has none
def test_fault_07_the_seed_decides(ppo, letters):
    policy, value = (
        tiny_policy(letters, 0, **SIZES),
        scorer_from(tiny_policy(letters, 1, **SIZES), 1),
    )  # the seed must not act through a fresh value head
    found = []
    for seed, noise in ((0, 1), (0, 2), (1, 1)):
        torch.manual_seed(noise)
        trainer = ppo(
            seed=seed,
            num_mini_batches=2,
            total_episodes=16,
            model=copy.deepcopy(policy),
            parts=dict(value_model=copy.deepcopy(value)),
            save_rollouts=True,
        )
        for path in Path(trainer.args.output_dir).glob("rollouts/*"):
            path.unlink()
        trainer.train()
        found.append(
            (
                weights(trainer),
                [untimed(log) for log in logs(trainer)],
                [r.prompts + r.responses for r in rollouts(trainer)],
            )
        )
        if len(found) == 2:
            one, again = found
            assert not unlike(one[0], again[0]) and one[1:] == again[1:]
    one, _, other = found
    assert unlike(one[0], other[0]) == list(one[0]) and one[2] != other[2]


# catches: a run that depends on what else was drawn between making the trainer and train(): two
# trainers side by side in a notebook
def test_fault_07_the_seed_decides_for_two_trainers_side_by_side(ppo):
    first, second = ppo(total_episodes=16), ppo(total_episodes=16)
    for trainer in (first, second):
        trainer.train()
    assert not unlike(weights(first), weights(second))


# ---- 8: the penalty ----


# catches: the tokenizer's EOS in place of this run's stop token
@pytest.mark.parametrize(
    "how, stop", [(dict(stop_token_id=5), 5), (dict(stop_token="eos"), STOP), ({}, STOP)]
)
def test_fault_08_the_penalty_follows_the_stop_token(ppo, how, stop):
    r = scored(ppo(nothing, missing_eos_penalty=2.0, **how))
    ended = [stop in row[keep].tolist() for row, keep in zip(r.response_ids, r.mask)]
    assert r.scores.tolist() == [0.0 if end else -2.0 for end in ended]
    assert r.stopped.tolist() == ended
    assert 0 < sum(ended) < len(r)
    assert not r.raw_scores.any()
    assert any(STOP in row[keep].tolist() for row, keep in zip(r.response_ids, r.mask))
    replaced = scored(ppo(likes_c, non_eos_penalty=True, penalty_reward_value=-7.0, **how))
    assert replaced.scores.eq(-7).tolist() == (~replaced.stopped).tolist()
    assert 0 < replaced.stopped.sum() < len(replaced)


def test_fault_08_the_penalty_follows_stop_strings(ppo):
    r = scored(ppo(nothing, missing_eos_penalty=2.0, stop_strings=["b", "ij"]))
    ended = [text.endswith(("b", "ij")) for text in r.responses]
    assert 0 < sum(ended) < len(r)
    assert r.scores.tolist() == [0.0 if end else -2.0 for end in ended]


# ---- 9: where the score is paid ----


# catches: the last column instead of the last token; one slot late; a row of a single stop token, a
# row cut off at the limit
@pytest.mark.parametrize("kl_coef", [0.0, 0.5])
def test_fault_09_the_score_is_paid_on_the_last_real_token(ppo, kl_coef):
    trainer = ppo(
        lambda prompts, responses, **_: [3.0 + i for i in range(len(responses))],
        kl_coef=kl_coef,
        total_episodes=8,
    )
    trainer.train()  # so that the KL is not zero
    r = scored(trainer)
    paid, lengths = r.rewards + kl_coef * r.kl, set()
    for b in range(len(r)):
        n = int(r.mask[b].sum())
        lengths.add((n, bool(r.stopped[b])))
        assert paid[b].tolist() == pytest.approx(
            [0.0] * (n - 1) + [3.0 + b] + [0.0] * (r.mask.shape[1] - n), abs=1e-4
        )
    assert {(1, True), (5, False)} < lengths and r.kl.abs().max() > 1e-3


# ---- 10: the model's own generation config ----

LEFTOVERS = dict(repetition_penalty=1.8, no_repeat_ngram_size=1, suppress_tokens=[3, 4, 5])
LEFTOVERS |= dict(temperature=0.2, do_sample=True, top_k=2, num_beams=3)
LEFTOVERS |= dict(min_new_tokens=4, max_new_tokens=2)


def cut(ids: torch.Tensor, mask: torch.Tensor, stopped: torch.Tensor) -> Sample:
    "As `PPOTrainer.sample` returns it: no longer than the longest response."
    width = int(mask.sum(1).max())
    return Sample(ids[:, :width], mask[:, :width], stopped)


def with_leftovers(ppo, leftovers: dict) -> list:
    "What is sampled, and its log-probs, by a model whose generation config has these in it."
    trainer = ppo(learning_rate=0.0, save_rollouts=True, total_episodes=8, num_ppo_epochs=1)
    for model in (trainer.model.policy, trainer.ref_model):
        for name, value in leftovers.items():
            setattr(model.generation_config, name, value)
    trainer.train()
    for log in logs(trainer):
        assert abs(log["objective/kl"]) <= 1e-6
        assert abs(log["val/ratio"] - 1) <= 1e-6
        assert log["val/ratio_var"] <= 1e-6
        assert log["policy/clipfrac_avg"] == 0 and log["policy/approxkl_avg"] <= 1e-12
    return [(r.response_ids.tolist(), r.logprobs.tolist()) for r in rollouts(trainer)]


# catches: generate() with the model's own config as the sampler, or its log-probs as the old ones
def test_fault_10_leftovers_in_the_generation_config_have_no_say(ppo):
    assert with_leftovers(ppo, {}) == with_leftovers(ppo, LEFTOVERS)


# ---- 11: pad equal to stop ----


# that a pad token may be the stop token: test_pad_token.py


# catches: a tokenizer without a pad token that is given its stop token for one
def test_fault_11_a_missing_pad_token_is_made_and_is_not_the_stop_token(ppo, letters):
    tokenizer = copy.deepcopy(letters)
    tokenizer.pad_token = None
    trainer = ppo.trained(parts=dict(processing_class=tokenizer), resize_embeddings=True)
    assert trainer.processing_class.pad_token_id not in (None, STOP)
    assert trainer.model.policy.config.pad_token_id == trainer.processing_class.pad_token_id


# ---- 12: a pad id outside the embedding, chunks of different length ----


# catches: an IndexError in the middle of a run; a reference that is resized to other numbers than
# the policy
@pytest.mark.parametrize("given", [False, True])
def test_fault_12_the_policy_is_resized_on_request(ppo, letters, padded_outside, given):
    trainer = ppo.trained(
        resize_embeddings=True,
        parts=dict(processing_class=padded_outside)
        | (dict(ref_model=tiny_policy(letters, 0, **SIZES)) if given else {}),
        learning_rate=0.0,
        total_episodes=8,
    )
    assert (
        trainer.model.policy.get_input_embeddings().num_embeddings
        == trainer.ref_model.get_input_embeddings().num_embeddings
        == 13
    )
    for log in logs(trainer):
        assert abs(log["objective/kl"]) < 1e-3
        assert all(math.isfinite(value) for value in untimed(log).values())


# catches: any id outside that is taken for a pad token, and a row for it that nobody trained
def test_fault_12_other_ids_outside_are_refused(ppo, padded_outside):
    padded_outside.add_tokens(["[MORE]"])
    wanted = r"ids 0 to 13 .*embedding rows 0 to 11: set resize_embeddings=True"
    with pytest.raises(ValueError, match=wanted):
        ppo(parts=dict(processing_class=padded_outside))


# catches: a reward model that is asked about a token it has no row for, or whose scores change
# because another row was added
def test_fault_12_the_reward_model_grows_with_the_policy(ppo, letters, padded_outside):
    reward = scorer_from(tiny_policy(letters, 5, **SIZES), 5)
    before = copy.deepcopy(reward)
    trainer = ppo(reward, parts=dict(processing_class=padded_outside), resize_embeddings=True)
    r = trainer.score(trainer.rollout(PROMPTS))
    assert (
        (r.prompt_ids == 12).any()
        and reward.get_input_embeddings().num_embeddings
        == trainer.model.value.get_input_embeddings().num_embeddings
        == 13
    )
    for b in range(len(r)):
        ids = torch.cat([r.prompt_ids[b][r.prompt_mask[b]], r.response_ids[b][r.mask[b]]])[None]
        model = reward if (ids == 12).any() else before
        assert r.raw_scores[b].item() == pytest.approx(
            model.score(model.base_model(ids).last_hidden_state[0, -1]).item(), abs=1e-5
        )


# catches: ids that the reward model has no row for, which ends as an IndexError in the middle of a
# run
@pytest.mark.parametrize("part", ["reward", "value"])
def test_fault_12_an_embedding_too_small_is_refused(ppo, letters, part):
    model = scorer_from(tiny_policy(letters, 0, **SIZES), 0)
    model.resize_token_embeddings(8)
    with pytest.raises(ValueError, match=f"{part} model has an embedding for ids 0 to 7"):
        ppo(model) if part == "reward" else ppo(parts=dict(value_model=model))


# catches: chunks that end at different lengths and cannot be put together, or are put together
# askew
def test_fault_12_rollout_chunks_of_different_length(ppo, letters):
    found = []
    # the same draw for the same row in any chunk: where the cumulated probability passes a half
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            rlhf_nb.rollout,
            "draw_tokens",
            lambda probs, generator=None: (probs.cumsum(-1) < 0.5).sum(-1, keepdim=True),
        )
        for size in (64, 3):
            trainer = ppo(
                model=tiny_policy(letters, 1, **SIZES, initializer_range=0.2),
                local_rollout_forward_batch_size=size,
                stop_token_id=5,
                response_length=8,
            )
            found.append(
                trainer.advantages(trainer.score(trainer.rollout([*PROMPTS[:6], "ab", "cc"])))
            )
    whole, parts = found
    ends = [rows.sum(1).max().item() for rows in parts.mask.split(3)]
    assert len(set(ends)) > 1, f"every chunk is as long as the others: {ends}"
    assert torch.equal(whole.response_ids, parts.response_ids)
    assert torch.equal(whole.mask, parts.mask)
    assert torch.equal(whole.stopped, parts.stopped)
    signals = "logprobs ref_logprobs kl values rewards advantages returns raw_scores scores"
    for name in signals.split():
        torch.testing.assert_close(getattr(whole, name), getattr(parts, name), atol=1e-5, rtol=1e-5)


# ---- 13: saving and LoRA under two processes: tests/test_two_processes.py ----


# ---- 14: a data set smaller than a batch ----


# catches: a loader that drops the only batch, and a loop that waits for the next one for ever
@pytest.mark.parametrize("drop_last", [True, False])
def test_fault_14_a_data_set_smaller_than_a_batch_is_refused_at_once(ppo, drop_last):
    for rows, accumulation, prompts in ((8, 1, 7), (4, 2, 7), (4, 2, 1), (64, 16, 24)):
        began, n = time.monotonic(), rows * accumulation
        said = f"the data set has {prompts} prompts and one update takes {n}: lower per_device_tr"
        with pytest.raises(ValueError, match=said):
            ppo(
                per_device_train_batch_size=rows,
                gradient_accumulation_steps=accumulation,
                data=Dataset.from_dict(dict(prompt=PROMPTS[:prompts])),
                dataloader_drop_last=drop_last,
            )
        assert time.monotonic() - began < 5


def test_fault_14_a_data_set_of_one_batch_trains(ppo):
    assert ppo.trained(data=Dataset.from_dict(dict(prompt=PROMPTS[:8]))).state.global_step == 3


# ---- 15: callbacks ----

EVENTS = [name for name in vars(TrainerCallback) if name.startswith("on_")]


# catches: an event that this trainer's own loop forgets; events in another order or number than
# the documentation's, where a step is an update
def test_fault_15_every_event_fires_and_in_order(ppo):
    events = Events()
    sizes = dict(per_device_train_batch_size=2, gradient_accumulation_steps=4)
    sizes |= dict(total_episodes=16, num_ppo_epochs=2, num_mini_batches=2)
    saves = dict(save_strategy="steps", save_steps=1, eval_strategy="steps", eval_steps=1)
    trainer = ppo.trained(parts=dict(callbacks=[events]), **sizes, **saves)
    told = [name for name in events.seen if name not in ("on_substep_end", "on_prediction_step")]
    assert (
        told[:3] == ["on_init_end", "on_train_begin", "on_epoch_begin"]
        and told[-2:] == ["on_epoch_end", "on_train_end"]
    ) or told[-3:] == ["on_epoch_end", "on_log", "on_train_end"]
    first = told.index("on_step_begin")
    assert told[first : first + 10] == [
        "on_step_begin",
        *["on_pre_optimizer_step", "on_optimizer_step"] * 4,
        "on_step_end",
    ]
    assert sorted(told[first + 10 : told.index("on_step_begin", first + 1)]) == [
        "on_evaluate",
        "on_log",
        "on_log",
        "on_save",
    ]  # the evaluation is logged too
    assert {
        name: told.count(name)
        for name in ("on_step_begin", "on_step_end", "on_save", "on_evaluate", "on_optimizer_step")
    } == dict(on_step_begin=2, on_step_end=2, on_save=2, on_evaluate=2, on_optimizer_step=8)
    predicted = trainer.predict(Dataset.from_dict(dict(prompt=PROMPTS[:5]))).predictions
    assert predicted.shape[0] == 5 and predicted.shape[1] <= 5  # a response to each prompt
    with pytest.raises(OSError):
        trainer.push_to_hub()  # there is no network here, and the event comes first
    assert set(EVENTS) <= set(events.seen) and len(EVENTS) > 14


# catches: control.should_training_stop that nobody reads
def test_fault_15_a_callback_stops_the_run(ppo):
    events = Events(stop_at=2)
    trainer = ppo.trained(parts=dict(callbacks=[events]), total_episodes=24)
    assert (
        trainer.state.global_step
        == 2
        == len(logs(trainer))
        == events.seen.count("on_step_end")
        == events.seen.count("on_step_begin")
        and events.seen[-1] == "on_train_end"
    )


# catches: logs, evaluations and checkpoints at every update, or at none; a log that tells of its
# last update alone
def test_fault_15_steps_between_logs_evaluations_and_checkpoints(ppo):
    every = ppo.trained(total_episodes=56, num_ppo_epochs=1)
    trainer = ppo.trained(
        total_episodes=56,
        num_ppo_epochs=1,
        logging_steps=2,
        eval_strategy="steps",
        eval_steps=3,
        save_strategy="steps",
        save_steps=4,
    )
    each, told = logs(every), logs(trainer)
    assert [log["step"] for log in each] == [1, 2, 3, 4, 5, 6, 7] and [
        log["step"] for log in told
    ] == [2, 4, 6, 7]  # the last update is always logged
    assert [log["step"] for log in trainer.state.log_history if "eval_score" in log] == [3, 6, 7]
    assert sorted(path.name for path in Path(trainer.args.output_dir).glob("checkpoint-*")) == [
        "checkpoint-4",
        "checkpoint-7",
    ]  # Trainer evaluates and saves at the end too
    for name in ("objective/raw_scores", "policy/entropy_avg", "loss/value_avg"):
        assert [log[name] for log in told[:3]] == pytest.approx(
            [(a[name] + b[name]) / 2 for a, b in zip(each[::2], each[1::2])]
        )
        assert told[-1][name] == each[-1][name]
    assert [log["episode"] for log in told] == [16, 32, 48, 56]


# catches: a table of completions that counts as the log of its update, so that the metrics of that
# update are told later or never
def test_fault_15_completions_take_no_log_away(ppo):
    trainer = ppo.trained(num_sample_generations=3)
    assert (
        [log["step"] for log in logs(trainer)]
        == [1, 2, 3]
        == [log["step"] for log in trainer.state.log_history if "sample_score" in log]
    )


# catches: a flag of TrainerControl that the loop does not read
def test_fault_15_a_callback_asks_for_a_log_an_evaluation_and_a_checkpoint(ppo):
    class Asks(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            if state.global_step == 2:
                control.should_log = control.should_evaluate = control.should_save = True
            if state.global_step == 4:
                control.should_epoch_stop = True

    trainer = ppo.trained(parts=dict(callbacks=[Asks()]), total_episodes=48, logging_strategy="no")
    assert [log["step"] for log in logs(trainer)][0] == 2
    assert [log["step"] for log in trainer.state.log_history if "eval_score" in log] == [2]
    assert [path.name for path in Path(trainer.args.output_dir).glob("checkpoint-*")] == [
        "checkpoint-2"
    ] and trainer.state.global_step == 4  # the second epoch, of updates 4 to 6, ended at once


# ---- 16: padding ----


def with_padding(r: Rollout, left: int, right: int, seed: int) -> Rollout:
    "The same episodes with more padding, and with rubbish on all of it."
    rubbish = torch.Generator().manual_seed(seed)

    def filled(x: torch.Tensor, real: torch.Tensor, sides: tuple[int, int]) -> torch.Tensor:
        wide = torch.nn.functional.pad(x, sides)
        junk = (
            torch.randint(2, 12, wide.shape, generator=rubbish)
            if not x.is_floating_point()
            else 100 * torch.randn(wide.shape, generator=rubbish)
        )
        return torch.where(torch.nn.functional.pad(real, sides), wide, junk.to(x.dtype))

    return r.with_(
        **{
            name: filled(getattr(r, name), r.mask, (0, right))
            for name in ("response_ids", "logprobs", "ref_logprobs", "kl", "values")
        },
        prompt_ids=filled(r.prompt_ids, r.prompt_mask, (left, 0)),
        prompt_mask=torch.nn.functional.pad(r.prompt_mask, (left, 0)),
        mask=torch.nn.functional.pad(r.mask, (0, right)),
    )


def check_padding(ppo, letters, absolute=False, **settings):
    found, reward = [], scorer_from(tiny_policy(letters, 5, **SIZES), 5)
    # GPT-2 knows a token's place by its number, GPT-NeoX by its distance to the others
    if absolute:
        policy = small_model("gpt2", max_position_embeddings=24, initializer_range=0.2)
        reward = scorer_from(policy, 5)
    for left, right in ((0, 0), (0, 3), (2, 0), (3, 4)):
        if absolute:
            settings["model"] = copy.deepcopy(policy)
        learning = dict(learning_rate=0.05, optim="sgd", max_grad_norm=0.0)
        learning |= dict(num_ppo_epochs=2, num_mini_batches=2, entropy_coef=0.1, cliprange=0.01)
        scaled = dict(whiten_rewards=True, normalize_scores=True)
        trainer = ppo(reward, **learning, **scaled, **settings)
        r = trainer.rollout(PROMPTS[:8])
        assert not r.mask.all() and not r.prompt_mask.all()
        if left or right:
            r = with_padding(r, left, right, seed=left)
        r = trainer.advantages(trainer.score(r))
        metrics = trainer.update(r)
        advantages, after = r.advantages[r.mask], weights(trainer)
        found.append((metrics, advantages, after))
        assert_alike(found[0][0], metrics, 1e-6)
        torch.testing.assert_close(found[0][1], advantages, atol=2e-6, rtol=0)
        for name in after:
            torch.testing.assert_close(found[0][2][name], after[name], atol=1e-6, rtol=0)


# catches: a mean over the rectangle, a token on padding that attention sees, positions that count
# padding, whitening over padding
@pytest.mark.parametrize("kl_estimator, absolute", [("k1", False), ("k3", True)])
def test_fault_16_padding_counts_in_no_metric(ppo, letters, kl_estimator, absolute):
    check_padding(ppo, letters, absolute, kl_estimator=kl_estimator)


# ---- 17: a row that stops at once ----


def stops_at_once(rows, keep_stop=True):
    "A trainer whose policy says its stop token first, in these rows; unmasked, a row is empty."

    class StopsAtOnce(PPOTrainer):
        def sample(self, prompt_ids, prompt_mask):
            sampled, _ = super().sample(prompt_ids, prompt_mask)
            ids, mask, stopped = (x.clone() for x in sampled)
            ids[rows], mask[rows], stopped[rows] = self.processing_class.pad_token_id, False, True
            ids[rows, 0], mask[rows, 0] = STOP, keep_stop
            return cut(ids, mask, stopped), None

    return StopsAtOnce


def check_stops_at_once(ppo, rows, keep_stop=True, **settings):
    trainer = ppo.trained(
        lambda prompts, responses, **_: [len(p) + len(r) for p, r in zip(prompts, responses)],
        kind=stops_at_once(rows, keep_stop),
        total_episodes=8,
        **settings,
    )
    assert len(logs(trainer)) == 1
    for log in logs(trainer):
        assert all(math.isfinite(value) for value in log.values())
        assert log["tokens/response_length"] >= 1
    r = trainer.advantages(trainer.score(trainer.rollout(PROMPTS[:8])))
    assert r.mask[rows].sum(1).eq(1).all() and r.stopped[rows].all()
    if not trainer.args.whiten_rewards:
        assert r.rewards[rows, 0].tolist() == pytest.approx(
            (r.scores - trainer.controller.value * r.kl[:, 0])[rows].tolist(), abs=1e-5
        )
    for b in torch.arange(8)[rows].tolist():
        trainer.model.zero_grad()
        loss_now(trainer, r.select([b]))[0].backward()
        for part in (trainer.model.policy, trainer.model.value):
            size = gradient(part).norm().item()
            assert math.isfinite(size) and size > 1e-6, b
        got = gradient(trainer.model.policy)
        trainer.model.zero_grad()
        # what chose the stop token
        logits = trainer.model.policy(r.prompt_ids[b][r.prompt_mask[b]][None]).logits[0, -1]
        (-r.advantages[b, 0] * logits.log_softmax(-1)[STOP]).backward()
        torch.testing.assert_close(got, gradient(trainer.model.policy), atol=1e-5, rtol=1e-4)


# catches: 0 / 0 in a row of one token, a mask that ends before the stop token, a value or an
# advantage of a row that has none
@pytest.mark.parametrize("rows", [slice(0, 1), slice(0, 4), slice(None)], ids=["1", "4", "all"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        dict(num_mini_batches=8, num_ppo_epochs=1, whiten_rewards=True, normalize_scores=True),
        dict(bootstrap_truncated=True, kl_estimator="full", missing_eos_penalty=1.0),
    ],
    ids=["plain", "mini", "full"],
)
def test_fault_17_a_row_that_stops_at_once(ppo, rows, settings):
    check_stops_at_once(ppo, rows, **settings)


# catches: a check of such rows that an empty row would pass
def test_fault_17_an_empty_row_is_caught(ppo):
    with pytest.raises((AssertionError, FloatingPointError, RuntimeError)):
        check_stops_at_once(ppo, slice(0, 4), keep_stop=False)


# catches: 0 / 0 where every reward is the same: nothing to learn from, and nothing to break either
def test_fault_17_rows_that_stop_at_once_and_earn_the_same(ppo):
    objective = dict(whiten_rewards=True, normalize_scores=True, kl_coef=0.0)
    trainer = ppo.trained(nothing, kind=stops_at_once(slice(None)), total_episodes=16, **objective)
    for log in logs(trainer):
        assert all(math.isfinite(value) for value in log.values())


# ---- 18: micro-batches: with fault 2 ----


# ---- 19: whitening over ranks ----

RANK = textwrap.dedent(
    """
    import os, sys, torch, torch.distributed as dist
    from datasets import Dataset
    from rlhf_nb.rollout import Rollout
    from rlhf_nb.training.model_loading import tiny_policy, train_tokenizer
    from rlhf_nb.trainer import PPOConfig, PPOTrainer

    tokenizer = train_tokenizer(["a b c d e f g h i j"])
    policy = tiny_policy(tokenizer, 0, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=16)
    worst = {}
    for scaled in (False, True):
        whole = Rollout.load(f"whole-{scaled}.safetensors")
        args = PPOConfig(output_dir="run", use_cpu=True, report_to="none", disable_tqdm=True, per_device_train_batch_size=4, num_sample_generations=0, response_length=5, kl_coef=0.3,
                         whiten_rewards=scaled, normalize_scores=True, total_episodes=8)
        trainer = PPOTrainer(args, tokenizer, policy, reward_model=lambda prompts, responses, word, **_: word, train_dataset=Dataset.from_dict(dict(prompt=["a b"] * 8)))
        assert trainer.accelerator.num_processes == 2 and trainer.args.batch_size == 8
        mine = slice(3 * trainer.args.process_index, 3 + 5 * trainer.args.process_index)  # 3 rows and 5 rows
        r = trainer.advantages(trainer.score(whole.select(torch.arange(8)[mine])))
        for name in ("scores", "rewards", "advantages", "returns"):
            apart = (getattr(r, name) - getattr(whole, name)[mine]).abs().max()
            dist.all_reduce(apart, dist.ReduceOp.MAX)
            worst[scaled, name] = apart.item()
    if dist.get_rank() == 0: print("worst:", worst, flush=True)
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads now and then abort a process that takes itself apart
    """
)


# catches: advantages, rewards or scores that each rank whitens by itself, means of means where
# ranks hold different numbers of tokens
@pytest.mark.skipif(sys.platform != "linux", reason="torchrun with gloo on one machine")
def test_fault_19_whitening_is_global_over_ranks(ppo, tmp_path):
    def judge(prompts, responses, word, **_):
        return word

    for scaled in (False, True):
        trainer = ppo(judge, kl_coef=0.3, whiten_rewards=scaled, normalize_scores=True)
        trainer.train_dataset = None
        r = trainer.rollout(PROMPTS[:8])
        r = r.with_(
            columns=dict(word=[float(i * i) for i in range(8)]),
            kl=torch.randn(r.mask.shape, generator=torch.Generator().manual_seed(0)).abs() * r.mask,
        )
        whole = trainer.advantages(trainer.score(r))
        assert whole.mask[:3].sum() / 3 != whole.mask[3:].sum() / 5
        assert len({int(n) for n in whole.mask.sum(1)}) > 1
        whole.save(tmp_path / f"whole-{scaled}.safetensors")
    (tmp_path / "rank.py").write_text(RANK)
    env = dict(ACCELERATE_USE_CPU="true")
    done = forks.run(tmp_path / "rank.py", folder=tmp_path, ranks=2, **env)
    assert done.returncode == 0, done.stdout[-3000:]
    worst = eval(done.stdout.split("worst:")[1].splitlines()[0])
    assert len(worst) == 2 * 4 and max(worst.values()) < 1e-5, worst


# ---- 20: prompts padded on the right ----


# catches: padding of the user's own taken for words, on the right (where the answer would follow
# it) or on the left: a run that differs from the run on the same prompts as text
def test_fault_20_padded_prompts(ppo, letters):
    def run(**parts):
        trainer = ppo.trained(**parts, total_episodes=8, num_ppo_epochs=1)
        assert trainer.rollout(trainer.train_dataset[:8]).prompts == PROMPTS[:8]
        return weights(trainer)

    as_text = run()
    for side, with_mask, kind in pairwise(
        ("left", "right"), (True, False), (None, "torch", "numpy")
    ):
        rows = letters(PROMPTS, padding=True, padding_side=side)
        if with_mask:
            rows["input_ids"] = [
                [i if real else 7 for i, real in zip(*row)]
                for row in zip(rows["input_ids"], rows["attention_mask"])
            ]  # the mask alone says what is real
        data = Dataset.from_dict(
            dict(input_ids=rows["input_ids"])
            | (dict(attention_mask=rows["attention_mask"]) if with_mask else {})
        ).with_format(kind)
        assert not unlike(as_text, run(data=data)), (side, with_mask, kind)


# catches: a collator of the user's own (the published trainer's default pads input_ids) that the
# rollout cannot read, or reads askew
def test_fault_20_a_collator_of_ones_own(ppo, letters):
    ids = Dataset.from_dict(dict(input_ids=[letters(p)["input_ids"] for p in PROMPTS]))

    def run(**parts):
        return weights(ppo.trained(data=ids, parts=parts, total_episodes=8, num_ppo_epochs=1))

    ours = run()
    for side, with_mask in itertools.product(("left", "right"), (True, False)):
        tokenizer = copy.deepcopy(letters)
        tokenizer.padding_side = side
        padder = DataCollatorWithPadding(tokenizer)

        def collator(rows, padder=padder, with_mask=with_mask):
            batch = padder(rows)
            return batch if with_mask else {"input_ids": batch["input_ids"]}

        assert not unlike(ours, run(data_collator=collator)), (side, with_mask)


@pytest.fixture
def on_the_right(letters):
    "Three prompts padded on the right, as tensors, and responses of two tokens."
    rows = letters(PROMPTS[:3], padding=True, padding_side="right", return_tensors="pt")
    return (
        rows["input_ids"],
        rows["attention_mask"].bool(),
        torch.full((3, 2), 4),
        torch.ones(3, 2, dtype=torch.bool),
    )


# catches: a collator that hands over the trainer's own names with padding on the wrong side:
# refused before anything has changed
def test_fault_20_prompt_ids_padded_on_the_right_are_refused(ppo, steps, on_the_right):
    ids, mask, *_ = on_the_right
    trainer = ppo(
        parts=dict(
            data_collator=lambda rows: dict(
                prompt_ids=ids, prompt_mask=mask, prompt=PROMPTS[:3], columns={}
            )
        )
    )
    before = weights(trainer)
    with pytest.raises(ValueError, match="pad prompts on the left"):
        trainer.train()
    assert not steps and not unlike(before, weights(trainer))


# catches: a number that is read off padding
@pytest.mark.parametrize("what", ["log-probs", "values", "samples"])
def test_fault_20_a_number_after_padding_is_refused(letters, on_the_right, what):
    policy = tiny_policy(letters, 0, **SIZES)
    with pytest.raises(ValueError, match="pad prompts on the left"):
        if what == "samples":
            sample(policy, *on_the_right[:2], Sampling(2, 0))
        elif what == "values":
            response_values(scorer_from(policy), *on_the_right)
        else:
            response_logprobs(policy, *on_the_right)


# ---- The faults, put back ----


def every_second_step(plain, self, model):
    self.seen = getattr(self, "seen", 0) + 1
    return plain(self, model) if self.seen % 2 else 0.0


def divided_twice(plain, now, r, args, **how):
    loss, sums = plain(now, r, args, **how)
    n = 8 / len(r)  # micro-batches of an update
    return loss / n, sums | dict(policy=sums["policy"] / n)


def means_of_micro_batches(plain, *given, **how):
    loss, sums = plain(*given, **how)
    return loss, {name: x / sums["tokens"] for name, x in sums.items()}


def recomputes_in_the_policy(plain, self, **how):
    self.policy.activation_checkpointing_enable(**how)


def samples_while_it_trains(plain, self, *prompts):
    self.model.policy.eval = self.model.policy.train
    return plain(self, *prompts)


def logprobs_without_temperature(plain, self, batch):
    r = plain(self, batch)
    rows = (r.prompt_ids, r.prompt_mask, r.response_ids, r.mask)
    with torch.no_grad():
        return r.with_(logprobs=response_logprobs(self.model.policy, *rows).logprobs)


def never_clips(plain, self, model):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(self.args, "max_grad_norm", 0.0)
        return plain(self, model)


def logs_the_clipped_norm(plain, self, model):
    return min(plain(self, model), self.args.max_grad_norm)


def draws_by_the_clock(plain, self, *prompts):
    torch.manual_seed(time.perf_counter_ns())
    return plain(self, *prompts)


def has_one_seed(plain, self, args, **parts):
    args.seed = 0
    plain(self, args, **parts)


def looks_for_eos(plain, self, r):
    ended = ((r.response_ids == STOP) & r.mask).any(1)
    return plain(self, r.with_(stopped=ended)).with_(stopped=r.stopped)


def paid_in(column, plain, self, r):
    r = plain(self, r)
    charge, place = -self.controller.value * r.kl * r.mask, column(r.mask)[:, None]
    return r.with_(rewards=charge.scatter_add(1, place, r.scores[:, None]))


def cuts_each_chunk(plain, self, *prompts):
    size = self.args.local_rollout_forward_batch_size
    parts = [plain(self, *rows)[0] for rows in zip(*(x.split(size) for x in prompts))]
    return Sample(*map(torch.cat, zip(*parts))), None


def never_listens(plain, self, *given, **how):
    class Deaf(type(self.control)):
        should_training_stop = property(lambda self: False, lambda self, value: None)

    self.control = Deaf()
    return plain(self, *given, **how)


def counts_the_rectangle(plain, now, r, args, **how):
    loss, sums = plain(now, r, args, **how)
    return loss, sums | dict(tokens=sums["tokens"] * 0 + r.mask.numel())


def adds_up_the_padding(plain, self, r, *sums):
    return plain(self, r.with_(mask=torch.ones_like(r.mask)), *sums)


def means_by_rows(plain, now, r, args, **how):
    loss, sums = plain(now, r, args, **how)
    return loss / r.mask.sum() * len(r), sums


def last_column(mask):
    return torch.full((len(mask),), mask.shape[1] - 1)


def one_slot_late(mask):
    return mask.sum(1).clamp(max=mask.shape[1] - 1)


CLIPS = test_fault_06_max_grad_norm_clips_and_the_norm_is_logged
RECOMPUTES = test_fault_04_checkpointing_recomputes_in_both_models
SAMPLED = test_fault_04_checkpointing_does_not_change_what_is_sampled
SCALES = test_fault_02_metrics_do_not_scale_with_accumulation
SEED, STOPS = test_fault_07_the_seed_decides, test_fault_15_a_callback_stops_the_run
PAID = test_fault_09_the_score_is_paid_on_the_last_real_token
PENALTY = test_fault_08_the_penalty_follows_the_stop_token
CHUNKS, ENABLE = test_fault_12_rollout_chunks_of_different_length, "activation_checkpointing_enable"
FAULTS = [  # the wrong program, what it takes the place of, the check that refuses it
    (every_second_step, "optimizer_step", check_steps, (4, 2, 2, 1)),
    (divided_twice, "ppo_loss", SCALES, ()),
    (means_of_micro_batches, "ppo_loss", SCALES, ()),
    (recomputes_in_the_policy, ENABLE, RECOMPUTES, ("activation_checkpointing",)),
    (samples_while_it_trains, "sample", SAMPLED, ()),
    (logprobs_without_temperature, "rollout", check_ratio_is_one, ()),
    (never_clips, "optimizer_step", CLIPS, ()),
    (logs_the_clipped_norm, "optimizer_step", CLIPS, ()),
    (draws_by_the_clock, "sample", SEED, ()),
    (has_one_seed, "__init__", SEED, ()),
    (looks_for_eos, "score", PENALTY, (dict(stop_token_id=5), 5)),
    (partial(paid_in, last_column), "advantages", PAID, (0.5,)),
    (partial(paid_in, one_slot_late), "advantages", PAID, (0.5,)),
    (cuts_each_chunk, "sample", CHUNKS, ()),
    (never_listens, "_run_epoch", STOPS, ()),
    (counts_the_rectangle, "ppo_loss", check_padding, ()),
    (adds_up_the_padding, "metrics", check_padding, ()),
    (means_by_rows, "ppo_loss", SCALES, ()),
]


# catches: a check above that a trainer with its fault would pass
@pytest.mark.parametrize("wrong, place, check, given", FAULTS)
def test_a_trainer_with_the_fault_is_caught(
    ppo, steps, letters, monkeypatch, wrong, place, check, given
):
    for owner in dict(
        ppo_loss=[rlhf_nb.trainer, ppo_fixtures], activation_checkpointing_enable=[PolicyAndValue]
    ).get(place, [PPOTrainer]):
        plain = getattr(owner, place)
        monkeypatch.setattr(owner, place, lambda *a, plain=plain, **how: wrong(plain, *a, **how))
    fixtures = dict(ppo=ppo, steps=steps, letters=letters)
    needed = [x for name, x in fixtures.items() if name in inspect.signature(check).parameters]
    with pytest.raises((AssertionError, RuntimeError)):
        check(*needed, *given)
