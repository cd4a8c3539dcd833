"""A session's state dict: models by their own names and in FP32, optimizers, schedulers, scales and counts.

It loads under another policy, and from ``DistributedDataParallel`` into one process or back: models are saved without the
prefix of a wrapper. Each process saves its own part of sharded tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from mezzo.engine import checks
from mezzo.engine.processes.replicas import bare
from mezzo.engine.progress import Progress
from mezzo.engine.snapshots.position import Position
from mezzo.engine.window import Window
from mezzo.errors import SessionError

if TYPE_CHECKING:
    from mezzo.engine.loop_checks import NoWatch, Ownership
    from mezzo.engine.schedules import Schedules
    from mezzo.engine.session import Session
    from mezzo.engine.snapshots.resumable import Snapshots


def state_of(session: Session, *, window_calls: int) -> dict[str, Any]:
    """Return everything that training needs to resume.

    Args:
        session: the session.
        window_calls: backward passes since its last update.

    Raises:
        SessionError: a window is open; its gradients are not part of the state.
    """
    _refuse_open_window("state_dict()", window_calls)
    optimizers = [o.state_dict() for o in session.optimizers]
    masters = session.masters.saved(optimizers)
    return {
        "policy": str(session.policy),
        "models": [_fp32_state(bare(model), masters) for model in session.models],
        "optimizers": optimizers,
        "schedulers": [s.state_dict() for s in session.schedulers],
        "scales": [s.state_dict() for s in session.scales],
        "updates": session.updates,
        "skipped": session.skipped,
    }


def load_state(session: Session, state: dict[str, Any], *, window_calls: int) -> None:
    """Load what ``state_of`` returned, without the counts.

    Args:
        session: the session that loads it.
        state: the saved state.
        window_calls: backward passes since the session's last update.

    Raises:
        SessionError: the state has other numbers of models, optimizers, schedulers or losses, or a window is open.
    """
    _refuse_open_window("load_state_dict()", window_calls)
    models = [bare(model) for model in session.models]
    parts = {part: getattr(session, part) for part in ("models", "optimizers", "schedulers", "scales")}
    checks.check_state(state, parts)
    for model, saved in zip(models, state["models"], strict=True):
        model.load_state_dict(saved)
    for part in ("optimizers", "schedulers", "scales"):
        for item, saved in zip(getattr(session, part), state[part], strict=True):
            item.load_state_dict(saved)
    session.masters.load(models, state["models"])


def _fp32_state(model: nn.Module, masters: dict[nn.Parameter, Tensor]) -> dict[str, Tensor]:
    """Return the model's state dict with the FP32 masters that it has: it loads into a model of any format."""
    state = dict(model.state_dict())
    named = model.named_parameters(remove_duplicate=False)
    return {**state, **{name: masters[parameter] for name, parameter in named if parameter in masters}}


def _refuse_open_window(call: str, window_calls: int) -> None:
    if window_calls:
        raise SessionError(
            f"{call} after {window_calls} backward passes of an open window",
            hint="call update() first: gradients of an open window are not saved",
        )


# --- What a session changes from update to update, besides its models, optimizers, schedulers and scales ------------------------

# One value: snapshots, captured graphs, guards and micro-batches read it and write it, and nothing else of a session that is private.


@dataclass(slots=True)
class SessionState:
    """The state of one session."""

    window: Window
    """The open window: its backward passes and their weights."""
    progress: Progress
    """Updates, skipped ones, the last norm."""
    schedules: Schedules
    """Which scheduler steps are still to be made."""
    position: Position
    """The passes over the data."""
    snapshots: Snapshots
    """The folder that it saves to, and the save in progress."""
    watch: NoWatch
    """The checks of the first windows; later ``NoWatch``."""
    ownership: Ownership
    """Whether the models' weights are still those that the session was built with."""


def open_window(session: Session) -> None:
    """Begin a window, without gradients."""
    session.state.window.open(session.accumulate, len(session.scales))
    if (
        session.accumulate > 1 or not session.state.progress.windows
    ):  # else every backward pass exchanges, as the last one did
        session.processes.expect(0)
