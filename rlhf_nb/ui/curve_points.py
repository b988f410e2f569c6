"""What a metric is called, in which unit, and the points and numbers of a small picture of it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rlhf_nb.ui.html import number_text

METRICS = {  # what is logged: what it is, and its unit
    "objective/raw_scores": ("raw score", "reward per response"),
    "objective/scores": ("score after scaling and penalties", "reward per response"),
    "objective/kl": ("KL to the reference", "nats per response"),
    "objective/kl_coef": ("price of KL", "reward per nat"),
    "objective/non_score_reward": ("KL penalty", "reward per response"),
    "objective/rlhf_reward": ("score less the KL penalty", "reward per response"),
    "objective/entropy": ("entropy of a response, by its samples", "nats per response"),
    "policy/entropy_avg": ("entropy of a token, over the vocabulary", "nats per token"),
    "policy/approxkl_avg": ("KL to the policy that sampled", "nats per token"),
    "policy/clipfrac_avg": ("clipped", "share of tokens"),
    "policy/grad_norm": ("gradient before clipping", "norm"),
    "tokens/response_length": ("length", "tokens per response"),
    "tokens/per_second": ("speed", "tokens per second"),
    "val/clipfrac_avg": ("values clipped", "share of tokens"),
    "val/explained_variance": ("variance that the values explain", "share"),
    "val/ratio": ("probability over that of the sampling policy", "ratio"),
    "val/ratio_var": ("variance of that probability ratio", "squared ratio"),
    "val/num_eos_tokens": ("responses that stopped by themselves", "responses"),
    "val/eos_share": ("responses that stopped by themselves", "share of responses"),
    "entropy gap": ("entropy as computed less as sampled", "nats per token"),
    "loss/policy_avg": ("loss of the policy", "loss"),
    "loss/kl_avg": ("KL term of the loss", "nats per token"),
    "loss/value_avg": ("loss of the values", "loss"),
    "lr": ("learning rate", "step size"),
    "learning_rate": ("learning rate", "step size"),
    "loss": ("loss", "nats per token"),
    "gold/win_rate": (
        "wins against the references, near-greedy, by the gold judge",
        "share of posts",
    ),
}
Points = Sequence[tuple[int, float]]  # update and value, in order


def thin(points: Points, most: int = 240) -> list[tuple[int, float]]:
    """About `most` points with the same outline: first, last, and the smallest and largest of each
    stretch. nan and inf go."""
    points = [point for point in points if math.isfinite(point[1])]
    if len(points) <= most:
        return points
    size, kept = math.ceil(len(points) / (most // 2)), {points[0], points[-1]}
    for at in range(0, len(points), size):
        stretch = points[at : at + size]
        kept |= {min(stretch, key=lambda point: point[1]), max(stretch, key=lambda point: point[1])}
    return sorted(kept)


def written(value: float, largest: float) -> str:
    "A number of a curve: two decimals, or two digits where all of the curve is below 0.05."
    if value == 0:
        return "0"
    if largest < 0.05:
        return f"{value:.2g}".replace("-", "−") if abs(value) >= largest / 200 else "≈0"
    return number_text(value, 2 if largest < 10_000 else 0)
