"""Identify the graph nodes that are created inside a backward pass, in any thread.

A node of the forward pass is identified by its sequence number. Every thread counts its own nodes, and on a GPU backward passes run in
autograd's own thread. So a node created there, by reentrant checkpointing or for the gradient of a gradient, can have the same number as a
node of the forward pass. Such a node gets an identity of its own, below 0, which is stored in its ``metadata``.

A dispatch mode runs before autograd attaches the node to the result. So the tracer keeps a weak reference to the result, and reads its node
when the next operation runs in this thread or when the script creates a node. A node that no result leads to (that of a view rebuilt after
a write into its base) is given the identity of the node that ran before it, if both run in a nested backward pass.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable
from typing import Any, TypeAlias

from torch import Tensor
from torch.utils.weak import TensorWeakRef

from mezzo.observe.trace import LAST_NUMBER, GraphNode, RunningCall

Results: TypeAlias = list[tuple[TensorWeakRef, int, int, bool]]
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
        self.results: Results = []
        """Results whose nodes are still unknown."""


class BackwardNodes:
    """Identities of the nodes created inside backward passes of an observed step."""

    def __init__(self) -> None:
        self._threads: dict[int, Results] = {}
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


def _mark(results: Results) -> set[int]:
    """Store the identities of the nodes of ``results`` in their metadata, drop those results, and return the identities."""
    assigned: set[int] = set()
    left: Results = []
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
