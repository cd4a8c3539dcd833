"""Find the first value of a script that left its format by running it as often as needed, each time to the step in question.

1. Two flags a step, and every operation in steps 1, 2, 4, 8 and so on: silent saturation shows nowhere else.
2. Where a step that is a fault lies between those, once more, inspecting its operations.
3. In FP32, or at a loss scale of 1, up to that step: what fails there too is no matter of the format, or of the scale.
4. With what may help, until something does (``mezzo.launch.several.trying``).

A script that sets its seeds takes the same way each time. One that does not may pass the step unharmed the second time:
every step after it is inspected then. Several processes are not run again, because they would have to meet a second
time: there every step is inspected from the beginning. Imports no torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mezzo.errors import NonFiniteLossError, ScaleFloorError
from mezzo.formats import FP16
from mezzo.launch.process.command_signals import Stop, Stopped, stoppable
from mezzo.launch.request import Request, policy_text
from mezzo.launch.runner import diagnose_child
from mezzo.launch.several.trying import Trials, inspected
from mezzo.observe.nonfinite import fixes, words
from mezzo.observe.nonfinite.trend import trend_of
from mezzo.observe.settings import DiagnoseSettings
from mezzo.policy import Policy
from mezzo.records import AnyRecord, DiagnoseRecord, Pass, Reason, RunRecord

_MAX_SUSPECTS = 3
_RAISED = (1, ScaleFloorError.exit_code, NonFiniteLossError.exit_code)
"""Exit codes of runs that a value may have ended."""
_SEVERAL = "several processes would have to meet a second time"
_STRAYS = "the script goes another way each time"

Child = Callable[..., AnyRecord]


def diagnose_script(request: Request, *, steps: int, child: Child = diagnose_child) -> DiagnoseRecord | RunRecord:
    """Run the script of ``request`` until it is known where its first value that left its format comes from, and what helps.

    Args:
        request: what to run; what to observe is set here.
        steps: how many training steps to watch at most.
        child: runs a request; returns its record.
    """
    with stoppable() as stop:
        return _Passes(request, steps, child, stop).diagnose()


class _Passes:
    """The runs of one script."""

    def __init__(self, request: Request, steps: int, child: Child, stop: Stop) -> None:
        self._request, self._steps, self._child, self._stop = request, steps, child, stop
        self._passes: list[Pass] = []
        self._repeats = True
        """Whether the script, as far as is known, does the same each time."""

    def diagnose(self) -> DiagnoseRecord | RunRecord:
        alone = int(os.environ.get("WORLD_SIZE", "1")) < 2
        settings = DiagnoseSettings(steps=inspected(self._steps) if alone else tuple(range(1, self._steps + 1)))
        first = self._run(settings, "to find the first step that is not finite")
        if not isinstance(first, DiagnoseRecord):
            assert isinstance(first, RunRecord)
            return first
        self._say(_seen(first))
        if not alone:
            return _whole(fixes.offered(first, untried=_SEVERAL) if first.located else first, first, self._passes)
        return _whole(self._again(first), first, self._passes)

    def _again(self, first: DiagnoseRecord) -> DiagnoseRecord:
        """Run the script as often as is needed beyond the first time; return what is known by then."""
        found = first
        try:
            found = self._located(first)
            found = self._confirmed(found).model_copy(update={"run": first.run})
            return self._fixed(found, first)
        except Stopped:
            return fixes.offered(found, untried="the search was interrupted") if found.located else found

    def _located(self, first: DiagnoseRecord) -> DiagnoseRecord:
        """Return the record that names an operation, of a second run where the first one does not."""
        failed = first.run.error is not None and first.run.exit_code in _RAISED
        raised = [len(first.run.steps) + 1] if failed and not first.faulty_steps else []
        unseen = [step for step in (*first.faulty_steps, *raised) if step not in first.passes[0].watched]
        if first.located and first.verdict in ("scale_overflow", "range_overflow"):  # of a skip, perhaps not the first
            unseen = [step for step in unseen if step < first.step][:1]
        elif first.located:
            unseen = []
        if not unseen:
            return first
        suspects = tuple(unseen[:_MAX_SUSPECTS])
        settings = DiagnoseSettings(steps=tuple(sorted({*suspects, self._steps})), suspects=suspects)
        why = f"to inspect the operations of step {', '.join(map(str, suspects))}"
        second = self._run(settings, why)
        if not isinstance(second, DiagnoseRecord):
            self._say("the process died")
            return first
        self._say(_seen(second))
        self._repeats = not second.located or second.step in suspects
        if (
            second.located
            or second.fix == words.DIVERGES
            or (first.verdict == "healthy" and second.verdict != "unfinished")
        ):
            return second
        return first

    def _confirmed(self, found: DiagnoseRecord) -> DiagnoseRecord:
        if not found.located or found.verdict == "silent_saturation" or found.origin == "refused":
            return found
        if found.verdict == "scale_overflow":
            return self._at_scale_one(found)
        return found if policy_text(self._request.policy) == "fp32" else self._in_fp32(found)

    def _at_scale_one(self, found: DiagnoseRecord) -> DiagnoseRecord:
        step = found.step
        third = self._run(DiagnoseSettings(steps=(step,), loss_scale=1.0), f"with a loss scale of 1 in step {step}")
        if not isinstance(third, DiagnoseRecord) or step not in third.passes[0].watched:
            self._say("the step was not reached")
            return found
        if step not in third.bad_steps:
            self._say(_seen(third) if third.located else "finite")
            # What is too small for the format at a scale of 1 is no fault of the script's.
            return third if third.located and third.origin != "vanished" else found
        self._say(_seen(third))
        if not third.located or third.verdict == "scale_overflow":
            return found
        return self._in_fp32(third)

    def _in_fp32(self, found: DiagnoseRecord) -> DiagnoseRecord:
        step = found.step
        third = self._run(DiagnoseSettings(steps=(step,)), f"in FP32, to step {step}", policy=Policy.parse("fp32"))
        fails = isinstance(third, DiagnoseRecord) and third.verdict not in ("healthy", "unfinished")
        reached = isinstance(third, DiagnoseRecord) and (fails or step in third.passes[0].watched)
        if not isinstance(third, DiagnoseRecord) or not reached:
            self._say("the step was not reached")
            return found
        self._say(_seen(third) if fails else "finite")
        if fails and found.verdict == "range_overflow":
            cause = _cause_in_fp32(third, found)
            return found.model_copy(update={"notes": [*found.notes, cause]})
        if fails or not self._repeats or found.verdict != "invalid_operation":
            return found
        return self._of_the_format(found)

    def _of_the_format(self, found: DiagnoseRecord) -> DiagnoseRecord:
        """Return the verdict on an operation that fails on what a narrow format made of its operands, and not in FP32."""
        narrow = next((o.format for o in found.operands if o.format in ("fp16", "bf16")), self._format())
        update = {"verdict": "range_overflow", "format": narrow, "detail": words.rounded_away(found, narrow)}
        return found.model_copy(update=update)

    def _format(self) -> str:
        return FP16.name if self._request.policy is None else self._request.policy.compute

    def _fixed(self, found: DiagnoseRecord, first: DiagnoseRecord) -> DiagnoseRecord:
        """Return the record with a fix that was tried, or with the reason why it was not."""
        if not self._repeats:
            return fixes.offered(found, untried=_STRAYS)
        if not found.located:
            return found
        of_scale = found.verdict == "scale_overflow"
        last = max(found.step, len(first.run.steps)) if of_scale else found.step
        return Trials(self._run, self._say).fixed(found, last=last)

    def _run(self, settings: DiagnoseSettings, why: str, *, policy: Policy | None = None) -> AnyRecord:
        """Run the script; what it prints from the second time on goes to a file beside the record."""
        number = len(self._passes) + 1
        if number > 1:
            self._stop.check()
        policy = policy or self._request.policy
        path = Path(self._request.record_path)
        output = None if number == 1 else path.with_name(f"pass{number}.log")
        update: dict[str, Any] = {"observe": settings, "policy": policy}
        if output is not None:
            update |= {"output_to_stderr": False, "record_path": str(path.with_name(f"pass{number}.json"))}
        self._passes.append(Pass(policy=policy_text(policy), reason=why))
        record = self._child(self._request.model_copy(update=update), output=output)
        if number > 1 and self._stop.stopped:
            self._say(f"stopped by {self._stop.name}")
            self._stop.check()
        if isinstance(record, DiagnoseRecord):
            seen = record.passes[0]
            self._passes[-1] = seen.model_copy(update={"reason": why})
        return record

    def _say(self, outcome: str) -> None:
        self._passes[-1] = self._passes[-1].model_copy(update={"outcome": outcome})


def _cause_in_fp32(third: DiagnoseRecord, found: DiagnoseRecord) -> Reason:
    """Return what it means that a run in FP32 failed as well."""
    if third.located and third.format == found.format:
        why = "under fp32, too, the step leaves this format: the script casts to it by itself"
        return Reason(what="cause", value=found.format, reason=why)
    why = f"in FP32, too, the training fails, in step {third.step}: precision is not the cause"
    return Reason(what="cause", value=words.ITSELF, reason=why)


def _whole(found: DiagnoseRecord, first: DiagnoseRecord, passes: list[Pass]) -> DiagnoseRecord:
    """Return what was found with what the first run, which is the script's own, showed of all steps."""
    of_skips = found.verdict == "scale_overflow" or (found.verdict == "range_overflow" and len(first.faulty_steps) > 1)
    skips = words.skipped(first.run, first.faulty_steps) if of_skips else ""
    notes = [*found.notes, *(note for note in first.notes if note not in found.notes)]
    return found.model_copy(
        update={
            "run": first.run,
            "detail": ". ".join(filter(None, [found.detail, skips])),
            "passes": passes,
            "bad_steps": first.bad_steps,
            "faulty_steps": first.faulty_steps,
            "num_skipped": first.num_skipped,
            "notes": notes,
            "trend": trend_of(first.run, max([found.step, *first.bad_steps])),
        }
    )


def _seen(record: DiagnoseRecord) -> str:
    if record.located:
        verdict = record.verdict.replace("_", " ")
        return f"{verdict} in step {record.step}: {record.op} of {record.module}, {record.phase}"
    if record.verdict == "unfinished":
        return record.detail
    if record.verdict != "healthy":
        return f"step {record.step} is not finite"
    if record.num_skipped:
        return f"{record.num_skipped} updates skipped, as is normal"
    return "every step is finite"
