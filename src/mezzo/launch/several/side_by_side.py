"""Runs of one command, one after another or side by side: each of these has its own GPU, or its share of the CPU's threads.

A run's place is fixed by environment variables that are set when its process starts, before the script's first line. A run that fails
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

from mezzo.errors import UsageError
from mezzo.launch import runner
from mezzo.launch.process.command_signals import Stop, Stopped, stoppable
from mezzo.launch.request import Request
from mezzo.measure.environment import usable_cores
from mezzo.records import AnyRecord, Placement

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "TF_NUM_INTRAOP_THREADS")
"""What PyTorch, Paddle, NumPy and TensorFlow read their number of threads from."""
_LIST_GPUS_TIMEOUT_S = 10.0
_GPU = re.compile(r"^(\s*)\S.*\(UUID: ((?:GPU|MIG)-[^)]+)\)", re.MULTILINE)

Ended = tuple[Request, AnyRecord]
LimitS = Callable[[], float | None]
"""Returns the time limit of a run that begins, in seconds."""


class Engine(Protocol):
    """A way to make the runs of a command."""

    @property
    def at_once(self) -> int | None:
        """The most runs at once; None for as many as a cluster allows."""

    @property
    def cluster(self) -> str:
        """The cluster that makes the runs; empty for this machine."""

    @property
    def gives_gpus(self) -> bool | None:
        """Whether each run has a GPU of its own; None if only the run knows, or no run is beside it."""

    def opened(self, folder: Path) -> AbstractContextManager[None]:
        """Share between the runs inside what they have in common, such as imported libraries; ``folder`` is the command's."""

    def __call__(self, requests: Sequence[Request], limit_s: LimitS) -> Iterator[Ended]:
        """Make runs, and yield each request with its record when its run has ended."""


@dataclass(frozen=True)
class Slot:
    """A GPU or a share of the threads, for one run after another."""

    variables: dict[str, str]
    placement: Placement


def output_of(request: Request) -> Path:
    """Return the file for what a run prints, beside its record; make its folder."""
    path = Path(request.record_path)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.with_name(f"{_part(path) or 'output'}.log")


def run_label(request: Request) -> str:
    """Return what a run is called: its folder's name, and that of its record where the folder has several."""
    path = Path(request.record_path)
    return f"{path.parent.name}/{_part(path)}" if _part(path) else path.parent.name


def _part(record: Path) -> str:
    """Return the name of a run that shares its folder with others; empty for one that has its own folder."""
    return "" if record.name == "record.json" else record.name.removesuffix(".json").removesuffix(".record")


class OneAfterAnother:
    """The engine that makes one run at a time, with everything the command may use."""

    at_once: int | None = 1
    cluster = ""
    gives_gpus: bool | None = None

    def opened(self, folder: Path) -> AbstractContextManager[None]:
        """Let the runs inside share their imports."""
        return runner.shared_imports()

    def __call__(self, requests: Sequence[Request], limit_s: LimitS) -> Iterator[Ended]:
        """Make the runs."""
        with stoppable() as stop:
            for request in requests:
                record = runner.observe_child(request, output=output_of(request), limit_s=limit_s())
                if stop.stopped:
                    return
                yield request, record


one_after_another = OneAfterAnother()


# --- places ----------------------------------------------------------------------------------------------------------------------


def visible_gpus() -> list[str]:
    """Return the NVIDIA GPUs that this command may use, as ``CUDA_VISIBLE_DEVICES`` names them; a GPU that MIG divides by its parts."""
    asked = os.environ.get(_VISIBLE)
    if asked is not None:
        return [name.strip() for name in asked.split(",") if name.strip()]
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    try:
        done = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=_LIST_GPUS_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return listed_gpus(done.stdout)


def listed_gpus(text: str) -> list[str]:
    """Return the UUIDs in the output of ``nvidia-smi -L``; of a GPU that MIG divides, those of its parts."""
    found: list[list[str]] = []
    for indent, uuid in _GPU.findall(text):
        if indent and found:
            found[-1].append(uuid)
        else:
            found.append([uuid])
    return [uuid for own in found for uuid in (own[1:] or own)]


def places(jobs: int) -> list[Slot]:
    """Return a place for each of ``jobs`` runs at once.

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
    """Return how many threads the runs may have together: the cores of this process, or fewer if the shell says so."""
    cores = usable_cores()
    asked = os.environ.get(_THREADS[0], "")
    return min(cores, int(asked)) if asked.isdecimal() and int(asked) else cores


# --- runs at once ----------------------------------------------------------------------------------------------------------------

_Told = SimpleQueue[Ended | BaseException | None]
"""Runs that have ended; an error of Mezzo's own; None for a run that a signal stopped."""


class SideBySide:
    """The engine that makes a run in each place at once."""

    cluster = ""

    def __init__(self, jobs: Sequence[Slot]) -> None:
        self._jobs = [*jobs]
        self._asked: SimpleQueue[tuple[Request, LimitS, _Told] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        """One for each place that has had a run: the processes that a thread starts end with it."""

    @property
    def at_once(self) -> int | None:
        """The number of places."""
        return len(self._jobs)

    @property
    def gives_gpus(self) -> bool | None:
        """Whether each run has a GPU of its own."""
        return all(place.placement.gpus is not None for place in self._jobs)

    @contextmanager
    def opened(self, folder: Path) -> Iterator[None]:
        """Let the runs in each place share their imports inside."""
        with stoppable():  # of this thread, which receives the signals, so that all others know
            try:
                yield
            finally:
                self._withdraw()
                for _ in self._threads:
                    self._asked.put(None)
                for thread in self._threads:
                    thread.join()
                self._threads.clear()

    def __call__(self, requests: Sequence[Request], limit_s: LimitS) -> Iterator[Ended]:
        """Make the runs, while the engine is open.

        Raises:
            MezzoError: what was raised beside a run; what runs goes on to its end first.
        """
        told: _Told = SimpleQueue()
        for request in requests:
            self._asked.put((request, limit_s, told))
        self._begin(min(len(requests), len(self._jobs)))
        left, error = len(requests), None
        try:
            while left:
                found = told.get()
                left -= 1
                if isinstance(found, BaseException):
                    error = error or found
                    left -= self._withdraw()
                elif found is not None:
                    yield found
        finally:
            self._withdraw()
        if error is not None:
            raise error

    def _begin(self, num: int) -> None:
        for number in range(len(self._threads), num):
            work = copy_context().run  # the signal and the display of the command
            thread = threading.Thread(target=work, args=(self._work, number), name=f"mezzo-job-{number}")
            self._threads.append(thread)
            thread.start()

    def _withdraw(self) -> int:
        """Start nothing more; return how many requests were waiting."""
        num = 0
        while True:
            try:
                self._asked.get_nowait()
            except Empty:
                return num
            num += 1

    def _work(self, number: int) -> None:
        place, over = self._jobs[number], False
        try:
            with stoppable() as stop, runner.shared_imports(prints_why_not=number == 0, variables=place.variables):
                while (asked := self._asked.get()) is not None:
                    request, limit_s, told = asked
                    told.put(None if stop.stopped else _made(request, place, limit_s, stop))
                over = True
        except BaseException as error:  # beside the runs: whoever waits for one is told
            while not over and (asked := self._asked.get()) is not None:
                asked[2].put(error)


def _made(request: Request, place: Slot, limit_s: LimitS, stop: Stop) -> Ended | BaseException | None:
    """Run a request in its place; return the message for the one who waits for it."""
    variables = {**request.variables, **place.variables}
    asked = request.model_copy(update={"variables": variables, "placement": place.placement})
    try:
        record = runner.observe_child(asked, output=output_of(asked), limit_s=limit_s())
    except Stopped:
        return None
    except BaseException as error:
        return error
    return None if stop.stopped else (request, record)
