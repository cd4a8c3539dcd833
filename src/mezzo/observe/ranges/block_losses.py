"""What formats in blocks lose of the operands of linear layers, counted in one FP32 run for every format and rule of scales.

Each of a layer's three products rounds two operands (``engine.matrix_units.block_linear``), so each layer has six. An operand is rounded
to BF16, as under the policies, then to each format; where a recipe transforms the operands of ``wgrad``, the transformed ones count. For
each operand and format the sums over the observed steps are six numbers, in this order:

    values         that are not zero
    zeroed         of them, in the format
    saturated      beyond the largest element of their block
    at_end         in blocks whose scale is beyond the scale format's range, by more than a factor of 4
    error, square  sums of squares: of the differences, and of the values; the root of their quotient is the relative error

Layers and products that the policy keeps in BF16 are left out, in all formats. Limits: so are operands that are not finite.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from mezzo.engine.matrix_units.block_formats import block_scales, in_tiles, rounded, seed_of, transformed
from mezzo.engine.matrix_units.block_linear import LayerPlan
from mezzo.engine.matrix_units.low_layers import planned
from mezzo.formats import BF16, Format, Recipe
from mezzo.observe.ranges.table import BlockKey
from mezzo.policy import Policy
from mezzo.policyfields import LayerProduct
from mezzo.records import BlockOperand

JUDGED = (
    *("fp8-block", "fp8-block:scale_rule=rceil", "mxfp8", "mxfp8:scale_rule=floor"),
    *("mxfp4", "mxfp4:scale_rule=floor", "nvfp4", "nvfp4:scale_rule=four_or_six"),
)
"""Policies whose formats and rules are judged, beside the one that was asked for."""
_AT_END = 4.0


class _Operand(NamedTuple):
    product: LayerProduct
    name: BlockOperand
    values: Tensor
    form: Format
    along: int
    seed: Tensor | None


class BlockLosses:
    """Counts what ``policy`` and other formats in blocks lose of the layers in blocks; the sums go to ``table``, by key."""

    def __init__(self, policy: Policy, table: Callable[[BlockKey, Tensor], Tensor]) -> None:
        self._table = table
        kept = {name: getattr(policy, name) for name in ("end_layers", "bf16_products", "fp32_modules")}
        self._policies = {name: Policy.parse(name).replace(**kept) for name in (str(policy), *JUDGED)}
        self._plans: dict[str, WeakKeyDictionary[nn.Module, LayerPlan]] = {
            name: WeakKeyDictionary() for name in self._policies
        }

    def called(self, model: nn.Module) -> None:
        """Find out which layers of a model would compute in blocks, under each policy."""
        for name, policy in self._policies.items():
            self._plans[name].update(planned(model, policy).values())

    def returned(self, module: nn.Module, name: str, inputs: Any, output: Any) -> None:
        """Count the operands of a layer's products once the gradient of its result is known."""
        x = inputs[0] if isinstance(inputs, tuple) and inputs else None
        if not isinstance(x, Tensor) or not isinstance(output, Tensor) or not output.requires_grad or not x.numel():
            return
        plans = {policy: of_policy[module] for policy, of_policy in self._plans.items() if module in of_policy}
        if plans:
            weight = module.weight
            assert isinstance(weight, Tensor)
            operands = x.detach(), weight.detach()
            output.register_hook(functools.partial(self._count, name, *operands, plans, x.requires_grad))

    def _count(
        self, name: str, x: Tensor, weight: Tensor, plans: Mapping[str, LayerPlan], inner: bool, gradient: Tensor
    ) -> None:
        with torch.no_grad():
            rows, low, dy = (t.reshape(-1, t.shape[-1]).to(BF16.dtype).contiguous() for t in (x, weight, gradient))
            if not all(bool(t.isfinite().all()) for t in (rows, low, dy)):
                return
            for policy, plan in plans.items():
                for operand in _operands(rows, low, dy, plan.recipe):
                    if operand.product in plan.in_16_bits or (operand.product == "dgrad" and not inner):
                        continue
                    sums = losses(operand.values, operand.form, along=operand.along, seed=operand.seed)
                    table = self._table((name, operand.product, operand.name, policy), sums)
                    table += sums


def _operands(x: Tensor, weight: Tensor, dy: Tensor, recipe: Recipe) -> Iterator[_Operand]:
    seed = seed_of(dy, weight) if recipe.stochastic else None
    yield _Operand("forward", "activation", x, recipe.values, 1, None)
    yield _Operand("forward", "weight", weight, recipe.weights, 1, None)
    yield _Operand("dgrad", "gradient", dy, recipe.gradients, 1, seed)
    yield _Operand("dgrad", "weight", weight, recipe.weights, 0, None)
    mixed = [transformed(t) if recipe.hadamard else t for t in (dy, x)]
    yield _Operand("wgrad", "gradient", mixed[0], recipe.gradients, 0, None if seed is None else seed ^ 1)
    yield _Operand("wgrad", "activation", mixed[1], recipe.values, 0, None)


def losses(x: Tensor, form: Format, *, along: int, seed: Tensor | None = None) -> Tensor:
    """Return the six numbers for a finite BF16 matrix rounded to ``form``, in FP64; arguments as for ``rounded``."""
    tiles, scales, largest = block_scales(x, form, along=along)
    found = in_tiles(rounded(x, form, along=along, seed=seed), *tiles.shape[1::2])
    some, wanted = tiles != 0, largest / form.max
    ends = (scales > wanted * _AT_END) | (scales < wanted / _AT_END)
    counts = (some, some & (found == 0), tiles.abs() > scales * form.max, some & ends)
    numbers = [
        torch.count_nonzero(count).double() for count in counts
    ]  # a sum of truth values takes seven times as long
    numbers += [torch.linalg.vector_norm(t, dtype=torch.double).square() for t in (found - tiles, tiles)]
    return torch.stack(numbers)
