"""Which files a script writes, and when. Python's own writes come by an audit hook; torch and safetensors write in native code."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any, Protocol

import torch

from mezzo.launch.import_hooks import after_import
from mezzo.launch.patches import Patches

_MOST = 1000
_ELSEWHERE = ("/dev/", "/proc/", "/sys/")


class Told(Protocol):
    """Told of a file that the script writes."""

    def __call__(self, path: str, *, is_checkpoint: bool) -> None:
        """Note the file."""


class FilesWritten:
    """The files of a run."""

    def __init__(self, told: Told) -> None:
        self._told, self._num, self._telling = told, 0, False

    def install(self, patches: Patches) -> None:
        """Follow writes until ``patches`` are undone."""
        global _following, _hooked
        if not _hooked:
            sys.addaudithook(_audit)
            _hooked = True
        _following = self
        patches.on_undo(_forget)
        patches.around(torch, "save", self._saving)
        patches.around(torch.jit, "save", self._saving)
        after_import("safetensors.torch", functools.partial(self._wrap_safetensors, patches), patches)

    def _wrap_safetensors(self, patches: Patches) -> None:
        for name in ("save_file", "save_model"):
            patches.around(sys.modules["safetensors.torch"], name, self._saving)

    def _saving(self, original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        named = args[1] if len(args) > 1 else kwargs.get("f", kwargs.get("filename"))
        self._note(getattr(named, "name", named), is_checkpoint=True)
        return result

    def heard(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Note the file of an event, if it is one that writes a file."""
        if self._telling:
            return
        if event == "open":
            path, _, flags = arguments
            if isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR):
                self._note(path, is_checkpoint=False)
        elif event == "os.rename":
            self._note(arguments[1], is_checkpoint=False)

    def _note(self, named: Any, *, is_checkpoint: bool) -> None:
        if self._num >= _MOST or not isinstance(named, (str, bytes, os.PathLike)):
            return
        path = os.path.abspath(os.fsdecode(named))
        if path.startswith(_ELSEWHERE) or "__pycache__" in path:
            return
        self._num += 1
        self._telling = True
        try:
            self._told(path, is_checkpoint=is_checkpoint)
        finally:
            self._telling = False


_following: FilesWritten | None = None
_hooked = False


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    """Pass events on while a run is followed; an audit hook cannot be removed."""
    if _following is not None:
        _following.heard(event, arguments)


def _forget() -> None:
    global _following
    _following = None
