"""Tell the observer when the script itself uses torch's profiler, of which a process has one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.autograd.profiler import profile

from mezzo.launch.patches import Patches
from mezzo.observe.observer import Observer


def note_script_profiles(observer: Callable[[], Observer], patches: Patches) -> None:
    """Tell the current observer of every profile: ``torch.profiler.profile`` makes one of these as well, at its warm-up."""

    def prepare(original: Callable[..., Any], self: Any) -> Any:
        observer().profile_begins(self)
        return original(self)

    def leave(original: Callable[..., Any], self: Any, *error: Any) -> Any:
        try:
            return original(self, *error)
        finally:
            observer().profile_ended(self)

    patches.around(profile, "_prepare_trace", prepare)
    patches.around(profile, "__exit__", leave)
