"""JupyterLab on loopback, its pages in Chromium, and everything that a page and its kernel say to
one another.

ipywidgets, `interact`, `Output` and Lab each swallow the exceptions of a handler in a way of their
own. None of them keeps them off the wire: so the tests listen there, and not in the page.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, urlsplit

import nbformat
from jupyter_server.services.kernels.connection.base import deserialize_msg_from_ws_v1 as unpack
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright

ROOT = Path(__file__).resolve().parents[2]
FLAGS = "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync".split()
FLAGS += "--disable-background-networking --disable-component-update".split()
FLAGS += ["--enable-blink-features=ComputedAccessibilityInfo"]  # what a screen reader says
SETTINGS = {  # every cell is there, nothing is fetched, nothing asks a question
    "@jupyterlab/notebook-extension:tracker": {"windowingMode": "none"},
    "@jupyterlab/apputils-extension:notification": {"fetchNews": "false", "checkForUpdates": False},
    "@jupyterlab/extensionmanager-extension:plugin": {"enabled": False},
    "@jupyterlab/docmanager-extension:plugin": {"autosave": False},
    "@jupyterlab/apputils-extension:themes": {"theme": "JupyterLab Light"},
}
# While a kernel starts it has no time of its last activity, and another page that asks for all
# kernels then gets an error of the server's own.
SERVER = """from jupyter_server._tz import utcnow
from jupyter_server.services.kernels.kernelmanager import ServerKernelManager
ServerKernelManager._last_activity_default = lambda self: utcnow()
"""
PATIENCE = 400  # seconds for the cells of a page, on a machine that does other things too


# ---- The wire ----


@dataclass
class Message:
    "What a kernel said, and the request it answers."

    kind: str
    content: dict
    asked: str  # kind of the request: execute_request, comm_msg, ...
    parent: str  # its id


class Wire:
    "All messages between a page and its kernel."

    def __init__(self, page: Page):
        self.requests: dict[str, tuple[str, str]] = {}  # id -> kind, code
        self.early: set[str] = (
            set()
        )  # comms that Lab's widget manager opens before a cell has imported ipywidgets
        self.waiting: set[str] = set()  # requests that the kernel has not yet done with
        self.said: list[Message] = []
        self.replies = 0  # to execute_request
        page.on(
            "websocket",
            lambda ws: (
                "/channels" in ws.url
                and (ws.on("framesent", self.sent), ws.on("framereceived", self.received))
            ),
        )

    def sent(self, frame: bytes) -> None:
        channel, (header, _, _, content, *_) = unpack(frame)
        header, content = json.loads(header), json.loads(content)
        if channel != "shell":
            return
        if content.get("target_name") == "jupyter.widget.control":
            self.early.add(content["comm_id"])
        self.requests[header["msg_id"]] = header["msg_type"], content.get("code", "")
        self.waiting.add(header["msg_id"])

    def received(self, frame: bytes) -> None:
        channel, (header, parent, _, content, *_) = unpack(frame)
        kind, parent = json.loads(header)["msg_type"], json.loads(parent)
        if kind == "execute_reply":
            self.replies += 1
        if channel != "iopub" or kind not in (
            "status",
            "error",
            "stream",
            "display_data",
            "execute_result",
            "comm_open",
        ):
            return
        content = json.loads(content)
        if kind == "status":
            content["execution_state"] == "idle" and self.waiting.discard(parent.get("msg_id"))
        if kind != "status" or content["execution_state"] in ("restarting", "dead"):
            self.said.append(
                Message(kind, content, parent.get("msg_type", ""), parent.get("msg_id", ""))
            )

    def asked_of(self, message: Message) -> str:
        "Where to look: the cell's first line of code, or that it was a widget's handler."
        code = self.requests.get(message.parent, ("", ""))[1]
        lines = [line for line in code.splitlines() if line.strip() and not line.startswith("#|")]
        return f"cell {lines[0][:80]!r}" if lines else f"answer to {message.asked or 'nobody'}"

    def faults(self) -> list[str]:
        "Exceptions, swallowed or not, and a handler's stderr: Lab shows neither beside the widget."
        found = []
        for m in self.said:
            text = m.content.get("text", "")
            if m.kind == "error":
                what = f"{m.content['ename']}: {m.content['evalue']}"
            elif m.kind == "status":
                what = "the kernel died"
            elif (
                m.kind == "stream"
                and m.content["name"] == "stderr"
                and (m.asked != "execute_request" or "Traceback (most recent" in text)
            ):
                what = text.strip()[-400:]
                if re.fullmatch(r"No such comm( target registered)?: (\S+)", what) and what.split()[
                    -1
                ] in {"jupyter.widget.control", *self.early}:
                    continue
            else:
                continue
            found.append(f"{self.asked_of(m)}: {what}")
        return found

    def views(self) -> int:
        "Widgets that cells have displayed."
        return sum(
            "application/vnd.jupyter.widget-view+json" in m.content.get("data", {})
            for m in self.said
        )


# ---- A page ----

# On a busy machine Lab takes its splash screen off the page twice, which is an error of Lab's
# alone.
SPLASH = """const remove = Node.prototype.removeChild;
Node.prototype.removeChild = function (child) { return child.id === 'jupyterlab-splash' && child.parentNode !== this ? child : remove.call(this, child); };
"""
RUN = """(async () => {
  const nap = () => new Promise(r => setTimeout(r, 50));
  while (!window.jupyterapp) await nap();
  const app = window.jupyterapp;
  await app.restored;
  app.shell.collapseLeft();
  while (!app.shell.currentWidget?.sessionContext) await nap();
  const panel = app.shell.currentWidget;
  await panel.context.ready; await panel.sessionContext.ready; await panel.revealed;
  while (!panel.sessionContext.session?.kernel) await nap();
  await panel.sessionContext.session.kernel.info;
  await app.commands.execute('notebook:run-all-cells');
  window.ranAll = true;
})()"""
LEAVE = """async () => {
  await jupyterapp.shell.currentWidget?.sessionContext.shutdown().catch(() => null);
  jupyterapp.serviceManager.dispose();
}"""
# Cells of code that have something to run: for so many the kernel owes a reply.
CELLS = (
    "() => [...jupyterapp.shell.currentWidget.content.model.cells].filter(c => c.type === "
    "'code' && c.sharedModel.source.trim()).length"
)


class Notebook:
    "One notebook, open in Lab and running from the moment it is made."

    def __init__(self, context: BrowserContext, base: str, name: str):
        self.name, self.page = name, context.new_page()
        self.wire, self.console, self.strangers, self.sockets = Wire(self.page), [], [], []
        self.page.on("websocket", lambda socket: self.sockets.append(socket))
        self.page.on(
            "pageerror",
            lambda error: self.console.append(f"uncaught in the page: {error} {error.stack}"[:600]),
        )
        self.page.on(
            "console",
            lambda m: (
                m.type == "error"
                and self.console.append(f"{m.text} ({m.location.get('url', '')})"[:600])
            ),
        )
        self.page.on(
            "request",
            lambda r: (
                urlsplit(r.url).scheme.startswith(("http", "ws"))
                and urlsplit(r.url).hostname != "127.0.0.1"
                and self.strangers.append(r.url)
            ),
        )
        self.page.add_init_script(SPLASH + RUN)
        self.started = time.monotonic()
        self.page.goto(
            f"{base}/lab/workspaces/{re.sub('[^A-Za-z0-9]', '-', name)}/tree/nbs/{quote(name)}",
            wait_until="commit",
        )

    def wait(self) -> None:
        "Until every cell has its reply and the kernel is idle. Raises TimeoutError."
        while not (
            self.page.evaluate("window.ranAll === true")
            and not self.wire.waiting
            and self.wire.replies >= self.page.evaluate(CELLS)
        ):
            if time.monotonic() - self.started > PATIENCE:
                self.give_up(f"{self.wire.replies} cells ran")
            self.page.wait_for_timeout(50)
        self.settle()

    def settle(self) -> None:
        "Until the kernel owes nothing, seen twice: a widget may send a change that it held back."
        calm, start = 0, time.monotonic()
        while calm < 2:
            self.page.wait_for_timeout(20)
            calm = 0 if self.wire.waiting else calm + 1
            if time.monotonic() - start > PATIENCE:
                self.give_up("the kernel has not answered")

    def give_up(self, what: str) -> None:
        "Raise TimeoutError with what Lab asks, if it asks something."
        asks = " ".join(self.page.locator(".jp-Dialog").all_inner_texts()).split()
        raise TimeoutError(
            f"{self.name}: {what} in {PATIENCE} s."
            + (f" Lab asks: {' '.join(asks)}" if asks else "")
        )

    def theme(self, name: str) -> None:
        "Light or Dark."
        if self.page.evaluate("document.body.dataset.jpThemeName") == f"JupyterLab {name}":
            return
        change = "theme => void jupyterapp.commands.execute('apputils:change-theme', {theme})"
        self.page.evaluate(change, f"JupyterLab {name}")
        self.page.wait_for_function(
            "name => document.body.dataset.jpThemeName === name", arg=f"JupyterLab {name}"
        )
        self.page.wait_for_function(
            "() => !document.getElementById('jupyterlab-splash')"
        )  # it covers the page while a theme is loaded

    def widen(self, width: int, height: int) -> None:
        "Another size of the window, and Lab laid out in it."
        self.page.set_viewport_size(dict(width=width, height=height))
        self.page.wait_for_function(
            "([w, h]) => { const e = jupyterapp.shell.currentWidget.node; return "
            "Math.abs(e.getBoundingClientRect().bottom - h) < 60 && e.offsetWidth < w; }",
            arg=[width, height],
        )

    def unroll(self) -> None:
        """A window over all that the page shows. To axe-core, text that is scrolled away stands on
        the grey frame around the notebook."""
        tall = self.page.locator(".jp-WindowedPanel-inner").evaluate("e => e.scrollHeight")
        self.widen(1280, min(8000, max(1000, tall + 250)))

    def examine(self, axe: str) -> None:
        "Make axe-core ready in the page."
        self.page.evaluate(axe)

    def bare(self) -> None:
        """Take code and prose off the page, as it has run: thousands of elements that each look at
        the outputs would have to pass."""
        self.page.evaluate(
            "() => document.querySelectorAll('.jp-Cell-inputWrapper').forEach(e => e.remove())"
        )

    def close(self) -> None:
        """The page goes, and its kernel with it. It takes leave first: a server that is writing to
        a page which is gone has an exception."""
        self.page.evaluate(LEAVE)
        start = time.monotonic()
        while not all(socket.is_closed() for socket in self.sockets):
            if time.monotonic() - start > PATIENCE:
                self.give_up("its connections are not closed")
            self.page.wait_for_timeout(20)
        self.page.close(run_before_unload=False)


# ---- The server ----

# ipykernel 6 says that it is idle once more after it was told to go, from a thread that asks whether
# the one which sends is alive, and then writes to it: in between, that one may have ended.
HEAD = "Traceback (most recent call last)"
FAREWELL = ('_publish_status_and_flush("idle", "control"', "_event_pipe.send(")


def fresh(folder: Path, notebooks: Path) -> dict[str, str]:
    "A copy of the notebooks, and an environment in which Jupyter knows of nothing but it."
    shutil.copytree(notebooks, folder / "nbs", ignore=shutil.ignore_patterns(".ipynb_checkpoints"))
    for shown in ("benchmarks", "docs/static"):  # figures and pictures of pages
        if (ROOT / shown).is_dir():
            shutil.copytree(ROOT / shown, folder / shown)
    for plugin, values in SETTINGS.items():
        path = folder / "settings" / plugin.replace(":", "/", 1)
        path.parent.mkdir(parents=True, exist_ok=True)
        Path(f"{path}.jupyterlab-settings").write_text(json.dumps(values))
    (folder / "config").mkdir()
    (folder / "config" / "jupyter_server_config.py").write_text(SERVER)
    leave = {
        "MPLBACKEND",
        "TQDM_DISABLE",
        "HF_HUB_DISABLE_PROGRESS_BARS",
        "HF_DATASETS_DISABLE_PROGRESS_BARS",
        "JUPYTER_PATH",
    }  # figures and bars as a person sees them
    env = {k: v for k, v in os.environ.items() if k not in leave and not k.startswith("JPY_")}
    env |= {
        f"JUPYTER_{kind}_DIR": str(folder / kind.lower()) for kind in ("CONFIG", "DATA", "RUNTIME")
    }
    return env | dict(
        JUPYTERLAB_SETTINGS_DIR=str(folder / "settings"),
        JUPYTERLAB_WORKSPACES_DIR=str(folder / "workspaces"),
        IPYTHONDIR=str(folder / "ipython"),
        OMP_NUM_THREADS="1",
        TOKENIZERS_PARALLELISM="false",
        DO_NOT_TRACK="1",
        HF_HUB_OFFLINE="1",
        HF_DATASETS_OFFLINE="1",
        TRANSFORMERS_OFFLINE="1",
        IN_TEST="1",
        PATH=os.pathsep.join([str(Path(sys.executable).parent), env.get("PATH", "")]),
    )


def leave_out(folder: Path) -> None:
    "Cells that nbdev_test skips become text: they want a GPU, minutes, or a reader's copy."
    from nbdev.config import get_config

    never = {"eval: false", *get_config(path=ROOT).tst_flags.split()}
    for path in folder.rglob("*.ipynb"):
        nb = json.loads(path.read_text(encoding="utf-8"))
        for cell in nb["cells"]:
            source = "".join(cell["source"]).splitlines()
            marks = {line[2:].strip() for line in source if line.startswith("#|")}
            if cell["cell_type"] != "code":
                continue
            if marks & never:
                cell["cell_type"] = "raw"
                for key in ("outputs", "execution_count"):
                    cell.pop(key, None)
            else:
                cell["outputs"] = []  # what is seen afterwards is of this run
        path.write_text(json.dumps(nb), encoding="utf-8")


class Lab:
    "A server with a browser in front of it."

    def __init__(self, context: BrowserContext, base: str, folder: Path):
        self.context, self.base = context, base
        self.folder, self.log = folder / "nbs", folder / "lab.log"
        self.open, self.read = {}, 0

    def notebook(self, name: str, *cells: str) -> Notebook:
        """A page whose cells have all run, opened once; of these cells where some are given."""
        page = self.open[name] = self.open.get(name) or self.start(name, *cells)
        page.page.bring_to_front()
        page.wait()
        return page

    def start(self, name: str, *cells: str) -> Notebook:
        "A page, running; of these cells where some are given."
        if cells:
            kernel = dict(name="python3", display_name="Python 3", language="python")
            made = [nbformat.v4.new_code_cell(cell.strip()) for cell in cells]
            nb = nbformat.v4.new_notebook(cells=made, metadata=dict(kernelspec=kernel))
            nbformat.write(nb, self.folder / name)
        return Notebook(self.context, self.base, name)

    def close(self, name: str) -> None:
        self.open.pop(name).close()

    def traceback(self) -> str:
        """The first exception that the server or a kernel has written into its log since the last
        call, which no page hears of; nothing if there is none. A kernel's FAREWELL is none."""
        with open(self.log, errors="replace") as log:
            log.seek(self.read)
            text = log.read()
            self.read = log.tell()
        _, *found = text.split(HEAD)
        meant = [HEAD + each for each in found if not all(line in each for line in FAREWELL)]
        return meant[0][:2000] if meant else ""


@contextmanager
def drive(chromium: str) -> Iterator[Browser]:
    "Chromium, with an empty profile, for as long as the block lasts."
    with sync_playwright() as p:
        browser = p.chromium.launch(executable_path=chromium, args=FLAGS)
        yield browser
        browser.close()


@contextmanager
def serve(folder: Path, notebooks: Path, browser: Browser) -> Iterator[Lab]:
    "Lab and a browser in front of it, both with an empty profile, for as long as the block lasts."
    env, log = fresh(folder, notebooks), folder / "lab.log"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    leave_out(folder / "nbs")
    command = [
        sys.executable,
        "-m",
        "jupyterlab",
        "--no-browser",
        "--allow-root",
        "--ip=127.0.0.1",
        f"--port={port}",
        "--ServerApp.port_retries=0",
        "--IdentityProvider.token=",
        "--ServerApp.password=",
        f"--ServerApp.root_dir={folder}",
        "--LabApp.expose_app_in_browser=True",
        "--LabApp.news_url=None",
        "--LabApp.extension_manager=readonly",
        "--ServerApp.iopub_data_rate_limit=1e12",
        "--ServerApp.iopub_msg_rate_limit=1e12",
    ]
    with open(log, "w") as out:
        server = subprocess.Popen(
            command,
            env=env,
            cwd=folder,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        wait_for(f"http://127.0.0.1:{port}/api", server, log)
        context = browser.new_context(
            viewport=dict(width=1280, height=1000), reduced_motion="reduce"
        )
        yield Lab(context, f"http://127.0.0.1:{port}", folder)
        context.close()
    finally:
        server.terminate()
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            server.kill()


def wait_for(url: str, server: subprocess.Popen, log: Path, seconds: int = 120) -> None:
    "Until a server answers. Raises RuntimeError with the end of its log if it does not."
    for _ in range(seconds * 5):
        if server.poll() is not None:
            break
        try:
            return urllib.request.urlopen(url, timeout=5).close()
        except OSError:
            time.sleep(0.2)
    raise RuntimeError(f"JupyterLab did not start. Its log ends with:\n{log.read_text()[-2000:]}")
