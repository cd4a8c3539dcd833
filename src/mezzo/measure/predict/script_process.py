"""Record a few steps of an unmodified script on fake tensors: ``python -m mezzo.measure.predict.script_process JOBS``.

The script runs from its first line under a fake-tensor mode, so its model and its data take no memory and have no numbers. Where
it asks for a number (``loss.item()``, a condition, ``tolist``), it gets 1.0, 0 or False: the stand-in is said in the record. Recording
begins when a model in training mode is called and ends after the second optimizer step, where the script stops. What happens
between a step and the next call of the model is data preparation, which belongs to the host and is not recorded.

The process imports torch once and forks for each tape.
"""

from __future__ import annotations

import os
import pickle
import runpy
import sys
import traceback
import types
from pathlib import Path

from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from mezzo.measure.predict.batch_sources import main_module
from mezzo.measure.predict.script_batches import ScriptBatches
from mezzo.measure.predict.script_recorder import Enough, ScriptRecorder
from mezzo.measure.predict.scripted import ScriptTape, TapeRequest
from mezzo.measure.predict.training import STEPS
from mezzo.policy import Policy


def recorded(request: TapeRequest, policy: Policy) -> ScriptTape:
    """Run the request's script in this process as ``python script`` would, and return what it trained."""
    watch = ScriptRecorder(
        policy, batches=ScriptBatches(own=request.own_batch, wanted=request.batch), steps=request.steps
    )
    argv, path = sys.argv, list(sys.path)
    sys.argv = [request.script, *request.arguments]
    sys.path[0] = str(Path.cwd() if request.as_module else Path(request.script).resolve().parent)
    try:
        with watch.watching(request.script):
            if request.as_module:
                runpy.run_module(request.script, run_name="__main__", alter_sys=True)
            elif request.numbers and request.batch is not None:
                _run_changed(request.script, main_module(request.script, request.numbers, request.batch))
            else:
                runpy.run_path(request.script, run_name="__main__")
    except Enough:
        pass
    finally:
        sys.argv, sys.path[:] = argv, path
    if watch.num_steps < STEPS:
        return ScriptTape(tape=None, num_steps=watch.num_steps)
    sizes = watch.sizes[-1]
    tape = watch.recorder.ended(watch.num_events)
    tape.batch = sizes[0] if sizes else 1
    return ScriptTape(
        tape=tape,
        batch=sizes[0] if sizes and len(set(sizes)) == 1 else None,
        num_batches=max(1, len(sizes)),
        num_steps=watch.num_steps,
        from_loader=watch.from_loader,
        channels_last=watch.channels_last,
        optimizer=", ".join(dict.fromkeys(type(one).__name__ for one in watch.optimizers)),
        read_at=watch.read_at,
        sized_at=watch.sized_at,
    )


def _run_changed(script: str, code: types.CodeType) -> None:
    """Run code in place of the script's own, as ``runpy.run_path`` does."""
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
    if not hasattr(os, "fork"):
        for number, request in enumerate(requests):
            _write(request, place.with_name(f"tape{number}"))
        return
    running: list[int] = []
    for number, request in enumerate(requests):
        if len(running) == 2:
            _wait(running.pop(0))
        child = os.fork()
        if child == 0:
            _write(request, place.with_name(f"tape{number}"))
            sys.stdout.flush()
            os._exit(0)
        running.append(child)
    for child in running:
        _wait(child)


def _wait(child: int) -> None:
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        print(f"ended by signal {os.WTERMSIG(status)}")


def _write(request: TapeRequest, place: Path) -> None:
    try:
        made = recorded(request, Policy.parse(request.policy))
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code)
        code = 1 if isinstance(ended.code, str) else ended.code
        made = ScriptTape(tape=None, error=f"exit code {code}" if code else "", exited=bool(code))
    except Exception as error:
        traceback.print_exc()
        by_numbers = isinstance(error, (DataDependentOutputException, DynamicOutputShapeException))
        made = ScriptTape(tape=None, error=_said(error, request.script), needs_numbers=by_numbers)
    unfinished = place.with_suffix(".part")
    unfinished.write_bytes(pickle.dumps(made))
    unfinished.replace(place)


def _said(error: Exception, script: str) -> str:
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == script]
    where = f"{Path(script).name}:{lines[-1]}: " if lines else ""
    first = str(error).strip().partition("\n")[0]
    return f"{where}{type(error).__name__}: {first}"


if __name__ == "__main__":
    main(sys.argv[1:])
