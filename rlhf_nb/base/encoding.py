"""One text, tokenized once: what is prompt, what is answer, and which tokens count."""

from __future__ import annotations

import json
import re
import reprlib
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count, product
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from rlhf_nb.base.files import parse_json
from rlhf_nb.base.sandbox import bound_templates

bound_templates()

# text, or a conversation: [{"role": "user", "content": "..."}, ...]
Turns = str | Sequence[Mapping[str, Any]]
ROLES = dict(gpt="assistant", model="assistant", assistant="assistant", developer="system")
THOUGHTS = "reasoning_content", "reasoning", "thinking"  # keys of a turn
TAG = re.compile(r"[<\[\u25c1][^\s<>\[\]'\"]+[>\]\u25b7]")  # by which a template may cut a text


def check_turns(x: Any, name: str) -> list[Any]:
    """A conversation as a list, without the None of a table, and with calls whose arguments are
    objects. A None among these stays where no table put it: in JSON, and where the turns have
    different keys, which a table gives them all. Raises ValueError that names what is none."""
    turns = list(x) if isinstance(x, (list, tuple)) else []
    if not turns or not all(isinstance(turn, Mapping) for turn in turns):
        raise ValueError(
            f"{name} is {reprlib.repr(x)}: give text, or turns such as "
            "[{'role': 'user', 'content': '...'}], or drop the row with dataset.filter."
        )
    for i, turn in enumerate(turns):
        says = isinstance(x := turn.get("content"), (str, list)) or turn.get("tool_calls")
        if not isinstance(turn.get("role"), str) or not says:
            raise ValueError(
                f"{name} has the turn {reprlib.repr(turn)}, whose role or content is no text: give "
                "turns such as {'role': 'user', 'content': '...'}."
            )
        for part in x if isinstance(x, list) else ():
            if not isinstance(part.get("text") if isinstance(part, Mapping) else part, str):
                raise ValueError(
                    f"{name}: turn {i} of role {turn['role']!r} has {reprlib.repr(part)} in its "
                    "content, which is no text, and models here read text alone: put it into "
                    "words, or drop the row with dataset.filter."
                )
    of_table = len({frozenset(turn) for turn in turns}) == 1
    return change_calls(drop_none(turns if of_table else call_texts(turns)), "arguments", _parsed)


def template_settings(row: Mapping[str, Any]) -> dict[str, Any]:
    """What the columns tools and chat_template_kwargs of a row, which may be JSON, give to its chat
    template; not what is decided here. Raises ValueError on other things."""
    given: dict[str, Any] = {}
    for name, kind in (("tools", list), ("chat_template_kwargs", dict)):
        x = row.get(name) or kind()
        try:
            given[name] = parse_json(x) if isinstance(x, str) else drop_none(x)
        except ValueError as error:
            raise ValueError(f"{name} is {reprlib.repr(x)}: it is no JSON ({error}).") from error
        if not isinstance(given[name], kind):
            raise ValueError(f"{name} is {reprlib.repr(x)}: give a {kind.__name__}.")
    tools, settings = given.values()
    decided = "tokenize", "add_generation_prompt", "continue_final_message", "by_policy"
    settings = {name: x for name, x in settings.items() if name not in decided}
    return settings | ({"tools": tools} if tools else {})


def drop_none(x: Any) -> Any:
    "Without the None that a data set puts where another row has a key that this one lacks."
    if isinstance(x, Mapping):
        return {key: drop_none(value) for key, value in x.items() if value is not None}
    return [drop_none(value) for value in x] if isinstance(x, list) else x


def change_calls(x: Any, key: str, change: Callable[[Any], Any]) -> Any:
    "Turns, or their calls, with another name or other arguments in each call."
    if not isinstance(x, Mapping):
        return [change_calls(one, key, change) for one in x] if isinstance(x, list) else x
    inner = {k: change_calls(x[k], key, change) for k in ("tool_calls", "function") if k in x}
    return {**x, **inner} | ({key: change(x[key])} if key in x else {})


def _parsed(x: Any) -> Any:
    "The object of which a text is the JSON; anything else as it is."
    try:
        found = parse_json(x or "{}") if isinstance(x, str) else x
    except ValueError:
        return x
    return found if isinstance(found, Mapping) else x


def call_texts(turns: Any) -> Any:
    "With JSON for the arguments of calls, in which a table keeps None."
    as_json = lambda x: json.dumps(x, ensure_ascii=False) if isinstance(x, Mapping) else x
    return change_calls(turns, "arguments", as_json)


def join_blocks(turns: Any) -> list[dict[str, Any]]:
    "Turns whose content is text, where it was blocks of nothing but text, or none beside a call."

    def joined(turn: Mapping[str, Any]) -> Any:
        x = turn.get("content") or ("" if turn.get("tool_calls") else None)
        texts: list[Any] = [one.get("text") if isinstance(one, Mapping) else one for one in x or ()]
        return "".join(texts) if x and all(isinstance(text, str) for text in texts) else x

    return [{**turn, "content": joined(turn)} for turn in turns]


def split_blocks(turns: Any) -> list[dict[str, Any]]:
    "Turns whose content is blocks, which templates of models that see want."
    block = lambda x: [dict(type="text", text=x)] if isinstance(x, str) else x or []
    return [{**turn, "content": block(turn.get("content"))} for turn in turns]


def lost_turn(
    turns: Sequence[Mapping[str, Any]], tokenizer: PreTrainedTokenizerBase, **settings: Any
) -> int | None:
    """The first turn of which the template leaves out a text, a call, or the thoughts of an answer
    that is the last, if not `by_policy`; behind the last turn, where it leaves out a tool. Each is
    exchanged for a mark of its own, between tags that the template names, such as </think>: where
    that is written, so is any other."""
    numbers, said, marked = count(0xF0000), list[tuple[str, str, int]](), list[dict[str, Any]]()
    last = max((i for i, turn in enumerate(turns) if turn["role"] != "tool"), default=0)
    tags = "|".join(map(re.escape, {*TAG.findall(str(tokenizer.chat_template))})) or "(?!)"

    def mark(x: Any, shape: Callable[[int], str] = chr) -> Any:
        if isinstance(x, Mapping) and isinstance(x.get("text"), str):
            return {**x, "text": mark(x["text"], lambda n: chr(n) + '"')}  # no JSON writes it so
        if not isinstance(x, str) or not x.strip():
            return x
        parts = [] if whole else re.split(f"({tags})", x)
        if len(parts) > 1 and any(map(str.strip, parts[::2])):
            return "".join(p if i % 2 else mark(p, shape) for i, p in enumerate(parts))
        said.append((shape(next(numbers)), x.strip(), len(marked)))
        return x.replace(x.strip(), said[-1][0], 1)

    for turn in turns:
        x, calls = turn.get("content"), turn.get("tool_calls")
        whole = turn["role"] == "assistant" and (len(marked) != last or settings.get("by_policy"))
        new = dict(content=[*map(mark, x)] if isinstance(x, list) else mark(x))
        new["tool_calls"] = change_calls(calls, "name", lambda x: mark(x, "call_{}_x".format))
        thoughts = [k for k in THOUGHTS if turn.get(k) and len(marked) == last]
        new |= dict.fromkeys(thoughts, mark(turn[thoughts[0]]) if thoughts else "")
        marked.append({**turn, **{k: x for k, x in new.items() if k in turn}})
    tools = change_calls(settings.get("tools"), "name", lambda x: mark(x, "call_{}_x".format))
    options = {**settings, "tools": tools, "continue_final_message": False}
    try:
        text = write_turns(marked, tokenizer, **options)
    except ValueError:  # a template that looks into what is said
        text = write_turns(turns, tokenizer, **settings)
        said = [(own, own, i) for _, own, i in said]
    return next((i for x, _, i in said if x not in text), None)


NO_TOOLS = (
    "the chat_template does not show the tools, so that no model would know them: set "
    "tokenizer.chat_template to one that does, or leave out tools and describe them in the text."
)


def readable_turns(
    x: Any, tokenizer: PreTrainedTokenizerBase, name: str = "the conversation", **settings: Any
) -> list[Any]:
    """A conversation of which the template writes all that is said; if need be, blocks of text
    are joined, and arguments are JSON. Raises ValueError that names the turn that is left out."""
    turns, problems = check_turns(x, name), dict[int, ValueError]()
    as_given = lambda turns: turns
    for blocks, calls in product((as_given, join_blocks, split_blocks), (as_given, call_texts)):
        try:
            new = calls(blocks(turns))
            if (i := lost_turn(new, tokenizer, name=name, **settings)) is None:
                return new
            if i == len(turns):
                problems[i] = ValueError(f"{name}: {NO_TOOLS}")
                break
            role = turns[i]["role"]
            problems[i] = ValueError(
                f"{name}: the chat_template does not write all that turn {i} of role {role!r} says "
                f"({reprlib.repr(turns[i])}), so that no model would read it: give it text alone, "
                "or calls alone, without thoughts, in a role that the template knows, such as "
                f"{ROLES.get(role.lower(), 'user')!r}, or set another tokenizer.chat_template."
            )
        except ValueError as error:
            problems.setdefault(-1, error)
    if (last := max(problems)) < 0:
        raise name_refused(turns, problems[last], tokenizer, name, **settings)
    raise problems[last]  # of the form that came furthest


def name_refused(
    turns: list[Any], error: ValueError, tokenizer: PreTrainedTokenizerBase, name: str, **how: Any
) -> ValueError:
    "The error, of a template that refuses a conversation, with the first turn that it refuses so."
    how["continue_final_message"] = False
    for i in range(len(turns) if tokenizer.chat_template else 0):
        try:
            write_turns(turns[: i + 1], tokenizer, **how)
        except ValueError as other:
            if (why := str(other.__cause__)) == str(error.__cause__):
                return ValueError(
                    f"{name}: the chat_template refuses turn {i} of role {turns[i]['role']!r} "
                    f"({reprlib.repr(turns[i])}): {' '.join(why.split())}. Give text in turns of "
                    "user and assistant, one after the other, the tools and chat_template_kwargs "
                    "that it reads, or set another tokenizer.chat_template."
                )
    return error


def render(
    x: Any,  # text or a conversation
    tokenizer: PreTrainedTokenizerBase,
    name: str = "the text",  # that an error calls it, such as "prompt 3"
    **settings: Any,  # of the chat template
) -> str:
    """Text as it is, a conversation through the chat template. Raises ValueError that names it on
    anything else, and where the template leaves out what is said."""
    if isinstance(x, str):
        return x
    return write_turns(readable_turns(x, tokenizer, name, **settings), tokenizer, name, **settings)


def write_turns(
    turns: Any, tokenizer: PreTrainedTokenizerBase, name: str = "the conversation", **settings: Any
) -> str:
    "A conversation through the chat template, whatever that leaves out."
    if not tokenizer.chat_template:
        raise ValueError(
            f"{name} is a conversation and the tokenizer has no chat_template: set "
            "tokenizer.chat_template, or give text."
        )
    try:
        return str(tokenizer.apply_chat_template(turns, tokenize=False, **settings))
    except Exception as error:  # whatever a template raises
        why = f"the chat_template refuses {reprlib.repr(turns)}: {' '.join(str(error).split())}"
        raise ValueError(f"{name}: {why}.") from error


def is_begun(turns: Any) -> bool:
    "Whether a conversation ends with an answer of the assistant that is to be continued."
    return not isinstance(turns, str) and turns[-1]["role"] == "assistant"


def prompt_text(
    prompt: Any,  # text or a conversation
    tokenizer: PreTrainedTokenizerBase,
    name: str = "the prompt",  # that an error calls it
    **settings: Any,  # of the chat template
) -> str:
    """What a model goes on from: a conversation with the mark that opens an answer, or up to the
    end of the answer that it has begun; text as it is."""
    if isinstance(prompt, str):
        return prompt
    started = is_begun(check_turns(prompt, name))
    option = "continue_final_message" if started else "add_generation_prompt"
    return render(prompt, tokenizer, name, **{**settings, option: True})


def overlap(first: Sequence, second: Sequence) -> int:
    "How many characters, or ids, two rows have in common at their beginning."
    lengths = range(1, min(len(first), len(second)) + 1)
    return bisect_left(lengths, True, key=lambda n: first[:n] != second[:n])


def place_of(
    i: int,
    turns: Sequence[Mapping[str, Any]],
    text: str,  # of the conversation
    tokenizer: PreTrainedTokenizerBase,
    **settings: Any,
) -> tuple[int, int] | None:
    """Where a turn's content stands in the text: what changes when the turn says something else.
    None where the template leaves it out."""
    other = next(c for c in map(chr, range(0xE000, 0xF900)) if c not in text)  # no text has it
    said = [dict(type="text", text=other)] if isinstance(turns[i].get("content"), list) else other
    kept = {k: x for k, x in turns[i].items() if k in ("role", "name", "tool_call_id")}
    changed = [*turns[:i], dict(kept, content=said), *turns[i + 1 :]]
    try:
        new = write_turns(changed, tokenizer, f"with another turn {i}, it", **settings)
    except ValueError:  # Mistral counts turns, and one that calls a tool is none
        if i + 1 == len(turns):
            raise
        own = write_turns(upto := turns[: i + 1], tokenizer, **settings)
        if (place := place_of(i, upto, own, tokenizer, **settings)) is None:
            return None
        said, at = own[slice(*place)], -1
        for _ in range(own.count(said, 0, place[0]) + 1):  # the same may have been said before
            at = text.find(said, at + 1)
        if at < 0:
            raise
        return at, at + len(said)
    start = overlap(text, new)
    end = len(text) - overlap(text[start:][::-1], new[start:][::-1])
    return None if text == new else (start, end)


def end_mark(
    between: str,  # what stands between an answer and what the next turn says
    last: str,  # the mark at the end of a conversation
    header: str,  # what stands before an earlier turn of the next one's role
    tokenizer: PreTrainedTokenizerBase,
    opening: str = "",  # what opens an answer
) -> int | None:
    "Length of the mark that ends an answer inside a conversation; None: it cannot be told."
    if last and between.startswith(last):
        return len(last)
    added = "|".join(re.escape(str(x)) for x in tokenizer.added_tokens_decoder.values())
    both = between[: overlap(between, last)]  # a mark, and then EOS at the end of a conversation
    if shared := [match.end() for match in re.finditer(added, both)] if added else []:
        return shared[-1]
    known = [last and token for token in tokenizer.all_special_tokens] + [tokenizer.eos_token]
    marks = "|".join(re.escape(x) for x in known if x and x != tokenizer.bos_token)
    if match := re.match(rf"\s*({marks})(?=\s*\S)", between) if marks else None:
        return match.end()
    opens = overlap(between[::-1], header.removeprefix(tokenizer.bos_token or "")[::-1])
    ends = between[: len(between) - opens]
    if opens and ends:
        return len(ends.rstrip()) or len(ends)
    begins = re.match(added, opening) if added else None  # all turns begin alike
    if begins and (end := between.find(begins[0])) > 0:
        return len(between[:end].rstrip()) or end
    opens_all = tokenizer.bos_token, begins and begins[0]
    if added and not last and (match := re.match(added, between)) and match[0] not in opens_all:
        return match.end()  # GLM: the mark of the next role ends an answer
    return None if last else 0


def trim_tail(tail: str) -> str:
    "The end of a text without white space behind it; white space alone stays."
    return tail.rstrip() or tail


def generation_spans(
    turns: Sequence[Mapping[str, Any]], tokenizer: PreTrainedTokenizerBase, **settings: Any
) -> list[tuple[int, int]] | None:
    "What the template puts between its marks of generation, in characters; None: it has none."
    template = tokenizer.get_chat_template(None, settings.get("tools"))
    if not re.search(r"\{%-?\s*generation\s*-?%\}", template):
        return None
    options: dict[str, Any] = {**tokenizer.special_tokens_map, **settings}
    options |= dict(chat_template=template, return_assistant_tokens_mask=True)
    return [*render_jinja_template([[*map(dict, turns)]], **options)[1][0]]


def answers_in(
    turns: Sequence[Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    first: int = 0,  # what is said before this turn is left out
    **settings: Any,  # of the chat template
) -> tuple[str, list[tuple[int, int]]]:
    """A conversation as text, and the assistant's answers in it: the first character of each, and
    the one after its end mark. Raises ValueError where the template does not show them."""
    turns = readable_turns(turns, tokenizer, **settings)
    text = write_turns(turns, tokenizer, **settings)
    if (marked := generation_spans(turns, tokenizer, **settings)) is not None:
        of_prompt = generation_spans(turns[:first], tokenizer, **settings) if first else None
        return text, marked[len(of_prompt or []) :]
    place = lambda i: place_of(i, turns, text, tokenizer, **settings)
    roles = [turn["role"] for turn in turns]
    answers = [i for i in range(first, len(turns)) if roles[i] == "assistant"]
    places = {i: where for i in answers if (where := place(i)) is not None}
    if not places:
        return text, []
    bare = lambda i: write_turns(turns[:i], tokenizer, **settings)
    n, own, of_last = max(places) + 1, text, places[max(places)]
    if n < len(turns):
        of_last = place_of(n - 1, turns[:n], own := bare(n), tokenizer, **settings) or (0, len(own))
    last = trim_tail(own[of_last[1] :])  # the mark at the end of a conversation
    opens = dict(settings, add_generation_prompt=True)
    given = {i: write_turns(turns[:i], tokenizer, **opens) for i in places if i}
    begins = {i: len(before) for i, before in given.items() if text.startswith(before)}
    opening_mark = lambda i: given[i][overlap(bare(i), given[i]) :] if i in given else ""
    opening, lead = "", ""  # of an answer, and the space behind it
    if given and len(begins) < len(places):
        i = [*given][-1]
        opening = opening_mark(i)
        lead = text[begins[i] : places[i][0]] if i in begins else ""

    spans: list[tuple[int, int]] = []
    for i, (start, end) in places.items():
        since = max(0, overlap(given.get(i, ""), text) - len(opening), *(x for _, x in spans[-1:]))
        at = text.rfind(opening, since, start) if opening else -1
        if i in begins:
            start = begins[i]
        elif at >= 0:
            start = at + len(opening)
        elif lead.isspace() and text.endswith(lead, 0, start):
            start -= len(lead)
        length: int | None = len(last)
        unlike = i + 1 < len(turns) and not text.startswith(last or " ", end)
        after = place(i + 1) if unlike or (turns[i + 1 :] and turns[i].get("tool_calls")) else None
        if unlike:
            earlier = place(roles.index(roles[i + 1]))
            header = text[: earlier[0]] if earlier and earlier[0] < start else ""
            between = text[end : after[0] if after else None]
            length = end_mark(between, last, header, tokenizer, opening_mark(i))
        if length is None or (after and start <= after[0] < end):
            raise ValueError(
                f"the chat_template writes {last!r} behind the last answer and something else "
                f"behind turn {i} ({text[end : end + 30]!r}), or turn {i + 1} inside it, so that "
                "its end cannot be told: put {% generation %} and {% endgeneration %} around what "
                "the assistant says."
            )
        spans.append((start, end + length))
    return text, spans


class Marked(NamedTuple):
    "A text, and the parts of it that a model is to write."

    text: str
    answers: list[tuple[int, int]]  # first character of each, and the one after its last
    ends: bool = False  # the stop token belongs behind it
    left_out: int = 0  # answers that the template does not write


def strip_stop(text: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """The text without the stop tokens, and the white space behind them, that it or its template
    may have put at its end."""
    while (end := text.rstrip()).endswith(tokenizer.eos_token):
        text = end.removesuffix(tokenizer.eos_token)
    return text


def cut_at_end(
    x: Any,  # text or a conversation
    tokenizer: PreTrainedTokenizerBase,
    ends: bool = True,  # False: up to what the last turn says
    **settings: Any,  # of the chat template
) -> str:
    "A conversation as text, up to the mark that ends it; any other text as it is."
    if isinstance(x, str):
        return x
    turns = readable_turns(x, tokenizer, "the text", **settings)
    text = write_turns(turns, tokenizer, **settings)
    place = place_of(len(turns) - 1, turns, text, tokenizer, **settings)
    end = len(text) if place is None else place[1]
    return text[:end] + (trim_tail(text[end:]) if ends else "")


def turn_end(text: str, tokenizer: PreTrainedTokenizerBase) -> str | None:
    "The special token at the end of a text, if it is not EOS; a template may end turns by it."
    special = {str(x) for x in tokenizer.added_tokens_decoder.values() if x.special}
    ends = special - {tokenizer.eos_token, tokenizer.pad_token}
    return next((x for x in sorted(ends, key=len) if text.rstrip().endswith(x)), None)


def marked_answers(
    turns: Sequence[Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    first: int = 0,  # what is said before this turn does not count
    **settings: Any,  # of the chat template
) -> Marked:
    "A conversation in which what the assistant says counts, each answer with its end mark."
    text, answers = answers_in(turns, tokenizer, first, **settings)
    left_out = sum(turn["role"] == "assistant" for turn in turns[first:]) - len(answers)
    if not answers or text[answers[-1][1] :].strip():
        return Marked(text, answers, False, left_out)
    start, end = answers[-1]
    text = text[:start] + strip_stop(text[start:end], tokenizer)
    return Marked(text, [*answers[:-1], (start, len(text))], True, left_out)


def join_answer(prompt: Turns, answer: Turns) -> Turns:
    """Prompt and answer as one text or one conversation; text to a conversation is what the
    assistant says, and goes on with an answer that the prompt has begun. An answer that repeats its
    prompt may have a system or developer turn in front. Raises ValueError on text with a
    conversation behind it."""
    prompt, answer = (
        x if isinstance(x, str) else check_turns(x, name)
        for name, x in (("the prompt", prompt), ("the answer", answer))
    )
    if isinstance(prompt, str):
        if isinstance(answer, str):
            return prompt + answer
        raise ValueError(
            "the prompt is text and the answer a conversation: make the prompt a turn, dataset.map("
            "lambda row: dict(prompt=[dict(role='user', content=row['prompt'])])), or give the "
            "answer as text."
        )
    reply = [dict(role="assistant", content=answer)] if isinstance(answer, str) else [*answer]
    for later in (reply, reply[1:] if reply[0]["role"] in ("system", "developer") else []):
        if join_blocks(later[: len(prompt)]) == join_blocks(prompt):
            return reply
    if not (is_begun(prompt) and is_begun(reply[:1])):
        return [*prompt, *reply]
    said = [turn.get("content") or "" for turn in (prompt[-1], reply[0])]
    if not all(isinstance(x, str) for x in said):
        said = [[dict(type="text", text=x)] if isinstance(x, str) else [*x] for x in said]
    return [*prompt[:-1], {**prompt[-1], "content": said[0] + said[1]}, *reply[1:]]


def marked_pair(
    prompt: Turns,
    answer: Turns,
    tokenizer: PreTrainedTokenizerBase,
    ends: bool = True,  # False: the answer was cut off, and gets no end mark
    **settings: Any,  # of the chat template
) -> Marked:
    "Prompt and answer as one text, in which the answer counts; see `join_answer`."
    turns: Any = join_answer(prompt, answer)
    if not isinstance(prompt, str) and turns[0]["role"] != prompt[0]["role"]:
        prompt = [turns[0], *check_turns(prompt, "the prompt")]  # with the answer's system turn
    text = cut_at_end(turns, tokenizer, ends, **settings)
    given = prompt_text(prompt, tokenizer, **settings)
    start = overlap(given, text)
    if start < len(given) and not is_begun(prompt):  # the answer changes how the prompt is written
        spans = answers_in(turns, tokenizer, len(prompt), **settings)[1]
        start = spans[0][0] if spans else start
    if ends:
        text = text[:start] + strip_stop(text[start:], tokenizer)
    return Marked(text, [(start, len(text))], ends)


ANSWERS = ("chosen", "rejected")


def pair_texts(
    row: dict[str, Any],  # prompt (or none), chosen and rejected: texts or conversations
    tokenizer: PreTrainedTokenizerBase,
) -> list[Marked]:  # of chosen and rejected
    "Both answers behind their prompt; without a prompt column, two whole texts that count."
    settings = template_settings(row)
    if row.get("prompt") is not None:
        return [marked_pair(row["prompt"], row[name], tokenizer, **settings) for name in ANSWERS]
    texts = [strip_stop(cut_at_end(row[x], tokenizer, **settings), tokenizer) for x in ANSWERS]
    return [Marked(text, [(-1, len(text))], True) for text in texts]


class Encoded(NamedTuple):
    "A text as ids."

    ids: list[int]
    counts: list[bool]  # whether each is part of an answer
    merged: bool  # whether the first answer begins inside a token, which counts


def front_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    "What the tokenizer puts in front of a text, such as BOS."
    plain, with_front = (tokenizer("a", add_special_tokens=x)["input_ids"] for x in (False, True))
    starts = [k for k in range(len(with_front)) if with_front[k : k + len(plain)] == plain]
    return with_front[: starts[0]] if starts else []


def tokenized(texts: list[str], tokenizer: PreTrainedTokenizerBase, **how: Any) -> Any:
    "What a tokenizer makes of texts alone. Raises ValueError where it cannot read one."
    for i, text in enumerate(texts):
        if re.search("[\ud800-\udfff]", text):
            raise ValueError(f"text {i} has a lone surrogate ({reprlib.repr(text)}): remove it.")
    try:
        return tokenizer(texts, add_special_tokens=False, **how)
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # of Rust, which is no Exception
            raise
        raise ValueError(f"the tokenizer broke down ({error}): shorten long texts.") from error


def plain_ids(texts: Iterable[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    "Ids of texts, with nothing put in front or behind."
    texts = list(texts)
    return tokenized(texts, tokenizer)["input_ids"] if texts else []


def encode_prompts(
    texts: Iterable[str], tokenizer: PreTrainedTokenizerBase
) -> list[list[int]]:  # without padding
    """Ids of texts that begin a sequence. What the tokenizer puts in front (BOS) is added once, and
    what it appends is not. `tokenizer.add_bos_token = False` leaves BOS out."""
    front = front_ids(tokenizer)
    rows = plain_ids(texts, tokenizer)
    return [row if row[: len(front)] == front else [*front, *row] for row in rows]


def encode(rows: Iterable[Marked], tokenizer: PreTrainedTokenizerBase) -> list[Encoded]:
    """Each text as ids, tokenized as a whole. A token that is only in part an answer's counts as
    the answer's. BOS is in front once, the stop token behind where it belongs."""
    rows, front, stop = list(rows), front_ids(tokenizer), tokenizer.eos_token_id
    encoded = []
    for row, (ids, counts, merged) in zip(rows, _tokens(rows, tokenizer)):
        if ids[: len(front)] != front:
            ids, counts = [*front, *ids], [False] * len(front) + counts
        encoded.append(Encoded([*ids, *[stop] * row.ends], [*counts, *[True] * row.ends], merged))
    return encoded


def _tokens(rows: list[Marked], tokenizer: PreTrainedTokenizerBase) -> list[Encoded]:
    "The tokens of the texts alone."
    texts = [row.text for row in rows]
    if not (rows and tokenizer.is_fast):
        ids = plain_ids(texts, tokenizer)
        return [_without_offsets(row, one, tokenizer) for row, one in zip(rows, ids)]
    found = tokenized(texts, tokenizer, return_offsets_mapping=True)
    encoded = []
    for row, ids, spans in zip(rows, found["input_ids"], found["offset_mapping"]):
        words = [*tokenizer.convert_ids_to_tokens(ids)]
        spans = restore_spaces(spans, words, len(row.text))
        counts = [
            any(end > a and (start < b or start == end <= b) for a, b in row.answers)
            for start, end in spans
        ]
        merged = False
        if row.answers and any(counts):
            a, first = row.answers[0][0], counts.index(True)
            space = words[first][:1] in ("\u0120", "\u2581")
            swallowed = space and row.text[: max(a, 0)].endswith(" ")
            merged = spans[first][0] < a or (swallowed and spans[first][0] == a)
        encoded.append(Encoded(ids, counts, merged))
    return encoded


def restore_spaces(
    spans: list[tuple[int, int]],  # of the tokens of a text, in characters
    words: list[str],  # the tokens
    length: int,  # of the text
) -> list[tuple[int, int]]:
    "With the spaces at a token's end, which byte-level tokenizers may leave out."
    starts = [start for start, _ in spans[1:]] + [length]
    spaces = [len(word) - len(word.rstrip("\u0120")) for word in words]
    return [
        (start, end + min(n, max(0, after - end)) if n < len(word) else end)
        for (start, end), after, n, word in zip(spans, starts, spaces, words)
    ]


def _without_offsets(row: Marked, ids: list[int], tokenizer: PreTrainedTokenizerBase) -> Encoded:
    "The same by a tokenizer that does not say which characters a token stands for."
    counts, merged = [False] * len(ids), False
    for n, (a, b) in enumerate(row.answers):
        given = row.text[: max(a, 0)]  # white space at the end of a text may be split otherwise
        before, upto, inside = plain_ids([given, row.text[:b], given + "\ue000"], tokenizer)
        start, end = max(overlap(before, ids), overlap(inside[:-1], ids)), overlap(upto, ids)
        end += end < len(upto)  # the token that goes on behind the answer
        counts[start:end] = [True] * len(counts[start:end])
        merged = merged or (n == 0 and start < len(before))
    return Encoded(ids, counts, merged)


def token_spans(
    tokenizer: PreTrainedTokenizerBase,
    ids: list[int],
    text: str,  # their text, without a stop token at the end
) -> list[tuple[int, int]]:  # of each token
    """Where each token starts and ends in the text, by decoding one more at a time. Pieces of a
    character are empty, and start where it does; the token that completes it has it all. A stop
    token is empty, at the end."""
    ends: list[int] = []
    first = read = base = 0  # ids[first:read] are what is decoded before a token for its blanks
    for n in range(1, len(ids) + 1):
        known = str(tokenizer.decode(ids[first:n]))
        complete = known.rstrip("\ufffd")  # what a character begins with, and does not end
        end = base + len(complete) - len(str(tokenizer.decode(ids[first:read])))
        ends.append(min(len(text), max([end, *ends[-1:]])))
        if complete == known:
            first, read, base = read, n, end
    if ends and ends[-1] < len(text):  # it ends within a character
        ends[-1] = len(text)
    return list(zip([0, *ends], ends))
