"""Merge the rows of an audit: equal operations, casts and products become one row with their sums. Imports no torch."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from mezzo.records import CastTotal, Operation, PassKind, Product

T = TypeVar("T")


@dataclass(kw_only=True)
class AuditRow:
    """One operation, in the form that the audits of all frameworks share."""

    op: str
    module: str
    phase: PassKind
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    bytes: int
    flops: int = 0
    format: str = ""
    """The format that a product multiplies in."""


@dataclass
class ProductShape:
    """The shape of a product, ``batch`` times (m, k) x (k, n), and what keeps it off Tensor Cores."""

    m: int
    n: int
    k: int
    batch: int = 1
    problems: dict[str, str] = field(default_factory=dict)
    """A sentence by kind of problem: ``dimension``, ``alignment``, ``layout``, ``copy``, ``groups``."""

    def listed(self) -> list[str]:
        """Return the problems as a record lists them."""
        return [f"{kind}: {sentence}" for kind, sentence in self.problems.items()]


def grouped(rows: Iterable[T], key: Callable[[T], Hashable]) -> list[list[T]]:
    """Return the rows grouped by key, in the order in which the keys first appear."""
    groups: dict[Hashable, list[T]] = defaultdict(list)
    for row in rows:
        groups[key(row)].append(row)
    return list(groups.values())


def largest(rows: Iterable[T], size: Callable[[T], Any]) -> list[T]:
    """Return the rows sorted by size, the largest first."""
    return sorted(rows, key=size, reverse=True)


def operations(rows: Iterable[AuditRow]) -> list[Operation]:
    """Return all operations, equal ones merged, in the order in which they first ran."""
    groups = grouped(rows, lambda r: (r.op, r.module, r.phase, r.inputs, r.outputs, r.format))
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


def flops_by_phase(rows: Iterable[AuditRow]) -> dict[str, dict[str, int]]:
    """Return the FLOPs of products by phase, then by format."""
    totals: dict[str, Counter[str]] = defaultdict(Counter)
    for row in rows:
        if row.flops:
            totals[row.phase][row.format] += row.flops
    return {phase: dict(by_format) for phase, by_format in totals.items()}


def casts(rows: Iterable[CastTotal]) -> list[CastTotal]:
    """Return all casts, equal ones merged, the largest first."""
    groups = grouped(rows, lambda c: (c.module, c.phase, c.of, c.source, c.target))
    totals = [
        group[0].model_copy(update={"count": len(group), "bytes": sum(row.bytes for row in group)}) for group in groups
    ]
    return largest(totals, lambda total: total.bytes)


def products(rows: Iterable[tuple[AuditRow, ProductShape]]) -> list[Product]:
    """Return all products by the shape that a Tensor Core works on, the largest first."""

    def key(pair: tuple[AuditRow, ProductShape]) -> Hashable:
        row, shape = pair
        return row.op, row.module, row.phase, row.format, shape.m, shape.n, shape.k, shape.batch, *shape.listed()

    products = [
        Product(
            op=row.op,
            module=row.module,
            phase=row.phase,
            format=row.format,
            m=shape.m,
            n=shape.n,
            k=shape.k,
            batch=shape.batch,
            count=len(group),
            flops=sum(member.flops for member, _ in group),
            eligible=not shape.problems,
            problems=shape.listed(),
        )
        for group in grouped(rows, key)
        for row, shape in group[:1]
    ]
    return largest(products, lambda product: product.flops)
