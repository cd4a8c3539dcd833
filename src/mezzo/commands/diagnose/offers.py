"""A possible fix as data: what it changes, and the line that writes it. Imports no framework."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal, NamedTuple

from mezzo.formats import FP16
from mezzo.frameworks import framework_called
from mezzo.observe.settings import FORMATS_OF_16_BITS, TrialChanges
from mezzo.policy import Policy

LinePlace = Literal["line", "scaler", "forward", "autocast", "step", "batch"]
"""Where a line belongs: at the line of the fault; where a GradScaler is created; in the module's forward; in place of the script's
autocast; between the backward pass and the update; where a batch is read."""


class ScriptLine(NamedTuple):
    """A line of a script, as PyTorch writes it; ``frameworks`` have theirs by its name."""

    name: str
    """Empty for a line that is the same in each framework."""
    torch: str
    """``{end}`` and ``{x}`` are filled in for the formats of the operands."""
    place: LinePlace = "line"
    end: str = ""
    in_fp32: bool = False
    """Whether ``{x}`` is cast to FP32."""

    def text(self, library: str) -> str:
        """Return the line as a script of ``library`` writes it; empty where no line does it."""
        line, cast = self.torch, "x.float()"
        if library != "torch":
            framework = framework_called(library)
            line, cast = framework.lines.get(self.name, line), framework.in_fp32
        return line.format(x=cast if self.in_fp32 else "x", end=self.end) if self.name else line


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
    return ScriptLine("", line)


def new_scaler(scale: float | None = None) -> ScriptLine:
    """Return the line that creates a GradScaler; without a scale, a line that is new to the script."""
    if scale is None:
        use = "scaler.scale(loss).backward(), scaler.step(optimizer), scaler.update()"
        return ScriptLine("new scaler", f"scaler = torch.amp.GradScaler()  # {use}", "scaler")
    return ScriptLine("scaler", "scaler = torch.amp.GradScaler(init_scale={end})", "scaler", end=str(scale))


AUTOCAST_OFF = ScriptLine(
    "autocast off", "with torch.autocast(x.device.type, enabled=False):  # in their forward, on x.float()", "forward"
)
OWN_BF16 = ScriptLine("own bf16", "torch.autocast(device_type, dtype=torch.bfloat16)  # and no GradScaler", "autocast")
CAST = ScriptLine("cast", "x = x.float()  # before this line")
CHECK_DATA = ScriptLine("check data", "assert torch.isfinite(batch).all()", "batch")
CLIP = ScriptLine("clip", "clip_grad_norm_(parameters, 1.0)", "step")
NOT_EMPTY = ScriptLine("not empty", "if x.numel():")
OF_ALL = ScriptLine("of all", "y = x.std(correction=0)")
AT_LEAST = ScriptLine("at least", "x = x.clamp(min=1e-6)")
MASK_AFTER = ScriptLine("mask after", 'y = (x / t).masked_fill(mask, float("-inf"))')
MASK_FINITE = ScriptLine("mask finite", "x = x.masked_fill(mask, torch.finfo(x.dtype).min)")
MASK_BEFORE = ScriptLine("mask before", "y = p * logs.masked_fill(p == 0, 0.0)")
"""Its gradient is finite as well: where the product itself is filled, 0 times the infinity returns in the backward pass."""


class Domain(NamedTuple):
    """Operations with arguments at which they are not finite, and how to keep away from these."""

    ops: tuple[str, ...]
    advice: str
    name: str
    """Of the line in each framework."""
    torch: str
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
        return ScriptLine(self.name, self.torch, end=end, in_fp32=wide)


NO_ROOT = Domain(
    ops=("sqrt",),
    advice="a negative number has no root: keep the argument at or above 0",
    name="root at 0",
    torch="y = torch.sqrt(x.clamp_min({end}))",
    end="1e-12",
    end_in_fp16="1e-4",
)
"""In a forward pass; in a backward pass, the derivative at 0 is the fault."""
DOMAINS = (
    Domain(
        ops=("sqrt",),
        advice="the derivative of a root at 0 is infinite: keep its argument above 0",
        name="root",
        torch="y = torch.sqrt(x + {end})",
        end="1e-12",
        end_in_fp16="1e-4",
    ),
    Domain(
        ops=("rsqrt", "reciprocal"),
        advice="1 / 0 is infinite: keep the argument above 0",
        name="rsqrt",
        torch="y = torch.rsqrt(x + {end})",
        end="1e-6",
        end_in_fp16="1e-2",
    ),
    Domain(
        ops=("log", "log2", "log10"),
        advice="the logarithm needs an argument above 0",
        name="log",
        torch="y = torch.log(x.clamp_min({end}))",
        end="1e-6",
        end_in_fp16="1e-4",
    ),
    Domain(
        ops=("log1p",),
        advice="the argument must be above -1",
        name="log1p",
        torch="y = torch.log1p({x}.clamp_min(-1 + 1e-6))",
        in_fp32=True,
    ),
    Domain(
        ops=("div", "divide"),
        advice="keep the divisor away from 0",
        name="div",
        torch="y = a / torch.where(b.abs() < 1e-6, 1.0, b)",
    ),
    Domain(
        ops=("pow",),
        advice="keep the base above 0 where the exponent is below 1",
        name="pow",
        torch="y = x.clamp_min({end}).pow(p)",
        end="1e-12",
        end_in_fp16="1e-4",
    ),
    Domain(
        ops=("norm", "std", "var"),
        advice="it has no derivative at 0",
        name="norm",
        torch="y = (x * x).sum(-1).add({end}).sqrt()",
        end="1e-12",
        end_in_fp16="1e-4",
    ),
    Domain(
        ops=("exp",),
        advice="clamp the argument: FP32's exponential ends at 88",
        name="exp",
        torch="y = x.clamp_max({end}).exp()",
        end="80",
        end_in_fp16="10",
    ),
    Domain(
        ops=("acos", "asin", "atanh"),
        advice="keep the argument inside (-1, 1)",
        name="acos",
        torch="y = {x}.clamp(-1 + 1e-6, 1 - 1e-6).acos()",
        in_fp32=True,
    ),
    Domain(
        ops=("softmax",),
        advice="a row that is all masked has no softmax",
        name="softmax",
        torch="mask = mask & ~mask.all(-1, keepdim=True)",
    ),
)
"""The first row that names an operation counts."""
