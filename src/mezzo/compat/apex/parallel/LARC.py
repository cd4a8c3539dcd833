"""Layer-wise adaptive rate clipping and scaling around any optimizer (You et al., arXiv:1708.03888)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mezzo.formats import FP32


class LARC:
    """An optimizer around another that limits each parameter's update to a fraction of the parameter's norm.

    The local rate of a parameter ``w`` with gradient ``g`` is ``trust_coefficient * |w| / (|g| + weight_decay * |w| + eps)``. Weight
    decay is added to the gradient here and disabled in the optimizer during the step, so that the rate covers it.

    Args:
        optimizer: the optimizer that makes the updates.
        trust_coefficient: the fraction.
        clip: whether the local rate bounds the optimizer's from above; False multiplies the two.
        eps: keeps the quotient finite.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, trust_coefficient: float = 0.02, clip: bool = True, eps: float = 1e-8
    ) -> None:
        self.optim, self.trust_coefficient, self.clip, self.eps = optimizer, trust_coefficient, clip, eps

    @property
    def state(self) -> Any:
        """The optimizer's state."""
        return self.optim.state

    @property
    def defaults(self) -> dict[str, Any]:
        """The optimizer's defaults."""
        return self.optim.defaults

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's parameter groups."""
        return self.optim.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self.optim.param_groups = value

    def __repr__(self) -> str:
        return repr(self.optim)

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state dict."""
        return self.optim.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the optimizer's state dict."""
        self.optim.load_state_dict(state_dict)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Clear gradients as the optimizer does."""
        self.optim.zero_grad(*args, **kwargs)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the optimizer."""
        self.optim.add_param_group(param_group)

    @torch.no_grad()
    def step(self) -> None:
        """Scale the gradients and update."""
        decays = [group.get("weight_decay", 0.0) for group in self.param_groups]
        for group, decay in zip(self.param_groups, decays, strict=True):
            if "weight_decay" in group:
                group["weight_decay"] = 0.0
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._adapt(parameter, group["lr"], decay)
        try:
            self.optim.step()
        finally:
            for group, decay in zip(self.param_groups, decays, strict=True):
                if "weight_decay" in group:
                    group["weight_decay"] = decay

    def _adapt(self, parameter: Tensor, lr: float, decay: float) -> None:
        gradient = parameter.grad
        assert gradient is not None
        # In FP32: squares of FP16 leave its range from 256 on.
        weight_norm = torch.linalg.vector_norm(parameter, dtype=FP32.dtype)
        gradient_norm = torch.linalg.vector_norm(gradient, dtype=FP32.dtype)
        rate = self.trust_coefficient * weight_norm / (gradient_norm + decay * weight_norm + self.eps)
        if self.clip:
            rate = (rate / lr).clamp(max=1.0)
        # No comparison in Python, which would wait for the device: a norm of zero leaves the gradient as it is.
        applies = (weight_norm != 0) & (gradient_norm != 0)
        adapted = (gradient + decay * parameter) * rate
        gradient.copy_(torch.where(applies, adapted, gradient))
