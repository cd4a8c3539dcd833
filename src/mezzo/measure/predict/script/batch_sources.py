"""Find where a script without a loader gets its batch size: an argument, a number in its text, or one in a file that it reads.

A source is a guess until the script is traced with another number there: it sets the batch size only if the batch changes and the
model does not. Reads text and imports no torch.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_NAMED = re.compile(r"batch|(^|_)bs($|_)|^B$|(^|_)bsz($|_)", re.IGNORECASE)
_SETTING = re.compile(r"""([A-Za-z_][\w.-]*)["']?\s*[:=]\s*["']?(\d+)(?![\w.])""")
"""A setting of a whole number in JSON, YAML, TOML or an INI file, with its name."""
_LEAST = 2
"""Smaller numbers are counts and flags in most places."""


@dataclass(frozen=True, kw_only=True)
class BatchSource:
    """A place in the script that may set the size of a batch."""

    where: str
    """For a reader: ``--batch-size``, ``train.py:12``, or ``config.json:3``."""
    argument: int | None = None
    """Index of the script's argument."""
    file: str = ""
    """The file of the numbers."""
    numbers: tuple[tuple[int, int], ...] = ()
    """Line and column of each number in a Python file; from and to, in characters, of each in a configuration."""

    def arguments(self, arguments: Sequence[str], *, size: int, other: int) -> list[str]:
        """Return the script's arguments with ``other`` in place of ``size``."""
        words = list(arguments)
        if self.argument is not None:
            head, _, _ = words[self.argument].rpartition(str(size))
            words[self.argument] = head + str(other)
        return words


def batch_sources(
    script: str, arguments: Sequence[str], size: int, *, modules: Sequence[str] = (), configurations: Sequence[str] = ()
) -> Iterator[BatchSource]:
    """Yield the places that may set a batch of ``size``, the likeliest first.

    Args:
        script: its path; empty for one that is run as a module, which is then among ``modules``.
        arguments: its own arguments.
        size: the size.
        modules: the Python files that it imports.
        configurations: other files of settings that it reads.
    """
    in_arguments = [*_in_arguments(arguments, size)]
    yield from in_arguments
    if in_arguments or size < _LEAST:
        return
    texts = {file: _numbers(file, size) for file in dict.fromkeys([*([script] if script else []), *modules])}
    for file, (named, _) in texts.items():
        if named:
            yield _source(file, named)
    for file in configurations:
        yield from _in_configuration(file, size)
    numbers = texts[script][1] if script else []
    if numbers:
        yield _source(script, numbers)


def _numbers(file: str, size: int) -> tuple[list[ast.expr], list[ast.expr]]:
    """Return the numbers ``size`` in a Python file: those whose names speak of a batch, and all."""
    try:
        tree = ast.parse(Path(file).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return [], []
    constants = [node for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    numbers: list[ast.expr] = [node for node in constants if type(node.value) is int and node.value == size]
    return [node for node in _named(tree) if node in numbers], numbers


def _in_configuration(file: str, size: int) -> Iterator[BatchSource]:
    """Yield the settings of a configuration whose names speak of a batch: all at once, then each."""
    try:
        text = Path(file).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return
    settings = [setting for setting in _SETTING.finditer(text) if _NAMED.search(setting[1]) and int(setting[2]) == size]
    for chosen in (settings, *([setting] for setting in settings if len(settings) > 1)):
        if chosen:
            lines = sorted({text.count("\n", 0, setting.start(2)) + 1 for setting in chosen})
            where = ", ".join(f"{Path(file).name}:{line}" for line in lines)
            yield BatchSource(where=where, file=file, numbers=tuple(setting.span(2) for setting in chosen))


def _in_arguments(arguments: Sequence[str], size: int) -> Iterator[BatchSource]:
    for index, word in enumerate(arguments):
        option, equals, value = word.partition("=")
        if equals and value == str(size) and _NAMED.search(option):
            yield BatchSource(where=option, argument=index)
        elif word == str(size) and index and arguments[index - 1].startswith("-") and _is_batch(arguments[index - 1]):
            yield BatchSource(where=arguments[index - 1], argument=index)


def _is_batch(option: str) -> bool:
    return bool(_NAMED.search(option.lstrip("-").replace("-", "_"))) or option == "-b"


def _named(tree: ast.AST) -> Iterator[ast.expr]:
    """Yield what is assigned to, or passed or defaulted as, a name that speaks of a batch."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Assign, ast.AnnAssign, ast.keyword)) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", node)]
            names = [getattr(one, key, None) or "" for one in targets for key in ("id", "attr", "arg")]
            if any(map(_NAMED.search, names)):
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
    return BatchSource(where=where, file=script, numbers=tuple((node.lineno, node.col_offset) for node in nodes))
