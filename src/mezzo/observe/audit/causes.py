"""Explain why a matrix product or convolution ran in FP32 or wider.

``off``        no autocast was on around it
``switched off``  an autocast of the script is around it, and off: ``enabled=False``, or for another device
``excluded``   autocast was on when a module began, and off at the operation inside it
``list``       a rule of an op list puts it in FP32, or the operation that it is a part of: torch's attention widens 16-bit
               operands itself if no fused kernel supports them, for example with dropout on a CPU
``promotion``  it read FP32 operands: a rule takes the widest, or a value became FP32 next to FP32 values
``no rule``    autocast was on and has no rule for it: it has none for operations with an ``out`` argument
``float64``    its operands are FP64, which autocast never casts

Inside a dispatch mode autocast is always off. So the cause follows from whether it was on when the module began, and from the number of
autocast contexts around the operation: one more than around the module means the script's own ``autocast(enabled=False)``, and an equal
number means a rule. The lists of a Mezzo policy are read from the policy.

The rule is NVIDIA's (Deep Learning Performance guide, "Matrix Multiplication"): every row that a kernel loads or
stores must begin at a multiple of 16 bytes. For 16-bit operands, the innermost dimensions must therefore be multiples of 8. Since
cuBLAS 11, other sizes also run on Tensor Cores, but with narrower loads. A matrix of one row or column is read in one piece.

For convolutions, the rule applies to the channels. cuDNN pads them itself and computes on the padding. Up to 4 channels mean an
image, which no script can choose, and cuDNN has kernels for them. The kernels need the channels-last layout. If the input or the weight has
it, torch copies the other into it; if neither has it, cuDNN transposes before and after.

An FP32 product is judged as if it had 16-bit operands: the question is what lowering it would gain.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

from mezzo import oplists
from mezzo.formats import FORMATS, FP64
from mezzo.observe.audit.merged import ProductShape
from mezzo.observe.audit.operations import TracedOperation
from mezzo.observe.module_names import Names
from mezzo.observe.settings import IMAGE_CHANNELS, WIDE_FORMATS
from mezzo.observe.settings import TENSOR_CORE_MULTIPLE as MULTIPLE
from mezzo.observe.trace import TracedProduct
from mezzo.policy import Policy
from mezzo.records import Cause

_PROMOTING = ("tensordot", "bilinear", "dot", "vdot")
_FAMILY = {
    "convolution": "conv",
    "mkldnn_rnn_layer": "rnn",
    "_cudnn_rnn": "rnn",
}


@dataclass(frozen=True)
class Why:
    """The cause of a wide product, the module that it belongs to, and a sentence."""

    cause: Cause
    module: str
    reason: str


def why_wide(operation: TracedOperation, *, policy: Policy | None, lowers_elsewhere: bool, names: Names) -> Why:
    """Return the reason why the forward product ``operation`` ran in FP32 or wider.

    Args:
        operation: the product.
        policy: the policy of the run, if any.
        lowers_elsewhere: whether other products of the step ran in 16 bits.
        names: the paths of modules.
    """
    product = operation.product
    assert product is not None
    if product.format == FP64.name:
        return Why("float64", operation.module, "its operands are FP64, and FP64 is never cast")
    calls = operation.raw.entry.calls
    dtype = compute_dtype(calls[0].module) if calls else ""
    if dtype:
        promoted = bool(operation.promoted_in)
        cause, why = why_wide_in_layer(
            dtype, operation.module, operation.op, lowers_elsewhere=lowers_elsewhere, promoted=promoted
        )
        return Why(cause, operation.promoted_in if cause == "promotion" else operation.module, why)
    on = next((call for call in calls if call.autocast), None)
    if on is not None and on is calls[0] and product.nesting <= on.nesting:
        return _ruled(operation, product, policy)
    if on is not None:
        where = names.of(on.module)
        return Why("excluded", where, f"autocast is on when {where} begins and off at this operation")
    if operation.promoted_in:
        return Why("promotion", operation.promoted_in, "it reads a value that became FP32 by meeting FP32 operands")
    if lowers_elsewhere:
        return Why("off", operation.module, "autocast is off around it, and on elsewhere")
    # Checkpointing recomputes inside an autocast context of its own, on or off.
    around = 0 if operation.phase == "recompute" else calls[-1].nesting if calls else product.nesting
    if policy is None and around:
        why = "the script's autocast around it is off: enabled=False, or for another device"
        return Why("switched off", operation.module, why)
    return Why("off", operation.module, "nothing in the step lowers precision")


def _listed(policy: Policy | None, operation: TracedOperation) -> oplists.Precision | None:
    if policy is None or not policy.lowers:
        return None
    chosen = oplists.assign(policy.lower, policy.fp32, policy.widest)
    family = _FAMILY.get(operation.op) or ("attention" if "attention" in operation.op else "matmul")
    precisions: set[oplists.Precision] = {chosen[op] for op in oplists.BY_NAME[family].ops}
    return next((p for p in ("fp32", "widest") if p in precisions), "lower")


def _ruled(operation: TracedOperation, product: TracedProduct, policy: Policy | None) -> Why:
    op, module = operation.op, operation.module
    if "out" in operation.raw.func._overloadname:
        return Why("no rule", module, f"autocast has no rule for {op} that writes into given memory (out=)")
    called = next((c for c in product.callers if c in _PROMOTING), "")
    listed = _listed(policy, operation)
    if called or listed == "widest":
        return Why("promotion", module, f"{called or op} takes the widest of its operands' formats, FP32")
    if listed == "fp32":
        return Why("list", module, f"the policy lists the family of {op} in FP32")
    around = f"the operation around {op} computes in FP32"
    return Why("list", module, f"{around}: autocast's lists keep it there, or it is attention without a fused kernel")


def lowers(step: Iterable[TracedOperation]) -> bool:
    """Return whether a product of a forward or backward pass ran in 16 bits; an optimizer's own (Muon's) say nothing about autocast."""
    products = (operation for operation in step if operation.product is not None)
    return any(not is_wide(product) and product.phase != "optimizer" for product in products)


def is_wide(operation: TracedOperation) -> bool:
    """Return whether ``operation`` is a product in FP32 or wider."""
    return operation.product is not None and operation.format in WIDE_FORMATS


# A Keras layer computes in the format of its dtype policy and does its own casts; PyTorch's autocast plays no part.
_WIDE = (FORMATS["fp32"].dtype_name, FORMATS["fp64"].dtype_name)

FIXES = {
    "A101": 'run it under a policy: mezzo run --policy bf16 (or fp16), or write keras.config.set_dtype_policy("mixed_bfloat16") '
    "before the layers are created. If it is under one already, move the code into a layer",
    "A102": "move this code into a layer: layers cast their inputs and weights, code outside them casts nothing",
    "A103": 'leave out dtype="float32" of this layer, or its name in fp32_modules, if FP32 is not needed there',
    "A104": "write the operation as keras.ops.matmul or einsum on operands in the layer's compute_dtype",
    "A105": "cast the FP32 operand where the operands meet: keras.ops.cast(x, self.compute_dtype)",
    "A106": "cast its operands to the layer's compute_dtype: keras.ops.cast(x, self.compute_dtype)",
    "A203": 'leave data_format at "channels_last", Keras\' default',
    "A302": "in a layer of your own, read the weight once in call() and use that value again: every read of a variable casts it. "
    "Keras' recurrent layers cast theirs at every time step",
    "A303": "keep neighbouring layers in one format, or set one layer around several small ones to float32",
    "A304": "cast the FP32 operand to the layer's compute_dtype: keras.ops.cast(x, self.compute_dtype)",
    "A401": 'train under mixed_float16 or mixed_bfloat16, which keep variables in FP32, instead of "float16" or "bfloat16"',
    "A402": 'give the layer dtype="float32", or cast before the operation: keras.ops.cast(x, "float32")',
}
"""Fixes in Keras, by the code of a finding; rules without an entry have the same fix in every framework."""


def compute_dtype(module: Any) -> str:
    """Return the dtype that a Keras layer computes in; empty for any other module."""
    found = getattr(module, "compute_dtype", None)
    return found if isinstance(found, str) and hasattr(module, "dtype_policy") else ""


def why_wide_in_layer(dtype: str, where: str, op: str, *, lowers_elsewhere: bool, promoted: bool) -> tuple[Cause, str]:
    """Return why a product in a layer ran in FP32, and a sentence.

    Args:
        dtype: the layer's compute dtype.
        where: the layer's name.
        op: the operation.
        lowers_elsewhere: whether other products of the step ran in 16 bits.
        promoted: whether it read a value that became FP32 by meeting FP32 operands.
    """
    if dtype in _WIDE and lowers_elsewhere:
        return "excluded", f"the dtype policy of {where} computes in {dtype}"
    if dtype in _WIDE:
        return "off", "no layer of the step has a dtype policy that lowers precision"
    if promoted:
        return "promotion", "it reads a value that became FP32 by meeting FP32 operands"
    return "list", f"the layer casts to {dtype}, but its own code, or Keras' backend, passes FP32 operands to {op}"


_BYTES, _HALF = 16, 2

OperandLayout: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], int]
"""Size, strides and alignment of a tensor."""


def shape_of(operation: TracedOperation) -> ProductShape | None:
    """Return the shape of a product and its problems; None for several products at once (recurrent layers)."""
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


def _tensors(operation: TracedOperation) -> tuple[OperandLayout, OperandLayout, OperandLayout]:
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
