"""Sum the operations of observed steps into the tables of an audit's record."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeVar

from mezzo.observe.audit.causes import Why, is_wide, why_wide
from mezzo.observe.audit.eligibility import shape_of
from mezzo.observe.audit.operations import TracedOperation
from mezzo.observe.module_names import Names
from mezzo.policy import Policy
from mezzo.records import CastTotal, Operation, Product, RoundTrip, WideProduct

T = TypeVar("T")
_FORWARD = ("forward", "recompute")


def _grouped(
    seen: Iterable[TracedOperation], key: Callable[[TracedOperation], Hashable]
) -> list[list[TracedOperation]]:
    groups: dict[Hashable, list[TracedOperation]] = defaultdict(list)
    for one in seen:
        groups[key(one)].append(one)
    return list(groups.values())


def operations(seen: Sequence[TracedOperation]) -> list[Operation]:
    """Return all operations, equal ones merged, in the order in which they first ran."""

    def key(one: TracedOperation) -> Hashable:
        return one.op, one.module, one.phase, one.inputs, one.outputs, one.format

    return [
        Operation(
            op=first.op,
            module=first.module,
            phase=first.phase,
            inputs=list(first.inputs),
            outputs=list(first.outputs),
            format=first.format,
            count=len(group),
            flops=sum(one.flops for one in group),
            bytes=sum(one.bytes for one in group),
        )
        for group in _grouped(seen, key)
        for first in group[:1]
    ]


def flops_by_phase(seen: Sequence[TracedOperation]) -> dict[str, dict[str, int]]:
    """Return the FLOPs of products by phase, then by format."""
    totals: dict[str, Counter[str]] = defaultdict(Counter)
    for one in seen:
        if one.flops:
            totals[one.phase][one.format] += one.flops
    return {phase: dict(by_format) for phase, by_format in totals.items()}


def casts(seen: Sequence[TracedOperation]) -> list[CastTotal]:
    """Return all casts, equal ones merged, the largest first."""

    def key(one: TracedOperation) -> Hashable:
        assert one.cast is not None
        return one.module, one.phase, one.cast.of, one.cast.source, one.cast.target

    found = [
        CastTotal(
            module=first.module,
            phase=first.phase,
            of=first.cast.of,
            source=first.cast.source,
            target=first.cast.target,
            count=len(group),
            bytes=sum(one.bytes for one in group),
            line=first.noted.line,
        )
        for group in _grouped((one for one in seen if one.cast is not None), key)
        for first in group[:1]
        if first.cast is not None
    ]
    return _largest(found, lambda total: total.bytes)


def round_trips(seen: Sequence[TracedOperation]) -> list[RoundTrip]:
    """Return all casts that a later cast undoes, by the module of the first, the largest first."""

    def key(one: TracedOperation) -> Hashable:
        cast = one.cast
        assert cast is not None
        assert cast.back_to is not None
        return cast.back_to.module, one.phase, cast.source, cast.target, cast.needless

    found = []
    for group in _grouped((one for one in seen if one.cast is not None and one.cast.back_to is not None), key):
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
    return _largest(found, lambda trip: trip.bytes)


def wide_products(
    steps: Sequence[Sequence[TracedOperation]], *, policy: Policy | None, names: Names
) -> list[WideProduct]:
    """Return the products that ran in FP32 or wider, by cause, the largest first."""
    lowers = any(one.product is not None and not is_wide(one) for step in steps for one in step)
    totals: Counter[tuple[str, str, Why, str]] = Counter()
    for step in steps:
        backward = _backward_flops(step)
        modules: dict[str, tuple[str, str, Why, str]] = {}
        for one in step:
            if one.phase in _FORWARD and is_wide(one):
                assert one.product is not None
                why = why_wide(one, policy=policy, lowers_elsewhere=lowers, name=names)
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
    return _largest(found, lambda product: product.flops)


def _backward_flops(step: Sequence[TracedOperation]) -> dict[int, tuple[int, str]]:
    """Return the FLOPs of the wide products of backward passes, and their module, by the number of their graph node."""
    totals: dict[int, tuple[int, str]] = {}
    for one in step:
        if one.phase not in _FORWARD and one.noted.node is not None and is_wide(one):
            number = one.noted.node.number
            totals[number] = totals.get(number, (0, ""))[0] + one.flops, one.module
    return totals


def products(seen: Sequence[TracedOperation]) -> list[Product]:
    """Return all products by the shape that a Tensor Core works on, the largest first."""
    groups: dict[Hashable, Product] = {}
    for one in seen:
        shape = shape_of(one) if one.product is not None else None
        if shape is None:
            continue
        problems = [f"{kind}: {sentence}" for kind, sentence in shape.problems.items()]
        key = one.op, one.module, one.phase, one.format, shape.m, shape.n, shape.k, shape.batch, tuple(problems)
        before = groups.get(key)
        groups[key] = Product(
            op=one.op,
            module=one.module,
            phase=one.phase,
            format=one.format,
            m=shape.m,
            n=shape.n,
            k=shape.k,
            batch=shape.batch,
            count=1 if before is None else before.count + 1,
            flops=one.flops + (0 if before is None else before.flops),
            eligible=not problems,
            problems=problems,
        )
    return _largest(list(groups.values()), lambda product: product.flops)


def _largest(found: list[T], size: Callable[[T], Any]) -> list[T]:
    return sorted(found, key=size, reverse=True)
