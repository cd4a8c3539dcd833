"""Runs of one command on the workers of a cluster, which share the command's folder: each writes one record, atomically.

A run whose worker is lost is tried once more, and then fails, with its name in the error. A signal cancels running jobs. Imports no
torch.
"""

from __future__ import annotations

import os
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from mezzo.errors import RecordError
from mezzo.launch.process.command_signals import Stopped, stoppable
from mezzo.launch.progress import followed
from mezzo.launch.request import Request
from mezzo.launch.runner import run_alone, substitute_record
from mezzo.launch.several.side_by_side import Ended, LimitS, output_of, run_label
from mezzo.records import AnyRecord, Placement, read_record, write_record

_POLL_S = 0.5
_CANCEL_S = 15.0
"""Time to wait for cancelled runs, so that none writes into the folder later."""
_ATTEMPTS = 2


class ClusterJob(Protocol):
    """A run that was submitted to a cluster."""

    def done(self) -> bool:
        """Return whether it is over."""

    def lost(self) -> str:
        """Return why a job that is over did not finish its run; empty if it did."""

    def cancel(self) -> None:
        """End it."""


class Cluster(Protocol):
    """A scheduler that executes runs on other machines."""

    @property
    def name(self) -> Literal["slurm", "ray"]:
        """Its name in records."""

    @property
    def gives_gpus(self) -> bool | None:
        """Whether each run has a GPU of its own; None if only the run itself can tell."""

    def begin(self, folder: Path) -> None:
        """Prepare to submit runs; the scheduler's own files go into the command's folder."""

    def submit(self, request: Request, *, output: Path, limit_s: float | None) -> ClusterJob:
        """Submit a run."""

    def under_way(self, request: Request) -> ClusterJob | None:
        """Return an earlier command's job for the same run; None if there is none."""

    def end(self) -> None:
        """Disconnect from the cluster."""


@dataclass
class _Running:
    """A run that was submitted."""

    request: Request
    job: ClusterJob
    attempts: int
    shown: ExitStack
    """The run's progress on the display."""


class OnCluster:
    """The engine that submits each run to a cluster."""

    def __init__(self, cluster: Cluster, *, jobs: int | None, note: Callable[[str], None]) -> None:
        """Prepare to execute at most ``jobs`` runs at once; None for as many as the cluster allows."""
        self._cluster, self.at_once, self._note = cluster, jobs, note
        self._folder: Path | None = None
        """The command's folder, until the first run is submitted."""

    @property
    def cluster(self) -> str:
        """The cluster's name."""
        return self._cluster.name

    @property
    def gives_gpus(self) -> bool | None:
        """Whether each run has a GPU of its own; None if only the run itself can tell."""
        return self._cluster.gives_gpus

    @contextmanager
    def opened(self, folder: Path) -> Iterator[None]:
        """Stay connected inside, from the first run on."""
        self._folder = folder
        try:
            yield
        finally:
            if self._folder is None:
                self._cluster.end()

    def __call__(self, requests: Sequence[Request], limit_s: LimitS) -> Iterator[Ended]:
        """Execute the runs, while the engine is open."""
        if requests and self._folder is not None:
            self._cluster.begin(self._folder)
            self._folder = None
        runs = _Runs(self._cluster, requests, self.at_once, limit_s, self._note)
        try:
            with stoppable():
                yield from runs.ended()
        finally:
            runs.cancel()


class _Runs:
    """The runs that wait, and those that were submitted."""

    def __init__(
        self,
        cluster: Cluster,
        requests: Sequence[Request],
        jobs: int | None,
        limit_s: LimitS,
        note: Callable[[str], None],
    ) -> None:
        self._cluster, self._jobs, self._limit_s, self._note = cluster, jobs, limit_s, note
        self._waiting = deque((request, 1) for request in requests)
        self._running: list[_Running] = []

    def ended(self) -> Iterator[Ended]:
        with stoppable() as stop:
            while (self._waiting or self._running) and not stop.stopped:
                while self._waiting and (self._jobs is None or len(self._running) < self._jobs):
                    self._submit(*self._waiting.popleft())
                for run in [run for run in self._running if run.job.done()]:
                    self._running.remove(run)
                    run.shown.close()
                    record = self._record(run)
                    if record is not None and not stop.stopped:
                        yield run.request, record
                time.sleep(_POLL_S)

    def cancel(self) -> None:
        for run in self._running:
            run.job.cancel()
        end = time.monotonic() + _CANCEL_S
        while time.monotonic() < end and not all(run.job.done() for run in self._running):
            time.sleep(_POLL_S)
        for run in self._running:
            run.shown.close()

    def _submit(self, request: Request, attempts: int) -> None:
        placement = self._placement(attempts)
        shown, output = ExitStack(), output_of(request)
        submitted = shown.enter_context(followed(request, passes_output=False))
        path = str(Path(request.record_path).absolute())
        submitted = submitted.model_copy(update={"placement": placement, "record_path": path})
        job = self._cluster.under_way(request) if attempts == 1 else None
        if job is not None:
            self._note(f"{run_label(request)} is already in progress; waiting for it")
        else:
            job = self._cluster.submit(submitted, output=output, limit_s=self._limit_s())
        self._running.append(_Running(request, job, attempts, shown))

    def _placement(self, attempts: int) -> Placement:
        return Placement(jobs=self._jobs or 0, through=self._cluster.name, attempts=attempts)

    def _record(self, run: _Running) -> AnyRecord | None:
        """Return the record of a run that is over; None if it is to be tried again."""
        lost, path = run.job.lost(), Path(run.request.record_path)
        if not lost:
            try:
                return read_record(path)
            except RecordError as error:
                lost = f"it left no record ({error.message})"
        if run.attempts < _ATTEMPTS:
            self._note(f"{run_label(run.request)} was lost and is tried again: {lost}")
            self._waiting.appendleft((run.request, run.attempts + 1))
            return None
        record = substitute_record(run.request, 1, f"{run_label(run.request)} was lost {_ATTEMPTS} times; {lost}")
        record = record.model_copy(update={"placement": self._placement(run.attempts)})
        write_record(record, path)
        return record


# --- One run on a worker of a cluster: it writes its record to the folder that the command and all workers share. Imports no torch ---


def run_here(packed: str, folder: str, output: str, limit_s: float | None) -> str:
    """Run a request on this machine; return the name of the signal that stopped the run, or an empty text.

    Args:
        packed: the request as JSON, with a placement.
        folder: the folder that the command was typed in.
        output: the file for the script's output.
        limit_s: seconds after which the script is stopped; None for no limit.
    """
    os.chdir(folder)
    request = Request.of_json(packed)
    assert request.placement is not None
    threads = os.environ.get("OMP_NUM_THREADS", "")
    machine = {
        "host": socket.gethostname(),
        "gpus": os.environ.get("CUDA_VISIBLE_DEVICES") or None,
        "threads": int(threads) if threads.isdecimal() else None,
    }
    request = request.model_copy(update={"placement": request.placement.model_copy(update=machine)})
    with stoppable() as stop, suppress(Stopped):  # raised by a signal that arrives before the run begins
        run_alone(request, output=Path(output), limit_s=limit_s)
    return stop.name
