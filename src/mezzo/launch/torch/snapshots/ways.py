"""The way from the end of set-up to a running loop, frame by frame, and whether it can be gone again."""

from __future__ import annotations

import ast
import builtins
import inspect
from pathlib import Path
from types import CodeType, FrameType, FunctionType, MethodType
from typing import Any, NamedTuple

from mezzo.errors import NotSavable
from mezzo.launch.torch.snapshots.rewriting import (
    Loop,
    ScriptSource,
    TextSpan,
    WayBack,
    not_entered,
    place_of,
    position_of,
    span_of,
    up_to_loop,
)
from mezzo.launch.torch.snapshots.script_files import OwnFiles

_CONTEXTS = (
    *("no_grad", "enable_grad", "set_grad_enabled", "inference_mode", "autocast", "sdpa_kernel", "device"),
    *("nullcontext", "catch_warnings", "open", "tqdm"),
)
"""Context managers that may be entered once more."""


class LoopPath(NamedTuple):
    """The frames between the end of set-up and a loop."""

    frames: list[FrameType]
    """The script's frames, the outermost first; the last one is in the loop."""
    common: int
    """How many of them existed when set-up ended."""
    base: TextSpan
    """The statement before which set-up ends, in the last of these."""
    loop: TextSpan


def path_between(
    files: OwnFiles,
    stack: list[FrameType],
    then: list[FrameType],
    positions: list[TextSpan | None],
    end: TextSpan,
    loop: tuple[str, int],
) -> LoopPath:
    """Return the path from the end of set-up to a loop.

    Args:
        files: the script's files.
        stack: all frames, including libraries' frames.
        then: the script's frames at the end of set-up, and ``positions`` where they were.
        positions: of each, its call or loop.
        end: the statement that set-up ended at, in the innermost of them.
        loop: the loop to enter again.

    Raises:
        NotSavable: there is no such path.
    """
    own = [one for one in stack if files.has(one)]
    common = 0
    while common < min(len(own), len(then)) and own[common] is then[common]:
        common += 1
    if not common:
        raise NotSavable(
            "the functions in which set-up ran have ended", hint="train in one function, or at the top of the script"
        )
    frame = own[common - 1]
    source, place = files.sources[frame.f_code.co_filename], place_of(frame.f_code)
    target = span_of(files.sources[loop[0]].loops[loop[1]])
    now = _statements(source, frame, target if common == len(own) else None)
    is_innermost = common == len(then)
    if is_innermost and end in map(span_of, now):
        return _checked(files, stack, LoopPath(own, common, end, target))
    at = end if is_innermost else positions[common - 1]
    before = [] if at is None else source.chain(place, at)
    other = next((one for one, two in zip(before, now, strict=False) if one is not two), None)
    if other is None:
        raise NotSavable("the same statement runs set-up and the training", hint="write one training loop around both")
    return _checked(files, stack, LoopPath(own, common, span_of(other), target))


def _statements(source: ScriptSource, frame: FrameType, loop: TextSpan | None) -> list[ast.stmt]:
    place = place_of(frame.f_code)
    if loop is not None:
        return up_to_loop(source.chain(place, loop), loop)
    at = position_of(frame.f_code, frame.f_lasti)
    return [] if at is None else source.chain(place, at)


def _checked(files: OwnFiles, stack: list[FrameType], path: LoopPath) -> LoopPath:
    """Raise unless every frame of the path is the script's, and none of them twice."""
    inner = stack[stack.index(path.frames[path.common - 1]) :]
    for frame in inner:
        code = frame.f_code
        if not files.has(code):
            raise NotSavable(
                f"the loop is called through {code.co_name} of {frame.f_globals.get('__name__', '?')}",
                hint="use the checkpoints of that library, or save with mezzo.Session",
            )
        if code.co_flags & (inspect.CO_GENERATOR | inspect.CO_COROUTINE) or (
            code.co_name.startswith("<") and code.co_name != "<module>"
        ):
            raise NotSavable(
                f"the loop runs inside {code.co_name} at {Path(code.co_filename).name}:{code.co_firstlineno}",
                hint="call the training in a statement of its own",
            )
    codes = [frame.f_code for frame in inner]
    if len(set(codes)) < len(codes):
        raise NotSavable("a function of the training calls itself", hint="save with mezzo.Session")
    return path


def ways_of(files: OwnFiles, path: LoopPath) -> list[WayBack]:
    """Return the way of each frame from the end of set-up.

    Raises:
        NotSavable: a statement on the way cannot be entered, or a call cannot be made again.
    """
    ways = list[WayBack]()
    for number, frame in enumerate(path.frames):
        if number < path.common - 1:
            continue
        code = frame.f_code
        source, place = files.sources[code.co_filename], place_of(code)
        base = path.base if number == path.common - 1 else None
        is_last = number == len(path.frames) - 1
        at = path.loop if is_last else position_of(code, frame.f_lasti)
        if at is None:
            raise NotSavable(
                f"the position in {code.co_name} is not known", hint="run the script with the Python that compiled it"
            )
        statements = _statements(source, frame, path.loop if is_last else None)
        _refuse_blocks(statements, base)
        if is_last:
            ways.append(WayBack(files.name_of(code.co_filename), place, str(number), at, base))
            continue
        arguments = _arguments(statements[-1], at, frame, path.frames[number + 1].f_code)
        ways.append(WayBack(files.name_of(code.co_filename), place, str(number), at, base, arguments, str(number + 1)))
    return ways


def _refuse_blocks(statements: list[ast.stmt], base: TextSpan | None) -> None:
    """Raise for statements on the way, after the end of set-up, whose bodies cannot be entered."""
    begun = base is None
    for outer, inner in zip(statements, [*statements[1:], None], strict=True):
        begun = begun or (base is not None and base.contains(span_of(outer)))
        if not begun or inner is None or isinstance(outer, Loop | ast.If):
            continue
        if isinstance(outer, ast.Try) and inner in outer.body:
            continue
        if isinstance(outer, ast.With) and all(_name_of(item.context_expr) in _CONTEXTS for item in outer.items):
            continue
        raise not_entered(outer, NotSavable)


def _name_of(expression: ast.expr) -> str:
    function = expression.func if isinstance(expression, ast.Call) else expression
    return (
        function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""
    )


def _arguments(statement: ast.stmt, at: TextSpan, frame: FrameType, called: CodeType) -> tuple[int, tuple[str, ...]]:
    """Return how to call a function again without its arguments: how many, and the names of those passed by name only."""
    header = [statement] if not hasattr(statement, "body") else _header(statement)
    calls = [node for part in header for node in ast.walk(part) if isinstance(node, ast.Call)]
    call = next((node for node in calls if span_of(node) == at), None)
    if call is None:
        raise NotSavable(
            f"line {at.line}: {called.co_name} is not called by name", hint="call it in a statement of its own"
        )
    for node in calls:
        if node is not call and (
            span_of(node)[2:] <= span_of(call)[:2] or any(node is part for part in ast.walk(call.func))
        ):
            raise NotSavable(
                f"line {at.line}: {ast.unparse(node)[:40]} is called before {ast.unparse(call)[:40]} in one statement",
                hint="give each call a line of its own",
            )
    function = _value(call.func, frame)
    bound = isinstance(function, MethodType)
    plain = function.__func__ if isinstance(function, MethodType) else function
    if not isinstance(plain, FunctionType) or plain.__code__ is not called:
        raise NotSavable(
            f"line {at.line}: {ast.unparse(call.func)[:40]} does not call {called.co_name} itself, but through a decorator or a class",
            hint="call the function itself",
        )
    by_name = called.co_varnames[called.co_argcount : called.co_argcount + called.co_kwonlyargcount]
    return called.co_argcount - bound, by_name


def _header(statement: ast.stmt) -> list[ast.AST]:
    parts = [getattr(statement, "iter", None), getattr(statement, "test", None), getattr(statement, "subject", None)]
    return [
        one for one in [*parts, *(item.context_expr for item in getattr(statement, "items", []))] if one is not None
    ]


def _value(expression: ast.expr, frame: FrameType) -> Any:
    """Return the value of a name with attributes, without running code of the script."""
    if isinstance(expression, ast.Name):
        for names in (frame.f_locals, frame.f_globals, vars(builtins)):
            if expression.id in names:
                return names[expression.id]
    if isinstance(expression, ast.Attribute):
        return getattr(_value(expression.value, frame), expression.attr)
    raise NotSavable(
        f"line {expression.lineno}: {ast.unparse(expression)[:40]} is not a plain name",
        hint="call the training by its name",
    )
