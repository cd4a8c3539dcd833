"""Features that only PyTorch scripts support; the trainings of other frameworks inherit the refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar, NoReturn

from mezzo.errors import ScriptError
from mezzo.launch.support.supported_commands import Stage, refusal

if TYPE_CHECKING:
    from mezzo.launch.patches import Patches
    from mezzo.launch.request_parts import GuardRequest, ModelChanges, ScriptFile, SnapshotRequest, TraceRequest
    from mezzo.launch.step_limit import StepLimit
    from mezzo.records import Finding, OutOfMemory


class WithoutPyTorch:
    """The part of ``launch.frameworks.Training`` that only PyTorch scripts support: an error if requested, empty otherwise."""

    stage: ClassVar[Stage]
    """The framework, as refusals name it."""
    not_resumed = None
    run_file = None
    stopped_by_guard = None

    @property
    def has_any_loss(self) -> bool:
        """Whether a loss was seen, even without an update; Keras reports a loss only with its update."""
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
