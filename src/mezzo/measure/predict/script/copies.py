"""Deep copies of tensors without numbers, such as a moving average of a model's weights makes.

``Tensor.__deepcopy__`` looks up where the numbers are and copies that memory. A fake tensor has none there: torch fails for some, and
writes to memory that is not its own for others.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch import Tensor, nn
from torch._subclasses import FakeTensor


@contextmanager
def copies_without_numbers() -> Iterator[None]:
    """Let ``copy.deepcopy`` copy the shape of such tensors for the block."""
    original = Tensor.__deepcopy__

    def deepcopy(tensor: Tensor, memo: dict[int, Any]) -> Any:
        if not isinstance(tensor, FakeTensor) or not tensor.is_leaf:
            return original(tensor, memo)
        if id(tensor) not in memo:
            copy: Tensor = tensor.detach().clone()
            is_parameter = isinstance(tensor, nn.Parameter)
            needed = tensor.requires_grad
            memo[id(tensor)] = nn.Parameter(copy, needed) if is_parameter else copy.requires_grad_(needed)
        return memo[id(tensor)]

    with patch.object(Tensor, "__deepcopy__", deepcopy):
        yield
