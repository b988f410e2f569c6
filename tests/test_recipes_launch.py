"""`accelerate launch --config_file` with each of the package's own files: what the file asks for is
what runs, or the run is refused."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ppo_fixtures import need_deepspeed, saved_base

import rlhf_nb

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="gloo on one machine"),
    pytest.mark.slow,  # the layouts themselves run at every stop in test_two_processes.py
]
RECIPES = Path(rlhf_nb.__file__).parent / "recipes"
WORKER = str(Path(__file__).with_name("recipe_worker.py"))
SAYS = dict(
    ddp="2 processes, DDP (MULTI_CPU), cpu, float32",
    zero2="2 processes, DeepSpeed ZeRO-2 (DEEPSPEED), cpu, bf16",
    zero3="2 processes, DeepSpeed ZeRO-3 (DEEPSPEED), cpu, bf16",
)
ON_GPUS = dict(
    ddp="2 processes, DDP (MULTI_GPU), cuda",
    fsdp2="2 processes, FSDP2 (FSDP), cuda",
    zero2="2 processes, DeepSpeed ZeRO-2 (DEEPSPEED), cuda",
    zero3="2 processes, DeepSpeed ZeRO-3 (DEEPSPEED), cuda",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recipes")
    saved_base(folder, [f"tell {i} of a" for i in range(4)])
    return folder


def launch(recipe: str, folder: Path, **env: str) -> subprocess.CompletedProcess:
    "The recipe as it is, but for the number of processes, which its first lines say to edit."
    words = ["--config_file", str(RECIPES / f"{recipe}.yaml"), "--num_processes", "2"]
    words += ["--main_process_port", "0", WORKER, str(folder)]
    return subprocess.run(
        [sys.executable, "-m", "accelerate.commands.launch", *words],
        capture_output=True,
        text=True,
        timeout=900,
        env={name: value for name, value in os.environ.items() if name != "DS_ACCELERATOR"}
        | dict(OMP_NUM_THREADS="1")
        | env,
    )


# catches: a file that accelerate no longer reads, one that starts another layout than its name says
@pytest.mark.parametrize("recipe", ["ddp", "zero2", "zero3"])
def test_the_recipe_runs_on_two_processes(recipe, folder):
    if "zero" in recipe:
        need_deepspeed()
    # ACCELERATE_USE_CPU would turn DeepSpeed off
    cpu = dict(ACCELERATE_USE_CPU="true") if recipe == "ddp" else dict(DS_ACCELERATOR="cpu")
    done = launch(recipe, folder, CUDA_VISIBLE_DEVICES="", **cpu)
    assert done.returncode == 0 and done.stdout.count(SAYS[recipe]) == 1, (
        done.stdout[-2000:] + done.stderr[-4000:]
    )


# catches: an FSDP recipe that trains by DDP without a word, which is what Accelerate makes of it on
# a CPU
def test_fsdp_on_a_cpu_is_refused(folder):
    done = launch("fsdp2", folder, CUDA_VISIBLE_DEVICES="", ACCELERATE_USE_CPU="true")
    assert (
        done.returncode != 0
        and "ACCELERATE_USE_FSDP is 'true' and what runs is 2 processes, DDP (MULTI_CPU)"
        in done.stderr
    ), done.stdout[-2000:] + done.stderr[-4000:]


# catches: a recipe that asks for what no GPU run gets
@pytest.mark.parametrize("recipe", sorted(ON_GPUS))
@pytest.mark.skipif(
    torch.cuda.device_count() < 2,
    reason="needs two GPUs: Accelerate gives FSDP to GPUs alone (tests/test_two_processes.py runs "
    "its layout on a CPU), and NCCL wants one for each process",
)
def test_the_recipe_runs_on_two_gpus(recipe, folder):
    if "zero" in recipe:
        need_deepspeed()
    done = launch(recipe, folder, RECIPE_ON="gpu")
    assert (
        done.returncode == 0 and done.stdout.count(ON_GPUS[recipe]) == 1 and "bf16" in done.stdout
    ), done.stdout[-2000:] + done.stderr[-4000:]
