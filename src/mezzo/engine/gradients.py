"""Gradients of the parameters that are trained: the backward pass, the norm, scaling, setting aside.

``torch.autograd.backward`` prepares lists of outputs and inputs, tensor subclasses and initial gradients before it calls the engine. One
plain FP32 scalar needs none of that, and it costs a twentieth of a small model's pass, more than Mezzo's own hooks. The engine receives
the same arguments as from torch, so the gradients are bit-identical.

The gradient of the loss itself is always 1, in a tensor that is reused. No other code may keep it: a loss with a hook or with
``retain_grad`` goes through torch's ``backward``, and so does a pass that a CUDA graph captures. A custom function that writes into the
tensor changes its version, and then a new one is created. A new one is used from the next pass on, whose stream has waited for this
pass's update.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import _engine_run_backward
from torch.utils._python_dispatch import _disable_current_modes

from mezzo.devices import has_fp64
from mezzo.formats import FP32, Format

_FP32 = FP32.dtype
_ZERO_GRAD = torch.optim.Optimizer.zero_grad
_LEAF: Any = torch.ones((), requires_grad=True, device="cpu")
ACCUMULATES = type(_LEAF.expand(1).grad_fn.next_functions[0][0])
"""The type of the graph nodes that accumulate into a leaf's gradient."""


def parameters_of(models: Iterable[nn.Module]) -> list[nn.Parameter]:
    """Return the parameters of all models, each once."""
    return list(dict.fromkeys(p for model in models for p in model.parameters()))


def trained_by(optimizers: Iterable[torch.optim.Optimizer]) -> list[nn.Parameter]:
    """Return the parameters of all groups of all optimizers."""
    return [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]


def all_parameters(models: Iterable[nn.Module], optimizers: Iterable[torch.optim.Optimizer]) -> list[nn.Parameter]:
    """Return the models' parameters and those that only an optimizer has."""
    return list(dict.fromkeys([*parameters_of(models), *trained_by(optimizers)]))


def trained_leaves(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the leaves that one optimizer updates."""
    groups = getattr(optimizer, "param_groups", ())  # missing if its constructor failed
    return [p for group in groups for p in group["params"] if p.is_leaf]


def gradients_of(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return the gradients of ``parameters``, not copied; for a sparse gradient its values.

    Sparse gradients are first coalesced in place, so that a row that was used twice counts as its sum.
    """
    listed = list(parameters)
    gradients = [gradient for p in listed if (gradient := p.grad) is not None]
    for gradient in gradients:
        if gradient.is_sparse:
            break
    else:
        return gradients
    for parameter in listed:
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = parameter.grad.coalesce()
    return [g._values() if g.is_sparse else g for p in listed if (g := p.grad) is not None]


def wide(gradient: Tensor) -> Tensor:
    """Return a gradient in FP64, on the CPU if its device has no FP64: for the few updates whose squares leave FP32's range."""
    return gradient.double() if has_fp64(gradient.device) else gradient.cpu().double()


def total_norm(gradients: list[Tensor]) -> Tensor:
    """Return the norm of all gradients together: FP32 (FP64 if a gradient is), on the first one's device.

    16-bit gradients are squared in FP32: their squares leave FP16's range from 256 on.
    """
    widest = None if gradients[0].element_size() > 2 else FP32.dtype
    norms: tuple[Tensor, ...] | list[Tensor] = torch._foreach_norm(gradients, dtype=widest)
    if len({n.device for n in norms}) > 1:
        norms = [n.to(norms[0].device) for n in norms]
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return total


def by_device(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Return ``tensors`` in one list per device: a kernel reads only its own device's memory."""
    devices = dict.fromkeys([t.device for t in tensors])  # lists: a generator costs a call per element
    if len(devices) < 2:
        return [list(tensors)]
    return [[t for t in tensors if t.device == device] for device in devices]


def multiply(tensors: list[Tensor], factor: Tensor | None) -> None:
    """Multiply ``tensors``, on any devices, by one number in place; None for 1."""
    if not tensors or factor is None:
        return
    if factor.is_cpu and factor.dtype is _FP32 and False not in [t.is_cpu and t.dtype is _FP32 for t in tensors]:
        # One operation; foreach on a CPU runs one for each tensor. The products are bit-identical.
        torch._amp_foreach_non_finite_check_and_unscale_(tensors, torch.empty_like(factor), factor)
        return
    devices = {t.device for t in tensors}
    if len(devices) == 1 and factor.device in devices:  # almost always: no list is built
        torch._foreach_mul_(tensors, factor)
        return
    for here in by_device(tensors):
        torch._foreach_mul_(here, factor.to(here[0].device))


def clamp(tensors: list[Tensor], largest: float) -> None:
    """Bring every element to at most ``largest`` in magnitude, in place."""
    if not tensors:  # torch rejects an empty list
        return
    torch._foreach_clamp_min_(tensors, -largest)
    torch._foreach_clamp_max_(tensors, largest)


def clip_factor(norm: Tensor, largest: float, factor: Tensor | None) -> Tensor:
    """Return ``factor`` (None for 1) times the coefficient that clips gradients of ``norm`` to ``largest``.

    The coefficient is ``torch.nn.utils.clip_grad_norm_``'s: ``largest / (norm + 1e-6)``, at most 1.
    """
    coefficient = torch.clamp(largest / (norm + 1e-6), max=1.0)
    return coefficient if factor is None else coefficient * factor


def not_finite(norm: Tensor) -> Tensor:
    """Return 1 if ``norm`` is not finite, else 0, in FP32 and without waiting for the device."""
    return (norm - norm).ne(0).float()  # the difference is NaN there; isfinite would run four operations in its place


def any_not_finite(gradients: list[Tensor]) -> Tensor:
    """Return 1 if an element of a gradient is not finite, else 0, in FP32 and without waiting for the device."""
    return (~finite_each(gradients)).any().float()


def finite_each(gradients: Sequence[Tensor]) -> Tensor:
    """Return for each gradient whether all its elements are finite, as booleans on the first one's device, without waiting for it."""
    # Magnitudes, since squares leave FP32's range; torch has no largest one of no elements.
    largest = torch._foreach_norm([g if g.numel() else g.new_zeros(1) for g in gradients], ord=math.inf)
    return torch.stack([n.to(largest[0].device) for n in largest]).isfinite()


def all_finite(gradients: Iterable[Tensor]) -> bool:
    """Return whether every element of every gradient is finite; waits for the device."""
    return all(bool(g.isfinite().all()) for g in gradients)


def set_aside(parameters: Iterable[nn.Parameter]) -> list[tuple[nn.Parameter, Tensor]]:
    """Remove the gradients of ``parameters`` and return them, so that a backward pass leaves fresh ones."""
    aside = [(p, p.grad) for p in parameters if p.grad is not None]
    for parameter, _ in aside:
        parameter.grad = None
    return aside


def drop_gradients(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Set all gradients to None, as ``zero_grad`` does; call that method if it was replaced, overridden or wrapped."""
    for optimizer in optimizers:
        if type(optimizer).zero_grad is not _ZERO_GRAD or "zero_grad" in vars(optimizer):
            optimizer.zero_grad(set_to_none=True)
            continue
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None


def put_back(aside: list[tuple[nn.Parameter, Tensor]]) -> None:
    """Add the gradients that ``set_aside`` removed to the fresh ones."""
    for parameter, gradient in aside:
        parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)


@torch.no_grad()
def round_sums(gradients: Iterable[Tensor], fmt: Format) -> None:
    """Round gradients in place to ``fmt``, hidden from counters and observers, as if they had been added up in it.

    The sum of a gradient in ``fmt`` and one in FP32 is rounded twice, once to FP32. That changes a result only if the first
    rounding ends half-way between two numbers of ``fmt``.
    """
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        for gradient in gradients:
            real = torch.view_as_real(gradient) if gradient.is_complex() else gradient
            real.copy_(real.to(fmt.dtype))


def worst_gradients(named: Iterable[tuple[str, Tensor | None]]) -> str:
    """Name up to five gradients with the largest share of elements that are not finite; waits for the device."""
    gradients = [(name, g.coalesce()._values() if g.is_sparse else g) for name, g in named if g is not None]
    shares = [(float((~g.isfinite()).float().mean()), name) for name, g in gradients]
    largest = sorted((s for s in shares if s[0] > 0), reverse=True)[:5]
    return ", ".join(f"{name} ({share:.0%})" for share, name in largest) or "parameters outside the models"


_BACKWARD, _OF_TENSORS = torch.autograd.backward, Tensor.backward
_ARE_TORCHS = _BACKWARD.__globals__ is vars(torch.autograd) and _OF_TENSORS.__globals__ is vars(torch._tensor)
"""Whether nothing had replaced them when this file was imported."""


class DirectPasses:
    """Backward passes from one scalar."""

    def __init__(self, run_engine: Callable[..., None]) -> None:
        """Create passes; those that need torch's preparation go through ``run_engine``, torch's own ``backward``."""
        self._run_engine = run_engine
        self._unit_gradient: Tensor | None = None

    def __call__(
        self,
        loss: Tensor,
        gradient: Tensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        grad_variables: Any = None,
        inputs: Any = None,
    ) -> None:
        """Run the backward pass of ``loss``, with the arguments of ``torch.autograd.backward``."""
        if (
            not (retain_graph or create_graph)
            and grad_variables is None
            and inputs is None
            and type(loss) is Tensor
            and loss.dtype is _FP32
            and loss.dim() == 0
            and not loss.is_leaf  # reading grad_fn would create a Python object
            and loss._backward_hooks is None
            and not loss.retains_grad
            and not torch._C._are_functorch_transforms_active()
            and not (loss.is_cuda and torch.cuda.is_current_stream_capturing())
        ):
            start = self._unit_gradient if gradient is None else gradient
            if start is not None and (gradient is not None or (not start._version and start.device == loss.device)):
                _engine_run_backward((loss,), (start,), False, False, (), allow_unreachable=True, accumulate_grad=True)
                return
            self._unit_gradient = torch.ones_like(loss.detach())
        self._run_engine(loss, gradient, retain_graph, create_graph, grad_variables, inputs)

    def from_loss(self, loss: Tensor, *, retain_graph: bool) -> None:
        """Run ``loss.backward(retain_graph=retain_graph)``; tools that replace torch's functions see every pass."""
        torchs_own = torch.autograd.backward is _BACKWARD and Tensor.backward is _OF_TENSORS and _ARE_TORCHS
        if retain_graph or not torchs_own:
            loss.backward(retain_graph=retain_graph)
        else:
            self(loss)
