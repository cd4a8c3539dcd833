"""Put a script's forward passes under a policy, without the script knowing.

A module called from outside any module begins a region, its return ends it: optimizer arithmetic, data preparation
and metrics stay as they were. What leaves a region is FP32 again. Code that ``torch.compile`` traces is skipped by
the hooks, because the module or function around it has begun the region already. A script's own ``torch.autocast`` is
a region as well.

What activation checkpointing computes again is computed as deep in modules as it was the first time, so it has the
same formats.

Not covered: forward code outside any module, autocast and compiled function. It runs in FP32, and the count of FLOPs
says so.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import CellType
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.compiler import is_compiling, is_dynamo_compiling
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._pytree import tree_leaves

from mezzo.engine.autocast_kernels import open_table
from mezzo.engine.casting import Casting
from mezzo.engine.conversion import to_format
from mezzo.formats import FP32
from mezzo.launch.patches import Patches
from mezzo.launch.torch.state import Run

_FP32 = FP32.dtype


class Regions:
    """Begin and end regions around a script's modules and compiled functions."""

    def __init__(self, run: Run, *, watched: bool) -> None:
        self._run, self._watched = run, watched
        self._counted = False
        self._calls: Any = None
        """What calls modules without regions."""
        self._installed: Any = None

    def install(self, patches: Patches) -> None:
        """Set the hooks until ``patches`` are undone."""
        patches.wrap(nn.Module, "__call__", self._call)
        if self._watched and self._run.applied is not None and self._run.applied.lowers:
            patches.on_undo(register_module_forward_hook(self._end_inside).remove)
        patches.wrap(torch, "compile", self._compile)
        patches.wrap(torch.utils.checkpoint, "checkpoint", self._checkpoint)
        if self._run.applied is not None and self._run.applied.lowers:
            patches.wrap(F, "binary_cross_entropy", _in_fp32)

    def counted(self) -> None:
        """Let calls of modules go straight to torch, where nothing is cast, once nothing else needs to hear them."""
        self._counted = True

    def _remove(self) -> None:
        if nn.Module.__call__ is self._installed:  # nobody has replaced it since
            nn.Module.__call__ = self._calls  # type: ignore[method-assign]

    def _end_inside(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Convert what the outermost module returns while watchers still count it as the module's own work."""
        if torch.compiler.is_compiling() or self._run.local.outermost is not module:
            return None
        return _half_to_fp32(output)

    def covered(self) -> bool:
        """Return whether the running code is under the policy: in a module, a compiled function or the script's own autocast."""
        if self.depth() > 0:
            return True
        device_type = self._run.device_type
        # A kernel of ours has turned autocast off around itself; its table is still open.
        return open_table() is not None or (device_type is not None and torch.is_autocast_enabled(device_type))

    def depth(self) -> int:
        """Return 1 where the running code is in a module or a compiled function, in this thread, else 0."""
        return self._run.local.depth

    def _call(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Begin a region before a module that is called from outside any module, and end it after.

        Not by torch's global hooks: one of those makes the call of every module inside modules take torch's slow way.
        A policy that casts the model does so here too: torch looks a module's ``forward`` up before any hook runs.
        """
        local, run = self._run.local, self._run
        is_torchs = original is nn.Module._wrapped_call_impl

        @functools.wraps(original)
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if is_dynamo_compiling():  # half the price of is_compiling, in every module's call
                return original(module, *args, **kwargs)
            if local.autocasts_off and not is_compiling():
                args, kwargs = to_format(args, _FP32), to_format(kwargs, _FP32)
            if local.depth:  # in place of torch's function, not before it; torch.compile has to meet torch's own
                if is_torchs and not run.compiles and module._compiled_call_impl is None:
                    return module._call_impl(*args, **kwargs)
                return original(module, *args, **kwargs)
            if is_compiling():
                return original(module, *args, **kwargs)
            if not run.lint.over:
                run.lint.called(args, kwargs)
            elif self._counted:
                self._remove()
            casting = run.casting(run.meet(module, args))
            local.depth, local.outermost = 1, module
            try:
                if casting is None:
                    return original(module, *args, **kwargs)
                with casting.region():
                    output = original(module, *args, **kwargs)
            finally:
                local.depth, local.outermost = 0, None
            return _half_to_fp32(output)

        self._run.before_compiling.append(functools.partial(_never_compile_alone, call))
        self._calls, self._installed = original, call
        return call

    @contextmanager
    def _at(self, depth: int) -> Iterator[None]:
        """Run code as if it were ``depth`` modules deep."""
        local = self._run.local
        before, local.depth = local.depth, depth
        try:
            yield
        finally:
            local.depth = before

    def _checkpoint(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def checkpoint(function: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return original(function, *args, **kwargs)
            depth = self.depth()

            def at_same_depth(*inner: Any, **named: Any) -> Any:
                with self._at(depth), self._recomputing():
                    return function(*inner, **named)

            return original(at_same_depth, *args, **kwargs)

        return checkpoint

    @contextmanager
    def _recomputing(self) -> Iterator[None]:
        """Tell watchers that what runs in a backward pass is a forward pass made again."""
        before = self._run.recomputing
        self._run.recomputing = before or torch._C._current_autograd_node() is not None
        try:
            yield
        finally:
            self._run.recomputing = before

    def _compile(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def compile(model: Any = None, **kwargs: Any) -> Any:
            if model is None:
                return lambda function: compile(function, **kwargs)
            self._run.compiles = True
            self._run.steady.end()
            while self._run.before_compiling:
                self._run.before_compiling.pop()()
            compiled = original(model, **kwargs)
            return compiled if isinstance(model, nn.Module) else self._compiled_function(model, compiled)

        return compile

    def _compiled_function(self, function: Any, compiled: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(compiled)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self.depth() > 0 or torch.compiler.is_compiling():
                return compiled(*args, **kwargs)
            self._run.lint.compiled_called()
            casting = self._casting_of(function, [args, kwargs])
            self._run.in_compiled = True
            try:
                with self._at(1), nullcontext() if casting is None else casting.region():
                    result = compiled(*args, **kwargs)
            finally:
                self._run.in_compiled = False
                for watcher in self._run.watchers:
                    watcher.compiled_ended()
            return result if casting is None else _half_to_fp32(result)

        return call

    def _casting_of(self, function: Any, args: list[Any]) -> Casting | None:
        """Meet the modules that a compiled function uses, since hooks do not fire in what is compiled; return its casting.

        A compiled update, which uses an optimizer and no module, is left alone.
        """
        leaves = tree_leaves(args)
        used = [*_used_by(function), *leaves]
        modules = [m for m in used if isinstance(m, nn.Module)]
        tensors = [t for t in leaves if isinstance(t, Tensor)]
        for module in modules:
            self._run.meet(module, tensors)
        if not modules and any(isinstance(value, torch.optim.Optimizer) for value in used):
            return None
        if tensors:
            self._run.begin_on(tensors[0].device)
        return self._run.casting(tensors[0].device.type if tensors else self._run.device_type or "cpu")


def _never_compile_alone(call: Callable[..., Any]) -> None:
    """Keep torch.compile from beginning at a module's call where it gives up the code around it: at the module's own frame it may."""
    from torch._dynamo.eval_frame import skip_code

    skip_code(call.__code__)


def _used_by(function: Any) -> list[Any]:
    """Return the values that a function finds in its object, its closure and by the global names it mentions."""
    function = getattr(function, "func", function)  # a partial's
    owner = getattr(function, "__self__", None)
    function = getattr(function, "__func__", function)
    code, scope = getattr(function, "__code__", None), getattr(function, "__globals__", {})
    names = () if code is None else code.co_names
    return [owner, *map(_content, getattr(function, "__closure__", None) or ()), *(scope.get(name) for name in names)]


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a name that is assigned later
        return None


def _half_to_fp32(output: Any) -> Any:
    return (
        output if type(output) is Tensor and output.dtype is _FP32 else to_format(output, _FP32)
    )  # mostly nothing to do


def _in_fp32(original: Callable[..., Any]) -> Callable[..., Any]:
    """Run a function that CUDA's autocast refuses with FP32 operands and autocast off."""

    @functools.wraps(original)
    def call(input: Tensor, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(input.device.type, enabled=False):
            values, names = to_format((input, *args), _FP32), to_format(kwargs, _FP32)
            return original(*values, **names)

    return call
