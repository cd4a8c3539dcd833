"""A training on several GPUs of one machine: the memory of each, and the time of communication. Not validated by measurements.

With data parallelism, each GPU keeps everything, and buckets as large as the gradients. With FSDP2, a rank keeps its share of
parameters, gradients and optimizer state; each layer is gathered before it runs, forward and backward, while the next one is already
being gathered, and its gradients are scattered after its backward pass::

    data parallel   2 (n - 1) / n x gradients       a step, all-reduced
    FSDP2           3 (n - 1) / n x parameters      a step: gathered twice, gradients scattered once

in the bytes of the formats that are sent, over one direction of the link in ``links.csv``. Communication during computation is free
until it takes longer; the first gather and the last scatter overlap with no computation.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Literal, NamedTuple

from mezzo.errors import UsageError
from mezzo.gpus import Gpu
from mezzo.measure.predict.names import SHARDS, Sharding
from mezzo.measure.predict.tape import CostedOperation, MemoryBlock, MemoryKind, TrainingTape
from mezzo.measure.predict.time import family, longer_of

_SHARDED: frozenset[MemoryKind] = frozenset({"parameters", "gradients", "optimizer"})
LINK_SHARE = 0.8
"""Share of a link's speed that is reached; assumed."""
_GATHERED = 2
"""Layers whose parameters are complete at the same time: the running one and the next."""


class Link(NamedTuple):
    """The connection between the GPUs of a machine, or of a GPU with its host."""

    name: str
    bytes_per_s: float
    """One direction, one GPU."""
    source: str


@cache
def _links(to: str) -> dict[str, Link]:
    text = (files("mezzo.measure.predict") / "links.csv").read_text(encoding="utf-8")
    return {
        row["gpu"]: Link(row["link"], float(row["gb_per_s"]) * 1e9, row["source"])
        for row in csv.DictReader(text.splitlines())
        if row["to"] in (to, "both")
    }


def link_of(gpu: Gpu, *, to: Literal["GPUs", "host"] = "GPUs") -> Link:
    """Return the link of ``gpu`` to other GPUs or to its host: its own, or the usual one of its architecture."""
    found = _links(to)
    return found.get(gpu.name) or found[family(gpu.architecture)]


@dataclass(frozen=True)
class GpuGroup:
    """How many GPUs train together, each on a batch of its own."""

    num_gpus: int = 1
    shard: Sharding = "ddp"

    def tape_of_rank(self, tape: TrainingTape) -> TrainingTape:
        """Return what one GPU of the job runs, from the tape of one GPU alone."""
        if self.num_gpus == 1:
            return tape
        return self._sharded(tape) if self.shard == "fsdp" else _with_buckets(tape)

    def communication_s(self, tape: TrainingTape, gpu: Gpu) -> float:
        """Return the seconds that a step of ``tape``, of one GPU alone, sends and receives."""
        if self.num_gpus == 1:
            return 0.0
        times = 3 if self.shard == "fsdp" else 2
        moved = times * (self.num_gpus - 1) / self.num_gpus * _gradient_bytes(tape)
        return moved / (link_of(gpu).bytes_per_s * LINK_SHARE)

    def step_s(self, compute_s: float, communication_s: float, tape: TrainingTape) -> float:
        """Return the seconds of a step whose communication overlaps with its computation, except for one layer."""
        if not communication_s:
            return compute_s
        whole = max(1, sum(tape.units.values()))
        alone = communication_s * min(1.0, max(tape.units.values(), default=whole) / whole)
        return alone + float(longer_of(compute_s, communication_s - alone))

    def _share(self, size: int) -> int:
        return -(-size // self.num_gpus)

    def _sharded(self, tape: TrainingTape) -> TrainingTape:
        in_optimizer = _allocated_in_optimizer(tape)
        blocks = [
            replace(block, size_bytes=self._share(block.size_bytes))
            if block.kind in _SHARDED or number in in_optimizer
            else block
            for number, block in enumerate(tape.blocks)
        ]
        layers = [size for unit, size in tape.units.items() if unit] or [0]
        rest = tape.units.get("", 0)
        whole = [rest, *[max(layers)] * _GATHERED]
        return _with_whole_layers(
            replace(tape, blocks=blocks, operations=[self._updated(op) for op in tape.operations]),
            gathered=whole,
            scattered=[rest, max(layers)],
        )

    def _updated(self, op: CostedOperation) -> CostedOperation:
        if op.phase != "optimizer":
            return op
        return replace(op, read_bytes=self._share(op.read_bytes), written_bytes=self._share(op.written_bytes))


def check_job(num_gpus: int, shard: str) -> GpuGroup:
    """Return the job that options name.

    Raises:
        UsageError: there is no such way to share a training, or a single GPU is to shard it.
    """
    if shard not in SHARDS:
        raise UsageError(f"--shard {shard!r} is not a way to share a training", hint=f"choose from {', '.join(SHARDS)}")
    if num_gpus == 1 and shard == "fsdp":
        raise UsageError("--shard fsdp needs several GPUs", hint="add --gpus-per-job 8")
    return GpuGroup(num_gpus, "fsdp" if shard == "fsdp" else "ddp")


def _gradient_bytes(tape: TrainingTape) -> int:
    """Return the bytes of one step's gradients."""
    begin = tape.step_starts[-1]
    return sum(tape.blocks[e].size_bytes for e in tape.events[begin:] if e >= 0 and tape.blocks[e].kind == "gradients")


def _allocated_in_optimizer(tape: TrainingTape) -> set[int]:
    """Return the numbers of temporary blocks that the optimizer's steps allocate: of the size of what they update."""
    found: set[int] = set()
    for begin in tape.optimizer_starts:
        end = min((index for index in tape.step_starts if index > begin), default=len(tape.events))
        found.update(event for event in tape.events[begin:end] if event >= 0)
    return {number for number in found if tape.blocks[number].kind == "temporaries"}


def _with_buckets(tape: TrainingTape) -> TrainingTape:
    size = _gradient_bytes(tape)
    begin = tape.step_starts[0]
    events = [*tape.events[:begin], len(tape.blocks), *tape.events[begin:]]
    return replace(
        tape,
        blocks=[*tape.blocks, MemoryBlock(size, "temporaries")],
        events=events,
        step_starts=[index + 1 for index in tape.step_starts],
        backward_starts=[index + 1 for index in tape.backward_starts],
        optimizer_starts=[index + 1 for index in tape.optimizer_starts],
    )


def _with_whole_layers(tape: TrainingTape, *, gathered: list[int], scattered: list[int]) -> TrainingTape:
    """Return the tape with whole parameters from each step's start, and whole gradients from its backward pass, to its optimizer."""
    blocks, events = list(tape.blocks), list[int]()
    boundaries = sorted(
        # at the same index an optimizer's step without allocations ends before the next step begins
        [(index, 0, "optimizer") for index in tape.optimizer_starts]
        + [(index, 1, "step") for index in tape.step_starts]
        + [(index, 2, "backward") for index in tape.backward_starts]
    )
    sizes = {"step": gathered, "backward": scattered, "optimizer": list[int]()}
    starts: dict[str, list[int]] = {kind: [] for kind in sizes}
    open_blocks: dict[str, list[int]] = {}
    done = 0
    for index, _, kind in boundaries:
        events += tape.events[done:index]
        done = index
        starts[kind].append(len(events))
        if kind == "optimizer":
            events += [~number for numbers in open_blocks.values() for number in numbers]
            open_blocks = {}
        elif kind not in open_blocks:  # a step may have several backward passes
            open_blocks[kind] = list(range(len(blocks), len(blocks) + sum(map(bool, sizes[kind]))))
            events += open_blocks[kind]
            blocks += [MemoryBlock(size, "temporaries") for size in sizes[kind] if size]
    return replace(
        tape,
        blocks=blocks,
        events=[*events, *tape.events[done:]],
        step_starts=starts["step"],
        backward_starts=starts["backward"],
        optimizer_starts=starts["optimizer"],
    )
