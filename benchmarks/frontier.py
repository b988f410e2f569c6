"""Reward, gold and win rate against KL over the updates of a run of `rlhf-nb demo`, its alarms,
and best-of-n beside it.

    python benchmarks/frontier.py runs/demo
    python benchmarks/frontier.py runs/seeds/few_labels_seed12 --best_of 64 --posts 200

A line of the table is what the rollout of an update says of the policy that wrote it. Best-of-n
samples from the run's SFT model, and its reward model chooses; the KL has a closed form. The gold
judge judges, on the same posts. Prints, and writes JSON and a plot under benchmarks/results/.
"""

import json
import re
from dataclasses import fields
from pathlib import Path

import matplotlib
from common import HERE, described_parser

matplotlib.use("Agg")
import pandas as pd
import torch

from rlhf_nb.base.files import read_jsonl
from rlhf_nb.cli.demo_run import DemoSettings
from rlhf_nb.cli.demo_stages import world_of
from rlhf_nb.frontier import best_of_n_kl, best_of_n_reward, frontier
from rlhf_nb.rollout import Rollout
from rlhf_nb.scoring import score_texts
from rlhf_nb.tldr import gold_judge
from rlhf_nb.training.alarms import hacking_alarms
from rlhf_nb.training.completions import complete
from rlhf_nb.training.model_loading import load_policy, load_scorer
from rlhf_nb.ui.plots import plot_frontier
from rlhf_nb.world import win_rate

TEMPERATURE = 0.7  # of the PPO stage of `rlhf-nb demo`


def repetition(text: str) -> float:
    "Share of the runs of three words that occurred earlier in it."
    words = re.findall(r"\w+|[^\w\s]", text)
    grams = [*zip(words, words[1:], words[2:])]
    return 1 - len({*grams}) / len(grams) if grams else 0.0


def updates(run: Path, world, metrics: dict[int, dict]) -> pd.DataFrame:
    "One row an update, from the rollout that it was made of."
    posts = {row["prompt"]: (json.loads(row["facts"]), row["completion"]) for row in world["train"]}
    rows = []
    for path in sorted((run / "ppo" / "rollouts").iterdir()):
        r = Rollout.load(path)
        ours = [
            gold_judge(text, posts[prompt][0], bool(stop)).gold
            for prompt, text, stop in zip(r.prompts, r.responses, r.stopped)
        ]
        theirs = [gold_judge(posts[prompt][1], posts[prompt][0]).gold for prompt in r.prompts]
        update = r.info["update"] + 1
        rows.append(
            dict(
                update=update,
                kl=r.kl.sum(1).mean().item(),
                reward=r.raw_scores.mean().item(),
                gold=sum(ours) / len(ours),
                win_rate=win_rate(ours, theirs),
                length=r.mask.sum(1).float().mean().item(),
                repetition=sum(map(repetition, r.responses)) / len(r),
                entropy=metrics[update]["policy/entropy_avg"],
                stopped=r.stopped.float().mean().item(),
            )
        )
    return pd.DataFrame(rows)


def best_of(run: Path, world, tokenizer, n: int, posts: int, seed: int) -> pd.DataFrame:
    "Expected scores of the best of 1, 2, 4, .. n answers (Nakano et al. 2021, eq. 10 of app. I)."
    policy, judge = load_policy(str(run / "sft")), load_scorer(str(run / "reward"))
    some = world["test"].select(range(posts))
    truths = [json.loads(text) for text in some["facts"]]
    theirs = [gold_judge(text, truth).gold for text, truth in zip(some["completion"], truths)]
    scores, golds, wins = [], [], []
    for k in range(n):
        found = complete(policy, tokenizer, some["prompt"], 32, TEMPERATURE, seed=seed * 1000 + k)
        scores.append(
            score_texts(judge, tokenizer, found.prompts, found.texts, stopped=found.stopped)
        )
        ours = [gold_judge(*three).gold for three in zip(found.texts, truths, found.stopped)]
        golds.append(torch.tensor(ours))
        wins.append(torch.tensor([float(a > b) + 0.5 * (a == b) for a, b in zip(ours, theirs)]))
    scores, golds, wins = (torch.stack(x, 1).double() for x in (scores, golds, wins))
    sizes = [2**i for i in range(n.bit_length()) if 2**i <= n]
    mean = lambda of, k: float(torch.as_tensor(best_of_n_reward(scores, k, of=of)).mean())
    rows = [(k, best_of_n_kl(k), *(mean(of, k) for of in (None, golds, wins))) for k in sizes]
    return pd.DataFrame(rows, columns=["n", "kl", "reward", "gold", "win_rate"])


def main() -> None:
    parser = described_parser(__doc__)
    add = parser.add_argument
    add("runs", nargs="+", type=Path, help="folders of finished runs of `rlhf-nb demo`")
    add("--best_of", type=int, default=0, help="answers to each post for best-of-n; 0: none")
    add("--posts", type=int, default=200, help="test posts for best-of-n")
    add("--threads", type=int, default=1, help="of torch")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    results = HERE / "results"
    results.mkdir(exist_ok=True)
    for run in options.runs:
        told = json.loads((run / "settings.json").read_text())
        known = {f.name: told[f.name] for f in fields(DemoSettings) if f.name in told}
        settings = DemoSettings(**known)
        world, tokenizer = world_of(settings)
        lines = [x for x in read_jsonl(run / "metrics.jsonl") if "policy/entropy_avg" in x]
        table = updates(run, world, {x["step"]: x for x in lines if x.get("stage") == "ppo"})
        print(f"\n{run.name}\n{table.round(3).to_string(index=False)}")
        best = frontier(table).query("on_frontier")["update"].max()
        print(f"best: update {best:g}", *hacking_alarms(table), sep="\n")
        more, kept = {}, dict(updates=table.to_dict("records"), best_of=None)
        if options.best_of:
            given = options.best_of, options.posts, settings.seed
            more["best_of"] = best_of(run, world, tokenizer, *given)
            kept["best_of"] = more["best_of"].to_dict("records")
            print(f"\nbest of n\n{more['best_of'].round(3).to_string(index=False)}")
        figure = plot_frontier(table.assign(run=run.name), **more)
        figure.savefig(results / f"frontier_{run.name}.png", dpi=120)
        (results / f"frontier_{run.name}.json").write_text(json.dumps(kept, indent=1))


if __name__ == "__main__":
    main()
