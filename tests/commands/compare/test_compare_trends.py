"""Runs that diverged or stopped learning, runs that only look like it, and what skipped updates explain."""

from __future__ import annotations

import math

import numpy as np
import pytest

from helpers_compare import falling, judge, row_of, run, series
from mezzo.records import Loss, RunRecord

NAN, INF = math.nan, math.inf
TIME = np.linspace(0.0, 1.0, 100)


def learning(seed: int, *, end: float = 0.1, noise: float = 0.05) -> np.ndarray:
    """Return a loss that falls from 2.3 to ``end`` in 100 steps."""
    rng = np.random.default_rng(seed)
    return end + (2.3 - end) * np.exp(-6 * TIME) + noise * rng.standard_normal(100)


def runs(policy: str, losses: list[np.ndarray], **fields: object) -> list[RunRecord]:
    return [run(policy, [float(v) for v in values], seed=seed, **fields) for seed, values in enumerate(losses)]


BASE = runs("fp32", [learning(seed) for seed in range(3)])


# --- values that are not finite -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss", "how"),
    [
        ([*falling(1.0)[:-1], NAN], "1 of the last 2 values of the loss is NaN"),
        ([*falling(1.0)[:-2], INF, -INF], "2 of the last 2 values of the loss are infinite"),
        ([5.0, NAN], "the last value of the loss is NaN"),
        ([*falling(1.0, num_steps=40)[:-4], NAN, 1.0, NAN, 1.0], "2 of the last 4 values of the loss are NaN"),
    ],
)
def test_a_loss_that_is_not_finite_at_the_end_diverged(loss: list[float], how: str) -> None:
    row = row_of([run("fp32", falling(1.0)), run("bf16", loss)])
    assert (row.verdict, row.reason) == ("diverged", f"the only run diverged: with seed 0, {how}")


@pytest.mark.parametrize(
    "loss", [[*falling(1.0)[:-3], NAN, 1.0, 1.0], [*falling(1.0, num_steps=40)[:-3], NAN, 1.0, 1.0]]
)
def test_a_loss_that_recovers_did_not(loss: list[float]) -> None:
    assert row_of([run("fp32", falling(1.0, num_steps=len(loss))), run("bf16", loss)]).verdict == "undecided"


def test_a_metric_that_is_lost_diverged() -> None:
    row = row_of([run("fp32", falling(1.0), metric=0.5), run("bf16", falling(1.0), metric=NAN)])
    assert row.verdict == "diverged"
    assert row.reason == "the only run diverged: with seed 0, the last perplexity is nan, where the baseline's is 0.5"


# --- real faults, in one of three seeds ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "verdict", "words"),
    [
        (np.where(TIME > 0.6, 0.1 + 6 * (TIME - 0.6), learning(1)), "diverged", "the loss rose from"),
        (np.where(TIME > 0.7, 1.7, learning(1)), "diverged", "and rose again to 1.7"),
        (np.where(TIME > 0.7, 1e5, learning(1)), "diverged", "far above all of fp32's"),
        (2.3 + 0.05 * np.sin(40 * TIME), "stopped_learning", "the loss went from 2.3"),
        (2.3 - 0.1 * (2.3 - learning(1)), "stopped_learning", "where fp32's fell from"),
    ],
    ids=["rises", "collapses", "explodes", "never learns", "nearly frozen"],
)
def test_a_fault_in_one_of_three_seeds_is_found(fault: np.ndarray, verdict: str, words: str) -> None:
    row = row_of(BASE + runs("bf16", [learning(0), fault, learning(2)]))
    assert row.verdict == verdict
    assert row.reason.startswith(f"1 of 3 runs {verdict.replace('_', ' ')}: with seed 1, ")
    assert words in row.reason


def test_a_loss_that_stops_half_way_differs_from_one_that_keeps_falling() -> None:
    line = [2.3 - 2.2 * TIME + 0.01 * learning(seed) for seed in range(3)]
    stopped = [np.maximum(values, 1.4) for values in line]
    row = row_of(runs("fp32", line) + runs("bf16", stopped))
    assert row.verdict == "stopped_learning"
    assert (
        "3 of 3 runs stopped learning: with seed 0, the loss stopped falling half-way, at 1.4, and ended at 1.4"
        in row.reason
    )


@pytest.mark.parametrize("progress", [0.01, 0.05, 0.15])
def test_nearly_frozen_weights_are_found_with_three_seeds(progress: float) -> None:
    frozen = [2.3 - progress * (2.3 - learning(seed, noise=0.1)) for seed in range(3)]
    row = row_of(
        runs("fp32", [learning(seed, noise=0.1) for seed in range(3)]) + runs("bf16-pure", frozen), "bf16-pure"
    )
    assert row.verdict == "stopped_learning"


# --- what only looks like it --------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_steps", [5, *(pytest.param(n, marks=pytest.mark.slow) for n in (50, 400))])
@pytest.mark.parametrize("autocorrelation", [0.0, 0.95])
def test_noise_without_a_trend_is_no_divergence(num_steps: int, autocorrelation: float) -> None:
    rng = np.random.default_rng(num_steps)
    for _ in range(20):
        noise = rng.standard_normal((6, num_steps))
        for step in range(1, num_steps):
            noise[:, step] = autocorrelation * noise[:, step - 1] + math.sqrt(1 - autocorrelation**2) * noise[:, step]
        rows = 1.0 + 0.2 * noise
        row = row_of(runs("fp32", list(rows[:3])) + runs("bf16", list(rows[3:])))
        assert row.verdict in ("undecided", "equivalent", "different")


def test_a_rise_of_a_ten_millionth_is_no_divergence() -> None:
    base = [run("fp32", [1.0] * 2 + [1.0 - 1e-7] * 18, seed=seed) for seed in range(3)]
    other = [run("bf16", [1.0] * 2 + [1.0 + 1e-7] * 18, seed=seed) for seed in range(3)]
    assert row_of(base + other).verdict == "equivalent"


def test_a_loss_that_rises_as_the_baselines_does_is_no_divergence() -> None:
    base = [run("fp32", falling(6.0), seed=seed) for seed in range(2)]
    assert (
        row_of([*base, *(run("bf16", falling(6.0 + seed / 100), seed=seed) for seed in range(2))]).verdict != "diverged"
    )


def test_a_baseline_that_itself_stops_learning_now_and_then_explains_a_policy_that_does() -> None:
    flat = 2.3 + 0.0 * TIME
    base = runs("fp32", [learning(0), flat, learning(2), learning(3), learning(4)])
    other = runs("bf16", [flat, learning(1), learning(2), learning(3), learning(4)])
    rows = judge(base + other).rows
    assert rows[0].reason.startswith("1 of 5 runs stopped learning: with seed 1")
    assert rows[1].verdict == "undecided"
    assert "1 of 5 runs stopped learning: with seed 0" in rows[1].reason
    assert "1 of 5 runs under fp32 went wrong too" in rows[1].reason
    worse = runs("bf16", [flat, flat, flat, flat, learning(4)])
    assert row_of(base + worse).verdict == "stopped_learning"


def test_each_of_several_losses_is_judged() -> None:
    def gan(policy: str, seed: int, *, explodes: bool) -> RunRecord:
        rng = np.random.default_rng(seed)
        d, g = (level + 0.1 * rng.standard_normal(40) for level in (1.3, 0.8))
        g = np.where(np.arange(40) > 30, 50.0, g) if explodes else g
        pairs = [float(v) for pair in zip(d, g, strict=True) for v in pair]
        named = [Loss(name="netD", steps=[*range(1, 81, 2)], values=[*map(float, d)])]
        named.append(Loss(name="netG", steps=[*range(2, 81, 2)], values=[*map(float, g)]))
        return run(policy, pairs, seed=seed, losses=named)

    base = [gan("fp32", seed, explodes=False) for seed in range(3)]
    rows = judge([*base, *(gan("bf16", seed, explodes=seed == 1) for seed in range(3))]).rows
    assert rows[0].loss is None
    assert [*rows[0].losses] == ["netD", "netG"]
    assert rows[0].losses["netD"].value == pytest.approx(1.3, abs=0.1)
    assert rows[1].verdict == "diverged"
    assert "with seed 1, the loss of netG ended at 50, far above all of fp32's" in rows[1].reason


def test_a_run_of_the_baseline_that_begins_low_and_ends_low_has_learned() -> None:
    """As gradient descent on a line does, where each seed begins elsewhere."""
    courses = [start * np.exp(-8 * TIME) + end for start, end in ((3.8, 0.17), (0.25, 0.35), (4.5, 0.2))]
    rows = judge(runs("fp32", courses) + runs("bf16", [1.001 * course for course in courses])).rows
    assert "stopped learning" not in rows[0].reason
    assert rows[1].verdict == "equivalent"


# --- skipped updates ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("skipped", "words"),
    [
        ([False] * 17 + [True] * 3, "its last 3 updates were all skipped; skipped "),
        ([False] * 45 + [True] * 5, "its last 5 updates were all skipped; skipped "),
        ([True, True], "its last 2 updates were all skipped; skipped 100% of its updates"),
        ([True], "its last update was skipped; skipped 100% of its updates"),
    ],
)
def test_a_run_that_ends_in_skipped_updates_stopped_learning(skipped: list[bool], words: str) -> None:
    loss = falling(1.0, num_steps=len(skipped))
    row = row_of([run("fp32", loss), run("bf16", loss, skipped=skipped)])
    assert row.verdict == "stopped_learning"
    assert row.reason.startswith(f"the only run stopped learning: with seed 0, {words}")


@pytest.mark.parametrize("skipped", [[False] * 18 + [True] * 2, [False] * 46 + [True] * 4])
def test_a_skipped_update_now_and_then_is_none(skipped: list[bool]) -> None:
    loss = falling(1.0, num_steps=len(skipped))
    assert row_of([run("fp32", loss), run("bf16", loss, skipped=skipped)]).verdict == "equivalent"


@pytest.mark.parametrize(
    ("policy", "skipped", "words"),
    [
        (
            "fp16",
            [True, False, False] * 10,
            "skipped 33% of its updates: try bf16, which has FP32's range",
        ),
        (
            "fp16",
            [True] * 9 + [False] * 21,
            "skipped 30% of its updates, most at the start until its loss scale was found: try fp16:init_scale=64",
        ),
        (
            "fp16",
            [False, True, True] + [False] * 27,
            "skipped 6.7% of its updates, most at the start until its loss scale was found: try fp16:init_scale=64",
        ),
        (
            "fp16:growth_interval=5",
            [True] * 9 + [False] * 21,
            "most at the start until its loss scale was found: try fp16:init_scale=64:growth_interval=5",
        ),
        ("as-is", [True] * 9 + [False] * 21, "until its loss scale was found: try GradScaler(init_scale=64)"),
        (
            "as-is",
            [True, False, False] * 10,
            "skipped 33% of its updates",
        ),
    ],
)
def test_skips_are_named_with_the_setting_to_try(policy: str, skipped: list[bool], words: str) -> None:
    finals = [1.0, 1.001, 1.002]
    base = [run("fp32", falling(f, num_steps=30), seed=seed) for seed, f in enumerate(finals)]
    other = [
        run(policy, falling(f + 0.001, num_steps=30), seed=seed, skipped=skipped, loss_scale=[64.0] * 30)
        for seed, f in enumerate(finals)
    ]
    row = row_of(base + other, policy)
    assert row.verdict == "equivalent"
    assert words in row.reason.split("; ", 1)[1]


def test_few_skips_are_not_named() -> None:
    skipped = [True] + [False] * 29
    row = row_of(
        [run("fp32", falling(1.0, num_steps=30)), run("fp16", falling(1.0, num_steps=30), skipped=skipped)], "fp16"
    )
    assert "skipped" not in row.reason


def test_a_static_scale_is_advised_to_adapt() -> None:
    skipped = [True] * 9 + [False] * 11
    other = run("fp16:loss_scale=static:init_scale=64", falling(1.0), skipped=skipped, loss_scale=[64.0] * 20)
    row = row_of([*series("fp32", [1.0]), other], other.policy)
    assert row.reason.endswith("skipped 45% of its updates: try a loss scale that adapts, fp16:init_scale=64")
