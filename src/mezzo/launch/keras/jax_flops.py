"""Count the products in a traced step of JAX, from its jaxpr: forward, backward, and in called functions.

As in ``measure.flops``, a product counts as two operations. Both sides of a branch are counted, a scan's body as often as it runs, and
a loop of unknown length once. Keras' order of dimensions distinguishes a convolution from its gradients.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any


def count(jaxpr: Any) -> Counter[str]:
    """Return the FLOPs of the products in a jaxpr, by the name of the operands' dtype."""
    total: Counter[str] = Counter()
    for equation in jaxpr.eqns:
        flops_of = _PRODUCTS.get(equation.primitive.name)
        if flops_of is not None:
            total[str(equation.invars[0].aval.dtype)] += flops_of(equation)
        times = equation.params.get("length", 1) if equation.primitive.name == "scan" else 1
        for inner in _called(equation):
            for dtype, flops in count(inner).items():
                total[dtype] += times * flops
    return total


def _called(equation: Any) -> Iterator[Any]:
    """Yield the jaxprs that an equation runs."""
    for value in equation.params.values():
        for candidate in value if isinstance(value, (tuple, list)) else (value,):
            jaxpr = getattr(candidate, "jaxpr", candidate)
            if hasattr(jaxpr, "eqns"):
                yield jaxpr


def _dot(equation: Any) -> int:
    (contracted, _), _ = equation.params["dimension_numbers"]
    shape = equation.invars[0].aval.shape
    flops: int = 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(shape[k] for k in contracted)
    return flops


def _convolution(equation: Any) -> int:
    """Count a convolution of Keras, or one of its gradients, which JAX writes as convolutions with dimensions swapped."""
    (x, kernel), (y,), numbers = equation.invars, equation.outvars, equation.params["dimension_numbers"]
    batch, features, *spatial_dims = numbers.lhs_spec
    if batch != 0:  # the gradient of the kernel: summed over the batch and the positions of the output's gradient
        positions = x.aval.shape[features] * math.prod(kernel.aval.shape[k] for k in numbers.rhs_spec[2:])
        return int(2 * positions * math.prod(y.aval.shape))
    of_input = numbers.rhs_spec[0] < numbers.rhs_spec[1]  # or a transposed convolution
    spatial = [x.aval.shape[k] for k in spatial_dims] if of_input else [y.aval.shape[k] for k in numbers.out_spec[2:]]
    return int(2 * x.aval.shape[batch] * math.prod(spatial) * math.prod(kernel.aval.shape))


_PRODUCTS = {"dot_general": _dot, "conv_general_dilated": _convolution}
"""The FLOP formula of each primitive that is a product."""
