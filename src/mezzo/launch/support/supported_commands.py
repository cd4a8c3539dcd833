"""Which commands and options take a script in which framework: one table, read before anything runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from mezzo.errors import ScriptError
from mezzo.launch.frameworks import framework_of
from mezzo.launch.support.keras_backend import backend_of

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
