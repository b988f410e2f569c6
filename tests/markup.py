"One reader of HTML for all tests of what is drawn."

from __future__ import annotations

import re
from html.parser import HTMLParser

VOID = {"br", "hr", "img", "input", "link", "meta", "wbr"}


class Reader(HTMLParser):
    """Tags in order with their attributes, text by tag, scripts as raw text, tables as rows of
    cells; fails on tags that do not nest."""

    def __init__(self, markup: str):
        super().__init__(convert_charrefs=True)
        self.seen: list[tuple[str, dict]] = []
        self.open: list[str] = []
        self.cells: list[list[list[list]]] = []  # of each table its rows of tag, attributes, text
        self.captions: list[str] = []
        self.heads: list[list] = []  # level and text
        self.scripts: list[list] = []  # attributes and text
        self.style, self.words = "", []
        self.feed(markup)
        self.close()
        assert not self.open, f"left open: {self.open}"

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.seen.append((tag, attributes))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "table":
            self.cells.append([])
        elif tag == "tr":
            self.cells[-1].append([])
        elif tag in ("td", "th"):
            self.cells[-1][-1].append([tag, attributes, ""])
        elif tag == "caption":
            self.captions.append("")
        elif tag == "script":
            self.scripts.append([attributes, ""])
        elif re.fullmatch(r"h\d", tag):
            self.heads.append([int(tag[1]), ""])

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, text):
        if "style" in self.open:
            self.style += text
            return
        if "script" in self.open:
            self.scripts[-1][1] += text
            return
        self.words.append(text)
        if "caption" in self.open:
            self.captions[-1] += text
        if {"td", "th"} & {*self.open}:
            self.cells[-1][-1][-1][2] += text
        if any(re.fullmatch(r"h\d", tag) for tag in self.open):
            self.heads[-1][1] += text

    def all(self, tag: str) -> list[dict]:
        return [attributes for name, attributes in self.seen if name == tag]

    @property
    def tables(self) -> list[list[list[str]]]:
        return [texts(table) for table in self.cells]

    @property
    def text(self) -> str:
        return " ".join("".join(self.words).split())


def texts(table: list[list[list]]) -> list[list[str]]:
    return [[text for _, _, text in row] for row in table]
