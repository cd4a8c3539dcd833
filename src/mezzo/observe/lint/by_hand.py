"""See what a script does by hand between its backward pass and its next forward pass: norms over gradients, averages of weights.

A function mode sees every call of torch that Python makes, without changing any. It is on only in some updates: from a backward
pass to the update, and from the update to the next forward pass; never around modules or compiled code.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils import _device
from torch.utils.weak import WeakTensorKeyDictionary

from mezzo.engine.half import HALF
from mezzo.observe.tensors import storage

_NORMS = frozenset(
    ("norm", "vector_norm", "linalg_vector_norm", "_foreach_norm", "frobenius_norm", "pow", "__pow__", "square")
)
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


class View(Protocol):
    """A listener to calls of torch."""

    def see(self, name: str, args: Sequence[Any], result: Any) -> None:
        """Look at one call that was made."""


class ByHand(TorchFunctionMode):
    """A mode that shows calls of torch to a view."""

    def __init__(self) -> None:
        super().__init__()
        self._view: View | None = None
        self._here = threading.local()
        """Whether it is among the modes of this thread: each thread has its own, and can take out of its own only."""

    @property
    def on(self) -> bool:
        """Return whether it is on."""
        return self._view is not None

    def start(self, view: View) -> None:
        """Show every call to ``view`` from now on, where the modes that are on allow it."""
        self.stop()
        if self._entered or _put_in(self):
            self._view, self._here.entered = view, True

    @property
    def _entered(self) -> bool:
        return getattr(self._here, "entered", False)

    def stop(self) -> None:
        """Show nothing any more.

        torch takes the mode off the stack while the mode handles a call, such as ``Tensor.backward``, and puts it back afterwards. Stopped
        inside such a call, the mode shows nothing but stays until it is stopped again outside.
        """
        self._view = None
        if self._entered and any(mode is self for mode in _get_current_function_mode_stack()):
            _take_out(self)
            self._here.entered = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call ``func`` and show what it was."""
        result = func(*args, **(kwargs or {}))
        if self._view is not None and args:
            self._view.see(getattr(func, "__name__", ""), args, result)
        return result


class GradientView:
    """A view of what a script does to gradients.

    Args:
        gradients: to see.
        norm_read: called when a norm, or a square, of one is taken before any was changed.
        limited: called when one is clamped before any was changed, with whether in place.
    """

    def __init__(
        self, gradients: Iterable[Tensor], *, norm_read: Callable[[], None], limited: Callable[[bool], None]
    ) -> None:
        self._gradients = WeakTensorKeyDictionary(dict.fromkeys(gradients))
        self._places = set(map(_place, self._gradients.keys())) - {0}
        self._derived = WeakTensorKeyDictionary()
        self._norm_read, self._limited = norm_read, limited
        self.changed = False
        """Whether one was changed in place: its version does not tell of torch._foreach under a dispatch mode."""

    def see(self, name: str, args: Sequence[Any], result: Any) -> None:
        """Look at one call that was made."""
        same = name in _SAME_VALUES or _casts(args[0], result)
        if not (name in _NORMS or name in _LIMITED or name in _PRODUCTS or same or _changes(name)):
            return
        own = any(t in self._gradients or _place(t) in self._places for t in _tensors(args[0]))
        if not own and not any(t in self._derived for t in _tensors(args[0])):
            return
        if not self.changed:
            self._see_first(name, args)
        if same:
            self._derived.update(dict.fromkeys(_tensors(result)))
        self.changed = self.changed or (own and _changes(name))

    def _see_first(self, name: str, args: Sequence[Any]) -> None:
        if name in _LIMITS or name in _LIMITED:
            self._limited(name in _LIMITS)
        elif name in _NORMS or (name in _PRODUCTS and len(args) > 1 and args[0] is args[1]):
            self._norm_read()


class _Source(NamedTuple):
    """What a tensor was made of."""

    parameter: Tensor | None
    """The weight that it was made of."""
    half: bool
    """Whether a 16-bit tensor that is no weight went into it."""
    multiplied: bool = False
    mixed: bool = False
    """Whether a weight and something else were added up."""


_NOTHING = _Source(None, half=False)


class AverageView:
    """A view of weight averages that are kept in 16 bits.

    Args:
        parameters: the weights.
        averaged: called with the weight whose value goes into a 16-bit tensor beside an earlier one.
    """

    def __init__(self, parameters: Iterable[Tensor], *, averaged: Callable[[Tensor], None]) -> None:
        self._parameters = {_place(p): p for p in parameters}
        self._parameters.pop(0, None)
        self._averaged = averaged
        self._derived = WeakTensorKeyDictionary()

    def see(self, name: str, args: Sequence[Any], result: Any) -> None:
        """Look at one call that was made."""
        if name in _IN_PLACE and len(args) > 1:
            for target, other in zip(_tensors(args[0]), _tensors(args[1]), strict=False):
                self._see_sum(target, target, other, into=True, summed=False)
        elif name in _MIXES and len(args) > 1:
            for target, first, second in _together(result, args[0], args[1]):
                self._see_sum(target, first, second, into=False, summed=name in _SUMS)
        elif name in _DIFFERENCES and len(args) > 1:
            for target, first, second in _together(result, args[0], args[1]):
                found = self._source(first), self._source(second)
                whole = next((one for one in found if one.parameter is not None), _NOTHING)
                self._derived[target] = whole._replace(half=any(one.half for one in found))
        elif name == "copy_" and len(args) > 1:
            for target, other in zip(_tensors(args[0]), _tensors(args[1]), strict=False):
                self._see_kept(target, self._source(other))
        elif name in _SAME_VALUES or name in _PRODUCTS or _casts(args[0], result):
            for before, after in zip(_tensors(args[0]), _tensors(result), strict=False):
                source = self._source(before)
                self._see_kept(after, source)
                self._derived[after] = source._replace(multiplied=source.multiplied or name in _PRODUCTS)

    def _see_sum(self, target: Tensor, first: Tensor, second: Tensor, *, into: bool, summed: bool) -> None:
        """Tell an average: a weight, and what is not that weight, go into one tensor of its shape."""
        if target.numel() < 2 or not first.shape == second.shape == target.shape:
            return
        sources = self._source(first), self._source(second)
        found = [one for one in sources if one.parameter is not None]
        if not found or (len(found) == 2 and found[0].parameter is found[1].parameter):
            return
        if _place(target) in self._parameters or (summed and not any(one.multiplied for one in found)):
            return
        if target.dtype in HALF:
            assert found[0].parameter is not None
            self._averaged(found[0].parameter)
        elif not into:
            half = any(one.half for one in sources)
            self._derived[target] = _Source(found[0].parameter, half=half, multiplied=True, mixed=True)

    def _see_kept(self, target: Tensor, source: _Source) -> None:
        """Tell an average that was computed in FP32 from one that was kept in 16 bits, and is kept so again."""
        if source.mixed and source.half and target.dtype in HALF and source.parameter is not None:
            self._averaged(source.parameter)

    def _source(self, tensor: Tensor) -> _Source:
        parameter = self._parameters.get(_place(tensor))
        if parameter is not None:
            return _Source(parameter, half=False)
        found: _Source | None = self._derived.get(tensor)
        return _Source(None, half=tensor.dtype in HALF) if found is None else found


def _together(*values: Any) -> Iterator[tuple[Tensor, ...]]:
    return zip(*map(_tensors, values), strict=False)


def _changes(name: str) -> bool:
    """Return whether a function of this name writes into its first argument."""
    return name.startswith(("__i", "__set")) or (name.endswith("_") and not name.endswith("__"))


def _casts(value: Any, result: Any) -> bool:
    """Return whether a call cast a tensor, by whichever name."""
    tensors = isinstance(value, Tensor) and isinstance(result, Tensor)
    return tensors and value.dtype != result.dtype and value.shape == result.shape and result.is_floating_point()


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        yield from (v for v in value if isinstance(v, Tensor))


def _place(tensor: Tensor) -> int:
    """Return where a tensor's memory begins, 0 where it has none."""
    own = storage(tensor)
    return 0 if own is None else own.data_ptr()


def _put_in(mode: TorchFunctionMode) -> bool:
    """Put a mode below all others, so that they are left in the order in which they were entered; a default device stays the lowest.

    Return False where a default device is out of the stack because it handles the call that runs now: nothing may go below it.
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


def _take_out(mode: TorchFunctionMode) -> None:
    stack = [_pop_mode() for _ in _get_current_function_mode_stack()]
    for other in reversed(stack):
        if other is not mode:
            _push_mode(other)
