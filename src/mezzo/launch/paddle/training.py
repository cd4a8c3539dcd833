"""Run Paddle code that knows nothing of Mezzo under a policy, and report its training."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import paddle

from mezzo.errors import ScriptError
from mezzo.frameworks.paddle import explain_run
from mezzo.launch.guard_request import GuardRequest
from mezzo.launch.model_changes import ModelChanges
from mezzo.launch.paddle.backward import BackwardPasses
from mezzo.launch.paddle.counted_step import CountedStep
from mezzo.launch.paddle.forward import Regions
from mezzo.launch.paddle.observers import observer_for
from mezzo.launch.paddle.observing import StepObserver, refuse_static_graphs
from mezzo.launch.paddle.operations import Operations
from mezzo.launch.paddle.own_amp import replace_amp
from mezzo.launch.paddle.seeds import shift_seeds
from mezzo.launch.paddle.state import PaddleRun, this_device
from mezzo.launch.paddle.updates import Updates
from mezzo.launch.patches import Patches
from mezzo.launch.snapshot_request import SnapshotRequest
from mezzo.launch.step_limit import StepLimit
from mezzo.launch.trace_request import TraceRequest
from mezzo.measure.environment import environment_without_torch, nvidia_driver
from mezzo.measure.live import Report
from mezzo.observe.settings import AnySettings
from mezzo.observe.stopping import StopScript
from mezzo.policy import Policy
from mezzo.records import Effective, Environment, Finding, Memory, Reason, Steps


@contextmanager
def training(
    policy: Policy | None, *, seed: int | None, observe: AnySettings | None = None
) -> Iterator[PaddleTraining]:
    """Run the code inside under ``policy`` (None: its own precision) and record every training step.

    Args:
        policy: the policy to apply.
        seed: added to every seed that the code sets; None leaves seeds alone.
        observe: settings of the observer; with one, formats and bytes are not counted.
    """
    run, patches = PaddleRun(policy), Patches()
    operations, passes, regions = Operations(run), BackwardPasses(run), Regions(run)
    counted = CountedStep(run, operations, passes)
    try:
        if seed is not None:
            shift_seeds(seed, patches)
        if policy is not None and not policy.lowers:
            _set_tf32(patches, on=policy.compute == "tf32")
        replace_amp(run, regions, patches)
        regions.install(patches)
        operations.install(patches)
        passes.install(patches)
        Updates(run).install(patches)
        observer = None if observe is None else _observer(observe, run, patches)
        if observer is None:
            counted.install(patches)
        yield PaddleTraining(run, counted, observer)
        with suppress(StopScript):
            run.close_update()
    finally:
        patches.undo()


def _observer(settings: AnySettings, run: PaddleRun, patches: Patches) -> StepObserver:
    """Return the observer that ``settings`` ask for, at work until ``patches`` are undone."""
    observer = observer_for(settings, run)
    observer.install(patches)
    refuse_static_graphs(observer, patches)
    run.observer = observer
    patches.on_undo(observer.close)
    observer.start()
    return observer


class PaddleTraining:
    """A Paddle script's training (``launch.frameworks.Training``)."""

    def __init__(self, run: PaddleRun, counted: CountedStep, observer: StepObserver | None = None) -> None:
        self._run, self._counted = run, counted
        self.observer = observer
        self.framework = f"paddle {paddle.__version__}"

    @property
    def num_updates(self) -> int:
        """The number of updates, including the open one."""
        return self._run.num_updates

    def report_to(self, report: Report, *, every_s: float) -> None:
        """Report the latest numbers that the host knows, at most every ``every_s`` seconds."""
        self._run.steps.reports.begin(report, every_s=every_s)

    def stop_after(self, limit: StepLimit) -> None:
        """Refuse: only PyTorch scripts are stopped after a step."""
        raise ScriptError(
            "a step limit was set for a Paddle script; allowed: PyTorch scripts",
            hint="leave the limit out, or pass arguments that make the script train for fewer steps",
        )

    not_resumed = None

    def begin_snapshots(self, asked: SnapshotRequest | None) -> None:
        """Refuse: only the state of PyTorch scripts is found."""
        if asked is not None:
            raise ScriptError(
                "snapshots were asked of a Paddle script; allowed: PyTorch scripts",
                hint="leave --snapshot and --resume out, and use the framework's own checkpoints",
            )

    def begin_trace(self, asked: TraceRequest | None) -> None:
        """Refuse: only the state of PyTorch scripts is found."""
        if asked is not None:
            raise ScriptError(
                "mezzo resume-check was given a Paddle script; allowed: PyTorch scripts",
                hint="stop and resume the script by hand, and compare its losses",
            )

    def end_snapshots(self) -> None:
        """Return None: none are taken."""

    stopped_by_guard = None

    def begin_guard(self, asked: GuardRequest) -> None:
        """Refuse: only PyTorch scripts are watched."""
        raise ScriptError(
            "a guard was asked of a Paddle script; allowed: PyTorch scripts",
            hint="leave --guard out, and use the framework's own callbacks",
        )

    def guardrails(self) -> None:
        """Return None: nothing watches."""

    def out_of_memory(self, error: BaseException | None) -> None:
        """Return None: what holds memory is not counted."""

    def change_models(self, changes: ModelChanges) -> Callable[[], float | None]:
        """Refuse: only PyTorch models are changed."""
        raise ScriptError(
            "--channels-last or --compile was given for a Paddle script; allowed: PyTorch scripts",
            hint="leave it out",
        )

    def close_update(self) -> None:
        """Close the update that is open."""
        self._run.close_update()

    def steps(self) -> Steps:
        """Return the record of every step."""
        return self._run.steps.steps(self._run.names)

    def memory(self) -> Memory:
        """Return the bytes of a step."""
        return self._counted.memory()

    def effective(self) -> Effective:
        """Return what really ran in which format."""
        return self._counted.effective()

    def bottleneck(self) -> None:
        """Return None: only PyTorch scripts are watched."""

    def findings(self) -> list[Finding]:
        """Return an empty list: only PyTorch's mixed precision is checked."""
        return []

    def explanation(self) -> list[Reason]:
        """Return what the policy does on the device, with reasons."""
        if self._run.policy is None or self._run.device is None:  # nothing was trained
            return []
        choices = explain_run(self._run.policy, self._run.device)
        return [Reason(what=c.what, value=c.value, reason=c.reason) for c in choices]

    def weights(self) -> str:
        """Return nothing: several processes are compared in PyTorch only."""
        return ""

    def environment(self) -> Environment:
        """Return the machine and the versions."""
        device = self._run.device or this_device()
        on_gpu = device.kind == "cuda"
        known = {
            "device": device.kind,
            "threads": int(os.environ.get("OMP_NUM_THREADS", 0)) or os.cpu_count() or 1,
            "gpu": device.name if on_gpu else None,
            "driver": nvidia_driver() if on_gpu else None,
            "cuda": paddle.version.cuda() if on_gpu else None,
        }
        return environment_without_torch().model_copy(update=known)


def _set_tf32(patches: Patches, *, on: bool) -> None:
    """Switch TF32 for the products and convolutions of CUDA builds, which have it on by default."""
    core = paddle.base.core
    for library in ("cublas", "cudnn"):
        if hasattr(core, f"set_{library}_switch"):
            switch = getattr(core, f"set_{library}_switch")
            patches.on_undo(functools.partial(switch, getattr(core, f"get_{library}_switch")()))
            switch(on)
