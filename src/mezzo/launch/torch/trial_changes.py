"""Change a script's own precision while it runs, as a line that a diagnosis prints would: to try a fix, or to decide on a cause.

Three changes see every call of torch that the script makes, through a mode for functions. One gives the operations of one line their
16-bit operands in FP32; a tensor that the operation changes in place stays as it is, since a copy would take the result. One puts another
format in the place of each 16-bit one that a call names; formats that reach torch in other ways (NumPy arrays, files, kernels of other
libraries) stay as they are. One puts another number in the place of a static loss scale.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.autocast_mode import autocast
from torch.amp.grad_scaler import GradScaler
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map, tree_map_only

from mezzo.engine.casts.half import HALF
from mezzo.formats import FORMATS
from mezzo.launch.patches import Patches
from mezzo.launch.torch.own_amp import turned_off
from mezzo.observe.observer import ModuleTree
from mezzo.observe.settings import TrialChanges
from mezzo.observe.source_lines import script_line


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
    """The operations of one line of the script in FP32, but not those of modules that it calls."""

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
    """One format in the place of every 16-bit one that a call names."""

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
