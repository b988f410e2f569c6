"""The rollout's forward pass, kept for the first optimizer step: the same numbers to the bit, and
never one that is out of date."""

from __future__ import annotations

import copy
import gc
import importlib.util
import sys
import weakref
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from ppo_fixtures import scored, unlike, untimed, weights
from transformers import AutoModelForCausalLM, GPT2Config, GPTNeoXConfig, LlamaConfig

import rlhf_nb.trainer
from rlhf_nb.trainer import PPOTrainer, _kept_bytes

SMALL = dict(
    vocab_size=23,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=64,
)
MODELS = dict(
    neox=GPTNeoXConfig(**SMALL, intermediate_size=64),
    llama=LlamaConfig(**SMALL, intermediate_size=64),
    gpt2=GPT2Config(**SMALL, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
)
PARTS = dict(micro_batch_tokens=48)  # so that an update has several


def model(name: str):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(copy.deepcopy(MODELS[name]))


def made(ppo, name: str = "neox", kind=PPOTrainer, **more) -> PPOTrainer:
    return ppo(
        kind=kind,
        model=model(name),
        **dict(
            per_device_train_batch_size=24,
            gradient_accumulation_steps=1,
            total_episodes=72,
            response_length=9,
            learning_rate=0.01,
            num_ppo_epochs=3,
            **PARTS,
        )
        | more,
    )


def forwards(trainer: PPOTrainer) -> list[int]:
    "Rows of each forward pass with gradients, filled as they happen."
    seen = []
    trainer.model.policy.get_input_embeddings().register_forward_pre_hook(
        lambda _, args: seen.append(len(args[0])) if torch.is_grad_enabled() else None
    )
    return seen


def run(trainer: PPOTrainer, updates: int = 3) -> tuple[dict, list[dict]]:
    torch.manual_seed(0)
    told = [untimed(trainer.step()) for _ in range(updates)]
    return weights(trainer), told


# catches: an entropy without a gradient, values of other rows, parts in another order, a pass used
# for the wrong step, two passes that are not alike
@pytest.mark.parametrize(
    "more",
    [
        dict(),
        dict(entropy_coef=0.02),
        dict(share_value_trunk=True),
        dict(reward_slot="after_eos"),
        dict(kl_estimator="full"),
        dict(temperature=0.7, num_generations=3),
        dict(bootstrap_truncated=True),
        dict(num_ppo_epochs=1),
        dict(target_kl=1e-9),
        dict(value_warmup_updates=1),
        dict(
            parts=dict(
                peft_config=LoraConfig(r=2, task_type="CAUSAL_LM", target_modules="all-linear")
            )
        ),
    ],
    ids=str,
)
def test_the_same_run_to_the_bit(ppo, more):
    plain, kept = (run(made(ppo, keep_forward_gib=most, **more)) for most in (0, None))
    assert not unlike(plain[0], kept[0]) and plain[1] == kept[1]


@pytest.mark.parametrize("name", MODELS)
def test_the_same_run_of_each_family(ppo, name):
    plain, kept = made(ppo, name, keep_forward_gib=0), made(ppo, name)
    counts = forwards(plain), forwards(kept)
    found = run(plain), run(kept)
    assert not unlike(found[0][0], found[1][0]) and found[0][1] == found[1][1]
    # one of the epochs' passes was made in the rollout, and no row more than once
    assert len(counts[0]) == len(counts[1]) > 9 and sum(counts[0]) == sum(counts[1]) == 3 * 3 * 24


# catches: a pass that is made and then made again, and one that is kept after it was used
def test_the_update_makes_one_pass_less(ppo):
    trainer = made(ppo)
    seen, here, update = forwards(trainer), [], trainer.update

    def watched(r):
        before, graph = len(seen), weakref.ref(trainer._ahead.found[0][0])
        told = update(r)
        gc.collect()
        here.append((before, len(seen) - before, graph() is None and trainer._ahead is None))
        return told

    trainer.update = watched
    trainer.step()
    parts = here[0][0]
    assert parts > 3 and here == [(parts, 2 * parts, True)]


# catches: memory that was not asked for
def test_as_much_as_there_is_room_for(ppo):
    whole = made(ppo)
    whole._whole_step = True
    torch.manual_seed(0)
    with _kept_bytes(whole.model) as sizes:
        whole.rollout(whole._next_batch())
    needs, parts = sum(sizes.values()), len(whole._ahead.found)
    part = made(ppo, keep_forward_gib=0.5 * needs / 2**30)
    part._whole_step = True
    torch.manual_seed(0)
    with _kept_bytes(part.model) as sizes:
        part.rollout(part._next_batch())
    kept = [found is not None for found in part._ahead.found]
    assert parts == len(kept) > 3 and 1 < sum(kept) < parts and kept == sorted(kept, reverse=True)
    assert 0.3 * needs < sum(sizes.values()) < 0.6 * needs
    plain, some = (run(made(ppo, keep_forward_gib=most)) for most in (0, 0.5 * needs / 2**30))
    assert not unlike(plain[0], some[0]) and plain[1] == some[1]


# catches: a graph kept where the update takes other rows together, where memory is short, or where
# nobody will use it
@pytest.mark.parametrize(
    "more",
    [
        dict(num_mini_batches=2),
        dict(activation_checkpointing=True),
        dict(trim_padding=False),
        dict(value_warmup_updates=9),
        dict(keep_forward_gib=0.0),
        dict(bf16=True),
        dict(micro_batch_tokens=10**6, local_rollout_forward_batch_size=3),
    ],
    ids=str,
)
def test_where_nothing_is_kept(ppo, more):
    trainer, seen = made(ppo, **more), []
    update = trainer.update
    trainer.update = lambda r: (seen.append(trainer._ahead), update(r))[1]
    trainer.step()
    assert seen == [None]


def test_a_rollout_to_look_at_keeps_nothing(ppo):
    trainer = made(ppo)
    trainer.step()
    r = scored(trainer)
    assert trainer._ahead is None and not any(x.requires_grad for x in (r.logprobs, r.values))


class Fewer(PPOTrainer):
    "Learns from some of what it wrote."

    def score(self, r):
        return super().score(r).select(torch.arange(len(r)).flip(0)[3:])


class Shorter(PPOTrainer):
    "Learns from the first tokens of every row."

    def score(self, r):
        return _shorter(self, r, super())


class Nudged(PPOTrainer):
    "Changes its weights between the rollout and the update."

    def score(self, r):
        with torch.no_grad():
            for p in self.model.parameters():
                p.mul_(0.5)
        return super().score(r)


def of(module, base: type) -> type:
    return type(
        base.__name__,
        (module.PPOTrainer,),
        {"score": lambda self, r: SCORES[base](self, r, module.PPOTrainer)},
    )


def _fewer(self, r, trainer):
    return trainer.score(self, r).select(torch.arange(len(r)).flip(0)[3:])


def _shorter(self, r, trainer):
    r = trainer.score(r) if isinstance(trainer, super) else trainer.score(self, r)
    mask = r.mask & (torch.arange(r.mask.shape[1]) < 3)
    return r.with_(
        mask=mask,
        logprobs=r.logprobs * mask,
        ref_logprobs=r.ref_logprobs * mask,
        kl=r.kl * mask,
        values=r.values * mask,
    )


def _nudged(self, r, trainer):
    with torch.no_grad():
        for p in self.model.parameters():
            p.mul_(0.5)
    return trainer.score(self, r)


SCORES = {Fewer: _fewer, Shorter: _shorter, Nudged: _nudged}


# catches: log-probs of rows that are no longer there, or of weights that have changed since
@pytest.mark.parametrize("kind", SCORES)
def test_what_changed_in_between_is_asked_again(ppo, kind):
    plain, kept = (run(made(ppo, kind=kind, keep_forward_gib=most)) for most in (0, None))
    assert not unlike(plain[0], kept[0]) and plain[1] == kept[1]


WRONG = {
    "rows of another rollout": (
        "if all(a is b for a, b in zip(kept.rows, self._rows_of(r))) else []",
        "",
        Fewer,
    ),
    "rows that are shorter now": (
        "return r.prompt_ids, r.prompt_mask, r.response_ids, r.mask",
        "return r.prompt_ids, r.prompt_mask, r.response_ids",
        Shorter,
    ),
    "weights of before": (
        "kept is None or kept.versions != self._versions()",
        "kept is None",
        Nudged,
    ),
    "the last part first": (
        "said = dict(said=ahead.pop(0))",
        "said = dict(said=ahead.pop())",
        None,
    ),
    "a pass for every epoch": (
        "said = dict(said=ahead.pop(0)) if ahead else {}",
        "said = dict(said=ahead[i]) if ahead else {}",
        None,
    ),
    "an entropy nobody learns from": (
        'entropy = ("learn" if self.args.entropy_coef and not detach',
        'entropy = ("learn" if self.args.entropy_coef and not self._whole_step',
        None,
    ),
}


# catches: comparisons that would let these pass
@pytest.mark.parametrize("name", WRONG)
def test_wrong_programs_are_seen(ppo, name, monkeypatch):
    text, (old, new, base) = Path(rlhf_nb.trainer.__file__).read_text(), WRONG[name]
    assert text.count(old) == 1, (
        f"{old!r} stands {text.count(old)} times in trainer.py: name the passage anew"
    )
    wrong = importlib.util.module_from_spec(
        importlib.util.spec_from_loader("rlhf_nb.wrong_ahead", loader=None)
    )
    monkeypatch.setitem(sys.modules, wrong.__name__, wrong)
    exec(compile(text.replace(old, new), "wrong_ahead.py", "exec"), wrong.__dict__)
    kind = wrong.PPOTrainer if base is None else of(wrong, base)
    more = dict(entropy_coef=0.1)
    plain = run(made(ppo, kind=base or PPOTrainer, keep_forward_gib=0, **more))
    with pytest.raises((AssertionError, RuntimeError, IndexError, ValueError)):
        found = run(made(ppo, kind=kind, **more))
        assert not unlike(plain[0], found[0]) and plain[1] == found[1]


def test_room_is_not_negative(ppo):
    with pytest.raises(
        ValueError, match="keep_forward_gib is -1: give a finite number that is not negative"
    ):
        made(ppo, keep_forward_gib=-1)
