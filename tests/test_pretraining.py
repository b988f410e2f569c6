"A value model fitted to saved rollouts before the first update: targets, steps, resume, bad input."

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from ppo_fixtures import PROMPTS, rollouts, unlike, weights
from test_adapters import for_value
from test_turns import record

from rlhf_nb.cli.ppo import ppo_parser
from rlhf_nb.environments import guess_number
from rlhf_nb.rollout import Rollout
from rlhf_nb.training.pretraining import pretrain_values, rewards_to_go, saved_episodes
from rlhf_nb.update import Objective

STILL = dict(learning_rate=0.0, kl_coef=0.2, save_rollouts=True)
FITTED = dict(learning_rate=1e-2, value_pretrain_epochs=2, output_dir="")
PLAN = [[(2, 1), (3, 0)], [(1, 2), (1, 1), (2, 2)]]


@pytest.fixture
def fitted(ppo, tmp_path):
    "Makes a trainer that begins with what a run of 160 episodes kept: `fitted(...settings)`."
    kept = ppo.trained(total_episodes=160, output_dir=str(tmp_path / "kept"), **STILL).output_dir

    def make(name="new", **changes):
        own = dict(output_dir=str(tmp_path / name), value_pretrain_rollouts=str(kept))
        return ppo(**FITTED | own | changes)

    return make


# catches: an old value in a target, a discount at an observation, the charge for the KL paid twice,
# rewards that are whitened again, V learnt where a turn goes on
@pytest.mark.parametrize("estimator", ["gae", "gae_turns"])
def test_targets_are_the_rewards_to_go(estimator):
    r = record(PLAN)
    rewards = r.logprobs.masked_fill(~r.chosen, 0.0)
    old = r.with_(rewards=rewards, values=r.values * torch.nan, scores=None, kl=r.kl * 1e9)
    cfg = Objective(advantage_estimator=estimator, gamma_turn=0.5, lam=0.3, whiten_rewards=True)
    cfg.gamma = 0.9 if estimator == "gae" else 1.0
    made = rewards_to_go(old, cfg)
    for b, turns in enumerate(r.turn.tolist()):
        wanted, to_go, later = np.zeros(len(turns)), 0.0, None
        for t in np.flatnonzero(r.chosen[b].numpy())[::-1]:
            to_go = rewards[b, t].item() + to_go * cfg.gamma * (0.5 if later != turns[t] else 1.0)
            wanted[t], later = to_go, turns[t]
        if estimator == "gae_turns":
            own = zip(turns, r.chosen[b].tolist())
            wanted *= (first := [x not in turns[:t] and c for t, (x, c) in enumerate(own)])
            assert made.valued[b].tolist() == first
        np.testing.assert_allclose(made.returns[b].numpy(), wanted, atol=1e-6)
    assert torch.equal(made.values, made.returns)


# catches: a clip that holds the values back, a loss that is not divided by its tokens, an episode
# that is measured and fitted, a policy that moves
def test_a_step_is_the_gradient_of_the_plain_value_loss(fitted):
    one = dict(gradient_accumulation_steps=32, total_episodes=256, value_pretrain_epochs=1)
    one["data"] = Dataset.from_dict(dict(prompt=PROMPTS * 6))
    trainer = fitted(optim="sgd", cliprange_value=1e-9, warmup_steps=1, max_grad_norm=0.0, **one)
    before = weights(trainer)
    folder, words = trainer.args.value_pretrain_rollouts, trainer.processing_class
    r = saved_episodes(trainer.args, folder, words, len(words))
    r = r.select([i for i in range(160) if i % 5 < 4])
    left = trainer.pair.values(r)[:, :-1] - rewards_to_go(r, Objective()).returns
    (0.1 * 0.5 * left[r.mask].square().mean()).backward()
    named = {f"value.{name}": p for name, p in trainer.pair.value.named_parameters()}
    wanted = {name: p.detach() - 1e-2 * p.grad for name, p in named.items()}
    trainer.model.zero_grad()
    pretrain_values(trainer)
    after = weights(trainer)
    assert {*unlike(before, after)} <= {*wanted} and trainer.learning_rate() == 0.0
    for name, x in wanted.items():
        torch.testing.assert_close(after[name], x, atol=1e-6, rtol=1e-4)


# catches: a resume that fits again or wants the folder, a checkpoint-0 before it, other samples
@pytest.mark.parametrize("kind", ["plain", "trunk"])
def test_a_run_begins_with_it_once(fitted, ppo, kind, tmp_path):
    saves = dict(save_strategy="steps", save_steps=1, save_start=True, save_rollouts=True)
    how = dict(share_value_trunk=kind == "trunk", learning_rate=1e-2)
    whole, plain = fitted(**saves | how), ppo(output_dir=str(tmp_path / "plain"), **saves | how)
    for trainer in (whole, plain):
        trainer.train()
    first = whole.state.log_history[0]
    assert first["step"] == 0 and first["pretrain/explained_before"] < 0.02
    assert first["pretrain/explained_after"] > first["pretrain/explained_before"] + 0.05
    ours, theirs = (rollouts(x)[0] for x in (whole, plain))
    assert torch.equal(ours.response_ids, theirs.response_ids)
    assert not torch.equal(ours.values, theirs.values)
    shutil.rmtree(whole.args.value_pretrain_rollouts)
    for step in (0, 1):
        again = fitted(**saves | how)
        again.train(resume_from_checkpoint=str(whole.output_dir / f"checkpoint-{step}"))
        assert not unlike(weights(whole), weights(again))


# catches: turns and their targets left out, an adapter beside which the model moves
@pytest.mark.parametrize("kind", ["gae", "gae_turns", "lora"])
def test_turns_and_adapters(ppo, tmp_path, kind):
    world = dict(environment_factory=guess_number(9, 3, 36, ("a", "b", "c")), max_turns=2)
    how = dict(response_length=2, advantage_estimator="gae" if kind == "lora" else kind)
    kept = ppo.trained(parts=world, total_episodes=80, **STILL | how)
    how |= dict(output_dir=str(tmp_path / "new"), value_pretrain_rollouts=str(kept.output_dir))
    parts = world | (dict(value_peft_config=for_value()) if kind == "lora" else {})
    trainer = ppo(parts=parts, **FITTED | how)
    before = weights(trainer)
    pretrain_values(trainer)
    moved = unlike(before, weights(trainer))
    assert moved and all(name.startswith("value.") for name in moved)
    assert kind != "lora" or all("lora" in name or "score" in name for name in moved)
    row = trainer.state.log_history[0]
    assert row["pretrain/explained_after"] > row["pretrain/explained_before"]


# ---- Bad input ----


SPOILT = {  # what becomes of each rollout that a run kept, and what is said of it
    "no rollouts are there; give the output_dir of a run with save_rollouts": lambda r: None,
    "no rewards are in it; save what trainer.advantages": lambda r: r.with_(rewards=None),
    "of another tokenizer .*'[a-j]'": lambda r: r.with_(tokens=[["x"] * len(x) for x in r.tokens]),
    "of another tokenizer .*id 2": lambda r: r.with_(response_ids=r.response_ids + 12),
    "a fifth of its 8 episodes or the rest are under 8": lambda r: None if r.info["update"] else r,
}


@pytest.mark.parametrize("wanted", SPOILT)
def test_what_cannot_be_fitted_is_refused(fitted, wanted):
    trainer = fitted()
    for file in (Path(folder := trainer.args.value_pretrain_rollouts) / "rollouts").iterdir():
        r = SPOILT[wanted](Rollout.load(file))
        file.unlink() if r is None else r.save(file)
    before = weights(trainer)
    for _ in range(2):  # not only the first time
        with pytest.raises(ValueError, match=f"value_pretrain_rollouts is '{folder}': .*{wanted}"):
            trainer.step()
    assert not unlike(before, weights(trainer))
    with pytest.raises(ValueError, match="vf_coef is 0.0: the value model learns nothing"):
        fitted(vf_coef=0.0)
    typed = ["--value_pretrain_rollouts", folder, "--value_pretrain_epochs", "3"]
    assert ppo_parser().read(typed).value_pretrain_epochs == 3
