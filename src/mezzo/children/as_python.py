"""Run a script or a module in this process as ``python`` does: under every command, under predict and under Apex. Imports no package."""

from __future__ import annotations

import builtins
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any


def run_as_python(target: str, *, module: bool) -> dict[str, Any]:
    """Run ``target`` as ``__main__``, with its own folder first on the path, and return its global names; ``sys.argv`` is the caller's."""
    if module:
        sys.path[0] = os.getcwd()
        return runpy.run_module(target, run_name="__main__", alter_sys=True)
    sys.path[0] = str(Path(target).resolve().parent)
    return runpy.run_path(target, run_name="__main__")


def run_changed(path: str, code_of: Callable[[ModuleType], CodeType], *, package: str | None = None) -> dict[str, Any]:
    """Run other code than a file's as ``__main__``, and return its global names.

    Args:
        path: the file.
        code_of: returns the code, given the module that it will run in.
        package: the package of a module, as for ``python -m``.
    """
    module = ModuleType("__main__")
    vars(module).update(__file__=path, __cached__=None, __builtins__=builtins, __package__=package)
    before, sys.modules["__main__"] = sys.modules["__main__"], module
    try:
        exec(code_of(module), vars(module))
    finally:
        sys.modules["__main__"] = before
    return vars(module)
