"""A possible fix of a fault, and how to try it. Imports no torch."""

from __future__ import annotations

from typing import NamedTuple

from mezzo.policy import Policy


class Offer(NamedTuple):
    """A possible fix, and how to try it."""

    advice: str
    line: str
    policy: Policy | None = None
    """The policy under which to try it; None for the run's own."""
    loss_scale: float | None = None
    """The loss scale to begin with, if the script has its own scaler."""
    fp32_modules: tuple[str, ...] = ()
    """Modules to keep in FP32 if the script keeps its own precision."""

    @property
    def can_run(self) -> bool:
        """Whether a run can try it; a change to the script's own lines cannot be tried."""
        return self.policy is not None or self.loss_scale is not None or bool(self.fp32_modules)

    def kept_beyond(self, policy: Policy | None) -> tuple[str, ...]:
        """Return the modules that it keeps in FP32 and ``policy``, the one of the script's run, does not."""
        before = () if policy is None else policy.fp32_modules
        after = () if self.policy is None else self.policy.fp32_modules
        return tuple(name for name in dict.fromkeys((*self.fp32_modules, *after)) if name not in before)
