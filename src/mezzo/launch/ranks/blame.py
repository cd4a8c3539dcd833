"""Which process of a failed or hanging run is to blame: most wait or fail only because of another. Imports no torch."""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from mezzo.error_texts import is_about_peer
from mezzo.launch.request import Request


@dataclass(frozen=True, kw_only=True)
class ProcessEnd:
    """How one process of a run ended."""

    rank: int
    error: str | None
    exit_code: int = 0
    """The script's, if it ended by itself."""
    at_s: float = 0.0
    """When rank 0 learned of it, on its own clock."""
    stopped: bool = False
    """Whether it was still running when the whole run was stopped."""
    vanished: bool = False
    """Whether its mezzo process is gone, so that nothing more is known about it."""
    where: str = ""
    """Where its script was when the whole run was stopped; empty if that is not known."""
    waiting: bool = False
    """Whether it was waiting for other processes there."""
    updates: int | None = None
    """Number of updates that it made; None if that is not known."""

    @property
    def failure(self) -> str | None:
        """Why it failed by itself; None if it ended well or was stopped."""
        if self.stopped or self.error is not None or not self.exit_code:
            return None if self.stopped else self.error
        return f"its script ended with exit code {self.exit_code}"


def blamed(ends: Sequence[ProcessEnd]) -> tuple[int, str] | None:
    """Return the rank that ended a run, and the reason in a sentence; None if all ended well.

    In order of preference: a process that vanished; the first that failed for a reason of its own; one that was still busy while the
    others waited for it; one whose script had ended early, perhaps because it has fewer batches; the first that failed.
    """
    ended = all(end.error is None and not end.stopped and not end.vanished for end in ends)
    if ended and len({end.exit_code for end in ends}) == 1:  # the script's own, such as a verdict
        return None
    vanished = [end for end in ends if end.vanished]
    if vanished:
        return vanished[0].rank, "its process vanished"
    failed = sorted((end for end in ends if end.failure is not None), key=lambda end: end.at_s)
    failed_itself = [end for end in failed if not is_about_peer(end.failure or "")]
    if failed_itself:
        return failed_itself[0].rank, failed_itself[0].failure or ""
    running = [end for end in ends if end.stopped]
    busy = [end for end in running if not end.waiting and end.where]
    early = None if busy else _ended_early(ends)
    if early is not None:
        return early
    busy = busy or (
        [] if failed else [end for end in running if not end.waiting] or running
    )  # a silent one before one that waits
    if busy:
        positions = Counter(end.where for end in running)
        hung = min(busy, key=lambda end: positions[end.where])
        return hung.rank, _no_progress(hung, running)
    return (failed[0].rank, failed[0].failure or "") if failed else (running[0].rank, _no_progress(running[0], running))


def _ended_early(ends: Sequence[ProcessEnd]) -> tuple[int, str] | None:
    """Return a process that exited normally too early, and how its exit stopped the others."""
    ended_well = [end for end in ends if end.failure is None and not end.stopped and end.updates is not None]
    left_behind = [end for end in ends if (end.waiting if end.stopped else end.failure is not None)]
    if not ended_well or not left_behind:
        return None
    first = min(ended_well, key=lambda end: end.updates or 0)
    if (first.updates or 0) > min(end.updates or 0 for end in left_behind):
        return None
    ranks = ", ".join(str(end.rank) for end in left_behind)
    waiting = f"rank{'s' * (len(left_behind) > 1)} {ranks} still waited for it"
    error = next((end.error for end in left_behind if not end.stopped), None)
    why = f"its script ended after {first.updates} updates, while {waiting}: give all processes as many batches, or use join()"
    return first.rank, why + ("" if error is None else f" ({error})")


def _no_progress(hung: ProcessEnd, running: Sequence[ProcessEnd]) -> str:
    by_position: dict[str, list[str]] = {}
    for end in running:
        if end.rank != hung.rank and end.where:
            by_position.setdefault(end.where, []).append(str(end.rank))
    others = [f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)} at {where}" for where, ranks in by_position.items()]
    at = f" at {hung.where}" if hung.where else ""
    return f"it made no progress{at}" + (f", with {'; '.join(others)}" if others else "")


# ``faulthandler`` writes the traceback from a signal handler in C, so that even a process blocked in native code answers.

POSITION_SIGNAL = signal.SIGRTMAX - 2 if hasattr(signal, "SIGRTMAX") else None
"""The signal that asks for the traceback."""

_FRAME = re.compile(r'^\s+File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$', re.MULTILINE)
_OURS = str(Path(__file__).parents[2]) + os.sep
_LIBRARIES = re.compile(rf"^{re.escape(_OURS)}|[\\/](?:site-packages|dist-packages)[\\/]|[\\/]lib[\\/]python\d|^<")
_WAITING = re.compile(
    r"[\\/]torch[\\/](?:distributed[\\/]|autograd[\\/]graph\.py|nn[\\/]parallel[\\/]distributed\.py|cuda[\\/]|utils[\\/]_foreach)"
)
"""Files of torch in which a process waits for others, or for its device, which may itself wait for others."""

_WRITTEN_S, _LOOKS_EVERY_S = 10.0, 0.1
"""Time for a process to write its traceback: milliseconds, unless it is starved or stuck."""


class ScriptPosition(NamedTuple):
    """Where a script is."""

    where: str
    """The innermost line in the script's own files, such as ``train.py:31 in load``."""
    waiting: bool
    """Whether the script waits there for other processes."""


def write_position_on_signal(path: Path) -> None:
    """Write this process's traceback to ``path`` whenever it receives ``POSITION_SIGNAL``; the file exists once the handler does."""
    if POSITION_SIGNAL is not None:
        unready = path.with_name(f"{path.name}.part")
        faulthandler.register(POSITION_SIGNAL, file=unready.open("w"), all_threads=True)
        unready.replace(path)  # only now: a signal without a handler would end the process


def wait_for_position(path: Path) -> None:
    """Wait until a signalled process has written its traceback: its main thread comes last, so until the file grows no more."""
    end_s, seen_bytes = time.monotonic() + _WRITTEN_S, 0
    while time.monotonic() < end_s and path.exists():
        size_bytes = path.stat().st_size
        if 0 < size_bytes == seen_bytes:
            return
        seen_bytes = size_bytes
        time.sleep(_LOOKS_EVERY_S)


def take_position(request: Request) -> ScriptPosition:
    """Return the position that a run's process has reported, and delete its file."""
    position = position_in(request.position_file)
    request.position_file.unlink(missing_ok=True)
    return position


def position_in(path: Path) -> ScriptPosition:
    """Return the position in a file with a traceback; an empty one if there is none."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ScriptPosition("", False)
    main = re.split(r"^(?:Current thread|Thread) .*$", text, flags=re.MULTILINE)[-1]  # the newest thread is first
    frames = [(m["file"], m["line"], m["function"]) for m in _FRAME.finditer(main)]  # the innermost first
    innermost = next((n for n, (file, _, _) in enumerate(frames) if not _LIBRARIES.search(file)), None)
    if innermost is None:
        return ScriptPosition("", False)
    file, line, function = frames[innermost]
    inside = "" if function == "<module>" else f" in {function}"
    waiting = any(_WAITING.search(inner) for inner, _, _ in frames[:innermost])
    return ScriptPosition(f"{Path(file).name}:{line}{inside}", waiting)
