"""Times are compared between runs on like devices with equally many concurrent runs; otherwise the row says why not."""

from __future__ import annotations

from typing import Any

import pytest

from helpers_compare import ENVIRONMENT, judge, run
from mezzo.records import Environment, Placement, RunRecord

LOSS = [1.0 / step for step in range(1, 21)]


def timed(policy: str, seed: int, step_ms: float, *, placement: Placement | None = None, **where: Any) -> RunRecord:
    environment: Environment = ENVIRONMENT.model_copy(update=where)
    return run(policy, LOSS, seed=seed, time_ms=[step_ms] * len(LOSS), environment=environment, placement=placement)


def test_runs_on_like_terms_are_timed() -> None:
    side_by_side = Placement(jobs=2, host="a", threads=1)
    there = side_by_side.model_copy(update={"host": "b", "gpus": "1"})  # like machines have many names
    runs = [timed("fp32", 0, 10.0, placement=side_by_side), timed("bf16", 0, 5.0, placement=there)]
    row = judge(runs).rows[1]
    assert (row.speedup, "not compared" in row.reason) == (2.0, False)


UNLIKE = [
    ({"gpu": "NVIDIA L4", "device": "cuda"}, None, "device NVIDIA L4, the baseline's cpu"),
    ({"cpu": "y"}, None, "CPU y, the baseline's x"),
    ({"threads": 4}, None, "threads 4, the baseline's 1"),
    ({}, Placement(jobs=4), "runs at once 4, the baseline's 1"),
    ({}, Placement(jobs=0, through="slurm", gpus="0"), "runs at once not known, the baseline's 1"),
    ({}, Placement(jobs=1, through="ray", gpus="0"), "placed by ray, the baseline's mezzo"),
]


@pytest.mark.parametrize(("where", "placement", "why"), UNLIKE)
def test_unlike_runs_are_not_timed_and_the_row_says_why(
    where: dict[str, Any], placement: Placement | None, why: str
) -> None:
    runs = [timed("fp32", seed, 10.0) for seed in range(2)]
    runs += [timed("bf16", 0, 5.0), timed("bf16", 1, 5.0, placement=placement, **where)]
    baseline, row = judge(runs).rows
    assert (row.speedup, row.speedup_low, row.speedup_high) == (None, None, None)
    assert row.verdict == "equivalent"
    said = f"times are not compared, because the runs were not timed under the same conditions (seed 1: {why})"
    assert row.reason.endswith(said)
    assert "not compared" not in baseline.reason


def test_a_cluster_without_gpus_may_have_run_other_work() -> None:
    placement = Placement(jobs=0, through="slurm", threads=1)
    runs = [timed("fp32", 0, 10.0, placement=placement), timed("bf16", 0, 5.0, placement=placement)]
    row = judge(runs).rows[1]
    assert row.speedup is None
    assert row.reason.endswith("the cluster may have run other work on the same CPU")
    on_gpu = placement.model_copy(update={"gpus": "0"})
    runs = [timed("fp32", 0, 10.0, placement=on_gpu), timed("bf16", 0, 5.0, placement=on_gpu)]
    assert judge(runs).rows[1].speedup == 2.0


@pytest.mark.parametrize(
    ("formats", "speedup"),
    [
        ({"fp32": 8}, None),  # a device without TF32: any difference is noise
        ({"tf32": 8}, 2.0),
        ({}, 2.0),  # not counted
    ],
)
def test_tf32_has_a_speed_only_where_products_ran_in_it(formats: dict[str, int], speedup: float | None) -> None:
    def counted(record: RunRecord, by_format: dict[str, int]) -> RunRecord:
        effective = record.effective.model_copy(update={"flops_by_format": by_format})
        return record.model_copy(update={"effective": effective})

    runs = [counted(timed("fp32", 0, 10.0), {"fp32": 8} if formats else {}), counted(timed("tf32", 0, 5.0), formats)]
    row = judge(runs).rows[1]
    assert (row.speedup, "no product ran in TF32" in row.reason) == (speedup, speedup is None)
