"""A quantity's numbers in words, in the units in which people state them."""

from __future__ import annotations

from collections.abc import Sequence

from mezzo.commands.compare.pairing import title_of
from mezzo.commands.compare.quantities import BEYOND_ERROR, INSIDE_ERROR, Quantity
from mezzo.commands.compare.scales import Proportion, Ratio


def short(value: float) -> str:
    """Return a value with four digits."""
    return f"{value:.0f}" if 1e4 <= abs(value) < 1e9 else f"{value:.4g}"


def percent(share: float) -> str:
    """Return a share as percent with two digits, three from 100 on."""
    return f"{_two_digits(100.0 * share)}%"


def _two_digits(value: float, *, sign: str = "") -> str:
    return f"{value:{sign}.0f}" if 10 <= abs(value) < 1e9 else f"{value:{sign}.2g}"


def listed(parts: Sequence[str]) -> str:
    """Return parts joined as in a sentence: ``a, b and c``."""
    *head, last = parts
    return f"{', '.join(head)} and {last}" if head else last


def size(quantity: Quantity, change: float, *, signed: bool = False) -> str:
    """Return a change in the units in which people state it: ``+3.1%``, ``2.4 times``, ``-0.28 points``, ``+12``."""
    sign = "+" if signed and change else ""
    if isinstance(quantity.scale, Ratio):
        return f"{_two_digits(100.0 * change, sign=sign)}%" if -0.5 < change < 1.0 else f"{1.0 + change:.3g} times"
    if isinstance(quantity.scale, Proportion):
        return f"{_two_digits(100.0 * change / quantity.scale.unit, sign=sign)} points"
    return f"{change:{sign}.0f}" if 1e2 <= abs(change) < 1e9 else f"{change:{sign}.2g}"


def sentence(quantity: Quantity, *, num_quantities: int, baseline: str) -> str:
    """Return the means, their difference, its interval, and the interval's position relative to the margin."""
    d = quantity.record()
    name = quantity.name if quantity.is_metric else title_of(quantity.name)
    text = f"{name} {short(d.value)} against {short(d.baseline)}"
    margin = f"{size(quantity, d.margin)}{_reason(quantity, baseline=baseline)}"
    if len(quantity) < 2:
        return f"{text} ({size(quantity, d.difference, signed=True)}), to be judged by a margin of {margin}"
    text += f" ({size(quantity, d.difference, signed=True)}, 95% CI {_interval(quantity, d.low, d.high)})"
    if quantity.is_inside():
        narrower = f", by the {1 - 2 * INSIDE_ERROR:.0%} CI" if max(-d.low, d.high) > d.margin else ""
        return f"{text}, inside the margin of {margin}{narrower}"
    nearest = max(d.low, -d.high)
    if quantity.is_beyond(num_quantities=num_quantities):
        return f"{text}, beyond the margin of {margin}"
    if nearest > d.margin and quantity.margin.spread:
        error = BEYOND_ERROR / num_quantities
        most = quantity.natural_margin(float(quantity.margin.upper_bound(len(quantity), error=error)))
        return f"{text}, beyond {margin}, but {baseline}'s own seeds may lie {size(quantity, most)} apart"
    return f"{text}, partly beyond the margin of {margin}"


def _interval(quantity: Quantity, low: float, high: float) -> str:
    ends = [size(quantity, end, signed=True) for end in (low, high)]
    units = [end.partition(" ")[2] for end in ends]
    return f"{ends[0].partition(' ')[0] if units[0] == units[1] else ends[0]} to {ends[1]}"


def _reason(quantity: Quantity, *, baseline: str) -> str:
    margin = quantity.margin
    if len(quantity) > 1 and margin.lower_bound(len(quantity)) > margin.share:
        return f" ({baseline}'s own seed-to-seed spread)"
    return f" ({margin.why})" if margin.why else ""
