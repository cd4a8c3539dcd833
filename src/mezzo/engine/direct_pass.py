"""The usual backward pass of a training step, without torch's preparation in Python.

``torch.autograd.backward`` prepares lists of outputs and inputs, tensor subclasses and initial gradients before it calls the engine. One
plain FP32 scalar needs none of that, and it costs a twentieth of a small model's pass, more than Mezzo's own hooks. The engine receives
the same arguments as from torch, so the gradients are bit-identical.

The gradient of the loss itself is always 1, in a tensor that is reused. No other code may keep it: a loss with a hook or with
``retain_grad`` goes through torch's ``backward``, and so does a pass that a CUDA graph captures. A custom function that writes into the
tensor changes its version, and then a new one is created. A new one is used from the next pass on, whose stream has waited for this
pass's update.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward

from mezzo.formats import FP32

_FP32 = FP32.dtype
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
        """Run ``loss.backward(retain_graph=retain_graph)``."""
        if retain_graph or not _runs_torchs_own():
            loss.backward(retain_graph=retain_graph)
        else:
            self(loss)


def _runs_torchs_own() -> bool:
    """Return whether ``loss.backward()`` runs torch's own functions; tools that replace them must see every pass."""
    return torch.autograd.backward is _BACKWARD and Tensor.backward is _OF_TENSORS and _ARE_TORCHS
