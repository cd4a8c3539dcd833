"""Compute an operation again on other values or in a wider format: what it reads, what it writes, and what it returns.

An operation that changes an argument in place is computed on copies; one that exchanges values with other processes never is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mezzo.engine.casts.autocast_kernels import flat_tensors
from mezzo.formats import FP32

Change = Callable[[Tensor], Tensor]

_UNDECLARED = ("batch_norm", "rnn")
"""Parts of the names of operations that change buffers without declaring it; operations of other libraries may do so, too."""
_ONLY_OVERWRITE = frozenset(("copy_", "fill_", "zero_", "normal_", "uniform_", "random_", "bernoulli_", "exponential_"))
_WRITES: dict[int, bool] = {}
_DRAWS: dict[int, bool] = {}
"""By the identity of an operation, which lives as long as the process: torch builds both answers anew each time."""
COLLECTIVE_NAMESPACES = ("c10d", "_c10d_functional", "c10d_functional")
"""Namespaces of operations between processes, which are never recomputed."""


def wait_for_exchange(func: Any, result: Any) -> None:
    """Wait until a collective has written its results; it returns while another thread, or stream, still writes them.

    Sends and receives are not waited for: the other process may have to be asked first. A second wait, the script's own, returns at once.
    """
    if func.namespace == "c10d":
        wait = getattr(result[-1], "wait", None) if isinstance(result, (tuple, list)) and result else None
        if wait is not None:
            wait()
    elif func.overloadpacket.__name__ != "wait_tensor":
        for tensor in flat_tensors((result,)):
            torch.ops._c10d_functional.wait_tensor(tensor)


def writes(func: Any) -> bool:
    """Return whether an operation writes into an argument."""
    known = _WRITES.get(id(func))  # hashing the operation itself is a Python call
    if known is None:
        known = _WRITES[id(func)] = bool(func._schema.is_mutable)
    return known


def written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors among the arguments that the operation writes into."""
    found: list[Any] = []
    for place, spec in enumerate(func._schema.arguments):
        if spec.alias_info is not None and spec.alias_info.is_write:
            found.append(args[place] if place < len(args) else kwargs.get(spec.name))
    return flat_tensors(found)


def outputs(func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> list[Tensor]:
    """Return the results of an operation: the tensors that it wrote into, then those that it returned."""
    if not writes(func):
        return flat_tensors((result,))
    changed = written(func, args, kwargs)
    known = {id(t) for t in changed}
    return [*changed, *(t for t in flat_tensors((result,)) if id(t) not in known)]


def arguments_before(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments before the operation runs, with copies of the tensors that it changes."""
    changed = {id(t) for t in written(func, args, kwargs)}

    def kept(value: Any) -> Any:
        return value.clone() if id(value) in changed else value

    return _mapped(list(args), kept), {name: _mapped(value, kept) for name, value in kwargs.items()}


def _mapped(values: Any, change: Callable[[Any], Any]) -> Any:
    """Return ``values`` with everything in their lists and tuples changed: the dispatcher passes no other containers."""
    if isinstance(values, (list, tuple)):
        return type(values)([_mapped(value, change) for value in values])
    return change(values)


def operands(
    func: Any, kept: tuple[Sequence[Any], dict[str, Any]], passed: tuple[Sequence[Any], dict[str, Any]]
) -> list[tuple[Tensor, Tensor]]:
    """Return the tensors that the operation reads, each as it was before and as passed, without those that it only overwrites."""
    overwrites = func.overloadpacket.__name__ in _ONLY_OVERWRITE or "out" in func._overloadname
    skipped = {id(t) for t in written(func, *passed)} if overwrites else set()
    pairs = zip(*(flat_tensors((*args, *kwargs.values())) for args, kwargs in (kept, passed)), strict=True)
    return [(a, b) for a, b in pairs if id(b) not in skipped]


def recomputed(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any], change: Change, *, least: torch.dtype = FP32.dtype
) -> list[Tensor] | None:
    """Return the operation's results in FP32, in the order of ``outputs``; None if it has no such kernel.

    Args:
        func: the operation.
        args: its arguments as they were before it ran.
        kwargs: its keyword arguments, likewise.
        change: returns a tensor's true values, with 16-bit values in FP32; tensors that the operation writes into are copied.
        least: the format that narrower ones named among the arguments become.
    """
    changed = {id(t) for t in written(func, args, kwargs)} if writes(func) else set()
    copies = func.namespace != "aten" or any(part in func.overloadpacket.__name__ for part in _UNDECLARED)

    def widened(tensor: Tensor) -> Tensor:
        wide = change(tensor)
        return wide.clone() if (copies or id(tensor) in changed) and wide is tensor else wide

    def in_wide_formats(value: Any) -> Any:
        if isinstance(value, Tensor):
            return widened(value)
        narrow = isinstance(value, torch.dtype) and value.is_floating_point and value.itemsize < least.itemsize
        return least if narrow else value

    wide_args = _mapped(list(args), in_wide_formats)
    wide_kwargs = {name: _mapped(value, in_wide_formats) for name, value in kwargs.items()}
    try:
        result = func(*wide_args, **wide_kwargs)
    except (RuntimeError, NotImplementedError, TypeError):  # its kernels take only 16-bit operands
        return None
    return outputs(func, wide_args, wide_kwargs, result)


def dropout_in_fp32(args: Sequence[Any], kwargs: dict[str, Any], result: Any, change: Change) -> list[Tensor]:
    """Return the FP32 results of ``native_dropout`` with the mask that it drew."""
    probability = args[1] if len(args) > 1 else kwargs["p"]
    scale = 0.0 if probability == 1 else 1 / (1 - probability)
    return [change(args[0]) * result[1] * scale, result[1]]


def at_least(tensor: Tensor, least: torch.dtype) -> Tensor:
    """Return a floating-point tensor narrower than ``least`` in it, and any other unchanged."""
    narrow = tensor.is_floating_point() and tensor.element_size() < least.itemsize
    return tensor.to(least) if narrow else tensor


def draws(func: Any) -> bool:
    """Return whether an operation draws random numbers."""
    known = _DRAWS.get(id(func))
    if known is None:
        known = _DRAWS[id(func)] = torch.Tag.nondeterministic_seeded in func.tags
    return known
