"""Round tensors to a 16-bit format and keep them in FP32, with the result of a cast and a cast back, including gradients.

The gradient of a 16-bit tensor has that format, too, so a rounded tensor's gradient is rounded in the backward pass: a cast
and a cast back do so automatically. They are used for BF16, but not for FP16 on a CPU: Paddle 3.3.1 casts tiny
values wrongly there (2.5e-27 becomes 6.0e-08, and -2.1e-24 becomes -3.9e-05), exactly where gradients vanish. So FP16 is
rounded by arithmetic that any FP32 unit performs exactly:

* adding and subtracting ``1.5 * 2**(e + 13)``, where ``2**e`` is the value's binade, but at least FP16's smallest normal
  one, leaves FP16's 10 mantissa bits, rounded to nearest, ties to even;
* multiplying by ``2**112`` and back makes 65536 and more infinite, and is exact below.
"""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import paddle
from paddle.autograd import PyLayer

from mezzo.formats import FP16, FP32, Format
from mezzo.launch.paddle.surveys import is_fp32

Array: TypeAlias = npt.NDArray[np.float32]

_EXPONENT, _SIGN = np.uint32(0x7F800000), np.uint32(0x80000000)
_LOWEST, _HIGHEST = np.float32(FP16.min_normal), np.float32(2.0 ** (FP16.bias + 1))
_MAGIC = np.float32(1.5 * 2.0 ** (FP32.mantissa_bits - FP16.mantissa_bits))
_UP, _DOWN = np.float32(2.0 ** (FP32.bias - FP16.bias)), np.float32(2.0 ** (FP16.bias - FP32.bias))
_EMPTY_LIKE = paddle._C_ops.empty_like
"""Paddle's unpatched function: an observer must not record this allocation as an operation of the script."""
_PIECE = 32768
"""Values rounded at a time: the memory, which is read and written ten times, then stays in the L2 cache."""


class _Scratch(threading.local):
    """Each thread's buffer for the added values: allocating it each time would cost more than the arithmetic."""

    def __init__(self) -> None:
        self.bits = np.empty(_PIECE, np.uint32)


_scratch = _Scratch()


def round_to_fp16(values: Array, out: Array) -> None:
    """Write FP32 ``values`` rounded to FP16 into ``out``, as FP32: nearest, ties to even, infinite from 65520 on, subnormals kept.

    Both are contiguous, one-dimensional and of the same size.
    """
    with np.errstate(all="ignore"):
        for start in range(0, values.size, _PIECE):
            _round_piece(values[start : start + _PIECE], out[start : start + _PIECE])


def _round_piece(values: Array, out: Array) -> None:
    bits, value_bits = _scratch.bits[: values.size], values.view(np.uint32)
    magic = bits.view(np.float32)
    np.bitwise_and(value_bits, _EXPONENT, out=bits)
    np.clip(magic, _LOWEST, _HIGHEST, out=magic)  # larger values overflow anyway
    magic *= _MAGIC
    np.add(values, magic, out=out)
    out -= magic
    out *= _UP
    out *= _DOWN
    np.bitwise_and(value_bits, _SIGN, out=bits)  # values that become zero keep their sign
    out_bits = out.view(np.uint32)
    np.bitwise_or(out_bits, bits, out=out_bits)


def rounded(tensor: Any, fmt: Format) -> Any:
    """Return an FP32 ``tensor`` rounded to ``fmt``, in FP32; its gradient is rounded in the backward pass."""
    if fmt is FP16 and tensor.place.is_cpu_place():
        if tensor.stop_gradient or not paddle.is_grad_enabled():
            return _on_cpu(tensor)
        return _RoundedOnCpu.apply(tensor)
    return tensor.astype(fmt.dtype_name).astype(FP32.dtype_name)


def rounder(fmt: Format) -> Callable[[Any], Any]:
    """Return a function that rounds every initialised FP32 tensor in its argument to ``fmt``, also in lists and tuples."""

    def apply(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(apply(item) for item in value)
        if isinstance(value, paddle.Tensor) and is_fp32(value) and value._is_initialized():
            return rounded(value, fmt)
        return value

    return apply


def _on_cpu(tensor: Any) -> Any:
    count = math.prod(tensor.shape)
    if not count:
        return tensor
    contiguous = tensor if tensor.is_contiguous() else tensor.contiguous()
    result = _EMPTY_LIKE(contiguous, contiguous.dtype, contiguous.place)
    round_to_fp16(_values(contiguous, count), _values(result, count))
    return result


def _values(tensor: Any, count: int) -> Array:
    """Return the values of a contiguous FP32 tensor on the CPU without a copy; DLPack would take ten times as long."""
    return np.frombuffer(memoryview((ctypes.c_float * count).from_address(tensor.data_ptr())), np.float32)


class _RoundedOnCpu(PyLayer):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, tensor: Any) -> Any:
        return _on_cpu(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return _on_cpu(gradient)
