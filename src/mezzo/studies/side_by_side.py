"""Runs of one command, one after another or side by side. Side by side, each has its own GPU, or its share of the CPU's threads.

Environment variables that are set when a run's process starts, before the script's first line, bind it to its slot. A run that fails
leaves the others running; a signal stops all. Imports no torch.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import copy_context
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Protocol

from mezzo.children.signals import Stop, Stopped, stoppable
from mezzo.errors import UsageError
from mezzo.launch import runner
from mezzo.launch.request import Request
from mezzo.measure.environment import usable_cores
from mezzo.records import AnyRecord, Placement

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "TF_NUM_INTRAOP_THREADS")
"""The variables from which PyTorch, Paddle, NumPy and TensorFlow read their number of threads."""
_LIST_GPUS_TIMEOUT_S = 10.0
_GPU = re.compile(r"^(\s*)\S.*\(UUID: ((?:GPU|MIG)-[^)]+)\)", re.MULTILINE)

RequestAndRecord = tuple[Request, AnyRecord]
LimitS = Callable[[], float | None]
"""Returns the time limit, in seconds, of a run that begins now."""


class Engine(Protocol):
    """A way to execute the runs of a command."""

    @property
    def at_once(self) -> int | None:
        """The most runs at once; None for as many as a cluster allows."""

    @property
    def cluster(self) -> str:
        """The cluster that executes the runs; empty for this machine."""

    @property
    def gives_gpus(self) -> bool | None:
        """Whether each run has a GPU of its own; None if only the run itself can tell, or runs are executed one at a time."""

    def opened(self, folder: Path) -> AbstractContextManager[None]:
        """Let the runs inside share what they have in common, such as imported libraries; ``folder`` is the command's."""

    def __call__(self, requests: Sequence[Request], limit_s: LimitS) -> Iterator[RequestAndRecord]:
        """Execute runs; yield each request with its record when its run has ended."""


@dataclass(frozen=True)
class Slot:
    """A GPU or a share of the threads, for one run after another."""

    variables: dict[str, str]
    placement: Placement


def output_of(request: Request) -> Path:
    """Return the file for a run's output, next to its record; create its folder."""
    path = Path(request.record_path)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.with_name(f"{_part(path) or 'output'}.log")


def run_label(request: Request) -> str:
    """Return a run's name in messages: its folder's name, with its record's if the folder has several."""
    path = Path(request.record_path)
    return f"{path.parent.name}/{_part(path)}" if _part(path) else path.parent.name


def _part(record: Path) -> str:
    """Return the name of a run that shares its folder with others; empty if the folder is its own."""
    return "" if record.name == "record.json" else record.name.removesuffix(".json").removesuffix(".record")


class OneAfterAnother:
    """The engine that executes one run at a time, with everything the command may use."""

    at_once: int | None = 1
    cluster = ""
    gives_gpus: bool | None = None

    def opened(self, folder: Path) -> AbstractContextManager[None]:
        """Let the runs inside share their imports."""
        return runner.shared_imports()

    def __call__(self, requests: Sequence[Request], limit_s: LimitS) -> Iterator[RequestAndRecord]:
        """Execute the runs."""
        with stoppable() as stop:
            for request in requests:
                record = runner.observe_child(request, output=output_of(request), limit_s=limit_s())
                if stop.stopped:
                    return
                yield request, record


one_after_another = OneAfterAnother()


def visible_gpus() -> list[str]:
    """Return the NVIDIA GPUs that this command may use, named as in ``CUDA_VISIBLE_DEVICES``; for a GPU divided by MIG, its parts."""
    variable = os.environ.get(_VISIBLE)
    if variable is not None:
        return [name.strip() for name in variable.split(",") if name.strip()]
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    try:
        done = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=_LIST_GPUS_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return listed_gpus(done.stdout)


def listed_gpus(text: str) -> list[str]:
    """Return the UUIDs in the output of ``nvidia-smi -L``; for a GPU divided by MIG, its parts'."""
    gpus: list[list[str]] = []
    for indent, uuid in _GPU.findall(text):
        if indent and gpus:
            gpus[-1].append(uuid)
        else:
            gpus.append([uuid])
    return [uuid for gpu, *parts in gpus for uuid in (parts or [gpu])]


def slots(jobs: int) -> list[Slot]:
    """Return a slot for each of ``jobs`` runs at once.

    Raises:
        UsageError: there are GPUs, but fewer.
    """
    gpus, cores = visible_gpus(), _cores()
    if gpus and jobs > len(gpus):
        raise UsageError(
            f"--jobs {jobs}: each run has a GPU of its own, and {len(gpus)} can be used; allowed: 1 to {len(gpus)}",
            hint=f"type: --jobs {len(gpus)}; or {_VISIBLE}= in front of the command to run on the CPU",
        )
    threads = max(cores // jobs, 1)
    found = []
    for number in range(jobs):
        gpu = gpus[number] if gpus else None
        variables = dict.fromkeys(_THREADS, str(threads)) | ({} if gpu is None else {_VISIBLE: gpu})
        placement = Placement(jobs=jobs, host=socket.gethostname(), gpus=gpu, threads=threads)
        found.append(Slot(variables, placement))
    return found


def _cores() -> int:
    """Return how many threads the runs may have together: one per core of this process, or fewer if OMP_NUM_THREADS limits them."""
    cores = usable_cores()
    limit = os.environ.get(_THREADS[0], "")
    return min(cores, int(limit)) if limit.isdecimal() and int(limit) else cores


_Results = SimpleQueue[RequestAndRecord | BaseException | None]
"""Runs that have ended; an error of Mezzo's own; None for a run that a signal stopped."""


class SideBySide:
    """The engine that executes one run in each slot at the same time."""

    cluster = ""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._slots = [*slots]
        self._requests: SimpleQueue[tuple[Request, LimitS, _Results] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        """One for each slot that has had a run: the processes that a thread starts end with it."""

    @property
    def at_once(self) -> int | None:
        """The number of slots."""
        return len(self._slots)

    @property
    def gives_gpus(self) -> bool | None:
        """Whether each run has a GPU of its own."""
        return all(slot.placement.gpus is not None for slot in self._slots)

    @contextmanager
    def opened(self, folder: Path) -> Iterator[None]:
        """Let the runs in each slot share their imports inside."""
        with stoppable():  # begun in this thread, which receives the signals, and shared with the other threads
            try:
                yield
            finally:
                self._withdraw()
                for _ in self._threads:
                    self._requests.put(None)
                for thread in self._threads:
                    thread.join()
                self._threads.clear()

    def __call__(self, requests: Sequence[Request], limit_s: LimitS) -> Iterator[RequestAndRecord]:
        """Execute the runs, while the engine is open.

        Raises:
            MezzoError: raised by Mezzo outside a run; the other runs in progress are finished first.
        """
        results: _Results = SimpleQueue()
        for request in requests:
            self._requests.put((request, limit_s, results))
        self._start_threads(min(len(requests), len(self._slots)))
        left, error = len(requests), None
        try:
            while left:
                result = results.get()
                left -= 1
                if isinstance(result, BaseException):
                    error = error or result
                    left -= self._withdraw()
                elif result is not None:
                    yield result
        finally:
            self._withdraw()
        if error is not None:
            raise error

    def _start_threads(self, num: int) -> None:
        for number in range(len(self._threads), num):
            run_in_context = copy_context().run  # the command's signal handling and display
            thread = threading.Thread(target=run_in_context, args=(self._work, number), name=f"mezzo-job-{number}")
            self._threads.append(thread)
            thread.start()

    def _withdraw(self) -> int:
        """Empty the queue, so that no further run starts; return how many requests were waiting."""
        num = 0
        while True:
            try:
                self._requests.get_nowait()
            except Empty:
                return num
            num += 1

    def _work(self, number: int) -> None:
        slot, over = self._slots[number], False
        try:
            with stoppable() as stop, runner.shared_imports(prints_why_not=number == 0, variables=slot.variables):
                while (item := self._requests.get()) is not None:
                    request, limit_s, results = item
                    results.put(None if stop.stopped else _run_in(slot, request, limit_s, stop))
                over = True
        except BaseException as error:  # outside the runs: pass it to everyone who waits for one
            while not over and (item := self._requests.get()) is not None:
                item[2].put(error)


def _run_in(slot: Slot, request: Request, limit_s: LimitS, stop: Stop) -> RequestAndRecord | BaseException | None:
    """Run a request in a slot; return the result for the queue."""
    variables = {**request.variables, **slot.variables}
    placed = request.model_copy(update={"variables": variables, "placement": slot.placement})
    try:
        record = runner.observe_child(placed, output=output_of(placed), limit_s=limit_s())
    except Stopped:
        return None
    except BaseException as error:
        return error
    return None if stop.stopped else (request, record)
