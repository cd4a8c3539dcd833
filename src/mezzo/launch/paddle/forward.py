"""Run a Paddle script's forward passes under a policy, transparently to the script.

A layer called from outside any layer begins a region, and its return ends it: optimizer arithmetic, data preparation and
metrics stay unchanged, and the outputs of a region are FP32. On a GPU a region is ``paddle.amp.auto_cast`` with the
policy's lists; on a CPU, where that does nothing, ``operations`` rounds the operations in a region.

Under a policy, code passed to ``paddle.jit.to_static`` runs eagerly: a traced program ignores regions,
and in some traced programs Paddle's own AMP aborts the process on a CPU. The record says that the code ran eagerly.

Not covered: forward code outside layers. It runs in FP32, and the count of FLOPs shows it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import paddle
from paddle.jit.dy2static.program_translator import StaticFunction

from mezzo.formats import FP32
from mezzo.frameworks.paddle import to_paddle
from mezzo.launch.paddle.state import PaddleRun, mapped
from mezzo.launch.paddle.surveys import is_half
from mezzo.launch.patches import Patches

AUTO_CAST_MODULE: Any = importlib.import_module("paddle.amp.auto_cast")  # as an attribute, this name is a function


class ForwardRegions:
    """Hooks that begin and end regions around a script's layers."""

    def __init__(self, run: PaddleRun) -> None:
        self._run = run
        self._guard = AUTO_CAST_MODULE.amp_guard

    def install(self, patches: Patches) -> None:
        """Patch Paddle until ``patches`` are undone."""
        patches.around(paddle.nn.Layer, "__call__", self._call)
        patches.around(StaticFunction, "__call__", self._static_call)

    @contextmanager
    def region(self) -> Iterator[None]:
        """Run the code inside under the policy."""
        local = self._run.local
        before, local.depth = local.depth, 1
        try:
            with self._casting():
                yield
        finally:
            local.depth = before

    @contextmanager
    def in_fp32(self) -> Iterator[None]:
        """Run the code inside in FP32."""
        without_amp = self._guard(enable=False) if self._run.casts or self._run.policy is None else nullcontext()
        with self._run.in_fp32(), without_amp:
            yield

    def _casting(self) -> AbstractContextManager[Any]:
        run = self._run
        if not run.casts or run.applied is None or run.local.fp32_depth:
            return nullcontext()
        casting: AbstractContextManager[Any] = self._guard(**to_paddle(run.applied).auto_cast)
        return casting

    def _call(self, original: Callable[..., Any], layer: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Begin a region before a layer called from outside any layer, unless the script has begun one, and end it after."""
        run, local = self._run, self._run.local
        if local.in_layer or local.in_backward:
            return self._call_inner(original, layer, args, kwargs)
        run.record_root(layer)
        local.in_layer = True
        try:
            if local.depth:
                return self._call_inner(original, layer, args, kwargs)
            with self.region():
                result = original(layer, *args, **kwargs)
        finally:
            local.in_layer = False
        return _to_fp32(result) if run.casts else result

    def _call_inner(self, original: Callable[..., Any], layer: Any, args: Any, kwargs: Any) -> Any:
        """Run a layer inside a region; in FP32 if the policy keeps it there."""
        if layer not in self._run.fp32_layers:
            return original(layer, *args, **kwargs)
        with self.in_fp32():
            return original(layer, *_to_fp32(args), **_to_fp32(kwargs))

    def _static_call(self, original: Callable[..., Any], function: Any, /, *args: Any, **kwargs: Any) -> Any:
        run = self._run
        run.begin()
        if run.policy is None:
            if run.observer is not None:
                run.observer.static_graph("paddle.jit.to_static")
            run.note_left_alone(
                "to_static", "not counted", "the operations of a traced program are not seen: no FLOPs, no formats"
            )
            return original(function, *args, **kwargs)
        why = "a traced program would not be under the policy; as-is keeps it traced"
        run.note_left_alone("to_static", "run eagerly", why)
        with self.region():
            result = function._call_dygraph_function(*args, **kwargs)
        return _to_fp32(result) if run.casts else result


def _to_fp32(value: Any) -> Any:
    """Return ``value`` with its 16-bit tensors in FP32, also those in lists, tuples and dictionaries."""
    return mapped(value, lambda tensor: tensor.astype(FP32.dtype_name) if is_half(tensor) else tensor)
