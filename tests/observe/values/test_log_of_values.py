"""A log of values as a file, and distances where a value has no counterpart or no order."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from mezzo.errors import RecordError
from mezzo.observe.values.log import (
    FOURTHS,
    NO_COUNTERPART,
    NUMBERS,
    SKETCH,
    SQUARES,
    Event,
    Output,
    ValueRead,
    ValuesLog,
    distances,
    rounding,
    rows_of,
)

APART = 8 / 2**0.5
"""64 sums that are 1 apart, over the root of the larger sum of squares."""
FULL = Event(
    "cast",
    3,
    "backward",
    "to",
    "blocks.1",
    "train.py:7",
    settings=("dtype=bf16", "[1, 2]"),
    reads=(ValueRead(0, 1, (5, 2, 3)), ValueRead(1, 0, ())),
    outputs=(Output("bf16", (2, 3)), Output("int64", ())),
    row=4,
    draws=True,
    flops=12,
    error=0.25,
)


def of(*events: Event, numbers: np.ndarray | None = None) -> ValuesLog:
    rows = np.zeros((9, NUMBERS)) if numbers is None else numbers
    return ValuesLog(list(events), np.arange(len(rows)), rows)


def two(one: tuple[int, ...] | None, other: tuple[int, ...] | None, *, further: int = 0) -> ValuesLog:
    """Return a log of two events with a first result of these shapes, and further ones that only the first event has."""
    events = []
    for n, shape in enumerate((one, other)):
        outputs = (Output("fp32", shape or ()), *(Output("fp32", (2,)) for _ in range(0 if n else further)))
        events.append(Event("operation", 1, "forward", "op", "", "", outputs=outputs, row=4 * n))
    numbers = np.ones((9, NUMBERS))
    numbers[4:] *= 2
    return of(*events, numbers=numbers)


def test_everything_is_in_the_file(tmp_path: Path) -> None:
    log = of(FULL, numbers=np.random.default_rng(0).normal(size=(9, NUMBERS)))
    log.numbers[3] = np.nan
    log.points = {"logits#1": np.array([[1.0, -np.inf]]), "logits#2": np.zeros(0)}
    log.environment = {"device": "cpu", "torch": "2"}

    log.save(tmp_path / "new" / "values.npz")
    read = ValuesLog.load(tmp_path / "new" / "values.npz")

    assert read.events == [FULL]
    assert (read.hashes.tolist(), read.environment) == (log.hashes.tolist(), log.environment)
    np.testing.assert_array_equal(read.numbers, log.numbers)
    assert {name: values.tolist() for name, values in read.points.items()} == {
        "logits#1": [[1.0, -np.inf]],
        "logits#2": [],
    }
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["values.npz"]


def test_another_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "values.npz"
    meta = np.frombuffer(json.dumps({"version": 9, "points": []}).encode(), np.uint8)
    np.savez(path, meta=meta, hashes=np.zeros(0), numbers=np.zeros(0))
    with pytest.raises(RecordError) as caught:
        ValuesLog.load(path)
    assert caught.value.message == f"{path} has fingerprints of version 9; this Mezzo reads version 1"
    assert caught.value.hint == "record both runs with one version of Mezzo"


@pytest.mark.parametrize("content", [b"", b"no archive", b"PK\x03\x04 cut"])
def test_another_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "values.npz"
    path.write_bytes(content)
    with pytest.raises(RecordError, match="is not a file of fingerprints: ") as caught:
        ValuesLog.load(path)
    assert caught.value.hint == "record them again"


def test_a_file_without_parts_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "values.npz", hashes=np.zeros(3))
    with pytest.raises(RecordError, match="is not a file of fingerprints: "):
        ValuesLog.load(tmp_path / "values.npz")


def test_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordError) as caught:
        ValuesLog.load(tmp_path / "values.npz")
    assert caught.value.message == f"there are no fingerprints at {tmp_path / 'values.npz'}"
    assert caught.value.hint == "type: mezzo run --fingerprints train.py"


@pytest.mark.parametrize(
    ("one", "other", "further", "expected"),
    [
        ((2, 3), (2, 3), 0, [APART]),
        ((2, 3), (3, 2), 0, [np.inf]),
        ((2, 3, 4), (6, 4), 0, [APART]),  # a batched product, and the product of all rows
        ((2, 3, 4), (2, 12), 0, [np.inf]),
        ((), (1,), 0, [APART]),
        ((2, 3), (2, 3), 2, [APART, 0.0, 0.0]),
        ((2, 3), (4, 3), 2, [np.inf] * 3),
    ],
)
def test_shapes(one: tuple[int, ...], other: tuple[int, ...], further: int, expected: list[float]) -> None:
    log = two(one, other, further=further)
    assert distances(log, log, 0, 1).tolist() == pytest.approx(expected)


def test_rows() -> None:
    assert [rows_of(shape) for shape in ((), (5,), (2, 5), (2, 3, 5))] == [(1, 1), (1, 5), (2, 5), (6, 5)]


@pytest.mark.parametrize(
    ("squares", "fourths", "expected"), [(1.21, 1.0, 0.1 / 1.1), (1.0, 1.1**4, 0.1 / 1.1), (1.0, 1.0, 0.0)]
)
def test_values_without_an_order_are_compared_by_their_sums_of_powers(
    squares: float, fourths: float, expected: float
) -> None:
    log = two((4,), (4,))
    log.numbers[:] = 1.0
    log.numbers[4, [SQUARES, FOURTHS]] = squares, fourths
    log.numbers[:, SKETCH:] = np.nan
    assert distances(log, log, 0, 1)[0] == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_a_value_without_a_counterpart_is_not_apart() -> None:
    log = two((4,), (4,))
    log.numbers[0, SQUARES] = NO_COUNTERPART
    assert distances(log, log, 0, 1).tolist() == [0.0]


def test_rounding_of_nothing_is_nothing() -> None:
    log = two((4,), (4,))
    log.numbers[0, :3] = 0.0
    assert rounding(log, 0).tolist() == [0.0]
