"""Series of several runs as one line and a band, thinned and whole."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from mezzo.report.charts import data

NAN, INF = math.nan, math.inf


def test_a_band_is_the_mean_and_the_ends_of_all_series_at_each_position() -> None:
    found = data.band_of([[1.0, 2.0, NAN, NAN], [3.0, 5.0, 7.0, INF], [5.0]], data.positions(4))
    assert found.mean[:3] == [3.0, 3.5, 7.0]
    assert math.isnan(found.mean[3])
    assert found.low[:3] == [1.0, 2.0, 7.0]
    assert found.high[:3] == [5.0, 5.0, 7.0]


def test_a_mean_of_large_values_does_not_overflow() -> None:
    assert data.band_of([[1e308], [1.5e308]], data.positions(1)).mean == [pytest.approx(1.25e308)]


def test_thinning_keeps_spikes_and_means() -> None:
    dice = random.Random(0)
    values = [dice.gauss(0, 1) for _ in range(10_000)]
    values[777], values[4001] = 99.0, -50.0
    places = data.positions(len(values))
    assert len(places) <= data.MOST_POINTS
    assert [i for place in places for i in place] == list(range(10_000))
    found = data.band_of([values], places)
    for place, mean, low, high in zip(places, found.mean, found.low, found.high, strict=True):
        own = values[place.start : place.stop]
        assert (low, high) == (min(own), max(own))
        assert mean == pytest.approx(statistics.fmean(own))
    assert (max(found.high), min(found.low)) == (99.0, -50.0)


@pytest.mark.parametrize(
    ("num_steps", "most", "lengths"),
    [(0, 300, []), (3, 300, [1, 1, 1]), (300, 300, [1] * 300), (301, 300, [2] * 150 + [1]), (7, 3, [3, 3, 1])],
)
def test_positions_share_the_steps_evenly(num_steps: int, most: int, lengths: list[int]) -> None:
    assert [len(place) for place in data.positions(num_steps, most=most)] == lengths


def test_stretches_that_are_not_finite() -> None:
    stretches = data.broken_stretches([NAN, 1.0, INF, -INF, 2.0, NAN])
    assert [(s.start, s.stop, s.before) for s in stretches] == [(0, 1, None), (2, 4, 1.0), (5, 6, 2.0)]


def test_a_band_of_means_is_that_of_each_series_mean() -> None:
    found = data.band_of_means([[1.0, 3.0, 8.0], [4.0, NAN, 6.0]], data.positions(3, most=2))
    assert (found.mean, found.low, found.high) == ([3.0, 7.0], [2.0, 6.0], [4.0, 8.0])


def test_small_functions() -> None:
    assert data.thinned(range(9), limit=3) == [0, 4, 8]
    assert data.quantile([1.0, 2.0, 3.0, 5.0], 0.5) == 2.5
    assert data.quantile([7.0], 0.95) == 7.0
    assert [data.points_for(n) for n in (1, 12, 24, 1000)] == [300, 300, 150, 60]
