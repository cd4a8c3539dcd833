"""A possible fix as data: what it changes, and the line that writes it in the words of each framework. Imports no framework."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal, NamedTuple

from mezzo.formats import FP16
from mezzo.observe.settings import FORMATS_OF_16_BITS, TrialChanges
from mezzo.policy import Policy

LinePlace = Literal["line", "scaler", "forward", "autocast", "step", "batch"]
"""Where a line belongs: at the line of the fault; where a GradScaler is created; in the module's forward; in place of the script's
autocast; between the backward pass and the update; where a batch is read."""


class ScriptLine(NamedTuple):
    """A line of a script in each framework."""

    torch: str
    keras: str
    paddle: str
    place: LinePlace = "line"


class Offer(NamedTuple):
    """A possible fix, and how to try it."""

    advice: str
    line: ScriptLine | None = None
    """What to write; None for a policy, and for advice without a line."""
    policy: Policy | None = None
    """The policy under which to try it; None for the run's own."""
    changes: TrialChanges = TrialChanges()
    """What the line changes about the script's own precision, as a run makes it."""
    where: str = ""
    """Where to write the line; empty if that follows from the line and the kind of script."""

    @property
    def can_run(self) -> bool:
        """Whether a run can try it."""
        return self.policy is not None or bool(self.changes)

    def kept_beyond(self, policy: Policy | None) -> tuple[str, ...]:
        """Return the modules that it keeps in FP32 and ``policy``, the one of the script's run, does not."""
        before = () if policy is None else policy.fp32_modules
        after = () if self.policy is None else self.policy.fp32_modules
        return tuple(name for name in dict.fromkeys((*self.changes.fp32_modules, *after)) if name not in before)


def everywhere(line: str) -> ScriptLine:
    """Return a line that is the same in each framework."""
    return ScriptLine(line, line, line)


def new_scaler(scale: float | None = None) -> ScriptLine:
    """Return the line that creates a GradScaler; without a scale, one that is new to the script. Keras wraps its optimizer."""
    if scale is None:
        use = "  # scaler.scale(loss).backward(), scaler.step(optimizer), scaler.update()"
        return ScriptLine(
            f"scaler = torch.amp.GradScaler(){use}", "", f"scaler = paddle.amp.GradScaler(){use}", "scaler"
        )
    torch, paddle = f"torch.amp.GradScaler(init_scale={scale})", f"paddle.amp.GradScaler(init_loss_scaling={scale})"
    return ScriptLine(f"scaler = {torch}", "", f"scaler = {paddle}", "scaler")


AUTOCAST_OFF = ScriptLine(
    "with torch.autocast(x.device.type, enabled=False):  # in their forward, on x.float()",
    "",  # the dtype of layers
    'with paddle.amp.auto_cast(enable=False):  # in their forward, on x.astype("float32")',
    "forward",
)
OWN_BF16 = ScriptLine(
    "torch.autocast(device_type, dtype=torch.bfloat16)  # and no GradScaler",
    "",  # the dtype policy
    'paddle.amp.auto_cast(dtype="bfloat16")  # and no GradScaler',
    "autocast",
)
CAST = ScriptLine(
    "x = x.float()  # before this line",
    'x = keras.ops.cast(x, "float32")  # before this line',
    'x = x.astype("float32")  # before this line',
)
CHECK_DATA = ScriptLine(
    "assert torch.isfinite(batch).all()",
    "assert np.isfinite(batch).all()",
    "assert paddle.isfinite(batch).all()",
    "batch",
)
CLIP = ScriptLine(
    "clip_grad_norm_(parameters, 1.0)",
    "clipnorm=1.0  # argument of the optimizer",
    "paddle.nn.utils.clip_grad_norm_(parameters, 1.0)",
    "step",
)
NOT_EMPTY = ScriptLine("if x.numel():", "if keras.ops.size(x):", "if x.size:")
OF_ALL = ScriptLine("y = x.std(correction=0)", "y = keras.ops.std(x)", "y = x.std(unbiased=False)")
AT_LEAST = ScriptLine("x = x.clamp(min=1e-6)", "x = keras.ops.maximum(x, 1e-6)", "x = x.clip(min=1e-6)")
MASK_AFTER = ScriptLine(
    'y = (x / t).masked_fill(mask, float("-inf"))',
    'y = keras.ops.where(mask, float("-inf"), x / t)',
    'y = (x / t).masked_fill(mask, float("-inf"))',
)
MASK_FINITE = ScriptLine(
    "x = x.masked_fill(mask, torch.finfo(x.dtype).min)",
    "x = keras.ops.where(mask, -1e30, x)",
    "x = x.masked_fill(mask, paddle.finfo(x.dtype).min)",
)
MASK_BEFORE = ScriptLine(
    "y = p * logs.masked_fill(p == 0, 0.0)",
    "y = p * keras.ops.where(p == 0, 0.0, logs)",
    "y = p * logs.masked_fill(p == 0, 0.0)",
)
"""Its gradient is finite as well: where the product itself is filled, 0 times the infinity returns in the backward pass."""


class Domain(NamedTuple):
    """Operations with arguments at which they are not finite, and how to keep away from these."""

    ops: tuple[str, ...]
    advice: str
    torch: str
    """The line, in which ``{end}`` and ``{x}`` are filled in for the formats of the operands."""
    keras: str
    paddle: str
    end: str = ""
    """The number that keeps the argument away."""
    end_in_fp16: str = ""
    """FP16 rounds 1e-12 to 0, does not hold the slopes of roots and logarithms near 1e-6, and ends at the exponential of 11."""
    in_fp32: bool = False
    """Whether no 16-bit format holds the line's numbers: none has one between 1 and 1 - 1e-6."""

    def line(self, formats: Collection[str]) -> ScriptLine:
        """Return the line that works on operands of ``formats``."""
        end = self.end_in_fp16 if self.end_in_fp16 and FP16.name in formats else self.end
        wide = self.in_fp32 and not set(formats).isdisjoint(FORMATS_OF_16_BITS)
        casts = ("x.float()", 'keras.ops.cast(x, "float32")', 'x.astype("float32")') if wide else ("x", "x", "x")
        lines = zip((self.torch, self.keras, self.paddle), casts, strict=True)
        torch, keras, paddle = (line.format(x=x, end=end) for line, x in lines)
        return ScriptLine(torch, keras, paddle)


NO_ROOT = Domain(
    ops=("sqrt",),
    advice="a negative number has no root: keep the argument at or above 0",
    torch="y = torch.sqrt(x.clamp_min({end}))",
    keras="y = keras.ops.sqrt(keras.ops.maximum(x, {end}))",
    paddle="y = paddle.sqrt(x.clip(min={end}))",
    end="1e-12",
    end_in_fp16="1e-4",
)
"""In a forward pass; in a backward pass, the derivative at 0 is the fault."""
DOMAINS = (
    Domain(
        ops=("sqrt",),
        advice="the derivative of a root at 0 is infinite: keep its argument above 0",
        torch="y = torch.sqrt(x + {end})",
        keras="y = keras.ops.sqrt(x + {end})",
        paddle="y = paddle.sqrt(x + {end})",
        end="1e-12",
        end_in_fp16="1e-4",
    ),
    Domain(
        ops=("rsqrt", "reciprocal"),
        advice="1 / 0 is infinite: keep the argument above 0",
        torch="y = torch.rsqrt(x + {end})",
        keras="y = keras.ops.rsqrt(x + {end})",
        paddle="y = paddle.rsqrt(x + {end})",
        end="1e-6",
        end_in_fp16="1e-2",
    ),
    Domain(
        ops=("log", "log2", "log10"),
        advice="the logarithm needs an argument above 0",
        torch="y = torch.log(x.clamp_min({end}))",
        keras="y = keras.ops.log(keras.ops.maximum(x, {end}))",
        paddle="y = paddle.log(x.clip(min={end}))",
        end="1e-6",
        end_in_fp16="1e-4",
    ),
    Domain(
        ops=("log1p",),
        advice="the argument must be above -1",
        torch="y = torch.log1p({x}.clamp_min(-1 + 1e-6))",
        keras="y = keras.ops.log1p(keras.ops.maximum({x}, -1 + 1e-6))",
        paddle="y = paddle.log1p({x}.clip(min=-1 + 1e-6))",
        in_fp32=True,
    ),
    Domain(
        ops=("div", "divide"),
        advice="keep the divisor away from 0",
        torch="y = a / torch.where(b.abs() < 1e-6, 1.0, b)",
        keras="y = a / keras.ops.where(keras.ops.abs(b) < 1e-6, 1.0, b)",
        paddle="y = a / paddle.where(b.abs() < 1e-6, 1.0, b)",
    ),
    Domain(
        ops=("pow",),
        advice="keep the base above 0 where the exponent is below 1",
        torch="y = x.clamp_min({end}).pow(p)",
        keras="y = keras.ops.power(keras.ops.maximum(x, {end}), p)",
        paddle="y = x.clip(min={end}).pow(p)",
        end="1e-12",
        end_in_fp16="1e-4",
    ),
    Domain(
        ops=("norm", "std", "var"),
        advice="it has no derivative at 0",
        torch="y = (x * x).sum(-1).add({end}).sqrt()",
        keras="y = keras.ops.sqrt(keras.ops.sum(x * x, -1) + {end})",
        paddle="y = ((x * x).sum(-1) + {end}).sqrt()",
        end="1e-12",
        end_in_fp16="1e-4",
    ),
    Domain(
        ops=("exp",),
        advice="clamp the argument: FP32's exponential ends at 88",
        torch="y = x.clamp_max({end}).exp()",
        keras="y = keras.ops.exp(keras.ops.minimum(x, {end}))",
        paddle="y = x.clip(max={end}).exp()",
        end="80",
        end_in_fp16="10",
    ),
    Domain(
        ops=("acos", "asin", "atanh"),
        advice="keep the argument inside (-1, 1)",
        torch="y = {x}.clamp(-1 + 1e-6, 1 - 1e-6).acos()",
        keras="y = keras.ops.arccos(keras.ops.clip({x}, -1 + 1e-6, 1 - 1e-6))",
        paddle="y = {x}.clip(-1 + 1e-6, 1 - 1e-6).acos()",
        in_fp32=True,
    ),
    Domain(
        ops=("softmax",),
        advice="a row that is all masked has no softmax",
        torch="mask = mask & ~mask.all(-1, keepdim=True)",
        keras="mask = keras.ops.logical_or(mask, ~keras.ops.any(mask, -1, keepdims=True))",
        paddle="mask = mask & ~mask.all(-1, keepdim=True)",
    ),
)
"""The first row that names an operation counts."""
