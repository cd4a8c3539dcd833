"""Which files belong to libraries and not to a script: packages, byte code, compiled kernels, caches. Imports the standard library only."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

_CACHES = (
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
    "TORCH_EXTENSIONS_DIR",
    "MPLCONFIGDIR",
    "HF_HOME",
    "NUMBA_CACHE_DIR",
)
"""Environment variables with the folder of a library's cache."""
_INSTALLED = ("lib", "lib64", "share", "etc")
"""Folders of an installation of Python that hold no script: the installation itself may be /usr, and a script in /usr/src."""
_OF_LIBRARIES = re.compile(
    r"[/\\](?:__pycache__|site-packages|dist-packages|mlruns|wandb|\.triton|\.nv)[/\\]|\.pyc$|[/\\]mlflow\.db$"
)


def cache_home() -> Path:
    """Return the user's cache folder, which may not exist.

    Raises:
        RuntimeError: the user has no home.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def is_library_file(path: str) -> bool:
    """Return whether the file at ``path``, an absolute path, belongs to a library."""
    if _OF_LIBRARIES.search(path):
        return True
    installed = [os.path.join(prefix, name) for prefix in (sys.prefix, sys.base_prefix) for name in _INSTALLED]
    folders = [*installed, *filter(None, map(os.environ.get, _CACHES))]
    with suppress(RuntimeError):
        folders.append(str(cache_home()))
    below = {os.path.join(find(folder), "") for folder in folders for find in (os.path.abspath, os.path.realpath)}
    return path.startswith((*below, os.path.join(tempfile.gettempdir(), "torchinductor_")))
