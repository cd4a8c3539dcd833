"""What one operation of a step computes and moves, from its arguments and its result: the rows of a tape.

A convolution's backward pass is two products, with their own shapes and bytes: the gradient of its input and that of its weight.
Bytes are those of a kernel that reads each operand and writes each result once. An embedding reads the rows that it returns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from mezzo.formats import format_of
from mezzo.measure.flops import COUNTS
from mezzo.measure.predict.tape import CostedOperation, Phase, Shape

aten: Any = torch.ops.aten
_FREE = frozenset(
    {
        aten.detach,
        aten.alias,
        aten.lift_fresh,
        aten._unsafe_view,
        aten.empty,
        aten.empty_like,
        aten.empty_strided,
        aten.new_empty,
        aten.new_empty_strided,
    }
)
"""Operations that compute nothing."""
_OVERWRITES = frozenset({aten.copy_, aten.zero_, aten.fill_})
"""Operations that do not read their first operand."""
_READS_WHAT_IT_WRITES = frozenset({aten.embedding, aten.index_select, aten.gather})
_NORMS = {
    aten.native_batch_norm: 0,
    aten._native_batch_norm_legit: 0,
    aten.native_batch_norm_backward: 1,
}
"""Normalisations over the batch, with the place of their input."""


def operations_of(func: Any, args: Any, kwargs: Any, result: Any, phase: Phase, module: str) -> list[CostedOperation]:
    """Return what ``func`` computes; empty for an operation that computes nothing."""
    packet = func.overloadpacket
    if packet in _FREE or func.is_view or func.namespace == "prim":
        return []
    inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    outputs = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
    if all(t.dim() == 0 for t in (*inputs, *outputs)):
        return []
    form = _format(inputs or outputs)
    if packet is aten.convolution_backward:
        return _convolution_backward(args, result, form, phase, module)
    written = outputs or [t for t in tree_leaves(args[:1]) if isinstance(t, Tensor)]  # a list operation in place
    read = inputs[1:] if packet in _OVERWRITES else inputs
    if packet in _READS_WHAT_IT_WRITES:
        read = [*inputs[1:], *outputs]
    count = COUNTS.get(packet)
    return [
        CostedOperation(
            name=packet.__name__,
            phase=phase,
            module=module,
            format=form,
            flops=count(result, *args) if count is not None else 0,
            read_bytes=sum(map(_bytes, read)),
            written_bytes=sum(map(_bytes, written)),
            shape=_shape(packet, args, result),
        )
    ]


def _convolution_backward(
    args: Sequence[Any], result: Sequence[Tensor | None], form: str, phase: Phase, module: str
) -> list[CostedOperation]:
    grad, x, weight, transposed, groups = args[0], args[1], args[2], args[7], args[9]
    forward = _convolved(x.shape, weight.shape, grad.shape, transposed, groups)
    flops = 2 * forward.products * forward.rows * forward.columns * forward.depth
    kinds = {
        # the gradient of the input sums over output channels, that of the weight over positions
        "convolution_input_gradient": (
            result[0],
            weight,
            Shape(
                forward.products,
                x.shape[0] * math.prod(x.shape[2:]),
                x.shape[1] // groups,
                forward.columns * math.prod(weight.shape[2:]),
                forward.window,
            ),
        ),
        "convolution_weight_gradient": (
            result[1],
            x,
            Shape(forward.products, forward.columns, forward.depth, forward.rows, forward.window),
        ),
    }
    found = []
    for name, (gradient, operand, shape) in kinds.items():
        if gradient is not None:
            found.append(
                CostedOperation(
                    name=name,
                    phase=phase,
                    module=module,
                    format=form,
                    flops=flops,
                    read_bytes=_bytes(grad) + _bytes(operand),
                    written_bytes=_bytes(gradient),
                    shape=shape,
                )
            )
    if len(result) > 2 and (bias := result[2]) is not None:
        found.append(CostedOperation("sum", phase, module, form, 0, _bytes(grad), _bytes(bias)))
    return found


def _shape(packet: Any, args: Any, result: Any) -> Shape:
    found = _SHAPES.get(packet)
    if found is not None:
        return found(args, result)
    if packet in _NORMS:
        x = args[_NORMS[packet]]
        return Shape(1, x.shape[1], x.numel() // x.shape[1], 0)
    return Shape()


def _product(a: Tensor, b: Tensor) -> Shape:
    if a.dim() < 2 or b.dim() < 2:
        return Shape(1, a.shape[-2] if a.dim() > 1 else 1, b.shape[-1] if b.dim() > 1 else 1, a.shape[-1])
    return Shape(math.prod(a.shape[:-2]), a.shape[-2], b.shape[-1], a.shape[-1])


def _convolved(x: Sequence[int], weight: Sequence[int], y: Sequence[int], transposed: bool, groups: int) -> Shape:
    window = math.prod(weight[2:])
    if transposed:  # the gradient of a convolution from y to x
        rows = x[0] * math.prod(x[2:])
        return Shape(groups, rows, weight[1] * window, weight[0] // groups, window)
    return Shape(groups, y[0] * math.prod(y[2:]), weight[0] // groups, weight[1] * window, window)


def _attended(q: Tensor, k: Tensor) -> Shape:
    return Shape(math.prod(q.shape[:-2]), q.shape[-2], k.shape[-2], q.shape[-1])


_SHAPES: dict[Any, Callable[[Any, Any], Shape]] = {
    aten.mm: lambda a, _: _product(a[0], a[1]),
    aten.mv: lambda a, _: _product(a[0], a[1]),
    aten.bmm: lambda a, _: _product(a[0], a[1]),
    aten.addmm: lambda a, _: _product(a[1], a[2]),
    aten.baddbmm: lambda a, _: _product(a[1], a[2]),
    aten.convolution: lambda a, r: _convolved(a[0].shape, a[1].shape, r.shape, a[6], a[8]),
    aten._scaled_dot_product_flash_attention: lambda a, _: _attended(a[0], a[1]),
    aten._scaled_dot_product_flash_attention_backward: lambda a, _: _attended(a[1], a[2]),
    aten._scaled_dot_product_efficient_attention: lambda a, _: _attended(a[0], a[1]),
    aten._scaled_dot_product_efficient_attention_backward: lambda a, _: _attended(a[1], a[2]),
}


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _format(tensors: list[Tensor]) -> str:
    operand = next((t for t in tensors if t.is_floating_point()), None)
    if operand is None:
        return "other"
    found = format_of(operand.dtype)
    return found.name if found is not None else "other"
