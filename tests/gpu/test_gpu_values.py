"""Values that kernels compute on a GPU against the CPU's: exponents, norms, 8-bit moments, and what ``mezzo ranges`` counts."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from gpu_jobs import CUDA, NEEDS_A_GPU, Ask, mezzo, plan
from torch import Tensor, nn

import mezzo as library
from mezzo.engine.kernels import exponents, reference
from mezzo.engine.optimizers.one_pass import choose

plan("test_gpu_values", ranges=mezzo("ranges", "--steps", "3", "{here}/attribution_script.py", "{device}", "plain"))
SIZES = (1, 3, 31, 1024, 4097, 1_000_003)
FORMATS = (torch.float32, torch.float16, torch.bfloat16)
both = pytest.mark.parametrize("device", ["cpu", CUDA])


def normal(size: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(size)).to(dtype)


@both
@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_exponents_are_counted_alike(device: str, dtype: torch.dtype) -> None:
    values = [normal(size, dtype) * 2.0 ** (size % 7 - 3) for size in SIZES]
    values.append(torch.tensor([math.inf, -math.inf, math.nan, 0.0, -0.0, 1e-7], dtype=dtype))
    values.append(values[3].view(32, 32).t())  # not contiguous
    ours, other = exponents.tables(len(values), device), exponents.tables(len(values))
    exponents.add([v.to(device) for v in values], list(ours))
    exponents.reference(values, list(other))
    assert torch.equal(one_nan(ours.cpu()), one_nan(other))
    assert device == "cpu" or exponents.counter(device)[1].startswith("a Triton kernel")


def one_nan(tables: Tensor) -> Tensor:
    """Put all NaNs into one cell: which of theirs they fall into is the bits' that a conversion to FP32 gives them."""
    infinite = exponents.tables(1)
    exponents.reference([torch.tensor([math.inf])], list(infinite))
    first = int(infinite[0].argmax()) + 1
    return torch.cat([tables[:, :first], tables[:, first:].sum(1, keepdim=True)], dim=1)


@both
@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_norms_are_alike(device: str, dtype: torch.dtype) -> None:
    """FP64's sum of squares, to the accuracy of FP32 sums of 16."""
    gradients = [normal(size, dtype) for size in SIZES]
    exact = sum(float((g.double() ** 2).sum()) for g in gradients)
    kernels = choose(device)[0] if device == "cuda" else reference
    assert float(kernels.sum_of_squares([g.to(device) for g in gradients])) == pytest.approx(exact, rel=1e-6)


@both
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_norm_with_one_bad_value_is_not_finite(device: str, bad: float) -> None:
    gradients = [normal(size, torch.float16) for size in SIZES]
    gradients[-1][500_001] = bad
    kernels = choose(device)[0] if device == "cuda" else reference
    assert not math.isfinite(float(kernels.sum_of_squares([g.to(device) for g in gradients])))


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("moments", ["fp32", "bf16", "8bit"])
@both
def test_moments_are_those_of_the_cpu(device: str, moments: str, dtype: torch.dtype) -> None:
    """Rounding to 8 bits can fall to either side where FP32 differs in its last bit: by one step of the code, at few places."""
    states = []
    for where in ("cpu", device):
        weights = [nn.Parameter(normal(size, dtype).to(where)) for size in SIZES]
        optimizer = library.AdamW(weights, lr=1e-2, moments=moments)
        for number in range(5):
            for weight in weights:
                weight.grad = (normal(weight.numel() + number, dtype)[number:]).to(where)
            optimizer.step()
        state = optimizer.state_dict()["state"]
        states.append([state[n][name].float().cpu() for n in state for name in ("exp_avg", "exp_avg_sq")])
        states[-1] += [weight.detach().float().cpu() for weight in weights]
    for one, other in zip(*states, strict=True):
        apart = (one - other).abs() > 1e-5 + 2.0**-7 * other.abs()
        assert apart.float().mean() <= 1e-3
        assert (one - other).norm() <= 1e-3 * other.norm() + 1e-6


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=NEEDS_A_GPU)])
def test_ranges_are_those_of_the_cpu(ended: Ask, device: str) -> None:
    """The same script and weights: a value near a power of two may be counted beside it."""
    ours, other = (histograms(ended("ranges", where).record) for where in (device, "cpu"))
    assert ours.keys() == other.keys()
    for tensor, counts in ours.items():
        assert counts.total() == other[tensor].total()
        assert (counts - other[tensor]).total() <= 0.01 * counts.total(), tensor


def histograms(record: dict[str, Any]) -> dict[tuple[str, str], Counter[int]]:
    """Return how many values of each tensor have which exponent."""
    found: dict[tuple[str, str], Counter[int]] = {}
    for tensor in record["tensors"]:
        one = tensor["histogram"]
        counts = Counter({one["first_exponent"] + n: count for n, count in enumerate(one["counts"])})
        found[tensor["kind"], tensor["name"]] = counts + Counter({-1000: one["zeros"]})
        assert (one["infinite"], one["nan"]) == (0, 0)
    return found
