"""Sphinx's settings. The pages come from collect.py, the reference from reference.py."""

import sys
from configparser import ConfigParser
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
from reference import linkcode_resolve  # noqa: E402, F401  Sphinx looks for it here

config = ConfigParser(delimiters=["="])
config.read(HERE.parent / "settings.ini", encoding="utf-8")
settings = config["DEFAULT"]

project, author, version = settings["title"], settings["author"], settings["version"]
project_copyright = settings["copyright"]
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.linkcode",
    "sphinx.ext.mathjax",
    "reference",
]

# Notebooks: outputs are kept in them, nothing runs here.
nb_execution_mode = "off"
nb_merge_streams = True
nb_code_prompt_show = "Show the code"
nb_code_prompt_hide = "Hide the code"
nb_render_markdown_format = "myst"  # a table in an output is a table
nb_ipywidgets_js = {}  # no page holds a widget, and these would be fetched from the web
myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_heading_anchors = 6

# The reference. Types of other packages cannot be looked up without a network; ours must be found.
nitpicky = True
nitpick_ignore_regex = [
    ("py:.*", rf"(?!{settings['lib_name']}\b).*"),
    ("py:class", r".*\.[A-Z]"),  # type variables, which have no page
]
autodoc_default_options = {"no-value": True}
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
add_module_names = False
python_maximum_signature_line_length = 88
toc_object_entries_show_parents = "hide"

# What the reader's browser is given. MathJax and its fonts are among the files of the site.
html_theme, html_title = "furo", settings["title"]
VIEWS = (
    HERE.parent / "rlhf_nb" / "ui" / "static"
)  # what the views of the package share with the site
html_static_path = [
    str(HERE / "static"),
    *(str(VIEWS / name) for name in ("theme.css", "explorers.css", "explorers.js")),
    str(Path(find_spec("sphinx-mathjax-offline").origin).parent / "static"),
]
exclude_patterns = [
    "mathjax/*svg*",
    "mathjax/*mml*",
    "mathjax/*full*",
    "mathjax/output/svg*",
    "mathjax/node-main.js",
    "mathjax/sre/mathmaps/[!be]*",
    "mathjax/sre/mathmaps/es.json",
]
mathjax_path = "mathjax/tex-chtml.js"
html_css_files = ["theme.css", "explorers.css", "site.css"]
html_js_files = [("explorers.js", {"defer": "defer"}), "site.js"]
html_search_scorer = str(HERE / "scorer.js")
html_show_search_summary = False  # a page that is read from disk may not fetch another
html_use_index = False  # the front page of the reference has every name
html_domain_indices = False
smartquotes = False  # `--fresh` and [..., V] stay what they are
html_copy_source = html_show_sourcelink = False
