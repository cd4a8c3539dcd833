"""The change to a script that a check offers: derived from its text, tried, and written next to the record."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from mezzo.cli import results
from mezzo.cli.script import Script

if TYPE_CHECKING:
    from mezzo.commands.check.patched import PatchOutcome
    from mezzo.launch.request import Request
    from mezzo.patching import Patch
    from mezzo.policy import Policy
    from mezzo.records import CheckRecord

_WHY = "--write-patch: the change to the script itself, tried before it is offered"
_MIN_LIMIT_S = 120.0
"""The two runs of a trial may take this long, however little is left of the budget."""


def with_patch(
    script: Script, record: CheckRecord, folder: Path, *, left_s: float, say: Callable[[str], None]
) -> CheckRecord:
    """Return the record with the patch that applies its answer, or with the reason why there is none.

    Args:
        script: the script, as it was typed.
        record: the finished check.
        folder: the folder of the check; the patch and the runs of its trial go there.
        left_s: seconds left of the budget.
        say: called with each message.
    """
    from mezzo.policy import Policy
    from mezzo.records import AS_IS

    answer = record.answer
    if answer.decision != "use":
        return _without(record, f"the answer is {answer.decision}: there is nothing to change in the script")
    if answer.policy == AS_IS:
        return _without(record, "the script turns on its own mixed precision already")
    if script.as_module:
        return _without(record, "a module that runs with -m cannot be tried from another folder")
    from mezzo.patching import Patch, make_patch

    policy = Policy.parse(answer.policy)
    patch = make_patch(Path(script.target), policy=policy)
    if not isinstance(patch, Patch):
        return _without(record, f"{patch.reason}; {patch.by_hand}")
    say(
        f"patch: {patch.kind} script, {patch.path.name} changed for {answer.policy}; running it and the unpatched script"
    )
    return _tried(script, record, folder, patch, policy, left_s=left_s)


def _tried(
    script: Script, record: CheckRecord, folder: Path, patch: Patch, policy: Policy, *, left_s: float
) -> CheckRecord:
    from mezzo.commands.check.patched import try_patch
    from mezzo.records import CheckStage

    began_s = time.monotonic()
    place = folder / "patch"
    outcome = try_patch(_request(script, policy, place), patch, place, limit_s=max(left_s, _MIN_LIMIT_S) / 2)
    summary = "; ".join(f"{reason.what}: {reason.value} ({reason.reason})" for reason in outcome.reasons)
    stage = CheckStage(
        name="patch",
        what=f"the patch for {patch.path.name}",
        why=_WHY,
        outcome=summary,
        folder=str(place),
        duration_s=time.monotonic() - began_s,
    )
    record = record.model_copy(update={"stages": [*record.stages, stage]})
    if not outcome.may_be_offered:
        return _without(record, f"its trial failed: {summary}")
    diff_path = folder / f"{patch.path.stem}.patch"
    patch.write_diff(diff_path)
    next_step = {
        "next_command": f"patch {shlex.quote(str(patch.path))} {shlex.quote(str(diff_path))}",
        "next_why": f"writes {policy} into {patch.path.name}; {_agreement(outcome)}",
    }
    answer = record.answer.model_copy(update=next_step)
    return record.model_copy(update={"answer": answer, "patch": patch.diff})


def _agreement(outcome: PatchOutcome) -> str:
    """Return what the trial of an offered patch showed."""
    steps = 0 if outcome.patched is None else len(outcome.patched.steps)
    if outcome.same_losses:
        return f"tried for {steps} steps: every loss is the same, to the last bit, as under {outcome.tried_as}"
    return (
        f"tried for {steps} steps: losses agree within one rounding of the format with those under {outcome.tried_as}"
    )


def _request(script: Script, policy: Policy, place: Path) -> Request:
    from mezzo.commands.check.patched import COMPARED_STEPS

    request = script.request(policy, folder=place, seed=0)
    # Steps beyond those that are compared would only cost time, above all in FP16 on a CPU.
    return request.model_copy(update={"stop_after_steps": COMPARED_STEPS if request.framework == "torch" else None})


def _without(record: CheckRecord, why: str) -> CheckRecord:
    from mezzo.records import Reason

    results.note(f"--write-patch: no patch, because {why}")
    note = Reason(what="--write-patch", value="no patch", reason=why)
    return record.model_copy(update={"notes": [*record.notes, note]})
