"""Damaged records: each is refused with ``RecordError``, or still a record; nothing else is ever raised."""

from __future__ import annotations

import pickle
import random
from pathlib import Path

import pytest

import record_builders as build
from mezzo.errors import RecordError
from mezzo.records import read_record, write_record


@pytest.fixture
def whole(tmp_path: Path) -> bytes:
    write_record(build.doctor_record(), tmp_path / "record.json")
    return (tmp_path / "record.json").read_bytes()


def test_a_record_that_was_cut_off_is_refused(whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "torn.json"
    draw = random.Random(1)
    for length in [0, 1, len(whole) - 1, *draw.sample(range(len(whole)), 300)]:
        path.write_bytes(whole[:length])
        with pytest.raises(RecordError):
            read_record(path)


def test_a_damaged_record_is_refused_or_a_record(whole: bytes, tmp_path: Path) -> None:
    """JSON has no checksum: a changed digit is still a number."""
    path, draw, refused = tmp_path / "damaged.json", random.Random(2), 0
    for _ in range(700):
        damaged = bytearray(whole)
        for _ in range(draw.randrange(1, 8)):
            damaged[draw.randrange(len(damaged))] = draw.randrange(256)
        path.write_bytes(damaged)
        try:
            read_record(path)
        except RecordError:
            refused += 1
    assert refused > 350


def test_a_pickle_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "pickle.json"
    path.write_bytes(pickle.dumps({"kind": "run"}))
    with pytest.raises(RecordError):
        read_record(path)
