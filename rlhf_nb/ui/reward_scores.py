"""What a reward model makes of pairs: refitted on the choices of a person, and the score of each
answer, token by token. No widgets."""

from __future__ import annotations

import copy
import hashlib
import json
import math
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PrinterCallback

from rlhf_nb.base.encoding import Turns
from rlhf_nb.base.random_state import random_state_kept
from rlhf_nb.evaluate import wilson_interval
from rlhf_nb.masks import right_pad
from rlhf_nb.models import scorer_head, token_scores
from rlhf_nb.reward import (
    RewardConfig,
    RewardTrainer,
    encode_pairs,
    marked_answers_of,
    preference_metrics,
    score_marked,
)
from rlhf_nb.rollout import token_texts
from rlhf_nb.sft import tokenizer_of
from rlhf_nb.training.model_loading import check_vocabulary, load_scorer, load_tokenizer
from rlhf_nb.training.prompts import turns_text
from rlhf_nb.ui.facts import facts_told
from rlhf_nb.ui.html import data_table, element, percent, safe_text, sheet, spaced, themed
from rlhf_nb.ui.preference_labels import share_sentence
from rlhf_nb.ui.viz import Html, signed, visible

# ---- Refitted on choices ----


def is_held_out(
    prompt: Turns | None,
    share: float = 0.25,  # of all prompts
    seed: int = 0,
) -> bool:
    "Whether labels on this prompt are kept for measuring: a hash decides, for good."
    digest = hashlib.sha256(f"{seed}/{json.dumps(prompt)}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64 < share


@dataclass(frozen=True)
class Refit:
    "A reward model of the labels so far, compared with them."

    model: PreTrainedModel
    table: pd.DataFrame  # a row a label: pair, prompt, chosen, rejected, margin, held_out
    seconds: float

    def right(self) -> tuple[int, int]:
        """Held-out labels that the model predicts, of all held-out labels; a tie of the scores
        counts as wrong."""
        held = self.table[self.table.held_out]
        return int((held.margin > 0).sum()), len(held)

    def disagreements(self) -> pd.DataFrame:
        """Labels that the model contradicts, the most confident first; sure is its probability of
        the other answer."""
        wrong = self.table[self.table.margin < 0].sort_values("margin", kind="stable")
        return wrong.assign(
            sure=torch.sigmoid(-torch.tensor(wrong.margin.to_numpy(dtype=float))).tolist()
        )

    def verdict(self) -> str:
        "Accuracy on held-out labels, against chance."
        right, of = self.right()
        if not of:
            return "no held-out label yet: nothing can be said of labels that it has not seen"
        low, high = wilson_interval(right / of, of)
        against = (
            "better than a coin"
            if low > 0.5
            else "worse than a coin: are the labels the wrong way round?"
            if high < 0.5
            else "not to be told from a coin (50 %)"
        )
        return f"{share_sentence(right, of)} of held-out labels predicted, {against}"

    def _repr_html_(self) -> str:
        return render_refit(self)

    def __repr__(self) -> str:
        return f"Refit(trained on {int((~self.table.held_out).sum())} labels; {self.verdict()})"


def render_refit(
    refit: Refit,
    most: int = 8,  # disagreements that are shown
) -> Html:
    "What the model learned, and where it contradicts the person."
    wrong, trained = refit.disagreements(), int((~refit.table.held_out).sum())
    rows = [
        (
            int(row["pair"]),
            percent(row["sure"], 0),
            "held out" if row["held_out"] else "trained on",
            turns_text(row["chosen"]),
            turns_text(row["rejected"]),
        )
        for row in wrong.head(most).to_dict("records")
    ]
    title = element("b", f"Refitted on {trained} labels in {refit.seconds:.1f} s: ")
    parts = [element("p", title, safe_text(f"{refit.verdict()}."))]
    if rows:
        count = f"The model disagrees with you on {len(wrong)} of {len(refit.table)} labels"
        parts.append(element("p", count + f"; the {most} most confident" * (len(wrong) > most)))
        heads = ["pair", "model is sure", "label was", "you chose", "the model prefers"]
        parts.append(data_table("", heads, rows))
    else:
        parts.append(element("p", "It agrees with every label."))
    return themed(sheet(*parts), sheets=["sheet.css"])


def margins_of(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    data: Dataset,
    max_length: int | None,
) -> list[float]:
    "Score of the chosen answer less that of the rejected one."
    both = zip(*(marked_answers_of(row, tokenizer) for row in data))
    chosen, rejected = (score_marked(model, tokenizer, x, max_length=max_length) for x in both)
    return (chosen - rejected).tolist()


def quick_reward_args(output_dir: str) -> RewardConfig:
    """Eight passes with a large learning rate: for models of a few hundred thousand weights and
    labels of a few minutes."""
    return RewardConfig(
        output_dir,
        learning_rate=3e-3,
        per_device_train_batch_size=8,
        num_train_epochs=8,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )


def refit_reward_model(
    labels: Dataset,  # of load_preferences
    model: PreTrainedModel | str,  # to start from, as RewardTrainer takes it; it is not changed
    processing_class: PreTrainedTokenizerBase | str | None = None,
    args: RewardConfig | None = None,  # None: quick_reward_args
    held_out: float = 0.25,  # share of prompts that is never trained on
    seed: int = 0,  # which prompts those are
) -> Refit:
    """A reward model trained on the labels whose prompts are not held out. Raises ValueError on
    fewer than two of them."""
    held = [is_held_out(row.get("prompt") or row["chosen"], held_out, seed) for row in labels]
    train = labels.select([i for i, kept in enumerate(held) if not kept])
    if len(train) < 2:
        raise ValueError(
            f"of {len(labels)} decided labels {len(train)} may be trained on: label at least "
            f"{2 - len(train)} more pairs, or lower held_out ({held_out:g})."
        )
    start, tokenizer = time.monotonic(), tokenizer_of(model, processing_class)
    with random_state_kept(), tempfile.TemporaryDirectory() as folder:
        own = model if isinstance(model, str) else copy.deepcopy(model)
        settings = args or quick_reward_args(folder)
        trainer = RewardTrainer(own, settings, train, processing_class=tokenizer)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    scorer = trainer.model
    if not isinstance(scorer, PreTrainedModel):
        raise TypeError(f"the trained model is a {type(scorer).__name__}: give a PreTrainedModel.")
    margins = margins_of(scorer, tokenizer, labels, settings.max_length)
    kept = [
        name for name in ("prompt", "chosen", "rejected", "pair") if name in labels.column_names
    ]
    table = pd.DataFrame(dict(pair=range(len(labels)))).assign(
        **{name: labels[name][:] for name in kept}
    )
    return Refit(scorer, table.assign(margin=margins, held_out=held), time.monotonic() - start)


# ---- The score so far ----


def _scorer(model: PreTrainedModel | str, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    "A model that RewardTrainer makes. Raises ValueError on others."
    if not isinstance(model, str) and not hasattr(getattr(model, "config", None), "num_labels"):
        raise ValueError(
            f"model is a {type(model).__name__}: give a reward model as RewardTrainer makes it, "
            "or its folder."
        )
    model = load_scorer(model)
    scorer_head(model)
    check_vocabulary(model, tokenizer, "reward model")
    return model


@torch.no_grad()
def _running_scores(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: list[list[int]],
    batch_size: int = 64,
) -> list[list[float]]:
    "The head's score at each token of each row. Padding is on the right."
    was_training, running = model.training, []
    model.eval()
    for start in range(0, len(rows), batch_size):
        ids, mask = right_pad(rows[start : start + batch_size], tokenizer.pad_token_id)
        scores = token_scores(model, ids.to(model.device), mask.to(model.device)).cpu()
        running += [row[keep].tolist() for row, keep in zip(scores, mask.bool())]
    model.train(was_training)
    return running


def _check_causal(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, row: list[int]
) -> None:
    "Raises ValueError where the score so far depends on what comes later."
    half = max(1, len(row) // 2)
    other = row[:half] + row[:1] * (len(row) - half)  # as long, so that rounding is the same
    score, changed = (
        scores[half - 1] for scores in _running_scores(model, tokenizer, [row, other])
    )
    loose = 1e-6 if next(model.parameters()).dtype == torch.float32 else 1e-2
    if not math.isclose(score, changed, rel_tol=loose, abs_tol=loose):
        raise ValueError(
            f"{type(model).__name__} reads both ways: its score after {half} tokens is "
            f"{score:.6g}, and {changed:.6g} where other words follow, so that there "
            "is no score so far. Give a reward model that is made from a causal model."
        )


@dataclass(frozen=True)
class ScoredPair:
    "Two answers, token by token, and the score of a reward model so far at each."

    number: int  # row of the data
    prompt: str
    tokens: tuple[list[str], list[str]]  # chosen and rejected; the stop token is the last
    scores: tuple[list[float], list[float]]
    start: float | None  # at the end of the prompt; None without one
    answers: tuple[str, str] = ("", "")  # as texts, with the blanks that tokens may lack

    @property
    def margin(self) -> float:
        "Score of the chosen answer less that of the rejected one: below zero, the model is wrong."
        return self.scores[0][-1] - self.scores[1][-1]

    def changes(self, which: int) -> list[float]:
        "What each token did to the score; they add up to the score, from that of the prompt."
        scores = self.scores[which]
        return [now - before for before, now in zip([self.start or 0.0, *scores], scores)]

    @property
    def text(self) -> str:
        "Both answers, to find a word in."
        both = zip(self.answers, self.tokens)
        return "\n".join(answer or "".join(tokens) for answer, tokens in both)


def _rows_of_ids(
    pairs: Dataset, tokenizer: PreTrainedTokenizerBase, max_length: int | None
) -> Dataset:
    """Columns chosen_ids and rejected_ids. Raises ValueError on an empty set, or on rows that
    cannot be scored."""
    if not len(pairs):
        raise ValueError("there are 0 pairs to look at: give at least one.")
    if {"chosen_ids", "rejected_ids"} <= set(pairs.column_names):
        for i, row in enumerate(pairs):
            if not row["chosen_ids"] or not row["rejected_ids"]:
                raise ValueError(f"row {i} has no ids: drop the row.")
        return pairs
    return encode_pairs(pairs, tokenizer, max_length)


def score_pairs(
    model: PreTrainedModel | str,  # a reward model made by RewardTrainer, or its folder
    processing_class: PreTrainedTokenizerBase | str,
    pairs: Dataset,  # prompt, chosen, rejected: texts or conversations; or ids of encode_pairs
    max_length: int | None = None,  # as in training
) -> list[ScoredPair]:
    """The running score of every answer. Raises ValueError on another kind of model, and on rows
    that RewardTrainer refuses."""
    tokenizer = load_tokenizer(processing_class)
    scorer, data = _scorer(model, tokenizer), _rows_of_ids(pairs, tokenizer, max_length)
    rows = [(list(one), list(two)) for one, two in zip(data["chosen_ids"], data["rejected_ids"])]
    _check_causal(scorer, tokenizer, rows[0][0])
    scores = _running_scores(scorer, tokenizer, [ids for both in rows for ids in both])
    text = lambda ids: str(tokenizer.decode(ids))
    scored: list[ScoredPair] = []
    for i, (one, two) in enumerate(rows):
        differ = (k for k, (a, b) in enumerate(zip(one, two)) if a != b)
        shared = next(differ, min(len(one), len(two)) - 1)
        first, second = scores[2 * i : 2 * i + 2]
        tokens = token_texts(tokenizer, one[shared:]), token_texts(tokenizer, two[shared:])
        start = first[shared - 1] if shared else None
        running = first[shared:], second[shared:]
        answers = text(one[shared:]), text(two[shared:])
        scored.append(ScoredPair(i, text(one[:shared]), tokens, running, start, answers))
    return scored


PAIR_SIGNALS = ("running score", "change")


def worst_first(
    pairs: Sequence[ScoredPair],
) -> list[ScoredPair]:
    "The most confident mistakes first; those that tie keep their order, NaN comes last."
    return sorted(pairs, key=lambda one: (math.isnan(one.margin), one.margin))


def pair_summary(
    pairs: Sequence[ScoredPair],
) -> str:
    "How many pairs are in the right order, and how far apart the two are."
    chosen, rejected = (torch.tensor([one.scores[which][-1] for one in pairs]) for which in (0, 1))
    metrics = preference_metrics(chosen, rejected)
    right = int((chosen > rejected).sum())
    return (
        f"{len(pairs)} pairs · accuracy {share_sentence(right, len(pairs))} · mean margin "
        f"{signed(metrics['margin'])}"
    )


def pair_facts(one: ScoredPair) -> str:
    "What is known of a pair as a whole."
    chosen, rejected = (signed(scores[-1]) for scores in one.scores)
    verdict = "right" if one.margin > 0 else "wrong"
    start = "" if one.start is None else f" · at the end of the prompt {signed(one.start)}"
    return (
        f"Pair {one.number} · {verdict}, margin {signed(one.margin)} · chosen {chosen}, "
        f"rejected {rejected}{start}"
    )


def pair_numbers(one: ScoredPair, which: int) -> dict[str, list[float]]:
    "The numbers under the tokens of one answer, signal by signal."
    return {"running score": one.scores[which], "change": one.changes(which)}


def pair_record(one: ScoredPair) -> dict[str, Any]:
    """One pair as the script reads it: texts with everything visible, all digits of the numbers,
    and the facts that the prompt tells."""
    exact = lambda numbers: " ".join(f"{x:.7g}" for x in numbers)
    words = lambda which: spaced(one.tokens[which], one.answers[which])
    return dict(
        facts=pair_facts(one),
        asked=visible(one.prompt).replace("↵\n", "\n"),
        text=visible(one.text),
        number=one.number,
        margin=one.margin if math.isfinite(one.margin) else None,
        tokens=[[visible(word) or "∅" for word in words(which)] for which in (0, 1)],
        rows=[{name: exact(x) for name, x in pair_numbers(one, which).items()} for which in (0, 1)],
        told=facts_told(one.prompt),
    )
