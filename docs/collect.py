"""The pages of the site, taken from the notebooks and the modules: nothing is written twice.

`collect` writes the folder that Sphinx reads: each notebook of `nbs/` as readers of the site want
it, and a page for each module.
"""

from __future__ import annotations

import ast
import gzip
import json
import re
import shutil
import subprocess
from configparser import ConfigParser
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha1
from html import unescape
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

from markdown_it import MarkdownIt

# The sections of the menu, in their order, and the folder below nbs/ that each one shows.
SECTIONS = {"Start here": ".", "The course": "course", "Labs": "labs", "Reference": "reference"}
FIRST = ("index", "course")  # pages that come before the others of their section
# Folders of plain modules, which no notebook exports.
HAND_WRITTEN = ("training", "base", "cli", "ui", "exercises", "diagnose")
UNSEEN = {"hide", "default_exp"}  # cells of these directives are no part of the page
EXPORTS = {"export", "exports", "exporti"}

OF_CLASS = (
    "   :members:\n   :inherited-members: object\n   :undoc-members:\n   :show-inheritance:\n"
)


class Wrong(Exception):
    "The site cannot be built as it is: `complaints` says where and why."

    def __init__(self, complaints: list[str]) -> None:
        super().__init__("\n".join(complaints))
        self.complaints = complaints


# ---- The project ----


@dataclass
class Project:
    "A repository: its notebooks, its modules, and where it is published."

    root: Path
    complaints: list[str] = field(default_factory=list)

    @cached_property
    def settings(self) -> dict[str, str]:
        config = ConfigParser(delimiters=["="])
        config.read(self.root / "settings.ini", encoding="utf-8")
        return dict(config["DEFAULT"])

    @property
    def nbs(self) -> Path:
        return self.root / self.settings["nbs_path"]

    @property
    def lib(self) -> Path:
        return self.root / self.settings["lib_path"]

    @cached_property
    def paths(self) -> dict[str, Path]:
        "Name -> file, in the order of the names; the site has no folders."
        found = [p for p in self.nbs.rglob("*.ipynb") if ".ipynb_checkpoints" not in p.parts]
        return {
            path.stem: path for path in sorted(found, key=lambda p: (p.stem not in FIRST, p.stem))
        }

    @cached_property
    def notebooks(self) -> dict[str, dict]:
        "Name -> content, by number."
        return {
            name: json.loads(path.read_text(encoding="utf-8")) for name, path in self.paths.items()
        }

    def written(self, name: str) -> str:
        "A page's file, seen from the top of the repository."
        return self.paths[name].relative_to(self.root).as_posix()

    @cached_property
    def makers(self) -> dict[str, str]:
        "Module -> the notebook that begins it, in the order of the notebooks."
        named = {
            name: re.search(r"^#\|\s*default_exp\s+(\S+)", code_of(nb), re.M)
            for name, nb in self.notebooks.items()
        }
        return {found[1]: name for name, found in named.items() if found}

    @cached_property
    def added(self) -> dict[str, str]:
        "Notebook -> the module that it goes on with, begun by another."
        named = {
            name: re.search(r"^#\|\s*exports?\s+(\w+)\s*$", code_of(nb), re.M)
            for name, nb in self.notebooks.items()
        }
        return {name: found[1] for name, found in named.items() if found}

    @cached_property
    def exports(self) -> dict[str, dict[str, str]]:
        """Module -> what it exports, in the order of the file -> the directive of autodoc that
        documents it. Read and not imported."""
        files = {path.stem: path for path in sorted(self.lib.glob("*.py"))}
        for folder in HAND_WRITTEN:
            package = self.lib / folder
            if (package / "__init__.py").is_file():
                files[folder] = package / "__init__.py"
            plain = sorted(package.glob("[!_]*.py"))
            files |= {f"{folder}.{path.stem}": path for path in plain}
        return {
            name: exports_of(ast.parse(path.read_text(encoding="utf-8")), is_plain(name))
            for name, path in files.items()
        }

    @cached_property
    def explorer_pages(self) -> list[str]:
        "Pages that show an explorer in a frame."
        return [name for name, nb in self.notebooks.items() if any(map(has_explorer, nb["cells"]))]

    def explorer_file(self, name: str) -> Path:
        "What `docs/explorers.py` wrote for a page."
        return self.root / "docs" / "explorers" / f"{name}.json.gz"

    def explorers(self, name: str) -> dict[str, dict]:
        "Cell -> the grid of its explorer; empty where none is kept."
        path = self.explorer_file(name)
        grids = json.loads(gzip.decompress(path.read_bytes())) if path.is_file() else []
        return {grid["cell"]: grid for grid in grids}

    def url(self, path: Path) -> str:
        "Where a file or folder of the repository can be read."
        kind = "tree" if path.is_dir() else "blob"
        place = quote(path.relative_to(self.root).as_posix())
        return f"{self.settings['git_url']}/{kind}/{self.settings['branch']}/{place}"

    def is_ignored(self, path: Path) -> bool:
        "Does git leave it out? Then it is on this machine alone."
        if not (self.root / ".git").exists():
            return False
        return (
            subprocess.run(
                ["git", "check-ignore", "-q", path], cwd=self.root, capture_output=True
            ).returncode
            == 0
        )


def is_plain(module: str) -> bool:
    "Whether a module is written by hand."
    return module.partition(".")[0] in HAND_WRITTEN


def assigned(node: ast.stmt) -> list[str]:
    "Names to which a statement gives values."
    targets = getattr(node, "targets", [getattr(node, "target", None)])
    return [
        part.id
        for target in targets
        if target
        for part in ast.walk(target)
        if isinstance(part, ast.Name)
    ]


def exports_of(
    tree: ast.Module,
    by_hand: bool = False,  # without `__all__`, a module exports its public functions and classes
) -> dict[str, str]:
    "What `__all__` lists: name -> autofunction, autoclass or autodata."
    named, kinds = [], {}
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            kinds[node.name] = "autoclass" if isinstance(node, ast.ClassDef) else "autofunction"
        for name in assigned(node):
            kinds[name] = "autodata"
        if "__all__" in assigned(node):
            named = ast.literal_eval(node.value)
    if by_hand and "__all__" not in kinds:
        named = [n for n, kind in kinds.items() if kind != "autodata" and not n.startswith("_")]
    return {name: kinds.get(name, "autodata") for name in sorted(named, key=[*kinds, *named].index)}


def code_of(nb: dict) -> str:
    "All code of a notebook."
    return "\n".join(text(cell) for cell in nb["cells"] if cell["cell_type"] == "code")


def text(cell: dict) -> str:
    "The source of a cell, which the format allows to be a list of lines."
    return "".join(cell["source"])


def has_explorer(cell: dict) -> bool:
    "Whether a cell makes an explorer that has a title: such are moved on the site as well."
    return cell["cell_type"] == "code" and bool(
        re.search(r"\bExplorer\(.*^    title=", text(cell), re.S | re.M)
    )


def title(nb: dict) -> str:
    "What stands behind the first `# `. Empty where there is none."
    return next(
        iter(
            re.findall(
                r"^# (.+)$",
                "\n".join(text(c) for c in nb["cells"] if c["cell_type"] == "markdown"),
                re.M,
            )
        ),
        "",
    )


# ---- Names ----


def imported(source: str, lib: str) -> list[tuple[str, str]]:
    """What code imports from the package: (module, name). Of `from rlhf_nb import Rollout` the
    module is `__init__`."""
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except SyntaxError:
        return []  # a command for the shell, or code that is wrong on purpose
    found = [
        node
        for node in nodes
        if isinstance(node, ast.ImportFrom)
        and (node.module or "").split(".")[0] == lib
        and not node.level
    ]
    return [
        (node.module.partition(".")[2] or "__init__", part.asname or part.name)
        for node in found
        for part in node.names
    ]


def names_on(project: Project, page: str) -> dict[str, str]:
    """What the code of a page makes or imports, and the classes that everyone imports first: name
    -> where it is documented."""
    made = [
        (module, name)
        for module, maker in project.makers.items()
        if page == maker or project.added.get(page) == module
        for name in project.exports.get(module, {})
    ]
    used = [
        pair
        for cell in project.notebooks[page]["cells"]
        if cell["cell_type"] == "code"
        for pair in imported(text(cell), project.lib.name)
    ]
    front = {
        name: module
        for module, names in project.exports.items()
        if module != "__init__"
        for name in names
        if name in project.exports.get("__init__", {})
    }
    pairs = {name: module for module, name in [*((m, n) for n, m in front.items()), *used, *made]}
    known = {
        name: front.get(name) if module == "__init__" else module for name, module in pairs.items()
    }
    return {
        name: f"{project.lib.name}.{module}.{name}"
        for name, module in known.items()
        if name in project.exports.get(module, {})
    }


# ---- The menu ----


def menu(project: Project) -> dict[str, list[str]]:
    "Section -> names of its notebooks, in their order."
    found: dict[str, list[str]] = {section: [] for section in SECTIONS}
    sections = {folder: section for section, folder in SECTIONS.items()}
    for name, path in project.paths.items():
        folder = path.parent.relative_to(project.nbs).as_posix()
        if folder in sections:
            found[sections[folder]].append(name)
        else:
            project.complaints.append(
                f"{project.written(name)} has no place in the menu: put it into one of "
                f"{', '.join(sections)}, or add its folder to SECTIONS of docs/collect.py."
            )
    return {section: names for section, names in found.items() if names}


def label(name: str, nb: dict) -> str:
    "`08_kl` and its title -> `08 KL: how far from home?`"
    number = re.match(r"\d\d", name)
    return f"{number[0]} {title(nb)}" if number else title(nb)


def toctree(caption: str, entries: list[str]) -> str:
    "A part of the menu, in MyST."
    return "\n".join(["```{toctree}", ":hidden:", f":caption: {caption}", "", *entries, "```"])


def contents(project: Project, modules: list[str]) -> str:
    "The whole menu, which stands unseen on the first page."
    parts = [
        toctree(
            section,
            [
                f"{label(name, project.notebooks[name])} <{'self' if name == 'index' else name}>"
                for name in names
            ],
        )
        for section, names in menu(project).items()
    ]
    if modules:
        parts.append(
            toctree(
                "API",
                [
                    "Everything, by module <api/index>",
                    *(f"{project.lib.name}.{name} <api/{name}>" for name in modules),
                ],
            )
        )
    return "\n\n".join(parts)


# ---- Links ----


def destinations(markdown: str) -> dict[str, bool]:
    "What a text links to -> whether as an image. Code is not read."
    found: dict[str, bool] = {}
    for token in MarkdownIt("commonmark").enable("table").parse(markdown):
        for child in token.children or []:
            if child.type == "link_open":
                found.setdefault(str(child.attrs["href"]), False)
            if child.type == "image":
                found[str(child.attrs["src"])] = True
    return found


def redirected(project: Project, page: str, href: str, as_image: bool, out: Path) -> str:
    """The same destination for a reader of the site. A link to what is not there is a complaint;
    notebooks are left to Sphinx, which knows their headings."""
    parts = urlsplit(href)
    if parts.scheme or parts.netloc or not parts.path:
        return href
    target = (project.paths[page].parent / unquote(parts.path)).resolve()
    if target.is_relative_to(project.nbs) and target.suffix == ".ipynb":
        return target.name + (f"#{parts.fragment}" if parts.fragment else "")
    if not target.exists() or not target.is_relative_to(project.root) or project.is_ignored(target):
        project.complaints.append(
            f"{project.written(page)} links to {href}: there is no such file in the repository."
        )
        return href
    if not as_image:
        return project.url(target) + (f"#{parts.fragment}" if parts.fragment else "")
    kept = Path("files") / target.relative_to(project.root)
    (out / kept).parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(target, out / kept)
    return kept.as_posix()


def relinked(project: Project, page: str, markdown: str, out: Path) -> str:
    "A text whose relative links lead where they should."
    for href, as_image in destinations(markdown).items():
        new = redirected(project, page, href, as_image, out)
        markdown = re.sub(
            rf"(\]\(\s*<?){re.escape(href)}(?=[>\s)])",
            lambda match, new=new: match[1] + new,
            markdown,
        )
    return markdown


# ---- A page ----


def markdown_cell(source: str) -> dict:
    return dict(
        cell_type="markdown",
        id=f"site-{sha1(source.encode()).hexdigest()[:12]}",
        metadata={},
        source=source,
    )


def directives(source: str) -> set[str]:
    "`#| export` -> export; of `#| echo: false` the whole as well."
    found = re.findall(r"^#\|\s*(.*?)\s*$", source, re.M)
    return {*found, *(words.split()[0] for words in found if words)}


def described(outputs: list[dict]) -> dict:
    "Settings of a cell that give a drawing in its output the text that the drawing has for itself."
    drawings = ["".join(o.get("data", {}).get("image/svg+xml", "")) for o in outputs]
    label = re.search(r'<svg[^>]*\baria-label="([^"]*)"', "".join(drawings))
    return dict(mystnb=dict(image=dict(alt=unescape(label[1])))) if label else {}


def code_cells(project: Project, page: str, cell: dict, out: Path) -> list[dict]:
    """A cell of code as it is shown: without directives, folded where JupyterLab folds it. One
    that makes part of the package bears a mark, and an anchor that the reference leads to."""
    said = directives(text(cell))
    if said & UNSEEN:
        return []
    folded = cell["metadata"].get("jupyter", {}).get("source_hidden", False)
    tags = (
        ["remove-input"] * ("echo: false" in said)
        + ["hide-input"] * folded
        + ["exported"] * bool(said & EXPORTS)
    )
    if grid := project.explorers(page).get(cell.get("id")):
        cell = cell | dict(outputs=[explorer_output(grid)])
    for output in cell["outputs"]:
        if "text/markdown" in output.get("data", {}):
            output["data"]["text/markdown"] = relinked(
                project, page, "".join(output["data"]["text/markdown"]), out
            )
    shown = cell | dict(
        source=re.sub(r"^#\|.*\n?", "", text(cell), flags=re.M).strip("\n"),
        metadata=dict(tags=tags) | described(cell["outputs"]),
    )
    anchor = markdown_cell(f'<div id="cell-{cell.get("id")}"></div>')
    return [anchor, shown] if "exported" in tags else [shown]


def explorer_output(grid: dict) -> dict:
    "An explorer that needs no kernel, in place of the picture that the notebook keeps."
    from rlhf_nb.ui.explore import frame  # only where one is shown: the import takes seconds

    return dict(output_type="display_data", metadata={}, data={"text/html": frame(grid)})


def missing_explorers(project: Project, name: str) -> list[str]:
    "What is wrong with the grids of a page."
    there = {cell["id"] for cell in project.notebooks[name]["cells"] if has_explorer(cell)}
    kept = project.explorers(name).keys()
    how = f"run `python docs/explorers.py {name}`."
    return [
        *(
            f"{project.written(name)}: the explorer of cell {c} is not drawn: {how}"
            for c in there - kept
        ),
        *(
            f"{project.written(name)} shows no explorer in cell {c} any more: {how}"
            for c in kept - there
        ),
    ]


def about(project: Project, name: str) -> str:
    "Where a page comes from, and what is made on it."
    begun = next((module for module, maker in project.makers.items() if maker == name), None)
    module = begun or project.added.get(name)
    made = (
        f" The cells with a bar at their left are {'' if begun else 'the rest of '}the module "
        f"[`{project.lib.name}.{module}`](api/{module}.rst)."
        if module
        else ""
    )
    return (
        f":::{{container}} about\nThis page is the notebook "
        f"[{name}.ipynb]({project.url(project.paths[name])}).{made}\n:::"
    )


def landing(project: Project) -> str:
    "What the first page opens with: a rollout to touch, three doors, and the picture of the loop."
    template = project.root / "docs" / "landing.html"
    if not template.is_file():
        return ""
    from rlhf_nb.ui.loop import loop_picture

    loop = linked(loop_picture())
    numbers = gain(project.root / "benchmarks" / "results" / "mini_tldr_seeds.json")
    markup = template.read_text(encoding="utf-8").format(loop=loop, **numbers)
    return f"```{{raw}} html\n{markup}\n```"


def linked(loop: str) -> str:
    "The picture of the loop, in which each box leads to its page."
    from rlhf_nb.ui.loop import STEPS

    pages = {step.number: step.page for step in STEPS}

    def link(box: re.Match[str]) -> str:
        number = re.search(r'class="page"[^>]*>(\d\d)<', box[0])
        return f'<a href="{pages[number[1]]}.html">{box[0]}</a>' if number else box[0]

    boxes = re.sub(r'<g class="step.*?</g>', link, loop, flags=re.DOTALL)
    return boxes.replace('role="img"', 'role="group"', 1)  # an image would hide its links


def gain(results: Path) -> dict[str, str]:
    "Win rates of SFT and PPO in per cent, means over the seeds that were measured."
    from rlhf_nb.gains import rate_interval

    seeds = json.loads(results.read_text(encoding="utf-8"))["default"].values()
    rate = lambda which: (
        100 * rate_interval([one["verdict"][which]["win_rate"] for one in seeds]).value
    )
    runs = dict(near_sft="sft@0.01", near_ppo="ppo@0.01", warm_sft="sft@1", warm_ppo="ppo@1")
    return {name: f"{rate(run):.0f}" for name, run in runs.items()} | dict(seeds=str(len(seeds)))


def page(project: Project, name: str, out: Path, tail: str = "") -> dict:
    "A notebook as the site shows it."
    nb, cells = project.notebooks[name], []
    project.complaints += missing_explorers(project, name)
    for cell in nb["cells"]:
        if cell["cell_type"] == "code":
            cells += code_cells(project, name, cell, out)
        elif cell["cell_type"] == "markdown":
            cells.append(markdown_cell(relinked(project, name, text(cell), out)))
    if not title(nb):
        project.complaints.append(
            f"{project.written(name)} has no title: its first cell should open with '# Title'."
        )
    if name == "index":  # the pictures and the number at its head are the README's alone
        first = next((i for i, cell in enumerate(cells) if text(cell).startswith("## ")), 1)
        cells[1:first] = [markdown_cell(landing(project))]
    else:
        cells.insert(1, markdown_cell(about(project, name)))
    return nb | dict(
        cells=cells + [markdown_cell(tail)] * bool(tail),
        metadata=dict(
            language_info=dict(name="python", pygments_lexer="ipython3"),
            kernelspec=nb["metadata"]["kernelspec"],
        ),
    )


# ---- The reference ----


def underlined(heading: str) -> str:
    return f"{heading}\n{'=' * len(heading)}\n"


def module_page(project: Project, module: str) -> str:
    "The page of one module. What it says is in the docstrings."
    full, maker = f"{project.lib.name}.{module}", project.makers.get(module)
    pages = [maker, *(page for page, part in project.added.items() if part == module)]
    made = (
        "How it is made, step by step: "
        + ", ".join(f":doc:`{label(page, project.notebooks[page])} </{page}>`" for page in pages)
        + "."
        if maker
        else "A plain module, written by hand."
    )
    members = "".join(
        f".. {kind}:: {full}.{name}\n{OF_CLASS if kind == 'autoclass' else ''}\n"
        for name, kind in project.exports[module].items()
    )
    return f"{underlined(full)}\n.. automodule:: {full}\n\n{made}\n\n{members}"


def front_page(project: Project, modules: list[str]) -> str:
    "The page that leads to the others: every export of every module."
    lib = project.lib.name
    home = {export: module for module in modules for export in project.exports[module]}
    lines = [
        underlined("API reference"),
        f".. py:module:: {lib}\n",
        "Made from the docstrings. ``[source]`` leads to the cell of the notebook where a thing "
        "is made, or to the file of a module that is written by hand.\n",
        f"From ``{lib}`` itself one can import "
        + ", ".join(f":py:obj:`~{lib}.{home[e]}.{e}`" for e in project.exports.get("__init__", []))
        + ".\n",
    ]
    for module in modules:
        names = ", ".join(
            f":py:obj:`~{lib}.{module}.{export}`" for export in project.exports[module]
        )
        lines.append(f":doc:`{lib}.{module} <{module}>`\n   {names}\n")
    return "\n".join(lines)


def write_reference(project: Project, out: Path) -> list[str]:
    """Pages for the modules: in the order of the notebooks that make them, then those written by
    hand. -> names of the modules"""
    here = {path.stem for path in project.lib.glob("*.py")} - {"__init__", "_modidx"}
    project.complaints += [
        f"{project.lib.name}/{name}.py: no notebook makes it."
        for name in sorted(here - project.makers.keys())
    ]
    modules = [name for name in project.makers if name in here]
    modules += [name for name, exports in project.exports.items() if is_plain(name) and exports]
    (out / "api").mkdir(parents=True)
    for name in modules:
        (out / "api" / f"{name}.rst").write_text(module_page(project, name), encoding="utf-8")
    if modules:
        (out / "api" / "index.rst").write_text(front_page(project, modules), encoding="utf-8")
    return modules


def collect(root: Path, out: Path) -> Project:
    "Write the folder that Sphinx reads. Raises Wrong, with all that is amiss at once."
    project = Project(root.resolve())
    shutil.rmtree(out, ignore_errors=True)
    modules = write_reference(project, out)
    for name in project.notebooks:
        staged = page(project, name, out, contents(project, modules) if name == "index" else "")
        (out / f"{name}.ipynb").write_text(json.dumps(staged), encoding="utf-8")
    (out / "names.json").write_text(
        json.dumps({name: names_on(project, name) for name in project.notebooks}), encoding="utf-8"
    )
    if "index" not in project.notebooks:
        project.complaints.append("nbs/index.ipynb is not there: it is the first page of the site.")
    if project.complaints:
        raise Wrong(project.complaints)
    return project
