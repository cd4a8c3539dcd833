"""A command in several processes that a launcher started: rank 0 runs it, and the others follow."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from mezzo.cli.words import value_after
from mezzo.errors import ScriptError
from mezzo.launch.ranks.launched import Launched, launched, report_failure

_IN_ALL_PROCESSES = ("run", "watch", "compare", "audit", "diagnose", "ranges", "fallback")
"""Commands that run a script in all processes at once."""
_IN_ONE_PROCESS = {
    "check": "check in one process; the answer holds for distributed runs, too",
    "diff": "type it without the launcher; --ranks compares numbers of processes",
    "gate": "gate in one process, with the batch of one process",
    "predict": "predict in one process; --gpus-per-job and --shard describe a job of several",
    "resume-check": "check in one process, without the launcher",
    "tune": "tune in one process, with the batch of one process",
}
"""Commands on a script that run in one process, and what to do instead of starting several."""


def in_ranks(words: Sequence[str], command: Callable[[], int]) -> int:
    """Run a command and return its exit code; in one of several processes, together with the others.

    Args:
        words: the command line after ``mezzo``.
        command: runs it in this process.

    Raises:
        ScriptError: the command runs in one process only, or the processes did not find each other.
    """
    if not words or words[0] not in (*_IN_ALL_PROCESSES, *_IN_ONE_PROCESS):
        return command()
    process = launched(os.environ, command=words)
    if process is None:
        exit_code = command()
        report_failure(exit_code, words[0])
        return exit_code
    if words[0] in _IN_ONE_PROCESS:
        raise ScriptError(
            f"{process.launcher} started mezzo {words[0]} in {process.size} processes; allowed: one",
            hint=_IN_ONE_PROCESS[words[0]],
        )
    return _run_together(process, words, command)


def refuse_in_several(option: str, *, hint: str) -> None:
    """Refuse, in one of several processes, an option that is for a single process.

    Raises:
        ScriptError: a launcher started several.
    """
    process = launched(os.environ)
    if process is not None:
        raise ScriptError(f"{option} was given in one of {process.size} processes; allowed: one process", hint=hint)


def _show_for_leader(path: Path) -> None:
    """Write the page of the record that this process wrote because rank 0 is gone, and print the record."""
    from mezzo.cli import results
    from mezzo.records import read_record

    results.finish(read_record(path), path.parent, as_json=False, log_to=None, after_script=True, verbose=False)


def _run_together(process: Launched, words: Sequence[str], command: Callable[[], int]) -> int:
    from mezzo.launch.ranks.following import follow
    from mezzo.launch.ranks.leading import leading
    from mezzo.launch.ranks.meeting import Meeting, meeting_place

    # An --out of the script itself does no harm: all processes read the same words.
    out = value_after("--out", words) or value_after("--resume", words)
    shared = Path("runs") if out is None else Path(out).parent
    meeting = Meeting(process, meeting_place(process, shared=shared), words=words)
    if process.rank:
        exit_code, recorded = follow(meeting)
        if recorded is not None:
            _show_for_leader(recorded)
        report_failure(exit_code, words[0], own_rank=process.rank)
        return exit_code
    with leading(meeting) as leader:
        leader.run_command(command)
        report_failure(
            leader.exit_code, words[0], own_rank=0
        )  # before the others end: torchrun then stops this process too
    return leader.exit_code
