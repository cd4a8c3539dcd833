"""Recognise runs that ended for lack of memory: how much they requested, and what this machine has."""

from __future__ import annotations

import re
import signal

from mezzo.measure.checkpointing.wanted import bytes_text
from mezzo.measure.environment import host_bytes
from mezzo.records import RunRecord

_REQUESTED = re.compile(r"tried to allocate (\d+) bytes")
"""In the message of torch's allocator on a CPU."""
_KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)
"""Exit codes of a process that the system killed, as it does when memory runs out."""


def short_of_memory(run: RunRecord) -> str:
    """Return why memory ended ``run``; empty if something else did, or nothing."""
    requested = _REQUESTED.search(run.error or "")
    if requested is not None:
        return (
            f"it requested {bytes_text(int(requested[1]))} at once, which this machine, with {bytes_text(host_bytes())}, could not "
            "provide; mezzo predict traces it without memory for its weights"
        )
    if run.exit_code in _KILLED and run.first_steps is None:
        return (
            f"the system killed it (exit code {run.exit_code}), as it does when memory runs out; this machine has "
            f"{bytes_text(host_bytes())}, and mezzo predict traces it without memory for its weights"
        )
    if "out of memory" in (run.error or "").lower():
        return run.error or ""
    return ""
