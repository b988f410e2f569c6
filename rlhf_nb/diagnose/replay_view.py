"""An update as it was and as replayed, as markup: numbers, the ratios, and what became likelier."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from rlhf_nb.diagnose.replay_outcome import Outcome, most_moved, shown_numbers
from rlhf_nb.packing import score_sums
from rlhf_nb.ui.episodes import end_of, episode_tokens
from rlhf_nb.ui.html import (
    data_table,
    element,
    safe_prose,
    safe_text,
    sheet,
    spaced,
    themed,
    themed_page,
    tinted_text,
)
from rlhf_nb.ui.viz import Html

SHEETS = ("sheet.css", "tints.css", "replay.css")
LEFT, RIGHT, TOP, BOTTOM = 46, 550, 14, 150  # of the histogram's axes
BINS = 41
OWN, VARIED = "as it was", "as replayed"


def short(value: float | None) -> str:
    "Four digits, or a dash."
    if value is None:
        return "–"
    return f"{value:.4g}".replace("-", "−")


def columns(replay: Any) -> list[tuple[str, Outcome]]:
    "The update as it was, and beside it as replayed where a setting was varied."
    varied = [(VARIED, replay.now)] * bool(replay.settings)
    return [(OWN, replay.was), *varied]


def number_table(replay: Any) -> Html:
    "Every number of the update, side by side."
    heads, outcomes = zip(*columns(replay), strict=True)
    rows = shown_numbers(outcomes)
    body = [[f"{words} ({name})", *map(short, numbers)] for name, words, numbers in rows]
    return data_table("", ["number", *heads], body)


# ---- The ratios ----


def bins_of(logs: Sequence[Tensor]) -> Tensor:
    "Edges of the bins, 0 in the middle of one, wide enough for all but one log in a thousand."
    far = torch.cat(list(logs)).abs().double().quantile(0.999).clamp(min=1e-4).item()
    return torch.linspace(-far * 1.05, far * 1.05, BINS + 1, dtype=torch.float64)


def counted(logs: Tensor, edges: Tensor) -> list[int]:
    "How many logs are in each bin; what is beyond the last is in it."
    inside = torch.bucketize(logs.double().contiguous(), edges[1:-1].contiguous())
    return torch.bincount(inside, minlength=BINS).tolist()


def bars(
    counts: Sequence[int],
    edges: Sequence[float],  # one more
    x: Callable[[float], float],
    y: Callable[[int], float],
) -> str:
    "The outline of a histogram, as the path of a picture."
    steps = (f"V{y(n):.1f}H{x(right):.1f}" for n, (_, right) in zip(counts, pairwise(edges)))
    return f"M{LEFT} {BOTTOM}{''.join(steps)}V{BOTTOM}"


def histogram(replay: Any) -> Html:
    "Probability after over probability before, of every token; both axes are logarithms."
    kinds = columns(replay)
    logs = [one.ratios.log() for _, one in kinds]
    edges = bins_of(logs)
    counts = [counted(one, edges) for one in logs]
    most, far = max(map(max, counts)), edges[-1].item()
    y = lambda n: BOTTOM - (BOTTOM - TOP) * math.log1p(n) / math.log1p(most)
    x = lambda log: LEFT + (RIGHT - LEFT) * (log + far) / (2 * far)
    below, above = kinds[-1][1].clip
    ends = [math.log(at) for at in (1 - below, 1 + (above or below)) if at > 0]
    word = lambda at, down, text, side: element(
        "text", text, x=f"{at:.0f}", y=f"{down:.0f}", text_anchor=side
    )
    drawn = [bars(count, edges.tolist(), x, y) for count in counts]
    parts = [
        element("path", class_="axis", d=f"M{LEFT} {TOP}V{BOTTOM}H{RIGHT}"),
        *(element("path", class_=kind, d=d) for d, kind in zip(drawn, ("was", "now"))),
        *(
            element("path", class_="clip", d=f"M{x(at):.1f} {TOP}V{BOTTOM}")
            for at in ends
            if abs(at) < far
        ),
        *(
            word(x(at), BOTTOM + 16, f"{math.exp(at):.3g}", "middle")
            for at in (-far, -far / 2, 0.0, far / 2, far)
        ),
        word(LEFT - 5, BOTTOM, "0", "end"),
        word(LEFT - 5, TOP + 8, f"{most:,}", "end"),
        word((LEFT + RIGHT) / 2, BOTTOM + 32, "probability after over before", "middle"),
    ]
    said = "; ".join(f"{name}: {short(one.ratios.max().item())}" for name, one in kinds)
    label = f"Histogram of the ratios of all tokens after the update. Largest ratio {said}"
    size = f"0 0 {RIGHT + 24} {BOTTOM + 40}"
    return element("svg", *parts, viewBox=size, role="img", aria_label=label)


# ---- Token by token ----


def token_text(outcome: Outcome, episode: int, most: float) -> Html:
    "One response, tinted by what became likelier (orange) and less likely (blue)."
    r, tokens = outcome.before, episode_tokens(outcome.before, episode)
    response = r.responses[episode] if r.responses else ""
    moved = outcome.likelier[episode, : len(tokens)].tolist()
    return tinted_text(spaced(tokens, response), moved, most, "log-prob after less before")


def episode_markup(replay: Any, episode: int, most: float) -> Html:
    "A prompt, and its response as each update moved it."
    r = replay.was.before
    if not 0 <= episode < len(r):
        raise ValueError(f"there is no episode {episode}: the update has {len(r)}, from 0.")
    score = "" if r.scores is None else f", score {short(float(score_sums(r.scores)[episode]))}"
    prompt = end_of(r.prompts[episode]) if r.prompts else ""
    texts = [
        element(
            "div",
            element(
                "p", f"{name}, {short(one.likelier[episode].sum().item())} nats", class_="quiet"
            ),
            token_text(one, episode, most),
        )
        for name, one in columns(replay)
    ]
    return element(
        "div",
        element("h3", f"Episode {episode}{score}"),
        element("p", safe_prose(prompt), class_="prompt quiet"),
        element("div", *texts, class_="pair"),
    )


def tokens_markup(replay: Any, episodes: Sequence[int] | None) -> Html:
    "The chosen episodes, or those that moved most, on one scale of colour."
    outcomes = [one for _, one in columns(replay)]
    chosen = most_moved(outcomes) if episodes is None else list(episodes)
    every = torch.cat([one.likelier.abs().flatten() for one in outcomes]).double()
    most = every[every > 0].quantile(0.99).item() if (every > 0).any() else 0.0
    which = "the episodes that moved most" if episodes is None else "the chosen episodes"
    intro = (
        f"Log-prob of each token after the update less before it, {which}: orange became likelier, "
        f"blue (underlined) less likely; full colour at {short(most)} nats."
    )
    return element(
        "div",
        element("p", safe_text(intro)),
        *(episode_markup(replay, episode, most) for episode in chosen),
    )


# ---- The whole ----


def verdict(replay: Any) -> Html:
    "Whether the run's own settings gave what the run did, and the checks behind it."
    checks = replay.checks.checks
    failed = [one for one in checks if not one.passed and not one.skipped]
    compared = ", ".join(one.name for one in checks if one.passed)
    if replay.same:
        text = f"The run's own settings give what the run did, bit for bit: {compared}."
    elif failed:
        text = f"The run's own settings do not give what the run did: {failed[0].name} differ. "
        text += f"Look here: {failed[0].advice}. {replay.elsewhere}"
    else:
        text = f"Nothing after the update was kept to compare with; the same before it: {compared}."
    rows = [[one.name, one.measured, one.expected] for one in checks]
    table = data_table("", ["check", "measured", "expected"], rows)
    fold = element(
        "details", element("summary", "The checks of this replay"), table, class_="words"
    )
    return element("div", element("p", safe_text(text), class_="failed" if failed else None), fold)


def legend(replay: Any) -> Html:
    "Which colour is which update."
    keys = [
        element("span", name, class_=f"key-{kind}")
        for (name, _), kind in zip(columns(replay), ("was", "now"))
    ]
    return element(
        "p",
        "How many tokens have which ratio after the update (both axes are logarithms; dashed: the "
        "clip range). ",
        " · ".join(keys),
        class_="quiet",
    )


def replay_body(replay: Any, episodes: Sequence[int] | None = None) -> Html:
    "Numbers, ratios and tokens of an update, without a style sheet."
    return element(
        "div",
        sheet(
            element("p", element("b", safe_text(f"Update {replay.record.update}: {replay.words}"))),
            verdict(replay),
            number_table(replay),
            legend(replay),
            histogram(replay),
            tokens_markup(replay, episodes),
        ),
        class_="replay",
    )


def replay_markup(replay: Any, episodes: Sequence[int] | None = None) -> Html:
    "An update as it was and as replayed, in the colours of the page around it."
    return themed(replay_body(replay, episodes), sheets=SHEETS)


def replay_page(replay: Any, episodes: Sequence[int] | None = None) -> str:
    "The same as a page of its own, which runs no script."
    title = f"Update {replay.record.update} again"
    heading = element("h1", safe_text(title))
    return themed_page(title, heading, replay_body(replay, episodes), sheets=SHEETS)
