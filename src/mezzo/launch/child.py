"""The child process: run one script under one policy and write one record, whatever the script does.

Called as ``python -m mezzo.launch.child REQUEST``. The script sees the same ``__main__``, ``sys.argv`` and ``sys.path[0]`` as
under ``python``, and its exit code is kept. Its traceback begins at its own first line.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread
import hashlib
import importlib.util
import os
import runpy
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from mezzo.errors import MezzoError, ScriptError
from mezzo.launch.files_read import files_read
from mezzo.launch.frameworks import Framework, Training, Watching, training_in
from mezzo.launch.output import MetricReader, MetricStream
from mezzo.launch.process.script_signals import EndedBySignal, ended_by_signals, interrupts_kill, undisturbed
from mezzo.launch.progress import EVERY_S, reports_to
from mezzo.launch.request import Request, policy_text
from mezzo.launch.step_limit import StepLimit
from mezzo.launch.tracebacks import print_error
from mezzo.measure.environment import surroundings
from mezzo.observe.settings import step_text
from mezzo.records import Effective, Finding, Reason, RunRecord, write_record

INTERRUPTED = 130


def main(argv: list[str], *, unheeded: Callable[[], list[Reason]] = list) -> int:
    """Run the script of the request in ``argv`` and return the exit code.

    Args:
        argv: the request, as returned by ``Request.packed``.
        unheeded: returns, at the end, the script's settings that came too late to take effect.
    """
    request = Request.unpacked(argv[0])
    process, path = os.getpid(), Path(request.record_path).absolute()  # before the script changes the working directory
    shell = surroundings()
    with interrupts_kill():
        train = training_in(request.framework)
    started, started_at_s = time.perf_counter(), time.time()
    watched = files_read(request.compared_since_s)
    with (
        ended_by_signals(),
        train(request.policy, seed=request.seed, observe=request.observe) as training,
        watched as files,
    ):
        if request.reports_progress:
            training.report_to(reports_to(request.progress_file), every_s=EVERY_S)
        digest = _digest(request)  # imports a module's package
        reader = MetricReader(request.metric, lambda: training.num_updates) if request.metric else None
        limit = _limit(request, training)
        elements = training.change_models(request.models) if request.models is not None else lambda: None
        exit_code, error = _run_script(request, reader)
        if os.getpid() != process:  # a process forked by the script ended here: only its parent writes the record
            return exit_code
        stopped = limit is not None and limit.stopped  # closing the last step may reach the limit as well
        exit_code, error = _guarded(training.close_update, before=(exit_code, error))
        num_steps, observer = training.num_updates, training.observer
        if exit_code == 0:
            exit_code, error = _trained(request, num_steps, observer)
    with undisturbed():
        record = RunRecord(
            command=list(request.command),
            script=request.target,
            script_sha256=digest,
            framework=training.framework,
            policy=policy_text(request.policy),
            policy_typed=request.policy_typed,
            explanation=training.explanation(),
            seed=request.seed,
            environment=training.environment().model_copy(update=shell),
            steps=training.steps(),
            memory=training.memory(),
            effective=_with(training.effective(), [*_stand_in_reasons(request), *unheeded()]),
            metric=reader.metric() if reader else None,
            findings=training.findings(),
            first_steps=num_steps if stopped else None,
            input_elements=elements(),
            files_read=files.found,
            started_at_s=started_at_s,
            duration_s=time.perf_counter() - started,
            exit_code=exit_code,
            error=_sentence(error),
        )
        write_record(record if observer is None else observer.record(record), path)
    if isinstance(error, MezzoError):
        print(f"mezzo: {error}", file=sys.stderr)
    if observer is None and record.findings:
        print(f"mezzo: {_in_one_line(record.findings)}", file=sys.stderr)
    signalled = isinstance(error, EndedBySignal)
    if signalled or ((observer is not None or stopped) and any(t.daemon for t in threading.enumerate())):
        _exit_at_once(exit_code, tidily=not signalled)
    return exit_code


def _limit(request: Request, training: Training) -> StepLimit | None:
    """Return the limit of the run, now in force; None without one."""
    if request.stop_after_steps is None and request.stop_after_s is None:
        return None
    limit = StepLimit(steps=request.stop_after_steps, seconds=request.stop_after_s)
    training.stop_after(limit)
    return limit


def _in_one_line(findings: list[Finding]) -> str:
    """Return the gravest finding and the codes of the others."""
    first = findings[0]
    where = ", ".join([*(Path(line).name for line in first.lines[:1]), f"step {first.step}"])
    others = f"; also {', '.join(f.code for f in findings[1:])}" if len(findings) > 1 else ""
    return f"{first.code}: {first.title} ({where}){others}; the record says how to fix it"


def _with(effective: Effective, more: list[Reason]) -> Effective:
    return effective.model_copy(update={"left_alone": [*effective.left_alone, *more]})


def _stand_in_reasons(request: Request) -> list[Reason]:
    return [] if request.stand_in is None else [request.stand_in.reason]


def _exit_at_once(exit_code: int, *, tidily: bool) -> None:
    """End the process without Python's own shutdown, as a signal would.

    A script that was ended early needs this, too: with daemon threads running, Python's shutdown would abort in native code.

    Args:
        exit_code: the exit code of the process.
        tidily: whether to run the script's ``atexit`` functions.
    """
    if tidily:
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(exit_code)


Ending = tuple[int, BaseException | None]


def _run_script(request: Request, reader: MetricReader | None) -> Ending:
    sys.argv = [request.target, *request.arguments]
    streams = sys.stdout, sys.stderr
    if reader is not None:
        sys.stdout, sys.stderr = (cast(Any, MetricStream(stream, reader.line)) for stream in streams)
    try:
        ending = _guarded(lambda: _execute(request))
        return ending if isinstance(ending[1], EndedBySignal) else _guarded(_wait_for_threads, before=ending)
    finally:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, MetricStream):
                stream.finish()
            stream.flush()
        sys.stdout, sys.stderr = streams


def _execute(request: Request) -> None:
    if request.stand_in is not None:
        words = [*request.stand_in.options, *(["-m"] if request.kind == "module" else []), *sys.argv]
        sys.path[0], sys.argv = os.getcwd(), [request.stand_in.module, *words]
        runpy.run_module(request.stand_in.module, run_name="__main__", alter_sys=True)
    elif request.kind == "module":
        sys.path[0] = os.getcwd()
        runpy.run_module(request.target, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(request.target).resolve().parent)
        runpy.run_path(request.target, run_name="__main__")


def _wait_for_threads() -> None:
    """Wait for the threads that Python would wait for: a script may train in one."""
    pooled = concurrent.futures.thread._threads_queues  # idle workers themselves wait for Python's shutdown
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon and thread not in pooled:
            thread.join()


def _guarded(action: Callable[[], None], *, before: Ending = (0, None)) -> Ending:
    """Run the script's code; return the exit code that Python would give and the error that ended it, an earlier one first."""
    ending: Ending = (0, None)
    try:
        action()
    except EndedBySignal as error:
        ending = error.exit_code, error
    except SystemExit as leaving:
        ending = _exit_code(leaving), None
    except MezzoError as error:
        ending = error.exit_code, error
    except KeyboardInterrupt as error:
        print_error(error)
        ending = INTERRUPTED, error
    except BaseException as error:
        print_error(error)
        ending = 1, error
    return ending if before == (0, None) else before


def _exit_code(leaving: SystemExit) -> int:
    if leaving.code is None:
        return 0
    if isinstance(leaving.code, int):
        return leaving.code & 0xFF  # as the system truncates it
    print(leaving.code, file=sys.stderr)
    return 1


def _sentence(error: BaseException | None) -> str | None:
    if error is None:
        return None
    if isinstance(error, EndedBySignal):
        return error.sentence
    return error.message if isinstance(error, MezzoError) else f"{type(error).__name__}: {error}".rstrip(": ")


def _trained(request: Request, num_steps: int, observer: Watching | None) -> Ending:
    """Return the ending of a script that ended by itself: an error if there was nothing to record."""
    error = None
    if not num_steps:
        error = _never_trained(request)
    elif observer is not None and observer.too_short():
        error = _too_short(request, num_steps)
    return (0, None) if error is None else (error.exit_code, error)


def _never_trained(request: Request) -> ScriptError:
    what, unseen = _TRAINS_BY[request.framework]
    return ScriptError(
        f"{request.target} ended without a training step: it never {what}",
        hint=f"pass the script that trains, with the arguments that make it train; {unseen}",
    )


_TRAINS_BY: dict[Framework, tuple[str, str]] = {
    "torch": ("called backward()", "torch.func's gradients are not seen"),
    "keras": ("applied gradients by a Keras optimizer", "TensorFlow's own optimizers are not seen"),
    "paddle": ("called backward()", "static graphs are not seen"),
}
"""What makes a training step in a framework, and what makes one that is not seen."""


def _too_short(request: Request, num_steps: int) -> ScriptError:
    steps = () if request.observe is None else request.observe.steps
    return ScriptError(
        f"{request.target} ended after {num_steps} training step{'s' * (num_steps != 1)}; the steps to observe are {step_text(steps)}",
        hint=f"pass numbers from 1 to {num_steps} with --steps, or arguments that make the script train longer",
    )


def _digest(request: Request) -> str:
    path: str | None = request.target
    if request.kind == "module":
        sys.path[0] = os.getcwd()
        spec = importlib.util.find_spec(request.target)
        path = None if spec is None else spec.origin
    try:
        return hashlib.sha256(Path(path or "").read_bytes()).hexdigest()
    except OSError:  # a frozen or built-in module has no file
        return ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
