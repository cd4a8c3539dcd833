"""The frames of a running script."""

from __future__ import annotations

import sys
import traceback
from typing import Any

from mezzo.launch.torch.tracing.variables import is_own_file, script_folder


def frames_of_script() -> tuple[list[Any], str]:
    """Return the script's frames from the outermost to the loop, and the library whose code runs the loop; empty without one."""
    folder = script_folder()
    frames, libraries = [], []
    for frame, _ in traceback.walk_stack(sys._getframe(1)):
        name = str(frame.f_globals.get("__name__", ""))
        if name == "runpy":
            break
        if is_own_file(frame.f_code.co_filename, folder):
            frames.append(frame)
        elif name.split(".")[0] not in ("mezzo", "torch", "tqdm", "rich", "contextlib", "functools"):
            libraries.append(name)
    return frames[::-1], libraries[0] if libraries else ""
