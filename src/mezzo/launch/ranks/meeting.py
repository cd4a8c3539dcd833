"""The folder through which the processes of a job communicate, in small files: each is written atomically, and by one process only.

Rank 0 creates a new folder for every job. To find it, each other rank writes a question with a random number in its name, which rank 0
answers, so that a file left behind by an earlier job is never mistaken for an answer. While a process takes part, it increments a
number in a file of its own; a process whose number no longer changes is gone, whatever the machines' clocks say. Imports no torch.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import stat
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from mezzo.errors import ScriptError
from mezzo.launch.ranks.launched import Launched

JOIN_S = 120.0
"""Time for all processes to join: their launcher starts them together, but a busy file system may be slow."""
SILENT_S = 30.0
"""A process whose number has not changed for this long is gone."""

_BEAT_S, _POLL_S = 1.0, 0.02
_START_ALIKE = (
    "start every process with the same mezzo command; on several machines pass --out with a folder that all of them see"
)


def meeting_place(launched: Launched, *, shared: Path) -> Path:
    """Return where the processes of a job meet; if they are all on one machine, in its folder for temporary files.

    Args:
        launched: any of the processes.
        shared: a folder that all machines can access.
    """
    if not launched.one_machine:
        return shared.absolute() / f".mezzo-{launched.job}"
    return Path(tempfile.gettempdir()) / f"mezzo-{os.getuid() if hasattr(os, 'getuid') else 0}-{launched.job}"


class Meeting:
    """One process's view of the folder."""

    def __init__(self, launched: Launched, place: Path, *, join_s: float = JOIN_S, silent_s: float = SILENT_S) -> None:
        self.launched = launched
        self.others = [rank for rank in range(launched.size) if rank != launched.rank]
        self._place, self._join_s, self._silent_s = place, join_s, silent_s
        self._folder = place
        self._seen: dict[int, tuple[int, float]] = {}
        """The latest number of each process, and when it was first read."""
        self._left = threading.Event()
        self._threads: list[threading.Thread] = []

    # --- arriving and leaving --------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Create the job's folder, as rank 0, and begin to answer the others."""
        _create_own(self._place)
        self._folder = self._place / f"job-{secrets.token_hex(8)}"
        self._folder.mkdir(mode=0o700)
        self._start(self._beat, self._answer)

    def join(self) -> None:
        """Find the folder that rank 0 created.

        Raises:
            ScriptError: there was no answer.
        """
        rank, token = self.launched.rank, secrets.token_hex(8)
        question, answer = self._place / f"hello-{rank}-{token}", self._place / f"welcome-{rank}-{token}"
        end = time.monotonic() + self._join_s
        while time.monotonic() < end:
            message = read_message(answer)
            if message is not None:
                answer.unlink(missing_ok=True)
                self._folder = self._place / message["folder"]
                self._start(self._beat)
                return
            if not question.exists():
                _create_own(self._place)
                write_message(question, {})
            time.sleep(_POLL_S)
        question.unlink(missing_ok=True)
        raise ScriptError(
            f"rank {rank} of {self.launched.size} found no rank 0 in {self._place} within {self._join_s:g} s",
            hint=_START_ALIKE,
        )

    def wait_for_all(self) -> None:
        """Wait, as rank 0, until all processes have joined.

        Raises:
            ScriptError: some did not.
        """
        end = time.monotonic() + self._join_s
        while missing := [rank for rank in self.others if not self._path(f"alive-{rank}").exists()]:
            if time.monotonic() > end:
                names = ", ".join(map(str, missing))
                raise ScriptError(
                    f"rank{'s' * (len(missing) > 1)} {names} of {self.launched.size} did not join within {self._join_s:g} s",
                    hint=_START_ALIKE,
                )
            time.sleep(_POLL_S)

    def leave(self) -> None:
        """Stop counting; rank 0 deletes the folder."""
        self._left.set()
        for thread in self._threads:
            thread.join()
        if self.launched.rank == 0:
            shutil.rmtree(self._folder, ignore_errors=True)
            with suppress(OSError):  # another job may meet there, or a question may just have been asked
                self._place.rmdir()

    # --- messages --------------------------------------------------------------------------------------------------------------

    def put(self, name: str, value: dict[str, Any]) -> None:
        """Leave a message."""
        write_message(self._path(name), value)

    def get(self, name: str) -> dict[str, Any] | None:
        """Return a message; None before it was written."""
        return read_message(self._path(name))

    def folder_for(self, name: str) -> Path:
        """Return a folder inside the job's, created if missing, which is deleted when the job ends."""
        folder = self._path(name)
        folder.mkdir(exist_ok=True)
        return folder

    def gone(self, rank: int) -> bool:
        """Return whether a process has stopped counting."""
        message, now = read_message(self._path(f"alive-{rank}")), time.monotonic()
        number = -1 if message is None else int(message["number"])
        last, since_s = self._seen.get(rank, (None, now))
        if number != last:
            self._seen[rank] = number, now
            return False
        return now - since_s > self._silent_s

    def host_of(self, rank: int) -> str:
        """Return the name of a process's machine; empty if the process never joined."""
        message = read_message(self._path(f"alive-{rank}"))
        return "" if message is None else str(message["host"])

    # --- threads ---------------------------------------------------------------------------------------------------------------

    def _start(self, *actions: Callable[[], None]) -> None:
        self._put_alive(0)
        for action in actions:
            thread = threading.Thread(target=action, name="mezzo-ranks", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _put_alive(self, number: int) -> None:
        with suppress(OSError):  # the folder is deleted when the job is over
            self.put(f"alive-{self.launched.rank}", {"number": number, "host": socket.gethostname()})

    def _beat(self) -> None:
        number = 0
        while not self._left.wait(_BEAT_S):
            number += 1
            self._put_alive(number)

    def _answer(self) -> None:
        while not self._left.wait(_POLL_S):
            with suppress(OSError):
                for question in self._place.glob("hello-*"):
                    answer = question.with_name(question.name.replace("hello", "welcome", 1))
                    write_message(answer, {"folder": self._folder.name})
                    question.unlink(missing_ok=True)
            if all(self._path(f"alive-{rank}").exists() for rank in self.others):
                return

    def _path(self, name: str) -> Path:
        return self._folder / name


def _create_own(place: Path) -> None:
    """Create the folder, for this user alone; refuse one that somebody else created.

    Raises:
        ScriptError: it belongs to another user.
    """
    place.parent.mkdir(parents=True, exist_ok=True)
    place.mkdir(mode=0o700, exist_ok=True)
    status = place.stat()
    if hasattr(os, "getuid") and (status.st_uid != os.getuid() or not stat.S_ISDIR(status.st_mode)):
        raise ScriptError(
            f"{place} belongs to another user, so the processes of this job cannot meet there",
            hint="set TMPDIR to a folder of your own",
        )


def write_message(path: Path, value: dict[str, Any]) -> None:
    """Write a message atomically."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    temporary.write_text(json.dumps(value), encoding="utf-8")
    os.replace(temporary, path)


def read_message(path: Path) -> dict[str, Any] | None:
    """Return a message; None before it was written."""
    try:
        message: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return message
