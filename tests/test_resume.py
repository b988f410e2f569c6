"""What a resumed run may change and what it may not, in all three trainers; and the folder that a run
has for itself."""

from __future__ import annotations

import json
import os
import resource
import signal
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from pathlib import Path
from threading import Thread

import pytest
import small_runs
import torch
from datasets import Dataset
from ppo_fixtures import BEST, PROMPTS, SIZES, Runs, likes_c, logs, rollouts, untimed, weights
from small_runs import QUIET, RUN, SAVED
from transformers import TrainerCallback

from rlhf_nb.base.files import whole_file
from rlhf_nb.checkpoint import seal
from rlhf_nb.environments import guess_number
from rlhf_nb.models import scorer_from
from rlhf_nb.reward import RewardConfig, RewardTrainer
from rlhf_nb.sft import SFTConfig, SFTTrainer
from rlhf_nb.training.folders import run_lock
from rlhf_nb.training.model_loading import tiny_policy
from rlhf_nb.training.resume import check_same_run, fingerprint_data, fingerprint_function

EVALUATED = dict(eval_dataset=Dataset.from_dict(dict(prompt=PROMPTS[:5])))


@pytest.fixture(scope="module")
def half(letters, imports, tmp_path_factory):
    "A run of PPO with a checkpoint after the first of three updates: its trainer, and how it is made."
    from rlhf_nb.trainer import PPOConfig, PPOTrainer

    def make(reward=likes_c, folder="run", policy=0, reference=None, prompts=PROMPTS, **changes):
        settings = QUIET | RUN | SAVED | dict(total_episodes=24)
        return PPOTrainer(
            PPOConfig(str(root / folder), **settings | changes),
            letters,
            tiny_policy(letters, policy, **SIZES),
            None if reference is None else tiny_policy(letters, reference, **SIZES),
            reward,
            Dataset.from_dict(dict(prompt=prompts)),
        )

    root = tmp_path_factory.mktemp("half")
    trainer = make()
    trainer.train()
    return make, root / "run" / "checkpoint-1", trainer


def likes_d(prompts, responses, **columns):
    return [response.count("d") - 0.1 * len(response) for response in responses]


def with_weight(w):
    return lambda prompts, responses, **_: [w * response.count("c") for response in responses]


# catches: a checkpoint of another run that is taken for one of this, by any of its parts
@pytest.mark.parametrize(
    "name, changes",
    [
        ("seed", dict(seed=1)),
        ("batch_size", dict(gradient_accumulation_steps=1)),
        ("response_length", dict(response_length=4)),
        ("stop_token_id", dict(stop_token_id=[3])),
        ("kl_estimator", dict(kl_estimator="k3")),
        ("whiten_rewards", dict(whiten_rewards=True)),
        ("kl_controller", dict(kl_controller="adaptive")),
        ("temperature", dict(temperature=0.9)),
        ("train_dataset", dict(prompts=PROMPTS[::-1])),
        ("train_dataset", dict(prompts=[*PROMPTS[:-1], "ef"])),
        ("judges", dict(reward=[likes_c, likes_c])),
        ("judges", dict(reward=likes_d)),
        ("ref_model_weights", dict(policy=1)),
        ("ref_model_weights", dict(reference=1)),
        ("value_model", dict(share_value_trunk=True)),
    ],
)
def test_another_run_is_refused_by_name_with_both_values(half, name, changes):
    make, checkpoint, _ = half
    other = make(folder="other", **changes)
    before = weights(other)
    with pytest.raises(ValueError, match=f"its {name} is .*, this run's is ") as error:
        other.train(resume_from_checkpoint=str(checkpoint))
    assert "\n" not in str(error.value) and f"--resume_anyway {name}" in str(error.value)
    assert not any((x != weights(other)[k]).any() for k, x in before.items())


# catches: judges that are compared by name alone
def test_a_reward_function_is_its_code():
    def likes_c(prompts, responses, **columns):
        return [response.count("c") for response in responses]

    assert fingerprint_function(likes_c) != fingerprint_function(globals()["likes_c"])


def test_a_judge_is_its_weights(half, letters):
    make, _, _ = half
    judge = lambda seed: scorer_from(tiny_policy(letters, seed, **SIZES), seed)
    make(judge(3), "judge").train()
    other = make(judge(3), "judge")
    with torch.no_grad():
        other.reward_model.get_submodule("score").weight[0, 3] += 1e-3
    with pytest.raises(ValueError, match="its reward_model_weights is"):
        other.train(resume_from_checkpoint=True)


# catches: a name that lets everything pass, a difference that no card tells
def test_a_named_difference_passes_and_is_in_the_card(half):
    make, checkpoint, _ = half
    with pytest.raises(ValueError, match="its seed is 0"):
        make(folder="x", temperature=0.5, seed=1, resume_anyway=["temperature"]).train(
            resume_from_checkpoint=str(checkpoint)
        )
    other = make(folder="anyway", temperature=0.5, resume_anyway=["temperature"])
    other.train(resume_from_checkpoint=str(checkpoint))
    card = (Path(other.args.output_dir) / "checkpoint-3" / "README.md").read_text()
    assert "after step 1 | temperature 0.5 (was 1.0)" in card
    with pytest.raises(ValueError, match="names 'temprature', .* Did you mean temperature?"):
        make(folder="y", resume_anyway=["temprature"]).train(resume_from_checkpoint=str(checkpoint))


# catches: a changed setting that the optimizer's or the controller's saved state overrules in silence
def test_what_may_change_takes_effect_and_is_named(half, caplog):
    make, checkpoint, whole = half
    changes = dict(
        learning_rate=5e-3,
        kl_coef=0.7,
        gamma=0.9,
        weight_decay=0.1,
        num_ppo_epochs=2,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
        total_episodes=48,
        save_steps=5,
    )
    other = make(folder="changed", **changes)
    other.train(resume_from_checkpoint=str(checkpoint))
    log = logs(other)[1]
    assert log["lr"] == pytest.approx(5e-3 * 5 / 6) and log["objective/kl_coef"] == 0.7
    assert other.optimizer.param_groups[0]["weight_decay"] == 0.1 and len(logs(other)) == 6
    assert untimed(logs(other)[0]) == untimed(logs(whole)[0])
    said = "learning_rate 0.005 (was 0.001)"
    card = (Path(other.args.output_dir) / "checkpoint-6" / "README.md").read_text()
    assert said in caplog.text and "not bit for bit" in caplog.text and said in card
    assert "kl_coef 0.7 (was 0.05)" in card
    again = make(folder="changed", **changes | dict(total_episodes=56, kl_coef=0.2))
    again.train(resume_from_checkpoint=True)
    card = (Path(other.args.output_dir) / "checkpoint-7" / "README.md").read_text()
    assert said in card and "kl_coef 0.2 (was 0.7)" in card and len(logs(again)) == 7


# catches: a rate of the old schedule at the first step after a resume; one that steering had set
def test_the_value_models_rate_and_the_schedule_change_too(half):
    make, checkpoint, _ = half
    other = make(folder="rates", lr_scheduler_type="constant", value_learning_rate=1e-2)
    with pytest.raises(ValueError):  # the optimizer has other groups: it cannot take up the state
        other.train(resume_from_checkpoint=str(checkpoint))
    other = make(folder="schedule", lr_scheduler_type="constant")
    other.train(resume_from_checkpoint=str(checkpoint))
    assert [log["lr"] for log in logs(other)] == pytest.approx([1e-3, 1e-3, 1e-3])


# ---- SFT and reward ----

WORDS = ["abc", "bd", "cde", "fa", "hh", "ig", "ja", "b"] * 2


@pytest.fixture(params=["sft", "reward"])
def supervised(request, letters, tmp_path):
    "Makes a trainer: `supervised(seed=..., words=..., ...settings)`."

    def make(words=WORDS, folder="run", policy=None, **changes):
        steps = dict(max_steps=6, save_steps=2, logging_steps=3, per_device_train_batch_size=4)
        settings = QUIET | dict(learning_rate=1e-2) | steps | changes
        model = policy or tiny_policy(letters, 0, **SIZES)
        if request.param == "sft":
            data = Dataset.from_dict(dict(prompt=words, completion=words[::-1]))
            args = SFTConfig(str(tmp_path / folder), **settings)
            return SFTTrainer(model, args, data, data, processing_class=letters)
        rejected = [word[::-1] + "j" for word in words]
        data = Dataset.from_dict(dict(prompt=words, chosen=words[::-1], rejected=rejected))
        args = RewardConfig(str(tmp_path / folder), **settings)
        return RewardTrainer(model, args, data, data, processing_class=letters)

    return make


def told(trainer) -> list[dict]:
    return [
        {k: v for k, v in log.items() if not k.startswith("train_") and k != "total_flos"}
        for log in trainer.state.log_history
    ]


# catches: the loss of a step before the checkpoint that the next log forgets
def test_supervised_runs_go_on_bit_for_bit(supervised):
    whole = supervised()
    whole.train()
    again = supervised(folder="again")
    again.train(resume_from_checkpoint=f"{whole.args.output_dir}/checkpoint-4")
    assert told(again) == told(whole)
    assert not any((x != weights(again)[k]).any() for k, x in weights(whole).items())


# catches: one step more of a run that was finished, with a rate that is not 0 at its end
def test_a_finished_supervised_run_does_nothing_more(supervised):
    whole = supervised(lr_scheduler_type="constant")
    whole.train()
    again = supervised(lr_scheduler_type="constant")
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 6 and told(again) == told(whole)
    assert not any((x != weights(again)[k]).any() for k, x in weights(whole).items())


def test_supervised_runs_are_told_apart(supervised, letters):
    supervised().train()
    wide = tiny_policy(letters, 0, **SIZES | dict(hidden_size=32))
    for name, changes in (
        ("seed", dict(seed=1)),
        ("batch_size", dict(per_device_train_batch_size=2)),
        ("train_dataset", dict(words=WORDS[1:] + WORDS[:1])),
        ("model", dict(policy=wide)),
    ):
        with pytest.raises(ValueError, match=f"its {name} is .*, this run's is "):
            supervised(**changes).train(resume_from_checkpoint=True)


def test_supervised_rates_change(supervised, caplog):
    supervised().train()
    again = supervised(max_steps=8, learning_rate=1e-3, logging_steps=1)
    again.train(resume_from_checkpoint=True)
    rates = {log["step"]: log.get("learning_rate") for log in again.state.log_history[:-1]}
    assert rates == pytest.approx({3: 1e-2 * 4 / 6, 6: 1e-2 / 6, 7: 1e-3 * 2 / 8, 8: 1e-3 / 8})
    assert "learning_rate 0.001 (was 0.01)" in caplog.text and "max_steps 8 (was 6)" in caplog.text
    assert "learning_rate 0.001 (was 0.01)" in again.changes["after step 6"]


def test_weights_alone_cannot_be_resumed(supervised):
    supervised(save_only_model=True).train()
    with pytest.raises(ValueError, match="save_only_model: it holds weights, and neither"):
        supervised().train(resume_from_checkpoint=True)


# ---- The best checkpoint ----


class SpoilsTheBest(TrainerCallback):
    "A byte of the best checkpoint's weights changes before the end of the run."

    def on_save(self, args, state, control, **_):
        if state.global_step == state.max_steps:
            file = Path(state.best_model_checkpoint) / "model.safetensors"
            file.write_bytes(file.read_bytes()[:-1] + b"!")


# catches: damaged weights that a run ends with
def test_a_damaged_best_is_an_error(ppo):
    best = dict(metric_for_best_model="eval_score", greater_is_better=True, **BEST)
    trainer = ppo(total_episodes=16, **best, parts=dict(callbacks=[SpoilsTheBest()]) | EVALUATED)
    with pytest.raises(ValueError, match=r"checkpoint-\d is damaged: model.safetensors"):
        trainer.train()


def test_a_damaged_best_is_an_error_in_supervised_runs_too(supervised):
    trainer = supervised(max_steps=2, **BEST)
    trainer.add_callback(SpoilsTheBest())
    with pytest.raises(ValueError, match=r"checkpoint-\d is damaged: model.safetensors"):
        trainer.train()


# ---- The folder ----


# catches: a fresh run that is mixed with an older one, an older one that is lost without a word
def test_a_fresh_run_does_not_mix_with_an_older_one(ppo, caplog):
    settings = dict(total_episodes=16, save_rollouts=True, save_strategy="steps", save_steps=1)
    first = ppo(**settings)
    folder = Path(first.args.output_dir)
    first.train()
    with pytest.raises(ValueError, match=r"holds an earlier run \(checkpoint-1, checkpoint-2\)"):
        ppo(**settings).train()
    ppo(**settings | dict(total_episodes=8, overwrite_output_dir=True)).train()
    assert [path.name for path in folder.glob("checkpoint-*")] == ["checkpoint-1"]
    assert "deleted" in caplog.text
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 2
    assert len([*folder.glob("rollouts/*")]) == 1
    assert len([*folder.glob("earlier-1/rollouts/*")]) == 2


def test_what_was_logged_before_training_stays(ppo):
    trainer = ppo(total_episodes=8)
    trainer.evaluate()
    trainer.train()
    rows = [json.loads(x) for x in open(Path(trainer.args.output_dir) / "metrics.jsonl")]
    assert "eval_score" in rows[0] and "objective/kl" in rows[1]


def test_a_checkpoint_that_was_not_written_here_is_not_deleted(ppo):
    trainer = ppo(total_episodes=8, overwrite_output_dir=True)
    mine = Path(trainer.args.output_dir) / "checkpoint-9"
    mine.mkdir(parents=True)
    (mine / "weights").write_text("mine")
    with pytest.raises(ValueError, match="checkpoint-9 was not written by this package"):
        trainer.train()
    assert (mine / "weights").read_text() == "mine"


# catches: later checkpoints that are renamed for a resume that is then refused; two lines for a
# step, a torn line that stays
def test_a_refused_resume_changes_nothing_and_one_that_goes_on_has_a_line_a_step(ppo):
    settings = dict(total_episodes=24, save_strategy="steps", save_steps=1)
    folder = Path(ppo.trained(**settings).args.output_dir)
    file, before = folder / "metrics.jsonl", sorted(path.name for path in folder.iterdir())
    with pytest.raises(ValueError, match="belongs to another run: its seed"):
        ppo(**settings, seed=5).train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    assert sorted(path.name for path in folder.iterdir()) == before
    with open(file, "a") as lines:
        lines.write('{"step": 3, "objec')
    again = ppo(**settings)
    again.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    steps = [row["step"] for row in rows if "objective/kl" in row]
    assert steps == [1, 2, 3] and rows == again.state.log_history
    assert (folder / "checkpoint-3.later-1").is_dir()


# catches: an older checkpoint that is kept although save_total_limit is reached, one that was never
# finished taken for the last, in silence
def test_an_unfinished_checkpoint_is_skipped_with_a_line(ppo, caplog):
    settings = dict(total_episodes=24, save_strategy="steps", save_steps=1, save_total_limit=2)
    first = ppo.trained(**settings)
    folder = Path(first.args.output_dir)
    assert sorted(p.name for p in folder.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-3"]
    (folder / "checkpoint-3" / "manifest.json").unlink()
    (folder / "checkpoint-4.partial").mkdir()
    again = ppo(**settings)
    again.train(resume_from_checkpoint=True)
    assert "checkpoint-3 was never finished, and is skipped" in caplog.text
    assert "checkpoint-4.partial was never finished" in caplog.text
    assert again.state.global_step == 3 and len(logs(again)) == 3


def test_nothing_to_resume_is_one_line(ppo):
    with pytest.raises(ValueError, match="There is no whole checkpoint in .*Start without"):
        ppo().train(resume_from_checkpoint=True)


# catches: a signal in the last step that nobody answers, so that a script goes on as if all were well
@pytest.mark.parametrize("at", [1, 3])
def test_a_signal_is_answered_after_any_step(ppo, at):
    class Interrupted(TrainerCallback):
        def on_substep_end(self, args, state, control, **_):
            if state.global_step == at - 1:
                os.kill(os.getpid(), signal.SIGINT)

    settings = dict(total_episodes=24, save_strategy="steps", save_steps=99)
    trainer = ppo(**settings, parts=dict(callbacks=[Interrupted()]))
    # tests started in the background by a shell inherit SIGINT as ignored
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(
        KeyboardInterrupt, match=f"^stopped after step {at}. The last whole .*-{at}:"
    ):
        trainer.train()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    again = ppo(**settings)
    again.train(resume_from_checkpoint=True)
    assert [log["step"] for log in logs(again)] == [1, 2, 3]


@contextmanager
def refused(most: int, said: str) -> Iterator[None]:
    "An OSError with this text, on a disk that takes no file of more bytes."
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        with pytest.raises(OSError, match=said):
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        signal.signal(signal.SIGXFSZ, before)


# catches: a final save that ends in a traceback through a file writer; a state that is cut off, a
# rollout or a lock that leaves a part of itself, an error that names no file
def test_what_finds_no_disk_is_one_line(ppo, tmp_path):
    trainer = ppo.trained(total_episodes=8, save_strategy="steps", save_steps=1, save_rollouts=True)
    trainer.save_state()
    folder = trainer.output_dir
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with refused(2048, "could not be written .* whole checkpoint is .*-1:"):
        trainer.save_model(str(tmp_path / "saved"))
    state = folder / "trainer_state.json"
    with refused(9, f"{state}"), whole_file(state) as beside:
        trainer.state.save_to_json(beside)
    with refused(2048, "update-00001.safetensors"):
        trainer.step()
    with refused(3, f"{folder}/_run.owner"), run_lock(folder):
        pass
    with run_lock(folder):
        pass
    assert {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()} == before


# catches: torch's advice to load it all the same, in the error or behind it
@pytest.mark.parametrize("name", ["optimizer.pt", "rng_state.pth", "pending_0.pt"])
def test_a_checkpoint_that_would_run_code_is_refused(ppo, capsys, name):
    settings = dict(total_episodes=16, save_strategy="steps", save_steps=1)
    folder = Path(ppo.trained(**settings).args.output_dir) / "checkpoint-1"
    torch.save(dict(a=Runs()), folder / name)
    seal(folder, **json.loads((folder / "manifest.json").read_text())["run"])
    with pytest.raises(ValueError, match=f"^a file in {folder} .* do not read it by") as e:
        ppo(**settings).train(resume_from_checkpoint=str(folder))
    shown = "".join(traceback.format_exception(e.value))
    assert "weights_only" not in shown and "it ran" not in capsys.readouterr().out


# ---- Data ----


# catches: JSON that knows no tensor and no date
@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_formats_and_rich_columns_survive(ppo, kind):
    import datetime

    rows = dict(
        prompt=PROMPTS,
        when=[datetime.datetime(2024, 5, 1, 12, i) for i in range(len(PROMPTS))],
        blob=[bytes([i, 255]) for i in range(len(PROMPTS))],
        numbers=[[i, i + 1] for i in range(len(PROMPTS))],
    )
    plain = Dataset.from_dict(rows)
    data = plain.with_format(kind, columns=["numbers"], output_all_columns=True)
    settings = dict(total_episodes=16, save_rollouts=True, save_strategy="steps", save_steps=1)
    found = rollouts(ppo.trained(data=data, **settings))[0].columns
    by_number = {row["numbers"][0]: row for row in plain}
    for when, blob, numbers in zip(found["when"], found["blob"], found["numbers"]):
        row = by_number[int(numbers[0])]
        assert (when, blob, numbers.tolist()) == (row["when"], row["blob"], row["numbers"])
        assert type(numbers).__module__ == kind
    ppo(data=plain, **settings | dict(total_episodes=24)).train(resume_from_checkpoint=True)


def test_data_are_their_rows_in_order():
    data = Dataset.from_dict(dict(a=["x", None, "z"], b=[[1, 2], [3], []], c=[1.0, 2.0, 3.0]))
    assert fingerprint_data(data) == fingerprint_data(data.select([0, 1, 2]).with_format("numpy"))
    assert fingerprint_data(data.select([0, 1, 2]).flatten_indices()) == fingerprint_data(data)
    others = [data.select([1, 0, 2]), data.rename_column("a", "d"), data.select([0, 1])]
    moved = Dataset.from_dict(dict(a=["x", None, "z"], b=[[1], [2, 3], []], c=[1.0, 2.0, 3.0]))
    assert len({fingerprint_data(x) for x in (data, moved, *others)}) == 5


LIMIT, LIKED = 3, ["a"]


def helper(x):
    return min(x, LIMIT)


def reads_its_module(prompts, responses, **columns):
    return [helper(sum(x in LIKED for x in y)) + len(small_runs.TOLD) for y in responses]


class Weighed:
    def __init__(self, weight):
        self.weight = weight

    def __call__(self, prompts, responses):
        return [self.weight] * len(responses)

    def method(self, prompts, responses):
        return self(prompts, responses)


def weighed(prompts, responses, *, weight=1.0):
    return [weight] * len(responses)


def with_default(w):
    def weighed(prompts, responses, *, weight=w):
        return [weight] * len(responses)

    return weighed


class Slotted:
    __slots__ = ("weight",)
    __init__, __call__ = Weighed.__init__, Weighed.__call__


def cached(w):
    return with_weight(lru_cache(lambda x: w * x))


# catches: what a reward holds that its own code does not show, for each place where it may be
@pytest.mark.parametrize(
    "make",
    [
        lambda w: partial(weighed, weight=w),
        Weighed,
        Slotted,
        cached,
        lambda w: type("Told", (Weighed,), dict(told=w)),
        lambda w: type("Told", (Weighed,), dict(told=property(lambda self: w)))(0),
        lambda w: Weighed(w).method,
        lambda w: Weighed({"deep": [torch.tensor(w)]}),
        with_default,
        with_weight,
        lambda w: with_weight([dict(w=w)]),
        lambda w: guess_number(15, int(w)),
    ],
)
def test_a_reward_function_is_all_that_it_holds(make):
    assert fingerprint_function(make(1.0)) == fingerprint_function(make(1.0))
    assert fingerprint_function(make(1.0)) != fingerprint_function(make(2.0))


PLACES = dict(LIMIT=4, LIKED=["b"], helper=len) | {"small_runs.TOLD": "x"}


@pytest.mark.parametrize("name", PLACES)
def test_a_reward_function_is_what_it_reads_of_modules(monkeypatch, name):
    before = fingerprint_function(reads_its_module)
    assert before == fingerprint_function(reads_its_module)
    monkeypatch.setattr(name if "." in name else f"{__name__}.{name}", PLACES[name])
    assert fingerprint_function(reads_its_module) != before


def test_what_a_reward_holds_and_nobody_can_compare_is_named(caplog):
    fingerprint_function(with_weight(Thread(target=print)))
    assert "Thread" in caplog.text


# catches: another evaluation set, a rate that makes another optimizer, a manifest that says nothing,
# a state of another version, and a word for a folder, each found late or never
def test_a_checkpoint_that_cannot_be_this_runs_is_refused(half, tmp_path):
    make, checkpoint, trainer = half
    with pytest.raises(ValueError, match="value_learning_rate is 0.1, and was None in"):
        make(folder="rate", value_learning_rate=0.1).train(str(checkpoint))
    with pytest.raises(ValueError, match="'last', and there is no such folder"):
        make(folder="word").train("last")
    (tmp_path / "manifest.json").write_text('{"run": {}}')
    with pytest.raises(ValueError, match="does not say which run"):
        check_same_run(tmp_path, trainer.identity())
    (tmp_path / "ppo_state.json").write_text('{"update_count": 1}')
    with pytest.raises(ValueError, match="lacks controller, .*, moments, .*: another version"):
        trainer.read_state(tmp_path)
    trainer.eval_dataset = dict(one=Dataset.from_dict(dict(prompt=["a"])))
    before = trainer.identity()
    trainer.eval_dataset = dict(one=Dataset.from_dict(dict(prompt=["b"])))
    assert before.keys() == trainer.identity().keys() and before != trainer.identity()
    trainer.eval_dataset = None


# catches: a warm-up that the run ends in, without a word; a warning of one that it does not
@pytest.mark.parametrize(
    "updates, given, kind, told",
    [
        (3, 3, "linear", "the warm-up (warmup_steps) has 3 steps and the run 3: it ends before"),
        (2, 9, "cosine", "9 steps and the run 2"),
        (3, 0.9, "linear", "3 steps and the run 3"),
        (3, 2, "linear", ""),
        (3, 0.5, "linear", ""),
        (3, 9, "constant", ""),
    ],
)
def test_a_warm_up_beyond_the_run_is_named(ppo, caplog, updates, given, kind, told):
    ppo(total_episodes=8 * updates, warmup_steps=given, lr_scheduler_type=kind).prepare()
    lines = [x.message for x in caplog.records if "warmup_steps" in x.message]
    assert len(lines) == bool(told) and all(told in line for line in lines)
