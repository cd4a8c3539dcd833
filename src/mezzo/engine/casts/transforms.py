"""Tensors inside the transforms of ``torch.func``."""

from __future__ import annotations

from torch import Tensor
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor


def unwrapped(tensor: Tensor) -> Tensor:
    """Return the tensor that owns the memory: each transform, such as ``grad`` or ``vmap``, wraps it once."""
    while is_functorch_wrapped_tensor(tensor):
        tensor = get_unwrapped(tensor)
    return tensor
