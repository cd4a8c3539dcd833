"""The text of a script and of its patch, kept byte for byte: encoding, line endings, indentation, edits, diffs."""

from __future__ import annotations

import ast
import difflib
import io
import itertools
import tokenize
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal, NoReturn, TypeAlias

from mezzo.records.values import Note


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


_AFTER, _BEFORE, _INDENT, _INLINE = range(4)
"""Order of insertions at one offset: what follows the previous statement, then what precedes this one, then its indentation."""


class Editor:
    """Edits of one text, collected and then applied together."""

    def __init__(self, text: Text) -> None:
        self.text = text
        self._edits: list[tuple[int, int, int, int, str]] = []
        self._indented: set[int] = set()

    def insert(self, offset: int, words: str) -> None:
        """Insert words inside a line."""
        self._add(offset, offset, _INLINE, words)

    def replace(self, node: ast.AST, words: str) -> None:
        """Replace a node's text."""
        start, end = self.text.span(node)
        self._add(start, end, _INLINE, words)

    def append_to(self, node: ast.AST, words: str) -> None:
        """Insert words right after a node."""
        self.insert(self.text.span(node)[1], words)

    def add_argument(self, call: ast.Call, words: str) -> None:
        """Add an argument after the last one, on a line of its own if that one begins a line."""
        arguments: list[ast.expr | ast.keyword] = [*call.args, *call.keywords]
        if not arguments:
            self.insert(self.text.span(call)[1] - 1, words)
            return
        last = max(arguments, key=lambda argument: (argument.lineno, argument.col_offset))
        line = self.text.lines[last.lineno - 1]
        indent = line[: len(line) - len(line.lstrip())]
        alone = len(indent.encode()) == last.col_offset
        self.append_to(last, f",{self.text.newline}{indent}{words}" if alone else f", {words}")

    def line_before(self, stmt: ast.stmt, *lines: str) -> None:
        """Insert lines above a statement, indented like it."""
        self._check_alone(stmt, stmt)
        place, indent = self.text.line_start(first_line(stmt)), self.text.indent(stmt)
        self._add(place, place, _BEFORE, "".join(f"{indent}{line}{self.text.newline}" for line in lines))

    def line_after(self, stmt: ast.stmt, *lines: str) -> None:
        """Insert lines below a statement, indented like it."""
        self._check_alone(stmt, stmt)
        place, indent, newline = self.text.line_start(last_line(stmt) + 1), self.text.indent(stmt), self.text.newline
        body = "".join(f"{indent}{line}{newline}" for line in lines)
        if not self.text.lines[last_line(stmt) - 1].endswith("\n"):
            body = newline + body.removesuffix(newline)  # the file's last line has no ending
        self._add(place, place, _AFTER, body)

    def wrap(self, first: ast.stmt, last: ast.stmt, header: str, *, unit: str, comment: str = "") -> None:
        """Put statements of one block under ``header``, indented by one more ``unit``."""
        self._check_alone(first, last)
        self.line_before(first, header + comment)
        for line in range(first_line(first), last_line(last) + 1):
            if line in self._indented:
                unclear(f"line {line} would be wrapped twice", "patch this loop by hand")
            self._indented.add(line)
            if self.text.lines[line - 1].strip() and line not in self.text.inside_strings:
                place = self.text.line_start(line)
                self._add(place, place, _INDENT, unit)

    def delete(self, stmt: ast.stmt) -> None:
        """Remove the lines of a statement."""
        self._check_alone(stmt, stmt)
        start, end = self.text.line_start(first_line(stmt)), self.text.line_start(last_line(stmt) + 1)
        self._add(start, end, _AFTER, "")

    def _check_alone(self, first: ast.stmt, last: ast.stmt) -> None:
        """Refuse statements that share a line with others, since edits move whole lines."""
        begins = self.text.lines[first.lineno - 1].encode()[: first.col_offset].strip()
        assert last.end_col_offset is not None
        rest = self.text.lines[last_line(last) - 1].encode()[last.end_col_offset :].strip()
        if begins or (rest and not rest.startswith(b"#")):
            unclear(f"line {first.lineno} has several statements", "put each statement on its own line")

    def _add(self, start: int, end: int, order: int, words: str) -> None:
        self._edits.append((start, end, order, len(self._edits), words))

    def result(self) -> str:
        """Return the text with all edits applied."""
        parts: list[str] = []
        done = 0
        for start, end, _, _, words in sorted(self._edits, key=lambda e: (e[0], e[2], e[3])):
            if start < done:
                unclear("two changes to the script overlap", "patch this loop by hand")
            parts += [self.text.text[done:start], words]
            done = max(done, end)
        return "".join([*parts, self.text.text[done:]])


LoopKind: TypeAlias = Literal[
    "plain",
    "accumulation",
    "clipping",
    "gan",
    "own_amp",
    "lightning",
    "fabric",
    "accelerate",
    "transformers",
    "keras",
    "paddle_fit",
    "compiled",
]
PatchStyle: TypeAlias = Literal["auto", "torch.amp", "mezzo"]
WrittenStyle: TypeAlias = Literal["torch.amp", "mezzo", "framework", "paddle.amp"]
"""The interface that a patched script calls; ``framework``: an argument of the library that trains."""


@dataclass(frozen=True, kw_only=True)
class Patch:
    """A change to a script that turns on a policy, as a unified diff."""

    path: Path
    """The file to change: the script, or another of the user's files next to it that has the training loop."""
    source: str
    patched: str
    diff: str
    """Unified, with file names ``a/...`` and ``b/...``, for ``git apply`` and ``patch -p1``."""
    kind: LoopKind
    style: WrittenStyle
    reasons: Sequence[Note] = field(default_factory=list)
    """What was changed, on which line, and why; also what was left alone, and why."""
    encoding: str = "utf-8"
    """The file's encoding, which ``write`` and ``write_diff`` keep."""

    def write(self, path: Path) -> None:
        """Write the patched text with the encoding and line endings of the source."""
        path.write_bytes(self.patched.encode(self.encoding))

    def write_diff(self, path: Path) -> None:
        """Write the diff with the bytes of the source, so that it applies."""
        path.write_bytes(self.diff.encode(self.encoding.removesuffix("-sig")))


@dataclass(frozen=True, kw_only=True)
class Refused:
    """No patch: the reason, and instructions to patch by hand."""

    reason: str
    by_hand: str
    already: bool = False
    """Whether the script already does what the patch would add."""
    only_in_style: bool = False
    """Whether another style of patch may do what this one cannot."""


class Unclear(Exception):
    """A script that cannot be patched without guessing, or needs no patch."""

    def __init__(self, refused: Refused) -> None:
        super().__init__(refused.reason)
        self.refused = refused


def unclear(reason: str, by_hand: str, *, already: bool = False, only_in_style: bool = False) -> NoReturn:
    """Give up the patch, with the reason and the instructions.

    Raises:
        Unclear: always.
    """
    raise Unclear(Refused(reason=reason, by_hand=by_hand, already=already, only_in_style=only_in_style))
