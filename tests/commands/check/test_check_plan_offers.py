"""The policies that a check tries, by device, each with its reason."""

from __future__ import annotations

import pytest

from mezzo.commands.check.plan import offered, tried
from mezzo.devices import Device
from mezzo.gpus import GPUS

CPU = Device(kind="cpu", name="a CPU")
CPU_BF16 = Device(kind="cpu", name="a CPU", flags=frozenset({"avx512_bf16"}))


@pytest.mark.parametrize(
    ("here", "gpu", "policies"),
    [
        (CPU, None, ["fp32", "bf16", "fp16"]),  # both are emulated
        (CPU_BF16, None, ["fp32", "bf16", "fp16"]),
        (GPUS["a100-80gb"].device, None, ["fp32", "tf32", "bf16", "fp16"]),
        (GPUS["h100-sxm"].device, None, ["fp32", "tf32", "bf16", "fp16", "fp8"]),
        (GPUS["t4"].device, None, ["fp32", "fp16"]),  # no units for BF16
        (CPU, "v100-16gb", ["fp32", "fp16"]),
        (CPU, "a100-80gb", ["fp32", "bf16", "fp16"]),  # TF32 cannot be emulated
        (CPU, "h100-sxm", ["fp32", "bf16", "fp16", "fp8"]),
        (GPUS["t4"].device, "a100-80gb", ["fp32", "bf16", "fp16"]),
        (Device(kind="cuda", name="GTX 1080", capability=(6, 1)), None, ["fp32", "bf16", "fp16"]),  # no units at all
        (Device(kind="mps", name="an Apple GPU"), None, ["fp32", "bf16", "fp16"]),
    ],
)
def test_a_device_is_offered_what_it_computes_in(here: Device, gpu: str | None, policies: list[str]) -> None:
    offers = offered(here, target=None if gpu is None else GPUS[gpu].device)
    assert tried(offers) == policies
    assert {offer.policy for offer in offers} == {"fp32", "tf32", "bf16", "fp16", "fp8"}
    assert all(offer.reason for offer in offers)


def test_the_reason_names_the_device_that_lacks_a_format() -> None:
    reasons = {offer.policy: offer.reason for offer in offered(CPU, target=GPUS["v100-16gb"].device)}
    assert reasons["bf16"].startswith(
        "V100-SXM2-16GB: compute capability 7.0, and matrix units take bf16 only from 8.0"
    )
    assert reasons["fp16"].endswith("emulated here, which shows what it does to training, not how fast it is")


def test_a_script_with_mixed_precision_of_its_own_is_judged_as_it_is_too() -> None:
    offers = offered(CPU, own_amp="GradScaler")
    assert tried(offers) == ["fp32", "bf16", "fp16", "as-is"]
    assert (
        offers[-1].reason == "the script asks for mixed precision itself (GradScaler), which the other policies replace"
    )
