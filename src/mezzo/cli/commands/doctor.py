"""``mezzo doctor``: the formats that this machine computes in."""

from __future__ import annotations

from mezzo.cli import results
from mezzo.cli.options import shared as options
from mezzo.cli.options.folders import new_folder


def doctor(out: options.Out = None, log_to: options.LogTo = None, as_json: options.Json = False) -> None:
    """Show which formats this machine computes in, why, and what to change."""
    from mezzo.measure.doctor import examine

    results.finish(examine(), new_folder(out, "doctor"), as_json=as_json, log_to=log_to)
