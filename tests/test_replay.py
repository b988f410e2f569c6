"""One update again: with the run's own settings bit for bit, with others as a resumed run does it;
what is refused, and why; and that nothing of the run is touched."""

from __future__ import annotations

import hashlib
import json
import math
import random
import re
import shutil
import sys
from contextlib import nullcontext
from dataclasses import fields
from pathlib import Path

import forks
import numpy as np
import pytest
import torch
from datasets import Dataset
from ppo_fixtures import PROMPTS, SIZES, likes_c, logs, untimed
from small_runs import QUIET, RUN, SAVED, TOLD

import rlhf_nb.diagnose.replay as module
import rlhf_nb.trainer
from rlhf_nb import replay
from rlhf_nb.base.fields import settings_that_say
from rlhf_nb.cli import main
from rlhf_nb.cli.replay import replay_parser
from rlhf_nb.diagnose.replay_outcome import Outcome, most_moved, shown_numbers
from rlhf_nb.diagnose.replay_record import record_of
from rlhf_nb.diagnose.replay_settings import (
    MAY_VARY,
    NOWHERE,
    REASONS,
    UNREPLAYED,
    check_settings,
)
from rlhf_nb.diagnose.replay_view import bins_of, counted, replay_markup
from rlhf_nb.models import scorer_from
from rlhf_nb.moments import RunningMoments
from rlhf_nb.rollout import Rollout
from rlhf_nb.trainer import PPOConfig, PPOTrainer
from rlhf_nb.training.model_loading import tiny_policy

KINDS = dict(
    plain=dict(normalize_scores=True, kl_controller="adaptive", missing_eos_penalty=0.5),
    lora=dict(kl_coef=0.2),
    trunk=dict(share_value_trunk=True),
    rates=dict(value_learning_rate=5e-3, bootstrap_truncated=True, whiten_rewards=True),
    grpo=dict(advantage_estimator="grpo", num_generations=2, kl_in="loss", kl_estimator="k3"),
    full=dict(kl_estimator="full", lr_scheduler_type="cosine", max_grad_norm=0.1),
)


def parts_of(kind: str) -> dict:
    if kind != "lora":
        return {}
    from peft import LoraConfig

    lora = lambda task: LoraConfig(
        r=2, target_modules=["query_key_value", "dense_h_to_4h"], task_type=task
    )
    return dict(peft_config=lora("CAUSAL_LM"), value_peft_config=lora("SEQ_CLS"))


@pytest.fixture(scope="module")
def made(letters, imports, tmp_path_factory):
    "Makes a trainer of a kind that saves everything: `made(kind, folder, ...settings)`."
    root = tmp_path_factory.mktemp("runs")

    def make(kind="plain", folder=None, **changes):
        settings = QUIET | RUN | SAVED | dict(learning_rate=1e-2, num_mini_batches=2)
        settings |= dict(total_episodes=24, save_start=True)
        args = PPOConfig(str(root / (folder or kind)), **settings | KINDS[kind] | changes)
        policy, data = tiny_policy(letters, 0, **SIZES), Dataset.from_dict(dict(prompt=PROMPTS))
        return PPOTrainer(args, letters, policy, None, likes_c, data, **parts_of(kind))

    return make


@pytest.fixture(scope="module")
def run(made):
    "A run of three updates, once for each kind: `run(kind)` is its trainer."
    done = {}

    def get(kind="plain"):
        if kind not in done:
            done[kind] = made(kind)
            done[kind].train()
        return done[kind]

    return get


def tree(folder: Path) -> dict[str, str]:
    "Every file of a folder, by its bytes."
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(p): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def failed(done) -> list[str]:
    return [one.name for one in done.checks.checks if not one.passed and not one.skipped]


# ---- The same settings ----


# catches: anything that the run's state, its settings or its rollout does not tell
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_settings_give_what_the_run_did_bit_for_bit(run, kind):
    trainer = run(kind)
    done = replay(trainer, 1)
    assert done.same and not failed(done) and done.now is done.was and not done.settings
    assert [one.skipped for one in done.checks.checks] == [False] * 5
    line = untimed(logs(trainer)[1])
    assert {name: x for name, x in done.was.metrics.items() if name in line} == {
        name: x for name, x in line.items() if name in done.was.metrics
    }
    assert len(done.was.metrics) > 15


@pytest.mark.parametrize("update", [0, 1, 2])
def test_every_update_is_done_again_from_the_folder_alone(run, update):
    folder = run().output_dir
    before = tree(folder)
    assert replay(folder, update).same
    assert tree(folder) == before  # nothing of the run is written


def test_an_adapter_is_put_on_the_base_that_is_given(run, letters):
    folder, base = run("lora").output_dir, tiny_policy(letters, 0, **SIZES)
    with pytest.raises(
        ValueError, match=r"is an adapter, .* give that as model \(--model\)|model_"
    ):
        replay(folder, 1)
    value = scorer_from(base, 0)
    assert replay(folder, 1, model=base, value_model=value).same
    other = tiny_policy(letters, 1, **SIZES)
    wrong = replay(folder, 1, model=other, value_model=value)
    assert not wrong.same and failed(wrong)[0] == "log-probs"


# Wrong programs: each forgets one thing, and the checks name it.


def restored(monkeypatch, spoil) -> None:
    "Every trainer is spoilt after its checkpoint was restored."
    restore = PPOTrainer.restore

    def wrong(self, *given):
        restore(self, *given)
        spoil(self)

    monkeypatch.setattr(PPOTrainer, "restore", wrong)


def forget_optimizer(trainer):
    trainer.optimizer.state.clear()


def forget_place(trainer):
    "The schedule begins again."
    for group in trainer.optimizer.param_groups:
        group["lr"] = group["initial_lr"]
    trainer.lr_scheduler.last_epoch = 0
    trainer.lr_scheduler._last_lr = [g["lr"] for g in trainer.optimizer.param_groups]


def forget_moments(trainer):
    trainer.moments = RunningMoments()


def forget_controller(trainer):
    trainer.controller.set(trainer.args.kl_coef)


def forget_count(trainer):
    "The shuffle's seed is that of the first update."
    trainer.update_count = 0


def forget_critic(trainer):
    torch.nn.init.zeros_(trainer.pair.value.score.weight)


@pytest.mark.parametrize(
    "spoil, first",
    [
        (forget_optimizer, "metrics"),
        (forget_place, "metrics"),
        (forget_moments, "rewards"),
        (forget_controller, "rewards"),
        (forget_count, "metrics"),
        (forget_critic, "log-probs"),
    ],
)
def test_a_replay_that_forgets_is_caught(run, monkeypatch, spoil, first):
    restored(monkeypatch, spoil)
    done = replay(run(), 1)
    assert not done.same and failed(done)[0] == first and "weights" in failed(done)
    assert "do not give what the run did" in done._repr_html_()


def test_a_replay_that_samples_is_caught(run, monkeypatch):
    ready = module.ready

    def sampled(trainer, saved, was):
        again = trainer.rollout(saved.prompts)
        return ready(trainer, again.with_(raw_scores=saved.raw_scores), was)

    monkeypatch.setattr(module, "ready", sampled)
    done = replay(run(), 1)
    assert not done.same and {"log-probs", "weights"} <= set(failed(done))


def test_another_order_of_the_rows_is_caught(run, monkeypatch):
    own = rlhf_nb.trainer.mini_batches
    other = lambda n, epochs, parts, seed: own(n, epochs, parts, seed + 1)
    monkeypatch.setattr(rlhf_nb.trainer, "mini_batches", other)
    done = replay(run(), 1)
    assert not done.same and "weights" in failed(done) and "rewards" not in failed(done)


# ---- Other settings ----


# catches: a setting that is not taken up, or taken up in another way than a run does. A run that is
# resumed with it samples the same episodes, since its random state is the same.
@pytest.mark.parametrize(
    "kind, changes",
    [
        ("plain", dict(learning_rate=3e-2, cliprange=0.05, kl_coef=0.7)),
        ("plain", dict(gamma=0.9, lam=0.5, vf_coef=1.0, missing_eos_penalty=2.0)),
        ("plain", dict(num_ppo_epochs=2, num_mini_batches=4, weight_decay=0.1, adam_beta1=0.5)),
        ("rates", dict(value_learning_rate=1e-4, max_grad_norm=0.01, entropy_coef=0.1)),
        ("trunk", dict(target_kl=1e-4, cliprange_value=0.01, lr_scheduler_type="constant")),
        ("lora", dict(score_clip=0.5, cliprange_high=0.5, dual_clip=3.0)),
    ],
)
def test_other_settings_give_what_a_run_resumed_with_them_does(run, made, tmp_path, kind, changes):
    trainer = run(kind)
    done = replay(trainer, 1, **changes)
    other = made(kind, tmp_path.name + kind + "-".join(changes), **changes)
    other.train(resume_from_checkpoint=str(trainer.output_dir / "checkpoint-1"))
    line = untimed(logs(other)[1])
    assert {name: done.now.metrics[name] for name in line if name in done.now.metrics} == {
        name: x for name, x in line.items() if name in done.now.metrics
    }
    assert done.same and done.now.metrics != done.was.metrics
    assert {name: new for name, (_, new) in done.settings.items()} == changes


# catches: settings of the checkpoint where a resume had changed them
def test_what_a_resume_changed_is_the_runs_own(made):
    made(folder="resumed").train()
    again = made(folder="resumed", learning_rate=5e-3, kl_coef=0.4)
    again.train(resume_from_checkpoint=str(again.output_dir / "checkpoint-1"))
    done = replay(again.output_dir, 1)
    assert done.same and done.record.settings["learning_rate"] == 5e-3
    assert done.was.metrics["objective/kl_coef"] == 0.4


def test_the_kl_estimator_is_computed_from_the_record(run):
    done = replay(run(), 1, kl_estimator="k3", whiten_rewards=True)
    r, new = done.was.before, done.now.before
    logr = (r.ref_logprobs - r.logprobs)[r.mask]
    torch.testing.assert_close(new.kl[r.mask], logr.exp() - 1 - logr)
    assert torch.equal(new.logprobs, r.logprobs) and done.same


def test_other_micro_batches_are_the_same_but_for_rounding(run):
    done = replay(run(), 1, per_device_train_batch_size=2)
    assert "not bit for bit" in done.words and "not bit for bit" in done._repr_html_()
    assert done.now.metrics == pytest.approx(done.was.metrics, abs=1e-4, rel=1e-4)
    assert replay(run(), 1, learning_rate=1e-2).settings == {}  # what is the run's is not varied


def test_a_run_goes_on_from_its_start(run, made):
    whole = run()
    again = made(folder="from the start")
    again.train(resume_from_checkpoint=str(whole.output_dir / "checkpoint-0"))
    assert [untimed(x) for x in logs(again)] == [untimed(x) for x in logs(whole)]


# catches: generators, weights or modes of the notebook's own trainer that a replay leaves changed, or
# generators that stay reseeded where it ends in an error
@pytest.mark.parametrize("fails", [False, True])
def test_the_generators_of_the_notebook_and_its_trainer_are_as_they_were(run, monkeypatch, fails):
    trainer = run()
    draw = lambda: (random.random(), np.random.rand(), torch.rand(1).item())  # noqa: NPY002
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    first, weights = draw(), {k: x.clone() for k, x in trainer.pair.state_dict().items()}
    random.setstate(states[0]), np.random.set_state(states[1])  # noqa: NPY002
    torch.set_rng_state(states[2])

    def fail(*given, **more):
        raise ValueError("this checkpoint is of another run")

    if fails:
        monkeypatch.setattr(PPOTrainer, "restore", fail)  # once the trainer is made, and has seeded
    with pytest.raises(ValueError, match="of another run") if fails else nullcontext():
        replay(trainer, 1, learning_rate=1.0)
    assert draw() == first
    assert all(torch.equal(x, weights[k]) for k, x in trainer.pair.state_dict().items())


# ---- What is refused ----


@pytest.mark.parametrize(
    "settings, said",
    [
        (dict(temperature=0.5), "temperature cannot be varied .* sampling: .* temperature 1.0"),
        (dict(response_length=9), "response_length cannot be varied .* sampling"),
        (dict(stop_strings=["x"]), "stop_strings cannot be varied .* sampling"),
        (dict(seed=1), "seed cannot be varied here: it belongs to the sampling and to the order"),
        (dict(reward_weights=[1.0]), "reward_weights cannot .* judges"),
        (dict(share_value_trunk=True), "share_value_trunk cannot .* the models"),
        (dict(optim="sgd"), "optim cannot .* optimizer's state"),
        (dict(batch_size=4), "batch_size cannot .* number of episodes"),
        (dict(kl_target=3.0), "kl_target cannot .* vary kl_coef"),
        (dict(use_liger_kernel=True), "liger_kernel cannot .* no run of PPO .* have no labels"),
        (dict(torch_compile=True), "torch_compile cannot .* no run of PPO .* rows of a new length"),
        (dict(full_determinism=True), "full_determinism cannot .* by rounding alone"),
        (dict(save_steps=3), "save_steps cannot .* no number of one update depends on it"),
        (dict(kl_estimator="full"), "kl_estimator cannot .* take k1, k2, k3 or abs"),
        (dict(advantage_estimator="rloo"), "advantage_estimator cannot .* value model"),
        (dict(value_learning_rate=1e-3), "value_learning_rate cannot .* vary learning_rate"),
        (dict(lerning_rate=1), "no setting 'lerning_rate'. Did you mean learning_rate"),
        (dict(per_device_train_batch_size=3), "is 3 and the record has 8 .* divisor of 8"),
        (
            dict(per_device_train_batch_size=2, gradient_accumulation_steps=2),
            "is 4 and the record has 8 .* divisor of 8",
        ),
        (dict(cliprange=-1.0), "cliprange is -1.0"),
        (dict(num_mini_batches=3), "num_mini_batches is 3"),
    ],
)
def test_a_setting_that_cannot_be_varied_is_refused_with_the_reason(run, settings, said):
    with pytest.raises(ValueError, match=said) as error:
        replay(run(), 1, **settings)
    assert "\n" not in str(error.value)


# catches: scores in units of this one batch, as if they had been those of all scores so far
def test_scores_are_not_normalized_by_what_the_run_did_not_keep(run):
    with pytest.raises(ValueError, match="normalize_scores cannot .* the mean and spread of all"):
        replay(run("lora"), 1, normalize_scores=True)
    off = replay(run(), 1, normalize_scores=False).now.before
    assert torch.equal(off.scores, off.raw_scores - 0.5 * ~off.stopped)


# catches: a length of the run that is taken up and changes nothing
def test_total_episodes_beside_max_steps(run, made):
    was = record_of(run(), 1).settings
    check_settings(dict(total_episodes=8000), was)
    steps = "total_episodes cannot be varied here: max_steps is 3, which alone decides"
    for changes, max_steps in ((dict(), 3), (dict(max_steps=3), -1)):
        with pytest.raises(ValueError, match=steps):
            check_settings(dict(total_episodes=8000) | changes, was | dict(max_steps=max_steps))
    trainer = made(folder="of three steps", total_episodes=None, max_steps=3)
    trainer.train()
    other = replay(trainer, 1, total_episodes=8000, max_steps=-1)
    assert other.same and other.now.metrics["lr"] > other.was.metrics["lr"]


# catches: a setting of PPO that is neither varied nor refused with a reason of its own
def test_every_setting_is_known():
    names = {f.name for f in fields(PPOConfig)}
    of_run = {*settings_that_say(PPOConfig, "run")}
    assert not MAY_VARY & (of_run | set(REASONS) | UNREPLAYED) and not of_run & set(REASONS)
    assert names <= MAY_VARY | set(REASONS) | of_run and NOWHERE
    assert {*settings_that_say(PPOConfig, "names")} <= MAY_VARY | set(REASONS)


@pytest.fixture
def spoilt(run, tmp_path):
    "A copy of the run that may be spoilt."
    return Path(shutil.copytree(run().output_dir, tmp_path / "copy"))


def test_what_the_run_did_not_keep_is_named_with_the_setting(spoilt):
    def said(update, text):
        with pytest.raises(ValueError, match=text) as error:
            replay(spoilt, update)
        assert "\n" not in str(error.value)

    said(None, "no update is given: .* can be replayed: 0, 1, 2")
    said(7, "keeps the rollouts of updates 0 to 2, not 7")
    shutil.rmtree(spoilt / "checkpoint-0")
    said(0, r"no checkpoint-0, .* save_start=True \(--save_start\). .* replayed: 1, 2")
    shutil.rmtree(spoilt / "checkpoint-1")
    said(1, r"no checkpoint-1, .* save_steps=1 \(--save_steps 1\), .* replayed: 2")
    shutil.rmtree(spoilt / "rollouts")
    said(2, r"keeps no rollouts, .* save_rollouts=True \(--save_rollouts\)")
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        replay(spoilt / "nowhere", 1)


def test_damage_and_other_versions_are_named(spoilt):
    file = spoilt / "rollouts" / "update-00001.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-50])
    with pytest.raises(
        ValueError, match=r"update-00001.safetensors is damaged|no checkpoint|not 1"
    ):
        replay(spoilt, 1)
    file.write_bytes(whole)
    manifest = spoilt / "checkpoint-1" / "manifest.json"
    text = json.loads(manifest.read_text())
    del text["run"]["settings"]
    manifest.write_text(json.dumps(text))
    with pytest.raises(
        ValueError, match="checkpoint-1 does not record the settings .* older version"
    ):
        replay(spoilt, 1)
    with open(spoilt / "checkpoint-2" / "optimizer.pt", "ab") as out:
        out.write(b"!")
    with pytest.raises(ValueError, match="checkpoint-2 is damaged: optimizer.pt"):
        replay(spoilt, 2)


def no_work(*given):
    raise AssertionError("the update was done before it was refused")


# catches: a number that only PPOConfig refuses, found out once the update with the run's own is done
@pytest.mark.parametrize(
    "settings, said",
    [
        (dict(cliprange=-1.0), "cliprange is -1.0"),
        (dict(num_ppo_epochs=0), "num_ppo_epochs is 0"),
        (dict(num_mini_batches=3), "num_mini_batches is 3"),
    ],
)
def test_a_number_out_of_range_is_refused_before_the_work(run, monkeypatch, settings, said):
    monkeypatch.setattr("rlhf_nb.diagnose.replay.do_again", no_work)
    with pytest.raises(ValueError, match=said):
        replay(run(), 1, **settings)


# catches: a damaged checkpoint after the update, found out once the update is done
@pytest.mark.parametrize(
    "file, text, said",
    [
        ("model.safetensors", "cut", "model.safetensors is not as it was written"),
        ("ppo_state.json", None, "ppo_state.json is missing"),
        ("manifest.json", "no JSON", "manifest.json is not as it was written"),
        ("manifest.json", None, "has no manifest.json"),
    ],
)
def test_damage_after_the_update_is_named_before_the_work(spoilt, monkeypatch, file, text, said):
    path = spoilt / "checkpoint-2" / file
    path.write_text(text) if text else path.unlink()
    with monkeypatch.context() as patch, pytest.raises(ValueError, match=said) as error:
        patch.setattr(module, "do_again", no_work)
        replay(spoilt, 1)
    assert f"Or move {spoilt / 'checkpoint-2'} out of the run's folder" in str(error.value)


# catches: the advice it gives for damage after the update, which does not help
def test_without_the_checkpoint_after_it_an_update_is_still_replayed(spoilt):
    (spoilt / "checkpoint-2").rename(spoilt.with_name("aside"))
    done = replay(spoilt, 1)
    assert done.same and [x.name for x in done.checks.checks if x.skipped] == ["state", "weights"]


# catches: advice to train again where a checkpoint was given, a model's name that is ignored
def test_a_checkpoint_or_a_model_that_is_of_no_use_is_refused(run):
    folder = run().output_dir
    with pytest.raises(ValueError, match=r"checkpoint-1 is a checkpoint: give its run, .*plain\."):
        replay(folder / "checkpoint-1", 1)
    with pytest.raises(ValueError, match=r"nowhere would not be used: .* \(--model_name_or_path\)"):
        replay(folder, 1, model="nowhere")


# catches: an optimizer's state in parts that is taken for none, so that Adam starts anew
def test_a_state_in_parts_is_refused(spoilt):
    manifest = spoilt / "checkpoint-1" / "manifest.json"
    text = json.loads(manifest.read_text())
    del text["files"]["optimizer.pt"]
    manifest.write_text(json.dumps(text))
    (spoilt / "checkpoint-1" / "optimizer.pt").unlink()
    with pytest.raises(ValueError, match="in parts, as FSDP and DeepSpeed write it: .* under DDP"):
        replay(spoilt, 1)


# catches: a rollout of another update, an update that is called the same with nothing to compare
def test_a_rollout_of_another_update_is_not_the_same(spoilt):
    shutil.copy(*(spoilt / "rollouts" / f"update-0000{k}.safetensors" for k in (2, 1)))
    done = replay(spoilt, 1)
    assert not done.same and failed(done)[0] == "log-probs"
    shutil.rmtree(spoilt / "checkpoint-3")
    (spoilt / "metrics.jsonl").unlink()
    done = replay(spoilt, 2)
    assert not failed(done) and not done.same
    assert [one.name for one in done.checks.checks if one.skipped] == [
        "metrics",
        "state",
        "weights",
    ]
    assert "Nothing after the update was kept" in done._repr_html_()


# catches: the mean over several updates, taken for the metrics of one
def test_a_log_of_several_updates_is_not_compared(made):
    trainer = made(folder="sparse", logging_steps=3)
    trainer.train()
    done = replay(trainer.output_dir, 2)
    assert done.same and [x.name for x in done.checks.checks if x.skipped] == ["metrics"]


# ---- What is shown ----


def test_likelier_is_after_less_before(run):
    done = replay(run(), 1, learning_rate=3e-2)
    for one in (done.was, done.now):
        r = one.before
        assert not one.likelier[~r.mask].any() and len(one.ratios) == int(r.mask.sum())
        moved = (one.after.logprobs - r.logprobs)[r.mask]
        torch.testing.assert_close(one.ratios.log(), moved, atol=1e-6, rtol=0)
        kl = one.numbers()["after/approxkl"]
        assert kl == pytest.approx(0.5 * moved.square().mean().item(), rel=1e-4)
        counts = counted(moved, bins_of([moved]))
        assert sum(counts) == len(moved) and counts[len(counts) // 2] > 0
    # the advantage's sign is the direction: what earned more is likelier, on the whole
    r = done.now.before
    together = torch.corrcoef(torch.stack([r.advantages[r.mask], done.now.likelier[r.mask]]))
    assert together[0, 1] > 0.1
    first = most_moved([done.was, done.now], 1)[0]
    total = (done.was.likelier.abs() + done.now.likelier.abs()).sum(1) / r.mask.sum(1)
    assert total[first] == total.max()
    words = {name for name, _, _ in shown_numbers([done.was, done.now])}
    assert {"loss/policy_avg", "policy/grad_norm", "val/explained_variance", "lr"} <= words
    assert len(done.was.steps) == 8 and all("grad_norm" in step for step in done.was.steps)


def test_the_view_is_whole_and_safe(run, tmp_path):
    done = replay(run(), 1, learning_rate=3e-2)
    r = done.was.before
    evil = r.with_(responses=["<script>x</script>"] * len(r), prompts=["<img src=x>"] * len(r))
    for one in (done.was, done.now):
        object.__setattr__(one, "before", evil)
    text = done._repr_html_()
    assert "<script" not in text and "<img" not in text and "&lt;img src=x&gt;" in text
    for part in ("as it was", "as replayed", "<svg", "bit for bit", "tint-"):
        assert part in text
    assert text.count('class="pair"') == 3 and "Episode 2" in replay_markup(done, [2])
    with pytest.raises(ValueError, match="there is no episode 99: the update has 8, from 0"):
        replay_markup(done, [99])
    page = done.save_html(tmp_path / "page.html", [0]).read_text()
    assert page.startswith("<!doctype html>") and "<script" not in page and "default-src" in page
    assert "learning_rate 0.03 (was 0.01)" in page and repr(done).startswith("Replay(update 1:")


# ---- On the command line ----


def test_the_command(run, tmp_path, capsys):
    folder, page = str(run().output_dir), tmp_path / "made" / "page.html"
    words = ["replay", folder, "--update", "1", "--learning_rate", "1e-5", "--cliprange", "0.1"]
    assert main([*words, "--output", str(page), "--episodes", "2", "4"]) == 0
    out = capsys.readouterr().out
    assert "learning_rate 1e-05 (was 0.01), cliprange 0.1 (was 0.2)" in " ".join(out.split())
    assert "weights: the same, bit for bit" in out and "KL moved" in out and page.is_file()
    assert main([*words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["same"] and told["settings"]["cliprange"] == dict(was=0.2, now=0.1)
    assert told["was"]["numbers"]["lr"] != told["now"]["numbers"]["lr"]


# catches: an optional setting that the command cannot switch off, as Python's None does
def test_an_optional_setting_is_switched_off(run, capsys):
    words = ["replay", str(run().output_dir), "--update", "1", "--json"]
    assert main([*words, "--missing_eos_penalty", "none", "--score-clip", "None"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["settings"] == dict(missing_eos_penalty=dict(was=0.5, now=None))
    others = "dual_clip target_kl lam_value cliprange_high score_clip".split()
    options = replay_parser().read(["run", *(f"--{name}=none" for name in others)])
    assert all(getattr(options, name) is None for name in others)


# catches: a setting with hyphens that is ignored, a line after the JSON, JSON with a bare NaN
def test_the_json_is_whole_and_hyphens_are_underscores(run, tmp_path, capsys, monkeypatch):
    words = ["replay", str(run().output_dir), "--update", "1", "--learning-rate", "1e-5", "--json"]
    numbers = Outcome.numbers
    monkeypatch.setattr(Outcome, "numbers", lambda self: numbers(self) | dict(of_none=math.nan))
    assert main([*words, "--output", str(tmp_path / "page.html")]) == 0
    out, err = capsys.readouterr()
    told = json.loads(out, parse_constant=pytest.fail)
    assert told["settings"] == dict(learning_rate=dict(was=0.01, now=1e-5))
    assert told["now"]["numbers"]["of_none"] is None and "page.html" in err


# catches: what cannot be done, found out once the update is done
@pytest.mark.parametrize(
    "words, said",
    [
        ("--episodes 99", "there is no episode 99: update 1 has 8. Give some of 0 to 7"),
        ("--output .", "--output . is a folder: give a file"),
        ("--per-device-train-batch-size 3", "is 3 and the record has 8 episodes .* divisor of 8"),
        ("--model-adapter-name x", "--model_adapter_name cannot .* models"),
    ],
)
def test_the_command_refuses_before_the_work(run, capsys, monkeypatch, words, said):
    monkeypatch.setattr(module, "do_again", no_work)
    assert main(["replay", str(run().output_dir), "--update", "1", *words.split()]) == 2
    assert re.search(said, capsys.readouterr().err)


@pytest.mark.parametrize(
    "words, said",
    [
        ("--temperature 0.5", "--temperature cannot be varied here: it belongs to the sampling"),
        ("--model_adapter_name x", "--model_adapter_name cannot .* models"),
        ("--logging_steps 2", "--logging_steps cannot .* no number of one update"),
        ("--lam 2", "--lam is 2.0"),
        ("--update 9", "keeps the rollouts of updates 0 to 2, not 9"),
    ],
)
def test_the_command_refuses_in_one_line(run, capsys, words, said):
    given = ["replay", str(run().output_dir), "--update", "1", *words.split()]
    try:
        code = main(given)
    except SystemExit as error:
        code = error.code
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert code == 2 and re.search(said, line), line


def test_the_command_fails_where_the_run_did_something_else(spoilt, capsys):
    shutil.copy(*(spoilt / "rollouts" / f"update-0000{k}.safetensors" for k in (2, 1)))
    assert main(["replay", str(spoilt), "--update", "1"]) == 1
    assert "DIFFERS log-probs: not the same" in capsys.readouterr().out


# ---- Two processes ----


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="torchrun with gloo on one machine")
def test_two_processes_do_it_bit_for_bit_and_one_refuses(tmp_path):
    from rlhf_nb.training.model_loading import train_tokenizer

    tokenizer = train_tokenizer(TOLD)
    tiny_policy(tokenizer, 0, **SIZES).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    worker = Path(__file__).with_name("replay_worker.py")
    env = dict(ACCELERATE_USE_CPU="true")
    done = forks.run(worker, str(tmp_path), folder=tmp_path, ranks=2, **env)
    assert done.returncode == 0 and "right: two ranks" in done.stdout, done.stdout[-4000:]
    assert len(Rollout.load(tmp_path / "plain/rollouts/update-00001-rank1.safetensors")) == 4
    said = "made by 2 processes, .* this is 1: start 2, as with rlhf-nb launch --num_processes 2"
    with pytest.raises(ValueError, match=said):
        replay(tmp_path / "plain", 1)
