"""Two launch agents on loopback, one process each, in folders of their own, as on two machines
whose disks are not shared: the numbers of one process, files where they are wanted, resume, and what
is said when one machine is gone."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import forks
import pytest
import torch
from ppo_fixtures import TOLD, need_deepspeed, saved_base
from test_two_processes import DEEPSPEED, SAYS, alone, check_same_numbers
from transformers import AutoModelForCausalLM

from rlhf_nb.cli import RECIPES

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="gloo on one machine")
HERE = Path(__file__).parent
TORCHRUN = ["torch.distributed.run", "--nnodes", "2", "--nproc_per_node", "1"]
ACCELERATE = ["accelerate.commands.launch", "--num_machines", "2", "--num_processes", "2"]
__all__ = ["alone"]  # a fixture


def launchers(kind: str) -> list[list[str]]:
    "The command of each machine, without the program."
    port = str(forks.free_port())
    if kind == "torchrun":
        address = ["--master_addr", "127.0.0.1", "--master_port", port]
        return [[*TORCHRUN, *address, "--node_rank", str(n)] for n in range(2)]
    layout = ["--config_file", str(RECIPES / f"{kind}.yaml"), "--mixed_precision", "no"]
    address = ["--main_process_ip", "127.0.0.1", "--main_process_port", port]
    return [[*ACCELERATE, *layout, *address, "--machine_rank", str(n)] for n in range(2)]


class Machines:
    "Two agents, each in its folder, with what it writes in a file."

    def __init__(self, folders: list[Path], launcher: str, program: str, *words: str, **env: str):
        given = dict(os.environ, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="") | env
        given["PYTHONPATH"] = os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])
        self.outputs, self.agents = [folder / "output" for folder in folders], []
        for folder, output, command in zip(folders, self.outputs, launchers(launcher)):
            command = [sys.executable, "-m", *command, str(HERE / program), *words]
            with output.open("w") as file:
                process = subprocess.Popen(
                    command, cwd=folder, env=given, stdout=file, stderr=file, start_new_session=True
                )
            self.agents.append(process)

    def wait(self, timeout: float = 600) -> list[int]:
        "Exit codes; all that is left is ended."
        until = time.monotonic() + timeout
        try:
            for agent in self.agents:
                with suppress(subprocess.TimeoutExpired):
                    agent.wait(max(0.0, until - time.monotonic()))
            return [-999 if agent.poll() is None else agent.returncode for agent in self.agents]
        finally:
            self.end()

    def end(self) -> None:
        for agent in self.agents:
            for process in [*children(agent.pid), agent.pid]:
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            agent.wait()

    def texts(self) -> list[str]:
        return [output.read_text() for output in self.outputs]


def children(pid: int) -> list[int]:
    with suppress(FileNotFoundError):
        return [int(x) for x in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def files_in(folder: Path, rank: int) -> set[str]:
    "Paths of a machine's files, without the number of its rank."
    names = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}
    for numbered in ("rank{}.", "state_{}.", "pending_{}.", "zero_pp_rank_{}_"):
        names = {name.replace(numbered.format(rank), numbered.format("N")) for name in names}
    return names


# catches: an update that depends on the number of machines, a checkpoint that lacks what the second
# machine wrote, a model that transformers writes on the first rank alone, a table or a log written
# twice, ranks that read the order of an epoch from a file that one machine has
@pytest.mark.parametrize(
    ("launcher", "kind"),
    [  # without one, the same environment: what torchrun does besides is tried further down
        ("none", "plain"),
        pytest.param("zero3", "named", marks=pytest.mark.slow),
    ],
)
def test_two_machines_train_resume_and_save_as_one_does(launcher, kind, tmp_path, alone):
    if launcher == "zero3":
        need_deepspeed()
    base, folders = alone(kind), [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        shutil.copytree(base, folder)
    if launcher == "none":
        env = dict(EACH_NODE="1", SAYS=SAYS["ddp"], ACCELERATE_USE_CPU="true")
        done = forks.run_machines(HERE / "ppo_worker.py", ".", kind, folders=folders, **env)
        codes, texts = done.args, [done.stdout, ""]
    else:
        layout = {name: x for name, x in DEEPSPEED.items() if "USE" not in name}
        machines = Machines(
            folders, launcher, "ppo_worker.py", ".", kind,
            EACH_NODE="1", SAYS=SAYS[launcher], **layout,
        )  # fmt: skip
        codes, texts = machines.wait(), machines.texts()
    assert codes == [0, 0] and f"right: {kind}" in texts[0], (texts[0] + texts[1])[-6000:]
    check_same_numbers(folders, kind)
    first, second = (files_in(folder / "whole", n) for n, folder in enumerate(folders))
    of_deepspeed = {name for name in first if Path(name).name.startswith("zero_to")}
    once = {"metrics.jsonl", "completions/update-00003-sample.csv"} | of_deepspeed
    assert second == first - once and once < first
    assert "checkpoint-3/value/model.safetensors" in second
    ids, models = torch.arange(3, 12)[None], []
    for folder in folders:
        models.append(AutoModelForCausalLM.from_pretrained(folder / "saved"))
        logits = torch.load(folders[0] / f"logits-{kind}-2.pt")
        torch.testing.assert_close(models[-1](ids).logits, logits, atol=1e-6, rtol=0)


# catches: the order of an epoch that one machine alone has on its disk, and the other waits for
@pytest.mark.weekly
def test_two_machines_train_sft_and_reward_models(tmp_path):
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        saved_base(folder, TOLD, 32)
    env = dict(ACCELERATE_USE_CPU="true", EACH_NODE="1")
    machines = Machines(folders, "torchrun", "supervised_worker.py", ".", "plain", **env)
    codes, texts = machines.wait(), machines.texts()
    assert codes == [0, 0] and "right: plain" in texts[0], (texts[0] + texts[1])[-6000:]
    for what in ("whole-sft", "whole-reward", "saved-sft", "saved-reward"):
        first, second = (files_in(folder / what, n) for n, folder in enumerate(folders))
        assert second == first - {"metrics.jsonl"} and second


# catches: machines that write into one folder each as if it were its own, a checkpoint without what
# another machine wrote, a rank that waits for one that has raised, ranks that resume from other steps
def test_machines_agree_about_disks_and_checkpoints(tmp_path):
    done = forks.run(HERE / "nodes_worker.py", folder=tmp_path, ranks=2, ACCELERATE_USE_CPU="true")
    assert done.returncode == 0 and done.stdout.count("right") == 2, done.stdout[-4000:]


# ---- A machine that is gone ----


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    "A folder with a model, and a run of two machines that was left alone."
    folder = tmp_path_factory.mktemp("nodes")
    saved_base(folder, TOLD)
    machines, _ = start(folder, folder / "alone", "never")
    assert machines.wait() == [0, 0], machines.texts()
    return folder


def start(base: Path, to: Path, moment: str, **env: str) -> tuple[Machines, list[Path]]:
    folders = [to / "first", to / "second"]
    for folder in folders:
        if not folder.exists():
            shutil.copytree(base / "base", folder / "base")
            (folder / "out").mkdir()
    env |= dict(ACCELERATE_USE_CPU="true", EACH_NODE="1")
    return Machines(folders, "torchrun", "killed_worker.py", ".", "out", moment, **env), folders


# catches: a machine that waits for gloo's half hour for one that is gone, an error that does not say
# what happened, checkpoints of which one machine has more than the other
@pytest.mark.slow
@pytest.mark.parametrize(
    ("moment", "victim", "how"),
    [
        ("update-3", 1, ""),  # the process, and its launcher sees it
        pytest.param("rollout-4", 1, "machine", marks=pytest.mark.weekly),
        # the one that holds the rendezvous
        pytest.param("update-3", 0, "machine", marks=pytest.mark.weekly),
        # no connection is closed, and nothing comes
        pytest.param("update-3", 1, "silent", marks=pytest.mark.weekly),
    ],
)
def test_a_machine_that_is_gone_ends_the_other(moment, victim, how, base, tmp_path):
    env = dict(HOW=how, VICTIM=str(victim)) | (dict(TIMEOUT="20") if how == "silent" else {})
    machines, folders = start(base, tmp_path, moment, **env)
    other, mark = 1 - victim, folders[victim] / "out" / f"killed-{moment}"
    try:
        machines.agents[other].wait(300)
        ended = time.time()
    finally:
        machines.end()
    assert machines.agents[other].returncode != 0 and ended - float(mark.read_text()) < 60
    text = machines.texts()[other]
    lines = [line for line in text.splitlines() if "lost the others after step" in line]
    assert len(lines) == 1 and "The last whole checkpoint is out/checkpoint-" in lines[0], text
    if how == "machine":
        again, folders = start(base, tmp_path, "never")
        assert again.wait() == [0, 0], again.texts()
        files = [path / "first" / "out" / "weights.pt" for path in (base / "alone", tmp_path)]
        one, two = (torch.load(file) for file in files)
        assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
