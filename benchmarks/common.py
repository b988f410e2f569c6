"""What the benchmarks share: the work that is asked, models of a size, our trainer on them, the
machine's rate, and how figures are shown.

`ppo_side.py` also runs in the peer's environment, where rlhf_nb is not installed: it is imported
where our trainer is made, not before.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import math
import os
import platform
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

for name, value in dict(
    TOKENIZERS_PARALLELISM="false",
    HF_HUB_OFFLINE="1",
    TRANSFORMERS_OFFLINE="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    HF_DATASETS_DISABLE_PROGRESS_BARS="1",
    DS_ACCELERATOR="cpu",
).items():
    os.environ.setdefault(name, value)

import torch  # noqa: E402  reads the variables set above

HERE = Path(__file__).resolve().parent
PAD, EOS = 0, 1
PHASES = ("rollout", "score", "advantages", "update")
SMALL = dict(
    hidden=128,
    layers=4,
    heads=4,
    inner=352,
    vocab=4096,
    prompts=[32, 64],
    response=48,
    mean_length=None,
    batch=64,
    micro=64,
    epochs=4,
    mini_batches=1,
)


# ---- What is to be done ----


def sized(hidden: int) -> dict[str, int]:
    "A body of this width: heads of 32, an MLP 2.75 times as wide."
    return dict(hidden=hidden, heads=max(1, hidden // 32), inner=hidden * 11 // 4)


def prompt_lengths(s: dict) -> list[int]:
    "Evenly spread from the shortest to the longest, or those of the prompts given."
    if "prompt_ids" in s:
        return [len(ids) for ids in s["prompt_ids"]]
    low, high = s["prompts"]
    return [low + i % (high - low + 1) for i in range(s["batch"])]


def response_lengths(s: dict) -> list[int]:
    "All full, or quantiles of a geometric law of mean `mean_length`, cut off; or those given."
    if "lengths" in s:
        return s["lengths"]
    if s["mean_length"] is None:
        return [s["response"]] * s["batch"]
    stay = math.log(1 - 1 / s["mean_length"])
    return [
        min(s["response"], math.ceil(math.log(1 - (i + 0.5) / s["batch"]) / stay))
        for i in range(s["batch"])
    ]


def tokens(s: dict) -> dict[str, int]:
    "Of every update: steps, real tokens of all epochs, response tokens and positions of one."
    prompts, responses = prompt_lengths(s), response_lengths(s)
    return dict(
        steps=s["epochs"] * s["mini_batches"],
        real=s["epochs"] * (sum(prompts) + sum(responses)),
        response=sum(responses),
        padded=s["batch"] * (max(prompts) + max(responses)),
    )


def layer_shapes(s: dict, rows: int) -> list[list[int]]:
    "Matrix products [m, k] x [k, n] of a layer's forward, keys and values first."
    h, i, wide = s["hidden"], s["inner"], 1 if s.get("family") == "neox" else 2
    attention = [[rows, h, s.get("kv", h)]] * 2 + [[rows, h, h]] * 2
    return attention + [[rows, h, i]] * wide + [[rows, i, h]]


def shapes(s: dict) -> list[list[int]]:
    "The matrix products of one forward of the policy over a batch's real tokens."
    count = tokens(s)
    return layer_shapes(s, count["real"] // s["epochs"]) * s["layers"] + [
        [count["response"], s["hidden"], s["vocab"]]
    ]


def necessary_flops(s: dict, everywhere: bool = False) -> float:
    """Of one update phase: policy and value model, forward and backward (twice the forward), all
    epochs.

    Of the last layer, keys and values for every real token, and the rest where a state is read; of
    each row's last token nothing, since no token is chosen after it. `everywhere`: all of it for
    every real token.
    """
    of = lambda products: sum(2 * m * k * n for m, k, n in products)
    pairs = [(p, p + r - (not everywhere)) for p, r in zip(prompt_lengths(s), response_lengths(s))]
    real, read = sum(n for _, n in pairs), tokens(s)["response"]
    last = layer_shapes(s, real)[:2] + layer_shapes(s, real if everywhere else read)[2:]
    body = of(layer_shapes(s, real) * (s["layers"] - 1) + last)
    attention = sum(4 * s["hidden"] * n * (n + 1) / 2 for _, n in pairs)
    # the state before the first answer is read
    of_prompts = 0 if everywhere else sum(4 * s["hidden"] * p * (p - 1) / 2 for p, _ in pairs)
    heads = of([[read, s["hidden"], s["vocab"]], [read, s["hidden"], 1]])
    return 3 * s["epochs"] * (2 * (body + s["layers"] * attention - of_prompts) + heads)


class Dice:
    "Draws a token a row, and says when a response ends. Rows that ended may stay or leave."

    def __init__(
        self,
        draw: Callable[..., torch.Tensor],
        lengths: list[int],
        limit: int,
        seed: int = 0,
        pad: int = PAD,
        eos: int = EOS,
    ):
        self.pad, self.eos = pad, eos
        self.draw, self.plain, self.limit, self.seed = draw, torch.tensor(lengths), limit, seed
        self.t, self.rollouts, self.calls, self.drawn = max(lengths), 0, 0, 0

    def __call__(self, probs: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        drawn = self.draw(probs, *args, **kwargs)
        self.calls += 1
        if self.t == int(self.plain.max()):
            # the one before has ended: a new rollout, its lengths in another order
            chance = torch.Generator().manual_seed(self.seed + self.rollouts)
            order = torch.randperm(len(self.plain), generator=chance)
            self.lengths, self.t, self.rollouts = self.plain[order], 0, self.rollouts + 1
        self.t += 1
        left = self.lengths[self.lengths >= self.t]
        among = self.lengths if len(drawn) == len(self.lengths) else left
        ends = (among == self.t).to(drawn.device)
        if len(drawn) not in (len(self.lengths), len(left)):
            raise RuntimeError(
                f"{len(drawn)} rows are drawn, wanted {len(self.lengths)}, or {len(left)} without "
                "those that have ended"
            )
        self.drawn += len(left)
        drawn = drawn.masked_fill((drawn == self.pad) | (drawn == self.eos), self.eos + 1)
        # at the limit rows are cut off
        return drawn.masked_fill(ends[:, None], self.eos) if self.t < self.limit else drawn


@contextmanager
def drawing(module: Any, name: str, around: Callable[[Callable], Any]) -> Iterator[Any]:
    "Meanwhile `around(draw)` is in the place of what draws tokens, `module.name`."
    plain = getattr(module, name)
    setattr(module, name, around(plain))
    try:
        yield getattr(module, name)
    finally:
        setattr(module, name, plain)


def dice(s: dict, seed: int = 0, side: str = "ours") -> AbstractContextManager[Dice]:
    "Meanwhile the responses of a trainer have the lengths of the setting."
    ids = s.get("pad", PAD), s.get("eos", EOS)
    around = lambda draw: Dice(draw, response_lengths(s), s["response"], seed, *ids)
    # what a trainer draws its tokens with: the peer, or ours
    if side != "ours":
        return drawing(torch, "multinomial", around)
    from rlhf_nb import rollout

    return drawing(rollout, "draw_tokens", around)


def peak_mib() -> float:
    "Most that this process has held in memory. macOS tells bytes, Linux KiB."
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


def wait_for(device: str) -> None:
    "Until the device has done what it was told."
    if device == "cuda":
        torch.cuda.synchronize()


def rate(shapes: list[list[int]], seconds: float, device: str = "cpu") -> float:
    "FLOPs a second of products [m, k] x [k, n] in turn, best of passes; on a GPU in bfloat16."
    how = dict(device=device, dtype=torch.bfloat16 if device == "cuda" else torch.float32)
    made = lambda m, k, n: (torch.randn(m, k, **how), torch.randn(n, k, **how))
    out_of = lambda m, _, n: torch.empty(m, n, **how)
    # on a GPU, equal shapes share their tensors: those of 16 layers would fill it
    make = functools.cache(lambda *shape: (*made(*shape), out_of(*shape)))
    pairs = [(make if device == "cuda" else make.__wrapped__)(*shape) for shape in shapes]
    best, end = math.inf, time.perf_counter() + seconds
    with torch.no_grad():
        while time.perf_counter() < end or best == math.inf:
            start = time.perf_counter()
            for a, b, out in pairs:
                torch.mm(a, b.T, out=out)
            wait_for(device)
            best = min(best, time.perf_counter() - start)
    return sum(2 * m * k * n for m, k, n in shapes) / best


# ---- Models and trainer ----


def make_config(s: dict, name: str) -> Any:
    "Of policy, reward or value: Llama class or, where the setting says so, GPT-NeoX (Pythia)."
    from transformers import GPTNeoXConfig, LlamaConfig

    sizes = dict(
        vocab_size=s["vocab"],
        hidden_size=s["hidden"],
        intermediate_size=s["inner"],
        num_hidden_layers=s["layers"],
        num_attention_heads=s["heads"],
        max_position_embeddings=max(512, max(s["prompts"]) + s["response"]),
        pad_token_id=PAD,
        bos_token_id=None,
        eos_token_id=EOS,
    )
    kind = dict(llama=LlamaConfig, neox=GPTNeoXConfig)[s.get("family", "llama")]
    return kind(**sizes) if name == "policy" else kind(**sizes, num_labels=1)


def make_model(s: dict, name: str) -> Any:
    "policy, reward or value, from scratch, float32."
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    kind = AutoModelForCausalLM if name == "policy" else AutoModelForSequenceClassification
    torch.manual_seed(("policy", "reward", "value").index(name))
    return kind.from_config(make_config(s, name))


def make_tokenizer(s: dict) -> Any:
    "A word for every id."
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": PAD, "<eos>": EOS, "<unk>": 2} | {f"w{i}": i for i in range(3, s["vocab"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
    )


def make_prompts(s: dict) -> Any:
    "The prompts of every update, as a data set."
    from datasets import Dataset

    if "prompt_ids" in s:
        return Dataset.from_dict(dict(input_ids=s["prompt_ids"]))
    draws = torch.Generator().manual_seed(0)
    draw = lambda n: torch.randint(2, s["vocab"], (n,), generator=draws).tolist()
    return Dataset.from_dict(dict(input_ids=[draw(n) for n in prompt_lengths(s)]))


def settings(s: dict, folder: Path) -> dict:
    "The settings that both trainers know, by the same names."
    return dict(
        output_dir=str(folder / "out"),
        per_device_train_batch_size=s["micro"],
        gradient_accumulation_steps=s["batch"] // s["micro"],
        num_mini_batches=s["mini_batches"],
        num_ppo_epochs=s["epochs"],
        total_episodes=1000 * s["batch"],
        response_length=s["response"],
        temperature=1.0,
        local_rollout_forward_batch_size=s["batch"],
        num_sample_generations=0,
        bf16=s.get("device") == "cuda",
        use_cpu=s.get("device") != "cuda",
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        seed=0,
    )


def in_phases(around: Callable[[str], Any]) -> type:
    "Our PPOTrainer, each of its four phases inside `with around(name)`."
    from rlhf_nb.trainer import PPOTrainer

    def inside(name: str) -> Callable:
        plain = getattr(PPOTrainer, name)

        def phase(self, given):
            with around(name):
                return plain(self, given)

        return phase

    return type("PPOTrainer", (PPOTrainer,), {name: inside(name) for name in PHASES})


def make_trainer(s: dict, folder: Path, kind: type, parts: dict | None = None, **more: Any) -> Any:
    """Our trainer on models of its own, ready for `step()`. The reference is a copy of the policy;
    `parts` replace the trainer's models, `more` goes into its config."""
    from transformers.utils.logging import disable_progress_bar

    from rlhf_nb.trainer import PPOConfig

    disable_progress_bar()
    models = dict(model="policy", reward_model="reward", value_model="value")
    made = {word: make_model(s, name) for word, name in models.items() if word not in (parts or {})}
    args = PPOConfig(**settings(s, folder) | dict(stop_token="eos") | more)
    return kind(args, make_tokenizer(s), train_dataset=make_prompts(s), **made | (parts or {}))


# ---- Telling ----


def run_logged(words: list[str], log: Path, name: str, **more: str) -> None:
    "Python in a process of its own, `more` in its environment; raises SystemExit where it fails."
    start = time.perf_counter()
    with open(log, "a", encoding="utf-8") as file:
        both = dict(stdout=file, stderr=subprocess.STDOUT, env=os.environ | more)
        code = subprocess.run([sys.executable, *words], **both).returncode
    took = time.perf_counter() - start
    print(f"{name}: exit code {code} after {took:.0f} s", flush=True)
    if code:
        raise SystemExit(f"see {log}")


def described_parser(doc: str) -> argparse.ArgumentParser:
    "With a module's docstring as it is."
    kind = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=doc, formatter_class=kind)


def installed(name: str) -> str | None:
    "Its version."
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def environment(loaded: bool) -> dict:
    "Machine, versions, commit and date."
    how = dict(capture_output=True, text=True, cwd=HERE)
    run = lambda *words: subprocess.run(words, **how).stdout.strip()
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").is_file() else ""
    model = re.search(r"^model name.*?: (.*)", info, re.M)
    code = b"".join(path.read_bytes() for path in sorted((HERE.parent / "rlhf_nb").glob("*.py")))
    return dict(
        machine=model[1].strip() if model else platform.processor(),
        system=platform.platform(),
        cpus=os.cpu_count(),
        load_before=round(os.getloadavg()[0], 2),
        under_load=loaded,
        python=platform.python_version(),
        torch=torch.__version__,
        transformers=installed("transformers"),
        commit=run("git", "rev-parse", "--short", "HEAD"),
        package_sha256=hashlib.sha256(code).hexdigest()[:12],
        changed=bool(run("git", "status", "--porcelain", "--", "../rlhf_nb")),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def check(what: str, found: float, rule: str, wanted: float, form: str = ".2f") -> dict:
    "A check for the results: found should be `at least` or `at most` wanted."
    reached = found >= wanted if rule == "at least" else found <= wanted
    return dict(what=what, found=found, wanted=wanted, rule=rule, form=form, reached=bool(reached))


def table(title: str, heads: list[str], rows: list[list[str]], caption: str = "") -> Any:
    "Figures for a terminal. Of each row the first cell is on the left, as are its words."
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    shown = Table(title=title, caption=caption, box=SIMPLE_HEAD, pad_edge=False)
    for i, head in enumerate(heads):
        shown.add_column(head, justify="right" if i else "left")
    for row in rows:
        shown.add_row(*row)
    return shown


def check_table(checks: list[dict]) -> Any:
    "Checks as a table: reached or not, and the figure."
    figures = [(c, format(c["found"], c["form"]), format(c["wanted"], c["form"])) for c in checks]
    said = ("[red]not reached[/]", "[green]reached[/]")
    rows = [[c["what"], x, f"{c['rule']} {y}", said[c["reached"]]] for c, x, y in figures]
    return table("What was to be reached", ["check", "found", "wanted", ""], rows)


def medians(found: dict[str, list[dict]], what: str) -> dict[str, float]:
    "Of each side, over its rounds."
    return {side: median(x[what] for x in rounds) for side, rounds in found.items()}


def times_ours(found: dict[str, list[dict]], what: str) -> dict[str, float]:
    "Each other side over ours: the median of the rounds' own ratios."
    pairs = {side: zip(found["ours"], x) for side, x in found.items() if side != "ours"}
    return {side: median(b[what] / a[what] for a, b in x) for side, x in pairs.items()}


def title(text: str, results: dict) -> str:
    "A table's title, which says where figures are not to be kept."
    said = {
        "quick: figures say nothing": results["quick"],
        "measured on a busy machine": results["environment"]["under_load"],
    }
    notes = [note for note, true in said.items() if true]
    return text + (f" ({'; '.join(notes)})" if notes else "")


def parser_of(doc: str, name: str, threads: Any = 1, rounds: int = 0) -> argparse.ArgumentParser:
    "The words that every benchmark knows, and defaults; several `threads` are measured in turn."
    parser = described_parser(doc)
    add = parser.add_argument
    add("--quick", action="store_true", help="tiny sizes, few rounds: does it run?")
    many = "+" if isinstance(threads, list) else None
    add("--threads", type=int, nargs=many, default=threads, help=f"of torch (default {threads})")
    if rounds:
        add("--rounds", type=int, default=rounds, help=f"counted, at least 5 (default {rounds})")
    add("--output", type=Path, default=HERE / "results" / f"{name}.json", help="a JSON file")
    add("--under_load", action="store_true", help="say in the results that other work ran beside")
    return parser


def parse(parser: argparse.ArgumentParser, words: list[str] | None) -> argparse.Namespace:
    "The command line; one that could only fail later is refused now."
    asked = parser.parse_args(words)
    threads = asked.threads if isinstance(asked.threads, list) else [asked.threads]
    if min(threads) < 1:
        parser.error(f"--threads is {asked.threads}: give a positive number")
    if asked.output.suffix != ".json":
        parser.error(f"--output is {asked.output}: give a name that ends in .json")
    if getattr(asked, "rounds", 5) < (1 if asked.quick else 5):
        parser.error(f"--rounds is {asked.rounds}: a median wants at least 5 (or take --quick)")
    asked.output.parent.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(threads[0])
    return asked


def finish(results: dict, asked: argparse.Namespace, shown: Any) -> dict:
    "Writes JSON, prints the table and the checks."
    from rich.console import Console

    asked.output.write_text(json.dumps(results, indent=1) + "\n")
    console = Console()
    for one in (shown, *([check_table(results["checks"])] if results["checks"] else [])):
        console.print(one)
    console.print(str(asked.output), style="dim", soft_wrap=True)
    return results
