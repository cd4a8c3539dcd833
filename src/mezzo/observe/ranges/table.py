"""Build a record of counted values: losses of casts by format and scale, the scale window, updates lost to rounding, and advice.

A loss scale S suits a format if S times the largest gradient does not overflow and few gradients are so small
that S times them becomes zero. Both limits follow from one histogram (``mezzo.engine.kernels.exponent_bins``): multiplying by a
power of two changes only exponents, so the effect of a cast at scale 2**k is read with the format's limits shifted by -k.

Limits: the counts describe rounding a value once. They do not cover sums inside a matrix product in the format, nor products of two
rounded values. Counts from some steps say nothing about gradients that shrink later.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from mezzo.engine.kernels.exponent_bins import (
    BINS,
    CELLS,
    FIRST_EXPONENT,
    ROWS,
    bin_of,
    first_normal,
    first_overflow,
)
from mezzo.formats import BF16, E4M3, E5M2, FORMATS, FP16, Format
from mezzo.observe.settings import SCALE_HEADROOM
from mezzo.policy import Policy
from mezzo.policyfields import LayerProduct, recipe_of
from mezzo.records import (
    GRADIENTS,
    BlockLoss,
    BlockOperand,
    Casts,
    FormatLimits,
    Histogram,
    KindRange,
    Note,
    RangeKind,
    RangesRecord,
    RunRecord,
    ScaleWindow,
    TensorRange,
    UpdateLoss,
)
from mezzo.records.files import write_whole

CAST_TO = (FP16, BF16, E4M3, E5M2)
RANGE_KINDS: tuple[RangeKind, ...] = ("activations", "activation gradients", "weight gradients", "weights", "updates")
_BY_LISTS: tuple[RangeKind, ...] = ("activations", *GRADIENTS)
_NAMED = 3  # tensors that a sentence names
_WORST = 5


BlockKey: TypeAlias = tuple[str, LayerProduct, BlockOperand, str]
"""A layer, one of its products, an operand of that, and a policy."""


@dataclass(frozen=True, kw_only=True)
class ObservedValues:
    """The counts of the observed steps."""

    counts: Mapping[tuple[RangeKind, str], Counts]
    lowered: Collection[tuple[RangeKind, str]]
    """Activations and gradients that have 16 bits under the policy; the op lists keep the others in FP32."""
    swallowed: Mapping[str, list[int]]
    """By parameter: the number of non-zero updates, and how many of them FP16 and BF16 lose."""
    blocks: Mapping[BlockKey, list[float]]
    """What formats in blocks lose of linear layers, if the policy is one of them."""
    steps: list[int]
    forced_eager: bool
    updates_seen: bool
    """Whether an optimizer object made an update."""
    models: list[str]
    """The prefix of the names of each model's tensors."""

    def name(self, full: str) -> str:
        """Return a tensor's displayed name: without the model's class if there is a single model, as in ``fp32_modules`` patterns."""
        return full.removeprefix(f"{self.models[0]}.") if len(self.models) == 1 else full


def ranges_record(run: RunRecord, values: ObservedValues, *, policy: Policy) -> RangesRecord:
    """Return the record of ``values``, judged for ``policy``."""
    target = gradient_format(policy)
    ordered = sorted(values.counts.items(), key=lambda item: RANGE_KINDS.index(item[0][0]))
    tensors = [_tensor(kind, name, counts, policy, values) for (kind, name), counts in ordered]
    gradients = {
        (kind, values.name(name)): counts
        for (kind, name), counts in ordered
        if kind in GRADIENTS and not _kept(kind, name, policy, values)
    }
    windows = [scale_window(gradients, form) for form in CAST_TO]
    if not gradients and any(t.kind in GRADIENTS and t.histogram.nonzero for t in tensors):
        windows = [w.model_copy(update={"reason": f"{policy.name} keeps every gradient in FP32"}) for w in windows]
    updates = update_losses({values.name(name): row for name, row in values.swallowed.items()})
    record = RangesRecord(
        run=run,
        policy=str(policy),
        format=target.name,
        steps_watched=values.steps,
        first_scale=SCALES.start,
        little=LITTLE,
        limits=[_limits(form) for form in CAST_TO],
        kinds=[_kind(kind, values.counts) for kind in RANGE_KINDS if any(k == kind for k, _ in values.counts)],
        tensors=tensors,
        windows=windows,
        updates=updates,
        blocks=_block_losses(values.blocks, values.name),
    )
    return record.model_copy(update={"notes": _notes(record, policy, target, values)})


def gradient_format(policy: Policy) -> Format:
    """Return the format of gradients under ``policy``; if it lowers nothing, FP16, whose range is the question."""
    recipe = recipe_of(policy)
    if recipe is not None and not recipe.by_layer:
        return FORMATS[recipe.gradients.name]
    return policy.storage if policy.lowers else FP16


def _limits(form: Format) -> FormatLimits:
    smallest, normal, largest = (
        math.frexp(number)[1] - 1 for number in (form.min_subnormal, form.min_normal, form.max)
    )
    return FormatLimits(format=form.name, smallest=smallest, normal=normal, largest=largest)


def _activation_format(policy: Policy) -> Format:
    recipe = recipe_of(policy)
    return E4M3 if recipe is not None and not recipe.by_layer else gradient_format(policy)


def scale_window(gradients: Mapping[tuple[RangeKind, str], Counts], target: Format) -> ScaleWindow:
    """Return the loss scales at which these gradients fit ``target``."""
    merged = Counts.merged(gradients.values())
    lowest, highest = merged.lowest(target), merged.highest(target)
    chosen, reason = suggested(merged, target)
    if lowest is None or highest is None:
        return ScaleWindow(format=target.name, reason=reason)
    return ScaleWindow(
        format=target.name,
        lowest=lowest,
        highest=highest,
        suggested=chosen,
        lost_unscaled=merged.lost(target, 0),
        lost=merged.lost(target, highest if chosen is None else chosen),
        reason=reason,
        at_top=_largest({key: counts.overflowed(target, highest + 1) for key, counts in gradients.items()}),
        at_bottom=_largest({key: counts.zeroed(target, highest) for key, counts in gradients.items()}),
    )


def _largest(numbers: Mapping[tuple[RangeKind, str], int]) -> list[str]:
    ordered = sorted((key for key, number in numbers.items() if number), key=lambda key: -numbers[key])
    return [f"{name} ({kind})" for kind, name in ordered[:_NAMED]]


def update_losses(swallowed: Mapping[str, list[int]]) -> list[UpdateLoss]:
    """Return how many updates FP16 and BF16 weights would lose without masters."""
    losses = []
    for place, target in enumerate((FP16, BF16), start=1):
        shares = {name: row[place] / row[0] for name, row in swallowed.items() if row[0] and row[place]}
        worst = sorted(shares, key=lambda name: -shares[name])[:_WORST]
        losses.append(
            UpdateLoss(
                format=target.name,
                num_updates=sum(row[0] for row in swallowed.values()),
                num_swallowed=sum(row[place] for row in swallowed.values()),
                worst={name: shares[name] for name in worst},
            )
        )
    return losses if any(row[0] for row in swallowed.values()) else []


def _block_losses(sums: Mapping[BlockKey, list[float]], name: Callable[[str], str]) -> list[BlockLoss]:
    """Return the record's rows; ``name`` returns a layer's displayed name."""
    rows = []
    for (layer, product, operand, policy), numbers in sums.items():
        values, zeroed, saturated, at_end, error, square = numbers
        rows.append(
            BlockLoss(
                layer=name(layer),
                product=product,
                operand=operand,
                policy=policy,
                values=int(values),
                zeroed=int(zeroed),
                saturated=int(saturated),
                at_end=int(at_end),
                error=error,
                square=square,
            )
        )
    return rows


def _kind(kind: RangeKind, counts: Mapping[tuple[RangeKind, str], Counts]) -> KindRange:
    of_kind = [c for (k, _), c in counts.items() if k == kind]
    merged = Counts.merged(of_kind)
    casts = [merged.casts(target) for target in CAST_TO]
    return KindRange(kind=kind, num_tensors=len(of_kind), histogram=merged.histogram(), casts=casts)


def _tensor(kind: RangeKind, name: str, counts: Counts, policy: Policy, values: ObservedValues) -> TensorRange:
    ends = {form.name: (counts.lowest(form), counts.highest(form)) for form in CAST_TO}
    return TensorRange(
        kind=kind,
        name=values.name(name),
        kept_fp32=_kept(kind, name, policy, values),
        histogram=counts.histogram(),
        lowest={name: low for name, (low, _) in ends.items() if low is not None},
        highest={name: high for name, (_, high) in ends.items() if high is not None},
    )


def _kept(kind: RangeKind, name: str, policy: Policy, values: ObservedValues) -> bool:
    """Return whether ``policy`` keeps a tensor in FP32: by the op lists, or by its module (names begin with the model's class)."""
    if kind in _BY_LISTS and (kind, name) not in values.lowered:
        return True
    _, _, inner = name.partition(".")
    if kind in ("weight gradients", "weights", "updates"):
        inner = inner.rpartition(".")[0]
    parts = inner.split(".")
    modules = [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
    return any(fnmatchcase(module, pattern) for module in modules if module for pattern in policy.fp32_modules)


def _notes(record: RangesRecord, policy: Policy, target: Format, values: ObservedValues) -> list[Note]:
    notes = [*_forward_overflow(record, policy), *_not_finite(record), *_initial_scale(record, policy, target)]
    if values.forced_eager:
        why = "inside compiled kernels a value belongs to no module; fused kernels may also round less often"
        notes.append(Note(what="torch.compile", value="compiled code ran eagerly in the observed steps", reason=why))
    if not values.updates_seen:
        why = "the script has no torch optimizer: updates by hand are not seen"
        notes.append(Note(what="updates", value="not counted", reason=why))
    if not any(t.kind == "activations" for t in record.tensors):
        why = "the script calls no module in its training steps: values outside modules are not seen"
        if policy.lowers:
            why += f", and {policy.name} lowers none of them. Call a model as model(x), not as model.forward(x)"
        notes.append(Note(what="activations", value="not counted", reason=why))
    return notes


def _forward_overflow(record: RangesRecord, policy: Policy) -> Iterable[Note]:
    """Yield a note on forward values that no loss scale can help."""
    form = _activation_format(policy)
    if policy.in_layers:  # operands are scaled tensor by tensor
        return
    over = [t for t in record.tensors if t.kind in ("activations", "weights") and not t.kept_fp32]
    over = [t for t in over if t.highest.get(form.name, 0) < 0]
    if over:
        over.sort(key=lambda t: t.highest[form.name])
        names = ", ".join(f"{t.name} (up to 2^{t.histogram.last_exponent + 1})" for t in over[:_NAMED])
        more = f" and {len(over) - _NAMED} more" if len(over) > _NAMED else ""
        why = "a loss scale moves gradients only: keep these modules in FP32 (fp32_modules=...), or use bf16"
        yield Note(what="forward overflow", value=f"{names}{more} beyond {form.name}'s {form.max:g}", reason=why)


def _not_finite(record: RangesRecord) -> Iterable[Note]:
    broken = [t for t in record.tensors if t.histogram.infinite or t.histogram.nan]
    if broken:
        names = ", ".join(f"{t.name} ({t.kind})" for t in broken[:_NAMED])
        why = "no other format helps against overflow in FP32: check these operations first"
        yield Note(what="not finite", value=f"in FP32 already: {names}", reason=why)


def _initial_scale(record: RangesRecord, policy: Policy, target: Format) -> Iterable[Note]:
    """Compare the policy's own initial scale with the window."""
    window = next(w for w in record.windows if w.format == target.name)
    if policy.loss_scale == "none" or window.highest is None or window.lowest is None or window.empty:
        return
    scale = policy.init_scale
    if scale > 2.0**window.highest:
        how = (
            "is halved until it fits, and each halving loses an update"
            if policy.loss_scale == "dynamic"
            else "never changes"
        )
        yield Note(
            what="policy's loss scale",
            value=f"{scale:g} overflows",
            reason=f"the window ends at 2^{window.highest}; it {how}",
        )
    elif scale < 2.0**window.lowest:
        why = (
            f"the window begins at 2^{window.lowest}; pass {policy.name}:init_scale={2.0 ** (window.suggested or 0):g}"
        )
        yield Note(what="policy's loss scale", value=f"{scale:g} is too small", reason=why)


def write_values(values: ObservedValues, path: Path) -> None:
    """Write counted values: of each table, the non-zero entries."""
    contents = {
        "counts": [
            [kind, name, {place: n for place, n in enumerate(counts.table) if n}]
            for (kind, name), counts in values.counts.items()
        ],
        "lowered": sorted(values.lowered),
        "swallowed": dict(values.swallowed),
        "blocks": [[*key, sums] for key, sums in values.blocks.items()],
        "steps": values.steps,
        "forced_eager": values.forced_eager,
        "updates_seen": values.updates_seen,
        "models": values.models,
    }
    write_whole(json.dumps(contents), path)


def read_values(path: Path) -> ObservedValues | None:
    """Return the values that ``write_values`` wrote; None if there is no file."""
    try:
        contents: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    counts: dict[tuple[RangeKind, str], Counts] = {}
    for kind, name, entries in contents.pop("counts"):
        table = [0] * BINS
        for place, n in entries.items():
            table[int(place)] = n
        counts[kind, name] = Counts(table)
    lowered = {(kind, name) for kind, name in contents.pop("lowered")}
    blocks = {tuple(key): sums for *key, sums in contents.pop("blocks")}
    return ObservedValues(counts=counts, lowered=lowered, blocks=blocks, **contents)


def _added(tables: Sequence[Mapping[Any, list[Any]]]) -> dict[Any, list[Any]]:
    """Return the rows of several processes, those under one key added up."""
    keys = dict.fromkeys(key for table in tables for key in table)
    return {key: [sum(n) for n in zip(*(t[key] for t in tables if key in t), strict=True)] for key in keys}


def values_of_all(by_rank: Sequence[ObservedValues]) -> ObservedValues:
    """Return the values of several processes added up, with the names and steps of the first process."""
    first = by_rank[0]
    keys = dict.fromkeys(key for values in by_rank for key in values.counts)
    return ObservedValues(
        counts={key: Counts.merged(v.counts[key] for v in by_rank if key in v.counts) for key in keys},
        lowered={key for values in by_rank for key in values.lowered},
        swallowed=_added([values.swallowed for values in by_rank]),
        blocks=_added([values.blocks for values in by_rank]),
        steps=first.steps,
        forced_eager=any(values.forced_eager for values in by_rank),
        updates_seen=any(values.updates_seen for values in by_rank),
        models=first.models,
    )


SCALES = range(-24, 41)
"""Exponents of the scales that a record lists."""
LITTLE = 0.01
"""Share of the non-zero gradient values that may become zero inside the window."""
MAX_SUGGESTED = 24
"""Exponent of the largest scale suggested: the ceiling of ``DynamicScale``."""
_SEARCHED = range(-400, 401)  # outside it no FP32 value can be scaled into any format


@dataclass(frozen=True)
class Counts:
    """A table of ``exponent_bins`` for the values of one tensor, or of several together."""

    table: Sequence[int]

    @classmethod
    def merged(cls, parts: Iterable[Counts]) -> Counts:
        """Return the counts of all parts as one."""
        tables = [part.table for part in parts]
        return cls([int(n) for n in np.sum(np.array(tables, dtype=np.int64), axis=0)] if tables else [0] * BINS)

    @cached_property
    def _below(self) -> list[int]:
        """For every bin, how many finite non-zero values lie in the bins before it."""
        finite = self.table[CELLS : (ROWS - 1) * CELLS]
        return [0] * CELLS + list(accumulate(finite, initial=0))

    @property
    def nonzero(self) -> int:
        """How many values are finite and not zero."""
        return self._below[-1]

    def zeroed(self, target: Format, scale: int) -> int:
        """Return how many non-zero values times ``2**scale`` become zero in ``target``; half the smallest subnormal number does, too."""
        half_smallest = -target.bias - target.mantissa_bits
        return self._below[bin_of(half_smallest - scale, 1)]

    def subnormal(self, target: Format, scale: int) -> int:
        """Return how many non-zero values times ``2**scale`` become a subnormal number other than zero."""
        exponent, mantissa = first_normal(target)
        return self._below[bin_of(exponent - scale, mantissa)] - self.zeroed(target, scale)

    def overflowed(self, target: Format, scale: int) -> int:
        """Return how many finite values times ``2**scale`` overflow in ``target``."""
        exponent, mantissa = first_overflow(target)
        return self.nonzero - self._below[bin_of(exponent - scale, mantissa)]

    def lost(self, target: Format, scale: int) -> float:
        """Return the share of non-zero values that become zero."""
        return self.zeroed(target, scale) / self.nonzero if self.nonzero else 0.0

    def highest(self, target: Format) -> int | None:
        """Return the exponent of the largest scale at which nothing overflows; None if all values are zero."""
        if not self.nonzero:
            return None
        return _last(_SEARCHED, lambda scale: self.overflowed(target, scale) == 0)

    def lowest(self, target: Format) -> int | None:
        """Return the exponent of the smallest scale at which at most the share ``LITTLE`` becomes zero."""
        if not self.nonzero:
            return None
        return -_last(_SEARCHED, lambda scale: self.lost(target, -scale) <= LITTLE)

    def casts(self, target: Format) -> Casts:
        """Return the effect of casts to ``target`` at each of ``SCALES``."""
        return Casts(
            format=target.name,
            zeroed=[self.zeroed(target, s) for s in SCALES],
            subnormal=[self.subnormal(target, s) for s in SCALES],
            overflowed=[self.overflowed(target, s) for s in SCALES],
        )

    def histogram(self) -> Histogram:
        """Return the counts by whole exponents, from the smallest value's to the largest's."""
        rows = [sum(self.table[row * CELLS : (row + 1) * CELLS]) for row in range(1, ROWS - 1)]
        used = [i for i, n in enumerate(rows) if n]
        top = (ROWS - 1) * CELLS
        return Histogram(
            first_exponent=FIRST_EXPONENT + used[0] if used else 0,
            counts=rows[used[0] : used[-1] + 1] if used else [],
            zeros=self.table[0],
            infinite=self.table[top],
            nan=sum(self.table[top + 1 :]),
        )


def _last(candidates: range, condition: Callable[[int], bool]) -> int:
    """Return the last candidate for which ``condition`` is true; it is true up to some candidate and false after that."""
    low, high = candidates.start, candidates.stop - 1
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if condition(middle) else (low, middle - 1)
    return low


def suggested(counts: Counts, target: Format) -> tuple[int | None, str]:
    """Return the exponent of the initial loss scale for gradients with these counts, and why; None if none fits."""
    highest, lowest = counts.highest(target), counts.lowest(target)
    if highest is None or lowest is None:
        return None, "every gradient is zero"
    if lowest > highest:
        lost = counts.lost(target, highest)
        return (
            None,
            f"at 2^{highest}, the largest scale without overflow, {lost:.1%} of the non-zero values become zero",
        )
    if highest >= 0 and not counts.zeroed(target, 0) and counts.subnormal(target, 0) <= LITTLE * counts.nonzero:
        return 0, "nothing becomes zero and hardly anything subnormal without a loss scale"
    chosen = max(lowest, min(highest - SCALE_HEADROOM, MAX_SUGGESTED))
    room = highest - chosen
    return chosen, f"{room} doublings below the first overflow; fewer values become zero the larger the scale is"
