"""Errors for what CUDA does not compute in 16 bits: torch's own words, and what to keep in FP32."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import FrameType

import torch
from torch import Tensor, nn

from mezzo.engine.casts.conversion import module_names
from mezzo.errors import NoKernelError
from mezzo.formats import BF16, FP16, format_of
from mezzo.library_files import is_library_file

CUDA_NAMES = {FP16.dtype: "Half", BF16.dtype: "BFloat16", torch.complex32: "ComplexHalf"}
"""What torch's C++ code calls the 16-bit dtypes."""
_MEZZO = os.path.join(Path(__file__).parents[2], "")
_IN_BF16: ContextVar[list[str] | None] = ContextVar("what CUDA would refuse in BF16", default=None)


@contextmanager
def noting_bf16() -> Iterator[list[str]]:
    """Collect what CUDA would refuse in BF16 of what the block computes in FP16, with the script's lines.

    A prediction for BF16 rests on the trace of FP16, which has the same operations.
    """
    found: list[str] = []
    token = _IN_BF16.set(found)
    try:
        yield found
    finally:
        _IN_BF16.reset(token)


def note_bf16(words: str, operand: Tensor) -> None:
    """Note an operation on FP16 that CUDA would refuse in BF16, in the words of ``refusal``; once for each line."""
    found = _IN_BF16.get()
    if found is None:
        return
    line = _script_line(list(_frames()))
    text = f"{line + ': ' if line else ''}{NoKernelError.__name__}: {_filled(words, operand, BF16.dtype)}"
    if text not in found:
        found.append(text)


def refusal(words: str, operand: Tensor) -> NoKernelError:
    """Return the error for an operation that CUDA refuses; its hint names the script's line, and the module if the model has a name for it.

    Args:
        words: what torch says on CUDA; ``{dtype}`` and ``{sizes}`` stand for the operand's.
        operand: the 16-bit operand.
    """
    frames = list(_frames())
    line = _script_line(frames)
    module = _running_module(frames)
    name = format_of(operand.dtype)
    low = name.name.upper() if name is not None else FP16.name.upper()  # complex numbers of two FP16
    keep = f"CUDA has no kernel for this in {low}: keep the operation{f' at {line}' if line else ''} in FP32"
    wide = "call it on .float() operands inside torch.autocast(x.device.type, enabled=False)"
    return NoKernelError(
        _filled(words, operand, operand.dtype),
        hint=f"{keep}: {wide}" + (f", or keep its module by the policy's fp32_modules={module}" if module else ""),
    )


def _filled(words: str, operand: Tensor, dtype: torch.dtype) -> str:
    return words.format(dtype=CUDA_NAMES[dtype], sizes=list(operand.shape))


def _script_line(frames: list[FrameType]) -> str:
    return next((f"{Path(f.f_code.co_filename).name}:{f.f_lineno}" for f in frames if _is_of_script(f)), "")


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_of_script(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return not (file.startswith((_MEZZO, "<")) or is_library_file(file))


def _running_module(frames: list[FrameType]) -> str:
    """Return the name of the innermost running module in the outermost one; empty if it is the outermost one or has no name there."""
    owners = (frame.f_locals.get("self") for frame in frames if frame.f_code.co_name == "forward")
    running = [owner for owner in owners if isinstance(owner, nn.Module)]
    named = module_names(running[-1]) if running else {}
    return next((name for name, module in named.items() if module is running[0]), "")
