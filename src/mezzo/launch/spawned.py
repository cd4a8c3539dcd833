"""Processes that a script itself starts to train in: each records its own run, and the script's process merges the records into one.

``torch.multiprocessing.spawn`` (also Lightning's and Accelerate's launchers) and ``multiprocessing.Process`` run a function in a new
process, whatever the start method; Lightning's subprocess launcher starts the script again with a rank in its environment. Workers of
data loaders, pools and managers are left alone. Imports no torch: a process that does not train should not wait for it.
"""

from __future__ import annotations

import multiprocessing.process
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from mezzo.children.script_text import names_cuda
from mezzo.launch.patches import Patches
from mezzo.launch.ranks.blame import ProcessEnd, blamed
from mezzo.launch.ranks.merged import for_rank, merged, run_of
from mezzo.launch.recording import guarded, record_of
from mezzo.launch.request import Request
from mezzo.launch.training import Training, training_in
from mezzo.measure.environment import surroundings
from mezzo.records import AnyRecord, RunRecord, record_at, write_record

_WORKERS = ("torch.utils.data", "paddle.io", "multiprocessing", "concurrent", "joblib", "torch._inductor", "mezzo")
"""Packages whose processes do not train."""
_RANKS = ("LOCAL_RANK", "RANK")

_CURRENT: list[Training] = []
"""The training of this process. It is not in ``child``, which exists twice if it runs as ``__main__`` and is also imported."""


def inherited() -> Training | None:
    """Return the training of the process that this one was forked from; None in a new process."""
    return _CURRENT[-1] if _CURRENT else None


def run_function(request: Request, action: Callable[[], Any]) -> int:
    """Run a function in a process that the script itself started; return the exit code.

    The process writes a record if it trained or failed. A forked process is already under the policy.
    """
    shell, started, started_at_s = surroundings(), time.perf_counter(), time.time()
    with ExitStack() as stack:
        training = inherited()
        if training is None:
            train = training_in(request.framework)
            training = stack.enter_context(train(request.policy, seed=request.seed, observe=request.observe))
            if request.framework == "torch" and names_cuda(request.target, kind=request.kind):
                training.begin_stand_in()
        if request.rank is not None:
            patches = Patches()
            stack.callback(patches.undo)
            training.keep_weights(patches)
        exit_code, error = guarded(action)
        exit_code, error = guarded(training.close_update, before=(exit_code, error))
        if training.num_updates or exit_code:
            ran = started_at_s, time.perf_counter() - started
            record = record_of(request, training, (exit_code, error), shell=shell, ran=ran)
            write_record(record, Path(request.record_path))
    return exit_code


class Recorded:
    """The target of a process, run under a request; it is pickled to reach the process."""

    def __init__(self, target: Callable[..., Any], request: str) -> None:
        self._target, self._request = target, request

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Run the target; end with its exit code."""
        request = Request.of_json(self._request)
        if request.framework not in sys.modules:  # nothing that the process has imported could train
            self._target(*args, **kwargs)
            return
        code = run_function(request, lambda: self._target(*args, **kwargs))
        if code:
            sys.exit(code)


class SpawnedProcesses:
    """The processes that a script starts, and their records."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._path = Path(request.record_path).absolute()
        self._target = os.path.abspath(request.target) if request.kind == "script" else request.target
        self._pid = os.getpid()
        self._paths: list[Path] = []

    def install(self, patches: Patches, training: Training) -> None:
        """Let processes that are started from now on record their training, until ``patches`` are undone."""
        _CURRENT.append(training)
        patches.on_undo(_CURRENT.pop)
        patches.around(multiprocessing.process.BaseProcess, "start", self._start)
        patches.around(subprocess.Popen, "__init__", self._open)

    def _start(self, original: Callable[..., Any], process: Any, *args: Any, **kwargs: Any) -> Any:
        target = getattr(process, "_target", None)
        if os.getpid() != self._pid or target is None or not _may_train(target):
            return original(process, *args, **kwargs)
        process._target = Recorded(target, self._next(self._request).model_dump_json())
        return original(process, *args, **kwargs)

    def _open(self, original: Callable[..., Any], process: Any, args: Any, *rest: Any, **kwargs: Any) -> Any:
        is_rank = os.getpid() == self._pid and _names_a_rank(kwargs.get("env"))
        arguments = self._arguments(args) if is_rank else None
        if arguments is not None:
            request = self._request.model_copy(update={"target": self._target, "arguments": tuple(arguments)})
            args = [sys.executable, "-m", "mezzo.launch.child", self._next(request).packed()]
        return original(process, args, *rest, **kwargs)

    def _arguments(self, command: Any) -> Sequence[str] | None:
        """Return the script's arguments in a command that starts the script again; None for any other command."""
        if not isinstance(command, (list, tuple)) or not command or str(command[0]) != sys.executable:
            return None
        words = [str(word) for word in command[1:]]
        before = ["-m"] if self._request.kind == "module" else []
        for index, word in enumerate(words):
            name = word if before else os.path.abspath(word)
            if name == self._target and words[max(index - len(before), 0) : index] == before:
                return words[index + 1 :]
            if not word.startswith("-"):
                return None
        return None

    def _next(self, request: Request) -> Request:
        """Return the request of the next process."""
        number = len(self._paths) + 1  # the script's own process writes the files of rank 0
        path = self._path.with_name(f"{self._path.stem}.process{number}.json")
        self._paths.append(path)
        # Only a launcher's processes save together, and act together on an alarm.
        guard = None if request.guard is None else request.guard.model_copy(update={"action": "note"})
        changed = {
            "record_path": str(path),
            "reports_progress": False,
            "variables": {},
            "snapshots": None,
            "guard": guard,
        }
        request = request.model_copy(update=changed)
        return for_rank(request, number, folder=self._path.parent, number=number, ranks=1)

    def merged_with(self, own: AnyRecord) -> AnyRecord:
        """Return one record of the script's process, whose record is ``own``, and of those that it started; delete theirs."""
        trained: list[AnyRecord | None] = []
        for path in self._paths:
            record = record_at(path)
            path.unlink(missing_ok=True)
            if record is None or _trained(record):
                trained.append(record)
        if not any(record is not None for record in trained):
            return own
        if (run := run_of(own)) is not None and len(run.steps):
            trained.insert(0, own)
        records = {rank: record for rank, record in enumerate(trained) if record is not None}
        first = min(records)
        records[0] = records.get(0, records[first])
        ends = [ProcessEnd(rank=rank, error=_error(record)) for rank, record in enumerate(trained)]
        if trained[0] is own or _error(own) is None or _never_trained(own):
            return merged(records, ends=ends, blame=blamed(ends), hosts={})
        return _with_error_of(own, merged(records, ends=ends, blame=(0, ""), hosts={}))


def _with_error_of(own: AnyRecord, record: AnyRecord) -> AnyRecord:
    """Return ``record`` with the error of the script's own process, which names the process that failed, and its reason."""
    run, own_run = run_of(record), run_of(own)
    assert run is not None
    assert own_run is not None
    run = run.model_copy(update={"error": own_run.error, "exit_code": own_run.exit_code})
    return run if isinstance(record, RunRecord) else record.model_copy(update={"run": run})


def _may_train(target: Any) -> bool:
    module = str(getattr(target, "__module__", "") or type(target).__module__)
    return not any(module == name or module.startswith(f"{name}.") for name in _WORKERS)


def _names_a_rank(variables: Mapping[str, str] | None) -> bool:
    return variables is not None and any(variables.get(name) != os.environ.get(name) for name in _RANKS)


def _trained(record: AnyRecord) -> bool:
    run = run_of(record)
    return run is not None and (len(run.steps) > 0 or (run.error is not None and not _never_trained(record)))


def _never_trained(record: AnyRecord) -> bool:
    """Return whether a process ended without training, which is no error if it starts others."""
    run = run_of(record)
    return run is not None and run.trained_nothing


def _error(record: AnyRecord | None) -> str | None:
    if record is None:
        return "it left no record"
    run = run_of(record)
    assert run is not None
    return run.error or (f"exit code {run.exit_code}" if run.exit_code else None)
