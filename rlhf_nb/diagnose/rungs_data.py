"Rungs on the data: what the policy reads, how long it is, where a response ends."

from __future__ import annotations

import statistics
from typing import Any

import torch

from rlhf_nb.diagnose.checks import Found, Rung, not_here
from rlhf_nb.diagnose.subject import Subject
from rlhf_nb.runtime.build import readers
from rlhf_nb.sft import encode_rows

SHOWN = 3  # prompts


def end_of(text: str, most: int = 160) -> str:
    "The end of a long text."
    return text if len(text) <= most else f"… {text[-most:]}"


def text_of(tokenizer: Any, prompt: Any) -> str:
    "A prompt as text, rendered by the tokenizer's own template if it is a conversation."
    if isinstance(prompt, str):
        return prompt
    return str(tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True))


def prompt_fault(tokenizer: Any, given: Any, ids: list[int]) -> str:
    "What is wrong with the ids of a prompt; empty: nothing."
    wanted = tokenizer(text_of(tokenizer, given), add_special_tokens=False)["input_ids"]
    front = ids[: len(ids) - len(wanted)]
    if not wanted or ids[-len(wanted) :] != wanted:
        return "does not end with the ids of its own text"
    if any(i not in tokenizer.all_special_ids for i in front):
        return f"has {len(front)} ids in front of its text that are no special tokens"
    if len(ids) > 1 and ids[0] == ids[1] == tokenizer.bos_token_id:
        return "begins with BOS twice"
    return ""


def prompts(subject: Subject) -> Found:
    "Some prompts as the policy sees them, against an encoding of their texts made here."
    rows, tokenizer = subject.rows(32), subject.tokenizer
    batch = subject.trainer.data_collator(rows)
    ids, mask = batch["prompt_ids"], batch["prompt_mask"].bool()
    kept = [i[m].tolist() for i, m in zip(ids, mask)]
    shown = "\n".join(f"{k + 1}: {end_of(tokenizer.decode(kept[k]))}" for k in range(len(kept))[:3])
    if (mask[:, :-1] & ~mask[:, 1:]).any():
        return Found(False, f"padding to the right of a prompt\n{shown}")
    if "prompt" not in rows[0]:
        return Found(True, f"ids as they are in the data set\n{shown}")
    faults = [prompt_fault(tokenizer, row["prompt"], x) for row, x in zip(rows, kept)]
    bad = [k for k, fault in enumerate(faults) if fault]
    if bad:
        text = tokenizer.decode(kept[bad[0]])
        head = f"{len(bad)} of {len(rows)}: prompt {bad[0] + 1} {faults[bad[0]]}: {end_of(text)}"
        return Found(False, f"{head}\n{shown}")
    return Found(True, shown)


def lengths(subject: Subject) -> Found:
    "Tokens of prompts and references, against the models' positions and response_length."
    args, tokenizer = subject.args, subject.tokenizer
    batch = subject.trainer.data_collator(subject.rows(512))
    tokens = sorted(batch["prompt_mask"].sum(1).tolist())
    found = f"prompts {tokens[0]} to {tokens[-1]} tokens, median {statistics.median(tokens):g}"
    room = min((x for x in map(positions_of, models_of(subject)) if x), default=None)
    fits = room is None or tokens[-1] + args.response_length <= room
    found += f", with the response at most {tokens[-1] + args.response_length}"
    found += f" of {room} positions" if room else " (no limit of positions is known)"
    cut = 0.0
    if subject.answers:
        answers = [text for _, text in subject.answers]
        sizes = [len(x) + 1 for x in tokenizer(answers, add_special_tokens=False)["input_ids"]]
        cut = sum(n > args.response_length for n in sizes) / len(sizes)
        found += f"; {cut:.0%} of {len(sizes)} references are longer than response_length"
    return Found(fits and cut <= 0.5, found)


def models_of(subject: Subject) -> list[Any]:
    "Policy, value model, and reward models that read the policy's ids."
    return [model for _, model in readers(subject.trainer.pair, subject.trainer.judges)]


def positions_of(model: Any) -> int | None:
    "How many tokens a model can read."
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    return getattr(inner.config.get_text_config(), "max_position_embeddings", None)


def duplicates(subject: Subject) -> Found:
    "How many prompts there are twice."
    data = subject.trainer.train_dataset
    name = "prompt" if "prompt" in data.column_names else "input_ids"
    texts = [str(x) for x in data[name][:]]
    distinct = len(set(texts))
    found = f"{distinct:,} distinct prompts of {len(texts):,}"
    return Found(distinct > 1 or len(texts) == 1, found)


def episodes(subject: Subject) -> Found:
    "Where each response ends, from its ids alone."
    r, how = subject.start.sampled, subject.trainer.sampling_settings
    if how.stop_strings is not None:
        return not_here("stop_strings end a response within a token's text")
    wrong = []
    for i, (ids, mask) in enumerate(zip(r.response_ids.tolist(), r.mask.tolist())):
        ends = [t + 1 for t, token in enumerate(ids[: sum(mask)]) if token in how.stop_ids]
        n = ends[0] if ends else how.response_length
        right = mask == [t < n for t in range(len(mask))] and bool(r.stopped[i]) == bool(ends)
        if not right or any(token != how.pad_id for token in ids[n:]):
            wrong.append(i)
    found = f"{len(r) - len(wrong)} of {len(r)} responses end at their first stop token, or at "
    found += f"{how.response_length} tokens, with nothing but padding behind"
    return Found(not wrong, found)


def stop_token(subject: Subject) -> Found:
    "How likely the policy ends a response, and whether SFT on the references teaches it to."
    start, how = subject.start, subject.trainer.sampling_settings
    share = start.sampled.stopped.float().mean().item()
    found = f"{share:.0%} of {len(start.sampled)} samples reached it"
    if how.stop_strings is not None:
        return Found(share > 0, found)
    rows = [x.all_logprobs[:, list(how.stop_ids)].exp().sum(1) for x in start.hand.policy]
    chance = torch.cat(rows).mean().item()
    uniform = len(how.stop_ids) / start.hand.policy[0].all_logprobs.shape[1]
    ended = sum(1 - (1 - p.clamp(max=1)).prod().item() for p in rows) / len(rows)
    whole = ended * max(subject.args.total_episodes or 0, subject.args.batch_size)
    found += f"; probability {chance:.2g} a token (uniform {uniform:.2g}), about {whole:,.1f}"
    found += " responses of the whole run"
    unlabelled = without_stop_label(subject)
    if unlabelled:
        found += f"; {unlabelled} references lose it in the labels of supervised fine-tuning"
    return Found(whole >= 1 and chance >= uniform / 10 and not unlabelled, found)


def without_stop_label(subject: Subject) -> int:
    "References whose stop token carries no label when `SFTTrainer` encodes them."
    from datasets import Dataset

    pairs = [
        dict(prompt=row["prompt"], completion=text)
        for row, text in subject.answers
        if isinstance(row.get("prompt"), str)
    ]
    eos = subject.tokenizer.eos_token_id
    if not pairs or eos is None:
        return 0
    labels = encode_rows(Dataset.from_list(pairs), subject.tokenizer)["labels"][:]
    return sum(row[-1] != eos for row in labels)


RUNGS = (
    Rung(
        "data: prompts",
        prompts,
        "the ids of a prompt are those of its text, rendered once, BOS at most once, padding on "
        "the left: the policy goes on from the last id (definition)",
        "the chat template, BOS in the texts, the side on which prompts are cut or padded",
    ),
    Rung(
        "data: lengths",
        lengths,
        "the longest prompt and response_length fit the positions of every model (positions beyond "
        "were never trained); at most half of the references are longer than response_length, or "
        "the median answer is cut off",
        "response_length, max_prompt_length, and the unit: tokens of this tokenizer",
    ),
    Rung(
        "data: duplicates",
        duplicates,
        "more than one distinct prompt, or every update trains on the same one (definition)",
        "how the data set was made; the column that is named prompt",
    ),
    Rung(
        "data: episodes",
        episodes,
        "the first stop token ends a response and counts, nothing behind it does "
        "(2403.17031; definition)",
        "stop_token, stop_token_id, the mask of the response, the pad token",
    ),
    Rung(
        "data: stop token",
        stop_token,
        "at least one response of the whole run ends by itself, else the EOS penalty is a "
        "constant (2403.17031, 'EOS trick'); a token has at least a tenth of its uniform "
        "probability, else training has suppressed it; the references keep it as a label",
        "whether SFT trained on the stop token (labels of -100 where pad is eos), stop_token, "
        "response_length",
    ),
)
