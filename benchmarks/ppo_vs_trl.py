"""One PPO update, against the last published PPO trainer (trl 1.12.0): the same work, episodes per
second.

    python benchmarks/ppo_vs_trl.py                      small, early stops, tiny; 1 and 2 threads
    python benchmarks/ppo_vs_trl.py --settings tiny --threads 1 --rounds 9 --warmup 2
    python benchmarks/ppo_vs_trl.py --quick              does it run? Seconds; figures mean nothing

The peer's virtual environment is made where it is missing, in `--peer_venv` (1 minute and 1.5 GB,
pinned versions). Both sides load the same random Llama-class folders, prompts and lengths, in
float32 on the CPU, each in a process of its own that waits while the other works (ppo_side.py). A
round is one update of ours, one of the peer as shipped, and one of the peer with its two
`gc.collect()` calls an update taken out, so that all three meet the same moods of the machine.
Medians of `--rounds` rounds after `--warmup`; ratios are medians of the rounds' own ratios. On a
GPU: `gpu/job.py`.

Every update has all prompts, of 32 to 64 tokens. Where responses stop early, `Dice` (common.py)
give both sides the quantiles of a geometric law with mean 16, cut off at 48. Asserted equal, update
by update: optimizer steps, real tokens, and the rectangle with padding. A side may leave out work
that nobody reads (padding, the last layer's MLP on a prompt), and no token that is learnt from.

Roofline: `necessary_flops` (common.py) over the machine's matrix rate, measured in the same run and
threads on these very shapes. No activation function, norm, loss or optimizer is in the count. The
peer does not clip gradients, ours does, which costs us a little.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path

import common
from common import HERE, SMALL, check, medians, necessary_flops, shapes, times_ours, tokens

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
}
TARGETS = {
    "small": dict(peer=1.45, peer_no_gc=1.35),
    "early": dict(peer=2.2, peer_no_gc=2.1),
    "tiny": dict(peer=2.4, peer_no_gc=1.6),
}
NAMES = {"small": "small", "early": "early stops", "tiny": "tiny"}
WORDS = dict(ours="rlhf_nb", peer="trl", peer_no_gc="trl, gc off")
COLOURS = dict(ours="#0072B2", peer="#D55E00", peer_no_gc="#E69F00")
# process, and whether it collects garbage
SIDES = dict(ours=("ours", True), peer=("peer", True), peer_no_gc=("peer", False))
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "rlhf_nb"
PEER_VENV = CACHE / "peer-trl-1.12.0"


# ---- What is to be done ----


def check_equal(s: dict, found: dict[str, list[dict]]) -> None:
    "AssertionError where a side did other work, but for each row's last token, and padding."
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
            # with several mini-batches our trainer rounds rows up to 16 positions
            ours = most * (-(-width // 16) * 16) // width
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
        common.make_model(s, name).save_pretrained(folder / name)
    common.make_tokenizer(s).save_pretrained(folder / "policy")
    (folder / "setting.json").write_text(json.dumps(s))


def peer_python(folder: Path, tell=print) -> Path:
    "The peer's Python; its virtual environment is made where missing. Or SystemExit."
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

    def __init__(self, side: str, python: str | Path, folder: Path, threads: int):
        # common.py has set the rest, and the worker inherits it
        quiet = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))
        quiet |= dict(CUDA_VISIBLE_DEVICES="", ACCELERATE_USE_CPU="true")
        quiet |= dict(TRL_EXPERIMENTAL_SILENCE="1", HF_HUB_DISABLE_PROGRESS_BARS="1")
        others = ("PYTHONPATH", "VIRTUAL_ENV")
        kept = {name: x for name, x in os.environ.items() if not name.startswith(others)}
        self.name, self.log = side, folder / f"{side}.log"
        words = ["--side", side, "--folder", str(folder), "--threads", str(threads)]
        with open(self.log, "w", encoding="utf-8") as log:
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


def measure(s: dict, threads: int, asked: argparse.Namespace, pythons: dict) -> dict:
    "Rounds of one setting, and what they come to."
    with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
        write_models(s, Path(place))
        sides = {
            name: stack.enter_context(Side(name, python, Path(place), threads))
            for name, python in pythons.items()
        }
        units = {name: unit for name, unit in SIDES.items() if unit[0] in sides}
        found: dict[str, list[dict]] = {name: [] for name in units}
        versions = {name: side.ready for name, side in sides.items()}  # all are loaded by now
        ask = lambda: sides["ours"].ask(rate=[shapes(s), [[1024] * 3]], seconds=0.5)["rate"]
        rates = [ask()]
        for i in range(asked.warmup + asked.rounds):
            for name, (side, collects) in units.items():
                found[name] += [sides[side].ask(gc=collects)] * (i >= asked.warmup)
            if i == asked.warmup + asked.rounds // 2:
                rates.append(ask())
        rates.append(ask())
        check_equal(s, found)
    best = dict(zip(("own_shapes", "large"), map(max, zip(*rates))))
    told = dict(threads=threads, rounds=found, versions=versions, rate=best)
    return told | summary(s, found, best)


def summary(s: dict, found: dict[str, list[dict]], rate: dict[str, float]) -> dict:
    "Medians, ratios of the same rounds, and the share of the machine's matrix rate."
    seconds, update_seconds = medians(found, "seconds"), medians(found, "update_seconds")
    flops, everywhere = necessary_flops(s), necessary_flops(s, everywhere=True)
    share = lambda flops, x: {name: flops / took / x for name, took in update_seconds.items()}
    by_shape = {shape: share(flops, x) for shape, x in rate.items()}
    return dict(
        setting=s,
        tokens=tokens(s),
        seconds=seconds,
        update_seconds=update_seconds,
        episodes_per_second={name: s["batch"] / x for name, x in seconds.items()},
        times_faster=times_ours(found, "seconds"),
        times_faster_in_update=times_ours(found, "update_seconds"),
        peak_mib={name: max(u["peak_mib"] for u in x) for name, x in found.items()},
        necessary_gflop=flops / 1e9,
        share_of_rate={name: {x: by_shape[x][name] for x in by_shape} for name in found},
        share_with_all_of_the_last_layer=share(everywhere, rate["own_shapes"]),
    )


# ---- Telling ----


def where(r: dict) -> str:
    "The setting and threads of a run."
    return f"{NAMES.get(r['name'], r['name'])}, {r['threads']} thread{'s' * (r['threads'] > 1)}"


def checks(results: dict) -> list[dict]:
    "What was to be reached: times faster than the peer."
    words = dict(peer="as shipped", peer_no_gc="its gc off")
    return [
        check(f"{where(r)}: times the peer, {words[side]}", times, "at least", wanted)
        for r in results["runs"]
        for side, wanted in TARGETS[r["name"]].items()
        if (times := r["times_faster"].get(side)) is not None
    ]


def table(results: dict):
    "The figures, for a terminal: a row for each side."
    rows = []
    for r in results["runs"]:
        for name, speed in r["episodes_per_second"].items():
            share, times = r["share_of_rate"][name], r["times_faster"].get(name)
            rows.append(
                [
                    f"{where(r)}: {WORDS[name]}",
                    f"{speed:.1f}",
                    "" if times is None else f"{times:.2f}",
                    f"{TARGETS[r['name']].get(name, '')}",
                    f"{share['own_shapes']:.0%} / {share['large']:.0%}",
                    f"{r['peak_mib'][name]:.0f}",
                ]
            )
    return common.table(
        common.title("One PPO update, episodes per second", results),
        ["setting, threads, side", "eps", "×", "wanted", "of the matrix rate", "peak MiB"],
        rows,
        "×: how many times faster ours is. Of the matrix rate: necessary FLOPs of the update "
        "phase, of the rate at these shapes / at 1024 cubed.",
    )


def plot(results: dict, path: Path) -> None:
    "Episodes per second, side by side; the ratio over each of the peer's bars."
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    count = len(results["runs"])
    how = dict(figsize=(1.2 + 2.1 * count, 3.4), squeeze=False, layout="constrained")
    figure, panels = plt.subplots(1, count, **how)
    for panel, r in zip(panels[0], results["runs"]):
        speeds = r["episodes_per_second"]
        names = [WORDS[name].replace(", ", ",\n") for name in speeds]
        bars = panel.bar(names, speeds.values(), color=[COLOURS[name] for name in speeds])
        times = {name: f"\n{x:.2f} ×" for name, x in r["times_faster"].items()}
        labels = [f"{x:.3g}{times.get(name, '')}" for name, x in speeds.items()]
        panel.bar_label(bars, labels, fontsize=8)
        panel.set_title(where(r), fontsize=9)
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
    parser = common.parser_of(__doc__, "ppo_vs_trl", threads=[1, 2], rounds=5)
    add = parser.add_argument
    add("--settings", nargs="+", choices=SETTINGS, default=[*SETTINGS])
    add("--warmup", type=int, default=1, help="rounds before that, not counted (default 1)")
    add("--no_peer", action="store_true", help="our side alone")
    add("--peer_venv", type=Path, default=PEER_VENV, help="made where it is missing")
    asked = common.parse(parser, words)
    if asked.quick:
        asked.settings, asked.threads, asked.rounds, asked.warmup = ["tiny"], [1], 2, 1
    return asked


def main(words: list[str] | None = None) -> dict:
    "Measure, write, print."
    asked = arguments(words)
    pythons = dict(ours=sys.executable)
    if not asked.no_peer:
        pythons["peer"] = peer_python(asked.peer_venv)
    made = common.environment(asked.under_load) | dict(peer=PINS)
    results: dict = dict(environment=made, quick=asked.quick, runs=[])
    for name in asked.settings:
        for threads in asked.threads:
            start = time.perf_counter()
            run = dict(name=name) | measure(SETTINGS[name], threads, asked, pythons)
            results["runs"].append(run)
            print(f"{where(run)}: {time.perf_counter() - start:.0f} s", flush=True)
            asked.output.write_text(json.dumps(results, indent=1) + "\n")
    results["checks"] = checks(results)
    plot(results, asked.output.with_suffix(".png"))
    return common.finish(results, asked, table(results))


if __name__ == "__main__":
    main()
