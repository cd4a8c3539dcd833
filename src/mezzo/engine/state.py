"""What a session consists of, and the part of it that training changes.

Snapshots, captured graphs, guards, micro-batches and checks of the loop take a ``SessionParts``, so they know no more of a session than
its parts, and ``Session`` itself is imported by none of them.
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
from mezzo.engine.session_errors import warn
from mezzo.engine.snapshots.background import Snapshots
from mezzo.engine.snapshots.position import Position
from mezzo.engine.window import Window
from mezzo.errors import SessionError
from mezzo.policy import Policy

OpenRegion: TypeAlias = AbstractContextManager[Any]


class NoLoopChecks:
    """No checks, for all windows after the first ones."""

    def region(self, region: OpenRegion) -> OpenRegion:
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
    loop_checks: NoLoopChecks
    """The checks of the first windows; later ``NoLoopChecks``."""
    ownership: Ownership
    """Whether the models' weights are still those that the session was built with."""

    def end_checks(self) -> None:
        """Check no more windows."""
        self.loop_checks = NoLoopChecks()


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
        return self.state.progress.updates_closed - self.skipped

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
    closed, skipped = session.state.progress.updates_closed, host_value(session.state.progress.skips)
    if skipped is None:
        return f"{closed} updates, skipped ones included; .skipped, .loss_scale and .grad_norm are on {session.device}: reading one waits"
    scales = ", ".join(
        f"loss scale {scale.value():g}" if scale.skips_overflows else "no loss scale" for scale in session.scales
    )
    return f"{closed - int(skipped)} updates, {int(skipped)} skipped; {scales}"


def open_window(session: SessionParts) -> None:
    """Begin a window, without gradients."""
    session.state.window.open(session.accumulate, len(session.scales))
    if (
        session.accumulate > 1 or not session.state.progress.updates_closed
    ):  # else every pass exchanges, as the last one did
        session.processes.expect(0)


def close_window(session: SessionParts) -> None:
    """Count the update that closes a window, and begin the next one."""
    session.state.progress.updates_closed += 1
    open_window(session)


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
        self.updates_closed = 0
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

    def measured(self, norm: Tensor, factor: Tensor | None = None) -> None:
        """Note the norm of the update's gradients before clipping, and the factor that unscales it; None for 1."""
        self.last = norm, factor

    def note(self, skips: Tensor | int, flags: Sequence[tuple[Scale, Tensor]]) -> None:
        """Count an update as skipped if ``skips`` is above 0; ``flags`` say which scales' gradients overflowed."""
        self.skips += skips
        if flags:
            self.floor.note(flags)

    def restore(self, *, updates: int, skipped: int) -> None:
        """Continue after so many updates that were made and skipped."""
        self.updates_closed = updates + skipped
        self.skips.fill_(skipped)

    def in_place(self) -> Iterable[Tensor]:
        """Return the tensors that an update changes in place."""
        return self.skips, *self.floor.in_place()


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


class Schedules:
    """Learning rate schedulers that step after updates of their optimizers, and not after skipped ones.

    Only the device knows whether an update was skipped. On a CPU reading the flag costs nothing. On other devices the flag is copied to
    the host when the update is enqueued, and the schedulers step at the start of the next update, when it has long arrived: each
    update has the right learning rate, and ``scheduler.get_last_lr()`` shows the last update's until the next begins. The host
    waits only if it runs a whole update ahead of the device.
    """

    def __init__(self, schedulers: Sequence[Any], device: torch.device) -> None:
        self._schedulers = schedulers
        self._device = device
        self._flag = torch.zeros((), pin_memory=device.type == "cuda")
        self._sent = torch.cuda.Event() if device.type == "cuda" else None
        self._pending: list[Any] | None = None
        """The optimizers of an update of which the host does not know yet whether it was skipped."""
        self._counts: dict[int, int] = {}
        """Each scheduler's number of steps after the session last stepped it, by id."""
        self._stepped_elsewhere = 0
        """How many updates in a row came after other code had stepped a scheduler."""
        self._warned = False
        self._rates: tuple[int, list[float]] = (-2, [])
        """The window of the last update that was skipped, and its learning rates."""

    def follow(self, optimizers: list[Any], skipped: Tensor | bool) -> None:
        """Register an update of ``optimizers``; ``skipped`` is above 0 if it was skipped."""
        if isinstance(skipped, bool) or self._device.type == "cpu":
            self._step(optimizers, skipped=bool(skipped))
            return
        # Only CUDA has an event to wait for: on other devices an asynchronous copy might be read too early.
        self._flag.copy_(skipped, non_blocking=self._sent is not None)
        if self._sent is not None:
            self._sent.record(torch.cuda.current_stream(self._device))
        self._pending = optimizers

    def settle(self) -> None:
        """Step the schedulers for the last update, if that is still pending."""
        if self._pending is None:
            return
        if self._sent is not None:
            self._sent.synchronize()
        optimizers, self._pending = self._pending, None
        self._step(optimizers, skipped=bool(self._flag))

    def _step(self, optimizers: list[Any], *, skipped: bool) -> None:
        self._check()
        for scheduler in self._schedulers:
            if not skipped and getattr(scheduler, "optimizer", optimizers[0]) in optimizers:
                scheduler.step()
        self._counts = {id(scheduler): _count(scheduler) for scheduler in self._schedulers}

    def _check(self) -> None:
        """Warn of schedulers that the script also steps; loading a state moves one as well, but only once."""
        moved = [s for s in self._schedulers if _count(s) > self._counts.get(id(s), math.inf)]
        self._stepped_elsewhere = self._stepped_elsewhere + 1 if moved else 0
        if self._stepped_elsewhere == 2:
            warn(
                f"{type(moved[0]).__name__} is stepped by the script and by the session, so it runs ahead; remove scheduler.step(), "
                "or leave scheduler= out of Session(...)"
            )

    def skipped(self, optimizers: list[Any], *, window: int) -> None:
        """Warn of a learning rate that changes between two skipped updates: the script steps a scheduler itself."""
        before = self._rates
        rates = [float(group["lr"]) for o in optimizers for group in o.param_groups if "lr" in group]
        moved = before[0] == window - 1 and before[1] != rates and len(before[1]) == len(rates)
        if moved and not self._warned:
            self._warned = True
            warn(
                "the learning rate changed from one skipped update to the next: a scheduler is stepped where nothing was updated. "
                "Pass it as Session(..., scheduler=scheduler), which makes it wait, and remove scheduler.step()"
            )
        self._rates = window, rates


def _count(scheduler: Any) -> int:
    return int(getattr(scheduler, "_step_count", getattr(scheduler, "last_epoch", 0)))
