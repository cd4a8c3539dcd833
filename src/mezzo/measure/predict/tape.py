"""A training as data: blocks of memory in the order they are allocated and freed, and operations with their cost.

A *tape* has no tensors. It is recorded once (``recorder``); then pure functions replay it through an allocator and price it on a GPU.
Two tapes of the same steps at different batch sizes determine every other batch size, because the size of each block and the cost of
each operation is a constant plus a multiple of the batch, or of its square where samples are compared with each other.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Literal, NamedTuple

from mezzo.errors import UsageError

MemoryKind = Literal[
    "parameters", "buffers", "gradients", "optimizer", "activations", "temporaries", "inputs", "workspaces"
]
"""``workspaces`` of size 0 are cuBLAS', whose size depends on the GPU; others are cuDNN's."""
TapePhase = Literal["setup", "inputs", "forward", "backward", "optimizer"]


@dataclass(slots=True)
class MemoryBlock:
    """One tensor's storage, or a workspace."""

    size_bytes: int
    kind: MemoryKind
    matrix_format: str = ""
    """The format of a convolution that needs the block where matrix units compute that format; empty if every device needs it."""

    def is_taken(self, matrix_formats: Collection[str]) -> bool:
        """Return whether a device whose matrix units compute ``matrix_formats`` needs the block."""
        return not self.matrix_format or self.matrix_format in matrix_formats


class ProductSize(NamedTuple):
    """The shape of ``products`` equal matrix products (rows, depth) x (depth, columns), or of a normalisation over the batch.

    A convolution is the product that computes it, one per group; ``window`` is the size of its kernel. An attention is its products of
    queries and keys; the columns are the keys that a query meets on average, and ``window`` the heads that share their keys, if any do.
    A normalisation has a row for each channel, a column for each element of a channel, and no depth. All zeros for other operations.
    """

    products: int = 0
    rows: int = 0
    columns: int = 0
    depth: int = 0
    window: int = 0


ATTENTION_ROWS = 128
"""Queries, and keys, that one block of a fused attention computes together (Dao 2023, arXiv 2307.08691)."""
NO_SHAPE = ProductSize()
_MOST_OMITTED = 2
"""Samples that a linear size may leave out: differences of neighbours leave out one, and rounded halves up to two."""


@dataclass(slots=True)
class CostedOperation:
    """One operation that computes, with its cost on any device."""

    name: str
    phase: TapePhase
    module: str
    format: str
    """The format of its operands."""
    flops: int
    """FLOPs of products and convolutions; 0 for others."""
    read_bytes: int
    written_bytes: int
    shape: ProductSize = NO_SHAPE
    channels_last: bool = False
    """Whether a convolution or a normalisation over the batch computes images that are stored channels-last."""
    unaligned: bool = False
    """Whether the rows of a product's matrices begin elsewhere than at multiples of 16 bytes, which matrix units load at once."""


@dataclass
class TrainingTape:
    """The setup of a training and a few of its steps."""

    batch: int
    blocks: list[MemoryBlock] = field(default_factory=list)
    events: list[int] = field(default_factory=list)
    """In order: ``n`` allocates block n, ``~n`` frees it."""
    operations: list[CostedOperation] = field(default_factory=list)
    """Operations of the last step."""
    step_starts: list[int] = field(default_factory=list)
    """Index into ``events`` at which each step begins."""
    backward_starts: list[int] = field(default_factory=list)
    """The same for each backward pass."""
    optimizer_starts: list[int] = field(default_factory=list)
    """The same for each call of an optimizer."""
    tries_algorithms: bool = False
    """Whether cuDNN may try its algorithms for convolutions."""
    is_compiled: bool = False
    """Whether the step runs as one program, so that the host does not prepare its operations."""
    read_at: list[str] = field(default_factory=list)
    """Lines of a model by name that read a number (``placeholder_numbers``)."""
    sized_at: list[str] = field(default_factory=list)
    """Lines of a model by name where the size of a result depends on numbers (``result_sizes``)."""
    units: dict[str, int] = field(default_factory=dict)
    """Bytes of parameters by the part of the model that sharding gathers together: a layer of a list, or ``""`` for the rest."""

    def at_batch(self, other: TrainingTape, batch: int) -> TrainingTape:
        """Return the tape of the same training at ``batch``, from this tape and ``other`` at another batch size.

        Raises:
            UsageError: the two tapes differ in more than sizes.
        """
        check_same_steps(self, other)

        def scaled(low: int, high: int) -> int:
            return _size_at(batch, (self.batch, low), (other.batch, high))

        return replace(
            self,
            batch=batch,
            blocks=[
                MemoryBlock(scaled(a.size_bytes, b.size_bytes), a.kind, a.matrix_format)
                for a, b in zip(self.blocks, other.blocks, strict=True)
            ],
            operations=[
                CostedOperation(
                    a.name,
                    a.phase,
                    a.module,
                    a.format,
                    scaled(a.flops, b.flops),
                    scaled(a.read_bytes, b.read_bytes),
                    scaled(a.written_bytes, b.written_bytes),
                    ProductSize(*map(scaled, a.shape, b.shape)),
                    a.channels_last,
                    a.unaligned,
                )
                for a, b in zip(self.operations, other.operations, strict=True)
            ],
        )


def stored_channels_last(tape: TrainingTape) -> TrainingTape:
    """Return the tape of the same training with its images stored channels-last."""
    return replace(tape, operations=[replace(operation, channels_last=True) for operation in tape.operations])


def grow_unevenly(one: TrainingTape, other: TrainingTape) -> bool:
    """Return whether the bytes of a block grow faster than the batch."""
    pairs = zip(one.blocks, other.blocks, strict=True)
    return any(_is_curved((one.batch, a.size_bytes), (other.batch, b.size_bytes)) for a, b in pairs)


def _size_at(batch: int, one: tuple[int, int], other: tuple[int, int]) -> int:
    """Return the size at ``batch`` from pairs of batch and size: a constant plus a multiple of the batch, or of its square too."""
    (b1, y1), (b2, y2) = one, other
    if _is_curved(one, other):
        square = (y2 / b2 - y1 / b1) / (b2 - b1)
        found = round(batch * (y1 / b1 + square * (batch - b1)))
    else:
        found = y1 + round((y2 - y1) * (batch - b1) / (b2 - b1))
    return max(min(1, y1), found)


def _is_curved(one: tuple[int, int], other: tuple[int, int]) -> bool:
    """Return whether a size grows faster than the batch: the line through two sizes reaches 0 at more than ``_MOST_OMITTED`` samples."""
    (b1, y1), (b2, y2) = one, other
    slope = (y2 - y1) / (b2 - b1)
    return min(y1, y2) > 0 and slope * b1 - y1 > slope * _MOST_OMITTED


def _without_order(events: Sequence[int]) -> list[int]:
    """Return events with each run of releases in one order: autocast drops its cache of casts in the order of their addresses."""
    runs = groupby(events, key=lambda event: event < 0)
    return [event for freed, run in runs for event in (sorted(run) if freed else run)]


def check_same_steps(one: TrainingTape, other: TrainingTape) -> None:
    """Raise UsageError unless the tapes have the same blocks and operations in the same order."""
    same = (
        _without_order(one.events) == _without_order(other.events)
        and [block.kind for block in one.blocks] == [block.kind for block in other.blocks]
        and [operation.name for operation in one.operations] == [operation.name for operation in other.operations]
    )
    if not same or one.batch == other.batch:
        raise UsageError(
            f"the step at batch {one.batch} and the step at batch {other.batch} run different operations, so other batch "
            "sizes do not follow from them",
            hint="name the batch size to predict",
        )
