"""The words of a diagnosis: its sentences, its places, its fixes as the script writes them. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import PurePath
from typing import Literal, NamedTuple

from mezzo.commands.diagnose.offers import LinePlace, Offer
from mezzo.formats import FORMATS
from mezzo.frameworks import keras, paddle
from mezzo.observe.nonfinite.evidence import Evidence, Harmless, Located, LostValues, WrongGradients
from mezzo.policy import Policy
from mezzo.records import Diagnosed, DiagnoseRecord, Note, Operand, RunRecord

DIED = "the process died"
NOT_REACHED = "the step was not reached"
ENDED_BY_SIGNAL = (129, 130, 143)
"""Exit codes of a script that SIGHUP, Ctrl-C or SIGTERM ended."""
HIDDEN_BY_SKIP = (
    "The loss scaler skipped that update, so the training continued; without a scaler, as in FP32 and BF16, the weights "
    "become NaN"
)
NO_LOWER_SCALE = "no run at a lower loss scale reached the same step"
BAD_AT_LOWER_SCALE = "the same step is not finite at a loss scale of 1 either"
NO_FP32 = "no run in FP32 reached the same step"
BAD_IN_FP32 = "the training is not finite in FP32 either, for a reason that was not found"
GOOD_IN_FP32 = "the same step is finite in FP32"
STILL_16_BITS = "the run in FP32 still computed in 16 bits, which the script itself asks for"
_UNREAD = "neither the loss nor a gradient depends on it"
_FIRST_STEPS = 6
_LEAST_SHARE = 0.005
"""A smaller share is not worth a number."""


def undecided(record: DiagnoseRecord, why: str) -> Note:
    """Return the verdict that the operation alone suggests, and why it is not one."""
    return Note(what="undecided", value=f"perhaps {record.verdict.replace('_', ' ')}", reason=why)


def too_few_steps(record: DiagnoseRecord, *, steps: int) -> str:
    """Return why so few steps do not show whether the loss scale has settled too low."""
    return (
        f"the loss scale is down to {record.settled_scale or 0:g} in {steps} steps, and in fewer than {record.steps_needed} one "
        "that settles higher may be as low for a while"
    )


def detail(located: Located, verdict: Diagnosed) -> str:
    """Return what happened at a fault."""
    source = located.source
    if source.kind in ("entered", "constant"):
        count = sum(o.num_not_finite for o in source.operands)
        if not count:  # a plain number has no operand
            return f"{_where(source)} is given a number that is not finite"
        of = "a weight" if source.parameter else "an input"
        values = f"{count} value{'s' * (count != 1)}"
        return f"{_where(source)} read {of} that already had {values} that {'are' if count != 1 else 'is'} not finite"
    if source.kind == "refused":
        return f"{_where(source)} is given {_number(source.largest, '.4g')}; {_end(source.format)}, and torch raises an error"
    if source.kind == "vanished":
        return f"{_vanishing(source)}. {_off(located.gradients)}"
    failing = _failing(source.op, source.backward, source.operands)
    if located.vanished is not None:
        return f"{failing}. {_vanishing(located.vanished)}; FP32 keeps them"
    if verdict == "silent_saturation" and source.in_fp64 is not None:
        reach = f"{_where(source)} is infinite in FP32, which ends at 3.4e+38, and {source.in_fp64:.4g} in FP64"
        return f"{reach}. {_swallowed(located)}"
    if verdict == "invalid_operation" or source.largest is None:
        return _failing(source.op, source.backward, source.operands, " in FP32 either")
    reach = f"{_where(source)} reaches {source.largest:.4g}; {_end(source.format)}"
    if source.loss_scale > 1 and (verdict == "scale_overflow" or (source.backward and located.gradients is not None)):
        of = "the script's own static loss scale" if source.static_scale else "the loss scale"
        reach = f"{reach}. Without {of} of {source.loss_scale:g} it would be {source.largest / source.loss_scale:.3g}"
    if verdict == "scale_overflow":
        return reach
    if verdict == "silent_saturation":
        return f"{reach}. {_swallowed(located)}"
    if located.symptom is not None:
        return f"{reach}. Its wrong values then reach {_where(located.symptom)}, which has no finite result for them"
    return reach


def _swallowed(located: Located) -> str:
    names = [f"{op}()" for op in located.source.swallowed_by] or ["what reads it"]
    turn = "turns" if len(names) == 1 else "turn"
    return f"{' and '.join(names)} {turn} the infinity into finite but wrong numbers. {_off(located.gradients)}"


def notes(evidence: Evidence, *, backend: str) -> list[Note]:
    """Return notes on how a run was inspected, and on a fault that began in another process."""
    reasons = [Note(what="not inspected", value=f"{op}()", reason=why) for op, why in evidence.problems.items()]
    if evidence.forced_eager:
        why = "operations inside compiled kernels cannot be distinguished; compiled code may round differently"
        compiler = "tf.function" if backend == "tensorflow" else "torch.compile"
        reasons.append(Note(what=compiler, value="inspected steps ran eagerly", reason=why))
    if backend == "tensorflow":
        why = "values that are infinite or NaN are followed to the loss, a gradient or a weight, and no others"
        reasons.append(Note(what="silent saturation", value="not judged on TensorFlow", reason=why))
    if evidence.found_by_rank is not None:
        why = "this process received it with the gradients of all processes"
        reasons.append(Note(what="found by", value=f"the process of rank {evidence.found_by_rank}", reason=why))
    return reasons


def harmless(value: Harmless) -> Note:
    """Return a note on a value that left its format and made no difference."""
    absorbed, swallowed = (" and ".join(f"{op}()" for op in ops) for ops in (value.absorbed_by, value.swallowed_by))
    where = f"{value.op}() in {PurePath(value.line).name}"
    if value.largest is None:
        hides = absorbed or swallowed
        why = f"it is not finite in FP32 either; {f'{hides} hides that' if hides else 'nothing reads it'}, and no gradient changes"
    else:
        why = f"{value.largest:.3g} is infinite in {value.format.upper()}; "
        if swallowed:
            why += f"{swallowed} makes other finite numbers of it, and no gradient changes by more than rounding"
        else:
            why += f"{absorbed} returns the same for both, and no gradient changes" if absorbed else _UNREAD
    return Note(what="harmless", value=where, reason=why)


def cause_in_fp32(record: DiagnoseRecord, *, of_script: bool, step: int) -> Note:
    """Return the cause of a fault if a run in FP32 fails as well: in a format ``of_script``, or in FP32 itself, in ``step``."""
    if of_script:
        why = "the step leaves this format under fp32, too, because the script itself casts to it"
        return Note(what="cause", value=record.format, reason=why)
    why = f"the training fails in FP32, too, in step {step}: precision is not the cause"
    return Note(what="cause", value="the training itself", reason=why)


def elsewhere(record: DiagnoseRecord) -> str:
    """Return where the same step fails in 16 bits, if FP32 fails at another place."""
    line = f" in {PurePath(record.line).name}" if record.line else ""
    return f"In {record.format.upper()} the same step fails at {record.op}(){line}, too"


def later_in_fp32(in_fp32: DiagnoseRecord) -> Note:
    """Return a note that FP32 also fails in the step to which a fix moved the fault."""
    why = f"the training fails in FP32, too, in step {in_fp32.step}, so no fix of the precision gets beyond it"
    return Note(what="cause", value="the training itself", reason=why)


def rounded_away(record: DiagnoseRecord, form: str) -> str:
    """Return what happened at an operation that has a finite result only in a run in FP32."""
    failing = _failing(record.op, record.phase == "backward", record.operands)
    return f"{failing}. The same step is finite in FP32: rounding to {form.upper()} gave the operation an input that it has no result for"


def zero_eps(record: DiagnoseRecord) -> str:
    """Return what happened in an update that divides by an eps of 0."""
    least = FORMATS[record.format].min_subnormal if record.format in FORMATS else 0.0
    return (
        f"{record.op}() makes weights that are not finite. Its eps of {record.zero_eps:g} is 0 in {record.format.upper()}, whose smallest "
        f"number is {least:.2g}; where the squared gradients are 0 too, it divides by 0. The same step is finite in FP32"
    )


def skipped(run: RunRecord, faulty: Sequence[int]) -> str:
    """Return how many updates a loss scale that never settles has cost; empty if none."""
    count = run.steps.num_skipped
    lost = [step for step in faulty if step <= len(run.steps) and run.steps.skipped[step - 1]]
    if not lost:
        return ""
    total = len(run.steps)
    if count == total:
        reached = f", and the scale is down to {run.final_scale:g}" if run.final_scale is not None else ""
        return f"All {total} updates were skipped{reached}" if total > 1 else "The only update was skipped"
    steps = ", ".join(map(str, lost[:_FIRST_STEPS])) + (" and so on" if len(lost) > _FIRST_STEPS else "")
    share = "all" if len(lost) == count else f"{len(lost)} of them"
    came = "after the loss scale had been found"
    if lost[-1] <= list(run.steps.skipped).index(False):  # the steps that follow are another optimizer's
        came = "by an optimizer that never made an update"
    if count == 1:
        return f"1 of {total} updates was skipped, {came}: step {steps}"
    which = f"step{'s' if len(lost) > 1 else ''} {steps}"
    return f"{count} of {total} updates were skipped, {share} {came}: {which}"


def settled(run: RunRecord, scale: float, *, zeros: float) -> str:
    """Return at which low loss scale the training goes on, and which share of the gradients that costs."""
    lost = f"; {zeros:.0%} of all gradient elements are 0 at that scale" if zeros >= _LEAST_SHARE else ""
    count = f"{run.steps.num_skipped} of {len(run.steps)} updates were skipped"
    return f"{count} until the loss scale was down to {scale:g}{lost}"


def beyond_fp32(step: int) -> str:
    """Return the fault of a step in which the result of every operation was finite."""
    return (
        f"every gradient of step {step} is finite, but their norm is beyond FP32's range: its square is above 3.4e38, so "
        "the training diverges or its loss is far too large"
    )


def unlocated(step: int, *, lost: bool) -> str:
    """Return the fault of a step whose operations were not inspected."""
    what = f"the loss of step {step} was" if lost else f"gradients of step {step} were"
    return f"{what} not finite; the operation that caused it was not inspected"


def unfinished(run: RunRecord) -> str:
    """Return how a run ended that permits no verdict."""
    count = len(run.steps)
    when = "before its first training step" if not count else f"after {count} training step{'s' if count > 1 else ''}"
    how = "was interrupted" if run.exit_code in ENDED_BY_SIGNAL else "ended"
    cause = f": {run.error.splitlines()[0]}" if run.error and run.exit_code not in ENDED_BY_SIGNAL else ""
    nothing = ". No fault was found up to then" if count else ""
    return f"the script {how} {when}, with exit code {run.exit_code}{cause}{nothing}"


def seen(record: DiagnoseRecord, *, unexplained: bool = False) -> str:
    """Return the outcome of a run, in a few words; ``unexplained`` if the loss scale does not explain a skip."""
    if record.located:
        return f"{_named_fault(record)}, {record.phase}"
    if record.verdict == "unfinished":
        return record.detail
    if record.verdict != "healthy":
        return f"step {record.step} is not finite"
    if record.num_skipped:
        what = f"{record.num_skipped} update{'s' if record.num_skipped > 1 else ''} skipped"
        return f"{what}, {'for no known reason' if unexplained else 'as is normal'}"
    return "every step is finite"


def seen_with_fix(record: DiagnoseRecord) -> str:
    """Return the outcome of a run with a fix."""
    if record.verdict == "healthy":
        return "nothing is wrong"
    return _named_fault(record) if record.located else record.run.error or f"step {record.step} is not finite"


def _named_fault(record: DiagnoseRecord) -> str:
    return f"{record.verdict.replace('_', ' ')} in step {record.step}: {record.op} of {record.module}"


def _where(source: LostValues) -> str:
    return _named(source.op, backward=source.backward)


def _named(op: str, *, backward: bool) -> str:
    return f"the backward pass of {op}()" if backward else f"{op}()"


def _number(value: float | None, form: str) -> str:
    return format(math.inf if value is None else value, form)


def _end(form: str) -> str:
    limit = FORMATS[form].max if form in FORMATS else math.inf
    return f"{form.upper()} ends at {limit:g}"


def _vanishing(source: LostValues) -> str:
    least = FORMATS[source.format].min_subnormal if source.format in FORMATS else 0.0
    name = source.format.upper()
    return f"{_where(source)} turns values up to {_number(source.largest, '.3g')} into 0, because {name}'s smallest number is {least:.2g}"


def _off(gradients: WrongGradients | None) -> str:
    if gradients is None:
        return ""
    if not gradients.count and gradients.loss_error is not None:
        return f"The loss is off by {min(gradients.loss_error, 99.99):.0%}; the gradients are right"
    zeros = f"{gradients.zeros:.0%} of all gradient elements are 0 for this reason alone. " if gradients.zeros else ""
    wrong = f"{gradients.count} of {gradients.total} gradients are wrong"
    return f"{zeros}{wrong}; {gradients.parameter}'s is off by {min(gradients.error, 99.99):.0%} of its norm"


def _failing(op: str, backward: bool, operands: Sequence[Operand], even: str = "") -> str:
    where = _named(op, backward=backward)
    return f"{where} has no finite result{even}; it read {_spans(operands)}"


def _spans(operands: Sequence[Operand]) -> str:
    return f"magnitudes of {'; '.join(map(_span, operands))}" if operands else "no values"


def _span(operand: Operand) -> str:
    infinite = f" and {operand.num_not_finite} that are not finite" if operand.num_not_finite else ""
    return f"{operand.smallest:.3g} to {operand.largest:.3g}{infinite} in {operand.format}"


TrainingStyle = Literal["loop", "session", "own_amp", "lightning", "fabric", "accelerate", "transformers", "function"]
"""The code that trains: a loop that calls torch, a loop with a ``mezzo.Session`` or with its own autocast or GradScaler, a library, or a
function passed to ``mezzo.diagnose``."""

_SESSION = 'mezzo.Session(model, optimizer, policy="{policy}")'
_IN_CODE: dict[TrainingStyle, str] = {
    "lightning": 'Trainer(plugins=mezzo.compat.lightning.MezzoPrecision("{policy}"))',
    "fabric": 'Fabric(plugins=mezzo.compat.lightning.MezzoFabricPrecision("{policy}"))',
    "accelerate": 'mezzo.compat.accelerate.MezzoAccelerator(policy="{policy}")',
    "transformers": 'mezzo.compat.transformers.MezzoTrainer(..., policy="{policy}")',
}
"""How to pass a policy to a library that trains."""
_SCALER: dict[TrainingStyle, str] = {
    "lightning": "pass it on: Trainer(plugins=MixedPrecision('16-mixed', 'cuda', scaler=scaler))",
    "fabric": "pass it on: Fabric(plugins=MixedPrecision('16-mixed', scaler=scaler))",
    "accelerate": "Accelerator(kwargs_handlers=[GradScalerKwargs(init_scale={scale})]), which creates the scaler",
    "transformers": "TrainingArguments cannot pass it: type mezzo run --policy fp16:init_scale={scale}",
}
"""How to set the initial loss scale of a library's scaler."""
_BF16: dict[TrainingStyle, str] = {
    "lightning": 'Trainer(precision="bf16-mixed")',
    "fabric": 'Fabric(precision="bf16-mixed")',
    "accelerate": 'Accelerator(mixed_precision="bf16")',
    "transformers": "TrainingArguments(bf16=True)",
}
"""The argument that turns on BF16 autocast in a library."""


class WrittenFix(NamedTuple):
    """A fix in a script's own terms."""

    line: str = ""
    where: str = ""
    policy: str = ""
    """The policy to type, if the fix is one."""


def applies(offer: Offer, own: Policy | None, library: str) -> bool:
    """Return whether a script of ``library`` that trains under ``own`` can apply the fix: Keras keeps no single operation in FP32."""
    return library != "keras" or own is None or offer.policy is None or offer.policy.fp32 == own.fp32


def written(offer: Offer, record: DiagnoseRecord, own: Policy | None, caller: TrainingStyle) -> WrittenFix:
    """Return a fix as the script of ``record`` writes it.

    Args:
        offer: the fix.
        record: the fault.
        own: the policy that the script trains under; None for its own precision.
        caller: the code that trains.
    """
    at = f"at {record.line}" if record.line else "in the script"
    library, line, scale = record.run.library, offer.line, offer.changes.loss_scale
    if library == "keras":
        parts = keras.script_lines(own, offer.policy, scale=scale, kept=offer.kept_beyond(own))
        if parts:
            return WrittenFix(
                "; ".join(part.line for part in parts), offer.where or "; ".join(part.where for part in parts)
            )
        if line is not None:
            where = keras.AT_OPTIMIZER if line.place == "step" else at
            return WrittenFix(line.text(library), offer.where or where)
    if line is not None:
        return WrittenFix(line.text(library), offer.where or _place(line.place, scale, record, caller) or at)
    if offer.policy is None:
        return WrittenFix()
    policy = str(offer.policy)
    changes = paddle.script_lines(record.run.policy, offer.policy) if library == "paddle" else ""
    text = f'policy = "{policy}"'
    where = _of_policy(policy, record, caller, changes=changes)
    return WrittenFix(f"{changes}  # {text}" if changes else text, offer.where or where, policy)


def _place(place: LinePlace, scale: float | None, record: DiagnoseRecord, caller: TrainingStyle) -> str:
    """Return where a line belongs; empty at the line of the fault."""
    if place == "scaler":
        if caller in _SCALER and scale is not None:
            return _SCALER[caller].format(scale=scale)
        return "where the script creates its GradScaler" if record.own_scaler else "before the training loop"
    return {
        "forward": f"in the forward of {record.module or 'the model'}, around its operations",
        "autocast": _BF16.get(caller, "in place of the script's own autocast, and without its GradScaler"),
        "step": "between loss.backward() and optimizer.step()",
        "batch": "where the script reads a batch",
    }.get(place, "")


def _of_policy(policy: str, record: DiagnoseRecord, caller: TrainingStyle, *, changes: str) -> str:
    """Return how to pass a policy: on the command line, or in code, in Paddle by ``changes``."""
    typed = f"on the command line: --policy {policy}"
    in_session = f"in code: {_SESSION.format(policy=policy)}"
    if record.session_policy:
        return f"{in_session}; or on the command line, in its place: --policy {policy}"
    if record.run.library == "paddle":
        return f"{typed}; in code: the line before #, where the script turns on mixed precision" if changes else typed
    if caller == "function":
        return in_session
    inside = _IN_CODE.get(caller, _SESSION).format(policy=policy)
    removed = ", without the script's autocast and GradScaler" if caller == "own_amp" else ""
    return f"{typed}; in code: {inside}{removed}"
