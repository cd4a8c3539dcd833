"""Possible fixes of a fault, the best first, and which of them helped. Imports no torch.

A fix that a run can try (a module, an operation or a line in FP32, BF16, another loss scale, another eps) is tried before it is offered,
as it is printed: the script runs with it up to the step of the fault. Any other change cannot be tried, and the record says so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from mezzo import oplists
from mezzo.commands.diagnose import offers as lines
from mezzo.commands.diagnose.offers import DOMAINS, NO_ROOT, Offer
from mezzo.commands.diagnose.words import TrainingStyle, applies, written
from mezzo.errors import PolicyError
from mezzo.formats import FORMATS, FP16
from mezzo.observe.module_names import outermost
from mezzo.observe.settings import FORMATS_OF_16_BITS, SCALE_HEADROOM, TrialChanges
from mezzo.policy import Policy
from mezzo.records import AS_IS, DiagnoseRecord, Operand

_DEFAULT_SCALE = 65536.0
_LARGE = 1e30
_LARGE_SQUARE = 1e19
"""The square of a larger number is beyond FP32."""
_GROWS = frozenset({"pow", "square", "mul", "multiply", "norm"})
_COSTLY = frozenset(("linear", "matmul", "mm", "addmm")).union(
    op.rsplit(".", maxsplit=1)[-1] for name in ("conv", "attention", "rnn") for op in oplists.BY_NAME[name].ops
)
"""Operations that do nearly all the work: with these in FP32, little of mixed precision is left."""
_IN_SCRIPT = "it is a change of the script itself"
_MAX_TRIALS = 5
"""The largest number of runs to find a fix."""
_MAX_MODULES = 3
TRAIN_LONGER = (
    "let the script train for {} steps or more, and diagnose them: then it is known where the loss scale settles"
)
RUN_AGAIN = "set the script's seeds and run it again, so that the step can be inspected"
"""The fix of a fault whose operation was not inspected."""
DIVERGES = "lower the learning rate, or clip the gradients"


class Tried(NamedTuple):
    """One fix that was tried."""

    offer: Offer
    again: DiagnoseRecord | None
    """The verdict on the script with it; None if its process died."""


def offered(record: DiagnoseRecord, *, untried: str, caller: TrainingStyle) -> DiagnoseRecord:
    """Return ``record`` with the best fix, which was not tried because of ``untried``."""
    offers = offers_for(record)
    if not offers:
        return record
    first = offers[0]
    note = f"not tried: {untried if first.can_run else _IN_SCRIPT}"
    return _with(record, first, caller, {"fix_note": note})


def _with(record: DiagnoseRecord, offer: Offer, caller: TrainingStyle, tried: dict[str, object]) -> DiagnoseRecord:
    """Return ``record`` with a fix as its script writes it."""
    line, where, policy = written(offer, record, _policy(record), caller)
    fix = {"fix": offer.advice, "fix_line": line, "fix_where": where, "fix_policy": policy}
    return record.model_copy(update={**fix, **tried})


def offers_for(record: DiagnoseRecord) -> list[Offer]:
    """Return the fixes that may help against a fault, the best first."""
    offers: list[Offer] = []
    for offer in _applied(_offers(record), record):
        if not offer.can_run or not _is_among(offer, offers):
            offers.append(offer)
    return offers


def _applied(offers: list[Offer], record: DiagnoseRecord) -> list[Offer]:
    """Return the offers that the script's framework can apply."""
    own = _policy(record)
    return [offer for offer in offers if applies(offer, own, record.run.library)]


def _policy(record: DiagnoseRecord) -> Policy | None:
    """Return the policy that the script trains under: the command's, or its own session's; None for other precision of its own."""
    named = record.session_policy if record.run.policy == AS_IS else record.run.policy
    return Policy.of(named) if named else None


def _offers(record: DiagnoseRecord) -> list[Offer]:
    if record.origin == "raised":
        narrow = any(o.format in FORMATS_OF_16_BITS for o in record.operands)
        module = [_wider(record, (record.pattern,))] if record.pattern else []
        return [*_line(record), *module] if narrow else []
    if not record.located:
        return []
    if record.verdict == "scale_overflow" and record.steps_needed is not None:
        return []
    if record.verdict == "scale_overflow" and record.settled_scale is not None:
        return _for_range(record)  # a scale that fits is what loses the small gradients
    if record.verdict == "scale_overflow":
        return _for_scale(record)
    if record.zero_eps is not None and record.format in FORMATS:
        return [_for_eps(record), *_bf16(record)]
    if record.phase == "update" and record.op.endswith(".step"):
        wider = _bf16(record) if record.verdict == "range_overflow" else []
        return [*wider, _for_update(record.op)]
    if record.origin in ("entered", "constant"):
        return [_for_entered(record)]
    if record.verdict == "invalid_operation":
        return [_for_invalid(record.op, record.operands, forward=record.phase == "forward")]
    if record.verdict == "silent_saturation" and record.origin == "made" and record.largest is None:
        return [_beyond_fp32(record.op)]
    if record.verdict == "silent_saturation" and record.origin == "vanished" and record.phase == "backward":
        return _for_vanished(record)
    of_scale = (
        record.phase == "backward" and record.origin == "made" and record.loss_scale > 1 and record.largest is not None
    )
    return [*(_for_scale(record)[:1] if of_scale else []), *_for_range(record)]


def next_offer(record: DiagnoseRecord, tried: Sequence[Tried], *, last: int) -> Offer | None:
    """Return the fix to try next; None once a fix made the script healthy up to step ``last``, or if none is left.

    A fix may only move the fault to another module or to a later step: then it is tried together with a fix of that fault. Combinations
    of two kinds of fixes come after all single ones.
    """
    waiting = [offer for offer in offers_for(record) if offer.can_run]
    done: list[Offer] = []
    for offer, outcome in tried:
        if helped(outcome, last):
            return None
        done.append(offer)
        more, another = _more_modules(offer, record, outcome), _with_another(offer, record, outcome)
        first, later = _applied(more, record), _applied(another, record)
        known = [*done, *waiting]
        waiting = [*_new(first, known), *waiting[1:], *_new(later, known)]
    return waiting[0] if waiting and len(tried) < _MAX_TRIALS else None


def settled(record: DiagnoseRecord, tried: Sequence[Tried], *, last: int, caller: TrainingStyle) -> DiagnoseRecord:
    """Return ``record`` with the fix that helped, or with a note on those that did not."""
    for offer, outcome in tried:
        if outcome is not None and helped(outcome, last):
            return _with_fix(record, offer, outcome, caller)
    offers = offers_for(record)
    if not tried or any(not offer.can_run for offer in offers):
        return offered(record, untried="no further run was made", caller=caller)
    if record.origin == "raised" and any(
        again is not None and again.run.error == record.run.error for _, again in tried
    ):
        return record.model_copy(update={"fix_note": "the error is the same in FP32: the format is not its cause"})
    first = tried[0].offer.advice
    several = f"none of these is enough: {'; '.join(offer.advice for offer, _ in tried)}"
    advice = several if len(tried) > 1 else f"not enough: {first}"
    note = "; ".join(filter(None, [_farthest(record, tried), _next_step(record, tried)]))
    return record.model_copy(update={"fix": advice, "fix_line": "", "fix_tried": False, "fix_note": note})


def farthest_step(record: DiagnoseRecord, tried: Sequence[Tried]) -> int:
    """Return the step in which the script fails with the best fix; 0 if no fix moved the fault to a later step."""
    reached = max(map(_reached, tried), default=0)
    return reached if reached > record.step else 0


def _farthest(record: DiagnoseRecord, tried: Sequence[Tried]) -> str:
    """Return which fix brought the script farthest, and what failed there; empty if none moved the fault."""
    best = max(tried, key=_reached)
    if best.again is None or not farthest_step(record, tried):
        return ""
    where = f" at {best.again.op}() of {best.again.module}" if best.again.located else ""
    return (
        f"the best of them, {best.offer.advice}, fails in step {best.again.step} instead of step {record.step}{where}"
    )


def _reached(trial: Tried) -> int:
    return 0 if trial.again is None else trial.again.step


def _next_step(record: DiagnoseRecord, tried: Sequence[Tried]) -> str:
    if _casts_itself(record):
        return f"change the cast to {record.format} in the script"
    if record.fails_in_fp32:
        return f"the training fails in FP32 too: {DIVERGES}"
    outcome = max(tried, key=_reached).again
    explained = outcome is not None and (outcome.located or outcome.origin == "norm")
    if outcome is not None and explained and farthest_step(record, tried) and outcome.verdict == "invalid_operation":
        advice = [offer.advice for offer in offers_for(outcome)] or [DIVERGES]
        return f"no precision fixes that one: {advice[0]}"
    return "mezzo fallback searches for a set of modules to keep in FP32"


def _casts_itself(record: DiagnoseRecord) -> bool:
    """Return whether the script itself chose the format that the value left."""
    return bool(record.own_cast) and record.own_cast == record.format


def _with_fix(record: DiagnoseRecord, offer: Offer, outcome: DiagnoseRecord, caller: TrainingStyle) -> DiagnoseRecord:
    count = len(outcome.run.steps)
    how = "with it" if offer.policy is None or str(offer.policy) == record.run.policy else f"under {offer.policy}"
    note = f"tried: the script ran {count} step{'s' if count != 1 else ''} {how}, and nothing is wrong"
    note = "; ".join(filter(None, [note, _in_the_script(record)]))
    return _with(record, offer, caller, {"fix_tried": True, "fix_note": note})


def helped(outcome: DiagnoseRecord | None, last: int) -> bool:
    """Return whether a run reached step ``last`` and is healthy, its loss scale found."""
    if outcome is None or not any(not skipped for skipped in outcome.run.steps.skipped):
        return False
    return outcome.verdict == "healthy" and len(outcome.run.steps) >= last


def _more_modules(offer: Offer, record: DiagnoseRecord, outcome: DiagnoseRecord | None) -> list[Offer]:
    """Return the offer to keep the module to which the fault has moved in FP32 as well."""
    kept = offer.kept_beyond(_policy(record))
    if outcome is None or not outcome.pattern or record.pattern not in kept or len(kept) >= _MAX_MODULES:
        return []
    same = outcome.pattern in kept or outcome.verdict not in ("range_overflow", "silent_saturation")
    return [] if same else [_wider(record, outermost((*kept, outcome.pattern)))]


def _with_another(offer: Offer, record: DiagnoseRecord, outcome: DiagnoseRecord | None) -> list[Offer]:
    """Return ``offer`` together with a fix of another kind, for the fault that it leaves in a later step."""
    if outcome is None or not outcome.located or outcome.step <= record.step or outcome.run.policy == AS_IS:
        return []
    if _more_modules(offer, record, outcome):
        return []
    compute = Policy.of(outcome.run.policy).compute
    more = [other for other in offers_for(outcome) if other.policy is not None and other.policy.compute == compute]
    return [other._replace(advice=f"{offer.advice}, and {other.advice}") for other in more[:1]]


def _new(offers: Sequence[Offer], known: Sequence[Offer]) -> list[Offer]:
    return [offer for offer in offers if not _is_among(offer, known)]


def _is_among(offer: Offer, others: Sequence[Offer]) -> bool:
    """Return whether one of ``others`` would run the script in the same way."""
    return any((offer.policy, offer.changes) == (other.policy, other.changes) for other in others)


def _in_the_script(record: DiagnoseRecord) -> str:
    """Return an untried change to the script that would help as well; empty if there is none."""
    if record.origin == "refused":
        return "writing torch.finfo(x.dtype).min or max in place of the number in the script was not tried"
    if record.origin == "vanished" and record.verdict == "range_overflow":
        least = FORMATS[record.format].min_subnormal if record.format in FORMATS else 0.0
        return f"keeping the value that becomes 0 above {least:.1g} in the script was not tried"
    return ""


def _wider(record: DiagnoseRecord, modules: tuple[str, ...]) -> Offer:
    """Return the offer to keep modules in FP32: several, if the values of one overflow again in the next."""
    names, policy = " and ".join(modules), _policy(record)
    if policy is None:
        in_keras = record.run.library == "keras"
        advice = f"keep {names} in FP32" if in_keras else f"turn autocast off inside {names}"
        return Offer(advice, lines.AUTOCAST_OFF, changes=TrialChanges(fp32_modules=modules))
    kept = policy.replace(fp32_modules=tuple(dict.fromkeys((*policy.fp32_modules, *modules))))
    return Offer(f"keep {names} in FP32", policy=kept)


def _for_scale(record: DiagnoseRecord) -> list[Offer]:
    """Offer a loss scale that fits the largest gradient and is no larger than the run's lowest, and BF16."""
    at_one, bf16 = (record.largest or 0.0) / record.loss_scale, _bf16(record)
    if record.format not in FORMATS or not math.isfinite(at_one):  # a complex format, for example
        return bf16
    room = FORMATS[record.format].max / max(at_one, 1e-30)
    reached = min((scale for scale in record.run.steps.loss_scale or [] if scale > 0), default=_DEFAULT_SCALE)
    exponent = min(math.floor(math.log2(room)) - SCALE_HEADROOM, math.floor(math.log2(reached)), 16)
    if exponent < 0:
        return bf16
    scale = 2.0**exponent
    own = _policy(record)
    if own is None and record.static_scale:
        line = f"scale = {scale}  # in place of the script's {record.loss_scale:g}, wherever it multiplies or divides by it"
        changes = TrialChanges(own_scale=(record.loss_scale, scale))
        return [Offer(f"lower the static loss scale to {scale:g}", lines.everywhere(line), changes=changes), *bf16]
    if own is None:
        return [_scaled(scale), *bf16]
    policy = own.replace(loss_scale="dynamic", init_scale=scale)
    advice = f"begin with a loss scale of {scale:g} and let it be dynamic"
    return [Offer(advice, policy=policy), *bf16]


def _scaled(scale: float) -> Offer:
    """Return the offer to begin the script's own loss scale with ``scale``."""
    advice = f"begin with a loss scale of {scale:g}"
    return Offer(advice, lines.new_scaler(scale), changes=TrialChanges(loss_scale=scale))


def _for_vanished(record: DiagnoseRecord) -> list[Offer]:
    """Offer a loss scale for gradients that are too small for the format, and BF16."""
    bf16, own = _bf16(record), _policy(record)
    if own is not None:
        policy = own.replace(loss_scale="dynamic", init_scale=_DEFAULT_SCALE)
        return [Offer("multiply the loss by a dynamic loss scale", policy=policy), *bf16]
    if record.own_scaler:
        return [_scaled(_DEFAULT_SCALE), *bf16]
    return [Offer("multiply the loss by a loss scale", lines.new_scaler(), Policy.parse(FP16.name)), *bf16]


def _for_range(record: DiagnoseRecord) -> list[Offer]:
    """Offer FP32 for the module if it has a name, FP32 for the operation, and BF16."""
    module = [_wider(record, (record.pattern,))] if record.pattern else []
    by_name, by_line = _operation(record), _line(record)
    costly = record.op in _COSTLY
    # A policy's lists do not reach what the script itself casts.
    operation = (by_line or by_name) if _casts_itself(record) else (by_name or by_line)
    offers = [*module, *_bf16(record), *operation] if costly else [*module, *operation, *_bf16(record)]
    return offers or [Offer(f"compute {record.op} in FP32", lines.CAST)]


def _line(record: DiagnoseRecord) -> list[Offer]:
    """Offer FP32 for the operations of the script's line, where no policy lowers them."""
    if not record.line or not _in_torch(record):
        return []
    advice = f"compute the line of {record.op} in FP32"
    line = "with torch.autocast(x.device.type, enabled=False):  # and x.float() for the line's 16-bit operands"
    changes = TrialChanges(fp32_line=record.line)
    return [Offer(advice, lines.everywhere(line), changes=changes, where=f"around {record.line}")]


def _in_torch(record: DiagnoseRecord) -> bool:
    """Return whether a run can change the script's own calls, as only PyTorch's can be."""
    return record.run.library == "torch"


def _for_eps(record: DiagnoseRecord) -> Offer:
    """Offer the smallest power of ten that is a normal number of the weight's format."""
    eps = 10.0 ** math.ceil(math.log10(FORMATS[record.format].min_normal))
    optimizer = record.op.removesuffix(".step")
    advice = f"raise eps to {eps:g}, which {record.format.upper()} can represent, or keep the weights in FP32"
    line = lines.everywhere(f"optimizer = {optimizer}(..., eps={eps:g})")
    return Offer(advice, line, changes=TrialChanges(eps=eps))


def _operation(record: DiagnoseRecord) -> list[Offer]:
    name = record.op.rsplit(".", maxsplit=1)[-1]
    policy = _policy(record)
    if policy is None or not policy.lowers or not oplists.is_listed(name):
        return []
    try:
        lists = {field: tuple(n for n in getattr(policy, field) if n != name) for field in ("lower", "widest")}
        changed = policy.replace(fp32=tuple(dict.fromkeys((*policy.fp32, name))), **lists)
    except PolicyError:  # another list has its family
        return []
    return [Offer(f"compute {name} in FP32", policy=changed)] if changed != policy else []


def _bf16(record: DiagnoseRecord) -> list[Offer]:
    advice, policy = "train in BF16, which has FP32's range", _policy(record)
    if policy is None:
        if record.format != FP16.name:
            return []
        if not _in_torch(record):
            return [Offer(advice, lines.OWN_BF16, Policy.parse("bf16"))]
        line = (
            "dtype=torch.bfloat16  # for each torch.float16 of the script, .bfloat16() for .half(), and no GradScaler"
        )
        changes = TrialChanges(own_format="bf16")
        return [Offer(advice, lines.everywhere(line), changes=changes, where="wherever the script names FP16")]
    if policy.compute != FP16.name:
        return []
    plain = Policy.parse(policy.name.replace(FP16.name, "bf16"))
    kept = {
        name: getattr(policy, name) for name in ("lower", "fp32", "widest", "fp32_modules", "arithmetic", "op_lists")
    }
    changed = plain.replace(**kept)
    return [Offer(advice, policy=changed)]


def _for_entered(record: DiagnoseRecord) -> Offer:
    if record.origin == "constant":
        return Offer("the script creates a value here that is not finite, and it reaches the loss")
    if record.parameter:
        return _for_update("an update")
    return Offer("clean the data: no precision helps", lines.CHECK_DATA)


def _for_update(step: str) -> Offer:
    return Offer(f"{step} made a weight infinite or NaN: lower the learning rate, or raise the optimizer's eps")


def _beyond_fp32(op: str) -> Offer:
    advice = f"divide what {op} reads by its largest magnitude, or compute the line in FP64: BF16 ends where FP32 does"
    return Offer(advice)


def _for_invalid(op: str, operands: list[Operand], *, forward: bool) -> Offer:
    if not operands:
        return Offer(f"{op} has no values to work on: skip it for empty tensors", lines.NOT_EMPTY)
    if any(o.num_not_finite for o in operands) and "softmax" not in op:
        is_0 = any(o.smallest == 0 for o in operands)
        return _ZERO_TIMES_INFINITY if forward and is_0 and op in ("mul", "multiply") else _of_infinities(op)
    if forward and op in ("std", "var"):
        advice = "a single value has no standard deviation: pass more values, or divide by their number"
        return Offer(advice, lines.OF_ALL)
    formats = {o.format for o in operands}
    if forward and op in ("sqrt", "sqrt_"):
        return Offer(NO_ROOT.advice, NO_ROOT.line(formats))
    if op in _GROWS and min(o.smallest for o in operands) > 0 and max(o.largest for o in operands) > _LARGE_SQUARE:
        return _TOO_LARGE
    for domain in DOMAINS:
        if any(name in op.split("_") or name == op for name in domain.ops):
            return Offer(domain.advice, domain.line(formats))
    if max((o.largest for o in operands), default=0.0) > _LARGE:
        return _TOO_LARGE
    return Offer(f"keep the input of {op} in the range where its result is finite", lines.AT_LEAST)


def _of_infinities(op: str) -> Offer:
    """Return a fix that keeps a mask: with 0 in the place of its infinities, it would let through what it hides."""
    if op in _SCALES:
        advice = f"an infinity that the script creates, as in a mask, meets 0 in {op} or its gradient: mask the result instead"
        return Offer(advice, lines.MASK_AFTER)
    advice = "an infinity that the script creates, as in a mask, meets 0 or another infinity: create a large finite number instead"
    return Offer(advice, lines.MASK_FINITE)


_TOO_LARGE = Offer("values grow beyond FP32: lower the learning rate, or clip gradients", lines.CLIP)
_ZERO_TIMES_INFINITY = Offer(
    "an infinity that the script creates, as in a mask, is multiplied by 0, as in p * log p: put 0 in its place before the product",
    lines.MASK_BEFORE,
)
_SCALES = ("div", "divide", "true_divide", "mul", "multiply")
