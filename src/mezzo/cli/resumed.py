"""``--resume``: a command of several runs continues in its folder, and runs only what is missing or failed there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from mezzo.cli.script import Script
from mezzo.cli.words import RESUME
from mezzo.errors import UsageError

if TYPE_CHECKING:
    from mezzo.launch.resuming import Finished


def finished_before(
    script: Script, folder: Path, what: str, *, say: Callable[[str], None], **identity: str
) -> Finished:
    """Return what an earlier command finished in the folder; empty, with the reason printed, if that was a different command.

    Args:
        script: the script, as it was typed.
        folder: the command's folder.
        what: a name for the command's work: ``check``, ``comparison`` or ``search``.
        say: prints a line.
        identity: options of the command that must not have changed.

    Raises:
        UsageError: ``--resume`` was typed, and there is nothing to continue, or it was a different script.
    """
    from mezzo.launch.resuming import Finished

    options = {name.replace("_", "-"): value for name, value in identity.items()}
    finished = Finished(folder, script.identity(**{f"--{name}": value for name, value in options.items()}))
    if script.resume and finished.why_restart:
        raise UsageError(
            f"{RESUME} cannot continue in {folder}: {finished.why_restart}",
            hint=f"leave out {RESUME} to start over, or undo the change",
        )
    if script.resume and not finished.found:
        raise UsageError(
            f"{RESUME}: {folder} has no {what} to continue; allowed: a folder in which one was started",
            hint=f"leave out {RESUME} to start one",
        )
    if finished.why_restart:
        say(f"starting over: {finished.why_restart}")
    return finished
