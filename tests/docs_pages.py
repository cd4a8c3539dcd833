"""The pages of the documentation by kind, and how many words of a page are read."""

from __future__ import annotations

import ast
import re
from functools import cache

from paths import ROOT

DOCS = ROOT / "docs"


@cache
def contents() -> dict[str, list[str]]:
    """Return the pages of each kind, from the table of contents of ``docs/conf.py``."""
    tree = ast.parse((DOCS / "conf.py").read_text(encoding="utf-8"))
    value = next(
        n.value for n in tree.body if isinstance(n, ast.AnnAssign) and getattr(n.target, "id", "") == "CONTENTS"
    )
    assert value is not None
    pages: dict[str, list[str]] = eval(compile(ast.Expression(value), "conf.py", "eval"))
    return pages


def user_pages() -> list[str]:
    """Return the pages for users."""
    return [*contents()["Start"], *contents()["How to"]]


def num_words(page: str) -> int:
    """Return how many words of a page are read: not those of code, output and addresses."""
    text = re.sub(r"^```.*?^```|^    .*?$|<!--.*?-->", "", page, flags=re.S | re.M)
    return sum(bool(re.search(r"\w", word)) for word in re.sub(r"\]\([^)]*\)", "]", text).split())
