"""How Sphinx builds a site from these pages: ``make docs``, into build/docs.

The pages are plain Markdown that also reads well in a repository browser, so the table of contents is defined here and not in the pages.
"""

from __future__ import annotations

import sys
from pathlib import Path

from sphinx.application import Sphinx

sys.path.insert(0, str(Path(__file__).parent))

import reference_pages
import search_language

from mezzo.version import VERSION

project = "Mezzo"
author = "The Mezzo authors"
copyright = author
version = release = VERSION
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
source_suffix = {".md": "markdown"}
myst_heading_anchors = 4
myst_enable_extensions = ["deflist"]
nitpicky = False
smartquotes = False  # they make a dash of --
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_class_signature = "mixed"
napoleon_google_docstring = True
html_theme = "furo"
html_title = f"Mezzo {version}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_search_language = search_language.SearchEnglishAndChinese.lang
html_search_scorer = str(Path(__file__).parent / "static/scorer.js")
highlight_language = "text"  # indented blocks are mostly shell and output
html_show_sourcelink = False
html_copy_source = False
copybutton_prompt_text = "$ "

CONTENTS: dict[str, list[str]] = {
    "Start": ["install", "tutorial", "choosing-a-policy", "troubleshooting", "troubleshooting-speed"],
    "How to": [
        *("scripts", "check", "compare", "diagnose", "audit", "predict", "checkpointing", "tuning", "watch", "tune"),
        *("ranges", "fallback", "diff", "guardrails", "snapshots", "resume-check", "expect", "gate", "distributed", "patch"),
        *("keras", "paddle", "lightning", "accelerate", "transformers", "session"),
    ],
    "Reference": [
        *("commands", "exit-codes", "frameworks", "library", "policies", "optimizers", "fast-path", "formats", "block-formats"),
        *(
            "hardware",
            "migrating",
            "apex",
            "report",
            "records",
            "tracking",
            "notebook",
            "agents",
            "glossary",
            "findings/README",
        ),
        *(f"details/{name}" for name in ("scripts", "terminal", "compare", "several-runs", "check", "diagnose")),
        *(f"details/{name}" for name in ("fallback", "predict", "traced-scripts")),
        *(f"details/{name}" for name in ("policies", "session", "snapshots", "guardrails", "distributed", "tune")),
        *(f"details/{name}" for name in ("patch", "checkpointing", "micro-batches", "apex", "keras", "paddle")),
    ],
    "Evidence": [
        *("evidence/predictions", "evidence/held-out", "evidence/differences", "evidence/verdicts", "evidence/tests", "h100", "benchmarks"),
        *("article-numbers", "paper", "examples", "public-scripts", "public-reports"),
    ],
    "中文": [
        *("zh-CN/start", "zh-CN/run", "zh-CN/compare", "zh-CN/nan", "zh-CN/memory", "zh-CN/predict", "zh-CN/watch"),
        *("zh-CN/resume", "zh-CN/distributed", "zh-CN/paddle", "zh-CN/choosing-a-policy", "zh-CN/troubleshooting"),
        *("zh-CN/check", "zh-CN/audit", "zh-CN/loss-scale", "zh-CN/fallback", "zh-CN/diff", "zh-CN/gate", "zh-CN/expect", "zh-CN/troubleshooting-speed", "zh-CN/glossary"),
        *("zh-CN/install", "zh-CN/tune", "zh-CN/guardrails", "zh-CN/patch", "zh-CN/session", "zh-CN/keras", "zh-CN/trainers"),
    ],
    "Inside Mezzo": [],
}
"""By kind of page, the pages in reading order; the pages of design/ and of the findings are added from their folders."""


REFERENCE = {"commands": ("command", "Every option"), "library": ("module", "Every class and function")}
"""Pages that list the pages generated from the code, with their kind and the heading of the list."""


def make_reference(app: Sphinx) -> None:
    """Generate the reference pages from the code."""
    reference_pages.write(Path(app.srcdir))


def remove_reference(app: Sphinx, error: Exception | None) -> None:
    """Remove them from the folder of sources."""
    reference_pages.remove(Path(app.srcdir))


def add_contents(app: Sphinx, page: str, source: list[str]) -> None:
    """Append the tree of contents to the pages that have one."""
    folder = Path(app.srcdir)
    if page == "index":
        designs = sorted(f"design/{path.stem}" for path in (folder / "design").glob("*.md"))
        for section, pages in (CONTENTS | {"Inside Mezzo": designs}).items():
            source[0] += toctree(pages, caption=section)
    elif page in REFERENCE:
        kind, title = REFERENCE[page]
        source[0] += toctree(reference_pages.pages(kind, folder), title=title)
    elif page == "findings/README":
        source[0] += toctree(sorted(path.stem for path in (folder / "findings").glob("A*.md")))


def toctree(pages: list[str], *, caption: str = "", title: str = "") -> str:
    """Return a tree of contents in MyST's syntax: hidden, or as a list under a heading."""
    head = ["", f"## {title}", ""] if title else [""]
    options = [":maxdepth: 1"] if title else [":hidden:", *([f":caption: {caption}"] if caption else [])]
    return "\n".join([*head, "```{toctree}", *options, *pages, "```", ""])


def setup(app: Sphinx) -> None:
    """Register the search language and the handlers of this file with Sphinx."""
    app.add_search_language(search_language.SearchEnglishAndChinese)
    app.connect("builder-inited", make_reference)
    app.connect("source-read", add_contents)
    app.connect("build-finished", remove_reference)
