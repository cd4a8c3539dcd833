"""Rewrite one of the script's files, so that its loops can be left for a snapshot and entered again.

Every loop gets a hook at the top of its body, and an iterator with a name of its own, so that its position can be saved::

    for x in data:          for x in (_mezzo_it_7 := __mezzo__.begin(7, FILE, data)):
        train(x)                if __mezzo__.due: __mezzo__.hook(7, FILE)
                                train(x)

A resumed run gets other code in the functions on the way to the saved place, and only there. Until it has arrived, ``_mezzo_on`` is
true: the statements before the way are left out, conditions on it hold, a loop takes its saved iterator and begins with an empty turn,
and a call is made without computing its arguments: the called function takes its variables from the snapshot.

Lines and names of functions stay as they were, so that tracebacks and pickles do.
"""

from __future__ import annotations

import ast
import itertools
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

from mezzo.errors import SnapshotError

RUNTIME = "__mezzo__"
"""The name in ``builtins`` by which rewritten code calls Mezzo."""
ITERATOR, ON, CELLS, TURN, SAVED = "_mezzo_it_", "_mezzo_on", "_mezzo_cells", "_mezzo_turn_", "_mezzo_saved"
OWN_NAMES = (ITERATOR, ON, CELLS, TURN, SAVED)
"""Beginnings of the names that rewriting adds to a function or a file."""


class WayBack(NamedTuple):
    """How a function gets back to the place where it was."""

    file: str
    place: FunctionPlace
    frame: str
    """The name of its frame in the snapshot: ``0``, ``1``, or ``generator 0``."""
    to: TextSpan
    """The loop, the call or the ``yield`` that it was at."""
    base: TextSpan | None = None
    """The statement that set-up ends at, in the function in which it does."""
    arguments: tuple[int, tuple[str, ...]] = (0, ())
    """Of the call: how many positional arguments the called function needs, and the names of those it takes by name only."""
    calls: str = ""
    """The frame that the call creates; empty for a loop and a ``yield``."""

    @property
    def yields(self) -> bool:
        """Whether it leads to a ``yield``."""
        return self.frame.startswith("generator")


def not_entered(statement: ast.stmt, kind: type[SnapshotError]) -> SnapshotError:
    """Return the error, of a kind, that a compound statement cannot be entered in the middle."""
    kind_of_block = type(statement).__name__.lower()
    return kind(
        f"line {statement.lineno}: the loop is inside {kind_of_block}, which cannot be entered in the middle",
        hint="move the loop out of it, or save with mezzo.Session",
    )


def rewritten(source: ScriptSource, ways: Sequence[WayBack] = ()) -> CodeType:
    """Return the code of a file, with hooks in its loops, and the ways back that belong to it.

    Raises:
        SnapshotError: a way leads through a statement that cannot be entered.
    """
    return _Rewriting(source, ways).code()


class _Rewriting:
    def __init__(self, source: ScriptSource, ways: Sequence[WayBack]) -> None:
        self._source, self._tree = source, source.parsed()
        self._numbers = {id(loop): number for number, loop in enumerate(loops_of(self._tree))}
        self._ways = {way.place: way for way in ways}
        plain = compile(source.text, source.path, "exec", dont_inherit=True)
        self._codes = {place_of(code): code for code in codes_in(plain)}

    def code(self) -> CodeType:
        self._tree.body = self._function(self._tree.body, MODULE, [])
        return compile(ast.fix_missing_locations(self._tree), self._source.path, "exec", dont_inherit=True)

    # --- functions -------------------------------------------------------------------------------------------------------

    def _function(self, body: list[ast.stmt], place: FunctionPlace, scopes: list[str]) -> list[ast.stmt]:
        head_length = _head_length(body)
        head, rest = body[:head_length], body[head_length:]
        if not rest:
            return body
        at = rest[0]
        code = self._codes.get(place)
        cells = [name for name in code.co_cellvars if name != "__class__"] if code and place != MODULE else []
        if place == MODULE:  # names that exist from the start: a loop over globals() must not see it grow
            names = [f"{ITERATOR}{number}" for number in self._numbers.values()]
            head += _new(f"{' = '.join([*names, ON, SAVED])} = None", at)
        if cells:
            head += _new(f"{CELLS} = lambda: ({', '.join(cells)},)", at)
        way = self._ways.get(place)
        if way is None:
            return head + self._plain(rest, scopes)
        statements = chain(self._tree, place, way.to)
        if not (way.yields or way.calls):
            statements = up_to_loop(statements, way.to)
        if way.base is None:
            head += _new(f"{ON} = {RUNTIME}.enter({way.frame!r}, {CELLS if cells else None})", at)
            head += self._assigned(way, statements, at)
        else:
            head += _new(f"{ON} = False", at)
        return head + _Path(self, way, scopes).body(rest, statements, live=way.base is None)

    def _assigned(self, way: WayBack, statements: Iterable[ast.stmt], at: ast.stmt) -> list[ast.stmt]:
        """Return statements that give a function's variables their saved values."""
        if way.place == MODULE:  # its variables are in a dict, which is restored
            return []
        code = self._codes[way.place]
        loops = [f"{ITERATOR}{self._numbers[id(one)]}" for one in statements if isinstance(one, ast.For)]
        names = [*dict.fromkeys([*code.co_varnames, *code.co_cellvars]), *loops]
        lines = [f"if {ON}:", f"    {SAVED} = {RUNTIME}.variables({way.frame!r})"]
        for name in names:
            if name.isidentifier() and name != "__class__":
                lines.append(f"    if {name!r} in {SAVED}: {name} = {SAVED}[{name!r}]")
        return _new("\n".join(lines), at)

    # --- statements ------------------------------------------------------------------------------------------------------

    def _plain(self, body: list[ast.stmt], scopes: list[str], *, in_class: bool = False) -> list[ast.stmt]:
        return [new for statement in body for new in self._one(statement, scopes, in_class=in_class)]

    def _one(self, statement: ast.stmt, scopes: list[str], *, in_class: bool = False) -> list[ast.stmt]:
        if isinstance(statement, ast.FunctionDef):
            place = FunctionPlace(".".join([*scopes, statement.name]), first_line(statement))
            statement.body = self._function(statement.body, place, [*scopes, statement.name, "<locals>"])
            return [statement]
        if isinstance(statement, ast.ClassDef):
            statement.body = self._plain(statement.body, [*scopes, statement.name], in_class=True)
            return [statement]
        if isinstance(statement, ast.AsyncFunctionDef):
            return [statement]
        self._inner(statement, scopes, in_class=in_class)
        if isinstance(statement, Loop) and not in_class:
            return self._loop(statement)
        return [statement]

    def _inner(self, statement: ast.stmt, scopes: list[str], *, in_class: bool = False) -> None:
        """Rewrite the bodies of a compound statement."""
        for name in ("body", "orelse", "finalbody"):
            if getattr(statement, name, None):
                setattr(statement, name, self._plain(getattr(statement, name), scopes, in_class=in_class))
        for part in [*getattr(statement, "handlers", []), *getattr(statement, "cases", [])]:
            part.body = self._plain(part.body, scopes, in_class=in_class)

    def _loop(self, loop: Loop) -> list[ast.stmt]:
        number = self._numbers[id(loop)]
        loop.body = self.hook(number, loop) + loop.body
        if isinstance(loop, ast.While):
            return [*_new(self._begin(number, "()"), loop), loop]
        loop.iter = self.begun(number, loop)
        return [loop, *_new(f"{ITERATOR}{number} = None", loop)]

    def begun(self, number: int, loop: ast.For) -> ast.expr:
        """Return the header's iterable, made an iterator with a name."""
        call = _expression(self._begin(number, "0"), loop.iter)
        assert isinstance(call, ast.Call)
        call.args[-1] = loop.iter
        target = ast.copy_location(ast.Name(f"{ITERATOR}{number}", ast.Store()), loop.iter)
        return ast.copy_location(ast.NamedExpr(target, call), loop.iter)

    def hook(self, number: int, loop: ast.stmt, *, unless: str = "") -> list[ast.stmt]:
        return _new(f"if {RUNTIME}.due{unless}: {RUNTIME}.hook({number}, {self._source.path!r})", loop)

    def _begin(self, number: int, iterable: str) -> str:
        return f"{RUNTIME}.begin({number}, {self._source.path!r}, {iterable})"

    def number(self, loop: ast.stmt) -> int:
        return self._numbers[id(loop)]


class _Path:
    """The statements of one function, with the way through them."""

    def __init__(self, rewriting: _Rewriting, way: WayBack, scopes: list[str]) -> None:
        self._all, self._way, self._scopes = rewriting, way, scopes

    def body(self, body: list[ast.stmt], way: list[ast.stmt], *, live: bool) -> list[ast.stmt]:
        """Return a body that leads to ``way[0]``; ``live`` if the way has begun before it."""
        step, rest = way[0], way[1:]
        index = body.index(step)
        plain, saved = lambda part: self._all._plain(part, self._scopes), self._way
        before, between = body[:index], list[ast.stmt]()
        base = next((n for n, one in enumerate(body[: index + 1]) if span_of(one) == saved.base), None)
        if base is not None and not live:
            before, between = body[:base], body[base:index]
        out = plain(before)
        if live:
            out = _if(f"not {ON}", out, step)
        elif base is not None:
            at = body[base]
            out += _new(f"{ON} = {RUNTIME}.base({saved.frame!r})", at)
            out += self._all._assigned(saved, [step, *rest], at)
            out += _if(f"not {ON}", plain(between), step)
            live = True
        return out + self._step(step, rest, live=live) + plain(body[index + 1 :])

    def _step(self, step: ast.stmt, rest: list[ast.stmt], *, live: bool) -> list[ast.stmt]:
        if not rest and self._way.yields:
            return self._yield(step)
        if not rest and self._way.calls:
            return self._call(step)
        if isinstance(step, Loop):
            return self._loop(step, rest, live=live)
        if not live:  # set-up comes this way: its conditions and its contexts hold by themselves
            self._into(step, rest, live=False)
            return [step]
        if isinstance(step, ast.If):
            in_body = self._into(step, rest, live=True)
            step.test = _joined(f"{ON} or 0" if in_body else f"not {ON} and 0", step.test)
            return [step]
        if isinstance(step, ast.With):
            self._into(step, rest, live=True)
            step.body = self._all._assigned(self._way, [step, *rest], step) + step.body
            return [step]
        if isinstance(step, ast.Try) and rest[0] in step.body:
            self._into(step, rest, live=True)
            return [step]
        raise not_entered(step, SnapshotError)

    def _into(self, step: ast.stmt, rest: list[ast.stmt], *, live: bool) -> bool:
        """Lead the way into the body that it goes through, and rewrite the others; return whether it is the first body."""
        first = False
        for name in ("body", "orelse", "finalbody"):
            block = getattr(step, name, None)
            if block and rest[0] in block:
                first = name == "body"
                setattr(step, name, self.body(block, rest, live=live))
            elif block:
                setattr(step, name, self._all._plain(block, self._scopes))
        for part in [*getattr(step, "handlers", []), *getattr(step, "cases", [])]:
            way = rest[0] in part.body
            part.body = self.body(part.body, rest, live=live) if way else self._all._plain(part.body, self._scopes)
        return first

    def _loop(self, loop: Loop, rest: list[ast.stmt], *, live: bool) -> list[ast.stmt]:
        number = self._all.number(loop)
        if rest:
            inner = self._all.hook(number, loop, unless=f" and not {ON}") + self.body(loop.body, rest, live=live)
        else:
            inner = _new(f"if {ON}: {RUNTIME}.arrive()", loop)
            inner += self._all._assigned(self._way, [loop], loop) + _new(f"{ON} = False", loop)
            inner += self._all.hook(number, loop) + self._all._plain(loop.body, self._scopes)
        loop.orelse = self._all._plain(loop.orelse, self._scopes)
        if isinstance(loop, ast.While):
            loop.test, loop.body = _joined(f"{ON} or 0", loop.test), inner
            return [*_if(f"not {ON}", _new(self._all._begin(number, "()"), loop), loop), loop]
        target = loop.target
        turn = f"{TURN}{number}"
        loop.target = ast.copy_location(ast.Name(turn, ast.Store()), target)
        take = ast.copy_location(ast.Assign([target], ast.copy_location(ast.Name(turn, ast.Load()), target)), target)
        loop.body = _if(f"{turn} is not {RUNTIME}.EMPTY", [take], loop) + inner
        choice = _expression(f"{RUNTIME}.again({ITERATOR}{number}) if {ON} else 0", loop.iter)
        assert isinstance(choice, ast.IfExp)
        choice.orelse = self._all.begun(number, loop)
        loop.iter = choice
        return [loop, *_new(f"{ITERATOR}{number} = None", loop)]

    def _call(self, step: ast.stmt) -> list[ast.stmt]:
        way = self._way
        old = next(n for n in ast.walk(step) if isinstance(n, ast.Call) and span_of(n) == way.to)
        count, names = way.arguments
        words = ", ".join(["None"] * count + [f"{name}=None" for name in names])
        new = _expression(f"0({words}) if {RUNTIME}.entering == {way.calls!r} else 0", old)
        assert isinstance(new, ast.IfExp)
        assert isinstance(new.body, ast.Call)
        new.body.func, new.orelse = old.func, ast.Call(old.func, old.args, old.keywords)
        ast.copy_location(new.orelse, old)
        _replace(step, old, new)
        opened = _new(f"if {ON}: {RUNTIME}.entering, {ON} = {way.calls!r}, False", step)
        return opened + self._all._one(step, self._scopes)

    def _yield(self, step: ast.stmt) -> list[ast.stmt]:
        old = next(n for n in ast.walk(step) if isinstance(n, ast.Yield) and span_of(n) == self._way.to)
        new = _expression(f"(yield) if {ON} else 0", old)
        assert isinstance(new, ast.IfExp)
        new.orelse = ast.copy_location(ast.Yield(old.value), old)
        _replace(step, old, new)
        return [step, *_new(f"{ON} = False", step)]


# --- small pieces of syntax ------------------------------------------------------------------------------------------------


def _head_length(body: list[ast.stmt]) -> int:
    """Return the number of statements that must stay first: the docstring, ``from __future__``, ``global`` and ``nonlocal``."""
    for number, one in enumerate(body):
        text = isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant) and isinstance(one.value.value, str)
        future = isinstance(one, ast.ImportFrom) and one.module == "__future__"
        if not (text or future or isinstance(one, ast.Global | ast.Nonlocal)):
            return number
    return len(body)


def _new(text: str, at: ast.stmt) -> list[ast.stmt]:
    """Return statements, at the place of another one."""
    statements = ast.parse(text).body
    for statement in statements:
        _move(statement, at)
    return statements


def _expression(text: str, at: ast.expr) -> ast.expr:
    new = ast.parse(text, mode="eval").body
    _move(new, at)
    return new


def _move(new: ast.AST, at: ast.expr | ast.stmt) -> None:
    for node in ast.walk(new):
        if "lineno" in node._attributes:
            ast.copy_location(node, at)
            if isinstance(at, ast.stmt):  # a compound statement's end is not its first line
                node.end_lineno, node.end_col_offset = node.lineno, node.col_offset  # type: ignore[attr-defined]


def _if(test: str, body: list[ast.stmt], at: ast.stmt) -> list[ast.stmt]:
    if not body:
        return []
    (new,) = _new(f"if {test}: pass", at)
    assert isinstance(new, ast.If)
    new.body = body
    return [new]


def _joined(text: str, test: ast.expr) -> ast.expr:
    """Return ``text`` with ``test`` for its last operand."""
    new = _expression(text, test)
    assert isinstance(new, ast.BoolOp)
    new.values[-1] = test
    return new


def _replace(step: ast.stmt, old: ast.expr, new: ast.expr) -> None:
    """Replace an expression of a statement, but not inside statements in its bodies."""

    class Replace(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> ast.AST:
            if node is old:
                return new
            return node if isinstance(node, ast.stmt) and node is not step else self.generic_visit(node)

    Replace().visit(step)


def codes_in(code: CodeType) -> Iterable[CodeType]:
    """Yield a code object and those inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes_in(constant)


# A running frame knows the position of the instruction that it executes (``co_positions``, Python 3.11). From it follow the call or loop
# that the frame is in, and the statements around that, from the outermost to the innermost: the way by which a new frame gets there again.

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


class ScriptSource:
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
    """Return the statements of a function around a position, the outermost first; nested functions are not entered."""
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
    """Return the body of a function; the file's for ``MODULE``.

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
    """Return the line that the function's code begins with: its first decorator's, if it has one."""
    return min([function.lineno, *(decorator.lineno for decorator in function.decorator_list)])
