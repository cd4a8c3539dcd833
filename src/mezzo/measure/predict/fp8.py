"""Linear layers in FP8: which products of a 16-bit tape run in 8 bits, and the cost of the casts around them.

Layers are chosen as Mezzo's FP8 policy chooses them (``engine.matrix_units.fp8_torchao``): sizes in multiples of 16, large
enough, not the last. Weights, gradients and saved activations stay in 16 bits, so memory is that of BF16. For each of a layer's
three products::

    product = as in ``time``, at the FP8 peak, with operands of one byte
    casts   = (rows x depth + depth x columns) x (2 + 2 + 1) bytes / bandwidth + 4 launches

Each operand is read for its largest magnitude, read again for rounding, and written in 8 bits: two fused kernels an operand, as
torch.compile makes them. FP8 loses where a product has few rows and columns for the size of its operands: the casts then cost more
than the faster units gain.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from mezzo.engine.matrix_units.fp8_torchao import SizeFault, fault_of_sizes
from mezzo.gpus import Gpu
from mezzo.measure.predict.constants import Constants
from mezzo.measure.predict.tape import CostedOperation
from mezzo.measure.predict.time import HALF_FORMATS, Bounds, Card, Columns, operation_bounds

CASTS = 4
"""Kernels that prepare one product: two for each operand."""
_CAST_BYTES = 2 + 2 + 1
_LINEAR = ("addmm", "mm")
_LAST = "the last layer"
_FAULTS: dict[SizeFault, str] = {
    "not multiples": "a size is not a multiple of 16",
    "too small": "too small to gain",
}


@dataclass(frozen=True, kw_only=True)
class Fp8Layers:
    """Which operations of a tape run in FP8, and which linear layers do not."""

    chosen: NDArray[np.bool_]
    """By operation."""
    num_layers: int
    num_chosen: int
    others: Counter[str]
    """Reason: how many layers stay in 16 bits for it."""

    @property
    def sentence(self) -> str:
        """How many layers run in FP8 and why the others do not, in a sentence."""
        if not self.num_layers:
            return "It has no linear layers, so FP8 is BF16"
        why = "; ".join(f"{count}: {reason}" for reason, count in self.others.most_common())
        verb = "runs" if self.num_chosen == 1 else "run"
        head = f"{self.num_chosen} of {self.num_layers} linear layers {verb} in FP8"
        return head + (f", the others in BF16 ({why})" if why else "")


def fp8_layers(operations: Sequence[CostedOperation]) -> Fp8Layers:
    """Return which products of ``operations``, those of a 16-bit step, run in FP8."""
    layers: dict[str, tuple[int, int]] = {}
    for op in operations:
        if op.phase == "forward" and _is_linear(op):
            layers[op.module] = op.shape.columns, op.shape.depth
    faults = {name: fault_of_sizes(*sizes, "tensorwise") for name, sizes in layers.items()}
    reasons = {name: None if fault is None else _FAULTS[fault] for name, fault in faults.items()}
    if layers:
        reasons[next(reversed(layers))] = _LAST
    chosen = {name for name, reason in reasons.items() if reason is None}
    return Fp8Layers(
        chosen=np.array([_is_linear(op) and op.module in chosen for op in operations], dtype=bool),
        num_layers=len(layers),
        num_chosen=len(chosen),
        others=Counter(reason for reason in reasons.values() if reason),
    )


def _is_linear(op: CostedOperation) -> bool:
    return op.name in _LINEAR and op.format in HALF_FORMATS and op.phase in ("forward", "backward")


def fp8_bounds(operations: Sequence[CostedOperation], gpu: Gpu, constants: Constants, *, channels_last: bool) -> Bounds:
    """Return the seconds of ``operations``, linear products of 16-bit operands, in FP8 with the casts of their operands."""
    c = replace(constants, feed_bytes=2 * constants.feed_bytes)  # an element has half as many bytes
    card = Card.of(replace(gpu, fp16_flops_per_s=gpu.fp8_flops_per_s), tf32=True, channels_last=channels_last)
    small = [replace(op, read_bytes=op.read_bytes // 2) for op in operations]
    found = operation_bounds(Columns.of(small), card, c)
    shapes = [op.shape for op in operations]
    elements = np.array([s.products * s.depth * (s.rows + s.columns) for s in shapes], dtype=np.float64)
    casts = elements * _CAST_BYTES / (gpu.bandwidth_bytes_per_s * c.bandwidth)
    return Bounds(found.arithmetic, found.traffic + casts, found.total + casts + CASTS * c.latency_s)
