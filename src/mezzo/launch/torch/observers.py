"""Choose the diagnosis that a request asks for: one row a kind."""

from __future__ import annotations

from mezzo.observe.observer import Diagnosis, Running
from mezzo.observe.settings import AnySettings, DiagnoseSettings, FallbackSettings, RangesSettings


def diagnosis_for(settings: AnySettings, run: Running) -> Diagnosis:
    """Return the diagnosis of ``run`` that ``settings`` ask for; imported only now, and only that one."""
    if isinstance(settings, RangesSettings):
        from mezzo.observe.ranges.observer import Ranges

        return Ranges(settings, run)
    if isinstance(settings, DiagnoseSettings):
        from mezzo.observe.nonfinite.observer import NonFinite

        return NonFinite(settings, run)
    if isinstance(settings, FallbackSettings):
        from mezzo.observe.fallback.observer import Fallback

        return Fallback(settings, run)
    from mezzo.observe.audit.observer import Audit

    return Audit(settings, run)
