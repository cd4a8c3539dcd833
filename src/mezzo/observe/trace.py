"""What is noted of every operation while a step runs; its meaning is worked out afterwards."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn

Meta: TypeAlias = tuple[int, torch.dtype, int]
"""Where a tensor's storage begins, its dtype, and the bytes that it takes."""

LAST_NUMBER = 2**64 - 1
"""Sequence number of the nodes that add to a parameter's gradient: the greatest one, so that they run first."""

CASTS = ("_to_copy", "copy_", "copy")


class Entry:
    """A call of a module that is running, and whether autocast was on when it began."""

    __slots__ = ("again", "autocast", "module", "nesting", "outer")

    def __init__(
        self, module: nn.Module | None, outer: Entry | None, *, autocast: bool, nesting: int, again: bool
    ) -> None:
        self.module, self.outer, self.autocast, self.nesting = module, outer, autocast, nesting
        self.again = again
        """Whether the call was made inside a backward pass."""

    @property
    def calls(self) -> list[Entry]:
        """Return the calls that are running, the innermost first."""
        return [self] if self.outer is None else [self, *self.outer.calls]


NOWHERE = Entry(None, None, autocast=False, nesting=0, again=False)


class Node(NamedTuple):
    """What is known of the graph's node that an operation of a backward pass runs in."""

    number: int
    """Sequence number; of a node that was made inside a backward pass, an identity below 0 (``mezzo.observe.backward_nodes``)."""
    task: int
    """Number of the backward pass."""
    parameter: int = 0
    """Identity of the parameter, of a node that adds to its gradient."""


@dataclass
class TracedProduct:
    """What is known of a matrix product or convolution while it runs."""

    format: str
    flops: int
    operands: list[tuple[tuple[int, ...], tuple[int, ...], int]]
    """Shape, strides and alignment in bytes (up to 16) of each tensor, then of each result."""
    number: int
    """Number of the graph's node, as in ``Node``, of a forward operation."""
    arguments: tuple[Any, ...] = ()
    """The arguments that are no tensors: strides, groups, masks."""
    nesting: int = 0
    """In how many autocast contexts it ran, those that turn autocast off included."""
    callers: tuple[str, ...] = ()
    """Names of torch's Python functions that the operation runs in."""


class Noted(NamedTuple):
    """One recorded operation."""

    func: Any
    entry: Entry
    node: Node | None
    ins: list[Meta]
    outs: list[Meta]
    stepping: bool
    again: bool
    product: TracedProduct | None
    line: str
    hidden: bool
    """Whether it is no operation of the training: Mezzo's own, or one that the device which is emulated would not run."""
    by_policy: bool
    """Whether the policy cast here, and not the script."""


@dataclass
class Trace:
    """The operations of a step, and which module the nodes of its graph belong to."""

    operations: list[tuple[Any, ...]] = field(default_factory=list)
    """The fields of ``Noted``: making its objects at once would cost half as much as the operation."""
    forward: dict[int, Entry] = field(default_factory=dict)
    """The module that ran when a node of the graph was made, by the node's sequence number."""
    recomputed: dict[int, tuple[Entry, Node]] = field(default_factory=dict)
    """The same of nodes that were made inside a backward pass, by their identity, with the node that was running."""
    roots: dict[nn.Module, None] = field(default_factory=dict)
    """Modules that were called from outside any module, in order."""

    def maker(self, node: Node) -> Entry:
        """Return the call of a module that made a node of the graph.

        A node without an operation of its own has the next one's, else the last one's.
        """
        while node.number in self.recomputed:
            entry, node = self.recomputed[node.number]
            if entry is not NOWHERE:  # by a module that ran again, else by the node that ran
                return entry
        if node.number == LAST_NUMBER or not self.forward:
            return NOWHERE
        known = self.forward.get(node.number)
        return self.forward[nearest(sorted(self.forward), node.number)] if known is None else known


def nearest(numbers: Sequence[int], number: int) -> int:
    """Return the first of sorted ``numbers`` that is not below ``number``, else the last one."""
    return numbers[min(bisect.bisect_left(numbers, number), len(numbers) - 1)]
