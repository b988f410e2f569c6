"""Markup that several views share. Text is escaped here, so that no view has to remember it."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from rlhf_nb.ui.assets import asset
from rlhf_nb.ui.viz import SHADE, Html, hover_title, visible

CELL = "background:var(--paper,transparent);color:var(--ink,inherit)"  # the theme's colours, or
HEAD = f"background:var(--shade,{SHADE});color:var(--ink,inherit)"  # those of the page


def safe_text(text: object) -> str:
    """Text as it may be placed between tags: invisible characters are shown, markup is escaped, and
    a right-to-left text cannot reorder its neighbours."""
    return f"<bdi>{escape(visible(str(text)))}</bdi>"


def safe_prose(text: object) -> str:
    "The same for a text of several lines, in an element that breaks lines itself (`pre-wrap`)."
    return safe_text(text).replace("↵\n", "\n")


def element(tag: str, *content: str, **attributes: object) -> Html:
    """An element around some markup. Attributes are escaped; None leaves one out; `class_` is
    class, `aria_label` aria-label."""
    written = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{escape(str(value))}"'
        for name, value in attributes.items()
        if value is not None
    )
    void = tag in ("br", "img", "meta")
    return Html(f"<{tag}{written}>" + ("" if void else f"{''.join(content)}</{tag}>"))


def themed(*content: str, sheets: Sequence[str] = ()) -> Html:
    "Markup in the colours of the page around it, light or dark. `sheets` are files of `static`."
    style = element("style", *map(asset, ("theme.css", *sheets)))
    return element("div", style, *content, class_="rlhf")


def themed_page(title: str, *content: str, sheets: Sequence[str] = ()) -> str:
    "A whole page of some markup, which runs no script, and no style sheet but its own."
    style = "".join(map(asset, ("theme.css", *sheets)))
    return asset("page.html").format(
        title=escape(visible(title)),
        digest=base64.b64encode(hashlib.sha256(style.encode()).digest()).decode(),
        style=style,
        body="".join(content),
    )


def tinted_text(
    tokens: Sequence[str],
    values: Sequence[float],  # one a token
    most: float,  # magnitude of full colour; 0: no colour
    name: str,  # of the numbers
) -> Html:
    """Tokens as running text: orange above zero, blue below, in eight steps (`tints.css`); the
    number on hover."""

    def word(token: str, value: float) -> str:
        finite = math.isfinite(value) and most > 0
        step = round(8 * min(1.0, abs(value) / most)) if finite else 0
        side = f"{'up' if value > 0 else 'down'} tint-{step}" if step else None
        return element("span", escape(visible(token)), class_=side, title=f"{name} {value!r}")

    return element("bdi", *map(word, tokens, values), class_="tinted")


def spaced(tokens: Sequence[str], text: str) -> list[str]:
    "Each token with the blanks before it in the text: some tokenizers keep no blank in a token."
    words, at = [], 0
    for token in tokens:
        found = text.find(token, at)
        gap = text[at : max(found, at)]
        words.append(gap[len(gap.rstrip()) :] + token)
        at = at if found < 0 else found + len(token)
    return words


def sheet(*content: str) -> Html:
    "What `sheet.css` lays out: paragraphs, plain tables, folds."
    return element("div", *content, class_="sheet")


def plain_table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> Html:
    "A table of texts whose first column names its rows; its colours come from a style sheet."
    cells = lambda texts, tag, scope: [element(tag, safe_text(x), scope=scope) for x in texts]
    body = [
        element("tr", *cells(row[:1], "th", "row"), *cells(row[1:], "td", None)) for row in rows
    ]
    top = element("thead", element("tr", *cells(heads, "th", "col")))
    return element("table", top, element("tbody", *body))


def data_table(
    caption: str, heads: Sequence[str], rows: Sequence[Sequence[object]], kind: str = ""
) -> str:
    """A table whose first column names its rows. Text is escaped; Html goes in as it is; None is a
    dash. `kind` is one more CSS class."""

    def content(cell: object) -> str:
        return cell if isinstance(cell, Html) else safe_text("–" if cell is None else cell)

    def head(cell: object, scope: str) -> str:
        # A dark theme colours backgrounds and text separately: both are set, or neither is.
        return f'<th scope="{scope}" style="{HEAD}">{content(cell)}</th>'

    def line(row: Sequence[object]) -> str:
        cells = "".join(f'<td style="{CELL}">{content(cell)}</td>' for cell in row[1:])
        return f"<tr>{head(row[0], 'row')}{cells}</tr>"

    above = f"<caption>{escape(caption)}</caption>" if caption else ""
    top = "".join(head(cell, "col") for cell in heads)
    body = "".join(line(row) for row in rows)
    return (
        f'<div class="wide {kind}" tabindex="0" role="region" '
        f'aria-label="{escape(caption or heads[0])}"><table style="color:inherit">{above}'
        f"<thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def missing_note(text: str) -> str:
    "One line in the place of something that is not there yet."
    return f'<p class="missing">{escape(text)}</p>'


def error_note(error: BaseException) -> str:
    "An exception, announced to screen readers as well."
    return f'<p role="alert"><b>{type(error).__name__}</b>: {safe_text(error)}</p>'


def breakable(markup: str) -> str:
    "The same markup, with places where a very long word may break."

    def broken(word: re.Match[str]) -> str:
        return "<wbr>".join(re.findall(r"(?:&[#\w]+;|[^&]){1,24}", word[0]))

    return re.sub(r">[^<]{60,}", lambda text: re.sub(r"[^\s>]{60,}", broken, text[0]), markup)


def contained(markup: str) -> str:
    "Markup that is no wider than its column, in the colours of the page around it."
    style = "padding:2px 8px;line-height:1.5;contain:inline-size"
    return f'<div style="{style}">{breakable(markup)}</div>'


def number_text(value: float | None, digits: int = 2) -> str:
    "A plain number, or a dash; what would round to zero and is not zero is ≈0."
    if value is None or not math.isfinite(value):
        return "–"
    if 0 < abs(value) < 0.5 * 10**-digits:
        return "≈0"
    return f"{value:,.{digits}f}".replace("-", "−")


def percent(value: float | None) -> str:
    "A share as per cent, or a dash."
    return "–" if value is None or not math.isfinite(value) else f"{100 * value:.1f} %"


def points(value: float, digits: int = 1) -> str:
    "A difference of two shares, in points of per cent, with its sign."
    return f"{100 * value:+.{digits}f}".replace("-", "−")


def exact(text: str, value: float | None) -> Html:
    "A rounded number that shows the exact one on hover."
    return Html(f"<span{hover_title(value)}>{escape(text)}</span>")


def duration(seconds: float) -> str:
    "Seconds as people write them: 5.2 s, 2 min 0 s."
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"


def section_page(
    title: str, lead: str, sections: Mapping[str, str], sheets: Sequence[str] = ()
) -> str:
    """A whole page without a script: heading, the first section, then the others with links to
    each. `sheets` are files of `static`, after the report's own."""
    (first, opening), *others = sections.items()
    links = "".join(
        f'<li><a href="#s{i}">{escape(name)}</a></li>' for i, (name, _) in enumerate(others)
    )
    body = "".join(
        f'<section aria-labelledby="s{i}"><h2 id="s{i}">{escape(name)}</h2>{markup}</section>'
        for i, (name, markup) in enumerate(others)
    )
    return asset("report.html").format(
        title=escape(visible(title)),
        style="".join(map(asset, ("theme.css", "report.css", *sheets))),
        heading=safe_text(title),
        lead=safe_text(lead),
        first=escape(first),
        opening=opening,
        links=links,
        body=body,
    )


def script_page(
    template: str, script: str, style: str, data: Mapping[str, Any], **parts: str
) -> str:
    """A whole page with one script and the data that it reads. The page names the script's hash, so
    that a browser runs no other; the data cannot close their element, whatever is in them."""
    return asset(template).format(
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        script=script,
        data=json.dumps(data, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c"),
        style=style,
        **parts,
    )
