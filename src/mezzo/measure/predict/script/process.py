"""Record a few steps of an unmodified script on fake tensors: ``python -m mezzo.measure.predict.script.process REQUESTS``.

The script runs from its first line under a fake-tensor mode, so its model and its data take no memory and have no numbers. Where
it asks for a number (``loss.item()``, a condition, ``tolist``), it gets 1.0, 0 or False, which the record mentions. A script
that takes long to prepare its data has numbers until its first module (``data``). Recording begins when a model in
training mode is called, and ends after the second optimizer step, where the script stops. Between a step and the next call of the
model the script prepares data, which is the host's work and not recorded.

The process imports torch once and forks for each tape.
"""

from __future__ import annotations

import os
import pickle
import runpy
import sys
import traceback
import types
from dataclasses import replace
from pathlib import Path

import torch._dynamo.config  # noqa: F401  # a fake mode imports the compiler; here once, and not in every fork
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from mezzo.measure.predict.script.data import SlowData
from mezzo.measure.predict.script.files import ScriptFiles, with_numbers
from mezzo.measure.predict.script.recorder import Enough, ScriptRecorder
from mezzo.measure.predict.script.tapes import ScriptTape, TapeRequest
from mezzo.measure.predict.training import STEPS
from mezzo.measure.standard_input import reopen_input

_AT_ONCE = 2
"""Scripts that run at the same time."""
_SLOW_DATA = 3
"""Exit code of a fork whose script has to start again with numbers."""


def recorded(request: TapeRequest, told_of_gpu: list[str] | None = None) -> ScriptTape:
    """Run the request's script in this process as ``python script`` would, and return its tape.

    Args:
        request: the script, its policy and its batches.
        told_of_gpu: receives the name of each function that told the script of a GPU.
    """
    watch = ScriptRecorder(request, told_of_gpu=told_of_gpu)
    argv, path = sys.argv, list(sys.path)
    sys.argv = [request.script, *request.arguments]
    root = str(Path.cwd() if request.as_module else Path(request.script).resolve().parent)
    sys.path[0] = root
    changed = request.batch if request.numbers else None
    files = ScriptFiles(root, file=request.file, numbers=request.numbers, value=changed)
    try:
        with watch.watching(), files.watching():
            if request.as_module:
                runpy.run_module(request.script, run_name="__main__", alter_sys=True)
            elif changed is not None and request.file == request.script:
                _run_changed(request.script, with_numbers(request.script, request.numbers, changed))
            else:
                runpy.run_path(request.script, run_name="__main__")
    except Enough:
        pass
    finally:
        sys.argv, sys.path[:] = argv, path
    if watch.num_steps < STEPS:
        return ScriptTape(tape=None, num_steps=watch.num_steps)
    sizes = watch.sizes[-1]
    tape = watch.recorder.finished(watch.num_events)
    tape.batch = sizes[0] if sizes else 1
    return ScriptTape(
        tape=tape,
        batch=sizes[0] if sizes and len(set(sizes)) == 1 else None,
        num_batches=max(1, len(sizes)),
        num_steps=watch.num_steps,
        from_loader=watch.from_loader,
        modules=files.modules,
        configurations=files.configurations,
        numbers_first=request.numbers_first,
        launched=request.launched,
        policy=request.policy,
        compiles=watch.compiles,
        channels_last=watch.channels_last,
        optimizer=", ".join(dict.fromkeys(type(one).__name__ for one in watch.optimizers)),
        read_at=watch.read_at,
        sized_at=watch.sized_at,
    )


def _run_changed(script: str, code: types.CodeType) -> None:
    """Run ``code`` instead of the script's text, as ``runpy.run_path`` would."""
    module, own = types.ModuleType("__main__"), sys.modules["__main__"]
    vars(module).update(__file__=script, __cached__=None, __package__="")
    sys.modules["__main__"] = module
    try:
        exec(code, vars(module))
    finally:
        sys.modules["__main__"] = own


def main(words: list[str]) -> None:
    """Record each request in a fork of this process, two at a time, and write its tape beside the list of requests."""
    place = Path(words[0])
    requests: list[TapeRequest] = pickle.loads(place.read_bytes())
    places = [place.with_name(f"tape{number}") for number in range(len(requests))]
    if not hasattr(os, "fork"):
        for request, made in zip(requests, places, strict=True):
            if _write(request, made).slow_data:
                _write(replace(request, numbers_first=True), made)
        return
    waiting = list(zip(requests, places, strict=True))
    running: list[tuple[int, TapeRequest, Path]] = []
    slow = False
    while waiting or running:
        if waiting and len(running) < _AT_ONCE:
            request, made = waiting.pop(0)
            request = replace(request, numbers_first=slow or request.numbers_first)
            running.append((_forked(request, made), request, made))
            continue
        child, request, made = running.pop(0)
        if _exit_code(child) == _SLOW_DATA:
            slow = True
            waiting.insert(0, (request, made))


def _forked(request: TapeRequest, place: Path) -> int:
    child = os.fork()
    if child == 0:
        reopen_input()
        made = _write(request, place)
        sys.stdout.flush()
        os._exit(_SLOW_DATA if made.slow_data else 0)
    return child


def _exit_code(child: int) -> int:
    """Wait for a fork; print the signal that ended it, if one did."""
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        print(f"ended by signal {os.WTERMSIG(status)}")
    return os.waitstatus_to_exitcode(status)


def _write(request: TapeRequest, place: Path) -> ScriptTape:
    """Record a request, write its tape and return it."""
    told: list[str] = []
    try:
        made = recorded(request, told)
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code)
        code = 1 if isinstance(ended.code, str) else ended.code
        made = ScriptTape(tape=None, error=f"exit code {code}" if code else "", exited=bool(code))
    except SlowData:
        made = ScriptTape(tape=None, slow_data=True)
    except Exception as error:
        traceback.print_exc()
        by_numbers = isinstance(error, (DataDependentOutputException, DynamicOutputShapeException))
        made = ScriptTape(tape=None, error=_said(error, request.script), needs_numbers=by_numbers)
    made = replace(made, told_of_gpu=told)
    unfinished = place.with_suffix(".part")
    unfinished.write_bytes(pickle.dumps(made))
    unfinished.replace(place)
    return made


def _said(error: Exception, script: str) -> str:
    own = os.path.join(os.path.realpath(os.path.dirname(script)), "")  # its modules are its own as well
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_below(frame.filename, own)]
    where = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}: " if frames else ""
    first = str(error).strip().partition("\n")[0]
    return f"{where}{type(error).__name__}: {first}"


def _is_below(file: str, folder: str) -> bool:
    return os.path.realpath(file).startswith(folder) and "site-packages" not in file


if __name__ == "__main__":
    main(sys.argv[1:])
