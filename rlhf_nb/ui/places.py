"Links from a report into a page of rollouts that was saved beside it."

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote, urlencode

from rlhf_nb.ui.html import element, safe_text
from rlhf_nb.ui.packed import header_of, prompt_text
from rlhf_nb.ui.viz import Html

DATA = re.compile(
    r'<script type="application/json" id="rlhf-reader-data">(.*?)</script>', re.DOTALL
)


@dataclass(frozen=True)
class SavedPage:
    "A page of rollouts, and what is in it."

    name: str = ""  # of the file; empty: there is none
    episodes: Mapping[str, Sequence[int]] = field(default_factory=dict)  # of each update
    last: Mapping[str, tuple[str, int]] = field(default_factory=dict)  # prompt -> update, episode


NO_PAGE = SavedPage()


def saved_page(folder: Path) -> SavedPage:
    "The page that `rlhf-nb view` writes beside the report, or an empty one where there is none."
    path = folder / "rollouts.html"
    found = DATA.search(path.read_text(encoding="utf-8")) if path.is_file() else None
    if not found:
        return NO_PAGE
    own = [one for one in json.loads(found[1])["updates"] if "run" not in one]
    headers = {one["name"]: header_of(base64.b64decode(one["packed"])) for one in own}
    last: dict[str, tuple[str, int]] = {}
    for update, header in headers.items():
        for episode, prompt in zip(header["episodes"], header["asked"]):
            last[header["prompts"][prompt]["text"]] = (update, episode)
    return SavedPage(path.name, {name: one["episodes"] for name, one in headers.items()}, last)


def page_link(page: SavedPage, text: str, **place: object) -> Html:
    "A link to a place in the page: update, episode, signal. Nothing where there is no page."
    if not page.name:
        return Html("")
    where = f"#{urlencode(place)}" if place else ""
    return element("a", safe_text(text), href=quote(page.name) + where)


def episode_link(page: SavedPage, update: object, episode: int) -> Html:
    "A link to one episode, where the page has it."
    if episode not in page.episodes.get(str(update), ()):
        return Html("")
    text = f"Episode {episode} of update {update} in {page.name}"
    return page_link(page, text, update=str(update), episode=episode)


def prompt_link(page: SavedPage, prompt: str) -> Html:
    "A link to the last answer to a prompt that the page has; nothing where it was not answered."
    found = page.last.get(prompt_text(prompt))
    return episode_link(page, *found) if found else Html("")


def update_links(page: SavedPage, updates: Sequence[object]) -> str:
    "Where to read what a policy wrote at some updates, as one paragraph."
    there = [str(update) for update in updates if str(update) in page.episodes]
    if not there:
        return ""
    links = [page_link(page, f"update {one}", update=one) for one in there]
    return element("p", "What the policy wrote then, token by token: ", ", ".join(links), ".")
