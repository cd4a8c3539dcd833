"""Find the first value of a script that is not finite by running it as often as needed, each time to the step in question.

1. Two flags a step, and every operation in steps 1, 2, 4, 8 and so on: silent saturation shows nowhere else.
2. Where a step that was not finite lies between those, once more, looking at its operations.
3. In FP32, or at a loss scale of 1, up to that step: what fails there too is no matter of the format, or of the scale.

A script that sets its seeds takes the same way each time. One that does not may pass the step unharmed the second time:
every step after it is looked at then. Several processes are not run again, because they would have to meet a second
time: there every step is looked at from the beginning. Imports no torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from mezzo.diagnosis import fixes
from mezzo.diagnosis.settings import DiagnoseSettings
from mezzo.diagnosis.trend import trend_of
from mezzo.launch.request import AS_IS, Request
from mezzo.launch.runner import diagnose_child
from mezzo.launch.stopping import Stop, Stopped, stoppable
from mezzo.records import AnyRecord, DiagnoseRecord, Pass, Reason, RunRecord

_MAX_SUSPECTS = 3

Child = Callable[..., AnyRecord]


def diagnose_script(request: Request, *, steps: int, child: Child = diagnose_child) -> DiagnoseRecord | RunRecord:
    """Run the script of ``request`` until it is known where its first value that is not finite comes from.

    Args:
        request: what to run; its diagnosis is set here.
        steps: how many training steps to watch at most.
        child: runs a request; returns its record.
    """
    with stoppable() as stop:
        return _Passes(request, steps, child, stop).diagnose()


class _Passes:
    """Run one script several times."""

    def __init__(self, request: Request, steps: int, child: Child, stop: Stop) -> None:
        self._request, self._steps, self._child, self._stop = request, steps, child, stop
        self._passes: list[Pass] = []
        self._repeats = True
        """Whether the script, as far as is known, does the same each time."""

    def diagnose(self) -> DiagnoseRecord | RunRecord:
        alone = int(os.environ.get("WORLD_SIZE", "1")) < 2
        numbers = [2**k for k in range(self._steps.bit_length())] if alone else [*range(1, self._steps + 1)]
        settings = DiagnoseSettings(steps=tuple(sorted({*numbers, self._steps})))
        first = self._run(settings, "to find the first step that is not finite")
        if not isinstance(first, DiagnoseRecord):
            assert isinstance(first, RunRecord)
            return first
        self._say(_seen(first))
        found = first
        if alone:
            with suppress(Stopped):  # what the runs until then showed is kept
                found = self._located(first)
                found = self._confirmed(found, first)
        return found.model_copy(
            update={
                "run": first.run,
                "passes": self._passes,
                "bad_steps": first.bad_steps,
                "num_skipped": first.num_skipped,
                "trend": trend_of(first.run, max([found.step, *first.bad_steps])),
            }
        )

    def _located(self, first: DiagnoseRecord) -> DiagnoseRecord:
        """Return the record that names an operation, of a second run where the first one does not."""
        unseen = [step for step in first.bad_steps if step not in first.passes[0].watched]
        if first.located or not unseen:
            return first
        suspects = tuple(unseen[:_MAX_SUSPECTS])
        settings = DiagnoseSettings(steps=tuple(sorted({*suspects, self._steps})), suspects=suspects)
        why = f"to look at the operations of step {', '.join(map(str, suspects))}"
        second = self._run(settings, why)
        if not isinstance(second, DiagnoseRecord):
            self._say("the process died")
            return first
        self._say(_seen(second))
        self._repeats = not second.located or second.step in suspects
        if second.located or first.verdict == "healthy":
            return second
        return first

    def _confirmed(self, found: DiagnoseRecord, first: DiagnoseRecord) -> DiagnoseRecord:
        if not found.located or found.verdict == "silent_saturation":
            return found
        if found.verdict == "scale_overflow":
            return self._at_scale_one(found, first)
        return found if self._request.policy == "fp32" else self._in_fp32(found)

    def _at_scale_one(self, found: DiagnoseRecord, first: DiagnoseRecord) -> DiagnoseRecord:
        own_first = self._request.policy == AS_IS and found.step == 1  # no scaler is known before its first call
        step = first.bad_steps[-1] if own_first and first.bad_steps else found.step
        third = self._run(DiagnoseSettings(steps=(step,), scale_one=True), f"with a loss scale of 1 in step {step}")
        if not isinstance(third, DiagnoseRecord) or step not in third.passes[0].watched:
            self._say("the step was not reached")
            return found
        if step not in third.bad_steps:
            self._say(_seen(third) if third.located else "finite")
            return third if third.located else found
        self._say(_seen(third))
        if not third.located or third.verdict == "scale_overflow":
            return found
        return self._in_fp32(third)

    def _in_fp32(self, found: DiagnoseRecord) -> DiagnoseRecord:
        step = found.step
        third = self._run(DiagnoseSettings(steps=(step,)), f"in FP32, to step {step}", policy="fp32")
        fails = isinstance(third, DiagnoseRecord) and third.verdict != "healthy"
        reached = isinstance(third, DiagnoseRecord) and (fails or step in third.passes[0].watched)
        if not isinstance(third, DiagnoseRecord) or not reached:
            self._say("the step was not reached")
            return found
        self._say(_seen(third) if fails else "finite")
        if fails or not self._repeats or found.verdict != "invalid_operation":
            return found
        return self._of_the_format(found)

    def _of_the_format(self, found: DiagnoseRecord) -> DiagnoseRecord:
        """Return the verdict on an operation that fails on what a narrow format made of its operands, and not in FP32."""
        narrow = next((o.format for o in found.operands if o.format in ("fp16", "bf16")), self._format(found))
        own = self._request.policy == AS_IS
        fix, line = fixes.for_range(
            narrow, module=found.module, op=found.op, own_precision=own, backward=found.phase == "backward"
        )
        why = "in FP32 the same step is finite: rounding to the narrow format gave the operation what it cannot take"
        note = Reason(what="cause", value=f"the range of {narrow}", reason=why)
        update = {"verdict": "range_overflow", "fix": fix, "fix_line": line, "notes": [*found.notes, note]}
        return found.model_copy(update=update)

    def _format(self, found: DiagnoseRecord) -> str:
        return "fp16" if self._request.policy == AS_IS else self._request.policy.split(":")[0]

    def _run(self, settings: DiagnoseSettings, why: str, *, policy: str | None = None) -> AnyRecord:
        """Run the script; what it prints from the second time on goes to a file beside the record."""
        number = len(self._passes) + 1
        if number > 1:
            self._stop.check()
        policy = policy or self._request.policy
        path = Path(self._request.record_path)
        output = None if number == 1 else path.with_name(f"pass{number}.log")
        update = {"diagnosis": settings, "policy": policy}
        if output is not None:
            update |= {"output_to_stderr": False, "record_path": str(path.with_name(f"pass{number}.json"))}
        self._passes.append(Pass(policy=policy, reason=why))
        record = self._child(self._request.model_copy(update=update), output=output)
        if number > 1 and self._stop.heard:
            self._say(f"stopped by {self._stop.name}")
            self._stop.check()
        if isinstance(record, DiagnoseRecord):
            seen = record.passes[0]
            self._passes[-1] = seen.model_copy(update={"reason": why})
        return record

    def _say(self, outcome: str) -> None:
        self._passes[-1] = self._passes[-1].model_copy(update={"outcome": outcome})


def _seen(record: DiagnoseRecord) -> str:
    if record.located:
        verdict = record.verdict.replace("_", " ")
        return f"{verdict} in step {record.step}: {record.op} of {record.module}, {record.phase}"
    if record.verdict != "healthy":
        return f"step {record.step} is not finite"
    if record.bad_steps and not record.num_skipped:
        return f"ended in step {record.bad_steps[0]}"
    return f"{record.num_skipped} updates skipped" if record.num_skipped else "every step is finite"
