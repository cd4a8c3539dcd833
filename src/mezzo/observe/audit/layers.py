"""Why a product in a Keras layer ran in FP32, and the fixes of findings in Keras. Imports no Keras.

A Keras layer computes in the format of its dtype policy and does its own casts; PyTorch's autocast plays no part.
"""

from __future__ import annotations

from typing import Any

from mezzo.formats import FORMATS
from mezzo.records import Cause

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
