"""Fork the runs of one command from one process that has already imported PyTorch, Mezzo and the compiler.

A short run spends half of its time before its first step, and most of that on imports. So the first run of a command starts a process
that imports once, and each run is a fork of it. A script sees the same as in a process of its own: standard streams, signals, random
numbers, exit code, its own process id. CUDA does not survive a fork, and neither do threads: if either was in use, or if the
script may change what has been imported, the forked child replaces itself with a new process, and the command prints the reason.

Called as ``python -m mezzo.launch.fork_server SOCKET [LIBRARY ...]``. The command sends a request and the file for the output; the
server answers ``pid N``, perhaps ``restarted WHY``, and ``code N``. It ends when the other end of the socket closes. Imports no torch
until the first request.
"""

from __future__ import annotations

import ast
import contextlib
import gc
import importlib
import importlib.util
import io
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import IO, Any, Literal, NamedTuple

from mezzo.launch.frameworks import MAX_FILES, spec_of
from mezzo.launch.guard import PASSED_ON, STOPPING, die_with_parent
from mezzo.launch.request import Request
from mezzo.launch.signals import Guarded
from mezzo.launch.training import training_in
from mezzo.records import Reason

_COMPILER = "torch._dynamo"
"""The compiler, which torch imports when a script constructs its first optimizer."""

_READ_BY_COMPILER = re.compile(rb"\b(?!TORCHELASTIC)(?:TORCH|TRITON|INDUCTOR|AOT)[A-Z]*_[A-Z]\w*")
"""Names of the environment variables that the compiler may read while it is imported."""

_READ_ONCE = re.compile(r"TORCH(?:DYNAMO|INDUCTOR|_COMPILE)_(?!CACHE_DIR)\w+")
"""Those of them that it never reads again. The folder of its cache is not one of them: the compiler reads and sets it later."""

_DEVICES = ("/dev/nvidia", "/dev/kfd")
_ENDED = "the process that had imported PyTorch for all runs was killed"
_LONGEST_BYTES = 1 << 20
_STANDARD_OUTPUT, _STANDARD_ERROR = 1, 2


def child_command(request: str) -> list[str]:
    """Return the command of a child process that runs ``request`` without a fork server."""
    return [sys.executable, "-m", "mezzo.launch.child", request]


# --- the command's side ------------------------------------------------------------------------------------------------------


class Starter:
    """The fork server's client, in the command."""

    def __init__(self, variables: Mapping[str, str] | None = None) -> None:
        """Begin without a server; ``variables`` are environment variables of all its runs, which override the command's."""
        self._variables = dict(variables or {})
        self.why_not_forked: str | None = None
        """Why runs are started without the server after all."""
        self._surroundings = os.getcwd(), dict(os.environ)
        self._process: Guarded | None = None
        self._connection: socket.socket | None = None

    def begin(self, request: Request) -> bool:
        """Start the server for runs like this one, unless it runs; return False if they have to be started without it."""
        if self._process is None:
            self.why_not_forked = self.why_not_forked or _why_not(request)
        if self._surroundings != (os.getcwd(), dict(os.environ)):
            self.why_not_forked = "the folder or the environment changed between the runs"
        if self.why_not_forked is not None:
            return False
        if self._process is None:
            self._begin(Path(request.record_path).parent, libraries=shared_libraries(request.target, kind=request.kind))
        return True

    def start(self, request: Request, *, sink: IO[bytes]) -> Forked | None:
        """Start a run that prints to ``sink``; return None if it has to be started without the server."""
        if not self.begin(request):
            return None
        assert self._process is not None
        assert self._connection is not None
        try:
            socket.send_fds(self._connection, [request.packed().encode()], [sink.fileno()])
        except (BrokenPipeError, ConnectionResetError):
            self.why_not_forked = _ENDED
            return None
        return Forked(self, self._process, self._connection)

    def _begin(self, folder: Path, *, libraries: Sequence[str]) -> None:
        """Start the server, whose standard output is a file as in the runs, so that Python buffers it the same way."""
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, tempfile.TemporaryFile(dir=folder) as output:
            descriptor = theirs.fileno()
            command = [sys.executable, "-m", "mezzo.launch.fork_server", str(descriptor), *libraries]
            env = {**os.environ, **self._variables} if self._variables else None
            self._process = Guarded(command, stdout=output, stderr=subprocess.STDOUT, pass_fds=[descriptor], env=env)

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


def _why_not(request: Request) -> str | None:
    """Return why the imports cannot precede the script, None if they can."""
    for path in files_to_search(request.target, kind=request.kind):
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


def fork_for_requests(connection: socket.socket, *, libraries: Sequence[str]) -> tuple[Request, frozenset[int]]:
    """Fork for every request and return it in the child; the server process ends here when the socket closes.

    Also return the ids of what the libraries have finalised.
    """
    imported = _import(libraries)
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in PASSED_ON}
    while True:
        message, files, _, _ = socket.recv_fds(connection, _LONGEST_BYTES, 1)
        if not message:
            os._exit(0)
        request = Request.unpacked(message.decode())
        unsafe = imported.failure or _several_threads() or _device_opened()
        # Signals that arrive before the child has its handlers are delivered later.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
        parent, child = os.getpid(), os.fork()
        if child == 0:
            die_with_parent()
            if os.getppid() != parent:  # the parent was killed before that took effect
                os._exit(128 + signal.SIGKILL)
            why = unsafe or _why_not_here(request, imported.packages)
            if why is not None:
                connection.send(f"restarted {why}".encode())
            connection.close()
            _redirect_streams(files[0])
            for number, handler in handlers.items():
                signal.signal(number, handler)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            if why is not None:
                os.execv(sys.executable, child_command(message.decode()))
            _reset_state(imported, message.decode())
            return request, imported.finalised
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


def _import(libraries: Sequence[str]) -> _Imported:
    packages: list[str] = []
    generators: list[random.Random] = []
    failure = None
    try:
        importlib.import_module("mezzo.launch.child")
        training_in("torch")
        packages = _import_shared(libraries)
        generators = _generators()  # what is frozen is not listed
        # Without the compiler, because Triton calls its own objects a leak if they are not collected.
        gc.freeze()
        packages += _import_shared([_COMPILER])
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


def _why_not_here(request: Request, packages: list[str]) -> str | None:
    """Return why this forked process must not run the script, None if it may."""
    import torch

    if torch.cuda._is_in_bad_fork():
        return "importing PyTorch initialised CUDA, which does not survive a fork"
    folder = os.getcwd() if request.kind == "module" else str(Path(request.target).resolve().parent)
    for name in packages:
        spec = PathFinder.find_spec(name, [folder])
        if spec is not None and spec.loader is not None:
            return f"{spec.origin} has the name of a module that is imported once for all runs"
    return None


def _redirect_streams(descriptor: int) -> None:
    os.dup2(descriptor, _STANDARD_OUTPUT)
    os.dup2(descriptor, _STANDARD_ERROR)
    os.close(descriptor)


def _reset_state(imported: _Imported, request: str) -> None:
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
    sys.orig_argv[:] = child_command(request)


def _compiler_variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if _READ_ONCE.fullmatch(name)}


def _late_settings(before: dict[str, str]) -> list[Reason]:
    """Return the compiler's variables that were set after its import: by a package, since the script names none."""
    why = "it was set while the script ran, after the compiler had read it: set it in the shell"
    changed = sorted(before.items() ^ _compiler_variables().items())
    return [Reason(what=name, value="ignored", reason=why) for name in dict.fromkeys(name for name, _ in changed)]


# The objects of torch, Mezzo and the shared libraries exist before the fork and are frozen (``gc.freeze``): to collect them again took most
# of the time in which a run ended. What they refer to is then not collected either. That matters only for objects that do something at
# their end: if the run has left such an object, everything is collected, as in a process of its own.

_ACT = (io.IOBase, GeneratorType, CoroutineType, AsyncGeneratorType)


def ids_to_finalise() -> frozenset[int]:
    """Return the ids of the collected objects that do something at their end: before the fork, those of libraries."""
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


# A library is listed if its import reads nothing but environment variables with the listed beginnings, and needs longer than a short run.
# A script that imports something of its own before it, or names such a variable, imports it in each run.

_READS = {"sklearn": r"SCIPY_|SKLEARN_|JOBLIB_|LOKY_", "scipy": r"SCIPY_"}
"""The beginnings of the environment variables that each library, or one that it needs, reads when it is imported."""


def shared_libraries(target: str, *, kind: Literal["script", "module"]) -> list[str]:
    """Return the modules of listed and installed libraries that a script imports before it runs anything of its own."""
    files = list(files_to_search(target, kind=kind))
    try:
        tree = ast.parse(files[0].read_bytes())
    except (OSError, SyntaxError, ValueError):  # the script's own error, which appears when it runs
        return []
    texts = [text for file in files if (text := _text_of(file))]
    names = dict.fromkeys(_first_imports(tree, files[0].resolve().parent))
    return [name for name in names if (library := name.partition(".")[0]) in _READS and _may_share(library, texts)]


def files_to_search(target: str, *, kind: Literal["script", "module"]) -> Iterator[Path]:
    """Yield the file of a script or of a module, and the Python files next to it."""
    script = Path(target)
    if kind == "module":
        spec = spec_of(target)
        script = Path(spec.origin if spec is not None and spec.origin is not None else "")
    yield script
    yield from sorted(script.resolve().parent.glob("*.py"))[:MAX_FILES]


def _text_of(file: Path) -> bytes:
    with contextlib.suppress(OSError):
        return file.read_bytes()
    return b""


def _may_share(library: str, texts: list[bytes]) -> bool:
    variable = re.compile(_READS[library].encode())
    return importlib.util.find_spec(library) is not None and not any(map(variable.search, texts))


def _first_imports(tree: ast.Module, folder: Path) -> Iterator[str]:
    """Yield the modules that a script imports before its first statement of another kind, and before a module of its own."""
    for node in tree.body:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):  # the script's docstring
            continue
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
            names = [node.module]
        else:
            return
        if any(os.path.exists(folder / name.partition(".")[0]) or _is_file(folder, name) for name in names):
            return
        yield from names


def _is_file(folder: Path, name: str) -> bool:
    return folder.joinpath(name.partition(".")[0]).with_suffix(".py").is_file()


if __name__ == "__main__":
    request_, of_libraries = fork_for_requests(socket.socket(fileno=int(sys.argv[1])), libraries=sys.argv[2:])
    from mezzo.launch.child import main

    at_start = _compiler_variables()
    code_ = main([request_.model_dump_json()], late_settings=lambda: _late_settings(at_start))
    collect_all_if_needed(of_libraries)
    sys.exit(code_)
