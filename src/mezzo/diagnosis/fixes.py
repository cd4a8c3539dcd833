"""What to write against a value that is not finite. Imports no torch."""

from __future__ import annotations

import math

from mezzo.formats import FORMATS
from mezzo.records import Operand

HEADROOM = 2
"""Halvings that a suggested loss scale stays below the largest one that fits."""
SCRIPT = "(script)"
_LARGE = 1e30

Fix = tuple[str, str]
"""An advice and the line to write."""


def for_scale(form: str, *, at_scale_one: float, reached: float | None, own_scaler: bool) -> Fix:
    """Return what to do where a loss scale is too large.

    Args:
        form: the format's name.
        at_scale_one: the largest gradient without a loss scale, of the operation that overflowed first.
        reached: the scale that the run came down to; None where it is not known.
        own_scaler: whether the script's own GradScaler is in use.
    """
    room = FORMATS[form].max / max(at_scale_one, 1e-30)
    top = 16 if reached is None or reached <= 0 else math.floor(math.log2(reached))
    scale = 2 ** max(0, min(math.floor(math.log2(room)) - HEADROOM, top, 16))
    if own_scaler:
        return f"begin with a loss scale of {scale}", f"scaler = torch.amp.GradScaler(init_scale={float(scale)})"
    return f"begin with a loss scale of {scale} and let it be dynamic", f'policy = "{form}:init_scale={scale}"'


def for_range(form: str, *, module: str, op: str, own_precision: bool, backward: bool) -> Fix:
    """Return what to do where a format is too narrow."""
    if backward:
        advice = "gradients leave the format without any loss scale: take a mean in place of a sum in the loss, or BF16"
        return advice, "loss = loss / len(batch)"
    if module == SCRIPT:
        return f"compute {op} in FP32, or use BF16, which has FP32's range", "x = x.float()  # before this line"
    advice = f"keep {module} in FP32, or use BF16, which has FP32's range"
    if own_precision:
        return advice, "with torch.autocast(x.device.type, enabled=False):  # in its forward, on x.float()"
    return advice, f'policy = "{form}:fp32_modules={module}"'


def for_entered(*, parameter: bool, constant: bool) -> Fix:
    """Return what to do where a value was not finite before it was computed with."""
    if constant:
        return "the script puts a value here that is not finite, and it reaches the loss", ""
    if parameter:
        return "an update made a weight infinite or NaN: lower the learning rate, or raise the optimizer's eps", ""
    return "clean the data: no precision helps", "assert torch.isfinite(batch).all()"


def for_invalid(op: str, operands: list[Operand]) -> Fix:
    """Return what to do where an operation has no finite result in any format."""
    for names, advice, line in _INVALID:
        if any(name in op.split("_") or name == op for name in names):
            return advice, line
    if max((o.largest for o in operands), default=0.0) > _LARGE:
        return "values grow beyond FP32: lower the learning rate, or clip gradients", "clip_grad_norm_(parameters, 1.0)"
    return f"keep what {op} reads away from where it has no finite result", "x = x.clamp(min=1e-6)"


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
