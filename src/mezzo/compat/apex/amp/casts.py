"""O1: torch's functions cast their operands, wherever they are called, until the handle is deactivated.

Apex replaced some 200 functions of torch by wrappers. Here autocast stays on, and a function mode with Apex's lists casts
while it is on: code that turns autocast off for a while, or on again for the recompute of activation checkpointing, has
its usual effect. The mode is at the bottom of the stack of modes, as with ``torch.set_default_device``, so a mode
that is entered and left around it removes itself and not this one.

Both belong to the thread that started them; backward passes carry them into autograd's threads.

Casts of weights are kept until ``scale_loss`` or ``optimizer.step`` ends, and are redone if the weight has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, _len_torch_function_stack, _pop_mode, _push_mode  # type: ignore[attr-defined]

from mezzo import oplists
from mezzo.engine.casts.autocast_kernels import CastRule, CastTable, WeightCasts
from mezzo.engine.casts.casting import Casting, rules_for
from mezzo.engine.casts.conversion import to_format
from mezzo.engine.matrix_units.emulation import emulation
from mezzo.formats import FP16, FP32, Format
from mezzo.launch.torch.update_losses import WITHOUT_MODE_CHECK
from mezzo.oplists import Precision
from mezzo.policy import Policy

# A function mode receives every call of a torch function or method in its thread before torch runs it. It does not see
# operations inside C++ composites, nor TorchScript. Functions of torch that are written in Python and pass themselves to
# the mode are entered, so that it sees what they call. A call costs 2 to 5 us.

Function = Callable[..., Any]

_BACKWARD = (Tensor.backward, torch.autograd.backward, torch.autograd.grad)
_PLACES: dict[str, Any] = {
    "torch": torch,
    "F": torch.nn.functional,
    "Tensor": Tensor,
    "_nn": torch._C._nn,
    "_VF": torch._C._VariableFunctions,
    "linalg": torch.linalg,
    "special": torch.special,
}

_DUNDERS = {
    "matmul": "__matmul__",
    "pow": "__pow__",
    "add": "__add__ __radd__",
    "mul": "__mul__ __rmul__",
    "div": "__truediv__",
}
_OTHER_NAMES = {other: name for other, name in oplists.SYNONYMS.items() if not other.startswith("__")}
_NAMESAKES = {"linalg.cross"}
"""Functions with the name of a listed operation that are a different operation."""
_COMPOSED = {
    "_nn.nll_loss_nd": "nll_loss",
    "_nn.cross_entropy_loss": "nll_loss",
    "torch.pairwise_distance": "dist",
}
"""Functions around listed operations that a mode cannot see inside, and one of those."""


class _Table(CastTable):
    """The casts alone: the mode decides which calls are cast."""

    def __init__(self, device_type: str, low: Format) -> None:
        super().__init__({}, device_type=device_type, low=low, keeps_kernels=True)
        self.kept = WeightCasts()
        """Casts of weights, kept until they are cleared, since no region ends."""

    def cast_weight(self, weight: Tensor) -> Tensor:
        """Return a weight in the lower format."""
        return self.kept.of(weight, self.low.dtype)


class CastMode(TorchFunctionMode):
    """A function mode that looks up every torch call in a table while autocast is on."""

    def __init__(self, casting: Casting, rules: dict[Function, CastRule]) -> None:
        super().__init__()
        self.device_type = casting.device_type
        self.low = casting.policy.storage.dtype
        self.rules = rules
        self.table = _Table(self.device_type, casting.policy.storage)

    def __torch_function__(
        self, func: Function, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one torch call as its rule says."""
        kwargs = kwargs or {}
        rule = self.rules.get(func)
        if rule is None:
            entered = WITHOUT_MODE_CHECK.get(func)
            if entered is not None:
                return self._enter(func, entered, args, kwargs)
        if not torch.is_autocast_enabled(self.device_type):
            return func(*args, **kwargs)
        # The kernels of torch.autocast must not cast on top of ours. Two C++ calls; the context manager would cost 5 us.
        torch.set_autocast_enabled(self.device_type, False)
        try:
            return self._run(func, rule, args, kwargs)
        finally:
            torch.set_autocast_enabled(self.device_type, True)

    def _enter(self, func: Function, entered: Function, args: Any, kwargs: dict[str, Any]) -> Any:
        if func in _BACKWARD:  # recompute has to see this mode, and nothing else of a backward pass may be cast
            with torch.autocast(self.device_type, enabled=False), self:
                return entered(*args, **kwargs)
        with self:
            return entered(*args, **kwargs)

    def _run(self, func: Function, rule: CastRule | None, args: Any, kwargs: dict[str, Any]) -> Any:
        if rule is None or kwargs.get("out") is not None:
            return func(*args, **kwargs)
        return self.table.run(func, rule, args, kwargs)


def python_rules(policy: Policy, *, emulate: bool) -> dict[Function, CastRule]:
    """Return the rule of every function and method by which Python calls a listed operation."""
    rules: dict[Function, CastRule] = {}
    by_name: dict[str, CastRule] = {}
    for op, rule in rules_for(policy, emulate=emulate, overlay=False).items():
        by_name.setdefault(oplists.python_name(op._schema.name.removeprefix("aten::")), rule)
    families = {oplists.python_name(op): family for family in oplists.FAMILIES for op in family.ops}
    for name, rule in by_name.items():
        for function in _callers(name):
            if rule.emulation is not None:  # of the function that is called: a method's arguments may be others
                base = families[name].name
                emulated = emulation(function, name, low=policy.storage.name, family=base, recipe=None)
                rule = CastRule(rule.precision, emulated)
            rules[function] = rule
    return rules


def _callers(name: str) -> Iterator[Function]:
    """Yield the compiled functions and methods that call the operation ``name``; Python functions are entered instead."""
    others = [other for other, listed in _OTHER_NAMES.items() if listed == name]
    for face in (name, *others):
        for place in _PLACES:
            function = None if f"{place}.{face}" in _NAMESAKES else find_function(f"{place}.{face}")
            if function is not None and function not in WITHOUT_MODE_CHECK:
                yield function
    for place in (f"Tensor.{dunder}" for dunder in _DUNDERS.get(name, "").split()):
        yield find_function(place)
    yield from (find_function(face) for face, listed in _COMPOSED.items() if listed == name)


def find_function(name: str) -> Any:
    """Return the torch function at a place (``Tensor.exp``), or None where this torch lacks it."""
    place, name = name.split(".", 1)
    return getattr(_PLACES[place], name, None)


_FORMATS = (FP16.dtype, FP32.dtype)


class PatchedFunctions(CastMode):
    """Apex's op lists, applied to the operands of torch's functions on one kind of device."""

    def __init__(self, device_type: str, *, verbose: bool) -> None:
        casting = Casting.of(POLICY, device_type)
        super().__init__(casting, rules(emulate=casting.emulates))
        self.takes_first = takes_first()
        self.refused = refused()
        self.verbose = verbose
        self.dtype_before = torch.get_autocast_dtype(device_type)
        """Autocast's format before this mode."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one torch call as its list says."""
        kwargs = kwargs or {}
        if torch.is_autocast_enabled(self.device_type):
            if func in self.refused:
                self._refuse_half(func, (*args, *kwargs.values()))
            if func in self.takes_first and args and args[0].dtype in _FORMATS:
                first = args[0].dtype
                args, kwargs = (args[0], *to_format(args[1:], first)), to_format(kwargs, first)
        return super().__torch_function__(func, types, args, kwargs)

    def call(self, function: Callable[..., Any], precision: Precision, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run a user's function on operands cast as ``precision`` says; calls inside it are cast by the lists."""
        return self._run(function, CastRule(precision), args, kwargs)

    def prefer(self, function: Callable[..., Any], precision: Precision) -> None:
        """Move one of torch's functions to another list."""
        self.rules[function] = CastRule(precision)

    def clear(self) -> None:
        """Drop the casts of weights."""
        self.table.kept.clear()
        torch.clear_autocast_cache()

    def _run(self, func: Callable[..., Any], rule: CastRule | None, args: Any, kwargs: dict[str, Any]) -> Any:
        if self.verbose and rule is not None:
            print(f"{func.__name__}: {rule.precision}")
        return super()._run(func, rule, args, kwargs)

    def _refuse_half(self, func: Callable[..., Any], operands: tuple[Any, ...]) -> None:
        text, first_only = self.refused[func]
        counted = operands[:1] if first_only else operands
        if any(isinstance(x, Tensor) and x.dtype is FP16.dtype for x in counted):
            raise NotImplementedError(text)


def begin(mode: PatchedFunctions) -> None:
    """Turn autocast on and put ``mode`` below this thread's modes, but above a default device's."""
    torch.set_autocast_dtype(mode.device_type, mode.low)
    torch.set_autocast_enabled(mode.device_type, True)
    above = _pop_modes()
    if above and hasattr(above[-1], "old_device"):  # set by set_default_device, not by ``with torch.device(...)``
        _push_mode(above.pop())
    _push_mode(mode)
    _push_modes(above)


def end(mode: PatchedFunctions) -> None:
    """Turn autocast off and remove ``mode`` from this thread's modes, if it is among them."""
    modes = _pop_modes()
    if mode in modes:
        torch.set_autocast_enabled(mode.device_type, False)
        torch.set_autocast_dtype(mode.device_type, mode.dtype_before)
    _push_modes([m for m in modes if m is not mode])


def _pop_modes() -> list[Any]:
    return [_pop_mode() for _ in range(_len_torch_function_stack())]


def _push_modes(modes: list[Any]) -> None:
    for mode in reversed(modes):
        _push_mode(mode)


# The portable lists contain nearly all of Apex's: products run in FP16; exponentials, norms, sums and losses in FP32. A
# policy moves operations that Apex lists elsewhere, and functions that ``oplists`` lacks (dunder methods, comparisons,
# ``cpu``) are named here. Apex did not cast what it did not know: ``einsum``, attention and whole recurrent layers run in
# FP16 here.

POLICY = Policy.parse("fp16:fp32=gelu+var+grid_sample:widest=add+mul+div")

_FP32 = "F.softmin F.local_response_norm F.normalize F.multilabel_soft_margin_loss Tensor.__ipow__ Tensor.cpu"
"""Functions beyond the policy that run in FP32: ``cpu`` because tensors go there to be printed, saved or averaged."""

_ARITHMETIC = "add sub mul div truediv"
_WIDEST = " ".join(
    [
        *(f"Tensor.__{kind}{name}__" for name in _ARITHMETIC.split() for kind in ("", "r", "i")),
        *(f"Tensor.__{name}__" for name in ["eq", "ge", "gt", "le", "lt", "ne"]),
        *(f"{place}.{name}" for name in ["eq", "equal", "ge", "gt", "le", "lt", "ne"] for place in ("torch", "Tensor")),
    ]
)
"""Functions beyond the policy that run in the widest format of their operands; ``cat`` and ``stack`` do so in torch itself now."""

FP32_IN_PLACE = [
    "acos",
    "asin",
    "cosh",
    "erfinv",
    "exp",
    "expm1",
    "log",
    "log10",
    "log2",
    "reciprocal",
    "rsqrt",
    "sinh",
    "tan",
    "pow",
    "cumprod",
    "cumsum",
    "renorm",
]
"""Operations of the FP32 list whose in-place form cannot widen an FP16 tensor: refused."""

FIRST_IN_PLACE = [
    "addmm",
    "addmv",
    "addr",
    "baddbmm",
    "addbmm",
    "addcdiv",
    "addcmul",
    "atan2",
    "add",
    "sub",
    "div",
    "mul",
    "eq",
    "ge",
    "gt",
    "le",
    "lt",
    "ne",
]
"""Operations whose in-place form takes the format of the tensor that they change."""

BANNED = {
    "F.binary_cross_entropy": (
        "amp does not accept an FP16 input to torch.nn.functional.binary_cross_entropy or torch.nn.BCELoss: near 0 and 1 the "
        "logarithms of FP16 probabilities are infinite. Use binary_cross_entropy_with_logits or torch.nn.BCEWithLogitsLoss and "
        "leave out the sigmoid, or call amp.register_float_function(torch, 'sigmoid') before amp.initialize."
    )
}


def rules(*, emulate: bool) -> dict[Callable[..., Any], CastRule]:
    """Return the rule of every torch function in Apex's lists."""
    found = python_rules(POLICY, emulate=emulate)
    beyond: tuple[tuple[oplists.Precision, str], ...] = (("fp32", _FP32), ("widest", _WIDEST))
    for precision, names in beyond:
        found.update(dict.fromkeys(_functions(names.split()), CastRule(precision)))
    return found


def takes_first() -> set[Callable[..., Any]]:
    """Return the in-place methods that take the format of the tensor that they change."""
    return set(_functions(f"Tensor.{name}_" for name in FIRST_IN_PLACE))


def refused() -> dict[Callable[..., Any], tuple[str, bool]]:
    """Return the functions that refuse FP16, each with the message and whether only its first operand counts."""
    found: dict[Callable[..., Any], tuple[str, bool]] = {}
    for name in FP32_IN_PLACE:
        for place in ("torch", "Tensor"):
            text = (
                f"Cannot call the in-place function {name}_ on FP16 tensors: its result is FP32 and does not fit into its "
                f"operand. Call {name} without the underscore, or cast the tensor to FP32 first."
            )
            found.update(dict.fromkeys(_functions([f"{place}.{name}_"]), (text, place == "Tensor")))
    for name, text in BANNED.items():
        found.update(dict.fromkeys(_functions([name]), (text, False)))
    return found


def _functions(names: Iterable[str]) -> list[Callable[..., Any]]:
    return [function for function in map(find_function, names) if function is not None]
