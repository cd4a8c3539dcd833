"""What the process that runs a PyTorch script asks of its training: ``launch.training.Training``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

from mezzo.errors import MezzoError, UnsupportedFormatError
from mezzo.launch.patches import Patches
from mezzo.launch.request import GuardRequest, ModelChanges, ScriptFile, SnapshotRequest, TraceRequest
from mezzo.launch.torch.communication import refuse_join
from mezzo.launch.torch.counted_step import CountedStep
from mezzo.launch.torch.digests import WeightsDigest
from mezzo.launch.torch.own_amp import note_autocast_without_device
from mezzo.launch.torch.state import TorchRun
from mezzo.launch.torch.watching import Watch
from mezzo.launch.training import StepLimit
from mezzo.measure.environment import environment
from mezzo.measure.live import Latest, Report
from mezzo.observe.observer import Observer
from mezzo.records import (
    Bottleneck,
    Effective,
    Environment,
    Finding,
    Guardrails,
    Memory,
    OutOfMemory,
    Reason,
    SnapshotsTaken,
    Steps,
)

if TYPE_CHECKING:
    from mezzo.launch.torch.snapshots.taking import ScriptSnapshots
    from mezzo.launch.torch.traced import StateTrace


class TorchTraining:
    """A PyTorch script's training (``launch.training.Training``)."""

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
        return self._run.listeners.observer

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

    def explanation(self) -> list[Reason]:
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
            return [Reason(what="arithmetic", value="impossible here", reason=error.message)]
        return [*(Reason(what=c.what, value=c.value, reason=c.reason) for c in choices), *changed]

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
