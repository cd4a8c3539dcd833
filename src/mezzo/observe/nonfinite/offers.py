"""One possible fix of a fault, and how it is tried. Imports no torch."""

from __future__ import annotations

from typing import NamedTuple

from mezzo.policy import Policy


class Offer(NamedTuple):
    """One possible fix, and how it is tried."""

    advice: str
    line: str
    policy: Policy | None = None
    """What to run the script under to try it; None for the run's own."""
    loss_scale: float | None = None
    """The loss scale to begin with, where the script has a scaler of its own."""
    fp32_modules: tuple[str, ...] = ()
    """Modules to keep in FP32 where the script's own precision is left alone."""

    @property
    def can_run(self) -> bool:
        """Whether a run can try it; a change of the script's own lines cannot be tried."""
        return self.policy is not None or self.loss_scale is not None or bool(self.fp32_modules)
