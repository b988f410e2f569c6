"""LiveDashboard: what a hand wishes happens between two updates and nowhere else, is written down,
and a run that nobody touches is the run without it."""

from __future__ import annotations

import base64
import json
import math
import re
import threading
import time
from html import unescape
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from ppo_fixtures import likes_c, logs, unlike, untimed, weights
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from rlhf_nb.kl_control import AdaptiveKLController, FixedKLController
from rlhf_nb.training.metrics import METRICS, in_order
from rlhf_nb.ui.chart import thin
from rlhf_nb.ui.dashboard import LiveDashboard, Wishes
from rlhf_nb.ui.run_view import (
    STATES,
    VIEWER_CURVES,
    Change,
    Run,
    chosen_curves,
    curve_figure,
    render_run,
    state_sentence,
)


class At(TrainerCallback):
    "Does something while update n is being made."

    def __init__(self, **acts):
        self.acts = acts

    def on_step_begin(self, args, state, control, **kwargs):
        if act := self.acts.get(f"u{state.global_step + 1}"):
            act()


def coefs(trainer) -> list[float]:
    return [log["objective/kl_coef"] for log in logs(trainer)]


def kept(trainer, update: int) -> float:
    return json.loads(
        Path(trainer.args.output_dir, f"checkpoint-{update}", "ppo_state.json").read_text()
    )["controller"]["value"]


ONE_PASS = dict(per_device_train_batch_size=8, gradient_accumulation_steps=1)  # less work


def steered(ppo, acts: dict, updates: int = 6, **settings):
    "A run of so many updates, its dashboard, and what was asked, in a thread where acts want it."
    dashboard = LiveDashboard(every=0)
    hand = At(**{name: lambda act=act: act(dashboard) for name, act in acts.items()})
    parts = dict(callbacks=[dashboard, hand])
    return ppo(total_episodes=8 * updates, **ONE_PASS, parts=parts, **settings), dashboard


def wish(value):
    return lambda dashboard: setattr(dashboard, "kl_coef", value)


def wait_for(dashboard: LiveDashboard, state: str) -> None:
    end = time.monotonic() + 20
    while dashboard.run.state != state:
        assert time.monotonic() < end, f"{state} did not come: {dashboard!r}"
        time.sleep(0.01)


# catches: a dashboard that draws a random number, holds a log back, or changes a setting
def test_watching_changes_nothing(ppo):
    alone = ppo(total_episodes=24, **ONE_PASS)
    alone.train()
    for drawn in (False, True):
        trainer, dashboard = steered(ppo, {}, 3)
        if drawn:
            assert dashboard.box.children  # made as if somebody looked
        trainer.train()
        assert not unlike(weights(trainer), weights(alone))
        assert [*map(untimed, logs(trainer))] == [*map(untimed, logs(alone))]
        told = {name for line in trainer.state.log_history for name in line}
        assert not [name for name in told if name.startswith("steering/")]
        assert dashboard.run.state == "done" and (dashboard.seconds > 0) == drawn


# catches: a wish that acts inside the update that is being made, one that comes an update late, one
# that the checkpoint of its update does not know; a log of the change that takes back the log that
# was due
@pytest.mark.parametrize("kind", ["fixed", "adaptive"])
def test_kl_coef_takes_effect_with_the_next_update_and_is_kept(ppo, kind):
    each = dict(save_strategy="steps", save_steps=1)
    trainer, dashboard = steered(ppo, dict(u3=wish(0.4)), kl_controller=kind, **each)
    trainer.train()
    assert all(abs(value - 0.05) < 0.01 for value in coefs(trainer)[:3])
    assert coefs(trainer)[3] == 0.4
    assert all(abs(value - 0.4) < 0.02 for value in coefs(trainer)[3:])
    assert (len(set(coefs(trainer)[3:])) == 1) == (kind == "fixed")
    assert kept(trainer, 3) == 0.4 != kept(trainer, 2)
    (line,) = (line for line in trainer.state.log_history if "steering/kl_coef" in line)
    before = line["steering/kl_coef_before"]
    assert line["step"] == 3 and line["steering/kl_coef"] == 0.4
    assert dashboard.run.changes == [Change(3, "kl_coef", before, 0.4)]
    assert "steering/kl_coef" in trainer.card(Path(trainer.args.output_dir))
    assert [log["step"] for log in logs(trainer)] == [1, 2, 3, 4, 5, 6]


# catches: a resume that falls back to the configuration, loses the curves before it, or forgets who
# changed what
def test_resume_goes_on_with_the_change_and_the_curves(ppo, tmp_path):
    kept_in = dict(save_strategy="steps", save_steps=10, output_dir=str(tmp_path / "steered"))
    trainer, _ = steered(ppo, dict(u2=wish(0.3), u4=LiveDashboard.stop), **kept_in)
    assert trainer.train().global_step == 4 and kept(trainer, 4) == 0.3
    again, dashboard = steered(ppo, {}, **kept_in)
    again.train(resume_from_checkpoint=True)
    straight, _ = steered(ppo, dict(u2=wish(0.3)))
    straight.train()
    assert not unlike(weights(again), weights(straight))
    assert coefs(again) == coefs(straight) == [0.05] * 2 + [0.3] * 4
    assert [u for u, _ in dashboard.run.lines["objective/kl"]] == [1, 2, 3, 4, 5, 6]
    assert [(change.update, change.what) for change in dashboard.run.changes] == [
        (2, "kl_coef"),
        (4, "stop"),
    ]


# catches: a stop inside an update, one update too late, without a checkpoint, without its log, or
# reported as done
@pytest.mark.parametrize("strategy", ["no", "steps"])
def test_stop_ends_this_update_and_keeps_it(ppo, strategy):
    trainer, dashboard = steered(
        ppo, dict(u3=LiveDashboard.stop), save_strategy=strategy, save_steps=100, logging_steps=100
    )
    result = trainer.train()
    assert result.global_step == trainer.update_count == 3 and dashboard.run.state == "stopped"
    assert [log["step"] for log in logs(trainer)] == [3]
    assert Path(trainer.args.output_dir, "checkpoint-3").is_dir() == (strategy == "steps")
    assert "Stopped by hand after update 3 of 6" in render_run(dashboard.run)


# catches: a stop in the last update that claims to have stopped something, and a pause in it that
# holds for ever
def test_the_last_update_is_an_end_like_any_other(ppo):
    trainer, dashboard = steered(
        ppo, dict(u6=lambda dashboard: (dashboard.pause(), dashboard.stop(), dashboard.pause()))
    )
    dashboard.start(trainer)
    assert dashboard.wait(30).global_step == 6 and dashboard.run.state == "done"
    assert not dashboard.run.changes


# catches: a pause that only looks like one, one before the log and the checkpoint of its update, so
# that the reader waits beside an unsaved update; one that steps once more when it is stopped, or a
# stop in it that saves nothing
@pytest.mark.parametrize("save_steps", [1, 100])
def test_a_paused_run_stands_still_until_it_is_told(ppo, save_steps):
    every = dict(save_strategy="steps", save_steps=save_steps, logging_steps=save_steps)
    trainer, dashboard = steered(ppo, dict(u2=LiveDashboard.pause), 3, **every)
    dashboard.start(trainer)
    wait_for(dashboard, "paused")
    before = weights(trainer)
    time.sleep(0.3)
    assert trainer.update_count == 2 and not unlike(weights(trainer), before)
    if save_steps == 1:
        assert logs(trainer)[-1]["step"] == 2
        assert Path(trainer.args.output_dir, "checkpoint-2").is_dir()
        dashboard.go_on()
        dashboard.wait(20)
        straight = ppo(total_episodes=24, overwrite_output_dir=True, **ONE_PASS)
        straight.train()
        assert not unlike(weights(trainer), weights(straight)) and len(dashboard.run.changes) == 1
        return
    dashboard.kl_coef = 0.7
    assert dashboard.kl_coef == 0.05 and dashboard.requested == ("kl_coef 0.7",)
    dashboard.stop()
    assert dashboard.wait(20).global_step == trainer.update_count == 2
    assert not unlike(weights(trainer), before)
    assert kept(trainer, 2) == 0.7 and logs(trainer)[-1]["step"] == 2
    assert [change.what for change in dashboard.run.changes] == ["pause", "kl_coef", "stop"]


# catches: wishes of several threads that get lost, mix, or act on the thread that makes them
def test_wishes_of_many_threads_are_fulfilled_by_one(ppo, monkeypatch):
    trainer, dashboard = steered(ppo, {})
    assert dashboard.box.children
    acted, real = set(), FixedKLController.set

    def note(controller, value):
        if controller is trainer.controller:
            acted.add(threading.get_ident())
        real(controller, value)

    monkeypatch.setattr(FixedKLController, "set", note)

    def press(i):
        for j in range(40):
            if dashboard.run.state == "running":
                try:
                    dashboard.kl_coef = 0.1 + (i * 40 + j) / 1000
                except RuntimeError:
                    return  # the run was over first
            time.sleep(0.001)

    hands = [threading.Thread(target=press, args=(i,)) for i in range(4)]
    dashboard.start(trainer)
    wait_for(dashboard, "running")
    for hand in hands:
        hand.start()
    for hand in hands:
        hand.join()
    dashboard.wait(20)
    lines = [line for line in trainer.state.log_history if "steering/kl_coef" in line]
    others = {threading.get_ident(), *(hand.ident for hand in hands)}
    assert lines and len(acted) == 1 and not acted & others
    assert all(b["steering/kl_coef_before"] == a["steering/kl_coef"] for a, b in pairwise(lines))
    last = {line["step"]: line["steering/kl_coef"] for line in lines}
    assert all(coefs(trainer)[step] == value for step, value in last.items() if step < 6)


# catches: a bad number that is found an update later in the training thread, where it ends the run;
# a wish to a run that is not there, swallowed without a word, which then holds the next run; one rank
# that obeys while the others go on with the old coefficient
@pytest.mark.parametrize(
    "kind, wrong", [("fixed", (-0.1, math.nan, math.inf)), ("adaptive", (0.0, math.nan))]
)
def test_a_wish_that_cannot_be_is_refused_at_once(ppo, kind, wrong):
    acts = (LiveDashboard.pause, LiveDashboard.stop, LiveDashboard.go_on, wish(0.1))
    seen = []

    def refused(dashboard, error, match, acts):
        for act in acts:
            with pytest.raises(error, match=match):
                act(dashboard)
            seen.append(dashboard.requested)

    def try_it(dashboard):
        refused(dashboard, ValueError, "kl_coef is", map(wish, wrong))
        dashboard.ranks = 2
        refused(dashboard, RuntimeError, "2 processes", acts[:2] + acts[3:])

    trainer, dashboard = steered(ppo, dict(u2=try_it), 3, kl_controller=kind)
    for _ in range(2):
        refused(dashboard, RuntimeError, "no run is going on", acts)
        trainer.train()
    assert trainer.state.global_step == 3 and not dashboard.run.changes and len(seen) > 12
    assert not any(seen)


# catches: an error that leaves "Running" behind, is swallowed, or is shown as markup; an interrupt
# that looks like an end; a pause that an interrupt cannot end
@pytest.mark.parametrize(
    "error, told",
    [
        (ValueError("<b>bad</b>"), "Failed after 2 whole updates: ValueError: &lt;b&gt;bad"),
        (KeyboardInterrupt(), "Interrupted after 2 whole updates"),
    ],
)
@pytest.mark.parametrize("thread", [False, True])
def test_a_run_that_breaks_off_says_so(ppo, error, told, thread):
    calls = []

    def reward(prompts, responses, **columns):
        calls.append(1)
        if len(calls) == 3:
            raise error
        return likes_c(prompts, responses)

    dashboard = LiveDashboard()
    trainer = ppo(reward, parts=dict(callbacks=[dashboard]), **ONE_PASS)
    with pytest.raises(type(error)):
        if thread:
            dashboard.start(trainer), dashboard.wait(20)
        else:
            trainer.train()
    assert told in render_run(dashboard.run) and not dashboard.requested
    with pytest.raises(RuntimeError):
        dashboard.pause()


# catches: a wait in a pause that never returns to Python, and one that is told as half an update
def test_an_interrupt_ends_a_pause(ppo, monkeypatch):
    trainer, dashboard = steered(ppo, dict(u2=LiveDashboard.pause))

    def interrupted(seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(dashboard.wishes, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert dashboard.run.state == "left" and "nothing is half made" in repr(dashboard)
    assert not dashboard.wishes.pausing


# catches: a drawing that fails and takes the run with it, or fails without a word
def test_a_drawing_that_fails_is_told_and_training_goes_on(ppo, monkeypatch):
    trainer, dashboard = steered(ppo, {}, 3)
    assert dashboard.box.children
    monkeypatch.setattr("rlhf_nb.ui.run_view.body_markup", lambda *given: 1 / 0)
    assert trainer.train().global_step == 3 and "ZeroDivisionError" in dashboard.panel.view.value
    assert 'role="alert"' in dashboard.panel.view.value


# catches: handlers that fail in silence, a late click that raises, a slider that cannot take its
# wish back
def test_handlers_say_what_went_wrong(ppo):
    def try_it(dashboard):
        dashboard.panel.slider.value = 0.2
        assert dashboard.requested == ("kl_coef 0.2",)
        assert "kl_coef 0.2" in dashboard.panel.head.value
        dashboard.panel.slider.value = 0.05
        assert dashboard.requested == ()
        dashboard.trainer.controller.set, real = None, dashboard.trainer.controller.set
        with pytest.raises(TypeError):
            dashboard.panel.slider.value = 0.3
        assert "TypeError" in dashboard.panel.head.value
        dashboard.trainer.controller.set = real

    trainer, dashboard = steered(ppo, dict(u2=try_it), 3)
    assert dashboard.box.children
    trainer.train()
    assert not dashboard.run.changes and dashboard.panel.slider.disabled
    assert dashboard.panel.hold.disabled
    dashboard.panel.stop.click()
    assert "no run was going on" in dashboard.panel.head.value


# catches: a widget whose clicks ipykernel 7.4 leads to the busy shell
def test_every_control_has_its_ear_open(monkeypatch):
    import comm

    class Comm(comm.DummyComm):
        def _reply_subshell_for(self, data, default):
            return None

    monkeypatch.setattr(comm, "create_comm", lambda *given, **more: Comm(*given, **more))
    dashboard = LiveDashboard()
    assert dashboard.box.children
    for name in ("hold", "stop", "slider", "signal", "curves", "beat"):
        comm_of = getattr(dashboard.panel, name).comm
        assert comm_of and getattr(comm_of, "_reply_subshell_for", None) is None, name


# catches: curves from the log alone, which has a line in ten updates; shared lists; text and gaps
# among the numbers
def test_every_update_is_a_point_whatever_is_logged(ppo):
    trainer, dashboard = steered(ppo, {}, logging_steps=100)
    trainer.train()
    assert all([u for u, _ in line] == [1, 2, 3, 4, 5, 6] for line in dashboard.run.lines.values())
    assert dashboard.run.last.info["update"] == 5
    ppo(total_episodes=16, parts=dict(callbacks=[dashboard])).train()
    assert [u for u, _ in dashboard.run.lines["objective/kl"]] == [
        1,
        2,
    ] and dashboard.run.last.info["update"] == 1


# catches: a dashboard that is deaf to trainers that are not PPO, or offers them kl_coef
def test_any_trainer_is_watched(tmp_path):
    class Line(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.zeros(1))

        def forward(self, x=None, labels=None):
            return dict(loss=((self.w * x - labels) ** 2).mean())

    refused = []

    def try_it():
        with pytest.raises(RuntimeError, match="PPOTrainer"):
            dashboard.kl_coef = 0.1
        refused.append(True)

    quiet = dict(use_cpu=True, report_to="none", disable_tqdm=True, save_strategy="no")
    args = TrainingArguments(str(tmp_path), max_steps=9, logging_steps=2, **quiet)
    dashboard = LiveDashboard(every=0)
    assert dashboard.box.children
    data = [dict(x=torch.ones(1), labels=torch.ones(1))] * 16
    hands = At(u3=try_it, u5=lambda: dashboard.stop())
    trainer = Trainer(Line(), args, train_dataset=data, callbacks=[dashboard, hands])
    trainer.train()
    assert trainer.state.global_step == 5 and dashboard.run.state == "stopped" and refused
    assert [u for u, _ in dashboard.run.lines["loss"]] == [2, 4, 5]
    assert dashboard.panel.slider.layout.display == "none"
    assert "after step 5" in render_run(dashboard.run)


# catches: a script that prints, opens a window on a second rank, or fails where there is no
# notebook
def test_without_a_notebook_it_is_silent(ppo, capsys):
    trainer, dashboard = steered(ppo, {})
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    told = capsys.readouterr()
    assert told.out == "" and "dashboard" not in told.err.lower()
    assert "box" not in vars(dashboard) and dashboard.seconds == 0


# catches: thinning that loses a spike, the ends or the order, and one that keeps nan
def test_thin_keeps_every_extreme():
    points = [
        (u, math.sin(u / 70) + 50 * (u == 3_331) - 40 * (u == 7_007)) for u in range(9_999)
    ] + [(9_999, math.nan), (10_000, math.inf), (10_001, 0.5)]
    found = thin(points, 100)
    assert len(found) <= 102 and found == sorted(found) and found[0][0] == 0
    assert found[-1] == (10_001, 0.5) and {3_331, 7_007} <= {u for u, _ in found}
    assert thin(points[:50], 100) == points[:50] and thin([]) == []


def words(markup: str) -> str:
    "What a reader sees of it."
    return unescape(re.sub("<[^>]*>", "", re.sub("<style.*?</style>", "", markup, flags=re.S)))


def drawn(metric: str, run: Run) -> str:
    "The words of a metric's picture."
    data = re.search(r"base64,([^\"]+)", curve_figure(metric, run.lines[metric], run))
    return words(base64.b64decode(data[1]).decode())


# catches: markup of a model, a prompt or a metric's name that acts, a curve without its numbers in
# words; a page that asks for something: tests/browser/test_dashboard.py
def test_what_is_shown_is_escaped(ppo, tmp_path):
    from datasets import Dataset

    trainer, dashboard = steered(
        ppo, dict(u2=wish(0.2)), data=Dataset.from_dict(dict(prompt=["abc", "b", "cd"] * 8))
    )
    trainer.train()
    hostile, image = "</style><script>alert(1)</script>\u202e", "<img src=x onerror=alert(1)>"
    dashboard.run.last.prompts[0], dashboard.run.last.tokens[0][0] = hostile, image
    dashboard.run.lines[image] = [(1, 2.0), (2, 3.0)]
    dashboard.curves += [image, hostile]
    dashboard.run.state, dashboard.run.error = "failed", "<i>oh</i>{name}"
    text = dashboard.save_html(tmp_path / "run.html").read_text()
    for shown in (text, dashboard._repr_html_()):
        assert "<script" not in shown and "<img src=x" not in shown and "<i>oh" not in shown
        assert "dashed: kl_coef was moved" in shown and "\u202e" not in shown
        assert hostile[:-1] in words(shown) and "<i>oh</i>{name}" in words(shown)
        assert re.search(r"1\.\d\d after update 6|0\.\d\d after update 6", words(shown))
    assert "text/html" in dashboard._repr_mimebundle_()


# catches: a division by nothing on the first point, on equal values, on a run without an end
def test_small_runs_are_drawn():
    run = Run(state="running", update=1, total=0)
    run.add(1, {"objective/kl": 2.0, "flag": "yes", "bad": math.nan, "epoch": 1.0})
    run.add(1, {"objective/kl": 2.0})
    assert set(run.lines) == {"objective/kl", "bad"}
    assert "no finite number" in words(render_run(run, None))
    assert "KL to the reference objective/kl2.00 after update 1" in words(render_run(run, ["KL"]))


# catches: a list of curves of its own, in another order than the viewer's; a word on a metric that
# this kind of run never logs; one that is asked for by name and is not there in silence
def test_the_few_curves_are_the_viewers():
    logged = ["val/explained_variance", "objective/equal_groups", "policy/approxkl_avg", "lr"]
    logged += ["policy/clipfrac_avg", "objective/kl", "objective/raw_scores"]
    run = Run(update=1, total=1, batch=4, lines={name: [(1, 0.5)] for name in logged})
    few = [metric.name for metric in in_order() if metric.name in logged]
    assert chosen_curves(run, VIEWER_CURVES) == few and len(few) == 6
    assert few[0] == "objective/raw_scores"
    assert "Never logged" not in words(render_run(run))
    assert "Never logged: policy/entropy_avg" in words(render_run(run, ["score", "entropy"]))


# catches: an axis without a name or a unit, two figures of one name, a metric of PPO that nobody
# has given a unit; a token without its number, a colour or a line below it that is not the sign of
# its number, a prompt that is cut inside a word
def test_every_axis_has_a_unit_and_every_token_its_number(ppo):
    trainer, dashboard = steered(ppo, {})
    trainer.train()
    for metric in dashboard.run.lines:
        known = METRICS[metric]
        unit = known.unit.replace("share of ", "% of ")
        assert unit and unit in drawn(metric, dashboard.run)
        assert "update" in drawn(metric, dashboard.run)
        assert known.label in words(render_run(dashboard.run, [metric]))
    labels = [METRICS[name].label for name in dashboard.run.lines]
    assert len(set(labels)) == len(labels)
    entropies = [METRICS[name] for name in METRICS if "/entropy" in name]
    assert len({m.title for m in entropies}) == len({m.unit for m in entropies}) == 2
    r = dashboard.run.last
    r.prompts[0] = "abcdefghi " * 30
    shown = render_run(dashboard.run, signal="rewards", episodes=1)
    n = int(r.mask[0].sum())
    numbers = r.rewards[0, :n].tolist()
    spans = re.findall(r'<span(?: class="(\w+) tint-\d")? title="rewards ([^"]+)">', shown)
    assert [float(x) for _, x in spans[:n]] == numbers
    for (side, _), x in zip(spans, numbers, strict=False):
        assert side in ("", "up" if x > 0 else "down")
    assert any(side for side, _ in spans) and "…" in shown
    assert "… abcdefghi " in words(shown) and "full colour at" in words(shown)


# catches: a tiny number that looks like none, a number of ten digits, a learning rate that is 0.00,
# the exact number nowhere
@pytest.mark.parametrize(
    "values, shown",
    [
        ([0.004, 2.0], "2.00 after update 2; lowest ≈0, highest 2.00"),
        ([-0.0, -1.23456], "−1.23 after update 2; lowest −1.23, highest 0"),
        ([0.001, 0.00012], "0.00012 after update 2; lowest 0.00012, highest 0.001"),
        ([0.04, 0.0001], "≈0 after update 2; lowest ≈0, highest 0.04"),
        ([1.0, 12345.678], "12,346 after update 2; lowest 1, highest 12,346"),
    ],
)
def test_numbers_of_a_curve(values, shown):
    run = Run(lines={"objective/kl": list(enumerate(values, 1))})
    figure = curve_figure("objective/kl", run.lines["objective/kl"], run)
    assert shown in words(figure) and f'title="{values[1]!r} nats per response"' in figure


# catches: a state without a sentence, or one that is never reached
def test_every_state_has_a_sentence():
    sentences = {state: state_sentence(Run(state=state, update=2, total=3)) for state in STATES}
    assert len(set(sentences.values())) == len(STATES) and "{" not in "".join(sentences.values())
    assert not Run().going and Run(state="paused").going and not Run(state="left").going


# catches: a wish that is granted twice, or lost between two threads
def test_a_wish_is_taken_once():
    wishes, taken = Wishes(), []
    made = threading.Event()

    def make():
        for i in range(1, 2001):
            wishes.move_kl_coef(i)
        made.set()

    hand = threading.Thread(target=make)
    hand.start()
    while not made.is_set() or wishes.kl_coef is not None:
        taken.append(wishes.take_kl_coef())
    hand.join()
    taken = [value for value in taken if value is not None]
    assert taken[-1] == 2000 and taken == sorted(set(taken)) and wishes.take_kl_coef() is None
    wishes.pause()
    assert wishes.pausing and not wishes.wait(0.01)
    wishes.clear()
    assert not wishes.pausing and wishes.wait(0)


# catches: arguments that fail at the first drawing instead of at once
@pytest.mark.parametrize(
    "wrong", [dict(signal="kll"), dict(curves="KL"), dict(every=-1), dict(episodes=math.nan)]
)
def test_bad_arguments(wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} is"):
        LiveDashboard(**wrong)


# catches: a second start into a run that is going on, and a wait for nothing
def test_start_and_wait_refuse_what_makes_no_sense(ppo):
    trainer, dashboard = steered(ppo, dict(u2=LiveDashboard.pause))
    with pytest.raises(RuntimeError, match="start"):
        dashboard.wait()
    dashboard.start(trainer)
    with pytest.raises(RuntimeError, match="a run is going on"):
        dashboard.start(trainer)
    with pytest.raises(TimeoutError, match="goes on"):
        dashboard.wait(0.2)
    wait_for(dashboard, "paused")
    dashboard.stop()
    assert dashboard.wait(20).global_step == 2


# catches: controllers that take by hand what their constructor refuses, or change before they
# refuse
def test_controllers_are_set_with_the_care_of_their_constructors():
    for made, bad in (
        (FixedKLController(0.1), (-1.0, math.nan, math.inf)),
        (AdaptiveKLController(0.1, 6.0, 1000), (0.0, -1.0, math.nan)),
    ):
        for value in bad:
            with pytest.raises(ValueError, match="kl_coef is"):
                made.set(value)
        assert made.value == 0.1
        made.set(0.3)
        assert made.value == 0.3 and made.state_dict() == dict(value=0.3)


# catches: callbacks of others that are called with what they do not know, and a door that is not
# there when one steps by hand
def test_ppo_events_reach_those_who_have_ears(ppo):
    class Ears(TrainerCallback):
        def __init__(self):
            self.heard = []

        def ppo_begin(self, trainer):
            self.heard.append("begin")

        def ppo_update(self, rollout, metrics):
            self.heard.append((rollout.info["update"], metrics["objective/kl_coef"]))

        def ppo_between(self, control):
            self.heard.append("between")

        def ppo_end(self, error):
            self.heard.append(error)

    ears, dashboard = Ears(), LiveDashboard()
    ppo(total_episodes=16, parts=dict(callbacks=[ears, TrainerCallback(), dashboard])).train()
    assert ears.heard == ["begin", (0, 0.05), "between", (1, 0.05)]
    ppo(total_episodes=16, parts=dict(callbacks=[dashboard2 := LiveDashboard()])).step()
    assert dashboard2.run.update == 1 and len(dashboard2.run.lines["objective/kl"]) == 1
