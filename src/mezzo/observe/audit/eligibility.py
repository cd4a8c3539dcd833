"""Decide whether Tensor Cores can run a matrix product or convolution with full-width loads, and if not, why.

The rule is NVIDIA's (Deep Learning Performance guide, "Matrix Multiplication"): every row that a kernel loads or
stores must begin at a multiple of 16 bytes. For 16-bit operands, the innermost dimensions must therefore be multiples of 8. Since
cuBLAS 11, other sizes also run on Tensor Cores, but with narrower loads. A matrix of one row or column is read in one piece.

For convolutions, the rule applies to the channels. cuDNN pads them itself and computes on the padding. Up to 4 channels are those of an
image, which no script can choose, and cuDNN has kernels for them. The kernels need the channels-last layout. If the input or the weight has
it, torch copies the other into it; if neither has it, cuDNN transposes before and after.

An FP32 product is judged as if it had 16-bit operands: the question is what lowering it would gain.
"""

from __future__ import annotations

import math
from typing import TypeAlias

from mezzo.observe.audit.causes import is_wide
from mezzo.observe.audit.merged import ProductShape
from mezzo.observe.audit.operations import TracedOperation
from mezzo.observe.limits import IMAGE_CHANNELS
from mezzo.observe.limits import TENSOR_CORE_MULTIPLE as MULTIPLE

_BYTES, _HALF = 16, 2

Operand: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], int]
"""Size, strides and alignment of a tensor."""


def shape_of(operation: TracedOperation) -> ProductShape | None:
    """Return the shape of a product and its problems; None for one that is more than one product (recurrent layers)."""
    if operation.op in ("mm", "bmm", "addmm", "baddbmm"):
        return _matmul(operation)
    if operation.op in ("convolution", "convolution_backward"):
        return _convolution(operation)
    if "attention" in operation.op:
        return _attention(operation)
    return None


def _matmul(operation: TracedOperation) -> ProductShape:
    assert operation.product is not None
    skip = 1 if operation.op in ("addmm", "baddbmm") and len(operation.product.operands) == 4 else 0
    a, b, result = operation.product.operands[skip : skip + 2] + operation.product.operands[-1:]
    shape = ProductShape(result[0][-2], result[0][-1], a[0][-1], math.prod(result[0][:-2]))
    rows = {row for operand in (a, b, result) if (row := _row(operand[0], operand[1])) is not None}
    names = {"n": shape.n, "k": shape.k, "m": shape.m}
    odd = [f"{name} = {size}" for name, size in names.items() if size % MULTIPLE and size in rows]
    if odd:
        shape.problems["dimension"] = f"{', '.join(odd)}: not a multiple of {MULTIPLE}"
    elif any(row % MULTIPLE for row in rows):
        shape.problems["alignment"] = (
            f"rows lie {', '.join(str(r) for r in sorted(rows) if r % MULTIPLE)} elements apart"
        )
    addresses = [operand[2] for operand in operation.product.operands]
    if min(addresses, default=_BYTES) < _BYTES and not odd:
        shape.problems["alignment"] = f"an operand begins at a multiple of {min(addresses)} bytes, not of {_BYTES}"
    return shape


def _row(size: tuple[int, ...], strides: tuple[int, ...]) -> int | None:
    """Return the distance in elements between rows (or columns, if transposed) of a matrix; None if it is read in one piece."""
    return None if len(size) < 2 or 1 in size[-2:] else max(strides[-2:])


def _convolution(operation: TracedOperation) -> ProductShape:
    product = operation.product
    assert product is not None
    x, weight, y = _tensors(operation)
    # The arguments end with: transposed, output_padding, groups; in a backward pass, output_mask follows.
    transposed, _, groups = (
        product.arguments[-4:-1] if operation.op == "convolution_backward" else product.arguments[-3:]
    )
    ins, outs = x[0][1] // groups, y[0][1] // groups
    positions = y[0][0] * math.prod((x if transposed else y)[0][2:])
    shape = ProductShape(positions, outs, ins * math.prod(weight[0][2:]), groups)
    least = 0 if groups > 1 else IMAGE_CHANNELS
    odd = [f"{n} {what} channels" for n, what in ((ins, "input"), (outs, "output")) if n % MULTIPLE and n > least]
    if groups > 1 and odd:
        shape.problems["groups"] = f"{' and '.join(odd)} in each of {groups} groups: too few for a Tensor Core's tile"
    elif odd:
        shape.problems["dimension"] = f"{' and '.join(odd)}: not a multiple of {MULTIPLE}, to which cuDNN pads"
    if copied_bytes(operation):
        shape.problems["copy"] = "its input is channels-first and its weight channels-last: torch copies the input"
    elif _layouts_differ(x[0]) and not (is_channels_last(*x[:2]) or is_channels_last(*weight[:2])):
        shape.problems["layout"] = "its input is channels-first; the kernels take channels-last"
    return shape


def _tensors(operation: TracedOperation) -> tuple[Operand, Operand, Operand]:
    """Return the input, the weight and the result of a convolution; of a backward pass, the result's gradient."""
    assert operation.product is not None
    operands = operation.product.operands
    if operation.op == "convolution_backward":
        return operands[1], operands[2], operands[0]
    return operands[0], operands[1], operands[-1]


def copied_bytes(operation: TracedOperation) -> int:
    """Return the bytes that torch moves to copy a 16-bit convolution's input into its weight's layout; 0 if the layouts agree."""
    if operation.op not in ("convolution", "convolution_backward") or operation.phase == "dgrad" or is_wide(operation):
        return 0  # the gradient of the input is computed without the input
    x, weight, _ = _tensors(operation)
    if not _layouts_differ(x[0]) or is_channels_last(*x[:2]) or not is_channels_last(*weight[:2]):
        return 0
    return 2 * _HALF * math.prod(x[0])  # read and written


def _layouts_differ(size: tuple[int, ...]) -> bool:
    """Return whether the two layouts of a convolution's input differ: with one channel they do not."""
    return len(size) >= 4 and size[1] > 1


def is_channels_last(size: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Return whether torch takes a tensor for channels-last: strides that fit both layouts count as channels-first."""
    if len(size) < 4 or not all(size) or strides[1] == 0:
        return False
    least = 0
    for dimension in (1, *range(len(size) - 1, 1, -1), 0):
        if strides[dimension] < least or (dimension == 0 and least == strides[1]):
            return False
        least = strides[dimension] * size[dimension]
    return True


def _attention(operation: TracedOperation) -> ProductShape:
    assert operation.product is not None
    skip = 1 if "backward" in operation.op else 0
    q, k = operation.product.operands[skip : skip + 2]
    shape = ProductShape(q[0][-2], k[0][-2], q[0][-1], math.prod(q[0][:-2]))
    if shape.k % MULTIPLE:
        shape.problems["dimension"] = f"heads are {shape.k} wide: not a multiple of {MULTIPLE}"
    return shape
