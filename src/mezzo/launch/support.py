"""Which commands and options take a script in which framework: one table, read before anything runs, and the refusals of trainings."""

from __future__ import annotations

import ast
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, NoReturn, TypeAlias, TypeGuard

from mezzo.children.script_text import own_trees
from mezzo.errors import ScriptError
from mezzo.launch.frameworks import framework_of

if TYPE_CHECKING:
    from mezzo.launch.patches import Patches
    from mezzo.launch.request import GuardRequest, ModelChanges, ScriptFile, SnapshotRequest, TraceRequest
    from mezzo.launch.training import StepLimit
    from mezzo.records import Finding, OutOfMemory


Stage: TypeAlias = Literal["PyTorch", "Keras on torch", "Keras on tensorflow", "Keras on jax", "Keras", "Paddle"]
"""A framework, and Keras' backend; ``Keras`` alone if the script chooses its backend while it runs."""

_ALL: tuple[Stage, ...] = ("PyTorch", "Keras on torch", "Keras on tensorflow", "Keras on jax", "Keras", "Paddle")
_INSPECTED: tuple[Stage, ...] = ("PyTorch", "Keras on torch", "Keras", "Paddle")
"""Where single operations are seen; under ``Keras`` alone, the run itself decides."""
_ON_TORCH = "KERAS_BACKEND=torch mezzo {command} {target} runs the same script on PyTorch, if it only uses Keras"


@dataclass(frozen=True)
class _Limited:
    """A command or an option that not every framework supports."""

    stages: tuple[Stage, ...]
    why: str
    hint: str


_TORCH: tuple[Stage, ...] = ("PyTorch",)
_TORCHES: tuple[Stage, ...] = ("PyTorch", "Keras on torch")
_LIMITED: dict[str, _Limited] = {
    "mezzo audit": _Limited((*_INSPECTED, "Keras on tensorflow"), "compiled steps hide their operations", _ON_TORCH),
    "mezzo diagnose": _Limited((*_INSPECTED, "Keras on tensorflow"), "compiled steps hide their values", _ON_TORCH),
    "mezzo ranges": _Limited(_INSPECTED, "compiled steps hide their values", _ON_TORCH),
    "mezzo fallback": _Limited(_INSPECTED, "compiled steps hide their values", _ON_TORCH),
    "mezzo predict": _Limited(
        _TORCH,
        "it traces the steps of torch.optim without numbers",
        "type mezzo check --gpu a100-80gb {target}: counted FLOPs and bytes bound how much faster it would be",
    ),
    "mezzo tune": _Limited(
        _TORCHES, "it stops runs after a number of PyTorch steps", "mezzo compare measures policies in every framework"
    ),
    "mezzo resume-check": _Limited(
        _TORCH,
        "it traces the state of torch.optim and of torch's DataLoader",
        "stop and resume the script manually, and compare its losses",
    ),
    "mezzo watch": _Limited(
        _TORCH, "it measures what PyTorch waits for", "mezzo run --policy as-is records the time of every step"
    ),
    "--guard": _Limited(
        _TORCH, "it returns PyTorch's state to a snapshot", "leave --guard out, and use the framework's own callbacks"
    ),
    "--snapshot": _Limited(
        _TORCH, "it saves PyTorch's state", "leave --snapshot out, and use the framework's own checkpoints"
    ),
    "--resume": _Limited(
        _TORCH, "it restores PyTorch's state", "leave --resume out, and use the framework's own checkpoints"
    ),
    "--channels-last": _Limited(_TORCH, "it changes PyTorch models", "leave --channels-last out"),
    "--compile": _Limited(_TORCH, "it is torch.compile", "leave --compile out"),
    "--checkpoint": _Limited(_TORCH, "it is PyTorch's activation checkpointing", "leave --checkpoint out"),
}
"""What is not here takes scripts in every framework."""
LIMITED = tuple(_LIMITED)


def stage_of(target: str, *, kind: Literal["script", "module"]) -> Stage:
    """Return the framework of a script or module, with Keras' backend."""
    framework = framework_of(target, kind=kind)
    if framework == "torch":
        return "PyTorch"
    return "Paddle" if framework == "paddle" else on_backend(backend_of(target, kind=kind))


def on_backend(backend: str | None) -> Stage:
    """Return the stage of a Keras script on a backend; ``Keras`` for one that is not known."""
    named = f"Keras on {backend}"
    return next((stage for stage in _ALL if stage == named), "Keras")


def refusal(feature: str, stage: Stage, *, target: str = "...") -> ScriptError | None:
    """Return why a command or an option does not take scripts in a framework; None if it does.

    Args:
        feature: ``mezzo audit``, ``--guard``: a name of ``LIMITED``, or one that every framework supports.
        stage: the framework.
        target: the script, for the command that the hint writes.
    """
    limited = _LIMITED.get(feature)
    if limited is None or stage in limited.stages:
        return None
    allowed = ", ".join(one for one in _ALL if one in limited.stages and one != "Keras")
    return ScriptError(
        f"{feature} was given for a {stage} script, and {limited.why}; allowed: {allowed} scripts",
        hint=limited.hint.format(command=feature.removeprefix("mezzo "), target=target),
    )


_VARIABLE = "KERAS_BACKEND"
_DEFAULT = "tensorflow"


def backend_of(
    target: str, *, kind: Literal["script", "module"], environment: Mapping[str, str] = os.environ
) -> str | None:
    """Return the name of the backend; None if the script chooses it while it runs.

    Args:
        target: the script, or the module's dotted name.
        kind: which of the two ``target`` is.
        environment: the environment variables of the script.
    """
    found: set[str | None] = set()
    for tree in own_trees(target, kind=kind):
        found |= set(_chosen_in(tree, environment.get(_VARIABLE)))
    if found:
        return found.pop() if len(found) == 1 else None
    return environment.get(_VARIABLE) or _configured(environment)


def _chosen_in(tree: ast.AST, inherited: str | None) -> Iterator[str | None]:
    """Yield the backends that a file may choose; None for one that its text does not tell."""
    named = {id(n) for n in ast.walk(tree) if isinstance(n, ast.Constant) and n.value == _VARIABLE}
    for stmt in getattr(tree, "body", []):  # what runs whatever the script is told
        if isinstance(stmt, ast.Assign) and isinstance(stmt.targets[0], ast.Subscript):
            name = id(stmt.targets[0].slice)
            if name in named:
                named.discard(name)
                yield _text(stmt.value)
        elif isinstance(stmt, ast.Expr) and _is_setdefault(stmt.value) and id(stmt.value.args[0]) in named:
            named.discard(id(stmt.value.args[0]))
            yield inherited or _text(stmt.value.args[1])
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
            named.discard(id(node.slice))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            if node.func.attr in ("get", "getenv"):  # which read it
                named.discard(id(node.args[0]))
            elif node.func.attr == "set_backend":
                yield None
    if named:  # it is set in another way, or only under a condition
        yield None


def _is_setdefault(value: ast.expr) -> TypeGuard[ast.Call]:
    is_call = isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and len(value.args) == 2
    return is_call and value.func.attr == "setdefault"  # type: ignore[attr-defined]


def _text(value: ast.expr) -> str | None:
    return value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else None


def _configured(environment: Mapping[str, str]) -> str:
    """Return the backend that Keras' own file names, or Keras' default."""
    home = environment.get("KERAS_HOME") or str(Path(environment.get("HOME", "~")).expanduser() / ".keras")
    try:
        named = json.loads((Path(home) / "keras.json").read_text(encoding="utf-8")).get("backend")
    except (OSError, ValueError, AttributeError):
        return _DEFAULT
    return named if isinstance(named, str) else _DEFAULT


class WithoutPyTorch:
    """The part of ``launch.training.Training`` that only PyTorch scripts support: an error if requested, empty otherwise."""

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
