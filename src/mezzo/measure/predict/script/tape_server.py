"""One process that records all tapes of a command, because importing torch takes longer than most tapes. Imports no torch.

It starts as soon as the command knows that it will trace a script, and imports while the command does something else. Without it, or
where the system cannot fork, each list of tapes has a process of its own.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import IO

PROGRAM = "mezzo.measure.predict.script.process"
SOCKET = "--socket"
"""The option of ``PROGRAM`` that makes it a server."""
ONLY_PROCESS: Mapping[str, str] = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}
"""The environment variables that a launcher sets for the only process of a job."""
RECORDED = b"."
"""What the process sends for each file whose tapes are there."""
_SERVER: ContextVar[TapeServer | None] = ContextVar("tape_server", default=None)


def environment() -> dict[str, str]:
    """Return the environment of a process that traces: with a launcher's variables a script would wait for the others."""
    return {name: value for name, value in os.environ.items() if name not in ONLY_PROCESS}


def current_server() -> TapeServer | None:
    """Return the server of the command; None without one."""
    return _SERVER.get()


@contextmanager
def shared_imports(libraries: Sequence[str], *, folder: str) -> Iterator[None]:
    """Let all tapes that are recorded inside share the imports of torch and of ``libraries``, unless a file in ``folder`` replaces them.

    Args:
        libraries: what the script imports first.
        folder: where the script's own modules are.
    """
    if not hasattr(os, "fork"):
        yield
        return
    server = TapeServer([folder, *libraries])
    token = _SERVER.set(server)
    try:
        server.start()
        yield
    finally:
        _SERVER.reset(token)
        server.close()


class TapeServer:
    """The client of the process."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self._arguments = arguments
        self._output: IO[bytes] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None

    def start(self) -> None:
        """Start the process, unless it runs."""
        if self._process is not None:
            return
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the process
        self._connection, theirs = socket.socketpair()
        with theirs:
            descriptor = theirs.fileno()
            self._process = subprocess.Popen(
                [sys.executable, "-m", PROGRAM, SOCKET, str(descriptor), *self._arguments],
                stdout=self._output,
                stderr=subprocess.STDOUT,
                env=environment(),
                start_new_session=True,
                pass_fds=[descriptor],
            )

    def record(self, requests_file: str, *, deadline_s: float | None) -> tuple[str, int] | None:
        """Record the tapes of a file of requests; return what was printed and the exit code, 0 while the process runs.

        Returns None, and ends the process, if they are not recorded at ``deadline_s``, a time of ``time.monotonic``.
        """
        self.start()
        assert self._process is not None
        assert self._connection is not None
        assert self._output is not None
        begin = os.fstat(self._output.fileno()).st_size
        self._connection.settimeout(None if deadline_s is None else max(deadline_s - time.monotonic(), 1e-3))
        try:
            self._connection.sendall(f"{requests_file}\n".encode())
            answer = self._connection.recv(len(RECORDED))
        except TimeoutError:
            self.close()
            return None
        except (BrokenPipeError, ConnectionResetError):
            answer = b""
        size = os.fstat(self._output.fileno()).st_size - begin
        printed = os.pread(self._output.fileno(), size, begin).decode(errors="replace")
        if answer:
            return printed, 0
        code = self._process.wait()
        self.close()
        return printed, code

    def close(self) -> None:
        """End the process and the forks that are left."""
        if self._process is None or self._connection is None or self._output is None:
            return
        self._connection.close()
        self._output.close()
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process = self._connection = self._output = None
