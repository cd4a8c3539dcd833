"""Errors by which torch reports that a process started by the script has failed: which process, and why, in one sentence.

``torch.multiprocessing.spawn`` raises with the process's whole traceback as its message, ``torchrun`` with a table of all
processes. Imports no torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

_ERROR_FILE = "error.json"
"""The name of the file in which a process reports to torchrun why it failed."""
_TRACEBACK = "Traceback (most recent call last):"


def sentence_of(error: BaseException) -> str:
    """Return the type and message of an error; if it reports a failed process, that process and its reason."""
    kind = type(error)
    if kind.__module__.startswith("torch."):
        if kind.__name__ == "ChildFailedError":
            return _first_failure(error)
        if kind.__name__ == "ProcessRaisedException":
            return f"process {getattr(error, 'error_index', '?')}: {raised(str(error))}"
        if kind.__name__ == "ProcessExitedException":
            return str(error)
    return f"{kind.__name__}: {error}".rstrip(": ")


def _first_failure(error: Any) -> str:
    """Return the first failure that torchrun reports, or how that process ended if it gave no reason."""
    rank, failure = error.get_first_failure()
    message = failure.message
    if isinstance(message, dict):  # written by torch's @record
        return f"rank {rank}: {message.get('message', '')}".rstrip(": ")
    if Path(failure.error_file).name == _ERROR_FILE:
        return f"rank {rank}: {message}"
    how = f"signal {failure.signal_name()}" if failure.exitcode < 0 else f"exit code {failure.exitcode}"
    return f"rank {rank}: it ended with {how}; see the output above; `torchrun ... -m mezzo` would record the reason"


def raised(text: str) -> str:
    """Return the type and message of the exception that the last traceback in ``text`` ends with."""
    lines = text.rpartition(_TRACEBACK)[2].strip("\n").splitlines()
    start = 0
    for place, line in enumerate(lines):
        if not line.startswith("  File "):
            continue
        after = place + 1
        while after < len(lines) and lines[after].startswith("    "):
            after += 1
        start = after
    return "\n".join(lines[start:]).strip() or text.strip()
