"""The backend on which a Keras script will run, as far as its own files and the environment tell before it runs."""

from __future__ import annotations

import ast
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal, TypeGuard

from mezzo.launch.frameworks import own_trees

_VARIABLE = "KERAS_BACKEND"
_DEFAULT = "tensorflow"


def backend_of(
    target: str, *, kind: Literal["script", "module"], environment: Mapping[str, str] = os.environ
) -> str | None:
    """Return the name of the backend; None if the script chooses it while it runs.

    Args:
        target: the script, or the module's dotted name.
        kind: which of the two ``target`` is.
        environment: the environment variables of the script.
    """
    found: set[str | None] = set()
    for tree in own_trees(target, kind=kind):
        found |= set(_chosen_in(tree, environment.get(_VARIABLE)))
    if found:
        return found.pop() if len(found) == 1 else None
    return environment.get(_VARIABLE) or _configured(environment)


def _chosen_in(tree: ast.AST, inherited: str | None) -> Iterator[str | None]:
    """Yield the backends that a file may choose; None for one that its text does not tell."""
    named = {id(n) for n in ast.walk(tree) if isinstance(n, ast.Constant) and n.value == _VARIABLE}
    for stmt in getattr(tree, "body", []):  # what runs whatever the script is told
        if isinstance(stmt, ast.Assign) and isinstance(stmt.targets[0], ast.Subscript):
            name = id(stmt.targets[0].slice)
            if name in named:
                named.discard(name)
                yield _text(stmt.value)
        elif isinstance(stmt, ast.Expr) and _is_setdefault(stmt.value) and id(stmt.value.args[0]) in named:
            named.discard(id(stmt.value.args[0]))
            yield inherited or _text(stmt.value.args[1])
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
            named.discard(id(node.slice))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            if node.func.attr in ("get", "getenv"):  # which read it
                named.discard(id(node.args[0]))
            elif node.func.attr == "set_backend":
                yield None
    if named:  # it is set in another way, or only under a condition
        yield None


def _is_setdefault(value: ast.expr) -> TypeGuard[ast.Call]:
    is_call = isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and len(value.args) == 2
    return is_call and value.func.attr == "setdefault"  # type: ignore[attr-defined]


def _text(value: ast.expr) -> str | None:
    return value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else None


def _configured(environment: Mapping[str, str]) -> str:
    """Return the backend that Keras' own file names, or Keras' default."""
    home = environment.get("KERAS_HOME") or str(Path(environment.get("HOME", "~")).expanduser() / ".keras")
    try:
        named = json.loads((Path(home) / "keras.json").read_text(encoding="utf-8")).get("backend")
    except (OSError, ValueError, AttributeError):
        return _DEFAULT
    return named if isinstance(named, str) else _DEFAULT
