"""SmolLM2-135M-Instruct learns to answer in positive words, on two cores.

    python benchmarks/real_model.py                             # reward by the rule, seeds 0 to 2
    python benchmarks/real_model.py --seeds 0 --kl_coef 0       # without the penalty
    python benchmarks/real_model.py --pairs runs/smollm2/pairs  # comparisons, labelled with noise
    rlhf-nb reward --config smollm2_learnt.yaml                 # a reward model that learns them
    python benchmarks/real_model.py --reward learnt             # reward by that model, seeds 0 to 2
    python benchmarks/real_model.py --profile                   # where the seconds of an update go
    python benchmarks/real_model.py --show                      # tables of what is kept

Settings are those of smollm2_positive.yaml and smollm2_learnt.yaml; options not of this program are
settings of `rlhf-nb ppo`. Each policy is sampled on 150 held-out requests. Runs are kept in
benchmarks/results/real_model.json.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from common import HERE, described_parser, environment, rate
from datasets import DatasetDict
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_nb.base.encoding import prompt_text
from rlhf_nb.cli.ppo import ppo_parser, trainer_of
from rlhf_nb.gains import crossed_gain
from rlhf_nb.real import Sentiment, everyday_requests, sampled_pairs, to_the_point
from rlhf_nb.rollout import Rollout
from rlhf_nb.training.model_loading import load_policy, load_tokenizer
from rlhf_nb.training.reference import as_reference

KEPT = HERE / "results" / "real_model.json"
RECIPES = dict(rule="smollm2_positive.yaml", learnt="smollm2_learnt.yaml")
SHOWN = (
    "objective/raw_scores",
    "objective/raw_scores/model",
    "objective/raw_scores/sentiment",
    "objective/kl",
    "policy/clipfrac_avg",
    "policy/approxkl_avg",
    "tokens/response_length",
    "val/explained_variance",
    "time/rollout",
    "time/update",
)


def measures(
    r: Rollout,  # scored, one response to each of several prompts
    model: PreTrainedModel,  # the reference
    tokenizer: PreTrainedTokenizerBase,
) -> dict[str, float]:
    "What a rollout on held-out requests shows, apart from its texts."
    n, tokens = len(r), r.mask.sum()
    ids = [row[real].tolist() for row, real in zip(r.response_ids, r.mask)]
    right = to_the_point(model, tokenizer, r.prompts, ids)
    scores = torch.tensor(Sentiment()(r.prompts, r.responses))
    return dict(
        score=scores.mean().item(),
        standard_error=(scores.std() / n**0.5).item(),
        reward=r.raw_scores.mean().item(),
        kl=(r.kl.sum() / n).item(),
        perplexity=(-(r.ref_logprobs * r.mask).sum() / tokens).exp().item(),
        to_the_point=sum(right) / n,
        tokens=tokens.item() / n,
        stopped=r.stopped.float().mean().item(),
        texts=r.responses,
        scores=scores.tolist(),
        rewards=r.raw_scores.tolist(),
    )


def save_pairs(folder: Path) -> None:
    "3,000 comparisons to learn from, and some on held-out requests to judge what was learnt."
    model, tokenizer, rule = load_policy("smollm2"), load_tokenizer("smollm2"), Sentiment()
    asked = {name: rows["prompt"] for name, rows in everyday_requests().items()}
    train = sampled_pairs(model, tokenizer, asked["train"], rule).select(range(3000))
    test = sampled_pairs(model, tokenizer, asked["test"], rule, answers=3)
    for name, rows in dict(train=train, test=test).items():
        print(f"{name}: {len(rows)} pairs, {sum(rows['right']) / len(rows):.0%} labelled right")
    DatasetDict(train=train, test=test).save_to_disk(folder)
    save_first_layers(model, tokenizer, folder.with_name("first_layers"))


def save_first_layers(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, layers: int = 10
) -> None:
    "A smaller model to learn a reward: a third of the layers."
    model.model.layers = model.model.layers[:layers]
    model.config.num_hidden_layers = layers
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def learnt() -> dict[str, float]:
    "What the reward model knows: of held-out pairs, how many it and how many the labels get right."
    state = json.loads(Path("runs/smollm2/reward/trainer_state.json").read_text())
    pairs = DatasetDict.load_from_disk("runs/smollm2/pairs")
    found = next(log for log in reversed(state["log_history"]) if "eval_accuracy" in log)
    return dict(
        pairs=len(pairs["train"]),
        steps=state["global_step"],
        train_labels_right=sum(pairs["train"]["right"]) / len(pairs["train"]),
        labels_right=sum(pairs["test"]["right"]) / len(pairs["test"]),
        agrees_with_labels=float(found["eval_accuracy"]),
    )


def run(
    reward: str,
    seed: int,
    kl_coef: float | None,  # None: the recipe's
    words: list[str],  # further options of `rlhf-nb ppo`
    kept: dict,  # gets the run, and what the untouched model answers if that is not there yet
) -> None:
    "One run: its curve, and its answers to held-out requests before and after."
    begun = time.time()
    with tempfile.TemporaryDirectory() as folder:
        more = ["--seed", str(seed), "--output_dir", folder, *words]
        more += [] if kl_coef is None else ["--kl_coef", str(kl_coef)]
        more += ["--save_rollouts", "false", "--report_to", "none", "--disable_tqdm", "true"]
        trainer = trainer_of(*ppo_parser().settings(["--config", RECIPES[reward], *more]))
        held_out = everyday_requests()["test"]["prompt"]
        asked = [prompt_text(x, trainer.processing_class, "a request") for x in held_out]

        def look() -> dict:
            r = trainer.score(trainer.rollout(asked))
            with as_reference(trainer.policy, None), torch.no_grad():
                return measures(r, trainer.policy, trainer.processing_class)

        before = kept["before"] = kept["before"] or look()
        started = time.time()
        trainer.train()
        trained = time.time() - started
        after = look()
    logs = [log for log in trainer.state.log_history if "objective/kl" in log]
    curve = [{name: round(float(log[name]), 5) for name in SHOWN if name in log} for log in logs]
    shown = pd.DataFrame(dict(before=before, after=after))
    print(shown.drop(["texts", "scores", "rewards"], errors="ignore").to_string(), flush=True)
    settings = " ".join([f"kl_coef {trainer.args.kl_coef:g}", *words])
    kept["runs"][f"{reward}, {settings}, seed {seed}"] = dict(
        after=after,
        curve=curve,
        seconds=dict(training=round(trained), all=round(time.time() - begun)),
        threads=torch.get_num_threads(),
    )


def profile_update() -> dict[str, Any]:
    """Seconds of one update of the recipe, by phase and (slowed down by the profiler) by kind of
    operation, and the least that its matrix products can take: the layers below the adapters once
    for each token, those with adapters forward for old log-probs and for the reference and, in each
    epoch, forward and back to their inputs; the head likewise on the tokens of the response; and
    what the sampler reads. At the rate of one large product."""
    from torch.profiler import ProfilerActivity, profile

    with tempfile.TemporaryDirectory() as folder:
        words = ["--config", RECIPES["rule"], "--output_dir", folder, "--save_rollouts", "false"]
        trainer = trainer_of(*ppo_parser().settings([*words, "--report_to", "none"]))
        prompts = iter(trainer.get_train_dataloader())
        trainer.step(next(prompts))  # to warm up
        phases: dict[str, float] = {}

        def step(batch: Any) -> Rollout:
            r = batch
            for name in ("rollout", "score", "advantages", "update"):
                begun = time.perf_counter()
                made = getattr(trainer, name)(r)
                phases[name] = time.perf_counter() - begun
                r = made if isinstance(made, Rollout) else r
            return r

        r = step(next(prompts))
        seconds = dict(phases)
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            step(next(prompts))
    model = trainer.policy.get_base_model()
    layers = [
        sum(x.weight.numel() for n, x in layer.named_modules() if n.endswith("_proj"))
        for layer in model.model.layers
    ]
    epochs = trainer.args.num_ppo_epochs
    real, said = int(r.prompt_mask.sum() + r.mask.sum()), int(r.mask.sum())
    passes = 2 + 2 * epochs  # old, reference; forward and back
    trained = 2 * real * (sum(layers[:18]) + passes * sum(layers[18:]))
    head = 2 * said * passes * model.lm_head.weight.numel()
    sampled = 2 * (real * sum(layers) + said * model.lm_head.weight.numel())
    rate_of = rate([[real, model.config.hidden_size, model.config.intermediate_size]], 2.0)
    kinds: dict[str, float] = {}
    for event in seen.key_averages():
        name = event.key.removeprefix("aten::")
        kind = "attention" if "attention" in name else "the rest"
        kind = "matrix products" if name in ("mm", "addmm", "bmm", "baddbmm") else kind
        kinds[kind] = kinds.get(kind, 0.0) + event.self_cpu_time_total / 1e6
    return dict(
        environment=environment(False),
        tokens=dict(real=real, response=said),
        seconds={name: round(x, 2) for name, x in seconds.items()},
        profiled={name: round(x, 2) for name, x in kinds.items()},
        floor={
            "sampling": round(sampled / rate_of, 2),
            "log-probs and update": round((trained + head) / rate_of, 2),
        },
        gflops_a_second=round(rate_of / 1e9, 1),
        threads=torch.get_num_threads(),
    )


def table(kept: dict) -> pd.DataFrame:
    "A line for each run."
    lines = {}
    for name, x in kept["runs"].items():
        pairs = {key: (value, x["after"][key]) for key, value in kept["before"].items()}
        lines[name] = dict(
            updates=len(x["curve"]),
            minutes=x["seconds"]["training"] / 60,
            score="{:.2f} to {:.2f}".format(*pairs["score"]),
            kl=x["after"]["kl"],
            perplexity="{:.1f} to {:.1f}".format(*pairs["perplexity"]),
            to_the_point="{:.0%} to {:.0%}".format(*pairs["to_the_point"]),
            tokens="{:.1f} to {:.1f}".format(*pairs["tokens"]),
        )
    return pd.DataFrame(lines).T


def main() -> None:
    parser = described_parser(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--reward", choices=list(RECIPES), default="rule")
    parser.add_argument("--kl_coef", type=float, help="default: the recipe's")
    parser.add_argument("--pairs", type=Path, help="sample comparisons into this folder, no more")
    parser.add_argument("--output", type=Path, default=KEPT)
    parser.add_argument("--profile", action="store_true", help="one update, no run")
    parser.add_argument("--show", action="store_true", help="print what is kept, run nothing")
    asked, words = parser.parse_known_args()
    if asked.pairs is not None:
        return save_pairs(asked.pairs)
    kept = dict(before=None, runs={})
    if asked.output.exists():
        kept = json.loads(asked.output.read_text())
    if asked.profile:
        kept["profile"] = profile_update()
        print(json.dumps(kept["profile"], indent=1))
        asked.output.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")
        return None
    for seed in [] if asked.show else asked.seeds:
        if asked.reward == "learnt":
            kept["reward_model"] = learnt()
        run(asked.reward, seed, asked.kl_coef, words, kept)
        asked.output.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")
    print(table(kept).to_string())
    alike: dict[str, list] = {}  # by settings, one of each seed
    for name, x in kept["runs"].items():
        alike.setdefault(name.rpartition(", seed ")[0], []).append(x["after"]["scores"])
    for name, after in alike.items():
        if len(after) > 1:
            gain = crossed_gain(after, [kept["before"]["scores"]] * len(after))
            print(f"{name}: {gain.value:+.2f}, 95 % interval {gain.low:+.2f} to {gain.high:+.2f}")


if __name__ == "__main__":
    main()
