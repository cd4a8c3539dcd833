"""The usual backward pass of a steady run, without torch's preparation of it in Python.

``loss.backward()`` of one plain FP32 scalar needs nothing of what ``torch.autograd.backward`` sorts out before it calls the engine:
lists of outputs and inputs, tensor subclasses, gradients to make. That costs a twentieth of a small model's pass, more than Mezzo's own
hooks. The engine is given what torch would give it, so the gradients are equal to the bit.

The gradient of the loss itself is always 1, in a tensor that is kept. Nobody else may get hold of it: a loss with a hook or with
``retain_grad`` takes torch's way, so does a pass that a CUDA graph captures, and a custom function that writes into it leaves a version
number, so a new one is made. It is used from the next pass on: whatever stream that runs on has waited for this one's update.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward

from mezzo.formats import FP32

_FP32 = FP32.dtype
_PLAIN: tuple[tuple[Any, ...], ...] = ((), (None, False), (False, False))
"""What follows the gradient where ``Tensor.backward`` or a script passes nothing special: ``retain_graph``, ``create_graph``."""
_NO_INPUTS = {"inputs": None}


class DirectPass:
    """Backward passes from one scalar."""

    def __init__(self) -> None:
        self._one: Tensor | None = None

    def __call__(self, loss: Tensor, gradient: Tensor | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Run the backward pass of ``loss``, a plain scalar; return False, with nothing done, if torch must prepare it.

        Args:
            loss: where the pass starts.
            gradient: its gradient; None for 1.
            args: further positional arguments of ``torch.autograd.backward``.
            kwargs: its arguments by name.
        """
        if args not in _PLAIN or (kwargs and kwargs != _NO_INPUTS) or torch._C._are_functorch_transforms_active():
            return False
        if loss.dtype is not _FP32 or loss.grad_fn is None or loss._backward_hooks is not None or loss.retains_grad:
            return False
        if loss.is_cuda and torch.cuda.is_current_stream_capturing():
            return False
        if gradient is None:
            gradient = self._one
            if gradient is None or gradient._version or gradient.device != loss.device:
                self._one = torch.ones_like(loss.detach())
                return False
        _engine_run_backward((loss,), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True)
        return True
