"""The dashboard in JupyterLab while a training runs: pause, slider and stop reach it there, and
where they cannot, it says so.

Only a browser shows this. `button.click()` in Python calls the handler on the thread that trains;
here the click goes over the wire, to a kernel that is busy.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from controls import violations
from lab import Lab, Notebook
from PIL import Image
from playwright.sync_api import Locator, Page
from test_static import File, rollout

from rlhf_nb.ui.dashboard import LiveDashboard
from rlhf_nb.ui.run_view import Change, Run

SETUP = """
import json, tempfile, time
from pathlib import Path
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from rlhf_nb.ui.dashboard import LiveDashboard
from rlhf_nb.training.model_loading import tiny_policy
from rlhf_nb.trainer import PPOConfig, PPOTrainer
while WAIT and not Path("go").exists(): time.sleep(.1)
inner = Tokenizer(models.WordLevel({w: i for i, w in enumerate(["<pad>", "<eos>", *"abcdefghij"])}, unk_token="<pad>"))
inner.pre_tokenizer, inner.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
letters = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", padding_side="left")
def likes_c(prompts, responses, **columns):
    time.sleep(.1)
    return [response.count("c") - .1 * len(response) for response in responses]
def trainer_of(updates, **changes):
    args = PPOConfig(tempfile.mkdtemp(), **dict(use_cpu=True, report_to="none", logging_steps=1, per_device_train_batch_size=8, total_episodes=8 * updates,
        response_length=5, temperature=1.0, learning_rate=1e-3, num_sample_generations=0, seed=0, save_strategy="steps", save_steps=10_000) | changes)
    model = tiny_policy(letters, 0, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=16)
    return PPOTrainer(args, letters, model, reward_model=likes_c, train_dataset=Dataset.from_dict(dict(prompt=["abc", "b", "cdefg", "ja", "hhhh", "efe"] * 40)))
"""
TRAIN = """
dashboard = LiveDashboard(every=0.2)
trainer = trainer_of(600)
trainer.add_callback(dashboard)
result = trainer.train()
"""
REPORT = """
folder = Path(trainer.args.output_dir) / f"checkpoint-{result.global_step}"
log = [[line["step"], line["objective/kl_coef"]] for line in trainer.state.log_history if "objective/kl_coef" in line]
print("REP" + "ORT", json.dumps(dict(steps=result.global_step, log=log, kept=json.loads((folder / "ppo_state.json").read_text())["controller"]["value"],
      changes=[[c.update, c.what] for c in dashboard.run.changes], state=dashboard.run.state)))
"""


def said(notebook: Notebook, pattern: str, seconds: int = 60) -> re.Match:
    "Wait until the page says it."
    notebook.page.wait_for_function(
        "pattern => new RegExp(pattern).test(document.body.innerText)",
        arg=pattern,
        timeout=1000 * seconds,
    )
    return re.search(pattern, notebook.page.evaluate("document.body.innerText"))


def reached(notebook: Notebook, update: int, seconds: int = 60) -> None:
    "Wait until so many are done; a number may be passed between two drawings."
    notebook.page.wait_for_function(
        "update => [...document.body.innerText.matchAll(/Running: update ([0-9,]+) of/g)].some(m "
        "=> +m[1].replace(',', '') >= update)",
        arg=update,
        timeout=1000 * seconds,
    )


# The light grounds in a dark theme, and the dark ones in a light theme, of all that is drawn.
SLABS = """theme => [...document.querySelectorAll('.rlhf, .rlhf *')].flatMap(e => {
  const [r, g, b, a] = getComputedStyle(e).backgroundColor.match(/[0-9.]+/g).map(Number), mean = (r + g + b) / 3;
  return a === 0 || e.closest('progress, .tinted') || (theme === 'Dark') === (mean < 128) ? [] : [`${e.tagName} ${mean}`] })"""


def brightness(element: Locator) -> float:
    "The mean of a picture's pixels, 0 to 255."
    shot = Image.open(io.BytesIO(element.screenshot())).convert("L")
    return sum(shot.getdata()) / (shot.width * shot.height)


def press(notebook: Notebook, name: str) -> None:
    "A button, by keyboard."
    notebook.page.get_by_role("button", name=name, exact=True).last.focus()
    notebook.page.keyboard.press("Enter")


# catches: handlers that the busy kernel hears only when the cell is over (ipykernel 7.4 leads them
# to the shell that last wrote), and those that act inside an update
def test_pause_slider_and_stop_reach_a_run_in_a_cell(lab: Lab):
    notebook = lab.start("steered.ipynb", SETUP.replace("WAIT", "False"), TRAIN, REPORT)
    page = notebook.page
    page.bring_to_front()
    try:
        reached(notebook, 3, 120)
        press(notebook, "pause")
        stood = int(said(notebook, r"Paused after update (\d+)")[1])
        page.wait_for_timeout(700)  # six updates, if it went on; drawn three times
        assert f"Paused after update {stood} " in page.inner_text("body"), "it goes on"
        page.locator("input[type=range]").last.focus()
        for _ in range(2):
            page.keyboard.press("ArrowRight")
        said(notebook, r"Requested: kl_coef 0\.06")
        press(notebook, "go on")
        said(notebook, r"kl_coef 0\.05 → 0\.06")
        reached(notebook, stood + 4)
        press(notebook, "stop")
        said(notebook, "Stopped by hand after")
        told = json.loads(said(notebook, r"REPORT (\{.*\})")[1])
        notebook.wait()
        assert told["state"] == "stopped" and stood < told["steps"] < 600
        assert [value for _, value in told["log"]] == [0.05] * stood + [0.06] * (
            told["steps"] - stood
        )
        assert told["kept"] == 0.06 and [what for _, what in told["changes"]] == [
            "pause",
            "kl_coef",
            "stop",
        ]
        assert not notebook.wire.faults() and not notebook.console and not notebook.strangers
        for theme in ("Light", "Dark"):
            notebook.theme(theme)
            page.locator("progress").last.scroll_into_view_if_needed()
            assert not (slabs := page.evaluate(SLABS, theme)), slabs
            light = brightness(page.locator(".rlhf figure img").last) > 128
            assert light == (theme == "Light"), "the curves do not follow the theme"
    finally:
        notebook.theme("Light")
        notebook.close()


# catches: buttons that are dead without a word where the front end has no subshells, and a `start`
# whose run cannot be stopped there
@pytest.mark.slow
def test_a_front_end_that_is_not_heard_is_told_so(lab: Lab):
    cell = (
        "dashboard = LiveDashboard(every=0.2)\nearlier = "
        "trainer_of(90)\nearlier.add_callback(dashboard)\nearlier.train();"
    )
    beside = "beside, trainer = LiveDashboard(every=0.2), trainer_of(600)\nbeside.start(trainer)"
    notebook = lab.start("deaf.ipynb", SETUP.replace("WAIT", "True"), cell, beside)
    page = notebook.page
    page.bring_to_front()
    try:
        page.wait_for_function(
            "() => window.jupyterapp?.shell.currentWidget?.sessionContext?.session?.kernel"
        )
        page.evaluate("""() => { jupyterapp.serviceManager.kernels.commsOverSubshells = 'disabled';
                                 jupyterapp.shell.currentWidget.sessionContext.session.kernel.commsOverSubshells = 'disabled' }""")
        Path(lab.folder, "go").touch()
        said(notebook, "Clicks do not reach this run", 90)
        press(notebook, "pause")  # heard when the cell is over, and then it must not hold anything
        said(notebook, "Done: all 90 updates", 60)
        said(notebook, "That click came when no run was going on", 30)
        notebook.wait()
        reached(notebook, 3)
        press(notebook, "stop")
        said(notebook, "Stopped by hand after")
        page.wait_for_timeout(500)
        assert "Clicks do not reach" not in page.evaluate(
            "[...document.querySelectorAll('.jp-OutputArea')].at(-1).innerText"
        )
        assert not notebook.wire.faults() and not notebook.console
    finally:
        notebook.close()


# catches: a saved page that asks for anything, that breaks its own policy, scrolls sideways, is
# light in a dark system, or that a screen reader or a keyboard cannot use
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_saved_dashboard(fresh: Callable[..., Page], axe: str, tmp_path: Path, scheme: str):
    run = Run(state="stopped", update=6, total=9, batch=8, changes=[Change(3, "kl_coef", 0.1, 0.2)])
    for update in range(1, 7):
        metrics = {"objective/kl": update / 9, "policy/entropy_avg": 2.0, "lr": 1e-3 / update}
        run.add(update, {**metrics, "<img src=//example.invalid>": update})
    run.last = rollout(4, 30)
    run.last.prompts[0] = "<script>hacked = 1</script>"
    run.last.tokens[0][:3] = [" a", "\u202eb", "<b>"]
    dashboard = LiveDashboard()
    dashboard.run = run
    file = File(fresh(scheme)).open(dashboard.save_html(tmp_path / "run.html"))
    file.page.evaluate("document.querySelectorAll('details').forEach(e => e.open = true)")
    assert not (slabs := file.page.evaluate(SLABS, scheme.title())), slabs
    light = brightness(file.page.locator("figure img").first) > 128
    assert light == (scheme == "light"), "the curves do not follow the theme"
    file.examine(axe)
    assert not (told := violations([file.body]) + file.said()), told
    file.page.set_viewport_size(dict(width=400, height=900))
    assert file.page.evaluate("document.documentElement.scrollWidth") <= 400
