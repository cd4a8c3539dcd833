"""A command in several processes that a launcher started: rank 0 runs it, the others follow."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from mezzo.cli.words import value_after
from mezzo.errors import ScriptError
from mezzo.launch.ranks.launched import PADDLE_SIZE, Launched, launched
from mezzo.launch.ranks.torchrun_error import report_failure

_TOGETHER = ("run", "watch", "compare", "audit", "diagnose", "ranges", "fallback")
"""Commands that run a script in all processes at once."""
_ALONE = {
    "check": "check in one process; the answer serves distributed runs too",
    "predict": "predict in one process; --gpus-per-job and --shard describe a job of several",
    "resume-check": "check in one process, without the launcher",
    "tune": "tune in one process, with the batch of one process",
}
"""Commands on a script for one process, and what to do instead of starting several."""


def in_ranks(words: Sequence[str], command: Callable[[], int]) -> int:
    """Run a command and return its exit code; as one of several processes, together with the others.

    Args:
        words: the command line after ``mezzo``.
        command: runs it in this process.

    Raises:
        ScriptError: the command is for one process, the processes did not find each other, or Paddle's launcher started them.
    """
    if not words or words[0] not in (*_TOGETHER, *_ALONE):
        return command()
    _refuse_paddles_launcher()
    one = launched(os.environ, command=words)
    if one is None:
        exit_code = command()
        report_failure(exit_code, words[0])
        return exit_code
    if words[0] in _ALONE:
        raise ScriptError(
            f"{one.launcher} started mezzo {words[0]} in {one.size} processes; allowed: one", hint=_ALONE[words[0]]
        )
    return _together(one, words, command)


def refuse_in_several(option: str, *, hint: str) -> None:
    """Refuse an option that is for one process in one of several.

    Raises:
        ScriptError: a launcher started several.
    """
    one = launched(os.environ)
    if one is not None:
        raise ScriptError(f"{option} was given in one of {one.size} processes; allowed: one process", hint=hint)


def _together(one: Launched, words: Sequence[str], command: Callable[[], int]) -> int:
    from mezzo.launch.ranks.following import follow
    from mezzo.launch.ranks.leading import leading
    from mezzo.launch.ranks.meeting import Meeting, meeting_place

    # The script's own option of that name serves as well: all processes read the same words.
    out = value_after("--out", words)
    meeting = Meeting(one, meeting_place(one, shared=Path("runs") if out is None else Path(out).parent))
    if one.rank:
        exit_code = follow(meeting)
        report_failure(exit_code, words[0], own_rank=one.rank)
        return exit_code
    with leading(meeting) as leader:
        leader.exit_code = 1  # unless it gets to its end
        leader.exit_code = command()
        report_failure(
            leader.exit_code, words[0], own_rank=0
        )  # before the others end: torchrun then stops this process too
    return leader.exit_code


def _refuse_paddles_launcher() -> None:
    count = os.environ.get(PADDLE_SIZE, "1")
    if count.isdecimal() and int(count) > 1:
        raise ScriptError(
            f"paddle.distributed.launch started {count} processes; Mezzo runs Paddle scripts in one",
            hint="run mezzo without the launcher: one process shows the precision problems of all",
        )
