"""Features that only PyTorch scripts support; the trainings of other frameworks inherit the refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

from mezzo.errors import ScriptError

if TYPE_CHECKING:
    from mezzo.launch.patches import Patches
    from mezzo.launch.request_parts import GuardRequest, ModelChanges, SnapshotRequest, TraceRequest
    from mezzo.launch.step_limit import StepLimit
    from mezzo.records import Finding


class WithoutPyTorch:
    """The part of ``launch.frameworks.Training`` that only PyTorch scripts support: an error if requested, empty otherwise."""

    framework_shown: ClassVar[str]
    """The framework's name in messages."""
    not_resumed = None
    stopped_by_guard = None

    @property
    def has_any_loss(self) -> bool:
        """Whether a loss was seen, even without an update; Keras reports a loss only with its update."""
        return False

    def _refusal(self, request: str, hint: str) -> ScriptError:
        return ScriptError(f"{request} a {self.framework_shown} script; allowed: PyTorch scripts", hint=hint)

    def stop_after(self, limit: StepLimit) -> None:
        """Refuse: only PyTorch scripts are stopped after a step."""
        hint = "leave the limit out, or pass arguments that make the script train for fewer steps"
        raise self._refusal("a step limit was set for", hint)

    def begin_snapshots(self, request: SnapshotRequest | None) -> None:
        """Refuse: only the state of PyTorch scripts can be saved."""
        if request is not None:
            hint = "leave --snapshot and --resume out, and use the framework's own checkpoints"
            raise self._refusal("snapshots were requested of", hint)

    def begin_trace(self, request: TraceRequest | None) -> None:
        """Refuse: only the state of PyTorch scripts can be traced."""
        if request is not None:
            hint = "stop and resume the script yourself, and compare its losses"
            raise self._refusal("mezzo resume-check was given", hint)

    def end_snapshots(self) -> None:
        """Return None: none are taken."""

    def begin_guard(self, request: GuardRequest) -> None:
        """Refuse: only PyTorch scripts are watched."""
        raise self._refusal("a guard was requested of", "leave --guard out, and use the framework's own callbacks")

    def guardrails(self) -> None:
        """Return None: nothing watches."""

    def out_of_memory(self, error: BaseException | None) -> None:
        """Return None: memory is inspected in PyTorch scripts only."""

    def change_models(self, changes: ModelChanges) -> Callable[[], float | None]:
        """Refuse: only PyTorch models are changed."""
        raise self._refusal("--channels-last or --compile was given for", "leave it out")

    def bottleneck(self) -> None:
        """Return None: only PyTorch scripts are watched."""

    def findings(self) -> list[Finding]:
        """Return an empty list: only PyTorch's mixed precision is checked."""
        return []

    def keep_weights(self, patches: Patches) -> None:
        """Keep nothing: several processes are compared in PyTorch only."""

    def weights(self) -> str:
        """Return an empty text: several processes are compared in PyTorch only."""
        return ""
