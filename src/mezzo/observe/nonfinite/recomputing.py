"""Recompute one operation in FP32 or FP64, from its operands or from other values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mezzo.engine.casts.autocast_kernels import flat_tensors
from mezzo.formats import FP16, FP32, FP64
from mezzo.observe.nonfinite.evidence import Source
from mezzo.observe.nonfinite.shadows import RangeEnd
from mezzo.observe.tensors import has_floats, is_finite, largest

Change = Callable[[Tensor], Tensor]

_UNDECLARED = ("batch_norm", "rnn")
"""Parts of the names of operations that change buffers without declaring it; operations of other libraries may do so, too."""
_ONLY_OVERWRITE = frozenset(("copy_", "fill_", "zero_", "normal_", "uniform_", "random_", "bernoulli_", "exponential_"))
_KEEP_MAGNITUDE = frozenset(
    {"clone", "copy_", "cat", "stack", "index", "index_select", "gather", "where", "masked_fill", "masked_fill_"}
    | {"constant_pad_nd", "repeat", "flip", "roll", "slice_backward", "select_backward", "relu", "relu_", "neg", "abs"}
    | {"threshold_backward", "clamp", "clamp_", "clamp_min", "clamp_max", "maximum", "minimum", "amax", "amin", "max"}
    | {"max_pool2d_with_indices", "sign", "embedding", "zeros_like", "new_zeros", "zero_", "fill_", "full_like"}
)
"""Operations that return no value smaller than those that they read, except zeros that FP32 has as well."""
_WRITES: dict[int, bool] = {}
_DRAWS: dict[int, bool] = {}
"""By the identity of an operation, which lives as long as the process: torch builds both answers anew each time."""
COLLECTIVES = ("c10d", "_c10d_functional", "c10d_functional")
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


@dataclass
class Recomputable:
    """An operation with its operands, so that it can be computed again."""

    func: Any
    args: Sequence[Any]
    kwargs: dict[str, Any]
    kept: tuple[list[Any], dict[str, Any]]
    """Its arguments as they were before."""
    read: list[tuple[Tensor, Tensor]]
    """The floating-point tensors that it reads, as they were before and as passed."""
    truths: dict[RangeEnd, tuple[dict[int, Tensor], tuple[Source, ...]]]
    """For each end of the range: the true values of operands that differ from them, and the sources of the difference."""

    @property
    def draws(self) -> bool:
        """Whether it draws random numbers."""
        known = _DRAWS.get(id(self.func))
        if known is None:
            known = _DRAWS[id(self.func)] = torch.Tag.nondeterministic_seeded in self.func.tags
        return known

    def outputs(self, result: Any) -> list[Tensor]:
        """Return its results."""
        return outputs(self.func, self.args, self.kwargs, result)

    def computed(
        self, result: Any, true: dict[int, Tensor] | None = None, *, least: torch.dtype = FP32.dtype
    ) -> list[Tensor] | None:
        """Return its results in FP32, from its operands or from their ``true`` values; None if they are unknown.

        They are in FP64 if ``least`` is, or if a true value of its operands left FP32.
        """
        known = true or {}
        if any(t.dtype is FP64.dtype for t in known.values()):
            least = FP64.dtype

        def change(tensor: Tensor) -> Tensor:
            return at_least(known.get(id(tensor), tensor), least)

        if self.func.overloadpacket is torch.ops.aten.native_dropout:
            wide: list[Tensor] | None = dropout_in_fp32(*self.kept, result, change)
        else:
            wide = None if self.draws else recomputed(self.func, *self.kept, change, least=least)
        # A selection may return more or fewer elements of the true values: these cannot be matched.
        matches = wide is not None and [t.shape for t in wide] == [t.shape for t in self.outputs(result)]
        return wide if matches else None

    def keeps_magnitude(self) -> bool:
        """Return whether its results are never smaller than its operands."""
        return self.func.overloadpacket.__name__ in _KEEP_MAGNITUDE and not self.has_tiny_number()

    def has_tiny_number(self) -> bool:
        """Return whether the script passed it a number below FP16's full precision, such as an epsilon."""
        numbers = (x for x in (*self.args, *self.kwargs.values()) if isinstance(x, float))
        return any(0 < abs(x) < FP16.min_normal for x in numbers)


def largest_of(values: list[Tensor] | None, outputs: list[Tensor]) -> float | None:
    """Return the largest magnitude in ``values`` of the floating-point ``outputs``; None if any is not finite or unknown."""
    if values is None:
        return None
    of_floats = [value for value, output in zip(values, outputs, strict=True) if has_floats(output)]
    return max(map(largest, of_floats), default=0.0) if all(map(is_finite, of_floats)) else None
