"""Choose the diagnosis that a request asks for: one row a kind."""

from __future__ import annotations

from mezzo.diagnosis.settings import AnySettings, DiagnoseSettings, FallbackSettings, RangesSettings
from mezzo.diagnosis.watching import Diagnosis, Running


def diagnosis_for(settings: AnySettings, run: Running) -> Diagnosis:
    """Return the diagnosis of ``run`` that ``settings`` ask for; imported only now, and only that one."""
    if isinstance(settings, RangesSettings):
        from mezzo.diagnosis.ranges import Ranges

        return Ranges(settings, run)
    if isinstance(settings, DiagnoseSettings):
        from mezzo.diagnosis.nonfinite import NonFinite

        return NonFinite(settings, run)
    if isinstance(settings, FallbackSettings):
        from mezzo.diagnosis.fallback import Fallback

        return Fallback(settings, run)
    from mezzo.diagnosis.audit import Audit

    return Audit(settings, run)
