"""``apex.optimizers``: the fused Adam and SGD, by the engine's one-pass optimizers.

They run on every device. Moments are FP32 whatever the weights are in; learning rates, groups and state dicts are torch's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from mezzo.engine.kernels.reference import AdamWSettings, Batch
from mezzo.engine.optimizers.adamw import AdamW
from mezzo.engine.optimizers.one_pass import OnePass
from mezzo.engine.optimizers.sgd import SGD

_CORRECTED = 2.0**23
"""A number of steps after which Adam's bias corrections are 1 in every precision, and from which FP32 can still count."""


class _Fused(OnePass):
    """The part of Apex's interface that both optimizers have."""

    set_grad_none: bool

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear the gradients, by default as ``set_grad_none`` says."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)


class FusedAdam(_Fused, AdamW):
    """AdamW, or Adam with ``adam_w_mode=False``.

    Args:
        params: parameters or groups; FP32, FP16 or BF16.
        lr: learning rate.
        bias_correction: whether the moments are corrected for their start at zero.
        betas: decay of the means of gradients and of their squares.
        eps: added to the root of the second.
        adam_w_mode: whether weight decay is decoupled; False adds it to the gradient.
        weight_decay: how much of it.
        amsgrad: not supported, as in Apex.
        set_grad_none: whether ``zero_grad`` removes gradients or makes them zero.
        capturable: not supported: Mezzo captures steps itself.
        master_weights: whether 16-bit weights have FP32 masters in the optimizer's state.

    Raises:
        RuntimeError: ``amsgrad`` or ``capturable`` is set.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
    ) -> None:
        if amsgrad:
            raise RuntimeError("FusedAdam does not support the AMSGrad variant. Use mezzo.AdamW(amsgrad=True).")
        if capturable:
            raise RuntimeError(
                "FusedAdam(capturable=True) is not offered here. Use mezzo.Session, which captures whole steps."
            )
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        for group in self.param_groups:
            group.setdefault("bias_correction", bias_correction)
        self.defaults["bias_correction"] = bias_correction
        self.adam_w_mode, self.set_grad_none = adam_w_mode, set_grad_none
        self.master_weights = master_weights
        self._factor = torch.ones(())

    def __getstate__(self) -> dict[str, Any]:
        own = {"adam_w_mode": self.adam_w_mode, "set_grad_none": self.set_grad_none}
        return {**super().__getstate__(), **own, "_factor": torch.ones(())}

    def step(self, closure: Callable[[], Any] | None = None, **retired: Any) -> Any:
        """Update all parameters that have a gradient; return what ``closure`` did.

        Raises:
            RuntimeError: an argument is given that Apex retired.
        """
        if any(value is not None for value in retired.values()):
            raise RuntimeError(
                f"FusedAdam.step() got {', '.join(retired)}. It takes a closure or nothing: leave the rest out."
            )
        return _stepped(self, closure)

    def update(self, factor: Tensor, found_inf: Tensor) -> None:
        """Update from scaled gradients, or leave everything as it is."""
        self._factor = factor
        super().update(factor if self.adam_w_mode else torch.ones_like(factor), found_inf)

    def _batch(self, group: dict[str, Any], device: torch.device) -> Batch:
        batch = super()._batch(group, device)
        decay = group["weight_decay"]
        if not self.adam_w_mode:  # terms added to a gradient are not scaled
            factor = self._factor.to(device)
            pairs = zip(batch.gradients, batch.weights, strict=True)
            gradients = [(g.float() * factor + decay * w.detach().float()).to(g.dtype) for g, w in pairs]
            batch = dataclasses.replace(batch, gradients=gradients)
        return batch

    def _settings(self, group: dict[str, Any]) -> AdamWSettings:
        settings = super()._settings(group)
        return settings if self.adam_w_mode else dataclasses.replace(settings, weight_decay=0.0)

    def _fit(self, parameter: nn.Parameter, state: dict[str, Any], group: dict[str, Any]) -> None:
        begins = "step" not in state
        super()._fit(parameter, state, group)
        if begins and not group["bias_correction"]:
            state["step"].fill_(_CORRECTED)


class FusedSGD(_Fused, SGD):
    """Stochastic gradient descent with momentum, as torch defines it.

    Args:
        params: parameters or groups; FP32, FP16 or BF16.
        lr: learning rate.
        momentum: share of the last direction that is kept.
        dampening: share of the gradient that is left out of the buffer.
        weight_decay: a share of the weight that is added to the gradient.
        nesterov: look ahead along the momentum.
        wd_after_momentum: not supported.
        materialize_master_grads: without effect: under O2 masters always have FP32 gradients.
        set_grad_none: whether ``zero_grad`` removes gradients or makes them zero.

    Raises:
        RuntimeError: ``wd_after_momentum`` is set.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        wd_after_momentum: bool = False,
        materialize_master_grads: bool = True,
        set_grad_none: bool = False,
    ) -> None:
        if wd_after_momentum:
            raise RuntimeError(
                "FusedSGD(wd_after_momentum=True) is not offered here. Leave it False, or decay the weights yourself before step()."
            )
        super().__init__(
            params, lr=lr, momentum=momentum, dampening=dampening, weight_decay=weight_decay, nesterov=nesterov
        )
        self.set_grad_none, self.materialize_master_grads = set_grad_none, materialize_master_grads
        self.master_weights = False

    def __getstate__(self) -> dict[str, Any]:
        own = {"set_grad_none": self.set_grad_none, "materialize_master_grads": self.materialize_master_grads}
        return {**super().__getstate__(), **own}

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient; return what ``closure`` did."""
        return _stepped(self, closure)


def _stepped(optimizer: OnePass, closure: Callable[[], Any] | None) -> Any:
    loss = None
    if closure is not None:
        with torch.enable_grad():
            loss = closure()
    OnePass.step(optimizer)  # not the base's, which torch may have wrapped with its hooks: they would run twice
    return loss
