"""FP32 master weights under a model with 16-bit weights.

An update of one part in a thousand of a weight is below half a unit in the last place of BF16 (2**-9) and is lost. So
the optimizer updates FP32 copies, and the model computes with their 16-bit roundings (Micikevicius et al.,
arXiv:1710.03740, section 3.1).

This is the general way, for any torch optimizer: the optimizer's parameter groups hold the masters. It costs, beyond
the 16-bit weights and gradients, 4 bytes a parameter for the masters and 4 for their FP32 gradients while an update
runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from mezzo.engine.onepass import OnePass
from mezzo.formats import FP32


class NoMasters:
    """Stand for weights that are their own masters."""

    def begin(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Take up work after the model was cast."""

    def pull_gradients(self) -> None:
        """Bring gradients to where the optimizer reads them."""

    def push(self) -> None:
        """Bring updated values to where the model reads them."""

    def gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """Return a parameter's gradient, wherever it is at the moment."""
        return parameter.grad

    def values(self, parameter: nn.Parameter) -> Tensor | None:
        """Return a parameter's FP32 master, or None where it has none."""
        return None

    def set_values(self, parameter: nn.Parameter, values: Tensor) -> None:
        """Set a parameter's master, if it has one."""

    def fp32_state(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the model's state dict with FP32 masters where there are any: it loads into a model of any format."""
        state = dict(model.state_dict())
        for name, parameter in model.named_parameters(remove_duplicate=False):
            master = self.values(parameter)
            if master is not None:
                state[name] = master
        return state

    def load(self, models: Sequence[nn.Module], states: Sequence[dict[str, Tensor]]) -> None:
        """Take master values from FP32 state dicts, one a model."""
        for model, state in zip(models, states, strict=True):
            for name, parameter in model.named_parameters(remove_duplicate=False):
                self.set_values(parameter, state[name])


class MasterWeights(NoMasters):
    """Hold an FP32 master for every 16-bit parameter and move values between the two: for any torch optimizer."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        """Copy the masters from ``parameters``, which are still in FP32; cast the model after this."""
        self._master_of = {
            p: nn.Parameter(p.detach().clone(), requires_grad=p.requires_grad)
            for p in parameters
            if p.dtype is FP32.dtype
        }

    def begin(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Put the masters of what was cast into the optimizers' groups, with any state there is; norms stay their own masters."""
        self._master_of = {p: m for p, m in self._master_of.items() if p.dtype is not FP32.dtype}
        for optimizer in optimizers:
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

    def values(self, parameter: nn.Parameter) -> Tensor | None:
        """Return a parameter's FP32 master, or None where it has none."""
        master = self._master_of.get(parameter)
        return None if master is None else master.detach()

    def set_values(self, parameter: nn.Parameter, values: Tensor) -> None:
        """Set a parameter's master, if it has one."""
        master = self._master_of.get(parameter)
        if master is not None:
            master.data.copy_(values)


class OptimizerMasters(NoMasters):
    """Stand for masters that one-pass optimizers keep in their own state: 16-bit gradients are read where they are."""

    def __init__(self, optimizers: Sequence[OnePass]) -> None:
        """Let the optimizers take the FP32 weights down; cast the model after this."""
        self._optimizers = optimizers
        for optimizer in optimizers:
            optimizer.keep_masters()

    def begin(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Begin the masters of what was cast."""
        for optimizer in self._optimizers:
            optimizer.begin_masters()

    def values(self, parameter: nn.Parameter) -> Tensor | None:
        """Return a parameter's FP32 master, or None where it has none."""
        found = (o.master(parameter) for o in self._optimizers)
        return next((m for m in found if m is not None), None)

    def set_values(self, parameter: nn.Parameter, values: Tensor) -> None:
        """Set a parameter's master, if it has one."""
        for optimizer in self._optimizers:
            optimizer.set_master(parameter, values)


def masters_for(
    optimizers: Sequence[torch.optim.Optimizer], parameters: Iterable[nn.Parameter], *, keep: bool, one_pass: bool
) -> NoMasters:
    """Return what holds the masters of weights that are about to be cast.

    Args:
        optimizers: those that will update.
        parameters: the models', still in FP32.
        keep: whether there are to be masters.
        one_pass: whether the optimizers read 16-bit gradients themselves.
    """
    own = [o for o in optimizers if isinstance(o, OnePass)]
    for optimizer in own:
        optimizer.master_weights = keep and one_pass
    if not keep:
        return NoMasters()
    return OptimizerMasters(own) if one_pass else MasterWeights(parameters)
