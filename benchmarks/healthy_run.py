"""The healthy run of the page on metrics, on seeds that chose nothing.

    python benchmarks/healthy_run.py                # seeds 21 to 25
    python benchmarks/healthy_run.py --seeds 0      # the page's own

The page's first cells are run with another seed of all but the world. Prints what the last update
logged and how near-greedy answers to 64 posts end; writes benchmarks/results/healthy_run.json.
"""

import json

import pandas as pd
from common import HERE, described_parser

PAGE = HERE.parent / "nbs" / "reference" / "47_metrics.ipynb"
CELLS = ("1c53e424", "666542a5", "33aeb95c", "5d5c4104")  # imports, policy, settings, the run
SHOWN = (
    "objective/scores",
    "objective/kl",
    "policy/clipfrac_avg",
    "val/explained_variance",
    "val/num_eos_tokens",
)


def run(seed: int) -> dict[str, float]:
    "What the page's run ends in, with another seed."
    cells = {cell["id"]: cell for cell in json.loads(PAGE.read_text(encoding="utf-8"))["cells"]}
    space: dict = {}
    for name in CELLS:
        source = "".join(cells[name]["source"]).replace("test=16", "test=64")
        lines = source.replace("SEED = 0", f"SEED = {seed}").splitlines()
        # what the page asserts is about its own seed
        exec("\n".join(line for line in lines if not line.startswith("assert")), space)
    log = space["healthy_run"]
    found = {name: float(log[name].iloc[-1]) for name in SHOWN}
    learned = log[log["policy/clipfrac_avg"].gt(0).cummax()]
    found["least explained variance"] = float(learned["val/explained_variance"].min())
    found["largest clip fraction, first"] = float(learned["policy/clipfrac_avg"].iloc[0])
    found["largest clip fraction, later"] = float(learned["policy/clipfrac_avg"].iloc[1:].max())
    return found | {name: float(x) for name, x in space["well"].evaluate().items()}


def main() -> None:
    parser = described_parser(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[21, 22, 23, 24, 25])
    seeds = parser.parse_args().seeds
    runs = {seed: run(seed) for seed in seeds}
    print(pd.DataFrame(runs).round(3).to_string())
    (HERE / "results" / "healthy_run.json").write_text(json.dumps(runs, indent=1) + "\n")


if __name__ == "__main__":
    main()
