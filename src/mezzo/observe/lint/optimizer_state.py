"""Check the state of optimizers once, after their first update: second moments and ``eps`` in 16 bits.

Only formats and the numbers of the parameter groups are read.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor
from torch.optim import Optimizer

from mezzo.engine.casts.half import HALF
from mezzo.formats import FP16, Format, format_of
from mezzo.observe.lint.misuse_log import MisuseLog

_MOMENTS = (
    *(("exp_avg_sq", "betas"), ("v", "betas"), ("square_avg", "alpha"), ("square_avg", "rho")),
    *(("exp_inf", "betas"), ("sum", "lr_decay")),
)
"""The second moments of Adam's family, also written by hand, RMSprop, Adadelta, Adamax and Adagrad: their name in the state, and a name in
the group, which is their decay's except for Adagrad's sum."""


class _Moments(NamedTuple):
    """The second moments of a group of parameters that are kept in one 16-bit format."""

    parameters: list[Tensor]
    key: str
    decay: float
    """1 for a sum."""
    format: Format
    group: dict[str, Any]


class OptimizerStates:
    """The states of all optimizers."""

    def __init__(self, log: MisuseLog) -> None:
        self._log = log
        self._inspected: WeakSet[Optimizer] = WeakSet()

    def inspect(self, optimizer: Optimizer) -> None:
        """Inspect an optimizer after its first update."""
        if optimizer in self._inspected or not optimizer.state:
            return
        self._inspected.add(optimizer)
        name = type(optimizer).__name__
        for found in _moments(optimizer):
            lost = _lost(found)
            if lost:
                with_decay = f" with a decay of {found.decay:g}" if found.decay < 1 else ""
                detail = f"{name} keeps second moments in {found.format.name.upper()};{with_decay} {lost}"
                self._log.add("A622", detail, parameters=found.parameters)
            eps = found.group.get("eps")
            # A fused kernel computes in FP32.
            if isinstance(eps, float) and eps and not found.group.get("fused") and _vanishes(eps, found.format):
                detail = f"the eps of {name}, {eps:g}, is added to {found.format.name.upper()} values, and rounds to 0 in that format"
                self._log.add("A620", detail, parameters=found.parameters)


def _moments(optimizer: Optimizer) -> Iterator[_Moments]:
    for group in optimizer.param_groups:
        for key, field in _MOMENTS:
            decay = group.get(field)
            decay = decay[1] if isinstance(decay, (list, tuple)) and len(decay) > 1 else decay
            decay = 1.0 if key == "sum" and decay is not None else decay
            if not isinstance(decay, float):
                continue
            moments = ((p, optimizer.state.get(p, {}).get(key)) for p in group["params"])
            narrow = [(p, m) for p, m in moments if isinstance(m, Tensor) and m.dtype in HALF]
            for dtype in dict.fromkeys(m.dtype for _, m in narrow):
                form = format_of(dtype)
                assert form is not None
                yield _Moments([p for p, m in narrow if m.dtype == dtype], key, decay, form, group)


def _lost(moments: _Moments) -> str:
    """Return what a second moment loses in its format; empty for nothing that is certain."""
    share = 1 - moments.decay
    if moments.key == "sum":
        return f"once a sum is {round(4 / moments.format.eps)} times as large as a square, adding that changes nothing"
    if share < moments.format.eps / 4:  # half a unit in the last place of the numbers just below a power of two
        return "they never fall: each step is below half a unit in the last place"
    if moments.format is FP16 and share > 0 and moments.key != "exp_inf":
        least = (moments.format.min_subnormal / 2 / share) ** 0.5
        return f"gradients below {least:.2g} leave no trace: their squares round to 0"
    return ""


def _vanishes(value: float, form: Format) -> bool:
    return not torch.tensor(value, dtype=form.dtype).item()
