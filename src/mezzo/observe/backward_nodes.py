"""Know the nodes of the graph that were made inside a backward pass, whichever thread made them.

A node that the forward pass made is known by its sequence number. Every thread counts its nodes for itself, and on a GPU backward
passes run in autograd's own thread: a node that is made there, by reentrant checkpointing or for a gradient's gradient, has a number that a
node of the forward pass may have as well. Such a node gets an identity of its own, below 0, which is written into its ``metadata``.

A dispatch mode runs before autograd gives the result its node. So the result is remembered, weakly, and asked for its node when the next
operation runs in this thread, or when the script makes a node. A node that no result leads to (the view that is made anew after a
write into its base) takes the identity of the node that ran before it, where both run in a backward pass inside another.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable
from typing import Any, TypeAlias

from torch import Tensor
from torch.utils.weak import TensorWeakRef

from mezzo.observe.trace import LAST_NUMBER, Entry, Node

Results: TypeAlias = list[tuple[TensorWeakRef, int, int, bool]]
"""Results of operations, each with the number and the identity of its node, and whether a node with a later number is meant, too."""

_KEY = "mezzo: made inside a backward pass"
_IDENTITIES = itertools.count(2)  # -1 is the number of no node


class ThreadNodes(threading.local):
    """What a tracer knows of one thread."""

    def __init__(self) -> None:
        self.entry: Entry | None = None
        """The innermost call of a module that is running."""
        self.again = 0
        """How many calls of modules are running that were made inside a backward pass."""
        self.number = -1
        """Sequence number that the next node had when the last operation ran."""
        self.made = -1
        """Identity of the last node that was made."""
        self.found = True
        """Whether that node is marked, or needs no mark."""
        self.running: Any = None
        """The node of the graph that ran when the last operation did."""
        self.node = Node(0, 0)
        """What is known of it."""
        self.outer: int | None = None
        """Number of the backward pass inside which the running one was begun."""
        self.epoch = 0
        """How often the script had made nodes when a node ran here."""
        self.results: Results = []
        """Results whose nodes are not known yet."""


class Made:
    """Identities of the nodes that are made inside backward passes while a step is observed."""

    def __init__(self) -> None:
        self._threads: dict[int, Results] = {}
        self._epoch = 0

    def by_script(self) -> None:
        """Record that the script makes a node, so that no backward pass runs."""
        self._epoch += 1
        for results in self._threads.values():
            if results:
                _settle(results)
                results.clear()

    def inside(self, local: ThreadNodes, number: int) -> int:
        """Return the identity of the node that was just made in a backward pass; the next one in this thread has ``number``."""
        local.number, local.made, local.found = number, -next(_IDENTITIES), False
        return local.made

    def expect(self, local: ThreadNodes, args: Any, results: Iterable[Tensor]) -> None:
        """Remember the results of an operation: one of them gets the node that was last made in this thread."""
        self._threads[id(local.results)] = local.results
        for result in results:
            # Of a view that is written into, the node becomes its base's.
            base = result._base if args and result is args[0] else None
            known = TensorWeakRef(result if base is None else base)
            local.results.append((known, local.number - 1, local.made, base is not None))

    def settle(self, local: ThreadNodes) -> None:
        """Mark the nodes that results have by now."""
        if local.made in _settle(local.results):
            local.found = True

    def identity(self, node: Any) -> int:
        """Return the identity of a node that runs."""
        number: int = node.metadata.get(_KEY, node._sequence_nr()) if self._threads else node._sequence_nr()
        return number

    def meet(self, local: ThreadNodes, running: Any, task: int) -> Node:
        """Return what is known of a node that begins to run in backward pass number ``task``."""
        local.results.clear()  # of the node that ran before
        local.found = True
        before, local.running = local.node, running
        if local.epoch != self._epoch:
            local.epoch, local.outer = self._epoch, None
        elif task != before.task:
            local.outer = None if local.outer == task else before.task
        number = running._sequence_nr()
        if number == LAST_NUMBER:
            local.node = Node(number, task, id(getattr(running, "variable", None)))
            return local.node
        identity = running.metadata.get(_KEY) if self._threads else None
        if identity is None and before.number < 0 and before.task == task and local.outer is not None:
            identity = before.number
        local.node = Node(number if identity is None else identity, task)
        return local.node


def _settle(results: Results) -> set[int]:
    """Mark the nodes of results, and keep those that have none yet; return the identities that were given."""
    found: set[int] = set()
    left: Results = []
    for result in results:
        reference, number, identity, or_later = result
        tensor = reference()
        node = None if tensor is None else tensor.grad_fn
        if node is not None and (node._sequence_nr() == number or (or_later and node._sequence_nr() > number)):
            node.metadata.setdefault(_KEY, identity)
            found.add(identity)
        elif tensor is not None:
            left.append(result)
    results[:] = [result for result in left if result[2] not in found]
    return found
