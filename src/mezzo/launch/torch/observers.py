"""Choose the observer for a request, one row per kind, and let it observe a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.autograd.profiler import profile

from mezzo.launch.patches import Patches
from mezzo.launch.torch.state import Run
from mezzo.observe.observer import ObservedRun, Observer
from mezzo.observe.ranges.listed_formats import JudgedFormats
from mezzo.observe.settings import AnySettings, DiagnoseSettings, FallbackSettings, RangesSettings


def observer_for(settings: AnySettings, run: ObservedRun, formats: JudgedFormats | None = None) -> Observer:
    """Return the observer that ``settings`` request; only its module is imported.

    Args:
        settings: of the observer.
        run: what it observes.
        formats: determines which values a judged policy lowers; None for its op lists.
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


def begin_observing(settings: AnySettings, run: Run, patches: Patches) -> None:
    """Observe ``run`` until ``patches`` are undone; if the first steps turn out to be no training steps, with a new observer."""

    def begin() -> Observer:
        run.observer = observer_for(settings, run)
        run.watchers.append(run.observer)
        run.observer.start()
        return run.observer

    def observer() -> Observer:
        assert run.observer is not None
        return run.observer

    def restart() -> None:
        observer().close()
        run.watchers.remove(run.observer)
        begin()

    begin()
    run.by_hand.restart_observer = restart
    _note_script_profiles(observer, patches)
    patches.on_undo(lambda: observer().close())


def _note_script_profiles(observer: Callable[[], Observer], patches: Patches) -> None:
    """Notify the current observer when the script itself uses torch's profiler: a process can run only one.

    ``torch.profiler.profile`` creates one of these, too, at its warm-up.
    """

    def prepare(original: Callable[..., Any], self: Any) -> Any:
        observer().profile_begins(self)
        return original(self)

    def leave(original: Callable[..., Any], self: Any, *error: Any) -> Any:
        try:
            return original(self, *error)
        finally:
            observer().profile_ended(self)

    patches.around(profile, "_prepare_trace", prepare)
    patches.around(profile, "__exit__", leave)
