"""The bytes that a plan keeps and the work that it repeats, exactly, from the trace of a forward pass.

::

    kept         storages that a plain call saved, and of each checkpointed call its arguments, what its products wrote
                 if it keeps that, and copies of the buffers that it changes; each storage once
    peak         the largest of ``kept`` and, for each checkpointed call, of what is kept up to its end and what it saves
                 when it runs again: backward passes run in the reverse order, so what came after is gone by then
    recomputed   operations of the call before the last tensor that it saves; torch stops there. Not products that are kept

Only tensors that wait for the backward pass count. Gradients, and the working memory of single operations, come on top in every plan,
checkpointed or not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

from mezzo.engine.checkpointing import Keeps
from mezzo.measure.checkpointing.trace import Computed, ForwardTrace, ModuleCall, SavedTensor

Choice: TypeAlias = Mapping[str, Keeps]
"""What each checkpointed module keeps, by name."""


class Costs(NamedTuple):
    """What a forward and a backward pass cost under a plan."""

    kept_bytes: int
    """What waits for the backward pass when it begins."""
    peak_bytes: int
    """The largest number of bytes that wait at any moment of it."""
    recomputed_flops: int
    recomputed_moved_bytes: int
    """What the operations that run again read and write."""


class CheckpointedRegion(NamedTuple):
    """One checkpointed call."""

    kept: frozenset[int]
    """Storages that it keeps."""
    copied_bytes: int
    resaved: frozenset[int]
    """Storages that it saves when it runs again, without casts of weights."""
    cast_bytes: int
    """Bytes of the weights that it casts again and saves."""
    flops: int
    moved_bytes: int


def saved_in(trace: ForwardTrace, begin: int, end: int) -> frozenset[int]:
    """Return the storages that the events from ``begin`` to ``end`` save."""
    events = trace.events[begin:end]
    return frozenset(e.storage for e in events if isinstance(e, SavedTensor) and e.alive and e.storage >= 0)


def region_of(trace: ForwardTrace, call: ModuleCall, keeps: Keeps) -> CheckpointedRegion:
    """Return what ``call`` costs if it is checkpointed."""
    events = trace.events[call.begin : call.end]
    last_saved = max((i for i, event in enumerate(events) if isinstance(event, SavedTensor)), default=0)
    rerun = [e for e in events[:last_saved] if isinstance(e, Computed) and not (keeps == "products" and e.is_product)]
    saved = saved_in(trace, call.begin, call.end)
    return CheckpointedRegion(
        kept=call.arguments | (call.products if keeps == "products" else frozenset()),
        copied_bytes=call.copied_bytes,
        resaved=saved - trace.casts,
        cast_bytes=bytes_of(trace, saved & trace.casts),
        flops=sum(e.flops for e in rerun),
        moved_bytes=sum(e.moved_bytes for e in rerun),
    )


def bytes_of(trace: ForwardTrace, storages: frozenset[int]) -> int:
    """Return the bytes of ``storages``."""
    return sum(trace.sizes[storage] for storage in storages)


def costs_of(trace: ForwardTrace, choice: Choice) -> Costs:
    """Return what ``choice`` costs: a walk along the forward pass. Modules inside a checkpointed one are ignored."""
    kept: frozenset[int] = frozenset()
    copied = peak = flops = moved = position = 0
    for call in trace.calls:
        keeps = choice.get(call.module)
        if keeps is None or call.begin < position:
            continue
        kept |= saved_in(trace, position, call.begin)
        region = region_of(trace, call, keeps)
        kept, copied, position = kept | region.kept, copied + region.copied_bytes, call.end
        # A second pass runs on a copy of the copies.
        peak = max(peak, bytes_of(trace, kept | region.resaved) + region.cast_bytes + copied + region.copied_bytes)
        flops, moved = flops + region.flops, moved + region.moved_bytes
    kept |= saved_in(trace, position, len(trace.events))
    total = bytes_of(trace, kept) + copied
    return Costs(total, max(peak, total), flops, moved)
