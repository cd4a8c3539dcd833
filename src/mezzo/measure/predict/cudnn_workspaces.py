"""Memory that cuDNN takes beside a convolution's operands when it may try its algorithms (``torch.backends.cudnn.benchmark``).

The largest buffer among the usual algorithms is that of Winograd's, kept apart from its products (NVIDIA's documentation calls it
WINOGRAD_NONFUSED: "a significant workspace may be needed"). It holds the input, the weight and the result transformed. By Lavin and
Gray, "Fast Algorithms for Convolutional Neural Networks" (2016), F(4x4, 3x3), a tile of 4x4 results needs 6x6 transformed values of each
channel in and out, and each pair of channels 6x6 transformed weights; the two gradients need as many.
"""

from __future__ import annotations

import math
from typing import Any

import torch

aten: Any = torch.ops.aten
_TILE, _TRANSFORMED, _WINDOW = 4, 6 * 6, (3, 3)


def trial_bytes(func: Any, args: Any) -> int:
    """Return the bytes of Winograd's buffers for a convolution, or for a gradient of one; 0 where it does not apply."""
    at = {aten.convolution: 0, aten.convolution_backward: 1}.get(func.overloadpacket)
    if at is None:
        return 0
    # a gradient's arguments begin with the gradient of the result, and have the sizes of the bias before the stride
    x, weight = args[at : at + 2]
    stride, padding, dilation, transposed, _, groups = args[at + 3 : at + 9]
    plain = set(stride) == {1} and set(dilation) == {1} and groups == 1 and not transposed
    if not plain or tuple(weight.shape[2:]) != _WINDOW:
        return 0
    sides = [size + 2 * pad - 2 for size, pad in zip(x.shape[2:], padding, strict=True)]
    tiles = x.shape[0] * math.prod(-(-side // _TILE) for side in sides)
    out, within = weight.shape[:2]
    return int(_TRANSFORMED * (tiles * (within + out) + within * out) * x.element_size())
