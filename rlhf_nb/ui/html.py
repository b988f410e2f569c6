"Markup that several views share, and files that hold the rest of it. Text is escaped here."

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import unicodedata
from collections.abc import Mapping, Sequence
from functools import cache
from html import escape, unescape
from itertools import zip_longest
from pathlib import Path
from typing import Any
from urllib.parse import quote

# ---- Scripts, style sheets and page templates ----


STATIC = Path(__file__).parent / "static"


@cache
def asset(name: str) -> str:
    "The text of a file in `static`, such as `reader.css`. Raises FileNotFoundError without one."
    path = STATIC / name
    if not path.is_file():
        names = ", ".join(sorted(file.name for file in STATIC.iterdir()))
        raise FileNotFoundError(f"there is no asset {name!r}: give one of {names}.")
    return path.read_text(encoding="utf-8")


@cache
def module(*names: str) -> str:
    "Some scripts of `static` as one, in their order: a file or a widget has nothing to import."
    joined = "\n".join(asset(name) for name in names)
    return re.sub(r'^import \{[^}]*\} from "\./[\w-]+\.js";\n', "", joined, flags=re.MULTILINE)


# ---- Markup ----


SHADE = "#80808026"  # behind header cells
VOID = ("br", "img", "meta", "wbr")  # elements without content; those of a drawing close themselves
SHAPES = ("circle", "line", "path", "polygon", "polyline", "rect")


def _inner_text(markup: str) -> str:
    "What a reader sees of a piece of markup: tags dropped, escapes undone, one line."
    return " ".join(unescape(re.sub(r"<[^>]*>", "", markup)).split())


def _plain_text(markup: str) -> str:
    "Captions, table rows and paragraphs as lines, cells aligned; other markup as its text."
    blocks = re.findall(r"<(caption|tr|p|summary)\b[^>]*>(.*?)</\1>", markup, re.S)
    parts = lambda inner: re.findall(r"<t[hd]\b[^>]*>(.*?)</t[hd]>", inner, re.S) or [inner]
    rows = [list(map(_inner_text, parts(inner))) for _, inner in blocks]
    cells = [row for row in rows if len(row) > 1]
    widths = [max(map(len, column)) for column in zip_longest(*cells, fillvalue="")]
    lines = ["  ".join(map(str.rjust, row, widths)) if len(row) > 1 else row[0] for row in rows]
    return "\n".join(lines) or _inner_text(markup)


class Html(str):
    "Markup that a notebook shows, and a terminal prints as plain text. It escapes nothing."

    def _repr_html_(self) -> str:
        return str(self)

    def __repr__(self) -> str:
        return _plain_text(self)


def visible(
    text: str,  # anything a model may write
    lines: bool = False,  # line breaks and tabs stay as they are
) -> str:  # with ↵ at line breaks, ⇥ for tabs, ⟨U+202E⟩ for what cannot be seen; not yet escaped
    "Invisible characters made visible. Spaces, and joiners that scripts and emoji need, stay."

    def show(character: str) -> str:
        if character in " \u200c\u200d\u3000" or (lines and character in "\n\t"):
            return character
        if character in "\n\t":
            return "↵\n" if character == "\n" else "⇥"
        hidden = unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp", "Zs")
        return f"⟨U+{ord(character):04X}⟩" if hidden else character

    return "".join(map(show, str(text)))


def safe_text(text: object) -> str:
    "Text to place between tags: escaped, invisible characters shown, its direction kept to itself."
    return element("bdi", escape(visible(str(text))))


def safe_prose(text: object) -> str:
    "The same for a text of several lines, in an element that breaks lines itself (`pre-wrap`)."
    return element("bdi", escape(visible(str(text), lines=True)))


def element(tag: str, *content: str, **attributes: object) -> Html:
    """An element of HTML or SVG around some markup. Attributes are escaped, fractions have six
    digits; None leaves one out; `class_` is class, `aria_label` aria-label."""
    text = lambda value: escape(f"{value:g}" if isinstance(value, float) else str(value))
    names = {key.rstrip("_").replace("_", "-"): x for key, x in attributes.items()}
    written = "".join(f' {name}="{text(x)}"' for name, x in names.items() if x is not None)
    if tag in VOID or tag in SHAPES:
        return Html(f"<{tag}{written}{'/' if tag in SHAPES else ''}>")
    return Html(f"<{tag}{written}>{''.join(content)}</{tag}>")


@cache
def inline(rule: str, **values: str) -> str:
    "A rule of `inline.css` as the text of a `style` attribute; each value replaces its `var(--…)`."
    (body,) = re.findall(rf"\.{rule} \{{(.*?)\}}", asset("inline.css"))
    text = re.sub(r"([:;])\s+", r"\1", body.strip())
    for name, value in values.items():
        text = text.replace(f"var(--{name})", value)
    return text


def themed_markup(*content: str, sheets: Sequence[str] = ()) -> Html:
    "Markup in the colours of the page around it, light or dark. `sheets` are files of `static`."
    style = element("style", *map(asset, ("theme.css", *sheets)))
    return element("div", style, *content, class_="rlhf")


def page_head(title: str, style: str, script: str = "") -> str:
    """The head of a page that fetches nothing. It names the hash of its script, so that a browser
    runs no other; beside one, elements may have a style of their own."""
    digest = lambda text: base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    styles = "'unsafe-inline'" if script else f"'sha256-{digest(style)}'"
    policy = f"default-src 'none'; img-src data:; style-src {styles}"
    policy += f"; script-src 'sha256-{digest(script)}'" * bool(script)
    return asset("head.html").format(policy=policy, title=escape(title), style=style)


def themed_page(title: str, *content: str, sheets: Sequence[str] = ()) -> str:
    "A whole page of some markup, which runs no script, and no style sheet but its own."
    head = page_head(visible(title), "".join(map(asset, ("theme.css", *sheets))))
    return head + element("body", element("main", *content), class_="rlhf") + "</html>"


def tinted_text(tokens: Sequence[str], values: Sequence[float], most: float, name: str) -> Html:
    """Tokens as running text: orange above zero, blue below (`tints.css`), in full colour at `most`
    if that is not 0; the name of the numbers and each token's own on hover."""

    def word(token: str, value: float) -> str:
        finite = math.isfinite(value) and most > 0
        step = round(8 * min(1.0, abs(value) / most)) if finite else 0
        kind = f"{'up' if value > 0 else 'down'} tint-{step}" if step else None
        return element("span", escape(visible(token)), class_=kind, title=f"{name} {value!r}")

    return element("bdi", *map(word, tokens, values), class_="tinted")


def add_blanks(tokens: Sequence[str], text: str) -> list[str]:
    "Each token with the blanks before it in the text: some tokenizers keep no blank in a token."
    words, at = [], 0
    for token in tokens:
        start = text.find(token, at)
        gap = text[at : max(start, at)]
        words.append(gap[len(gap.rstrip()) :] + token)
        at = at if start < 0 else start + len(token)
    return words


def sheet(*content: str) -> Html:
    "What `sheet.css` lays out: paragraphs, plain tables, folds."
    return element("div", *content, class_="sheet")


def data_table(
    caption: str,
    heads: Sequence[str],
    rows: Sequence[Sequence[object]],
    kind: str | None = None,  # CSS class of a box that scrolls; None: there is no box
) -> Html:
    "A table whose first column names its rows; text is escaped, Html is not, None is a dash."

    def content(cell: object) -> str:
        return cell if isinstance(cell, Html) else safe_text("–" if cell is None else cell)

    def cells(row: Sequence[object], tag: str, scope: str | None = None) -> list[Html]:
        return [element(tag, content(cell), scope=scope) for cell in row]

    above = element("caption", escape(caption)) if caption else ""
    top = element("thead", element("tr", *cells(heads, "th", "col")))
    lines = [element("tr", *cells(row[:1], "th", "row"), *cells(row[1:], "td")) for row in rows]
    table = element("table", above, top, element("tbody", *lines))
    around = dict(tabindex=0, role="region", aria_label=caption or heads[0])
    return table if kind is None else element("div", table, class_=f"wide {kind}", **around)


def folded(title: str, *content: str, **attributes: object) -> Html:
    "Some markup that opens by a click on its title."
    return element("details", element("summary", title), *content, **attributes)


def missing_note(text: str) -> str:
    "One line in the place of something that is not there yet."
    return element("p", escape(text), class_="missing")


def error_note(error: BaseException) -> str:
    "An exception, announced to screen readers as well."
    return element("p", element("b", type(error).__name__), ": ", safe_text(error), role="alert")


def breakable(markup: str) -> str:
    "The same markup, with places where a very long word may break."

    def break_word(word: re.Match[str]) -> str:
        return element("wbr").join(re.findall(r"(?:&[#\w]+;|[^&]){1,24}", word[0]))

    return re.sub(r">[^<]{60,}", lambda text: re.sub(r"[^\s>]{60,}", break_word, text[0]), markup)


def fit_column(markup: str) -> str:
    "Markup that is no wider than its column, in the colours of the page around it."
    return element("div", breakable(markup), style=inline("contained"))


def drawing(svg: str, alt: str) -> Html:
    "An SVG as an image within the page, coded no more than an attribute in double quotes needs."
    data = quote(svg, safe=" =:/;,()!$*@?&+'<>")
    return Html(f'<img alt="{escape(alt)}" style="max-width:100%" src="data:image/svg+xml,{data}">')


def number_text(value: float | None, digits: int = 2) -> str:
    "A plain number, or a dash; what would round to zero and is not zero is ≈0."
    if value is None or not math.isfinite(value):
        return "–"
    if 0 < abs(value) < 0.5 * 10**-digits:
        return "≈0"
    return f"{value:,.{digits}f}".replace("-", "−")


def percent(value: float | None, digits: int = 1) -> str:
    "A share as per cent, or a dash."
    return "–" if value is None or not math.isfinite(value) else f"{100 * value:.{digits}f} %"


def points(value: float, digits: int = 1) -> str:
    "A difference of two shares, in points of per cent, with its sign."
    return f"{100 * value:+.{digits}f}".replace("-", "−")


def exact(text: str, value: float | None) -> Html:
    "A rounded number that shows the exact one on hover."
    return element("span", escape(text), title=value)


def duration(seconds: float) -> str:
    "Seconds as people write them: 5.2 s, 2 min 0 s."
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"


def section_page(title: str, lead: str, sections: Mapping[str, str]) -> str:
    "A page without a script: a line, the first section, the others below headings and links."
    (first, opening), *others = sections.items()
    links, body = "", ""
    for i, (name, markup) in enumerate(others):
        head = element("h2", escape(name), id=f"s{i}")
        links += element("li", element("a", escape(name), href=f"#s{i}"))
        body += element("section", head, markup, aria_labelledby=f"s{i}")
    above = element("h1", safe_text(title)) + element("p", safe_text(lead), class_="lead")
    above += element("section", opening, aria_label=first)
    above += element("nav", element("ul", links), aria_label="Sections")
    return themed_page(title, above, body, sheets=["report.css"])


def script_page(
    template: str, title: str, script: str, style: str, data: Mapping[str, Any], **parts: str
) -> str:
    "A whole page with one script and its data, which cannot close their element."
    text = json.dumps(data, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")
    body = asset(template).format(title=escape(title), script=script, data=text, **parts)
    return page_head(title, style, script) + body
