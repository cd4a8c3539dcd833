"""The runs of a comparison: their names and their arguments. Imports no torch."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence

from mezzo.records.run import RUN_NAME

_LONGEST = 80
GRACE_S = 30.0
"""Time that a run may take beyond a command's budget before it is killed: the estimate may have been too low."""


def folder_name(policy: str) -> str:
    """Return a policy's text as part of a folder's name, in characters that every file system allows.

    A long text is cut, and gets a digest of the whole at its end.
    """
    plain = re.sub(r"[^\w.,=+-]", "_", policy)
    if len(plain) <= _LONGEST:
        return plain
    return f"{plain[: _LONGEST - 9]}-{hashlib.sha256(policy.encode()).hexdigest()[:8]}"


def run_name(policy: str, seed: int) -> str:
    """Return the name of a run, which is also the name of its folder."""
    return f"{folder_name(policy)}-seed{seed}"


def named_arguments(arguments: Sequence[str], name: str) -> tuple[str, ...]:
    """Return the script's arguments with the run's name in place of ``{run}``."""
    return tuple(argument.replace(RUN_NAME, name) for argument in arguments)
