"""The bound on a policy's gain, against hand counts with an A100's 19.5 and 312 TFLOP/s and 2039 GB/s."""

from __future__ import annotations

import pytest

from mezzo.commands.check.worth import StepWork, bound
from mezzo.gpus import GPUS

A100, V100 = GPUS["a100-80gb"], GPUS["v100-16gb"]
TERA = 10**12


@pytest.mark.parametrize(
    ("baseline", "policy", "times", "share", "limit"),
    [
        # 0.9 of the FLOPs 16 times as fast: 1 / (0.1 + 0.9 / 16)
        (StepWork(flops_by_format={"fp32": TERA}, bytes=None), {"bf16": 9, "fp32": 1}, 6.4, 0.9, "compute"),
        (StepWork(flops_by_format={"fp32": TERA}, bytes=None), {"bf16": 10}, 16.0, 1.0, "compute"),
        # nothing was lowered
        (StepWork(flops_by_format={"fp32": TERA}, bytes=None), {"fp32": 10}, 1.0, 0.0, "compute"),
        # against TF32 the units are twice as fast
        (StepWork(flops_by_format={"tf32": TERA}, bytes=None), {"bf16": 10}, 2.0, 1.0, "compute"),
    ],
)
def test_compute_follows_amdahl(
    baseline: StepWork, policy: dict[str, int], times: float, share: float, limit: str
) -> None:
    ours = StepWork(flops_by_format={name: n * TERA // 10 for name, n in policy.items()}, bytes=None)
    found = bound(baseline, ours, A100)
    assert found is not None
    assert (found.times, found.share, found.limit) == (pytest.approx(times), pytest.approx(share), limit)


def test_milliseconds_at_the_peak() -> None:
    one, other = (
        StepWork(flops_by_format={"fp32": TERA}, bytes=None),
        StepWork(flops_by_format={"bf16": TERA}, bytes=None),
    )
    found = bound(one, other, A100)
    assert found is not None
    assert found.policy_ms == pytest.approx(3.2051282)  # 1e12 / 312e12 s
    assert found.times == pytest.approx(16)
    assert found.rates == {"fp32": 19.5e12, "bf16": 312e12}


def test_little_arithmetic_is_limited_by_bytes() -> None:
    found = bound(
        StepWork(flops_by_format={"fp32": 10}, bytes=4 * 10**9),
        StepWork(flops_by_format={"bf16": 10}, bytes=2 * 10**9),
        A100,
    )
    assert found is not None
    assert found.times == pytest.approx(2.0)
    assert found.limit == "memory"
    assert found.policy_ms == pytest.approx(2 * 2e9 / 2039e9 * 1e3)


def test_the_bytes_stop_what_the_units_could_gain() -> None:
    # FP32: 1 ms of products hide 2 * 0.5e9 / 2039e9 s = 0.4904 ms of traffic. BF16: 0.0625 ms of products do not.
    found = bound(
        StepWork(flops_by_format={"fp32": 195 * 10**8}, bytes=5 * 10**8),
        StepWork(flops_by_format={"bf16": 195 * 10**8}, bytes=5 * 10**8),
        A100,
    )
    assert found is not None
    assert found.times == pytest.approx(2.039)
    assert found.limit == "memory"


def test_bytes_that_only_one_run_measured_count_for_neither() -> None:
    found = bound(
        StepWork(flops_by_format={"fp32": TERA}, bytes=10**15),
        StepWork(flops_by_format={"bf16": TERA}, bytes=None),
        A100,
    )
    assert found is not None
    assert found.times == pytest.approx(16.0)


@pytest.mark.parametrize(
    ("baseline", "policy"),
    [
        ({}, {}),  # nothing was counted
        ({"fp32": 0}, {"fp32": 0}),
        ({"fp32": 10}, {"bf16": 10}),  # a V100 has no units for it
        ({"fp64": 10}, {"fp64": 10}),  # rates of FP64 are not among the facts
    ],
)
def test_no_bound_without_a_rate(baseline: dict[str, int], policy: dict[str, int]) -> None:
    found = bound(StepWork(flops_by_format=baseline, bytes=1), StepWork(flops_by_format=policy, bytes=1), V100)
    assert found is None
