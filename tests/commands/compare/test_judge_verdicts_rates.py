"""How often verdicts are wrong: the simulations of ``python -m benchmarks verdicts`` with fewer comparisons and fixed seeds.

Limits leave three standard errors above the rates that are claimed.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from benchmarks.verdicts import courses, differences, metrics, modules, promises, scales

from helpers_compare import row_of, run

SEEDS = [2, 3, 5, 10]


def above(rate: float, num: int) -> float:
    """Return the rate that a sample of ``num`` exceeds in one case of a thousand."""
    return rate + 3.1 * math.sqrt(rate * (1 - rate) / num)


@pytest.mark.parametrize("num_seeds", SEEDS)
@pytest.mark.parametrize("noise", ["normal", "heavy"])
@pytest.mark.parametrize("closeness", [0.01, 0.3, 1.0, differences.UNPAIRED])
@pytest.mark.parametrize("share", [0.0, 1.0, 5.0])
def test_equivalent_and_different_at_the_margin(num_seeds: int, noise: str, closeness: float, share: float) -> None:
    setting = differences.Setting(noise, num_seeds, share, closeness, 1)
    for verdict in ("equivalent", "different"):
        assert differences.share_of(setting, verdict, num=4000, seed=num_seeds) <= above(0.05, 4000)


def test_equivalence_is_found_where_it_is() -> None:
    for num_seeds, least in ((2, 0.45), (3, 0.95), (5, 0.99)):
        setting = differences.Setting("normal", num_seeds, 5.0, 1.0, 1, at=0.0)
        assert differences.share_of(setting, "equivalent", num=2000, seed=0) >= least
    beyond = differences.Setting("normal", 3, 5.0, 0.3, 1, at=3.0)
    assert differences.share_of(beyond, "different", num=2000, seed=0) >= 0.9


@pytest.mark.slow
@pytest.mark.parametrize("num_seeds", SEEDS)
@pytest.mark.parametrize(("num_examples", "counted"), [(100, False), (1000, False), (10_000, False), (360, True)])
def test_metrics_in_steps_at_the_margin(num_seeds: int, num_examples: int, counted: bool) -> None:
    for accuracy, shared, own, drawn in (
        (0.95, 0.0, 0.0001, False),
        (0.9, 0.02, 0.02, True),
        (0.983, 0.1, 0.005, False),
    ):
        setting = metrics.Setting(num_examples, counted, num_seeds, accuracy, shared, own, drawn)
        for verdict in ("equivalent", "different"):
            assert metrics.share_of(setting, verdict, num=150, seed=1) <= above(0.05, 150)


@pytest.mark.slow
@pytest.mark.parametrize("num_steps", [5, 20, 100])
@pytest.mark.parametrize("autocorrelation", courses.AUTOCORRELATIONS)
def test_no_false_alarms_on_noise(num_steps: int, autocorrelation: float) -> None:
    for num_seeds, level in ((2, 0.0), (3, 10.0)):
        setting = courses.Setting(num_steps, autocorrelation, num_seeds, "heavy", level)
        assert courses.false_alarms(setting, num=100, seed=num_steps) <= above(0.01, 100)


@pytest.mark.parametrize("fault", courses.FAULTS)
def test_faults_are_found(fault: str) -> None:
    assert courses.share_found(courses.FAULTS[fault], 0.02, num=20, num_wrong=1) == 1.0
    assert courses.share_found(courses.healthy, 0.1, num=40, num_wrong=3) == 0.0


@pytest.mark.parametrize("num_seen", [3, pytest.param(5, marks=pytest.mark.slow)])
def test_as_many_seeds_as_promised_decide(num_seen: int) -> None:
    rng = np.random.default_rng(num_seen)
    settings = [(difference, deviation) for difference in (0.0, 0.5, 2.0) for deviation in (0.5, 1.0, 2.0)]
    kept = [promises.promise(*setting, num_seen=num_seen, rng=rng) for setting in settings for _ in range(6)]
    made = [bool(outcome) for outcome in kept if outcome is not None]
    assert len(made) >= 15
    assert sum(made) / len(made) >= 0.8


@pytest.mark.parametrize("policy", ["fp16", "bf16"])
@pytest.mark.parametrize(("rounding", "size", "noise"), [(0.1, 1, "heavy"), (0.3, 10, "normal"), (0.6, 1000, "normal")])
def test_fallback_blames_no_module_of_a_healthy_training(policy: str, rounding: float, size: int, noise: str) -> None:
    setting = modules.Setting(policy, rounding, size, noise)
    assert modules.share_of(setting, modules.BLAMED, num=60, seed=1) <= above(0.05, 60)


@pytest.mark.parametrize("policy", ["fp16", "bf16"])
@pytest.mark.parametrize(("lost", "hidden"), [(math.inf, False), (1.0, False), (0.6, False), (1.0, True)])
def test_fallback_misses_no_fault(policy: str, lost: float, hidden: bool) -> None:
    for rounding in (0.03, 0.6):
        setting = modules.Setting(policy, rounding, 10, "normal", lost, hidden)
        assert modules.share_of(setting, ("not needed",), num=20, seed=1) == 0.0


@pytest.mark.parametrize("num_steps", [50, 200, 1000])
@pytest.mark.parametrize(("noise", "autocorrelation"), [("normal", 0.0), ("skewed", 0.9)])
def test_scales_that_settle_too_low(num_steps: int, noise: str, autocorrelation: float) -> None:
    for mean, wrong in ((8.0, "too low"), (5.0, "fits")):
        setting = scales.Setting(num_steps, 1.0, autocorrelation, noise, 2000, mean)
        answers = scales.answers(setting, num=400, seed=1)
        assert float((answers == wrong).mean()) <= above(0.05, 400)
        assert bool((answers == "undecided").any()) is (num_steps == 50)


def test_the_simulations_judge_as_a_comparison_does() -> None:
    """A simulated sample, put into records as runs, gets the verdict that the simulation counts."""
    rng, counted = np.random.default_rng(3), []
    for _ in range(40):
        base = 0.1 * rng.standard_normal(3)
        policy = base + rng.choice([0.0, 0.015, 0.8]) + 0.003 * rng.standard_normal(3)
        finals = np.exp(policy), np.exp(base)
        runs = [
            run(name, [9.0, 9.0, *[float(v)] * 18], seed=seed)
            for name, side in zip(("bf16", "fp32"), finals, strict=True)
            for seed, v in enumerate(side)
        ]
        found = differences.judged(policy - base, base, share=math.log1p(0.02))
        counted.append(found)
        assert row_of(runs).verdict == (found or "undecided")
    assert {"equivalent", "different", None} <= set(counted)
