"""The formats in which moments are kept between updates: FP32, BF16, or 8 bits."""

from __future__ import annotations

import torch
from torch import Tensor

from mezzo.engine.kernels import eight_bit
from mezzo.engine.kernels.noise import round_to_bf16
from mezzo.formats import BF16, FP32

KINDS = {"fp32": FP32.dtype, "bf16": BF16.dtype, "8bit": torch.uint8}
"""Users' names of the formats, and the dtype that stores each."""
SIGNED = ("exp_avg", "momentum_buffer")
"""The moments that may be below 0."""
_HALF = 0x8000


def flat(tensor: Tensor) -> Tensor:
    """Return a tensor without gaps as one row, in the order of its memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


def zero_moment(kind: str, parameter: Tensor) -> Tensor:
    """Return a moment of zeros for ``parameter``."""
    if kind == "8bit":
        return torch.zeros(eight_bit.packed_bytes(parameter.numel()), dtype=torch.uint8, device=parameter.device)
    return torch.zeros_like(parameter, dtype=KINDS[kind], memory_format=torch.preserve_format)


def flat_fp32(kept: Tensor, count: int, *, signed: bool) -> Tensor:
    """Return a moment of ``count`` elements as flat FP32; an FP32 one itself, without a copy."""
    return eight_bit.unpack(kept, count, signed=signed) if kept.dtype is torch.uint8 else flat(kept).float()


def rounded(values: Tensor, kind: torch.dtype, noise: Tensor, *, signed: bool) -> Tensor:
    """Return flat FP32 ``values`` in a format of ``KINDS``, rounded by ``noise``."""
    if kind is torch.uint8:
        return eight_bit.pack(values, noise, signed=signed)
    return round_to_bf16(values, noise) if kind is BF16.dtype else values


def as_fp32(kept: Tensor, shape: torch.Size, strides: tuple[int, ...], *, signed: bool) -> Tensor:
    """Return a moment as an FP32 tensor of a shape and strides, with the values that an update uses."""
    count = shape.numel()
    return flat_fp32(kept, count, signed=signed).as_strided(shape, strides)


def stored_as(kind: str, values: Tensor, *, signed: bool) -> Tensor:
    """Return an FP32 moment in the format ``kind``, rounded to nearest; exact if it was in that format before."""
    nearest = torch.full((values.numel(),), _HALF, device=values.device)
    stored = rounded(flat(values), KINDS[kind], nearest, signed=signed)
    return stored if kind == "8bit" else stored.as_strided(values.shape, values.stride())
