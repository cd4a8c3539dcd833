"""Unscale all gradients of a backward pass in one call, if no code can see a scaled one.

A hook on every leaf (``backward``) costs two kernels and three Python calls per parameter. In a steady run most passes need none: if the
graph has only torch's own nodes and no hook of the script, no Python code runs before the pass has ended; and if the optimizer's
parameters had no gradients before, every gradient that the pass leaves is scaled. Then one call multiplies all gradients and sets one
flag, as in ``torch.amp.GradScaler``. Before the optimizer's step a second call checks the gradients again, since the script may have
changed them, and the flag is read. Every pass is checked: its graph is walked for its leaves, and a pass that does not qualify gets hooks.

An overflowed gradient stays infinite until then, as under GradScaler; a hook makes it NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import _HookMixin

from mezzo.engine.gradients import ACCUMULATES, trained_leaves
from mezzo.formats import FP32
from mezzo.launch.patches import Patches
from mezzo.launch.torch.precision import ScriptPrecision

_FP32 = FP32.dtype


class BatchedUnscaling:
    """The passes of a steady run whose gradients are unscaled in one call, and the flag of the last one."""

    def __init__(self, precision: ScriptPrecision) -> None:
        self._precision = precision
        self._unhook: Callable[[Tensor], None] = lambda leaf: None
        self._disabled = False
        """Whether the script sets hooks inside graphs, so that its code may run in any backward pass, or retains gradients there."""
        self._known: set[type] = set()
        """Types of graph nodes that run no Python code."""
        self._group: Any = dist.distributed_c10d._world if dist.is_available() else None
        self._overflow: Tensor | None = None
        """A flag that is above 0 if the last pass overflowed; None if that pass was not batched."""
        self._factor_of_1: Tensor | None = None

    def install(self, patches: Patches, unhook: Callable[[Tensor], None]) -> None:
        """Detect hooks on graph nodes until ``patches`` are undone; ``unhook`` removes the launcher's own hook from a leaf."""
        self._unhook = unhook

        def detecting(original: Callable[..., Any]) -> Any:
            def register(*args: Any) -> Any:
                self.disable()
                return original(*args)

            return staticmethod(register)

        patches.replace(_HookMixin, "_register_hook", detecting(_HookMixin._register_hook))

    def disable(self) -> None:
        """Batch no more passes."""
        self._disabled = True

    def forget(self) -> None:
        """Forget the flag: another pass has changed the gradients."""
        self._overflow = None

    def start_of(self, loss: Any, optimizer: torch.optim.Optimizer) -> Tensor | None:
        """Return the scaled gradient from which the backward pass of ``loss`` starts if it can be batched, else None."""
        if self._disabled or (self._group is not None and self._group._default_pg is not None):
            return None
        scale = self._precision.scale.on_device()
        if type(loss) is not Tensor or loss.dim() or loss.dtype is not _FP32 or not isinstance(scale, Tensor):
            return None
        device = scale.device
        if loss.device != device or loss.grad_fn is None:
            return None
        trained = set()  # ids: hashing a tensor is a Python call
        for group in optimizer.param_groups:
            for p in group["params"]:
                if type(p) is not nn.Parameter and type(p) is not Tensor:
                    return None
                if p.grad is not None or p.dtype is not _FP32 or p.device != device:
                    return None
                if p._post_accumulate_grad_hooks or (p._backward_hooks and not self._unhooked(p)):
                    return None
                trained.add(id(p))
        return scale.clone() if self._reaches_only(trained, loss.grad_fn) else None

    def _unhooked(self, leaf: Tensor) -> bool:
        """Remove the launcher's hook from a leaf; return whether no other hook is left."""
        self._unhook(leaf)
        return not leaf._backward_hooks

    def _reaches_only(self, trained: set[int], root: Any) -> bool:
        """Return whether a graph has only nodes of torch, and only leaves whose ids are in ``trained``."""
        waiting, seen, known = [root], {root}, self._known
        while waiting:
            node = waiting.pop()
            kind = type(node)
            if kind is ACCUMULATES:
                if id(node.variable) not in trained:
                    return False
                continue
            if kind not in known:
                if issubclass(kind, torch._C._FunctionBase):  # written in Python
                    return False
                known.add(kind)
            for following, _ in node.next_functions:
                if following is not None and following not in seen:
                    seen.add(following)
                    waiting.append(following)
        return True

    def unscale(self, optimizer: torch.optim.Optimizer, unscale_one: Callable[[Tensor], Tensor]) -> None:
        """Unscale the gradients that a batched pass has left: with ``unscale_one``, one by one, if any has an unusual form."""
        inverse = self._precision.scale.inverse()
        assert inverse is not None
        self._overflow = None
        gradients = _gradients(optimizer, inverse.device)
        if gradients is None or not _are_disjoint(gradients):
            for parameter in trained_leaves(optimizer):
                if parameter.grad is not None:
                    parameter.grad = unscale_one(parameter.grad)
        elif gradients:
            self._overflow = torch.zeros((), dtype=_FP32, device=inverse.device)
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, self._overflow, inverse)

    def finite(self, optimizer: torch.optim.Optimizer) -> bool | None:
        """Return whether all gradients are finite, and were after the last pass; None if that pass was not batched.

        Checks them again, since the script may have changed them. Reads one flag from the device.
        """
        flag, self._overflow = self._overflow, None
        if flag is None:
            return None
        gradients = _gradients(optimizer, flag.device)
        if gradients is None:
            return None
        if gradients:
            if self._factor_of_1 is None:
                self._factor_of_1 = torch.ones((), dtype=_FP32, device=flag.device)
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, flag, self._factor_of_1)
        return not flag


def _gradients(optimizer: torch.optim.Optimizer, device: torch.device) -> list[Tensor] | None:
    """Return the gradients of an optimizer's parameters; None if one is not an FP32 tensor of the usual form on ``device``."""
    gradients = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            g = parameter.grad
            if g is None:
                continue
            if type(g) is not Tensor or g.layout is not torch.strided or g.dtype is not _FP32:
                return None
            if g.device != device or g.requires_grad:
                return None
            gradients.append(g)
    return gradients


def _are_disjoint(gradients: Sequence[Tensor]) -> bool:
    """Return whether gradients share no memory: autograd may leave views of one tensor as the gradients of several leaves."""
    ranges = []
    for gradient in gradients:
        start = gradient.data_ptr()
        ranges.append((start, start + gradient.nbytes))
    ranges.sort()
    last_end = 0
    for start, end in ranges:
        if start < last_end:
            return False
        last_end = end
    return True
