"""Follow which files a script writes, and when: an audit hook sees writes from Python, patches see those of torch and safetensors.

The latter two write in native code.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any, Protocol

import torch

from mezzo.launch.import_hooks import after_import
from mezzo.launch.patches import Patches

_MAX_FILES = 1000
_IGNORED = ("/dev/", "/proc/", "/sys/")


class Listener(Protocol):
    """A function that is called with each file that the script writes."""

    def __call__(self, path: str, *, is_checkpoint: bool) -> None:
        """Record the file."""


class FilesWritten:
    """The files that a run writes."""

    def __init__(self, listener: Listener) -> None:
        self._listener, self._num, self._calling = listener, 0, False

    def install(self, patches: Patches) -> None:
        """Report writes until ``patches`` are undone."""
        global _active, _hooked
        if not _hooked:
            sys.addaudithook(_audit)
            _hooked = True
        _active = self
        patches.on_undo(_forget)
        patches.around(torch, "save", self._save)
        patches.around(torch.jit, "save", self._save)
        after_import("safetensors.torch", functools.partial(self._wrap_safetensors, patches), patches)

    def _wrap_safetensors(self, patches: Patches) -> None:
        for name in ("save_file", "save_model"):
            patches.around(sys.modules["safetensors.torch"], name, self._save)

    def _save(self, original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        file = args[1] if len(args) > 1 else kwargs.get("f", kwargs.get("filename"))
        is_path = isinstance(file, (str, bytes, os.PathLike))  # a Path, too, has a name: its last part
        self._report(file if is_path else getattr(file, "name", None), is_checkpoint=True)
        return result

    def on_event(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Report the file that an audit event writes, if it writes one."""
        if self._calling:
            return
        if event == "open":
            path, _, flags = arguments
            if isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR):
                self._report(path, is_checkpoint=False)
        elif event == "os.rename":
            self._report(arguments[1], is_checkpoint=False)

    def _report(self, file: Any, *, is_checkpoint: bool) -> None:
        if self._num >= _MAX_FILES or not isinstance(file, (str, bytes, os.PathLike)):
            return
        path = os.path.abspath(os.fsdecode(file))
        if path.startswith(_IGNORED) or "__pycache__" in path:
            return
        self._num += 1
        self._calling = True
        try:
            self._listener(path, is_checkpoint=is_checkpoint)
        finally:
            self._calling = False


_active: FilesWritten | None = None
_hooked = False


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    """Pass events on while a run is traced; an audit hook cannot be removed."""
    if _active is not None:
        _active.on_event(event, arguments)


def _forget() -> None:
    global _active
    _active = None
