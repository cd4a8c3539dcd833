"""Report to torchrun why a command failed, in the file that torchrun reads.

torchrun ends with a table of the processes that failed. Without that file the table gives no reason, and torchrun's own traceback
hides the reason that Mezzo has printed. The same is true of ``accelerate launch``, which is built on torchrun. Imports no torch.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_FILE = "TORCHELASTIC_ERROR_FILE"


@dataclass
class FailureReason:
    """Why this process's command failed."""

    text: str = ""
    """Empty if nothing failed: a verdict may have an exit code other than 0 as well."""
    rank: int | None = None
    """The process to blame, if there are several."""


REASON = FailureReason()
"""The reason why the only command of this process failed."""


def report_failure(
    exit_code: int, command: str, *, own_rank: int | None = None, variables: Mapping[str, str] = os.environ
) -> None:
    """Write the reason for torchrun, unless the command succeeded or the script itself has written one.

    Args:
        exit_code: the command's.
        command: its name.
        own_rank: the rank of this process; torchrun names the process that failed first, which should be the one to blame.
        variables: the environment.
    """
    path = variables.get(_FILE, "")
    if not exit_code or not path or Path(path).exists():
        return
    text = REASON.text or f"exit code {exit_code}, which is an answer, not a crash: see the report above"
    text = f"mezzo {command}: {text}"
    failed_at_s = int(time.time()) - (own_rank == REASON.rank)  # the process to blame a second before the others
    extra = {"py_callstack": text, "timestamp": str(failed_at_s)}
    with suppress(OSError):  # the folder is gone: torchrun then prints its table without a reason
        Path(path).write_text(json.dumps({"message": {"message": text, "extraInfo": extra}}), encoding="utf-8")
