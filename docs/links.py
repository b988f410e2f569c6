"""Is every link of the built site good? Files and anchors must be there; what a page loads must be
among its own files; of the addresses of others, which cannot be tried without a network, the form
is looked at.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADED = {
    ("img", "src"),
    ("script", "src"),
    ("iframe", "src"),
    ("source", "src"),
    ("video", "src"),
    ("audio", "src"),
    ("embed", "src"),
    ("object", "data"),
    ("link", "href"),
    ("image", "href"),
    ("use", "href"),
}
NOT_LOADED = {
    "canonical",
    "index",
    "search",
    "next",
    "prev",
    "author",
    "license",
}  # kinds of <link> that only tell
BUILT_IN = {"search.html", "404.html"}  # pages that no menu shows


@dataclass
class Seen(HTMLParser):
    """What one page has: anchors, links with the line they are in, things that it loads, formulas
    that nobody set."""

    ids: set[str] = field(default_factory=set)
    links: list[tuple[int, str]] = field(default_factory=list)
    loads: list[tuple[int, str]] = field(default_factory=list)
    raw: list[tuple[int, str]] = field(default_factory=list)
    inside: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        has, line = dict(attributes), self.getpos()[0]
        self.ids |= {has[name] for name in ("id", "name") if has.get(name)}
        if tag in ("pre", "code", "script", "style", "textarea"):
            self.inside.append(tag)
        for name, value in attributes:
            told = tag == "link" and (has.get("rel") or "") in NOT_LOADED
            if (tag, name.removeprefix("xlink:")) in LOADED and value and not told:
                self.loads.append((line, value))
            elif name in ("href", "xlink:href") and value is not None:
                self.links.append((line, value))
            if name == "style":
                self.loads += [
                    (line, found) for found in re.findall(r"url\(['\"]?([^'\")]+)", value or "")
                ]

    def handle_endtag(self, tag: str) -> None:
        if tag in self.inside:
            del self.inside[self.inside.index(tag) :]

    def handle_data(self, data: str) -> None:
        if "$$" in data and not self.inside:
            self.raw.append((self.getpos()[0], data.strip()[:60]))


@cache
def seen(page: Path) -> Seen:
    "A page, read once."
    found = Seen()
    found.feed(page.read_text(encoding="utf-8"))
    return found


def ill_formed(href: str) -> str:
    "What is wrong with an address outside the site; empty where nothing can be seen to be."
    parts = urlsplit(href)
    if parts.scheme == "mailto":
        return "" if re.fullmatch(r"[^@\s]+@[^@\s]+\.\w+", parts.path) else "no address of anybody"
    if parts.scheme not in ("https", "http"):
        return "an address starts with https://"
    if not re.fullmatch(r"([a-z0-9-]+\.)+[a-z]{2,}|localhost|127\.0\.0\.1", parts.hostname or ""):
        return "its host is no host"
    if (
        re.search(r"[\s<>\"\\^`{|}]", href)
        or href.endswith((".", ",", ";", ":"))
        or href.count("(") != href.count(")")
    ):
        return "it holds or ends in what is no part of an address"
    if parts.hostname == "arxiv.org" and not re.fullmatch(
        r"/(abs|pdf)/(\d{4}\.\d{4,5}|[a-z-]+/\d{7})(v\d+)?", parts.path
    ):
        return "arXiv has https://arxiv.org/abs/1234.56789"
    return ""


def amiss(site: Path, page: Path, href: str) -> str:
    "What is wrong with one link; empty where it is good."
    parts = urlsplit(href)
    if parts.scheme or parts.netloc:
        return "" if parts.scheme == "data" else ill_formed(href)
    target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
    if not target.is_relative_to(site) or not target.is_file():
        return "there is no such page or file in the site"
    if (
        parts.fragment
        and target.suffix == ".html"
        and unquote(parts.fragment) not in seen(target).ids
    ):
        return f"{target.name} has no such anchor"
    return ""


def strange(site: Path, folder: Path, href: str) -> str:
    "What is wrong with a thing that a page loads."
    parts = urlsplit(href)
    if parts.scheme == "data" or not parts.path:
        return ""
    if parts.scheme or parts.netloc:
        return "a page asks nothing of a network: bring the file along"
    target = (folder / unquote(parts.path)).resolve()
    return (
        ""
        if target.is_relative_to(site) and target.is_file()
        else "there is no such file in the site"
    )


def of_page(site: Path, page: Path) -> list[str]:
    "Complaints about one page."
    found, name = seen(page), page.relative_to(site)
    said = [
        f"{name}:{line}: link to {href}: {why}"
        for line, href in found.links
        if (why := amiss(site, page, href))
    ]
    said += [
        f"{name}:{line}: loads {href}: {why}"
        for line, href in found.loads
        if (why := strange(site, page.parent, href))
    ]
    return said + [f"{name}:{line}: a formula that was not set: {text}" for line, text in found.raw]


def of_style(site: Path, sheet: Path) -> list[str]:
    "Complaints about the fonts and pictures of a style sheet."
    urls = re.findall(
        r"(?:url\(\s*|@import\s+)['\"]?([^'\")\s;]+)", sheet.read_text(encoding="utf-8")
    )
    return [
        f"{sheet.relative_to(site)}: loads {url[:80]}: {why}"
        for url in urls
        if (why := strange(site, sheet.parent, url))
    ]


def left_out(site: Path) -> list[str]:
    "Pages to which the menu of the first page does not lead."
    front = site / "index.html"
    shown = {
        (site / unquote(urlsplit(href).path)).resolve()
        for _, href in seen(front).links
        if not urlsplit(href).scheme
    } | {front}
    return [
        f"{page.relative_to(site)}: no entry of the menu leads to this page"
        for page in pages(site)
        if page not in shown
    ]


def pages(site: Path) -> list[Path]:
    "What a reader can open; parts of MathJax are not among them."
    return [
        page
        for page in sorted(site.rglob("*.html"))
        if "_static" not in page.relative_to(site).parts and page.name not in BUILT_IN
    ]


def faults(site: Path) -> list[str]:
    "All that is wrong with the links of a built site."
    site = site.resolve()
    seen.cache_clear()
    found = [said for page in [*pages(site), site / "search.html"] for said in of_page(site, page)]
    return (
        found
        + [said for sheet in sorted(site.rglob("*.css")) for said in of_style(site, sheet)]
        + left_out(site)
    )
