"""How Sphinx makes a site from these pages: ``make docs``, into build/docs.

The pages are plain Markdown that also reads well in a repository browser, so the tree of contents lives here and not in the pages.
"""

from __future__ import annotations

from importlib.metadata import version as version_of
from pathlib import Path

from sphinx.application import Sphinx

project = "Mezzo"
author = "The Mezzo authors"
copyright = author
version = release = version_of("mezzo")
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
source_suffix = {".md": "markdown"}
myst_heading_anchors = 4
nitpicky = False
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_class_signature = "separated"
napoleon_google_docstring = True
html_theme = "furo"
html_title = f"Mezzo {version}"
html_static_path: list[str] = []
html_show_sourcelink = False
html_copy_source = False
copybutton_prompt_text = "$ "

CONTENTS: dict[str, list[str]] = {
    "Start": ["tutorial", "check", "choosing-a-policy", "troubleshooting", "tuning", "formats", "migrating"],
    "Commands": ["scripts", "watch", "resume-check", "compare", "patch", "predict", "tune", "diagnose", "audit", "ranges", "fallback", "hardware", "exit-codes"],
    "Library": ["session", "policies", "optimizers", "checkpointing", "snapshots", "distributed", "fast-path"],
    "Frameworks": ["lightning", "accelerate", "transformers", "apex", "keras", "paddle"],
    "Results": ["report", "records", "tracking", "notebook", "agents", "findings/README"],
    "Trust": ["examples", "paper", "benchmarks", "public-scripts"],
    "Reference": ["glossary"],
    "中文": ["zh-CN/start", "zh-CN/choosing-a-policy", "zh-CN/troubleshooting", "zh-CN/glossary"],
    "Inside Mezzo": [],
}
"""By section, the pages in reading order; the pages of design/ and of the findings are added from their folders."""


def add_contents(app: Sphinx, page: str, source: list[str]) -> None:
    """Append the tree of contents to the pages that have one."""
    folder = Path(app.srcdir)
    if page == "index":
        designs = sorted(f"design/{path.stem}" for path in (folder / "design").glob("*.md"))
        for section, pages in (CONTENTS | {"Inside Mezzo": designs}).items():
            source[0] += toctree(pages, caption=section)
    elif page == "findings/README":
        source[0] += toctree(sorted(path.stem for path in (folder / "findings").glob("A*.md")))


def toctree(pages: list[str], *, caption: str = "") -> str:
    """Return a hidden tree of contents, in MyST's syntax."""
    lines = ["", "```{toctree}", ":hidden:", *([f":caption: {caption}"] if caption else []), *pages, "```", ""]
    return "\n".join(lines)


def setup(app: Sphinx) -> None:
    """Connect what this file adds to Sphinx."""
    app.connect("source-read", add_contents)
