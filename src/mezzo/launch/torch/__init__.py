"""TorchRun PyTorch code that does not use Mezzo under a policy. All patches of torch are set and undone here."""

from __future__ import annotations

import functools
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from types import FrameType
from typing import Any, TextIO

import torch
import torch.utils.checkpoint
from torch.autograd.profiler import profile

from mezzo.launch.any_script import shift_seeds
from mezzo.launch.patches import Patches
from mezzo.launch.torch.backward import BackwardPasses
from mezzo.launch.torch.communication import Communication
from mezzo.launch.torch.counted_step import CountedStep
from mezzo.launch.torch.forward import ForwardRegions
from mezzo.launch.torch.lint_hooks import report_to_lint
from mezzo.launch.torch.optimizer_steps import Updates
from mezzo.launch.torch.own_amp import keep_fp32_products, replace_amp
from mezzo.launch.torch.sessions import record_sessions
from mezzo.launch.torch.state import TorchRun
from mezzo.launch.torch.torch_training import TorchTraining
from mezzo.launch.torch.trial_changes import make_changes
from mezzo.launch.torch.watching import watched
from mezzo.observe.observer import ObservedRun, Observer
from mezzo.observe.ranges.listed_formats import JudgedFormats
from mezzo.observe.settings import AnySettings, DiagnoseSettings, FallbackSettings, RangesSettings, StopScript
from mezzo.observe.source_lines import is_of_mezzo, script_line
from mezzo.policy import Policy


@contextmanager
def switched(
    policy: Policy | None, *, seed: int | None = None, observe: AnySettings | None = None
) -> Iterator[tuple[TorchRun, CountedStep]]:
    """TorchRun the code inside under ``policy`` (None: its own precision) and record every training step.

    Args:
        policy: the policy to apply.
        seed: added to every seed that the code sets; None leaves seeds alone.
        observe: settings of the observer, ``run.observer``; with one, formats and bytes are not counted.
    """
    run, patches = TorchRun(policy), Patches()
    regions = ForwardRegions(run, watched=observe is not None)
    communication = Communication(run)
    counted = CountedStep(run, in_region=regions.covered)
    try:
        if seed is not None:
            shift_seeds(seed, patches)
        if policy is not None and policy.casting == "none":
            keep_fp32_products(policy, patches, run.notes.note_left_alone)
        replace_amp(run, patches)
        report_to_lint(run.lint, patches, as_is=policy is None)
        if policy is None:
            run.steady.scaler_calls.install(patches)
        record_sessions(run, patches)
        run.graphs.install(patches)
        regions.install(patches)
        communication.install(patches)
        BackwardPasses(run, communication).install(patches)
        Updates(run).install(patches)
        if observe is None:
            counted.install(patches)
            if policy is None:
                counted.when_over(regions.counting_ended)
        else:  # one observer at a time: two would have to leave the dispatch mode stack in reverse order
            _begin_observing(observe, run, patches)
        _restore_autocast(patches)
        with warnings.catch_warnings():
            # Our hooks skip what torch.compile traces and count depth, so firing once more for the wrapper is harmless.
            warnings.filterwarnings("ignore", message=".*there are global hooks on modules.*")
            warnings.showwarning = at_script_line(warnings.showwarning)
            yield run, counted
        with suppress(StopScript):
            run.close_update()
    finally:
        patches.undo()


@contextmanager
def training(policy: Policy | None, *, seed: int | None, observe: AnySettings | None) -> Iterator[TorchTraining]:
    """TorchRun the code inside as ``switched`` does, for a process that runs one script."""
    patches = Patches()
    with (
        switched(policy, seed=seed, observe=observe) as (run, counted),
        watched(run, counted) if observe is None else nullcontext(None) as watch,  # an observer distorts the times
    ):
        try:
            yield TorchTraining(run, counted, watch, patches)
        finally:
            patches.undo()


def _restore_autocast(patches: Patches) -> None:
    """Restore autocast's state at the end: code that torch.compile fails to compile half-way leaves it changed."""
    for kind in ("cpu", "cuda"):
        patches.on_undo(functools.partial(torch.set_autocast_enabled, kind, torch.is_autocast_enabled(kind)))


# --- observers ---------------------------------------------------------------------------------------------------------------------


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


def _begin_observing(settings: AnySettings, run: TorchRun, patches: Patches) -> None:
    """Observe ``run`` until ``patches`` are undone; if the first steps turn out to be no training steps, with a new observer."""

    def observer() -> Observer:
        assert run.listeners.observer is not None
        return run.listeners.observer

    if isinstance(settings, DiagnoseSettings):
        make_changes(settings.changes, run.objects.tree, patches)
    run.listeners.observe(lambda: observer_for(settings, run))
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


# Limit: a script that replaces ``warnings.showwarning``, or records warnings, sees Mezzo's line.


def at_script_line(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a ``warnings.showwarning`` that calls ``original`` with the script's line in place of Mezzo's, once per text and line."""
    shown: set[tuple[str, str]] = set()
    repeated: set[tuple[str, str]] = set()

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        place = script_line(_cause())[0] if is_of_mezzo(filename) else ""
        key = str(message), place or f"{filename}:{lineno}"
        if key in shown and (place or key not in repeated):
            if not place:  # Python has not seen it at the script's line before
                repeated.add(key)
        else:
            shown.add(key)
            path, _, number = key[1].rpartition(":")
            original(message, category, path, int(number), file, None if place else line)
        if place:
            _forget(filename)  # torch may warn again about another line of the script

    return show


def _cause() -> FrameType | None:
    """Return the frame that caused the warning being shown."""
    frames = (frame for frame, _ in traceback.walk_stack(sys._getframe(2)))
    return next((frame for frame in frames if frame.f_code.co_filename != warnings.__file__), None)


def _forget(filename: str) -> None:
    """Forget the warnings of a file: Python shows each only once per text and line."""
    for module in list(sys.modules.values()):
        if getattr(module, "__file__", None) == filename:
            vars(module).pop("__warningregistry__", None)
