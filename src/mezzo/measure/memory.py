"""Count the bytes of a training step by kind, exactly, on any device.

parameters  storages of the parameters that modules and optimizers hold
gradients   what hangs on them when an optimizer steps
optimizer   tensors in the optimizers' state after it
activations what the forward pass keeps for the backward pass: storages that autograd saves, and the inputs of checkpointed functions,
            each storage once and parameters left out

The count of activations is the largest over the backward passes of the step. Autograd's hooks for saved tensors see what it keeps;
those of activation checkpointing lie inside ours, so what it drops is not counted.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves


class SavedTensors:
    """Count what autograd keeps for the backward pass while the hooks are on."""

    def __init__(self) -> None:
        self._hooks: Any = torch.autograd.graph.saved_tensors_hooks(self._pack, _same)
        self._bytes_by_storage: dict[int, int] = {}
        self._parameters: set[int] = set()
        self.peak_bytes = 0

    def start(self, parameters: Iterable[Tensor]) -> None:
        """Begin to count; storages of ``parameters`` are not activations."""
        self._parameters = {_storage(p) for p in parameters}
        self._hooks.__enter__()

    def stop(self) -> None:
        """Take the hooks off."""
        self._hooks.__exit__(None, None, None)

    def keep(self, values: Any) -> None:
        """Count the tensors in ``values`` as kept: the inputs of a checkpointed function."""
        for tensor in tree_leaves(values):
            if isinstance(tensor, Tensor):
                self._count(tensor)

    def backward_begins(self) -> None:
        """Take the count: everything the forward pass kept is alive now."""
        self.peak_bytes = max(self.peak_bytes, sum(self._bytes_by_storage.values()))

    def backward_ended(self) -> None:
        """Forget what was kept: the backward pass has freed it."""
        self._bytes_by_storage.clear()

    def _pack(self, tensor: Tensor) -> Tensor:
        self._count(tensor)
        return (
            tensor.detach()
        )  # the tensor itself could be the output of the node that keeps it: a cycle that is never freed

    def _count(self, tensor: Tensor) -> None:
        if tensor.layout is torch.strided and _storage(tensor) not in self._parameters:
            self._bytes_by_storage[_storage(tensor)] = tensor.untyped_storage().nbytes()


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def total_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the storages under ``tensors``, each counted once."""
    sizes = {_storage(t): t.untyped_storage().nbytes() for t in tensors if t.layout is torch.strided}
    return sum(sizes.values())


def optimizer_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of the tensors in an optimizer's state."""
    leaves = [leaf for state in optimizer.state.values() for leaf in tree_leaves(state)]
    return total_bytes(leaf for leaf in leaves if isinstance(leaf, Tensor))
