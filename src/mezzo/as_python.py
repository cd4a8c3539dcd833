"""Run a script or a module in this process as ``python`` does: under every command, under predict and under Apex. Imports no package."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Any


def run_as_python(target: str, *, module: bool) -> dict[str, Any]:
    """Run ``target`` as ``__main__``, with its own folder first on the path, and return its global names; ``sys.argv`` is the caller's."""
    if module:
        sys.path[0] = os.getcwd()
        return runpy.run_module(target, run_name="__main__", alter_sys=True)
    sys.path[0] = str(Path(target).resolve().parent)
    return runpy.run_path(target, run_name="__main__")
