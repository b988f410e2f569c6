"""A training process killed with SIGKILL, again and again, and resumed: weights, metrics and
rollouts are those of a run that was left alone."""

import json
import os
import random
import signal
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from forks import processes
from safetensors.torch import load_file

from rlhf_nb.rollout import Rollout

UPDATES, TIMES = 12, ("time/", "tokens/per_second", "eps", "train_")  # what two runs never share


def train(folder: str, resume: bool) -> None:
    """One process of training, as a script would run it: everything that a checkpoint must hold is
    in use."""
    import torch
    from datasets import Dataset

    from rlhf_nb.models import tiny_policy, train_tokenizer
    from rlhf_nb.trainer import PPOConfig, PPOTrainer

    torch.set_num_threads(1)
    prompts = [
        f"tell {i} of {chr(97 + i % 20)}" for i in range(40)
    ]  # 5 batches an epoch: the runs cross epochs
    tokenizer = train_tokenizer([*prompts, "a b c d e f g h i j ."])
    args = PPOConfig(
        folder,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        save_strategy="steps",
        save_steps=2,
        save_total_limit=2,
        logging_steps=3,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        num_mini_batches=2,
        total_episodes=8 * UPDATES,
        response_length=6,
        temperature=1.0,
        learning_rate=1e-3,
        value_learning_rate=3e-3,
        kl_controller="adaptive",
        kl_horizon=100,
        normalize_scores=True,
        save_rollouts=True,
        num_sample_generations=0,
        seed=7,
    )
    policy = tiny_policy(
        tokenizer,
        0,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=32,
    )
    reward = lambda prompts, responses, **columns: [
        response.count("a") - 0.1 * len(response) for response in responses
    ]
    trainer = PPOTrainer(
        args,
        tokenizer,
        policy,
        reward_model=reward,
        train_dataset=Dataset.from_dict(dict(prompt=prompts)),
    )
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(f"{folder}/final")
    trainer.model.value.save_pretrained(f"{folder}/final/value")
    logs = [
        {name: value for name, value in log.items() if not name.startswith(TIMES)}
        for log in trainer.state.log_history
    ]
    Path(folder, "done.json").write_text(json.dumps(logs))


def start(folder: Path) -> BaseProcess:
    "A process that goes on from the last checkpoint, if there is one."
    resume = any(path.name.split("-")[-1].isdigit() for path in folder.glob("checkpoint-*"))
    child = processes.Process(target=train, args=(str(folder), resume))
    child.start()
    return child


def result(folder: Path) -> tuple:
    "All that must be equal: weights, metrics, and every rollout but for the time it was written."
    files = sorted((folder / "rollouts").iterdir())
    rollouts = [(path.name, Rollout.load(path)) for path in files]
    told = [
        (name, r.responses, r.info, r.logprobs.tolist(), r.values.tolist(), r.advantages.tolist())
        for name, r in rollouts
    ]
    weights = [
        {
            name: x.tolist()
            for name, x in load_file(folder / "final" / part / "model.safetensors").items()
        }
        for part in ("", "value")
    ]
    return weights, json.loads((folder / "done.json").read_text()), told


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    "The run that was left alone, and how long its training took."
    folder = tmp_path_factory.mktemp("alone")
    first = processes.Process(target=print)  # the server imports before it forks
    first.start()
    first.join()
    began = time.time()
    child = start(folder)
    child.join()
    assert child.exitcode == 0
    return result(folder), time.time() - began


def kill_after(child, folder: Path, seconds: float) -> None:
    child.join(seconds)


def kill_while_writing(child, folder: Path, step: int) -> None:
    """Wait until the checkpoint is being written: its folder is there under its other name, with
    something in it."""
    while child.is_alive() and not any((folder / f"checkpoint-{step}.partial").glob("*")):
        time.sleep(0.0005)


MOMENTS = [
    *[(kill_after, share) for share in (0.15, 0.3, 0.45, 0.6, 0.75, 0.9)],
    *[(kill_while_writing, step) for step in (2, 4, 8, 12)],
]
FEW = [(kill_after, 0.45), (kill_while_writing, 4)]


# catches: a state that no checkpoint holds (random numbers, controller, moments, place in the data,
# half a log), and half a checkpoint taken for a whole one
@pytest.mark.parametrize(
    ("moments", "least"),
    [
        pytest.param(FEW, 1, id="two moments"),
        pytest.param(MOMENTS, 7, id="all moments", marks=pytest.mark.slow),
    ],
)
def test_a_killed_run_goes_on_as_if_nothing_had_been(alone, tmp_path, moments, least):
    expected, seconds = alone
    rng, killed = random.Random(os.environ.get("KILL_SEED", "2024")), []
    for i, (wait, moment) in enumerate(moments):
        folder = tmp_path / str(i)
        folder.mkdir()
        child = start(folder)
        wait(
            child,
            folder,
            moment if wait is kill_while_writing else seconds * (moment + rng.uniform(-0.1, 0.1)),
        )
        if child.is_alive():
            os.kill(child.pid, signal.SIGKILL)
            child.join()
            killed.append(child.exitcode)
        kept = sorted(path.name for path in folder.glob("checkpoint-*"))
        again = start(folder)
        again.join()
        assert again.exitcode == 0, f"moment {i}: the resumed run failed; there were {kept}"
        for what, got, want in zip(("weights", "metrics", "rollouts"), result(folder), expected):
            assert got == want, (
                f"moment {i} ({wait.__name__} {moment}): other {what} than without the kill; "
                f"resumed from {kept}"
            )
        assert not list(folder.glob("*.partial")), f"moment {i}: rubbish stayed"
    assert killed.count(-signal.SIGKILL) >= least, (
        "too few runs were caught alive: the moments are too late"
    )


# catches: one update more for a run that was finished
def test_a_finished_run_that_is_resumed_does_nothing_more(alone, tmp_path):
    for _ in range(2):
        child = start(tmp_path)
        child.join()
        assert child.exitcode == 0
    assert result(tmp_path)[0] == alone[0][0] and len(result(tmp_path)[2]) == UPDATES


# catches: a test above that would pass whatever a checkpoint forgot
def test_a_checkpoint_that_forgot_the_update_is_another_run(alone, tmp_path):
    child = start(tmp_path)
    kill_while_writing(child, tmp_path, 6)
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    from rlhf_nb.checkpoint import MANIFEST

    last = tmp_path / "checkpoint-4"
    state = json.loads((last / "ppo_state.json").read_text())
    (last / "ppo_state.json").write_text(
        json.dumps(state | dict(update_count=state["update_count"] + 1))
    )
    found = json.loads((last / MANIFEST).read_text())
    del found["files"]["ppo_state.json"]
    (last / MANIFEST).write_text(json.dumps(found))
    again = start(tmp_path)
    again.join()
    assert again.exitcode == 0 and result(tmp_path)[0] != alone[0][0]
