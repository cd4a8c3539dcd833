"""Why a command failed, left in the file where torchrun looks for it.

torchrun's last words are a table of the processes that failed. Without that file it names no reason there, and its own traceback
hides the one that Mezzo has printed. ``accelerate launch`` is built on it. Imports no torch.
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
class Reason:
    """Why this process's command fails."""

    text: str = ""
    """Empty where nothing failed: a verdict has an exit code too."""
    rank: int | None = None
    """The process to blame, where there are several."""


REASON = Reason()
"""Of this process's command: a process runs one."""


def tell(
    exit_code: int, command: str, *, own_rank: int | None = None, variables: Mapping[str, str] = os.environ
) -> None:
    """Leave the reason for torchrun, unless the command succeeded or the script has left one.

    Args:
        exit_code: the command's.
        command: its name.
        own_rank: this process's; torchrun names the process whose failure came first, which is to be the one to blame.
        variables: the environment.
    """
    place = variables.get(_FILE, "")
    if not exit_code or not place or Path(place).exists():
        return
    text = REASON.text or f"exit code {exit_code}, which is an answer, not a crash: see the report above"
    text = f"mezzo {command}: {text}"
    at_s = int(time.time()) - (own_rank == REASON.rank)
    extra = {"py_callstack": text, "timestamp": str(at_s)}
    with suppress(OSError):  # a folder that is gone: torchrun then says what it says without a file
        Path(place).write_text(json.dumps({"message": {"message": text, "extraInfo": extra}}), encoding="utf-8")
