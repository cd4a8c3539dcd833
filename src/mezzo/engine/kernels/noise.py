"""Random bits for stochastic rounding, from a hash of position and update instead of a generator.

A value between two numbers of a format is rounded up with a probability equal to its position between them: nothing is lost on
average, whereas rounding to nearest loses every change below half a step each time (Gupta et al., arXiv:1502.02551). The bits of
element ``i`` of parameter ``number`` at update ``step``::

    h = mix(i + mix(mix(step) + number * 0x9E3779B9))     32 bits; mix is Wellons' "lowbias32"
    weight:         h        & 0xFFFF
    first moment:   h >> 16
    second moment:  (h * 0x9E3779B1 mod 2**32) >> 16

So the kernels of every device round alike regardless of their threads, a resumed run continues bit for bit, replicas in
several processes agree without communication, and torch's generators are not used.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mezzo.formats import BF16

GOLDEN, SECOND = 0x9E3779B9, 0x9E3779B1
_LOW32 = 0xFFFFFFFF


def mix(x: Tensor) -> Tensor:
    """Return the hash of 32-bit numbers, in int64 tensors."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _LOW32
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _LOW32
    return x ^ (x >> 16)


def streams(count: int, number: int, step: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return 16 random bits for each of ``count`` elements: for the weight, its first moment and its second.

    Args:
        count: number of elements of the parameter, in the order of its memory.
        number: the parameter's number in its optimizer.
        step: the number of the update: FP32, no dimensions.
    """
    seed = mix((mix(step.long()) + number * GOLDEN) & _LOW32)
    h = mix((torch.arange(count, device=step.device) + seed) & _LOW32)
    return h & 0xFFFF, h >> 16, ((h * SECOND) & _LOW32) >> 16


def round_to_bf16(values: Tensor, noise: Tensor) -> Tensor:
    """Round FP32 values stochastically to BF16; non-finite values stay as they are."""
    bits = values.view(torch.int32) + noise.int()
    # The noise carries into the upper half as often as the lower half is large.
    rounded = (bits >> 16).to(torch.int16).view(BF16.dtype)
    return torch.where(values.isfinite(), rounded, values.to(BF16.dtype))
