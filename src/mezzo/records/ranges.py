"""Where the values of a training script lie, and what casts to narrower formats would make of them."""

from __future__ import annotations

from typing import Literal, TypeAlias

from mezzo.records.run import RunRecord
from mezzo.records.values import SCHEMA_VERSION, Reason, Value

RangeKind: TypeAlias = Literal["activations", "activation gradients", "weight gradients", "weights", "updates"]
GRADIENTS: tuple[RangeKind, ...] = ("activation gradients", "weight gradients")


class Histogram(Value):
    """Count values by the exponent of their magnitude."""

    first_exponent: int = 0
    counts: list[int] = []
    """Entry i counts magnitudes from ``2**(first_exponent + i)`` up to the next power of two."""
    zeros: int = 0
    infinite: int = 0
    nan: int = 0

    @property
    def nonzero(self) -> int:
        """Return how many values are finite and not zero."""
        return sum(self.counts)

    @property
    def total(self) -> int:
        """Return how many values were counted."""
        return self.nonzero + self.zeros + self.infinite + self.nan

    @property
    def last_exponent(self) -> int:
        """Return the exponent of the largest finite value."""
        return self.first_exponent + len(self.counts) - 1


class Casts(Value):
    """Count what a cast to one format makes of finite non-zero values, at every scale that the record looks at."""

    format: str
    zeroed: list[int]
    """Values that become zero."""
    subnormal: list[int]
    """Values that stay, with fewer bits."""
    overflowed: list[int]
    """Values that round to more than the format holds: infinite, or in E4M3 (no infinity) NaN or 448, as the library has it."""


class FormatLimits(Value):
    """State which magnitudes a format holds, as exponents of two."""

    format: str
    smallest: int
    """The smallest subnormal number."""
    normal: int
    """The smallest number with all bits."""
    largest: int
    """The largest number lies between this power of two and the next."""


class KindRange(Value):
    """Hold all values of one kind together."""

    kind: RangeKind
    num_tensors: int
    histogram: Histogram
    casts: list[Casts]


class TensorRange(Value):
    """Hold the values of one tensor over the watched steps."""

    kind: RangeKind
    name: str
    kept_fp32: bool = False
    """Whether the policy keeps it in FP32, by its module or by the op lists, so that it sets no limit."""
    histogram: Histogram
    highest: dict[str, int] = {}
    """By format, the exponent of the largest power-of-two scale at which nothing overflows."""
    lowest: dict[str, int] = {}
    """By format, the exponent of the smallest scale at which little becomes zero."""


class ScaleWindow(Value):
    """Hold the loss scales at which no gradient overflows a format and little becomes zero in it."""

    format: str
    lowest: int | None = None
    """Exponent of the smallest scale at which little becomes zero; None without any non-zero gradient."""
    highest: int | None = None
    """Exponent of the largest scale at which nothing overflows."""
    suggested: int | None = None
    """Exponent of the initial loss scale to begin with; None where no scale fits."""
    lost_unscaled: float = 0.0
    """Share of the non-zero gradient values that become zero at scale 1."""
    lost: float = 0.0
    """The same at the suggested scale, or at the highest where none fits."""
    reason: str
    at_top: list[str] = []
    """Tensors whose largest values set the upper end."""
    at_bottom: list[str] = []
    """Tensors that lose most values at the highest scale; empty where nothing is lost there."""

    @property
    def empty(self) -> bool:
        """Return whether no loss scale fits."""
        return self.lowest is not None and self.highest is not None and self.lowest > self.highest


class UpdateLoss(Value):
    """Count the weight updates that rounding swallows where weights are kept in a format without master weights."""

    format: str
    num_updates: int
    """Updates of single weights that are not zero."""
    num_swallowed: int
    """Those that leave the rounded weight as it was."""
    worst: dict[str, float] = {}
    """Share swallowed by parameter, of those that lose most."""

    @property
    def share(self) -> float:
        """Return the share of updates that are swallowed."""
        return self.num_swallowed / self.num_updates if self.num_updates else 0.0


class RangesRecord(Value):
    """Hold where a script's values lie, from steps computed in FP32."""

    kind: Literal["ranges"] = "ranges"
    schema_version: int = SCHEMA_VERSION
    run: RunRecord
    policy: str
    """The policy that is judged; the script ran in FP32."""
    format: str
    """The format of gradients under that policy."""
    steps_watched: list[int] = []
    first_scale: int
    """Exponent of the first scale in every ``Casts``; each following one is twice the one before."""
    little: float
    """Share of non-zero gradient values up to which "little" becomes zero."""
    limits: list[FormatLimits] = []
    kinds: list[KindRange] = []
    tensors: list[TensorRange] = []
    windows: list[ScaleWindow] = []
    updates: list[UpdateLoss] = []
    notes: list[Reason] = []
    """What follows from the values, and what was not seen."""
