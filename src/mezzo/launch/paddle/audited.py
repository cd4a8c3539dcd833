"""What an audit knows of the operations of Paddle steps, and the tables of its record.

The format of an operation is the one that it computes in: where the policy rounds operands and results on a CPU, the values are kept in
FP32 tensors, but formats, casts and bytes are those of the policy.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from mezzo.records import CastTotal, Cause, Operation, Phase, Product, WideProduct

OF_GRADIENT = "_grad"
"""Suffix of a product that gives the gradient of another."""
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The shape of a product, ``batch`` times (m, k) x (k, n), and what keeps it off Tensor Cores."""

    m: int
    n: int
    k: int
    batch: int = 1
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Audited:
    """One operation, or the part of its backward pass that gives one gradient."""

    op: str
    module: str
    phase: Phase
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    bytes: int
    line: str = ""
    format: str = ""
    """The format that a product multiplies in."""
    flops: int = 0
    shape: Shape | None = None
    cause: tuple[Cause, str] | None = None
    """Why a product ran in FP32 or wider."""
    sensitive: bool = False
    """Whether it ran in 16 bits although the portable lists keep it in FP32."""


def operations(rows: Sequence[Audited]) -> list[Operation]:
    """Return all operations, equal ones merged, in the order in which they first ran."""
    groups = _grouped(rows, lambda r: (r.op, r.module, r.phase, r.inputs, r.outputs, r.format))
    return [
        Operation(
            op=group[0].op,
            module=group[0].module,
            phase=group[0].phase,
            inputs=list(group[0].inputs),
            outputs=list(group[0].outputs),
            format=group[0].format,
            count=len(group),
            flops=sum(row.flops for row in group),
            bytes=sum(row.bytes for row in group),
        )
        for group in groups
    ]


def flops_by_phase(rows: Iterable[Audited]) -> dict[str, dict[str, int]]:
    """Return the FLOPs of products by phase, then by format."""
    totals: dict[str, Counter[str]] = defaultdict(Counter)
    for row in rows:
        if row.flops:
            totals[row.phase][row.format] += row.flops
    return {phase: dict(by_format) for phase, by_format in totals.items()}


def casts(rows: Sequence[CastTotal]) -> list[CastTotal]:
    """Return all casts, equal ones merged, the largest first."""
    groups = _grouped(rows, lambda c: (c.module, c.phase, c.of, c.source, c.target))
    found = [
        group[0].model_copy(update={"count": len(group), "bytes": sum(one.bytes for one in group)}) for group in groups
    ]
    return sorted(found, key=lambda cast: -cast.bytes)


def wide_products(rows: Iterable[Audited]) -> list[WideProduct]:
    """Return the products that ran in FP32 or wider, by cause, the largest first; forward and backward together."""
    wide = [row for row in rows if row.cause is not None]
    groups = _grouped(wide, lambda r: (r.op.removesuffix(OF_GRADIENT), r.module, r.format, r.cause, r.line))
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
    return sorted(found, key=lambda product: -product.flops)


def products(rows: Iterable[Audited]) -> list[Product]:
    """Return all products by the shape that a Tensor Core works on, the largest first."""
    shaped = [row for row in rows if row.shape is not None]
    groups = _grouped(shaped, lambda r: (r.op, r.module, r.phase, r.format, r.shape))
    found = [
        Product(
            op=group[0].op,
            module=group[0].module,
            phase=group[0].phase,
            format=group[0].format,
            m=shape.m,
            n=shape.n,
            k=shape.k,
            batch=shape.batch,
            count=len(group),
            flops=sum(row.flops for row in group),
            eligible=not shape.problems,
            problems=list(shape.problems),
        )
        for group in groups
        if (shape := group[0].shape) is not None
    ]
    return sorted(found, key=lambda product: -product.flops)


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


def _grouped(rows: Iterable[T], key: Callable[[T], Hashable]) -> list[list[T]]:
    groups: dict[Hashable, list[T]] = defaultdict(list)
    for row in rows:
        groups[key(row)].append(row)
    return list(groups.values())
