"""Parse a request for activation checkpointing: a plan by name, or a number of bytes. Imports no torch."""

from __future__ import annotations

import re

from mezzo.errors import UsageError, nearest

NAMED = ("none", "full", "every-2", "selective")
"""The plans that every other plan is compared with; any number may follow ``every-``."""
EVERY = re.compile(r"every-([1-9]\d*)")
_BYTES = re.compile(r"(?=[\d.]*[1-9])(\d+(?:\.\d+)?)\s*([KMGT]?i?B)", re.IGNORECASE)
"""A number above 0 with a unit."""
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def is_plan(text: str) -> bool:
    """Return whether ``text`` is the name of a plan."""
    return text in NAMED or EVERY.fullmatch(text) is not None


def check_wanted(text: str) -> str:
    """Return ``text`` without spaces around it: the name of a plan, or bytes such as ``12GiB``.

    Raises:
        UsageError: it is neither, or ``none``, which changes nothing.
    """
    wanted = text.strip()
    if (is_plan(wanted) and wanted != "none") or _BYTES.fullmatch(wanted):
        return wanted
    plans = [name for name in NAMED if name != "none"]
    allowed = "allowed: full, every-K with a number, selective, or bytes"
    near = nearest(wanted, plans) if wanted.isidentifier() else allowed
    raise UsageError(
        f"--checkpoint {text!r}; {near}",
        hint="type: --checkpoint full, or --checkpoint 12GiB for the least recomputation that keeps within 12 GiB",
    )


def bytes_of_text(text: str | int, *, option: str = "budget") -> int:
    """Return the bytes that ``text`` names: ``12GiB``, ``800 MB``, or a number of bytes.

    Args:
        text: the value.
        option: the option or argument with that value; it begins the error.

    Raises:
        UsageError: it names none.
    """
    if isinstance(text, int):
        return text
    found = _BYTES.fullmatch(text.strip())
    if found is None:
        hint = f"type: {option} 12GiB" if option.startswith("-") else f'pass {option}="12GiB"'
        raise UsageError(
            f"{option} {text!r} is not a size; allowed: a number above 0 with a unit, such as 12GiB, 800MB or 2.5 GB",
            hint=hint,
        )
    unit = found.group(2).upper()
    power = "BKMGT".index(unit[0])
    return int(float(found.group(1)) * (1024 if "I" in unit else 1000) ** power)


def bytes_text(num_bytes: float) -> str:
    """Return bytes in the unit that shows three digits."""
    unit = 0
    while num_bytes >= 1000 and unit < len(_UNITS) - 1:
        num_bytes, unit = num_bytes / 1024, unit + 1
    return f"{num_bytes:.3g} {_UNITS[unit]}"
