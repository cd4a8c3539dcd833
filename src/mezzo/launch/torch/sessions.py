"""Scripts that train with ``mezzo.Session``: recorded like others, under the policy that the command names.

A session scales its loss, weighs micro-batches and skips updates itself. With ``as-is`` it continues to, and the record has the
losses without the scale, averaged over the micro-batches that each window really had. Any other policy replaces the session's own: the
session becomes FP32, and the policy is applied as to any other script.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from mezzo.engine.firstwindows import NoWatch
from mezzo.engine.session import Session
from mezzo.launch.patches import Patches
from mezzo.launch.torch.state import Run


def record_sessions(run: Run, patches: Patches) -> None:
    """Record the backward passes and updates of sessions until ``patches`` are undone."""
    if run.applied is not None:
        patches.wrap(Session, "__init__", _in_fp32)
    patches.wrap(Session, "_differentiate", functools.partial(_record_backward, run))
    patches.wrap(Session, "_close", functools.partial(_record_update, run))


class _ScaleOfLoss:
    """A stand-in for a script's GradScaler when a session scales a loss."""

    def __init__(self, session: Session, loss_id: int) -> None:
        self._of_session = session.scales[loss_id]

    @property
    def _scale(self) -> Any:
        """The loss scale on the device, under the name that a GradScaler uses."""
        return self._of_session.on_device()

    def get_scale(self) -> float:
        """Return the loss scale; waits for the device."""
        return self._of_session.value()


def _in_fp32(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def init(self: Session, *args: Any, **settings: Any) -> None:
        original(self, *args, **{**settings, "policy": "fp32"})
        self._watch = NoWatch()  # the autocast that it would find is the command's

    return init


def _record_backward(run: Run, original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def differentiate(self: Session, loss: Any, share: float, *, loss_id: int = 0, **how: Any) -> None:
        run.steady.end()
        if self.scales[loss_id].checks:
            run.script_scaler, run.scaled_by_script = _ScaleOfLoss(self, loss_id), True
        try:
            original(self, loss, share, loss_id=loss_id, **how)
        finally:
            run.scaled_by_script = False

    return differentiate


def _record_update(run: Run, original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def close(self: Session, chosen: Any, skipped: Any, **how: Any) -> None:
        total = self._window.total()
        if total is not None:
            run.recorder.weigh(1.0 / float(total))
        for optimizer in chosen:
            run.script_stepped(self, optimizer, skipped=skipped)
        original(self, chosen, skipped, **how)

    return close
