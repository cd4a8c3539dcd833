"""Choose the observer for a request: one row per kind."""

from __future__ import annotations

from mezzo.observe.observer import ObservedRun, Observer
from mezzo.observe.ranges.listed_formats import JudgedFormats
from mezzo.observe.settings import AnySettings, DiagnoseSettings, FallbackSettings, RangesSettings


def observer_for(settings: AnySettings, run: ObservedRun, formats: JudgedFormats | None = None) -> Observer:
    """Return the observer that ``settings`` ask for; only its module is imported.

    Args:
        settings: of the observer.
        run: what it observes.
        formats: tells which values a judged policy lowers; None for its op lists.
    """
    if isinstance(settings, RangesSettings):
        from mezzo.observe.ranges.observer import Ranges

        return Ranges(settings, run, formats)
    if isinstance(settings, DiagnoseSettings):
        from mezzo.observe.nonfinite.observer import NonFinite

        return NonFinite(settings, run)
    if isinstance(settings, FallbackSettings):
        from mezzo.observe.fallback.observer import Fallback

        return Fallback(settings, run)
    from mezzo.observe.audit.observer import Audit

    return Audit(settings, run)
