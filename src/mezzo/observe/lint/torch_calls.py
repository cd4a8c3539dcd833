"""Observe the calls of torch in a script's own code between a backward pass and the next forward pass: gradient norms, weight averages.

A function mode sees every call of torch from Python and changes none. It is on only in some updates, from a backward
pass to the update and from the update to the next forward pass, and never around modules or compiled code.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils import _device
from torch.utils.weak import WeakTensorKeyDictionary

from mezzo.engine.casts.conversion import HALF
from mezzo.engine.processes.shards import local
from mezzo.observe.source_lines import running_line
from mezzo.observe.tensors import region, storage
from mezzo.observe.trace import CoveredElements

_NORMS = frozenset(
    ("norm", "vector_norm", "linalg_vector_norm", "_foreach_norm", "frobenius_norm", "pow", "__pow__", "square")
)
_SQUARES = frozenset(("pow", "__pow__", "square"))
_LIMITS = frozenset(
    ("clamp_", "clip_", "clamp_min_", "clamp_max_", "hardtanh_", "_foreach_clamp_min_", "_foreach_clamp_max_")
)
_LIMITED = frozenset(
    ("clamp", "clip", "clamp_min", "clamp_max", "hardtanh", "_foreach_clamp_min", "_foreach_clamp_max")
)
_SAME_VALUES = frozenset(
    ("cat", "concat", "stack", "abs", "to", "type", "clone", "flatten", "contiguous", "cpu", "cuda")
)
_PRODUCTS = frozenset(("mul", "__mul__", "__rmul__", "_foreach_mul"))
_DIFFERENCES = frozenset(("sub", "__sub__", "__rsub__", "_foreach_sub"))
_IN_PLACE = frozenset(
    ("lerp_", "add_", "__iadd__", "sub_", "__isub__", "_foreach_lerp_", "_foreach_add_", "_foreach_sub_")
)
_SUMS = frozenset(("add", "__add__", "__radd__", "_foreach_add"))
_MIXES = _SUMS | {"lerp", "_foreach_lerp"}


class CallObserver(Protocol):
    """An observer of calls of torch."""

    def inspect_call(self, name: str, args: Sequence[Any], result: Any) -> None:
        """Inspect one finished call."""


class CallMode(TorchFunctionMode):
    """A mode that passes every call of torch to an observer."""

    def __init__(self) -> None:
        super().__init__()
        self._observer: CallObserver | None = None
        self._thread = threading.local()
        """Whether it is on this thread's mode stack: each thread has its own stack and can change no other."""

    @property
    def on(self) -> bool:
        """Whether it is on."""
        return self._observer is not None

    def start(self, observer: CallObserver) -> None:
        """Pass every call to ``observer`` from now on, if the active modes allow it."""
        self.stop()
        if self._entered or _insert_below(self):
            self._observer, self._thread.entered = observer, True

    @property
    def _entered(self) -> bool:
        return getattr(self._thread, "entered", False)

    def stop(self) -> None:
        """Stop passing calls on.

        torch removes the mode from the stack while it handles a call, such as ``Tensor.backward``, and puts it back afterwards. A mode
        stopped inside such a call passes nothing on, but stays on the stack until it is stopped again outside.
        """
        self._observer = None
        if self._entered and any(mode is self for mode in _get_current_function_mode_stack()):
            _remove(self)
            self._thread.entered = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call ``func``, then pass the call to the observer."""
        result = func(*args, **(kwargs or {}))
        if self._observer is not None and args:
            self._observer.inspect_call(getattr(func, "__name__", ""), args, result)
        return result


class GradientView:
    """An observer of a script's operations on gradients.

    Args:
        gradients: the gradients to watch.
        scaled: the ones that are multiplied by a loss scale.
        norm_read: called when the norm or the square of a scaled gradient is computed before any was changed.
        limited: called when a scaled gradient is clamped before any was changed, with whether that was in place.
        narrow: called with the format when the norm of gradients is computed in 16 bits, or cast to them.
    """

    def __init__(
        self,
        gradients: Iterable[Tensor],
        scaled: Iterable[Tensor],
        *,
        norm_read: Callable[[], None],
        limited: Callable[[bool], None],
        narrow: Callable[[torch.dtype], None],
    ) -> None:
        self._all = {_address(g) for g in gradients} - {0}
        self._of_all = WeakTensorKeyDictionary()
        """What was computed from gradients without a change of the values: whether it is a norm of them."""
        self._narrow = narrow
        self._gradients = WeakTensorKeyDictionary(dict.fromkeys(scaled))
        self._addresses = set(map(_address, self._gradients.keys())) - {0}
        self._derived = WeakTensorKeyDictionary()
        self._norm_read, self._limited = norm_read, limited
        self.changed = False
        """Whether a gradient was changed in place: torch._foreach under a dispatch mode does not change versions."""

    def inspect_call(self, name: str, args: Sequence[Any], result: Any) -> None:
        """Inspect one finished call."""
        same = name in _SAME_VALUES or _casts(args[0], result)
        if name in _NORMS or same:
            self._inspect_format(name, args, result, same=same)
        if not (name in _NORMS or name in _LIMITED or name in _PRODUCTS or same or _changes(name)):
            return
        is_gradient = any(t in self._gradients or _address(t) in self._addresses for t in _tensors(args[0]))
        if not is_gradient and not any(t in self._derived for t in _tensors(args[0])):
            return
        if not self.changed:
            self._inspect_first(name, args)
        if same:
            self._derived.update(dict.fromkeys(_tensors(result)))
        self.changed = self.changed or (is_gradient and _changes(name))

    def _inspect_format(self, name: str, args: Sequence[Any], result: Any, *, same: bool) -> None:
        """Report a norm of gradients that has 16 bits, or is cast to them."""
        given, results = list(_tensors(args[0])), list(_tensors(result))
        norm = not same or any(self._of_all.get(t) for t in given)
        if not any(_address(t) in self._all or t in self._of_all for t in given):
            return
        half = next((t.dtype for t in results if t.dtype in HALF), None)
        if norm and half is not None and name not in _SQUARES:
            self._narrow(half)
        self._of_all.update(dict.fromkeys(results, norm))

    def _inspect_first(self, name: str, args: Sequence[Any]) -> None:
        if name in _LIMITS or name in _LIMITED:
            self._limited(name in _LIMITS)
        elif name in _NORMS or (name in _PRODUCTS and len(args) > 1 and args[0] is args[1]):
            self._norm_read()


class _Source(NamedTuple):
    """The origin of a tensor's values."""

    parameter: Tensor | None
    """The weight that it was computed from."""
    half: bool
    """Whether it was computed from a 16-bit tensor that is not a weight."""
    multiplied: bool = False
    mixed: bool = False
    """Whether it is a sum of a weight and something else."""


_NOTHING = _Source(None, half=False)


class AverageView:
    """An observer of weight averages.

    Args:
        parameters: the weights.
        averaged: called with the weight whose value is mixed into another tensor, that tensor, and whether the average has 16 bits.
    """

    def __init__(self, parameters: Iterable[Tensor], *, averaged: Callable[[Tensor, Tensor, bool], None]) -> None:
        addressable = [p for p in parameters if _address(p)]
        self._parameters = {_address(p): p for p in addressable}
        self._parts = {_part(p): p for p in addressable}
        self._averaged = averaged
        self._derived = WeakTensorKeyDictionary()
        self._first_mixed = "", _NOTHING
        """The line and the origin of the first average in a new FP32 tensor, which the script may keep."""

    def kept(self) -> tuple[str, Tensor | None]:
        """Return the line that computed averages in new FP32 tensors, and one's weight, if the script has kept an average."""
        line, source = self._first_mixed
        mixed = (s.mixed and not s.half for s in self._derived.values())
        return (line, source.parameter) if any(mixed) else ("", None)

    def all_kept(self) -> list[tuple[Tensor, Tensor]]:
        """Return the averages in new FP32 tensors that the script has kept, each with its weight."""
        mixed = ((average, source) for average, source in self._derived.items() if source.mixed and not source.half)
        return [(source.parameter, average) for average, source in mixed if source.parameter is not None]

    def inspect_call(self, name: str, args: Sequence[Any], result: Any) -> None:
        """Inspect one finished call."""
        if name in _IN_PLACE and len(args) > 1:
            for target, other in zip(_tensors(args[0]), _tensors(args[1]), strict=False):
                self._inspect_sum(target, target, other, in_place=True, is_sum=False)
        elif name in _MIXES and len(args) > 1:
            for target, first, second in _zip_tensors(result, args[0], args[1]):
                self._inspect_sum(target, first, second, in_place=False, is_sum=name in _SUMS)
        elif name in _DIFFERENCES and len(args) > 1:
            for target, first, second in _zip_tensors(result, args[0], args[1]):
                sources = self._source(first), self._source(second)
                of_weight = next((source for source in sources if source.parameter is not None), _NOTHING)
                self._derived[target] = of_weight._replace(half=any(source.half for source in sources))
        elif name == "copy_" and len(args) > 1:
            for target, other in zip(_tensors(args[0]), _tensors(args[1]), strict=False):
                self._inspect_stored(target, self._source(other), copied=True)
        elif name in _SAME_VALUES or name in _PRODUCTS or _casts(args[0], result):
            for before, after in zip(_tensors(args[0]), _tensors(result), strict=False):
                source = self._source(before)
                self._inspect_stored(after, source, copied=False)
                self._derived[after] = source._replace(multiplied=source.multiplied or name in _PRODUCTS)

    def _inspect_sum(self, target: Tensor, first: Tensor, second: Tensor, *, in_place: bool, is_sum: bool) -> None:
        """Detect an average: a tensor of a weight's shape computed from that weight and from something else."""
        if target.numel() < 2 or not first.shape == second.shape == target.shape:
            return
        sources = self._source(first), self._source(second)
        of_weights = [source for source in sources if source.parameter is not None]
        if not of_weights or (len(of_weights) == 2 and of_weights[0].parameter is of_weights[1].parameter):
            return
        if _address(target) in self._parameters or (is_sum and not any(source.multiplied for source in of_weights)):
            return
        if target.dtype in HALF or in_place:
            assert of_weights[0].parameter is not None
            self._averaged(of_weights[0].parameter, target, target.dtype in HALF)
        else:
            half = any(source.half for source in sources)
            self._derived[target] = source = _Source(of_weights[0].parameter, half=half, multiplied=True, mixed=True)
            if not self._first_mixed[0]:
                self._first_mixed = running_line(), source

    def _inspect_stored(self, target: Tensor, source: _Source, *, copied: bool) -> None:
        """Detect an average that is computed in FP32 but stored between updates: by a copy, or as a cast to 16 bits."""
        if not source.mixed or source.parameter is None:
            return
        if (source.half and target.dtype in HALF) or (copied and not source.half):
            self._averaged(source.parameter, target, source.half)

    def _source(self, tensor: Tensor) -> _Source:
        parameter = self._parts.get(_part(tensor), self._parameters.get(_address(tensor)))
        if parameter is not None:
            return _Source(parameter, half=False)
        source: _Source | None = self._derived.get(tensor)
        return _Source(None, half=tensor.dtype in HALF) if source is None else source


def _zip_tensors(*values: Any) -> Iterator[tuple[Tensor, ...]]:
    return zip(*map(_tensors, values), strict=False)


def _changes(name: str) -> bool:
    """Return whether a function of this name writes into its first argument."""
    return name.startswith(("__i", "__set")) or (name.endswith("_") and not name.endswith("__"))


def _casts(value: Any, result: Any) -> bool:
    """Return whether a call cast a tensor, whatever its name."""
    tensors = isinstance(value, Tensor) and isinstance(result, Tensor)
    return tensors and value.dtype != result.dtype and value.shape == result.shape and result.is_floating_point()


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        yield from (v for v in value if isinstance(v, Tensor))


def _address(tensor: Tensor) -> int:
    """Return the address of a tensor's memory, 0 if it has none."""
    memory = storage(tensor)
    return 0 if memory is None else memory.data_ptr()


def _part(tensor: Tensor) -> tuple[int, CoveredElements]:
    """Return the address of a tensor's memory, and its part of that: the weights of a recurrent layer of cuDNN share one storage."""
    return _address(tensor), region(local(tensor))


def _insert_below(mode: TorchFunctionMode) -> bool:
    """Insert a mode below all others, which can then leave in the reverse order of their entry; a default device stays lowest.

    Return False if a default device is off the stack because it handles the running call: nothing may be inserted below it.
    """
    stack = _get_current_function_mode_stack()
    if _device.CURRENT_DEVICE is not None and not any(isinstance(other, _device.DeviceContext) for other in stack):
        return False
    above = [_pop_mode() for _ in stack]
    if above and isinstance(above[-1], _device.DeviceContext):
        _push_mode(above.pop())
    _push_mode(mode)
    for other in reversed(above):
        _push_mode(other)
    return True


def _remove(mode: TorchFunctionMode) -> None:
    stack = [_pop_mode() for _ in _get_current_function_mode_stack()]
    for other in reversed(stack):
        if other is not mode:
            _push_mode(other)
