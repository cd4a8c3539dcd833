"""Edits of a file's text by position, so that everything between them stays byte for byte the same."""

from __future__ import annotations

import ast

from mezzo.patching.outcome import unclear
from mezzo.patching.text import Text, first_line, last_line

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
