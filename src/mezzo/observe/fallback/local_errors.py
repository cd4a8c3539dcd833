"""Measure the error that every module makes on its own in a lower precision, from one step computed in FP32.

Comparing a low-precision run with an FP32 run module by module blames everything downstream of the culprit. So the step runs
in FP32, the inputs and output gradients of each module's first call are kept, and afterwards each module runs alone on
them: in FP32, under the policy, and under the policy with its inputs rounded as well (an operation that follows
its input's format loses bits only then). The children of a container always run in FP32, so that the container's error
comes only from what it computes itself. All three runs draw the same dropout masks.

Limits: the first call of a module stands for all its calls; code outside modules is not measured. Costs: a copy of
every module's inputs and output gradients, and about five steps of time per level of the module tree.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from mezzo.engine.casts.conversion import to_format
from mezzo.measure.flops import FlopCounter
from mezzo.observe.fallback.evidence import LocalError, scale_alone
from mezzo.observe.one_module import OneModule
from mezzo.observe.tensors import norm
from mezzo.policy import Policy


@dataclass(eq=False)
class FirstCall:
    """The inputs of a module's first call, and the gradients of its outputs."""

    module: nn.Module
    args: Any
    kwargs: Any = field(default_factory=dict)
    gradients: list[Tensor | None] = field(default_factory=list)
    """One per output that has a gradient, in order."""
    pass_number: int = 0
    """Number of the call of an outermost module in which this call took place."""


class Calls:
    """The first call of every module in a forward pass that has a backward pass.

    A script may call its model before it trains it, to learn the shape of its output. So a call without gradients is replaced by one in a
    later forward pass, that is, a later call of an outermost module.
    """

    def __init__(self) -> None:
        self.first: dict[nn.Module, FirstCall] = {}
        self._thread = threading.local()
        self._passes = 0
        self._copies: dict[int, tuple[Tensor, int, Tensor]] = {}

    def entering(self, module: nn.Module, args: Any) -> None:
        """Copy the inputs of a module that is being called, before it can change them in place."""
        outermost = self._thread.__dict__.setdefault("outermost", None)
        if outermost is None or outermost is module:
            self._thread.outermost = module
            self._passes += 1
        if self._is_wanted(module) and torch.is_grad_enabled():
            waiting = self._thread.__dict__.setdefault("calls", {})
            waiting.setdefault(module, FirstCall(module, self._copied(args), pass_number=self._passes))

    def returned(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Hook the outputs of a module to keep their gradients."""
        if self._thread.__dict__.get("outermost") is module:
            self._thread.outermost = None
        call = self._thread.__dict__.get("calls", {}).pop(module, None)
        if call is None or not self._is_wanted(module, before=call.pass_number):
            return
        call.kwargs = self._copied(kwargs)
        outputs = differentiable(output)
        if any(not tensor.is_leaf for tensor in outputs):
            self.first[module] = call
            call.gradients = [None] * len(outputs)
            for index, tensor in enumerate(outputs):
                tensor.register_hook(functools.partial(_keep_gradient, call, index))

    def _is_wanted(self, module: nn.Module, *, before: int = 0) -> bool:
        """Return whether no call of a module is known, or only one of an earlier pass that got no gradients."""
        known = self.first.get(module)
        if known is None:
            return True
        return known.pass_number < (before or self._passes) and all(g is None for g in known.gradients)

    def forget_copies(self) -> None:
        """Release tensors that were kept only to avoid a second copy."""
        self._copies = {}

    def _copied(self, values: Any) -> Any:
        def copy(tensor: Tensor) -> Tensor:
            known = self._copies.get(id(tensor))
            if known is None or known[1] != tensor._version:
                clone = tensor.detach().clone().requires_grad_(tensor.requires_grad)
                known = self._copies[id(tensor)] = (tensor, tensor._version, clone)
            return known[2]

        return tree_map_only(Tensor, copy, values)


def _keep_gradient(call: FirstCall, index: int, gradient: Tensor) -> None:
    if call.gradients[index] is None:
        call.gradients[index] = gradient.detach().clone()


def differentiable(values: Any) -> list[Tensor]:
    """Return the tensors in ``values`` from which a backward pass can start."""
    return [t for t in tree_leaves(values) if isinstance(t, Tensor) and t.requires_grad]


class Results(NamedTuple):
    """The outputs of one run of a module, the gradients of its inputs, and those of its weights."""

    output: list[Tensor]
    dgrad: list[Tensor]
    wgrad: list[Tensor]


class Bench:
    """Runs modules on their own and measures their errors."""

    def __init__(self, policy: Policy, alone: OneModule) -> None:
        self._alone = alone
        self._low = policy.storage.dtype
        self._policy, self._scale = policy, 1.0

    def measure(self, calls: Sequence[FirstCall], names: dict[nn.Module, tuple[str, bool]]) -> list[LocalError]:
        """Return the errors of the modules of ``calls``.

        Args:
            calls: calls of modules, each with its inputs and gradients.
            names: each module's name, and whether it is a whole model, which a pattern cannot name.
        """
        self._scale = scale_alone(self._policy, map(self._largest, calls))
        found = []
        for call in calls:
            name, unnamed = names.get(call.module, (type(call.module).__name__, True))
            found.append(self._local(call, name).model_copy(update={"unnamed": unnamed}))
        return found

    def _largest(self, call: FirstCall) -> float:
        """Return the largest magnitude of the gradients that a module reads or computes; 0 if it cannot run on its own."""
        try:
            exact = self._run(call)
        except Exception:  # ``_local`` runs it again and keeps the reason
            return 0.0
        return _largest([*(g for g in call.gradients if g is not None), *exact.dgrad, *exact.wgrad])

    def _local(self, call: FirstCall, name: str) -> LocalError:
        kind = type(call.module).__name__
        counter = FlopCounter(in_region=lambda: True)
        try:
            with counter:
                exact = self._run(call)
            low, rounded = self._run(call, low=True), self._run(call, low=True, rounds=True)
        except Exception as error:  # the script's module: it may fail on its own for any reason
            return LocalError(module=name, type=kind, reason=f"{type(error).__name__}: {error}".splitlines()[0])
        output, dgrad, wgrad = (relative_error(a, b) if a else None for a, b in zip(exact, low, strict=True))
        of_outputs = [g for g in call.gradients if g is not None]
        return LocalError(
            module=name,
            type=kind,
            output=output,
            dgrad=dgrad,
            wgrad=wgrad,
            rounded=max((relative_error(a, b) for a, b in zip(exact, rounded, strict=True) if a), default=0.0),
            flops=sum(counter.by_format.values()),
            largest=_largest([*of_outputs, *exact.dgrad, *exact.wgrad]),
        )

    def _run(self, call: FirstCall, *, low: bool = False, rounds: bool = False) -> Results:
        scale = self._scale if low else 1.0
        alone, inner = self._alone, self._low if rounds else None
        lowered = alone.lowered(call.module, inner=inner) if low else nullcontext()
        forward, backward = (alone.forward(), alone.backward()) if low else (nullcontext(), nullcontext())
        inputs = [t for t in tree_leaves((call.args, call.kwargs)) if isinstance(t, Tensor) and t.requires_grad]
        weights = alone.weights(call.module)
        args, kwargs = call.args, call.kwargs
        with torch.enable_grad(), alone.unchanged(call.module), lowered:
            if rounds:
                args, kwargs = to_format(args, self._low), to_format(kwargs, self._low)
            # Copies in the graph: a module that works in place must not change the kept inputs or a leaf.
            args, kwargs = tree_map_only(Tensor, lambda tensor: tensor.clone(), (args, kwargs))
            with forward:
                output = call.module(*args, **kwargs)
            outputs = differentiable(output)
            pairs = [(t, g) for t, g in zip(outputs, call.gradients, strict=True) if g is not None]
            with backward:
                found = torch.autograd.grad(
                    [t for t, _ in pairs],
                    [*inputs, *weights],
                    [(g * scale).to(t.dtype) for t, g in pairs],
                    allow_unused=True,
                )
        gradients = [
            torch.zeros_like(t) if g is None else g.float() / scale
            for t, g in zip([*inputs, *weights], found, strict=True)
        ]
        values = [t.detach().float() for t in tree_leaves(output) if isinstance(t, Tensor) and t.is_floating_point()]
        return Results(output=values, dgrad=gradients[: len(inputs)], wgrad=gradients[len(inputs) :])


def relative_error(exact: Sequence[Tensor], found: Sequence[Tensor]) -> float:
    """Return the norm of the difference over the norm of ``exact``, over all tensors together; waits for the device.

    Infinite if ``found`` is not finite, or differs from an ``exact`` that is zero.
    """
    norms = [norm(t) for t in exact]
    differences = [norm(b - a) for a, b in zip(exact, found, strict=True)]
    whole, difference = math.hypot(*norms), math.hypot(*differences)
    if not math.isfinite(difference):
        return math.inf
    if whole == 0.0:
        return 0.0 if difference == 0.0 else math.inf
    return difference / whole


def _largest(tensors: Sequence[Tensor]) -> float:
    return max((t.detach().abs().max().item() for t in tensors if t.numel()), default=0.0)
