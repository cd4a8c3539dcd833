"""Fourier transforms of FP16 numbers, with cuFFT's rules.

cuFFT transforms FP16 if all sizes are powers of two, and returns its complex format. CPUs have no such kernel, so it is emulated: one
transform in FP32 and one rounding. cuFFT refuses other sizes in FP16, and torch 2.13 refuses BF16 (``aten/src/ATen/native``:
``SpectralOps.cpp``, ``cuda/CuFFTPlanCache.h``). A backward pass transforms the same sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mezzo.engine.matrix_units.emulation_nodes import Op
from mezzo.engine.matrix_units.refusals import note_bf16, refusal
from mezzo.formats import BF16, FP16, FP32

DTYPES = frozenset((FP16.dtype, BF16.dtype, torch.complex32))
"""The dtypes of the operands to which the rules apply."""
PRIMITIVES = ("_fft_r2c", "_fft_c2r", "_fft_c2c")
"""The transforms that others call, such as ``stft``; their arguments are dimensions, normalization and, for ``_fft_c2r``, the last size."""
_TO_REAL = ("hfft", "irfft", "_fft_c2r")
_SIZES = "cuFFT only supports dimensions whose sizes are powers of two when computing in half precision, but got a signal size of{sizes}"
_UNSUPPORTED = "Unsupported dtype {dtype}"
_NO_PLAN = "cuFFT doesn't support tensor of type: {dtype}"


def fft(op: Op, name: str, *, refuses: bool) -> Op:
    """Return the transform ``name`` for 16-bit operands, as CUDA computes it.

    Args:
        op: the torch function.
        name: its name: ``fft_rfft2``, or one of ``PRIMITIVES``.
        refuses: whether to refuse what CUDA refuses.
    """
    in_bf16 = _NO_PLAN if name in PRIMITIVES else _UNSUPPORTED

    def transform(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if x.dtype not in (FP16.dtype, torch.complex32):
            if refuses and x.dtype is BF16.dtype:
                raise refusal(in_bf16, x)
            result: Tensor = op(x, *args, **kwargs)
            return result
        sizes = _signal_sizes(name, x, *args, **kwargs) if refuses and x.numel() else []
        if any(size & (size - 1) for size in sizes if size > 0):
            raise refusal(_SIZES.format(sizes=sizes), x)
        if refuses and x.dtype is FP16.dtype:
            note_bf16(in_bf16, x)
        wide: Tensor = op(x.to(torch.complex64) if x.is_complex() else x.to(FP32.dtype), *args, **kwargs)
        return wide.to(torch.complex32 if wide.is_complex() else FP16.dtype)

    return transform


def _signal_sizes(name: str, x: Tensor, *args: Any, **kwargs: Any) -> list[int]:
    """Return the sizes of the signals that a transform works on, in the order of its dimensions."""
    to_real = any(kind in name for kind in _TO_REAL) and "ihfft" not in name
    if name in PRIMITIVES:
        sizes = [x.size(dim) for dim in args[0]]
        return [*sizes[:-1], args[2]] if to_real else sizes
    given, dims = _size_and_dims(name, x, *args, **kwargs)
    sizes = [x.size(dim) if size in (None, -1) else int(size) for size, dim in zip(given, dims, strict=False)]
    return [*sizes[:-1], 2 * (sizes[-1] - 1)] if to_real and given[-1] in (None, -1) else sizes


def _size_and_dims(name: str, x: Tensor, *args: Any, **kwargs: Any) -> tuple[Sequence[Any], Sequence[int]]:
    is_list = name[-1] in "2n"
    size = args[0] if args else kwargs.get("s" if is_list else "n")
    default = (-2, -1) if name.endswith("2") else None if is_list else -1
    dim: Any = args[1] if len(args) > 1 else kwargs.get("dim", default)
    if not is_list:
        return [size], [dim]
    if dim is None:
        dim = list(range(-len(size), 0)) if size is not None else list(range(x.dim()))
    return [None] * len(dim) if size is None else list(size), list(dim)
