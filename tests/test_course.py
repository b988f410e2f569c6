"""The course keeps its promises: a path of 210 minutes, pages of half an hour that open with
something to look at, exercises before their solutions, links that lead somewhere.

As in test_house, each rule is a function from a page to a list of complaints.
"""

from __future__ import annotations
import __future__

import ast
import contextlib
import inspect
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache, cached_property
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from markdown_it import MarkdownIt

from rlhf_nb.checks import EXERCISES
from rlhf_nb.exercises import course
from rlhf_nb.ui.loop import STEPS, loop_picture

ROOT = Path(__file__).resolve().parent.parent
COURSE = ROOT / "nbs" / "course"
PATHS = sorted(COURSE.glob("[0-9][0-9]_*.ipynb"))
NOTEBOOKS = sorted(p for p in (ROOT / "nbs").rglob("*.ipynb") if "checkpoints" not in str(p))
CHECKERS = {exercise.name: exercise for exercise in EXERCISES}
HALF_AN_HOUR, PATH_MINUTES = 30, 210  # the second with what exercises and thinking take
SECONDS = 67  # of the slowest page, on one thread


# ---- Reading a page ----


class Cell:
    "One cell, and what the rules need to know of it."

    def __init__(self, number: int, cell: dict) -> None:
        self.number, self.kind, self.source = number, cell["cell_type"], "".join(cell["source"])
        self.folded = cell["metadata"].get("jupyter", {}).get("source_hidden", False)
        self.outputs = [o.get("data", {}) for o in cell.get("outputs", [])]

    @cached_property
    def exports(self) -> bool:
        return bool(re.search(r"^#\|\s*exports?\b", self.source, re.M))

    @cached_property
    def body(self) -> list[ast.stmt]:
        return parsed(self.source) if self.kind == "code" else []

    @cached_property
    def unfolded(self) -> str:
        "A text without what is folded."
        return re.sub(r"<details>.*?</details>", "", self.source, flags=re.S)

    @cached_property
    def shown_code(self) -> list[list[ast.stmt]]:
        "Programs that a reader sees: an unfolded cell of code, or unfolded code in a text."
        if self.kind == "code":
            return [] if self.folded else [self.body]
        return [parsed(code) for code in fenced(self.unfolded)]

    def __str__(self) -> str:
        return f"cell {self.number} ({self.source.strip()[:50]!r})"


def parsed(code: str) -> list[ast.stmt]:
    "Its statements; none where it is no Python."
    try:
        return ast.parse(re.sub(r"^(\s*)[!%].*$", r"\1pass", code, flags=re.M)).body
    except SyntaxError:
        return []


def fenced(text: str) -> list[str]:
    return re.findall(r"^```(?:python)?\n(.*?)^```", text, re.S | re.M)


class Page:
    "A notebook of the course."

    def __init__(self, name: str, nb: dict) -> None:
        self.name, self.nb = name, nb
        self.cells = [Cell(i, cell) for i, cell in enumerate(nb["cells"])]

    @property
    def code(self) -> list[Cell]:
        return [cell for cell in self.cells if cell.kind == "code"]

    @property
    def source(self) -> str:
        return "\n".join(cell.source for cell in self.cells)

    @property
    def texts(self) -> list[Cell]:
        return [cell for cell in self.cells if cell.kind == "markdown"]


@cache
def page(path: Path) -> Page:
    return Page(path.stem, json.loads(path.read_text(encoding="utf-8")))


# ---- Time ----


def formatted(nb: dict) -> dict:
    "A notebook as ruff formats it at 100 columns."
    ruff = [sys.executable, "-m", "ruff", "format", "--isolated", "--line-length", "100"]
    given = dict(capture_output=True, text=True, check=True, input=json.dumps(nb))
    done = subprocess.run([*ruff, "--stdin-filename", "page.ipynb", "-"], **given)
    return json.loads(done.stdout)


def takes_half_an_hour(page: Page) -> list[str]:
    minutes = course.reading_minutes(formatted(page.nb), (200, 20))  # of a quick reader
    return [f"{minutes:.1f} minutes to read: {HALF_AN_HOUR} at most"] * (minutes > HALF_AN_HOUR)


# ---- What is in the way ----


def defined(node: ast.stmt) -> str:
    "The name that a statement gives to something, if any."
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return node.name
    target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
    return target.id if isinstance(target, ast.Name) else ""


def imports_are_folded(page: Page) -> list[str]:
    "Cells of imports alone, and the one that names the module."
    kinds = (ast.Import, ast.ImportFrom)
    return [
        f"{cell} is not folded"
        for cell in page.code
        if not cell.folded and not re.search(r"^#\|\s*hide\b", cell.source, re.M)
        if all(isinstance(s, kinds) for s in cell.body) and "#| export" not in cell.source
        if cell.source.strip()
    ]


# ---- What one sees ----


def is_loop(data: dict) -> bool:
    return 'aria-label="The RLHF-PPO loop' in "".join(data.get("image/svg+xml", ""))


def is_view(data: dict) -> bool:
    "A picture, or HTML that is neither a plain table of numbers nor a checker's verdict."
    html = "".join(data.get("text/html", ""))
    marks = ('class="dataframe"', "not yet</b>", "your turn</b>", "right</b>")
    plain = any(mark in html for mark in marks)
    picture = any(kind.startswith("image/") for kind in data) and not is_loop(data)
    return picture or (bool(html) and not plain) or "<svg" in html or "<img" in html


def keeps_two_views(page: Page) -> list[str]:
    count = sum(is_view(data) for cell in page.code for data in cell.outputs)
    return [f"{count} pictures or views are kept: two at least"] * (count < 2)


def opens_with_a_view(page: Page) -> list[str]:
    "Before the first heading below the title there is something to look at."
    for cell in page.cells[1:]:
        if any(is_view(data) or is_loop(data) for data in cell.outputs):
            return []
        if cell.kind == "markdown" and re.search(r"^##\s", cell.source, re.M):
            break
    return ["nothing to look at comes before the first heading"]


def shows_the_loop(page: Page) -> list[str]:
    "The strip with the page's own step marked; 00 and 01 are about the whole."
    loops = ["".join(d["image/svg+xml"]) for c in page.code for d in c.outputs if is_loop(d)]
    if not loops:
        return ["no picture of the loop is kept"]
    title = next((step.title for step in STEPS if step.page == page.name), None)
    number = f"This page: {title} ({page.name[:2]})."
    return [f"the loop does not mark {title}"] if title and number not in loops[0] else []


# ---- Exercises ----


def exercises(page: Page) -> Iterator[tuple[int, str, str]]:
    "Each exercise: the index of its cell, the function it asks for, and its text up to the next."
    for cell in page.texts:
        parts = re.split(r"(?=^\*\*Exercise\*\*)", cell.source, flags=re.M)[1:]
        for i, text in enumerate(parts):
            if i == len(parts) - 1:  # hints may be in the cells of text that follow
                for other in page.cells[cell.number + 1 : cell.number + 4]:
                    if "**Exercise**" in other.source or re.match(r"##+ ", other.source):
                        break
                    text += "\n" + other.source * (other.kind == "markdown")
            name = re.search(r"`(my_\w+)\(", text)
            yield cell.number, name[1] if name else "", text


def exercises_are_announced(page: Page) -> list[str]:
    "Level, minutes, a reason, two hints; a checker for a function, a solution for the rest."
    problems = []
    for number, name, text in exercises(page):
        if not course.EXERCISE.match(text):
            problems.append(f"cell {number}: write **Exercise** · level · N minutes · reason")
        hints = len(re.findall(r"<details>\s*<summary>Hint", text))
        if hints != 2:
            problems.append(f"cell {number}: {hints} hints, and two are wanted")
        after = [c.source for c in page.cells[number + 1 : number + 5] if c.kind == "code"]
        if name and not any(re.search(rf"check_\w+\({name}\)", code) for code in after):
            problems.append(f"cell {number}: no cell below calls a checker on {name}")
        statement = text.partition("<details>")[0]
        if not name and "<summary>Solution" not in text and "below" not in statement:
            problems.append(
                f"cell {number}: no function is wanted, so fold a solution, or say it is below"
            )
    return problems


def asks_after_all(page: Page) -> list[str]:
    return [] if any(exercises(page)) else ["no exercise"]


# ---- Solutions ----


def functions(nodes: list[ast.stmt]) -> list[ast.FunctionDef]:
    return [n for node in nodes for n in ast.walk(node) if isinstance(n, ast.FunctionDef)]


def defined_functions(page: Page) -> dict[str, Callable]:
    "The functions that a page's code defines, and not those it imports; nothing else of it is run."
    scope: dict = dict(__name__="page")
    kinds = (ast.Import, ast.ImportFrom, ast.FunctionDef)
    later = __future__.annotations.compiler_flag
    for cell in page.code:
        for node in cell.body:
            if isinstance(node, (*kinds, ast.Assign) if cell.exports else kinds):
                with contextlib.suppress(Exception):  # a default that the page computes
                    exec(compile(ast.Module([node], []), "<page>", "exec", later), scope)
    found = {name: value for name, value in scope.items() if inspect.isfunction(value)}
    return {name: f for name, f in found.items() if f.__code__.co_filename == "<page>"}


def passing(page: Page, name: str) -> set[str]:
    "The functions of a page that the checker of an exercise accepts."
    checker = CHECKERS.get(name)
    if checker is None:
        return set()
    count = checker.right.__code__.co_argcount
    return {
        other
        for other, function in defined_functions(page).items()
        if function.__code__.co_argcount >= count and checker(function, seed=0)
    }


def solutions_come_after(page: Page) -> list[str]:
    """No function that the checker of an exercise accepts is shown above it, folded code excepted,
    nor within four cells below it, unless that is the export."""
    problems = []
    for number, name, _ in exercises(page):
        above = page.cells[: number + 1]
        near = [cell for cell in page.cells[number + 1 : number + 5] if not cell.exports]
        accepted = passing(page, name)
        problems += [
            f"{cell} defines {f.name}, which solves {name} (cell {number})"
            for cell in [*above, *near]
            for code in cell.shown_code
            for f in functions(code)
            if f.name in accepted
        ]
    return sorted(set(problems))


def answers_are_folded(page: Page) -> list[str]:
    "What the page exports as the answer of an exercise is folded, wherever it is."
    wanted = {name for _, name, _ in exercises(page) if name}
    right = wanted | {f"my_{other}" for name in wanted for other in passing(page, name)}
    return [
        f"{cell} answers an exercise, and is not folded"
        for cell in page.code
        if cell.exports and not cell.folded
        if any(f"my_{f.name}" in right for f in functions(cell.body))
    ]


# ---- Questions ----


def questions(page: Page) -> list[tuple[str, str]]:
    "Question and answer of each folded block under a heading Quiz, or from **Quiz 1.** on."
    text = "\n\n".join(cell.source for cell in page.texts)
    part = re.search(
        r"^(?:##+ (?:Quiz|Questions)\s*$|(?=\*\*Quiz 1\.\*\*))(.*?)(?=^##+ |\Z)", text, re.M | re.S
    )
    if not part:
        return []
    pieces = re.split(r"<details>(.*?)</details>", part[1], flags=re.S)
    found = []
    for before, details in zip(pieces[::2], pieces[1::2]):
        summary, _, answer = details.partition("</summary>")
        found.append((before + summary, answer))
    return found


OPTION = re.compile(r"\(([a-d])\)|(?:^|· )([A-D])\. ", re.M)  # (a) or A.


def asks_up_to_three_questions(page: Page) -> list[str]:
    "And each answer speaks of every option."
    found = questions(page)
    problems = [f"{len(found)} quiz questions: one to three"] * (len(found) not in (1, 2, 3))
    for number, (question, answer) in enumerate(found, 1):
        options = {x or y for x, y in OPTION.findall(question)}
        unexplained = [
            x
            for x in sorted(options)
            if not re.search(rf"\({x}\)|\*\*{x}\b" if x.islower() else rf"\b{x}\b", answer)
        ]
        if len(options) < 2:
            problems.append(f"question {number} has no options (a), (b) ...")
        if unexplained:
            problems.append(f"question {number} does not explain {', '.join(unexplained)}")
    return problems


RULES: list[Callable[[Page], list[str]]] = [
    takes_half_an_hour,
    imports_are_folded,
    keeps_two_views,
    opens_with_a_view,
    shows_the_loop,
    exercises_are_announced,
    asks_after_all,
    solutions_come_after,
    answers_are_folded,
    asks_up_to_three_questions,
]


def breaking(rule: Callable[[Page], list[str]], paths: list[Path]) -> str:
    "A line for each page that breaks a rule."
    assert paths
    found = {path.name: problems for path in paths if (problems := rule(page(path)))}
    return "".join(f"\n{name}: {'; '.join(problems)}" for name, problems in found.items())


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_pages_of_the_course(rule):
    assert not (problems := breaking(rule, PATHS)), problems


# catches: a solution above an exercise of a lab or of the reference
def test_no_other_page_shows_a_solution_early():
    others = [path for path in NOTEBOOKS if path not in PATHS]
    assert not (problems := breaking(solutions_come_after, others)), problems


# ---- The course as a whole ----


def path_minutes(pages: list[Page]) -> dict[str, float]:
    "What is above More: to read, to think, and what its exercises announce."
    above = {page.name: course.at_more(formatted(page.nb))[0] for page in pages}
    counts = course.reading_minutes, course.thinking_minutes, course.exercise_minutes
    return {name: sum(count(nb) for count in counts) for name, nb in above.items()}


def test_the_path_takes_210_minutes():
    minutes = path_minutes(path())
    assert len(minutes) == 12 and sum(minutes.values()) <= PATH_MINUTES, minutes
    assert len(course.SECONDS) == 12 and 0 < min(course.SECONDS) <= max(course.SECONDS) <= SECONDS
    assert {step.page for step in STEPS} < {path.stem for path in PATHS}


# catches: a page that changed after the table was made
def test_the_index_shows_the_minutes_of_the_pages():
    cells = page(COURSE / "course.ipynb").code
    tables = ["".join(d["text/markdown"]) for c in cells for d in c.outputs if "text/markdown" in d]
    wanted = [course.path_table(COURSE), course.beside_table(COURSE)]
    assert tables == wanted, "run nbs/course/course.ipynb again, and keep its tables"


# catches: a page that calls what only a page of the reference builds, without a link to it
def test_what_is_built_beside_the_path_is_linked():
    from rlhf_nb._modidx import d

    home = {name: at[0].split(".html")[0] for x in d["syms"].values() for name, at in x.items()}
    index = (COURSE / "course.ipynb").read_text()
    imports = re.compile(r"^from (rlhf_nb\.\w+) import (?:\(([^)]*)\)|(.*))$", re.M)
    missing = []
    for path in PATHS:
        cells = page(path).code
        text = path.read_text() + index
        for module, many, one in imports.findall("\n".join(cell.source for cell in cells)):
            for name in re.findall(r"\w+", many or one):
                folder, _, where = home.get(f"{module}.{name}", "").partition("/")
                if folder == "reference" and not re.search(rf"/\d\d_{where}\.ipynb", text):
                    missing.append(f"{path.stem}: {name} of {where}")
    assert home and not missing


def path() -> list[Page]:
    "The pages of the path, in the order of reading."
    by_number = {path.stem[:2]: path for path in PATHS}
    return [page(by_number[number]) for numbers in course.PATH.values() for number in numbers]


def made(pages: list[Page]) -> dict[str, set[str]]:
    """The pages that export each name, such as `masks.whiten`; with ` More` behind the page's name
    if the cell is below that heading."""
    homes: dict[str, set[str]] = {}
    for page in pages:
        begun = "".join(re.findall(r"^#\| default_exp (\w+)", page.source, re.M)[:1])
        path_ends = len(course.at_more(page.nb)[0]["cells"])
        for cell in page.code:
            if not (export := re.search(r"^#\|\s*exports?\b *(\w*)", cell.source, re.M)):
                continue
            home = page.name + " More" * (cell.number >= path_ends)
            for node in cell.body:
                targets = node.targets if isinstance(node, ast.Assign) else [node]
                found = [n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)]
                for name in found if isinstance(node, ast.Assign) else [defined(node)]:
                    homes.setdefault(f"{export[1] or begun}.{name}", set()).add(home)
    return homes


def unbuilt(path: list[Page], homes: dict[str, set[str]]) -> list[str]:
    "Names in a page's path part that no path part so far exports, and whose page it does not link."
    problems, earlier = [], set()
    for page in path:
        earlier.add(page.name)
        above = Page(page.name, course.at_more(page.nb)[0])
        text = "\n".join(cell.source for cell in above.texts)
        nodes = [n for cell in above.code for s in cell.body for n in ast.walk(s)]
        used = {n.id for n in nodes if isinstance(n, ast.Name)}
        for node in nodes:
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith(
                "rlhf_nb"
            ):
                continue
            module = node.module.removeprefix("rlhf_nb").removeprefix(".")
            for alias in node.names:
                where = homes.get(f"{module}.{alias.name}", set())
                if (alias.asname or alias.name) not in used or not where or where & earlier:
                    continue
                if not any(f"{home.removesuffix(' More')}.ipynb" in text for home in where):
                    problems.append(f"{page.name}: {alias.name} of {', '.join(sorted(where))}")
    return problems


# catches: a path part that calls what only More, or a page off the path, builds, without a link
def test_the_path_builds_what_it_uses():
    homes = made([page(path) for path in NOTEBOOKS])
    assert "02_masks" in "".join(homes["masks.response_mask"])
    assert not (problems := unbuilt(path(), homes)), "\n".join(problems)


# catches: a kept picture with the colours or the steps of an older drawing
def test_the_loop_on_a_page_is_the_one_of_today():
    assert not (problems := breaking(loop_of_today, PATHS)), problems


def loop_of_today(page: Page) -> list[str]:
    kept = [
        (call[1], "".join(d["image/svg+xml"]))
        for cell in page.code
        if (call := re.search(r"^loop_picture\((?:\"(\w+)\")?\)$", cell.source, re.M))
        for d in cell.outputs
        if is_loop(d)
    ]
    if not kept:
        return ["no cell ends in loop_picture(...)"]
    return [
        "run the cell with loop_picture again, and keep what it draws"
        for step, picture in kept
        if picture.strip() != str(loop_picture(step)).strip()
    ]


def code(source: str, *outputs: dict, folded: bool = False) -> dict:
    return dict(
        cell_type="code",
        source=source,
        metadata=dict(jupyter=dict(source_hidden=True)) if folded else {},
        outputs=[dict(output_type="display_data", data=data, metadata={}) for data in outputs],
        execution_count=None,
    )


def prose(source: str) -> dict:
    return dict(cell_type="markdown", source=source, metadata={})


def test_minutes_are_counted_as_announced():
    text = "**Exercise** · easy · 5 minutes · it matters. Write `my_x`.\n\n"
    text += "**Exercise** · hard · 15 minutes · it matters more.\n\n" + "word " * (180 - 17)
    cells = [prose(text), code("#| export\n\nx = 1\n" * 10)]
    nb = dict(cells=cells)
    assert course.reading_minutes(nb) == pytest.approx(len(text.split()) / 180 + 10 / 15)
    assert course.exercise_minutes(nb) == 20


# catches: a table, a picture, a formula or a question that costs no time, or a loop strip that does
def test_looking_and_thinking_are_counted():
    cell = code("x", {"text/html": "<table>" + "<td>1</td>" * 40 + "</table>"}, {"image/png": ""})
    loop = {"image/svg+xml": ["<svg aria-label=", '"The RLHF-PPO loop: prompts"></svg>']}
    other = code("y", loop, {"image/svg+xml": "<svg></svg>"})
    text = prose("*Predict.* What is $x$?\n\n$$x = 1$$\n\n$$y = 2$$")
    minutes = course.thinking_minutes(dict(cells=[text, cell, other]))
    assert minutes == pytest.approx(40 / 100 + 2 * 0.5 + 2 * 1 + 1.5)


def test_what_is_below_more_is_beside_the_path():
    cells = [prose("# T\n\n> P.\n\n### More or less"), code("1"), prose("## More: T"), code("2")]
    above, more = course.at_more(dict(cells=cells))
    assert (above["cells"], more["cells"]) == (cells[:2], cells[2:])
    for other in ("## Moreover", "# T\n\n## More", "### More"):
        cells[2] = prose(other)
        assert course.at_more(dict(cells=cells))[1]["cells"] == [], other


# catches: a page that is in no part, or in two
def test_every_page_of_the_path_is_in_one_part():
    numbers = [number for part in course.PATH.values() for number in part]
    assert len(numbers) == len(set(numbers)) and set(numbers) < {p.name[:2] for p in PATHS}


def test_a_folder_without_pages_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="give the folder nbs/course"):
        course.course_pages(tmp_path)


# ---- Links, in all notebooks ----


def anchors(nb: dict) -> set[str]:
    "What a link may name after `#`: the headings, as GitHub writes them, and ids."
    text = "\n".join("".join(c["source"]) for c in nb["cells"] if c["cell_type"] == "markdown")
    outside = re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)
    found = set(re.findall(r'\bid="([^"]+)"', outside))
    for heading in re.findall(r"^#{1,6} (.+?)\s*$", outside, re.M):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        found.add(re.sub(r"[^\w\- ]", "", words).replace(" ", "-"))
    return found


def links(nb: dict) -> list[str]:
    "Destinations of links and pictures, in texts and in kept Markdown."
    texts = ["".join(c["source"]) for c in nb["cells"] if c["cell_type"] == "markdown"]
    outputs = [o.get("data", {}) for c in nb["cells"] for o in c.get("outputs", [])]
    texts += ["".join(data["text/markdown"]) for data in outputs if "text/markdown" in data]
    found = []
    for text in texts:
        for token in MarkdownIt("commonmark").enable("table").parse(text):
            for child in token.children or []:
                found += [child.attrs[k] for k in ("href", "src") if k in child.attrs]
        found += re.findall(r'<(?:a|img)\b[^>]*?\b(?:href|src)="([^"]+)"', text)
    return [str(link) for link in found]


def broken(nb: dict, folder: Path, read: Callable[[Path], dict]) -> list[str]:
    "Links to files that are not there, or to headings that a notebook has not."
    problems = []
    for link in dict.fromkeys(links(nb)):
        parts = urlsplit(link)
        if parts.scheme or parts.netloc:
            continue
        target = (folder / unquote(parts.path)).resolve() if parts.path else None
        if target and not target.exists():
            problems.append(f"{link}: no such file")
        elif parts.fragment and (target is None or target.suffix == ".ipynb"):
            there = anchors(read(target) if target else nb)
            problems += [f"{link}: no such heading"] * (
                unquote(parts.fragment).lower() not in there
            )
    return problems


# catches: a table whose rows lack a column of its head: it is shown as a paragraph of bars
def test_rows_have_the_columns_of_their_head():
    for cell in (cell for path in NOTEBOOKS for cell in page(path).texts):
        for table in re.findall(r"(?:^\|.*\n?)+", cell.source, re.M):
            bars = {len(re.findall(r"(?<!\\)\|", row)) for row in table.splitlines()}
            assert len(bars) == 1, table


def test_no_link_is_broken():
    read = lambda target: page(target).nb
    assert not (
        problems := {p.name: found for p in NOTEBOOKS if (found := broken(read(p), p.parent, read))}
    ), problems
