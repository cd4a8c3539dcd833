"""Find the script's own name for a loss in the line that calls its backward pass."""

from __future__ import annotations

import ast
import functools
import linecache
import sys
import warnings

from mezzo.observe.source_lines import own_line

_BACKWARD = ("backward", "manual_backward")


def running_loss_name() -> str:
    """Return the script's name for the loss whose backward pass begins now; empty text if it has none."""
    line, by_library = own_line(sys._getframe(1))
    return loss_name(line, by_library=by_library)


def loss_name(line: str, *, by_library: bool) -> str:
    """Return the name of the loss whose backward pass a line calls: of the variable, attribute or key that holds it, or of a sum of such.

    Args:
        line: the line, as ``file:line``.
        by_library: whether the line calls a library, which runs the backward pass of its argument: ``accelerator.backward(loss)``.

    Returns:
        The name; empty text if the loss has none, or if the line has no such call or several.
    """
    file, _, number = line.rpartition(":")
    calls = [call for call in _calls_in(file) if call.lineno <= int(number or 0) <= (call.end_lineno or call.lineno)]
    if len(calls) != 1:
        return ""
    (call,) = calls
    assert isinstance(call.func, ast.Attribute)
    in_argument = by_library or call.func.attr != "backward" or ast.unparse(call.func.value) == "torch.autograd"
    if not in_argument:
        return _name(call.func.value)
    return _name(call.args[0]) if call.args else ""


@functools.lru_cache(maxsize=64)
def _calls_in(file: str) -> tuple[ast.Call, ...]:
    """Return the calls of backward passes in a file; none if it cannot be read, as code that was typed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python itself has warned about the script's text
            tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return ()
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    return tuple(call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr in _BACKWARD)


def _name(node: ast.expr) -> str:
    match node:
        case ast.Name():
            return node.id
        case ast.Attribute():
            return node.attr
        case ast.Subscript(slice=ast.Constant(value=str(key))):
            return key
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            names = [_name(left), _name(right)]
            return " + ".join(names) if all(names) else ""
        case ast.BinOp(left=left, op=ast.Div()):  # divided for accumulation
            return _name(left)
        case ast.Call(func=ast.Attribute(attr="scale"), args=[scaled]):  # by a GradScaler
            return _name(scaled)
    return ""
