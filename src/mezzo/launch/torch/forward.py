"""Put a script's forward passes under a policy, transparently to the script.

A module called from outside any module begins a region, and its return ends it: optimizer arithmetic, data preparation
and metrics stay unchanged. The outputs of a region are FP32 again; inside the script's own autocast they keep their format, as in
torch. The hooks skip code that ``torch.compile`` traces,
because the module or function around it has already begun the region. A script's own ``torch.autocast`` is
a region as well.

Activation checkpointing recomputes at the same module depth as the first time, so the formats are the same.

Not covered: forward code outside modules, autocast and compiled functions. It runs in FP32, and the count of FLOPs shows it.
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
from torch import Tensor, is_autocast_enabled, nn
from torch.compiler import is_compiling, is_dynamo_compiling
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._pytree import tree_leaves

from mezzo.engine.casts.autocast_kernels import open_table
from mezzo.engine.casts.casting import Casting
from mezzo.engine.casts.conversion import HALF, to_format
from mezzo.formats import FP32
from mezzo.launch.patches import Patches
from mezzo.launch.torch.state import TorchRun

_FP32 = FP32.dtype


class ForwardRegions:
    """Hooks that begin and end regions around a script's modules and compiled functions."""

    def __init__(self, run: TorchRun, *, watched: bool) -> None:
        self._run, self._watched = run, watched
        self._counting_over = False
        self._original_call: Any = None
        """The module call without regions."""
        self._installed_call: Any = None

    def install(self, patches: Patches) -> None:
        """Set the hooks until ``patches`` are undone."""
        patches.wrap(nn.Module, "__call__", self._call)
        if self._watched and self._run.precision.effective is not None and self._run.precision.effective.lowers:
            patches.on_undo(register_module_forward_hook(self._convert_output).remove)
        patches.wrap(torch, "compile", self._compile)
        patches.wrap(torch.utils.checkpoint, "checkpoint", self._checkpoint)
        if self._run.precision.effective is not None and self._run.precision.effective.lowers:
            patches.around(F, "binary_cross_entropy", _in_fp32)

    def counting_ended(self) -> None:
        """Note that nothing more is to be counted: module calls go straight to torch once nothing else needs the hook."""
        self._counting_over = True

    def _remove(self) -> None:
        if nn.Module.__call__ is self._installed_call:  # not replaced since
            nn.Module.__call__ = self._original_call  # type: ignore[method-assign]

    def _convert_output(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Convert the outermost module's output while watchers still attribute that to the module."""
        local = self._run.phase.local
        if torch.compiler.is_compiling() or local.outermost is not module or local.keeps_format:
            return None
        return _half_to_fp32(output)

    def covered(self) -> bool:
        """Return whether the running code is under the policy: in a module, a compiled function or the script's own autocast."""
        if self._run.phase.local.depth:
            return True
        device_type = self._run.precision.device_type
        # A kernel of Mezzo has turned autocast off around itself; its table is still open.
        return open_table() is not None or (device_type is not None and is_autocast_enabled(device_type))

    def _call(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Begin a region before a module that is called from outside any module, and end it after.

        Torch's global hooks are not used: a single one sends the calls of all inner modules through torch's slow path.
        A policy that casts the model does so here, too: torch looks up a module's ``forward`` before any hook runs.
        """
        local, run = self._run.phase.local, self._run
        is_torch_call = original is nn.Module._wrapped_call_impl

        @functools.wraps(original)
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if is_dynamo_compiling():  # half the cost of is_compiling, in every module's call
                return original(module, *args, **kwargs)
            if run.phase.autocasts_off and local.autocasts_off and not is_compiling():
                args, kwargs = to_format(args, _FP32), to_format(kwargs, _FP32)
            if local.depth:  # instead of torch's function, not around it: torch.compile must find torch's own
                if is_torch_call and not run.phase.compiles and module._compiled_call_impl is None:
                    return module._call_impl(*args, **kwargs)
                return original(module, *args, **kwargs)
            if torch.compiler._is_compiling_flag:  # is_compiling, without its two calls
                return original(module, *args, **kwargs)
            if not run.lint.over:
                run.lint.called(args, kwargs)
            elif (
                self._counting_over
                and run.objects.changed_models is None
                and run.objects.on_root_call is None
                and not run.phase.compiles
            ):
                self._remove()  # a compiled module still calls this function, and torch.compile would then trace what a root call does
            if run.objects.on_root_call is not None:
                run.objects.on_root_call(module, (args, kwargs))
            if run.objects.changed_models is not None:
                args, kwargs = run.objects.changed_models.called(module, args, kwargs)
            root = local.root
            if (
                root is None
                or root.module() is not module
                or root.policy is not run.precision.effective
                or (parameter := root.parameter()) is None
                or parameter.device != root.device
            ):
                root = run.root_of(module, args)
            region, casting = root.region, root.casting
            if casting is not None and local.own_switch is not None and not run.switched_on(module, casting):
                region = None
            local.keeps_format = casting is not None and is_autocast_enabled(casting.device_type)
            local.depth, local.outermost, local.root = 1, module, None  # a nested call must not enter the region again
            direct = is_torch_call and not run.phase.compiles and module._compiled_call_impl is None
            forward = module._call_impl if direct else functools.partial(original, module)
            try:
                if run.objects.changed_models is not None:
                    run.objects.changed_models.checkpoint(module, args, kwargs, root.casting)
                if region is None:
                    return forward(*args, **kwargs)
                with region:
                    output = forward(*args, **kwargs)
            finally:
                local.depth, local.outermost, local.root = 0, None, root
            if local.keeps_format or (type(output) is Tensor and output.dtype not in HALF):
                return output
            return to_format(output, _FP32)

        self._run.phase.before_compiling.append(functools.partial(_never_compile_alone, call))
        self._original_call, self._installed_call = original, call
        return call

    @contextmanager
    def _at_depth(self, depth: int) -> Iterator[None]:
        """Run code as if it were ``depth`` modules deep."""
        local = self._run.phase.local
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
            depth = self._run.phase.local.depth

            def at_same_depth(*inner: Any, **named: Any) -> Any:
                with self._at_depth(depth), self._run.phase.recomputed():
                    return function(*inner, **named)

            return original(at_same_depth, *args, **kwargs)

        return checkpoint

    def _compile(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def compile(model: Any = None, **kwargs: Any) -> Any:
            if model is None:
                return lambda function: compile(function, **kwargs)
            self._run.steady_state.end()
            self._run.phase.begin_compiling()
            compiled = original(model, **kwargs)
            return compiled if isinstance(model, nn.Module) else self._compiled_function(model, compiled)

        return compile

    def _compiled_function(self, function: Any, compiled: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(compiled)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._run.phase.local.depth or torch.compiler.is_compiling():
                return compiled(*args, **kwargs)
            self._run.lint.compiled_called()
            casting = self._casting_of(function, [args, kwargs])
            keeps_format = casting is not None and is_autocast_enabled(casting.device_type)
            region = nullcontext() if casting is None else casting.region()
            try:
                with self._run.phase.compiled(), self._at_depth(1), region:
                    result = compiled(*args, **kwargs)
            finally:
                for listener in self._run.listeners.all:
                    listener.compiled_ended()
            return result if casting is None or keeps_format else _half_to_fp32(result)

        return call

    def _casting_of(self, function: Any, args: list[Any]) -> Casting | None:
        """Record the modules that a compiled function uses, since hooks do not fire in compiled code; return its casting.

        A compiled update is left alone: it uses no module, and it uses an optimizer or runs in an optimizer's step. In a closure of that
        step, which enables gradients, a compiled function is a forward pass.
        """
        leaves = tree_leaves(args)
        used = [*_used_by(function), *leaves]
        modules = [m for m in used if isinstance(m, nn.Module)]
        tensors = [t for t in leaves if isinstance(t, Tensor)]
        for module in modules:
            self._run.record_root(module, tensors)
        if self._run.objects.changed_models is not None:
            self._run.objects.changed_models.compiled_called(modules)
        in_update = self._run.phase.local.stepping and not torch.is_grad_enabled()
        if not modules and (in_update or any(isinstance(value, torch.optim.Optimizer) for value in used)):
            return None
        if tensors:
            self._run.begin_on(tensors[0].device)
        return self._run.precision.casting(
            tensors[0].device.type if tensors else self._run.precision.device_type or "cpu"
        )


def _never_compile_alone(call: Callable[..., Any]) -> None:
    """Keep torch.compile from starting at our wrapper after a graph break around it: it may start at the module's own frame."""
    from torch._dynamo.eval_frame import skip_code

    skip_code(call.__code__)


def _used_by(function: Any) -> list[Any]:
    """Return the values that a function reaches through its object, its closure and the globals that it names."""
    function = getattr(function, "func", function)  # of a functools.partial
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
    if type(output) is Tensor and output.dtype not in HALF:  # the usual case, without a walk through the output
        return output
    return to_format(output, _FP32)  # audits attribute casts in that function's file to the policy


def _in_fp32(original: Callable[..., Any], input: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Run a function that CUDA's autocast rejects, with FP32 operands and autocast off."""
    with torch.autocast(input.device.type, enabled=False):
        values, names = to_format((input, *args), _FP32), to_format(kwargs, _FP32)
        return original(*values, **names)
