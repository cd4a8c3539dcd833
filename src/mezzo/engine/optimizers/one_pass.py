"""The base of one-pass optimizers: masters and moments in their state, one kernel call per group.

Every parameter's state has the memory layout of its weight, since the kernels walk through addresses. It is converted to a
new layout, format or kind of moments when the parameter or its group changes (``_fit``), so a model may be cast, moved to
channels_last or loaded after the optimizer was built.

A session's one pass reads scaled gradients and lets the device decide whether to skip: there is no call to hook into. If there are
hooks, the host reads whether the update is made, unscales the gradients and calls ``step``, as a loop with GradScaler does.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import optimizer as torchs

from mezzo.engine.descriptions import one_pass_text
from mezzo.engine.gradients import by_device
from mezzo.engine.kernels import cpu, fused, reference
from mezzo.engine.kernels.reference import NOT_SPREAD, Batch, Rule, Spread
from mezzo.engine.kernels.storage import (
    MOMENT_DTYPES,
    UNSIGNED,
    as_fp32,
    gradient_as,
    join,
    laid_out_as,
    refuse_gaps,
    split,
    stored_as,
    zero_moment,
)
from mezzo.engine.processes.shards import is_shared, local, part_of, shared_as, whole_of
from mezzo.errors import PolicyError, SessionError
from mezzo.explain import Choice
from mezzo.formats import BF16, FP16, FP32

_MASTERS = {FP16.dtype: FP32.dtype, BF16.dtype: torch.int16}
"""The formats of the masters of 16-bit weights."""
_ALLOWED = (FP32.dtype, *_MASTERS)


class OnePass(torch.optim.Optimizer):
    """An optimizer that keeps masters and moments in its state and updates each group by one kernel call."""

    _rule: ClassVar[Rule]

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        for name, allowed in (("moments", tuple(MOMENT_DTYPES)), ("rounding", ("nearest", "stochastic"))):
            if defaults[name] not in allowed:
                wrong = f"{name}={defaults[name]!r}; allowed: {', '.join(allowed)}"
                raise PolicyError(wrong, hint=f"choose {name} from these")
        self.master_weights = True
        """Whether 16-bit weights have FP32 masters; otherwise updates are rounded into the weights."""
        self._sources: dict[nn.Parameter, Tensor] = {}
        """FP32 values of weights that are about to be cast, from which masters are created."""
        self._layouts: dict[int, tuple[Any, ...]] = {}
        """The format, strides, and names and kind of moments that a parameter's state was created for, by the parameter's id."""
        self._numbers: dict[nn.Parameter, int] = {}
        self._remembered: dict[tuple[int, torch.device], dict[Any, Any]] = {}
        """Data that kernels keep from one update to the next, by a group's id and a device."""
        self.replaced = 0
        """How often tensors of the state were created or replaced: a captured step refers to them by address."""
        super().__init__(params, defaults)

    def __repr__(self) -> str:
        return one_pass_text(self)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "master_weights": self.master_weights}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # from a pickle, a deep copy or load_state_dict
        self._sources, self._layouts, self._numbers, self._remembered = {}, {}, {}, {}
        self.replaced = getattr(self, "replaced", 0) + 1
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
        """Copy the weights in FP32, before the model is cast to 16 bits.

        Raises:
            SessionError: a group asks for stochastic rounding, which is for weights without masters.
        """
        if any(group["rounding"] == "stochastic" for group in self.param_groups):
            raise SessionError(
                "rounding='stochastic' under a policy with master weights; allowed: policies without, such as bf16-pure",
                hint="leave rounding out: masters lose nothing; or choose the policy bf16-pure",
            )
        for parameter in self.parameters():
            self._sources[parameter] = parameter.detach().to(FP32.dtype, copy=True)
        # Every state will be converted; until then the strides give the layout of packed moments.
        self._layouts = {known: (None, layout[1], None) for known, layout in self._layouts.items()}

    def begin_masters(self) -> None:
        """Create the masters of weights that were cast since ``keep_masters``."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter in self._sources and parameter.dtype is not FP32.dtype:
                    self._state_of(parameter, local(parameter), self._kind(group), group)
        self._sources.clear()

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters of all groups."""
        return [p for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient.

        Raises:
            SessionError: a closure was passed.
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
            factor: FP32, no dimensions: every gradient is multiplied by it.
            found_inf: FP32, no dimensions: above 0 nothing changes. The host reads neither.
        """
        self._opt_called = True  # learning rate schedulers check this to see that the optimizer stepped first
        for group in self.param_groups:
            rule = self._rule_of(group)
            for device in {p.device: None for p in group["params"]}:
                batch = self._batch(group, device)
                if batch.weights:
                    run = _compiled(rule, device.type) or functools.partial(reference.apply, rule)
                    run(batch, self._settings(group), factor.to(device), found_inf.to(device))

    def _batch(self, group: dict[str, Any], device: torch.device) -> Batch:
        pairs = [(p, p.grad) for p in group["params"]]
        here = [(p, local(p), g) for p, g in pairs if g is not None and p.device == device]
        whole = self._rule_of(group).whole_matrices
        # A process without a part of a matrix gathers it too: the others wait for all.
        entries = [(p, w, g) for p, w, g in here if w.numel() or (whole and p.numel())]
        parameters, weights = [p for p, _, _ in entries], [w for _, w, _ in entries]
        kind = self._kind(group)
        states = [self._state_of(p, w, kind, group) for p, w, _ in entries]
        stochastic = group["rounding"] == "stochastic"
        return Batch(
            weights=weights,
            gradients=[gradient_as(w, local(g)) for _, w, g in entries],
            masters=[s.get("master", w) for s, w in zip(states, weights, strict=True)],
            steps=[s["step"] for s in states],
            moments={name: [s[name] for s in states] for name in kind[0]},
            numbers=self._numbers_of(parameters) if stochastic or group["moments"] != "fp32" else [],
            stochastic=stochastic,
            remembered=self._remembered.setdefault((id(group), device), {}),
            spread=[_spread_of(p) for p in parameters] if whole else [],
        )

    def _kind(self, group: dict[str, Any]) -> tuple[Any, ...]:
        """Return what decides how a group's state is stored: the moments' names and format, and the rounding of weights."""
        return self._moments(group), group["moments"], group["rounding"]

    def _numbers_of(self, parameters: list[nn.Parameter]) -> list[int]:
        if not all(p in self._numbers for p in parameters):
            self._numbers = {p: number for number, p in enumerate(self.parameters())}
        return [self._numbers[p] for p in parameters]

    def _state_of(
        self, parameter: nn.Parameter, weight: Tensor, kind: tuple[Any, ...], group: dict[str, Any]
    ) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        layout = (weight.dtype, weight.stride(), kind)
        if not state or self._layouts.get(id(parameter)) != layout:
            self._fit(parameter, state, group)
            self._layouts[id(parameter)] = layout
        return state

    def _fit(self, parameter: nn.Parameter, state: dict[str, Any], group: dict[str, Any]) -> None:
        """Create a parameter's state, or convert it to the parameter's current format and strides."""
        self.replaced += 1
        moments, kind, weight = self._moments(group), group["moments"], local(parameter)
        refuse_gaps(weight)
        missing = [name for name in moments if name not in state]
        if "step" not in state or "momentum_buffer" in missing:  # SGD recognises a first buffer by its step
            state["step"] = torch.zeros((), device=parameter.device)
        for name in missing:
            state[name] = zero_moment(kind, self._like(parameter, name))
        master_format = self._master_format(parameter, group)
        if "master" in state and state["master"].dtype is not master_format:  # of a format that the weight had before
            del state["master"]
        if master_format is not None and "master" not in state:
            source = self._sources.get(parameter)
            self._set_master(parameter, weight.detach().float() if source is None else source)
        for name in moments:
            state[name] = self._fitted(parameter, name, state[name], kind)
        if "master" in state:
            state["master"] = laid_out_as(weight, state["master"])

    def _fitted(self, parameter: nn.Parameter, name: str, kept: Tensor, kind: str) -> Tensor:
        """Return a moment in the format ``kind`` with the strides that it should have: itself if it has both already."""
        packed, like, signed = kept.dtype is MOMENT_DTYPES["8bit"], self._like(parameter, name), name not in UNSIGNED
        strides = self._packed_strides(parameter, like)
        if kept.dtype is MOMENT_DTYPES[kind] and (not packed or strides == like.stride()):
            return kept if packed else laid_out_as(like, kept)
        values = as_fp32(kept, like.shape, strides if packed else kept.stride(), signed=signed)
        return stored_as(kind, laid_out_as(like, values), signed=signed)

    def _like(self, parameter: nn.Parameter, name: str) -> Tensor:
        """Return a tensor whose shape, strides and device a moment has: the weight's part, if the rule has no shapes of its own."""
        weight, shape = local(parameter), self.whole_shape(parameter, name)
        return weight if shape is None else weight.new_empty(shape)

    def _packed_strides(self, parameter: nn.Parameter, like: Tensor) -> tuple[int, ...]:
        """Return the strides of the tensor that a packed moment was made from."""
        known = self._layouts.get(id(parameter)) if self._rule.moment_shape is None else None
        return like.stride() if known is None else known[1]

    def whole_shape(self, parameter: nn.Parameter, name: str) -> torch.Size | None:
        """Return the shape of a value of the state that each process has whole; None if it has the parameter's shape and parts."""
        shape = self._rule.moment_shape
        return None if shape is None or name == "master" else shape(name, parameter.shape)

    def _master_format(self, parameter: nn.Parameter, group: dict[str, Any]) -> torch.dtype | None:
        """Return the format of a parameter's master; None if it has none."""
        if group["rounding"] == "nearest":
            return _MASTERS.get(parameter.dtype) if self.master_weights else None
        if parameter.dtype is FP16.dtype:
            raise SessionError(
                f"rounding='stochastic' for a parameter of shape {tuple(parameter.shape)} in {parameter.dtype}; "
                f"allowed: {BF16.dtype} and {FP32.dtype}",
                hint="use the policy bf16-pure, or rounding='nearest' with master weights (fp16-master)",
            )
        return None

    def _set_master(self, parameter: nn.Parameter, values: Tensor) -> None:
        """Set a weight and its master, the master in place: a captured step refers to it by address.

        ``values`` are FP32 and on any device; if the weight has no master yet, they may become it without a copy.
        """
        state, weight = self.state[parameter], local(parameter)
        high, kept = split(values) if parameter.dtype is BF16.dtype else (values, values)
        weight.data.copy_(high)
        if "master" in state:
            state["master"].copy_(kept)
        else:
            state["master"] = kept.to(weight.device)

    def master(self, parameter: nn.Parameter) -> Tensor | None:
        """Return a parameter's FP32 master; None if it has none."""
        kept = self.state.get(parameter, {}).get("master")
        if kept is None:
            return None
        values = join(local(parameter).detach(), kept) if kept.dtype is torch.int16 else kept.detach()
        return shared_as(parameter, values)

    def has_master(self, parameter: nn.Parameter) -> bool:
        """Return whether a parameter has an FP32 master."""
        return "master" in self.state.get(parameter, {})

    def set_master(self, parameter: nn.Parameter, values: Tensor) -> None:
        """Set a parameter and its master to ``values``, if it has one."""
        if self.has_master(parameter):
            self._set_master(parameter, local(values).to(FP32.dtype))

    def state_dict(self) -> dict[str, Any]:
        """Return torch's state dict, with FP32 moments, and FP32 masters as ``master`` if there are any.

        Tensors of fewer bits are expanded on the host, one by one, so the device allocates nothing. FP32 tensors are not copied,
        as in torch.
        """
        with hooks_deferred(self._optimizer_state_dict_post_hooks) as deferred:
            saved: dict[str, Any] = super().state_dict()
        for number, parameter in enumerate(self.parameters()):
            state = saved["state"].get(number)
            if state is not None:
                kept = [name for name, value in state.items() if not self._is_absent(value)]
                saved["state"][number] = {name: self._saved(parameter, name, state[name]) for name in kept}
        for hook in deferred:
            changed = hook(self, saved)
            saved = saved if changed is None else changed
        return saved

    def _is_absent(self, value: Any) -> bool:
        """Return whether a value of the state is empty because the rule has no such moment for the weight."""
        return self._rule.moment_shape is not None and isinstance(value, Tensor) and value.numel() == 0

    def _saved(self, parameter: nn.Parameter, name: str, value: Any) -> Any:
        weight = local(parameter)
        if not isinstance(value, Tensor) or name == "step":
            return value
        if name == "master" and value.dtype is torch.int16:
            value = join(weight.detach().cpu(), value.cpu())
        elif value.dtype is not FP32.dtype:
            like = self._like(parameter, name)
            value = as_fp32(value.cpu(), like.shape, self._packed_strides(parameter, like), signed=name not in UNSIGNED)
        return value.detach() if self.whole_shape(parameter, name) is not None else shared_as(parameter, value.detach())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state saved by this class or by torch's optimizer of the same name.

        Each tensor is converted to its format on the host before it is sent to the device.
        """
        state_dict = state_dict.copy()
        for hook in list(self._optimizer_load_state_dict_pre_hooks.values()):
            changed = hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        numbers = {number for group in state_dict["param_groups"] for number in group["params"]}
        # torch would cast every state to its parameter's format: in 16 bits moments would lose their purpose.
        others = {key: value for key, value in state_dict["state"].items() if key not in numbers}
        pre, post = self._optimizer_load_state_dict_pre_hooks, self._optimizer_load_state_dict_post_hooks
        with hooks_deferred(pre), hooks_deferred(post) as deferred:
            super().load_state_dict({**state_dict, "state": others})
        self._load_state(state_dict)
        for hook in deferred:
            hook(self)

    @torch.no_grad()
    def _load_state(self, state_dict: dict[str, Any]) -> None:
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        ours = [(p, group) for group in self.param_groups for p in group["params"]]
        by_number = dict(zip(numbers, ours, strict=True))
        for number, saved in state_dict["state"].items():
            if number not in by_number:
                continue
            parameter, group = by_number[number]
            weight, state = local(parameter), self.state[parameter]
            refuse_gaps(weight)
            # torch's SGD counts no steps: if there is a buffer, the first step is done.
            first_step_done = float(saved.get("momentum_buffer") is not None)
            step = torch.as_tensor(saved.get("step", first_step_done), dtype=FP32.dtype)
            state["step"] = step.to(parameter.device, copy=True)
            for name in [n for n, value in saved.items() if n not in ("step", "master") and value is not None]:
                kind = group["moments"] if name in self._moments(group) and weight.numel() else "fp32"
                like = self._like(parameter, name)
                state[name] = _loaded_moment(saved[name], like, kind, signed=name not in UNSIGNED)
            if self._master_format(parameter, group) is not None:
                master = parameter.detach() if saved.get("master") is None else saved["master"]
                where = "cpu" if parameter.dtype is BF16.dtype else parameter.device  # BF16's are split on the host
                self._set_master(parameter, local(master).to(where, FP32.dtype, copy=True))
            if weight.numel():
                self._state_of(parameter, weight, self._kind(group), group)

    def explain(self) -> list[Choice]:
        """Return what this optimizer decides by itself, each choice with its reason."""
        return []

    def _rule_of(self, group: dict[str, Any]) -> Rule:
        return self._rule

    def _moments(self, group: dict[str, Any]) -> tuple[str, ...]:
        raise NotImplementedError

    def _settings(self, group: dict[str, Any]) -> Any:
        raise NotImplementedError


def _spread_of(parameter: nn.Parameter) -> Spread:
    if not is_shared(parameter):
        return NOT_SPREAD
    return Spread(functools.partial(whole_of, parameter), functools.partial(part_of, parameter))


def begin_with_masters(optimizers: Iterable[OnePass], *, keep: bool) -> None:
    """Decide whether 16-bit weights have FP32 masters."""
    for optimizer in optimizers:
        optimizer.master_weights = keep


def norm_by_kernels(gradients: list[Tensor], device: torch.device) -> Tensor:
    """Return the norm of gradients, of any formats and devices, on ``device``."""
    squares = [choose(here[0].device.type)[0].sum_of_squares(here) for here in by_device(gradients)]
    total: Tensor = squares[0] if len(squares) == 1 else torch.stack([s.to(device) for s in squares]).sum()
    return total.to(device).sqrt()


def _loaded_moment(value: Any, weight: Tensor, kind: str, *, signed: bool) -> Any:
    """Return an FP32 moment as ``kind``, on the device and with the strides of ``weight``; a value that is not a tensor as it is."""
    if not isinstance(value, Tensor):
        return value
    if kind == "fp32":
        return local(value).to(weight.device, FP32.dtype, copy=True)
    arranged = torch.empty_strided(weight.shape, weight.stride(), dtype=FP32.dtype).copy_(local(value))
    return stored_as(kind, arranged, signed=signed).to(weight.device)


def have_hooks(optimizers: Sequence[torch.optim.Optimizer]) -> bool:
    """Return whether a step of any of ``optimizers`` runs hooks, of its own or of all optimizers."""
    hooked = [o for o in optimizers if o._optimizer_step_pre_hooks or o._optimizer_step_post_hooks]
    return bool(hooked or torchs._global_optimizer_pre_hooks or torchs._global_optimizer_post_hooks)


def step_is_own(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether ``optimizer.step`` is its class's method in torch or mezzo, neither overridden nor wrapped."""
    step: Any = optimizer.step
    while step is not None:
        function = getattr(step, "__func__", step)
        home = getattr(function, "__globals__", {}).get("__name__", "")
        if not home.startswith(("torch.", "mezzo.")):
            return False
        step = getattr(function, "__wrapped__", None)  # by torch's hooks, its no_grad, and its learning rate schedulers
    return True


@contextmanager
def hooks_deferred(hooks: MutableMapping[int, Callable[..., Any]]) -> Iterator[list[Callable[..., Any]]]:
    """Keep torch from running ``hooks`` inside the block; yield them for the caller to run when their argument is complete."""
    deferred = dict(hooks)
    hooks.clear()
    try:
        yield list(deferred.values())
    finally:
        hooks.update(deferred)


def without_kernel(optimizers: Iterable[torch.optim.Optimizer], device_type: str) -> str:
    """Return the name of an optimizer that only its formula updates on a device; empty if all have kernels there."""
    ours = [o for o in optimizers if isinstance(o, OnePass)]
    rules = [(type(o).__name__, rule) for o in ours for rule in map(o._rule_of, o.param_groups)]
    return next((name for name, rule in rules if _compiled(rule, device_type) is None), "")


def _compiled(rule: Rule, device_type: str) -> Callable[..., None] | None:
    return getattr(choose(device_type)[0], rule.kernel, None) if rule.kernel else None


_FUSED_DEVICES = ("mps", "xpu")


@functools.cache
def choose(device_type: str) -> tuple[ModuleType, str]:
    """Return the module with the kernels for torch's device type, and why."""
    if device_type == "cpu":
        library, reason = cpu.library()
        return (cpu, reason) if library is not None else (fused, f"torch's fused kernels: {reason}")
    if device_type == "cuda":
        return _triton()
    if device_type in _FUSED_DEVICES:
        return fused, f"torch's fused kernels, with clipping and scale in grad_scale: Mezzo has none for {device_type}"
    return reference, f"plain torch operations: no fused kernels for {device_type}"


def _triton() -> tuple[ModuleType, str]:
    try:
        kernels = importlib.import_module("mezzo.engine.kernels.gpu")
        kernels.try_out(torch.device("cuda"))  # a Triton that cannot compile fails here, not in the first update
    except Exception as error:  # its compiler may raise anything
        return fused, f"torch's fused kernels: Triton does not work here ({type(error).__name__}: {error})"
    return kernels, "Triton kernels, one launch per group"


def rate(group: dict[str, Any]) -> float:
    """Return a group's learning rate."""
    lr = group["lr"]
    if isinstance(lr, Tensor) and lr.device.type != "cpu":
        raise SessionError(
            f"lr is a tensor on {lr.device}; allowed: a number, or a tensor on the CPU",
            hint="pass a number: it is sent to the device when it changes, and nothing waits for it",
        )
    return float(lr)


def check_range(**settings: tuple[float | Tensor, float, float | None]) -> None:
    """Refuse settings below their lower bound, or not below their upper one."""
    for name, (value, low, high) in settings.items():
        if not value >= low or (high is not None and not value < high):
            allowed = f"{low} or more" if high is None else f"from {low} to below {high}"
            raise PolicyError(f"{name}={value!r}; allowed: {allowed}", hint=f"choose {name} inside that range")
