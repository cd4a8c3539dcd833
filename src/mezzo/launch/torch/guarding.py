"""Watch a script's recorded numbers for alarms, and stop it or return it to a snapshot, if that was asked for.

Only what the recorder keeps anyway is read, and nothing from the device: on a CPU the numbers' memory itself, after every step; in the
steady state, in which a step records little, after every 32nd. On a GPU the numbers are sent to the host every 32 steps without
waiting, and are read once they have arrived, so that an alarm comes up to about 64 steps late. In several processes all act on an
alarm of any of them, after the same step: about once a second they exchange their alarms (``engine.processes.agreement``).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from mezzo.engine.guardrails.alarms import Alarms, UpdateNumbers
from mezzo.engine.processes.agreement import Agreement, are_several
from mezzo.errors import GuardError
from mezzo.launch.request_parts import GuardRequest
from mezzo.launch.torch.state import Run
from mezzo.measure.steps import NORMS_APART
from mezzo.observe.stopping import StopScript
from mezzo.records import Alarm, Guardrails, Rewind, Steps

_STEADY_EVERY = _SEND_EVERY = NORMS_APART
"""Steps between inspections: a norm has then just sorted the steps before it into the recorder's columns."""
_NO_PLACE = 50
"""Steps after an alarm in which a script must ask a DataLoader for a batch; else it cannot return to a snapshot, and is ended."""


class ScriptGuard:
    """The guardrails of one run."""

    def __init__(self, run: Run, asked: GuardRequest, *, on_stop: Callable[[], object]) -> None:
        """Watch ``run``; ``on_stop`` is called before the script is ended, while its model still exists."""
        self._run, self._asked, self._on_stop = run, asked, on_stop
        policy = run.applied
        dynamic = policy is not None and policy.loss_scale == "dynamic"
        self._alarms = Alarms(policy.min_scale if policy is not None and dynamic else None)
        self._next = 0
        """Number of steps inspected so far."""
        self.due = 0
        """Closed steps at which a steady run, which compares this number instead of calling, is inspected next."""
        self.noticed = Guardrails(action=asked.action)
        self.pending: Alarm | None = None
        """The alarm for which the run returns to a snapshot between the next two batches."""
        self._pending_at = 0
        self.stopped: GuardError | None = None
        """Why the script was ended; None if it was not."""
        acts = asked.action != "note"
        self._together = Agreement() if asked.together and acts else None
        self._wish: Alarm | None = None
        """An alarm of this process that the others do not know of yet."""
        self._run_is_over = False

    def check(self) -> None:
        """Inspect the steps closed since the last call.

        Raises:
            StopScript: an alarm ends the run.
        """
        run, closed = self._run, self._run.recorder.num_closed
        if run.steady.optimizer() is None or closed >= self.due:
            self.due = closed - closed % _STEADY_EVERY + _STEADY_EVERY
            if closed % _SEND_EVERY == 0:
                run.recorder.send_numbers()
            self._inspect(run.recorder.seen_from(self._next))
            if self._together is not None:
                self._agree(self._together, closed)
        if self.pending is not None and closed > self._pending_at + _NO_PLACE:
            self.end(f"{self.pending.kind}: {self.pending.evidence}; no DataLoader's batches came to return between")
        if self.stopped is not None:
            self._on_stop()
            raise StopScript

    def finish(self, steps: Steps) -> None:
        """Inspect the steps that ``check`` has not inspected; ``steps`` are all steps of the run."""
        self._run_is_over = True
        if self.stopped is None:
            self._inspect(seen_in(steps, self._next))

    @property
    def goes_on(self) -> bool:
        """Whether the run continues at its loss scale's floor, to return to a snapshot."""
        return self.pending is not None or (self._wish is not None and self._asked.action == "rewind")

    def restart(self) -> None:
        """Watch anew from the first step: the steps so far did not belong to the run."""
        self._next = self.due = 0
        self._wish = None
        self._alarms.forget()
        if self._together is not None:
            self._together.restart()

    def end(self, why: str) -> None:
        """Stop the script after the next step, for the reason ``why``."""
        self.due = 0
        self.stopped = GuardError(
            f"the run was stopped by its guard: {why}",
            hint="the record names the evidence; see docs/guardrails.md for what each alarm means",
        )
        self.noticed = self.noticed.model_copy(update={"stopped": why})

    def returned(self, rewind: Rewind) -> None:
        """Record a return to a snapshot, and watch anew."""
        changed = ", ".join(f"{one.what} {one.value}" for one in rewind.changes)
        _say(f"guard: back to {rewind.snapshot}, after {rewind.updates} updates; {changed}")
        self.noticed = self.noticed.model_copy(update={"rewinds": [*self.noticed.rewinds, rewind]})
        self.pending = None
        self._next = self._run.recorder.num_closed
        self._wish = None
        self._alarms.forget()

    @property
    def rewinds_left(self) -> int:
        """How often the run may still return to a snapshot."""
        return self._asked.rewinds - len(self.noticed.rewinds)

    def _inspect(self, new: Sequence[UpdateNumbers]) -> None:
        if new:
            self._next = new[-1].step
        for alarm in self._alarms.inspect(new):
            self._raised(alarm)
            if self.stopped is not None:
                return

    def _raised(self, alarm: Alarm) -> None:
        self._note(alarm)
        if self._together is None or self._run_is_over:
            self._act(alarm)
        elif self._wish is None and self.pending is None:
            self._wish = alarm

    def _note(self, alarm: Alarm) -> None:
        alarm = alarm.model_copy(update={"command": self._asked.commands.get(alarm.kind, "")})
        self.noticed = self.noticed.model_copy(update={"alarms": [*self.noticed.alarms, alarm]})
        _say(f"guard: {alarm.kind}, step {alarm.step}: {alarm.evidence}")
        if alarm.command:
            _say(f"guard: next, type: {alarm.command}")

    def _act(self, alarm: Alarm) -> None:
        if self._asked.action != "note" and self._asked.together is False and are_several():
            why = f"{self._asked.action} in several processes needs a launcher"
            _say(f"guard: {why}: the alarm is only noted")
            self.noticed = self.noticed.model_copy(update={"only_noted": why})
        elif self._asked.action == "stop":
            self.end(f"{alarm.kind}: {alarm.evidence}")
        elif self._asked.action == "rewind" and self.pending is None:
            if self.rewinds_left > 0:
                self.pending, self._pending_at = alarm, self._run.recorder.num_closed
            else:
                self.end(f"{alarm.kind} after {len(self.noticed.rewinds)} returns to a snapshot: {alarm.evidence}")

    def _agree(self, together: Agreement, closed: int) -> None:
        """Act on an alarm of any process in all of them, after the same step."""
        if closed >= together.next:
            wish, self._wish = self._wish, None
            if not are_several():  # the script's processes train apart
                together.next = closed + 1
                if wish is not None:
                    self._act(wish)
            elif (found := together.any_of(closed, None if wish is None else wish.model_dump())) is not None:
                rank, alarm = found[0], Alarm.model_validate(found[1])
                if wish is None:
                    alarm = alarm.model_copy(update={"evidence": f"rank {rank}: {alarm.evidence}"})
                    self._note(alarm)
                self._act(alarm)
        self.due = min(self.due, together.next)


def seen_in(steps: Steps, first: int) -> list[UpdateNumbers]:
    """Return the updates of a record from number ``first`` on, counted from 0."""
    seen: list[UpdateNumbers] = []
    for place in range(first, len(steps)):
        loss, norm = steps.loss[place], steps.grad_norm[place]
        scale = steps.loss_scale[place] if steps.loss_scale else None
        measured = norm == norm  # a record has NaN for what was not measured
        seen.append(UpdateNumbers(place + 1, loss, norm if measured else None, steps.skipped[place], scale))
    return seen


def _say(text: str) -> None:
    print(f"mezzo: {text}", file=sys.stderr, flush=True)
