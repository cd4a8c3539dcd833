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
        self._told, self._num = told, 0
        self._on = self._telling = False

    def install(self, patches: Patches) -> None:
        """Follow writes until ``patches`` are undone."""
        self._on = True
        patches.on_undo(self._off)
        sys.addaudithook(self._audit)
        patches.wrap(torch, "save", functools.partial(self._saving, place=1))
        patches.wrap(torch.jit, "save", functools.partial(self._saving, place=1))
        after_import("safetensors.torch", functools.partial(self._wrap_safetensors, patches), patches)

    def _off(self) -> None:
        self._on = False

    def _wrap_safetensors(self, patches: Patches) -> None:
        for name in ("save_file", "save_model"):
            patches.wrap(sys.modules["safetensors.torch"], name, functools.partial(self._saving, place=1))

    def _saving(self, original: Callable[..., Any], *, place: int) -> Callable[..., Any]:
        @functools.wraps(original)
        def save(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            named = args[place] if len(args) > place else kwargs.get("f", kwargs.get("filename"))
            self._note(getattr(named, "name", named), is_checkpoint=True)
            return result

        return save

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._on or self._telling:
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
