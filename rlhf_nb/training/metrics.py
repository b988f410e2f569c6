"""Every metric: what it is called, its unit and formula, what it is in a healthy run, and where it
is drawn. Viewer, dashboard, report, alarms, the page on metrics and the glossary read it from here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Literal

# Near-greedy, over ten runs of `rlhf-nb demo` (five seeds, twice): see nbs/results.ipynb; the quick
# ones: benchmarks/quick_demo.py. By the kind of run, which `rlhf_nb.cli.demo_run.kind_of` names.
SEEDS = dict(usual="79.8 to 98.7 % in ten runs", quick="77.8 to 96.8 % in five quick runs")

DEMO = "five runs of `rlhf-nb demo`, seeds 10 to 14 (`benchmarks/healthy_ranges.py`)"
RUN_160M = "the 160m run of [2403.17031](https://arxiv.org/abs/2403.17031)"
DEFINED = "by definition"


@dataclass(frozen=True)
class Metric:
    "What is known of one number in the log."

    name: str  # as it is logged; NAME stands for a judge's, or an environment's
    title: str = ""  # what it is, in words; empty: the name says it
    unit: str = ""
    formula: str = ""  # Markdown with LaTeX
    healthy: str = ""  # in words; a rule of thumb
    otherwise: str = ""  # what to do outside of it
    source: str = ""  # where the range comes from; empty: it has none of its own
    low: float | None = None  # of single updates in which the policy learns
    high: float | None = None
    first: float | None = None  # in place of high, in the first of those updates
    over: Literal["mean", "last", "max"] = "mean"  # updates between two logs, as one number
    short: tuple[str, ...] = ()  # short names, the viewer's first
    viewer: int = 0  # its place among the viewer's curves; 0: not there
    term: str = ""  # the term of the glossary that it is
    meaning: str = ""  # of that term

    @property
    def label(self) -> str:
        "What it is called where it is drawn."
        return self.title or self.name

    @property
    def is_share(self) -> bool:
        "Is it drawn in per cent?"
        return self.unit.startswith("share of ")

    @property
    def sign(self) -> str:
        "The unit as it is written behind a number."
        first = self.unit.partition(" ")[0]
        return "%" if self.is_share else first if first in ("nats", "tokens") else ""


EVALUATION = (
    Metric(
        "eval_score",
        unit="reward per response",
        formula="mean weighted raw score of all evaluation prompts' completions, no penalty",
        healthy="rises with `objective/raw_scores`",
        otherwise="falls while that rises: only sampled answers gain; read the completions",
    ),
    Metric(
        "eval_length",
        unit="tokens per response",
        formula="mean tokens of a completion, including the stop token",
        healthy="like that of good answers",
        otherwise="as in `tokens/response_length`",
    ),
    Metric(
        "eval_stopped",
        unit="share of responses",
        formula="share that reached the stop token",
        healthy="1",
        otherwise="below 0.9: greedy loops; a longer run with `missing_eos_penalty`",
    ),
    *(
        Metric(
            f"eval_{name}",
            unit=f"{what} per episode",
            formula=f"`turns/{of}` of those episodes, near-greedy",
            healthy=f"as `turns/{of}`",
            otherwise=f"as `turns/{of}`",
        )
        for name, of, what in (("return", "return", "reward"), ("turns", "per_episode", "turns"))
    ),
)

TABLES = {  # of the page on metrics, and what is in none of them
    "earned": (
        Metric(
            "objective/raw_scores",
            title="raw score",
            unit="reward per response",
            formula=r"$\frac1B\sum_i\sum_j w_j s_{ij}$",
            healthy="rises",
            otherwise="flat: can the judge tell answers apart? Only then look at `learning_rate`",
            source=DEFINED,
            short=("raw score", "score"),
            viewer=2,
        ),
        Metric(
            "objective/raw_scores/NAME",
            formula=r"$\frac1B\sum_i s_{ij}$, for each judge, if there are several",
            healthy="all rise, or hold",
            otherwise="one rises at the expense of another: change `reward_weights`",
        ),
        Metric(
            "objective/scores",
            title="score after scaling and penalties",
            unit="reward per response",
            formula=r"$\frac1B\sum_i s_i$",
            healthy="rises; with `normalize_scores` it starts near 0 and stays small",
            otherwise="below the raw score and falling: penalties; see `val/num_eos_tokens`",
        ),
        Metric(
            "objective/score_spread",
            title="share of a response that its score is spread over",
            unit="share",
            formula=r"mean of $\frac{(\sum_t\lvert s_t\rvert)^2}{n\sum_t s_t^2}$ of its scores",
            healthy="steady: the judge's habit, 1 where each token earns the same",
            otherwise="falls to $1/n$: one token earns it all; rises: small things are repeated",
        ),
        Metric(
            "objective/equal_groups",
            title="prompts whose answers all score the same",
            unit="share of prompts",
            formula="share of groups whose scores are all equal, where an estimator has groups",
            healthy="near 0: nothing is learned from such a prompt but its KL",
            otherwise="near 1: too easy, too hard, or a coarse judge; raise `num_generations`",
            short=("equal groups",),
            viewer=9,
        ),
        Metric(
            "objective/kl",
            title="KL to the reference",
            unit="nats per response",
            formula=r"$\frac1B\sum_i\sum_t k_{it}$, nats per response",
            healthy="0 in the first update, then slowly up to a few nats; at most 10",
            otherwise="above 10: raise `kl_coef`, lower `learning_rate`; clearly negative: two "
            "temperatures or precisions are being compared",
            source=f"0: {DEFINED}; up to 5 in {DEMO}; 10: as far as the best of 60,000 samples",
            low=-0.1,
            high=10.0,
            short=("KL",),
            viewer=3,
        ),
        Metric(
            "objective/kl_coef",
            title="price of KL",
            unit="reward per nat",
            formula=r"$\beta$ that shaped these rewards",
            healthy="constant, or settling if adaptive",
            otherwise="adaptive and running away: `kl_target` cannot be met, lower `learning_rate`",
            over="last",
            short=("kl_coef",),
        ),
        Metric(
            "objective/non_score_reward",
            title="KL penalty",
            unit="reward per response",
            formula=r"$-\beta\cdot$ `objective/kl`; 0 with `kl_in='loss'`",
            healthy="small beside the spread of the scores",
            otherwise="as large as the scores: only the penalty is learned from, lower `kl_coef`",
        ),
        Metric(
            "objective/rlhf_reward",
            title="score less the KL penalty",
            unit="reward per response",
            formula="`objective/scores` + `objective/non_score_reward`",
            healthy="rises: it is what PPO maximises",
            otherwise="falls while the score rises: the gain is not worth its KL",
        ),
        Metric(
            "objective/entropy",
            title="entropy of a response, by its samples",
            unit="nats per response",
            formula=r"$-\frac1B\sum_i\sum_t\log\pi_{it}$, nats per response",
            healthy="changes with the length of answers",
            otherwise="compare it per token (`tokens/response_length`); see `policy/entropy_avg`",
        ),
    ),
    "moved": (
        Metric(
            "val/ratio",
            title="probability over that of the sampling policy",
            unit="ratio",
            formula=r"$\langle\rho\rangle$",
            healthy="within 0.05 of 1",
            otherwise="further: sampling and update disagree, or the steps are far too large",
            source=DEMO + "; single updates of 1.12 right after the value warm-up",
            low=0.95,
            high=1.05,
            term="ratio",
            meaning=r"$\rho_t$: how much more likely a token has become since it was sampled.",
        ),
        Metric(
            "val/ratio_var",
            title="variance of that probability ratio",
            unit="squared ratio",
            formula=r"$\langle\rho^2\rangle-\langle\rho\rangle^2$",
            healthy="below 0.1",
            otherwise="some token became many times as likely: lower `learning_rate`",
            source=DEMO + "; single outliers far above it, which the clip takes out",
            low=0.0,
            high=0.1,
        ),
        Metric(
            "policy/approxkl_avg",
            title="KL to the policy that sampled",
            unit="nats per token",
            formula=r"$\langle\frac12(\log\rho)^2\rangle$",
            healthy="below 0.05, falling with the learning rate",
            otherwise="higher: lower `learning_rate`, set `target_kl`; 0: nothing is learned",
            source=f"up to 0.023 in {DEMO}, 0.05 in the page's run; 0.003 to 0.008 in {RUN_160M}",
            low=0.0,
            high=0.05,
            short=("approximate KL",),
            viewer=7,
            term="approxkl",
            meaning="$k_2$ between the new and the old policy: how far one batch has moved it.",
        ),
        Metric(
            "policy/clipfrac_avg",
            title="clip fraction",
            unit="share of tokens",
            formula=r"$\langle$ 1 where the clipped loss exceeds the plain one $\rangle$",
            healthy="below 0.15; up to 0.25 in the first update in which the policy learns",
            otherwise="higher: lower `learning_rate`, take fewer `num_ppo_epochs`, set `target_kl`",
            source=f"up to 0.06 in {DEMO}; 0.025 to 0.073 in {RUN_160M}; six seeds here",
            low=0.0,
            high=0.15,
            first=0.25,
            short=("clip fraction", "clipped"),
            viewer=6,
            term="clip, clipfrac",
            meaning="The limit on the ratio in the policy loss; the share of tokens it limits.",
        ),
        Metric(
            "policy/entropy_avg",
            title="entropy of a token, over the vocabulary",
            unit="nats per token",
            formula=r"$\langle H\rangle$",
            healthy="falls slowly, to no less than a quarter of its start",
            otherwise="collapsing: raise `kl_coef`, or `entropy_coef` a little; read the answers",
            source="a third or more of the start in " + DEMO,
            short=("token entropy", "entropy"),
            viewer=4,
            term="entropy",
            meaning="How undecided the policy is about the next token. Near 0: always the same.",
        ),
        Metric(
            "loss/policy_avg",
            title="loss of the policy",
            unit="loss",
            formula=r"$\langle\max(-A\rho,\,-A\,\mathrm{clip}(\rho))\rangle$",
            healthy="a little below 0, without a trend",
            otherwise="it does not measure progress; clearly above 0: steps too large",
        ),
        Metric(
            "loss/kl_avg",
            title="KL term of the loss",
            unit="nats per token",
            formula='the KL term of the loss, before `kl_coef`; with `kl_in="loss"` alone',
            healthy="small, and steady",
            otherwise="rises without end: raise `kl_coef`; compare `objective/kl`",
        ),
        Metric(
            "policy/grad_norm",
            title="gradient before clipping",
            unit="norm",
            formula="norm of the gradient of policy and value model together, mean over steps",
            healthy="steady, near or below `max_grad_norm`",
            otherwise="spikes: look at the scores; always above: lower `vf_coef`, scale the scores",
        ),
        Metric(
            "lr",
            title="learning rate",
            unit="step size",
            over="last",
            formula="learning rate of the policy in this update",
            healthy="follows the schedule",
            otherwise="0 too early: `total_episodes` or `max_steps` is not what you meant",
        ),
    ),
    "engine": (
        Metric(
            "sampling/weight",
            formula=r"$\langle w\rangle$",
            healthy="near 1",
            otherwise="the log-probs are not those of the draws, or the engine has old weights",
        ),
        Metric(
            "sampling/weight_max",
            over="max",
            formula="largest $e^{g}$, before the cap",
            healthy="not far above 1",
            otherwise="single tokens differ: keep the cap, use the same precision on both sides",
        ),
        Metric(
            "sampling/capped",
            unit="share of tokens",
            formula="share of tokens with $e^{g}>c$",
            healthy="near 0",
            otherwise="the cap changes what is learned: use the same precision on both sides",
        ),
        Metric(
            "sampling/kl",
            unit="nats per token",
            formula=r"$\langle e^{g}-1-g\rangle$",
            healthy="near 0",
            otherwise="as for `sampling/weight`",
        ),
        Metric(
            "sampling/gap",
            unit="nats per token",
            formula=r"mean of $\lvert g\rvert$, nats",
            healthy="near 0; larger in 16 bits than in 32",
            otherwise="as for `sampling/weight`; it should not grow during a run",
        ),
    ),
    "value": (
        Metric(
            "loss/value_avg",
            title="loss of the values",
            unit="loss",
            formula=r"$\langle\frac12\max((v-R)^2,\,(v^{\text{clip}}-R)^2)\rangle$",
            healthy="falls, then follows the scores",
            otherwise="in the hundreds: set `normalize_scores`, or raise `cliprange_value`",
        ),
        Metric(
            "val/clipfrac_avg",
            title="values clipped",
            unit="share of tokens",
            formula=r"$\langle$ 1 where the clipped error exceeds the plain one $\rangle$",
            healthy="falls from a high start",
            otherwise="stays high: raise `cliprange_value`, which they move, or scale the scores",
        ),
        Metric(
            "val/explained_variance",
            title="variance that the values explain",
            unit="share",
            formula=r"$1-\mathrm{Var}(R-V)/\mathrm{Var}(R)$, at the rollout",
            healthy="above 0 once the value model has warmed up, and rising",
            otherwise="below 0: set `value_warmup_updates`, raise `value_learning_rate`",
            source="0: no better than a constant, by definition; 0.9 at the end of " + DEMO,
            low=0.0,
            high=1.0,
            short=("explained variance", "explained"),
            viewer=8,
            term="explained variance",
            meaning="The share of the variance of the returns that the values predict: 1 is all "
            "(with lam = 1 a constant error does not show), 0 is no better than a constant.",
        ),
    ),
    "written": (
        Metric(
            "val/num_eos_tokens",
            title="responses that stopped by themselves",
            unit="responses",
            formula="answers that reached their stop token, of $B$",
            healthy="nearly all: 0.9 of the share at the start, or more",
            otherwise="few: set `missing_eos_penalty`, raise `response_length`; is length paid?",
            source="0.99 or more in " + DEMO,
        ),
        Metric(
            "tokens/response_length",
            title="length",
            unit="tokens per response",
            formula="$N/B$",
            healthy="settles, at most 2.25 times its start",
            otherwise="runs to `response_length` or to 1: the reward can be had by length alone",
            source="up to twice the start in " + DEMO + ", which have four facts more to tell",
            short=("length",),
            viewer=5,
        ),
        Metric(
            "tokens/paid",
            title="tokens with a score",
            unit="tokens per response",
            formula="tokens with a score of their own, over $B$; only where judges score tokens",
            healthy="as many as there are steps",
            otherwise="grows with the score: are steps farmed? Read answers; 0: no step is found",
        ),
        Metric("episode", over="last", formula=r"updates so far $\times B$", healthy="the x axis"),
        Metric(
            "time/rollout",
            unit="seconds",
            formula="seconds: sampling, log-probs, reference, values",
            healthy="grows with the length of answers",
            otherwise="largest: raise `local_rollout_forward_batch_size`, shorten answers",
        ),
        Metric(
            "time/score",
            unit="seconds",
            formula="seconds in the judges",
            healthy="small",
            otherwise="largest: a slow reward function, call it in batches",
        ),
        Metric(
            "time/update",
            unit="seconds",
            formula="seconds: advantages, and all optimizer steps",
            healthy="the largest on a CPU",
            otherwise="fewer `num_ppo_epochs`, a larger micro-batch",
        ),
        Metric(
            "tokens/per_second",
            title="speed",
            unit="tokens per second",
            formula="$N$ over the sum of the three times",
            healthy="steady",
            otherwise="falling: answers grow, or something else uses the machine",
        ),
        Metric(
            "eps",
            unit="episodes per second",
            formula="$B$ over the seconds of the whole update, as `train()` sees it",
            healthy="steady",
            otherwise="far below $B$ over the three times: data loading or callbacks",
        ),
    ),
    "turns": (
        Metric(
            "turns/return",
            title="return of an episode",
            unit="reward per episode",
            formula=r"$\frac1B\sum_i\sum_k r_{ik}$, what the environment paid over all turns",
            healthy="rises, towards that of best play where it is known",
            otherwise="flat: does any episode earn something? Raise `entropy_coef`, start from SFT",
            short=("return",),
            viewer=10,
        ),
        Metric(
            "turns/per_episode",
            title="turns",
            unit="turns per episode",
            formula=r"$\frac1B\sum_i K_i$",
            healthy="settles; falls where a quick end pays as much",
            otherwise="rises without the return: the policy waits for the end",
            short=("turns",),
            viewer=11,
        ),
        Metric(
            "turns/tokens",
            title="length of a turn",
            unit="tokens per turn",
            formula=r"$N/\sum_i K_i$, chosen tokens alone",
            healthy="settles",
            otherwise="as in `tokens/response_length`, which is over all turns",
        ),
        Metric(
            "turns/stopped",
            title="turns that stopped by themselves",
            unit="share of turns",
            formula="share of turns that reached their stop token",
            healthy="near 1; 0 where `response_length` is all that an action needs",
            otherwise="falls: set `missing_eos_penalty`, or raise `response_length`",
        ),
        *(
            Metric(
                f"turns/{why}",
                title=f"episodes that {ended}",
                unit="share of episodes",
                formula=f"share of episodes with the stop reason `{why}`",
                healthy="most are `terminated`, where the environment has an end of its own",
                otherwise="many end otherwise: raise the limit, or set `bootstrap_truncated`",
            )
            for why, ended in dict(
                terminated="the environment ended",
                truncated="the environment cut off",
                max_turns="had the most turns",
                context="were too long to go on",
            ).items()
        ),
        Metric(
            "turns/info/NAME",
            unit="mean over episodes",
            formula="mean of the last step's `info[NAME]`, for each number in it",
            healthy="as the environment says; a share such as `won` rises with the return",
            otherwise="moves against the return: the environment pays for something else",
        ),
    ),
    "evaluation": (
        *EVALUATION,
        *(
            replace(
                m,
                name=m.name.replace("eval", "sample"),
                formula=f"`{m.name}` of the first 64 prompts: `num_sample_generations`",
                healthy=f"as `{m.name}`, with more noise",
                otherwise=f"as `{m.name}`; never compare it with that",
            )
            for m in EVALUATION
        ),
    ),
    "reward model": (
        Metric(
            "eval_loss",
            unit="nats per pair",
            formula=r"mean of $-\log\sigma(c-d)$, with margins and centring term if used",
            healthy=r"below $\log 2 = 0.693$ and falling",
            otherwise="above 0.693: worse than a coin; rising in training: one epoch is enough",
        ),
        Metric(
            "eval_accuracy",
            unit="share of pairs",
            formula="share of pairs with $c>d$",
            healthy="0.6 to 0.8 on human labels",
            otherwise="0.5: labels are noise or swapped; 1.0: something such as length tells them",
        ),
        Metric(
            "eval_margin",
            unit="reward per pair",
            formula="mean of $c-d$",
            healthy="positive, growing slowly",
            otherwise="growing without accuracy: overconfident, stop earlier",
            term="margin",
            meaning="How much higher the chosen answer of a pair scores than the rejected one.",
        ),
        Metric(
            "eval_calibration_error",
            unit="share of pairs",
            formula=r"$\sum_b\frac{n_b}{n}\lvert\bar p_b-\bar o_b\rvert$ over bins of $n_b$ pairs",
            healthy="below 0.1",
            otherwise="higher: overconfident, stop earlier; PPO overreacts to small differences",
        ),
        *(
            Metric(
                f"eval_{name}_reward",
                unit="reward per response",
                formula=f"{of} of all $c$ and $d$",
                healthy=usual,
                otherwise=f"far {otherwise} in PPO",
            )
            for name, of, usual, otherwise in (
                ("min", "smallest", "a few below the mean", "below: set `score_clip`"),
                ("mean", "mean", "near 0", "from 0: `center_rewards`, or `normalize_scores`"),
                ("max", "largest", "a few above the mean", "above: set `score_clip`"),
            )
        ),
    ),
    "other": (
        Metric(
            "gold/win_rate",
            title="gold win rate, near-greedy",
            unit="share of validation posts, ties half",
            short=("gold wins",),
            viewer=1,
        ),
        *(
            Metric(f"gold/{what}", f"facts {what}", unit, short=(f"facts {what}",), viewer=place)
            for what, unit, place in (
                ("covered", "per summary, gold judge", 12),
                ("invented", "per summary, gold judge", 13),
            )
        ),
        Metric("learning_rate", title="learning rate", unit="step size"),
        Metric("pretrain/NAME", title="variance explained in saved rollouts", unit="share"),
        Metric("loss", title="loss", unit="nats per token"),
    ),
}

METRICS = {metric.name: metric for table in TABLES.values() for metric in table}
RANGES = {name: metric for name, metric in METRICS.items() if metric.source}
LOG_NAMES = {short: name for name, metric in METRICS.items() for short in metric.short}


def metric_of(name: str) -> Metric:
    """A metric by the name in the log, also where it ends in what somebody named; one that is not
    known here is its own title and unit."""
    family = METRICS.get(f"{name.rpartition('/')[0]}/NAME", Metric(name, unit=name))
    return METRICS.get(name) or replace(family, name=name)


def combine(name: str, values: Sequence[float]) -> float:
    "What the log has of a metric's values in the updates since the last log."
    over = metric_of(name).over
    if over == "mean":
        return sum(values) / len(values)
    return max(values) if over == "max" else values[-1]


def in_order() -> list[Metric]:
    "The metrics that the viewer draws, in its order."
    return sorted((m for m in METRICS.values() if m.viewer), key=attrgetter("viewer"))


def healthy(metric: str, value: float, first: bool = False) -> bool:
    """Whether a value is inside the metric's range, `first`: in the first update in which the
    policy learns. A metric without numbers has none to leave."""
    low, high, most = (getattr(RANGES[metric], name) for name in ("low", "high", "first"))
    return low is None or low <= value <= (most if first and most else high)


def _table(head: str, rows: Sequence[tuple[str, ...]]) -> str:
    "A table in Markdown; `head` has a bar between two columns."
    lines = [f"| {head} |", "|" + "---|" * (head.count("|") + 1)]
    return "\n".join(lines + [f"| {' | '.join(row)} |" for row in rows])


def ranges_table() -> str:  # Markdown
    "The healthy ranges, a row a metric."
    rows = [(f"`{m.name}`", m.healthy, m.otherwise, m.source) for m in RANGES.values()]
    return _table("metric | healthy | if not | where the range comes from", rows)


def metrics_table(table: str) -> str:  # Markdown
    "A table of the page on metrics; a metric with a range refers to `ranges_table`."
    words = lambda m: ("range", "as above") if m.source else (m.healthy, m.otherwise)
    rows = [(f"`{m.name}`", m.formula, *words(m)) for m in TABLES[table]]
    return _table("name | formula | healthy | if not", rows)
