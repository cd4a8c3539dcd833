"""Gains as a check lists them: what was measured, and with how many seeds."""

from __future__ import annotations

import pytest

from mezzo.commands.check.worth import measured_gain
from mezzo.records import Gain, Row


def row(**fields: object) -> Row:
    given = {"policy": "bf16", "num_runs": 2, "num_failed": 0, "verdict": "equivalent", "emulated": False, "reason": ""}
    return Row.model_validate(given | {"speedup": 1.5, "speedup_low": 1.4, "speedup_high": 1.6} | fields)


@pytest.mark.parametrize(("num_runs", "note"), [(1, "median step, 1 seed"), (2, "median step, 2 seeds")])
def test_a_measured_gain_says_how_many_seeds_it_is_of(num_runs: int, note: str) -> None:
    expected = Gain(kind="measured", times=1.5, low=1.4, high=1.6, device="a CPU", note=note)
    assert measured_gain(row(num_runs=num_runs), device="a CPU") == expected


@pytest.mark.parametrize("fields", [{"emulated": True}, {"speedup": None}], ids=str)
def test_what_was_not_timed_has_no_gain(fields: dict[str, object]) -> None:
    assert measured_gain(row(**fields), device="a CPU") is None
