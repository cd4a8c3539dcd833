"""The child process: run one script under one policy and write one record, whatever the script does.

Called as ``python -m mezzo.launch.child REQUEST``. The script sees the same ``__main__``, ``sys.argv`` and ``sys.path[0]`` as
under ``python``, and its exit code is kept. Its traceback begins at its own first line.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread
import errno
import hashlib
import importlib
import importlib.util
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from mezzo.children.as_python import run_as_python
from mezzo.children.script_text import names_cuda, spec_of
from mezzo.children.signals import EndedBySignal, ended_by_signals, interrupts_kill, signals_ignored
from mezzo.errors import MezzoError, ScriptError
from mezzo.frameworks import IMPORTED_AS, framework_called
from mezzo.launch.patches import Patches
from mezzo.launch.progress import REPORT_EVERY_S, reports_to
from mezzo.launch.ranks.blame import write_position_on_signal
from mezzo.launch.recording import Ending, MetricReader, MetricStream, files_read, guarded, record_of
from mezzo.launch.request import NO_RECORD, Request, ScriptFile
from mezzo.launch.spawned import SpawnedProcesses
from mezzo.launch.training import StepLimit, Training, training_in
from mezzo.measure.environment import surroundings
from mezzo.measure.standard_input import reopen_input
from mezzo.observe.settings import FallbackSettings, ValuesSettings, step_text
from mezzo.records import AnyRecord, Finding, Note, RunRecord, SnapshotsTaken, write_record

_COMPILER = "torch._dynamo"
"""Imported before the script only where runs are forked."""
_READ_ONCE = re.compile(r"TORCH(?:DYNAMO|INDUCTOR|_COMPILE)_(?!CACHE_DIR)\w+")
"""Environment variables that torch's compiler reads when it is imported and never again; it reads and sets its cache's folder later."""
_FULL = (errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC))
"""Errors of a full disk, or of one on which the user may write no more."""


def main(argv: list[str]) -> int:
    """Run the script of the request in ``argv``, as returned by ``Request.packed``, and return the exit code."""
    try:
        return _run(argv)
    except OSError as error:
        if error.errno not in _FULL:
            raise
        return NO_RECORD  # the command says why


def _run(argv: list[str]) -> int:
    compiler_settings = _compiler_settings() if _COMPILER in sys.modules else None
    reopen_input()
    request = Request.unpacked(argv[0])
    pid, path, shell = (
        os.getpid(),
        Path(request.record_path).absolute(),
        surroundings(),
    )  # before the script changes them
    _prepare_process(request)
    with interrupts_kill():
        train = training_in(request.framework)
    started, started_at_s = time.perf_counter(), time.time()
    with (
        ended_by_signals(),
        train(request.policy, seed=request.seed, observe=request.observe) as training,
        files_read(request.compared_since_s) as files,
        _recording_spawned(request, training) as spawned,
    ):
        digest = _digest(request)  # imports a module's package
        reader = MetricReader(request.metric, lambda: training.num_updates) if request.metric else None
        limit = _limit(request, training)
        input_elements = training.change_models(request.models) if request.models is not None else lambda: None
        exit_code, error = _run_script(request, reader, training)
        if os.getpid() != pid:  # a process that the script forked ends here: only its parent writes the record
            return exit_code
        stopped = limit is not None and limit.stopped  # read now: closing the last step may reach the limit as well
        exit_code, error = guarded(training.close_update, before=(exit_code, error))
        snapshots, guardrails = training.end_snapshots(), training.guardrails()
        duration_s = time.perf_counter() - started  # without the time to collect the record and inspect the machine
        trained_nothing = exit_code == 0 and _trained_nothing(training)
        if exit_code == 0:
            exit_code, error = _ending_without_exception(request, training, resumed=snapshots)
    with signals_ignored():
        record = record_of(
            request,
            training,
            (exit_code, error),
            shell=shell,
            ran=(started_at_s, duration_s),
            digest=digest,
            late_settings=_late_settings(compiler_settings),
            files_read=files.found,
            metric=reader.metric() if reader else None,
            input_elements=input_elements(),
            bottleneck=training.bottleneck(),
            snapshots=snapshots,
            guardrails=guardrails,
            out_of_memory=training.out_of_memory(error),
            first_steps=training.num_updates if stopped else None,
            trained_nothing=trained_nothing,
        )
        merged = spawned.merged_with(record)
        write_record(merged, path)
    if merged is not record and isinstance(error, ScriptError):  # the processes that the script started have trained
        exit_code, error = 0, None
    _print_summary(error, merged)
    _exit_if_ended_early(
        exit_code, error, stopped=stopped or training.observer is not None or training.stopped_by_guard is not None
    )
    return exit_code


def _compiler_settings() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if _READ_ONCE.fullmatch(name)}


def _late_settings(before: dict[str, str] | None) -> list[Note]:
    """Return the compiler's variables that were set after its import, by a package: a script that names one has it imported later."""
    if before is None:
        return []
    why = "it was set while the script ran, after the compiler had read it: set it in the shell"
    changed = sorted(before.items() ^ _compiler_settings().items())
    return [Note(what=name, value="ignored", reason=why) for name in dict.fromkeys(name for name, _ in changed)]


def _prepare_process(request: Request) -> None:
    """Set the run's environment variables and working directory, and register the signal that asks where the script is."""
    os.environ.update(request.variables)
    if request.rank is not None:
        write_position_on_signal(request.position_file)
    if request.work_folder is not None:
        os.chdir(request.work_folder)
        os.environ["PWD"] = request.work_folder


def _print_summary(error: BaseException | None, record: AnyRecord) -> None:
    """Print Mezzo's own error, whose hint the command's report has, and the findings of a run without an observer."""
    if isinstance(error, MezzoError):
        print(f"mezzo: {error.message}", file=sys.stderr)
    if isinstance(record, RunRecord) and record.findings:
        print(f"mezzo: {_in_one_line(record.findings)}", file=sys.stderr)


@contextmanager
def _recording_spawned(request: Request, training: Training) -> Iterator[SpawnedProcesses]:
    """Let the processes that the script starts record their training, and keep the weights that ranks compare."""
    spawned, patches = SpawnedProcesses(request), Patches()
    # The comparison of gradients that a fallback search makes follows one process.
    if training.follows_processes and not isinstance(request.observe, FallbackSettings):
        spawned.install(patches, training)
    if request.rank is not None:
        training.keep_weights(patches)
    try:
        yield spawned
    finally:
        patches.undo()


def _limit(request: Request, training: Training) -> StepLimit | None:
    """Apply the run's limit to the training and return it; None without one."""
    if request.stop_after_steps is None and request.stop_after_s is None:
        return None
    limit = StepLimit(steps=request.stop_after_steps, seconds=request.stop_after_s)
    training.stop_after(limit)
    return limit


def _in_one_line(findings: list[Finding]) -> str:
    """Return the most serious finding, and the codes of the others."""
    first = findings[0]
    where = ", ".join([*(Path(line).name for line in first.lines[:1]), f"step {first.step}"])
    others = f"; also {', '.join(f.code for f in findings[1:])}" if len(findings) > 1 else ""
    return f"{first.code}: {first.title} ({where}){others}; the record says how to fix it"


def _exit_if_ended_early(exit_code: int, error: BaseException | None, *, stopped: bool) -> None:
    """End the process without Python's own shutdown if a signal ended the script, or if Mezzo ``stopped`` it while daemon threads run.

    With these, Python's shutdown would abort in native code.
    """
    signalled = isinstance(error, EndedBySignal)
    if signalled or (stopped and any(thread.daemon for thread in threading.enumerate())):
        _exit_without_shutdown(exit_code, run_atexit=not signalled)


def _exit_without_shutdown(exit_code: int, *, run_atexit: bool) -> None:
    """End the process as a signal would; ``run_atexit``: after the script's ``atexit`` functions."""
    if run_atexit:
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(exit_code)


def _run_script(request: Request, reader: MetricReader | None, training: Training) -> Ending:
    sys.argv = [request.target, *request.arguments]
    ready = guarded(lambda: _begin(request, training))
    if ready[1] is not None:
        return ready
    streams = sys.stdout, sys.stderr
    if reader is not None:
        sys.stdout, sys.stderr = (cast(Any, MetricStream(stream, reader.line)) for stream in streams)
    try:
        ending = guarded(lambda: _execute(request, training.run_file))
        return ending if isinstance(ending[1], EndedBySignal) else guarded(_wait_for_threads, before=ending)
    finally:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, MetricStream):
                stream.finish()
            stream.flush()
        sys.stdout, sys.stderr = streams


def _begin(request: Request, training: Training) -> None:
    if request.reports_progress:
        first = None if request.compared_since_s is None else request.updated_file
        training.report_to(reports_to(request.progress_file, first=first), every_s=REPORT_EVERY_S)
    if request.framework == "torch" and names_cuda(request.target, kind=request.kind):
        training.begin_stand_in()
    training.begin_snapshots(request.snapshots, _file_of(request))
    training.begin_trace(request.trace)
    if request.tape_file:
        training.begin_tape(Path(request.tape_file))
    if request.guard is not None:
        training.begin_guard(request.guard)


_NAMESPACES: list[dict[str, Any]] = []
"""The script's global names, kept alive until the process ends, as under python. Deleting a DDP model earlier would join gloo's thread
while holding the GIL, which that thread needs to release the last all-reduce (torch 2.13)."""


def _execute(request: Request, run_file: Callable[[ScriptFile], dict[str, Any]] | None) -> None:
    if request.stand_in is not None:
        importlib.import_module(request.stand_in.module).provide(without_amp=True)
    sys.path[1:1] = request.import_paths
    if run_file is not None:
        script = _file_of(request)
        sys.path[0] = script.folder
        namespace = run_file(script)
    else:
        namespace = run_as_python(request.target, module=request.kind == "module")
    _NAMESPACES.append(namespace)


def _file_of(request: Request) -> ScriptFile:
    """Return the file of a script or of a module; without a path if a module has none."""
    if request.kind == "script":
        return ScriptFile(request.target, str(Path(request.target).resolve().parent), None, request.model_dump_json())
    spec, package = spec_of(request.target), request.target.rpartition(".")[0]
    if spec is not None and spec.submodule_search_locations:
        spec, package = spec_of(f"{request.target}.__main__"), request.target
    origin = "" if spec is None or spec.origin is None else spec.origin
    return ScriptFile(origin, os.getcwd(), package, request.model_dump_json())


def _wait_for_threads() -> None:
    """Wait for the threads that Python would wait for: a script may train in one of them."""
    pooled = concurrent.futures.thread._threads_queues  # not for idle pool workers, which end only in Python's shutdown
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon and thread not in pooled:
            thread.join()


def _ending_without_exception(request: Request, training: Training, *, resumed: SnapshotsTaken | None) -> Ending:
    """Return the ending of a script that raised nothing: still an error if it never trained, was not resumed, or the guard stopped it."""
    num_steps, observer = training.num_updates, training.observer
    error: MezzoError | None = training.not_resumed or training.stopped_by_guard
    had_trained = (
        resumed is not None and resumed.resumed_from is not None
    )  # it may have been stopped after its last update
    if (
        error is None
        and isinstance(request.observe, ValuesSettings)
        and observer is not None
        and not observer.too_short()
    ):
        return 0, None  # values are compared of a forward pass, too
    if error is None and not num_steps and not had_trained:
        error = _never_trained(request, has_any_loss=training.has_any_loss)
    elif error is None and observer is not None and observer.too_short():
        error = _too_short(request, num_steps, compiles=observer.compiles)
    return (0, None) if error is None else (error.exit_code, error)


def _trained_nothing(training: Training) -> bool:
    began = training.num_updates or training.has_any_loss or training.not_resumed or training.stopped_by_guard
    return not began


def _never_trained(request: Request, *, has_any_loss: bool) -> ScriptError:
    if has_any_loss:
        return ScriptError(
            f"{request.target} ended without a training step: it called backward(), but no optimizer made a step",
            hint="pass arguments that make it train until its first update; --policy as-is shows whether a loss scale of its own skips "
            "updates that are not finite",
        )
    what, not_seen = "called backward()", "torch.func's gradients are not seen"
    if request.framework != "torch":
        framework = framework_called(request.framework)
        what, not_seen = framework.training_call, framework.not_seen
    others = [name for name in IMPORTED_AS if name in sys.modules]
    if request.framework == "torch" and others:
        return ScriptError(
            f"{request.target} ended without a training step in PyTorch. A package imported {others[0]}, but no file of the script does, "
            "and by these files Mezzo chooses the framework",
            hint=f"write import {others[0]} in {request.target}, if that is what it trains in",
        )
    return ScriptError(
        f"{request.target} ended without a training step: it never {what}",
        hint=f"pass the script that trains, with the arguments that make it train; {not_seen}",
    )


def _too_short(request: Request, num_steps: int, *, compiles: bool) -> ScriptError:
    steps = () if request.observe is None else request.observe.steps
    ended = f"{request.target} ended after {num_steps} training step{'s' * (num_steps != 1)}"
    missed = [step for step in steps if step <= num_steps]
    if missed:
        return _not_observable(ended, missed, num_steps, compiles=compiles)
    return ScriptError(
        f"{ended}; the steps to observe are {step_text(steps)}",
        hint=f"pass numbers from 1 to {num_steps} with --at, or arguments that make the script train longer",
    )


def _not_observable(ended: str, missed: list[int], num_steps: int, *, compiles: bool) -> ScriptError:
    """Return the error for steps that ran, but began where no observation can begin."""
    if missed == [1] and not compiles:
        advice = f"pass a number from 2 to {num_steps} with --at" if num_steps > 1 else "make the script train longer"
        return ScriptError(
            f"{ended}; step 1 is observed from the first call of a module, and no module was called in it",
            hint=f"{advice}: later steps are observed from the end of the step before, with modules or without",
        )
    where, outside = ("compiled code", "without torch.compile") if compiles else ("a backward pass", "after it")
    return ScriptError(
        f"{ended}; step {step_text(missed)} began inside {where}, where no observation can begin",
        hint=f"run the script with its optimizer called {outside}",
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
