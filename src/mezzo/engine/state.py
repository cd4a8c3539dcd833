"""What a session consists of, and the part of it that training changes.

Snapshots, captured graphs, guards, micro-batches and checks of the loop take a ``SessionParts``, so they know no more of a session than
its parts, and ``Session`` itself is imported by none of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mezzo.engine.casts.casting import Casting
from mezzo.engine.descriptions import host_value, optimizer_text, tensors_text
from mezzo.engine.optimizers.master_weights import NoMasters
from mezzo.engine.ownership import Ownership
from mezzo.engine.processes.distributed import OneProcess
from mezzo.engine.progress import Progress
from mezzo.engine.scaling import Scale
from mezzo.engine.schedules import Schedules
from mezzo.engine.snapshots.position import Position
from mezzo.engine.snapshots.saves import Snapshots
from mezzo.engine.window import Window
from mezzo.policy import Policy

Region: TypeAlias = AbstractContextManager[Any]


class NoWatch:
    """No checks, for all windows after the first ones."""

    def region(self, region: Region) -> Region:
        """Return the session's region, with its checks."""
        return region

    def before_backward(self, loss: Tensor, *, opens: bool) -> None:
        """Check the state before a backward pass; ``opens`` says whether it is its window's first."""

    def after_backward(self) -> None:
        """Record the state after a backward pass."""

    def gradients_moved(self) -> None:
        """Forget the gradients of the last backward pass: the session set them aside, dropped them or put them back."""

    def before_update(self) -> None:
        """Check the gradients before an update."""


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

    def end_checks(self) -> None:
        """Check no more windows."""
        self.watch = NoWatch()


class SessionParts:
    """A session's settings and what it trains, without the methods that train."""

    policy: Policy
    models: list[nn.Module]
    optimizers: list[Optimizer]
    schedulers: list[Any]
    accumulate: int
    clip_norm: float | None
    clip_value: float | None
    device: torch.device
    processes: OneProcess
    casting: Casting
    scales: list[Scale]
    masters: NoMasters
    state: SessionState
    _is_built = False

    @property
    def updates(self) -> int:
        """The number of updates applied, not counting skipped ones; waits for the device."""
        return self.state.progress.windows - self.skipped

    @property
    def skipped(self) -> int:
        """The number of updates skipped because a gradient was not finite; waits for the device."""
        return int(self.state.progress.skips)

    def __repr__(self) -> str:
        """Return a session's models, optimizers, window and progress."""
        if not self._is_built:  # a debugger shows it while its constructor runs
            return f"{type(self).__name__}()"
        lines = [
            f"{type(self).__name__}(policy={str(self.policy)!r}) on {self.device}",
            f"  trains   {_models(self.models)}",
            f"  with     {_optimizers(self.optimizers, self.schedulers)}",
            f"  window   {_window(self)}",
            f"  so far   {_so_far(self)}",
        ]
        return "\n".join(lines)


def _models(models: Sequence[nn.Module]) -> str:
    names = ", ".join(type(model).__name__ for model in models)
    parameters = dict.fromkeys(p for model in models for p in model.parameters())
    return f"{names}: {tensors_text(parameters)}"


def _optimizers(optimizers: Sequence[Optimizer], schedulers: Sequence[Any]) -> str:
    return ", ".join([optimizer_text(one) for one in optimizers] + [type(one).__name__ for one in schedulers])


def _window(session: SessionParts) -> str:
    count = session.accumulate
    words = ["1 micro-batch" if count == 1 else f"{count} micro-batches, {session.state.window.calls} of them done"]
    limits = {"clip_norm": session.clip_norm, "clip_value": session.clip_value}
    return ", ".join(words + [f"{name}={limit:g}" for name, limit in limits.items() if limit is not None])


def _so_far(session: SessionParts) -> str:
    closed, skipped = session.state.progress.windows, host_value(session.state.progress.skips)
    if skipped is None:
        return f"{closed} updates, skipped ones included; .skipped, .loss_scale and .grad_norm are on {session.device}: reading one waits"
    scales = ", ".join(f"loss scale {scale.value():g}" if scale.checks else "no loss scale" for scale in session.scales)
    return f"{closed - int(skipped)} updates, {int(skipped)} skipped; {scales}"


def open_window(session: SessionParts) -> None:
    """Begin a window, without gradients."""
    session.state.window.open(session.accumulate, len(session.scales))
    if session.accumulate > 1 or not session.state.progress.windows:  # else every pass exchanges, as the last one did
        session.processes.expect(0)
