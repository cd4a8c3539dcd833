"""The process that traces a script for a command."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from pathlib import Path


def tracing(target: str, *, as_module: bool) -> AbstractContextManager[None]:
    """Let all traces of a script inside share their imports, which begin now."""
    from mezzo.launch.process.shared_libraries import shared_libraries
    from mezzo.measure.predict.script.tape_server import shared_imports

    folder = os.getcwd() if as_module else str(Path(target).resolve().parent)
    libraries = shared_libraries(target, kind="module" if as_module else "script")
    return shared_imports(libraries, folder=folder)
