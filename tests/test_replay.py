"""One update again: with the run's own settings bit for bit, with others as a resumed run does it;
what is refused; and that nothing of the run is touched."""

from __future__ import annotations

import hashlib
import json
import random
import re
import shutil
import sys
from contextlib import nullcontext
from pathlib import Path

import forks
import numpy as np
import pytest
import torch
from datasets import Dataset
from ppo_fixtures import PROMPTS, SIZES, likes_c, logs, saved_base, untimed
from small_runs import QUIET, RUN, SAVED, TOLD

import rlhf_nb.diagnose.replay as module
import rlhf_nb.trainer
from rlhf_nb import replay
from rlhf_nb.cli import main
from rlhf_nb.cli.replay import replay_parser
from rlhf_nb.diagnose.replay import source_of, update_again
from rlhf_nb.environments import guess_number
from rlhf_nb.moments import RunningMoments
from rlhf_nb.rollout import TENSORS
from rlhf_nb.trainer import PPOConfig, PPOTrainer
from rlhf_nb.training.model_loading import tiny_policy

KINDS = dict(
    plain=dict(normalize_scores=True, kl_controller="adaptive", missing_eos_penalty=0.5),
    lora=dict(kl_coef=0.2),
    trunk=dict(share_value_trunk=True),
    rates=dict(value_learning_rate=5e-3, bootstrap_truncated=True, whiten_rewards=True),
    grpo=dict(advantage_estimator="grpo", num_generations=2, kl_in="loss", kl_estimator="k3"),
    turns=dict(bootstrap_truncated=True, missing_eos_penalty=0.5, loss_aggregation="constant"),
    as_turns=dict(advantage_estimator="gae_turns", lam_turn=0.9, missing_eos_penalty=0.5),
    full=dict(kl_estimator="full", lr_scheduler_type="cosine", max_grad_norm=0.1),
)


def parts_of(kind: str) -> dict:
    if "turns" in kind:
        return dict(environment_factory=guess_number(9, 3, 36, ("a", "b", "c")), max_turns=2)
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

    def make(kind="plain", folder=None, policy=None, **changes):
        settings = QUIET | RUN | SAVED | dict(learning_rate=1e-2, num_mini_batches=2)
        settings |= dict(total_episodes=24, save_start=True)
        args = PPOConfig(str(root / (folder or kind)), **settings | KINDS[kind] | changes)
        policy = policy or tiny_policy(letters, 0, **SIZES)
        data = Dataset.from_dict(dict(prompt=PROMPTS))
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


# ---- The same settings ----


def differences(run, update) -> list[str]:
    "The parts in which an update done again is not what the run kept of it, in any bit."
    source = source_of(run, update)
    trainer, r, metrics = update_again(source, {})
    saved, after = source.rollout(0, 1), source.checkpoint.with_name(f"checkpoint-{update + 1}")
    state = json.loads((after / "ppo_state.json").read_text())
    load = lambda name: torch.load(after / name, weights_only=True)
    tensors = lambda r: {name: x for name in TENSORS if (x := getattr(r, name)) is not None}
    weights = {name: x.clone() for name, x in trainer.pair.state_dict().items()}
    trainer.read_model(after, trainer.pair)
    pairs = dict(
        rollout=(tensors(r), tensors(saved)),
        metrics=({k: x for k, x in metrics.items() if k in source.logged}, source.logged),
        optimizer=(trainer.optimizer.state_dict(), load("optimizer.pt")),
        schedule=(trainer.lr_scheduler.state_dict(), load("scheduler.pt")),
        state=(json.loads(json.dumps(trainer.run_state())), state),
        weights=(weights, dict(trainer.pair.state_dict())),
    )
    return [name for name, (a, b) in pairs.items() if not equal(a, b)]


def equal(a, b) -> bool:
    "Every bit of two nested values; `b` may have more names at the top."
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() <= b.keys() and all(equal(x, b[name]) for name, x in a.items())
    if isinstance(a, list):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


# catches: anything that the run's state, its settings or its rollout does not tell
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_settings_give_what_the_run_did_bit_for_bit(run, kind):
    trainer = run(kind)
    assert differences(trainer, 1) == []
    done = replay(trainer, 1)
    assert done.same and done.now is done.was and not done.settings
    line = untimed(logs(trainer)[1])
    compared = {name: x for name, x in done.was.items() if name in line}
    assert len(compared) > 15 and compared == {name: line[name] for name in compared}


@pytest.mark.parametrize("update", [0, 1, 2])
def test_every_update_is_done_again_from_the_folder_alone(run, update):
    folder = run().output_dir
    before = tree(folder)
    assert differences(folder, update) == [] and replay(folder, update).same
    assert tree(folder) == before  # nothing of the run is written


def test_an_adapter_is_put_on_its_base(run, made, letters, tmp_path):
    with pytest.raises(ValueError, match=r"does not tell which model it is of: .* PPOTrainer"):
        replay(run("lora").output_dir, 1)
    tiny_policy(letters, 0, **SIZES).save_pretrained(tmp_path / "base")
    trainer = made("lora", tmp_path.name, policy=str(tmp_path / "base"))
    trainer.train()
    assert differences(trainer.output_dir, 1) == []


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
    "spoil, part",
    [
        (forget_optimizer, "optimizer"),
        (forget_place, "schedule"),
        (forget_moments, "rollout"),
        (forget_controller, "rollout"),
        (forget_count, "weights"),
        (forget_critic, "weights"),
    ],
)
def test_a_replay_that_forgets_is_caught(run, monkeypatch, spoil, part):
    restored(monkeypatch, spoil)
    assert part in differences(run(), 1)
    done = replay(run(), 1)
    assert done.same is False and "do NOT give" in repr(done)


def test_a_replay_that_samples_is_caught(run, monkeypatch):
    prepare = module.prepare_rollout

    def sampled(trainer, saved):
        again = trainer.rollout(saved.prompts)
        return prepare(trainer, again.with_(raw_scores=saved.raw_scores))

    monkeypatch.setattr(module, "prepare_rollout", sampled)
    assert {"rollout", "weights"} <= {*differences(run(), 1)} and not replay(run(), 1).same


def test_another_order_of_the_rows_is_caught(run, monkeypatch):
    own = rlhf_nb.trainer.mini_batches
    other = lambda n, epochs, parts, seed: own(n, epochs, parts, seed + 1)
    monkeypatch.setattr(rlhf_nb.trainer, "mini_batches", other)
    assert "rollout" not in differences(run(), 1) and not replay(run(), 1).same


# ---- Other settings ----


# catches: a setting that is not taken up, or taken up in another way than a run does. A run that is
# resumed with it samples the same episodes, since its random state is the same.
@pytest.mark.parametrize(
    "kind, changes",
    [
        ("plain", dict(learning_rate=3e-2, cliprange=0.05, kl_coef=0.7)),
        ("plain", dict(gamma=0.9, lam=0.5, vf_coef=1.0, missing_eos_penalty=2.0)),
        ("plain", dict(num_ppo_epochs=2, num_mini_batches=4, weight_decay=0.1, adam_beta1=0.5)),
        ("rates", dict(learning_rate=1e-4, max_grad_norm=0.01, entropy_coef=0.1)),
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
    both = done.now.keys() & line.keys()
    assert {name: done.now[name] for name in both} == {name: line[name] for name in both}
    assert done.same and done.now != done.was
    assert {name: new for name, (_, new) in done.settings.items()} == changes


# catches: settings of the checkpoint where a resume had changed them
def test_what_a_resume_changed_is_the_runs_own(made):
    made(folder="resumed").train()
    again = made(folder="resumed", learning_rate=5e-3, kl_coef=0.4)
    again.train(resume_from_checkpoint=str(again.output_dir / "checkpoint-1"))
    done = replay(again.output_dir, 1)
    assert done.same and differences(again, 1) == []
    assert done.was["objective/kl_coef"] == 0.4 and replay(again, 1, kl_coef=0.4).settings == {}


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


def no_work(*given):
    raise AssertionError("the update was done before it was refused")


# catches: a setting that changes nothing, or whose other value needs what is not kept
@pytest.mark.parametrize(
    "settings, said",
    [
        (dict(temperature=0.5), "temperature cannot .* does not read it .*sampling"),
        (dict(seed=1), "seed cannot .* does not read it .*seeds"),
        (dict(reward_weights=[1.0]), "reward_weights cannot .*judges"),
        (dict(save_steps=3), "save_steps cannot .*run"),
        (dict(normalize_scores=False), "normalize_scores cannot .* hold only what the run's"),
        (dict(per_device_train_batch_size=2), "per_device_train_batch_size cannot .* hold only"),
        (dict(value_learning_rate=1e-3), "value_learning_rate cannot .* hold only"),
        (dict(lerning_rate=1), "no setting lerning_rate. Did you mean learning_rate"),
        (dict(cliprange=-1.0), "cliprange is -1.0"),
        (dict(num_mini_batches=3), "num_mini_batches is 3"),
    ],
)
def test_what_cannot_be_changed_is_refused_before_the_work(run, monkeypatch, settings, said):
    monkeypatch.setattr(module, "update_again", no_work)
    with pytest.raises(ValueError, match=said) as error:
        replay(run(), 1, **settings)
    assert "\n" not in str(error.value)


@pytest.fixture
def spoilt(run, tmp_path):
    "A copy of the run that may be spoilt."
    return Path(shutil.copytree(run().output_dir, tmp_path / "copy"))


def test_what_the_run_did_not_keep_is_named_with_the_setting(spoilt):
    def said(update, text):
        with pytest.raises(ValueError, match=text) as error:
            replay(spoilt, update)
        assert "\n" not in str(error.value)

    said(7, "no rollout of update 7. .* Updates that can be replayed: 0 to 2")
    shutil.rmtree(spoilt / "checkpoint-0")
    said(0, r"no checkpoint-0, .* save_start \(--save_start\)\. .* replayed: 1, 2")
    (spoilt / "checkpoint-2" / "optimizer.pt").write_bytes(b"!")
    said(2, "checkpoint-2 is damaged: optimizer.pt")
    manifest = spoilt / "checkpoint-2" / "manifest.json"
    text = json.loads(manifest.read_text())
    del text["files"]["optimizer.pt"]
    manifest.write_text(json.dumps(text))
    (spoilt / "checkpoint-2" / "optimizer.pt").unlink()
    said(2, "no optimizer.pt: .* FSDP and DeepSpeed leave it out")  # which Adam would begin without
    shutil.rmtree(spoilt / "checkpoint-1")
    said(1, r"no checkpoint-1, .* save_steps=1 \(--save_steps 1\)\.")
    shutil.rmtree(spoilt / "rollouts")
    said(2, "keeps no rollouts: give the output_dir of a run with save_rollouts=True")
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        replay(spoilt / "nowhere", 1)


# catches: a rollout of another update; a replay that is called the same with nothing to compare
def test_a_rollout_of_another_update_is_not_the_same(spoilt, capsys):
    shutil.copy(*(spoilt / "rollouts" / f"update-0000{k}.safetensors" for k in (2, 1)))
    assert main(["replay", str(spoilt), "--update", "1"]) == 1
    assert "do NOT give what the run logged" in capsys.readouterr().out
    shutil.rmtree(spoilt / "checkpoint-3")
    (spoilt / "metrics.jsonl").unlink()
    done = replay(spoilt, 2)
    assert done.same is None and "cannot be compared" in repr(done)


# catches: the mean over several updates, taken for the metrics of one
def test_a_log_of_several_updates_is_not_compared(made):
    trainer = made(folder="sparse", logging_steps=3)
    trainer.train()
    assert replay(trainer.output_dir, 2).same is None


# ---- What is shown ----


def test_the_table_has_the_kl_that_the_update_made(run):
    done = replay(run(), 1, learning_rate=3e-2)
    trainer, r, _ = update_again(source_of(run(), 1), dict(learning_rate=3e-2))
    with torch.no_grad():
        logr = (trainer.forward(trainer.pair, r)[0] - r.logprobs)[r.mask]
    moved = 0.5 * logr.square().mean().item()
    assert done.now["after/approxkl"] == pytest.approx(moved, rel=1e-4)
    assert done.was["after/approxkl"] < moved and 0 < done.now["after/clipfrac"] < 1
    assert "Update 1: learning_rate 0.03 (was 0.01)" in repr(done)
    assert re.search(r"KL between .* before and after the update .*\d +\d", repr(done))


# catches: a setting with hyphens that is ignored, an optional one that cannot be switched off
def test_the_command(run, capsys):
    words = ["replay", str(run().output_dir), "--update", "1"]
    changes = ["--learning-rate", "1e-5", "--missing_eos_penalty", "none", "--score-clip", "None"]
    assert main([*words, *changes]) == 0
    assert "learning_rate 1e-05 (was 0.01)" in capsys.readouterr().out
    assert main([*words, *changes, "--json"]) == 0
    told = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert told["settings"] == dict(
        learning_rate=dict(was=0.01, now=1e-5), missing_eos_penalty=dict(was=0.5, now=None)
    )
    assert told["same"] and told["was"]["lr"] != told["now"]["lr"]
    others = "dual_clip target_kl lam_value cliprange_high score_clip".split()
    options = replay_parser().read(["run", *(f"--{name}=none" for name in others)])
    assert all(getattr(options, name) is None for name in others)


@pytest.mark.parametrize(
    "words, said",
    [
        ("--temperature 0.5", "--temperature cannot be changed in a replay"),
        ("--model-adapter-name x", "--model_adapter_name cannot .*models"),
        ("--lam 2", r"--lam is 2.0: give a finite number of at least 0, up to 1\. See"),
        ("--update 9", "no rollout of update 9"),
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


# ---- Two processes ----


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="torchrun with gloo on one machine")
def test_two_processes_do_it_bit_for_bit_and_one_refuses(tmp_path):
    saved_base(tmp_path, TOLD)
    worker = Path(__file__).with_name("replay_worker.py")
    env = dict(ACCELERATE_USE_CPU="true")
    done = forks.run(worker, str(tmp_path), folder=tmp_path, ranks=2, **env)
    assert done.returncode == 0 and "right: two ranks" in done.stdout, done.stdout[-4000:]
    said = "made by 2 processes, and this is 1: use rlhf-nb launch --num_processes 2"
    with pytest.raises(ValueError, match=said):
        replay(tmp_path / "plain", 1)
