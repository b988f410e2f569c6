"""The bands that `rlhf-nb compare` draws, from the kept runs.

    python benchmarks/bands.py    # reads results/sensitivity.json and results/bug_museum.json

The recipe's bands are those of its seeds in the sensitivity runs; the illnesses, and the healthy
runs beside them, are those of the bug museum. Writes rlhf_nb/diagnose/bands.json, which is part of
the package.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from rlhf_nb.diagnose.bands import DATA, Bands, bands_of
from rlhf_nb.exercises.museum import BUGS, SUSPECTS

RESULTS = Path(__file__).parent / "results"
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


def of_recipe(sensitivity: Mapping[str, Any]) -> Bands:
    "The runs in which no setting was changed."
    runs = [run for run in sensitivity["runs"] if not run["setting"]]
    logs = [pd.DataFrame(run["log"]).astype(float).replace({None: np.nan}) for run in runs]
    return bands_of(logs, "reference", [run["seed"] for run in runs])


def made(sensitivity: Mapping[str, Any], museum: Mapping[str, Any]) -> dict[str, Any]:
    "What bands.json holds."
    healthy = {name: of_museum(run["log"], name) for name, run in museum["runs"].items()}
    twin = lambda name: f"healthy beside {name}" if name in TWINS else "healthy"
    recipe = written(of_recipe(sensitivity))
    recipe |= dict(command=sensitivity["recipe"], settings=sensitivity["demo"])
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
    return dict(references=dict(reference=recipe, museum=small), illnesses=ill)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=DATA)
    output = parser.parse_args().output
    kept = (json.loads((RESULTS / f).read_text()) for f in ("sensitivity.json", "bug_museum.json"))
    output.write_text(json.dumps(made(*kept), separators=(",", ":")) + "\n")
    print(f"{output}: {output.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
