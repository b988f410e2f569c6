"""One PPO update, against the last published PPO trainer (trl 1.12.0): the same work, episodes per
second.

    python benchmarks/ppo_vs_trl.py                      small, early stops, tiny; 1 and 2 threads
    python benchmarks/ppo_vs_trl.py --settings tiny --threads 1 --rounds 9 --warmup 2
    python benchmarks/ppo_vs_trl.py --quick              does it run? Seconds; figures mean nothing
    python benchmarks/ppo_vs_trl.py --profile --no_peer  where our update's time goes, as text

The peer's virtual environment is made where it is missing, in `--peer_venv` (1 minute and 1.5 GB,
pinned versions). Both sides load the same random Llama-class folders, prompts and lengths, in
float32 on the CPU, each in a process of its own that waits while the other works. A round is one
update of ours, one of the peer as shipped, and one of the peer with its two `gc.collect()` calls
an update taken out (the name `gc` in its module is replaced), so that all three meet the same
moods of the machine. Medians of `--rounds` rounds after `--warmup`; ratios are medians of the
rounds' own ratios.

On a GPU (`--settings gpu`): policy, value, reward and reference of the shape of pythia-1b, prompts
of 256 to 512 tokens, 53 response tokens, 16 rows x 4 micro-batches, 4 epochs, bf16 asked for on
both sides. The third side is the peer with its models loaded in bfloat16, since as shipped it
stays in float32. The sides would not fit into one GPU together, so in each round each is started,
does an update that is not counted and one that is, and ends. Memory is what torch had allocated at
most. Not run yet: no GPU was at hand; `--quick --settings gpu` goes the same way with tiny models,
on a CPU too.

Lengths. Prompts have 32 to 64 tokens, evenly spread, and every update has all of them. Where
responses stop early, their lengths are the quantiles of a geometric law with mean 16, cut off at
48, shuffled anew over the rows of each update by a seed. How a random model comes to write so:
around what each trainer draws tokens with (`torch.multinomial`; ours, `rollout.draw_tokens`) stand
the same dice (`Dice` in common.py), which draw likewise and then decide alone whether the stop
token comes. Log-probs are those of the model.

Asserted equal, update by update: optimizer steps, real tokens, and the rectangle of prompts and
responses with padding. A side may leave out work that nobody reads (padding, the last layer's MLP
on a prompt); it may not leave out a token that is learnt from.

Roofline. Necessary FLOPs of the update phase: every real token but each row's last through both
bodies, causal attention, and the head on response positions alone, times 3 for forward and
backward. Of the last layer, only keys and values are necessary for every real token; queries,
output projection and MLP where a state is read. (Counted for every real token too, the share is
told as `share_with_all_of_the_last_layer`; ours then gets work counted that it leaves out.) The
machine's matrix rate is measured in the same run with the same threads, best of many passes:
products of these very shapes, and one of 1024 x 1024 x 1024. No activation function, norm, loss or
optimizer is in the count. The settings differ from the trainers' defaults in nothing but sizes,
temperature 1, float32 and no files; the peer does not clip gradients, ours does, which costs us a
little.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from functools import cached_property
from pathlib import Path
from statistics import median

from common import (
    HERE,
    SMALL,
    at_least,
    at_most,
    environment,
    make_model,
    make_tokenizer,
    necessary_flops,
    shapes,
    title,
    tokens,
    verdicts,
)

PINS = (
    "trl==1.12.0",
    "torch==2.13.0",
    "transformers==5.23.0",
    "accelerate==1.15.0",
    "datasets==5.2.0",
    "peft==0.21.2",
    "rich==15.0.0",
)
SETTINGS = {
    "small": SMALL,
    "early": SMALL | dict(mean_length=16),
    "tiny": SMALL
    | dict(hidden=64, layers=2, inner=192, prompts=[16, 16], response=16, batch=32, micro=32),
    "gpu": SMALL
    | dict(
        family="neox",
        hidden=2048,
        layers=16,
        heads=8,
        inner=8192,
        vocab=50304,
        prompts=[256, 512],
        response=53,
        micro=16,
        device="cuda",
    ),
}
QUICK_GPU = dict(
    hidden=32,
    layers=2,
    heads=2,
    inner=64,
    vocab=256,
    prompts=[8, 16],
    response=8,
    batch=8,
    micro=2,
    epochs=2,
)
TARGETS = {
    "small": dict(peer=1.45, peer_no_gc=1.35),
    "early": dict(peer=2.2, peer_no_gc=2.1),
    "tiny": dict(peer=2.4, peer_no_gc=1.6),
    "gpu": dict(peer=5.0, peer_bf16=2.0),
}
SHARES = {"gpu": 0.45}  # of the matrix rate, in the update
NAMES = {
    "small": "small",
    "early": "early stops",
    "tiny": "tiny",
    "gpu": "pythia-1b shape on a GPU",
}
WORDS = dict(
    ours="rlhf_nb",
    peer="trl",
    peer_no_gc="trl, gc off",
    peer_bf16="trl, its models in bf16",
)
COLOURS = dict(
    ours="#0072B2",
    peer="#D55E00",
    peer_no_gc="#E69F00",
    peer_bf16="#E69F00",
)
SIDES = {
    "ours": ("ours", True),
    "peer": ("peer", True),
    "peer_no_gc": ("peer", False),
}  # process, and whether it collects garbage
APART = {
    "ours": ("ours", "float32"),
    "peer": ("peer", "float32"),
    "peer_bf16": ("peer", "bfloat16"),
}  # process, and what its models are in


# ---- What is to be done ----


def check_equal(s: dict, found: dict[str, list[dict]]) -> None:
    """Raises AssertionError where a side did other work than the setting says. A side may leave out
    each row's last token, and padding."""
    want = tokens(s)
    for side, updates in found.items():
        for u in updates:
            assert u["steps"] == want["steps"], (
                f"{side} took {u['steps']} optimizer steps, wanted {want['steps']}"
            )
            least = want["real"] - s["epochs"] * s["batch"]
            assert u["real"] == want["real"] or u["real"] == least, (
                f"{side} learnt from {u['real']} real tokens, wanted {want['real']}"
            )
            assert u["drawn"] == want["response"], (
                f"{side} drew {u['drawn']} response tokens, wanted {want['response']}"
            )
            most = want["padded"] * s["epochs"]
            width = want["padded"] // s["batch"]
            ours = (
                most * (-(-width // 16) * 16) // width
            )  # with several mini-batches our trainer rounds rows up to 16 positions
            assert u["real"] <= u["computed"] <= ours, (
                f"{side} computed {u['computed']} positions, wanted {u['real']} to {ours}"
            )
            if not side.startswith("ours"):
                assert (u["real"], u["computed"]) == (want["real"], most), (
                    f"{side}: {u}, wanted {want}"
                )


# ---- What both sides load ----


def write_models(s: dict, folder: Path) -> None:
    "Policy with tokenizer, reward and value model, from scratch, and the setting."
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    for name in ("policy", "reward", "value"):
        make_model(s, name).save_pretrained(folder / name)
    make_tokenizer(s).save_pretrained(folder / "policy")
    (folder / "setting.json").write_text(json.dumps(s))


def peer_python(folder: Path, tell=print) -> Path:
    """The peer's Python; its virtual environment is made where it is missing. Raises SystemExit
    where it cannot be made."""
    python, done = folder / "bin" / "python", folder / "installed.txt"
    if done.is_file() and done.read_text().split() == list(PINS):
        return python
    tell(f"making the peer's virtual environment in {folder}: 1 minute, 1.5 GB")
    for words in (
        [sys.executable, "-m", "venv", str(folder)],
        [str(python), "-m", "pip", "--disable-pip-version-check", "install", "-q", *PINS],
    ):
        if subprocess.run(words).returncode:
            raise SystemExit(
                f"the peer could not be installed into {folder} (see above): fix that, or "
                "measure our side alone with --no_peer"
            )
    done.write_text("\n".join(PINS))
    return python


# ---- Measuring ----


class Side:
    "A worker process, which loads while others do. Closed, it ends."

    def __init__(
        self,
        side: str,
        python: str | Path,
        folder: Path,
        threads: int,
        models_in: str = "float32",
        gpu: bool = False,
    ):
        quiet = dict(
            OMP_NUM_THREADS=str(threads),
            MKL_NUM_THREADS=str(threads),
            HF_HUB_OFFLINE="1",
            TRANSFORMERS_OFFLINE="1",
            TOKENIZERS_PARALLELISM="false",
            TRL_EXPERIMENTAL_SILENCE="1",
            HF_HUB_DISABLE_TELEMETRY="1",
            HF_HUB_DISABLE_PROGRESS_BARS="1",
            **({} if gpu else dict(CUDA_VISIBLE_DEVICES="", ACCELERATE_USE_CPU="true")),
        )
        kept = {
            name: x
            for name, x in os.environ.items()
            if not name.startswith(("PYTHONPATH", "VIRTUAL_ENV"))
        }
        self.name, self.log = side, folder / f"{side}.log"
        with open(self.log, "w", encoding="utf-8") as log:
            words = [
                "--side",
                side,
                "--folder",
                str(folder),
                "--threads",
                str(threads),
                "--models_in",
                models_in,
            ]
            self.process = subprocess.Popen(
                [str(python), str(HERE / "ppo_side.py"), *words],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=kept | quiet,
            )

    @cached_property
    def ready(self) -> dict:
        "What it runs on; waits until it is loaded."
        return self.hear()["ready"]

    def hear(self) -> dict:
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(
                f"{self.name} ended early; the end of its log:\n{self.log.read_text()[-3000:]}"
            )
        return json.loads(line)

    def ask(self, **word) -> dict:
        _ = self.ready  # waits until the side has loaded its models
        self.process.stdin.write(json.dumps(word) + "\n")
        self.process.stdin.flush()
        return self.hear()

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        self.process.stdin.close()
        self.process.wait(60)


def measure_apart(s: dict, threads: int, rounds: int, warmup: int, python: Path | None) -> dict:
    """The same where the sides would not fit into one GPU together: in each round each is started,
    warms up, does one update, and ends."""
    with tempfile.TemporaryDirectory() as place:
        write_models(s, Path(place))
        pythons = dict(ours=sys.executable) | ({} if python is None else dict(peer=python))
        units = {name: unit for name, unit in APART.items() if unit[0] in pythons}
        found: dict[str, list[dict]] = {name: [] for name in units}
        rates, versions = [], {}
        for _ in range(rounds):
            for name, (side, models_in) in units.items():
                with Side(
                    side, pythons[side], Path(place), threads, models_in, s["device"] == "cuda"
                ) as one:
                    if name == "ours":
                        rates.append(
                            one.ask(rate=[shapes(s), [[4096, 4096, 4096]]], seconds=0.5)["rate"]
                        )
                    for _ in range(warmup):
                        one.ask(gc=True)
                    found[name].append(one.ask(gc=True))
                    versions[name] = one.ready
        check_equal(s, found)
        best = dict(zip(("own_shapes", "large"), map(max, zip(*rates))))
        return dict(
            threads=threads, rounds=found, versions=versions, rate=best, **summary(s, found, best)
        )


def measure(
    s: dict,
    threads: int,
    rounds: int,
    warmup: int,
    python: Path | None,
    profile: Path | None = None,
) -> dict:
    "Rounds of one setting, and what they come to. Without the peer's Python, our side alone."
    from contextlib import ExitStack

    with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
        write_models(s, Path(place))
        pythons = dict(ours=sys.executable) | ({} if python is None else dict(peer=python))
        sides = {
            name: stack.enter_context(Side(name, path, Path(place), threads))
            for name, path in pythons.items()
        }
        units = {name: unit for name, unit in SIDES.items() if unit[0] in sides}
        found: dict[str, list[dict]] = {name: [] for name in units}
        rates: list[list[float]] = []
        versions = {
            name: side.ready for name, side in sides.items()
        }  # all are loaded before anything is measured

        def ask_rates() -> None:
            rates.append(
                sides["ours"].ask(rate=[shapes(s), [[1024, 1024, 1024]]], seconds=0.5)["rate"]
            )

        ask_rates()
        for i in range(warmup + rounds):
            for name, (side, collects) in units.items():
                update = sides[side].ask(gc=collects)
                if i >= warmup:
                    found[name].append(update)
            if i == warmup + rounds // 2:
                ask_rates()
        ask_rates()
        check_equal(s, found)
        if profile is not None:
            profile.write_text(f"{s}, {threads} threads\n\n")
            for kind in ("operations", "functions"):
                sides["ours"].ask(profile=str(profile), kind=kind)
        best = dict(zip(("own_shapes", "large"), map(max, zip(*rates))))
        return dict(
            threads=threads, rounds=found, versions=versions, rate=best, **summary(s, found, best)
        )


def summary(s: dict, found: dict[str, list[dict]], rate: dict[str, float]) -> dict:
    "Medians, ratios of the same rounds, and the share of the machine's matrix rate."
    middle = lambda name, what: median(u[what] for u in found[name])
    ratio = lambda name, what: median(
        theirs[what] / mine[what] for mine, theirs in zip(found["ours"], found[name])
    )
    others, flops = [name for name in found if name != "ours"], necessary_flops(s)
    return dict(
        setting=s,
        tokens=tokens(s),
        seconds={name: middle(name, "seconds") for name in found},
        update_seconds={name: middle(name, "update_seconds") for name in found},
        episodes_per_second={name: s["batch"] / middle(name, "seconds") for name in found},
        times_faster={name: ratio(name, "seconds") for name in others},
        times_faster_in_update={name: ratio(name, "update_seconds") for name in others},
        peak_mib={name: max(u["peak_mib"] for u in found[name]) for name in found},
        necessary_gflop=flops / 1e9,
        share_of_rate={
            name: {shape: flops / middle(name, "update_seconds") / x for shape, x in rate.items()}
            for name in found
        },
        share_with_all_of_the_last_layer={
            name: necessary_flops(s, everywhere=True)
            / middle(name, "update_seconds")
            / rate["own_shapes"]
            for name in found
        },
    )


# ---- Telling ----


def checks(results: dict) -> list[dict]:
    """What was to be reached: times faster than the peer, and the share of the matrix rate, at
    these shapes."""
    found, words = [], dict(peer="as shipped", peer_no_gc="its gc off", peer_bf16="forced to bf16")
    for r in results["runs"]:
        where = f"{NAMES[r['name']]}, {r['threads']} thread{'s' * (r['threads'] > 1)}"
        for side, wanted in TARGETS[r["name"]].items():
            if side in r["times_faster"]:
                times = r["times_faster"][side]
                found.append(at_least(f"{where}: times the peer, {words[side]}", times, wanted))
            if side in r["times_faster"] and r["name"] == "gpu":
                share = r["peak_mib"]["ours"] / r["peak_mib"][side]
                found.append(
                    at_most(
                        f"{where}: peak memory, of the peer's, {words[side]}", share, 0.5, ".0%"
                    )
                )
        if r["name"] in SHARES:
            share = r["share_of_rate"]["ours"]["large" if r["name"] == "gpu" else "own_shapes"]
            found.append(
                at_least(f"{where}: update, of the matrix rate", share, SHARES[r["name"]], ".0%")
            )
    return found


def table(results: dict):
    "The figures, for a terminal: a row for each side."
    from rich.table import Table

    shown = Table(
        title=title("One PPO update, episodes per second", results),
        caption="×: how many times faster ours is. Of the matrix "
        "rate: necessary FLOPs of the update phase, of the rate at these shapes / at 1024 cubed.",
    )
    for column in (
        "setting",
        "threads",
        "side",
        "eps",
        "×",
        "wanted",
        "of the matrix rate",
        "peak MiB",
    ):
        shown.add_column(column, justify="left" if column in ("setting", "side") else "right")
    for r in results["runs"]:
        wanted = TARGETS[r["name"]]
        for i, (name, speed) in enumerate(r["episodes_per_second"].items()):
            share, times = r["share_of_rate"][name], r["times_faster"].get(name)
            shown.add_row(
                *((NAMES[r["name"]], str(r["threads"])) if i == 0 else ("", "")),
                WORDS[name],
                f"{speed:.1f}",
                "" if times is None else f"{times:.2f}",
                f"{wanted[name]:g}"
                if name in wanted
                else f"{SHARES[r['name']]:.0%}"
                if r["name"] in SHARES and name == "ours"
                else "",
                f"{share['own_shapes']:.0%} / {share['large']:.0%}",
                f"{r['peak_mib'][name]:.0f}",
                end_section=i + 1 == len(r["episodes_per_second"]),
            )
    return shown


def plot(results: dict, path: Path) -> None:
    "Episodes per second, side by side; the ratio over each of the peer's bars."
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(
        1,
        len(results["runs"]),
        figsize=(1.2 + 2.1 * len(results["runs"]), 3.4),
        squeeze=False,
        layout="constrained",
    )
    for panel, r in zip(panels[0], results["runs"]):
        speeds = r["episodes_per_second"]
        bars = panel.bar(
            [WORDS[name].replace(", ", ",\n") for name in speeds],
            speeds.values(),
            color=[COLOURS[name] for name in speeds],
        )
        times = {name: f"\n{x:.2f} ×" for name, x in r["times_faster"].items()}
        labels = [f"{x:.3g}{times.get(name, '')}" for name, x in speeds.items()]
        panel.bar_label(bars, labels, fontsize=8)
        panel.set_title(
            f"{NAMES.get(r['name'], r['name'])}, {r['threads']} thread{'s' * (r['threads'] > 1)}",
            fontsize=9,
        )
        panel.set_ylim(0, 1.2 * max(speeds.values()))
        panel.spines[["top", "right"]].set_visible(False)
        panel.tick_params(labelsize=8)
    panels[0][0].set_ylabel("episodes per second")
    if any(r["times_faster"] for r in results["runs"]):
        figure.supxlabel("×: how many times faster rlhf_nb is", fontsize=9)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    "The command line."
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--settings",
        nargs="+",
        choices=SETTINGS,
        default=[name for name in SETTINGS if name != "gpu"],
    )
    add("--threads", nargs="+", type=int, default=[1, 2], help="each is measured by itself")
    add(
        "--rounds", type=int, default=5, help="counted updates of each side, at least 5 (default 5)"
    )
    add("--warmup", type=int, default=1, help="rounds before that, not counted (default 1)")
    add(
        "--micro",
        type=int,
        help="rows of a micro-batch on both sides; the whole batch, where it is not given",
    )
    add(
        "--quick",
        action="store_true",
        help="one small size and two rounds: a test of the benchmark, not of the trainers",
    )
    add(
        "--profile",
        action="store_true",
        help="add a profile of one of our updates as text beside the JSON file",
    )
    add("--no_peer", action="store_true", help="our side alone")
    add(
        "--peer_venv",
        type=Path,
        default=cache / "rlhf_nb" / "peer-trl-1.12.0",
        help="the peer's virtual environment, made where it is missing",
    )
    add(
        "--output",
        type=Path,
        default=HERE / "results" / "ppo_vs_trl.json",
        help="the plot and profiles are put beside it",
    )
    add(
        "--under_load",
        action="store_true",
        help="say in the results that other work ran beside this",
    )
    asked = parser.parse_args(words)
    on_gpu = asked.settings == ["gpu"]
    if "gpu" in asked.settings:
        if not on_gpu:
            parser.error("--settings gpu stands alone: it writes results of another machine")
        asked.threads = asked.threads[:1]
        if asked.output == parser.get_default("output"):
            asked.output = asked.output.with_name("ppo_vs_trl_gpu.json")
        if asked.micro is not None or asked.profile:
            parser.error("--micro and --profile are for the settings on a CPU")
        import torch

        if not (asked.quick or torch.cuda.is_available()):
            parser.error("--settings gpu wants a GPU, and torch sees none")
    if asked.quick:
        asked.settings, asked.threads, asked.rounds, asked.warmup = (
            asked.settings if on_gpu else ["tiny"],
            [1],
            2,
            1,
        )
    elif asked.rounds < 5:
        parser.error(f"--rounds is {asked.rounds}: a median wants at least 5 (or take --quick)")
    if min(asked.threads) < 1:
        parser.error(f"--threads is {asked.threads}: give positive numbers")
    for name in asked.settings:
        if asked.micro is not None and not (
            asked.micro > 0 and SETTINGS[name]["batch"] % asked.micro == 0
        ):
            parser.error(
                f"--micro is {asked.micro}: give a divisor of the batch of {name}, "
                f"{SETTINGS[name]['batch']}"
            )
    return asked


def measured_before(path: Path, results: dict, asked: argparse.Namespace) -> list[dict]:
    """Runs in this file of the very same code on the same machine, at settings and threads that are
    not measured now."""
    if asked.quick or asked.micro is not None or not path.is_file():
        return []
    old, alike = (
        json.loads(path.read_text()),
        (
            "package_sha256",
            "changed",
            "machine",
            "cpus",
            "torch",
            "transformers",
            "under_load",
            "peer",
        ),
    )
    now = json.loads(json.dumps(results["environment"]))  # lists where there were tuples
    same = not old["quick"] and all(old["environment"].get(name) == now[name] for name in alike)
    full = (
        [
            r
            for r in old["runs"]
            if r["setting"]["micro"] == r["setting"]["batch"] and "peer" in r["rounds"]
        ]
        if same
        else []
    )
    return [r for r in full if not (r["name"] in asked.settings and r["threads"] in asked.threads)]


def main(words: list[str] | None = None) -> dict:
    "Measure, write, print."
    import torch
    from rich.console import Console

    asked, console = arguments(words), Console()
    python = None if asked.no_peer else peer_python(asked.peer_venv, console.print)
    results = dict(
        environment=environment(asked.under_load) | dict(peer=PINS), quick=asked.quick, runs=[]
    )
    asked.output.parent.mkdir(parents=True, exist_ok=True)
    kept = measured_before(asked.output, results, asked)
    for name in asked.settings:
        s = SETTINGS[name] | ({} if asked.micro is None else dict(micro=asked.micro))
        if name == "gpu" and asked.quick:
            s |= QUICK_GPU | dict(device="cuda" if torch.cuda.is_available() else "cpu")
        for threads in asked.threads:
            start = time.perf_counter()
            profile = (
                asked.output.with_name(f"{asked.output.stem}_profile_{name}_{threads}.txt")
                if asked.profile
                else None
            )
            found = (
                measure_apart(s, threads, asked.rounds, asked.warmup, python)
                if name == "gpu"
                else measure(s, threads, asked.rounds, asked.warmup, python, profile)
            )
            kept.append(dict(name=name, **found))
            results["runs"] = sorted(
                kept, key=lambda r: ([*SETTINGS].index(r["name"]), r["threads"])
            )
            console.print(
                f"{NAMES[name]}, {threads} threads: {time.perf_counter() - start:.0f} s",
                style="dim",
            )
            asked.output.write_text(json.dumps(results, indent=1) + "\n")
    results["checks"] = checks(results)
    asked.output.write_text(json.dumps(results, indent=1) + "\n")
    plot(results, asked.output.with_suffix(".png"))
    for one in (table(results), verdicts(results["checks"])):
        console.print(one)
    if python:
        console.print(f"steps and tokens were equal on both sides; {asked.output}", style="dim")
    return results


if __name__ == "__main__":
    main()
