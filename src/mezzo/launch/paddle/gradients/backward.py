"""Scale a Paddle script's backward passes, and unscale every gradient before the script sees it.

The gradient from which a backward pass starts is multiplied by the loss scale, and a hook on every leaf of the graph (``leaves``) divides
its gradient by the scale before it is added to ``.grad``. The script sees unscaled losses and gradients, so its clipping,
accumulation and logs need no change. All of Paddle's backward passes end in one function of its core.

Not covered: gradients from ``paddle.grad``, such as for a penalty. They are not scaled, so small ones vanish where they are rounded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

import paddle

from mezzo.launch.paddle.gradients.leaves import Leaves
from mezzo.launch.paddle.gradients.script_hooks import ScriptHooks, observe_gradient
from mezzo.launch.paddle.state import PaddleRun
from mezzo.launch.patches import Patches


class BackwardPasses:
    """Hooks before and after every backward pass."""

    def __init__(self, run: PaddleRun) -> None:
        self._run = run
        self._leaves = Leaves(run)
        self._hooks = ScriptHooks(lambda: self._factors, on_leaf=self._hook)
        self._hooked: WeakValueDictionary[int, Any] = WeakValueDictionary()
        """The leaves that have a hook; after the run it does nothing, because no pass is scaled."""
        self._factors: tuple[float, float] | None = None
        """The loss scale of the running pass, and its inverse; None outside a scaled pass."""
        self.begins: Callable[[], Any] = lambda: None
        """Called before every backward pass."""

    def install(self, patches: Patches) -> None:
        """Patch Paddle until ``patches`` are undone."""
        patches.around(paddle.base.core.eager, "run_backward", self._run_backward)
        patches.around(paddle.base.core.eager, "run_partial_grad", self._run_partial)
        if self._run.scale.checks:
            self._leaves.install(patches)
            self._hooks.install(patches)

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
            leaves = list(self._leaves)
            for leaf in leaves:  # each time, because a script may unfreeze one at any time
                self._hook(leaf)
            self._leaves.check(tensors, leaves)
            self._factors = run.scale.value, run.scale.inverse
            grad_tensors = starts = self._scaled(tensors, starts)
        if run.observer is not None:
            run.observer.scaled(tensors, starts)
        before, local.depth, local.in_backward = local.depth, 1, True  # recomputed code is under the policy
        try:
            return original(tensors, grad_tensors, *args, **kwargs)
        finally:
            local.depth, local.in_backward, self._factors = before, False, None
            if run.observer is not None:
                run.observer.backward_ended()

    def _run_partial(self, original: Callable[..., Any], outputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Run ``paddle.grad``, which is not scaled: inside a script's own backward function its results are not unscaled."""
        before, self._factors = self._factors, None
        if self._run.scale.checks and not self._run.local.in_backward:
            self._leaves.check(outputs, list(self._leaves))
        try:
            gradients = original(outputs, *args, **kwargs)
        finally:
            self._factors = before
        if self._run.scale.checks:
            self._leaves.ignore(gradients)
        return gradients

    def _scaled(self, tensors: Any, starts: list[Any]) -> list[Any]:
        pairs = zip(tensors, starts, strict=True)
        scale = self._run.scale.value
        with self._run.own_work():
            return [paddle.full_like(t, scale) if g is None else g * scale for t, g in pairs]

    def _hook(self, leaf: Any) -> None:
        if self._hooked.get(id(leaf)) is not leaf:
            self._hooked[id(leaf)] = leaf
            observe_gradient(leaf, self._unscale)

    def _unscale(self, gradient: Any) -> Any:
        """Return ``gradient`` / scale, with NaN for infinity: an overflow must survive a script's clamp of its gradients."""
        if self._factors is None:
            return None
        with paddle.no_grad(), self._run.in_fp32(), self._run.own_work():
            unscaled = gradient * self._factors[1]
            return unscaled if gradient.is_selected_rows() else paddle._C_ops.add_(unscaled, gradient * 0.0)
