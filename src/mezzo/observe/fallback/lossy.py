"""Find the first matrix product of a step that loses its digits in lower precision: rounding changes how its rows differ.

An error relative to the values themselves does not show it: positions of 65536, 65537, 65538 are all 65536 in BF16, off by less than a
hundred-thousandth, and equal. So the error is compared with the differences along each dimension.

Limits: products in FP32, in the first forward pass and in the thread that starts the script. Other operations follow the format of
their operands.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map_only

from mezzo.formats import FP32
from mezzo.observe.fallback.evidence import LossyProduct
from mezzo.observe.source_lines import running_line

_PRODUCTS = frozenset(("mm", "bmm", "addmm", "baddbmm", "mv", "addmv", "dot", "convolution"))
_LOST = 0.5
"""A product is reported if rounding changes its differences by at least this share of them."""
_LEAST = 64 * FP32.eps
"""Differences below this share of the values are rounding errors of FP32 itself."""


class LossyProducts(TorchDispatchMode):
    """A mode that computes each product of a forward pass again, with operands and result rounded, until one loses its digits."""

    def __init__(self, low: torch.dtype) -> None:
        super().__init__()
        self.first: LossyProduct | None = None
        self._low, self._over = low, False
        self._thread = threading.get_ident()

    def end(self) -> None:
        """Leave the mode; one that was entered in another thread only passes operations on from now on."""
        self._over = True
        if self._thread == threading.get_ident():
            self.__exit__(None, None, None)

    def pause(self) -> None:
        """Stop inspecting: the forward pass is over."""
        self._over = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Run one operation and inspect it."""
        result = func(*args, **(kwargs or {}))
        wanted = not self._over and self.first is None and func.overloadpacket.__name__ in _PRODUCTS
        if wanted and torch._C._current_autograd_node() is None and result.dtype is FP32.dtype:
            with torch.no_grad(), _disable_current_modes():
                share = lost(result, self._rounded(func, args, kwargs or {}))
            if share >= _LOST:
                self.first = LossyProduct(line=running_line(), lost=share)
        return result

    def _rounded(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
        def low(tensor: Tensor) -> Tensor:
            return tensor.to(self._low).float() if tensor.dtype is FP32.dtype else tensor

        rounded: Tensor = func(*tree_map_only(Tensor, low, args), **tree_map_only(Tensor, low, kwargs))
        return low(rounded)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Allow torch.compile under this mode."""
        return True


def lost(exact: Tensor, found: Tensor) -> float:
    """Return the largest share of the differences along a dimension that is wrong; 0 where they are rounding errors of FP32."""
    error, whole = found - exact, float(exact.norm())
    if not exact.isfinite().all() or not error.isfinite().all():  # range, not digits
        return 0.0
    shares = [0.0]
    for dim in (d for d in range(exact.dim()) if exact.shape[d] > 1):
        differences = float((exact - exact.mean(dim, keepdim=True)).norm())
        if differences > _LEAST * whole:
            shares.append(float((error - error.mean(dim, keepdim=True)).norm()) / differences)
    return max(shares)
