"""The mini TL;DR pipeline on several seeds, and the same without a KL penalty.

    python benchmarks/mini_tldr_seeds.py    # five seeds; kl_coef 0, twice as long, on three;
                                            # few labels, on three
    python benchmarks/mini_tldr_seeds.py --seeds 10 --no_kl_seeds 10 --few_label_seeds 10 --jobs 1
    python benchmarks/mini_tldr_seeds.py --kept    # run nothing: table and plot of the kept JSON

Every seed reseeds everything; each is one `rlhf-nb demo` in a process of its own, `--jobs` of them
side by side. The runs without a KL penalty start from the SFT and reward model of the same seed.
Those with few labels train the reward model on 8,000 pairs instead of 30,000, and then PPO with the
penalty and without it. Finished runs are used again. Writes JSON, a table and a plot under
benchmarks/results/. The judge is the gold judge on the test posts, which training never sees.
"""

import io
import json
import math
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from common import HERE, described_parser, run_logged

from rlhf_nb.base.files import read_jsonl
from rlhf_nb.gains import Estimate, mean_interval, paired_gain, plan, rate_interval

COLOURS = dict(  # on a light page, on a dark one: static/theme.css
    first=("#1f5fa8", "#7fb3ee"),
    second=("#b35000", "#f4a259"),
    ink=("#000000", "#e7ebef"),
    paper=("#ffffff", "#15181d"),
)
KEPT = ("sft", "pairs", "reward")


def run(folder: Path, seed: int, threads: int, *more: str) -> Path:
    "One `rlhf-nb demo`, unless its results are there."
    if (folder / "results.json").is_file():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    words = ["-m", "rlhf_nb.cli", "demo", "--seed", str(seed), "--output_dir", str(folder)]
    words += ["--threads", str(threads), *more]
    run_logged(words, folder / "log.txt", f"seed {seed} {' '.join(more)}", COLUMNS="120")
    return folder


def without_kl(root: Path, seed: int, threads: int, episodes: int) -> Path:
    "The PPO stage again with kl_coef 0, from the same SFT and reward model."
    folder = root / f"no_kl_seed{seed}"
    if not (folder / "results.json").is_file():
        for name in KEPT:
            if not (folder / name).exists():
                shutil.copytree(root / f"seed{seed}" / name, folder / name)
    return run(folder, seed, threads, "--kl_coef", "0", "--episodes", str(episodes))


def few_labels(root: Path, seed: int, threads: int) -> tuple[Path, Path]:
    "The same seed with a reward model of few labels: with the penalty, and without it."
    words = "--fact_pairs 1000 --edit_pairs 1000 --eval_posts 500 --validation_posts 1000".split()
    held, free = root / f"few_labels_seed{seed}", root / f"few_labels_no_kl_seed{seed}"
    if not (held / "sft").exists():
        shutil.copytree(root / f"seed{seed}" / "sft", held / "sft")
    run(held, seed, threads, *words)
    for name in KEPT:
        if not (free / name).exists():
            shutil.copytree(held / name, free / name)
    return held, run(free, seed, threads, *words, "--kl_coef", "0")


def read(folder: Path) -> dict:
    "What one run found."
    results = json.loads((folder / "results.json").read_text())
    logs = read_jsonl(folder / "metrics.jsonl")
    updates = [log for log in logs if "objective/kl" in log]
    return dict(
        verdict={f"{row['model']}@{row['temperature']:g}": row for row in results["verdict"]},
        reward=results["reward"],
        gold=[log for log in logs if "gold/win_rate" in log],
        seconds={log["stage"]: log["seconds"] for log in logs if log.get("event") == "done"},
        kl=[log["objective/kl"] for log in updates],
        learned=[(log["episode"], log["objective/raw_scores"]) for log in updates],
    )


def told(one: Estimate, values: list[float], scale: float = 100, least: float = 0.0) -> str:
    "Mean over the seeds, its 95 % interval, and the smallest and the largest seed."
    form = (lambda x: f"{scale * x:.1f}") if scale == 100 else (lambda x: f"{x:.3f}")
    if len(values) == 1:
        return f"{form(one.value)} (one seed)"
    low = max(least, one.low)
    return (
        f"{form(one.value)} ({form(low)} to {form(one.high)}; "
        f"{form(min(values))} to {form(max(values))})"
    )


def share(rates: list[float]) -> str:
    "A share, in per cent."
    return told(rate_interval(rates), rates)


def number(values: list[float], least: float = 0.0) -> str:
    "Another number, which is `least` or more."
    return told(mean_interval(values), values, 1, least)


def gain(ours: list[float], theirs: list[float]) -> str:
    "In points; the two of a seed share its world, its SFT model and its posts."
    return told(paired_gain(ours, theirs), [a - b for a, b in zip(ours, theirs)], least=-1)


def parted(few: dict[int, tuple[dict, dict]]) -> list[dict[int, dict]]:
    "The runs of few labels with the penalty, and those without it."
    return [{seed: pair[i] for seed, pair in few.items()} for i in range(2)]


def table(
    runs: dict[int, dict],
    bare: dict[int, dict],
    few: dict[int, tuple[dict, dict]],
    day: str,  # on which they were run
) -> str:
    "The table of the results page."
    at = lambda model, name: [run["verdict"][model][name] for run in runs.values()]
    wins = {name: at(name, "win_rate") for name in ("sft@0.01", "ppo@0.01", "sft@1", "ppo@1")}
    posts = next(iter(runs.values()))["verdict"]["sft@0.01"]["posts"]
    best = lambda run: max(g["gold/win_rate"] for g in run["gold"])
    drop = [best(run) - run["gold"][-1]["gold/win_rate"] for run in runs.values()]
    lines = [
        f"Mean over {len(runs)} seeds (95 % interval of the mean over seeds; smallest to largest "
        f"seed), {posts:,} test posts each, {day}.",
        "",
        "| | SFT | PPO |",
        "|---|---|---|",
        "| gold win rate against the references, near-greedy, % | "
        f"{share(wins['sft@0.01'])} | {share(wins['ppo@0.01'])} |",
        f"| the same at temperature 1, % | {share(wins['sft@1'])} | {share(wins['ppo@1'])} |",
        f"| facts covered of 7, near-greedy | {number(at('sft@0.01', 'covered'))} | "
        f"{number(at('ppo@0.01', 'covered'))} |",
        f"| invented facts a summary, near-greedy | {number(at('sft@0.01', 'invented'))} | "
        f"{number(at('ppo@0.01', 'invented'))} |",
        f"| invented facts a summary, temperature 1 | {number(at('sft@1', 'invented'))} | "
        f"{number(at('ppo@1', 'invented'))} |",
        "",
        "| | |",
        "|---|---|",
        "| gain of PPO over SFT, near-greedy, points | "
        f"{gain(wins['ppo@0.01'], wins['sft@0.01'])} |",
        f"| the same at temperature 1, points | {gain(wins['ppo@1'], wins['sft@1'])} |",
        "| reward model, held-out pairs in gold order, % | "
        f"{share([run['reward']['accuracy'] for run in runs.values()])} |",
        "| of these the pairs of two samples, % | "
        f"{share([run['reward']['by_kind']['sample'] for run in runs.values()])} |",
        "| reward model, probe: one wrong fact in a perfect summary, % | "
        f"{share([run['reward']['probe'] for run in runs.values()])} |",
        f"| best validation win rate less the last, points | {told(mean_interval(drop), drop)} |",
    ]
    names = ("kl_coef 0, twice as long", "few labels, kl_coef 0.05", "few labels, kl_coef 0")
    groups = [(name, group) for name, group in zip(names, [bare, *parted(few)]) if group]
    if groups:
        lines += [
            "",
            "| over-optimisation, validation posts | seeds | learned reward of the samples, last "
            "less first | best gold win rate, % | last gold win rate, % | last invented facts | "
            "last KL, nats a response |",
            "|---|---|---|---|---|---|---|",
        ]
    for name, group in groups:
        learned = [run["learned"] for run in group.values()]
        rise = [
            sum(x for _, x in found[-3:]) / 3 - sum(x for _, x in found[:3]) / 3
            for found in learned
        ]
        last = lambda key, group=group: [run["gold"][-1][key] for run in group.values()]
        lines.append(
            f"| {name} | {', '.join(map(str, group))} | {number(rise, -math.inf)} | "
            f"{share([best(run) for run in group.values()])} | "
            f"{share(last('gold/win_rate'))} | {number(last('gold/invented'))} | "
            f"{number([run['kl'][-1] for run in group.values()])} |"
        )
    if len(runs) > 1:
        lines += ["", f"Against another recipe, PPO near-greedy. {plan(wins['ppo@0.01'])}"]
    return "\n".join(lines) + "\n"


def plot(
    runs: dict[int, dict], bare: dict[int, dict], few: dict[int, tuple[dict, dict]], path: Path
) -> None:
    "Gold win rate and learned reward by episodes, with and without the penalty: an SVG."
    halves = [("30,000 labels", runs, bare), ("8,000 labels", *parted(few))]
    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "seeds", "font.family": "sans"})
    figure, axes = plt.subplots(2, 2, figsize=(9, 6), constrained_layout=True)
    for row, (title, held, free) in zip(axes, halves):
        for group, colour, style, label in (
            (held, COLOURS["first"][0], "-", "kl_coef 0.05"),
            (free, COLOURS["second"][0], "--", "kl_coef 0"),
        ):
            for i, found in enumerate(group.values()):
                look = dict(color=colour, alpha=0.8, label=label if i == 0 else None)
                gold = [(g["episode"], 100 * g["gold/win_rate"]) for g in found["gold"]]
                row[0].plot(*zip(*gold), style, **look)
                row[1].plot(*zip(*found["learned"]), style, **look)
        row[0].set(title=f"gold wins on validation posts, % ({title})", xlabel="episodes")
        row[0].set_ylim(0, 100)
        row[1].set(title=f"learned reward of the samples ({title})", xlabel="episodes")
        for axis in row:
            axis.spines[["top", "right"]].set_visible(False)
        row[0].legend(frameon=False)
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata={"Date": None})
    plt.close(figure)
    svg = file.getvalue().replace("'sans'", "system-ui, 'DejaVu Sans', sans-serif")
    for name, (light, _) in COLOURS.items():
        svg = svg.replace(light, f"var(--{name}, {light})")
    of = lambda k: "".join(f"--{name}:{both[k]};" for name, both in COLOURS.items())
    theme = f"svg{{{of(0)}}}text{{fill:var(--ink)}}"
    theme += f"@media(prefers-color-scheme:dark){{svg{{{of(1)}}}}}"
    path.write_text(svg.replace("<defs>", f"<style>{theme}</style><defs>", 1))


def show(whole: dict, results: Path) -> None:
    "Table and plot of what is kept."
    found = whole["default"], whole["no_kl"], whole["few_labels"]
    text = table(*found, whole["date"])
    (results / "mini_tldr_seeds.md").write_text(text)
    plot(*found, results / "mini_tldr_seeds.svg")
    print(text)


def main() -> None:
    parser = described_parser(__doc__)
    parser.add_argument("--seeds", type=int, nargs="*", default=[10, 11, 12, 13, 14])
    parser.add_argument("--no_kl_seeds", type=int, nargs="*", default=[10, 11, 12])
    parser.add_argument("--no_kl_episodes", type=int, default=12_288)
    parser.add_argument("--few_label_seeds", type=int, nargs="*", default=[10, 11, 12])
    parser.add_argument("--runs", type=Path, default=Path("runs/mini_tldr_seeds"))
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--kept", action="store_true", help="write table and plot of the kept JSON")
    asked = parser.parse_args()
    results = HERE / "results"
    if asked.kept:
        return show(json.loads((results / "mini_tldr_seeds.json").read_text()), results)
    root, threads = asked.runs, asked.threads
    with ThreadPoolExecutor(asked.jobs) as pool:

        def each(seeds: list[int], job: Callable[[int], Any]) -> dict[int, Any]:
            return dict(zip(seeds, pool.map(job, seeds)))

        whole = dict(
            date=date.today().isoformat(),
            default=each(asked.seeds, lambda k: read(run(root / f"seed{k}", k, threads))),
            no_kl=each(
                asked.no_kl_seeds,
                lambda k: read(without_kl(root, k, threads, asked.no_kl_episodes)),
            ),
            few_labels=each(
                asked.few_label_seeds, lambda k: [*map(read, few_labels(root, k, threads))]
            ),
        )
    (results / "mini_tldr_seeds.json").write_text(json.dumps(whole, indent=1))
    show(whole, results)


if __name__ == "__main__":
    main()
