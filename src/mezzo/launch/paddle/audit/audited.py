"""An audited operation of a Paddle step, and the products that ran in FP32.

The format of an operation is the one in which it computes: where the policy rounds operands and results on a CPU, the values are kept in
FP32 tensors, but formats, casts and bytes are those of the policy.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from mezzo.observe.audit.merged import AuditRow, ProductShape, grouped, largest
from mezzo.records import Cause, WideProduct

OF_GRADIENT = "_grad"
"""Suffix of a product that computes a gradient."""


@dataclass(kw_only=True)
class Audited(AuditRow):
    """One operation, or the part of its backward pass that computes one gradient."""

    line: str = ""
    shape: ProductShape | None = None
    cause: tuple[Cause, str] | None = None
    """Why a product ran in FP32 or wider."""
    sensitive: bool = False
    """Whether it ran in 16 bits although the portable lists keep it in FP32."""


def wide_products(rows: Iterable[Audited]) -> list[WideProduct]:
    """Return the products that ran in FP32 or wider, by cause, the largest first; forward and backward together."""
    groups = grouped(rows, lambda r: (r.op.removesuffix(OF_GRADIENT), r.module, r.format, r.cause, r.line))
    products = [
        WideProduct(
            op=first.op,
            module=first.module,
            format=first.format,
            cause=first.cause[0],
            reason=first.cause[1],
            flops=sum(row.flops for row in group),
            line=first.line,
        )
        for group in groups
        if (first := group[0]).cause is not None
    ]
    return largest(products, lambda product: product.flops)


def of_gradient(row: Audited, *, weight: bool) -> Audited:
    """Return the part of a product's backward pass that computes the gradient of a weight, or of another operand."""
    shape = row.shape
    if shape is not None:
        shape = replace(shape, m=shape.k, k=shape.m) if weight else replace(shape, n=shape.k, k=shape.n)
    return replace(row, phase="wgrad" if weight else "dgrad", shape=shape, op=f"{row.op}{OF_GRADIENT}")
