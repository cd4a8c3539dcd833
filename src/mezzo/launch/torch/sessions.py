"""Record scripts that train with ``mezzo.Session`` like others, under the policy that the command names.

A session scales its loss, weighs micro-batches and skips updates itself. With ``as-is`` it still does, and the record has the losses
without the scale, averaged over the micro-batches that each window really had. Any other policy replaces the session's own: the
session becomes FP32, and the policy is applied as to any other script.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from mezzo.engine.loop_checks import in_fp32
from mezzo.engine.scaling import DynamicScale
from mezzo.engine.session import Session
from mezzo.launch.patches import Patches
from mezzo.launch.torch.state import TorchRun


def record_sessions(run: TorchRun, patches: Patches) -> None:
    """Record the backward passes and updates of sessions until ``patches`` are undone."""
    if run.precision.effective is None:
        patches.around(Session, "__init__", functools.partial(_init, run))
    else:
        patches.wrap(Session, "__init__", in_fp32)
    patches.around(Session, "_differentiate", functools.partial(_record_backward, run, WeakKeyDictionary()))
    patches.around(Session, "_close", functools.partial(_record_update, run))
    patches.around(Session, "capture", functools.partial(_capture, run))


class _ScaleOfLoss:
    """The scale of a session's loss, with the methods of a GradScaler, through which observers read and set it."""

    def __init__(self, session: Session, loss_id: int) -> None:
        self._session_scale = session.scales[loss_id]

    @property
    def dynamic(self) -> bool:
        """Whether the scale changes."""
        return isinstance(self._session_scale, DynamicScale)

    @property
    def hysteresis(self) -> int:
        """How many overflows in a row lower the scale."""
        return getattr(self._session_scale, "hysteresis", 1)

    def get_growth_interval(self) -> int:
        """Return the number of good updates after which the scale grows; 1 if it never does."""
        return getattr(self._session_scale, "growth_interval", 1)

    def state_dict(self) -> dict[str, Any]:
        """Return the scale and its settings."""
        return self._session_scale.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the scale and its settings."""
        self._session_scale.load_state_dict(state)

    @property
    def _scale(self) -> Any:
        """The loss scale on the device, under the name that a GradScaler uses."""
        return self._session_scale.on_device()

    def get_scale(self) -> float:
        """Return the loss scale; waits for the device."""
        return self._session_scale.value()


def _init(run: TorchRun, original: Callable[..., Any], self: Session, *args: Any, **settings: Any) -> None:
    original(self, *args, **settings)
    run.notes.note_session(str(self.policy))  # now, since the first forward pass may fail


def _record_backward(
    run: TorchRun,
    scales: WeakKeyDictionary[Session, dict[int, _ScaleOfLoss]],
    original: Callable[..., None],
    self: Session,
    loss: Any,
    share: float,
    *,
    loss_id: int = 0,
    **how: Any,
) -> None:
    if run.phase.not_training:
        return original(self, loss, share, loss_id=loss_id, **how)
    run.steady.end()
    if self.scales[loss_id].skips_overflows:
        known = scales.setdefault(self, {})
        run.record_scaler(known.setdefault(loss_id, _ScaleOfLoss(self, loss_id)))
    try:
        original(self, loss, share, loss_id=loss_id, **how)
    finally:
        run.update.scaling_ended()


def _record_update(
    run: TorchRun, original: Callable[..., None], self: Session, chosen: Any, skipped: Any, **how: Any
) -> None:
    replayed = run.graphs.take_replayed()
    if not replayed and not run.phase.not_training:
        total = self.state.window.total()
        if total is not None:
            run.update.recorder.weigh(1.0 / float(total))
        for optimizer in chosen:
            run.script_stepped(self, optimizer, skipped=skipped)
    original(self, chosen, skipped, **how)


def _capture(run: TorchRun, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Capture a session's step: its rehearsals are no training steps, and its replays are counted like those of any graph."""
    with run.phase.no_training():
        return original(*args, **kwargs)
