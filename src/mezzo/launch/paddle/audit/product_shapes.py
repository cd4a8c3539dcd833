"""The shape of a Paddle product as seen by a Tensor Core, and what prevents full-width loads.

The rules are NVIDIA's, as for PyTorch (``mezzo.observe.audit.eligibility``): innermost dimensions of 16-bit operands are multiples of 8,
and convolutions take channels last. An FP32 product is judged as if its operands had 16 bits.
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
    uneven = [f"{name} = {size}" for name, size in (("n", n), ("k", k)) if size % TENSOR_CORE_MULTIPLE]
    problems = {"dimension": f"{', '.join(uneven)}: not a multiple of {TENSOR_CORE_MULTIPLE}"} if uneven else {}
    return ProductShape(m=result.size // n // batch, n=n, k=k, batch=batch, problems=problems)


def _convolution(result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ProductShape:
    x, weight = argument(args, kwargs, 0, "x", "input"), argument(args, kwargs, 1, "filter")
    words = [word for word in (*args, *kwargs.values()) if isinstance(word, str)]
    layout = next((word for word in words if word.startswith("N")), "NCHW")
    channels = x.shape[-1] if layout in _CHANNELS_LAST else x.shape[1]
    groups, outputs = channels // weight.shape[1], weight.shape[0]
    in_group = weight.shape[1], outputs // groups
    allowed = 0 if groups > 1 else IMAGE_CHANNELS
    uneven = [
        f"{n} {what} channels"
        for n, what in zip(in_group, ("input", "output"), strict=True)
        if n % TENSOR_CORE_MULTIPLE and n > allowed
    ]
    problems = {}
    if groups > 1 and uneven:
        problems["groups"] = f"{' and '.join(uneven)} in each of {groups} groups: too few for a Tensor Core's tile"
    elif uneven:
        problems["dimension"] = f"{' and '.join(uneven)}: not a multiple of {TENSOR_CORE_MULTIPLE}, to which cuDNN pads"
    if layout not in _CHANNELS_LAST and channels > 1:
        problems["layout"] = "its input is channels-first; the kernels take channels-last"
    return ProductShape(
        m=result.size // outputs, n=in_group[1], k=math.prod(weight.shape[1:]), batch=groups, problems=problems
    )


_CHANNELS_LAST = ("NHWC", "NDHWC")
"""Names of the layouts whose channels come last."""
