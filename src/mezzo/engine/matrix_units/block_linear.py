"""A linear layer whose products read operands in blocks: MXFP8, MXFP4, NVFP4 and block-wise FP8, emulated in FP32.

A layer has three products: ``forward``, ``dgrad`` (the gradient of its input) and ``wgrad`` (the gradient of its weight). Each sums over
another dimension, so each rounds both operands anew, in blocks along its own sum:

    forward   x (tokens, in)      by rows      w (out, in)     by rows
    dgrad     dy (tokens, out)    by rows      w               by columns
    wgrad     dy                  by columns   x               by columns

Operands are BF16, weights too: trainers hand these kernels a BF16 weight (FSDP2's ``param_dtype``, TransformerEngine). Products are
added up in FP32 and rounded once to BF16. The BF16 input and the weight are kept for the backward pass.

For ``wgrad`` a recipe may mix the rows of both operands first, which changes no product before rounding; it may round gradients at
random, with seeds from the gradient and the weight: the weight changes with every update, so equal gradients are rounded anew.

Products that a policy keeps in 16 bits are emulated as ``emulation_nodes.Linear`` does.

What a GPU's unit does in one kernel is one product for observers: ``unrounded`` has its operands, which what runs inside rounds.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mezzo.engine.matrix_units.accumulation import product
from mezzo.engine.matrix_units.block_formats import in_blocks, rounded, seed_of, transformed
from mezzo.engine.matrix_units.emulation_nodes import wants
from mezzo.errors import NoKernelError
from mezzo.formats import BF16, FP8_BLOCK, FP32, Format, Recipe
from mezzo.policyfields import LAYER_PRODUCTS, PROMOTED, LayerProduct


@dataclass(frozen=True, kw_only=True)
class LayerPlan:
    """How the three products of one linear layer are computed."""

    recipe: Recipe
    in_16_bits: frozenset[LayerProduct] = frozenset()
    """Products that stay in BF16."""
    accumulate: str = FP32.name
    """How products of 8-bit blocks are added up, in a policy's word: in FP32, or promoted after every block."""

    policy: str = ""
    """The text of the policy, from which a snapshot makes the plan again."""

    @property
    def in_blocks(self) -> list[LayerProduct]:
        """The products whose operands are rounded in blocks."""
        return [product for product in LAYER_PRODUCTS if product not in self.in_16_bits]

    def format_of(self, product: LayerProduct) -> str:
        """Return the name of the format in which a product is counted."""
        return BF16.name if product in self.in_16_bits else self.recipe.product or self.recipe.values.name


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, plan: LayerPlan) -> Tensor:
    """Emulate a linear layer; ``x`` (..., in) and the result (..., out) are BF16, ``weight`` (out, in) is BF16 or FP32."""
    if torch._C._are_functorch_transforms_active():
        raise NoKernelError(
            f"torch.func transforms a linear layer that computes in {plan.format_of('forward')}, whose kernels have no such transforms",
            hint=_KEEP,
        )
    low = None if bias is None else bias.to(x.dtype)
    y: Tensor = _BlockLinear.apply(x, weight, plan)
    return y if low is None else y + low


_KEEP = "keep the layer in BF16: bf16_products=NAME.*, with its name in the model; or use the policy bf16"


class _BlockLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, plan: LayerPlan) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.plan, ctx.stands_for = plan, plan.format_of("forward")
        rows, low = x.reshape(-1, x.shape[-1]).contiguous(), weight.to(x.dtype).contiguous()
        return _product(rows, low.mT, lambda: _forward(rows, low, plan)).to(x.dtype).view(*x.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        plan: LayerPlan = ctx.plan
        if torch.is_grad_enabled():  # with create_graph
            raise NoKernelError(
                f"a backward pass with create_graph=True runs a linear layer in {plan.format_of('forward')}: it has no second gradient",
                hint=_KEEP,
            )
        x, weight = ctx.saved_tensors
        rows, low = grad.reshape(-1, grad.shape[-1]).contiguous(), weight.to(x.dtype).contiguous()
        seed = _product(rows, low, lambda: seed_of(rows, low)) if plan.recipe.stochastic else None
        grad_x = grad_weight = None
        if wants(ctx, 0):
            ctx.stands_for = plan.format_of("dgrad")
            grad_x = _product(rows, low, lambda: _dgrad(rows, low, plan, seed)).to(x.dtype).view(x.shape)
        if wants(ctx, 1):
            ctx.stands_for = plan.format_of("wgrad")
            columns = x.reshape(-1, x.shape[-1]).contiguous()
            wide = _product(rows.mT, columns, lambda: _wgrad(rows, columns, plan, seed))
            grad_weight = wide.to(x.dtype).to(weight.dtype)
        return grad_x, grad_weight, None


class _Local(threading.local):
    operands: tuple[Tensor, Tensor] | None = None


_LOCAL = _Local()


def unrounded() -> tuple[Tensor, Tensor] | None:
    """Return the operands of the product that a unit computes in this thread, (rows, sums) and (sums, columns); None if there is none."""
    return _LOCAL.operands


def _product(a: Tensor, b: Tensor, compute: Callable[[], Tensor]) -> Tensor:
    """Run a part of a unit's work on operands that it rounds itself."""
    if torch.compiler.is_compiling():
        return compute()
    before, _LOCAL.operands = _LOCAL.operands, (a, b)
    try:
        return compute()
    finally:
        _LOCAL.operands = before


def _forward(x: Tensor, weight: Tensor, plan: LayerPlan) -> Tensor:
    if "forward" in plan.in_16_bits:
        return F.linear(x.float(), weight.float())
    if plan.accumulate == PROMOTED:
        return _promoted((x, plan.recipe.values, 1), (weight, plan.recipe.weights, 1))
    return F.linear(rounded(x, plan.recipe.values, along=1), rounded(weight, plan.recipe.weights, along=1))


def _dgrad(grad: Tensor, weight: Tensor, plan: LayerPlan, seed: Tensor | None) -> Tensor:
    if "dgrad" in plan.in_16_bits:
        return grad.float() @ weight.float()
    if plan.accumulate == PROMOTED:
        return _promoted((grad, plan.recipe.gradients, 1), (weight, plan.recipe.weights, 0))
    return rounded(grad, plan.recipe.gradients, along=1, seed=seed) @ rounded(weight, plan.recipe.weights, along=0)


def _wgrad(grad: Tensor, x: Tensor, plan: LayerPlan, seed: Tensor | None) -> Tensor:
    if "wgrad" in plan.in_16_bits:
        return grad.float().mT @ x.float()
    if plan.accumulate == PROMOTED:
        return _promoted((grad, plan.recipe.gradients, 0), (x, plan.recipe.values, 0))
    seed = None if seed is None else seed ^ 1
    if plan.recipe.hadamard:
        grad, x = transformed(grad), transformed(x)
    values: Format = plan.recipe.values
    return rounded(grad, plan.recipe.gradients, along=0, seed=seed).mT @ rounded(x, values, along=0)


def _promoted(a: tuple[Tensor, Format, int], b: tuple[Tensor, Format, int]) -> Tensor:
    """Return a product in FP32 whose sums are scaled and promoted after every block of 128 products (arXiv:2412.19437, figure 7b).

    Args:
        a: a matrix, its format, and the dimension that the product sums over.
        b: likewise.
    """
    (left, by_left), (right, by_right) = (
        tuple(t if along == 1 else t.mT for t in in_blocks(x, fmt, along=along)) for x, fmt, along in (a, b)
    )
    scales = by_left[:, ::FP8_BLOCK], by_right[:, ::FP8_BLOCK].mT
    return product(left.to(a[1].dtype), right.mT.to(b[1].dtype), scales, accumulate=PROMOTED, of="results")
