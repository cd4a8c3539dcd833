"""The guard of a session: it inspects numbers that the session computes anyway, and never waits for the device.

Several processes exchange alarms about once a second, and all act on an alarm of any of them after the same update.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from mezzo.engine.checks import PrecisionWarning
from mezzo.engine.guardrails.alarms import Alarms, UpdateNumbers
from mezzo.engine.guardrails.remedies import apply_remedy, newest_good, unchanged_policy
from mezzo.engine.processes.agreement import Agreement
from mezzo.engine.snapshots.contents import set_contents
from mezzo.engine.snapshots.folder import SavedSnapshot
from mezzo.engine.snapshots.of_ranks import CompleteSnapshot, contents_for_rank, folder_of
from mezzo.engine.snapshots.randomness import random_states
from mezzo.engine.state import SessionParts
from mezzo.errors import GuardError, SessionError
from mezzo.records import Alarm, GuardAction, Guardrails, Rewind

MOST_REWINDS = 3
"""The most times that a training run returns to a snapshot."""
_ACTIONS = ("note", "stop", "rewind")
_KEEPS_POLICY = unchanged_policy("a session's weights and optimizers are built for its policy")


class SessionGuard:
    """The alarms of one session, and its reactions."""

    def __init__(self, session: SessionParts, action: GuardAction) -> None:
        """Create the guard.

        Raises:
            SessionError: ``action`` is not one of the actions.
        """
        if action not in _ACTIONS:
            raise SessionError(f"guard={action!r}; allowed: {', '.join(_ACTIONS)}, or None", hint='pass guard="stop"')
        self._session, self._action = session, action
        self._alarms = Alarms(session.policy.min_scale if session.policy.loss_scale == "dynamic" else None)
        self._arrivals = Arrivals(session.device, columns=4)
        self._loss: Tensor | None = None
        self.noticed = Guardrails(action=action)
        several, group = session.processes.several, session.processes.group
        self._agreement = Agreement(within=group) if several and action != "note" else None
        self._unshared: Alarm | None = None
        """An alarm of this process that the others have not received yet."""

    def backward(self, loss: Tensor, share: float) -> None:
        """Add a micro-batch's loss to the window's."""
        part = loss.detach() if share == 1.0 else loss.detach() * share
        self._loss = part if self._loss is None else self._loss + part

    def updated(self, skipped: Tensor | bool) -> None:
        """Inspect a finished update.

        Raises:
            GuardError: an alarm ends the training.
        """
        session = self._session
        scale = session.scales[0].on_device() if session.scales[0].checks else None
        loss, self._loss = self._loss, None
        self._arrivals.add(session.state.progress.windows, [loss, session.state.progress.norm, skipped, scale])
        arrived = [
            UpdateNumbers(number, seen_loss, norm, bool(flag), seen_scale)
            for number, (seen_loss, norm, flag, seen_scale) in self._arrivals.arrived()
        ]
        for alarm in self._alarms.inspect(arrived):
            self._note(alarm)
            if self._agreement is not None:
                self._unshared = self._unshared or alarm
                continue
            self._act(alarm)
            if self._action == "rewind":  # the other updates were made before the return
                break
        if self._agreement is not None and session.state.progress.windows >= self._agreement.next:
            self._agree(self._agreement)

    def _agree(self, agreement: Agreement) -> None:
        """Act on an alarm of any process in all of them, after the same update."""
        unshared, self._unshared = self._unshared, None
        reported = agreement.any_of(
            self._session.state.progress.windows, None if unshared is None else unshared.model_dump()
        )
        if reported is None:
            return
        rank, alarm = reported[0], Alarm.model_validate(reported[1])
        if unshared is None:
            alarm = alarm.model_copy(update={"evidence": f"rank {rank}: {alarm.evidence}"})
            self._note(alarm)
        self._act(alarm)

    def _note(self, alarm: Alarm) -> None:
        self.noticed = self.noticed.model_copy(update={"alarms": [*self.noticed.alarms, alarm]})
        warnings.warn(f"guard: {_text(alarm)}", PrecisionWarning, stacklevel=5)

    def _act(self, alarm: Alarm) -> None:
        text = _text(alarm)
        if self._action == "stop":
            raise self._stopped(text)
        if self._action == "rewind":
            self._rewind(alarm, text)

    def _stopped(self, why: str) -> GuardError:
        self.noticed = self.noticed.model_copy(update={"stopped": why})
        return GuardError(
            f"the training was stopped by its guard: {why}",
            hint="run the script under mezzo diagnose; docs/guardrails.md says what each alarm means",
        )

    def _rewind(self, alarm: Alarm, text: str) -> None:
        session, times = self._session, len(self.noticed.rewinds) + 1
        if times > MOST_REWINDS:
            raise self._stopped(f"{text}, after {MOST_REWINDS} returns to a snapshot")
        snapshots = session.state.snapshots
        if snapshots.saving is not None:
            snapshots.saving.wait()
        good, agreement = self._newest_good(alarm), self._agreement
        if agreement is not None and not agreement.all_equal([0, 0] if good is None else [*good[0][:2]]):
            raise self._stopped(f"{text}; the processes have no snapshot in common to return to")
        if good is None:
            raise self._stopped(f"{text}; there is no snapshot from before update {alarm.since} to return to")
        saved, contents = good
        position, random = session.state.position.as_it_is(), random_states()
        in_all = (lambda here: here) if agreement is None else agreement.in_all
        set_contents(session, {**contents, "random": random}, in_all=in_all)
        snapshots.count_from_now()  # a snapshot saved now would copy that one, and would count as progress
        session.state.position.set_back(position)  # the data is not rewound: other batches follow
        changes, _ = apply_remedy(
            alarm.kind,
            [earlier for earlier in self.noticed.rewinds if earlier.snapshot >= saved.path.name],
            optimizers=session.optimizers,
            schedulers=session.schedulers,
            scales=session.scales,
            fall_back=lambda: _KEEPS_POLICY,
        )
        if not changes:
            raise self._stopped(f"{text}; there is nothing to change that would help")
        rewind = Rewind(
            alarm=alarm.kind, step=alarm.step, snapshot=saved.path.name, updates=saved.updates, changes=changes
        )
        self.noticed = self.noticed.model_copy(update={"rewinds": [*self.noticed.rewinds, rewind]})
        self._alarms.forget()
        self._arrivals.forget()
        if agreement is not None:
            agreement.restart()

    def _newest_good(self, alarm: Alarm) -> tuple[SavedSnapshot, Any] | None:
        folder, agreement = self._session.state.snapshots.folder, self._agreement
        if folder is None:
            return None
        rank, size = (0, 1) if agreement is None else (agreement.rank, agreement.size)
        folders = [folder.path] if size == 1 else [folder_of(folder.path.parent, n, size) for n in range(size)]

        def read(saved: SavedSnapshot) -> Any:
            paths = [place / saved.path.name for place in folders]
            return contents_for_rank(CompleteSnapshot(saved.number, paths), rank, size)

        return newest_good(folder.path, before=alarm.since, weights=lambda c: c["session"]["models"], read=read)


def _text(alarm: Alarm) -> str:
    return f"{alarm.kind}, update {alarm.step}: {alarm.evidence}"


# --- Copy the numbers of a training run to the host, which never waits for them -------------------------------------------------

# On a CPU they are available at once. On a CUDA device a buffer collects 32 updates; it is copied to pinned memory, and read after an event
# shows that the copy has arrived. Other devices have no such event, so nothing is copied.

_ROWS = 32

Row = tuple[int, tuple[float | None, ...]]
"""The number of a row, and its values; None for a value that was not added."""


class Arrivals:
    """Rows of numbers, in order."""

    def __init__(self, device: torch.device, columns: int) -> None:
        self._device = device
        self._ready: list[Row] = []
        self._open: list[tuple[int, list[bool]]] = []
        self._sent: tuple[list[tuple[int, list[bool]]], Tensor, torch.cuda.Event] | None = None
        self._rows = torch.zeros(_ROWS, columns, device=device) if device.type == "cuda" else None
        self._cells = [] if self._rows is None else [row.unbind() for row in self._rows.unbind()]

    def add(self, number: int, values: Sequence[Tensor | float | None]) -> None:
        """Add a row, without waiting for the device."""
        if self._device.type == "cpu":
            self._ready.append((number, tuple(None if value is None else float(value) for value in values)))
            return
        if self._rows is None:
            return
        for cell, value in zip(self._cells[len(self._open)], values, strict=True):
            if isinstance(value, Tensor):
                cell.copy_(value.detach())
            elif value is not None:
                cell.fill_(value)
        self._open.append((number, [value is not None for value in values]))
        if len(self._open) == _ROWS:
            self._send(self._rows)

    def _send(self, rows: Tensor) -> None:
        self._receive()
        if self._sent is not None:  # the last copy has not arrived: the host runs far ahead, so these rows are dropped
            self._open = []
            return
        pinned = torch.empty(rows.shape, pin_memory=True).copy_(rows, non_blocking=True)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        self._sent, self._open = (self._open, pinned, event), []

    def _receive(self) -> None:
        if self._sent is None or not self._sent[2].query():
            return
        (sent, pinned, _), self._sent = self._sent, None
        for (number, has), values in zip(sent, pinned.tolist(), strict=True):
            self._ready.append((number, tuple(v if known else None for v, known in zip(values, has, strict=True))))

    def arrived(self) -> Iterator[Row]:
        """Yield the rows that have arrived since the last call."""
        self._receive()
        ready, self._ready = self._ready, []
        yield from ready

    def forget(self) -> None:
        """Drop all rows that were not read yet."""
        self._ready, self._open, self._sent = [], [], None
