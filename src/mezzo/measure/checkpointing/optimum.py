"""The plan with the least recomputation within a budget: shortest paths along the forward pass, with two lengths.

A path runs from the first event to the last. At the beginning of a candidate's call it continues without a checkpoint, or jumps to
the call's end: checkpointed, one jump for each thing that the call can keep. A *label* is a path so far: the bytes that it keeps, and
the work that it repeats. A label is kept only if no other with the same remaining choices is better in bytes and work. The choices that
remain depend on which later storages a label keeps already (a block's output is its successor's argument), and on modules that are
called again. Labels beyond the budget are dropped: the bytes up to a call, and those
that it saves when it runs again, are known when the call is passed.

**Guarantee.** The result never exceeds the budget. It is the least costly of all plans over the candidates, unless ``slack`` is above 0:
then labels whose costs differ by less than ``slack / steps`` may be merged, and the result costs at most ``slack`` more than the least.

The cost of running an operation again is its FLOPs, and ``FLOPS_PER_BYTE`` for each byte that it reads or writes.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from mezzo.engine.checkpointing import Keeps
from mezzo.measure.checkpointing.trace import Computed, ForwardTrace, ModuleCall, SavedTensor

FLOPS_PER_BYTE = 156
"""What a GPU computes in 16 bits while it moves a byte: an A100's 312 TFLOP/s over 2.0 TB/s."""
MOST_LABELS = 2000
_SMALLEST_SHARE = 0.002
"""A module that would free less than this share of all that is saved is no candidate."""

KeptStorages: TypeAlias = tuple[tuple[str, Keeps | None], ...]
PlanState: TypeAlias = tuple[frozenset[int], KeptStorages]
"""The basis of a label's future: storages kept that occur later, and choices for modules that are called again."""


class CheckpointCandidate(NamedTuple):
    """A call that may be checkpointed, and how."""

    call: ModuleCall
    regions: dict[Keeps, CheckpointedRegion]


class Label(NamedTuple):
    """The best of some paths to one position."""

    kept_bytes: int
    cost: int
    path: tuple[Label, str, Keeps] | None
    """The label before the last jump, and the jump."""


class TooManyLabels(Exception):
    """There are more labels than an exact search can follow."""


class Optimum(NamedTuple):
    """The plan that was found."""

    regions: dict[str, Keeps]
    slack: int
    """The most by which it may exceed the least cost; 0 if it is the least costly."""
    num_candidates: int


def candidates_of(trace: ForwardTrace, *, smallest_share: float = _SMALLEST_SHARE) -> list[CheckpointCandidate]:
    """Return the calls that may be checkpointed, and would free at least ``smallest_share`` of what a plain pass saves."""
    smallest = smallest_share * bytes_of(trace, saved_in(trace, 0, len(trace.events)))
    refused = {call.module for call in trace.calls if call.refused}
    without_products = {call.module for call in trace.calls if call.products_refused}
    found = []
    for call in trace.calls:
        if call.module in refused:
            continue
        regions = {}
        kept_options: tuple[Keeps, ...] = (
            ("inputs",) if call.module in without_products or not call.products else ("inputs", "products")
        )
        for keeps in kept_options:
            region = region_of(trace, call, keeps)
            if bytes_of(trace, region.resaved - region.kept) + region.cast_bytes - region.copied_bytes > smallest:
                regions[keeps] = region
        if regions:
            found.append(CheckpointCandidate(call, regions))
    # A plan applies to every call of a module, so what it keeps has to be possible in each.
    calls = Counter(call.module for call in trace.calls)
    num_keeping = Counter((one.call.module, keeps) for one in found for keeps in one.regions)
    for one in found:
        for keeps in [k for k in one.regions if num_keeping[one.call.module, k] < calls[one.call.module]]:
            del one.regions[keeps]
    return [one for one in found if one.regions]


def cost_of(region: CheckpointedRegion) -> int:
    """Return the cost of running a call again."""
    return region.flops + FLOPS_PER_BYTE * region.moved_bytes


def forward_cost(trace: ForwardTrace) -> int:
    """Return the cost of the forward pass."""
    return sum(e.flops + FLOPS_PER_BYTE * e.moved_bytes for e in trace.events if isinstance(e, Computed))


def best_plan(trace: ForwardTrace, budget_bytes: int) -> Optimum | None:
    """Return the least costly plan within ``budget_bytes``; None if no plan is."""
    share = _SMALLEST_SHARE
    while True:
        candidates = candidates_of(trace, smallest_share=share)
        for slack in (0, forward_cost(trace) // 100):
            try:
                regions = Paths(trace, candidates, budget_bytes, slack=slack).shortest()
            except TooManyLabels:
                continue
            return None if regions is None else Optimum(regions, slack, len({c.call.module for c in candidates}))
        share *= 4  # too many storages are shared between calls: consider larger modules only


def least_peak(trace: ForwardTrace) -> int:
    """Return the smallest budget that a plan can keep, by bisection."""
    candidates = candidates_of(trace, smallest_share=4 * _SMALLEST_SHARE)
    low, high = 0, bytes_of(trace, saved_in(trace, 0, len(trace.events)))

    def feasible(budget: int) -> bool:
        return Paths(trace, candidates, budget, slack=0, free=True).shortest() is not None

    while high - low > max(1, high // 256):
        middle = (low + high) // 2
        low, high = (low, middle) if feasible(middle) else (middle, high)
    return high


class Paths:
    """The labels of one search."""

    def __init__(
        self,
        trace: ForwardTrace,
        candidates: Sequence[CheckpointCandidate],
        budget_bytes: int,
        *,
        slack: int,
        free: bool = False,
    ) -> None:
        """Prepare a search; ``free`` makes recomputation cost nothing, to see whether the budget can be kept at all."""
        self._trace, self._budget, self._free = trace, budget_bytes, free
        self._positions = sorted({0, len(trace.events), *(p for c in candidates for p in (c.call.begin, c.call.end))})
        self._bucket = slack // len(self._positions)
        self._starting_at: dict[int, list[CheckpointCandidate]] = defaultdict(list)
        for candidate in candidates:
            self._starting_at[candidate.call.begin].append(candidate)
        calls = Counter(c.call.module for c in candidates)
        self._called_again = {name for name, count in calls.items() if count > 1}
        self._inside = {id(c.call): self._several_inside(c, candidates) for c in candidates}
        steps = zip(self._positions[:-1], self._positions[1:], strict=True)
        self._plain = {begin: saved_in(trace, begin, end) for begin, end in steps}
        self._last_use: dict[int, int] = {}
        """The last position at which each storage is used, by a plain step or a jump."""
        self._last_call = {c.call.module: c.call.begin for c in candidates}
        for position, saved in self._plain.items():
            self._note_use(saved, position)
        for c in candidates:
            for region in c.regions.values():
                self._note_use(region.kept | region.resaved, c.call.begin)

    def _several_inside(self, outer: CheckpointCandidate, candidates: Sequence[CheckpointCandidate]) -> tuple[str, ...]:
        begin, end = outer.call.begin, outer.call.end
        within = [c.call for c in candidates if begin <= c.call.begin and c.call.end <= end and c is not outer]
        return tuple(sorted({call.module for call in within} & self._called_again - {outer.call.module}))

    def _note_use(self, storages: Iterable[int], position: int) -> None:
        for storage in storages:
            self._last_use[storage] = max(self._last_use.get(storage, 0), position)

    def shortest(self) -> dict[str, Keeps] | None:
        """Return what each checkpointed module keeps in the least costly plan; None if none is within the budget.

        Raises:
            TooManyLabels: there are more labels than ``MOST_LABELS`` at one position.
        """
        at: dict[int, dict[PlanState, list[Label]]] = {position: {} for position in self._positions}
        at[0] = {(frozenset(), ()): [Label(0, 0, None)]}
        for begin, end in zip(self._positions[:-1], self._positions[1:], strict=True):
            states = {state: self._undominated(labels) for state, labels in at.pop(begin).items()}
            if sum(map(len, states.values())) > MOST_LABELS:
                raise TooManyLabels
            for state, labels in states.items():
                self._extend_plainly(state, labels, begin, end, at[end])
                for candidate in self._starting_at[begin]:
                    for keeps in candidate.regions:
                        self._jump(state, labels, candidate, keeps, at[candidate.call.end])
        finished = [label for labels in at[len(self._trace.events)].values() for label in labels]
        if not finished:
            return None
        found: dict[str, Keeps] = {}
        best: Label = min(finished, key=lambda label: (label.cost, label.kept_bytes))
        while best.path is not None:
            best, name, keeps = best.path
            found[name] = keeps
        return dict(reversed(found.items()))

    def _undominated(self, labels: list[Label]) -> list[Label]:
        kept: list[Label] = []
        lowest = None
        for label in sorted(labels, key=lambda one: (one.kept_bytes, one.cost)):
            cost = label.cost // self._bucket if self._bucket else label.cost
            if lowest is None or cost < lowest:
                kept.append(label)
                lowest = cost
        return kept

    def _extend_plainly(
        self, state: PlanState, labels: list[Label], begin: int, end: int, target: dict[PlanState, list[Label]]
    ) -> None:
        chosen = dict(state[1])
        for candidate in self._starting_at[begin]:
            name = candidate.call.module
            if name in self._called_again and chosen.setdefault(name, None) is not None:
                return
        added = bytes_of(self._trace, self._plain[begin] - state[0])
        next_state = self._state(state[0] | self._plain[begin], chosen, end)
        target.setdefault(next_state, []).extend(
            label._replace(kept_bytes=label.kept_bytes + added)
            for label in labels
            if label.kept_bytes + added <= self._budget
        )

    def _jump(
        self,
        state: PlanState,
        labels: list[Label],
        candidate: CheckpointCandidate,
        keeps: Keeps,
        target: dict[PlanState, list[Label]],
    ) -> None:
        chosen, name, region = dict(state[1]), candidate.call.module, candidate.regions[keeps]
        # No checkpoint within a checkpoint: neither a call inside this one, nor a call that begins here and encloses it.
        around = {c.call.module for c in self._starting_at[candidate.call.begin]} & self._called_again - {name}
        without = [(other, None) for other in {*self._inside[id(candidate.call)], *around}]
        for other, wanted in [*without, *([(name, keeps)] if name in self._called_again else [])]:
            if chosen.setdefault(other, wanted) != wanted:
                return
        kept = state[0] | region.kept
        added = bytes_of(self._trace, region.kept - state[0]) + region.copied_bytes
        resaved = bytes_of(self._trace, region.resaved - kept) + region.cast_bytes + region.copied_bytes
        cost = 0 if self._free else cost_of(region)
        next_state = self._state(kept, chosen, candidate.call.end)
        target.setdefault(next_state, []).extend(
            Label(label.kept_bytes + added, label.cost + cost, (label, name, keeps))
            for label in labels
            if label.kept_bytes + added + resaved <= self._budget
        )

    def _state(self, kept: frozenset[int], chosen: dict[str, Keeps | None], position: int) -> PlanState:
        needed_later = frozenset(storage for storage in kept if self._last_use.get(storage, -1) >= position)
        return needed_later, tuple(sorted((n, k) for n, k in chosen.items() if self._last_call[n] >= position))


# ::
#
#     kept         each storage once: what plain calls saved; the arguments of checkpointed calls, their products' results if
#                  they are kept, and copies of the buffers that they change
#     peak         the largest of ``kept`` and, for each checkpointed call, of what is kept up to its end and what it saves
#                  when it runs again: backward passes run in the reverse order, so what came after is gone by then
#     recomputed   operations of the call before the last tensor that it saves; torch stops there. Not products that are kept
#
# Only tensors that wait for the backward pass count. Gradients, and the working memory of single operations, come on top in every plan,
# checkpointed or not.

Keeping: TypeAlias = Mapping[str, Keeps]
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


def costs_of(trace: ForwardTrace, choice: Keeping) -> Costs:
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
