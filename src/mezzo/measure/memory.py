"""Count the bytes of a training step by kind, exactly, on any device.

parameters  storages of the parameters that modules and optimizers hold
gradients   the ``.grad`` of these when an optimizer steps
optimizer   tensors in the optimizers' state after the step
activations what the forward pass keeps for the backward pass: storages that autograd saves, and the inputs of checkpointed functions,
            each storage once and without parameters; of a view of data, such as a batch cut out of a data set, only its own part;
            for an emulated recurrent layer also what a device keeps inside it

The activations are the largest count over the step's backward passes. Autograd's saved-tensor hooks show what it keeps. The hooks of
activation checkpointing lie inside ours, so what it drops is not counted. Nor are the tensors of a graph that was discarded without a
backward pass (an evaluation with gradients on): only what is alive when the backward pass begins counts. ``torch.func`` allows no such
hooks, so a step that transforms with it has no count.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from mezzo.engine.matrix_units.emulation_nodes import inner_memory
from mezzo.engine.processes.shards import local


class SavedTensors:
    """A count of what autograd keeps for the backward pass, by its saved-tensor hooks."""

    def __init__(self) -> None:
        self._hooks: Any = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda kept: kept)
        self._saved: list[tuple[weakref.ref[Tensor], bool]] = []
        """What autograd keeps, and whether it is data: no operation of the graph computed it."""
        self._inputs: list[Tensor] = []
        self._later: list[Callable[[], list[Tensor]]] = []
        self._parameters: set[int] = set()
        self.peak_bytes: int | None = None
        """None until a backward pass has begun while the hooks were on, and where ``torch.func`` kept tensors unseen."""
        self._unseen = False
        self._disabling = torch.autograd.graph.disable_saved_tensors_hooks
        self._patch = patch.object(torch.autograd.graph, "disable_saved_tensors_hooks", self._without_hooks)

    def start(self, parameters: Iterable[Tensor]) -> None:
        """Start counting; storages of ``parameters`` are not activations."""
        self._parameters = {_storage(p) for p in parameters}
        inner_memory.begin()
        self._unseen = False
        self._patch.start()
        self._hooks.__enter__()

    def stop(self) -> None:
        """Remove the hooks."""
        inner_memory.end()
        self._hooks.__exit__(None, None, None)
        self._patch.stop()
        self._saved, self._inputs, self._later = [], [], []

    def keep(self, values: Any) -> None:
        """Count the tensors in ``values`` as kept: the inputs of a checkpointed function."""
        self._inputs += [value for value in tree_leaves(values) if isinstance(value, Tensor)]

    def keep_later(self, kept: Callable[[], list[Tensor]]) -> None:
        """Count the tensors that ``kept`` returns when the backward pass begins."""
        self._later.append(kept)

    def backward_begins(self) -> None:
        """Count now: everything that the forward pass kept is alive."""
        if self._unseen:
            return
        alive = [(tensor, data) for reference, data in self._saved if (tensor := reference()) is not None]
        others = [(t, _is_data(t)) for t in (*self._inputs, *(tensor for kept in self._later for tensor in kept()))]
        activations = [(t, data) for t, data in (*alive, *others) if _storage(t) not in self._parameters]
        self.peak_bytes = max(self.peak_bytes or 0, _kept_bytes(activations))

    def backward_ended(self) -> None:
        """Drop the inputs of checkpointed functions, which the backward pass has freed."""
        self._inputs, self._later = [], []

    @contextmanager
    def _without_hooks(self, message: str) -> Iterator[None]:
        """Disable hooks as torch does for a transformed function, which runs under none; ours are removed until it returns."""
        self._unseen, self.peak_bytes = True, None
        self._hooks.__exit__(None, None, None)
        try:
            with self._disabling(message):
                yield
        finally:
            self._hooks.__enter__()

    def _pack(self, tensor: Tensor) -> Tensor:
        # Packing the tensor itself could make a cycle that is never freed, if it is an output of the node that saves it.
        kept = tensor.detach()
        self._saved.append((weakref.ref(kept), _is_data(tensor)))
        return kept


def _storage(tensor: Tensor) -> int:
    tensor = local(tensor)
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0


def total_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the storages under ``tensors``, each counted once."""
    parts = (part for tensor in tensors for part in _strided(tensor))
    return sum({_storage(part): part.untyped_storage().nbytes() for part in parts}.values())


def _is_data(tensor: Tensor) -> bool:
    return tensor.grad_fn is None and not tensor.requires_grad


def _kept_bytes(tensors: Iterable[tuple[Tensor, bool]]) -> int:
    """Return the bytes kept for ``tensors``, of which some are data.

    A view keeps its whole storage alive. A batch that is a view of a data set keeps nothing more alive: the data set stays in any case,
    even where a cast has copied the batch. So only the batch's own part counts.
    """
    whole: dict[int, int] = {}
    parts: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for part, data in ((part, data) for tensor, data in tensors for part in _strided(tensor)):
        if data:
            parts[_storage(part)].append(_span_bytes(part))
        else:
            whole[_storage(part)] = part.untyped_storage().nbytes()
    return sum(whole.values()) + sum(_union_bytes(spans) for storage, spans in parts.items() if storage not in whole)


def _span_bytes(tensor: Tensor) -> tuple[int, int]:
    """Return where in its storage a tensor's first element begins and its last one ends."""
    size, begin = tensor.element_size(), tensor.storage_offset()
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int(begin * size), int((begin + last + 1) * size if tensor.numel() else begin * size)


def _union_bytes(spans: Iterable[tuple[int, int]]) -> int:
    total, covered = 0, 0
    for begin, end in sorted(spans):
        total += max(0, end - max(begin, covered))
        covered = max(covered, end)
    return total


def _strided(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the strided tensors that store ``tensor``, or this process's shard of it."""
    tensor = local(tensor)
    if tensor.layout is torch.strided:
        yield tensor
    elif tensor.layout is torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())


def optimizer_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of the tensors in an optimizer's state."""
    leaves = [leaf for state in optimizer.state.values() for leaf in tree_leaves(state)]
    return total_bytes(leaf for leaf in leaves if isinstance(leaf, Tensor))


# Where compiled code runs eagerly in the inspected step, that step takes more memory than the others. So the counters are reset when it
# ends; the peaks up to then count only if no further step follows.


@dataclass(frozen=True)
class Peaks:
    """The peaks of each device in bytes, by device number; empty where CUDA is not in use."""

    allocated: tuple[int, ...] = ()
    reserved: tuple[int, ...] = ()


class CudaPeaks:
    """The allocator's peaks over a run."""

    def __init__(self) -> None:
        self._until_reset: Peaks | None = None
        self._num_steps = 0

    def reset(self, num_steps: int) -> None:
        """Reset the counters after ``num_steps`` steps."""
        peaks = _read()
        if peaks.allocated:
            self._until_reset, self._num_steps = peaks, num_steps
            for device in range(len(peaks.allocated)):
                torch.cuda.reset_peak_memory_stats(device)

    def read(self, num_steps: int) -> Peaks:
        """Return the peaks of a run that made ``num_steps`` steps."""
        if self._until_reset is not None and num_steps <= self._num_steps + 1:
            return self._until_reset
        return _read()


def _read() -> Peaks:
    # Only if the process already uses CUDA: the query would initialise it.
    if not torch.cuda.is_initialized():
        return Peaks()
    devices = range(torch.cuda.device_count())
    return Peaks(
        allocated=tuple(torch.cuda.max_memory_allocated(device) for device in devices),
        reserved=tuple(torch.cuda.max_memory_reserved(device) for device in devices),
    )
