"""What a session consists of, and the part of it that training changes.

Snapshots, captured graphs, guards, micro-batches and checks of the loop take a ``SessionParts``, so they know no more of a session than
its parts, and ``Session`` itself is imported by none of them.

Counts of a training run: closed windows, skipped updates, the norm of the last gradients. Values computed on the device stay there.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeAlias
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mezzo.engine.casts.casting import Casting
from mezzo.engine.descriptions import host_value, optimizer_text, tensors_text
from mezzo.engine.gradients import parameters_of
from mezzo.engine.optimizers.master_weights import NoMasters
from mezzo.engine.processes.distributed import OneProcess
from mezzo.engine.scaling import Scale
from mezzo.engine.schedules import Schedules
from mezzo.engine.snapshots.background import Snapshots
from mezzo.engine.snapshots.position import Position
from mezzo.engine.window import Window
from mezzo.errors import SessionError
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


_LIVE: WeakSet[Ownership] = WeakSet()
_format_of = operator.attrgetter("dtype")


class Ownership:
    """The parameters with which a session was built, which no other session may train, and the models' formats and devices."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        """Take the parameters over from any session that has them.

        That is an error only if the other session continues to train: rerunning a notebook cell builds its session again.
        """
        self.lost = False
        """Whether another session has the model now."""
        self._parameters = {p for p in parameters_of(models) if p.requires_grad}  # a frozen part may serve several
        for other in list(_LIVE):
            if not self._parameters.isdisjoint(other._parameters):
                other.lost = True
        _LIVE.add(self)
        first = (next((p for p in model.parameters() if p.is_floating_point()), None) for model in models)
        self._places = [(p, p.device) for p in first if p is not None]
        """One parameter of each model: moving a model affects all of them."""
        self._all = parameters_of(models)
        self._formats = list(map(_format_of, self._all))

    def check_formats(self) -> None:
        """Refuse a model that was cast or moved since the session was built.

        Raises:
            SessionError: a model was cast or moved.
        """
        if list(map(_format_of, self._all)) != self._formats:  # some 30 ns for each
            one, before = next((p, f) for p, f in zip(self._all, self._formats, strict=True) if p.dtype is not f)
            raise SessionError(
                f"weights of shape {tuple(one.shape)} are {one.dtype}, and were {before} when the session was built",
                hint="remove model.half() and the like: the policy casts; evaluate a copy (copy.deepcopy(model).half())",
            )
        for parameter, device in self._places:
            if parameter.device != device:
                raise SessionError(
                    f"the model is on {parameter.device}, and was on {device} when the session was built",
                    hint="move the model first, then build optimizer and session",
                )


class Progress:
    """The counts of one session, and whether its loss scale is stuck at the floor."""

    def __init__(self, device: torch.device, *, several: bool) -> None:
        """Begin at zero.

        Args:
            device: the session's device.
            several: whether several processes train, which must notice a stuck scale at the same update.
        """
        self.windows = 0
        """Updates, skipped ones included."""
        self.skips = torch.zeros((), device=device)
        self.last: tuple[Tensor, Tensor | None] = torch.full((), math.nan, device=device), None
        """The norm of the last gradients as they were, and the factor that unscales and averages them (None for 1)."""
        self.floor = FloorWatch(device, several=several)

    @property
    def norm(self) -> Tensor:
        """The norm of the last update's gradients, unscaled and before clipping; multiplied only if a loop reads it."""
        norm, factor = self.last
        if factor is not None:
            norm = norm * factor
            self.last = norm, None
        return norm

    def measured(self, norm: Tensor) -> None:
        """Note the norm of the update's gradients, unscaled and before clipping."""
        self.last = norm, None

    def restore(self, *, updates: int, skipped: int) -> None:
        """Continue after so many updates that were made and skipped."""
        self.windows = updates + skipped
        self.skips.fill_(skipped)

    def in_place(self) -> Iterable[Tensor]:
        """Return the tensors that an update changes in place."""
        return self.skips, *self.floor.in_place()


# --- Notice without waiting that the loss scale is stuck at its floor -----------------------------------------------------------

# A flag on the device is set when gradients overflow at the floor. It is copied to the host without waiting, and the host
# reads the last copy that arrived: on a GPU perhaps an update or two late, which does no harm, since a scale at its floor
# stays there.
#
# Several processes must see the flag at the same update: otherwise one would raise and the others wait for it forever. So with
# several, it is copied only at every 64th update and read 32 updates later, when it has long arrived.

SEVERAL_EVERY = 64
"""Updates between two reads if several processes must see the same flag."""


class FloorWatch:
    """A flag on the device, and its last known value on the host."""

    def __init__(self, device: torch.device, *, several: bool = False) -> None:
        """Begin with the flag cleared.

        Args:
            device: the flag's device.
            several: whether several processes must see it at the same update. On a CPU they always do.
        """
        self._every, self._updates = (SEVERAL_EVERY if several and device.type != "cpu" else 1), 0
        self._sent = torch.cuda.Event() if self._every > 1 and device.type == "cuda" else None
        self._stuck = torch.zeros((), device=device)
        pinned = torch.zeros((), pin_memory=device.type == "cuda")
        self._arrived, self._value = pinned, pinned.numpy()

    def note(self, flags: Iterable[tuple[Scale, Tensor]]) -> None:
        """Set the flag if a scale is at its floor and its update overflowed."""
        for scale, found_inf in flags:
            self._stuck += found_inf * scale.floor_flag()
        self._updates += 1
        if self._updates % self._every == 0:
            # On devices other than CUDA nothing reports when an asynchronous copy has arrived.
            self._arrived.copy_(self._stuck, non_blocking=self._stuck.is_cuda)
            if self._sent is not None:
                self._sent.record(torch.cuda.current_stream(self._stuck.device))

    def in_place(self) -> Iterable[Tensor]:
        """Return the tensors that an update changes in place."""
        return self._stuck, self._arrived

    def reached(self) -> bool:
        """Return whether the flag was set in the copy that has arrived.

        Clear the flag, so that a caller who continues is warned only of a new overflow.
        """
        if self._updates % self._every != self._every // 2:
            return False
        if self._sent is not None:
            self._sent.synchronize()  # copied 32 updates ago: finished, unless the host runs that far ahead
        if not self._value > 0:
            return False
        self._stuck.zero_()
        self._arrived.zero_()
        return True
