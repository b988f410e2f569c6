"""The package's files for several machines, run by bash with stand-ins for Slurm and the launchers:
each machine's command is what the launcher and `rlhf-nb ppo` take, and they are one run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from accelerate.commands.launch import launch_command_parser
from torch.distributed.run import get_args_parser

from rlhf_nb.cli import RECIPES
from rlhf_nb.cli.ppo import ppo_parser

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="they are for bash")
WRITE = f"""#!{sys.executable}
import json, os, sys
with open(os.environ["CALLS"], "a") as file:
    file.write(json.dumps(sys.argv) + "\\n")
"""
SRUN = """#!/bin/bash
[ "$1" = --kill-on-bad-exit=1 ] || exit 3
shift
for SLURM_NODEID in 0 1; do export SLURM_NODEID; "$@"; done
"""
SLURM = dict(
    SLURM_JOB_ID="123456", SLURM_NNODES="2", SLURM_GPUS_ON_NODE="4", SLURM_JOB_NODELIST="gpu[07-08]"
)


@pytest.fixture
def calls(tmp_path):
    "Run a file; the command lines that its launchers were given, as words."
    programs = dict(srun=SRUN, scontrol="#!/bin/bash\nprintf 'gpu07\\ngpu08\\n'\n")
    for name, text in (programs | dict.fromkeys(("accelerate", "torchrun"), WRITE)).items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)

    def run(*words: str, **env: str) -> list[list[str]]:
        places = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        given = dict(os.environ, CALLS=str(tmp_path / "calls"), PATH=places) | env
        command = ["bash", "-eu", str(RECIPES / words[0]), *words[1:]]
        done = subprocess.run(command, env=given, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in (tmp_path / "calls").read_text().splitlines()]

    return run


def check_run(words: list[str]):
    "The launcher is to start our program, and that knows every word of the rest."
    assert words[:2] == ["rlhf_nb.cli", "ppo"], words
    options = ppo_parser().read([*words[2:], "--use_cpu"])  # bf16 wants a GPU, or this word
    assert options.output_dir == "runs/ppo" and int(options.ddp_timeout) == 900
    return options


def check_accelerate(call: list[str], machine: int, layout: str, processes: int, first: str):
    assert call[1] == "launch"
    args = launch_command_parser().parse_args(call[2:])
    assert args.config_file == str(RECIPES / f"{layout}.yaml") and Path(args.config_file).is_file()
    assert (args.num_machines, args.machine_rank, args.num_processes) == (2, machine, processes)
    assert args.main_process_ip == first and args.main_process_port > 1024 and args.module
    return args.main_process_port, check_run([args.training_script, *args.training_script_args])


# catches: a variable that one machine fills in for all, an option that the launcher or the program
# does not have, another port on each machine
@pytest.mark.parametrize("layout", ["zero3", "fsdp2"])
def test_the_slurm_file_starts_one_launcher_a_machine(calls, layout):
    first, second = calls("slurm.sbatch", LAYOUT=layout, **SLURM)
    ports = [
        check_accelerate(call, machine, layout, 8, "gpu07")
        for machine, call in enumerate((first, second))
    ]
    assert ports[0][0] == ports[1][0]
    lines = (RECIPES / "slurm.sbatch").read_text().splitlines()
    options = dict(line.split()[1].split("=") for line in lines if line.startswith("#SBATCH"))
    assert options["--ntasks-per-node"] == "1" and int(options["--nodes"]) > 1


@pytest.mark.parametrize("layout", ["ddp", "zero2", "zero3"])
def test_two_machines_by_hand_with_accelerate(calls, layout):
    both = [
        calls("two_machines.sh", str(machine), FIRST="10.0.0.1", LAYOUT=layout)[-1]
        for machine in (0, 1)
    ]
    for machine, call in enumerate(both):
        port, _ = check_accelerate(call, machine, layout, 16, "10.0.0.1")
        assert port == 29500


def test_two_machines_by_hand_with_torchrun(calls):
    for machine in (0, 1):
        call = calls("two_machines.sh", str(machine), "torchrun", FIRST="10.0.0.1")[-1]
        args = get_args_parser().parse_args(call[1:])
        assert (args.nnodes, args.nproc_per_node, args.node_rank) == ("2", "8", machine)
        assert (args.master_addr, args.master_port, args.module) == ("10.0.0.1", 29500, True)
        options = check_run([args.training_script, *args.training_script_args])
        assert options.bf16 in (True, "true")
