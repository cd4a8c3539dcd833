"""Rounded values and gradients, bit by bit, against NumPy's float16 and a bit-level oracle for BF16."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from paddle_runs import numbers, paddle

from mezzo.formats import BF16, FP16, Format
from mezzo.launch.paddle.surveys import rounded, rounder

Array = np.ndarray[Any, Any]
LARGE = [65504, 65519.996, 65520, -65520, 1e30, 3.4e38, -3.3961775e38, np.inf, -np.inf, np.nan]
SMALL = [0.0, -0.0, 2**-14, 2**-14 - 2**-25, 2**-24, 2**-25, 2**-25 * 1.0001, -(2**-25), 2.5e-27, -2.1e-24, 1e-45]
TIES = [1 + 2**-11, 1 + 3 * 2**-11, 1 + 2**-8, 1 + 3 * 2**-8]
EDGES = np.float32([*LARGE, *SMALL, *TIES])


def values() -> Array:
    """Return the edges, random bit patterns, and numbers of the size that networks hold; more than one piece of them."""
    draw = np.random.Generator(np.random.PCG64(3))
    bits = draw.integers(0, 2**32, 50_000, dtype=np.uint32).view(np.float32)
    usual = draw.standard_normal(50_000) * 10.0 ** draw.uniform(-9, 5.5, 50_000)
    return np.concatenate([EDGES, bits, usual.astype(np.float32)])


def fp16_oracle(x: Array) -> Array:
    with np.errstate(all="ignore"):
        return x.astype(np.float16).astype(np.float32)


def bf16_oracle(x: Array) -> Array:
    bits = x.view(np.uint32).astype(np.uint64)
    kept = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint32) << np.uint32(16)
    return np.where(np.isnan(x), x, kept.astype(np.uint32).view(np.float32))


ORACLES = [(FP16, fp16_oracle), (BF16, bf16_oracle)]


def same_bits(found: Array, wanted: Array) -> bool:
    both_nan = np.isnan(found) & np.isnan(wanted)
    return bool(np.all((found.view(np.uint32) == wanted.view(np.uint32)) | both_nan))


@pytest.mark.parametrize(("fmt", "oracle"), ORACLES)
def test_values_are_those_of_the_format(fmt: Format, oracle: Any) -> None:
    x = values()
    assert same_bits(numbers(rounded(paddle.to_tensor(x), fmt)), oracle(x))


@pytest.mark.parametrize(("fmt", "oracle"), ORACLES)
def test_gradients_are_rounded_on_their_way_back(fmt: Format, oracle: Any) -> None:
    x = values()
    tensor = paddle.zeros([x.size])
    tensor.stop_gradient = False
    rounded(tensor, fmt).backward(paddle.to_tensor(x))
    assert same_bits(numbers(tensor.grad), oracle(x))


def test_paddles_own_cast_to_fp16_is_still_wrong_on_a_cpu() -> None:
    """When this fails the arithmetic of ``rounding`` can go, and casts do for FP16 what they do for BF16."""
    tiny = paddle.to_tensor([2.5e-27, -2.1e-24])
    assert numbers(tiny.astype(FP16.dtype_name).astype("float32"))[1] < -1e-6


@pytest.mark.parametrize("fmt", [FP16, BF16])
def test_views_lists_integers_and_empty_tensors(fmt: Format) -> None:
    x = paddle.to_tensor(values()[:12].reshape(3, 4))
    apply, oracle = rounder(fmt), dict(ORACLES)[fmt]
    whole, (turned, labels), empty = apply((x, [x.t(), paddle.to_tensor([1, 2])], paddle.zeros([0, 4])))
    assert same_bits(numbers(whole), oracle(numbers(x)))
    assert same_bits(numbers(turned), oracle(numbers(x).T.copy()))
    assert (numbers(labels).tolist(), empty.shape) == ([1, 2], [0, 4])


def test_tensors_are_rounded_where_paddle_names_dtypes_for_static_programs() -> None:
    """FLAGS_enable_pir_api=0 gives ``paddle.float32`` a meaning that equals no tensor's dtype."""
    before = paddle.float32
    paddle.framework.dtype.bind_vartype()
    try:
        tensor = paddle.to_tensor([1.0 + 2.0**-20])
        assert tensor.dtype != paddle.float32
        assert numbers(rounder(BF16)(tensor)) == [1.0]
        assert numbers(rounder(FP16)([tensor])[0]) == [1.0]
    finally:
        paddle.framework.dtype.bind_datatype()
    assert paddle.float32 == before
