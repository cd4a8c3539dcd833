"""FP32 master weights under a model with 16-bit weights.

An update of one part in a thousand of a weight is below half a unit in the last place of BF16 (2**-9) and is lost. So
the optimizer updates FP32 copies, and the model computes with their 16-bit roundings (Micikevicius et al.,
arXiv:1710.03740, section 3.1).

``MasterWeights`` works with any torch optimizer, whose parameter groups then contain the masters. In addition to the 16-bit weights and
gradients it costs 4 bytes per parameter for the masters, and 4 for their FP32 gradients while an update runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mezzo.engine.descriptions import tensors_text
from mezzo.engine.gradients import trained_by
from mezzo.engine.optimizers.one_pass import OnePass, begin_with_masters
from mezzo.formats import FP32


class NoMasters:
    """No masters: the optimizer updates the weights themselves."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def begin(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Begin, after the model was cast."""

    def pull_gradients(self) -> None:
        """Move gradients to where the optimizer reads them."""

    def push(self) -> None:
        """Move updated values to where the model reads them."""

    def follow(self) -> None:
        """Update the masters of weights that were changed since the last ``push``, for example by ``model.load_state_dict``."""

    def gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """Return a parameter's gradient, its own or its master's."""
        return parameter.grad

    def master_or_self(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return the tensor that an optimizer updates for a parameter: itself, or its master."""
        return parameter

    def values(self, parameter: nn.Parameter) -> Tensor | None:
        """Return a parameter's FP32 master; None if it has none."""
        return None

    def set_values(self, parameter: nn.Parameter, values: Tensor) -> None:
        """Set a parameter's master, if it has one."""

    def saved(self, optimizers: Sequence[dict[str, Any]]) -> dict[nn.Parameter, Tensor]:
        """Return the FP32 masters to save; the state dicts of the session's ``optimizers`` may contain them."""
        return {}

    def restart(self, parameters: Iterable[nn.Parameter]) -> None:
        """Restart the masters of changed weights from the weights; a master that still rounds to its weight stays."""
        for parameter in parameters:
            master = self.values(parameter)
            if master is not None:
                weight = parameter.detach()
                kept = torch.where(weight == master.to(weight.dtype), master, weight.float())
                self.set_values(parameter, kept)

    def load(self, models: Sequence[nn.Module], states: Sequence[dict[str, Tensor]]) -> None:
        """Load master values from FP32 state dicts, one per model."""
        for model, state in zip(models, states, strict=True):
            for name, parameter in model.named_parameters(remove_duplicate=False):
                self.set_values(parameter, state[name].cpu())  # split on the host, so that the device allocates nothing


class _Followed(NoMasters):
    """Masters that follow changes of the weights, detected by the version counter of one weight: loading a state writes to all of them.

    Changes through ``.data`` do not increase the version, so the masters miss them and the next update overwrites them.
    """

    _weight: nn.Parameter | None = None
    _version = 0

    def _low(self) -> list[nn.Parameter]:
        """Return the 16-bit parameters that have masters."""
        raise NotImplementedError

    def _record_version(self) -> None:
        if self._weight is None:
            self._weight = next(iter(self._low()), None)
        if self._weight is not None:
            self._version = self._weight._version

    def follow(self) -> None:
        """Update the masters of weights that were changed since the last ``push``, for example by ``model.load_state_dict``."""
        if self._weight is not None and self._weight._version != self._version:
            self.restart(self._low())
            self._record_version()

    def load(self, models: Sequence[nn.Module], states: Sequence[dict[str, Tensor]]) -> None:
        """Load master values from FP32 state dicts, one per model."""
        super().load(models, states)
        self._record_version()


class MasterWeights(_Followed):
    """FP32 masters of 16-bit parameters, for any torch optimizer."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        """Copy the masters from ``parameters``, usually still in FP32; cast the model after this."""
        self._master_of = {
            p: nn.Parameter(p.detach().to(FP32.dtype, copy=True), requires_grad=p.requires_grad)
            for p in parameters
            if p.is_floating_point() and p.element_size() <= FP32.bytes
        }

        self._groups: dict[torch.optim.Optimizer, int] = {}
        """How many groups each optimizer had when its parameters were replaced by masters."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({tensors_text(self._master_of.values())})"

    def begin(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Put the masters of cast parameters, with any state, into the optimizers' groups; norms stay their own masters."""
        self._master_of = {p: m for p, m in self._master_of.items() if p.dtype is not FP32.dtype}
        for optimizer in optimizers:
            self._place(optimizer)
        self._record_version()

    def _low(self) -> list[nn.Parameter]:
        return list(self._master_of)

    def _place(self, optimizer: torch.optim.Optimizer) -> None:
        # Parameters that were added since the model was cast.
        added = [p for p in trained_by([optimizer]) if p.element_size() == 2 and p not in self._master_of]
        self._master_of.update({p: nn.Parameter(p.detach().float(), requires_grad=p.requires_grad) for p in added})
        for group in optimizer.param_groups:
            group["params"] = [self._master_of.get(p, p) for p in group["params"]]
        for parameter, master in self._master_of.items():
            if parameter in optimizer.state:
                optimizer.state[master] = optimizer.state.pop(parameter)
        self._groups[optimizer] = len(optimizer.param_groups)

    def pull_gradients(self) -> None:
        """Move every parameter's gradient to its master, in FP32, and free the 16-bit one."""
        self.follow()
        for optimizer, count in self._groups.items():
            if len(optimizer.param_groups) != count:  # add_param_group was called
                self._place(optimizer)
        for parameter, master in self._master_of.items():
            if parameter.grad is not None:
                master.grad = parameter.grad.float()
                parameter.grad = None

    def gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """Return a parameter's gradient, its own or its master's."""
        master = self._master_of.get(parameter)
        return parameter.grad if master is None or master.grad is None else master.grad

    def push(self) -> None:
        """Round the masters into the model's parameters."""
        if self._master_of:
            with torch.no_grad():
                torch._foreach_copy_(list(self._master_of), list(self._master_of.values()))
        self._record_version()

    def master_or_self(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return the tensor that an optimizer updates for a parameter: itself, or its master."""
        return self._master_of.get(parameter, parameter)

    def saved(self, optimizers: Sequence[dict[str, Any]]) -> dict[nn.Parameter, Tensor]:
        """Return the FP32 masters to save."""
        return {parameter: master.detach() for parameter, master in self._master_of.items()}

    def values(self, parameter: nn.Parameter) -> Tensor | None:
        """Return a parameter's FP32 master; None if it has none."""
        master = self._master_of.get(parameter)
        return None if master is None else master.detach()

    def set_values(self, parameter: nn.Parameter, values: Tensor) -> None:
        """Set a parameter's master, if it has one."""
        master = self._master_of.get(parameter)
        if master is not None:
            master.data.copy_(values)


class OptimizerMasters(_Followed):
    """Masters that one-pass optimizers keep in their own state; their kernels read the 16-bit gradients themselves."""

    def __init__(self, optimizers: Sequence[OnePass]) -> None:
        """Make the optimizers copy the FP32 weights; cast the model after this."""
        self._optimizers = optimizers
        for optimizer in optimizers:
            optimizer.keep_masters()

    def __repr__(self) -> str:
        names = ", ".join(type(optimizer).__name__ for optimizer in self._optimizers)
        return f"{type(self).__name__}(in {names}: of {tensors_text(self._low())})"

    def begin(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Create the masters of cast parameters."""
        for optimizer in self._optimizers:
            optimizer.begin_masters()
        self._record_version()

    def pull_gradients(self) -> None:
        """Leave gradients in place: the kernels read them there."""
        self.follow()

    def push(self) -> None:
        """Record the versions after an update: the kernels have rounded the masters into the weights."""
        self._record_version()

    def _low(self) -> list[nn.Parameter]:
        return [p for o in self._optimizers for p in o.parameters() if o.has_master(p)]

    def saved(self, optimizers: Sequence[dict[str, Any]]) -> dict[nn.Parameter, Tensor]:
        """Return the FP32 masters to save: those in the optimizers' state dicts, so that each is expanded and written once."""
        return {
            parameter: state["state"][number]["master"]
            for optimizer, state in zip(self._optimizers, optimizers, strict=True)
            for number, parameter in enumerate(optimizer.parameters())
            if "master" in state.get("state", {}).get(number, {})
        }

    def values(self, parameter: nn.Parameter) -> Tensor | None:
        """Return a parameter's FP32 master; None if it has none."""
        found = (o.master(parameter) for o in self._optimizers)
        return next((m for m in found if m is not None), None)

    def set_values(self, parameter: nn.Parameter, values: Tensor) -> None:
        """Set a parameter's master, if it has one."""
        for optimizer in self._optimizers:
            optimizer.set_master(parameter, values)


def masters_for(
    optimizers: Sequence[torch.optim.Optimizer], parameters: Iterable[nn.Parameter], *, keep: bool, one_pass: bool
) -> NoMasters:
    """Return the masters of weights that are about to be cast.

    Args:
        optimizers: the optimizers that will update.
        parameters: the models' parameters, still in FP32.
        keep: whether the weights get masters.
        one_pass: whether the optimizers read 16-bit gradients themselves.
    """
    one_pass_optimizers = [o for o in optimizers if isinstance(o, OnePass)]
    begin_with_masters(one_pass_optimizers, keep=keep and one_pass)
    if not keep:
        return NoMasters()
    return OptimizerMasters(one_pass_optimizers) if one_pass else MasterWeights(parameters)
