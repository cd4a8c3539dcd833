"""The files that a traced script reads: its own modules and its configuration. One of them can be served with other numbers."""

from __future__ import annotations

import ast
import builtins
import io
import os
import types
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any
from unittest.mock import patch

from mezzo.library_files import is_library_file
from mezzo.temporary import temporary_folder

_CONFIGURATION = (".json", ".yaml", ".yml", ".toml", ".ini", ".cfg", ".conf")
_MOST_BYTES = 1 << 20
"""Larger files are data."""


def with_numbers(file: str, numbers: Sequence[tuple[int, int]], value: int) -> types.CodeType:
    """Return the code of a Python file with ``value`` in place of the numbers at these lines and columns."""
    tree = ast.parse(Path(file).read_bytes(), filename=file)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and (node.lineno, node.col_offset) in numbers:
            node.value = value
    return compile(tree, file, "exec")


class ScriptFiles:
    """Watches what a script reads below ``root``, and serves ``file`` with ``value`` in place of its numbers.

    Args:
        root: the folder whose modules are the script's own.
        file: the file to change; empty to change none.
        numbers: line and column of each number in a Python file; from and to, in characters, of each in a configuration.
        value: what to write in their place.
    """

    def __init__(
        self, root: str, *, file: str = "", numbers: Sequence[tuple[int, int]] = (), value: int | None = None
    ) -> None:
        self._root, self._file = os.path.realpath(root), os.path.realpath(file) if file else ""
        self._numbers, self._value = numbers, value
        self.modules: list[str] = []
        self.configurations: list[str] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch for the block."""
        original_get_code, original_open = SourceFileLoader.get_code, builtins.open

        def code_of(loader: SourceFileLoader, name: str) -> types.CodeType | None:
            file = os.path.realpath(loader.get_filename(name))
            if self._value is not None and file == self._file:
                return with_numbers(file, self._numbers, self._value)
            if self._is_own(file) and file not in self.modules:
                self.modules.append(file)
            return original_get_code(loader, name)

        with ExitStack() as stack:
            served = self._served(stack)

            def open_file(file: Any, mode: str = "r", *args: Any, **settings: Any) -> Any:
                if not isinstance(file, (str, os.PathLike)) or set(mode) - set("rbtU"):
                    return original_open(file, mode, *args, **settings)
                path = os.path.realpath(os.fspath(file))
                if path == self._file and served:
                    return original_open(served, mode, *args, **settings)
                if _is_configuration(path) and path not in self.configurations:
                    self.configurations.append(path)
                return original_open(file, mode, *args, **settings)

            stack.enter_context(patch.object(SourceFileLoader, "get_code", code_of))
            stack.enter_context(patch.object(builtins, "open", open_file))
            stack.enter_context(patch.object(io, "open", open_file))  # what pathlib calls
            yield

    def _served(self, stack: ExitStack) -> str:
        """Return a copy of the configuration with other numbers, which lives as long as ``stack``; empty where none is changed."""
        if self._value is None or not self._file.endswith(_CONFIGURATION):
            return ""
        text = Path(self._file).read_text(encoding="utf-8")
        for start, end in sorted(self._numbers, reverse=True):
            text = text[:start] + str(self._value) + text[end:]
        copy = stack.enter_context(temporary_folder()) / Path(self._file).name
        copy.write_text(text, encoding="utf-8")
        return str(copy)

    def _is_own(self, file: str) -> bool:
        return file.startswith(self._root + os.sep) and "site-packages" not in file


def _is_configuration(path: str) -> bool:
    if not path.endswith(_CONFIGURATION) or is_library_file(path):  # such as Matplotlib's list of fonts
        return False
    try:
        return os.path.getsize(path) <= _MOST_BYTES
    except OSError:
        return False
