"""Report a script's calls to the lint: of its GradScaler and autocast, of torch's clipping, and calls that clear gradients.

The launcher's other hooks, on optimizers, schedulers, backward passes and modules, report to the lint themselves. These hooks change
nothing: every call proceeds as the script made it. Once the first updates have been checked, most calls go straight to torch again.
"""

from __future__ import annotations

import functools
import math
import pickle
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.autocast_mode import autocast
from torch.amp.grad_scaler import GradScaler
from torch.nn.utils import clip_grad
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import CheckpointFunction

from mezzo.formats import FP16
from mezzo.launch.patches import Patches, after_import
from mezzo.observe.lint.observer import Lint
from mezzo.observe.source_lines import is_of_mezzo

_ENABLED = 5
"""Position of GradScaler's argument ``enabled``, from 0."""

_FP16 = FP16.dtype
_LIMITS = ("max_norm", "clip_value")
_CHECKPOINTS = "torch.distributed.checkpoint"

OnCall = Callable[..., Any]


def report_to_lint(lint: Lint, patches: Patches, *, as_is: bool) -> None:
    """Report a script's calls to ``lint`` until ``patches`` are undone."""
    for name, listener in _LISTENERS.items():
        if as_is:
            patches.around(GradScaler, name, functools.partial(listener, lint))
        else:
            patches.wrap(GradScaler, name, functools.partial(_until_over, lint, name, listener))
    patches.around(GradScaler, "__init__", functools.partial(_created, lint))
    for name in ("state_dict", "__getstate__"):
        patches.around(GradScaler, name, functools.partial(_state_taken, lint))
    for owner, name in ((torch, "save"), (pickle, "dump")):
        patches.around(owner, name, functools.partial(_save, lint))
    after_import(_CHECKPOINTS, functools.partial(_report_distributed, lint, patches), patches)
    patches.around(torch.optim.Optimizer, "load_state_dict", functools.partial(_load, lint))
    patches.wrap(autocast, "__init__", functools.partial(_init_reporting, lint, as_is))
    patches.wrap(autocast, "__enter__", functools.partial(_enter_reporting, lint, as_is))
    for name in ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_"):
        function = vars(clip_grad).get(name) or getattr(torch.nn.utils, name)
        reporting = _clip_reporting(lint, function, by_norm=name == "clip_grad_norm_")
        for owner in (clip_grad, torch.nn.utils):
            if hasattr(owner, name):
                patches.replace(owner, name, reporting)
    patches.wrap(
        torch.optim.Optimizer, "zero_grad", functools.partial(_zero_grad_reporting, lint, torch.optim.Optimizer)
    )
    patches.wrap(nn.Module, "zero_grad", functools.partial(_zero_grad_reporting, lint, nn.Module))
    patches.around(AveragedModel, "update_parameters", functools.partial(_average, lint))
    patches.around(CheckpointFunction, "apply", functools.partial(_checkpointed, lint))
    _report_exchanges(lint, patches)
    if as_is:
        _report_settings(lint, patches)
    patches.on_undo(lint.close)


def _until_over(lint: Lint, name: str, listener: OnCall, original: OnCall) -> OnCall:
    """Report calls of a GradScaler that the policy has turned off, until the first updates have been checked.

    Calls of a GradScaler that is on are checked to the end: in a steady run by ``steady_state``.
    """

    @functools.wraps(original)
    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not lint.over:
            return listener(lint, original, self, *args, **kwargs)
        _restore(GradScaler, name, called, original)
        return original(self, *args, **kwargs)

    return called


def _restore(owner: Any, name: str, replacement: OnCall, original: OnCall) -> None:
    """Let calls go straight to ``original``, unless another tool has replaced the method since."""
    if vars(owner)[name] is replacement:
        setattr(owner, name, original)


# --- GradScaler --------------------------------------------------------------------------------------------------------------


def _created(lint: Lint, original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> None:
    original(self, *args, **kwargs)
    lint.scalers.created(self, enabled=bool(kwargs.get("enabled", args[_ENABLED] if len(args) > _ENABLED else True)))


def _scale(lint: Lint, original: OnCall, self: Any, outputs: Any) -> Any:
    scaled = original(self, outputs)
    if not torch.compiler.is_compiling():
        lint.scalers.scale(self, scaled)
    return scaled


def _unscale(lint: Lint, original: OnCall, self: Any, optimizer: Any) -> Any:
    with lint.scaler_unscales(self, optimizer):
        return original(self, optimizer)


def _step(lint: Lint, original: OnCall, self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    with lint.scaler_steps(self, optimizer):
        return original(self, optimizer, *args, **kwargs)


def _update(lint: Lint, original: OnCall, self: Any, new_scale: Any = None) -> Any:
    lint.scalers.update(self, new_scale)
    return original(self, new_scale)


def _get_scale(lint: Lint, original: OnCall, self: Any) -> Any:
    value = original(self)
    lint.scalers.get_scale(self, value)
    return value


def _state_taken(lint: Lint, original: OnCall, self: Any) -> Any:
    lint.checkpoints.state_taken(self)
    return original(self)


def _save(lint: Lint, original: OnCall, obj: Any, *args: Any, **kwargs: Any) -> Any:
    lint.saves(obj)
    return original(obj, *args, **kwargs)


def _load(lint: Lint, original: OnCall, self: Any, state_dict: Any) -> Any:
    with lint.loads(self, state_dict):
        return original(self, state_dict)


def _report_distributed(lint: Lint, patches: Patches) -> None:
    for name in ("save", "async_save"):
        patches.around(sys.modules[_CHECKPOINTS], name, functools.partial(_save, lint))


_LISTENERS: dict[str, OnCall] = {
    "scale": _scale,
    "unscale_": _unscale,
    "step": _step,
    "update": _update,
    "get_scale": _get_scale,
}


# --- what is configured, what is exchanged ----------------------------------------------------------------------------------


def _report_settings(lint: Lint, patches: Patches) -> None:
    """Report the 16-bit formats that the script asks a library for."""
    for module, name, read, what in _SETTINGS:
        reporting = functools.partial(_made_with_setting, lint, read, what)
        after_import(module, functools.partial(_report_class, patches, module, name, reporting), patches)


def _report_class(patches: Patches, module: str, name: str, reporting: OnCall) -> None:
    patches.around(getattr(sys.modules[module], name), "__init__", reporting)


def _made_with_setting(
    lint: Lint, read: Callable[[Any, Any], Any], what: str, original: OnCall, self: Any, *args: Any, **kwargs: Any
) -> None:
    original(self, *args, **kwargs)
    lint.configured.asked(read(self, kwargs), what)


def _of_arguments(made: Any, _: Any) -> str:
    return "bf16" if made.bf16 else "fp16" if made.fp16 else ""


def _of_trainer(_: Any, kwargs: Any) -> Any:
    return kwargs.get("precision")


def _of_accelerator(made: Any, _: Any) -> Any:
    return made.mixed_precision


def _of_shards(made: Any, _: Any) -> Any:
    return made.param_dtype


_FSDP = "torch.distributed.fsdp"
_SETTINGS: tuple[tuple[str, str, Callable[[Any, Any], Any], str], ...] = (
    ("transformers.training_args", "TrainingArguments", _of_arguments, "TrainingArguments({}=True)"),
    ("accelerate", "Accelerator", _of_accelerator, "Accelerator(mixed_precision='{}')"),
    ("lightning.pytorch.trainer.trainer", "Trainer", _of_trainer, "Trainer(precision='{}')"),
    ("pytorch_lightning.trainer.trainer", "Trainer", _of_trainer, "Trainer(precision='{}')"),
    (_FSDP, "MixedPrecision", _of_shards, "MixedPrecision(param_dtype={})"),
    (_FSDP, "MixedPrecisionPolicy", _of_shards, "MixedPrecisionPolicy(param_dtype={})"),
)
"""Module and class of a library that takes a format, how to read it from the object and its arguments, and how a finding names it."""


def _report_exchanges(lint: Lint, patches: Patches) -> None:
    """Report reductions over processes until the first updates have been checked."""
    for name, place in REDUCTIONS.items():
        if not hasattr(dist, name):  # by the version of torch, and by how it was built
            continue
        patches.wrap(dist, name, functools.partial(_reduce_reporting, lint, name, place))


def _reduce_reporting(lint: Lint, name: str, place: int, original: OnCall) -> OnCall:
    @functools.wraps(original)
    def reduce(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(*args, **kwargs)
        if not lint.awake:
            _restore(dist, name, reduce, original)
        else:
            tensor = args[place] if len(args) > place else kwargs.get("input", kwargs.get("tensor"))
            by_mezzo = is_of_mezzo(sys._getframe(1).f_code.co_filename)
            if isinstance(tensor, Tensor) and not by_mezzo:
                lint.reduces(name, tensor)
        return original(*args, **kwargs)

    return reduce


REDUCTIONS = {"all_reduce": 0, "reduce": 0, "reduce_scatter_tensor": 1, "reduce_scatter_single": 1}
"""The functions that reduce a tensor, and the position of what they read."""


# --- autocast ----------------------------------------------------------------------------------------------------------------


def _init_reporting(lint: Lint, as_is: bool, original: OnCall) -> OnCall:
    """Record the region that the script requests: a policy may open another one instead."""

    @functools.wraps(original)
    def init(self: Any, device_type: str, dtype: Any = None, enabled: bool = True, *rest: Any, **named: Any) -> None:
        # On a CPU the default is BF16, and FP16 on the device that the script is meant for.
        default = None if device_type == "cpu" else torch.get_autocast_dtype(device_type)
        self._mezzo_requested = default if dtype is None else dtype, enabled
        original(self, device_type, dtype, enabled, *rest, **named)
        if lint.over and (as_is or not lint.regions_matter):
            _restore(autocast, "__init__", init, original)

    return init


def _enter_reporting(lint: Lint, as_is: bool, original: OnCall) -> OnCall:
    @functools.wraps(original)
    def enter(self: Any) -> Any:
        if lint.over:
            if not lint.regions_matter:
                _restore(autocast, "__enter__", enter, original)
                return original(self)
            if as_is and self.fast_dtype is not _FP16:  # only an FP16 region changes the pending finding
                return original(self)
        result = original(self)
        if not torch.compiler.is_compiling():
            dtype, on = getattr(self, "_mezzo_requested", (self.fast_dtype, self._enabled))
            lint.region_begins(dtype, on=self._enabled if as_is else on)
        return result

    return enter


# --- gradients and weights ---------------------------------------------------------------------------------------------------


def _clip_reporting(lint: Lint, original: OnCall, *, by_norm: bool) -> OnCall:
    @functools.wraps(original)
    def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(parameters, *args, **kwargs)
        listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        limit = args[0] if args else next((kwargs[n] for n in _LIMITS if n in kwargs), 0.0)
        owners = lint.clip(listed, _number(limit), by_norm=by_norm)
        same_kind = (p for p in listed) if isinstance(parameters, types.GeneratorType) else listed
        result = original(same_kind, *args, **kwargs)
        lint.clipped(owners)
        return result

    return clip


def _number(limit: Any) -> float:
    """Return a limit as a number; NaN if it is on a device, from which it is not read."""
    return math.nan if isinstance(limit, Tensor) and limit.device.type != "cpu" else float(limit)


def _zero_grad_reporting(lint: Lint, owner: type, original: OnCall) -> OnCall:
    """Report ``zero_grad`` of an optimizer or a model while gradients are checked; after that, calls go straight to torch."""

    @functools.wraps(original)
    def zero_grad(self: Any, set_to_none: bool = True) -> None:
        original(self, set_to_none)
        if torch.compiler.is_compiling():
            return
        if lint.awake:
            lint.model_cleared(self) if isinstance(self, nn.Module) else lint.cleared([self])
        else:
            _restore(owner, "zero_grad", zero_grad, original)

    return zero_grad


def _checkpointed(lint: Lint, original: Callable[..., Any], *args: Any) -> Any:
    """Report reentrant checkpointing of which no argument requires a gradient: autograd then knows nothing of what it computes."""
    if lint.over or not torch.is_grad_enabled() or any(isinstance(a, Tensor) and a.requires_grad for a in args):
        return original(*args)
    with lint.cut_off():
        return original(*args)


def _average(lint: Lint, original: Callable[..., Any], self: Any, model: Any) -> Any:
    with lint.averages(self.module, model):
        return original(self, model)
