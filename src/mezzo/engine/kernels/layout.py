"""Memory layout of tensors: compiled kernels walk through addresses, not indices."""

from __future__ import annotations

import torch
from torch import Tensor

from mezzo.errors import SessionError
from mezzo.formats import BF16, FP32


def has_gaps(tensor: Tensor) -> bool:
    """Return whether a tensor's elements do not fill one contiguous stretch of memory without overlap."""
    return not (tensor.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(tensor))


def dense(gradient: Tensor) -> Tensor:
    """Return a gradient that fills one stretch of memory: itself if it does.

    Raises:
        SessionError: the gradient is sparse.
    """
    if gradient.layout is not torch.strided:
        raise SessionError(
            f"a gradient of shape {tuple(gradient.shape)} is {gradient.layout}; allowed: dense gradients",
            hint="build the embedding with sparse=False, or use torch.optim.SparseAdam for it",
        )
    if gradient.is_contiguous():  # called for every gradient of every update
        return gradient
    return gradient.contiguous() if has_gaps(gradient) else gradient


def laid_out_as(parameter: Tensor, tensor: Tensor) -> Tensor:
    """Return ``tensor`` with the strides of ``parameter``, which has no gaps: itself if it has them."""
    if tensor.stride() == parameter.stride():
        return tensor
    return torch.empty_like(parameter, dtype=tensor.dtype).copy_(tensor)


def gradient_as(parameter: Tensor, gradient: Tensor) -> Tensor:
    """Return a gradient with the strides of ``parameter``, which has no gaps: itself if it has them.

    Raises:
        SessionError: the gradient is sparse.
    """
    if gradient.layout is torch.strided and gradient.stride() == parameter.stride():
        return gradient
    return laid_out_as(parameter, dense(gradient))


def refuse_gaps(parameter: Tensor) -> None:
    """Refuse a weight whose elements do not fill one stretch of memory."""
    if has_gaps(parameter):
        raise SessionError(
            f"a parameter of shape {tuple(parameter.shape)} has strides {parameter.stride()}; "
            "allowed: weights that fill one stretch of memory",
            hint="give it memory of its own: parameter.data = parameter.data.contiguous()",
        )


# --- FP32 masters as a BF16 weight and its 16 low bits: bit-exact, and 2 bytes per parameter less -------------------------------

# The BF16 weight is the FP32 master rounded to nearest, ties away from zero: its bits are the master's upper 16, plus
# one if the top low bit is set. So the low bits show whether to subtract it again. Only ties differ from
# torch's rounding (to even): about 6 in a million values. The idea is Split-SGD's (Intel Extension for PyTorch);
# TransformerEngine calls the low bits "param remainders".


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """Return an FP32 tensor as its BF16 weight and int16 low bits."""
    bits = master.view(torch.int32)
    low = bits.to(torch.int16)  # keeps the low 16 bits
    high = (bits >> 16) + (low < 0).int()
    return high.to(torch.int16).view(BF16.dtype), low


def join(weight: Tensor, low: Tensor) -> Tensor:
    """Return the FP32 tensor from which ``split`` made these."""
    high = weight.view(torch.int16).to(torch.int32) - (low < 0).int()
    return ((high << 16) | (low.to(torch.int32) & 0xFFFF)).view(FP32.dtype)
