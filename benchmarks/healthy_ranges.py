"""Where the metrics of healthy runs lie: `rlhf_nb/training/metrics.py` beside what runs logged, and
the alarms that they raise.

    python benchmarks/healthy_ranges.py runs/mini_tldr_seeds/seed1?    # what the ranges came from
    python benchmarks/healthy_ranges.py --name fresh runs/fresh/*      # runs that chose nothing

Each argument is a folder of `rlhf-nb demo`. For every metric that has a range: the smallest and
largest value over all updates in which the policy learned, over all runs; and the share of those
updates that are inside the range. For every run: the alarms of `hacking_alarms` on its log, beside
its best and last gold win rate. Prints, and writes benchmarks/results/healthy_ranges_NAME.json.
"""

import json
from datetime import date
from pathlib import Path

import pandas as pd
from common import HERE, described_parser

from rlhf_nb.base.files import read_jsonl
from rlhf_nb.training.alarms import hacking_alarms
from rlhf_nb.training.metrics import RANGES


def logs_of(run: Path) -> tuple[pd.DataFrame, pd.DataFrame]:
    "The log of PPO, a row an update, and the gold figures of the run."
    lines = read_jsonl(run / "metrics.jsonl")
    log = pd.DataFrame([line for line in lines if "objective/kl" in line])
    log["stopped"] = log["val/num_eos_tokens"] / log["val/num_eos_tokens"].max()
    return log, pd.DataFrame([line for line in lines if "gold/win_rate" in line])


def main() -> None:
    parser = described_parser(__doc__)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--name", default="chosen", help="of the file with the results")
    options = parser.parse_args()
    logs, alarms = [], {}
    for run in options.runs:
        log, gold = logs_of(run)
        learning = log[log["policy/clipfrac_avg"].gt(0).cummax()]  # after the value warm-up
        logs.append(learning.assign(run=run.name, of=len(learning)))
        alarms[run.name] = dict(
            alarms=[str(alarm) for alarm in hacking_alarms(log)],
            best_gold=float(gold["gold/win_rate"].max()),
            last_gold=float(gold["gold/win_rate"].iloc[-1]),
        )
    frame, rows = pd.concat(logs), {}
    for name, found in RANGES.items():
        if name not in frame or found.low is None:
            continue
        values = frame[name]
        rows[name] = dict(
            smallest=float(values.min()),
            largest=float(values.max()),
            range=[found.low, found.high],
            inside=float(values.between(found.low, found.high).mean()),
        )
    print(pd.DataFrame(rows).T.to_string())
    for run, found in alarms.items():
        print(f"{run}: gold {found['best_gold']:.1%} at best, {found['last_gold']:.1%} at last")
        print(*(f"    {text}" for text in found["alarms"] or ["no alarm"]), sep="\n")
    results = dict(date=date.today().isoformat(), runs=len(logs), metrics=rows, alarms=alarms)
    path = HERE / "results" / f"healthy_ranges_{options.name}.json"
    path.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
