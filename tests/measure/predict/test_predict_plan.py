"""Predictions from tapes: what is possible, what fits, and the verdict in a sentence."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import pytest
from torch import nn

from helpers_predict import trained_tape
from helpers_values import existing
from mezzo.errors import UsageError
from mezzo.gpus import gpu_named
from mezzo.measure.predict import plan
from mezzo.measure.predict.host import Host
from mezzo.measure.predict.plan import (
    Tapes,
    check_policies,
    impossible,
    memory_on,
    predict,
    recorded_as,
    slower_than,
    verdict,
)
from mezzo.measure.predict.sharding import GpuGroup
from mezzo.measure.predict.tape import TrainingTape
from mezzo.measure.predict.tape_memory import DRIVER_BYTES, PredictedMemory, predict_memory
from mezzo.records import DataSet, LoaderRate

MIB = 1 << 20
FAST = Host(operation_s=1e-6, source="a host that bounds no step here")


def _tape(policy: str, batch: int) -> TrainingTape:
    build = lambda: nn.Sequential(nn.Linear(256, 4096), nn.ReLU(), nn.Linear(4096, 256))  # noqa: E731
    return trained_tape(build, 256, batch=batch, policy=policy)


@pytest.fixture(scope="module")
def tapes() -> dict[str, Tapes]:
    return {policy: Tapes.record(partial(_tape, policy), 64) for policy in ("fp32", "fp16")}


def test_a_prediction(tapes: dict[str, Tapes]) -> None:
    found = predict(tapes, gpu_named("a100-80gb"), "fp16", batch=64)
    assert found.possible
    assert found.fits
    assert found.throughput == pytest.approx(64 / (found.step_ms / 1e3))
    assert found.throughput_low < found.throughput < found.throughput_high
    assert found.allocated_bytes <= found.reserved_bytes == found.device_bytes - DRIVER_BYTES
    assert sum(found.bounds.values()) == pytest.approx(1)
    assert found.memory_bytes["parameters"] == 4 * (2 * 256 * 4096 + 4096 + 256)


def test_fp32_is_its_own_baseline(tapes: dict[str, Tapes]) -> None:
    found = predict(tapes, gpu_named("t4"), "fp32", batch=64)
    assert (found.over_fp32, found.over_tf32) == (1.0, None)
    tf32 = predict(tapes, gpu_named("t4"), "tf32", batch=64)
    assert tf32.reason == "T4 has no TF32: this is FP32"


@pytest.mark.parametrize(("gpu", "copied"), [("a100-80gb", True), ("t4", False)])
def test_convolutions_take_copies_in_tf32_alone(gpu: str, copied: bool) -> None:
    def convolved(batch: int) -> TrainingTape:
        build = lambda: nn.Sequential(nn.Conv2d(16, 64, 3), nn.Conv2d(64, 64, 3))  # noqa: E731
        return trained_tape(build, 16, 64, 64, batch=batch)

    both = {"fp32": Tapes.record(convolved, 64)}
    card = dataclasses.replace(gpu_named(gpu), memory_bytes=DRIVER_BYTES + 1024 * MIB)
    strict, tf32 = (predict(both, card, policy, batch=64) for policy in ("fp32", "tf32"))
    assert (tf32.allocated_bytes > strict.allocated_bytes) == copied
    # each largest batch is that of its own policy, though both share a tape
    for found, policy in ((strict, "fp32"), (tf32, "tf32")):
        assert found.largest_batch
        assert memory_on(both["fp32"].at(found.largest_batch), card, policy, headroom=0.13).fits


def test_the_largest_batch_fits_and_a_larger_one_does_not(tapes: dict[str, Tapes]) -> None:
    gpu = dataclasses.replace(gpu_named("t4"), memory_bytes=DRIVER_BYTES + 400 * MIB)
    made = predict(tapes, gpu, "fp32", batch=64, data=DataSet(samples=10**6))
    found = existing(made.largest_batch)
    assert made.largest_limit == "memory"
    for batch, fits in ((found, True), (found + found // 20, False)):
        assert memory_on(tapes["fp32"].at(batch), gpu, "fp32", headroom=0.13).fits == fits


@pytest.mark.parametrize(
    ("data", "num_gpus", "largest", "limit"),
    [
        (DataSet(samples=1797), 1, 1797, "data set"),
        (DataSet(samples=1797), 4, 449, "data set"),
        (DataSet(samples=1797, processes=8), 4, 224, "data set"),  # the script's own sampler shares it already
        (DataSet(samples=3), 4, 1, "data set"),
        (DataSet(reason="a stream"), 1, plan.MOST_MEASURED, "measured"),
        (None, 1, plan.MOST_MEASURED, "measured"),
    ],
)
def test_where_memory_would_hold_more_the_data_or_the_measurements_end_the_largest_batch(
    tapes: dict[str, Tapes], data: DataSet | None, num_gpus: int, largest: int, limit: str
) -> None:
    job = GpuGroup(num_gpus)
    made = predict(tapes, gpu_named("h100"), "fp16", batch=64, job=job, data=data)
    assert (made.largest_batch, made.largest_limit) == (largest, limit)


def test_a_traced_batch_above_all_measured_ones_is_within_the_limit(tapes: dict[str, Tapes]) -> None:
    made = predict(tapes, gpu_named("h100"), "fp16", batch=5000)
    assert (made.largest_batch, made.largest_limit) == (5000, "measured")


def test_what_delivers_less_than_the_gpu_trains_on_is_said(tapes: dict[str, Tapes]) -> None:
    def slower(rate: float | None, *, num_gpus: int = 1, gpu: str = "t4") -> tuple[str, float]:
        job, loader = GpuGroup(num_gpus), LoaderRate(samples_per_s=rate)
        made = predict(tapes, gpu_named(gpu), "fp32", batch=64, job=job, loader=loader)
        return made.slower, made.throughput

    alone, rate = slower(None)
    assert alone == ""
    assert slower(rate / 2)[0] == "loader"
    assert slower(rate * 2)[0] == ""
    several, all_gpus = slower(rate * 0.99, num_gpus=2)  # each GPU has a loader of its own
    assert (several == "loader") == (all_gpus / 2 > rate * 0.99)


def test_copies_are_a_steps_inputs_over_the_link_to_the_host(tapes: dict[str, Tapes]) -> None:
    made = predict(tapes, gpu_named("t4"), "fp32", batch=64)
    assert made.copy_ms == pytest.approx(1e3 * 64 * 256 * 4 / 15.75e9)
    assert slower_than(10.0, 5.0, LoaderRate(samples_per_s=7.0)) == "copies"
    assert slower_than(10.0, 7.0, LoaderRate(samples_per_s=5.0)) == "loader"
    assert slower_than(10.0, 20.0, None) == ""


@pytest.mark.parametrize("spare_bytes", [-MIB, -1, 0, 1])
def test_a_batch_fits_as_in_a_replay_with_the_limit(tapes: dict[str, Tapes], spare_bytes: int) -> None:
    reserved = memory_on(tapes["fp32"].at(64), gpu_named("t4"), "fp32").reserved_bytes
    gpu = dataclasses.replace(gpu_named("t4"), memory_bytes=DRIVER_BYTES + reserved + spare_bytes)
    found = predict(tapes, gpu, "fp32", batch=64)
    assert found.fits == memory_on(tapes["fp32"].at(64), gpu, "fp32", headroom=0.0).fits


def test_gpus_of_other_memory_share_the_replays_without_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    replays: list[tuple[int, bool]] = []

    def counted(tape: TrainingTape, *, limit_bytes: int | None, **how: Any) -> PredictedMemory:
        replays.append((tape.batch, limit_bytes is None))
        return predict_memory(tape, limit_bytes=limit_bytes, **how)

    monkeypatch.setattr(plan, "predict_memory", counted)
    both = {"fp32": Tapes.record(partial(_tape, "fp32"), 64)}
    for memory_bytes in (400 * MIB, 800 * MIB):
        gpu = dataclasses.replace(gpu_named("t4"), memory_bytes=DRIVER_BYTES + memory_bytes)
        predict(both, gpu, "fp32", batch=64)
    unlimited = [batch for batch, without_limit in replays if without_limit]
    assert len(unlimited) == len(set(unlimited)) > 10


def test_a_model_that_never_fits_has_largest_batch_0(tapes: dict[str, Tapes]) -> None:
    gpu = dataclasses.replace(gpu_named("t4"), memory_bytes=DRIVER_BYTES + 20 * MIB)
    found = predict(tapes, gpu, "fp32", batch=64)
    assert (found.fits, found.largest_batch) == (False, 0)


@pytest.mark.parametrize(
    ("gpu", "policy", "why"),
    [
        ("t4", "bf16", "T4 has no units for bf16"),
        ("v100", "bf16-pure", "V100-SXM2-16GB has no units for bf16"),
        ("t4", "fp16", ""),
        ("a100", "bf16", ""),
    ],
)
def test_what_is_impossible(gpu: str, policy: str, why: str) -> None:
    assert impossible(gpu_named(gpu), policy) == why


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("fp16", 3.0, 1.5, 0.6), "Worth it: 1.5 times as fast as TF32, with 60% of FP32's memory."),
        (("fp16", 3.0, None, 0.6), "Worth it: 3 times as fast as FP32, with 60% of FP32's memory."),
        (
            ("fp16", 3.0, 1.1, 0.6),
            "Perhaps: 1.10 times TF32's speed is within the error of the prediction, with 60% of FP32's memory.",
        ),
        (("fp16", 0.9, 0.9, 0.6), "Not for speed (0.90 times TF32's), but for memory: 60% of FP32's."),
        (("fp16", 0.9, 0.9, 1.0), "Not worth it: 0.90 times TF32's speed, with 100% of FP32's memory."),
        (("tf32", 4.0, 1.0, 1.0), "Worth it: 4 times as fast as FP32."),
        (("fp32", 1.0, 0.25, 1.0), "Strict FP32: TF32 is 4 times as fast."),
        (("fp32", 1.0, 0.99, 1.0), "The baseline: TF32 is no faster here."),
        (("fp32", 1.0, None, 1.0), "The baseline."),
    ],
)
def test_verdicts(arguments: tuple[Any, ...], sentence: str) -> None:
    assert verdict(*arguments) == sentence


@pytest.mark.parametrize(
    ("over_bf16", "sentence"),
    [
        (0.9, "Not worth it: 0.90 times BF16's speed, with BF16's memory."),
        (1.1, "Perhaps: 1.10 times BF16's speed, with BF16's memory."),
        (1.4, "Worth it: 1.40 times BF16's speed, with BF16's memory."),
    ],
)
def test_fp8_must_be_worth_it_over_bf16(over_bf16: float, sentence: str) -> None:
    assert verdict("fp8", 4.0, 2.0, 0.6, over_bf16=over_bf16) == sentence


def test_a_policy_that_cannot_be_predicted_is_refused() -> None:
    with pytest.raises(UsageError, match="'fp4' cannot be predicted") as told:
        check_policies(["fp32", "fp4"])
    assert "did you mean fp8" in told.value.hint or "fp16" in told.value.hint


@pytest.mark.parametrize(
    ("policy", "recorded"),
    [
        ("tf32", "fp32"),
        ("bf16", "fp16"),
        ("bf16-master", "fp16-master"),
        ("fp16-pure", "fp16-pure"),
        ("fp8", "fp16"),
        ("nvfp4", "fp16"),
    ],
)
def test_policies_that_share_a_tape(policy: str, recorded: str) -> None:
    assert recorded_as(policy) == recorded


def test_fp8_needs_units_and_says_which_layers_use_them(tapes: dict[str, Tapes]) -> None:
    assert impossible(gpu_named("a100"), "fp8") == "A100-SXM4-80GB has no units for fp8"
    assert impossible(gpu_named("h100"), "mxfp8") == "H100-SXM5-80GB has no units for mxfp8"
    assert [impossible(gpu_named("b200"), name) for name in ("mxfp8", "nvfp4", "fp8-block")] == [""] * 3
    found = predict(tapes, gpu_named("h100"), "fp8", batch=64)
    assert found.reason.startswith(
        "1 of 2 linear layers runs in FP8, the others in BF16 (1: the last layer). They take "
    )
    assert found.verdict.startswith("Not worth it: 1.00 times")
    assert not found.validated


def test_a_layout_changes_no_memory_so_its_replays_are_shared(tapes: dict[str, Tapes]) -> None:
    own = tapes["fp32"]
    last = own.stored_channels_last()
    assert last.peaks is own.peaks
    assert last.largest is own.largest
    assert not any(op.channels_last for op in own.at(96).operations)
    assert all(op.channels_last for op in last.at(96).operations)


def test_no_measurement_validates_another_framework(tapes: dict[str, Tapes]) -> None:
    others = {policy: dataclasses.replace(pair, of_measured_framework=False) for policy, pair in tapes.items()}
    found = [predict(known, gpu_named("t4"), "fp32", batch=64, host=FAST).not_validated for known in (tapes, others)]
    assert found == ["", "measurements"]


@pytest.mark.parametrize(
    ("host_us", "policy", "why", "launch"),
    [(1, "fp32", "", False), (1e5, "fp32", "host", True), (1e5, "bf16", "measurements", True)],
)
def test_no_measurement_validates_a_step_that_the_host_bounds(
    tapes: dict[str, Tapes], host_us: float, policy: str, why: str, launch: bool
) -> None:
    host = Host(operation_s=host_us * 1e-6, source="a test")
    found = predict(tapes, gpu_named("a100-80gb"), policy, batch=64, host=host)
    assert (found.not_validated, found.validated) == (why, not why)
    assert (found.bounds["launch"] == 1) is launch


@pytest.mark.parametrize(("kernel", "batch", "why"), [(3, 32, ""), (3, 31, "batch"), (0, 31, "")])
def test_no_measurement_validates_a_small_batch_of_a_convolutional_network(kernel: int, batch: int, why: str) -> None:
    def build() -> nn.Module:
        if not kernel:
            return nn.Linear(256, 64)
        return nn.Sequential(nn.Unflatten(1, (1, 16, 16)), nn.Conv2d(1, 64, kernel, padding=1), nn.Flatten())

    pair = Tapes.record(lambda size: trained_tape(build, 256, batch=size, policy="fp32"), 64)
    found = predict({"fp32": pair}, gpu_named("t4"), "fp32", batch=batch, host=FAST)
    assert (found.not_validated, found.validated) == (why, not why)


def test_tf32_where_there_is_none_is_no_gain_and_as_valid_as_fp32(tapes: dict[str, Tapes]) -> None:
    found = predict(tapes, gpu_named("t4"), "tf32", batch=64, host=FAST)
    assert (found.verdict, found.validated) == ("", True)
