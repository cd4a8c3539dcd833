"""``--snapshot`` and ``--resume``: how often, where, and what a resumed run must have in common with the first."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

from mezzo.errors import UsageError

if TYPE_CHECKING:
    from mezzo.cli.script import Script
    from mezzo.launch.request_parts import SnapshotRequest
    from mezzo.policy import Policy

FOLDER = "snapshots"
_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}
_USUAL_S = 300.0


def check_snapshots(snapshot: str | None, resume: Path | None, *, out: Path | None) -> None:
    """Refuse an invalid time, and a run to resume that has no snapshots; a run that resumes its own folder may be its first."""
    if snapshot is not None:
        seconds_of(snapshot)
    if resume is not None and not (resume / FOLDER).is_dir() and not _is_itself(resume, out):
        raise UsageError(
            f"--resume {str(resume)!r} has no folder {FOLDER}; allowed: the folder of a run with --snapshot",
            hint="find one with ls runs/*/snapshots; if --out names the same folder, a run that finds none starts from the beginning",
        )


def seconds_of(text: str) -> float:
    """Return the seconds in a time such as ``30s``, ``5m`` or ``1h``.

    Raises:
        UsageError: the text is not a time.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text.strip())
    if match is None:
        raise UsageError(f"--snapshot {text!r}; allowed: a time, such as 30s, 5m or 1h", hint="type: --snapshot 5m")
    return float(match[1]) * _UNITS[match[2]]


def snapshot_request(
    script: Script, folder: Path, snapshot: str | None, resume: Path | None, *, policy: Policy | None, seed: int | None
) -> SnapshotRequest | None:
    """Return the request for the run's snapshots; None if there is none. A resumed run continues in the folder of the earlier one."""
    from mezzo.launch.request import policy_text
    from mezzo.launch.request_parts import SnapshotRequest

    if snapshot is None and resume is None:
        return None
    return SnapshotRequest(
        folder=str(((resume or folder) / FOLDER).absolute()),
        every_s=_USUAL_S if snapshot is None else seconds_of(snapshot),
        resume=resume is not None,
        may_be_first=_is_itself(resume, script.out),
        identity={
            "script": script.target,
            "arguments": json.dumps(script.arguments or []),
            "policy": policy_text(policy),
            "seed": str(seed),
        },
    )


def _is_itself(resume: Path | None, out: Path | None) -> bool:
    """Return whether a run resumes the folder that it writes to: a launcher may restart such a command any number of times."""
    return resume is not None and out is not None and resume.absolute() == out.absolute()
