"""Run a user's script in a child process and return its record, its output and its exit code.

The child is the user's own Python with the user's own environment. Its output goes where ours goes, byte for
byte, or to a file. Signals reach it, and its record then contains everything up to that point. If a child dies without
writing a record (a crash in native code, a kill), one that says so is written for it. Imports no torch.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from pathlib import Path
from typing import IO, NamedTuple

from mezzo.children.fork_server import Starter, child_command
from mezzo.children.signals import Guarded, Process, Stop, Stopped, stoppable
from mezzo.errors import RecordError, ScriptError
from mezzo.launch.progress import followed
from mezzo.launch.ranks.blame import POSITION_SIGNAL, wait_for_position
from mezzo.launch.ranks.launched import REASON
from mezzo.launch.ranks.leading import Interrupted, leader
from mezzo.launch.ranks.merged import error_of
from mezzo.launch.request import NO_RECORD, Request, policy_text
from mezzo.measure.environment import environment_without_torch
from mezzo.observe.fallback.evidence import measured_path
from mezzo.observe.settings import FallbackSettings
from mezzo.records import FILE_CLOCK_TICK_S, AnyRecord, RunRecord, read_record, write_record

_PROGRAMS = ("mezzo.launch.child", "mezzo.launch.torch")
"""What a process imports from which runs are forked: the program of a child, and the framework of these runs."""
_STANDARD_ERROR = 2  # the file descriptor, so that a script's child processes print there, too
_STOPPED_S = 5.0
"""Time for a process to end once it is stopped because the run is over in another process."""
_POLL_S = 0.1
_STARTER: ContextVar[Starter | None] = ContextVar("starter", default=None)


class _End(NamedTuple):
    """How a child ended."""

    exit_code: int
    why: str
    """The reason to record if the child wrote no record."""
    at_limit: bool = False


@contextmanager
def shared_imports(*, prints_why_not: bool = True, variables: Mapping[str, str] | None = None) -> Iterator[None]:
    """Let the runs of PyTorch scripts inside share their imports, if the system can fork.

    Args:
        prints_why_not: whether to print the reason to standard error if they cannot.
        variables: environment variables of all these runs, which override the command's.
    """
    starter = Starter(*_PROGRAMS, environment={**os.environ, **variables} if variables else None)
    token = _STARTER.set(starter)
    try:
        with stoppable() as stop:
            yield
    finally:
        _STARTER.reset(token)
        starter.close()
        if prints_why_not and starter.why_not_forked is not None and not stop.stopped:
            print(f"mezzo: the runs did not share the import of PyTorch: {starter.why_not_forked}", file=sys.stderr)


def import_ahead(request: Request) -> None:
    """Begin the imports that the runs share, if they do, for runs like ``request``, while the command does something else."""
    starter = _STARTER.get()
    if starter is not None and request.framework == "torch":
        starter.begin(request.target, kind=request.kind)


def run_child(request: Request, *, output: Path | None = None, limit_s: float | None = None) -> RunRecord:
    """Run the script of ``request`` to its end and return its record; the record's ``exit_code`` is the script's.

    Args:
        request: what to run, and where the child writes the record.
        output: a file for the script's output; None passes it through.
        limit_s: seconds after which the script is stopped; None for no limit.
    """
    record = observe_child(request, output=output, limit_s=limit_s)
    assert isinstance(record, RunRecord)
    return record


def observe_child(request: Request, *, output: Path | None = None, limit_s: float | None = None) -> AnyRecord:
    """Run the script of ``request`` and return its record, of the kind that ``request.observe`` asks for.

    For a child that died it is a run's record. The arguments are ``run_child``'s. Under a launcher of several processes the
    script runs in all of them, and their records are merged into one.
    """
    lead = leader()
    if lead is None:
        record = run_alone(request, output=output, limit_s=limit_s)
    else:
        try:
            record = lead.run(request, output=output, limit_s=limit_s, run_one=run_alone)
        except ScriptError as error:  # not all processes have arrived, or not with the same command
            record = substitute_record(request, error.exit_code, error.message).model_copy(update={"hint": error.hint})
            _write_without_a_run(record, request)
        except Stopped as stopped:
            if not lead.missing:
                raise
            why = f"{stopped} while it waited for {lead.missing}"
            record = substitute_record(request, stopped.exit_code, why)
            _write_without_a_run(record, request)
    REASON.found(error_of(record), rank=None)
    return record


def _write_without_a_run(record: RunRecord, request: Request) -> None:
    """Write the record of a run that did not begin, so that its folder may not exist."""
    Path(request.record_path).parent.mkdir(parents=True, exist_ok=True)
    write_record(record, Path(request.record_path))


def run_alone(
    request: Request,
    *,
    output: Path | None = None,
    limit_s: float | None = None,
    interrupted: Interrupted | None = None,
) -> AnyRecord:
    """Run the script of ``request`` in a child of this process alone; stop it once ``interrupted`` returns True."""
    path = Path(request.record_path)
    with stoppable() as stop:
        stop.check()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        if isinstance(request.observe, FallbackSettings):  # a run that dies must not show what an earlier one measured
            measured_path(request.observe).unlink(missing_ok=True)
        request = _after_earlier_attempt(request)
        if importlib.util.find_spec(request.framework) is None:
            why = f"the script imports {request.framework}, which is not installed for {sys.executable}"
            end = _End(exit_code=1, why=why)
        else:
            end = _run(request, output, limit_s, stop, interrupted)
    try:
        return read_record(path)
    except RecordError:
        record = substitute_record(request, end.exit_code, end.why)
        record = record.model_copy(update={"stopped_at_limit": end.at_limit})
        write_record(record, path)
        return record


def _after_earlier_attempt(request: Request) -> Request:
    """Return a compared run's request with the time of the first update of an earlier attempt, if one was stopped."""
    if request.compared_since_s is None:
        return request
    try:
        updated_s = request.updated_file.stat().st_mtime
    except OSError:
        return request
    if updated_s < request.compared_since_s - FILE_CLOCK_TICK_S:  # left by an earlier comparison in this folder
        request.updated_file.unlink(missing_ok=True)
        return request
    return request.model_copy(update={"earlier_update_s": updated_s})


def _run(
    request: Request, output: Path | None, limit_s: float | None, stop: Stop, interrupted: Interrupted | None
) -> _End:
    """Run the child to its end."""
    file: AbstractContextManager[IO[bytes] | None] = nullcontext() if output is None else output.open("wb")
    with file as sink, followed(request, passes_output=sink is None) as request:
        process = _start(request, sink)
        with stop.passing_to(process):
            if interrupted is None:
                stopped, returned = _wait(process, limit_s)
            else:
                stopped, returned = _wait_for_ranks(process, request, interrupted)
    request.file.unlink(missing_ok=True)
    if stop.stopped:
        return _End(stop.exit_code, f"stopped by {stop.name} before it could write a record")
    exit_code = 128 - returned if returned < 0 else returned or 1
    if stopped and limit_s is None:
        return _End(exit_code, "it was stopped, because the run was over in another process")
    if stopped:
        return _End(exit_code, f"it was stopped at its limit of {limit_s:g} s", at_limit=True)
    if returned == NO_RECORD:
        return _End(1, "its record could not be written: the disk may be full")
    how = f"signal {signal.Signals(-returned).name}" if returned < 0 else f"exit code {returned}"
    if not returned:
        why = "the process called os._exit, or replaced itself by os.exec, before it could write a record"
        return _End(exit_code, why)
    return _End(exit_code, f"the process died with {how} before it could write a record")


def _start(request: Request, sink: IO[bytes] | None) -> Process:
    starter = _STARTER.get()
    if starter is not None and sink is not None and request.framework == "torch" and not request.output_to_stderr:
        forked = starter.start(request.packed(), request.target, kind=request.kind, sink=sink)
        if forked is not None:
            return forked
    stdout = _STANDARD_ERROR if request.output_to_stderr else sink
    command = child_command(_PROGRAMS[0], request.packed())
    env = None if request.snapshots is None else {**os.environ, "PYTHONHASHSEED": request.snapshots.hash_seed}
    return Guarded(command, stdout=stdout, stderr=None if sink is None else subprocess.STDOUT, env=env)


def _wait(process: Process, limit_s: float | None) -> tuple[bool, int]:
    """Wait for the child; return whether it was stopped at the limit, and its return code."""
    try:
        return False, process.wait(limit_s)
    except subprocess.TimeoutExpired:
        process.kill()  # a framework that hangs in native code reacts to no other signal
        return True, process.wait()


def _wait_for_ranks(process: Process, request: Request, interrupted: Interrupted) -> tuple[bool, int]:
    """Wait for the child, or until the run is over in another process; return whether it was, and the return code."""
    while True:
        try:
            return False, process.wait(_POLL_S)
        except subprocess.TimeoutExpired:
            if interrupted():
                break
    if (
        POSITION_SIGNAL is not None and request.position_file.exists()
    ):  # without the file, the signal would kill the child
        process.pass_on(POSITION_SIGNAL)
        wait_for_position(request.position_file)
    process.pass_on(signal.SIGTERM, kill_after_s=_STOPPED_S)
    return True, process.wait()


def substitute_record(request: Request, exit_code: int, why: str) -> RunRecord:
    """Return a record for a run that wrote none itself, with the reason as its error."""
    return RunRecord(
        command=list(request.command),
        script=request.target,
        script_sha256="",
        framework=request.framework,
        policy=policy_text(request.policy),
        policy_typed=request.policy_typed,
        checkpoint="" if request.models is None else request.models.checkpoint,
        seed=request.seed,
        environment=environment_without_torch(),
        request_sha256=request.digest,
        placement=request.placement,
        exit_code=exit_code,
        error=why,
    )
