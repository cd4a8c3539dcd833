"""From measurements to verdict: every limit, by invented measurements with known shares."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from mezzo.measure.bottleneck import (
    DeviceRates,
    Loader,
    OperationTimes,
    OperationWork,
    RunMeasurements,
    bottleneck,
    cpu_rates,
    shares_of,
)
from mezzo.records import GpuUse

RATES = DeviceRates(flops_per_s=1e11, bytes_per_s=1e10)
STEP_S = 0.1
PRODUCT = OperationWork(flops=int(1e10), bytes=int(1e7), cpu_s=0.09)
COPY = OperationWork(flops=0, bytes=int(1e9), cpu_s=0.09)
TINY = OperationWork(flops=100, bytes=100, cpu_s=5e-6)
PLAIN = RunMeasurements(num_steps=10, wall_s=10 * STEP_S, idle_share=0.0, operations=[PRODUCT], rates=RATES)
GPU = GpuUse(name="H100", num_samples=9, utilization=0.97, power_w=400, power_limit_w=700)
LIMITED = GPU.model_copy(update={"power_w": 690.0, "throttled": {"power limit": 0.8}})


SELDOM = LIMITED.model_copy(update={"throttled": {"power limit": 0.1}})
IDLE = GPU.model_copy(update={"utilization": 0.4})
REFUSED = dataclasses.replace(PRODUCT, cpu_s=0.018)


def on_gpu(gpu: GpuUse | None, **more: object) -> RunMeasurements:
    return dataclasses.replace(PLAIN, on_gpu=True, gpu=gpu, **more)


CASES: list[tuple[str, RunMeasurements, str]] = [
    ("products", PLAIN, "arithmetic"),
    ("a copy", dataclasses.replace(PLAIN, operations=[COPY]), "bandwidth"),
    ("tiny operations", dataclasses.replace(PLAIN, operations=[TINY] * 900), "host"),
    ("python alone", dataclasses.replace(PLAIN, operations=[TINY]), "host"),
    ("a loader", dataclasses.replace(PLAIN, input_s=0.5), "input"),
    ("a loader that keeps up", dataclasses.replace(PLAIN, input_s=0.05), "arithmetic"),
    ("a loader's workers", dataclasses.replace(PLAIN, input_s=0.6, idle_share=0.6), "input"),
    ("a lock", dataclasses.replace(PLAIN, idle_share=0.5), "waiting"),
    ("a lock beside a loader", dataclasses.replace(PLAIN, idle_share=0.7, input_s=0.1), "waiting"),
    ("a loader beside a lock", dataclasses.replace(PLAIN, idle_share=0.8, input_s=0.5), "input"),
    ("an exchange", dataclasses.replace(PLAIN, communication_s=0.4, idle_share=0.4), "communication"),
    ("a busy machine", dataclasses.replace(PLAIN, preempted_share=0.8, operations=[REFUSED]), "arithmetic"),
    ("a lock on a busy machine", dataclasses.replace(PLAIN, preempted_share=0.4, idle_share=0.5), "waiting"),
    ("no operations", dataclasses.replace(PLAIN, operations=[]), "unknown"),
    ("too few steps", dataclasses.replace(PLAIN, num_steps=4), "unknown"),
    ("too short", dataclasses.replace(PLAIN, wall_s=0.1), "unknown"),
    ("a busy GPU", on_gpu(GPU), "arithmetic"),
    ("a busy GPU that copies", on_gpu(GPU, operations=[COPY]), "bandwidth"),
    ("a GPU at its power limit", on_gpu(LIMITED), "power"),
    ("a limit reached now and then", on_gpu(SELDOM), "arithmetic"),
    ("a GPU at 40%", on_gpu(IDLE), "host"),
    ("a GPU at 40% that waits for data", on_gpu(IDLE, input_s=0.58), "input"),
    ("a GPU whose thread sleeps", on_gpu(GPU, idle_share=0.9), "arithmetic"),
    ("a GPU without counters", on_gpu(None), "arithmetic"),
    ("a GPU without facts", on_gpu(None, rates=None), "unknown"),
]


@pytest.mark.parametrize(("seen", "limit"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_the_limit_is_named(seen: RunMeasurements, limit: str) -> None:
    found = bottleneck(seen)
    assert found.limit == limit
    assert found.sentence
    assert bool(found.change) == (limit != "unknown")


@pytest.mark.parametrize(
    ("preempted", "sentence"),
    [
        (0.2, "90% of the time is spent in products, and no wait reaches 25%"),
        (
            0.8,
            "90% of the time is spent in products, and no wait of its own reaches 25% (other threads or processes had the cores "
            "for 80% of the whole time)",
        ),
    ],
)
def test_a_busy_machine_is_told_beside_the_waits(preempted: float, sentence: str) -> None:
    work = dataclasses.replace(PRODUCT, cpu_s=PRODUCT.cpu_s * (1 - preempted))
    assert bottleneck(dataclasses.replace(PLAIN, preempted_share=preempted, operations=[work])).sentence == sentence


def test_shares_are_of_the_time_that_others_did_not_take() -> None:
    """Of 1 s: 0.2 s asleep, 0.4 s refused, 0.1 s in a loader that computes, 0.3 s of other work: ready 0.8 s, ran half of it."""
    work = dataclasses.replace(PRODUCT, cpu_s=0.035)
    shares = shares_of(
        dataclasses.replace(
            PLAIN, idle_share=0.2, preempted_share=0.4, input_s=0.1, operations=[work], communication_s=0.0
        )
    )
    # The loader's sleep comes first: its 0.1 s are within the 0.2 s asleep. Left: 0.1 s asleep elsewhere and 0.8 s * 1/2 of work.
    whole = 0.1 + 0.1 + 0.4
    expected = {"input": 0.1 / whole, "waiting": 0.1 / whole, "arithmetic": 0.35 / whole, "host": 0.05 / whole}
    assert shares == pytest.approx(expected | {"preempted": 0.4, "communication": 0, "bandwidth": 0}, abs=1e-4)


@pytest.mark.parametrize(
    ("num_workers", "num_cores", "change"),
    [
        (0, 16, "DataLoader(num_workers=4): it has no workers, so nothing trains while it reads"),
        (0, 2, "DataLoader(num_workers=2): it has no workers, so nothing trains while it reads"),  # torch warns of more
        (2, 16, "more workers than 2, or cheaper transforms and decoding"),
        (2, 2, "cheaper transforms and decoding"),
    ],
)
def test_workers_are_suggested_where_there_are_cores(num_workers: int, num_cores: int, change: str) -> None:
    loader = Loader(num_workers=num_workers, pin_memory=True, persistent_workers=False)
    slow = dataclasses.replace(PLAIN, input_s=0.5, loader=loader, num_cores=num_cores)
    assert bottleneck(slow).change[0] == change


def test_what_a_loader_for_a_gpu_lacks_is_suggested() -> None:
    loader = Loader(num_workers=2, pin_memory=False, persistent_workers=False)
    words = " ".join(bottleneck(dataclasses.replace(PLAIN, input_s=0.5, on_gpu=True, loader=loader)).change)
    assert all(word in words for word in ("persistent_workers=True", "pin_memory=True"))


def test_the_line_that_sleeps_is_named() -> None:
    found = bottleneck(dataclasses.replace(PLAIN, idle_share=0.9, sleeping_line="train.py:15"))
    assert found.line == "train.py:15"
    assert "train.py:15" in found.sentence
    assert "train.py:15" in found.change[0]
    assert bottleneck(dataclasses.replace(PLAIN, sleeping_line="train.py:15")).line == ""


# --- Operations and bytes of a step, against hand counts ---


def test_operations_and_bytes_by_hand() -> None:
    a, b = torch.ones(4, 8), torch.ones(8, 2)
    with OperationTimes() as times:
        a @ b
        a.t()
        a + a
    assert [(o.flops, o.bytes) for o in times.operations] == [(2 * 4 * 8 * 2, 4 * (32 + 16 + 8)), (0, 0), (0, 4 * 64)]
    assert all(o.cpu_s >= 0 for o in times.operations)


def test_a_machine_multiplies_faster_than_it_moves() -> None:
    rates = cpu_rates(torch.get_num_threads())
    assert rates.flops_per_s > rates.bytes_per_s > 1e7
