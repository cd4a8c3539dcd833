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


def write_values(values: ObservedValues, path: Path) -> None:
    """Write counted values: of each table, the non-zero entries."""
    contents = {
        "counts": [
            [kind, name, {place: n for place, n in enumerate(counts.table) if n}]
            for (kind, name), counts in values.counts.items()
        ],
        "lowered": sorted(values.lowered),
        "swallowed": dict(values.swallowed),
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
    return ObservedValues(counts=counts, lowered=lowered, **contents)


def values_of_all(by_rank: Sequence[ObservedValues]) -> ObservedValues:
    """Return the values of several processes added up, with the names and steps of the first process."""
    first = by_rank[0]
    keys = dict.fromkeys(key for values in by_rank for key in values.counts)
    names = dict.fromkeys(name for values in by_rank for name in values.swallowed)
    return ObservedValues(
        counts={key: Counts.merged(v.counts[key] for v in by_rank if key in v.counts) for key in keys},
        lowered={key for values in by_rank for key in values.lowered},
        swallowed={
            name: [sum(n) for n in zip(*(v.swallowed[name] for v in by_rank if name in v.swallowed), strict=True)]
            for name in names
        },
        steps=first.steps,
        forced_eager=any(values.forced_eager for values in by_rank),
        updates_seen=any(values.updates_seen for values in by_rank),
        models=first.models,
    )
