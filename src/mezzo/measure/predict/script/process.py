"""Record a few steps of an unmodified script on fake tensors: ``python -m mezzo.measure.predict.script.process REQUESTS``.

The script runs from its first line under a fake-tensor mode, so its model and its data take no memory and have no numbers. Where
it reads a number (``loss.item()``, a condition, ``tolist``), it gets 1.0, 0 or False, which the record mentions. A script
that takes long to prepare its data has numbers until its first module (``data``). Recording begins when a model in
training mode is called, and ends after the second optimizer step, where the script stops. Between a step and the next call of the
model the script prepares data, which is the host's work and not recorded.

The process imports torch once and forks for each tape; with ``mezzo.children.fork_server`` it is itself a fork.
"""

from __future__ import annotations

import ast
import builtins
import io
import os
import pickle
import sys
import threading
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch._dynamo.config  # noqa: F401  # a fake mode imports the compiler; here once, and not in every fork
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from mezzo.children.as_python import run_as_python, run_changed
from mezzo.engine.matrix_units.refusals import noting_bf16
from mezzo.library_files import is_library_file
from mezzo.measure.predict.result_sizes import UnknownSize
from mezzo.measure.predict.script.batches import SlowData
from mezzo.measure.predict.script.loaders import MOST_S, rate_of, smallest_data
from mezzo.measure.predict.script.recorder import RecordingComplete, ScriptRecorder
from mezzo.measure.predict.script.tapes import ScriptTape, TapeRequest, loader_file
from mezzo.measure.predict.training import STEPS
from mezzo.measure.standard_input import reopen_input
from mezzo.records import LoaderRate
from mezzo.temporary import temporary_folder

_AT_ONCE = 2
"""How many scripts run at the same time."""
_SLOW_DATA = 3
"""Exit code of a fork whose script has to start again with numbers."""


def record_script(
    request: TapeRequest, gpu_queries: list[str] | None = None, timed: list[Callable[[], LoaderRate]] | None = None
) -> ScriptTape:
    """Run the request's script in this process as ``python script`` would, and return its tape.

    Args:
        request: the script, its policy and its batches.
        gpu_queries: receives the name of each function that reported the simulated GPU to the script.
        timed: receives a function that times the loader of the last step, where there is one.
    """
    script_recorder = ScriptRecorder(request, gpu_queries=gpu_queries)
    argv, path = sys.argv, list(sys.path)
    sys.argv = [request.script, *request.arguments]
    root = str(Path.cwd() if request.as_module else Path(request.script).resolve().parent)
    sys.path[0] = root
    changed = request.batch if request.numbers else None
    files = ScriptFiles(root, file=request.file, numbers=request.numbers, value=changed)
    try:
        with noting_bf16() as refused, script_recorder.watching(), files.watching():
            if changed is not None and request.file == request.script and not request.as_module:
                changed_code = with_numbers(request.script, request.numbers, changed)
                run_changed(request.script, lambda _: changed_code, package="")
            else:
                run_as_python(request.script, module=request.as_module)
    except RecordingComplete:
        pass
    finally:
        sys.argv, sys.path[:] = argv, path
    if script_recorder.num_steps < STEPS:
        return ScriptTape(tape=None, num_steps=script_recorder.num_steps)
    sizes = script_recorder.sizes[-1]
    drawn = script_recorder.loaders
    loader, data = smallest_data(drawn)
    if timed is not None and loader is not None:
        workers = script_recorder.batches.loaders.restore(loader)
        timed.append(partial(rate_of, loader, workers, batch=next(size for one, size in drawn if one is loader)))
    tape = script_recorder.recorder.finished(script_recorder.num_events)
    tape.batch = sizes[0] if sizes else 1
    return ScriptTape(
        tape=tape,
        batch=sizes[0] if sizes and len(set(sizes)) == 1 else None,
        num_batches=max(1, len(sizes)),
        num_steps=script_recorder.num_steps,
        from_loader=script_recorder.from_loader,
        modules=files.modules,
        configurations=files.configurations,
        numbers_first=request.numbers_first,
        whole_number=request.whole_number,
        launched=request.launched,
        policy=request.policy,
        refused_in_bf16=next(iter(refused), ""),
        compiles=script_recorder.compiles,
        channels_last=script_recorder.channels_last,
        optimizer=", ".join(dict.fromkeys(type(one).__name__ for one in script_recorder.optimizers)),
        data=data,
        read_at=script_recorder.read_at,
        sized_at=script_recorder.sized_at,
    )


def main(arguments: list[str]) -> None:
    """Record the requests of a file, and end the process: its forks have done the work, so nothing of its own has to be finalised."""
    _record_all(Path(arguments[0]))
    sys.stdout.flush()
    os._exit(0)


def _record_all(requests_file: Path) -> None:
    """Record each request in a fork of this process, two at a time, and write its tape next to the list of requests."""
    requests: list[TapeRequest] = pickle.loads(requests_file.read_bytes())
    tape_files = [requests_file.with_name(f"tape{number}") for number in range(len(requests))]
    if not hasattr(os, "fork"):
        for request, tape_file in zip(requests, tape_files, strict=True):
            if _write(request, tape_file).slow_data:
                _write(replace(request, numbers_first=True), tape_file)
        return
    waiting = sorted(zip(requests, tape_files, strict=True), key=lambda one: one[0].times_loader)
    running: list[tuple[int, TapeRequest, Path]] = []
    slow, (held, release) = False, os.pipe()
    while waiting or running:
        if waiting and len(running) < _AT_ONCE:
            request, tape_file = waiting.pop(0)
            request = replace(request, numbers_first=slow or request.numbers_first)
            running.append((_forked(request, tape_file, held, release), request, tape_file))
            continue
        running.sort(key=lambda one: one[1].times_loader)
        child, request, tape_file = running.pop(0)
        if request.times_loader:  # the last: nothing else runs while its loader is timed
            os.write(release, b".")
        if _exit_code(child) == _SLOW_DATA:
            slow = True
            waiting.insert(0, (request, tape_file))


def _forked(request: TapeRequest, tape_file: Path, held: int, release: int) -> int:
    child = os.fork()
    if child == 0:
        os.close(release)
        reopen_input()
        timed: list[Callable[[], LoaderRate]] = []
        tape = _write(request, tape_file, timed)
        sys.stdout.flush()
        if request.times_loader and timed:
            os.read(held, 1)  # until nothing else runs
            _write_rate(timed[0], loader_file(tape_file))
        os._exit(_SLOW_DATA if tape.slow_data else 0)
    return child


def _exit_code(child: int) -> int:
    """Wait for a fork; print the signal that ended it, if one did."""
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        print(f"ended by signal {os.WTERMSIG(status)}", flush=True)
    return os.waitstatus_to_exitcode(status)


def _write_rate(timed: Callable[[], LoaderRate], file: Path) -> None:
    """Time a loader and write its rate; end this process if a batch never comes and no signal ends the wait."""
    late = LoaderRate(reason=f"it stopped answering for {MOST_S:.0f} s")
    file.write_bytes(pickle.dumps(late))  # what is read if this process has to end
    guard = threading.Timer(MOST_S + 1.0, os._exit, (0,))
    guard.daemon = True
    guard.start()
    rate = timed()
    guard.cancel()
    file.write_bytes(pickle.dumps(rate))


def _write(request: TapeRequest, tape_file: Path, timed: list[Callable[[], LoaderRate]] | None = None) -> ScriptTape:
    """Record a request, write its tape and return it."""
    queries: list[str] = []
    try:
        tape = record_script(request, queries, timed)
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code)
        code = 1 if isinstance(ended.code, str) else ended.code
        tape = ScriptTape(tape=None, error=f"exit code {code}" if code else "", exited=bool(code))
    except SlowData:
        tape = ScriptTape(tape=None, slow_data=True)
    except Exception as error:
        traceback.print_exc()
        by_numbers = isinstance(error, (UnknownSize, DataDependentOutputException, DynamicOutputShapeException))
        tape = ScriptTape(tape=None, error=_error_text(error, request.script), needs_numbers=by_numbers)
    tape = replace(tape, gpu_queries=queries)
    unfinished = tape_file.with_suffix(".part")
    unfinished.write_bytes(pickle.dumps(tape))
    unfinished.replace(tape_file)
    return tape


def _error_text(error: Exception, script: str) -> str:
    script_folder = os.path.join(
        os.path.realpath(os.path.dirname(script)), ""
    )  # the modules next to it are its own as well
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_below(frame.filename, script_folder)]
    where = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}: " if frames else ""
    first = str(error).strip().partition("\n")[0]
    return f"{where}{type(error).__name__}: {first}"


def _is_below(file: str, folder: str) -> bool:
    return os.path.realpath(file).startswith(folder) and "site-packages" not in file


_CONFIGURATION = (".json", ".yaml", ".yml", ".toml", ".ini", ".cfg", ".conf")
_MOST_BYTES = 1 << 20
"""Larger files are data."""


def with_numbers(file: str, numbers: Sequence[tuple[int, int]], value: int) -> types.CodeType:
    """Return the code of a Python file with ``value`` in place of the numbers at these lines and columns."""
    tree = ast.parse(Path(file).read_bytes(), filename=file)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and (node.lineno, node.col_offset) in numbers:
            node.value = value
    return compile(tree, file, "exec")


class ScriptFiles:
    """Watches what a script reads below ``root``, and serves ``file`` with ``value`` in place of its numbers.

    Args:
        root: the folder whose modules are the script's own.
        file: the file to change; empty to change none.
        numbers: line and column of each number in a Python file; from and to, in characters, of each in a configuration.
        value: what to write in their place.
    """

    def __init__(
        self, root: str, *, file: str = "", numbers: Sequence[tuple[int, int]] = (), value: int | None = None
    ) -> None:
        self._root, self._file = os.path.realpath(root), os.path.realpath(file) if file else ""
        self._numbers, self._value = numbers, value
        self.modules: list[str] = []
        self.configurations: list[str] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch for the block."""
        original_get_code, original_open = SourceFileLoader.get_code, builtins.open

        def code_of(loader: SourceFileLoader, name: str) -> types.CodeType | None:
            file = os.path.realpath(loader.get_filename(name))
            if self._value is not None and file == self._file:
                return with_numbers(file, self._numbers, self._value)
            if self._is_own(file) and file not in self.modules:
                self.modules.append(file)
            return original_get_code(loader, name)

        with ExitStack() as stack:
            served = self._served(stack)

            def open_file(file: Any, mode: str = "r", *args: Any, **settings: Any) -> Any:
                if not isinstance(file, (str, os.PathLike)) or set(mode) - set("rbtU"):
                    return original_open(file, mode, *args, **settings)
                path = os.path.realpath(os.fspath(file))
                if path == self._file and served:
                    return original_open(served, mode, *args, **settings)
                if _is_configuration(path) and path not in self.configurations:
                    self.configurations.append(path)
                return original_open(file, mode, *args, **settings)

            stack.enter_context(patch.object(SourceFileLoader, "get_code", code_of))
            stack.enter_context(patch.object(builtins, "open", open_file))
            stack.enter_context(patch.object(io, "open", open_file))  # what pathlib calls
            yield

    def _served(self, stack: ExitStack) -> str:
        """Return a copy of the configuration with other numbers, which lives as long as ``stack``; empty where none is changed."""
        if self._value is None or not self._file.endswith(_CONFIGURATION):
            return ""
        text = Path(self._file).read_text(encoding="utf-8")
        for start, end in sorted(self._numbers, reverse=True):
            text = text[:start] + str(self._value) + text[end:]
        copy = stack.enter_context(temporary_folder()) / Path(self._file).name
        copy.write_text(text, encoding="utf-8")
        return str(copy)

    def _is_own(self, file: str) -> bool:
        return file.startswith(self._root + os.sep) and "site-packages" not in file


def _is_configuration(path: str) -> bool:
    if not path.endswith(_CONFIGURATION) or is_library_file(path):  # such as Matplotlib's list of fonts
        return False
    try:
        return os.path.getsize(path) <= _MOST_BYTES
    except OSError:
        return False


if __name__ == "__main__":
    main(sys.argv[1:])
