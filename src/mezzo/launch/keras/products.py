"""The products of TensorFlow: what each operation is called on a tape, its size and its FLOPs, from the sizes of its inputs and results.

As in ``measure.flops``, a multiplication and an addition count as two operations. A size that is not known raises ``TypeError`` or
``IndexError``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from mezzo.launch.keras.step_tape import product_size
from mezzo.measure.predict.tape import NO_SHAPE, ProductSize

Attribute: TypeAlias = Callable[[str], Any]
Sizes: TypeAlias = Sequence[Any]
Measured: TypeAlias = tuple[str, ProductSize]


@dataclass(frozen=True)
class ProductRule:
    """An operation that computes products."""

    measured: Callable[[Sizes, Sizes, Attribute], Measured]
    """Its name and size, from the sizes of inputs and results, and attributes."""
    operands: Callable[[Sizes, Sizes], tuple[Sizes, Sizes]] | None = None
    """The result and the weight of the convolution whose multiplications it does: a gradient of the input has more places than these."""
    depthwise: bool = False

    def flops(self, inputs: Sizes, outputs: Sizes, attribute: Attribute) -> int:
        """Return the FLOPs."""
        if self.operands is None:
            size = self.measured(inputs, outputs, attribute)[1]
            return int(2 * size.products * size.rows * size.columns * size.depth)
        result, weight = self.operands(inputs, outputs)
        # Each element of the result is a sum over all dimensions of the weight but the last, the output channels; a depthwise weight
        # is (*window, channels, multiplier), and its channels are not summed over.
        return int(2 * math.prod(result) * math.prod(weight[: -2 if self.depthwise else -1]))


def _matmul(inputs: Sizes, outputs: Sizes, attribute: Attribute) -> Measured:
    (rows, columns), depth = outputs[0], inputs[0][0 if attribute("transpose_a") else 1]
    return "mm", ProductSize(1, rows, columns, depth)


def _batch_matmul(inputs: Sizes, outputs: Sizes, attribute: Attribute) -> Measured:
    *batch, rows, columns = outputs[0]
    depth = inputs[0][-2 if attribute("adj_x") else -1]
    if len(inputs[1]) == 2:  # one weight for the whole batch
        return "mm", ProductSize(1, math.prod(batch) * rows, columns, depth)
    return "bmm", ProductSize(math.prod(batch), rows, columns, depth)


def _einsum(inputs: Sizes, outputs: Sizes, attribute: Attribute) -> Measured:
    terms, result = _text(attribute("equation")).replace(" ", "").split("->")
    if len(inputs) < 2:
        return "mm", NO_SHAPE
    labels = [_labels(term, shape) for term, shape in zip(terms.split(","), inputs, strict=True)]
    size: dict[str, int] = {}
    for names, shape in zip(labels, inputs, strict=True):
        size |= {name: max(size.get(name, 1), length) for name, length in zip(names, shape, strict=True)}
    if len(inputs) > 2:
        columns = outputs[0][-1]
        rows = math.prod(outputs[0][:-1])
        return "mm", ProductSize(1, rows, columns, math.prod(size.values()) // (rows * columns))
    kept = set(_labels(result, outputs[0]))
    left, right = map(set, labels)
    return product_size(
        [size[one] for one in left & right & kept],
        [size[one] for one in left - right],
        [size[one] for one in right - left],
        [size[one] for one in (left & right) - kept],
    )


def _labels(term: str, shape: Sizes) -> list[str]:
    """Return a name for each dimension of an operand of an einsum; an ellipsis has names of its own, counted from the last."""
    before, dots, after = term.partition("...")
    inside = len(shape) - len(before) - len(after) if dots else 0
    return [*before, *(f".{number}" for number in range(inside, 0, -1)), *after]


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _convolved(x: Sizes, weight: Sizes, y: Sizes, attribute: Attribute, *, depthwise: bool) -> ProductSize:
    first = "C" in _text(attribute("data_format"))[:2]
    channels, out = (x[1], y[1]) if first else (x[-1], y[-1])
    window = math.prod(weight[:-2])
    groups = channels if depthwise else max(1, channels // weight[-2])
    depth = window if depthwise else weight[-2] * window
    return ProductSize(groups, math.prod(y) // out, out // groups, depth, window)


def _forward(inputs: Sizes, outputs: Sizes, attribute: Attribute, *, depthwise: bool) -> Measured:
    return "convolution", _convolved(inputs[0], inputs[1], outputs[0], attribute, depthwise=depthwise)


def _input_gradient(inputs: Sizes, outputs: Sizes, attribute: Attribute, *, depthwise: bool) -> Measured:
    x = outputs[0]
    forward = _convolved(x, inputs[1], inputs[2], attribute, depthwise=depthwise)
    channels = forward.products * forward.depth // forward.window
    columns, depth = channels // forward.products, forward.columns * forward.window
    size = ProductSize(forward.products, math.prod(x) // channels, columns, depth, forward.window)
    return "convolution_input_gradient", size


def _weight_gradient(inputs: Sizes, outputs: Sizes, attribute: Attribute, *, depthwise: bool) -> Measured:
    forward = _convolved(inputs[0], outputs[0], inputs[2], attribute, depthwise=depthwise)
    size = ProductSize(forward.products, forward.columns, forward.depth, forward.rows, forward.window)
    return "convolution_weight_gradient", size


def _convolution(*, depthwise: bool = False) -> ProductRule:
    measured = partial(_forward, depthwise=depthwise)
    return ProductRule(measured, lambda inputs, outputs: (outputs[0], inputs[1]), depthwise)


def _of_input(*, depthwise: bool = False) -> ProductRule:
    measured = partial(_input_gradient, depthwise=depthwise)
    return ProductRule(measured, lambda inputs, outputs: (inputs[2], inputs[1]), depthwise)


def _of_weight(*, depthwise: bool = False) -> ProductRule:
    measured = partial(_weight_gradient, depthwise=depthwise)
    return ProductRule(measured, lambda inputs, outputs: (inputs[2], outputs[0]), depthwise)


PRODUCTS: dict[str, ProductRule] = {
    "MatMul": ProductRule(_matmul),
    "BatchMatMul": ProductRule(_batch_matmul),
    "BatchMatMulV2": ProductRule(_batch_matmul),
    "BatchMatMulV3": ProductRule(_batch_matmul),
    "Einsum": ProductRule(_einsum),
    "Conv2D": _convolution(),
    "Conv2DBackpropInput": _of_input(),
    "Conv2DBackpropFilter": _of_weight(),
    "Conv3D": _convolution(),
    "Conv3DBackpropInputV2": _of_input(),
    "Conv3DBackpropFilterV2": _of_weight(),
    "DepthwiseConv2dNative": _convolution(depthwise=True),
    "DepthwiseConv2dNativeBackpropInput": _of_input(depthwise=True),
    "DepthwiseConv2dNativeBackpropFilter": _of_weight(depthwise=True),
}
"""By the name of the operation."""
