"""FP32 master weights under a model with 16-bit weights.

An update of one part in a thousand of a weight is below half a unit in the last place of BF16 (2**-9) and is lost. So the optimizer updates
FP32 copies, and the model computes with their 16-bit roundings (Micikevicius et al., arXiv:1710.03740, section 3.1).

This is the general way, for any torch optimizer: the optimizer's parameter groups hold the masters. It costs, beyond the 16-bit weights and
gradients, 4 bytes a parameter for the masters and 4 for their FP32 gradients while an update runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from mezzo.formats import FP32


class MasterWeights:
    """Hold an FP32 master for every 16-bit parameter and move values between the two."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        """Copy the masters from ``parameters``, which are still in FP32; cast the model after this."""
        self._master_of = {
            p: nn.Parameter(p.detach().clone(), requires_grad=p.requires_grad)
            for p in parameters
            if p.dtype is FP32.dtype
        }

    def keep_cast(self) -> None:
        """Forget the masters of parameters that the cast left in FP32 (norms): they are their own masters."""
        cast = {p: m for p, m in self._master_of.items() if p.dtype is not FP32.dtype}
        self._master_of = cast

    def adopt(self, optimizer: torch.optim.Optimizer) -> None:
        """Put the masters into the optimizer's groups, in place of the model's parameters, with any state it has for them."""
        for group in optimizer.param_groups:
            group["params"] = [self._master_of.get(p, p) for p in group["params"]]
        for parameter, master in self._master_of.items():
            if parameter in optimizer.state:
                optimizer.state[master] = optimizer.state.pop(parameter)

    def pull_gradients(self) -> None:
        """Give every master its parameter's gradient in FP32 and free the 16-bit one."""
        for parameter, master in self._master_of.items():
            if parameter.grad is not None:
                master.grad = parameter.grad.float()
                parameter.grad = None

    def gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """Return a parameter's gradient, wherever it is at the moment."""
        master = self._master_of.get(parameter)
        return parameter.grad if master is None or master.grad is None else master.grad

    def push(self) -> None:
        """Round the masters into the model's parameters."""
        if self._master_of:
            with torch.no_grad():
                torch._foreach_copy_(list(self._master_of), list(self._master_of.values()))

    def fp32_state(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the model's state dict with FP32 masters where there are any: it loads into a model of any format."""
        state = dict(model.state_dict())
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if parameter in self._master_of:
                state[name] = self._master_of[parameter].detach()
        return state

    def load(self, models: Sequence[nn.Module], states: Sequence[dict[str, Tensor]]) -> None:
        """Take master values from FP32 state dicts, one a model."""
        with torch.no_grad():
            for model, state in zip(models, states, strict=True):
                for name, parameter in model.named_parameters(remove_duplicate=False):
                    if parameter in self._master_of:
                        self._master_of[parameter].copy_(state[name])
