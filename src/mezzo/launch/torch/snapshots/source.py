"""A file of the script as a syntax tree: its loops by number, its functions by place, and the statements around a position.

A running frame knows the position of the instruction that it executes (``co_positions``, Python 3.11). From it follow the call or loop
that the frame is in, and the statements around that, from the outermost to the innermost: the way by which a new frame gets there again.
"""

from __future__ import annotations

import ast
import itertools
import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

Loop = ast.For | ast.While


class TextSpan(NamedTuple):
    """A place in a file: from a line and column to another."""

    line: int
    column: int
    end_line: int
    end_column: int

    def contains(self, other: TextSpan) -> bool:
        """Return whether ``other`` lies inside."""
        return self[:2] <= other[:2] and other[2:] <= self[2:]


class FunctionPlace(NamedTuple):
    """A function by its name and first line; the module itself is ``<module>`` at line 1."""

    name: str
    line: int


MODULE = FunctionPlace("<module>", 1)


def span_of(node: ast.expr | ast.stmt) -> TextSpan:
    """Return the place of a node."""
    return TextSpan(
        node.lineno, node.col_offset, node.end_lineno or node.lineno, node.end_col_offset or node.col_offset
    )


def position_of(code: CodeType, instruction: int) -> TextSpan | None:
    """Return the place in the file of the instruction at byte ``instruction``; None if the compiler kept none."""
    if sys.version_info < (3, 11):
        return None
    line, end_line, column, end_column = next(itertools.islice(code.co_positions(), instruction // 2, None))
    if line is None or end_line is None or column is None or end_column is None:
        return None
    return TextSpan(line, column, end_line, end_column)


def place_of(code: CodeType) -> FunctionPlace:
    """Return the place of a function by its code."""
    if code.co_name == "<module>":
        return MODULE
    name: str = getattr(code, "co_qualname", code.co_name)
    return FunctionPlace(name, code.co_firstlineno)


class Source:
    """One of the script's files."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.text = Path(path).read_bytes()
        self.tree = self.parsed()
        self.loops = loops_of(self.tree)
        self._numbers = {span_of(loop): number for number, loop in enumerate(self.loops)}
        self._around: dict[tuple[CodeType, int], tuple[int, ...]] = {}

    def parsed(self) -> ast.Module:
        """Return a new syntax tree of the file."""
        return ast.parse(self.text, self.path)

    def number_of(self, loop: ast.stmt) -> int:
        """Return the number of a loop."""
        return self._numbers[span_of(loop)]

    def chain(self, place: FunctionPlace, at: TextSpan) -> list[ast.stmt]:
        """Return the statements of a function around a position, the outermost first."""
        return chain(self.tree, place, at)

    def loops_around(self, frame: FrameType) -> tuple[int, ...]:
        """Return the numbers of the loops whose bodies a frame is in, the outermost first."""
        key = (frame.f_code, frame.f_lasti)
        found = self._around.get(key)
        if found is None:
            at = position_of(*key)
            try:
                statements = [] if at is None else self.chain(place_of(frame.f_code), at)
            except LookupError:  # a comprehension or a lambda: no statement is inside
                statements = []
            around = [
                loop for loop in statements if isinstance(loop, Loop) and at is not None and not _in_header(loop, at)
            ]
            found = self._around[key] = tuple(map(self.number_of, around))
        return found


def loops_of(tree: ast.Module) -> list[Loop]:
    """Return the ``for`` and ``while`` statements of a file, in a fixed order."""
    return [node for node in ast.walk(tree) if isinstance(node, Loop)]


def _in_header(loop: Loop, at: TextSpan) -> bool:
    return span_of(loop.iter if isinstance(loop, ast.For) else loop.test).contains(at)


def chain(tree: ast.Module, place: FunctionPlace, at: TextSpan) -> list[ast.stmt]:
    """Return the statements of a function around a position, the outermost first; those of nested functions are not entered."""
    body, found = function_body(tree, place), list[ast.stmt]()
    while True:
        inside = next((statement for statement in body if span_of(statement).contains(at)), None)
        if inside is None:
            return found
        found.append(inside)
        if isinstance(inside, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            return found
        body = [inner for block in blocks_of(inside) for inner in block]


def up_to_loop(statements: list[ast.stmt], loop: TextSpan) -> list[ast.stmt]:
    """Return the statements around a loop, with it as the last one, without those in its header; none if it is not among them."""
    places = [isinstance(one, Loop) and span_of(one) == loop for one in statements]
    return statements[: places.index(True) + 1] if True in places else []


def blocks_of(statement: ast.stmt) -> list[list[ast.stmt]]:
    """Return the bodies of a compound statement; none for a simple one."""
    blocks = [getattr(statement, name, []) for name in ("body", "orelse", "finalbody")]
    inner = [*getattr(statement, "handlers", []), *getattr(statement, "cases", [])]
    return [block for block in [*blocks, *(one.body for one in inner)] if block]


def function_body(tree: ast.Module, place: FunctionPlace) -> list[ast.stmt]:
    """Return the body of a function; that of the file for ``MODULE``.

    Raises:
        LookupError: there is no such function, as for a lambda or a comprehension.
    """
    if place == MODULE:
        return tree.body
    name = place.name.rpartition(".")[2]
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == name and first_line(node) == place.line:
            return node.body
    raise LookupError(f"no function {place.name} at line {place.line}")


def first_line(function: ast.FunctionDef) -> int:
    """Return the line that the function's code begins with: that of its first decorator, if it has one."""
    return min([function.lineno, *(decorator.lineno for decorator in function.decorator_list)])
