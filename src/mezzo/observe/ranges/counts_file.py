"""Counted values in a file, so that the counts of all processes of a run can be added up. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mezzo.engine.kernels.exponent_bins import BINS
from mezzo.observe.ranges.casts import Counts
from mezzo.observe.ranges.table import ObservedValues
from mezzo.records import RangeKind
from mezzo.records.files import write_whole


def write_values(seen: ObservedValues, path: Path) -> None:
    """Write counted values, with the non-zero entries of each table."""
    value = {
        "counts": [
            [kind, name, {place: n for place, n in enumerate(counts.table) if n}]
            for (kind, name), counts in seen.counts.items()
        ],
        "lowered": sorted(seen.lowered),
        "swallowed": dict(seen.swallowed),
        "steps": seen.steps,
        "forced_eager": seen.forced_eager,
        "updates_seen": seen.updates_seen,
        "models": seen.models,
    }
    write_whole(json.dumps(value), path)


def read_values(path: Path) -> ObservedValues | None:
    """Return the values that ``write_values`` wrote; None if there is no file."""
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    counts: dict[tuple[RangeKind, str], Counts] = {}
    for kind, name, entries in found.pop("counts"):
        table = [0] * BINS
        for place, n in entries.items():
            table[int(place)] = n
        counts[kind, name] = Counts(table)
    lowered = {(kind, name) for kind, name in found.pop("lowered")}
    return ObservedValues(counts=counts, lowered=lowered, **found)


def values_of_all(seen: Sequence[ObservedValues]) -> ObservedValues:
    """Return the values of several processes together; names and steps are the first one's."""
    first = seen[0]
    keys = dict.fromkeys(key for one in seen for key in one.counts)
    names = dict.fromkeys(name for one in seen for name in one.swallowed)
    return ObservedValues(
        counts={key: Counts.together(one.counts[key] for one in seen if key in one.counts) for key in keys},
        lowered={key for one in seen for key in one.lowered},
        swallowed={
            name: [sum(n) for n in zip(*(one.swallowed[name] for one in seen if name in one.swallowed), strict=True)]
            for name in names
        },
        steps=first.steps,
        forced_eager=any(one.forced_eager for one in seen),
        updates_seen=any(one.updates_seen for one in seen),
        models=first.models,
    )
