"""Training processes killed with SIGKILL, each resumed and compared with a run that was left alone.

    python benchmarks/kills.py

Of each of the three trainers, and of PPO over turns on one process and on two, 50 tiny runs are
killed: half of them at a random moment of their training, half while a checkpoint is being written.
Of two ranks one is killed, and the other has to end. A run passes if it resumes to equal weights,
logs and rollouts, bit for bit. Writes benchmarks/results/kills.json; exit code 1: one did not pass.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from common import HERE, described_parser

PPO = ("ppo", "turns", "turns_on_two")
KINDS = (*PPO, "sft", "reward")
TIMES = ("time/", "tokens/per_second", "eps", "train_", "total_flos")  # what two runs never share
SAVE_STEPS = dict.fromkeys(PPO, 2) | dict(sft=3, reward=3)
STEPS = dict.fromkeys(PPO, 8) | dict(sft=12, reward=12)
SHARED: dict[str, Any] = dict(
    use_cpu=True,
    report_to="none",
    disable_tqdm=True,
    save_strategy="steps",
    save_total_limit=2,
    seed=7,
)
processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(
    ["rlhf_nb.trainer", "rlhf_nb.reward", "rlhf_nb.sft", "peft", "deepspeed"]
)


# ---- The runs: everything that a checkpoint must hold is in use ----


def tiny() -> tuple[list[str], Any, Any]:
    "Prompts, their tokenizer, and a policy."
    from rlhf_nb.training.model_loading import tiny_policy, train_tokenizer

    prompts = [f"{'so ' * (i % 4)}tell {i} of {chr(97 + i % 20)}" for i in range(40)]
    tokenizer = train_tokenizer([*prompts, "a b c d e f g h i j ."])
    sizes = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    return prompts, tokenizer, tiny_policy(tokenizer, 0, max_position_embeddings=32, **sizes)


def ppo_trainer(folder: str, kind: str = "ppo") -> Any:
    "Five batches an epoch, so that the run crosses epochs. Of turns: a world that the seed makes."
    from datasets import Dataset

    from rlhf_nb.environments import guess_number
    from rlhf_nb.trainer import PPOConfig, PPOTrainer

    prompts, tokenizer, policy = tiny()
    args = PPOConfig(
        folder,
        save_steps=SAVE_STEPS["ppo"],
        logging_steps=3,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        num_mini_batches=2,
        total_episodes=8 * STEPS["ppo"] * ranks_of(kind),
        response_length=6,
        temperature=1.0,
        learning_rate=1e-3,
        value_learning_rate=3e-3,
        kl_controller="adaptive",
        kl_horizon=100,
        normalize_scores=True,
        save_rollouts=True,
        num_sample_generations=0,
        **SHARED,
    )
    data = Dataset.from_dict(dict(prompt=prompts))
    world = None if kind == "ppo" else guess_number(15, 3, 36, ("a b", "c", "d"))
    return PPOTrainer(args, tokenizer, policy, None, likes_a, data, environment_factory=world)


def likes_a(prompts: list[str], responses: list[str], **columns: list) -> list[float]:
    return [response.count("a") - 0.1 * len(response) for response in responses]


def supervised_trainer(folder: str, kind: str) -> Any:
    "Ten batches an epoch, logs over two steps, checkpoints between them."
    from datasets import Dataset

    from rlhf_nb.reward import RewardConfig, RewardTrainer
    from rlhf_nb.sft import SFTConfig, SFTTrainer

    prompts, tokenizer, policy = tiny()
    settings = dict(
        save_steps=SAVE_STEPS[kind],
        logging_steps=2,
        max_steps=STEPS[kind],
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        **SHARED,
    )
    answers = [f"{'a b ' * (i % 3)}c {i}" for i in range(40)]
    if kind == "sft":
        data = Dataset.from_dict(dict(prompt=prompts, completion=answers))
        return SFTTrainer(policy, SFTConfig(folder, **settings), data, processing_class=tokenizer)
    others = [f"{'d ' * (i % 3)}e" for i in range(40)]
    data = Dataset.from_dict(dict(prompt=prompts, chosen=answers, rejected=others))
    args = RewardConfig(folder, **settings)
    return RewardTrainer(policy, args, data, processing_class=tokenizer)


def ranks_of(kind: str) -> int:
    return 2 if kind == "turns_on_two" else 1


def train(kind: str, folder: str, resume: bool, rank: int = 0, port: int = 0) -> None:
    "One process of training, as a script would run it."
    import torch

    if (ranks := ranks_of(kind)) > 1:
        here = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, WORLD_SIZE=ranks)
        here |= dict(RANK=rank, LOCAL_RANK=rank, ACCELERATE_USE_CPU="true")
        os.environ.update({name: str(x) for name, x in here.items()})
    torch.set_num_threads(1)
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        trainer = (ppo_trainer if kind in PPO else supervised_trainer)(folder, kind)
        Path(folder, "begun").touch()
        trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(f"{folder}/final")
    if rank:
        return
    if kind in PPO:
        trainer.model.value.save_pretrained(f"{folder}/final/value")
    Path(folder, "done.json").write_text(json.dumps(untimed(trainer.state.log_history)))


def untimed(logs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: x for k, x in log.items() if not k.startswith(TIMES)} for log in logs]


def start(kind: str, folder: Path) -> list[BaseProcess]:
    "Processes, one a rank, that go on from the last checkpoint, if there is one."
    resume = any(path.name.split("-")[-1].isdigit() for path in folder.glob("checkpoint-*"))
    with socket.create_server(("127.0.0.1", 0)) as free:
        how = kind, str(folder), resume
        port = free.getsockname()[1]
    ranks = [processes.Process(target=train, args=(*how, i, port)) for i in range(ranks_of(kind))]
    for child in ranks:
        child.start()
    return ranks


def ended(ranks: list[BaseProcess]) -> list[int]:
    "Their exit codes, once they are there; none where all are 0."
    for child in ranks:
        child.join()
    return [child.exitcode or 0 for child in ranks if child.exitcode]


def result(kind: str, folder: Path) -> dict[str, Any]:
    "All that must be equal: weights, logs, the metrics file, and every rollout."
    from safetensors.torch import load_file

    from rlhf_nb.rollout import Rollout

    parts = ("", "value") if kind in PPO else ("",)
    files = [folder / "final" / part / "model.safetensors" for part in parts]
    weights = [{name: x.tolist() for name, x in load_file(file).items()} for file in files]
    found = dict(weights=weights, logs=json.loads((folder / "done.json").read_text()))
    if kind in PPO:
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        found["metrics.jsonl"] = untimed([json.loads(line) for line in lines])
        rollouts = [Rollout.load(path) for path in sorted((folder / "rollouts").iterdir())]
        found["rollouts"] = [
            (r.responses, r.info, r.logprobs.tolist(), r.values.tolist(), r.advantages.tolist())
            for r in rollouts
        ]
    return found


# ---- Killing them ----


def left_alone(kind: str, folder: Path) -> tuple[dict[str, Any], float]:
    "What a run comes to that nobody kills, and the seconds of its training."
    folder.mkdir(parents=True)
    if codes := ended(start(kind, folder)):
        raise RuntimeError(f"the {kind} run that was left alone ended with {codes}")
    seconds = (folder / "done.json").stat().st_mtime - (folder / "begun").stat().st_mtime
    return result(kind, folder), seconds


def at_moment(seconds: float) -> Callable[[BaseProcess, Path], None]:
    "Wait so long after training has begun."

    def wait(child: BaseProcess, folder: Path) -> None:
        while child.is_alive() and not (folder / "begun").exists():
            time.sleep(0.001)
        child.join(seconds)

    return wait


def in_write(step: int, delay: float = 0.0) -> Callable[[BaseProcess, Path], None]:
    "Wait until that checkpoint is being written, and a moment longer."

    def wait(child: BaseProcess, folder: Path) -> None:
        partial = folder / f"checkpoint-{step}.partial"
        while child.is_alive() and not any(partial.glob("*")):
            time.sleep(0.0005)
        time.sleep(delay)

    return wait


def killed_and_resumed(
    kind: str,
    folder: Path,
    wait: Callable[[BaseProcess, Path], None],
    expected: dict[str, Any],
    victim: int = 0,  # the rank that dies, of as many as there are
) -> str | None:  # what is wrong, "" if nothing; None: it was over before it could be killed
    "One kill, one resume, one comparison."
    folder.mkdir(parents=True)
    ranks = start(kind, folder)
    child = ranks[victim % len(ranks)]
    wait(child, folder)
    if not child.is_alive():
        ended(ranks)
        return None
    os.kill(child.pid or 0, signal.SIGKILL)
    if len(ended(ranks)) < len(ranks):
        return "a rank came to its end as if nothing had been"
    kept = sorted(path.name for path in folder.glob("checkpoint-*"))
    if codes := ended(start(kind, folder)):
        return f"the resumed run ended with {codes}; there were {kept}"
    found = result(kind, folder)
    other = [name for name in expected if found[name] != expected[name]]
    left = [path.name for path in folder.iterdir() if path.suffix in (".partial", ".lock")]
    wrong = [f"other {', '.join(other)}"] * bool(other) + [f"{left} stayed"] * bool(left)
    return "; ".join(f"{text}; resumed from {kept}" for text in wrong)


def many(kind: str, kills: int, seed: str, root: Path) -> list[dict[str, Any]]:
    "Kills of one trainer's runs, the moments of each, and what was wrong."
    expected, seconds = left_alone(kind, root / "alone")
    rng, rows = random.Random(f"{seed} {kind}"), []
    while len(rows) < kills:
        inside = len(rows) % 2 == 1
        if inside:
            last = STEPS[kind] // SAVE_STEPS[kind]
            step, delay = SAVE_STEPS[kind] * rng.randint(1, last), rng.uniform(0.0, 0.02)
            wait, moment = in_write(step, delay), f"checkpoint-{step} + {delay:.4f} s"
        else:
            after = seconds * rng.uniform(0.0, 0.95)
            wait, moment = at_moment(after), f"{after:.3f} s"
        folder = root / str(len(rows))
        wrong = killed_and_resumed(kind, folder, wait, expected, len(rows) // 2)
        shutil.rmtree(folder)
        if wrong is not None:
            rows.append(dict(in_write=inside, moment=moment, wrong=wrong))
            if wrong:
                print(f"{kind}, {moment}: {wrong}", file=sys.stderr)
    return rows


def main(words: list[str] | None = None) -> int:
    "The command line."
    parser = described_parser(__doc__)
    parser.add_argument("--kills", type=int, default=50, help="of each trainer's runs")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="which trainers")
    parser.add_argument("--seed", default="2026", help="of the moments")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "kills.json")
    asked = parser.parse_args(words)
    if asked.kills < 1:
        parser.error(f"--kills is {asked.kills}: give a positive number")
    began, results = time.time(), {}
    for kind in asked.kinds:
        with tempfile.TemporaryDirectory() as root:
            rows = many(kind, asked.kills, asked.seed, Path(root))
        same = sum(not row["wrong"] for row in rows)
        results[kind] = dict(
            kills=len(rows),
            in_writes=sum(row["in_write"] for row in rows),
            bit_for_bit=same,
            rows=rows,
        )
        print(f"{kind}: {same} of {len(rows)} killed runs resumed bit for bit", flush=True)
    kills, same = (sum(r[key] for r in results.values()) for key in ("kills", "bit_for_bit"))
    summary = dict(kills=kills, bit_for_bit=same, seconds=round(time.time() - began), **results)
    asked.output.parent.mkdir(parents=True, exist_ok=True)
    asked.output.write_text(json.dumps(summary, indent=1) + "\n")
    print(f"{same} of {kills}; {asked.output}")
    return int(same < kills)


if __name__ == "__main__":
    sys.exit(main())
