"""Numbers and words for all views: the terminal and the page share these functions, so a fact reads the same in both.

Text is ASCII, so that it survives a pipe. Numbers have three significant digits unless a function says otherwise.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Callable, Sequence
from datetime import datetime

NOT_FOR_GPU = "emulated: says nothing about a GPU"
MISSING = "-"
UNKNOWN = "unknown"
"""Shown for a size that was not measured."""
LONGEST = 4000
"""The most characters of a text that a view shows."""
BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_LARGEST_PLAIN_EXPONENT = 16  # 65536 is read at a glance, 16777216 is not


def clean(text: str, *, keep_lines: bool = False, most: int = LONGEST) -> str:
    """Return ``text`` without control characters, which could control a terminal or hide part of a page.

    A text of more than ``most`` characters is cut in the middle: a page must stay readable whatever a script prints.
    """
    if len(text) > most:
        text = shortened(text, length=most)
    if text.isascii() and text.isprintable() and "  " not in text:
        return text.strip(" ")  # nearly every text, ten times as fast
    return "".join(
        c if c == "\n" and keep_lines else "\ufffd" if _controls(c) else c
        for c in (text if keep_lines else " ".join(text.split()))
    )


def clean_line(text: str) -> str:
    """Return a line of code without control characters, its indentation kept."""
    return "".join("\ufffd" if _controls(c) else c for c in text.expandtabs(4))


def _controls(character: str) -> bool:
    return unicodedata.category(character) in ("Cc", "Cf", "Cs")


def without_controls(text: str) -> str:
    """Return a whole page or output with its lines and indentation, but no character that controls a terminal or turns text around."""
    return _CONTROLS.sub("\ufffd", text)


def policy_text(policy: str, typed: str) -> str:
    """Return a policy as it was typed, with its full text if that differs."""
    return f"{clean(typed)} ({clean(policy)})" if typed else clean(policy)


def number_text(value: float | None, *, digits: int = 4) -> str:
    """Return ``value`` with ``digits`` significant digits, or its name if it is not finite."""
    if value is None:
        return MISSING
    return f"{value:.{digits}g}" if math.isfinite(value) else _not_finite(value)


def _not_finite(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


def signed_text(value: float) -> str:
    """Return a difference with its sign and two significant digits."""
    if not math.isfinite(value):
        return _not_finite(value)
    return f"{value:+.2g}" if value else "0"


def share_change_text(value: float) -> str:
    """Return a relative difference: ``+3.1%``, or ``12x`` for a large ratio."""
    if not math.isfinite(value):
        return _not_finite(value)
    if -0.5 < value < 1.0:
        return f"{100 * value:+.2g}%" if value else "0%"
    return f"{three_digits(1.0 + value)}x" if 1.0 + value < 1e4 else f"{1.0 + value:.2g}x"


def interval_text(low: float, high: float, *, show: Callable[[float], str] = signed_text) -> str:
    """Return the ends of an interval of differences, formatted by ``show``, or that there is none."""
    if math.isnan(low) or math.isnan(high):
        return "no interval"
    return f"{show(low)} to {show(high)}"


def ratio_text(value: float | None) -> str:
    """Return a ratio such as ``1.62x``."""
    if value is None:
        return MISSING
    return f"{three_digits(value)}x" if math.isfinite(value) else _not_finite(value)


def spread_text(low: float | None, high: float | None) -> str:
    """Return the ends of the spread of a ratio; empty if it is unknown."""
    if low is None or high is None or not (math.isfinite(low) and math.isfinite(high)):
        return ""
    return f"{three_digits(low)}x to {three_digits(high)}x"


def three_digits(value: float) -> str:
    """Return a finite ``value`` with three significant digits, or all digits of its integer part if there are more."""
    if value == 0:
        return "0"
    # Round first: 9.999 is 10.0, not 10.00.
    decimals = 2 - math.floor(math.log10(abs(float(f"{value:.3g}"))))
    return f"{value:.{max(0, decimals)}f}"


def rate_text(value: float) -> str:
    """Return a rate per second with three digits."""
    return three_digits(value) if value < 1000 else count_text(float(f"{value:.3g}"))


def count_text(count: float) -> str:
    """Return a whole number, with commas from 10,000 on."""
    return f"{count:,.0f}" if count >= 10_000 else f"{count:.0f}"


def loss_title(name: str) -> str:
    """Return the title of one of several losses: ``loss of netG``, ``loss 2``."""
    return clean(name) if name.startswith("loss ") else f"loss of {clean(name)}"


def bytes_text(num_bytes: int | None) -> str:
    """Return a size in the largest binary unit in which it is at least 1."""
    if num_bytes is None:
        return UNKNOWN
    value, exponent = byte_scale(num_bytes)
    unit = BYTE_UNITS[exponent]
    return f"{num_bytes} B" if exponent == 0 else f"{three_digits(value)} {unit}"


def byte_scale(num_bytes: int) -> tuple[float, int]:
    """Return ``num_bytes`` in its best unit, and that unit's power of 1024."""
    value, exponent = float(num_bytes), 0
    while round(value) >= 1024 and exponent < len(BYTE_UNITS) - 1:
        value, exponent = value / 1024, exponent + 1
    return value, exponent


def ms_text(time_ms: float | None) -> str:
    """Return a duration that was measured in milliseconds."""
    if time_ms is None:
        return MISSING
    if not math.isfinite(time_ms):
        return _not_finite(time_ms)
    seconds = time_ms / 1000
    return f"{three_digits(seconds)} s" if time_ms >= 999.5 else f"{three_digits(time_ms)} ms"


def duration_text(seconds: float) -> str:
    """Return a duration in words: ``12.3 s``, ``4 min 05 s``, ``2 h 10 min``."""
    if not math.isfinite(seconds):
        return _not_finite(seconds)
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min"


def about_text(seconds: float) -> str:
    """Return an estimated duration: ``40 s``, ``6 min``, ``2 h 10 min``."""
    if not math.isfinite(seconds):
        return _not_finite(seconds)
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 3600 else duration_text(seconds)


def date_text(date: str) -> str:
    """Return an ISO date as ``2026-11-22 14:05 UTC``; any other text unchanged."""
    try:
        moment = datetime.fromisoformat(date)
    except ValueError:
        return date
    zone = "" if moment.tzinfo is None else " UTC" if not moment.utcoffset() else f" {moment:%z}"
    return f"{moment:%Y-%m-%d %H:%M}{zone}"


def share_text(share: float) -> str:
    """Return a share of a whole in percent; only nothing reads as 0%, and only the whole as 100%."""
    percent = 100 * share
    if 0 < percent < 0.1:
        return "<0.1%"
    if 99.9 < percent < 100:
        return ">99.9%"
    return f"{percent:.1f}%" if percent % 100 else f"{percent:.0f}%"


def flops_text(flops: int) -> str:
    """Return a count of operations in its best decimal unit."""
    for unit, size in (("TFLOP", 10**12), ("GFLOP", 10**9), ("MFLOP", 10**6), ("kFLOP", 10**3)):
        if flops >= size:
            return f"{three_digits(flops / size)} {unit}"
    return f"{flops} FLOP" if flops else "0"


def scale_text(scale: float | None) -> str:
    """Return a loss scale; powers of two with many digits are written as powers."""
    if scale is None:
        return "none"
    if not math.isfinite(scale) or scale <= 0:
        return number_text(scale)
    fraction, exponent = math.frexp(scale)
    power = exponent - 1
    if fraction == 0.5 and not 0 <= power <= _LARGEST_PLAIN_EXPONENT:
        return f"2^{power}"
    return f"{scale:.6g}"


def mean_text(count: float) -> str:
    """Return a mean of counts: an integer as such, anything else with one decimal."""
    return f"{count:.0f}" if float(count).is_integer() else f"{count:.1f}"


def plural(count: int, noun: str) -> str:
    """Return ``count`` with its noun."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def first(count: int, noun: str) -> str:
    """Return ``first step`` or ``first 20 steps``."""
    return f"first {noun if count == 1 else plural(count, noun)}"


def listed(words: Sequence[str]) -> str:
    """Return words as an enumeration: ``a, b and c``."""
    *head, last = words
    return f"{', '.join(head)} and {last}" if head else last


def shortened(text: str, *, length: int) -> str:
    """Return ``text`` cut in the middle to at most ``length`` characters: policies often differ only at the end."""
    if len(text) <= length:
        return text
    tail = (length - 3) // 2
    return f"{text[: length - 3 - tail]}...{text[-tail:]}"


def error_text(error: float | None) -> str:
    """Return a relative error with two significant digits."""
    return number_text(error, digits=2)
