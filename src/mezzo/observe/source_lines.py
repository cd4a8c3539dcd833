"""Find the source of an operation: the script's line, and whether the script, the policy or Mezzo itself runs it."""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
from pathlib import Path
from types import FrameType
from typing import Literal, TypeAlias

import torch

Caller: TypeAlias = Literal["script", "policy", "mezzo"]
Owner: TypeAlias = Literal["script", "library", "torch"]
"""The owner of a file; ``torch`` means everything that belongs neither to the script nor to a training library."""

_TORCH = str(Path(torch.__file__).parent) + os.sep
_MEZZO = str(Path(__file__).parents[1]) + os.sep
"""With a separator, since torchvision and torchao are not parts of torch."""
_KERAS = str(Path(_TORCH).with_name("keras")) + os.sep
"""The folder of Keras: its operations on PyTorch are attributed to the script's line and to a layer."""
_INSTALLED = ("site-packages", "dist-packages")
"""Names of library folders; a list of paths would miss folders that a ``.pth`` file adds."""
_STANDARD = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib")})
_PASSED_THROUGH = (
    *(str(Path(_TORCH, *parts)) for parts in (("_tensor.py",), ("_ops.py",), ("library.py",), ("utils", "_pytree.py"))),
    str(Path(_MEZZO, "engine", "casts", "registration.py")),
    str(Path(_MEZZO, "observe", "location.py")),
    str(Path(_MEZZO, "observe", "nonfinite", "propagation.py")),
    str(Path(_MEZZO, "observe", "values", "tracer.py")),
    str(Path(_MEZZO, "observe", "lint", "torch_calls.py")),
    str(Path(_KERAS, "src", "backend", "torch", "core.py")),
)
"""Python files between the caller of an operation and the operation itself."""
_AROUND_MODES = (str(Path(_TORCH, "_dynamo", "eval_frame.py")), str(Path(_TORCH, "_compile.py")))
"""Files of torch that call the modes which torch.compile may ignore."""
_ENGINE = (
    *("casts/autocast_kernels", "casts/conversion", "kernels"),
    *(f"matrix_units/{name}" for name in ("accumulation", "emulation", "native_units", "low_layers", "block_linear")),
    *(f"optimizers/{name}" for name in ("one_pass", "adafactor", "adamw", "muon", "sgd")),
)
_APEX = ("optimizers", "amp/optimizers", "amp/casts")
_POLICY = (
    *(str(Path(_MEZZO, "engine", name)) for name in _ENGINE),
    *(str(Path(_MEZZO, "compat", "apex", name)) for name in _APEX),
    str(Path(_KERAS, "src", "dtype_policies")),
    str(Path(_KERAS, "src", "backend", "common", "variables.py")),
)
"""Path prefixes of files whose operations a real device would also run: casts, emulated operations, updates."""


def caller(frame: FrameType | None) -> Caller:
    """Return the owner of the running operation, by the file that calls it.

    ``policy`` casts the script's operands; ``mezzo`` computes loss scales, norms and records. Operations that torch's own Python or C++
    code calls belong to the script, whoever called that code.
    """
    while frame is not None:
        found = _caller_of(frame.f_code.co_filename)
        if found is not None:
            return found
        frame = frame.f_back
    return "script"


@functools.cache
def _caller_of(file: str) -> Caller | None:
    if file in _PASSED_THROUGH:
        return None
    return "policy" if file.startswith(_POLICY) else "mezzo" if file.startswith(_MEZZO) else "script"


def is_of_torch(frame: FrameType | None) -> bool:
    """Return whether a Python function of torch calls the running operation, and not the script, a library or Mezzo."""
    while frame is not None and frame.f_code.co_filename in (*_PASSED_THROUGH, *_AROUND_MODES):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(_TORCH)


def is_of_mezzo(file: str) -> bool:
    """Return whether a file is Mezzo's own."""
    return file.startswith(_MEZZO)


@functools.cache
def _is_foreign(file: str) -> bool:
    return file.startswith((_TORCH, _MEZZO, _KERAS, "<frozen"))


def script_line(frame: FrameType | None) -> tuple[str, tuple[str, ...]]:
    """Return the innermost line outside torch, Keras and Mezzo as ``file:line``, and the functions of these between it and ``frame``."""
    callers: list[str] = []
    while frame is not None:
        if not _is_foreign(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}", tuple(callers)
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


def running_line() -> str:
    """Return the line outside libraries that is running now."""
    return own_line(sys._getframe(1))[0]


def own_place(frame: FrameType | None) -> int:
    """Return a number that identifies the chain of the script's calls that leads to ``frame``."""
    calls = []
    while frame is not None:
        if _owner(frame.f_code.co_filename) == "script":
            calls.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return hash(tuple(calls))


@functools.cache
def _owner(file: str) -> Owner:
    if file.startswith((_TORCH, _MEZZO, "<frozen")):
        return "torch"
    if any(folder in Path(file).parts for folder in _INSTALLED):
        return "library"
    return "torch" if file.startswith(_STANDARD) else "script"
