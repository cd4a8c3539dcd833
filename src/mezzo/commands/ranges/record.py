"""The ranges of a training script's values, and what casts to narrower formats would do to them."""

from __future__ import annotations

from pathlib import PurePath
from typing import Literal, TypeAlias

from mezzo.records.run import RunRecord
from mezzo.records.values import Note, Value, WholeRecord

RangeKind: TypeAlias = Literal["activations", "activation gradients", "weight gradients", "weights", "updates"]
GRADIENTS: tuple[RangeKind, ...] = ("activation gradients", "weight gradients")


class Histogram(Value):
    """Values counted by the exponent of their magnitude."""

    first_exponent: int = 0
    counts: list[int] = []
    """Entry i counts magnitudes from ``2**(first_exponent + i)`` up to the next power of two."""
    zeros: int = 0
    infinite: int = 0
    nan: int = 0

    @property
    def nonzero(self) -> int:
        """How many values are finite and not zero."""
        return sum(self.counts)

    @property
    def total(self) -> int:
        """How many values were counted."""
        return self.nonzero + self.zeros + self.infinite + self.nan

    @property
    def last_exponent(self) -> int:
        """The exponent of the largest finite value."""
        return self.first_exponent + len(self.counts) - 1


class Casts(Value):
    """What a cast to one format does to finite non-zero values, at each scale of the record."""

    format: str
    zeroed: list[int]
    """Values that become zero."""
    subnormal: list[int]
    """Values that keep fewer bits."""
    overflowed: list[int]
    """Values that round beyond the format's range: to infinity or, in E4M3 (which has none), to NaN or 448, depending on the library."""


class FormatLimits(Value):
    """The magnitudes that a format represents, as exponents of two."""

    format: str
    smallest: int
    """The smallest subnormal number."""
    normal: int
    """The smallest normal number."""
    largest: int
    """The largest number is between this power of two and the next."""


class KindRange(Value):
    """All values of one kind."""

    kind: RangeKind
    num_tensors: int
    histogram: Histogram
    casts: list[Casts]


class TensorRange(Value):
    """The values of one tensor over the recorded steps."""

    kind: RangeKind
    name: str
    kept_fp32: bool = False
    """Whether the policy keeps it in FP32, because of its module or the op lists, so that it does not limit the loss scale."""
    histogram: Histogram
    highest: dict[str, int] = {}
    """By format, the exponent of the largest power-of-two scale at which nothing overflows."""
    lowest: dict[str, int] = {}
    """By format, the exponent of the smallest scale at which little becomes zero."""


class ScaleWindow(Value):
    """The loss scales at which no gradient overflows a format and little becomes zero in it."""

    format: str
    lowest: int | None = None
    """Exponent of the smallest scale at which little becomes zero; None without any non-zero gradient."""
    highest: int | None = None
    """Exponent of the largest scale at which nothing overflows."""
    suggested: int | None = None
    """Exponent of the initial loss scale to use; None if no scale fits."""
    lost_unscaled: float = 0.0
    """Share of the non-zero gradient values that become zero at scale 1."""
    lost: float = 0.0
    """The same at the suggested scale, or at the highest if none fits."""
    reason: str
    at_top: list[str] = []
    """Tensors whose largest values set the upper end."""
    at_bottom: list[str] = []
    """Tensors that lose the most values at the highest scale; empty if nothing is lost there."""

    @property
    def empty(self) -> bool:
        """Whether no loss scale fits."""
        return self.lowest is not None and self.highest is not None and self.lowest > self.highest


BlockOperand: TypeAlias = Literal["activation", "weight", "gradient"]


class BlockLoss(Value):
    """What a format in blocks loses of one operand of one product of a linear layer."""

    layer: str
    product: Literal["forward", "dgrad", "wgrad"]
    operand: BlockOperand
    policy: str
    """The policy whose format and rule of scales it is."""
    values: int
    """Values that are not zero."""
    zeroed: int
    saturated: int
    """Values beyond the largest element of their block."""
    at_end: int
    """Values in blocks whose scale is beyond the range of the scales' format."""
    error: float
    """Sum of the squares of the differences."""
    square: float
    """Sum of the squares of the values."""

    @property
    def relative_error(self) -> float:
        """The root mean square of the error, relative to the values'."""
        return (self.error / self.square) ** 0.5 if self.square else 0.0


class UpdateLoss(Value):
    """Weight updates that rounding would lose if the weights were in a format, without master weights."""

    format: str
    num_updates: int
    """Non-zero updates of single weights."""
    num_swallowed: int
    """Updates that leave the rounded weight unchanged."""
    worst: dict[str, float] = {}
    """Share lost, by parameter, for the parameters that lose the most."""

    @property
    def share(self) -> float:
        """Share of updates that are lost."""
        return self.num_swallowed / self.num_updates if self.num_updates else 0.0


class RangesRecord(WholeRecord):
    """The ranges of a script's values, from steps computed in FP32."""

    kind: Literal["ranges"] = "ranges"
    run: RunRecord
    policy: str
    """The policy under judgement; the script ran in FP32."""
    policy_typed: str = ""
    """The policy as typed, if that was another name for it."""
    format: str
    """The format of gradients under that policy."""
    steps_watched: list[int] = []
    first_scale: int
    """Exponent of the first scale in every ``Casts``; each scale is twice the one before."""
    little: float
    """Share of non-zero gradient values up to which "little" becomes zero."""
    limits: list[FormatLimits] = []
    kinds: list[KindRange] = []
    tensors: list[TensorRange] = []
    windows: list[ScaleWindow] = []
    updates: list[UpdateLoss] = []
    blocks: list[BlockLoss] = []
    """Under a policy in blocks: what every format in blocks and rule of scales would lose."""
    notes: list[Note] = []
    """Consequences of the values, and what was not recorded."""

    @property
    def summary(self) -> str:
        """The script and the scale window of its gradients, in one line."""
        script = f"{PurePath(self.run.script).name} for {self.policy}"
        window = next((window for window in self.windows if window.format == self.format), None)
        if window is None or window.suggested is None:
            return (
                f"{script}: no loss scale fits {self.format}"
                if window and window.empty
                else f"{script}: no scale window"
            )
        ends = [f"2^{end}" if end is not None else "any" for end in (window.lowest, window.highest)]
        return f"{script}: loss scales {ends[0]} to {ends[1]} fit {self.format}, begin with 2^{window.suggested}"

    @property
    def policy_shown(self) -> str:
        """The policy's name for people: as they typed it."""
        return self.policy_typed or self.policy
