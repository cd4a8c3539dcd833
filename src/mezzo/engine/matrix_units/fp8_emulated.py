"""Linear layers in FP8, emulated in FP32.

A layer has three products: the result, the gradient of its input and the gradient of its weight. Both operands of each
are multiplied by a scale and rounded to 8 bits, their products are added up in FP32, divided by the scales and rounded
to BF16. Each use computes its scale from the largest magnitude: ``scale = max / amax`` (arXiv:2209.05433,
section 3.2). The two recipes are torchao's, which computes them on a GPU:

``tensorwise``  one scale per tensor; values and weights in E4M3, gradients in E5M2
``rowwise``     all in E4M3; one scale for each row that a product sums over, the largest power of two not above ``max / amax``

E4M3 and E5M2 are the Open Compute Project's, or the FNUZ ones of AMD's MI300, to which torchao rounds there.

Weights are rounded from the format in which they are stored, not from BF16. The BF16 input and the weight itself are
kept for the backward pass and rounded again there, as torchao does: 8-bit values are operands of a product and are
not stored.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from mezzo.engine.matrix_units.emulation_nodes import wants
from mezzo.formats import FP8_PAIRS, Format


@dataclass(frozen=True)
class Recipe:
    """The formats of operands and gradients, and the extent of one scale."""

    values: Format
    gradients: Format
    by_rows: bool
    """Whether every row has its own scale; otherwise the whole tensor has one."""

    def rounded(self, x: Tensor, fmt: Format, *, along: int) -> Tensor:
        """Return ``x`` rounded to ``fmt``, in FP32, for a product that sums along dimension ``along``."""
        stored, scale = quantise(x, fmt, along=along if self.by_rows else None)
        return stored.float() / scale


RECIPES = {
    (name, pair): Recipe(values=e4m3, gradients=e4m3 if name == "rowwise" else e5m2, by_rows=name == "rowwise")
    for name in ("tensorwise", "rowwise")
    for pair, (e4m3, e5m2) in FP8_PAIRS.items()
}


class _Float8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, recipe: Recipe) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.recipe, ctx.stands_for = recipe, recipe.values.name
        return F.linear(recipe.rounded(x, recipe.values, along=-1), recipe.rounded(weight, recipe.values, along=-1)).to(
            x.dtype
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        recipe: Recipe = ctx.recipe
        rows, columns = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
        grad_x = grad_weight = None
        if wants(ctx, 0):
            wide = recipe.rounded(rows, recipe.gradients, along=-1) @ recipe.rounded(weight, recipe.values, along=0)
            grad_x = wide.to(x.dtype).reshape(x.shape)
        if wants(ctx, 1):
            wide = recipe.rounded(rows, recipe.gradients, along=0).mT @ recipe.rounded(columns, recipe.values, along=0)
            grad_weight = wide.to(x.dtype).to(weight.dtype)  # a GPU's product gives BF16 for an FP32 weight, too
        return grad_x, grad_weight, None


def quantise(x: Tensor, fmt: Format, *, along: int | None = None) -> tuple[Tensor, Tensor]:
    """Return ``x`` times a scale in the 8-bit format ``fmt``, and that scale in FP32.

    The scale maps the largest magnitude to the format's largest value. With ``along``, every row along that dimension
    has its own, rounded down to a power of two.
    """
    if x.numel() == 0:  # no largest magnitude
        return x.to(fmt.dtype), torch.ones((), device=x.device)
    magnitudes = x.abs()
    amax = magnitudes.amax() if along is None else magnitudes.amax(dim=along, keepdim=True)
    # torchao's minimum: smaller magnitudes get the scale of this one, and zeros a finite scale. A literal, because a compiler
    # with dynamic shapes turns a global number into a variable, which fails inside an autograd function.
    least = amax.float().clamp(min=1e-12)
    # torch divides a number by a tensor as a product with the reciprocal, which rounds twice.
    scale = torch.full_like(least, fmt.max) / least
    if along is not None:
        scale = scale.log2().floor().exp2()
    return (x.float() * scale).clamp(-fmt.max, fmt.max).to(fmt.dtype), scale


def float8_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, recipe: str = "tensorwise", formats: str = "ocp"
) -> Tensor:
    """Emulate a linear layer in FP8; ``x``, ``bias`` and result are BF16, ``weight`` is BF16 or FP32."""
    if weight.dim() == 1:  # one output feature, without a dimension of its own
        return float8_linear(x, weight[None], bias, recipe=recipe, formats=formats).squeeze(-1)
    y: Tensor = _Float8Linear.apply(x, weight, RECIPES[recipe, formats])
    return y if bias is None else y + bias


LINEAR: dict[tuple[str, str], Callable[..., Tensor]] = {
    (name, pair): partial(float8_linear, recipe=name, formats=pair) for name, pair in RECIPES
}
"""The emulation of ``torch.nn.functional.linear`` by the recipe and the pair of formats."""
