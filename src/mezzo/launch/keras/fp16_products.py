"""Let observers record Keras' FP16 products on PyTorch on a CPU as products in FP16.

There Keras casts FP16 operands to FP32, multiplies, and casts back; the result is that of a 16-bit unit.
``mezzo.engine.matrix_units.emulation`` computes the same numbers, forward and backward, and names the format and the operation
that it emulates.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

from torch import Tensor

from mezzo.engine.matrix_units.emulation import Emulation
from mezzo.engine.matrix_units.emulation_nodes import matmul as emulated_matmul
from mezzo.formats import FP16
from mezzo.launch.patches import Patches


def emulate_products(patches: Patches, *, on_use: Callable[[], None]) -> None:
    """Replace Keras' product of FP16 matrices on a CPU by the emulation, until ``patches`` are undone.

    Args:
        patches: restores Keras' own product.
        on_use: called whenever a product is emulated.
    """
    numpy = importlib.import_module("keras.src.backend.torch.numpy")
    product = Emulation(name="matmul", format=FP16.name, run=emulated_matmul)

    def emulated(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def matmul(x1: Any, x2: Any) -> Any:
            if not (_is_emulated(x1) or _is_emulated(x2)):
                return original(x1, x2)
            a, b = (x if isinstance(x, Tensor) else getattr(x, "value", x) for x in (x1, x2))  # of Keras' variables
            if not (_is_emulated(a) and _is_emulated(b)):
                return original(a, b)
            on_use()
            return product(a, b)

        return matmul

    for name in ("matmul", "dot"):
        patches.wrap(numpy, name, emulated)


def _is_emulated(value: Any) -> bool:
    """Return whether a value is a matrix, or a batch of them, in FP16 on a CPU."""
    if not isinstance(value, Tensor):
        return False
    return value.dtype is FP16.dtype and value.device.type == "cpu" and value.dim() > 1
