"""Choose the observer of a Paddle run by the kind of its settings."""

from __future__ import annotations

from mezzo.launch.paddle.observing import StepObserver
from mezzo.launch.paddle.state import PaddleRun
from mezzo.observe.settings import AnySettings, DiagnoseSettings, FallbackSettings, RangesSettings


def observer_for(settings: AnySettings, run: PaddleRun) -> StepObserver:
    """Return the observer for ``settings``; only its module is imported."""
    if isinstance(settings, DiagnoseSettings):
        from mezzo.launch.paddle.nonfinite.observer import NonFinite

        return NonFinite(settings, run)
    if isinstance(settings, RangesSettings):
        from mezzo.launch.paddle.ranges.observer import Ranges

        return Ranges(settings, run)
    if isinstance(settings, FallbackSettings):
        from mezzo.launch.paddle.fallback.observer import Fallback

        return Fallback(settings, run)
    from mezzo.launch.paddle.audit.observer import Audit

    return Audit(settings, run)
