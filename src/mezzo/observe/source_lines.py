"""Find the source of an operation: the script's line, and whether the script, the policy or Mezzo itself runs it."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path
from types import FrameType
from typing import Literal, TypeAlias

import torch

Caller: TypeAlias = Literal["script", "policy", "mezzo"]
Owner: TypeAlias = Literal["script", "library", "torch"]
"""The owner of a file; ``torch`` stands for everything that belongs neither to the script nor to a training library."""

_TORCH = str(Path(torch.__file__).parent)
_MEZZO = str(Path(__file__).parents[1])
_KERAS = str(Path(_TORCH).with_name("keras")) + os.sep
"""Keras, whose operations on PyTorch belong to the script's line and to a layer."""
_FOREIGN: dict[str, bool] = {}
_INSTALLED = ("site-packages", "dist-packages")
"""Names of library folders; a list of paths would miss those that a ``.pth`` file adds."""
_STANDARD = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib")})
_OWNERS: dict[str, Owner] = {}
_CALLERS: dict[str, Caller | None] = {}
_PASSED_THROUGH = (
    *(str(Path(_TORCH, *parts)) for parts in (("_tensor.py",), ("_ops.py",), ("library.py",), ("utils", "_pytree.py"))),
    str(Path(_MEZZO, "engine", "registration.py")),
    str(Path(_MEZZO, "observe", "nonfinite", "propagation.py")),
    str(Path(_MEZZO, "observe", "lint", "by_hand.py")),
    str(Path(_KERAS, "src", "backend", "torch", "core.py")),
)
"""Python files between the caller of an operation and the operation itself."""
_POLICY = (
    *(
        "autocast_kernels.py",
        "conversion.py",
        "emulation.py",
        "emulation_nodes.py",
        "fp8_emulated.py",
        "fp8_torchao.py",
    ),
    *("onepass.py", "optimizers.py"),
)
"""Files of the engine whose operations a real device would also run: casts, emulated operations, updates."""
_APEX = ("compat", "apex", "amp")
_OF_POLICIES = (
    str(Path(_MEZZO, "engine", "kernels")),
    str(Path(_MEZZO, *_APEX, "function_mode.py")),
    str(Path(_MEZZO, *_APEX, "casts.py")),
    str(Path(_KERAS, "src", "dtype_policies")),
    str(Path(_KERAS, "src", "backend", "common", "variables.py")),
)
"""The same for whole folders, and for files whose names are not unique."""


def caller(frame: FrameType | None) -> Caller:
    """Return the owner of the running operation, by the file that calls it.

    ``policy`` casts what the script computes; ``mezzo`` is the arithmetic of loss scales, norms and records. What torch's own
    Python or C++ code calls belongs to the script, whoever called that code.
    """
    while frame is not None:
        name = frame.f_code.co_filename
        if name not in _CALLERS:
            _CALLERS[name] = _caller_of(name)
        found = _CALLERS[name]
        if found is not None:
            return found
        frame = frame.f_back
    return "script"


def _caller_of(file: str) -> Caller | None:
    if file in _PASSED_THROUGH:
        return None
    inside = file.startswith(_OF_POLICIES)
    if not inside and not file.startswith(_MEZZO):
        return "script"
    return "policy" if inside or Path(file).name in _POLICY else "mezzo"


def is_of_mezzo(file: str) -> bool:
    """Return whether a file is Mezzo's own."""
    return file.startswith(_MEZZO + os.sep)


def script_line(frame: FrameType | None) -> tuple[str, tuple[str, ...]]:
    """Return the innermost line outside torch, Keras and Mezzo as ``file:line``, and their functions that it called."""
    callers: list[str] = []
    while frame is not None:
        name = frame.f_code.co_filename
        foreign = _FOREIGN.get(name)
        if foreign is None:
            foreign = _FOREIGN[name] = name.startswith((_TORCH, _MEZZO, _KERAS, "<frozen"))
        if not foreign:
            return f"{name}:{frame.f_lineno}", tuple(callers)
        callers.append(frame.f_code.co_name)
        frame = frame.f_back
    return "", tuple(callers)


def own_line(frame: FrameType | None) -> tuple[str, bool]:
    """Return the innermost line outside libraries as ``file:line``, and whether a library other than torch is called there.

    For a script that is itself installed as a library, return the innermost line outside torch and Mezzo.
    """
    through = ""
    while frame is not None:
        owner = _owner(frame.f_code.co_filename)
        if owner == "script":
            return f"{frame.f_code.co_filename}:{frame.f_lineno}", bool(through)
        if owner == "library":
            through = through or f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return through, bool(through)


def own_place(frame: FrameType | None) -> int:
    """Return a number for the script's calls that lead to ``frame``: equal if it was reached in the same way."""
    calls = []
    while frame is not None:
        if _owner(frame.f_code.co_filename) == "script":
            calls.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return hash(tuple(calls))


def _owner(file: str) -> Owner:
    if file not in _OWNERS:
        ours = file.startswith((_TORCH, _MEZZO, "<frozen"))
        library = any(folder in Path(file).parts for folder in _INSTALLED)
        _OWNERS[file] = (
            "torch" if ours else "library" if library else "torch" if file.startswith(_STANDARD) else "script"
        )
    return _OWNERS[file]
