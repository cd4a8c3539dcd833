"""The norm of several norms."""

from __future__ import annotations

import math

import pytest

from mezzo.measure.steps import _together


@pytest.mark.parametrize(("norms", "together"), [([3.0, 4.0], 5.0), ([2.0], 2.0), ([0.0], 0.0)])
def test_norms_of_several_optimizers_make_one(norms: list[float], together: float) -> None:
    assert _together(norms) == together


def test_a_step_without_a_norm_has_none() -> None:
    assert math.isnan(_together([]))
