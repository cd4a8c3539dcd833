"""Verdicts, intervals, times and memory of a comparison, against scipy's tests and numbers worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from mezzo.errors import MezzoError, PolicyError
from mezzo.measure.compare import MAX_SEEDS, Paired, compare, seeds_needed
from mezzo.records import CompareRecord, Effective, Environment, Memory, Metric, Row, RunRecord, Steps

NAN, INF = math.nan, math.inf
ENVIRONMENT = Environment(
    date="2026-01-01T00:00:00+00:00", mezzo="0", python="3", torch="2", os="Linux", cpu="x", threads=1, device="cpu"
)


def falling(final: float, *, start: float = 5.0, num_steps: int = 20) -> list[float]:
    """Return losses whose first tenth is ``start`` and whose other steps are ``final``."""
    num_first = max(1, num_steps // 10)
    return [start] * num_first + [final] * (num_steps - num_first)


def run(
    policy: str, loss: list[float], *, seed: int | None = 0, metric: float | None = None, **fields: Any
) -> RunRecord:
    steps = Steps(loss=loss, **{k: fields.pop(k) for k in ("skipped", "time_ms", "loss_scale") if k in fields})
    known: dict[str, Any] = {
        "command": ["mezzo", "run", "train.py"],
        "script": "train.py",
        "script_sha256": "0" * 64,
        "policy": policy,
        "seed": seed,
        "environment": ENVIRONMENT,
        "steps": steps,
        "metric": None if metric is None else Metric(name="accuracy", pattern="", steps=[1, 2], values=[0.0, metric]),
    }
    return RunRecord(**known | fields)


def series(policy: str, finals: list[float], **fields: Any) -> list[RunRecord]:
    return [run(policy, falling(final), seed=seed, **fields) for seed, final in enumerate(finals)]


def judge(runs: list[RunRecord], *, margin: float = 0.25, baseline: str = "fp32") -> CompareRecord:
    return compare(runs, baseline=baseline, margin=margin, command=["mezzo", "compare"])


def row_of(runs: list[RunRecord], policy: str = "bf16", **options: Any) -> Row:
    return next(row for row in judge(runs, **options).rows if row.policy == policy)


# --- verdicts on the loss: the baseline falls from 5 to 1, so a margin of 0.25 is 1 in units of the loss ----------


@pytest.mark.parametrize(
    ("finals", "verdict", "reason", "needed"),
    [
        (
            [1.125, 1.25, 1.375],
            "equivalent",
            "loss 1.25 against 1 (+0.25, 95% CI -0.061 to +0.56), inside the margin of 1",
            None,
        ),
        (
            [1.25, 1.5, 1.75],
            "equivalent",
            "loss 1.5 against 1 (+0.5, 95% CI -0.12 to +1.1), at 90% inside the margin of 1",
            None,
        ),
        (
            [0.75, 0.5, 0.25],
            "equivalent",
            "loss 0.5 against 1 (-0.5, 95% CI -1.1 to +0.12), at 90% inside the margin of 1",
            None,
        ),
        (
            [3.0, 3.25, 3.5],
            "different",
            "loss 3.25 against 1 (+2.2, 95% CI +1.6 to +2.9), beyond the margin of 1",
            None,
        ),
        (
            [-1.0, -1.25, -1.5],
            "different",
            "loss -1.25 against 1 (-2.2, 95% CI -2.9 to -1.6), beyond the margin of 1",
            None,
        ),
        (
            [1.0, 1.5, 2.0],
            "undecided",
            "loss 1.5 against 1 (+0.5, 95% CI -0.74 to +1.7), partly beyond the margin of 1"
            "; 3 seeds do not decide, 5 would at the same mean and spread",
            5,
        ),
        (
            [1.0, 2.0, 3.0],
            "undecided",
            "loss 2 against 1 (+1, 95% CI -1.5 to +3.5), partly beyond the margin of 1"
            "; 3 seeds do not decide, nor would 1000 at the same mean and spread",
            None,
        ),
        (
            [2.5],
            "undecided",
            "loss 2.5 against 1 (+1.5), to be judged by the margin of 1"
            "; one seed has no spread to judge a difference by: run it again with --seeds 3",
            None,
        ),
        ([1.0], "equivalent", "every step's loss is identical to fp32's", None),
        ([1.0, 1.0, 1.0], "equivalent", "every step's loss is identical to fp32's", None),
    ],
)
def test_the_verdict_and_its_reason(finals: list[float], verdict: str, reason: str, needed: int | None) -> None:
    row = row_of(series("fp32", [1.0, 1.0, 1.0]) + series("bf16", finals))
    assert (row.verdict, row.reason, row.seeds_needed) == (verdict, reason, needed)


def test_equal_final_losses_on_one_seed_do_not_make_identical_runs() -> None:
    other = [4.0, 5.0, *falling(1.0)[2:]]
    row = row_of([run("fp32", falling(1.0)), run("bf16", other)])
    assert row.loss is not None
    assert (row.loss.difference, row.verdict) == (0.0, "undecided")


def test_the_difference_is_scipys_paired_interval() -> None:
    base, other = [0.31, 0.36, 0.29, 0.33], [0.335, 0.342, 0.318, 0.371]
    found = row_of(series("fp32", base) + series("bf16", other)).loss
    oracle = stats.ttest_rel(other, base).confidence_interval(0.95)
    assert found is not None
    assert (found.low, found.high) == pytest.approx((oracle.low, oracle.high), rel=1e-9)
    assert found.difference == pytest.approx((oracle.low + oracle.high) / 2)
    assert (found.value, found.baseline) == pytest.approx((0.3415, 0.3225))
    assert found.margin == pytest.approx(0.25 * (5 - 0.3225))


def test_runs_pair_by_seed_whatever_their_order() -> None:
    base = [run("fp32", falling(final), seed=seed) for seed, final in ((1, 2.0), (0, 1.0), (2, 3.0))]
    other = [run("bf16", falling(final), seed=seed) for seed, final in ((2, 3.125), (7, 4.5), (0, 1.125), (1, 2.125))]
    loss = row_of(other + base).loss
    assert loss is not None
    assert (loss.value, loss.baseline, loss.low, loss.high) == (2.125, 2.0, 0.125, 0.125)


@pytest.mark.parametrize("seed", [None, 4])
def test_runs_that_share_a_seed_pair_in_order(seed: int | None) -> None:
    base = [run("fp32", falling(final), seed=seed) for final in (1.0, 2.0)]
    other = [run("bf16", falling(final), seed=seed) for final in (1.5, 2.5)]
    loss = row_of(base + other).loss
    assert loss is not None
    assert (loss.low, loss.high) == (0.5, 0.5)


@pytest.mark.parametrize(
    ("base", "margin"),
    [
        (falling(1.0), 0.02 * 4.0),  # the loss that training took off
        (falling(9.0), 0.02 * 4.0),  # a loss that rises, taken absolutely
        (falling(5.0), 0.02 * 5.0),  # no progress: a share of the loss itself
        (falling(-5.0, start=-5.0), 0.02 * 5.0),
        ([8.0, 6.0, *[4.0] * 27, 1.0, 2.0, 3.0], 0.02 * (18 / 3 - 2.0)),  # means of three of 32 steps
        ([3.0], 0.02 * 3.0),
        ([6.0, 5.0, *[2.0] * 16, 1.0], 0.02 * 5.0),  # a tenth of 19 steps is one
        ([INF, 6.0, *[1.0] * 18], 0.02 * 5.0),  # finite losses only
    ],
)
def test_the_margin_is_a_share_of_the_progress(base: list[float], margin: float) -> None:
    loss = row_of([run("fp32", base)], "fp32", margin=0.02).loss
    assert loss is not None
    assert loss.margin == pytest.approx(margin, rel=1e-12)


# --- the metric ---------------------------------------------------------------------------------------------------


def with_metric(policy: str, finals: list[float], metrics: list[float | None]) -> list[RunRecord]:
    pairs = zip(finals, metrics, strict=True)
    return [run(policy, falling(final), seed=i, metric=metric) for i, (final, metric) in enumerate(pairs)]


@pytest.mark.parametrize(
    ("finals", "metrics", "verdict"),
    [
        ([1.0, 1.125, 1.25], [8.0, 8.125, 8.25], "equivalent"),
        ([1.0, 1.125, 1.25], [4.0, 4.125, 4.25], "different"),
        ([1.0, 1.125, 1.25], [4.0, 8.0, 12.0], "undecided"),
        ([3.0, 3.25, 3.5], [8.0, 8.125, 8.25], "different"),
        ([1.0, 1.0, 1.0], [4.0, 4.125, 4.25], "different"),  # identical losses excuse no metric
        ([1.0, 1.0, 1.0], [8.0, 8.0, 8.0], "equivalent"),
        ([1.0, 1.125, 1.25], [4.0, None, None], "undecided"),  # one pair shows no spread
        ([1.0, 1.125, 1.25], [None, None, None], "equivalent"),
    ],
)
def test_the_metric_has_to_pass_too(finals: list[float], metrics: list[float | None], verdict: str) -> None:
    base = with_metric("fp32", [1.0, 1.0, 1.0], [8.0, 8.0, 8.0])
    row = row_of(base + with_metric("bf16", finals, metrics))
    assert row.verdict == verdict


def test_the_metrics_margin_is_a_share_of_the_baselines_metric() -> None:
    base = with_metric("fp32", [1.0, 1.0, 1.0], [-6.0, -8.0, -10.0])
    row = row_of(base + with_metric("bf16", [1.0, 1.125, 1.25], [-6.5, -8.5, -10.5]))
    assert row.metric is not None
    assert row.metric.model_dump() == {
        "value": -8.5, "baseline": -8.0, "difference": -0.5, "low": -0.5, "high": -0.5, "margin": 2.0
    }  # fmt: skip
    assert row.reason.endswith("; accuracy -8.5 against -8 (-0.5, 95% CI -0.5 to -0.5), inside the margin of 2")


# --- how many seeds -----------------------------------------------------------------------------------------------


def brute_force(quantities: list[Paired]) -> int | None:
    n = np.arange(2, MAX_SEEDS + 1)
    inside, outside = np.ones(len(n), bool), np.zeros(len(n), bool)
    for q in quantities:
        d = stats.describe(q.differences)
        scale = np.sqrt(d.variance / n)
        low, high = stats.t.interval(0.90, n - 1, loc=d.mean, scale=scale)
        inside &= (-q.margin <= low) & (high <= q.margin)
        low, high = stats.t.interval(0.95, n - 1, loc=d.mean, scale=scale)
        outside |= (low > q.margin) | (high < -q.margin)
    decided = n[inside | outside]
    return int(decided[0]) if len(decided) else None


def paired(differences: list[float], margin: float) -> Paired:
    return Paired(name="loss", pairs=tuple((d, 0.0) for d in differences), margin=margin)


@pytest.mark.parametrize(
    ("quantities", "expected"),
    [
        ([paired([0.0, 0.5, 1.0], 1.0)], 5),
        ([paired([0.0, -0.5, -1.0], 1.0)], 5),
        ([paired([0.0, 3.0, 6.0], 1.0)], 12),
        ([paired([0.0, -3.0, -6.0], 1.0)], 12),
        ([paired([0.0, 0.5, 1.0], 1.0), paired([0.0, 3.0, 6.0], 1.0)], 12),
        ([paired([0.0, 0.5, 1.0], 1.0), paired([-0.9, 0.1, 1.1], 0.5)], 19),
        ([paired([-0.9, 1.0, 2.8], 1.1)], 523),
        ([paired([-1.0, 1.0, 3.0], 1.1)], None),
        ([paired([0.0, 1.0, 2.0], 1.0)], None),
    ],
)
def test_seeds_needed_is_the_smallest_number_that_decides(quantities: list[Paired], expected: int | None) -> None:
    assert (seeds_needed(quantities), brute_force(quantities)) == (expected, expected)


def test_seeds_needed_is_more_than_there_are() -> None:
    wide, narrow = paired([-9.0, 9.0, 0.0, 5.0, -5.0], 1.0), paired([2.0, 3.0, 4.0], 1.0)
    assert seeds_needed([narrow]) == 4
    assert seeds_needed([wide, narrow]) == 6


def test_a_quantity_with_one_pair_can_never_be_shown_to_be_equal() -> None:
    assert seeds_needed([paired([0.0, 0.5, 1.0], 1.0), paired([0.0], 1.0)]) is None


# --- divergence and failure ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("other", "how"),
    [
        (run("bf16", [*falling(1.0)[:-1], NAN]), "1 of the last 2 losses came out not finite"),
        (run("bf16", [*falling(1.0)[:-2], INF, -INF]), "2 of the last 2 losses came out not finite"),
        (run("bf16", [5.0, NAN]), "the last loss came out not finite"),
        (
            run("bf16", falling(5.5)),
            "the loss rose from 5 to 5.5 where the baseline's fell from 5 to 1",
        ),
        (
            run("bf16", falling(1.0), skipped=[False] * 17 + [True] * 3),
            "the run ended in skipped updates only (3 looked at)",
        ),
        (
            run("bf16", falling(1.0, num_steps=50), skipped=[False] * 45 + [True] * 5),
            "the run ended in skipped updates only (5 looked at)",
        ),
        (run("bf16", falling(1.0), metric=NAN), "the last accuracy came out as nan"),
    ],
)
def test_a_run_diverges(other: RunRecord, how: str) -> None:
    row = row_of([run("fp32", falling(1.0), metric=0.5), other])
    assert (row.verdict, row.reason) == ("diverged", f"1 of 1 runs diverged: with seed 0, {how}")


@pytest.mark.parametrize(
    "other",
    [
        run("bf16", [*falling(1.0)[:-3], NAN, 1.0, 1.0]),  # a loss before the tail
        run("bf16", falling(5.0)),  # no progress is no rise
        run("bf16", falling(1.5), skipped=[False] * 18 + [True] * 2),  # two skipped updates
        run("bf16", falling(1.5, num_steps=50), skipped=[False] * 46 + [True] * 4),
        run("bf16", falling(7.0), seed=1),  # a rise, and no partner that fell
    ],
)
def test_a_run_does_not_diverge(other: RunRecord) -> None:
    assert row_of([run("fp32", falling(1.0)), other]).verdict == "undecided"


def test_a_loss_that_rises_with_the_baselines_is_no_divergence() -> None:
    base = [run("fp32", falling(6.0), seed=0, metric=NAN)]
    assert row_of([*base, run("bf16", falling(6.5), metric=NAN)]).verdict == "undecided"


def test_one_diverged_run_of_three_decides_the_row() -> None:
    bad = [run("bf16", falling(1.0), seed=0), run("bf16", falling(NAN), seed=1), run("bf16", falling(1.0), seed=2)]
    row = row_of(series("fp32", [1.0, 1.0, 1.0]) + bad)
    assert row.reason == "1 of 3 runs diverged: with seed 1, 2 of the last 2 losses came out not finite"
    assert row.loss is not None
    assert row.loss.value == 1.0


def test_failed_runs_leave_the_other_rows_right() -> None:
    failed = [run("fp16", [], seed=0, error="it ran out of memory"), run("fp16", falling(1.0), seed=1, error="late")]
    mixed = [run("bf16", [], seed=0), *series("bf16", [1.125, 1.25, 1.375])[1:]]
    rows = judge(failed + series("fp32", [1.0, 1.0, 1.0]) + mixed).rows
    assert [(r.policy, r.verdict, r.num_runs, r.num_failed) for r in rows] == [
        ("fp16", "failed", 2, 2),
        ("fp32", "baseline", 3, 0),
        ("bf16", "equivalent", 3, 1),
    ]
    assert (rows[0].reason, rows[0].loss, rows[0].step_ms) == ("it ran out of memory", None, None)
    assert rows[1].reason == "the others are compared with its loss 1"
    assert rows[2].reason.endswith("; 1 of 3 runs failed: the run ended without a training step")
    assert rows[2].loss is not None
    assert rows[2].loss.value == 1.3125


def test_a_failed_run_keeps_its_place_among_runs_without_a_seed() -> None:
    base = [run("fp32", falling(final), seed=None) for final in (1.0, 2.0)]
    other = [run("bf16", [], seed=None, error="stopped"), run("bf16", falling(2.5), seed=None)]
    loss = row_of(base + other).loss
    assert loss is not None
    assert loss.baseline == 2.0


@pytest.mark.parametrize(
    ("base", "verdict", "reason"),
    [
        (run("fp32", [], error="no such file"), "failed", "no such file"),
        (
            run("fp32", falling(NAN)),
            "baseline",
            "1 of 1 runs diverged: with seed 0, 2 of the last 2 losses came out not finite",
        ),
    ],
)
def test_a_baseline_that_did_not_train_leaves_the_others_undecided(base: RunRecord, verdict: str, reason: str) -> None:
    rows = judge([base, run("bf16", falling(1.0)), run("fp16", falling(NAN))]).rows
    assert (rows[0].verdict, rows[0].reason, rows[0].loss) == (verdict, reason, None)
    assert rows[1].reason == "no run shares its seed with a run under fp32 that trained well"
    assert [row.verdict for row in rows[1:]] == ["undecided", "diverged"]


def test_the_records_environment_is_that_of_a_run_that_trained() -> None:
    dead = run("fp32", [], error="killed", environment=ENVIRONMENT.model_copy(update={"device": "unknown"}))
    assert judge([dead, run("fp32", falling(1.0), seed=1)]).environment.device == "cpu"
    assert judge([dead, run("bf16", falling(1.0))]).environment.device == "cpu"
    assert judge([dead]).environment.device == "unknown"


# --- time, memory and what ran ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("times", "step_ms"),
    [
        ([100.0, 100.0, 100.0, 2.0, 4.0, 3.0], 3.0),  # three steps of warm-up
        ([100.0] * 4 + [2.0] * 35 + [100.0], 2.0),  # the fourth of 40 counts as warm-up, a late outlier as nothing
        ([9.0] * 3 + [1.0, 7.0], 4.0),
        ([9.0, 9.0, 9.0, 1.0], 1.0),  # what is left, however little
        ([9.0, 1.0, 5.0], 5.0),  # warm-up is all there is
        ([9.0, 9.0, 9.0, NAN, 3.0], 3.0),
        ([], None),
        ([NAN], None),
    ],
)
def test_the_time_of_a_step_leaves_warm_up_out(times: list[float], step_ms: float | None) -> None:
    assert row_of([run("fp32", falling(1.0), time_ms=times)], "fp32").step_ms == step_ms


def test_a_tenth_of_a_long_run_is_warm_up() -> None:
    times = [9.0] * 10 + [1.0] * 46 + [9.0] * 44  # of 90 steps after warm-up most take 1 ms, of 97 most take 9
    assert row_of([run("fp32", falling(1.0), time_ms=times)], "fp32").step_ms == 1.0


def timed(policy: str, medians: list[float], **fields: Any) -> list[RunRecord]:
    return [run(policy, falling(1.0), seed=i, time_ms=[ms] * 8, **fields) for i, ms in enumerate(medians)]


def times_of(row: Row) -> tuple[float | None, ...]:
    return row.step_ms, row.speedup, row.speedup_low, row.speedup_high


def test_the_speedup_is_the_median_of_the_seeds_ratios() -> None:
    rows = judge(timed("fp32", [8.0, 6.0, 12.0]) + timed("bf16", [4.0, 2.0, 8.0, 1.0])).rows
    assert times_of(rows[0]) == (8.0, 1.0, 1.0, 1.0)
    assert times_of(rows[1]) == (3.0, 2.0, 1.5, 3.0)  # the fourth seed has no partner


EMULATED = Effective(flops_by_format={"bf16": 3, "fp32": 1}, emulated=True)
EMULATED_NOTE = "its formats are emulated here, so its times say nothing of a speed-up"


def test_an_emulated_row_claims_no_speed() -> None:
    half = [*timed("bf16", [2.0]), run("bf16", falling(1.0), seed=1, time_ms=[2.0] * 8, effective=EMULATED)]
    base, row = judge(timed("fp32", [8.0, 8.0]) + half).rows
    assert (base.emulated, row.emulated) == (False, True)
    assert times_of(row) == (2.0, None, None, None)
    assert row.reason.endswith(f"; {EMULATED_NOTE}")
    assert EMULATED_NOTE not in base.reason


def test_no_row_claims_speed_over_an_emulated_baseline() -> None:
    rows = judge(timed("fp32", [2.0]) + timed("bf16", [8.0], effective=EMULATED), baseline="bf16").rows
    assert [times_of(row) for row in rows] == [(2.0, None, None, None), (8.0, None, None, None)]


def test_runs_without_times_give_no_speedup() -> None:
    row = row_of(timed("fp32", [8.0]) + series("bf16", [1.0]))
    assert times_of(row) == (None, None, None, None)


@pytest.mark.parametrize(
    ("ours", "theirs", "ratio"),
    [
        (Memory(parameters_bytes=6, activations_bytes=6), Memory(parameters_bytes=8, gradients_bytes=16), 0.5),
        (
            Memory(parameters_bytes=6, cuda_allocated_bytes=30),
            Memory(parameters_bytes=8, cuda_allocated_bytes=40),
            0.75,
        ),
        (Memory(parameters_bytes=2, cuda_allocated_bytes=30), Memory(parameters_bytes=8), 0.25),
        (Memory(parameters_bytes=2), Memory(parameters_bytes=8, cuda_allocated_bytes=30), 0.25),
        (Memory(parameters_bytes=6), Memory(), None),
        (Memory(), Memory(parameters_bytes=6), None),
    ],
)
def test_the_memory_ratio_takes_what_both_sides_have(ours: Memory, theirs: Memory, ratio: float | None) -> None:
    row = row_of([run("fp32", falling(1.0), memory=theirs), run("bf16", falling(1.0), memory=ours)])
    assert (row.memory, row.memory_ratio) == (ours, ratio)


def test_a_failed_baseline_gives_no_memory_ratio() -> None:
    memory = Memory(parameters_bytes=4)
    row = row_of([run("fp32", [], memory=memory), run("bf16", falling(1.0), memory=memory)])
    assert row.memory_ratio is None


def test_a_row_shows_what_its_first_good_run_did_and_the_mean_of_skips() -> None:
    other = [
        run("bf16", [], seed=0, effective=Effective(flops_by_format={"fp32": 1})),
        run("bf16", falling(1.0), seed=1, effective=EMULATED, skipped=[True, True, True, False], loss_scale=[8.0, 4.0]),
        run("bf16", falling(1.0), seed=2, skipped=[True, True, False, False], loss_scale=[2.0]),
    ]
    row = row_of(series("fp32", [1.0]) + other)
    assert (row.share_by_format, row.num_skipped, row.final_scale) == ({"bf16": 0.75, "fp32": 0.25}, 2.5, 4.0)


# --- the record and wrong calls -----------------------------------------------------------------------------------


def test_the_record_keeps_what_it_was_given() -> None:
    runs = series("bf16", [1.0]) + series("fp32", [1.0])
    record = compare(runs, baseline="bf16", margin=0.5, command=["mezzo", "compare", "train.py"])
    assert (record.baseline, record.margin, record.runs) == ("bf16", 0.5, runs)
    assert (record.command, record.environment) == (["mezzo", "compare", "train.py"], ENVIRONMENT)
    assert CompareRecord.model_validate_json(record.model_dump_json()).rows[1].reason == record.rows[1].reason


@pytest.mark.parametrize(
    ("runs", "baseline", "margin", "error", "message", "hint"),
    [
        (
            series("bf16", [1.0]) + series("fp16", [1.0]),
            "fp32",
            0.02,
            PolicyError,
            "baseline 'fp32' is not a policy that was run; did you mean fp16? Allowed: bf16, fp16",
            "add it to --policies, or choose a baseline among them",
        ),
        (
            [],
            "fp32",
            0.02,
            PolicyError,
            "baseline 'fp32' is not a policy that was run; there is no run at all",
            "add it to --policies, or choose a baseline among them",
        ),
        *(
            (
                series("fp32", [1.0]),
                "fp32",
                margin,
                MezzoError,
                f"margin={margin!r}; allowed: a number above 0",
                "0.02 stands for 2% of the loss that training took off",
            )
            for margin in (0.0, -0.1, NAN, INF)
        ),
    ],
)
def test_wrong_calls(
    runs: list[RunRecord], baseline: str, margin: float, error: type[MezzoError], message: str, hint: str
) -> None:
    with pytest.raises(error) as caught:
        judge(runs, baseline=baseline, margin=margin)
    assert (type(caught.value), caught.value.message, caught.value.hint) == (error, message, hint)


# --- for any runs -------------------------------------------------------------------------------------------------

finals = st.lists(st.floats(0.1, 4.0), min_size=2, max_size=6)
many = settings(max_examples=60, deadline=None)


@many
@given(finals=finals)
def test_a_policy_identical_to_the_baseline_is_equivalent(finals: list[float]) -> None:
    row = row_of(series("fp32", finals) + series("bf16", finals))
    assert (row.verdict, row.reason) == ("equivalent", "every step's loss is identical to fp32's")


@many
@given(finals=finals, shift=st.sampled_from([-1.0, 1.0]), noise=st.lists(st.floats(-0.01, 0.01), min_size=6))
def test_a_shift_far_beyond_the_margin_is_different(finals: list[float], shift: float, noise: list[float]) -> None:
    moved = [[loss + shift + d for loss in falling(final)] for final, d in zip(finals, noise, strict=False)]
    other = [run("bf16", losses, seed=seed) for seed, losses in enumerate(moved)]
    row = row_of(series("fp32", finals) + other, margin=0.02)
    assert row.verdict == "different"
    assert row.loss is not None
    assert math.copysign(1.0, row.loss.low) == math.copysign(1.0, row.loss.high) == shift


differences = st.lists(st.integers(-64, 64).map(lambda n: n / 16), min_size=2, max_size=8)


@many
@given(differences=differences, margin=st.integers(1, 64).map(lambda n: n / 16))
def test_the_sign_of_the_difference_does_not_matter(differences: list[float], margin: float) -> None:
    q, mirrored = paired(differences, margin), paired([-d for d in differences], margin)
    n = len(differences)
    low, high = q.interval(0.95, num_pairs=n)
    assert mirrored.interval(0.95, num_pairs=n) == (-high, -low)
    assert (q.is_inside(num_pairs=n), q.is_outside(num_pairs=n)) == (
        mirrored.is_inside(num_pairs=n),
        mirrored.is_outside(num_pairs=n),
    )
    assert seeds_needed([q]) == seeds_needed([mirrored])


@many
@given(
    differences=differences.filter(lambda d: len(set(d)) > 1), margin=st.integers(1, 64).map(lambda n: n / 16 + 0.01)
)
def test_equivalence_is_two_one_sided_tests_at_five_percent(differences: list[float], margin: float) -> None:
    above = stats.ttest_1samp(differences, -margin, alternative="greater").pvalue
    below = stats.ttest_1samp(differences, margin, alternative="less").pvalue
    q = paired(differences, margin)
    assert q.is_inside(num_pairs=len(q)) == (max(above, below) <= 0.05)


@many
@given(policies=st.lists(st.sampled_from(["fp32", "bf16", "fp16", "fp8", "as-is"]), min_size=1, max_size=12))
def test_rows_keep_the_order_of_first_appearance(policies: list[str]) -> None:
    rows = judge([run(policy, falling(1.0)) for policy in policies], baseline=policies[-1]).rows
    assert [row.policy for row in rows] == list(dict.fromkeys(policies))
    assert [row.num_runs for row in rows] == [policies.count(row.policy) for row in rows]
    assert [row.verdict == "baseline" for row in rows] == [row.policy == policies[-1] for row in rows]
