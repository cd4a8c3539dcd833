"""Scale a Paddle script's backward passes, and unscale every gradient before the script sees it.

The gradient from which a backward pass starts is multiplied by the loss scale, and a hook on every parameter divides its
gradient by the scale before it is added to ``.grad``. The script sees unscaled losses and gradients, so its clipping,
accumulation and logs need no change. All of Paddle's backward passes end in one function of its core.

Not covered: gradients from ``paddle.grad``, such as for a penalty. They are not scaled, so small ones vanish where they are rounded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import paddle

from mezzo.launch.paddle.state import PaddleRun, parameters_of
from mezzo.launch.patches import Patches


class BackwardPasses:
    """Hooks before and after every backward pass."""

    def __init__(self, run: PaddleRun) -> None:
        self._run = run
        self._hooked: dict[int, Any] = {}
        self._inverse: float | None = None
        self._num_roots = -1
        self.begins: Callable[[], Any] = lambda: None
        """Called before every backward pass."""

    def install(self, patches: Patches) -> None:
        """Patch Paddle until ``patches`` are undone."""
        patches.around(paddle.base.core.eager, "run_backward", self._run_backward)
        patches.on_undo(self._unhook)

    def _run_backward(
        self, original: Callable[..., Any], tensors: Any, grad_tensors: Any = (), *args: Any, **kwargs: Any
    ) -> Any:
        run, local = self._run, self._run.local
        if local.in_backward:  # inside activation checkpointing: the outer pass has begun and is scaled
            return original(tensors, grad_tensors, *args, **kwargs)
        self.begins()
        starts = list(grad_tensors or []) or [None] * len(tensors)
        run.backward_from(tensors, starts)
        if run.scale.checks:
            self._hook_parameters()
            self._inverse = run.scale.inverse
            grad_tensors = starts = self._scaled(tensors, starts)
        if run.observer is not None:
            run.observer.scaled(tensors, starts)
        before, local.depth, local.in_backward = local.depth, 1, True  # recomputed code is under the policy
        try:
            return original(tensors, grad_tensors, *args, **kwargs)
        finally:
            local.depth, local.in_backward, self._inverse = before, False, None
            if run.observer is not None:
                run.observer.backward_ended()

    def _scaled(self, tensors: Any, starts: list[Any]) -> list[Any]:
        pairs = zip(tensors, starts, strict=True)
        scale = self._run.scale.value
        with self._run.own_work():
            return [paddle.full_like(t, scale) if g is None else g * scale for t, g in pairs]

    def _hook_parameters(self) -> None:
        """Hook the parameters that have no hook yet.

        Those of optimizers are read each time, because a script may unfreeze one at any time; those of layers after a new root was called.
        """
        run = self._run
        new_root = len(run.roots) != self._num_roots
        parameters = run.parameters() if new_root else [p for o in list(run.optimizers) for p in parameters_of(o)]
        self._num_roots = len(run.roots)
        for parameter in parameters:
            if id(parameter) not in self._hooked and not parameter.stop_gradient:
                self._hooked[id(parameter)] = parameter, parameter.register_hook(self._unscale)

    def _unscale(self, gradient: Any) -> Any:
        """Return ``gradient`` / scale, with NaN for infinity: an overflow must survive a script's clamp of its gradients."""
        if self._inverse is None:
            return None
        with paddle.no_grad(), self._run.in_fp32(), self._run.own_work():
            unscaled = gradient * self._inverse
            return unscaled if gradient.is_selected_rows() else paddle._C_ops.add_(unscaled, gradient * 0.0)

    def _unhook(self) -> None:
        for _, handle in self._hooked.values():
            handle.remove()
