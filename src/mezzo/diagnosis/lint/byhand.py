"""Watch what a script does by hand between its backward pass and its next forward pass: norms over gradients, averages of weights.

A function mode sees every call of torch that Python makes, without changing any. It is on only in the first updates and in a few later
ones, from a backward pass to the update, and from the update to the next forward pass; never around modules or compiled code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils import _device
from torch.utils.weak import WeakTensorKeyDictionary

from mezzo.formats import BF16, FP16

_HALF = (FP16.dtype, BF16.dtype)
_NORMS = frozenset(
    {
        "norm",
        "vector_norm",
        "linalg_vector_norm",
        "_foreach_norm",
        "frobenius_norm",
        "pow",
        "__pow__",
        "square",
        "_foreach_pow",
    }
)
_LIMITS = frozenset(
    {"clamp_", "clip_", "clamp_min_", "clamp_max_", "hardtanh_", "_foreach_clamp_min_", "_foreach_clamp_max_"}
)
_SAME_VALUES = frozenset(
    {"cat", "concat", "stack", "abs", "to", "type", "clone", "flatten", "contiguous", "cpu", "cuda"}
)
_PRODUCTS = frozenset({"mul", "__mul__", "__rmul__", "_foreach_mul"})
_DIFFERENCES = frozenset({"sub", "__sub__", "__rsub__", "_foreach_sub"})
_IN_PLACE = frozenset(
    {"lerp_", "add_", "__iadd__", "sub_", "__isub__", "_foreach_lerp_", "_foreach_add_", "_foreach_sub_"}
)
_MIXES = frozenset({"add", "__add__", "__radd__", "lerp", "_foreach_lerp", "_foreach_add"})


class ByHand(TorchFunctionMode):
    """See calls of torch while it is on.

    Args:
        norm_read: called when a norm, or a square, of one of the gradients is taken.
        limited: called when one of the gradients is clamped in place.
        averaged: called with the parameter whose value goes into a 16-bit tensor beside an earlier one.
    """

    def __init__(
        self, *, norm_read: Callable[[], None], limited: Callable[[], None], averaged: Callable[[Tensor], None]
    ) -> None:
        super().__init__()
        self._norm_read, self._limited, self._averaged = norm_read, limited, averaged
        self._gradients: set[int] = set()
        self._parameters: dict[int, Tensor] = {}
        self._derived = WeakTensorKeyDictionary()
        """What was computed from gradients (None) or from a parameter (the parameter, and whether it was multiplied)."""
        self._on = False
        self.changed = False
        """Whether a gradient was changed in place: a version does not tell of torch._foreach under a dispatch mode."""

    @property
    def on(self) -> bool:
        """Return whether it is on."""
        return self._on

    def watch_gradients(self, gradients: Iterable[Tensor]) -> None:
        """See what is done to ``gradients``."""
        self._begin(gradients=gradients)

    def watch_averages(self, parameters: Iterable[Tensor]) -> None:
        """See averages that ``parameters`` go into."""
        self._begin(parameters=parameters)

    def stop(self) -> None:
        """See nothing any more."""
        if self._on:
            _take_out(self)
        self._on = False
        self._gradients, self._parameters, self._derived = set(), {}, WeakTensorKeyDictionary()

    def _begin(self, *, gradients: Iterable[Tensor] = (), parameters: Iterable[Tensor] = ()) -> None:
        self.stop()
        self._gradients = set(map(_place, gradients)) - {0}
        self._parameters = {_place(p): p for p in parameters}
        self._parameters.pop(0, None)
        self.changed = False
        if (self._gradients or self._parameters) and _put_in(self):
            self._on = True

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call ``func`` and look at what it was."""
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if self._on and args:
            if self._gradients:
                self._see_gradients(name, args, result)
            elif self._parameters:
                self._see_parameters(name, args, result)
        return result

    # --- gradients ---------------------------------------------------------------------------------------------------------------

    def _see_gradients(self, name: str, args: Sequence[Any], result: Any) -> None:
        if _changes(name) and any(_place(t) in self._gradients for t in _tensors(args[0])):
            self.changed = True
        same = name in _SAME_VALUES or _casts(args[0], result)
        if name not in _NORMS and name not in _LIMITS and name not in _PRODUCTS and not same:
            return
        if not any(_place(t) in self._gradients or t in self._derived for t in _tensors(args[0])):
            return
        if name in _LIMITS:
            self._limited()
        elif name in _NORMS or (name in _PRODUCTS and len(args) > 1 and args[0] is args[1]):
            self._norm_read()
        elif same:
            for tensor in _tensors(result):
                self._derived[tensor] = None

    # --- parameters --------------------------------------------------------------------------------------------------------------

    def _see_parameters(self, name: str, args: Sequence[Any], result: Any) -> None:
        if name in _SAME_VALUES or name in _PRODUCTS or _casts(args[0], result):
            for before, after in zip(_tensors(args[0]), _tensors(result), strict=False):
                source = self._source(before)
                if source is not None:
                    self._derived[after] = source[0], source[1] or name in _PRODUCTS
        elif name in _DIFFERENCES and len(args) > 1:
            for first, second, after in zip(_tensors(args[0]), _tensors(args[1]), _tensors(result), strict=False):
                source = self._source(first) or self._source(second)
                if source is not None:
                    self._derived[after] = source
        elif (name in _IN_PLACE or name in _MIXES) and len(args) > 1:
            targets = list(_tensors(args[0] if name in _IN_PLACE else result))
            for target, first, second in zip(targets, _tensors(args[0]), _tensors(args[1]), strict=False):
                self._see_mixture(target, first, second, mixes=name in ("add", "__add__", "__radd__", "_foreach_add"))

    def _see_mixture(self, target: Tensor, first: Tensor, second: Tensor, *, mixes: bool) -> None:
        """Tell an average: a parameter, and what is not that parameter, go into a 16-bit tensor of its shape."""
        if (
            target.dtype not in _HALF
            or target.numel() < 2
            or first.shape != second.shape
            or first.shape != target.shape
        ):
            return
        sources = [self._source(first), self._source(second)]
        found = [source for source in sources if source is not None]
        if not found or (len(found) == 2 and found[0][0] is found[1][0]):
            return
        if _place(target) in self._parameters or (mixes and not any(multiplied for _, multiplied in found)):
            return
        self._averaged(found[0][0])

    def _source(self, tensor: Tensor) -> tuple[Tensor, bool] | None:
        """Return the parameter that a tensor was made of, and whether it was multiplied on the way."""
        parameter = self._parameters.get(_place(tensor))
        return (parameter, False) if parameter is not None else self._derived.get(tensor)


def _changes(name: str) -> bool:
    """Return whether a function of this name writes into its first argument."""
    return name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))


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
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # sparse, or a wrapper around other tensors
        return 0


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
