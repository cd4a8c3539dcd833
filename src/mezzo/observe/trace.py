"""The raw record of every operation of a step, which is interpreted afterwards."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn

from mezzo.formats import FP32
from mezzo.measure.effective import Counted
from mezzo.measure.flops import lowered

Meta: TypeAlias = tuple[int, torch.dtype, int]
"""The address of a tensor's storage, its dtype and its size in bytes."""

Region: TypeAlias = tuple[Any, ...]
"""The elements of a storage that a tensor covers: their offset and size, then strides and sizes. Equal for views of the same elements."""

LAST_NUMBER = 2**64 - 1
"""Sequence number of the nodes that accumulate a parameter's gradient: the largest one, so that they run first."""

CASTS = ("_to_copy", "copy_", "copy")


class RunningCall:
    """A running call of a module, and whether autocast was on when it began."""

    __slots__ = ("autocast", "in_backward", "module", "nesting", "outer")

    def __init__(
        self, module: nn.Module | None, outer: RunningCall | None, *, autocast: bool, nesting: int, in_backward: bool
    ) -> None:
        self.module, self.outer, self.autocast, self.nesting = module, outer, autocast, nesting
        self.in_backward = in_backward
        """Whether the module was called inside a backward pass."""

    @property
    def calls(self) -> list[RunningCall]:
        """The running calls of modules, the innermost first."""
        if self is NOWHERE:
            return []
        return [self] if self.outer is None else [self, *self.outer.calls]


NOWHERE = RunningCall(None, None, autocast=False, nesting=0, in_backward=False)


class GraphNode(NamedTuple):
    """The graph node in which an operation of a backward pass runs."""

    number: int
    """Sequence number, or an identity below 0 for a node created inside a backward pass (``mezzo.observe.backward_nodes``)."""
    task: int
    """Number of the backward pass."""
    parameter: int = 0
    """Identity of the parameter, for a node that accumulates a gradient."""


@dataclass
class TracedProduct:
    """A matrix product or convolution, as recorded while it runs."""

    format: str
    flops: int
    operands: list[tuple[tuple[int, ...], tuple[int, ...], int]]
    """Shape, strides and alignment in bytes (up to 16) of each tensor, then of each result."""
    number: int
    """Number of the graph node of a forward operation, as in ``GraphNode``."""
    arguments: tuple[Any, ...] = ()
    """The arguments that are not tensors: strides, groups, masks."""
    nesting: int = 0
    """Number of autocast contexts around it, including those that turn autocast off."""
    callers: tuple[str, ...] = ()
    """Names of torch's Python functions around the operation."""


class RawOperation(NamedTuple):
    """One recorded operation."""

    func: Any
    entry: RunningCall
    node: GraphNode | None
    ins: list[Meta]
    outs: list[Meta]
    stepping: bool
    recomputed: bool
    """Whether activation checkpointing recomputes it."""
    product: TracedProduct | None
    line: str
    hidden: bool
    """Whether it is not part of the training: Mezzo's own, or one that the emulated device would not run."""
    by_policy: bool
    """Whether the policy, not the script, cast here."""
    region: Region
    """The part of its storage that a cast reads, () for other operations: one storage may contain many weights."""
    within: str
    """The function of torch that the script called, if torch implements it with this operation, in its operand's format."""


@dataclass
class Trace:
    """The operations of a step, and the module calls that created the nodes of its graph."""

    operations: list[tuple[Any, ...]] = field(default_factory=list)
    """The fields of ``RawOperation``: building the objects while the step runs would cost half as much as the operations themselves."""
    forward: dict[int, RunningCall] = field(default_factory=dict)
    """The module call that was running when a node was created, by the node's sequence number."""
    recomputed: dict[int, tuple[RunningCall, GraphNode]] = field(default_factory=dict)
    """The same for nodes created inside a backward pass, by identity, with the node that was running."""
    roots: dict[nn.Module, None] = field(default_factory=dict)
    """Modules called from outside any module, in order."""

    def creator(self, node: GraphNode) -> RunningCall:
        """Return the call of the module that created a graph node.

        A node without a recorded operation counts as created by the call that created the next recorded node, or the last one.
        """
        while node.number in self.recomputed:
            entry, node = self.recomputed[node.number]
            if entry is not NOWHERE:  # created by a recomputed module, else by the node that was running
                return entry
        if node.number == LAST_NUMBER or not self.forward:
            return NOWHERE
        known = self.forward.get(node.number)
        return self.forward[nearest(sorted(self.forward), node.number)] if known is None else known

    def reaches_back(self, index: int, number: int) -> bool:
        """Return whether an operation from ``index`` on runs in a graph node that is older than the node of this number."""
        later = (RawOperation._make(values).node for values in self.operations[index:])
        return any(node is not None and 0 <= node.number < number for node in later)


def nearest(numbers: Sequence[int], number: int) -> int:
    """Return the first of sorted ``numbers`` that is not below ``number``, else the last one."""
    return numbers[min(bisect.bisect_left(numbers, number), len(numbers) - 1)]


def count_formats(counted: Counted, operations: Iterable[tuple[Any, ...]], step: int) -> None:
    """Add to ``counted`` in which formats the operations of one step ran."""
    counted.step = counted.step or step
    counted.num_lowered = counted.num_lowered or 0
    for raw in map(RawOperation._make, operations):
        dtypes = [dtype for _, dtype, _ in (*raw.ins, *raw.outs)]
        counted.num_lowered += any(d.is_floating_point and d.itemsize < FP32.dtype.itemsize for d in dtypes)
        product, calls = raw.product, raw.entry.calls
        if product is None:
            continue
        counted.by_format[product.format] = counted.by_format.get(product.format, 0) + product.flops
        if raw.node is not None or raw.stepping or lowered({product.format: 1}):
            continue
        if not product.nesting:  # neither in a region nor in the script's own autocast
            counted.outside += product.flops
        elif calls and product.nesting > calls[-1].nesting:
            counted.switched_off += product.flops
