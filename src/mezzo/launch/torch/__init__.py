"""Run PyTorch code that does not use Mezzo under a policy. All patches of torch are set and undone here."""

from __future__ import annotations

import functools
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TextIO
from weakref import WeakKeyDictionary

import torch
import torch.utils.checkpoint
from torch.autograd.profiler import profile

from mezzo.engine.loop_checks import in_fp32
from mezzo.engine.scaling import DynamicScale
from mezzo.engine.session import Session
from mezzo.errors import MezzoError, UnsupportedFormatError
from mezzo.launch.any_script import shift_seeds
from mezzo.launch.patches import Patches
from mezzo.launch.request import GuardRequest, ModelChanges, ScriptFile, SnapshotRequest, TraceRequest
from mezzo.launch.torch.backward import BackwardPasses
from mezzo.launch.torch.communication import Communication, refuse_join
from mezzo.launch.torch.counted_step import CountedStep
from mezzo.launch.torch.digests import WeightsDigest
from mezzo.launch.torch.forward import ForwardRegions
from mezzo.launch.torch.lint_hooks import report_to_lint
from mezzo.launch.torch.optimizer_steps import Updates
from mezzo.launch.torch.own_amp import keep_fp32_products, make_changes, note_autocast_without_device, replace_amp
from mezzo.launch.torch.state import TorchRun
from mezzo.launch.torch.watching import Watch, watched
from mezzo.launch.training import StepLimit
from mezzo.measure.environment import environment
from mezzo.measure.live import Latest, Report
from mezzo.observe.observer import ObservedRun, Observer
from mezzo.observe.ranges.listed_formats import JudgedFormats
from mezzo.observe.settings import (
    AnySettings,
    AuditSettings,
    DiagnoseSettings,
    FallbackSettings,
    RangesSettings,
    StopScript,
    ValuesSettings,
)
from mezzo.observe.source_lines import is_of_mezzo, script_line
from mezzo.policy import Policy
from mezzo.records import (
    Bottleneck,
    Effective,
    Environment,
    Finding,
    Guardrails,
    Memory,
    Note,
    OutOfMemory,
    SnapshotsTaken,
    Steps,
)

if TYPE_CHECKING:
    from mezzo.launch.torch.snapshots.taking import ScriptSnapshots
    from mezzo.launch.torch.traced import StateTrace


@contextmanager
def switched(
    policy: Policy | None, *, seed: int | None = None, observe: AnySettings | None = None
) -> Iterator[tuple[TorchRun, CountedStep]]:
    """Run the code inside under ``policy`` (None: its own precision) and record every training step.

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
            run.steady_state.scaler_calls.install(patches)
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
    """Run the code inside as ``switched`` does, for a process that runs one script."""
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
    if isinstance(settings, ValuesSettings):
        from mezzo.observe.values.observer import RecordedValues

        return RecordedValues(settings, run)
    from mezzo.observe.audit.observer import Audit

    return Audit(settings, run)


def _begin_observing(settings: AnySettings, run: TorchRun, patches: Patches) -> None:
    """Observe ``run`` until ``patches`` are undone; if the first steps turn out to be no training steps, with a new observer."""

    def observer() -> Observer:
        watching = run.listeners.observer or run.listeners.retired
        assert watching is not None
        return watching

    if isinstance(settings, DiagnoseSettings):
        make_changes(settings.changes, run.objects.tree, patches)
    if isinstance(settings, AuditSettings) and settings.contract is not None:
        from mezzo.launch.torch.contract_hooks import watch_contract

        watch_contract(settings.contract, run, patches)
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


class TorchTraining:
    """A PyTorch script's training (``launch.training.Training``)."""

    follows_processes = True

    def __init__(
        self, run: TorchRun, counted: CountedStep, watch: Watch | None = None, patches: Patches | None = None
    ) -> None:
        self._run, self._counted, self._watch = run, counted, watch
        self._patches = patches or Patches()
        self._weights: WeightsDigest | None = None
        self._snapshots: ScriptSnapshots | None = None
        self._trace: StateTrace | None = None
        self.not_resumed: MezzoError | None = None
        """Why the run could not be resumed as requested; set by ``end_snapshots``."""
        self.run_file: Callable[[ScriptFile], dict[str, Any]] | None = None
        self.framework = f"torch {torch.__version__}"

    @property
    def _device(self) -> str:
        return self._run.precision.device_type or "cpu"

    @property
    def num_updates(self) -> int:
        """The number of updates, including the open one."""
        return self._run.update.num_updates

    @property
    def observer(self) -> Observer | None:
        """The observer of the training."""
        return self._run.listeners.observer or self._run.listeners.retired

    @property
    def has_any_loss(self) -> bool:
        """Whether a loss was seen, even if no update followed."""
        return self._run.update.recorder.has_any_loss

    def adopt(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Count the updates of those ``optimizers``, created before the training began, whose parameters it trains."""
        self._run.objects.existing.add(optimizers)

    def report_to(self, report: Report, *, every_s: float) -> None:
        """Report the latest numbers that the host knows, at most every ``every_s`` seconds."""
        watch = self._watch
        if watch is None:
            self._run.update.recorder.reports.begin(report, every_s=every_s)
            return

        def with_waits(latest: Latest) -> None:
            report(latest._replace(waits=watch.now(), shares=watch.shares()))

        self._run.update.recorder.reports.begin(with_waits, every_s=every_s)

    def stop_after(self, limit: StepLimit) -> None:
        """Stop the script at ``limit``."""
        self._run.stop_after(limit)

    def begin_tape(self, path: Path) -> None:
        """Refuse: a PyTorch script is traced without numbers, in a process of its own (``measure.predict.script``)."""
        raise NotImplementedError

    def begin_stand_in(self) -> None:
        """Let the CPU stand in for CUDA from now on, if this machine has no CUDA device."""
        if self._run.notes.stand_in is not None:
            self._run.notes.stand_in.install(self._patches, self._run.phase.before_compiling)
            if self._run.precision.effective is None:
                note_autocast_without_device(self._run, self._patches)

    def begin_snapshots(self, request: SnapshotRequest | None, script: ScriptFile) -> None:
        """Save the script's state from now on, and restore a saved one first, as requested."""
        if request is not None:
            from mezzo.launch.torch.snapshots.taking import ScriptSnapshots

            self._snapshots = ScriptSnapshots(self._run, request, script)
            self._snapshots.install()
            self.run_file = self._snapshots.run_file
            if request.ranks > 1:
                refuse_join("--snapshot", self._patches)

    def begin_trace(self, request: TraceRequest | None) -> None:
        """Trace the state of the training from now on, as requested."""
        if request is not None:
            from mezzo.launch.torch.traced import StateTrace

            self._trace = StateTrace(self._run, request)
            self._trace.install()

    def end_snapshots(self) -> SnapshotsTaken | None:
        """Wait for the last snapshot to be written, and return what was saved."""
        snapshots, self._snapshots = self._snapshots, None
        if snapshots is None:
            return None
        self.not_resumed = snapshots.not_reached
        return snapshots.close()

    def begin_guard(self, request: GuardRequest) -> None:
        """Watch the recorded numbers for alarms from now on."""
        self._run.begin_guard(request, on_stop=self.weights)
        if request.together and request.action != "note":
            refuse_join(f"--guard {request.action}", self._patches)

    def guardrails(self) -> Guardrails | None:
        """Return what the guard noticed in all steps; None without one."""
        guard = self._run.guard
        if guard is None:
            return None
        guard.finish(self.steps())
        return guard.noticed

    @property
    def stopped_by_guard(self) -> MezzoError | None:
        """Why a guard ended the script; known after ``guardrails``."""
        return None if self._run.guard is None else self._run.guard.stopped

    def out_of_memory(self, error: BaseException | None) -> OutOfMemory | None:
        """Return what occupied the memory if ``error`` ended the script because there was none left; None otherwise."""
        from mezzo.launch.torch.out_of_memory import is_out_of_memory, out_of_memory

        return out_of_memory(self._run, self.memory(), error) if error is not None and is_out_of_memory(error) else None

    def change_models(self, changes: ModelChanges) -> Callable[[], float | None]:
        """Change every model at its first call; return a function that returns the number of input elements per step."""
        return self._run.objects.change_models(changes, self._run.update, self._run.notes).input_elements

    def close_update(self) -> None:
        """Close the update that is open."""
        self._run.close_update()
        if self._trace is not None:
            self._trace.close()

    def steps(self) -> Steps:
        """Return the record of every step."""
        return self._run.update.recorder.steps(self._run.objects.numbers.names)

    def memory(self) -> Memory:
        """Return the memory that a step uses."""
        return self._counted.memory()

    def effective(self) -> Effective:
        """Return which operations really ran in which format."""
        return self._counted.effective()

    def bottleneck(self) -> Bottleneck | None:
        """Return what held the script back."""
        return None if self._watch is None else self._watch.bottleneck(self.steps(), self.effective())

    def findings(self) -> list[Finding]:
        """Return misuse of the script's own mixed precision."""
        return self._run.lint.findings()

    def explanation(self) -> list[Note]:
        """Return what the policy does on the device, with reasons."""
        run = self._run
        changed = [
            *run.notes.explanation(),
            *run.losses.explanation(),
            *([] if run.objects.changed_models is None else run.objects.changed_models.explanation()),
        ]
        changed += [] if run.precision.change is None else [run.precision.change]
        if run.precision.requested is None:
            return changed
        try:
            choices = run.precision.requested.explain(self._device)
        except UnsupportedFormatError as error:  # the run ended with this error, and its record says so
            return [Note(what="arithmetic", value="impossible here", reason=error.message)]
        return [*(Note(what=c.what, value=c.value, reason=c.reason) for c in choices), *changed]

    def environment(self) -> Environment:
        """Return the machine and the versions."""
        return environment(self._device)

    def keep_weights(self, patches: Patches) -> None:
        """Take a digest of the weights before the script drops them, until ``patches`` are undone."""
        self._weights = WeightsDigest(self._run)
        self._weights.install(patches)

    def weights(self) -> str:
        """Return a digest of the weights that are not sharded; empty if none was requested."""
        return "" if self._weights is None else self._weights.text()


# --- The script's own sessions ---------------------------------------------------------------------------------------------------

# A session scales its loss, weighs micro-batches and skips updates itself. With ``as-is`` it still does, and the record has the losses
# without the scale, averaged over the micro-batches that each window really had. Any other policy replaces the session's own: the
# session becomes FP32, and the policy is applied as to any other script.


def record_sessions(run: TorchRun, patches: Patches) -> None:
    """Record the backward passes and updates of sessions until ``patches`` are undone."""
    if run.precision.effective is None:
        patches.around(Session, "__init__", functools.partial(_init, run))
    else:
        patches.wrap(Session, "__init__", in_fp32)
    patches.around(Session, "_differentiate", functools.partial(_record_backward, run, WeakKeyDictionary()))
    patches.around(Session, "_close", functools.partial(_record_update, run))
    patches.around(Session, "capture", functools.partial(_capture, run))


class _ScaleOfLoss:
    """The scale of a session's loss, with the methods of a GradScaler, through which observers read and set it."""

    def __init__(self, session: Session, loss_id: int) -> None:
        self._session_scale = session.scales[loss_id]

    @property
    def dynamic(self) -> bool:
        """Whether the scale changes."""
        return isinstance(self._session_scale, DynamicScale)

    @property
    def hysteresis(self) -> int:
        """How many overflows in a row lower the scale."""
        return getattr(self._session_scale, "hysteresis", 1)

    def get_growth_interval(self) -> int:
        """Return the number of good updates after which the scale grows; 1 if it never does."""
        return getattr(self._session_scale, "growth_interval", 1)

    def state_dict(self) -> dict[str, Any]:
        """Return the scale and its settings."""
        return self._session_scale.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the scale and its settings."""
        self._session_scale.load_state_dict(state)

    @property
    def _scale(self) -> Any:
        """The loss scale on the device, under the name that a GradScaler uses."""
        return self._session_scale.on_device()

    def get_scale(self) -> float:
        """Return the loss scale; waits for the device."""
        return self._session_scale.value()


def _init(run: TorchRun, original: Callable[..., Any], self: Session, *args: Any, **settings: Any) -> None:
    original(self, *args, **settings)
    run.notes.note_session(str(self.policy))  # now, since the first forward pass may fail


def _record_backward(
    run: TorchRun,
    scales: WeakKeyDictionary[Session, dict[int, _ScaleOfLoss]],
    original: Callable[..., None],
    self: Session,
    loss: Any,
    share: float,
    *,
    loss_id: int = 0,
    **how: Any,
) -> None:
    if run.phase.not_training:
        return original(self, loss, share, loss_id=loss_id, **how)
    run.steady_state.end()
    if self.scales[loss_id].skips_overflows:
        known = scales.setdefault(self, {})
        run.record_scaler(known.setdefault(loss_id, _ScaleOfLoss(self, loss_id)))
    try:
        original(self, loss, share, loss_id=loss_id, **how)
    finally:
        run.update.scaling_ended()


def _record_update(
    run: TorchRun, original: Callable[..., None], self: Session, chosen: Any, skipped: Any, **how: Any
) -> None:
    replayed = run.graphs.take_replayed()
    if not replayed and not run.phase.not_training:
        total = self.state.window.total()
        if total is not None:
            run.update.recorder.weigh(1.0 / float(total))
        for optimizer in chosen:
            run.script_stepped(self, optimizer, skipped=skipped)
    original(self, chosen, skipped, **how)


def _capture(run: TorchRun, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Capture a session's step: its rehearsals are no training steps, and its replays are counted like any graph's."""
    with run.phase.no_training():
        return original(*args, **kwargs)
