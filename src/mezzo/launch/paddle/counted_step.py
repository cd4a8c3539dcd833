"""Inspect the second step of a Paddle run: the formats in which its products ran, and the bytes of each kind.

The second, because in the first the optimizer has no state yet; and only one step, because counting costs time (the first tenth
of the steps is excluded from all timing). Activations are the tensors that autograd keeps for the backward pass, counted by Paddle's
saved-tensor hooks, each storage once and without parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import paddle

from mezzo.launch.paddle.gradients.backward import BackwardPasses
from mezzo.launch.paddle.operations import Operations
from mezzo.launch.paddle.state import PaddleRun
from mezzo.launch.patches import Patches
from mezzo.records import Effective, Memory


class CountedStep:
    """The counts of one step's operations and bytes."""

    def __init__(self, run: PaddleRun, operations: Operations, passes: BackwardPasses) -> None:
        self._run, self._operations, self._passes = run, operations, passes
        self._saved: dict[int, int] = {}
        self._hooks: Any = None
        self._has_all = True
        """Whether the hooks have seen all tensors that the step keeps for its backward passes."""
        self._bytes: dict[str, int] = {}
        """Bytes by kind, for the kinds that were measured."""
        self._counted_step: int | None = None
        self._flops: dict[str, int] = {}
        self._outside_region = 0

    def install(self, patches: Patches) -> None:
        """Set the hooks until ``patches`` are undone."""
        self._run.watchers.append(self._updated)
        self._passes.begins = self._backward_begins
        patches.around(paddle.base.core.eager, "run_partial_grad", self._differentiate)
        patches.on_undo(self._end)

    def _differentiate(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run ``paddle.grad`` without the hooks, under which Paddle 3.3.1 cannot differentiate its results again.

        What it keeps is then unknown, and so are the step's activations.
        """
        hooks, self._hooks = self._hooks, None
        if hooks is None:
            return original(*args, **kwargs)
        self._has_all = False
        hooks.__exit__()
        try:
            return original(*args, **kwargs)
        finally:
            self._enter()

    def memory(self) -> Memory:
        """Return the bytes of the counted step, and the allocator's peaks over the run."""
        on_gpu = self._run.device is not None and self._run.device.kind == "cuda"
        kinds: dict[str, Any] = {f"{kind}_bytes": count for kind, count in self._bytes.items()}
        return Memory(
            **kinds,
            of_emulation=self._run.emulates,
            cuda_allocated_bytes=paddle.device.cuda.max_memory_allocated() if on_gpu else None,
            cuda_reserved_bytes=paddle.device.cuda.max_memory_reserved() if on_gpu else None,
        )

    def effective(self) -> Effective:
        """Return the formats of the counted step, and what was left alone."""
        run = self._run
        return Effective(
            flops_by_format=self._flops,
            emulated=run.emulates,
            counted_on_step=self._counted_step if self._flops else None,
            left_alone=[*run.left_alone.values(), *run.code_outside(self._outside_region, sum(self._flops.values()))],
        )

    def _updated(self) -> None:
        """Start counting after the first update; keep the counts at the second."""
        if self._counted_step is None:
            self._begin()
        elif self._operations.counting and self._run.num_updates >= self._counted_step:
            self._flops, self._outside_region = dict(self._operations.by_format), self._operations.outside_region
        if self._run.num_updates <= 2:
            self._weigh()

    def _begin(self) -> None:
        self._counted_step = self._run.num_updates + 1
        self._operations.counting = True
        self._enter()

    def _enter(self) -> None:
        self._hooks = paddle.autograd.saved_tensors_hooks(self._pack, lambda tensor: tensor)
        self._hooks.__enter__()

    def _backward_begins(self) -> None:
        if self._counted_step is None:
            return
        if self._run.num_updates >= self._counted_step:  # the counted update was made: this is the next step
            self._end()
            return
        parameters = {p.data_ptr() for p in self._run.parameters() if p._is_initialized()}
        activations = sum(size for pointer, size in self._saved.items() if pointer not in parameters)
        if self._has_all:
            self._bytes["activations"] = max(self._bytes.get("activations", 0), activations)
        else:
            self._bytes.pop("activations", None)
        self._saved = {}

    def _pack(self, tensor: Any) -> Any:
        if tensor._is_initialized():
            self._saved[tensor.data_ptr()] = _bytes(tensor)
        return tensor

    def _weigh(self) -> None:
        """Count the bytes of parameters, gradients and optimizer state."""
        parameters = self._run.parameters()
        now = {
            "parameters": _total(parameters),
            "gradients": _total(p.grad for p in parameters if p.grad is not None),
            "optimizer": sum(_optimizer_bytes(optimizer) for optimizer in list(self._run.optimizers)),
        }
        self._bytes.update({kind: max(count, self._bytes.get(kind, 0)) for kind, count in now.items()})

    def _end(self) -> None:
        self._operations.counting = False
        if self._hooks is not None:
            self._hooks.__exit__()
            self._hooks = None


def _bytes(tensor: Any) -> int:
    return int(tensor.size) * int(tensor.element_size())


def _total(tensors: Iterable[Any]) -> int:
    return sum(_bytes(t) for t in tensors if t._is_initialized())


def _optimizer_bytes(optimizer: Any) -> int:
    slots = [tensor for by_parameter in optimizer._accumulators.values() for tensor in by_parameter.values()]
    return _total([*slots, *optimizer._master_weights.values()])
