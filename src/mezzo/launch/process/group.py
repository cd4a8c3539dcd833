"""Start a run's process under a guard, pass signals on to it, and kill it with its descendants."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Protocol

_GUARD = str(Path(__file__).with_name("guard.py"))
_GUARDS = hasattr(os, "fork")


class Process(Protocol):
    """A run's process, as seen by the command."""

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code, negative for the signal that ended it.

        Raises:
            subprocess.TimeoutExpired: it still runs after ``timeout`` seconds.
        """

    def pass_on(self, number: int, *, kill_after_s: float = 0.0) -> None:
        """Send it a signal, unless a terminal has sent it already; kill it with its descendants ``kill_after_s`` later (0: never)."""

    def kill(self) -> None:
        """Kill it with its descendants."""


class Guarded:
    """A process that a guard kills, with its descendants, when this process ends (``guard.py``)."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        stdout: int | IO[bytes] | None,
        stderr: int | None,
        pass_fds: Sequence[int] = (),
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._pipe: int | None = None
        if not _GUARDS:
            self._process = subprocess.Popen(command, stdout=stdout, stderr=stderr, env=env)
            return
        read_end, self._pipe = os.pipe()
        guarded = [sys.executable, "-S", _GUARD, str(read_end), *command]
        try:
            self._process = subprocess.Popen(
                guarded, stdout=stdout, stderr=stderr, pass_fds=[read_end, *pass_fds], env=env
            )
        finally:
            os.close(read_end)

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code, negative for the signal that ended it."""
        returned = self._process.wait(timeout)
        if self._pipe is not None:
            os.close(self._pipe)
            self._pipe = None
        return returned

    def pass_on(self, number: int, *, kill_after_s: float = 0.0, pid: int = 0) -> None:
        """Send a signal to the process (0), or to its descendant ``pid``, unless a terminal has sent it already."""
        if not self._send(f"pass {number} {pid} {kill_after_s:g}"):
            self._process.send_signal(number)

    def kill(self, pid: int = 0) -> None:
        """Kill the process (0), or its descendant ``pid``, with all descendants."""
        if not self._send(f"kill {pid}"):
            self._process.send_signal(getattr(signal, "SIGKILL", signal.SIGTERM))

    def cancel_kill(self) -> None:
        """Cancel a pending kill: the process that was signalled has ended."""
        self._send("ended")

    def _send(self, text: str) -> bool:
        """Write a line to the guard; return whether this system has guards."""
        if self._pipe is not None:
            with contextlib.suppress(BrokenPipeError):  # the guard has ended, and the run with it
                os.write(self._pipe, f"{text}\n".encode())
        return _GUARDS
