"""Runs that ended for lack of memory: how much they requested, and what this machine has."""

from __future__ import annotations

import signal

from mezzo.measure.checkpointing.wanted import bytes_text
from mezzo.measure.environment import host_bytes
from mezzo.records import RunRecord

_KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)
"""Exit codes of a process that the system killed, as it does when memory runs out."""


def short_of_memory(run: RunRecord) -> str:
    """Return why memory ended ``run``; empty if something else did, or nothing."""
    failed = run.out_of_memory
    if failed is not None and failed.asked_bytes is not None and run.environment.device == "cpu":
        return (
            f"it requested {bytes_text(failed.asked_bytes)} at once, which this machine, with {bytes_text(host_bytes())}, could not "
            "provide; mezzo predict traces it without memory for its weights"
        )
    if failed is not None:
        return run.error or failed.message
    if run.exit_code in _KILLED and run.first_steps is None:
        return (
            f"the system killed it (exit code {run.exit_code}), as it does when memory runs out; this machine has "
            f"{bytes_text(host_bytes())}, and mezzo predict traces it without memory for its weights"
        )
    return ""
