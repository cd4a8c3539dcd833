"""A script's own mixed precision, left out while it is traced: each tape has the formats of its policy and no others.

A script's autocast would lower the tape of ``fp32`` as well. Its GradScaler reads whether gradients are finite, which traced
tensors cannot show, and would skip every step. A ``mezzo.Session`` does both. An ``autocast(enabled=False)`` stays: it keeps an
operation in FP32 under any policy.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from torch.amp.autocast_mode import autocast
from torch.amp.grad_scaler import GradScaler

from mezzo.engine.loop_checks import in_fp32
from mezzo.engine.session import Session


@contextmanager
def own_amp_left_out() -> Iterator[None]:
    """Turn off each autocast, GradScaler and session that the block makes or enters."""
    with ExitStack() as stack:
        for kind, name, wrapped in (
            (autocast, "__enter__", _entered),
            (autocast, "__exit__", _left),
            (GradScaler, "__init__", _off),
            (Session, "__init__", in_fp32),
        ):
            stack.enter_context(patch.object(kind, name, wrapped(getattr(kind, name))))
        yield


def _entered(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def enter(self: Any) -> Any:
        return self if self._enabled else original(self)

    return enter


def _left(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def leave(self: Any, *error: Any) -> Any:
        return None if self._enabled else original(self, *error)

    return leave


def _off(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def init(self: Any, *args: Any, **settings: Any) -> None:
        original(self, *args[:5], **{**settings, "enabled": False})

    return init
