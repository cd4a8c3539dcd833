"""What to write against a fault, the best first. Imports no torch.

What can be tried is tried before it is offered, by running the script with it (``mezzo.launch.several.trying``): a module or an
operation in FP32, BF16, another loss scale. A change of the script's own lines cannot, and the record says so.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from mezzo import oplists
from mezzo.errors import PolicyError
from mezzo.formats import FORMATS, FP16
from mezzo.observe.limits import HEADROOM
from mezzo.policy import Policy
from mezzo.records import AS_IS, DiagnoseRecord, Operand

_DEFAULT_SCALE = 65536.0
_LARGE = 1e30
_COSTLY = frozenset(("linear", "matmul", "mm", "addmm")).union(
    op.rsplit(".", maxsplit=1)[-1] for name in ("conv", "attention", "rnn") for op in oplists.BY_NAME[name].ops
)
"""Operations that are nearly all the work: with these in FP32 nothing is left of mixed precision."""
_IN_SCRIPT = "it changes the script itself"


class Offer(NamedTuple):
    """One possible fix, and how it is tried."""

    advice: str
    line: str
    policy: Policy | None = None
    """What to run the script under to try it; None for the run's own."""
    loss_scale: float | None = None
    """The loss scale to begin with, where the script has a scaler of its own."""
    fp32_modules: tuple[str, ...] = ()
    """Modules to keep in FP32 where the script's own precision is left alone."""

    @property
    def can_run(self) -> bool:
        """Whether a run can try it; a change of the script's own lines cannot be tried."""
        return self.policy is not None or self.loss_scale is not None or bool(self.fp32_modules)


def offered(
    found: DiagnoseRecord, *, untried: str = "a function cannot be run again from where it was"
) -> DiagnoseRecord:
    """Return ``found`` with the best fix, which was not tried because of ``untried``."""
    offers = offers_for(found)
    if not offers:
        return found
    first = offers[0]
    note = f"not tried: {untried if first.can_run else _IN_SCRIPT}"
    return found.model_copy(update={"fix": first.advice, "fix_line": first.line, "fix_note": note})


def offers_for(found: DiagnoseRecord) -> list[Offer]:
    """Return what may help against a fault, the best first."""
    if not found.located:
        return []
    if found.verdict == "scale_overflow":
        return _for_scale(found)
    if found.origin in ("entered", "constant"):
        return [_for_entered(found)]
    if found.verdict == "invalid_operation":
        return [_for_invalid(found.op, found.operands, forward=found.phase == "forward")]
    if found.verdict == "silent_saturation" and found.origin == "vanished" and found.phase == "backward":
        return _for_vanished(found)
    of_scale = found.phase == "backward" and found.origin == "made" and found.loss_scale > 1
    return [*(_for_scale(found)[:1] if of_scale else []), *_for_range(found)]


def in_the_script(found: DiagnoseRecord) -> str:
    """Return what a change of the script itself would do as well; nothing where there is no such change."""
    if found.origin == "refused":
        return "torch.finfo(x.dtype).min or max in the script, in place of the number, was not tried"
    if found.origin == "vanished" and found.verdict == "range_overflow":
        least = FORMATS[found.format].min_subnormal if found.format in FORMATS else 0.0
        return f"keeping what becomes 0 above {least:.1g} in the script was not tried"
    return ""


def wider(found: DiagnoseRecord, modules: tuple[str, ...]) -> Offer:
    """Return the offer to keep several modules in FP32: what one of them holds, the next may not take."""
    names = " and ".join(modules)
    if found.run.policy == AS_IS:
        line = "with torch.autocast(x.device.type, enabled=False):  # in their forward, on x.float()"
        return Offer(f"turn autocast off inside {names}", line, None, None, modules)
    policy = Policy.of(found.run.policy)
    kept = policy.replace(fp32_modules=tuple(dict.fromkeys((*policy.fp32_modules, *modules))))
    return Offer(f"keep {names} in FP32", f'policy = "{kept}"', kept)


# --- loss scales -----------------------------------------------------------------------------------------------------------------


def _for_scale(found: DiagnoseRecord) -> list[Offer]:
    """Offer a loss scale that fits, from the largest gradient without one and from what the run came down to; else BF16."""
    at_one = (found.largest or 0.0) / found.loss_scale
    room = FORMATS[found.format].max / max(at_one, 1e-30)
    reached = min((scale for scale in found.run.steps.loss_scale or [] if scale > 0), default=_DEFAULT_SCALE)
    exponent = min(math.floor(math.log2(room)) - HEADROOM, math.floor(math.log2(reached)), 16)
    bf16 = _bf16(found)
    if exponent < 0:
        return bf16
    scale = 2.0**exponent
    if found.run.policy == AS_IS:
        line = f"scaler = torch.amp.GradScaler(init_scale={scale})"
        return [Offer(f"begin with a loss scale of {scale:g}", line, None, scale), *bf16]
    policy = Policy.of(found.run.policy).replace(loss_scale="dynamic", init_scale=scale)
    advice = f"begin with a loss scale of {scale:g} and let it be dynamic"
    return [Offer(advice, f'policy = "{policy}"', policy), *bf16]


def _for_vanished(found: DiagnoseRecord) -> list[Offer]:
    """Offer a loss scale for gradients that are too small for the format; else BF16."""
    bf16 = _bf16(found)
    if found.run.policy != AS_IS:
        policy = Policy.of(found.run.policy).replace(loss_scale="dynamic", init_scale=_DEFAULT_SCALE)
        return [Offer("multiply the loss by a dynamic loss scale", f'policy = "{policy}"', policy), *bf16]
    if found.own_scaler:
        line = f"scaler = torch.amp.GradScaler(init_scale={_DEFAULT_SCALE})"
        return [Offer(f"begin with a loss scale of {_DEFAULT_SCALE:g}", line, None, _DEFAULT_SCALE), *bf16]
    line = "scaler = torch.amp.GradScaler()  # scaler.scale(loss).backward(), scaler.step(optimizer), scaler.update()"
    return [Offer("multiply the loss by a loss scale", line, Policy.parse(FP16.name)), *bf16]


# --- formats ---------------------------------------------------------------------------------------------------------------------


def _for_range(found: DiagnoseRecord) -> list[Offer]:
    """Offer FP32 for the module, or for the operation where no module has a name, then BF16."""
    module = [wider(found, (found.pattern,))] if found.pattern else []
    operation = _operation(found)
    costly = found.op in _COSTLY
    offers = [*module, *_bf16(found), *operation] if costly else [*module, *operation, *_bf16(found)]
    return offers or [Offer(f"compute {found.op} in FP32", "x = x.float()  # before this line")]


def _operation(found: DiagnoseRecord) -> list[Offer]:
    name = found.op.rsplit(".", maxsplit=1)[-1]
    if found.run.policy == AS_IS:
        return []
    policy = Policy.of(found.run.policy)
    if not policy.lowers:
        return []
    try:
        lists = {field: tuple(n for n in getattr(policy, field) if n != name) for field in ("lower", "widest")}
        changed = policy.replace(fp32=tuple(dict.fromkeys((*policy.fp32, name))), **lists)
    except PolicyError:  # an operation that no list has
        return []
    return [Offer(f"compute {name} in FP32", f'policy = "{changed}"', changed)] if changed != policy else []


def _bf16(found: DiagnoseRecord) -> list[Offer]:
    advice = "train in BF16, which has FP32's range"
    if found.run.policy == AS_IS:
        line = "torch.autocast(device_type, dtype=torch.bfloat16)  # and no GradScaler"
        return [Offer(advice, line, Policy.parse("bf16"))] if found.format == FP16.name else []
    policy = Policy.of(found.run.policy)
    if policy.compute != FP16.name:
        return []
    plain = Policy.parse(policy.name.replace(FP16.name, "bf16"))
    kept = {
        name: getattr(policy, name) for name in ("lower", "fp32", "widest", "fp32_modules", "arithmetic", "op_lists")
    }
    changed = plain.replace(**kept)
    return [Offer(advice, f'policy = "{changed}"', changed)]


# --- the script's own lines ------------------------------------------------------------------------------------------------------


def _for_entered(found: DiagnoseRecord) -> Offer:
    if found.origin == "constant":
        return Offer("the script puts a value here that is not finite, and it reaches the loss", "")
    if found.parameter:
        return Offer(
            "an update made a weight infinite or NaN: lower the learning rate, or raise the optimizer's eps", ""
        )
    return Offer("clean the data: no precision helps", "assert torch.isfinite(batch).all()")


def _for_invalid(op: str, operands: list[Operand], *, forward: bool) -> Offer:
    if not operands:
        return Offer(f"{op} gets no values here: leave it out where there are none", "if x.numel():")
    if any(o.num_not_finite for o in operands) and "softmax" not in op:
        advice = "an infinity that the script puts there meets 0 or another infinity: take it out before"
        return Offer(advice, "x = torch.where(x.isfinite(), x, 0)")
    if forward and op in ("std", "var"):
        return Offer(
            "a single value has no deviation: pass more of them, or divide by their number", "y = x.std(correction=0)"
        )
    for names, advice, line in _INVALID:
        if any(name in op.split("_") or name == op for name in names):
            return Offer(advice, line)
    if max((o.largest for o in operands), default=0.0) > _LARGE:
        return Offer(
            "values grow beyond FP32: lower the learning rate, or clip gradients", "clip_grad_norm_(parameters, 1.0)"
        )
    return Offer(f"keep what {op} reads away from where it has no finite result", "x = x.clamp(min=1e-6)")


_INVALID: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (("sqrt",), "the derivative of a root at 0 is infinite: keep its argument above 0", "y = torch.sqrt(x + 1e-12)"),
    (("rsqrt", "reciprocal"), "1 / 0 is infinite: keep the argument above 0", "y = torch.rsqrt(x + 1e-6)"),
    (("log", "log2", "log10"), "the logarithm needs an argument above 0", "y = torch.log(x.clamp_min(1e-6))"),
    (("log1p",), "the argument must be above -1", "y = torch.log1p(x.clamp_min(-1 + 1e-6))"),
    (("div",), "keep the divisor away from 0", "y = a / b.clamp_min(1e-6)"),
    (("pow",), "keep the base above 0 where the exponent is below 1", "y = x.clamp_min(1e-12).pow(p)"),
    (("norm", "std", "var"), "it has no derivative at 0", "y = (x * x).sum(-1).add(1e-12).sqrt()"),
    (("exp",), "clamp the argument: FP32's exponential ends at 88", "y = x.clamp_max(80).exp()"),
    (("acos", "asin", "atanh"), "keep the argument inside (-1, 1)", "y = x.clamp(-1 + 1e-6, 1 - 1e-6).acos()"),
    (("softmax",), "a row that is all masked has no softmax", "mask = mask & ~mask.all(-1, keepdim=True)"),
)
