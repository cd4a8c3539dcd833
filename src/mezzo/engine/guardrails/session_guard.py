"""The guard of a session: it inspects numbers that the session computes anyway, and never waits for the device.

Several processes exchange alarms about once a second, and all act on an alarm of any of them after the same update.
"""

from __future__ import annotations

import time
import warnings
from typing import TYPE_CHECKING, Any

from torch import Tensor

from mezzo.engine.checks import PrecisionWarning
from mezzo.engine.guardrails.alarms import Alarms, Seen
from mezzo.engine.guardrails.arrivals import Arrivals
from mezzo.engine.guardrails.good_snapshots import newest_good
from mezzo.engine.guardrails.remedies import POLICY, UNCHANGED, apply_remedy
from mezzo.engine.processes.agreement import Agreement
from mezzo.engine.snapshots.contents import set_contents
from mezzo.engine.snapshots.folder import SavedSnapshot
from mezzo.engine.snapshots.of_ranks import OfAll, folder_of, read_together
from mezzo.engine.snapshots.randomness import random_states
from mezzo.errors import GuardError, SessionError
from mezzo.records import Alarm, GuardAction, Guardrails, Reason, Rewind

if TYPE_CHECKING:
    from mezzo.engine.session import Session

MOST_REWINDS = 3
"""Most returns of a training to a snapshot."""
_ACTIONS = ("note", "stop", "rewind")
_KEEPS_POLICY = Reason(
    what=POLICY, value=UNCHANGED, reason="a session's weights and optimizers are made for its policy"
)


class SessionGuard:
    """The alarms of one session, and its reactions."""

    def __init__(self, session: Session, action: GuardAction) -> None:
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
        self._together = Agreement(within=group) if several and action != "note" else None
        self._wish: Alarm | None = None
        """An alarm of this process that the others do not know yet."""

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
        self._arrivals.add(session._progress.windows, [loss, session._progress.norm, skipped, scale])
        arrived = [
            Seen(number, seen_loss, norm, bool(flag), seen_scale)
            for number, (seen_loss, norm, flag, seen_scale) in self._arrivals.arrived()
        ]
        for alarm in self._alarms.see(arrived):
            self._note(alarm)
            if self._together is not None:
                self._wish = self._wish or alarm
                continue
            self._act(alarm)
            if self._action == "rewind":  # the other updates were made before the return
                break
        if self._together is not None and session._progress.windows >= self._together.next:
            self._agree(self._together)

    def _agree(self, together: Agreement) -> None:
        """Act on an alarm of any process in all of them, after the same update."""
        wish, self._wish = self._wish, None
        found = together.any_of(self._session._progress.windows, None if wish is None else wish.model_dump())
        if found is None:
            return
        rank, alarm = found[0], Alarm.model_validate(found[1])
        if wish is None:
            alarm = alarm.model_copy(update={"evidence": f"rank {rank}: {alarm.evidence}"})
            self._note(alarm)
        self._act(alarm)

    def _note(self, alarm: Alarm) -> None:
        self.noticed = self.noticed.model_copy(update={"alarms": [*self.noticed.alarms, alarm]})
        warnings.warn(f"guard: {_text(alarm)}", PrecisionWarning, stacklevel=5)

    def _act(self, alarm: Alarm) -> None:
        text = _text(alarm)
        if self._action == "stop":
            raise self._ended(text)
        if self._action == "rewind":
            self._return(alarm, text)

    def _ended(self, why: str) -> GuardError:
        self.noticed = self.noticed.model_copy(update={"stopped": why})
        return GuardError(
            f"the training was stopped by its guard: {why}",
            hint="run the script under mezzo diagnose; docs/guardrails.md says what each alarm means",
        )

    def _return(self, alarm: Alarm, text: str) -> None:
        session, times = self._session, len(self.noticed.rewinds) + 1
        if times > MOST_REWINDS:
            raise self._ended(f"{text}, after {MOST_REWINDS} returns to a snapshot")
        own = session._snapshots
        if own.saving is not None:
            own.saving.wait()
        good, together = self._newest_good(alarm), self._together
        if together is not None and not together.all_equal([0, 0] if good is None else [*good[0][:2]]):
            raise self._ended(f"{text}; the processes have no snapshot in common to return to")
        if good is None:
            raise self._ended(f"{text}; there is no snapshot from before update {alarm.since} to return to")
        saved, contents = good
        position, random = dict(vars(session._position)), random_states()
        in_all = (lambda here: here) if together is None else together.in_all
        set_contents(session, {**contents, "random": random}, in_all=in_all)
        own.last_s = time.monotonic()  # saved now, a copy of that snapshot would count as progress
        vars(session._position).update(position)  # the data does not go back: other batches follow
        changes = apply_remedy(
            alarm.kind,
            [one for one in self.noticed.rewinds if one.snapshot >= saved.path.name],
            optimizers=session.optimizers,
            schedulers=session.schedulers,
            scales=session.scales,
            fall_back=lambda: _KEEPS_POLICY,
        )
        if not changes:
            raise self._ended(f"{text}; there is nothing to change that would help")
        rewind = Rewind(
            alarm=alarm.kind, step=alarm.step, snapshot=saved.path.name, updates=saved.updates, changes=changes
        )
        self.noticed = self.noticed.model_copy(update={"rewinds": [*self.noticed.rewinds, rewind]})
        self._alarms.forget()
        self._arrivals.forget()
        if together is not None:
            together.again()

    def _newest_good(self, alarm: Alarm) -> tuple[SavedSnapshot, Any] | None:
        folder, together = self._session._snapshots.folder, self._together
        if folder is None:
            return None
        rank, size = (0, 1) if together is None else (together.rank, together.size)
        places = [folder.path] if size == 1 else [folder_of(folder.path.parent, one, size) for one in range(size)]

        def read(saved: SavedSnapshot) -> Any:
            return read_together(OfAll(saved.number, [place / saved.path.name for place in places]), rank, size)

        return newest_good(folder.path, before=alarm.since, weights=lambda c: c["session"]["models"], read=read)


def _text(alarm: Alarm) -> str:
    return f"{alarm.kind}, update {alarm.step}: {alarm.evidence}"
