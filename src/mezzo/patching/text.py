"""The text of a Python file, kept byte for byte: its encoding, line endings and indentation; and diffs of it."""

from __future__ import annotations

import ast
import difflib
import io
import itertools
import tokenize
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from mezzo.patching.outcome import unclear


@dataclass(frozen=True)
class Text:
    """A file's text, with offsets for the positions that ``ast`` reports."""

    text: str
    encoding: str = "utf-8"
    lines: list[str] = field(init=False, repr=False)
    """Each line with its ending."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "lines", split_lines(self.text))

    @classmethod
    def read(cls, path: Path) -> Text:
        """Return the text of a file as Python would decode it, with its line endings.

        Raises:
            Unclear: it cannot be read or decoded.
        """
        try:
            raw = path.read_bytes()
            encoding, _ = tokenize.detect_encoding(io.BytesIO(raw).readline)
            text = raw.decode(encoding)
        except OSError as error:
            unclear(f"cannot read {path}: {error.strerror}", "check the path and its permissions")
        except (SyntaxError, UnicodeDecodeError, LookupError) as error:
            unclear(f"cannot decode {path}: {error}", "save it as UTF-8")
        if "\r" in text.replace("\r\n", ""):
            unclear(
                f"{path} has lines that end with a bare carriage return", "save it with \\n or \\r\\n as line ending"
            )
        return cls(text, encoding)

    @property
    def newline(self) -> str:
        """The line ending of most lines."""
        windows = self.text.count("\r\n")
        return "\r\n" if windows > self.text.count("\n") - windows else "\n"

    @cached_property
    def _starts(self) -> list[int]:
        return list(itertools.accumulate(map(len, self.lines), initial=0))

    def line_start(self, line: int) -> int:
        """Return the offset at which a line begins; lines count from 1, and one past the last is the end."""
        return self._starts[min(line, len(self._starts)) - 1]

    def offset(self, line: int, utf8_column: int) -> int:
        """Return the offset of a position in ``ast``, whose columns count UTF-8 bytes."""
        before = self.lines[line - 1].encode()[:utf8_column]
        return self._starts[line - 1] + len(before.decode())

    def span(self, node: ast.AST) -> tuple[int, int]:
        """Return the offsets at which a node begins and ends."""
        assert isinstance(node, (ast.stmt, ast.expr, ast.arg, ast.keyword, ast.alias))
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self.offset(node.lineno, node.col_offset), self.offset(node.end_lineno, node.end_col_offset)

    def of(self, node: ast.AST) -> str:
        """Return the text of a node as written."""
        start, end = self.span(node)
        return self.text[start:end]

    def indent(self, stmt: ast.stmt) -> str:
        """Return the white space before a statement."""
        line = self.lines[first_line(stmt) - 1]
        return line[: len(line) - len(line.lstrip(" \t\f"))]

    @cached_property
    def inside_strings(self) -> frozenset[int]:
        """The lines that begin inside a string, where added white space would change its value."""
        found: set[int] = set()
        open_f_strings: list[int] = []
        for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
            name = tokenize.tok_name[token.type]
            if name == "STRING":
                found.update(range(token.start[0] + 1, token.end[0] + 1))
            elif name in ("FSTRING_START", "TSTRING_START"):
                open_f_strings.append(token.start[0])
            elif name in ("FSTRING_END", "TSTRING_END"):
                found.update(range(open_f_strings.pop() + 1, token.end[0] + 1))
        return frozenset(found)


def first_line(stmt: ast.stmt) -> int:
    """Return the line on which a statement begins, its decorators included."""
    decorators: list[ast.expr] = getattr(stmt, "decorator_list", [])
    return min([stmt.lineno, *(decorator.lineno for decorator in decorators)])


def last_line(stmt: ast.stmt) -> int:
    """Return the line on which a statement ends."""
    assert stmt.end_lineno is not None
    return stmt.end_lineno


def split_lines(text: str) -> list[str]:
    """Return the lines of a text with their endings; only a line feed ends a line, as in ``ast``, git and patch."""
    return list(io.StringIO(text, newline="\n"))


def unified(source: str, patched: str, name: str) -> str:
    """Return the diff between two texts of the file ``name``, as ``git apply`` and ``patch -p1`` read it."""
    lines = difflib.unified_diff(split_lines(source), split_lines(patched), f"a/{name}", f"b/{name}")
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)
