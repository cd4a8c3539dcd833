"""Runs of a comparison, one after another or side by side: each then has a GPU of its own, or its share of the CPU's threads.

A run's place is fixed by environment variables that its process is started with, so a script finds them before its first line. A run that
fails leaves the others running; a signal stops all. Imports no torch.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextvars import copy_context
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from mezzo.errors import UsageError
from mezzo.launch import runner
from mezzo.launch.process.command_signals import Stopped, stoppable
from mezzo.launch.request import Request
from mezzo.records import Placement, RunRecord

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "TF_NUM_INTRAOP_THREADS")
"""What PyTorch, Paddle, NumPy and TensorFlow read their number of threads from."""
_LIST_GPUS_TIMEOUT_S = 10.0
_GPU = re.compile(r"^(\s*)\S.*\(UUID: ((?:GPU|MIG)-[^)]+)\)", re.MULTILINE)

Ended = tuple[Request, RunRecord]
Engine = Callable[[Sequence[Request], Callable[[], float | None]], Iterator[Ended]]
"""Runs requests and yields each with its record when it has ended; the function returns the time limit of a run that begins."""


@dataclass(frozen=True)
class Place:
    """A GPU or a share of the threads that runs follow one another on."""

    variables: dict[str, str]
    placement: Placement


def output_of(request: Request) -> Path:
    """Return the file for what a run prints; make its folder."""
    output = Path(request.record_path).with_name("output.log")
    output.parent.mkdir(parents=True, exist_ok=True)
    return output


def one_after_another(requests: Sequence[Request], limit_s: Callable[[], float | None]) -> Iterator[Ended]:
    """Run one request at a time; see ``Engine``."""
    with stoppable() as stop:
        for request in requests:
            record = runner.run_child(request, output=output_of(request), limit_s=limit_s())
            if stop.stopped:
                return
            yield request, record


# --- places ----------------------------------------------------------------------------------------------------------------------


def visible_gpus() -> list[str]:
    """Return NVIDIA's GPUs that this command may use, as ``CUDA_VISIBLE_DEVICES`` names them; a divided one by its parts."""
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


def places(jobs: int) -> list[Place]:
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
        found.append(Place(variables, placement))
    return found


def _cores() -> int:
    """Return how many threads the runs may have together: the cores of this process, or fewer if the shell says so."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    asked = os.environ.get(_THREADS[0], "")
    return min(cores, int(asked)) if asked.isdecimal() and int(asked) else cores


def placed(request: Request, place: Place) -> Request:
    """Return the request with its place."""
    return request.model_copy(
        update={"variables": {**request.variables, **place.variables}, "placement": place.placement}
    )


# --- runs at once ----------------------------------------------------------------------------------------------------------------


def side_by_side(jobs: Sequence[Place]) -> Engine:
    """Return the engine that has a run in each place at once."""

    def run_all(requests: Sequence[Request], limit_s: Callable[[], float | None]) -> Iterator[Ended]:
        with stoppable():  # of this thread, which receives the signals, so that all others know
            workers = _Workers(requests, limit_s)
            try:
                yield from workers.ended(jobs)
            finally:
                workers.close()

    return run_all


class _Workers:
    """A thread for each place; each runs what waits, one after another."""

    def __init__(self, requests: Sequence[Request], limit_s: Callable[[], float | None]) -> None:
        self._waiting, self._limit_s = deque(requests), limit_s
        self._told: SimpleQueue[Ended | BaseException | None] = SimpleQueue()
        """Runs that have ended; an error of ours; None where a thread is over."""
        self._threads: list[threading.Thread] = []

    def ended(self, jobs: Sequence[Place]) -> Iterator[Ended]:
        for number, place in enumerate(jobs[: len(self._waiting)]):
            work = copy_context().run  # the signal and the display of the command
            thread = threading.Thread(target=work, args=(self._work, place, number == 0), name=f"mezzo-job-{number}")
            self._threads.append(thread)
            thread.start()
        error: BaseException | None = None
        for _ in self._threads:
            while (told := self._told.get()) is not None:
                if isinstance(told, BaseException):
                    error = error or told
                    self._waiting.clear()  # what runs goes on to its end
                else:
                    yield told
        if error is not None:
            raise error

    def close(self) -> None:
        self._waiting.clear()
        for thread in self._threads:
            thread.join()

    def _work(self, place: Place, says_why: bool) -> None:
        try:
            with stoppable() as stop, runner.several_runs(says_why=says_why, variables=place.variables):
                while not stop.stopped and (request := self._next()) is not None:
                    asked = placed(request, place)
                    record = runner.run_child(asked, output=output_of(asked), limit_s=self._limit_s())
                    if not stop.stopped:
                        self._told.put((request, record))
        except Stopped:
            pass
        except BaseException as error:
            self._told.put(error)
        finally:
            self._told.put(None)

    def _next(self) -> Request | None:
        try:
            return self._waiting.popleft()
        except IndexError:
            return None
