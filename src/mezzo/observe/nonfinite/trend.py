"""The steps before a fault. Imports no torch."""

from __future__ import annotations

import math

from mezzo.records import RunRecord, TrendStep

LENGTH = 10
"""Steps that a record shows, the fault's own included."""


def trend_of(run: RunRecord, step: int) -> list[TrendStep]:
    """Return the last steps of ``run`` up to ``step``."""
    steps = run.steps
    return [
        TrendStep(
            step=i + 1,
            loss=steps.loss[i],
            grad_norm=steps.grad_norm[i],
            loss_scale=steps.loss_scale[i] if steps.loss_scale else math.nan,
            skipped=steps.skipped[i],
        )
        for i in range(max(0, step - LENGTH), min(step, len(steps)))
    ]
