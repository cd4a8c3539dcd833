"""The shape of a Paddle product as a Tensor Core sees it, and what keeps it off full-width loads.

The rule is NVIDIA's, as for PyTorch (``mezzo.observe.audit.eligibility``): innermost dimensions of 16-bit operands are multiples of 8, and
convolutions take channels last. An FP32 product is judged as if its operands had 16 bits.
"""

from __future__ import annotations

import math
from typing import Any

from mezzo.launch.paddle.operations import argument
from mezzo.observe.audit.merged import ProductShape
from mezzo.observe.limits import IMAGE_CHANNELS, TENSOR_CORE_MULTIPLE

_CONVOLUTIONS = ("conv2d", "depthwise_conv2d", "conv3d")


def shape_of(op: str, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ProductShape | None:
    """Return the shape of a product; None for an operation of several products, such as a recurrent layer."""
    if op in _CONVOLUTIONS:
        return _convolution(result, args, kwargs)
    if op in ("matmul", "linear", "linear_v2", "bmm"):
        return _matmul(op, result, args, kwargs)
    return None


def _matmul(op: str, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ProductShape | None:
    x, y = argument(args, kwargs, 0, "x"), argument(args, kwargs, 1, "y", "weight")
    if x is None or y is None or len(x.shape) < 2 or len(y.shape) < 2:
        return None
    transposed = op == "matmul" and argument(args, kwargs, 2, "transpose_x")
    k, n = x.shape[-2 if transposed else -1], result.shape[-1]
    batch = math.prod(result.shape[:-2]) if len(y.shape) > 2 else 1
    odd = [f"{name} = {size}" for name, size in (("n", n), ("k", k)) if size % TENSOR_CORE_MULTIPLE]
    problems = {"dimension": f"{', '.join(odd)}: not a multiple of {TENSOR_CORE_MULTIPLE}"} if odd else {}
    return ProductShape(m=result.size // n // batch, n=n, k=k, batch=batch, problems=problems)


def _convolution(result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ProductShape:
    x, weight = argument(args, kwargs, 0, "x", "input"), argument(args, kwargs, 1, "filter")
    words = [word for word in (*args, *kwargs.values()) if isinstance(word, str)]
    layout = next((word for word in words if word.startswith("N")), "NCHW")
    channels = x.shape[-1] if layout in _LAST else x.shape[1]
    groups, outs = channels // weight.shape[1], weight.shape[0]
    each = weight.shape[1], outs // groups
    least = 0 if groups > 1 else IMAGE_CHANNELS
    odd = [
        f"{n} {what} channels"
        for n, what in zip(each, ("input", "output"), strict=True)
        if n % TENSOR_CORE_MULTIPLE and n > least
    ]
    problems = {}
    if groups > 1 and odd:
        problems["groups"] = f"{' and '.join(odd)} in each of {groups} groups: too few for a Tensor Core's tile"
    elif odd:
        problems["dimension"] = f"{' and '.join(odd)}: not a multiple of {TENSOR_CORE_MULTIPLE}, to which cuDNN pads"
    if layout not in _LAST and channels > 1:
        problems["layout"] = "its input is channels-first; the kernels take channels-last"
    return ProductShape(
        m=result.size // outs, n=each[1], k=math.prod(weight.shape[1:]), batch=groups, problems=problems
    )


_LAST = ("NHWC", "NDHWC")
"""Names of the layouts whose channels come last."""
