"""One update of a run again: the checkpoint before it, its saved rollout, other settings; nothing
is sampled. The same settings give what the run did, bit for bit, which is checked each time."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor
from transformers import TrainerCallback

from rlhf_nb.base.files import write_text_atomic
from rlhf_nb.base.loading import no_bars
from rlhf_nb.base.random_state import random_state_kept
from rlhf_nb.diagnose.checks import Check, Checks
from rlhf_nb.diagnose.replay_outcome import Outcome
from rlhf_nb.diagnose.replay_record import Record, record_of, trainer_of
from rlhf_nb.diagnose.replay_settings import arguments, check_settings, in_same_batch
from rlhf_nb.diagnose.replay_view import replay_markup, replay_page
from rlhf_nb.ppo import final_scores
from rlhf_nb.rollout import TENSORS, Rollout
from rlhf_nb.trainer import PPOConfig, PPOTrainer
from rlhf_nb.training.resume import changes_text
from rlhf_nb.ui.run_files import merged
from rlhf_nb.update import Metrics, charge


class Steps(TrainerCallback):
    "Keeps the numbers of each optimizer step: means over its tokens."

    def __init__(self) -> None:
        self.seen: list[dict[str, float]] = []

    def ppo_step(self, sums: dict[str, float], norm: float) -> None:
        means = {name: x / sums["tokens"] for name, x in sums.items() if name != "tokens"}
        self.seen.append(means | dict(tokens=sums["tokens"], grad_norm=norm))


# ---- The update ----


def tensors_of(r: Rollout) -> dict[str, Tensor]:
    "The tensors that a rollout has, by name."
    return {name: x for name in TENSORS if (x := getattr(r, name)) is not None}


def ready(trainer: PPOTrainer, saved: Rollout, was: Mapping[str, Any]) -> Rollout:
    "Scores, KL, rewards and advantages from the judges' raw scores, as the trainer makes them."
    args, reduce = trainer.args, trainer.layout.sum
    r = saved.with_(**{name: x.to(trainer.layout.device) for name, x in tensors_of(saved).items()})
    if args.kl_estimator != was["kl_estimator"]:
        r = r.with_(kl=trainer.kl(r, r.logprobs, r.ref_logprobs))
    final = final_scores(r.raw_scores, r.stopped, args, trainer.moments, reduce, r.mask)
    r = charge(r.with_(scores=final), args, trainer.controller.value)
    return trainer.advantages(r)


@torch.no_grad()
def recomputed_by(trainer: PPOTrainer, r: Rollout) -> Rollout:
    "The rollout with the log-probs and values of the models as they are now."
    outputs = lambda part: trainer.forward(trainer.model_wrapped, part)[::2]
    measure = lambda part: tuple(x for x in outputs(part) if x is not None)
    logprobs, *values = trainer.forward.over(r, measure)
    return r.with_(logprobs=logprobs, values=values[0] * r.mask if values else None)


def of_all_ranks(r: Rollout) -> Rollout:
    "The ranks' episodes as one rollout, in the host's memory."
    return merged(gather_object([r.with_(**{name: x.cpu() for name, x in tensors_of(r).items()})]))


def do_again(record: Record, changes: Mapping[str, Any]) -> Outcome:
    """The update with some settings changed; without any, compared with what the run did. Raises
    ValueError on settings that do not go together, FloatingPointError where it diverges."""
    made: dict[str, Any] = {
        k: record.made[k] for k in ("micro_batch_tokens", "trim_padding") if k in record.made
    }
    start = time.perf_counter()
    with no_bars(quiet=True), random_state_kept(), tempfile.TemporaryDirectory() as scratch:
        args = arguments({**record.settings, **made, **changes}, Path(scratch))
        saved = record.rollout(args.process_index, args.world_size)
        trainer, steps = trainer_of(record, args), Steps()
        if not trainer.layout.in_place:
            raise ValueError(
                f"this is {trainer.layout.describe()}: an update is replayed on one process, or on "
                "several under DDP."
            )
        trainer.add_callback(steps)
        trainer.restore(record.checkpoint, record.changed | set(changes))
        r = ready(trainer, saved, record.settings)
        first = recomputed_by(trainer, r)
        metrics = trainer.update(r)
        last = recomputed_by(trainer, r)
        unequal = {} if changes else differences(trainer, record, (saved, first, r), metrics)
    clip, seconds = (args.cliprange, args.cliprange_high), time.perf_counter() - start
    both, device = (of_all_ranks(r), of_all_ranks(last)), trainer.layout.device.type
    return Outcome(metrics, steps.seen, *both, clip, seconds, device, unequal)


# ---- Whether it is what the run did ----


def unlike(a: Any, b: Any, at: str = "") -> list[str]:
    "Where two nested values differ in any bit."
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return [] if a.shape == b.shape and bool((a.cpu() == b.cpu()).all()) else [at]
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        names = [name for name in a if name in b]
        lost = [f"{at}.{name}" for name in {*a} ^ {*b}]
        return lost + [x for name in names for x in unlike(a[name], b[name], f"{at}.{name}")]
    if isinstance(a, Sequence) and isinstance(b, Sequence) and not isinstance(a, str):
        same = len(a) == len(b)
        pairs = enumerate(zip(a, b))
        return [x for i, (p, q) in pairs for x in unlike(p, q, f"{at}.{i}")] if same else [at]
    return [] if a == b else [at]


def state_unlike(trainer: PPOTrainer, after: Path) -> list[str]:
    "Parts of optimizer, schedule, controller and moments that differ from a checkpoint's."
    load = lambda name: torch.load(after / name, map_location="cpu", weights_only=True)
    state = json.loads((after / "ppo_state.json").read_text())
    own = json.loads(json.dumps(trainer.run_state() | dict(update_count=trainer.update_count)))
    names = "controller", "moments", "update_count"
    return [
        *unlike(trainer.optimizer.state_dict(), load("optimizer.pt"), "optimizer"),
        *unlike(trainer.lr_scheduler.state_dict(), load("scheduler.pt"), "scheduler"),
        *(name for name in names if own[name] != state[name]),
    ]


def weights_unlike(trainer: PPOTrainer, after: Path) -> list[str]:
    "Weights that loading a checkpoint changes."
    before = {name: x.detach().clone() for name, x in trainer.pair.state_dict().items()}
    trainer.read_model(after, trainer.pair)
    return unlike(before, dict(trainer.pair.state_dict()), "weights")


def differences(
    trainer: PPOTrainer,  # after the update; the checkpoint after it is loaded into it
    record: Record,
    rollouts: tuple[Rollout, Rollout, Rollout],  # as saved, as the models see it, as learnt from
    metrics: Metrics,
) -> dict[str, list[str]]:  # by check; one that the folder cannot tell is left out
    "Everything in which an update differs from what the run kept of it, in any bit, on any rank."
    saved, recomputed, made = rollouts
    of_models, of_rewards = (
        ("logprobs", "values"),
        ("kl", "scores", "rewards", "advantages", "returns"),
    )
    part = lambda r, names: {name: x for name, x in tensors_of(r).items() if name in names}
    unequal = {
        "log-probs": unlike(part(recomputed, of_models), part(saved, of_models)),
        "rewards": unlike(part(made, of_rewards), part(saved, of_rewards)),
    }
    if record.line is not None:
        logged = {name: x for name, x in record.line.items() if name in metrics}
        unequal["metrics"] = unlike({name: metrics[name] for name in logged}, logged)
    if record.after is not None:
        unequal["state"] = state_unlike(trainer, record.after)
        unequal["weights"] = weights_unlike(trainer, record.after)
    everywhere: list[dict[str, list[str]]] = gather_object([unequal])
    return {name: sorted({x for one in everywhere for x in one[name]}) for name in unequal}


CHECKS = {  # name: what is compared, what is looked at when it differs, what keeps it
    "log-probs": (
        "the checkpoint's models give the log-probs and values of the rollout",
        "checkpoint and rollout are of two runs, or the run computed on another device",
        "",
    ),
    "rewards": (
        "scores, rewards, advantages and returns are those of the rollout",
        "a setting was changed while the run went on, or the running moments are of another place",
        "",
    ),
    "metrics": (
        "every metric is that of the run's log",
        "a setting was changed while the run went on, or another machine rounds otherwise",
        "logging_steps=1 logs each update alone",
    ),
    "state": (
        "optimizer, schedule, kl_coef and moments are those of the checkpoint after it",
        "the learning rate was changed while the run went on",
        "save_steps=1 keeps the checkpoint after each update",
    ),
    "weights": (
        "every weight is that of the checkpoint after it",
        "see the checks above; the first that fails is the cause",
        "save_steps=1 keeps the checkpoint after each update",
    ),
}


def checks_of(unequal: Mapping[str, list[str]]) -> Checks:
    "The same as checks: passed where nothing differs, skipped where the run did not keep it."

    def check(name: str) -> Check:
        expected, advice, keeps = CHECKS[name]
        if name not in unequal:
            return Check(
                name, False, True, f"skipped: the run kept none ({keeps})", expected, advice
            )
        lost = [part.lstrip(".") for part in unequal[name]]
        names = ", ".join(lost[:3]) + f" and {len(lost) - 3} more" * (len(lost) > 3)
        said = f"not the same: {names}" if lost else "the same, bit for bit"
        return Check(name, not lost, False, said, expected, advice)

    return Checks(tuple(check(name) for name in CHECKS))


# ---- Two of them side by side ----


@dataclass(frozen=True)
class Replay:
    "One update as it was and as replayed."

    record: Record
    settings: dict[str, tuple[Any, Any]]  # what was varied: as it was, as replayed
    was: Outcome
    now: Outcome  # the same object where nothing was varied

    @property
    def checks(self) -> Checks:
        "What the update with the run's own settings was compared with."
        return checks_of(self.was.differences)

    @property
    def same(self) -> bool:
        """Whether the run's own settings give, bit for bit, all that the run kept of this update;
        its metrics or its weights must be among that."""
        compared = {"metrics", "weights"} & set(self.was.differences)
        return bool(compared) and not any(self.was.differences.values())

    @property
    def words(self) -> str:
        "What was varied; whether the bits can be the same."
        return changes_text(self.settings, PPOConfig) if self.settings else "the run's own settings"

    @property
    def elsewhere(self) -> str:
        "In what this machine differs from the run's; empty: in nothing that is known."
        made, device = self.record.made, self.was.device
        now = dict(torch=torch.__version__, threads=torch.get_num_threads(), device=device)
        other = [f"{k} {made[k]} (here {x})" for k, x in now.items() if made.get(k, x) != x]
        return f"The run computed with {', '.join(other)}: not bit for bit." if other else ""

    def save_html(self, path: str | Path, episodes: Sequence[int] | None = None) -> Path:
        "Write one page that needs no kernel and no network."
        write_text_atomic(path, replay_page(self, episodes))
        return Path(path)

    def __repr__(self) -> str:
        verdict = "the same" if self.same else "not shown to be the same"
        return f"Replay(update {self.record.update}: {self.words}; own settings {verdict})"

    def _repr_html_(self) -> str:
        return replay_markup(self)


def replayed(record: Record, was: Outcome, settings: Mapping[str, Any]) -> Replay:
    "An update with some settings varied, beside the same with the run's own. Raises ValueError."
    check_settings(settings, record.settings)
    settings = in_same_batch(settings, record.settings)
    varied = {k: x for k, x in settings.items() if x != record.settings.get(k)}
    now = do_again(record, varied) if varied else was
    return Replay(record, {k: (record.settings.get(k), x) for k, x in varied.items()}, was, now)


def replay_of(record: Record, settings: Mapping[str, Any]) -> Replay:
    "`replay` of what a run keeps of an update."
    check_settings(settings, record.settings)
    return replayed(record, do_again(record, {}), settings)


def replay(
    run: Any,  # the folder of a run with checkpoints and rollouts, or its PPOTrainer
    update: int | None = None,  # from 0: the k-th starts from checkpoint-k
    *,
    model: Any = None,  # the policy, or an adapter's base, where the folder cannot tell
    value_model: Any = None,  # the same of the value model
    **settings: Any,  # of PPOConfig, those that are varied
) -> Replay:
    """One update of a run again with other settings, nothing sampled, beside what it was. Raises
    ValueError on a setting of the sampling, and where the run did not keep what is needed."""
    return replay_of(record_of(run, update, model, value_model), settings)
