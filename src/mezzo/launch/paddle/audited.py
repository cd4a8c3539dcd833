"""What an audit knows of the operations of Paddle steps.

The format of an operation is the one that it computes in: where the policy rounds operands and results on a CPU, the values are kept in
FP32 tensors, but formats, casts and bytes are those of the policy.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from mezzo.observe.audit.merged import Row, Shape, grouped, largest
from mezzo.records import Cause, WideProduct

OF_GRADIENT = "_grad"
"""Suffix of a product that gives the gradient of another."""


@dataclass(kw_only=True)
class Audited(Row):
    """One operation, or the part of its backward pass that gives one gradient."""

    line: str = ""
    shape: Shape | None = None
    cause: tuple[Cause, str] | None = None
    """Why a product ran in FP32 or wider."""
    sensitive: bool = False
    """Whether it ran in 16 bits although the portable lists keep it in FP32."""


def wide_products(rows: Iterable[Audited]) -> list[WideProduct]:
    """Return the products that ran in FP32 or wider, by cause, the largest first; forward and backward together."""
    wide = [row for row in rows if row.cause is not None]
    groups = grouped(wide, lambda r: (r.op.removesuffix(OF_GRADIENT), r.module, r.format, r.cause, r.line))
    found = [
        WideProduct(
            op=group[0].op,
            module=group[0].module,
            format=group[0].format,
            cause=group[0].cause[0],
            reason=group[0].cause[1],
            flops=sum(row.flops for row in group),
            line=group[0].line,
        )
        for group in groups
        if group[0].cause is not None
    ]
    return largest(found, lambda product: product.flops)


def of_gradient(row: Audited, shape: Shape | None, *, weight: bool) -> Audited:
    """Return the part of a product's backward pass that gives the gradient of a weight, or of another operand."""
    turned = shape
    if shape is not None and weight:
        turned = replace(shape, m=shape.k, k=shape.m)
    elif shape is not None:
        turned = replace(shape, n=shape.k, k=shape.n)
    return replace(row, phase="wgrad" if weight else "dgrad", shape=turned, op=f"{row.op}{OF_GRADIENT}")


def bytes_of(shapes: Iterable[Sequence[int]], width: int) -> int:
    """Return the bytes of tensors with these shapes."""
    return sum(math.prod(shape) * width for shape in shapes)
