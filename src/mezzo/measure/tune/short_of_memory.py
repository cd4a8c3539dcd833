"""What a run that ended for want of memory says: how much it asked for, and what this machine has."""

from __future__ import annotations

import os
import re
import signal

from mezzo.measure.checkpointing.wanted import bytes_text
from mezzo.records import RunRecord

_ASKED = re.compile(r"tried to allocate (\d+) bytes")
"""In the message of torch's allocator on a CPU."""
_KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)
"""Exit codes of a process that the system killed, as it does when memory runs out."""


def short_of_memory(run: RunRecord) -> str:
    """Return why memory ended ``run``; empty if something else did, or nothing."""
    asked = _ASKED.search(run.error or "")
    if asked is not None:
        return (
            f"it asked for {bytes_text(int(asked[1]))} at once, which this machine, with {bytes_text(host_bytes())}, did not give; "
            "mezzo predict traces it without memory for its weights"
        )
    if run.exit_code in _KILLED and run.first_steps is None:
        return (
            f"the system killed it (exit code {run.exit_code}), as when memory runs out; this machine has "
            f"{bytes_text(host_bytes())}, and mezzo predict traces it without memory for its weights"
        )
    if "out of memory" in (run.error or "").lower():
        return run.error or ""
    return ""


def host_bytes() -> int:
    """Return the memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
