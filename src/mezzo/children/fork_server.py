"""Fork the child processes of one command from one process that has already imported PyTorch, Mezzo and the compiler.

A short run spends half of its time before its first step, and most of that on imports. So the first child of a command starts a process
that imports once, and each child is a fork of it. A script sees the same as in a process of its own: standard streams, signals, random
numbers, exit code, its own process id. CUDA does not survive a fork, and neither do threads: if either was in use, or if the
script may change what has been imported, the forked child replaces itself with a new process, and the command prints the reason.

Called as ``python -m mezzo.children.fork_server SOCKET PROGRAM[,MODULE ...] [LIBRARY ...]``. The command sends the folder of the script and
a message, with the file for the output; the fork calls ``PROGRAM.main([message])``, and the server answers ``pid N``, perhaps
``restarted WHY``, and ``code N``. It ends when the other end of the socket closes. Imports no torch until the first request.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import IO, Any, NamedTuple

from mezzo.children.guard import PASSED_ON, STOPPING, die_with_parent
from mezzo.children.script_text import Kind, files_to_search, shared_libraries
from mezzo.children.signals import Guarded

_IMPORTED_LATE = "torch._dynamo"
"""The compiler, which torch imports when a script constructs its first optimizer."""

_READ_BY_COMPILER = re.compile(rb"\b(?!TORCHELASTIC)(?:TORCH|TRITON|INDUCTOR|AOT)[A-Z]*_[A-Z]\w*")
"""Names of the environment variables that the compiler may read while it is imported."""

_DEVICES = ("/dev/nvidia", "/dev/kfd")
_ENDED = "the process that had imported PyTorch for all runs was killed"
_LONGEST_BYTES = 1 << 20
_STANDARD_OUTPUT, _STANDARD_ERROR = 1, 2


def child_command(program: str, message: str) -> list[str]:
    """Return the command of a child process that runs ``program`` without a fork server."""
    return [sys.executable, "-m", program, message]


# --- the command's side ------------------------------------------------------------------------------------------------------


class Starter:
    """The fork server's client, in the command."""

    def __init__(self, *programs: str, environment: Mapping[str, str] | None = None) -> None:
        """Begin without a server.

        Args:
            programs: the module whose ``main`` each child calls, and others that it imports before the script runs.
            environment: the environment variables of all children; None for the command's own.
        """
        self._programs, self._environment = programs, environment
        self.why_not_forked: str | None = None
        """Why runs are started without the server after all."""
        self._surroundings = os.getcwd(), dict(os.environ)
        self._process: Guarded | None = None
        self._connection: socket.socket | None = None

    def begin(self, target: str, *, kind: Kind) -> bool:
        """Start the server for children of this script, unless it runs; return False if they have to be started without it."""
        if sys.platform != "linux":  # elsewhere, native libraries do not survive a fork
            return False
        if self._process is None:
            self.why_not_forked = self.why_not_forked or _why_not(target, kind)
        if self._surroundings != (os.getcwd(), dict(os.environ)):
            self.why_not_forked = "the folder or the environment changed between the runs"
        if self.why_not_forked is not None:
            return False
        if self._process is None:
            self._begin(shared_libraries(target, kind=kind))
        return True

    def start(self, message: str, target: str, *, kind: Kind, sink: IO[bytes]) -> Forked | None:
        """Start a child that runs ``message`` and prints to ``sink``; return None if it has to be started without the server."""
        if not self.begin(target, kind=kind):
            return None
        assert self._process is not None
        assert self._connection is not None
        try:
            folder = os.getcwd() if kind == "module" else str(Path(target).resolve().parent)
            socket.send_fds(self._connection, [json.dumps([folder, message]).encode()], [sink.fileno()])
        except (BrokenPipeError, ConnectionResetError):
            self.why_not_forked = _ENDED
            return None
        return Forked(self, self._process, self._connection)

    def _begin(self, libraries: Sequence[str]) -> None:
        """Start the server, whose standard output is a file as in the children, so that Python buffers it the same way."""
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, tempfile.TemporaryFile() as output:
            descriptor = theirs.fileno()
            program = ",".join(self._programs)
            self._process = Guarded(
                [sys.executable, "-m", "mezzo.children.fork_server", str(descriptor), program, *libraries],
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=[descriptor],
                env=self._environment,
            )

    def close(self) -> None:
        """End the server."""
        if self._process is not None and self._connection is not None:
            self._connection.close()
            self._process.wait()


class Forked:
    """A forked run, with the same interface as ``Guarded``."""

    def __init__(self, starter: Starter, process: Guarded, connection: socket.socket) -> None:
        self._starter, self._process, self._connection = starter, process, connection
        self._pid: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code, negative for the signal that ended the run.

        Raises:
            subprocess.TimeoutExpired: it still runs after ``timeout`` seconds.
        """
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            self._connection.settimeout(None if end is None else max(end - time.monotonic(), 1e-3))
            try:
                message = self._connection.recv(_LONGEST_BYTES).decode()
            except TimeoutError:
                raise subprocess.TimeoutExpired("a run", timeout or 0.0) from None
            except ConnectionResetError:  # it ended before it read the request
                message = ""
            kind, _, value = message.partition(" ")
            if kind == "pid":
                self._pid = int(value)
            elif kind == "restarted":
                self._starter.why_not_forked = value
            elif kind == "code":
                self._process.cancel_kill()
                return int(value)
            else:
                return self._server_ended()

    def pass_on(self, number: int, *, kill_after_s: float = 0.0) -> None:
        """Send a signal to the run; before the run exists, a stopping signal ends the server as well."""
        if self._pid is not None:
            self._process.pass_on(number, kill_after_s=kill_after_s, pid=self._pid)
        elif number in STOPPING:
            self._process.kill()

    def kill(self) -> None:
        """Kill the run with its descendants."""
        self._process.kill(self._pid or 0)

    def _server_ended(self) -> int:
        """Kill the run, whose exit code the server can no longer report; return how the server ended."""
        if self._pid is not None:
            self.kill()
            self._starter.why_not_forked = _ENDED
        return self._process.wait()


def _why_not(target: str, kind: Kind) -> str | None:
    """Return why the imports cannot precede the script, None if they can."""
    for path in files_to_search(target, kind=kind):
        with contextlib.suppress(OSError):
            variable = _READ_BY_COMPILER.search(path.read_bytes())
            if variable:
                return f"{path.name} names {variable.group().decode()}, which the compiler reads when it is imported"
    return None


# --- the process that forks ---------------------------------------------------------------------------------------------------


class _Imported(NamedTuple):
    """The effects of the imports."""

    output: bytes
    """What they printed, which each run prints, too."""
    packages: list[str]
    """The packages imported with the libraries and the compiler; a file of the same name in the script's folder would have been
    imported instead."""
    generators: list[random.Random]
    """Generators that were seeded by the system."""
    finalised: frozenset[int]
    """The ids of their objects that do something at their end."""
    failure: str | None
    """Why they failed; None if they did not."""


def fork_for_requests(
    connection: socket.socket, programs: Sequence[str], *, libraries: Sequence[str]
) -> tuple[str, frozenset[int]]:
    """Fork for every request and return its message in the child; the server process ends here when the socket closes.

    Also return the ids of what the libraries have finalised.
    """
    imported = _import(programs, libraries)
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in PASSED_ON}
    while True:
        received, files, _, _ = socket.recv_fds(connection, _LONGEST_BYTES, 1)
        if not received:
            os._exit(0)
        folder, message = json.loads(received)
        command = child_command(programs[0], message)
        unsafe = imported.failure or _several_threads() or _device_opened()
        # Signals that arrive before the child has its handlers are delivered later.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
        parent, child = os.getpid(), os.fork()
        if child == 0:
            die_with_parent()
            if os.getppid() != parent:  # the parent was killed before that took effect
                os._exit(128 + signal.SIGKILL)
            why = unsafe or _why_not_here(folder, imported.packages)
            if why is not None:
                connection.send(f"restarted {why}".encode())
            connection.close()
            _redirect_streams(files[0])
            for number, handler in handlers.items():
                signal.signal(number, handler)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            if why is not None:
                os.execv(sys.executable, command)
            _reset_state(imported, command)
            return message, imported.finalised
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(files[0])
        _report_end(child, connection)


def _report_end(child: int, connection: socket.socket) -> None:
    """Send the command the child's process id now, and its exit code when it has ended."""
    try:
        connection.send(f"pid {child}".encode())
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        connection.send(f"code {code}".encode())
    except (BrokenPipeError, ConnectionResetError):  # the command was killed
        os._exit(0)


def _import(programs: Sequence[str], libraries: Sequence[str]) -> _Imported:
    packages: list[str] = []
    generators: list[random.Random] = []
    failure = None
    try:
        for name in programs:
            importlib.import_module(name)
        packages = _import_shared(libraries)
        generators = _generators()  # what is frozen is not listed
        # Without the compiler, because Triton calls its own objects a leak if they are not collected.
        gc.freeze()
        packages += _import_shared([_IMPORTED_LATE])
    except Exception as error:  # a run without the server shows it where the script's errors appear
        also = "".join(f" and {name}" for name in libraries)
        failure = f"importing PyTorch and its compiler{also} failed: {type(error).__name__}: {error}"
    gc.collect()
    generators += _generators()
    # Linear algebra libraries end their threads at the first fork, and restart them when they next compute.
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    size = os.fstat(_STANDARD_OUTPUT).st_size
    return _Imported(os.pread(_STANDARD_OUTPUT, size, 0), packages, generators, ids_to_finalise(), failure)


def _generators() -> list[random.Random]:
    return [thing for thing in gc.get_objects() if type(thing) is random.Random]


def _import_shared(names: Sequence[str]) -> list[str]:
    """Import modules as a script in a new process would; return the names of the packages that they imported."""
    packages, variables = _packages(), set(os.environ)
    folder = sys.path.pop(0)  # no file next to the script may run here
    for name in names:
        importlib.import_module(name)
    sys.path.insert(0, folder)
    for name in set(os.environ) - variables:
        del os.environ[name]
    return sorted(_packages() - packages)


def _packages() -> set[str]:
    return {name.partition(".")[0] for name in sys.modules}


def _several_threads() -> str | None:
    count = len(os.listdir("/proc/self/task"))
    return None if count == 1 else f"importing PyTorch started {count - 1} threads, which a fork would lose"


def _device_opened() -> str | None:
    """Return the reason if a GPU driver is in use, whatever opened it: torch knows only of its own calls."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of the listing itself is closed by now
            file = os.readlink(f"/proc/self/fd/{name}")
            if file.startswith(_DEVICES):
                return f"importing PyTorch opened {file}, which does not survive a fork"
    return None


def _why_not_here(folder: str, packages: list[str]) -> str | None:
    """Return why this forked process must not run a script of ``folder``, None if it may."""
    import torch

    if torch.cuda._is_in_bad_fork():
        return "importing PyTorch initialised CUDA, which does not survive a fork"
    for name in packages:
        spec = PathFinder.find_spec(name, [folder])
        if spec is not None and spec.loader is not None:
            return f"{spec.origin} has the name of a module that is imported once for all runs"
    return None


def _redirect_streams(descriptor: int) -> None:
    os.dup2(descriptor, _STANDARD_OUTPUT)
    os.dup2(descriptor, _STANDARD_ERROR)
    os.close(descriptor)


def _reset_state(imported: _Imported, command: Sequence[str]) -> None:
    """Reseed the generators that the system seeds, and clear state that a new process would not have."""
    import multiprocessing

    import numpy as np
    import torch

    os.write(_STANDARD_OUTPUT, imported.output)
    for generator in imported.generators:
        generator.seed()
    np.random.seed()
    torch.default_generator.seed()
    multiprocessing.current_process().authkey = os.urandom(32)
    importlib.invalidate_caches()
    sys.orig_argv[:] = command


# The objects of torch, Mezzo and the shared libraries exist before the fork and are frozen (``gc.freeze``): to collect them again took most
# of the time in which a run ended. What they refer to is then not collected either. That matters only for objects that do something at
# their end: if the run has left such an object, everything is collected, as in a process of its own.

_ACT = (io.IOBase, GeneratorType, CoroutineType, AsyncGeneratorType)


def ids_to_finalise() -> frozenset[int]:
    """Return the ids of the collected objects that do something at their end: before the fork, the libraries' objects."""
    # No generator here: it would be one of them.
    objects = gc.get_objects()
    kinds = {kind for kind in set(map(type, objects)) if issubclass(kind, _ACT) or hasattr(kind, "__del__")}
    return frozenset([id(one) for one in objects if type(one) in kinds and _is_open(one)])


def collect_all_if_needed(before: frozenset[int]) -> None:
    """Let Python collect the frozen objects, too, if there are objects to finalise other than ``before``."""
    if not ids_to_finalise() <= before:
        gc.unfreeze()


def _is_open(one: Any) -> bool:
    """Return whether an object still has an end: a file that is open, a generator that has not ended, anything else."""
    if isinstance(one, io.IOBase):
        return not one.closed
    return not isinstance(one, GeneratorType) or one.gi_frame is not None


if __name__ == "__main__":
    programs_ = sys.argv[2].split(",")
    message_, of_libraries = fork_for_requests(
        socket.socket(fileno=int(sys.argv[1])), programs_, libraries=sys.argv[3:]
    )
    code = sys.modules[programs_[0]].main([message_])
    collect_all_if_needed(of_libraries)
    sys.exit(code)
