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


def casts(seen: Iterable[TracedOperation]) -> list[CastTotal]:
    """Return all casts, equal ones merged, the largest first."""
    return merged.casts(
        CastTotal(
            module=one.module,
            phase=one.phase,
            of=one.cast.of,
            source=one.cast.source,
            target=one.cast.target,
            bytes=one.bytes,
            line=one.noted.line,
        )
        for one in seen
        if one.cast is not None
    )


def round_trips(seen: Sequence[TracedOperation]) -> list[RoundTrip]:
    """Return the casts that a later cast undoes, by the module of the first of the two, the largest first."""
    trips = [(c.back_to, one, c) for one in seen if (c := one.cast) is not None and c.back_to is not None]
    groups = grouped(
        trips, lambda trip: (trip[0].module, trip[1].phase, trip[2].source, trip[2].target, trip[2].needless)
    )
    found = [
        RoundTrip(
            module=first.module,
            phase=second.phase,
            formats=f"{cast.target} > {cast.source} > {cast.target}",
            needless=cast.needless,
            count=len(group),
            bytes=sum(there.bytes + back.bytes for there, back, _ in group),
            line=first.noted.line,
        )
        for group in groups
        for first, second, cast in group[:1]
    ]
    return largest(found, lambda trip: trip.bytes)


def wide_products(
    steps: Sequence[Sequence[TracedOperation]], *, policy: Policy | None, names: Names
) -> list[WideProduct]:
    """Return the products that ran in FP32 or wider, by cause, the largest first."""
    elsewhere = any(lowers(step) for step in steps)
    totals: Counter[tuple[str, str, Why, str]] = Counter()
    for step in steps:
        backward = _backward_flops(step)
        modules: dict[str, tuple[str, str, Why, str]] = {}
        for one in step:
            if one.phase in _FORWARD and is_wide(one):
                assert one.product is not None
                why = why_wide(one, policy=policy, lowers_elsewhere=elsewhere, name=names)
                key = one.op, one.format, why, one.noted.line
                modules.setdefault(one.module, key)
                totals[key] += one.flops + backward.pop(one.product.number, (0, ""))[0]
        for flops, module in backward.values():  # of a gradient that is differentiated again
            if module in modules:
                totals[modules[module]] += flops
    found = [
        WideProduct(op=op, module=why.module, format=fmt, cause=why.cause, reason=why.reason, flops=flops, line=line)
        for (op, fmt, why, line), flops in totals.items()
    ]
    return largest(found, lambda product: product.flops)


def _backward_flops(step: Sequence[TracedOperation]) -> dict[int, tuple[int, str]]:
    """Return the FLOPs of the wide products of backward passes, and their module, by the number of their graph node."""
    totals: dict[int, tuple[int, str]] = {}
    for one in step:
        if one.phase not in _FORWARD and one.noted.node is not None and is_wide(one):
            number = one.noted.node.number
            totals[number] = totals.get(number, (0, ""))[0] + one.flops, one.module
    return totals


def products(seen: Iterable[TracedOperation]) -> list[Product]:
    """Return all products by the shape that a Tensor Core works on, the largest first."""
    shaped = ((one, shape_of(one)) for one in seen if one.product is not None)
    return merged.products((one, shape) for one, shape in shaped if shape is not None)
