"""The raw record of a step: its operations, the module calls around them, and the graph nodes of its backward pass.

It is interpreted afterwards. A node of the forward pass is identified by its sequence number. Every thread counts its own nodes, and on a
GPU backward passes run in autograd's own thread. So a node created there, by reentrant checkpointing or for the gradient of a gradient, can
have the same number as a node of the forward pass. Such a node gets an identity of its own, below 0, which is stored in its ``metadata``.

A dispatch mode runs before autograd attaches the node to the result. So the tracer keeps a weak reference to the result, and reads its node
when the next operation runs in this thread or when the script creates a node. Some nodes have no result, for example after a write into a
view's base. In a nested backward pass they take the identity of the previous node.
"""

from __future__ import annotations

import bisect
import itertools
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from mezzo.formats import FP32
from mezzo.measure.flops import Counted, lowered

Meta: TypeAlias = tuple[int, torch.dtype, int]
"""The address of a tensor's storage, its dtype and its size in bytes."""

CoveredElements: TypeAlias = tuple[Any, ...]
"""The elements of a storage that a tensor covers: their offset and size, then strides and sizes. Equal for views of the same elements."""

LAST_NUMBER = 2**64 - 1
"""Sequence number of the nodes that accumulate a parameter's gradient: the largest one, so that they run first."""

CAST_NAMES = ("_to_copy", "copy_", "copy")


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
    """Sequence number, or an identity below 0 for a node created inside a backward pass (``BackwardNodes``)."""
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
    """Whether it is not part of the training: Mezzo's own, or absent on the emulated device."""
    by_policy: bool
    """Whether the policy, not the script, cast here."""
    region: CoveredElements
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


def count_formats(counted: Counted, operations: Iterable[tuple[Any, ...]], step: int) -> Counted:
    """Return ``counted`` with the formats in which the operations of one more step ran."""
    by_format, num_lowered = Counter(counted.by_format), counted.num_lowered or 0
    outside, switched_off = counted.outside, counted.switched_off
    for raw in map(RawOperation._make, operations):
        dtypes = [dtype for _, dtype, _ in (*raw.ins, *raw.outs)]
        num_lowered += any(d.is_floating_point and d.itemsize < FP32.dtype.itemsize for d in dtypes)
        product, calls = raw.product, raw.entry.calls
        if product is None:
            continue
        by_format[product.format] += product.flops
        if raw.node is not None or raw.stepping or lowered({product.format: 1}):
            continue
        if not product.nesting:  # neither in a region nor in the script's own autocast
            outside += product.flops
        elif calls and product.nesting > calls[-1].nesting:
            switched_off += product.flops
    return replace(
        counted,
        step=counted.step or step,
        by_format=dict(by_format),
        num_lowered=num_lowered,
        outside=outside,
        switched_off=switched_off,
    )


NumberedResults: TypeAlias = list[tuple[TensorWeakRef, int, int, bool]]
"""Results of operations, each with the number and the identity of its node, and whether a higher number matches as well."""

_KEY = "mezzo: created inside a backward pass"
_IDENTITIES = itertools.count(2)  # -1 means no node


class ThreadNodes(threading.local):
    """A tracer's state in one thread."""

    def __init__(self) -> None:
        self.entry: RunningCall | None = None
        """The innermost running call of a module."""
        self.num_in_backward = 0
        """Number of running modules that were called inside a backward pass."""
        self.number = -1
        """Sequence number of the next node, as of the last operation."""
        self.created = -1
        """Identity of the node that was created last."""
        self.is_marked = True
        """Whether that node already has its identity in its metadata, or needs none."""
        self.running: Any = None
        """The graph node that was running at the last operation."""
        self.node = GraphNode(0, 0)
        """The description of that node."""
        self.outer: int | None = None
        """Number of the backward pass that contains the running one."""
        self.epoch = 0
        """Value of ``BackwardNodes._epoch`` when a node last ran in this thread."""
        self.results: NumberedResults = []
        """Results whose nodes are still unknown."""


class BackwardNodes:
    """Identities of the nodes created inside backward passes of an observed step."""

    def __init__(self) -> None:
        self._threads: dict[int, NumberedResults] = {}
        self._epoch = 0

    def script_created_node(self) -> None:
        """Record that the script creates a node, so no backward pass is running."""
        self._epoch += 1
        for results in self._threads.values():
            if results:
                _mark(results)
                results.clear()

    def new_identity(self, local: ThreadNodes, number: int) -> int:
        """Return a new identity for the node just created in a backward pass; the thread's next node will have ``number``."""
        local.number, local.created, local.is_marked = number, -next(_IDENTITIES), False
        return local.created

    def await_node(self, local: ThreadNodes, args: Any, results: Iterable[Tensor]) -> None:
        """Keep the results of an operation until one of them has the node that was created last in this thread."""
        self._threads[id(local.results)] = local.results
        for result in results:
            # A write into a view attaches the new node to its base.
            base = result._base if args and result is args[0] else None
            reference = TensorWeakRef(result if base is None else base)
            local.results.append((reference, local.number - 1, local.created, base is not None))

    def mark_known(self, local: ThreadNodes) -> None:
        """Mark the nodes of the results that have one by now."""
        if local.created in _mark(local.results):
            local.is_marked = True

    def identity(self, node: Any) -> int:
        """Return the identity of a running node."""
        number: int = node.metadata.get(_KEY, node._sequence_nr()) if self._threads else node._sequence_nr()
        return number

    def describe(self, local: ThreadNodes, running: Any, task: int) -> GraphNode:
        """Return the description of a node that begins to run in backward pass number ``task``."""
        local.results.clear()  # they belong to the node that ran before
        local.is_marked = True
        before, local.running = local.node, running
        if local.epoch != self._epoch:
            local.epoch, local.outer = self._epoch, None
        elif task != before.task:
            local.outer = None if local.outer == task else before.task
        number = running._sequence_nr()
        if number == LAST_NUMBER:
            local.node = GraphNode(number, task, id(getattr(running, "variable", None)))
            return local.node
        identity = running.metadata.get(_KEY) if self._threads else None
        if identity is None and before.number < 0 and before.task == task and local.outer is not None:
            identity = before.number
        local.node = GraphNode(number if identity is None else identity, task)
        return local.node


def _mark(results: NumberedResults) -> set[int]:
    """Store the identities of the nodes of ``results`` in their metadata, drop those results, and return the identities."""
    assigned: set[int] = set()
    left: NumberedResults = []
    for result in results:
        reference, number, identity, or_later = result
        tensor = reference()
        node = None if tensor is None else tensor.grad_fn
        if node is not None and (node._sequence_nr() == number or (or_later and node._sequence_nr() > number)):
            node.metadata.setdefault(_KEY, identity)
            assigned.add(identity)
        elif tensor is not None:
            left.append(result)
    results[:] = [result for result in left if result[2] not in assigned]
    return assigned
