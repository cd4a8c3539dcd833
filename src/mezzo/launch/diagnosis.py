"""Choose the diagnosis that a request asks for: one row a kind."""

from __future__ import annotations

from mezzo.diagnose.settings import AnySettings, DiagnoseSettings, FallbackSettings, RangesSettings
from mezzo.diagnose.watching import Diagnosis, Running


def diagnosis_for(settings: AnySettings, run: Running) -> Diagnosis:
    """Return the diagnosis of ``run`` that ``settings`` ask for; imported only now, and only that one."""
    if isinstance(settings, RangesSettings):
        from mezzo.diagnose.ranges import Ranges

        return Ranges(settings, run)
    if isinstance(settings, DiagnoseSettings):
        from mezzo.diagnose.nonfinite import NonFinite

        return NonFinite(settings, run)
    if isinstance(settings, FallbackSettings):
        from mezzo.diagnose.fallback import Fallback

        return Fallback(settings, run)
    from mezzo.diagnose.audit import Audit

    return Audit(settings, run)
