"""Run PyTorch code that does not use Mezzo under a policy. All patches of torch are set and undone here."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING

import torch
import torch.utils.checkpoint

from mezzo.errors import MezzoError, UnsupportedFormatError
from mezzo.launch.patches import Patches
from mezzo.launch.request_parts import GuardRequest, ModelChanges, SnapshotRequest, TraceRequest
from mezzo.launch.seeds import shift_seeds
from mezzo.launch.step_limit import StepLimit
from mezzo.launch.torch.counting.counted_step import CountedStep
from mezzo.launch.torch.counting.weights_digest import WeightsDigest
from mezzo.launch.torch.forward import ForwardRegions
from mezzo.launch.torch.gradients.backward import BackwardPasses
from mezzo.launch.torch.models.communication import Communication
from mezzo.launch.torch.models.joining import refuse_join
from mezzo.launch.torch.models.model_changes import ChangedModels
from mezzo.launch.torch.observers import begin_observing
from mezzo.launch.torch.script_amp.lint_hooks import report_to_lint
from mezzo.launch.torch.script_amp.own_amp import replace_amp
from mezzo.launch.torch.script_amp.tf32_switches import keep_fp32_products
from mezzo.launch.torch.sessions import record_sessions
from mezzo.launch.torch.state import Run
from mezzo.launch.torch.updates.optimizer_steps import Updates
from mezzo.launch.torch.warned_lines import at_script_line
from mezzo.launch.torch.watching import Watch, watched
from mezzo.measure.environment import environment
from mezzo.measure.live import Latest, Report
from mezzo.observe.observer import Observer
from mezzo.observe.settings import AnySettings
from mezzo.observe.stopping import StopScript
from mezzo.policy import Policy
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
    from mezzo.launch.torch.snapshots.script import ScriptSnapshots
    from mezzo.launch.torch.tracing.traced import StateTrace


@contextmanager
def switched(
    policy: Policy | None, *, seed: int | None = None, observe: AnySettings | None = None
) -> Iterator[tuple[Run, CountedStep]]:
    """Run the code inside under ``policy`` (None: its own precision) and record every training step.

    Args:
        policy: the policy to apply.
        seed: added to every seed that the code sets; None leaves seeds alone.
        observe: settings of the observer, ``run.observer``; with one, formats and bytes are not counted.
    """
    run, patches = Run(policy), Patches()
    regions = ForwardRegions(run, watched=observe is not None)
    communication = Communication(run)
    counted = CountedStep(run, in_region=regions.covered)
    try:
        if seed is not None:
            shift_seeds(seed, patches)
        if policy is not None and policy.casting == "none":
            keep_fp32_products(policy, patches, run.note_left_alone)
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
            begin_observing(observe, run, patches)
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


class TorchTraining:
    """A PyTorch script's training (``launch.frameworks.Training``)."""

    def __init__(
        self, run: Run, counted: CountedStep, watch: Watch | None = None, patches: Patches | None = None
    ) -> None:
        self._run, self._counted, self._watch = run, counted, watch
        self._patches = patches or Patches()
        self._weights: WeightsDigest | None = None
        self._snapshots: ScriptSnapshots | None = None
        self._trace: StateTrace | None = None
        self.not_resumed: MezzoError | None = None
        """Why the run could not be resumed as requested; set by ``end_snapshots``."""
        self.framework = f"torch {torch.__version__}"

    @property
    def _device(self) -> str:
        return self._run.device_type or "cpu"

    @property
    def num_updates(self) -> int:
        """The number of updates, including the open one."""
        return self._run.num_updates

    @property
    def has_any_loss(self) -> bool:
        """Whether a loss was seen, even if no update followed."""
        return self._run.recorder.has_any_loss

    @property
    def observer(self) -> Observer | None:
        """The observer of the training."""
        return self._run.observer

    def adopt(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Count the updates of those ``optimizers``, created before the training began, whose parameters it trains."""
        self._run.premade.add(optimizers)

    def report_to(self, report: Report, *, every_s: float) -> None:
        """Report the latest numbers that the host knows, at most every ``every_s`` seconds."""
        watch = self._watch
        if watch is None:
            self._run.recorder.reports.begin(report, every_s=every_s)
            return

        def with_waits(latest: Latest) -> None:
            report(latest._replace(waits=watch.now(), shares=watch.shares()))

        self._run.recorder.reports.begin(with_waits, every_s=every_s)

    def stop_after(self, limit: StepLimit) -> None:
        """Stop the script at ``limit``."""
        self._run.limit = limit

    def begin_snapshots(self, request: SnapshotRequest | None) -> None:
        """Save the script's state from now on, and restore a saved one first, as requested."""
        if request is not None:
            from mezzo.launch.torch.snapshots.script import ScriptSnapshots

            self._snapshots = ScriptSnapshots(self._run, request)
            self._snapshots.install()
            if request.ranks > 1:
                refuse_join("--snapshot", self._patches)

    def begin_trace(self, request: TraceRequest | None) -> None:
        """Trace the state of the training from now on, as requested."""
        if request is not None:
            from mezzo.launch.torch.tracing.traced import StateTrace

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
        from mezzo.launch.torch.guarding import ScriptGuard

        self._run.guard = ScriptGuard(self._run, request, on_stop=self.weights)
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
        self._run.changed_models = ChangedModels(self._run, changes)
        return self._run.changed_models.input_elements

    def close_update(self) -> None:
        """Close the update that is open."""
        self._run.close_update()
        if self._trace is not None:
            self._trace.close()

    def steps(self) -> Steps:
        """Return the record of every step."""
        return self._run.recorder.steps(self._run.owners.names)

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
        changed = [*run.measured(), *([] if run.changed_models is None else run.changed_models.explanation())]
        changed += [] if run.changed_policy is None else [run.changed_policy]
        if run.policy is None:
            return changed
        try:
            choices = run.policy.explain(self._device)
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


def _restore_autocast(patches: Patches) -> None:
    """Restore autocast's state at the end: code that torch.compile fails to compile half-way leaves it changed."""
    for kind in ("cpu", "cuda"):
        patches.on_undo(functools.partial(torch.set_autocast_enabled, kind, torch.is_autocast_enabled(kind)))
