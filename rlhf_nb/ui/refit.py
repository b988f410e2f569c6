"""A reward model refitted on the choices of a person, and where it contradicts them. No widgets."""

from __future__ import annotations

import copy
import hashlib
import json
import tempfile
import time
from dataclasses import dataclass

import pandas as pd
import torch
from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PrinterCallback

from rlhf_nb.base.encoding import Turns
from rlhf_nb.base.random_state import random_state_kept
from rlhf_nb.evaluate import win_rate_interval
from rlhf_nb.reward import RewardConfig, RewardTrainer
from rlhf_nb.scoring import pair_margins
from rlhf_nb.sft import load_processing_class
from rlhf_nb.training.prompts import turns_text
from rlhf_nb.ui.html import data_table, element, percent, safe_text, sheet, themed_markup
from rlhf_nb.ui.preference_labels import share_sentence
from rlhf_nb.ui.viz import Html


def is_held_out(prompt: Turns | None, share: float = 0.25, seed: int = 0) -> bool:
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
        "Held-out labels that the model predicts, of all held-out ones; tied scores are wrong."
        held = self.table[self.table.held_out]
        return int((held.margin > 0).sum()), len(held)

    def disagreements(self) -> pd.DataFrame:
        "Labels that the model contradicts, surest first; sure: its probability of the other."
        wrong = self.table[self.table.margin < 0].sort_values("margin", kind="stable")
        sure = torch.sigmoid(-torch.tensor(wrong.margin.to_numpy(dtype=float)))
        return wrong.assign(sure=sure.tolist())

    def verdict(self) -> str:
        "Accuracy on held-out labels, against chance."
        right, of = self.right()
        if not of:
            return "no held-out label yet: nothing can be said of labels that it has not seen"
        low, high = win_rate_interval(right, 0, of - right)
        against = "not to be told from a coin (50 %)"
        if low > 0.5:
            against = "better than a coin"
        elif high < 0.5:
            against = "worse than a coin: are the labels the wrong way round?"
        return f"{share_sentence(right, of)} of held-out labels predicted, {against}"

    def _repr_html_(self) -> str:
        return render_refit(self)

    def __repr__(self) -> str:
        return f"Refit(trained on {int((~self.table.held_out).sum())} labels; {self.verdict()})"


def render_refit(refit: Refit, most: int = 8) -> Html:
    "What the model learned, and the first of the pairs where it contradicts the person."
    wrong, trained = refit.disagreements(), int((~refit.table.held_out).sum())
    rows = []
    for row in wrong.head(most).to_dict("records"):
        label = "held out" if row["held_out"] else "trained on"
        texts = map(turns_text, (row["chosen"], row["rejected"]))
        rows.append((int(row["pair"]), percent(row["sure"], 0), label, *texts))
    title = element("b", f"Refitted on {trained} labels in {refit.seconds:.1f} s: ")
    parts = [element("p", title, safe_text(f"{refit.verdict()}."))]
    if rows:
        count = f"The model disagrees with you on {len(wrong)} of {len(refit.table)} labels"
        parts.append(element("p", count + f"; the {most} most confident" * (len(wrong) > most)))
        heads = ["pair", "model is sure", "label was", "you chose", "the model prefers"]
        parts.append(data_table("", heads, rows))
    else:
        parts.append(element("p", "It agrees with every label."))
    return themed_markup(sheet(*parts), sheets=["sheet.css"])


def quick_reward_args(output_dir: str) -> RewardConfig:
    "Eight passes with a large learning rate: for small models and labels of a few minutes."
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
    "A reward model trained on labels that are not held out. Raises ValueError on fewer than two."
    held = [is_held_out(row.get("prompt") or row["chosen"], held_out, seed) for row in labels]
    train = labels.select([i for i, kept in enumerate(held) if not kept])
    if len(train) < 2:
        raise ValueError(
            f"of {len(labels)} decided labels {len(train)} may be trained on: label at least "
            f"{2 - len(train)} more pairs, or lower held_out ({held_out:g})."
        )
    start, tokenizer = time.monotonic(), load_processing_class(model, processing_class)
    with random_state_kept(), tempfile.TemporaryDirectory() as folder:
        own = model if isinstance(model, str) else copy.deepcopy(model)
        settings = args or quick_reward_args(folder)
        trainer = RewardTrainer(own, settings, train, processing_class=tokenizer)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    scorer = trainer.model
    if not isinstance(scorer, PreTrainedModel):
        raise TypeError(f"the trained model is a {type(scorer).__name__}: give a PreTrainedModel.")
    margins = pair_margins(scorer, tokenizer, labels, settings.max_length).tolist()
    wanted = ("prompt", "chosen", "rejected", "pair")
    kept = {name: labels[name][:] for name in wanted if name in labels.column_names}
    table = pd.DataFrame(dict(pair=range(len(labels))))
    table = table.assign(**kept, margin=margins, held_out=held)
    return Refit(scorer, table, time.monotonic() - start)
