"""Linear layers in FP8, emulated in FP32.

The recipe is that of "FP8 Formats for Deep Learning" (arXiv:2209.05433) with one scale a tensor, taken from its
largest magnitude at each use: operands in E4M3, gradients in E5M2, sums in FP32, results in BF16. What is kept for
the backward pass is the 8-bit operands and their scales.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from mezzo.formats import E4M3, E5M2, Format


class _Float8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        x8, x_scale = quantise(x, E4M3)
        w8, w_scale = quantise(weight, E4M3)
        ctx.save_for_backward(x8, x_scale, w8, w_scale)
        ctx.has_bias, ctx.low = bias is not None, x.dtype
        y = F.linear(x8.float() / x_scale, w8.float() / w_scale).to(x.dtype)
        return y if bias is None else y + bias

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x8, x_scale, w8, w_scale = ctx.saved_tensors
        g8, g_scale = quantise(grad, E5M2)
        wide = g8.float() / g_scale
        rows = wide.reshape(-1, wide.shape[-1])
        grad_x = (wide @ (w8.float() / w_scale)).to(ctx.low)
        columns = (x8.float() / x_scale).reshape(-1, x8.shape[-1])
        grad_weight = (rows.mT @ columns).to(ctx.low)
        grad_bias = grad.float().reshape(-1, grad.shape[-1]).sum(0).to(ctx.low)
        return grad_x, grad_weight, grad_bias if ctx.has_bias else None


def quantise(x: Tensor, fmt: Format) -> tuple[Tensor, Tensor]:
    """Return ``x`` times a scale in the 8-bit format ``fmt``, and that scale (FP32, no dimensions).

    The scale maps the largest magnitude to the format's largest value: ``scale = max / amax`` (arXiv:2209.05433, section 3.2).
    """
    scale = fmt.max / x.abs().amax().float().clamp(min=1e-12)
    return (x.float() * scale).clamp(-fmt.max, fmt.max).to(fmt.dtype), scale


def float8_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Emulate a linear layer with E4M3 operands and E5M2 gradients; tensors and result are BF16."""
    y: Tensor = _Float8Linear.apply(x, weight, bias)
    return y
