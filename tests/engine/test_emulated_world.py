"""Emulated reductions against real sums of N tensors, whose shares are drawn in another way."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn

from helpers_engine import batches, mlp
from mezzo import Session
from mezzo.engine.emulated_world import EmulatedWorld
from mezzo.engine.exchange import divisors
from mezzo.formats import BF16, FP16, FORMATS
from mezzo.policy import Policy

SIZES = (2, 3, 8, 64, 384)


def world(reduce: str, size: int, order: str = "ring") -> EmulatedWorld:
    return EmulatedWorld(Policy.parse(f"fp32:reduce={reduce}:world={size}:reduce_order={order}"))


def oracle(gradient: Tensor, reduce: str, size: int, order: str) -> Tensor:
    """Return the average of ``size`` tensors around ``gradient``, cast and added as processes do it, whole tensors at a time."""
    dtype = FORMATS[reduce].dtype
    noise = np.random.default_rng(1).standard_normal((size, gradient.numel()))
    noise -= noise.mean(axis=0)
    exact = gradient.double().numpy()
    shares = exact + math.sqrt(size) * np.abs(exact) * noise * math.sqrt(size / (size - 1))
    before = size if reduce != "fp16" else {2: 2, 3: 2, 8: 4, 64: 8, 384: 32}[size]
    sent = [torch.from_numpy(share / before).to(dtype) for share in shares]
    while len(sent) > 1:
        if order == "ring":
            sent = [(sent[0].double() + sent[1].double()).to(dtype), *sent[2:]]
        else:
            sent = [sum(pair[1:], pair[0].double()).to(dtype) for pair in (sent[i : i + 2] for i in range(0, len(sent), 2))]
    return sent[0].double() * before / size


@pytest.mark.parametrize("order", ["ring", "tree"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("reduce", ["bf16", "fp16"])
def test_errors_are_distributed_as_those_of_a_real_sum(reduce: str, size: int, order: str) -> None:
    gradient = torch.randn(6000, generator=torch.Generator().manual_seed(size))
    found = gradient.clone()
    emulated = world(reduce, size, order)
    emulated.reduce([found])
    errors = ((found.double() - gradient) / gradient.abs()).numpy()
    real = ((oracle(gradient, reduce, size, order) - gradient) / gradient.abs()).numpy()
    assert np.sqrt((errors**2).mean()) == pytest.approx(np.sqrt((real**2).mean()), rel=0.06)
    assert stats.ks_2samp(errors, real).pvalue > 1e-3
    assert abs(errors.mean()) < 4 * errors.std() / math.sqrt(errors.size)  # no bias
    error = emulated.error()
    assert error == pytest.approx(float((found - gradient).norm() / gradient.norm()))
