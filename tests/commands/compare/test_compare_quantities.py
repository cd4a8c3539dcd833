"""The statistics of a comparison against scipy, exact cases and brute force: intervals, tests, margins, scales."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from helpers_compare import judge, row_of, run, series, with_metric
from mezzo.commands.compare.judge import MAX_SEEDS, seeds_needed
from mezzo.commands.compare.quantities import (
    Absolute,
    DifferenceScale,
    Margin,
    MetricGrid,
    Proportion,
    Quantity,
    Ratio,
    grid_of,
    scale_of_metric,
    spread_errors,
    spread_of,
    unaveraged,
)
from mezzo.records import Metric

many = settings(max_examples=60, deadline=None)


def quantity(differences: list[float], margin: float, *, spread: float = 0.0) -> Quantity:
    pairs = tuple((difference, 0.0) for difference in differences)
    return Quantity(name="loss", pairs=pairs, scale=Absolute(), margin=Margin(share=margin, why="", spread=spread))


# --- intervals ----------------------------------------------------------------------------------------------------


def test_the_interval_of_a_loss_is_scipys_paired_interval_of_logarithms() -> None:
    base, other = [0.31, 0.36, 0.29, 0.33], [0.335, 0.342, 0.318, 0.371]
    found = row_of(series("fp32", base) + series("bf16", other)).loss
    oracle = stats.ttest_rel(np.log(other), np.log(base)).confidence_interval(0.95)
    assert found is not None
    assert (found.low, found.high) == pytest.approx((math.expm1(oracle.low), math.expm1(oracle.high)), rel=1e-9)
    assert (found.value, found.baseline) == pytest.approx((stats.gmean(other), stats.gmean(base)))
    assert found.difference == pytest.approx(found.value / found.baseline - 1)
    assert found.scale == "ratio"


def test_the_interval_of_a_loss_below_zero_is_of_the_values() -> None:
    base, other = [-3.1, -3.6, -2.9], [-3.0, -3.65, -2.8]
    found = row_of(series("fp32", base) + series("bf16", other)).loss
    oracle = stats.ttest_rel(other, base).confidence_interval(0.95)
    assert found is not None
    assert (found.low, found.high) == pytest.approx((oracle.low, oracle.high), rel=1e-9)
    assert (found.scale, found.margin) == ("absolute", pytest.approx(0.5 / 6.71))  # the seeds lie 0.5 apart


def test_the_interval_of_an_accuracy_is_of_its_angles() -> None:
    base, other = [0.9512, 0.9533, 0.9478], [0.9507, 0.9541, 0.9489]
    found = row_of(with_metric("fp32", base, name="accuracy") + with_metric("bf16", other, name="accuracy")).metric
    angles = [2 * np.arcsin(np.sqrt(side)) for side in (other, base)]
    oracle = stats.ttest_rel(*angles).confidence_interval(0.95)
    # The deviation of the differences is above half a step of 0.0001, and the seeds of each side spread over many steps.
    middle = angles[1].mean()
    assert found is not None
    ends = [np.sin((middle + end) / 2) ** 2 - np.sin(middle / 2) ** 2 for end in (oracle.low, oracle.high)]
    assert (found.low, found.high) == pytest.approx(ends, rel=1e-9)
    assert found.difference == pytest.approx(found.value - found.baseline)


@pytest.mark.parametrize(("ours", "deviation"), [([1.0, 1.0], 0.25), ([1.0, 3.0], math.sqrt(2))])
def test_a_deviation_is_never_below_half_a_step(ours: list[float], deviation: float) -> None:
    """Printed digits hide what the seeds differ by."""
    pairs = tuple((value, 1.0) for value in ours)
    margin = Margin(share=1.0, why="", spread=0.0)
    found = Quantity(name="acc", pairs=pairs, scale=Absolute(), margin=margin, grid=MetricGrid(step=0.5))
    assert found.deviation == pytest.approx(deviation)


@many
@given(
    differences=st.lists(st.integers(-64, 64).map(lambda n: n / 16), min_size=2, max_size=8).filter(
        lambda d: len(set(d)) > 1
    ),
    margin=st.integers(1, 64).map(lambda n: n / 16 + 0.01),
)
def test_equivalence_is_two_one_sided_tests_at_four_percent(differences: list[float], margin: float) -> None:
    above = stats.ttest_1samp(differences, -margin, alternative="greater").pvalue
    below = stats.ttest_1samp(differences, margin, alternative="less").pvalue
    assert quantity(differences, margin).is_inside() == (max(above, below) <= 0.04)


@many
@given(
    differences=st.lists(st.integers(-64, 64).map(lambda n: n / 16), min_size=2, max_size=8).filter(
        lambda d: len(set(d)) > 1
    ),
    margin=st.integers(1, 64).map(lambda n: n / 16 + 0.01),
    num_quantities=st.integers(1, 4),
)
def test_a_difference_is_one_tests_share_of_five_percent(
    differences: list[float], margin: float, num_quantities: int
) -> None:
    above = stats.ttest_1samp(differences, margin, alternative="greater").pvalue
    below = stats.ttest_1samp(differences, -margin, alternative="less").pvalue
    found = quantity(differences, margin).is_beyond(num_quantities=num_quantities)
    assert found == (min(above, below) < 0.025 / num_quantities)


@many
@given(
    differences=st.lists(st.integers(-64, 64).map(lambda n: n / 16), min_size=2, max_size=8),
    margin=st.integers(1, 64).map(lambda n: n / 16),
)
def test_the_sign_of_the_difference_does_not_matter(differences: list[float], margin: float) -> None:
    q, mirrored = quantity(differences, margin), quantity([-d for d in differences], margin)
    low, high = q.interval()
    assert mirrored.interval() == (-high, -low)
    assert (q.is_inside(), q.is_beyond(num_quantities=1)) == (
        mirrored.is_inside(),
        mirrored.is_beyond(num_quantities=1),
    )


# --- margins ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("places", "spread"),
    [([1.0], 0.0), ([1.0, 3.5], 2.5), ([0.0, 1.0, 5.0], 4.0), ([0.0, 1.0, 2.0, 9.0], 4.5), ([2.0, 2.0, 2.0], 0.0)],
)
def test_the_spread_is_the_median_distance_of_pairs(places: list[float], spread: float) -> None:
    distances = [abs(a - b) for a, b in itertools.combinations(places, 2)]
    assert spread_of(np.array(places)) == spread == (float(np.median(distances)) if distances else 0.0)


@pytest.mark.parametrize("num_seeds", [2, 3, 4, 6, 9, 14, pytest.param(25, marks=pytest.mark.slow)])
def test_the_error_of_the_spread_is_that_of_simulated_seeds(num_seeds: int) -> None:
    rng = np.random.default_rng(num_seeds)
    first, second = np.triu_indices(num_seeds, 1)

    def simulated(noise: np.ndarray) -> np.ndarray:
        return np.median(np.abs(noise[:, first] - noise[:, second]), axis=1)

    normal = simulated(rng.standard_normal((60_000, num_seeds))) / (math.sqrt(2) * stats.norm.ppf(0.75))
    for quantile in (0.0125, 0.025):
        assert spread_errors(np.asarray(quantile), num_seeds) == pytest.approx(np.quantile(normal, quantile), rel=0.06)
    heavy = rng.standard_t(3, (60_000, num_seeds))
    true = 0.6980 * math.sqrt(3)  # of Student's t with 3 degrees of freedom: the median of four million pairs
    too_wide = Margin(share=0.0, why="").lower_bound(num_seeds, simulated(heavy)) > true
    assert np.mean(too_wide) == pytest.approx(0.01, abs=0.003)


def test_a_margin_is_the_share_or_the_spread_whichever_is_wider() -> None:
    assert Margin(share=0.02, why="", spread=0.05).lower_bound(3) == 0.02  # a seventh of it counts of three seeds
    assert Margin(share=0.02, why="", spread=0.671).lower_bound(3) == pytest.approx(0.1)
    assert Margin(share=0.02, why="", spread=0.671, step=0.2).lower_bound(3) == pytest.approx(0.471 / 6.71)
    assert Margin(share=0.02, why="").upper_bound(3, error=0.025) == 0.02
    assert Margin(share=0.02, why="", spread=1.0).upper_bound(2, error=0.025) == pytest.approx(1 / 0.0463, rel=0.01)


@pytest.mark.parametrize(
    ("base", "margin", "why"),
    [
        ([5.0] * 2 + [1.0] * 18, 0.02, ""),  # a share of the final loss, however far it fell
        ([5.0] * 2 + [1e-6] * 18, 0.02, ""),
        ([5.0] * 20, 0.02, ""),  # no progress: nothing to take a share of
        ([2.3] * 2 + [2.28] * 18, 5 * 0.02 * 0.02 / 2.28, "10% of what training took off"),
        ([-2.3] * 2 + [-2.4] * 18, 5 * 0.02 * 0.1, "10% of what training took off"),
        ([3.0] * 2 + [0.0] * 18, 3.0 * 2.0**-23, "what FP32 resolves of the loss at the start"),
    ],
)
def test_the_margin_of_a_loss(base: list[float], margin: float, why: str) -> None:
    runs = [run("fp32", base, seed=seed) for seed in range(2)]
    other = [run("bf16", [*base[:-1], base[-1] + 1e-9], seed=seed) for seed in range(2)]
    row = row_of(runs + other)
    assert row.loss is not None
    assert row.loss.margin == pytest.approx(margin, rel=1e-9)
    assert (f"({why})" in row.reason) == bool(why)


def test_final_losses_of_another_order_are_not_equivalent() -> None:
    base = series("fp32", [1.8e-14, 2.2e-14, 1.5e-14])
    row = row_of(base + series("bf16", [3e-5, 2e-5, 4e-5]))
    assert row.verdict == "different"
    assert "1.59e+09 times" in row.reason


def test_a_policy_that_learns_half_in_a_short_run_is_not_equivalent() -> None:
    starts = [2.301, 2.302, 2.304]
    base = [run("fp32", [a] * 2 + [a - 0.02] * 18, seed=seed) for seed, a in enumerate(starts)]
    half = [run("bf16", [a] * 2 + [a - 0.01] * 18, seed=seed) for seed, a in enumerate(starts)]
    frozen = [run("fp16-pure", [a] * 2 + [a - 0.001] * 18, seed=seed) for seed, a in enumerate(starts)]
    rows = {row.policy: row for row in judge(base + half + frozen).rows}
    assert rows["bf16"].verdict == "different"  # 0.4% of the loss, but half of what was learned
    assert rows["fp16-pure"].verdict == "stopped_learning"


# --- scales and steps of metrics ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "values", "scale"),
    [
        ("acc", [0.95, 0.2], Proportion(1.0)),
        ("test Accuracy", [95.0, 20.0], Proportion(100.0)),
        ("val_acc", [0.5], Proportion(1.0)),
        ("valAcc", [0.5], Proportion(1.0)),
        ("top-1 acc", [76.1], Proportion(100.0)),
        ("Prec@1", [76.1], Proportion(100.0)),
        ("error", [0.05], Proportion(1.0)),
        ("error rate", [4.9], Proportion(100.0)),
        ("error", [4.9], Ratio()),  # of what? stricter than as percent
        ("mean squared error", [0.05], Ratio()),
        ("rel error", [0.05], Ratio()),
        ("test loss", [0.05], Ratio()),
        ("perplexity", [23.4], Ratio()),
        ("loss", [0.0, 0.1], Absolute()),
        ("reward", [195.0], Absolute()),
        ("score", [0.93], Proportion(1.0)),
        ("score", [0.13], Ratio()),  # the stricter of the two
        ("BLEU", [27.3], Ratio()),
        ("R2", [-0.3, 0.2], Absolute()),
        ("acc", [120.0], Ratio()),
        ("accuracy", [0.0, 1.0], Proportion(1.0)),  # both ends belong to a proportion
        ("accuracy", [0.0, 100.0], Proportion(100.0)),
    ],
)
def test_the_scale_of_a_metric(name: str, values: list[float], scale: DifferenceScale) -> None:
    assert scale_of_metric(Metric(name=name, pattern=""), values) == scale


def test_a_percent_sign_makes_a_proportion() -> None:
    assert scale_of_metric(Metric(name="error", pattern="", percent=True), [4.9]) == Proportion(100.0)


@pytest.mark.parametrize("accuracies", [([0.95, 0.953, 0.948], [0.951, 0.953, 0.949]), ([0.99, 0.98], [0.8, 0.81])])
@pytest.mark.parametrize("unit", [1, 100])
def test_an_error_rate_and_an_accuracy_agree(accuracies: tuple[list[float], list[float]], unit: int) -> None:
    def metric(name: str, *, as_error: bool) -> str:
        sides = [[unit * ((1 - a) if as_error else a) for a in side] for side in accuracies]
        runs = [
            r
            for p, s in zip(("fp32", "bf16"), sides, strict=True)
            for r in with_metric(p, [round(v, 9) for v in s], name=name)
        ]
        return row_of(runs)

    accuracy, error = metric("accuracy", as_error=False), metric("error rate", as_error=True)
    assert accuracy.metric is not None
    assert error.metric is not None
    assert (accuracy.verdict, accuracy.seeds_needed) == (error.verdict, error.seeds_needed)
    for ours, theirs in (("difference", "difference"), ("low", "high"), ("high", "low")):
        assert getattr(accuracy.metric, ours) == pytest.approx(-getattr(error.metric, theirs), rel=1e-6)
    assert accuracy.metric.margin == pytest.approx(error.metric.margin, rel=1e-6)
    assert accuracy.metric.value + error.metric.value == pytest.approx(unit)


def test_the_margin_of_a_proportion_is_cohens_h() -> None:
    found = row_of(with_metric("fp32", [0.5, 0.5], name="acc") + with_metric("bf16", [0.6, 0.6], name="acc")).metric
    assert found is not None
    assert found.margin == pytest.approx(math.sin(math.pi / 4 + 0.01) ** 2 - 0.5)  # 1 point at 50%
    h = 2 * math.asin(math.sqrt(0.6)) - 2 * math.asin(math.sqrt(0.5))
    assert Proportion(1.0).to_scale([0.6])[0] - Proportion(1.0).to_scale([0.5])[0] == pytest.approx(h)


@pytest.mark.parametrize(
    ("values", "scale", "grid"),
    [
        ([0.95, 0.953], Proportion(1.0), MetricGrid(step=0.001)),
        ([k / 360 for k in (343, 351, 340)], Proportion(1.0), MetricGrid(step=1 / 360, num_examples=360)),
        ([round(k / 359, 4) for k in (343, 351, 340, 355, 356, 320)], Proportion(1.0), MetricGrid(step=1 / 359, num_examples=359)),
        (
            [round(100 * k / 359, 2) for k in (343, 351, 340, 355, 356, 320)],
            Proportion(100.0),
            MetricGrid(step=100 / 359, num_examples=359),
        ),
        ([0.9528], Proportion(1.0), MetricGrid(step=0.0001)),  # one value can be many things
        ([k / 1000 for k in (951, 953, 947)], Proportion(1.0), MetricGrid(step=0.001)),  # counts, or three digits
        ([23.41, 23.5], Ratio(), MetricGrid(step=0.01)),
        ([195.0, 200.0], Absolute(), MetricGrid(step=1.0)),
        ([0.0, 1.0], Proportion(1.0), MetricGrid(step=1.0)),
    ],
)  # fmt: skip
def test_the_step_of_a_metrics_values(values: list[float], scale: DifferenceScale, grid: MetricGrid) -> None:
    found = grid_of(values, scale)
    assert (found.step, found.num_examples) == (pytest.approx(grid.step), grid.num_examples)


def test_rounding_is_averaged_by_the_spread_of_seeds() -> None:
    rng, centre = np.random.default_rng(0), 0.37
    for sigma in (0.2, 0.4, 0.6, 1.0):
        values = np.round(centre + sigma * rng.standard_normal(400_000))
        shift = abs(values.mean() - centre)
        assert shift <= float(unaveraged(values.std())) + 4e-3


def test_two_equal_counts_are_no_proof() -> None:
    def verdict(num_seeds: int) -> str:
        pairs = [(0.95, 0.95)] * num_seeds
        runs = [
            run(policy, [5.0, 1.0, value, 0.5], seed=seed, metric=pair[side], metric_name="acc")
            for seed, pair in enumerate(pairs)
            for side, (policy, value) in enumerate((("bf16", 1.5), ("fp32", 1.6)))
        ]
        return row_of(runs).verdict

    assert verdict(2) == "undecided"
    assert verdict(10) == "undecided"  # two digits cannot show a margin of 0.43 points


def test_what_steps_prevent_is_said() -> None:
    runs = with_metric("fp32", [0.95] * 3, name="acc") + with_metric("bf16", [0.95] * 3, name="acc", final=1.0001)
    row = row_of(runs)
    assert (row.verdict, row.seeds_needed, row.seeds_cannot_decide) == ("undecided", None, True)
    assert (
        "acc comes in steps of 0.01, too coarse for its margin: print more digits, evaluate on more examples"
        in row.reason
    )


# --- how many seeds -----------------------------------------------------------------------------------------------


def test_more_seeds_are_promised_for_more_noise() -> None:
    needed = [seeds_needed([quantity([-s, 0.1, s], 1.0)]) for s in (0.5, 1.0, 2.0)]
    assert all(n is not None for n in needed)
    assert needed == sorted(n for n in needed if n is not None)
    assert needed[0] is not None
    assert 3 < needed[0] < needed[-1] <= MAX_SEEDS  # type: ignore[operator]


def test_the_promise_is_the_same_each_time() -> None:
    assert seeds_needed([quantity([0.0, 0.5, 1.0], 1.0)]) == seeds_needed([quantity([0.0, 0.5, 1.0], 1.0)])


def test_a_difference_at_the_margin_is_never_decided() -> None:
    assert seeds_needed([quantity([0.9, 1.1] * 15, 1.0)]) is None


def test_the_promise_knows_no_sign() -> None:
    assert seeds_needed([quantity([0.2, 0.9, 1.3], 1.0)]) == seeds_needed([quantity([-0.2, -0.9, -1.3], 1.0)])


def test_a_quantity_with_one_pair_can_never_be_shown_to_be_equal() -> None:
    assert seeds_needed([quantity([0.0, 0.5, 1.0], 1.0), quantity([0.0], 1.0)]) is None
