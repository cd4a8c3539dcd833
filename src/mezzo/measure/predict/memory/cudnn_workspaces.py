"""Memory that cuDNN takes besides a convolution's operands, for as long as the convolution runs.

Matrix units work channels-last. For channels-first operands cuDNN makes "NCHW-to-NHWC transformations to call the Tensor Core
operations" (its documentation of formats), so the workspace contains input, weight and result a second time. A window of one point
needs none: such a convolution is a product of the weight with each image as it is stored. Nor do groups, which matrix units do not compute.

When it may try its algorithms (``torch.backends.cudnn.benchmark``), the largest buffer among the usual ones is that of Winograd's,
kept apart from its products (NVIDIA's documentation calls it WINOGRAD_NONFUSED: "a significant workspace may be needed"). It contains
the transformed input, weight and result. By Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks" (2016),
F(4x4, 3x3), a tile of 4x4 results needs 6x6 transformed values of each channel in and out, and each pair of channels 6x6 transformed
weights; the two gradients need as many.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

aten: Any = torch.ops.aten
_LAYOUTS = {4: torch.channels_last, 5: torch.channels_last_3d}
_TILE, _TRANSFORMED, _WINDOW = 4, 6 * 6, (3, 3)


def copied_bytes(func: Any, args: Any, result: Any) -> int:
    """Return the bytes of a channels-first convolution's operands in the other layout, or of a gradient's; 0 where none is copied."""
    if func.overloadpacket is aten.convolution:
        operands, groups = (*args[:2], result), args[8]
    elif func.overloadpacket is aten.convolution_backward:
        operands, groups = (args[1], args[2], args[0]), args[9]  # both gradients have the same three sizes
    else:
        return 0
    x, weight, _ = operands
    if groups != 1 or math.prod(weight.shape[2:]) == 1 or _is_channels_last(x):
        return 0
    return sum(t.numel() * t.element_size() for t in operands)


def _is_channels_last(x: Tensor) -> bool:
    layout = _LAYOUTS.get(x.dim())
    return layout is not None and not x.is_contiguous() and x.is_contiguous(memory_format=layout)


def trial_bytes(func: Any, args: Any) -> int:
    """Return the bytes of Winograd's buffers for a convolution, or for a gradient of one; 0 where it does not apply."""
    input_at = {aten.convolution: 0, aten.convolution_backward: 1}.get(func.overloadpacket)
    if input_at is None:
        return 0
    # a gradient's arguments begin with the gradient of the result, and have the sizes of the bias before the stride
    x, weight = args[input_at : input_at + 2]
    stride, padding, dilation, transposed, _, groups = args[input_at + 3 : input_at + 9]
    plain = set(stride) == {1} and set(dilation) == {1} and groups == 1 and not transposed
    if not plain or tuple(weight.shape[2:]) != _WINDOW:
        return 0
    sides = [size + 2 * pad - 2 for size, pad in zip(x.shape[2:], padding, strict=True)]
    tiles = x.shape[0] * math.prod(-(-side // _TILE) for side in sides)
    out_channels, in_channels = weight.shape[:2]
    return int(_TRANSFORMED * (tiles * (in_channels + out_channels) + in_channels * out_channels) * x.element_size())
