"""Record which files a script reads that were written after the comparison began and before its own run began.

A run that resumes from another run's checkpoint is not independent. Writes need not be watched: a file's modification time,
which survives renaming, shows in which run it was written. So an audit hook inspects files that are opened for reading, at one ``stat``
per path. The hook does not see libraries that open files in native code: safetensors, HDF5, TensorFlow and TorchScript are
wrapped instead. Processes that the script starts are not watched.

Files that carry no training state are left out: byte code, packages, compiled kernels, the user's cache folder, and the databases
of trackers.
"""

from __future__ import annotations

import functools
import importlib
import os
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from mezzo.launch.patches import Patches, after_import
from mezzo.library_files import is_library_file
from mezzo.records import FILE_CLOCK_TICK_S, FileRead

_MAX_PATHS = 100_000
"""Most inspected paths that are remembered: a data set may have millions."""
_MAX_FOUND = 100


class FilesRead:
    """The files that a run has read."""

    def __init__(self, *, since_s: float, before_s: float) -> None:
        """Create an empty list; both are Unix times: when the comparison began, and when this run did."""
        self._since_s, self._before_s = since_s, before_s
        self._seen: set[str] = set()
        self._found: dict[str, float] = {}

    @property
    def found(self) -> list[FileRead]:
        """The files in the order in which they were read."""
        return [FileRead(path=path, written_at_s=written) for path, written in self._found.items()]

    def read(self, file: Any) -> None:
        """Inspect a file that is about to be read; ignore anything that is not the path of a file."""
        try:
            path = os.path.abspath(os.fsdecode(file))
            if path in self._seen:
                return
            if len(self._seen) >= _MAX_PATHS:
                self._seen.clear()
            self._seen.add(path)
            status = os.stat(path)
        except (OSError, TypeError, ValueError):  # missing, a descriptor, or a stream: opening it is up to the script
            return
        if self._is_of_another_run(status) and len(self._found) < _MAX_FOUND and not is_library_file(path):
            self._found[path] = status.st_mtime

    def _is_of_another_run(self, status: os.stat_result) -> bool:
        if not stat.S_ISREG(status.st_mode) or not status.st_size:
            return False
        written = status.st_mtime
        # Some file systems have a resolution of one or two seconds: the file may have been written that much later.
        coarse = written == int(written)
        earliest = self._since_s - (2.0 if coarse else FILE_CLOCK_TICK_S)
        return earliest <= written < (int(self._before_s) if coarse else self._before_s)


_watching: FilesRead | None = None
_hooked = False


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    """Record the files that Python opens. An audit hook cannot be removed, so it first checks whether recording is on."""
    watching = _watching
    if watching is None:
        return
    if event == "open":
        path, _, flags = arguments
        if isinstance(flags, int) and not flags & os.O_WRONLY and not flags & os.O_TRUNC and not isinstance(path, int):
            watching.read(path)
    elif event == "sqlite3.connect":
        watching.read(arguments[0])


@contextmanager
def files_read(since_s: float | None) -> Iterator[FilesRead]:
    """Record the files that the code inside reads and that were written since a Unix time; None records none."""
    global _watching, _hooked
    # The first file that the run itself writes may be dated one tick before the run began.
    files = FilesRead(since_s=0.0 if since_s is None else since_s, before_s=time.time() - FILE_CLOCK_TICK_S)
    if since_s is None:
        yield files
        return
    patches = Patches()
    for package, wrap in _NATIVE.items():
        after_import(package, functools.partial(wrap, files, patches), patches)
    if not _hooked:
        sys.addaudithook(_audit)
        _hooked = True
    _watching = files
    try:
        yield files
    finally:
        _watching = None
        patches.undo()


def _read(files: FilesRead, position: int, original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call a function that reads the file named by its argument at ``position``."""
    files.read(args[position] if len(args) > position else next(iter(kwargs.values()), None))
    return original(*args, **kwargs)


def _wrap_safetensors(files: FilesRead, patches: Patches) -> None:
    for name in ("safetensors", "safetensors.torch", "safetensors.numpy"):
        if hasattr(sys.modules.get(name), "safe_open"):
            patches.around(sys.modules[name], "safe_open", functools.partial(_read, files, 0))


def _wrap_h5py(files: FilesRead, patches: Patches) -> None:
    patches.around(sys.modules["h5py"].File, "__init__", functools.partial(_read, files, 1))


def _wrap_torch(files: FilesRead, patches: Patches) -> None:
    torch = sys.modules["torch"]
    patches.around(torch.jit, "load", functools.partial(_read, files, 0))
    patches.around(torch, "from_file", functools.partial(_read, files, 0))


def _wrap_tensorflow(files: FilesRead, patches: Patches) -> None:
    file_io = importlib.import_module("tensorflow.python.lib.io.file_io")
    patches.around(file_io.FileIO, "__init__", functools.partial(_read, files, 1))
    checkpoints = importlib.import_module("tensorflow.python.training.py_checkpoint_reader")

    def new_reader(original: Callable[..., Any], prefix: Any) -> Any:
        files.read(f"{os.fsdecode(prefix)}.index")
        return original(prefix)

    patches.around(checkpoints, "NewCheckpointReader", new_reader)


_NATIVE: dict[str, Callable[[FilesRead, Patches], None]] = {
    "safetensors": _wrap_safetensors,
    "h5py": _wrap_h5py,
    "torch": _wrap_torch,
    "tensorflow": _wrap_tensorflow,
}
