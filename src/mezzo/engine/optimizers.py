"""AdamW and SGD that update in one pass, straight from 16-bit gradients.

They take torch's arguments and load torch's state dicts. Beyond torch's they know 16-bit weights: the FP32 master and
the moments live in the optimizer's state, gradients are read in the format that they have, and one pass over the
memory unscales, clips, updates and rounds the new weights. Bytes a parameter, AdamW: 2 weight + 2 gradient + 4 master
+ 8 moments = 16 in FP16; in BF16 the master is the weight and its low bits, 14.

A ``Session`` hands scale, averaging and clipping over as one number on the device (``update``); ``step`` is the plain
optimizer's.

Limits: dense gradients, dense and non-overlapping weights, no closure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from mezzo.engine.kernels.batch import AdamWSettings, Batch, SGDSettings
from mezzo.engine.kernels.choice import choose
from mezzo.engine.kernels.layout import dense, has_gaps, laid_out_as
from mezzo.engine.kernels.split import join, split
from mezzo.errors import PolicyError, SessionError
from mezzo.formats import BF16, FP16, FP32

_MASTERS = {FP16.dtype: FP32.dtype, BF16.dtype: torch.int16}
"""What the masters of 16-bit weights are kept as."""
_ALLOWED = (FP32.dtype, *_MASTERS)


class OnePass(torch.optim.Optimizer):
    """Keep masters and moments, and hand every group to the device's kernel in one call."""

    _kernel: ClassVar[str]

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        self.master_weights = True
        """Whether 16-bit weights have FP32 masters; without, updates are rounded into the weights."""
        self._sources: dict[nn.Parameter, Tensor] = {}
        """FP32 values of weights that are about to be cast: masters begin from them."""
        self._layouts: dict[int, tuple[Any, ...]] = {}
        """By a parameter's id: format, strides and moments that its state was made for."""
        super().__init__(params, defaults)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "master_weights": self.master_weights}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # from a pickle, a deep copy or load_state_dict
        self._sources, self._layouts = {}, {}
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as torch's optimizers do.

        Raises:
            SessionError: a parameter has a format that the kernels do not know.
        """
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            if parameter.dtype not in _ALLOWED:
                del self.param_groups[-1]
                raise SessionError(
                    f"a parameter of shape {tuple(parameter.shape)} is {parameter.dtype}; "
                    f"allowed: {', '.join(str(d) for d in _ALLOWED)}",
                    hint=f"use torch.optim.{type(self).__name__} for it",
                )

    def keep_masters(self) -> None:
        """Take the FP32 weights down, before the model is cast to 16 bits."""
        for parameter in self.parameters():
            if parameter.dtype is FP32.dtype:
                self._sources[parameter] = parameter.detach().clone()
        self._layouts.clear()

    def begin_masters(self) -> None:
        """Begin the masters of weights that were cast since ``keep_masters``."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter in self._sources and parameter.dtype is not FP32.dtype:
                    self._state_of(parameter, self._moments(group))
        self._sources.clear()

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters of all groups."""
        return [p for group in self.param_groups for p in group["params"]]

    def gradients(self) -> list[Tensor]:
        """Return the gradients that an update would use, in their own formats.

        Raises:
            SessionError: a gradient is sparse.
        """
        return [dense(p.grad) for p in self.parameters() if p.grad is not None]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient.

        Raises:
            SessionError: a closure was given.
        """
        if closure is not None:
            raise SessionError(
                f"{type(self).__name__}.step() got a closure; it updates from the gradients that are there",
                hint="call the closure yourself before step(), or use torch's optimizer of the same name",
            )
        device = self.parameters()[0].device
        one, zero = torch.ones((), device=device), torch.zeros((), device=device)
        self.update(one, zero)

    @torch.no_grad()
    def update(self, factor: Tensor, found_inf: Tensor) -> None:
        """Update from scaled gradients, or leave everything as it is.

        Args:
            factor: FP32, no dimensions: what every gradient is multiplied by.
            found_inf: FP32, no dimensions: above 0 nothing changes. Neither is read by the host.
        """
        self._opt_called = True  # what learning rate schedulers look at to see that the optimizer came first
        for group in self.param_groups:
            for device in {p.device: None for p in group["params"]}:
                batch = self._batch(group, device)
                if batch.weights:
                    kernels, _ = choose(device.type)
                    run = getattr(kernels, self._kernel)
                    run(batch, self._settings(group), factor.to(device), found_inf.to(device))

    def _batch(self, group: dict[str, Any], device: torch.device) -> Batch:
        parameters = [p for p in group["params"] if p.grad is not None and p.numel() and p.device == device]
        moments = self._moments(group)
        states = [self._state_of(p, moments) for p in parameters]
        return Batch(
            weights=parameters,
            gradients=[_laid_out_as(p, p.grad) for p in parameters],
            masters=[s.get("master", p) for s, p in zip(states, parameters, strict=True)],
            steps=[s["step"] for s in states],
            moments={name: [s[name] for s in states] for name in moments},
        )

    def _state_of(self, parameter: nn.Parameter, moments: tuple[str, ...]) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        layout = (parameter.dtype, parameter.stride(), moments)
        if not state or self._layouts.get(id(parameter)) != layout:
            self._fit(parameter, state, moments)
            self._layouts[id(parameter)] = layout
        return state

    def _fit(self, parameter: nn.Parameter, state: dict[str, Any], moments: tuple[str, ...]) -> None:
        """Begin a parameter's state, or bring it to the parameter's present format and strides."""
        _refuse_gaps(parameter)
        missing = [name for name in moments if name not in state]
        if "step" not in state or "momentum_buffer" in missing:  # SGD tells a first buffer by its step
            state["step"] = torch.zeros((), device=parameter.device)
        for name in missing:
            state[name] = torch.zeros_like(parameter, dtype=FP32.dtype, memory_format=torch.preserve_format)
        kept_as = _MASTERS.get(parameter.dtype)
        if "master" in state and state["master"].dtype is not kept_as:  # of a format that the weight had before
            del state["master"]
        if self.master_weights and kept_as is not None and "master" not in state:
            source = self._sources.get(parameter)
            self._set_master(parameter, parameter.detach().float() if source is None else source)
        for name in (*moments, *(["master"] if "master" in state else [])):
            state[name] = laid_out_as(parameter, state[name])

    def _set_master(self, parameter: nn.Parameter, values: Tensor) -> None:
        if parameter.dtype is BF16.dtype:
            high, low = split(values)
            parameter.data.copy_(high)
            self.state[parameter]["master"] = low
        else:
            parameter.data.copy_(values)
            self.state[parameter]["master"] = values

    def master(self, parameter: nn.Parameter) -> Tensor | None:
        """Return a parameter's FP32 master, or None where it has none."""
        kept = self.state.get(parameter, {}).get("master")
        if kept is None:
            return None
        return join(parameter.detach(), kept) if kept.dtype is torch.int16 else kept.detach()

    def set_master(self, parameter: nn.Parameter, values: Tensor) -> None:
        """Set a parameter and its master to FP32 ``values``, if it has one."""
        if "master" in self.state.get(parameter, {}):
            self._set_master(parameter, values.to(parameter.device, FP32.dtype, copy=True))

    def state_dict(self) -> dict[str, Any]:
        """Return torch's state dict: FP32 moments, and FP32 masters under ``master`` where there are any."""
        saved: dict[str, Any] = super().state_dict()
        for number, parameter in enumerate(self.parameters()):
            if "master" in saved["state"].get(number, {}):
                saved["state"][number] = {**saved["state"][number], "master": self.master(parameter)}
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take a state that this class or torch's optimizer of the same name saved; moments and masters stay FP32."""
        super().load_state_dict(state_dict)
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        for number, parameter in zip(numbers, self.parameters(), strict=True):
            given = state_dict["state"].get(number)
            if given is None:
                continue
            state = self.state[parameter]
            state.pop("master", None)
            for name in [n for n, v in given.items() if isinstance(v, Tensor) and n not in ("step", "master")]:
                # torch casts state to the parameter's format: in 16 bits the moments would lose what they are kept for.
                state[name] = given[name].to(parameter.device, FP32.dtype, copy=True)
            # torch's SGD counts no steps: with a buffer, the first is over.
            step = torch.as_tensor(given.get("step", float("momentum_buffer" in state)), dtype=FP32.dtype)
            state["step"] = step.to(parameter.device, copy=True)
            if self.master_weights and parameter.dtype in _MASTERS:
                master = given.get("master")
                values = parameter.detach().float() if master is None else master
                self._set_master(parameter, values.to(parameter.device, FP32.dtype, copy=True))

    def _moments(self, group: dict[str, Any]) -> tuple[str, ...]:
        raise NotImplementedError

    def _settings(self, group: dict[str, Any]) -> AdamWSettings | SGDSettings:
        raise NotImplementedError


class AdamW(OnePass):
    """Update by AdamW (Loshchilov & Hutter, arXiv:1711.05101) in one pass.

    Args:
        params: as for ``torch.optim.AdamW``; FP32, FP16 or BF16.
        lr: learning rate.
        betas: decay of the means of gradients and of their squares.
        eps: added to the root of the second.
        weight_decay: decoupled; a share of the weight times ``lr``.
        amsgrad: use the largest second mean so far.
        maximize: go up the gradient.

    Raises:
        PolicyError: a setting is outside its range.
    """

    _kernel = "adamw"

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
    ) -> None:
        _check_range(lr=(lr, 0, None), eps=(eps, 0, None), weight_decay=(weight_decay, 0, None))
        _check_range(beta1=(betas[0], 0, 1), beta2=(betas[1], 0, 1))
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "amsgrad": amsgrad, "maximize": maximize})

    def _moments(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if group["amsgrad"] else ()))

    def _settings(self, group: dict[str, Any]) -> AdamWSettings:
        beta1, beta2 = group["betas"]
        own = {name: group[name] for name in ("eps", "weight_decay", "amsgrad", "maximize")}
        return AdamWSettings(lr=float(group["lr"]), beta1=beta1, beta2=beta2, **own)


class SGD(OnePass):
    """Update by stochastic gradient descent, with momentum as torch defines it, in one pass.

    Args:
        params: as for ``torch.optim.SGD``; FP32, FP16 or BF16.
        lr: learning rate.
        momentum: share of the last direction that is kept.
        dampening: share of the gradient that is left out of the buffer.
        weight_decay: a share of the weight that is added to the gradient.
        nesterov: look ahead along the momentum.
        maximize: go up the gradient.

    Raises:
        PolicyError: a setting is outside its range.
    """

    _kernel = "sgd"

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
    ) -> None:
        _check_range(lr=(lr, 0, None), momentum=(momentum, 0, None), weight_decay=(weight_decay, 0, None))
        if nesterov and (momentum <= 0 or dampening != 0):
            raise PolicyError(
                f"nesterov=True with momentum={momentum} and dampening={dampening}",
                hint="Nesterov's momentum needs a momentum above 0 and no dampening",
            )
        defaults = {"lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "nesterov": nesterov, "maximize": maximize})

    def _moments(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("momentum_buffer",) if group["momentum"] else ()

    def _settings(self, group: dict[str, Any]) -> SGDSettings:
        own = {name: group[name] for name in ("momentum", "dampening", "weight_decay", "nesterov", "maximize")}
        return SGDSettings(lr=float(group["lr"]), **own)


def _check_range(**settings: tuple[float, float, float | None]) -> None:
    for name, (value, low, high) in settings.items():
        if not value >= low or (high is not None and not value < high):
            allowed = f"{low} or more" if high is None else f"from {low} to below {high}"
            raise PolicyError(f"{name}={value!r}; allowed: {allowed}", hint=f"choose {name} inside that range")


def _laid_out_as(parameter: nn.Parameter, gradient: Tensor) -> Tensor:
    if gradient.layout is torch.strided and gradient.stride() == parameter.stride():
        return gradient
    return laid_out_as(parameter, dense(gradient))


def _refuse_gaps(parameter: nn.Parameter) -> None:
    if has_gaps(parameter):
        raise SessionError(
            f"a parameter of shape {tuple(parameter.shape)} has strides {parameter.stride()}; "
            "allowed: weights that fill one stretch of memory",
            hint="make it one of its own: parameter.data = parameter.data.contiguous()",
        )
