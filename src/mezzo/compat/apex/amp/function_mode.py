"""Cast by the name that Python calls, as Apex did, where the rest of Mezzo casts at torch's dispatcher.

A function mode receives every call of a torch function or method in its thread before torch runs it. It does not see
operations inside C++ composites, nor TorchScript. Functions of torch that are written in Python and pass themselves to
the mode are entered, so that it sees what they call. A call costs 2 to 5 us.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from mezzo import oplists
from mezzo.engine.casts.autocast_kernels import CastRule, CastTable, WeightCasts
from mezzo.engine.casts.casting import Casting, rules_for
from mezzo.engine.matrix_units.emulation import emulation
from mezzo.formats import Format
from mezzo.launch.torch.direct_calls import WITHOUT_MODE_CHECK
from mezzo.policy import Policy

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
_OTHER_NAMES = {other: name for other, name in oplists.ALIASES.items() if not other.startswith("__")}
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
                emulated = emulation(function, name, low=policy.storage.name, family=base, float8=None)
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
