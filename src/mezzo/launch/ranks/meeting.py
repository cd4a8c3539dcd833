"""The folder through which the processes of a job communicate, in small files: each is written atomically, and by one process only.

Rank 0 creates a new folder for every job. To find it, each other rank writes a question with a random number in its name, which rank 0
answers, so that a file left behind by an earlier job is never mistaken for an answer. While a process takes part, it increments a
number in a file of its own; a process whose number no longer changes is gone, whatever the machines' clocks say. Imports no torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shlex
import shutil
import socket
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from mezzo.errors import ScriptError
from mezzo.launch.ranks.launched import Launched
from mezzo.measure.environment import package_version
from mezzo.secrets import hidden
from mezzo.temporary import began, namespace
from mezzo.version import VERSION

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

    def __init__(
        self,
        launched: Launched,
        place: Path,
        *,
        words: Sequence[str] = (),
        join_s: float = JOIN_S,
        silent_s: float = SILENT_S,
    ) -> None:
        """Begin before the folder exists; ``words`` are the command line, which all processes must share."""
        self.launched = launched
        self._words, self._digest = list(hidden(words)), _digest_of(words)
        self._unequal: dict[int, str] = {}
        """By rank, what a process that was started with another command was told."""
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
        _remove_left(self._place, one_machine=self.launched.one_machine)
        self._folder = self._place / f"job-{secrets.token_hex(8)}"
        self._folder.mkdir(mode=0o700)
        self._start(self._beat, self._answer)

    def join(self, check: Callable[[], None] = lambda: None) -> None:
        """Find the folder that rank 0 created; ``check`` is called while this process waits.

        Raises:
            ScriptError: there was no answer, or rank 0 was started with another command.
        """
        rank, token = self.launched.rank, secrets.token_hex(8)
        question, answer = self._place / f"hello-{rank}-{token}", self._place / f"welcome-{rank}-{token}"
        end = time.monotonic() + self._join_s
        try:
            while time.monotonic() < end:
                check()
                message = read_message(answer)
                if message is not None:
                    answer.unlink(missing_ok=True)
                    if message["unequal"]:
                        raise _unequal(message["unequal"])
                    self._folder = self._place / message["folder"]
                    self._start(self._beat)
                    return
                if not question.exists():
                    with suppress(FileNotFoundError):  # the end of an earlier command has just removed the folder
                        _create_own(self._place)
                        own = {"rank": rank, "words": self._words, "versions": _versions(), "digest": self._digest}
                        write_message(question, {**own, **_own_process()})
                time.sleep(_POLL_S)
        finally:
            question.unlink(missing_ok=True)
            with suppress(OSError):  # rank 0 is there
                self._place.rmdir()
        raise ScriptError(
            f"rank {rank} of {self.launched.size} found no rank 0 in {self._place} within {self._join_s:g} s",
            hint=_START_ALIKE,
        )

    def wait_for_all(self, check: Callable[[], None] = lambda: None) -> None:
        """Wait, as rank 0, until all processes have joined; ``check`` is called meanwhile.

        Raises:
            ScriptError: some did not, or were started with another command.
        """
        end = time.monotonic() + self._join_s
        while missing := self.missing:
            if self._unequal:  # first: when the other process has heard it and ended, torchrun stops this one
                raise _unequal(min(self._unequal.items())[1])
            check()
            if time.monotonic() > end:
                raise ScriptError(f"{missing} did not join within {self._join_s:g} s", hint=_START_ALIKE)
            time.sleep(_POLL_S)

    @property
    def missing(self) -> str:
        """The processes that have not joined; empty if all have."""
        ranks = [str(rank) for rank in self.others if not self.has_joined(rank)]
        return f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)} of {self.launched.size}" if ranks else ""

    def leave(self) -> None:
        """Stop counting; rank 0 deletes the folder, and without rank 0 the last process that leaves."""
        self._left.set()
        for thread in self._threads:
            thread.join()
        with suppress(OSError):
            self.put(f"bye-{self.launched.rank}", {})
        if self.launched.rank == 0 or (self.gone(0) and all(map(self.has_left, self.others))):
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

    def has_joined(self, rank: int) -> bool:
        """Return whether a process takes part."""
        return self._path(f"alive-{rank}").exists()

    def has_left(self, rank: int) -> bool:
        """Return whether a process takes part no more, as it said or because it is gone."""
        return self.get(f"bye-{rank}") is not None or self.gone(rank)

    def gone(self, rank: int) -> bool:
        """Return whether a process has ended, if it is one of this machine, or stopped counting."""
        message, now = read_message(self._path(f"alive-{rank}")), time.monotonic()
        if message is not None and _has_ended(message):
            return True
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
            self.put(f"alive-{self.launched.rank}", {"number": number, **_own_process()})

    def _beat(self) -> None:
        number = 0
        while not self._left.wait(_BEAT_S):
            number += 1
            self._put_alive(number)

    def _answer(self) -> None:
        while not self._left.wait(_POLL_S):
            with suppress(OSError):
                for question in self._place.glob("hello-*"):
                    asked = read_message(question) or {}
                    answer = question.with_name(question.name.replace("hello", "welcome", 1))
                    is_left = "digest" not in asked or _has_ended(asked)  # by an earlier job
                    unequal = "" if is_left or asked["digest"] == self._digest else self._difference(asked)
                    if unequal:
                        self._unequal[int(asked.get("rank", -1))] = unequal
                    write_message(answer, {"folder": self._folder.name, "unequal": unequal})
                    question.unlink(missing_ok=True)
            if all(map(self.has_joined, self.others)):
                return

    def _difference(self, asked: dict[str, Any]) -> str:
        """Return how the command of a process that asks differs from this one's."""
        theirs = [str(word) for word in asked.get("words", [])]
        versions: dict[str, str] = asked.get("versions", {})
        parts = [
            f"{name} {versions[name] or 'missing'}, where rank 0 has {own or 'none'}"
            for name, own in _versions().items()
            if versions.get(name, own) != own
        ]
        parts += [
            f"{shlex.quote(their)}, where rank 0 has {shlex.quote(own)}"
            for their, own in zip(theirs, self._words, strict=False)
            if their != own
        ]
        if len(theirs) != len(self._words) or not parts:
            parts = [f"mezzo {shlex.join(theirs)}, and rank 0 with mezzo {shlex.join(self._words)}"]
        return f"rank {asked.get('rank')} of {self.launched.size} was started with {'; '.join(parts)}"

    def _path(self, name: str) -> Path:
        return self._folder / name


def _remove_left(place: Path, *, one_machine: bool) -> None:
    """Delete what killed jobs of this user left, beside ``place`` and in it.

    All their processes have ended, or nothing has changed while a process could wait; on several machines, whose clocks may differ,
    only the former counts.
    """
    before_s = time.time() - JOIN_S - SILENT_S if one_machine else 0.0
    for other in (*place.parent.glob(f"{place.name.rpartition('-')[0]}-*"), *place.glob("job-*")):
        with suppress(OSError):  # another process may just do the same
            inside = [other, *other.rglob("*")]
            processes = [read_message(path) for path in inside if path.name.startswith(("alive-", "hello-"))]
            ended = processes and all(message is not None and _has_ended(message) for message in processes)
            left = ended or max(path.stat().st_mtime for path in inside) < before_s
            if left and other != place and other.stat().st_uid == place.stat().st_uid:
                shutil.rmtree(other)


def _own_process() -> dict[str, Any]:
    """Return what tells other processes of this machine that this one lives; a container has numbers of its own."""
    pid = os.getpid()
    return {"pid": pid, "began": began(pid), "host": socket.gethostname(), "numbers": namespace()}


def _has_ended(message: dict[str, Any]) -> bool:
    """Return whether the process that wrote a message was on this machine and has ended; False if that is not known."""
    own = _own_process()
    if not own["numbers"] or any(message.get(name) != own[name] for name in ("host", "numbers")):
        return False
    return message.get("began") != began(int(message["pid"]))


@cache
def _versions() -> dict[str, str]:
    """Return the versions that are the same in all processes of a job."""
    python = ".".join(map(str, sys.version_info[:2]))
    return {"mezzo": VERSION, "Python": python, "torch": (package_version("torch") or "").partition("+")[0]}


def _digest_of(words: Sequence[str]) -> str:
    """Return a digest of a command and of the versions; of secrets, too, which are not in the words that are sent."""
    return hashlib.sha256("\0".join([*_versions().values(), *words]).encode(errors="surrogateescape")).hexdigest()


def _unequal(what: str) -> ScriptError:
    return ScriptError(
        f"{what}; allowed: the same command, script, arguments and versions in all processes", hint=_START_ALIKE
    )


def _create_own(place: Path) -> None:
    """Create the folder, for this user alone; refuse another user's.

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
    """Write a message atomically.

    Raises:
        OSError: it names ``path``; the disk may be full.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        temporary.write_text(json.dumps(value), encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:  # one of a full disk names no file
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from None


def read_message(path: Path) -> dict[str, Any] | None:
    """Return a message; None before it was written."""
    try:
        message: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return message
