"""Watch a script's recorded numbers for alarms, and stop the script or return it to a snapshot if requested.

Only numbers that the recorder keeps anyway are read, and none from the device. On a CPU they are read after every step, or after every
32nd in the steady state, in which a step records little. On a GPU they are sent to the host every 32 steps without waiting, and are
read once they have arrived, so an alarm comes up to about 64 steps late. In several processes all act on an alarm of any of them, after
the same step: about once a second they exchange their alarms (``engine.processes.agreement``).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from mezzo.engine.alarms import Alarms, UpdateNumbers
from mezzo.engine.processes.agreement import Agreement, are_several
from mezzo.errors import GuardError
from mezzo.launch.request import GuardRequest
from mezzo.launch.torch.open_update import OpenUpdate
from mezzo.launch.torch.precision import ScriptPrecision
from mezzo.launch.torch.steady_state import SteadyState
from mezzo.measure.steps import STEPS_BETWEEN_NORMS
from mezzo.observe.settings import StopScript
from mezzo.records import Alarm, Guardrails, Rewind, Steps

_STEADY_EVERY = _SEND_EVERY = STEPS_BETWEEN_NORMS
"""Steps between inspections: at these steps a norm has just sorted the steps before it into the recorder's columns."""
_MAX_STEPS_TO_RETURN = 50
"""Steps after an alarm within which a loop around them must begin a turn; else the run cannot return to a snapshot and is stopped."""


class ScriptGuard:
    """The guardrails of one run."""

    def __init__(
        self,
        precision: ScriptPrecision,
        update: OpenUpdate,
        steady_state: SteadyState,
        request: GuardRequest,
        *,
        on_stop: Callable[[], object],
    ) -> None:
        """Watch a run; ``on_stop`` is called before the script is stopped, while its model still exists."""
        self._update, self._steady_state, self._request, self._on_stop = update, steady_state, request, on_stop
        policy = precision.effective
        dynamic = policy is not None and policy.loss_scale == "dynamic"
        self._alarms = Alarms(policy.min_scale if policy is not None and dynamic else None)
        self._next = 0
        """Number of steps inspected so far."""
        self.due = 0
        """Number of closed steps at which the next inspection is due: a steady run compares it instead of making a call."""
        self.noticed = Guardrails(action=request.action)
        self.pending: Alarm | None = None
        """The alarm because of which the run will return to a snapshot, at the next turn of its loop."""
        self._pending_at = 0
        self.stopped: GuardError | None = None
        """Why the script was stopped; None if it was not."""
        acts = request.action != "note"
        self._agreement = Agreement() if request.together and acts else None
        self._unshared: Alarm | None = None
        """An alarm of this process that the other processes do not know of yet."""
        self._run_is_over = False

    def check(self) -> None:
        """Inspect the steps closed since the last call.

        Raises:
            StopScript: an alarm stops the run.
        """
        recorder, closed = self._update.recorder, self._update.recorder.num_closed
        if self._steady_state.optimizer() is None or closed >= self.due:
            self.due = closed - closed % _STEADY_EVERY + _STEADY_EVERY
            if closed % _SEND_EVERY == 0:
                recorder.send_numbers()
            self._inspect(recorder.seen_from(self._next))
            if self._agreement is not None:
                self._agree(self._agreement, closed)
        if self.pending is not None and closed > self._pending_at + _MAX_STEPS_TO_RETURN:
            why = "no loop around the updates began a turn since, so there was no point at which to return"
            self.end(f"{self.pending.kind}: {self.pending.evidence}; {why}")
        if self.stopped is not None:
            self._on_stop()
            raise StopScript

    def finish(self, steps: Steps) -> None:
        """Inspect the steps that ``check`` has not inspected; ``steps`` are all steps of the run."""
        self._run_is_over = True
        if self.stopped is None:
            self._inspect(seen_in(steps, self._next))

    @property
    def continues_at_floor(self) -> bool:
        """Whether the run survives an overflow at its loss scale's floor, because it will return to a snapshot."""
        return self.pending is not None or (self._unshared is not None and self._request.action == "rewind")

    def restart(self) -> None:
        """Watch again from the first step: the steps so far did not belong to the run."""
        self._next = self.due = 0
        self._unshared = None
        self._alarms.forget()
        if self._agreement is not None:
            self._agreement.restart()

    def end(self, why: str) -> None:
        """Stop the script after the next step, for the reason ``why``."""
        self.due = 0
        self.stopped = GuardError(
            f"the run was stopped by its guard: {why}",
            hint="the record names the evidence; see docs/guardrails.md for what each alarm means",
        )
        self.noticed = self.noticed.model_copy(update={"stopped": why})

    def returned(self, rewind: Rewind) -> None:
        """Record a return to a snapshot, and watch from there."""
        changed = ", ".join(f"{change.what} {change.value}" for change in rewind.changes)
        _say(f"guard: back to {rewind.snapshot}, after {rewind.updates} updates; {changed}")
        self.noticed = self.noticed.model_copy(update={"rewinds": [*self.noticed.rewinds, rewind]})
        self.pending = None
        self._next = self._update.recorder.num_closed
        self._unshared = None
        self._alarms.forget()

    @property
    def rewinds_left(self) -> int:
        """How often the run may still return to a snapshot."""
        return self._request.rewinds - len(self.noticed.rewinds)

    def _inspect(self, new: Sequence[UpdateNumbers]) -> None:
        if new:
            self._next = new[-1].step
        for alarm in self._alarms.inspect(new):
            self._raised(alarm)
            if self.stopped is not None:
                return

    def _raised(self, alarm: Alarm) -> None:
        self._note(alarm)
        if self._agreement is None or self._run_is_over:
            self._act(alarm)
        elif self._unshared is None and self.pending is None:
            self._unshared = alarm

    def _note(self, alarm: Alarm) -> None:
        alarm = alarm.model_copy(update={"command": self._request.commands.get(alarm.kind, "")})
        self.noticed = self.noticed.model_copy(update={"alarms": [*self.noticed.alarms, alarm]})
        _say(f"guard: {alarm.kind}, step {alarm.step}: {alarm.evidence}")
        if alarm.command:
            _say(f"guard: next, type: {alarm.command}")

    def _act(self, alarm: Alarm) -> None:
        if self._request.action != "note" and self._request.together is False and are_several():
            why = f"{self._request.action} in several processes needs a launcher"
            _say(f"guard: {why}: the alarm is only noted")
            self.noticed = self.noticed.model_copy(update={"only_noted": why})
        elif self._request.action == "stop":
            self.end(f"{alarm.kind}: {alarm.evidence}")
        elif self._request.action == "rewind" and self.pending is None:
            if self.rewinds_left > 0:
                self.pending, self._pending_at = alarm, self._update.recorder.num_closed
            else:
                self.end(f"{alarm.kind} after {len(self.noticed.rewinds)} returns to a snapshot: {alarm.evidence}")

    def _agree(self, agreement: Agreement, closed: int) -> None:
        """Act on an alarm of any process in all of them, after the same step."""
        if closed >= agreement.next:
            own, self._unshared = self._unshared, None
            if not are_several():  # the script's processes train independently
                agreement.wait_until(closed + 1)
                if own is not None:
                    self._act(own)
            elif (first := agreement.any_of(closed, None if own is None else own.model_dump())) is not None:
                rank, alarm = first[0], Alarm.model_validate(first[1])
                if own is None:
                    alarm = alarm.model_copy(update={"evidence": f"rank {rank}: {alarm.evidence}"})
                    self._note(alarm)
                self._act(alarm)
        self.due = min(self.due, agreement.next)


def seen_in(steps: Steps, first: int) -> list[UpdateNumbers]:
    """Return the updates of a record from number ``first`` on; the first update has number 0."""
    seen: list[UpdateNumbers] = []
    for place in range(first, len(steps)):
        loss, norm = steps.loss[place], steps.grad_norm[place]
        scale = steps.loss_scale[place] if steps.loss_scale else None
        measured = norm == norm  # a record has NaN for what was not measured
        seen.append(UpdateNumbers(place + 1, loss, norm if measured else None, steps.skipped[place], scale))
    return seen


def _say(text: str) -> None:
    print(f"mezzo: {text}", file=sys.stderr, flush=True)
