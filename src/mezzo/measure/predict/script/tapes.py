"""Tapes of unmodified scripts, recorded in a process of their own (``process``). Imports no torch.

The size of a batch is what a ``DataLoader`` yields; other sizes follow from a tape at half the size, which the loader is
made to yield. For a script without loaders, the size is looked for in its arguments, its text and the files that it reads.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from mezzo.children.fork_server import Starter, child_command
from mezzo.children.script_text import Kind
from mezzo.children.signals import Guarded, Process
from mezzo.error_texts import advice_for, is_of_sparse_tensor, missing_key, missing_module, refuses_format
from mezzo.errors import ScriptError, UsageError
from mezzo.formats import FP32, FP64
from mezzo.measure.predict.tape import TrainingTape
from mezzo.measure.predict.training import STEPS
from mezzo.records import DataSet, LoaderRate
from mezzo.records.run import BATCH
from mezzo.temporary import temporary_folder

PROGRAM = "mezzo.measure.predict.script.process"
ONLY_PROCESS: Mapping[str, str] = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}
"""The environment variables that a launcher sets for the only process of a job."""
_STARTER: ContextVar[Starter | None] = ContextVar("starter_of_tapes", default=None)
_TAIL = 4
_DIVIDED = "ZeroDivisionError"
_MOST_DOUBLE = 0.01


@dataclass(frozen=True, kw_only=True)
class TapeRequest:
    """One tape to record."""

    script: str
    arguments: Sequence[str]
    policy: str
    as_module: bool = False
    own_batch: int | None = None
    """Size of the loaders that yield batches of ``batch`` instead; None to leave them as they are."""
    batch: int | None = None
    steps: int | None = None
    file: str = ""
    """The file of ``numbers``: the script, a module of its own or a configuration."""
    numbers: Sequence[tuple[int, int]] = ()
    """The numbers in ``file`` that become ``batch``, in the form of ``BatchSource.numbers``."""
    numbers_first: bool = False
    """Whether the script has numbers until it builds its first module: preparing its data without them would take too long."""
    whole_number: int = 0
    """What the script gets when it reads a whole number."""
    gpu_present: bool = True
    """Whether the script sees a simulated GPU; otherwise it sees what this machine has."""
    on_cpu: bool = False
    """Whether the operations of this machine's CPU are recorded instead of a GPU's."""
    launched: bool = False
    """Whether it gets the variables that a launcher sets for the only process of a job."""
    times_loader: bool = False
    """Whether its loader is timed when all tapes are recorded."""


@dataclass(frozen=True, kw_only=True)
class ScriptTape:
    """What one request recorded."""

    tape: TrainingTape | None
    """None where the script never finished two steps."""
    batch: int | None = None
    """Samples of one batch."""
    num_batches: int = 1
    """Batches of one update."""
    num_steps: int = 0
    from_loader: bool = False
    size_at: str = ""
    """What sets the size of a batch in the script, if that is not a loader."""
    modules: Sequence[str] = ()
    """The Python files of its own that the script imports."""
    configurations: Sequence[str] = ()
    """Other files of settings that it reads."""
    channels_last: bool = False
    optimizer: str = ""
    read_at: Sequence[str] = field(default_factory=list)
    sized_at: Sequence[str] = field(default_factory=list)
    """Lines where the size of a result depends on numbers; an empty one is not the script's own."""
    error: str = ""
    """Why the script failed."""
    exited: bool = False
    """Whether it ended itself with an exit code."""
    numbers_first: bool = False
    """Whether it had numbers until it built its first module."""
    sized_by: str = ""
    """The error by which a script had to have numbers first; empty if the reason was that its data are too slow without."""
    whole_number: int = 0
    """What it got when it read a whole number."""
    slow_data: bool = False
    """Whether it was stopped because preparing its data without numbers takes too long."""
    needs_numbers: bool = False
    """Whether it failed because the size of a result depends on numbers."""
    gpu_queries: Sequence[str] = ()
    """Functions that reported the simulated GPU to it."""
    launched: bool = False
    """Whether it got the variables that a launcher sets for the only process of a job, because it fails without them."""
    policy: str = ""
    refused_in_bf16: str = ""
    """The first operation on FP16 that CUDA would refuse in BF16, whose predictions share the tapes of FP16."""
    compiles: Sequence[str] = ()
    """Functions by which it compiles, which were left out."""
    data: DataSet | None = None
    """The smallest data set of its loaders in a step; None without a loader."""
    loader: LoaderRate | None = None
    """What that loader delivers on this machine, if it was timed."""
    fails_with_gpu: str = ""
    """Why it failed with the simulated GPU; it was then traced with what this machine has."""

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of a request with which the script runs as this one did."""
        return {name: getattr(self, name) for name in ("numbers_first", "whole_number", "launched")}


@contextmanager
def shared_imports(script: str, *, kind: Kind) -> Iterator[None]:
    """Let all tapes that are recorded inside share their imports, which begin now."""
    starter = Starter(PROGRAM, environment=_environment())
    token = _STARTER.set(starter)
    try:
        starter.begin(script, kind=kind)
        yield
    finally:
        _STARTER.reset(token)
        starter.close()


def _environment() -> dict[str, str]:
    """Return the environment of a process that traces: with a launcher's variables a script would wait for the others."""
    return {name: value for name, value in os.environ.items() if name not in ONLY_PROCESS}


def recorded_tapes(requests: Sequence[TapeRequest], *, deadline_s: float | None = None) -> list[ScriptTape]:
    """Return the tapes of ``requests``, recorded in a process of their own.

    A script that needs a launcher's variables gets them for the only process of a job. One that divides by a whole number that it read gets
    1 for each. One whose sizes depend on numbers that it prepares before its first module has them. A script that fails because it sees the
    simulated GPU runs again without it. If FP32, the baseline of all, has a tape, a policy under which the script fails has none.

    Args:
        requests: what to record.
        deadline_s: the time of ``time.monotonic`` at which recording ends.

    Raises:
        UsageError: the script does not exist.
        ScriptError: it fails, cannot be traced, is not traced in time, or ends before its second step.
    """
    for request in requests:
        if not request.as_module and not Path(request.script).is_file():
            raise UsageError(f"there is no script {request.script!r}", hint="check the path")
    found, output = _recorded(requests, deadline_s)
    if all(missing_key(one.error) in ONLY_PROCESS for one in found):
        requests = [replace(request, launched=True) for request in requests]
        found, output = _recorded(requests, deadline_s)

    why = found[0].error
    if all(one.needs_numbers and not one.numbers_first for one in found):
        requests = [replace(request, numbers_first=True) for request in requests]
        with suppress(ScriptError):  # it does not end in time, or its data do not fit
            found, output = _recorded(requests, deadline_s)
            found = [replace(one, sized_by=why, numbers_first=True) for one in found]
    if all(_DIVIDED in one.error for one in found):
        again, _ = _recorded([replace(request, whole_number=1) for request in requests], deadline_s)
        found = [replace(one, sized_by=found[0].sized_by) for one in again] if any(one.tape for one in again) else found
    if not any(one.tape for one in found) and all(one.gpu_queries for one in found):
        again, _ = _recorded([replace(request, gpu_present=False) for request in requests], deadline_s)
        if any(one.tape for one in again):
            found = [replace(one, fails_with_gpu=why or "it never trains") for one in again]
    trains = any(one.tape for request, one in zip(requests, found, strict=True) if request.policy == FP32.name)
    for request, one in zip(requests, found, strict=True):
        if one.error and not trains:
            raise _script_error(request, one, output)
        if one.tape is None and not one.error:
            raise ScriptError(
                f"{request.script} never trains: it ended after {one.num_steps} of {STEPS} optimizer steps on a model in training mode",
                hint="name the script that trains, with the arguments that make it train for two steps",
            )
        if one.tape is not None:
            _check_formats(request.script, one.tape)
    return found


def _recorded(requests: Sequence[TapeRequest], deadline_s: float | None) -> tuple[list[ScriptTape], str]:
    """Return what each request recorded, and what the process printed."""
    with temporary_folder() as folder:
        requests_file = folder / "requests"
        requests_file.write_bytes(pickle.dumps(list(requests)))
        output, code = _run(requests_file, requests[0], deadline_s)
        tapes: list[ScriptTape] = []
        for number, request in enumerate(requests):
            tape_file = requests_file.with_name(f"tape{number}")
            if not tape_file.exists():
                raise _crash_error(request, output, code)
            tape: ScriptTape = pickle.loads(tape_file.read_bytes())
            timed = loader_file(tape_file)
            tapes.append(replace(tape, loader=pickle.loads(timed.read_bytes())) if timed.exists() else tape)
    return tapes, output


def loader_file(tape_file: Path) -> Path:
    """Return the file of the loader's rate, beside the tape's."""
    return tape_file.with_suffix(".loader")


def _run(requests_file: Path, first: TapeRequest, deadline_s: float | None) -> tuple[str, int]:
    """Return what the process printed that recorded a file of requests, and its exit code.

    Raises:
        ScriptError: it is not in time.
    """
    with tempfile.TemporaryFile() as printed:
        process = _started(requests_file, first, printed)
        try:
            code = process.wait(None if deadline_s is None else max(0.0, deadline_s - time.monotonic()))
        except BaseException as error:
            process.kill()
            process.wait()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            raise ScriptError(
                f"{first.script} was not traced in the time that was left",
                hint="mezzo predict traces it without a limit; what a script prepares after it has built its model takes longest",
            ) from None
        printed.seek(0)
        return printed.read().decode(errors="replace"), code


def _started(requests_file: Path, first: TapeRequest, printed: IO[bytes]) -> Process:
    starter, message = _STARTER.get(), str(requests_file)
    kind: Kind = "module" if first.as_module else "script"
    forked = None if starter is None else starter.start(message, first.script, kind=kind, sink=printed)
    if forked is not None:
        return forked
    return Guarded(child_command(PROGRAM, message), stdout=printed, stderr=subprocess.STDOUT, env=_environment())


def _crash_error(request: TapeRequest, output: str, code: int) -> ScriptError:
    last = "\n".join(output.splitlines()[-_TAIL:])
    causes = {  # by signal
        9: "it was killed, probably because the machine ran out of memory",
        11: "its native code, such as an optimizer's kernels, reads the memory of tensors, which have none here",
    }
    ended = (why for number, why in causes.items() if f"ended by signal {number}" in output or code == -number)
    cause = next(ended, "")
    return ScriptError(
        f"{request.script} cannot be traced without numbers: {cause or 'it ended with:' + chr(10) + last}",
        hint="predict its model by name with --model, or keep what reads numbers out of the first two steps",
    )


def _check_formats(script: str, tape: TrainingTape) -> None:
    """Raise ScriptError for a training with products in float64, whose rates the table of GPUs lacks."""
    counted = sum(operation.flops for operation in tape.operations)
    double = sum(operation.flops for operation in tape.operations if operation.format == FP64.name)
    if double > _MOST_DOUBLE * counted:
        raise ScriptError(
            f"{script} cannot be predicted: {double / counted:.0%} of its FLOPs are in float64, for which GPUs are listed without rates",
            hint="convert model and data to float32 (model.float(), torch.set_default_dtype), or measure it with mezzo run",
        )


def _script_error(request: TapeRequest, one: ScriptTape, output: str) -> ScriptError:
    if one.exited:  # for example argparse, which ends a script with an unknown option
        printed = next((line.strip() for line in reversed(output.splitlines()) if line.strip()), "it printed nothing")
        return ScriptError(
            f"{request.script} ended before it trained: {one.error} ({printed})",
            hint="check the script's own arguments; run it by itself with them first",
        )
    if missing := missing_module(one.error):
        return ScriptError(
            f"{request.script} imports {missing!r}, which is not installed here: {one.error}",
            hint=f"install it for {sys.executable}, or run the script by itself first",
        )
    if one.needs_numbers:
        return ScriptError(
            f"{request.script} cannot be traced without numbers: the size of a result depends on them at {one.error}",
            hint="change that line in a copy of the script, or predict the model by name with --model",
        )
    if is_of_sparse_tensor(one.error):
        return ScriptError(
            f"{request.script} cannot be predicted: it computes with sparse tensors, whose size depends on numbers ({one.error})",
            hint="trace a copy with dense tensors (sparse=False in its nn.Embedding), an upper bound, or measure it with mezzo run",
        )
    if _DIVIDED in one.error:
        return ScriptError(
            f"{request.script} cannot be traced without numbers: {one.error}",
            hint="it divides by a number that it reads, for which it got 0 and then 1: divide tensors instead, or by max(1, …)",
        )
    if (advice := advice_for(one.error)) or request.policy == "fp32" or not refuses_format(one.error):
        return ScriptError(
            f"{request.script} cannot be traced without numbers: {one.error}",
            hint=advice or "run it by itself first; if it works, predict its model by name with --model",
        )
    return ScriptError(f"{request.script} fails under {request.policy}: {one.error}", hint=hint_under(request.policy))


def hint_under(policy: str) -> str:
    """Return what to do about a script that fails only under ``policy``."""
    return f"find the modules that need FP32: mezzo fallback --policy {policy} …; or predict the rest: --policies fp32,tf32"


def has_batch(arguments: Sequence[str]) -> bool:
    """Return whether the arguments name the size of a batch."""
    return any(BATCH in word for word in arguments)


def with_batch(arguments: Sequence[str], batch: int | None) -> list[str]:
    """Return the arguments with ``{batch}`` replaced."""
    return [word.replace(BATCH, str(batch)) for word in arguments]
