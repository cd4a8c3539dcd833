"""The part of every other rank: run what rank 0 requests, hand over the record, and end with the command. Imports no torch."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from mezzo.children.signals import SIGNAL_GRACE_S, Stop, Stopped, stoppable
from mezzo.launch.ranks.blame import take_position
from mezzo.launch.ranks.launched import REASON
from mezzo.launch.ranks.leading import POLL_S
from mezzo.launch.ranks.meeting import Meeting
from mezzo.launch.ranks.merged import error_of, exit_code_of, for_rank, record_path
from mezzo.launch.request import Request
from mezzo.launch.runner import run_alone, shared_imports, substitute_record
from mezzo.records import RunRecord, write_record
from mezzo.records.files import file_of_rank, record_at

_WITHOUT_LEADER = 1
"""Exit code of a process whose rank 0 is gone."""


def follow(meeting: Meeting) -> int:
    """Run what rank 0 requests until the command is over; return the command's exit code.

    Raises:
        ScriptError: there is no rank 0, or it was started with another command.
    """
    with stoppable() as stop:
        try:
            meeting.join(stop.check)
        except Stopped as stopped:
            print(f"mezzo: {stopped} while waiting for rank 0", file=sys.stderr)
            return stopped.exit_code
        try:
            with shared_imports(prints_why_not=False):
                return _follow(meeting, stop)
        finally:
            meeting.leave()


def _follow(meeting: Meeting, stop: Stop) -> int:
    number, end_s = 1, float("inf")
    while True:
        is_alone = meeting.gone(0)  # before its messages are read: it leaves one and ends
        over, message = meeting.get("over"), meeting.get(f"run-{number}")
        if over is not None:
            REASON.text, REASON.rank = over["reason"], over["rank"]
            return stop.exit_code or int(over["exit_code"])
        if message is not None:
            _run(meeting, number, message, stop)
            number += 1
        if is_alone:
            REASON.text, REASON.rank = "rank 0: its process vanished", 0
            print(f"mezzo: {REASON.text}", file=sys.stderr)
            _record_for_leader(meeting, number - 1, why=REASON.text)
            return stop.exit_code or _WITHOUT_LEADER
        if stop.stopped:  # rank 0 received the signal as well, and reports when the records are written
            end_s = min(end_s, time.monotonic() + 3 * SIGNAL_GRACE_S)
        if time.monotonic() > end_s:
            return stop.exit_code
        time.sleep(POLL_S)


def _record_for_leader(meeting: Meeting, number: int, *, why: str) -> None:
    """Write the record of the run that rank 0 did not live to write, as the first of the processes that are left."""
    rank, message = meeting.launched.rank, meeting.get(f"run-{number}")
    if message is None or any(other < rank and not meeting.gone(other) for other in meeting.others):
        return
    own = record_at(record_path(meeting.folder_for(f"rank-{rank}"), number))
    if not isinstance(own, RunRecord):
        own = substitute_record(Request.of_json(message["request"]), _WITHOUT_LEADER, why)
    meeting.recorded = Path(message["record"])
    write_record(own.model_copy(update={"error": why, "exit_code": _WITHOUT_LEADER}), meeting.recorded)


def _run(meeting: Meeting, number: int, message: dict[str, Any], stop: Stop) -> None:
    rank = meeting.launched.rank
    request = Request.of_json(message["request"])
    folder = meeting.folder_for(f"rank-{rank}")
    request = for_rank(request, rank, folder=folder, number=number, ranks=meeting.launched.size)
    request = request.model_copy(update={"record_path": str(record_path(folder, number)), "reports_progress": False})
    output = None if message["output"] is None else file_of_rank(Path(message["output"]), rank)
    stopped = False

    def interrupted() -> bool:
        nonlocal stopped
        stopped = stopped or meeting.get(f"stop-{number}") is not None or meeting.gone(0)
        return stopped

    try:
        record = run_alone(request, output=output, interrupted=interrupted)
        ended = {"error": error_of(record), "exit_code": exit_code_of(record)}
    except Stopped as by_signal:
        ended = {"error": str(by_signal), "exit_code": by_signal.exit_code}
    meeting.put(f"ended-{number}-{rank}", {**ended, "stopped": stopped, **take_position(request)._asdict()})
