"""Rounding in blocks by hand, for tests."""

from __future__ import annotations

import torch
from torch import Tensor


def in_mxfp8(x: Tensor, *, along: int) -> Tensor:
    """Round rows (1) or columns (0) in whole blocks of 32, with torch's own E4M3; in FP64."""
    rows = x.detach().bfloat16().double().transpose(along, 1)
    blocks = rows.reshape(len(rows), -1, 32)
    scale = torch.exp2((blocks.abs().amax(-1, keepdim=True) / 448).log2().ceil())
    return (blocks / scale).float().to(torch.float8_e4m3fn).double().mul(scale).reshape(rows.shape).transpose(along, 1)
