"""The change to a script that a check offers: derived from its text, tried, and written next to the record."""

from __future__ import annotations

import math
import os
import shlex
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mezzo.children.signals import stoppable
from mezzo.cli import results
from mezzo.cli.script import Script
from mezzo.formats import BF16, FORMATS
from mezzo.frameworks.keras import INITIAL_SCALE
from mezzo.frameworks.paddle import NO_EFFECT
from mezzo.launch.request import Request
from mezzo.launch.runner import run_child
from mezzo.measure.state_trace import same_number
from mezzo.patching import Patch, make_patch
from mezzo.policy import Policy
from mezzo.records import AS_IS, Note, RunRecord
from mezzo.records.run import RUN_NAME, WIDE_POLICIES
from mezzo.studies.loop import named_arguments

if TYPE_CHECKING:
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
        "next_why": f"writes {policy} into {patch.path.name}; {_evidence_of(outcome)}",
    }
    answer = record.answer.model_copy(update=next_step)
    return record.model_copy(update={"answer": answer, "patch": patch.diff})


def _evidence_of(outcome: PatchOutcome) -> str:
    """Return what the trial of an offered patch showed."""
    steps = 0 if outcome.patched is None else len(outcome.patched.steps)
    if outcome.same_losses:
        return f"tried for {steps} steps: every loss is the same, to the last bit, as under {outcome.tried_as}"
    return (
        f"tried for {steps} steps: losses agree within one rounding of the format with those under {outcome.tried_as}"
    )


def _request(script: Script, policy: Policy, place: Path) -> Request:

    request = script.request(policy, folder=place, seed=0)
    # Steps beyond those that are compared would only cost time, above all in FP16 on a CPU.
    return request.model_copy(update={"stop_after_steps": COMPARED_STEPS if request.framework == "torch" else None})


def _without(record: CheckRecord, why: str) -> CheckRecord:
    from mezzo.records import Note

    results.note(f"--write-patch: no patch, because {why}")
    note = Note(what="--write-patch", value="no patch", reason=why)
    return record.model_copy(update={"notes": [*record.notes, note]})


# Both runs have the same seed. To make them comparable, the unpatched script runs with the policy's ``op_lists=device``:
# ``torch.autocast`` runs other operations in 16 bits on a CPU than on a GPU, where torch's lists and the policy's are the same. A patch
# for ``mezzo.Session``, Keras or Paddle is compared with the policy itself. Paddle's AMP has no effect on a CPU: there the patched script
# runs as it is, and then under the policy, whose regions are the patch's own.
#
# Rule: the same number of steps, the same number of skipped updates, no fewer FLOPs below 32 bits, and the same losses. Losses that are
# not the same to the last bit pass if none of the first ``COMPARED_STEPS`` differs by more than one rounding of the format, which sums in
# another order may cause; later steps amplify such differences.

COMPARED_STEPS = 20
"""First steps whose losses must agree to one rounding of the format."""
_GPU_ONLY = ("lightning", "fabric", "accelerate")
"""Libraries that compute FP16 on GPUs only: on a CPU they refuse it or use BF16 instead."""
_NO_KERNEL = ("RuntimeError", "NotImplementedError")
"""The errors that torch raises if a device has no kernel for a format."""
_BF16 = Policy.parse("bf16")
_SMALL_SCALE = 1024.0
"""A loss scale at which a scaled loss fits FP16's range."""

Child = Callable[..., RunRecord]


@dataclass(frozen=True, kw_only=True)
class PatchOutcome:
    """The outcome of a patch's trial."""

    may_be_offered: bool
    reasons: list[Note] = field(default_factory=list)
    """What was compared, by which rule, and the result."""
    tried_as: str = ""
    """The policy of the trial; not the requested one if the library computes FP16 on GPUs only."""
    same_losses: bool = False
    """Whether all losses are the same to the last bit."""
    reference: RunRecord | None = None
    """The unpatched script under the policy."""
    patched: RunRecord | None = None
    """The patched script as it is."""

    @property
    def on_gpu(self) -> bool:
        """Whether the trial's machine has a GPU."""
        return self.patched is not None and self.patched.environment.gpu is not None


def try_patch(
    request: Request, patch: Patch, folder: Path, *, limit_s: float | None = None, child: Child = run_child
) -> PatchOutcome:
    """Run a patched script and the unpatched one under the policy of ``request``, and compare them.

    Args:
        request: the unpatched script, its arguments and the policy.
        patch: the change to it, or to a file next to it.
        folder: where the patched script, both records and both outputs go.
        limit_s: seconds after which a run is stopped, and the patch not offered; None for no limit.
        child: runs a request in a child process.
    """
    assert request.policy is not None
    if request.kind == "module":
        why = "a module of a package cannot be run from another folder; apply the diff and run it yourself"
        return PatchOutcome(may_be_offered=False, reasons=[Note(what="trial", value="not run", reason=why)])
    trial = _Trial(request, folder.absolute(), limit_s, child)
    first = trial.compare(patch, request.policy)
    if first.may_be_offered or first.on_gpu:
        return first
    if patch.style == "paddle.amp":
        return trial.compare_in_paddle(patch, request.policy, first)
    substitute = _substitute(request.policy, patch, first)
    style = "auto" if patch.style == "framework" else patch.style
    other = None if substitute is None else make_patch(patch.path, policy=substitute[0], style=style)
    if substitute is None or not isinstance(other, Patch):
        return first
    policy, why = substitute
    notes = [Note(what="tried as", value=str(policy), reason=why)]
    run = first.patched if _is_bf16(first) else None
    return trial.compare(_for_cpu(other), policy, notes=notes, patched=run)


def _substitute(policy: Policy, patch: Patch, first: PatchOutcome) -> tuple[Policy, str] | None:
    """Return a policy to try instead, and why, if a machine without a GPU cannot compute the requested one like a GPU; else None."""
    untried = "this machine has no GPU; FP16 itself has not been compared"
    reference, patched = first.reference, first.patched
    if patch.kind == "transformers" and policy.compute in ("fp16", "bf16"):
        note = f"; {untried}" if policy.compute == "fp16" else ""
        why = "on a CPU, Hugging Face's Trainer computes BF16 only, and with use_cpu=True, which the trial set"
        return _BF16, why + note
    if policy.compute != "fp16" or reference is None or patched is None:
        return None
    if patch.kind in _GPU_ONLY:
        return _BF16, f"{patch.kind} computes FP16 on GPUs only, and {untried}"
    if reference.changed_nothing:
        return _BF16, f"on a CPU, nothing ran in FP16 under this library, and {untried}"
    if patch.style == "torch.amp" and (reference.error or "").startswith(_NO_KERNEL):
        why = str(reference.error).split(". ")[0]
        return _BF16, f"this CPU cannot compute the script in FP16 ({why}), and {untried}"
    # If the scale begins high, a smaller one is worth a trial.
    can_be_smaller = policy.loss_scale == "dynamic" and policy.init_scale > _SMALL_SCALE
    if patch.style == "torch.amp" and can_be_smaller and patched.error is None:
        why = "autocast on a CPU may leave the loss in FP16, where on a GPU it is FP32: at a large loss scale it overflows"
        return policy.replace(init_scale=_SMALL_SCALE), f"{why}; both runs begin at {_SMALL_SCALE:g}"
    return None


def _for_cpu(patch: Patch) -> Patch:
    """Return a patch with the argument that its library needs to train in BF16 on a CPU."""
    if patch.kind != "transformers" or "use_cpu" in patch.source:
        return patch
    return replace(patch, patched=patch.patched.replace("bf16=True", "bf16=True, use_cpu=True"))


def _is_bf16(first: PatchOutcome) -> bool:
    """Return whether the patched run trained, in BF16 instead of FP16, as Lightning does on a CPU."""
    run = first.patched
    return run is not None and run.error is None and BF16.name in run.effective.flops_by_format


def _comparable(policy: Policy, patch: Patch) -> Policy:
    """Return the policy under which the unpatched script computes what the patched one computes by itself."""
    if patch.kind == "keras" and policy.loss_scale == "dynamic":
        return policy.replace(init_scale=INITIAL_SCALE)  # compile() wraps the optimizer, and takes no scale
    if not policy.lowers or patch.style in ("mezzo", "paddle.amp") or patch.kind == "keras":
        return policy
    return policy.replace(op_lists="device", arithmetic="auto")


class _Trial:
    """The runs of one trial."""

    def __init__(self, request: Request, folder: Path, limit_s: float | None, child: Child) -> None:
        self._request, self._folder, self._limit_s, self._child = request, folder, limit_s, child
        self._since_s = time.time()

    def compare(
        self, patch: Patch, policy: Policy, *, notes: Sequence[Note] = (), patched: RunRecord | None = None
    ) -> PatchOutcome:
        """Run the patched script, unless its record is given, and the unpatched one under ``policy``; return the comparison."""
        patched = self._run_patched(patch) if patched is None else patched
        return judged(self._run("unpatched", policy=_comparable(policy, patch)), patched, policy, notes)

    def compare_in_paddle(self, patch: Patch, policy: Policy, first: PatchOutcome) -> PatchOutcome:
        """Compare again on a CPU, with the patched script under the policy; ``first`` ran it as it is, in FP32."""
        reference, patched = first.reference, first.patched
        assert reference is not None
        assert patched is not None
        if _failures(reference, patched):
            return first
        why = f"{NO_EFFECT}; the patched script ran to its end as it is, and then in the policy's formats where its auto_cast is"
        notes = [Note(what="tried as", value=f"{policy} under mezzo run", reason=why)]
        return judged(reference, self._run_patched(patch, policy=policy), policy, notes)

    def _run_patched(self, patch: Patch, *, policy: Policy | None = None) -> RunRecord:
        """Run the script with the patched file in place of the original, under its own precision (None) or a policy."""
        script = Path(self._request.target).absolute()
        copy = self._folder / "script"
        shutil.rmtree(copy, ignore_errors=True)
        mirror(script.parent, copy, without=patch.path.absolute())
        written = copy / patch.path.absolute().relative_to(script.parent)
        patch.write(written)
        if written != copy / script.name:
            (copy / script.name).unlink()
            shutil.copy2(script, copy / script.name)  # Python imports from the folder that a link points to
        run = self._run("patched", policy=policy, target=str(copy / script.name))
        return run.model_copy(update={"files_read": [f for f in run.files_read if f.path != str(written)]})

    def _run(self, name: str, **update: Any) -> RunRecord:
        self._folder.mkdir(parents=True, exist_ok=True)
        update |= {
            "record_path": str(self._folder / f"{name}.json"),
            "arguments": named_arguments(self._request.arguments, name),
            "seed": self._request.seed or 0,
            "compared_since_s": self._since_s,
            "output_to_stderr": False,
            "observe": None,
        }
        with stoppable() as stop:
            request = self._request.model_copy(update=update)
            run = self._child(request, output=self._folder / f"{name}.log", limit_s=self._limit_s)
            stop.check(run)
        return run


def mirror(folder: Path, copy: Path, *, without: Path) -> None:
    """Fill ``copy`` with links to everything in ``folder`` but one file, so that imports and data next to a script are found.

    The folders above that file are real folders in the copy, not links.
    """
    copy.mkdir(parents=True)
    for entry in folder.iterdir():
        if entry == without or entry.name == "__pycache__" or copy.is_relative_to(entry):
            continue
        if without.is_relative_to(entry):
            mirror(entry, copy / entry.name, without=without)
        else:
            os.symlink(entry, copy / entry.name, target_is_directory=entry.is_dir())


def judged(reference: RunRecord, patched: RunRecord, policy: Policy, notes: Sequence[Note] = ()) -> PatchOutcome:
    """Return the outcome of a trial: compare the unpatched script under the policy with the patched one as it is."""
    largest = largest_difference(reference.steps.loss, patched.steps.loss)
    losses = reference.steps.loss, patched.steps.loss
    same = len(losses[0]) == len(losses[1]) and all(map(same_number, *losses))  # NaN is equal to NaN
    faults = [*_failures(reference, patched), *_differences(reference, patched)]
    limit = FORMATS[policy.compute].eps
    if not faults and not same and largest > limit:
        why = f"a loss of the first {COMPARED_STEPS} steps differs by {largest:.2g} of its value, more than one rounding: {limit:.2g}"
        faults = [Note(what="losses", value="different", reason=why)]
    how = "as it is" if patched.policy == AS_IS else f"under {patched.policy}"
    compared = f"the patched script {how}, with the unpatched one under {reference.policy}, seed {reference.seed}"
    reasons = [Note(what="compared", value=f"{len(patched.steps)} steps", reason=compared), *notes]
    if not faults:
        reasons.append(_agreement(reference, patched, same, largest, limit))
    return PatchOutcome(
        may_be_offered=not faults,
        reasons=[*reasons, *faults],
        tried_as=str(policy),
        same_losses=same and bool(reference.steps.loss),
        reference=reference,
        patched=patched,
    )


def _agreement(reference: RunRecord, patched: RunRecord, same: bool, largest: float, limit: float) -> Note:
    formats = _flops(patched)
    if patched.effective.flops_by_format != reference.effective.flops_by_format:
        formats += f", where mezzo run reaches {_flops(reference)}"
    what = f"{patched.steps.num_skipped} skipped updates in both; {formats}"
    if same:
        return Note(what="losses", value="the same to the last bit", reason=what)
    value = f"within {largest:.2g} in the first {COMPARED_STEPS} steps"
    return Note(what="losses", value=value, reason=f"one rounding of the format is {limit:.2g}; {what}")


def _flops(run: RunRecord) -> str:
    """Return the FLOPs of the counted step by format, in words."""
    counts = [f"{flops:,} FLOPs in {name}" for name, flops in run.effective.flops_by_format.items()]
    return " and ".join(counts) or "no FLOPs counted"


def _failures(reference: RunRecord, patched: RunRecord) -> list[Note]:
    """Return why two runs cannot be compared."""
    faults = []
    for name, run in (("unpatched", reference), ("patched", patched)):
        if run.error is not None or run.exit_code:
            why = run.error or f"it ended with exit code {run.exit_code}"
            faults.append(Note(what=f"{name} run", value="failed", reason=why))
        elif not len(run.steps):
            faults.append(Note(what=f"{name} run", value="no step", reason="no training step was recorded"))
        if run.files_read:
            why = f"it read {run.files_read[0].path}, which the other run wrote; write {RUN_NAME} in the script's arguments"
            faults.append(Note(what=f"{name} run", value="not independent", reason=why))
    if not faults and reference.changed_nothing:
        why = f"nothing ran below 32 bits under {reference.policy}"
        faults.append(Note(what="policy", value="changed nothing", reason=why))
    return faults


def _differences(reference: RunRecord, patched: RunRecord) -> list[Note]:
    """Return what differs besides the losses; computing more in 16 bits than ``mezzo run`` does is no fault."""
    faults = []
    pairs = (
        ("steps", len(reference.steps), len(patched.steps)),
        ("skipped updates", reference.steps.num_skipped, patched.steps.num_skipped),
    )
    for what, expected, found in pairs:
        if expected != found:
            why = f"{expected} under the policy, {found} with the patch"
            faults.append(Note(what=what, value="different", reason=why))
    flops_found, flops_expected = patched.effective.flops_by_format, reference.effective.flops_by_format
    if any(flops_found.get(name, 0) < flops for name, flops in flops_expected.items() if name not in WIDE_POLICIES):
        why = f"{_flops(reference)} under the policy; {_flops(patched)} with the patch"
        faults.append(Note(what="FLOPs by format", value="different", reason=why))
    return faults


def largest_difference(first: list[float], second: list[float]) -> float:
    """Return the largest relative difference in the first ``COMPARED_STEPS`` values; infinity if only one of a pair is finite."""
    largest = 0.0
    for a, b in zip(first[:COMPARED_STEPS], second[:COMPARED_STEPS], strict=False):
        if math.isfinite(a) and math.isfinite(b):
            largest = max(largest, abs(a - b) / max(abs(a), abs(b), 1e-30))
        elif not same_number(a, b):
            return math.inf
    return largest
