"""Which files a script writes, and when: an audit hook sees Python's writes, patches those of torch and safetensors in native code."""

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
        """Report the file of an audit event, if the event writes one."""
        if self._calling:
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
        self._calling = True
        try:
            self._listener(path, is_checkpoint=is_checkpoint)
        finally:
            self._calling = False


_following: FilesWritten | None = None
_hooked = False


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    """Pass events on while a run is traced; an audit hook cannot be removed."""
    if _following is not None:
        _following.heard(event, arguments)


def _forget() -> None:
    global _following
    _following = None
