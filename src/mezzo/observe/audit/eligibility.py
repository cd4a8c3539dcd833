"""Decide whether Tensor Cores can run a matrix product or convolution with full-width loads, and if not, why.

The rule is NVIDIA's (Deep Learning Performance guide, "Matrix Multiplication"): every row that a kernel loads or
stores begins at a multiple of 16 bytes. For 16-bit operands, the innermost dimensions must therefore be multiples of 8. Since
cuBLAS 11, other sizes run on Tensor Cores too, with narrower loads. For convolutions, the rule applies to the channels, and the
kernels need the channels-last layout: any other costs a transposition before and after.

An FP32 product is judged as if it had 16-bit operands: the question is what lowering it would give.
"""

from __future__ import annotations

import math

from mezzo.observe.audit.merged import Shape
from mezzo.observe.audit.operations import TracedOperation

_BYTES = 16
_HALF = 2
MULTIPLE = _BYTES // _HALF


def shape_of(seen: TracedOperation) -> Shape | None:
    """Return the shape of a product and its problems; None for one that is more than one product (recurrent layers)."""
    if seen.op in ("mm", "bmm", "addmm", "baddbmm"):
        return _matmul(seen)
    if seen.op in ("convolution", "convolution_backward"):
        return _convolution(seen)
    if "attention" in seen.op:
        return _attention(seen)
    return None


def _matmul(seen: TracedOperation) -> Shape:
    assert seen.product is not None
    skip = 1 if seen.op in ("addmm", "baddbmm") and len(seen.product.operands) == 4 else 0
    a, b, result = seen.product.operands[skip : skip + 2] + seen.product.operands[-1:]
    shape = Shape(result[0][-2], result[0][-1], a[0][-1], math.prod(result[0][:-2]))
    rows = {row for operand in (a, b, result) if (row := _row(operand[0], operand[1])) is not None}
    names = {"n": shape.n, "k": shape.k, "m": shape.m}
    odd = [f"{name} = {size}" for name, size in names.items() if size % MULTIPLE and size in rows]
    if odd:
        shape.problems["dimension"] = f"{', '.join(odd)}: not a multiple of {MULTIPLE}"
    elif any(row % MULTIPLE for row in rows):
        shape.problems["alignment"] = (
            f"rows lie {', '.join(str(r) for r in sorted(rows) if r % MULTIPLE)} elements apart"
        )
    _check_addresses(shape, seen)
    return shape


def _row(size: tuple[int, ...], strides: tuple[int, ...]) -> int | None:
    """Return the distance in elements between rows (or columns, if transposed) of a matrix; None if it is read in one piece."""
    if len(size) < 2 or 1 in size[-2:]:
        return max(size[-2:]) if len(size) >= 2 else None
    return max(strides[-2:])


def _check_addresses(shape: Shape, seen: TracedOperation) -> None:
    assert seen.product is not None
    addresses = [operand[2] for operand in seen.product.operands]
    if min(addresses, default=_BYTES) < _BYTES and "dimension" not in shape.problems:
        shape.problems["alignment"] = f"an operand begins at a multiple of {min(addresses)} bytes, not of {_BYTES}"


def _convolution(seen: TracedOperation) -> Shape:
    product = seen.product
    assert product is not None
    backward = seen.op == "convolution_backward"
    x, weight = product.operands[1:3] if backward else product.operands[:2]
    y = product.operands[0] if backward else product.operands[-1]
    transposed, groups = (product.arguments[4], product.arguments[6]) if backward else _settings(product.arguments)
    ins, outs = x[0][1] // groups, y[0][1] // groups
    positions = y[0][0] * math.prod((x if transposed else y)[0][2:])
    shape = Shape(positions, outs, ins * math.prod(weight[0][2:]), groups)
    odd = [f"{n} {what} channels" for n, what in ((ins, "input"), (outs, "output")) if n % MULTIPLE]
    if groups > 1 and odd:
        shape.problems["groups"] = f"{' and '.join(odd)} in each of {groups} groups: too few for a Tensor Core's tile"
    elif odd:
        shape.problems["dimension"] = f"{' and '.join(odd)}: not a multiple of {MULTIPLE}"
    if len(x[0]) >= 4 and x[0][1] > 1 and x[1][1] != 1:
        shape.problems["layout"] = "its input is channels-first; the kernels take channels-last"
    return shape


def _settings(arguments: tuple[object, ...]) -> tuple[bool, int]:
    # The arguments that are not tensors, in order: (bias,) stride, padding, dilation, transposed, output_padding, groups.
    transposed, _, groups = arguments[-3:]
    assert isinstance(groups, int)
    return bool(transposed), groups


def _attention(seen: TracedOperation) -> Shape:
    assert seen.product is not None
    skip = 1 if "backward" in seen.op else 0
    q, k = seen.product.operands[skip : skip + 2]
    shape = Shape(q[0][-2], k[0][-2], q[0][-1], math.prod(q[0][:-2]))
    if shape.k % MULTIPLE:
        shape.problems["dimension"] = f"heads are {shape.k} wide: not a multiple of {MULTIPLE}"
    return shape
