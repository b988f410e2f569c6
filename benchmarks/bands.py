"""The bands that `rlhf-nb compare` draws, from the kept runs.

    python benchmarks/bands.py          # from the kept results
    python benchmarks/bands.py --run    # ten seeds of each recipe of the demo: an hour

The bands of `rlhf-nb demo`, and of `rlhf-nb demo --quick`, are those of results/demo_runs.json,
which --run makes: every seed has a world, models, pairs and sampling of its own, and seed 0, which
is what a reader runs first, is none of them. The bands of the short recipe are those of its seeds
in the sensitivity runs; the illnesses, and the healthy runs beside them, are those of the bug
museum. Writes rlhf_nb/diagnose/bands.json, which is part of the package.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from common import environment
from mini_tldr_seeds import run as run_demo

from rlhf_nb.diagnose.bands import DATA, Bands, bands_of, compared_metrics
from rlhf_nb.diagnose.compare import logged
from rlhf_nb.exercises.museum import BUGS, SUSPECTS
from rlhf_nb.runtime.files import write_text_atomic

RESULTS = Path(__file__).parent / "results"
FILES = ("demo_runs", "sensitivity", "bug_museum")
DEMOS = {"reference": ["--eval_posts", "500"], "quick": ["--quick"]}  # name -> options
JUDGED = ("eval_posts", "validation_posts", "evaluations")  # settings that training never sees
SEEDS = range(1, 11)
TWINS = ("sign_of_the_kl", "part_of_the_truth")  # whose healthy runs have other settings


def written(bands: Bands) -> dict[str, Any]:
    "Bands as the file holds them, a list a seed, to four digits."
    digits = lambda x: float(f"{x:.4g}")
    metrics = {m: [[*map(digits, seed)] for seed in x.T] for m, x in bands.values.items()}
    return dict(seeds=list(bands.seeds), metrics=metrics)


def of_museum(lines: Sequence[Mapping[str, Any]], name: str) -> Bands:
    "The runs of a case, from the lines of their logs."
    frame = pd.DataFrame(lines)
    seeds = sorted(frame["seed"].unique().tolist())
    logs = [frame[frame["seed"] == seed].drop(columns="seed") for seed in seeds]
    return bands_of([log.reset_index(drop=True) for log in logs], name, seeds)


def of_runs(runs: Sequence[Mapping[str, Any]], name: str) -> Bands:
    "Bands of runs that are kept with their logs."
    logs = [pd.DataFrame(run["log"]).astype(float).replace({None: np.nan}) for run in runs]
    return bands_of(logs, name, [run["seed"] for run in runs])


def demo_run(name: str, seed: int, root: Path) -> dict[str, Any]:
    "One demo, unless it was made before: its settings and its log, an update a row."
    folder = run_demo(root / f"{name}{seed}", seed, 1, *DEMOS[name])
    settings = json.loads((folder / "settings.json").read_text())
    log = logged(folder)
    log = log[[*compared_metrics(log), "step", "episode"]].replace({np.nan: None})
    return dict(seed=seed, settings=settings, log=log.to_dict("list"))


def demo_runs(root: Path, jobs: int) -> dict[str, Any]:
    "What demo_runs.json holds: for each recipe its command, its settings and its runs."
    where = [(name, seed, root) for name in DEMOS for seed in SEEDS]
    with ThreadPoolExecutor(jobs) as pool:
        runs = list(pool.map(lambda one: demo_run(*one), where))
    found: dict[str, Any] = dict(environment=environment(jobs > 1))
    for name, words in DEMOS.items():
        own = [run for run, (of, *_) in zip(runs, where) if of == name]
        settings = {k: v for k, v in own[0].pop("settings").items() if k not in (*JUDGED, "seed")}
        for run in own[1:]:
            assert settings.items() <= run.pop("settings").items(), "runs of two recipes"
        found[name] = dict(command=f"rlhf-nb demo {' '.join(words)}", settings=settings, runs=own)
    return found


def made(
    demos: Mapping[str, Any], sensitivity: Mapping[str, Any], museum: Mapping[str, Any]
) -> dict[str, Any]:
    "What bands.json holds."
    kept = {
        name: written(of_runs(demos[name]["runs"], name))
        | dict(command=demos[name]["command"], settings=demos[name]["settings"])
        for name in DEMOS
    }
    healthy = {name: of_museum(run["log"], name) for name, run in museum["runs"].items()}
    twin = lambda name: f"healthy beside {name}" if name in TWINS else "healthy"
    plain = [run for run in sensitivity["runs"] if not run["setting"]]
    short = written(of_runs(plain, "short"))
    short |= dict(command=sensitivity["recipe"], settings=sensitivity["demo"])
    small = written(healthy["healthy"]) | dict(command="benchmarks/bug_museum.py", settings={})
    ill = {
        name: dict(
            what=SUSPECTS[name],
            case=case,
            ill=written(healthy[name]),
            healthy=written(healthy[twin(name)]),
        )
        for case, name in enumerate(BUGS, 1)
    }
    return dict(references=kept | dict(short=short, museum=small), illnesses=ill)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=DATA)
    parser.add_argument("--run", action="store_true", help="run the demos")
    parser.add_argument("--root", type=Path, default=Path("runs/bands"), help="where they go")
    parser.add_argument("--jobs", type=int, default=2, help="side by side, each on one thread")
    args = parser.parse_args()
    output = args.output
    if args.run:
        text = json.dumps(demo_runs(args.root, args.jobs), separators=(",", ":"))
        write_text_atomic(RESULTS / f"{FILES[0]}.json", text + "\n")
    kept = (json.loads((RESULTS / f"{name}.json").read_text()) for name in FILES)
    output.write_text(json.dumps(made(*kept), separators=(",", ":")) + "\n")
    print(f"{output}: {output.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
