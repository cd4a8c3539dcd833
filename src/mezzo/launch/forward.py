"""Put a script's forward passes under a policy, without the script knowing.

A module called from outside any module begins a region, its return ends it: optimizer arithmetic, data preparation and metrics stay as
they were. What leaves a region is FP32 again. Code that ``torch.compile`` traces is skipped by the hooks, because the module or function
around it has begun the region already. A script's own ``torch.autocast`` is a region as well.

Not covered: forward code outside any module, autocast and compiled function. It runs in FP32, and the count of FLOPs says so.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from mezzo.engine.conversion import to_format
from mezzo.formats import FP32
from mezzo.launch.patches import Patches
from mezzo.launch.run import Run


class Regions:
    """Begin and end regions around a script's modules and compiled functions."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def install(self, patches: Patches) -> None:
        """Set the hooks until ``patches`` are undone."""
        patches.on_undo(register_module_forward_pre_hook(self._enter).remove)
        patches.on_undo(register_module_forward_hook(self._leave, always_call=True).remove)
        patches.wrap(torch, "compile", self._compile)
        if self._run.applied is not None and self._run.applied.lowers:
            patches.wrap(F, "binary_cross_entropy", _in_fp32)

    def depth(self) -> int:
        """Return how many modules and compiled functions deep the running code is, in this thread."""
        return getattr(self._run.local, "depth", 0)

    def _enter(self, module: nn.Module, args: Any) -> Any:
        if torch.compiler.is_compiling():
            return None
        local, depth = self._run.local, self.depth()
        local.depth = depth + 1
        if depth > 0:
            return None
        local.region = None
        device_type = self._run.meet(module, args)
        casting = self._run.casting(device_type)
        if casting is None:
            return None
        local.region = casting.region()
        local.region.__enter__()
        return to_format(args, casting.policy.storage.dtype) if casting.policy.casting == "model" else None

    def _leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        if torch.compiler.is_compiling():
            return None
        local = self._run.local
        local.depth -= 1
        if local.depth > 0 or local.region is None:
            return None
        local.region.__exit__(None, None, None)
        local.region = None
        # What checkpointing computes again must have the format that it had: the module around it has cast the output already.
        return None if self._run.in_backward else _half_to_fp32(output)

    def _compile(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def compile(model: Any = None, **kwargs: Any) -> Any:
            if model is None:
                return lambda function: compile(function, **kwargs)
            compiled = original(model, **kwargs)
            return compiled if isinstance(model, nn.Module) else self._compiled_function(compiled)

        return compile

    def _compiled_function(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(compiled)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self.depth() > 0 or self._run.in_backward or torch.compiler.is_compiling():
                return compiled(*args, **kwargs)
            sample = next((a for a in args if isinstance(a, Tensor)), None)
            casting = self._run.casting("cpu" if sample is None else sample.device.type)
            if casting is None:
                return compiled(*args, **kwargs)
            self._run.local.depth = 1
            try:
                with casting.region():
                    return _half_to_fp32(compiled(*args, **kwargs))
            finally:
                self._run.local.depth = 0

        return call


def _half_to_fp32(output: Any) -> Any:
    return to_format(output, FP32.dtype)


def _in_fp32(original: Callable[..., Any]) -> Callable[..., Any]:
    """Run a function that CUDA's autocast refuses with FP32 operands and autocast off."""

    @functools.wraps(original)
    def call(input: Tensor, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(input.device.type, enabled=False):
            values, names = to_format((input, *args), FP32.dtype), to_format(kwargs, FP32.dtype)
            return original(*values, **names)

    return call
