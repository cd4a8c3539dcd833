"""Replace a script's own mixed precision by the policy, or change it as a line that a diagnosis prints would.

Under ``fp32`` both are turned off. Under another policy the script decides where a region is, and the policy its format: an
``autocast`` that is on becomes a region of the policy, whatever dtype it names. One that is off inside a module or a region opts out:
FP32. One that is off around a whole model is the script's own switch (``enabled=use_amp``), which the policy replaces: the region goes
on when the model is called. If the script also has regions that are on, those that are off are no switch, and opt out.

The scaler is turned off, because the policy scales the loss itself. A scaler that is off passes losses and steps through, so the
script's calls stay valid. With ``as-is`` both are only recorded.

Where the CPU stands in for CUDA (``cuda_stand_in``), what the script says to CUDA's autocast is said to the CPU's, and queries agree.

Inside an autocast that was turned off, modules get their 16-bit arguments in FP32: a library that turns autocast on may also cast the
inputs (Lightning's Fabric does), and FP32 weights would not accept them.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, get_autocast_dtype, is_autocast_enabled, nn, set_autocast_dtype, set_autocast_enabled
from torch.amp.autocast_mode import autocast
from torch.amp.grad_scaler import GradScaler
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map, tree_map_only

from mezzo.engine.casts.autocast_kernels import open_table
from mezzo.engine.casts.conversion import HALF
from mezzo.engine.matrix_units.native_units import fp32_products_as_they_were, set_fp32_products
from mezzo.formats import FORMATS
from mezzo.launch.patches import Patches
from mezzo.launch.torch.cuda_stand_in import replace_builtin
from mezzo.launch.torch.phase import OwnSwitch
from mezzo.launch.torch.state import TorchRun
from mezzo.launch.torch.steady_state import found_on_device
from mezzo.observe.observer import ModuleTree
from mezzo.observe.settings import TrialChanges
from mezzo.observe.source_lines import script_line
from mezzo.policy import Policy

_CPU, _CUDA = "cpu", "cuda"


def replace_amp(run: TorchRun, patches: Patches) -> None:
    """Replace or record the script's autocast and GradScaler until ``patches`` are undone."""
    if run.precision.effective is None:
        for name, recording in (("scale", _record_scale), ("step", _record_step), ("update", _record_update)):
            patches.around(GradScaler, name, functools.partial(recording, run))
        patches.wrap(GradScaler, "_maybe_opt_step", _record_decision)
        return
    if run.notes.stand_in is not None:
        _use_state_of_cpu(patches)
    patches.wrap(autocast, "__init__", functools.partial(_in_policy, run))
    patches.wrap(autocast, "__enter__", functools.partial(_with_table, run))
    patches.wrap(autocast, "__exit__", functools.partial(_without_table, run))
    patches.around(GradScaler, "__init__", turned_off)


def note_autocast_without_device(run: TorchRun, patches: Patches) -> None:
    """Note if the script, as-is, turns autocast on for CUDA, which this machine does not have, until ``patches`` are undone."""
    patches.around(autocast, "__init__", functools.partial(_note_without_device, run))


def _note_without_device(
    run: TorchRun,
    original: Callable[..., Any],
    self: Any,
    device_type: str,
    dtype: Any = None,
    enabled: bool = True,
    *rest: Any,
    **named: Any,
) -> None:
    """Note that the script turns autocast on for CUDA, where torch then leaves it off."""
    if enabled and device_type == _CUDA:
        run.notes.note_own_amp_off()
    original(self, device_type, dtype, enabled, *rest, **named)


def _use_state_of_cpu(patches: Patches) -> None:
    """Make torch's functions for the state of CUDA's autocast use the CPU's, also those that ``custom_fwd`` and checkpointing call."""

    def enabled(device_type: str = _CUDA) -> bool:
        return is_autocast_enabled(_CPU if device_type == _CUDA else device_type)

    def dtype(device_type: str) -> torch.dtype:
        return get_autocast_dtype(_CPU if device_type == _CUDA else device_type)

    def enable(*args: Any) -> None:  # without a device type: CUDA's
        kind, value = args if len(args) > 1 else (_CUDA, *args)
        set_autocast_enabled(_CPU if kind == _CUDA else kind, value)

    def choose(device_type: str, dtype: torch.dtype) -> None:
        set_autocast_dtype(_CPU if device_type == _CUDA else device_type, dtype)

    def cast(original: Callable[..., Any], value: Any, device_type: str, dtype: torch.dtype) -> Any:
        return original(value, _CPU if device_type == _CUDA else device_type, dtype)

    patches.on_undo(functools.partial(set_autocast_dtype, _CPU, get_autocast_dtype(_CPU)))
    set_autocast_dtype(_CPU, get_autocast_dtype(_CUDA))  # what a query outside any region answers
    for name, substitute in (
        ("is_autocast_enabled", enabled),
        ("get_autocast_dtype", dtype),
        ("set_autocast_enabled", enable),
        ("set_autocast_dtype", choose),
    ):
        replace_builtin(patches, name, substitute)
    patches.replace(torch, "get_autocast_gpu_dtype", functools.partial(dtype, _CUDA))
    patches.replace(torch, "set_autocast_gpu_dtype", functools.partial(choose, _CUDA))
    patches.around(torch.amp.autocast_mode, "_cast", cast)


def _dtype_under(run: TorchRun) -> Callable[[], torch.dtype | None]:
    """Return a function that returns the format of the policy's regions, None for FP32; it is recomputed only after a fallback."""
    policy: Any = None
    dtype: torch.dtype | None = None

    def current() -> torch.dtype | None:
        nonlocal policy, dtype
        if run.precision.effective is not policy:
            policy = run.precision.effective
            dtype = policy.storage.dtype if policy is not None and policy.lowers else None
        return dtype

    return current


def _in_policy(run: TorchRun, original: Callable[..., Any]) -> Callable[..., Any]:
    dtype_under = _dtype_under(run)
    absent = None if run.notes.stand_in is None else _CUDA

    @functools.wraps(original)
    def init(self: Any, device_type: str, dtype: Any = None, enabled: bool = True, *rest: Any, **named: Any) -> None:
        lowered = dtype_under()
        on = enabled and lowered is not None
        device_type = _CPU if device_type == absent else device_type
        self._mezzo_turned_off, self._mezzo_left_off = enabled and not on, not enabled
        original(self, device_type, lowered if on else dtype, on, *rest, **named)

    return init


def _with_table(run: TorchRun, original: Callable[..., Any]) -> Callable[..., Any]:
    dtype_under = _dtype_under(run)

    @functools.wraps(original)
    def enter(self: Any) -> Any:
        if run.precision.change is not None and self._enabled and run.precision.effective is not None:
            dtype = dtype_under()  # the region may have been created under an earlier policy
            self._enabled, self._mezzo_turned_off = dtype is not None, dtype is None
            self.fast_dtype = dtype or self.fast_dtype
        off, on = getattr(self, "_mezzo_left_off", not self._enabled), self._enabled
        local, kind = run.phase.local, self.device
        compiling = torch.compiler.is_compiling()
        # Once a region of the script is on, it matters only for those that are off.
        outermost = not compiling and (off or not run.phase.own_autocast_on) and _is_outermost(run, kind)
        result = original(self) if compiling or torch._C._is_torch_function_mode_enabled() else _enter_state(self, kind)
        regions: list[AbstractContextManager[Any] | None] = self.__dict__.setdefault("_mezzo_regions", [])
        regions.append(None)
        if getattr(self, "_mezzo_turned_off", False):
            run.phase.autocast_turned_off()
            local.autocasts_off += 1
        if run.listeners.observer is not None and kind == (run.precision.device_type or kind):
            self._mezzo_entered = run.listeners.observer.autocast_entered(off=off, in_module=local.depth > 0)
        if on and not compiling:
            if outermost:
                run.phase.autocast_turned_on()
            casting = run.precision.casting(kind)
            if casting is not None and casting.table is not None and open_table() is None:
                regions[-1] = region = casting.region()
                region.__enter__()
        elif off and outermost and local.own_switch is None:
            local.own_switch = OwnSwitch(kind, regions)
        return result

    return enter


def _enter_state(self: Any, kind: str) -> Any:
    """Set autocast's state as ``autocast.__enter__`` does, whose calls through Python would double where the state of CUDA is the CPU's."""
    self.prev_cache_enabled, self.prev, self.prev_fastdtype = (
        torch.is_autocast_cache_enabled(),
        is_autocast_enabled(kind),
        get_autocast_dtype(kind),
    )
    set_autocast_enabled(kind, self._enabled)
    set_autocast_dtype(kind, self.fast_dtype)
    torch.autocast_increment_nesting()
    torch.set_autocast_cache_enabled(self._cache_enabled)
    return self


def _leave_state(self: Any) -> None:
    """Restore autocast's state as ``autocast.__exit__`` does."""
    if torch.autocast_decrement_nesting() == 0:
        torch.clear_autocast_cache()
    set_autocast_enabled(self.device, self.prev)
    set_autocast_dtype(self.device, self.prev_fastdtype)
    torch.set_autocast_cache_enabled(self.prev_cache_enabled)


def _is_outermost(run: TorchRun, device_type: str) -> bool:
    """Return whether no module, region or backward pass is around the running code."""
    if run.phase.local.depth or run.phase.recomputing or is_autocast_enabled(device_type):
        return False
    return open_table() is None and torch._C._current_autograd_node() is None


def _without_table(run: TorchRun, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def leave(self: Any, *error: Any) -> Any:
        regions = self.__dict__.get("_mezzo_regions")
        region = regions.pop() if regions else None
        if region is not None:
            region.__exit__(None, None, None)
        local = run.phase.local
        if local.own_switch is not None and local.own_switch.regions is regions and not regions:
            local.own_switch = None
        local.autocasts_off -= getattr(self, "_mezzo_turned_off", False)
        if run.listeners.observer is not None and hasattr(self, "_mezzo_entered"):
            run.listeners.observer.autocast_left(self.__dict__.pop("_mezzo_entered"))
        if torch.compiler.is_compiling() or torch._C._is_torch_function_mode_enabled():
            return original(self, *error)
        return _leave_state(self)

    return leave


def turned_off(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> None:
    """Create a GradScaler that is off, whatever the script says."""
    original(self, *args[:5], **{**kwargs, "enabled": False})


def _record_scale(run: TorchRun, original: Callable[..., Any], self: Any, outputs: Any) -> Any:
    if self.is_enabled():
        run.record_scaler(self)
    return original(self, outputs)


def _record_step(
    run: TorchRun, original: Callable[..., Any], self: Any, optimizer: Any, *args: Any, **kwargs: Any
) -> Any:
    if run.phase.not_training:  # perhaps in a capture, where nothing may be read
        return original(self, optimizer, *args, **kwargs)
    recorded = _RecordedStep(optimizer)
    self._mezzo_recorded = recorded
    try:
        result = original(self, optimizer, *args, **kwargs)
    finally:
        del self._mezzo_recorded
    if self.is_enabled():
        skipped = _skipped(self, optimizer, recorded)
        if isinstance(skipped, Tensor):
            run.lint.perhaps_skipped(optimizer, skipped)
        elif skipped:
            run.lint.skipped()
        run.script_stepped(self, optimizer, skipped=skipped)
    return result


class _RecordedStep:
    """A wrapper that records whether torch's scaler stepped an optimizer: reading the flag again would make the host wait a second time."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self.decided = self.stepped = False

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Step the optimizer."""
        self.stepped = True
        return self._optimizer.step(*args, **kwargs)


def _record_decision(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def step_or_skip(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        recorded = getattr(self, "_mezzo_recorded", None)
        if recorded is None:
            return original(self, optimizer, *args, **kwargs)
        recorded.decided = True
        return original(self, recorded, *args, **kwargs)

    return step_or_skip


def _skipped(scaler: Any, optimizer: Any, recorded: _RecordedStep) -> bool | Tensor:
    """Return whether a step was skipped: a bool if the host knows, a device flag if the optimizer itself skips."""
    if recorded.decided:
        return not recorded.stepped
    flag = found_on_device(scaler, optimizer)
    return flag if getattr(optimizer, "_step_supports_amp_scaling", False) else bool(flag)


def _record_update(run: TorchRun, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    run.update.scaling_ended()
    return original(*args, **kwargs)


# Keep FP32 products in the policy's precision: under ``fp32`` and ``tf32`` a script's own TF32 switches have no effect and are recorded.
#
# Most GPU scripts turn TF32 on in their first lines. Under ``fp32`` that would make the baseline of a comparison TF32. All of torch's
# switches end in a few functions of ``torch._C``, which are replaced. Reading a switch returns the real state: the policy's precision.

NoteLeftAlone = Callable[[str, str, str], None]


def keep_fp32_products(policy: Policy, patches: Patches, note_left_alone: NoteLeftAlone) -> None:
    """Set the switches as ``policy``, which lowers nothing, requires, until ``patches`` are undone.

    Args:
        policy: ``fp32`` or ``tf32``.
        patches: restores torch's functions.
        note_left_alone: records an overridden switch of the script: what, its value, the reason.
    """
    switches = fp32_products_as_they_were()
    switches.__enter__()
    patches.on_undo(lambda: switches.__exit__(None, None, None))
    set_fp32_products("tf32" if policy.compute == "tf32" else "ieee")
    override = functools.partial(_override, policy, note_left_alone)
    for name, describe in _SETTERS.items():
        original = getattr(torch._C, name)
        patches.replace(torch._C, name, functools.update_wrapper(functools.partial(override, describe), original))
    # This switch alone stores its setter as a value.
    cudnn_switch = vars(type(torch.backends.cudnn))["allow_tf32"]
    patches.replace(cudnn_switch, "setter", functools.partial(override, _SETTERS["_set_cudnn_allow_tf32"]))


def _override(
    policy: Policy, note_left_alone: NoteLeftAlone, describe: Callable[..., tuple[str, bool | None]], *values: Any
) -> None:
    """Ignore a call of one of torch's setters; record it if it asks for a precision other than the policy's."""
    switch, asks_for_tf32 = describe(*values)
    if asks_for_tf32 not in (None, policy.compute == "tf32"):
        requested = "reduced precision" if asks_for_tf32 else "FP32"
        note_left_alone("fp32 products", switch, f"the script asks for {requested}, and policy {policy!s} overrides it")


def _by_precision(precision: str) -> tuple[str, bool]:
    return f"torch.set_float32_matmul_precision({precision!r})", precision != "highest"


def _allowed(owner: str, allow: bool) -> tuple[str, bool]:
    return f"{owner}.allow_tf32 = {allow}", bool(allow)


def _by_part(backend: str, part: str, precision: str) -> tuple[str, bool | None]:
    owner = _OWNERS.get((backend, part), f"torch.backends.{backend}.{part}")
    return f"{owner}.fp32_precision = {precision!r}", None if precision == "none" else precision != "ieee"


_OWNERS = {
    ("generic", "all"): "torch.backends",
    ("cuda", "all"): "torch.backends.cudnn",
    ("cuda", "matmul"): "torch.backends.cuda.matmul",
    ("cuda", "conv"): "torch.backends.cudnn.conv",
    ("cuda", "rnn"): "torch.backends.cudnn.rnn",
}
_SETTERS: dict[str, Callable[..., tuple[str, bool | None]]] = {
    "_set_float32_matmul_precision": _by_precision,
    "_set_cublas_allow_tf32": functools.partial(_allowed, "torch.backends.cuda.matmul"),
    "_set_cudnn_allow_tf32": functools.partial(_allowed, "torch.backends.cudnn"),
    "_set_fp32_precision_setter": _by_part,
}
"""By setter, a description of a call: the switch as a script writes it, and whether less than FP32 is allowed; None for neither."""


# Three changes see every call of torch that the script makes, through a mode for functions. One gives the operations of one line their
# 16-bit operands in FP32; a tensor that the operation changes in place stays as it is, since a copy would take the result. One puts another
# format in place of each 16-bit format that a call names; formats that reach torch in other ways (NumPy arrays, files, kernels of other
# libraries) stay as they are. One puts another number in the place of a static loss scale.


def make_changes(changes: TrialChanges, tree: ModuleTree, patches: Patches) -> None:
    """Make all changes but the loss scale's, which the observer sets in the step that it inspects, until ``patches`` are undone."""
    if changes.fp32_modules:
        patches.on_undo(_keep_modules(changes.fp32_modules, tree).remove)
    if changes.eps is not None:
        patches.on_undo(register_optimizer_step_pre_hook(_with_eps(changes.eps)).remove)
    modes: list[TorchFunctionMode] = []
    if changes.fp32_line:
        modes.append(LineInFP32(changes.fp32_line))
    if changes.own_scale is not None:
        modes.append(OwnScale(*changes.own_scale))
    if changes.own_format:
        own = OwnFormat(FORMATS[changes.own_format].dtype)
        patches.around(autocast, "__init__", functools.partial(_with_dtype, own))
        patches.around(GradScaler, "__init__", turned_off)
        patches.around(torch, "set_default_dtype", functools.partial(_with_default, own))
        modes.append(own)
    for mode in modes:
        mode.__enter__()
        patches.on_undo(functools.partial(mode.__exit__, None, None, None))


class LineInFP32(TorchFunctionMode):
    """One line of the script in FP32, except for operations of modules that it calls."""

    def __init__(self, line: str) -> None:
        super().__init__()
        self._line = line

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        line, callers = script_line(sys._getframe(1))
        if line != self._line or _MODULE_CALL in callers:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name in _SAME:
            return func(*args, **kwargs)
        in_place = name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) or name.startswith("__i")
        first, rest = args[: int(in_place)], args[int(in_place) :]
        device_type = next((t.device.type for t in args if isinstance(t, Tensor)), "cpu")
        with torch.autocast(device_type, enabled=False):
            return func(*first, *tree_map_only(Tensor, _widened, tuple(rest)), **kwargs)


class OwnFormat(TorchFunctionMode):
    """One format in place of every 16-bit format that a call names."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype
        self._names = {f"torch.{kind}Tensor": torch.empty(0, dtype=dtype).type() for kind in ("Half", "BFloat16")}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func in _CASTS:
            return args[0].to(self._dtype)
        return func(*tree_map(self.of, tuple(args)), **tree_map(self.of, kwargs or {}))

    def of(self, value: Any) -> Any:
        """Return the format for a 16-bit one, and any other value unchanged."""
        if isinstance(value, torch.dtype):
            return self._dtype if value in HALF else value
        return self._names.get(value, value) if isinstance(value, str) else value


class OwnScale(TorchFunctionMode):
    """Another number in the place of the one by which the script scales: it multiplies, and its inverse or a division undoes it."""

    def __init__(self, before: float, after: float) -> None:
        super().__init__()
        self._numbers = {before: after, 1 / before: 1 / after}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        return func(*tree_map(self._other, tuple(args)), **tree_map(self._other, kwargs or {}))

    def _other(self, value: Any) -> Any:
        return self._numbers.get(value, value) if type(value) in (int, float) else value


_CASTS = (Tensor.half, Tensor.bfloat16)
_MODULE_CALL = "_call_impl"
"""The function of torch through which a module is called."""
_SAME = ("__get__", "__set__", "backward", "requires_grad_", "register_hook")
"""Calls that need the script's own tensor."""


def _widened(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in HALF else tensor


def _keep_modules(patterns: Sequence[str], tree: ModuleTree) -> Any:
    """Make modules whose names match one of ``patterns`` compute in FP32, from the first call of their model on."""
    known: set[int] = set()

    def entering(module: nn.Module, args: object) -> None:
        if id(module) in known:
            return
        known.update(id(inner) for _, inner in tree.modules(module))
        device_type = next((p.device.type for p in module.parameters()), "cpu")
        for name, inner in tree.named(module).items():
            if any(fnmatchcase(name, pattern) for pattern in patterns):
                tree.keep_fp32(inner, device_type)

    return register_module_forward_pre_hook(entering)


def _with_eps(eps: float) -> Callable[..., None]:
    def stepping(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            if "eps" in group:
                group["eps"] = eps

    return stepping


def _with_dtype(
    own: OwnFormat,
    original: Callable[..., Any],
    self: Any,
    device_type: str,
    dtype: Any = None,
    *rest: Any,
    **named: Any,
) -> None:
    original(self, device_type, own.of(dtype or torch.get_autocast_dtype(device_type)), *rest, **named)


def _with_default(own: OwnFormat, original: Callable[..., Any], dtype: torch.dtype) -> None:
    original(own.of(dtype))
