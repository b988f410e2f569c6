"""What a chat template puts around an observation, so that a conversation goes on without being
written again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlhf_nb.base.encoding import Turns, join_answer, plain_ids, render

ANSWERS = "Uvwx", "Qrstu"  # stand for what the policy and the world say; no template has them
WORLDS = 'Hi"j\nkl', 'Z"a\nbc'  # as JSON it is another text


@dataclass(frozen=True)
class Frame:
    "Texts around an observation. Of a prompt without a chat template both are empty."

    before: str = ""  # from the end of an answer: its end mark, and what opens the next turn
    after: str = ""  # what closes that turn, and opens an answer
    as_json: bool = False  # it writes the observation so

    def encode(
        self,
        observation: str,
        tokenizer: PreTrainedTokenizerBase,
        stop_id: int | None = None,  # the stop token that the policy wrote; None: it wrote none
    ) -> list[int]:
        "The ids that follow an answer, up to where the policy goes on."
        said = json.dumps(observation, ensure_ascii=False) if self.as_json else observation
        text = self.before + said + self.after
        if stop_id is not None and self.before:
            mark = str(tokenizer.decode([stop_id]))  # the policy wrote it
            text = text.removeprefix(mark)
            # read behind it: some tokenizers put a blank in front of a text that begins
            (ids,) = plain_ids([mark + text], tokenizer)
            if ids[0] == stop_id:
                return ids[1:]
        return plain_ids([text], tokenizer)[0]


def observation_frame(
    prompt: Turns,
    tokenizer: PreTrainedTokenizerBase,
    role: str = "user",  # who observes: user, or tool
    **settings: Any,  # of the chat template
) -> Frame:
    """Read from the prompt with answers and observations that stand for any others. Raises
    ValueError where the template writes them otherwise in another turn, or not at all."""
    if isinstance(prompt, str):
        return Frame()
    frames = set[Frame]()
    for answers, worlds in ((ANSWERS, WORLDS), (ANSWERS[::-1], WORLDS[::-1])):
        turns: Any = list(prompt)
        if frames and turns[0]["role"] == "system" and turns[0]["content"]:
            turns[0] = {**turns[0], "content": "Defg"}  # a frame has none of it
        for answer, world in zip(answers, worlds):
            turns = [*join_answer(turns, answer), dict(role=role, content=world)]
            frames.add(_last_frame(turns, (answer, world), tokenizer, role, settings))
    if len(frames) == 1:
        return frames.pop()
    shown = " and ".join(repr((x.before, x.after)) for x in sorted(frames, key=str)[:2])
    raise ValueError(
        f"the chat_template does not put the same text around each observation of role {role!r} "
        f"({shown}), so that a conversation cannot go on from the tokens that the policy wrote: "
        "set a tokenizer.chat_template that writes every turn alike, or give text prompts."
    )


def _last_frame(
    turns: Sequence[Any],
    said: tuple[str, str],  # the last answer, and what is observed
    tokenizer: PreTrainedTokenizerBase,
    role: str,
    settings: dict[str, Any],
) -> Frame:
    "What stands around the last observation of a conversation."
    what = f"a conversation that goes on behind an observation of role {role!r}"
    text = render(turns, tokenizer, what, **{**settings, "add_generation_prompt": True})
    (answer, world), as_json = said, json.dumps(said[1])
    world = as_json if (is_json := as_json in text) else world
    places = [text.count(x) for x in (answer, world)]
    if places != [1, 1] or text.index(answer) > text.index(world):
        raise ValueError(
            f"the chat_template writes an answer {places[0]} times and an observation of role "
            f"{role!r} {places[1]} times, expected once each, in this order: give the environment "
            "another role, set another tokenizer.chat_template, or give text prompts."
        )
    before, after = text.split(answer)[1].split(world)
    return Frame(before, after, is_json)
