"""Where a script gets the size of its batches from, other than a loader: an argument, or numbers in its text.

A place is a guess until the script is traced with another number there: only a trace in which the batch follows, and nothing of
the model does, makes it the size of the batch. Reads the text and imports no torch.
"""

from __future__ import annotations

import ast
import re
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_NAMED = re.compile(r"batch|(^|_)bs($|_)|^B$|(^|_)bsz($|_)", re.IGNORECASE)
_LEAST = 2
"""Numbers below are counts and flags in most places."""


@dataclass(frozen=True, kw_only=True)
class BatchSource:
    """One place that may set the size of a batch."""

    where: str
    """For a reader: ``--batch-size``, or ``train.py:12``."""
    argument: int | None = None
    """Index of the script's argument."""
    numbers: tuple[tuple[int, int], ...] = ()
    """Line and column of each number in the script's text."""

    def arguments(self, given: Sequence[str], *, size: int, other: int) -> list[str]:
        """Return the script's arguments with ``other`` in place of ``size``."""
        words = list(given)
        if self.argument is not None:
            head, _, _ = words[self.argument].rpartition(str(size))
            words[self.argument] = head + str(other)
        return words


def batch_sources(script: str, arguments: Sequence[str], size: int) -> Iterator[BatchSource]:
    """Yield the places that may set a batch of ``size``, the likeliest first."""
    given = [*_in_arguments(arguments, size)]
    yield from given
    if given or size < _LEAST:
        return
    try:
        tree = ast.parse(Path(script).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return
    constants = [node for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    numbers = [node for node in constants if type(node.value) is int and node.value == size]
    named = [node for node in _named(tree) if node in numbers]
    for found in (named, numbers):
        if found:
            yield _source(script, found)


def main_module(script: str, numbers: Sequence[tuple[int, int]], value: int) -> types.CodeType:
    """Return the code of a script with ``value`` in place of the numbers at these places."""
    tree = ast.parse(Path(script).read_bytes(), filename=script)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and (node.lineno, node.col_offset) in numbers:
            node.value = value
    return compile(tree, script, "exec")


def _in_arguments(arguments: Sequence[str], size: int) -> Iterator[BatchSource]:
    for place, word in enumerate(arguments):
        option, equals, value = word.partition("=")
        if equals and value == str(size) and _NAMED.search(option):
            yield BatchSource(where=option, argument=place)
        elif word == str(size) and place and arguments[place - 1].startswith("-") and _is_batch(arguments[place - 1]):
            yield BatchSource(where=arguments[place - 1], argument=place)


def _is_batch(option: str) -> bool:
    return bool(_NAMED.search(option.lstrip("-").replace("-", "_"))) or option == "-b"


def _named(tree: ast.AST) -> Iterator[ast.expr]:
    """Yield what is assigned to, or passed or defaulted as, a name that speaks of a batch."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Assign, ast.AnnAssign, ast.keyword)) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", node)]
            names = [
                getattr(one, "id", None) or getattr(one, "attr", None) or getattr(one, "arg", None) for one in targets
            ]
            if any(name and _NAMED.search(name) for name in names):
                yield node.value
        if isinstance(node, ast.Call) and any(_says_batch(one) for one in node.args):
            yield from (keyword.value for keyword in node.keywords if keyword.arg == "default")
        if isinstance(node, ast.arguments):
            positional = [*node.posonlyargs, *node.args]
            late = positional[len(positional) - len(node.defaults) :]
            pairs = [*zip(late, node.defaults, strict=True), *zip(node.kwonlyargs, node.kw_defaults, strict=True)]
            yield from (value for one, value in pairs if value is not None and _NAMED.search(one.arg))


def _says_batch(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and _is_batch(node.value)


def _source(script: str, nodes: Sequence[ast.expr]) -> BatchSource:
    lines = sorted({node.lineno for node in nodes})
    where = ", ".join(f"{Path(script).name}:{line}" for line in lines)
    return BatchSource(where=where, numbers=tuple((node.lineno, node.col_offset) for node in nodes))
