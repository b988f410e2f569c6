"""`rlhf-nb demo --quick` on several seeds of posts, pairs and PPO.

    python benchmarks/quick_demo.py    # seeds 0 to 4, one after the other; about six minutes
    python benchmarks/quick_demo.py --kept    # run nothing: what the kept JSON says over its seeds

Each run is a process of its own, with the command's own settings. The judge is the gold judge, on
400 test posts; training never sees it. Writes benchmarks/results/quick_demo.json, and says whether
each seed gains 20 points near-greedy with intervals apart, wins no less at temperature 1, and has
no more bad form (by two standard errors of the difference); then what holds over all seeds, with
the interval of `rlhf_nb.gains`: the gain, and the rise of bad form.
"""

import json
import math
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from common import HERE, described_parser

from rlhf_nb.gains import paired_gain, plan


def no_worse(before: float, after: float, posts: int) -> bool:
    "Whether a share rose by less than two standard errors of the difference."
    error = math.sqrt((before * (1 - before) + after * (1 - after)) / posts)
    return after - before <= 2 * error


def verdict(rows: list[dict[str, Any]]) -> dict[str, bool]:
    "What must hold, by name."
    at = {(row["model"], row["temperature"]): row for row in rows}
    greedy, sampled = (tuple(at[name, t] for name in ("sft", "ppo")) for t in (0.01, 1.0))
    posts = greedy[0]["posts"]
    return dict(
        gain=greedy[1]["win_rate"] - greedy[0]["win_rate"] >= 0.2,
        apart=greedy[1]["low"] > greedy[0]["high"],
        sampled=sampled[1]["win_rate"] >= sampled[0]["win_rate"],
        form=all(
            no_worse(before["malformed"], after["malformed"], posts)
            for before, after in (greedy, sampled)
        ),
    )


def run(seed: int, folder: str) -> dict[str, Any]:
    "One quick demo: its verdict table, reward model and seconds."
    start = time.perf_counter()
    words = ["-m", "rlhf_nb.cli", "demo", "--quick", "--seed", str(seed), "--output_dir", folder]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    results = json.loads((Path(folder) / "results.json").read_text())
    return dict(
        seed=seed,
        seconds=round(time.perf_counter() - start, 1),
        rows=results["verdict"],
        reward_accuracy=results["reward"]["accuracy"],
        holds=verdict(results["verdict"]),
    )


def over_seeds(runs: list[dict[str, Any]]) -> dict[str, str]:
    "What PPO changed at each temperature, over the seeds, and what so many seeds can show."

    def values(model: str, temperature: float, column: str) -> list[float]:
        rows = [row for one in runs for row in one["rows"]]
        at = [row for row in rows if (row["model"], row["temperature"]) == (model, temperature)]
        return [row[column] for row in at]

    said = {}
    for name, column, t in (
        ("gain", "win_rate", 0.01),
        ("gain", "win_rate", 1.0),
        ("rise of bad form", "malformed", 1.0),
    ):
        pairs = (values(model, t, column) for model in ("ppo", "sft"))
        said[f"{name} at temperature {t:g}"] = str(paired_gain(*pairs))
    for t in (0.01, 1.0):
        for name, column, digits in (
            ("bad form", "malformed", ".1%"),
            ("facts covered", "covered", ".1f"),
            ("facts invented", "invented", ".2f"),
            ("tokens", "length", ".1f"),
        ):
            before, after = (np.mean(values(model, t, column)) for model in ("sft", "ppo"))
            said[f"{name} at temperature {t:g}"] = f"{before:{digits}} → {after:{digits}}"
    if len(runs) > 1:
        gains = np.subtract(*(values(model, 0.01, "win_rate") for model in ("ppo", "sft")))
        said["plan, paired by seed"] = str(plan(gains, groups=1))
    return said


def main() -> None:
    parser = described_parser(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--output", type=Path, default=HERE / "results" / "quick_demo.json")
    parser.add_argument("--kept", action="store_true", help="summarise what --output holds")
    options = parser.parse_args()
    runs = json.loads(options.output.read_text())["runs"] if options.kept else []
    for seed in [] if options.kept else options.seeds:
        with tempfile.TemporaryDirectory() as folder:
            runs.append(run(seed, f"{folder}/run"))
        print(f"seed {seed}: {runs[-1]['seconds']} s, {runs[-1]['holds']}")
        for row in runs[-1]["rows"]:
            print(
                f"    {row['model']} at {row['temperature']:g}: {row['win_rate']:.1%} "
                f"({row['low']:.1%} to {row['high']:.1%}), bad form {row['malformed']:.1%}, "
                f"invented {row['invented']:.2f}",
                flush=True,
            )
    said = over_seeds(runs)
    for name, text in said.items():
        print(f"{name}: {text}")
    options.output.write_text(json.dumps(dict(runs=runs, over_seeds=said), indent=1) + "\n")
    if not all(all(one["holds"].values()) for one in runs):
        raise SystemExit("not everything holds on every seed")


if __name__ == "__main__":
    main()
