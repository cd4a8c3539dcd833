"""Whether a script switches mixed precision on by itself, read from its source without running it."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

_CALLS = ("autocast", "GradScaler")
_PRECISION = ("precision", "mixed_precision")
_OFF = ("no", "none", "false", "32", "32-true", "64", "64-true", "fp32", "float32", "highest", "high", "medium")
_FLAGS = ("fp16", "bf16")


def own_amp(sources: Iterable[str]) -> str:
    """Return the call or argument by which files ask for mixed precision: ``GradScaler``, ``precision='16-mixed'``; empty if none does."""
    for source in sources:
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError):
            continue
        if found := next(_requests(tree), ""):
            return found
    return ""


def _requests(tree: ast.AST) -> Iterator[str]:
    if any(_is_session(node) for node in ast.walk(tree)):  # named before the autocast() that it contains
        yield "mezzo.Session"
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        keywords = {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg}
        if name in _CALLS and not _is(keywords.get("enabled"), False):
            yield name
        for option in _PRECISION:
            value = keywords.get(option)
            if isinstance(value, ast.Constant) and _lowers(value.value):
                yield f"{option}={value.value!r}"
        yield from (f"{flag}=True" for flag in _FLAGS if _is(keywords.get(flag), True))


def _is_session(node: ast.AST) -> bool:
    """Return whether ``node`` is ``mezzo.Session``, or its import."""
    if isinstance(node, ast.ImportFrom):
        return node.module == "mezzo" and any(name.name == "Session" for name in node.names)
    if not isinstance(node, ast.Attribute) or node.attr != "Session":
        return False
    return isinstance(node.value, ast.Name) and node.value.id == "mezzo"


def _is(node: ast.AST | None, value: bool) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def _lowers(value: object) -> bool:
    return (isinstance(value, str) and value.lower() not in _OFF and any(c in value for c in "168")) or value == 16
