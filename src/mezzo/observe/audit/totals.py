"""Sum the operations of observed steps into the tables of an audit's record."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from mezzo.observe.audit import merged
from mezzo.observe.audit.causes import Why, is_wide, lowers, why_wide
from mezzo.observe.audit.eligibility import shape_of
from mezzo.observe.audit.merged import grouped, largest
from mezzo.observe.audit.operations import TracedOperation
from mezzo.observe.module_names import Names
from mezzo.policy import Policy
from mezzo.records import CastTotal, Product, RoundTrip, WideProduct

_FORWARD = ("forward", "recompute")


def casts(operations: Iterable[TracedOperation]) -> list[CastTotal]:
    """Return all casts, equal ones merged, the largest first."""
    return merged.casts(
        CastTotal(
            module=operation.module,
            phase=operation.phase,
            of=operation.cast.of,
            source=operation.cast.source,
            target=operation.cast.target,
            bytes=operation.bytes,
            line=operation.raw.line,
        )
        for operation in operations
        if operation.cast is not None
    )


def round_trips(operations: Sequence[TracedOperation]) -> list[RoundTrip]:
    """Return the casts that a later cast undoes, by the module of the first of the two, the largest first."""
    casts = [(operation, operation.cast) for operation in operations if operation.cast is not None]
    trips = [(cast.back_to, operation, cast) for operation, cast in casts if cast.back_to is not None]
    groups = grouped(
        trips, lambda trip: (trip[0].module, trip[1].phase, trip[2].source, trip[2].target, trip[2].needless)
    )
    totals = [
        RoundTrip(
            module=first.module,
            phase=second.phase,
            formats=f"{cast.target} > {cast.source} > {cast.target}",
            needless=cast.needless,
            count=len(group),
            bytes=sum(there.bytes + back.bytes for there, back, _ in group),
            line=first.raw.line,
        )
        for group in groups
        for first, second, cast in group[:1]
    ]
    return largest(totals, lambda trip: trip.bytes)


def wide_products(
    steps: Sequence[Sequence[TracedOperation]], *, policy: Policy | None, names: Names
) -> list[WideProduct]:
    """Return the products that ran in FP32 or wider, by cause, the largest first."""
    elsewhere = any(lowers(step) for step in steps)
    totals: Counter[tuple[str, str, Why, str]] = Counter()
    for step in steps:
        backward = _backward_flops(step)
        modules: dict[str, tuple[str, str, Why, str]] = {}
        for operation in step:
            if operation.phase in _FORWARD and is_wide(operation):
                assert operation.product is not None
                why = why_wide(operation, policy=policy, lowers_elsewhere=elsewhere, names=names)
                key = operation.op, operation.format, why, operation.raw.line
                modules.setdefault(operation.module, key)
                totals[key] += operation.flops + backward.pop(operation.product.number, (0, ""))[0]
        for flops, module in backward.values():  # of a gradient that is differentiated again
            if module in modules:
                totals[modules[module]] += flops
    products = [
        WideProduct(op=op, module=why.module, format=fmt, cause=why.cause, reason=why.reason, flops=flops, line=line)
        for (op, fmt, why, line), flops in totals.items()
    ]
    return largest(products, lambda product: product.flops)


def _backward_flops(step: Sequence[TracedOperation]) -> dict[int, tuple[int, str]]:
    """Return the FLOPs of the wide products of backward passes, and their module, by the number of their graph node."""
    totals: dict[int, tuple[int, str]] = {}
    for operation in step:
        if operation.phase not in _FORWARD and operation.raw.node is not None and is_wide(operation):
            number = operation.raw.node.number
            totals[number] = totals.get(number, (0, ""))[0] + operation.flops, operation.module
    return totals


def products(operations: Iterable[TracedOperation]) -> list[Product]:
    """Return all products by the shape that a Tensor Core works on, the largest first."""
    shaped = ((operation, shape_of(operation)) for operation in operations if operation.product is not None)
    return merged.products((operation, shape) for operation, shape in shaped if shape is not None)
