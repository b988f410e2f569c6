"""`rlhf-nb ppo` on two processes, and `accelerate launch -m rlhf_nb.cli ppo`: it trains with what the
recipe says, and every file is there once and whole."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import forks
import pandas as pd
import pytest
from marks import marked
from ppo_fixtures import TOLD, saved_base
from transformers import AutoModelForCausalLM

from rlhf_nb.rollout import Rollout

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="gloo on one machine")
RECIPE = """
ppo:
  response_length: 4
  temperature: 1.0
  learning_rate: 1e-3
  num_ppo_epochs: 2
  per_device_train_batch_size: 2
  gradient_accumulation_steps: 2
  total_episodes: 24
  save_rollouts: true
  num_sample_generations: 3
  logging_steps: 1
  eval_strategy: "no"
"""
REWARD = """
import os
def likes_a(prompts, responses, **columns):
    with open(f"asked-{os.environ['RANK']}", "a") as file: file.write(f"{len(prompts)}\\n")
    return [response.count("a") - 0.1 * len(response) for response in responses]
"""


WORDS = shlex.split(
    "ppo --config recipe.yaml --model_name_or_path base --dataset_name prompts.jsonl "
    "--dataset_test_split train[:5] --reward_function reward.py:likes_a --output_dir out "
    "--use_cpu true --report_to none"
)
PROGRAM = """
import os, sys
from rlhf_nb.cli import main
code = main(sys.argv[1:])
sys.stdout.flush()
os._exit(code)  # gloo's threads now and then abort a process that takes itself apart
"""


def launch(folder: Path, *flags: str, **env: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "accelerate.commands.launch", *flags, "-m", "rlhf_nb.cli", *WORDS],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=900,
        env=dict(os.environ, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="") | env,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli")
    saved_base(folder, TOLD)
    (folder / "prompts.jsonl").write_text(
        "".join(json.dumps(dict(prompt=prompt)) + "\n" for prompt in TOLD)
    )
    (folder / "recipe.yaml").write_text(RECIPE)
    (folder / "reward.py").write_text(REWARD)
    (folder / "typed.py").write_text(PROGRAM)
    return folder


# catches: a table or a model written by both ranks, rows of an evaluation done twice or dropped
# where they do not divide, a log that one rank cut short
# without a launcher: in the environment that it sets up
@pytest.mark.parametrize("launcher", ["none", *marked("slow", "accelerate")])
def test_ppo_on_two_processes(folder, launcher, tmp_path):
    folder = Path(shutil.copytree(folder, tmp_path / "run"))
    if launcher == "none":
        done = forks.run("typed.py", *WORDS, folder=folder, ranks=2, ACCELERATE_USE_CPU="true")
    else:
        flags = shlex.split("--multi_gpu --num_processes 2 --main_process_port 0")
        done = launch(folder, *flags, ACCELERATE_USE_CPU="true")
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("rlhf-nb ppo: 3 steps;") == 1
    assert "2 processes, DDP (MULTI_CPU)" in done.stdout
    state = json.loads((folder / "out" / "trainer_state.json").read_text())
    assert [log["episode"] for log in state["log_history"] if "episode" in log] == [8, 16, 24]
    assert sum("sample_score" in log for log in state["log_history"]) == 3
    files = sorted((folder / "out" / "rollouts").iterdir())
    assert [path.stem for path in files] == [
        f"update-{n:05d}-rank{rank}" for n in range(3) for rank in range(2)
    ]
    assert len({prompt for path in files for prompt in Rollout.load(path).prompts}) == 24
    tables = sorted((folder / "out" / "completions").iterdir())
    expected = [
        json.loads(line)["prompt"]
        for line in (folder / "prompts.jsonl").read_text().splitlines()[:5]
    ]
    assert [path.stem for path in tables] == [f"update-{n:05d}-sample" for n in (1, 2, 3)]
    for path in tables:
        # once each, in order, though 5 rows do not divide by 2
        assert pd.read_csv(path)["query"].tolist() == expected
    asked = [list(map(int, (folder / f"asked-{rank}").read_text().split())) for rank in range(2)]
    assert asked == [
        [4, 3] * 3,
        [4, 2] * 3,
    ]  # four responses of an update, then its share of the five rows
    AutoModelForCausalLM.from_pretrained(folder / "out")


# catches: two processes asked for, and one that runs without a word
@pytest.mark.slow  # what the launcher leaves behind is refused in test_contract.py
def test_a_launch_that_starts_one_process_is_refused(folder):
    done = launch(folder, "--cpu", "--num_processes", "2")
    assert done.returncode != 0
    assert "launch with --multi_gpu" in done.stderr
    assert "what runs is one process" in done.stderr
