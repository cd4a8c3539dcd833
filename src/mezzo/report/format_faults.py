"""Failures of a run that the format of its policy explains, and the command that finds the cause."""

from __future__ import annotations

from collections.abc import Iterable

from mezzo.records.run import leaves_range, refuses_format


def explained(errors: Iterable[str], policy: str) -> tuple[str, str] | None:
    """Return the reason for a command and its name, given the ``errors`` of runs under ``policy``; None if the format is not the cause."""
    errors = tuple(errors)
    if any(map(refuses_format, errors)):
        return (
            f"an operation does not accept the format of {policy}; find the modules that must stay in FP32",
            "fallback",
        )
    if any(map(leaves_range, errors)):
        return f"a number in the script is beyond the range of {policy}; find its line", "diagnose"
    return None
