"""Predictions from tapes: what is possible, what fits, and the sentence that judges."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mezzo.errors import UsageError
from mezzo.gpus import gpu_named
from mezzo.measure.predict.memory import DRIVER_BYTES
from mezzo.measure.predict.plan import Tapes, check_policies, impossible, memory_under_limit, predict, verdict
from mezzo.measure.predict.tape import Tape
from mezzo.measure.predict.training import record_training
from mezzo.policy import Policy

MIB = 1 << 20


def _loss(model: nn.Module, inputs: Any) -> tuple[Tensor, Any]:
    return model(inputs["x"]).float().sum(), None


def _tape(policy: str, batch: int) -> Tape:
    return record_training(
        lambda: nn.Sequential(nn.Linear(256, 4096), nn.ReLU(), nn.Linear(4096, 256)),
        lambda n: {"x": torch.empty(n, 256)},
        _loss,
        batch=batch,
        optimizer=partial(torch.optim.SGD, lr=0.1),
        policy=Policy.parse(policy),
    )


@pytest.fixture(scope="module")
def tapes() -> dict[str, Tapes]:
    return {policy: Tapes.record(partial(_tape, policy), 64) for policy in ("fp32", "fp16")}


def test_a_prediction(tapes: dict[str, Tapes]) -> None:
    found = predict(tapes, gpu_named("a100-80gb"), "fp16", batch=64, channels_last=False)
    assert found.possible
    assert found.fits
    assert found.throughput == pytest.approx(64 / (found.step_ms / 1e3))
    assert found.throughput_low < found.throughput < found.throughput_high
    assert found.allocated_bytes <= found.reserved_bytes == found.device_bytes - DRIVER_BYTES
    assert sum(found.bounds.values()) == pytest.approx(1)
    assert found.memory_bytes["parameters"] == 4 * (2 * 256 * 4096 + 4096 + 256)


def test_fp32_is_its_own_baseline(tapes: dict[str, Tapes]) -> None:
    found = predict(tapes, gpu_named("t4"), "fp32", batch=64, channels_last=False)
    assert (found.over_fp32, found.over_tf32) == (1.0, None)
    tf32 = predict(tapes, gpu_named("t4"), "tf32", batch=64, channels_last=False)
    assert tf32.reason == "T4 has no TF32: this is FP32"


def test_the_largest_batch_fits_and_a_larger_one_does_not(tapes: dict[str, Tapes]) -> None:
    gpu = dataclasses.replace(gpu_named("t4"), memory_bytes=DRIVER_BYTES + 400 * MIB)
    found = predict(tapes, gpu, "fp32", batch=64, channels_last=False).largest_batch
    assert found is not None
    for batch, fits in ((found, True), (found + found // 20, False)):
        assert memory_under_limit(tapes["fp32"].at(batch), gpu, 0.13).fits == fits


def test_a_model_that_never_fits_has_largest_batch_0(tapes: dict[str, Tapes]) -> None:
    gpu = dataclasses.replace(gpu_named("t4"), memory_bytes=DRIVER_BYTES + 20 * MIB)
    found = predict(tapes, gpu, "fp32", batch=64, channels_last=False)
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


def test_a_policy_that_cannot_be_predicted_is_refused() -> None:
    with pytest.raises(UsageError, match="'fp8' cannot be predicted"):
        check_policies(["fp32", "fp8"])
