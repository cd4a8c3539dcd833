"""Run a script as often as it takes to know where its first value that left its format comes from, and what helps.

1. With two flags per step, and every operation of steps 1, 2, 4, 8 and so on: silent saturation shows nowhere else.
2. If a faulty step lies between those, once more, inspecting its operations. The same if a single update was skipped though the loss
   scale fitted: a NaN that no scale helps is skipped like an overflow.
3. In FP32, or at a loss scale of 1, up to that step: if it fails there as well, the format or the scale is not the cause.
4. With what may help, until something does.

Each run leaves evidence; what to run next follows from all of it so far (``next_run``), and so does the verdict
(``mezzo.observe.nonfinite.verdict``).

A script that sets its seeds does the same each time. One that does not may pass the step without a fault the second time:
then every later step is inspected. Under a launcher of several processes, all of them run again together, and each leaves evidence.
Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mezzo.errors import NonFiniteLossError, ScaleFloorError
from mezzo.frameworks.paddle_lines import in_paddle
from mezzo.launch.process.command_signals import Stop, Stopped, stoppable
from mezzo.launch.ranks.requests import files_of_ranks
from mezzo.launch.request import Request
from mezzo.launch.runner import run_child
from mezzo.launch.several.caller import caller_of
from mezzo.observe.nonfinite import fixes
from mezzo.observe.nonfinite.evidence import Evidence, of_all, read_evidence
from mezzo.observe.nonfinite.verdict import ScriptRun, diagnosis, judged, known, last_step, repeats, tried
from mezzo.observe.nonfinite.where import where_to_write
from mezzo.observe.settings import DiagnoseSettings
from mezzo.policy import Policy
from mezzo.records import DiagnoseRecord, RunRecord

_MAX_SUSPECTS = 3
_RAISED = (1, ScaleFloorError.exit_code, NonFiniteLossError.exit_code)
"""Exit codes of runs that a value may have ended."""
_SETTLING = 16
"""Steps that a dynamic loss scale may need to settle."""

Child = Callable[..., RunRecord]


def diagnose_script(
    request: Request, *, steps: int, child: Child = run_child, note: Callable[[str], None] = lambda _: None
) -> DiagnoseRecord | RunRecord:
    """Run the script of ``request`` until it is known where its first value that left its format comes from, and what helps.

    Args:
        request: what to run; what to observe is set here.
        steps: how many training steps to watch at most.
        child: runs a request; returns its record, and leaves its evidence where the request's settings say.
        note: called with the reason when the script runs again.
    """
    asked: ScriptRun | None = ScriptRun(
        role="first",
        reason="to find the first step that is not finite",
        policy=request.policy,
        settings=DiagnoseSettings(steps=inspected(steps)),
    )
    untried = ""
    runs: list[ScriptRun] = []
    with stoppable() as stop:
        while asked is not None:
            if runs and stop.stopped:
                untried = "the search was interrupted"
                break
            if runs:
                note(f"the script runs again, {asked.reason}")
            runs.append(_ran(asked, request, len(runs) + 1, child, stop))
            asked = _from_start(next_run(runs), runs[0])
    first = runs[0]
    if first.evidence is None:
        assert first.run is not None
        return first.run
    return _in_terms_of(request, diagnosis(runs, untried=untried))


def _in_terms_of(request: Request, found: DiagnoseRecord) -> DiagnoseRecord:
    """Return a diagnosis with its line in the terms of the script's framework, and where to write it in such a script."""
    if not found.fix_line:
        return found
    if request.framework == "paddle":
        found = found.model_copy(update={"fix_line": in_paddle(found.fix_line, before=found.run.policy)})
    caller = "session" if found.session_policy else caller_of(request.target, kind=request.kind)
    where = where_to_write(found, caller)
    return found.model_copy(update={"fix_where": where})


def inspected(last: int) -> tuple[int, ...]:
    """Return the steps to inspect in a run of ``last`` steps: 1, 2, 4, 8 and so on, and the last one."""
    return tuple(sorted({*(2**k for k in range(last.bit_length())), last}))


def _ran(asked: ScriptRun, request: Request, number: int, child: Child, stop: Stop) -> ScriptRun:
    """Run the script; from the second time on, its output goes to a file beside the record."""
    path, output = Path(request.record_path), None
    typed = request.policy_typed if asked.policy == request.policy else ""
    update: dict[str, Any] = {"policy": asked.policy, "policy_typed": typed}
    if number > 1:
        path, output = path.with_name(f"pass{number}.json"), path.with_name(f"pass{number}.log")
        update |= {"output_to_stderr": False, "record_path": str(path)}
    evidence = path.absolute().with_suffix(".evidence.json")  # the script may change the folder
    for place in files_of_ranks(evidence):
        place.unlink(missing_ok=True)
    update["observe"] = asked.settings.model_copy(update={"evidence_path": str(evidence)})
    try:
        run = child(request.model_copy(update=update), output=output)
    except Stopped:
        if number == 1:
            raise
        return replace(asked, stopped_by=stop.name)
    if number > 1 and stop.stopped:
        return replace(asked, stopped_by=stop.name)
    return replace(asked, run=run, evidence=_evidence_at(evidence))


def _evidence_at(path: Path) -> Evidence | None:
    """Return the evidence of all processes of a run, without a script's own process if that only starts those that train."""
    found = [read_evidence(place) for place in files_of_ranks(path)]
    if len(found) > 1 and found[0] is not None and not (found[0].watched or found[0].bad_steps):
        del found[0]
    return of_all(found)


# --- what to run next ----------------------------------------------------------------------------------------------------------------


def next_run(runs: Sequence[ScriptRun]) -> ScriptRun | None:
    """Return the run that the evidence so far asks for; None where it is enough."""
    if runs[0].evidence is None:
        return None
    found, roles = known(runs), [ran.role for ran in runs]
    if len(runs) == 1 and (asked := _inspecting_suspects(runs[0])) is not None:
        return asked
    if len(runs) == 1 and found.verdict == "healthy" and (asked := _inspecting_skips(runs[0])) is not None:
        return asked
    if "scale of 1" not in roles and found.located and found.verdict == "scale_overflow":
        return _at_scale_of_1(found, runs[0])
    if "fp32" not in roles and _may_pass_in_fp32(found) and str(runs[0].policy) != "fp32":
        return _in_fp32(found)
    return _with_fix(found, runs)


def _from_start(asked: ScriptRun | None, first: ScriptRun) -> ScriptRun | None:
    """Return a run that inspects step 1 as one from the first line on, where the script calls no module in that step."""
    if asked is None or first.evidence is None or not first.evidence.missed_start or asked.settings.steps[0] != 1:
        return asked
    return replace(asked, settings=asked.settings.model_copy(update={"from_start": True}))


def _inspecting_suspects(first: ScriptRun) -> ScriptRun | None:
    """Inspect the faulty steps that the first run did not; of overflows, the first step, if that run located a later one."""
    found, run = judged(first), first.run
    assert run is not None
    assert first.evidence is not None
    failed = run.error is not None and run.exit_code in _RAISED
    raised = [len(run.steps) + 1] if failed and not found.faulty_steps else []
    only = [1] if first.evidence.missed_start and not first.evidence.watched and len(run.steps) else []
    unseen = [step for step in found.faulty_steps or raised or only if step not in first.evidence.watched]
    if found.located:
        of_skip = found.verdict in ("scale_overflow", "range_overflow")
        unseen = [step for step in unseen if of_skip and step < found.step][:1]
    if not unseen:
        return None
    suspects = tuple(unseen[:_MAX_SUSPECTS])
    return ScriptRun(
        role="suspects",
        reason=f"to inspect the operations of step {', '.join(map(str, suspects))}",
        policy=first.policy,
        settings=DiagnoseSettings(steps=tuple(sorted({*suspects, first.step})), suspects=suspects),
    )


def _inspecting_skips(first: ScriptRun) -> ScriptRun | None:
    assert first.evidence is not None
    unseen = [step for step in first.evidence.unexplained_skips if step not in first.evidence.watched]
    if not unseen:
        return None
    skips = tuple(unseen[:_MAX_SUSPECTS])
    steps = ", ".join(map(str, skips))
    return ScriptRun(
        role="skips",
        reason=f"to inspect the operations of step {steps}, whose update was skipped",
        policy=first.policy,
        settings=DiagnoseSettings(steps=skips, suspects=skips),
    )


def _at_scale_of_1(found: DiagnoseRecord, first: ScriptRun) -> ScriptRun:
    settings = DiagnoseSettings(steps=(found.step,), loss_scale=1.0)
    reason = f"with a loss scale of 1 in step {found.step}"
    return ScriptRun(role="scale of 1", reason=reason, policy=first.policy, settings=settings)


def _may_pass_in_fp32(found: DiagnoseRecord) -> bool:
    doubtful = found.verdict in ("range_overflow", "invalid_operation")
    return found.located and doubtful and found.origin != "refused"


def _in_fp32_later(found: DiagnoseRecord, runs: Sequence[ScriptRun], *, last: int) -> ScriptRun | None:
    """Ask whether FP32 gets beyond the step at which the best fix fails, if no fix is enough."""
    step = fixes.farthest_step(found, tried(runs))
    roles = [ran.role for ran in runs]
    any_helped = any(fixes.helped(one.again, last) for one in tried(runs))
    if "fp32 later" in roles or not step or any_helped or str(runs[0].policy) == "fp32":
        return None
    return replace(_in_fp32(found.model_copy(update={"step": step})), role="fp32 later")


def _in_fp32(found: DiagnoseRecord) -> ScriptRun:
    settings = DiagnoseSettings(steps=(found.step,))
    return ScriptRun(
        role="fp32", reason=f"in FP32, to step {found.step}", policy=Policy.parse("fp32"), settings=settings
    )


def _with_fix(found: DiagnoseRecord, runs: Sequence[ScriptRun]) -> ScriptRun | None:
    """Try the next fix, for as many steps after the fault as a loss scale may need to settle."""
    first = runs[0].run
    assert first is not None
    if not found.located or not repeats(runs):
        return None
    found = found.model_copy(update={"run": first})
    last = last_step(found, first)
    offer = fixes.next_offer(found, tried(runs), last=last)
    if offer is None:
        return _in_fp32_later(found, runs, last=last)
    steps = inspected(max(last, found.step + _SETTLING))
    settings = DiagnoseSettings(steps=steps, loss_scale=offer.loss_scale, fp32_modules=offer.fp32_modules)
    policy = offer.policy or runs[0].policy
    return ScriptRun(role="fix", reason=f"to try: {offer.advice}", policy=policy, settings=settings, offer=offer)
