"""Which commands and options take a script in which framework: one table, read before anything runs, and the refusals of trainings."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar, NamedTuple, NoReturn

from mezzo.children.script_text import Kind
from mezzo.errors import ScriptError
from mezzo.frameworks import IMPORTED_AS, framework_called, framework_of

if TYPE_CHECKING:
    from pathlib import Path

    from mezzo.launch.patches import Patches
    from mezzo.launch.request import GuardRequest, ModelChanges, ScriptFile, SnapshotRequest, TraceRequest
    from mezzo.launch.training import StepLimit
    from mezzo.records import Finding, OutOfMemory


_PYTORCH = "PyTorch"


class _Limited(NamedTuple):
    """A command or an option that not every framework supports."""

    why: str
    hint: str = ""
    """What to do instead; empty where the framework knows another of its forms."""


_LIMITED: dict[str, _Limited] = {
    "mezzo audit": _Limited("compiled steps hide their operations"),
    "mezzo diagnose": _Limited("compiled steps hide their values"),
    "mezzo ranges": _Limited("compiled steps hide their values"),
    "mezzo fallback": _Limited("compiled steps hide their values"),
    "mezzo diff": _Limited(
        "compiled steps hide their values", "mezzo compare compares losses and metrics in every framework"
    ),
    "mezzo tune": _Limited(
        "it stops runs after a number of PyTorch steps", "mezzo compare measures policies in every framework"
    ),
    "mezzo resume-check": _Limited(
        "it traces the state of torch.optim and of torch's DataLoader",
        "stop and resume the script manually, and compare its losses",
    ),
    "mezzo watch": _Limited(
        "it measures what PyTorch waits for", "mezzo run --policy as-is records the time of every step"
    ),
    "--guard": _Limited(
        "it returns PyTorch's state to a snapshot", "leave --guard out, and use the framework's own callbacks"
    ),
    "--snapshot": _Limited("it saves PyTorch's state", "leave --snapshot out, and use the framework's own checkpoints"),
    "--resume": _Limited("it restores PyTorch's state", "leave --resume out, and use the framework's own checkpoints"),
    "--expect": _Limited("it reads the formats of PyTorch's tensors", "leave --expect out"),
    "--write-expect": _Limited("it reads the formats of PyTorch's tensors", "leave --write-expect out"),
    "--per-gemm": _Limited(
        "it searches layers of PyTorch in blocks", "leave --per-gemm out, which searches for modules"
    ),
    "--fingerprints": _Limited("they are of PyTorch's operations", "leave --fingerprints out"),
    "--channels-last": _Limited("it changes PyTorch models", "leave --channels-last out"),
    "--compile": _Limited("it is torch.compile", "leave --compile out"),
    "--checkpoint": _Limited("it is PyTorch's activation checkpointing", "leave --checkpoint out"),
}
"""What is not here takes scripts in every framework."""
LIMITED = tuple(_LIMITED)


def stage_of(target: str, *, kind: Kind) -> str:
    """Return the framework of a script or module, in the form in which it trains, as refusals name it."""
    framework = framework_of(target, kind=kind)
    return _PYTORCH if framework == "torch" else framework_called(framework).stage_of(target, kind)


def refusal(feature: str, stage: str, *, target: str = "...") -> ScriptError | None:
    """Return why a command or an option does not take scripts in a framework; None if it does.

    Args:
        feature: ``mezzo audit``, ``--guard``: a name of ``LIMITED``, or a feature of every framework.
        stage: the framework.
        target: the script, for the command that the hint writes.
    """
    limited = _LIMITED.get(feature)
    if limited is None or stage == _PYTORCH:
        return None
    frameworks = [framework_called(name) for name in IMPORTED_AS]
    taken = [
        (one, framework) for framework in frameworks for one, takes in framework.stages.items() if feature in takes
    ]
    if any(one == stage for one, _ in taken):
        return None
    known = [one for one, framework in taken if one != framework.title or len(framework.stages) == 1]
    own = next(framework for framework in frameworks if stage in framework.stages)
    return ScriptError(
        f"{feature} was given for a {stage} script, and {limited.why}; allowed: {', '.join([_PYTORCH, *known])} scripts",
        hint=(limited.hint or own.elsewhere).format(command=feature.removeprefix("mezzo "), target=target),
    )


class WithoutPyTorch:
    """The part of ``launch.training.Training`` that only PyTorch scripts support: an error if requested, empty otherwise."""

    stage: ClassVar[str]
    """The framework, as refusals name it."""
    follows_processes = False
    not_resumed = None
    run_file = None
    stopped_by_guard = None

    @property
    def has_any_loss(self) -> bool:
        """Whether a loss was seen, even without an update; unless the framework overrides it, only updates report a loss."""
        return False

    def _refuse(self, feature: str) -> NoReturn:
        """Refuse what a command has not refused before it started this process."""
        refused = refusal(feature, self.stage)
        assert refused is not None, feature
        raise refused

    def stop_after(self, limit: StepLimit) -> None:
        """Refuse: only PyTorch scripts are stopped after a step."""
        hint = "leave the limit out, or pass arguments that make the script train for fewer steps"
        raise ScriptError(f"a step limit was set for a {self.stage} script; allowed: PyTorch scripts", hint=hint)

    def begin_snapshots(self, request: SnapshotRequest | None, script: ScriptFile) -> None:
        """Refuse: only the state of PyTorch scripts can be saved."""
        if request is not None:
            self._refuse("--snapshot")

    def begin_trace(self, request: TraceRequest | None) -> None:
        """Refuse: only the state of PyTorch scripts can be traced."""
        if request is not None:
            self._refuse("mezzo resume-check")

    def begin_tape(self, path: Path) -> None:
        """Record the operations of one step, unless the framework has none to show."""
        raise NotImplementedError

    def end_snapshots(self) -> None:
        """Return None: none are taken."""

    def begin_guard(self, request: GuardRequest) -> None:
        """Refuse: only PyTorch scripts are watched."""
        self._refuse("--guard")

    def guardrails(self) -> None:
        """Return None: nothing watches."""

    def out_of_memory(self, error: BaseException | None) -> OutOfMemory | None:
        """Return None, unless the framework overrides it."""
        return None

    def change_models(self, changes: ModelChanges) -> Callable[[], float | None]:
        """Refuse: only PyTorch models are changed."""
        self._refuse(
            "--channels-last" if changes.channels_last else "--compile" if changes.compiles else "--checkpoint"
        )

    def bottleneck(self) -> None:
        """Return None: only PyTorch scripts are watched."""

    def findings(self) -> list[Finding]:
        """Return an empty list: only PyTorch's mixed precision is checked."""
        return []

    def keep_weights(self, patches: Patches) -> None:
        """Keep nothing, unless the framework overrides it: only then are the weights of several processes compared."""

    def weights(self) -> str:
        """Return an empty text: no weights were kept."""
        return ""
