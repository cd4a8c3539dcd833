"""Policy ``fp8`` on a GPU with FP8 units: it trains as BF16 does, by FP8 kernels, and as the emulation says."""

from __future__ import annotations

import pytest
import torch
from fp8_script import batch, model_of, profile_of, rate
from gpu_jobs import CUDA, Ask, mezzo, plan
from torch import nn

import mezzo as library
from mezzo.observe.audit.observer import uses_tensor_cores

STEPS, WIDTH = 30, {"cpu": 64, "cuda": 2048}
LAYERS = 4
PRODUCTS = 3 * LAYERS
"""Forward, and the gradients of input and weight."""
NATIVE, EMULATED = "fp8", "fp8:arithmetic=emulated"
SCRIPT = ("{here}/fp8_script.py", "{device}", str(WIDTH["cuda"]), str(STEPS))
plan(
    "test_gpu_fp8",
    fp8=mezzo("run", "--policy", NATIVE, *SCRIPT),
    bf16=mezzo("run", "--policy", "bf16", *SCRIPT),
    audit=mezzo("audit", "--policy", NATIVE, "--at", "3", *SCRIPT[:-1], "4"),
)
LOSS_APART = 0.05
"""FP8's products are off by some 2%; how far that moves a loss is seen here. Above this share of the first loss it is another training."""


def needs_fp8_units(device: str) -> None:
    if device == "cuda":
        if torch.cuda.get_device_capability() < (8, 9):
            pytest.skip("needs a GPU of compute capability 8.9 or later, which has FP8 units")
        try:
            import torchao.float8  # noqa: F401
        except ImportError as error:
            pytest.skip(f"needs torchao: {error}")


def trained(policy: str, device: str, steps: int = STEPS) -> tuple[list[float], dict[str, object]]:
    """Return the losses of a session, and what the profiler saw in one more step."""
    model, (x, y) = model_of(device, WIDTH[device]), batch(device, WIDTH[device])
    session = library.Session(model, library.AdamW(model.parameters(), lr=rate(WIDTH[device])), policy=policy)

    def step() -> torch.Tensor:
        with session.autocast():
            loss = nn.functional.cross_entropy(model(x).float(), y)
        session.step(loss)
        return loss.detach()

    losses = [step() for _ in range(steps)]
    return torch.stack(losses).tolist(), profile_of(step, device)


def close(one: list[float], other: list[float]) -> None:
    """Check that both learn, and end nearly alike."""
    assert one[-1] < 0.9 * one[0]
    apart = max(abs(a - b) for a, b in zip(one, other, strict=True)) / other[0]
    assert apart <= LOSS_APART, f"losses differ by {apart:.3f} of the first"


both = pytest.mark.parametrize("device", ["cpu", CUDA])


@both
def test_a_session_trains_as_in_bf16(device: str) -> None:
    needs_fp8_units(device)
    losses, profile = trained(NATIVE if device == "cuda" else EMULATED, device)
    close(losses, trained("bf16" if device == "cuda" else "bf16:arithmetic=emulated", device)[0])
    assert profile["fp8_products"] == (PRODUCTS if device == "cuda" else 0)


@pytest.mark.parametrize("device", [CUDA])
def test_native_products_train_as_emulated_ones(device: str) -> None:
    needs_fp8_units(device)
    close(trained(NATIVE, device)[0], trained(EMULATED, device)[0])


@pytest.mark.parametrize("device", [CUDA])
def test_products_are_kernels_of_tensor_cores(device: str) -> None:
    needs_fp8_units(device)
    kernels = trained(NATIVE, device, 3)[1]["fp8_kernels"]
    assert kernels, "the profiler linked no kernel to aten::_scaled_mm"
    assert [name for name in kernels if uses_tensor_cores(name)], kernels  # type: ignore[attr-defined]


@pytest.mark.parametrize("device", [CUDA])
def test_an_unedited_script_trains_as_in_bf16_by_fp8_products(ended: Ask, device: str) -> None:
    needs_fp8_units(device)
    run, other = ended("fp8", device), ended("bf16", device)
    close(run.record["steps"]["loss"], other.record["steps"]["loss"])
    assert run.said[-1]["fp8_products"] == PRODUCTS
    assert other.said[-1]["fp8_products"] == 0
    (compute,) = [one for one in run.record["explanation"] if one["what"] == "compute"]
    assert "native" in compute["value"]


@pytest.mark.parametrize("device", [CUDA])
def test_an_audit_counts_fp8_products(ended: Ask, device: str) -> None:
    needs_fp8_units(device)
    record = ended("audit", device).record
    products = [one for one in record["products"] if one["format"] in ("e4m3", "e5m2")]  # mm of torchao's tensors
    assert sum(one["count"] for one in products) == PRODUCTS
    assert {one["phase"] for one in products} == {"forward", "dgrad", "wgrad"}
    assert {one["on_tensor_cores"] for one in products} == {True}, [one["kernels"] for one in products]
