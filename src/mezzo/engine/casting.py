"""Apply a policy to the operations of a region of code.

``torch.autocast`` is two things: a state (on or off, in which dtype; nestable, kept by activation checkpointing for
its recompute, guarded by torch.compile) and an implementation (C++ kernels with one fixed list a device). Here the
state stays torch's, and where the policy wants what the kernels do not do, another implementation acts on it: a
function mode that looks every call up in a table. So a nested ``torch.autocast(enabled=False)`` in a model works as
it always did, and ``torch.is_autocast_enabled`` tells the truth.

Three ways, chosen once by ``Casting.choose`` with its reason:

``kernels``  the policy is what the device's kernels do: plain ``torch.autocast``, no mode, no cost of ours
``overlay``  the kernels, and the mode for the operations that the policy changes
``table``    the mode alone: portable lists on a device with other lists, or emulated arithmetic

What the mode costs: a Python call for each torch call in the region, 2 to 5 microseconds. What it does not see:
operations inside C++ composites (their families are listed whole) and TorchScript. Python functions of torch that are
made of other torch calls (``F.multi_head_attention_forward``) are entered rather than looked up, so what they call is
seen.

Casts of weights are kept until the outermost region ends: one cast a weight and forward, however often it is used. A
cast made under ``no_grad`` is kept apart from one made with gradients, so validation inside a region does not cut the
graph.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from mezzo import oplists
from mezzo.devices import Device, this_device
from mezzo.engine.emulation import emulated
from mezzo.explain import Choice
from mezzo.formats import BF16, FP16, FP32
from mezzo.policy import Policy

Way = Literal["none", "kernels", "overlay", "table"]
Function: TypeAlias = Callable[..., Any]

_VF: Any = torch._C._VariableFunctions
_HALF = (FP16.dtype, BF16.dtype)
_CASTABLE = (*_HALF, FP32.dtype)  # FP64 is never cast: who asks for it needs it


@dataclass(frozen=True)
class Rule:
    """Say what to do with a call of one torch function."""

    precision: oplists.Precision
    run: Function | None = None
    """The emulation to call instead of the function, on 16-bit operands."""
    keeps_weight: bool = False
    """Whether the call is a linear layer whose weight the emulation takes in the format that it is kept in."""


class Casting:
    """Apply a policy on one kind of device; ``region()`` is the context in which a forward pass runs."""

    def __init__(self, policy: Policy, device: Device) -> None:
        self.policy = policy
        self.device_type = device.kind
        self._dtype = policy.storage.dtype
        self.arithmetic, self.arithmetic_reason = policy.arithmetic_on(device)
        self.way, reason = self.choose()
        self.choice = Choice(what="casting", value=self.way, reason=reason)
        self.mode = None if self.way in ("none", "kernels") else CastMode(self)

    @classmethod
    def of(cls, policy: Policy, device_type: str) -> Casting:
        """Return the casting of ``policy`` on this machine's device of torch type ``device_type``."""
        return cls(policy, this_device(device_type))

    @property
    def emulates(self) -> bool:
        """Return whether 16-bit or 8-bit arithmetic is emulated, so that times say nothing about a device that has it."""
        return self.arithmetic == "emulated"

    def choose(self) -> tuple[Way, str]:
        """Return the way in which the policy is applied, and why."""
        policy = self.policy
        if not policy.lowers:
            return "none", "the policy casts nothing"
        if self.emulates:
            return "table", "emulated arithmetic replaces the device's kernels"
        if policy.casting == "model":
            return "none", "weights and inputs are cast; operations run in their operands' format"
        if policy.op_lists == "device":
            if policy.lower or policy.fp32 or policy.widest:
                return "overlay", "the device's lists, changed by the policy's own"
            return "kernels", "the policy asks for the device's own lists"
        if self.device_type != "cuda":
            return "table", f"torch's lists for {self.device_type} differ from the portable ones"
        if policy.lower or policy.fp32 or policy.widest:
            return (
                "overlay",
                "CUDA's kernels follow the portable lists, changed by the policy's own",
            )
        return "kernels", "CUDA's kernels follow the portable lists"

    @contextmanager
    def region(self) -> Iterator[None]:
        """Run a forward pass under the policy; regions nest, and a nested one costs nothing."""
        with self.mode or nullcontext(), self.autocast():
            yield

    def autocast(self, *, enabled: bool = True) -> Any:
        """Return torch's own autocast context in the policy's dtype (a null context where the policy has no use for it)."""
        if self.way == "none":
            return nullcontext()
        return torch.autocast(self.device_type, dtype=self._dtype, enabled=enabled)

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Run a backward pass: what activation checkpointing computes again is computed under the policy.

        Autocast itself is off, as torch asks for backward passes; checkpointing turns it on around each recompute.
        """
        if self.mode is None:
            yield
            return
        with self.mode, self.autocast(enabled=False):
            yield


class CastMode(TorchFunctionMode):
    """Look every torch call up in the policy's table while autocast is on."""

    def __init__(self, casting: Casting) -> None:
        super().__init__()
        self.device_type = casting.device_type
        self.low, self.low_name = casting.policy.storage.dtype, casting.policy.storage.name
        self.keeps_kernels = casting.way == "overlay"
        self.rules = rules_for(casting.policy, emulate=casting.emulates, overlay=self.keeps_kernels)
        self.casts_operands = casting.policy.casting == "ops"
        self.weights: dict[tuple[int, bool], tuple[Tensor, Tensor]] = {}
        self.emulating: Function | None = None
        """The emulation that is running: FLOP counts ask."""
        self.depth = 0

    def __enter__(self) -> CastMode:
        self.depth += 1
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self.depth -= 1
        if self.depth == 0:
            self.weights.clear()

    def __torch_function__(
        self, func: Function, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one torch call as its rule says."""
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():
            reflected = _REFLECTED.get(func.__name__)
            if reflected is not None:
                return self._enter(func, reflected, args, kwargs)
            func = _TRACEABLE.get(func.__name__, func)
        rule = self.rules.get(func)
        if rule is None:
            entered = ENTERED.get(func)
            if entered is not None:
                return self._enter(func, entered, args, kwargs)
            if self.keeps_kernels:
                return func(*args, **kwargs)
        if not torch.is_autocast_enabled(self.device_type):
            return func(*args, **kwargs)
        if torch.compiler.is_compiling():
            with torch.autocast(self.device_type, enabled=False):
                return self._run(func, rule, args, kwargs)
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

    def _run(self, func: Function, rule: Rule | None, args: Any, kwargs: dict[str, Any]) -> Any:
        if rule is None or kwargs.get("out") is not None:
            return func(*args, **kwargs)
        if rule.keeps_weight and self.casts_operands:
            x, weight, bias = _linear(*args, **kwargs)
            if self._casts((x, weight, bias)):
                return self._emulate(rule.run, (self._lower(x), weight, self._lower(bias)), {})
        if rule.precision == "lower":
            if self.casts_operands:
                args, kwargs = self._lower(args), {k: self._lower(v) for k, v in kwargs.items()}
            if rule.run is not None and _all_half((*args, *kwargs.values())):
                return self._emulate(rule.run, args, kwargs)
        elif rule.precision == "fp32":
            # An explicit dtype (softmax, sum, ...) is the author's own choice.
            if kwargs.get("dtype") is None:
                args, kwargs = _cast(args, FP32.dtype), _cast(kwargs, FP32.dtype)
        elif rule.precision == "widest":
            widest = _widest((*args, *kwargs.values()))
            args, kwargs = _cast(args, widest), _cast(kwargs, widest)
        return func(*args, **kwargs)

    def _emulate(self, run: Function | None, args: Any, kwargs: dict[str, Any]) -> Any:
        assert run is not None
        self.emulating = run
        try:
            return run(*args, **kwargs)
        finally:
            self.emulating = None

    def _casts(self, operands: Sequence[Tensor | None]) -> bool:
        tensors = [t for t in operands if t is not None]
        return all(t.dtype in _CASTABLE and t.device.type == self.device_type for t in tensors)

    def _lower(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            if value.dtype is self.low or value.dtype not in _CASTABLE:
                return value
            if value.device.type != self.device_type:
                return value
            is_weight = value.requires_grad and value.is_leaf and value.dtype is FP32.dtype
            if is_weight and not torch.compiler.is_compiling():
                return self._lower_weight(value)
            return value.to(self.low)
        if isinstance(value, (list, tuple)):
            return type(value)([self._lower(v) for v in value])
        return value

    def _lower_weight(self, weight: Tensor) -> Tensor:
        # The entry holds the weight too: an id is only unique among living objects.
        key = (id(weight), torch.is_grad_enabled())
        kept = self.weights.get(key)
        if kept is None:
            kept = self.weights[key] = (weight, weight.to(self.low))
        return kept[1]


def rules_for(policy: Policy, *, emulate: bool, overlay: bool) -> dict[Function, Rule]:
    """Return the rule of every torch function that the policy's lists name and this torch has.

    Args:
        policy: gives the lists, and whether linear layers are computed in FP8.
        emulate: whether the lower-precision functions are emulated.
        overlay: whether only what the policy itself names is listed, the rest being left to torch's kernels.
    """
    chosen = oplists.assign(policy.lower, policy.fp32, policy.widest)
    rules: dict[Function, Rule] = {}
    for family in oplists.FAMILIES:
        for op in family.ops:
            precision, function = chosen[op], find_function(op)
            if function is None or precision == "follow":
                continue
            if overlay and precision == family.precision:
                continue
            if policy.casting == "model" and precision != "lower":
                continue
            rule = Rule(precision)
            if emulate and precision == "lower" and family.precision == "lower":
                name = op.split(".")[-1]
                recipe = policy.fp8_recipe if policy.compute == "fp8" else None
                run = emulated(function, name, family=family.name, float8=recipe)
                rule = replace(rule, run=run, keeps_weight=recipe is not None and name == "linear")
            rules[function] = rule
    return rules


def find_function(op: str) -> Function | None:
    """Return the torch function that the op lists name ``op``, or None where this torch lacks it."""
    place, name = op.split(".", 1)
    found: Function | None = getattr(_PLACES[place], name, None)
    return found


# Methods of Tensor that torch.compile can neither find in a table nor trace: Python wrappers of operators, and one that
# calls super(). The second table's do what Tensor's own do, with the mode on.
_TRACEABLE: dict[str, Function] = {
    "unflatten": _VF.unflatten,
    "pow": torch.pow,
    "__floordiv__": torch.floor_divide,
}
_REFLECTED: dict[str, Function] = {
    "__rpow__": lambda x, other: torch.pow(other, x),
    "__rsub__": lambda x, other: torch.rsub(x, other),
    "__rdiv__": lambda x, other: x.reciprocal() * other,
    "__rfloordiv__": lambda x, other: torch.floor_divide(other, x),
    "__rmod__": lambda x, other: torch.remainder(other, x),
}

_PLACES: dict[str, Any] = {
    "torch": torch,
    "F": torch.nn.functional,
    "Tensor": Tensor,
    "_nn": torch._C._nn,
    "_VF": _VF,
    "linalg": torch.linalg,
    "special": torch.special,
}


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
    return input, weight, bias  # by position or by name


def _cast(value: Any, dtype: torch.dtype | None) -> Any:
    if isinstance(value, Tensor):
        half = value.dtype in _HALF and value.dtype is not dtype
        return value.to(dtype) if dtype is not None and half else value
    if isinstance(value, (list, tuple)):
        return type(value)([_cast(v, dtype) for v in value])
    if isinstance(value, dict):
        return {k: _cast(v, dtype) for k, v in value.items()}
    return value


def _tensors(values: Sequence[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _all_half(values: Sequence[Any]) -> bool:
    floating = [t.dtype for t in _tensors(values) if t.is_floating_point()]
    return bool(floating) and all(dtype in _HALF for dtype in floating)


def _widest(values: Sequence[Any]) -> torch.dtype | None:
    dtypes = {t.dtype for t in _tensors(values) if t.dtype in _CASTABLE}
    return FP32.dtype if len(dtypes) > 1 else None


def _entered(function: types.FunctionType) -> Function:
    """Return ``function`` with its own look-up of function modes left out, so that its body runs under the mode."""
    scope = {**function.__globals__, **dict.fromkeys(_LOOKUPS, _never)}
    name, defaults = function.__name__, function.__defaults__
    twin = types.FunctionType(function.__code__, scope, name, defaults, function.__closure__)
    twin.__kwdefaults__ = function.__kwdefaults__
    return twin


def _never(*args: object) -> bool:
    return False


_LOOKUPS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
_BACKWARD = (Tensor.backward, torch.autograd.backward, torch.autograd.grad)


def _python_functions() -> dict[Function, Function]:
    # Not those of torch.functional: what they are made of is in no list, and torch.compile traces none of their twins.
    homes = [vars(torch.nn.functional), vars(Tensor)]
    found: list[Any] = [f for home in homes for f in home.values() if isinstance(f, types.FunctionType)]
    found += [torch.autograd.backward, torch.autograd.grad]
    looks_up = [f for f in found if set(_LOOKUPS) & set(f.__code__.co_names)]
    return {f: _entered(f) for f in looks_up if f is not Tensor.unflatten}


ENTERED = _python_functions()
"""Functions of torch written in Python that would hide what they call from a function mode."""
