"""The part of every other rank: run what rank 0 asks for, hand over the record, and end when the command is over. Imports no torch."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from mezzo.launch.process.command_signals import GRACE_S, Stop, Stopped, stoppable
from mezzo.launch.ranks.leading import POLL_S
from mezzo.launch.ranks.meeting import Meeting
from mezzo.launch.ranks.merged import error_of
from mezzo.launch.ranks.positions import take_position
from mezzo.launch.ranks.requests import beside, for_rank, record_path
from mezzo.launch.ranks.told import REASON
from mezzo.launch.request import Request
from mezzo.launch.runner import run_alone, shared_imports

_LEFT_ALONE = 1
"""Exit code of a process whose rank 0 is gone."""


def follow(meeting: Meeting) -> int:
    """Run what rank 0 asks for until the command is over; return the command's exit code.

    Raises:
        ScriptError: there is no rank 0.
    """
    meeting.join()
    try:
        with stoppable() as stop, shared_imports(prints_why_not=False):
            return _follow(meeting, stop)
    finally:
        meeting.put(f"bye-{meeting.launched.rank}", {})
        meeting.leave()


def _follow(meeting: Meeting, stop: Stop) -> int:
    number, end_s = 1, float("inf")
    while True:
        over, asked = meeting.get("over"), meeting.get(f"run-{number}")
        if over is not None:
            REASON.text, REASON.rank = over["reason"], over["rank"]
            return stop.exit_code or int(over["exit_code"])
        if asked is not None:
            _run(meeting, number, asked, stop)
            number += 1
        if meeting.gone(0):
            REASON.text, REASON.rank = "rank 0: its process vanished", 0
            return stop.exit_code or _LEFT_ALONE
        if stop.stopped:  # rank 0 received the signal as well, and tells when the records are written
            end_s = min(end_s, time.monotonic() + 3 * GRACE_S)
        if time.monotonic() > end_s:
            return stop.exit_code
        time.sleep(POLL_S)


def _run(meeting: Meeting, number: int, asked: dict[str, Any], stop: Stop) -> None:
    rank = meeting.launched.rank
    request = Request.model_validate_json(asked["request"])
    folder = meeting.folder_for(f"rank-{rank}")
    request = for_rank(request, rank, folder=folder, number=number, ranks=meeting.launched.size)
    request = request.model_copy(update={"record_path": str(record_path(folder, number)), "reports_progress": False})
    output = None if asked["output"] is None else beside(Path(asked["output"]), rank)
    told = False

    def interrupted() -> bool:
        nonlocal told
        told = told or meeting.get(f"stop-{number}") is not None or meeting.gone(0)
        return told

    try:
        record = run_alone(request, output=output, interrupted=interrupted)
        error = error_of(record)
    except Stopped as stopped:
        error = str(stopped)
    meeting.put(f"ended-{number}-{rank}", {"error": error, "stopped": told, **take_position(request)._asdict()})
