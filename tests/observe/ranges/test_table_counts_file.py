"""Counted values of several processes, added up."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from mezzo.engine.kernels.exponent_bins import BINS
from mezzo.observe.ranges.table import Counts, ObservedValues, read_values, values_of_all, write_values
from mezzo.records import RangeKind

WEIGHTS: RangeKind = "weights"
UPDATES: RangeKind = "updates"


def seen(seed: int, **fields: Any) -> ObservedValues:
    table = [int(n) for n in np.random.default_rng(seed).integers(0, 3, BINS)]
    known: dict[str, Any] = {
        "counts": {(WEIGHTS, "m.weight"): Counts(table)},
        "lowered": {(WEIGHTS, "m.weight")},
        "swallowed": {"m.weight": [10, 2, seed]},
        "blocks": {("m", "dgrad", "gradient", "mxfp8"): [10.0, seed, 0.0, 0.0, 0.5, 2.0]},
        "steps": [1, 2],
        "forced_eager": False,
        "updates_seen": True,
        "models": ["m"],
    }
    return ObservedValues(**{**known, **fields})


def test_values_come_back_from_their_file(tmp_path: Path) -> None:
    write_values(seen(1), tmp_path / "counts.json")
    assert asdict(read_values(tmp_path / "counts.json")) == asdict(seen(1))  # type: ignore[arg-type]
    assert read_values(tmp_path / "none.json") is None


def test_the_values_of_all_processes_add_up() -> None:
    only = {(UPDATES, "m.bias"): Counts([1] * BINS)}
    one, other = seen(1), seen(2, forced_eager=True)
    other = seen(2, forced_eager=True, counts={**other.counts, **only}, lowered=set(only))
    both = values_of_all([one, other])
    table = np.array(one.counts[WEIGHTS, "m.weight"].table) + np.array(other.counts[WEIGHTS, "m.weight"].table)
    assert list(both.counts[WEIGHTS, "m.weight"].table) == table.tolist()
    assert list(both.counts[UPDATES, "m.bias"].table) == [1] * BINS
    assert both.lowered == {(WEIGHTS, "m.weight"), (UPDATES, "m.bias")}
    assert both.swallowed == {"m.weight": [20, 4, 3]}
    assert both.blocks == {("m", "dgrad", "gradient", "mxfp8"): [20.0, 3, 0.0, 0.0, 1.0, 4.0]}
    assert (both.forced_eager, both.updates_seen, both.steps) == (True, True, [1, 2])
