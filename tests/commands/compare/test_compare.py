"""Verdicts and their reasons, rows over the same seeds, times and memory, against numbers worked out manually."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers_compare import ENVIRONMENT, falling, judge, row_of, run, series, with_metric
from mezzo.commands.compare.judge import compare
from mezzo.errors import MezzoError, PolicyError
from mezzo.records import CompareRecord, Effective, FileRead, Memory, Metric, Note, Row, RunRecord

NAN, INF = math.nan, math.inf
many = settings(max_examples=60, deadline=None)


# --- verdicts on the loss: the baseline ends at 1 with every seed -------------------------------------------------


@pytest.mark.parametrize(
    ("finals", "verdict", "reason"),
    [
        (
            [1.01, 1.012, 1.014],
            "equivalent",
            "loss 1.012 against 1 (+1.2%, 95% CI +0.7% to +1.7%), inside the margin of 2%",
        ),
        (
            [0.99, 0.988, 0.986],
            "equivalent",
            "loss 0.988 against 1 (-1.2%, 95% CI -1.7% to -0.7%), inside the margin of 2%",
        ),
        (  # judged by two one-sided tests at 4% each
            [1.0054, 1.01, 1.0146],
            "equivalent",
            "loss 1.01 against 1 (+1%, 95% CI -0.14% to +2.1%), inside the margin of 2%, by the 92% CI",
        ),
        (
            [1.1, 1.11, 1.12],
            "different",
            "loss 1.11 against 1 (+11%, 95% CI +8.5% to +14%), beyond the margin of 2%",
        ),
        (
            [0.9, 0.89, 0.88],
            "different",
            "loss 0.89 against 1 (-11%, 95% CI -13% to -8.5%), beyond the margin of 2%",
        ),
        (
            [2.4, 2.5, 2.6],
            "different",
            "loss 2.499 against 1 (2.5 times, 95% CI 2.26 to 2.76 times), beyond the margin of 2%",
        ),
        (
            [1.015],
            "undecided",
            "loss 1.015 against 1 (+1.5%), to be judged by a margin of 2%"
            "; one seed has no spread to judge a difference by",
        ),
        ([1.0], "equivalent", "every step's loss is identical to fp32's"),
        ([1.0, 1.0, 1.0], "equivalent", "every step's loss is identical to fp32's"),
    ],
)
def test_the_verdict_and_its_reason(finals: list[float], verdict: str, reason: str) -> None:
    row = row_of(series("fp32", [1.0, 1.0, 1.0]) + series("bf16", finals))
    assert (row.verdict, row.reason, row.seeds_needed) == (verdict, reason, None)


def test_an_undecided_row_says_how_many_seeds_would_decide() -> None:
    row = row_of(series("fp32", [1.0, 1.0, 1.0]) + series("bf16", [1.0, 1.01, 1.02]))
    assert (row.verdict, row.seeds_needed is not None) == ("undecided", True)
    assert row.reason == (
        "loss 1.01 against 1 (+1%, 95% CI -1.5% to +3.5%), partly beyond the margin of 2%; 3 seeds do not decide; "
        f"{row.seeds_needed} would, in 80% of cases or more"
    )


def test_a_policy_may_differ_as_much_as_the_baselines_seeds_do() -> None:
    base = series("fp32", [1.0, 1.3, 1.1, 0.8, 0.95])
    row = row_of(base + series("bf16", [1.02, 1.32, 1.13, 0.82, 0.98]))
    assert row.verdict == "equivalent"
    assert row.reason.endswith("inside the margin of 6.3% (fp32's own seed-to-seed spread)")
    row = row_of(base + series("bf16", [1.11, 1.41, 1.22, 0.91, 1.06]))
    assert row.verdict == "undecided"
    assert "beyond 6.3% (fp32's own seed-to-seed spread), but fp32's own seeds may lie 83% apart" in row.reason


def test_equal_final_losses_on_one_seed_do_not_make_identical_runs() -> None:
    other = [4.0, 5.0, *falling(1.0)[2:]]
    row = row_of([run("fp32", falling(1.0)), run("bf16", other)])
    assert row.loss is not None
    assert (row.loss.difference, row.verdict) == (0.0, "undecided")


def test_a_quantity_beyond_its_margin_counts_among_several() -> None:
    base = with_metric("fp32", [8.003, 8.101, 8.204], name="perplexity")
    row = row_of(base + with_metric("bf16", [9.003, 9.101, 9.204], name="perplexity"))
    assert row.verdict == "different"
    assert row.reason.split("; ")[1].startswith("perplexity 9.102 against 8.102 (+12%, 95% CI +")


# --- the same seeds on both sides ---------------------------------------------------------------------------------


def test_runs_pair_by_seed_whatever_their_order() -> None:
    base = [run("fp32", falling(final), seed=seed) for seed, final in ((1, 2.0), (0, 1.0), (2, 4.0))]
    other = [run("bf16", falling(final), seed=seed) for seed, final in ((2, 4.4), (7, 4.5), (0, 1.1), (1, 2.2))]
    loss = row_of(other + base).loss
    assert loss is not None
    assert (loss.value, loss.baseline, loss.low, loss.high) == pytest.approx((2.2, 2.0, 0.1, 0.1))


@pytest.mark.parametrize("seed", [None, 4])
def test_runs_that_share_a_seed_pair_in_order(seed: int | None) -> None:
    base = [run("fp32", falling(final), seed=seed) for final in (1.0, 2.0)]
    other = [run("bf16", falling(final), seed=seed) for final in (1.5, 3.0)]
    loss = row_of(base + other).loss
    assert loss is not None
    assert (loss.low, loss.high) == pytest.approx((0.5, 0.5))


def test_a_row_is_computed_over_the_seeds_that_trained_on_both_sides() -> None:
    memory = [Memory(parameters_bytes=n, gradients_bytes=0, optimizer_bytes=0, activations_bytes=0) for n in (8, 4, 2)]
    base = [
        run("fp32", [], seed=0, error="killed"),
        run("fp32", falling(2.0), seed=1, time_ms=[8.0] * 8, memory=memory[0]),
        run("fp32", falling(4.0), seed=2, time_ms=[12.0] * 8, memory=memory[0]),
    ]
    other = [
        run("bf16", falling(9.0), seed=0, time_ms=[99.0] * 8, skipped=[True] * 10 + [False] * 10, memory=memory[2]),
        run("bf16", falling(2.0), seed=1, time_ms=[4.0] * 8, skipped=[True] + [False] * 19, memory=memory[1]),
        run("bf16", falling(4.0), seed=2, time_ms=[4.0] * 8, memory=memory[1]),
    ]
    rows = judge(base + other).rows
    assert rows[1].loss is not None
    assert rows[1].loss.value == rows[1].loss.baseline == pytest.approx(math.sqrt(8))
    assert (rows[1].step_ms, rows[1].speedup, rows[1].num_skipped) == (4.0, 2.5, 0.5)
    assert (rows[1].memory, rows[1].memory_ratio) == (memory[1], 0.5)
    assert (rows[0].step_ms, rows[0].num_runs, rows[0].num_failed) == (10.0, 3, 1)


# --- runs that failed ---------------------------------------------------------------------------------------------


def test_a_seed_that_fails_where_the_baselines_succeeds_bars_equivalent() -> None:
    other = series("bf16", [1.0, 1.0, 1.0])
    other[1] = run("bf16", falling(1.0), seed=1, error="RuntimeError: loss is not finite at step 40")
    row = row_of(series("fp32", [1.0, 1.0, 1.0]) + other)
    assert (row.verdict, row.num_failed) == ("failed", 1)
    assert row.reason == (
        "1 of 3 runs failed where fp32 did not: with seed 1, RuntimeError: loss is not finite at step 40; "
        "loss 1 against 1 (0%, 95% CI 0% to 0%), inside the margin of 2%"
    )


def test_a_seed_that_fails_under_the_baseline_too_is_reported_without_an_objection() -> None:
    base, other = series("fp32", [1.0, 1.0, 1.0]), series("bf16", [1.0, 1.0, 1.0])
    base[1], other[1] = (r.model_copy(update={"error": "no memory"}) for r in (base[1], other[1]))
    rows = judge(base + other).rows
    assert rows[0].reason == "1 of 3 runs failed: with seed 1, no memory; the others are compared with its loss 1"
    assert (rows[1].verdict, rows[1].reason) == (
        "equivalent",
        "every step's loss is identical to fp32's; 1 of 3 runs failed: with seed 1, no memory",
    )


def test_a_policy_whose_runs_all_fail_failed() -> None:
    failed = [run("fp16", [], seed=0, error="it ran out of memory"), run("fp16", falling(1.0), seed=1, error="late")]
    row = row_of(failed + series("fp32", [1.0, 1.0]), "fp16")
    assert (row.verdict, row.reason, row.loss, row.step_ms) == ("failed", "it ran out of memory", None, None)
    assert (row.num_runs, row.num_failed) == (2, 2)


def test_a_run_that_diverged_says_more_than_one_that_failed() -> None:
    other = [run("bf16", [], seed=0, error="stopped"), run("bf16", falling(NAN), seed=1)]
    row = row_of(series("fp32", [1.0, 1.0]) + other)
    assert (row.verdict, row.reason) == (
        "diverged",
        "1 of 2 runs diverged: with seed 1, 2 of the last 2 values of the loss are NaN; 1 of 2 runs failed: with seed 0, stopped",
    )


def test_a_failed_run_keeps_its_place_among_runs_without_a_seed() -> None:
    base = [run("fp32", falling(final), seed=None) for final in (1.0, 2.0)]
    other = [run("bf16", [], seed=None, error="stopped"), run("bf16", falling(2.5), seed=None)]
    row = row_of(base + other)
    assert row.loss is not None
    assert row.loss.baseline == pytest.approx(2.0)
    assert row.reason.startswith("1 of 2 runs failed where fp32 did not: with run 1, stopped")


@pytest.mark.parametrize(
    ("base", "verdict", "reason"),
    [
        (run("fp32", [], error="no such file"), "failed", "no such file"),
        (
            run("fp32", falling(NAN)),
            "baseline",
            "the only run diverged: with seed 0, 2 of the last 2 values of the loss are NaN; no run of it can serve for comparison",
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


# --- numbers of steps ---------------------------------------------------------------------------------------------


def test_another_number_of_steps_is_no_equivalence() -> None:
    base = [run("fp32", falling(1.0, num_steps=100), seed=seed) for seed in range(3)]
    half = [run("bf16", falling(1.0, num_steps=50), seed=seed) for seed in range(3)]
    row = row_of(base + half)
    assert row.verdict == "different"
    assert row.reason.startswith("ran 50 steps where fp32 ran 100 with seed 0, and 2 more like it; loss 1 against 1")
    one = row_of([*base, *(run("bf16", falling(1.0, num_steps=99 + (seed > 0)), seed=seed) for seed in range(3))])
    assert one.verdict == "different"
    assert one.reason.startswith("ran 99 steps where fp32 ran 100 with seed 0; ")


def test_where_the_baselines_own_numbers_of_steps_differ_nothing_is_decided() -> None:
    base = [run("fp32", falling(1.0, num_steps=100 + seed), seed=seed) for seed in range(3)]
    other = [run("bf16", falling(1.0, num_steps=101 + seed), seed=seed) for seed in range(3)]
    row = row_of(base + other)
    assert (row.verdict, row.reason.split("; ")[0]) == (
        "undecided",
        "ran 101 steps where fp32 ran 100 with seed 0, and 2 more like it",
    )


# --- steps that a CUDA graph replays ----------------------------------------------------------------------------------------

REPLAYED = Effective(num_replays=100)


@pytest.mark.parametrize("which", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("final", "verdict", "place"), [(1.0, "undecided", 0), (1.5, "different", 0)], ids=["alike", "different"]
)
def test_no_verdict_calls_runs_equivalent_whose_steps_a_graph_replays(
    which: str, final: float, verdict: str, place: int
) -> None:
    runs = series("fp32", [1.0, 1.01, 0.99]) + series("bf16", [final, final + 0.01, final - 0.01])
    assert row_of(runs).verdict == ("equivalent" if verdict == "undecided" else verdict)
    known = [one.model_copy(update={"effective": REPLAYED}) if one.policy == which else one for one in runs]
    row = row_of(known)
    assert row.verdict == verdict
    assert row.reason.split("; ")[place] == (
        "100 replays of a CUDA graph are missing from the 20 recorded steps with seed 0: what the script trains in them is not compared"
    )
    assert row.speedup is None


# --- runs that depend on each other -------------------------------------------------------------------------------

BEGAN = 1_700_000_000.0


def timed_run(policy: str, seed: int, *, began: float, reads: float | None = None) -> RunRecord:
    """Return a run of ten seconds, whose first update ends in its second one, that reads a file of this time."""
    read = [] if reads is None else [FileRead(path="/out/last.pt", written_at_s=BEGAN + reads)]
    time_ms = [2000.0] + [400.0] * 19
    more = {"started_at_s": BEGAN + began, "duration_s": 10.0, "files_read": read, "time_ms": time_ms}
    return run(policy, falling(1.0), seed=seed, **more)


@pytest.mark.parametrize(
    ("written", "depends"),
    [
        (9.5, True),  # the checkpoint at the end of the first run
        (2.01, True),  # just after its first update
        (1.5, False),  # a data set that was prepared before it
        (1.0, True),  # whole seconds may be of a file system that has no finer ones, in which 2.5 is 2 or even 1
        (-3.0, False),  # before the comparison
        (12.0, False),  # between the runs: by none of them
    ],
)
def test_a_file_written_after_an_earlier_runs_first_update_bars_a_verdict(written: float, depends: bool) -> None:
    record = judge([timed_run("fp32", 0, began=0.0), timed_run("bf16", 0, began=13.0, reads=written)])
    row = record.rows[1]
    assert [(f.path, f.written_by, f.read_by) for f in record.shared_files] == (
        [("/out/last.pt", "fp32 with seed 0", "bf16 with seed 0")] if depends else []
    )
    assert row.verdict == ("undecided" if depends else "equivalent")
    assert (row.reason == (
        "its runs are not independent: the run of bf16 with seed 0 read /out/last.pt, which the run of fp32 with seed 0 had "
        "written. Give each run its own path with {run} in the script's arguments, as in --output_dir out/{run}, or let "
        "the script remove the file when it begins"
    )) == depends  # fmt: skip


def test_a_baseline_that_depends_on_another_run_bars_every_verdict() -> None:
    runs = [
        timed_run("bf16", 0, began=0.0),
        timed_run("fp32", 0, began=13.0, reads=9.5),
        timed_run("fp16", 0, began=26.0),
    ]
    rows = judge(runs).rows
    assert [row.verdict for row in rows] == ["undecided", "baseline", "undecided"]
    assert all("its runs are not independent" in row.reason for row in rows)


def test_a_run_that_found_its_training_done_depends_on_the_one_that_did_it() -> None:
    idle = timed_run("bf16", 0, began=13.0, reads=9.5).model_copy(update={"error": "it never called backward()"})
    row = row_of([timed_run("fp32", 0, began=0.0), idle])
    assert (row.verdict, row.num_failed) == ("undecided", 1)
    assert row.reason.startswith("its runs are not independent: the run of bf16 with seed 0 read /out/last.pt")
    assert row.reason.endswith("; the only run failed: with seed 0, it never called backward()")


def test_the_numbers_of_dependent_runs_are_not_explained() -> None:
    other = timed_run("bf16", 0, began=13.0, reads=9.5).model_copy(update={"memory": Memory(parameters_bytes=9)})
    other = other.model_copy(update={"steps": other.steps.model_copy(update={"skipped": [True] * 10 + [False] * 10})})
    row = row_of([timed_run("fp32", 0, began=0.0), other])
    assert row.reason.endswith("or let the script remove the file when it begins")


# --- the metric ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("metrics", "verdict"),
    [
        ([8.0, 8.01, 8.02], "equivalent"),
        ([4.0, 4.125, 4.25], "different"),
        ([4.0, 8.0, 12.0], "undecided"),
        ([8.0, 8.0, 8.0], "equivalent"),
    ],
)
def test_the_metric_has_to_pass_too(metrics: list[float | None], verdict: str) -> None:
    base = with_metric("fp32", [8.0, 8.0, 8.0], name="perplexity")
    assert row_of(base + with_metric("bf16", metrics, name="perplexity")).verdict == verdict


def test_the_baselines_row_names_what_the_others_are_compared_with() -> None:
    rows = judge(with_metric("fp32", [8.0] * 3, name="loss_ema") + with_metric("bf16", [8.0] * 3, name="loss_ema")).rows
    assert rows[0].reason == "the others are compared with its loss 1 and loss_ema 8"


def with_metrics(policy: str, metrics: list[Metric | None]) -> list[RunRecord]:
    return [run(policy, falling(1.0), seed=i).model_copy(update={"metric": m}) for i, m in enumerate(metrics)]


GOOD = Metric(name="val acc", pattern="", steps=[1], values=[0.95])
EMPTY = Metric(name="val acc", pattern="")


@pytest.mark.parametrize(
    ("base", "other", "reason"),
    [
        ([GOOD, GOOD], [GOOD, EMPTY], "val acc was not printed under bf16 with seed 1"),
        ([GOOD, GOOD], [GOOD, None], "val acc was not printed under bf16 with seed 1"),
        ([EMPTY, GOOD], [GOOD, GOOD], "val acc was not printed under fp32 with seed 0"),
        ([EMPTY, EMPTY], [EMPTY, EMPTY], "val acc was not printed under bf16 with seed 0"),
        (
            [GOOD, GOOD],
            [GOOD.model_copy(update={"text": "n/a"}), GOOD],
            "val acc came out as 'n/a', which is not a number, under bf16 with seed 0",
        ),
        (
            [GOOD.model_copy(update={"values": [NAN]})] * 2,
            [GOOD.model_copy(update={"values": [NAN]})] * 2,
            "val acc came out as nan under bf16 with seed 0",
        ),
    ],
)
def test_a_metric_that_is_missing_bars_equivalent(
    base: list[Metric | None], other: list[Metric | None], reason: str
) -> None:
    row = row_of(with_metrics("fp32", base) + with_metrics("bf16", other))
    assert (row.verdict, row.reason.split("; ")[0]) == ("undecided", reason)


def test_no_metric_is_missed_where_none_was_asked_for() -> None:
    assert row_of(series("fp32", [1.0, 1.0]) + series("bf16", [1.0, 1.0])).verdict == "equivalent"


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


def test_the_speedup_is_the_ratio_of_the_two_times_that_are_shown() -> None:
    rows = judge(timed("fp32", [8.0, 6.0, 12.0]) + timed("bf16", [4.0, 2.0, 8.0, 1.0])).rows
    assert times_of(rows[0]) == (8.0, 1.0, 1.0, 1.0)
    assert times_of(rows[1]) == (3.0, 8.0 / 3.0, 1.5, 3.0)  # the fourth seed has no partner, and no ratio of its own


def test_the_range_of_a_speedup_holds_the_speedup() -> None:
    """Five steps after warm-up for each seed: the median over both seeds may lie beyond either seed's ratio."""
    base = [
        run("fp32", falling(1.0), seed=i, time_ms=[9.0] * 3 + times) for i, times in enumerate([[4.0] * 5, [8.0] * 5])
    ]
    other = [
        run("bf16", falling(1.0), seed=i, time_ms=[9.0] * 3 + times) for i, times in enumerate([[2.0] * 7, [4.0] * 5])
    ]
    assert times_of(judge(base + other).rows[1]) == (2.0, 3.0, 2.0, 3.0)


def test_the_ratio_of_one_seed_has_no_spread_and_is_called_neither_faster_nor_slower() -> None:
    row = judge(timed("fp32", [8.0]) + timed("bf16", [16.0])).rows[1]
    assert times_of(row) == (16.0, 0.5, None, None)
    assert "slower" not in row.reason


WIDE = Effective(
    flops_by_format={"fp32": 4},
    left_alone=[Note(what="FP32 code", value="all", reason="forward code outside any module")],
)


@pytest.mark.parametrize(
    ("policy", "effective", "verdict"),
    [
        ("fp16", WIDE, "undecided"),
        ("bf16:op_lists=device", WIDE, "undecided"),
        ("tf32", WIDE, "equivalent"),  # lowers nothing below 32 bits
        ("as-is", WIDE, "equivalent"),
        ("fp16", Effective(), "equivalent"),  # no products, so nothing was counted
        ("fp16", Effective(flops_by_format={"fp32": 3, "fp16": 1}), "equivalent"),
        ("fp8", Effective(flops_by_format={"bf16": 3, "e4m3": 1}), "equivalent"),
    ],
)
def test_a_policy_under_which_nothing_was_lowered_shows_nothing_of_it(
    policy: str, effective: Effective, verdict: str
) -> None:
    row = row_of(series("fp32", [1.0, 1.1]) + series(policy, [1.0, 1.1], effective=effective), policy)
    assert row.verdict == verdict
    told = f"{policy} changed nothing, so this shows nothing about it: 100% fp32 ran (FP32 code: forward code outside any module); "
    assert row.reason.startswith(told) == (verdict == "undecided")


def test_a_policy_that_lowered_nothing_in_a_script_without_products_shows_nothing_of_it() -> None:
    row = row_of(series("fp32", [1.0, 1.1]) + series("fp16", [1.0, 1.1], effective=Effective(num_lowered=0)), "fp16")
    told = "fp16 changed nothing, so this shows nothing about it: no operation ran below 32 bits; "
    assert (row.verdict, row.reason[: len(told)]) == ("undecided", told)


OWN_16_BITS = Effective(flops_by_format={"fp16": 9, "fp32": 1}, own_16_bits="Net")
MULTIPLIES_BY_ITSELF = Effective(flops_by_format={"bf16": 1, "fp32": 1})


@pytest.mark.parametrize(
    ("effective", "losses", "verdict"),
    [
        (OWN_16_BITS, [1.0, 1.001, 1.002], "undecided"),
        (OWN_16_BITS, [1.5, 1.501, 1.502], "undecided"),
        (MULTIPLIES_BY_ITSELF, [1.0, 1.001, 1.002], "equivalent"),
        (MULTIPLIES_BY_ITSELF, [1.5, 1.501, 1.502], "different"),
    ],
)
def test_a_script_with_16_bit_weights_of_its_own_has_no_fp32_run_to_compare_with(
    effective: Effective, losses: list[float], verdict: str
) -> None:
    row = row_of(series("fp32", [1.0, 1.001, 1.002], effective=effective) + series("bf16", losses), "bf16")
    assert row.verdict == verdict
    told = "fp32 is not an FP32 run: the script itself keeps the weights of Net in 16 bits, and may scale its losses by itself; "
    assert row.reason.startswith(told) == (verdict == "undecided")


def test_an_fp8_policy_under_which_all_ran_in_16_bits_shows_nothing_of_fp8() -> None:
    small = Note(what="not in fp8", value="head", reason="the last linear layer")
    effective = Effective(flops_by_format={"bf16": 4}, left_alone=[small])
    row = row_of(series("fp32", [1.0, 1.1]) + series("fp8", [1.0, 1.1], effective=effective), "fp8")
    assert row.verdict == "undecided"
    assert row.reason.startswith(
        "fp8 computed nothing in FP8, so this shows nothing about it: 100% bf16 ran (not in fp8: the last linear layer); "
    )


EMULATED = Effective(flops_by_format={"bf16": 3, "fp32": 1}, emulated=True)


def test_an_emulated_row_claims_no_speed() -> None:
    half = [*timed("bf16", [2.0]), run("bf16", falling(1.0), seed=1, time_ms=[2.0] * 8, effective=EMULATED)]
    base, row = judge(timed("fp32", [8.0, 8.0]) + half).rows
    assert (base.emulated, row.emulated) == (False, True)
    assert times_of(row) == (2.0, None, None, None)
    assert "slower" not in row.reason


def test_no_row_claims_speed_over_an_emulated_baseline() -> None:
    rows = judge(timed("fp32", [2.0]) + timed("bf16", [8.0], effective=EMULATED), baseline="bf16").rows
    assert [times_of(row) for row in rows] == [(2.0, None, None, None), (8.0, None, None, None)]


def test_runs_without_times_give_no_speedup() -> None:
    row = row_of(timed("fp32", [8.0]) + series("bf16", [1.0]))
    assert times_of(row) == (None, None, None, None)


def of(size: int, **peaks: int) -> Memory:
    return Memory(parameters_bytes=size, gradients_bytes=0, optimizer_bytes=0, activations_bytes=0, **peaks)


@pytest.mark.parametrize(
    ("ours", "theirs", "ratio"),
    [
        (of(12), of(24), 0.5),
        (of(6, cuda_allocated_bytes=30), of(8, cuda_allocated_bytes=40), 0.75),
        (of(2, cuda_allocated_bytes=30), of(8), 0.25),
        (of(2), of(8, cuda_allocated_bytes=30), 0.25),
        (of(12, of_emulation=True), of(24), None),
        (of(30), of(24, of_emulation=True), None),
        (of(6), Memory(), None),
        (Memory(), of(6), None),
        (Memory(parameters_bytes=6, gradients_bytes=6, optimizer_bytes=0), of(18), None),  # activations are not known
    ],
)
def test_the_memory_ratio_takes_what_both_sides_have(ours: Memory, theirs: Memory, ratio: float | None) -> None:
    row = row_of([run("fp32", falling(1.0), memory=theirs), run("bf16", falling(1.0), memory=ours)])
    assert (row.memory, row.memory_ratio) == (ours, ratio)


def test_a_failed_baseline_gives_no_memory_ratio() -> None:
    row = row_of([run("fp32", [], memory=of(4)), run("bf16", falling(1.0), memory=of(4))])
    assert row.memory_ratio is None


@pytest.mark.parametrize(
    ("ours_ms", "size", "notes"),
    [
        ([10.0, 12.5], 8, "; slower: a step takes 1.41 times as long as fp32's"),
        ([7.0, 12.5], 8, ""),  # in one seed it is not
        ([8.1, 8.2], 8, ""),  # by less than a twentieth
        ([8.0, 8.0], 10, "; larger: it takes 1.25 times fp32's memory"),
        ([16.0, 16.0], 16, "; slower: a step takes 2 times as long as fp32's; larger: it takes 2 times fp32's memory"),
        ([4.0, 4.0], 4, ""),
    ],
)
def test_a_slower_or_larger_policy_is_called_that(ours_ms: list[float], size: int, notes: str) -> None:
    base = timed("fp32", [8.0, 8.0], memory=of(8))
    row = row_of(base + timed("bf16", ours_ms, memory=of(size)))
    assert row.reason == f"every step's loss is identical to fp32's{notes}"


def test_a_row_shows_what_its_first_run_did_and_the_mean_of_skips() -> None:
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
                "0.02 stands for 2% of the baseline's final loss",
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


@many
@given(finals=finals)
def test_a_policy_identical_to_the_baseline_is_equivalent(finals: list[float]) -> None:
    row = row_of(series("fp32", finals) + series("bf16", finals))
    assert (row.verdict, row.reason) == ("equivalent", "every step's loss is identical to fp32's")


@many
@given(policies=st.lists(st.sampled_from(["fp32", "bf16", "fp16", "fp8", "as-is"]), min_size=1, max_size=12))
def test_rows_keep_the_order_of_first_appearance(policies: list[str]) -> None:
    rows = judge([run(policy, falling(1.0)) for policy in policies], baseline=policies[-1]).rows
    assert [row.policy for row in rows] == list(dict.fromkeys(policies))
    assert [row.num_runs for row in rows] == [policies.count(row.policy) for row in rows]
    assert [row.verdict == "baseline" for row in rows] == [row.policy == policies[-1] for row in rows]
