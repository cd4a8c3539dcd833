"""Write why a command failed to the file that torchrun reads.

torchrun ends with a table of the processes that failed. Without that file the table names no reason, and torchrun's own traceback
hides the one that Mezzo has printed. The same holds for ``accelerate launch``, which is built on it. Imports no torch.
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
    """Why this process's command fails."""

    text: str = ""
    """Empty if nothing failed: a verdict has an exit code as well."""
    rank: int | None = None
    """The process to blame, if there are several."""


REASON = FailureReason()
"""The reason of this process's only command."""


def tell(
    exit_code: int, command: str, *, own_rank: int | None = None, variables: Mapping[str, str] = os.environ
) -> None:
    """Write the reason for torchrun, unless the command succeeded or the script has written one.

    Args:
        exit_code: the command's.
        command: its name.
        own_rank: this process's; torchrun names the process with the earliest failure, which should be the one to blame.
        variables: the environment.
    """
    place = variables.get(_FILE, "")
    if not exit_code or not place or Path(place).exists():
        return
    text = REASON.text or f"exit code {exit_code}, which is an answer, not a crash: see the report above"
    text = f"mezzo {command}: {text}"
    at_s = int(time.time()) - (own_rank == REASON.rank)
    extra = {"py_callstack": text, "timestamp": str(at_s)}
    with suppress(OSError):  # the folder is gone: torchrun then prints its table without a reason
        Path(place).write_text(json.dumps({"message": {"message": text, "extraInfo": extra}}), encoding="utf-8")
