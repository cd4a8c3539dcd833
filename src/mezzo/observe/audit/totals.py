"""Sum the operations of observed steps into the tables of an audit's record."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence

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
    """Return all casts that a later cast undoes, by the module of the first, the largest first."""

    def key(one: TracedOperation) -> Hashable:
        cast = one.cast
        assert cast is not None
        assert cast.back_to is not None
        return cast.back_to.module, one.phase, cast.source, cast.target, cast.needless

    found = []
    for group in grouped((one for one in seen if one.cast is not None and one.cast.back_to is not None), key):
        cast = group[0].cast
        assert cast is not None
        assert cast.back_to is not None
        there = [one.cast.back_to.bytes for one in group if one.cast is not None and one.cast.back_to is not None]
        found.append(
            RoundTrip(
                module=cast.back_to.module,
                phase=group[0].phase,
                formats=f"{cast.target} > {cast.source} > {cast.target}",
                needless=cast.needless,
                count=len(group),
                bytes=sum(there) + sum(one.bytes for one in group),
                line=cast.back_to.noted.line,
            )
        )
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
