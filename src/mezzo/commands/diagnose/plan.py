"""Run a script as often as needed to find out where its first value that left its format comes from, and what helps.

1. Read two flags per step, and inspect every operation of steps 1, 2, 4, 8 and so on: silent saturation shows nowhere else.
2. If a faulty step lies between those, run once more and inspect its operations. Do the same if a single update was skipped although
   the loss scale fitted: a NaN that no scale can cure is skipped like an overflow.
3. Run in FP32, or at a loss scale of 1, up to that step: if it fails there as well, the format or the scale is not the cause.
4. Run with one possible fix after another, until one helps.

Each run leaves evidence. What to run next follows from the evidence of all runs (``next_run``), and so does the verdict
(``mezzo.commands.diagnose.verdict``).

Every run begins with the same seed, and leaves the seeds that the script sets alone, so that it does the same each time. A script that
draws from elsewhere may pass the faulty step without a fault the second time: then every later step is inspected. Under a launcher of
several processes, all of them run again together, and each leaves evidence. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from mezzo.children.script_text import own_sources
from mezzo.children.signals import Stop, Stopped, stoppable
from mezzo.commands.diagnose import fixes
from mezzo.commands.diagnose.verdict import ScriptRun, diagnosis, judged, known, last_step, needs_fp32, repeats, tried
from mezzo.commands.diagnose.words import TrainingStyle
from mezzo.errors import NonFiniteLossError, ScaleFloorError
from mezzo.launch.request import Request
from mezzo.launch.runner import run_child
from mezzo.observe.nonfinite.evidence import Evidence, of_all, read_evidence
from mezzo.observe.settings import FORMATS_OF_16_BITS, DiagnoseSettings, TrialChanges
from mezzo.patching import frameworks, torch_amp
from mezzo.patching.reading import ScriptFacts
from mezzo.patching.text import Text, Unclear
from mezzo.policy import Policy
from mezzo.records import DiagnoseRecord, RunRecord
from mezzo.records.files import files_of_ranks
from mezzo.studies.loop import Wanted, carry_out, named_arguments

_MAX_SUSPECTS = 3
_MOST_TO_LOCATE = 2
"""The largest number of runs after which another one looks for the operation."""
_RAISED = (1, ScaleFloorError.exit_code, NonFiniteLossError.exit_code)
"""Exit codes of runs that a non-finite value may have ended."""
_SETTLING = 16
"""Steps that a dynamic loss scale may need to settle."""

Child = Callable[..., RunRecord]


def diagnose_script(
    request: Request, *, steps: int, child: Child = run_child, note: Callable[[str], None] = lambda _: None
) -> DiagnoseRecord | RunRecord:
    """Run the script of ``request`` until it is known where its first value that left its format comes from, and what helps.

    Args:
        request: what to run; its observer's settings are filled in here.
        steps: the most training steps to watch.
        child: runs a request; returns its record, and leaves its evidence where the request's settings say.
        note: called with the reason when the script runs again.
    """
    request = request.model_copy(update={"seed": request.seed or 0})
    runs: list[ScriptRun] = []
    untried = ""

    def next_part() -> Wanted | None:
        planned = _from_start(next_run(runs), runs[0]) if runs else _first_run(request, steps)
        if planned is None:
            return None
        return Wanted(
            says=f"the script runs again, {planned.reason}" if runs else "",
            do=lambda: runs.append(_run(planned, request, len(runs) + 1, child, stop)),
        )

    with stoppable() as stop:
        try:
            carry_out(next_part, say=note)
        except Stopped:
            if not runs:
                raise
            untried = "the search was interrupted"
    first = runs[0]
    if first.evidence is None:
        assert first.run is not None
        return first.run
    return diagnosis(runs, untried=untried, caller=caller_of(request.target, kind=request.kind))


def _first_run(request: Request, steps: int) -> ScriptRun:
    settings, reason = DiagnoseSettings(steps=inspected(steps)), "to find the first step that is not finite"
    return ScriptRun(role="first", reason=reason, policy=request.policy, settings=settings)


def inspected(last: int) -> tuple[int, ...]:
    """Return the steps to inspect in a run of ``last`` steps: 1, 2, 4, 8 and so on, and the last one."""
    return tuple(sorted({*(2**k for k in range(last.bit_length())), last}))


def _run(planned: ScriptRun, request: Request, number: int, child: Child, stop: Stop) -> ScriptRun:
    """Run the script as planned and return the run with its record; from the second run on, its output goes to a file."""
    path, output = Path(request.record_path), None
    typed = request.policy_typed if planned.policy == request.policy else ""
    arguments = named_arguments(request.arguments, f"pass{number}")
    update: dict[str, Any] = {"policy": planned.policy, "policy_typed": typed, "arguments": arguments}
    if number > 1:
        path, output = path.with_name(f"pass{number}.json"), path.with_name(f"pass{number}.log")
        update |= {"output_to_stderr": False, "record_path": str(path)}
    evidence = path.absolute().with_suffix(".evidence.json")  # the script may change the folder
    for of_earlier in files_of_ranks(evidence):
        of_earlier.unlink(missing_ok=True)
    update["observe"] = planned.settings.model_copy(update={"evidence_path": str(evidence)})
    try:
        run = child(request.model_copy(update=update), output=output)
    except Stopped:
        if number == 1:
            raise
        return replace(planned, stopped_by=stop.name)
    if number > 1 and stop.stopped:
        return replace(planned, stopped_by=stop.name)
    return replace(planned, run=run, evidence=_evidence_at(evidence))


def _evidence_at(path: Path) -> Evidence | None:
    """Return the evidence of all processes of a run; without the script's own process if that only starts those that train."""
    of_ranks = [read_evidence(file) for file in files_of_ranks(path)]
    if len(of_ranks) > 1 and of_ranks[0] is not None and not (of_ranks[0].watched or of_ranks[0].bad_steps):
        del of_ranks[0]
    return of_all(of_ranks)


def next_run(runs: Sequence[ScriptRun]) -> ScriptRun | None:
    """Return the run that the evidence of the earlier runs calls for; None if that is enough."""
    if runs[0].evidence is None:
        return None
    diagnosis, roles = known(runs), [ran.role for ran in runs]
    if len(runs) == 1 and (suspects := _inspecting_suspects(runs[0])) is not None:
        return suspects
    if len(runs) == 1 and diagnosis.verdict == "healthy" and (skips := _inspecting_skips(runs[0])) is not None:
        return skips
    if (earlier := _inspecting_update(diagnosis, runs) or _inspecting_start(diagnosis, runs)) is not None:
        return earlier
    if "scale of 1" not in roles and diagnosis.located and diagnosis.verdict == "scale_overflow":
        return _at_scale_of_1(diagnosis, runs[0])
    if needs_fp32(diagnosis, runs):
        # The script's own 16-bit weights stay so under fp32: an update of them is decided by the wide run alone.
        own_weights = runs[0].policy is None and diagnosis.phase == "update" and diagnosis.format in FORMATS_OF_16_BITS
        return _in_fp32(diagnosis, wide="fp32" in roles or str(runs[0].policy) == "fp32" or own_weights)
    return _with_fix(diagnosis, runs)


def _from_start(planned: ScriptRun | None, first: ScriptRun) -> ScriptRun | None:
    """Return the planned run; if it inspects step 1 and the script calls no module there, from the script's first line on."""
    if planned is None or first.evidence is None or not first.evidence.missed_start or planned.settings.steps[0] != 1:
        return planned
    return replace(planned, settings=planned.settings.model_copy(update={"from_start": True}))


def _inspecting_suspects(first: ScriptRun) -> ScriptRun | None:
    """Inspect the faulty steps that the first run did not; of overflows only the first, if it is before the located one."""
    diagnosis, run = judged(first), first.run
    assert run is not None
    assert first.evidence is not None
    failed = run.error is not None and run.exit_code in _RAISED
    raised = [len(run.steps) + 1] if failed and not diagnosis.faulty_steps else []
    only = [1] if first.evidence.missed_start and not first.evidence.watched and len(run.steps) else []
    unseen = [step for step in diagnosis.faulty_steps or raised or only if step not in first.evidence.watched]
    if diagnosis.located:
        overflows = diagnosis.verdict in ("scale_overflow", "range_overflow")
        unseen = [step for step in unseen if overflows and step < diagnosis.step][:1]
    if not unseen:
        return None
    return _inspecting(first, tuple(unseen[:_MAX_SUSPECTS]), last=first.step)


def _inspecting(first: ScriptRun, suspects: tuple[int, ...], *, last: int) -> ScriptRun:
    """Inspect steps, and the update before each: it may have made the weights infinite that the step reads."""
    updates = {step - 1 for step in suspects if step > 1}
    return ScriptRun(
        role="suspects",
        reason=f"to inspect the operations of step {', '.join(map(str, suspects))}",
        policy=first.policy,
        settings=DiagnoseSettings(steps=tuple(sorted({*suspects, *updates, last})), suspects=suspects),
    )


def _inspecting_update(diagnosis: DiagnoseRecord, runs: Sequence[ScriptRun]) -> ScriptRun | None:
    """Inspect the update before a step that read a weight that was not finite, if no run has."""
    watched = {step for ran in runs if ran.evidence is not None for step in ran.evidence.watched}
    before = diagnosis.step - 1
    if not (diagnosis.located and diagnosis.origin == "entered" and diagnosis.parameter) or before < 1:
        return None
    if before in watched or len(runs) > _MOST_TO_LOCATE:
        return None
    return _inspecting(runs[0], (diagnosis.step,), last=diagnosis.step)


def _inspecting_start(diagnosis: DiagnoseRecord, runs: Sequence[ScriptRun]) -> ScriptRun | None:
    """Inspect from the first line on if the first step was given a value that was not finite: the script may have computed it."""
    given = diagnosis.located and diagnosis.origin == "entered" and diagnosis.step == 1 and not diagnosis.parameter
    if not given or len(runs) > _MOST_TO_LOCATE or any(ran.settings.from_start for ran in runs):
        return None
    planned = _inspecting(runs[0], (1,), last=1)
    return replace(planned, settings=planned.settings.model_copy(update={"from_start": True}))


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


def _at_scale_of_1(diagnosis: DiagnoseRecord, first: ScriptRun) -> ScriptRun:
    own = TrialChanges(own_scale=(diagnosis.loss_scale, 1.0))
    changes = own if diagnosis.static_scale else TrialChanges(loss_scale=1.0)
    settings = DiagnoseSettings(steps=(diagnosis.step,), changes=changes)
    reason = f"with a loss scale of 1 in step {diagnosis.step}"
    return ScriptRun(role="scale of 1", reason=reason, policy=first.policy, settings=settings)


def _in_fp32_later(diagnosis: DiagnoseRecord, runs: Sequence[ScriptRun], *, last: int) -> ScriptRun | None:
    """Find out whether FP32 gets beyond the step at which the best fix fails, if no fix is enough."""
    step = fixes.farthest_step(diagnosis, tried(runs))
    roles = [ran.role for ran in runs]
    any_helped = any(fixes.helped(fix.again, last) for fix in tried(runs))
    if "fp32 later" in roles or not step or any_helped:
        return None
    wide = any(ran.role == "fp32" and ran.settings.changes.own_format == "fp32" for ran in runs)
    return replace(_in_fp32(diagnosis.model_copy(update={"step": step}), wide=wide), role="fp32 later")


def _in_fp32(diagnosis: DiagnoseRecord, *, wide: bool = False) -> ScriptRun:
    """Run in FP32 up to a step; ``wide`` also where the script itself names 16-bit formats, which an earlier run left alone."""
    settings = DiagnoseSettings(steps=(diagnosis.step,), changes=TrialChanges(own_format="fp32" if wide else ""))
    own = ", the script's own 16 bits too" if wide else ""
    reason = f"in FP32{own}, to step {diagnosis.step}"
    return ScriptRun(role="fp32", reason=reason, policy=Policy.parse("fp32"), settings=settings)


def _with_fix(diagnosis: DiagnoseRecord, runs: Sequence[ScriptRun]) -> ScriptRun | None:
    """Try the next fix, for as many steps after the fault as a loss scale may need to settle."""
    first = runs[0].run
    assert first is not None
    if not diagnosis.has_place or not repeats(runs):
        return None
    diagnosis = diagnosis.model_copy(update={"run": first})
    last = last_step(diagnosis, first)
    offer = fixes.next_offer(diagnosis, tried(runs), last=last)
    if offer is None:
        return _in_fp32_later(diagnosis, runs, last=last)
    steps = inspected(max(last, diagnosis.step + _SETTLING))
    settings = DiagnoseSettings(steps=steps, changes=offer.changes)
    policy = offer.policy or runs[0].policy
    return ScriptRun(role="fix", reason=f"to try: {offer.advice}", policy=policy, settings=settings, offer=offer)


_LIBRARIES: tuple[TrainingStyle, ...] = ("lightning", "fabric", "accelerate", "transformers")


def caller_of(target: str, *, kind: Literal["script", "module"]) -> TrainingStyle:
    """Return what trains in a script and the files next to it."""
    callers: set[TrainingStyle] = set()
    for source in own_sources(target, kind=kind):
        try:
            script = ScriptFacts(Text(source))
            trainer = frameworks.trainer_of(script)
        except (SyntaxError, ValueError, RecursionError, Unclear):  # a library's arguments come from the command line
            continue
        callers |= {library for library in _LIBRARIES if trainer is not None and trainer.kind == library}
        callers |= {"session"} if script.uses("mezzo.Session") else set()
        callers |= {"own_amp"} if torch_amp.has_own(script) else set()
    order: tuple[TrainingStyle, ...] = (*_LIBRARIES, "session", "own_amp")
    return next((caller for caller in order if caller in callers), "loop")
