"""The values of a Paddle tensor: which of them a format's range loses, and what rounding leaves of them."""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import paddle
from paddle.autograd import PyLayer

from mezzo.formats import FORMAT_NAMES, FORMATS, FP16, FP32, Format
from mezzo.records import Operand


class Survey(NamedTuple):
    """The largest value of a tensor, and which values a format's range loses."""

    largest: float
    """The largest magnitude; not finite if any value is not."""
    overflows: bool
    """Whether a finite value is beyond the format's range."""
    vanished: float = 0.0
    """The largest magnitude that becomes zero."""
    share: float = 0.0
    """The norm of the values that become zero over the norm of all."""


def survey(tensor: Any, fmt: Format) -> Survey:
    """Return which values of ``tensor`` are lost at the ends of the range of ``fmt`` when they are rounded to it."""
    values = np.abs(array_of(tensor))
    if not values.size:
        return Survey(0.0, overflows=False)
    largest = float(values.max())
    if not math.isfinite(largest):
        finite_values = values[np.isfinite(values)]
        overflows = bool(finite_values.size) and float(finite_values.max()) >= _TOO_LARGE[fmt.name]
        return Survey(largest, overflows=overflows)
    overflows, vanished = largest >= _TOO_LARGE[fmt.name], values[(values > 0) & (values <= fmt.min_subnormal / 2)]
    if not vanished.size:
        return Survey(largest, overflows)
    share = float(np.linalg.norm(vanished.astype(np.float64)) / np.linalg.norm(values.astype(np.float64)))
    return Survey(largest, overflows, float(vanished.max()), share)


_TOO_LARGE = {name: f.max + math.ldexp(1.0, math.frexp(f.max)[1] - f.mantissa_bits - 2) for name, f in FORMATS.items()}
"""The smallest magnitude that rounds to infinity, by format: half a unit in the last place above the largest number."""


def array_of(tensor: Any) -> npt.NDArray[Any]:
    """Return a copy of a tensor's values, 16-bit ones in FP32."""
    narrow = tensor.is_floating_point() and tensor.element_size() < 4
    return np.asarray((tensor.detach().astype(FP32.dtype_name) if narrow else tensor.detach()).numpy())


def is_fp32(tensor: Any) -> bool:
    """Return whether a tensor is in FP32.

    Not by ``paddle.float32``: with FLAGS_enable_pir_api=0 that is a name for static programs, which equals no tensor's dtype.
    """
    return bool(tensor.is_floating_point() and tensor.element_size() == FP32.bytes)


def is_half(tensor: Any) -> bool:
    """Return whether a tensor has a 16-bit floating-point format."""
    return bool(tensor.is_floating_point() and tensor.element_size() == 2)


def finite(tensor: Any) -> bool:
    """Return whether all values of a tensor are finite; waits for the device."""
    return not tensor.is_floating_point() or bool(np.isfinite(array_of(tensor)).all())


def format_name(tensor: Any) -> str:
    """Return the name of a tensor's format, or its dtype if it is not a floating-point one."""
    dtype = str(tensor.dtype).removeprefix("paddle.")
    return FORMAT_NAMES.get(dtype, dtype)


def operand(tensor: Any) -> Operand:
    """Return the description of a tensor as an operand, for the record."""
    values = np.abs(array_of(tensor).astype(np.float64))
    finite_values = values[np.isfinite(values)]
    return Operand(
        format=format_name(tensor),
        shape=list(tensor.shape),
        largest=float(finite_values.max()) if finite_values.size else 0.0,
        smallest=float(finite_values.min()) if finite_values.size else 0.0,
        num_not_finite=int(values.size - finite_values.size),
    )


# The gradient of a 16-bit tensor has that format, too, so a rounded tensor's gradient is rounded in the backward pass: a cast
# and a cast back do so automatically. They are used for BF16, but not for FP16 on a CPU: Paddle 3.3.1 casts tiny
# values wrongly there (2.5e-27 becomes 6.0e-08, and -2.1e-24 becomes -3.9e-05), exactly where gradients vanish. So FP16 is
# rounded by arithmetic that any FP32 unit performs exactly:
#
# * adding and subtracting ``1.5 * 2**(e + 13)``, where ``2**e`` is the value's binade, but at least FP16's smallest normal
#   one, leaves FP16's 10 mantissa bits, rounded to nearest, ties to even;
# * multiplying by ``2**112`` and back makes 65536 and more infinite, and is exact below.

Float32Array: TypeAlias = npt.NDArray[np.float32]

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


def round_to_fp16(values: Float32Array, out: Float32Array) -> None:
    """Write FP32 ``values`` rounded to FP16 into ``out``, as FP32: nearest, ties to even, infinite from 65520 on, subnormals kept.

    Both are contiguous, one-dimensional and of the same size.
    """
    with np.errstate(all="ignore"):
        for start in range(0, values.size, _PIECE):
            _round_piece(values[start : start + _PIECE], out[start : start + _PIECE])


def _round_piece(values: Float32Array, out: Float32Array) -> None:
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


def _values(tensor: Any, count: int) -> Float32Array:
    """Return the values of a contiguous FP32 tensor on the CPU without a copy; DLPack would take ten times as long."""
    return np.frombuffer(memoryview((ctypes.c_float * count).from_address(tensor.data_ptr())), np.float32)


class _RoundedOnCpu(PyLayer):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, tensor: Any) -> Any:
        return _on_cpu(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return _on_cpu(gradient)
