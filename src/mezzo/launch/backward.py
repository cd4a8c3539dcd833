"""Scale a script's gradients inside its backward passes, so that the script never sees a scaled one.

``torch.autograd.backward`` (every ``loss.backward()`` ends there) starts from ``gradient * scale`` instead of ``gradient``: the loss that
the script logs stays true. Every leaf of the graph has a hook that divides by the scale before the gradient is added to ``.grad``,
so clipping, accumulation, penalties on gradients and DDP's all-reduce see unscaled ones. The leaves are found by walking the graph, since a
leaf that was missed would get a gradient 65536 times too large: about a microsecond a node, only where the loss is scaled.

``torch.autograd.grad`` is scaled and its results are unscaled at once: penalties built on them keep their graph.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from mezzo.engine.gradients import total_norm
from mezzo.errors import NonFiniteLossError
from mezzo.launch.patches import Patches
from mezzo.launch.run import Run


class BackwardPasses:
    """Stand in for torch's two entries to the backward pass."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._inverse: Tensor | float | None = None
        """What gradients are multiplied by at the leaves; None outside a scaled ``backward``."""
        self._hooked = WeakTensorKeyDictionary()

    def install(self, patches: Patches) -> None:
        """Replace both entries until ``patches`` are undone."""
        patches.wrap(torch.autograd, "backward", self._backward)
        patches.wrap(torch.autograd, "grad", self._grad)
        patches.on_undo(self._unhook)

    def _backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
            outputs = _listed(tensors)
            if self._run.in_backward or not all(isinstance(t, Tensor) for t in outputs):
                original(tensors, grad_tensors, *args, **kwargs)
                return
            self._begin(outputs)
            by_hand = self._leaves_updated_by_hand(outputs)
            gradients: Any = grad_tensors
            if self._run.scale.checks:
                gradients = self._scaled(outputs, grad_tensors)
                self._hook_leaves(outputs)
                self._inverse = self._run.scale.inverse()
            try:
                with self._under_policy():
                    original(outputs, gradients, *args, **kwargs)
            finally:
                self._inverse = None
            if by_hand:
                self._update_by_hand([p.grad for p in by_hand if p.grad is not None])

        return backward

    def _grad(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def grad(outputs: Any, inputs: Any, grad_outputs: Any = None, *args: Any, **kwargs: Any) -> Any:
            roots, leaves = _listed(outputs), _listed(inputs)
            if self._run.in_backward or not all(isinstance(t, Tensor) for t in (*roots, *leaves)):
                return original(outputs, inputs, grad_outputs, *args, **kwargs)
            trains = self._trains(leaves, kwargs)
            if trains:
                self._begin(roots)
            gradients: Any = grad_outputs
            if self._run.scale.checks and not kwargs.get("is_grads_batched"):
                gradients = self._scaled(roots, grad_outputs)
            with self._under_policy():
                found = original(roots, inputs, gradients, *args, **kwargs)
            if gradients is not grad_outputs:
                inverse = self._run.scale.inverse()
                found = tuple(None if g is None else g * inverse for g in found)
            if trains:
                self._update_by_hand([g for g in found if g is not None])
            return found

        return grad

    @contextmanager
    def _under_policy(self) -> Iterator[None]:
        self._run.in_backward = True
        casting = self._run.main_casting
        try:
            if casting is None:
                yield
            else:
                with casting.backward():
                    yield
        finally:
            self._run.in_backward = False
            for watcher in self._run.watchers:
                watcher.backward_ended()

    def _begin(self, outputs: Sequence[Tensor]) -> None:
        self._run.close_update()
        for watcher in self._run.watchers:
            watcher.backward_begins()
        losses = [t.detach() for t in outputs if t.numel() == 1]
        script_scale = getattr(self._run.local, "script_scale", None)
        for loss in losses:
            if not len(self._run.recorder) and not self._run.recorder.has_loss() and not bool(loss.isfinite()):
                raise NonFiniteLossError(
                    f"the loss is {loss.item()} before the first update",
                    hint="no loss scale can help: look at the data and at the forward pass; compare with --policy fp32",
                )
            self._run.recorder.loss(loss if script_scale is None else loss / script_scale)

    def _scaled(self, outputs: Sequence[Tensor], given: Any) -> list[Tensor | None]:
        gradients = [None] * len(outputs) if given is None else _listed(given)
        pairs = zip(outputs, gradients, strict=True)
        return [self._run.scale.scale(torch.ones_like(t) if g is None else g).to(t.dtype) for t, g in pairs]

    def _hook_leaves(self, outputs: Sequence[Tensor]) -> None:
        for leaf in leaves_of(outputs):
            if leaf not in self._hooked:
                self._hooked[leaf] = leaf.register_hook(self._unscale)

    def _unhook(self) -> None:
        for handle in self._hooked.values():
            handle.remove()

    def _unscale(self, gradient: Tensor) -> Tensor | None:
        return None if self._inverse is None else gradient * self._inverse

    def _leaves_updated_by_hand(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        """Return the leaves of a script without any optimizer: it updates them itself, every backward pass is an update."""
        if self._run.optimizers:
            return []
        return [leaf for leaf in leaves_of(outputs) if leaf.requires_grad]

    def _trains(self, leaves: Sequence[Tensor], kwargs: dict[str, Any]) -> bool:
        no_graph = not kwargs.get("create_graph") and not torch.compiler.is_compiling()
        return no_graph and not self._run.optimizers and all(t.is_leaf for t in leaves)

    def _update_by_hand(self, gradients: list[Tensor]) -> None:
        self._run.leave("update", "by hand", "no optimizer object: every backward pass counts as an update")
        if gradients and self._run.updated(total_norm(gradients)):
            torch._foreach_zero_(gradients)  # the script's own update then changes nothing
        self._run.update_made(None)


def leaves_of(outputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the leaves that a backward pass from ``outputs`` reaches."""
    leaves = [t for t in outputs if t.grad_fn is None and t.requires_grad]
    waiting = [t.grad_fn for t in outputs if t.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        variable = getattr(node, "variable", None)
        if variable is not None:
            leaves.append(variable)
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return leaves


def _listed(values: Any) -> list[Any]:
    return [values] if isinstance(values, Tensor) or not isinstance(values, (list, tuple)) else list(values)
