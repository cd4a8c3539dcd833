"""``--snapshot`` and ``--resume``: how often, where, and what a resumed run must have in common with the first."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from mezzo.cli.budget import seconds_of
from mezzo.cli.words import RESUME, replacing
from mezzo.errors import UsageError
from mezzo.secrets import hidden

if TYPE_CHECKING:
    from mezzo.cli.script import Script
    from mezzo.launch.request import SnapshotRequest
    from mezzo.policy import Policy

FOLDER = "snapshots"
_USUAL_S = 300.0


def check_snapshots(snapshot: str | None, resume: Path | None, *, out: Path | None) -> None:
    """Refuse an invalid time, and a run to resume that has no snapshots; a run that resumes its own folder may be its first."""
    if snapshot is not None:
        _seconds_of(snapshot)
    if resume is not None and not (resume / FOLDER).is_dir() and not _is_itself(resume, out):
        raise UsageError(
            f"--resume {str(resume)!r} has no folder {FOLDER}; allowed: the folder of a run with --snapshot",
            hint=f"type: {_instead()}",
        )


def _instead() -> str:
    """Return the command that resumes the newest run with snapshots; where there is none, the one that begins to save them."""
    saved = sorted(Path("runs").glob(f"*/{FOLDER}"), key=lambda folder: folder.stat().st_mtime)
    if saved:
        return replacing(RESUME, str(saved[-1].parent))
    return replacing("--snapshot", "5m", without=RESUME)


def snapshot_request(
    script: Script, folder: Path, snapshot: str | None, resume: Path | None, *, policy: Policy | None, seed: int | None
) -> SnapshotRequest | None:
    """Return the request for the run's snapshots; None if there is none. A resumed run continues in the folder of the earlier one."""
    from mezzo.launch.request import SnapshotRequest, policy_text

    if snapshot is None and resume is None:
        return None
    script.check_supported("--resume" if snapshot is None else "--snapshot")
    given = os.environ.get("PYTHONHASHSEED", "")
    hash_seed = given if given.isdecimal() else "0"  # a random one would be another one in a resumed run
    return SnapshotRequest(
        folder=str(((resume or folder) / FOLDER).absolute()),
        every_s=_USUAL_S if snapshot is None else _seconds_of(snapshot),
        resume=resume is not None,
        hash_seed=hash_seed,
        proves=True,
        may_be_first=_is_itself(resume, script.out),
        identity={
            "script": script.target,
            "arguments": json.dumps(hidden(script.arguments or ())),
            "policy": policy_text(policy),
            "seed": str(seed),
            "PYTHONHASHSEED": hash_seed,
        },
    )


def _is_itself(resume: Path | None, out: Path | None) -> bool:
    """Return whether a run resumes the folder that it writes to: a launcher may restart such a command any number of times."""
    return resume is not None and out is not None and resume.absolute() == out.absolute()


def _seconds_of(snapshot: str) -> float:
    return seconds_of(snapshot, option="--snapshot", example="5m")
