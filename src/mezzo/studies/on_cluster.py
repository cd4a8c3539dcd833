"""Runs of one command on the workers of a cluster, which share the command's folder: each writes one record, atomically.

A run whose worker is lost is tried once more, and then fails, with its name in the error. A signal cancels running jobs. Imports no
torch.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from mezzo.children.signals import Stopped, stoppable
from mezzo.errors import RecordError, UsageError
from mezzo.launch.progress import followed
from mezzo.launch.request import Request
from mezzo.launch.runner import run_alone, substitute_record
from mezzo.records import AnyRecord, Placement, read_record, write_record
from mezzo.records.files import write_whole
from mezzo.studies.loop import read_object
from mezzo.studies.side_by_side import LimitS, RequestAndRecord, output_of, run_label, visible_gpus

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

    def __call__(self, requests: Sequence[Request], limit_s: LimitS) -> Iterator[RequestAndRecord]:
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

    def ended(self) -> Iterator[RequestAndRecord]:
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


ADDRESS, CPUS, GPUS = "address", "num_cpus", "num_gpus"
OPTIONS = (ADDRESS, CPUS, GPUS)
_EXAMPLE = "type: --on ray:num_gpus=1"


class Ray:
    """A Ray cluster, or one on this machine that lives as long as the command."""

    name: Literal["ray"] = "ray"

    def __init__(self, options: Mapping[str, str]) -> None:
        """Find Ray.

        Args:
            options: ``address`` of the cluster, and ``num_cpus`` and ``num_gpus`` of a run.

        Raises:
            UsageError: there is no such option, or a number is not one.
        """
        unknown = [name for name in options if name not in OPTIONS]
        if unknown:
            raise UsageError(f"--on ray:{unknown[0]}=...; allowed: {', '.join(OPTIONS)}", hint=_EXAMPLE)
        try:
            self._cpus, gpus = float(options.get(CPUS, "1")), options.get(GPUS)
            self._gpus = None if gpus is None else float(gpus)
        except ValueError as error:
            raise UsageError(f"--on ray: {error}; allowed: numbers for {CPUS} and {GPUS}", hint=_EXAMPLE) from None
        self._address = options.get(ADDRESS)
        self._ray: Any = importlib.import_module("ray")

    @property
    def gives_gpus(self) -> bool | None:
        """Whether each run gets at least one whole GPU."""
        return self._num_gpus() >= 1

    def _num_gpus(self) -> float:
        return self._gpus if self._gpus is not None else float(bool(visible_gpus()))

    def begin(self, folder: Path) -> None:
        """Connect to the cluster, or start one here."""
        path = os.environ.get("PYTHONPATH", "")
        environment = {"env_vars": {"PYTHONPATH": path}} if path else None
        local = {} if self._address or "RAY_ADDRESS" in os.environ else {"include_dashboard": False}
        self._ray.init(
            address=self._address, runtime_env=environment, log_to_driver=False, logging_level="error", **local
        )
        self._task = self._ray.remote(max_retries=0, num_cpus=self._cpus, num_gpus=self._num_gpus())(run_here)

    def submit(self, request: Request, *, output: Path, limit_s: float | None) -> RayTask:
        """Submit a run."""
        folder = os.getcwd()
        return RayTask(self._ray, self._task.remote(request.model_dump_json(), folder, str(output.absolute()), limit_s))

    def under_way(self, request: Request) -> RayTask | None:
        """Return None: Ray ends the tasks of a command that has ended."""
        return None

    def end(self) -> None:
        """Leave the cluster, and end it if it was started here."""
        self._ray.shutdown()


class RayTask:
    """A Ray task."""

    def __init__(self, ray: Any, reference: Any) -> None:
        self._ray, self._reference = ray, reference

    def done(self) -> bool:
        """Return whether it is over."""
        return bool(self._ray.wait([self._reference], timeout=0)[0])

    def lost(self) -> str:
        """Return why a task that is over did not finish its run; empty if it did."""
        try:
            stopped_by = self._ray.get(self._reference)
        except Exception as error:  # raised by Ray or by the task
            first = next(iter(str(error).splitlines()), "")
            return f"{type(error).__name__}: {first}".rstrip(": ")
        return f"its worker was stopped by {stopped_by}" if stopped_by else ""

    def cancel(self) -> None:
        """End it with its worker."""
        with suppress(Exception):  # it may just have ended
            self._ray.cancel(self._reference, force=True)


# submitit's files are in the subfolder ``slurm`` of the command's folder, next to ``jobs.json``, which lists the jobs by the digest of
# their request: a resumed command waits for a job that an earlier one submitted, instead of running it a second time.

_MINUTES = 12 * 60
"""Time limit of a job, unless ``time`` says otherwise: submitit's own is 5 minutes."""
CLUSTER, LOCAL = "cluster", "local"


class Slurm:
    """Slurm, or submitit's local stand-in for it."""

    name: Literal["slurm"] = "slurm"

    def __init__(self, options: Mapping[str, str]) -> None:
        """Find submitit and Slurm.

        Args:
            options: sbatch's long options; ``cluster=local`` runs the jobs as processes on this machine, as a trial.

        Raises:
            UsageError: either is missing.
        """
        self._options = {name: value for name, value in options.items() if name != CLUSTER}
        self._local = options.get(CLUSTER) == LOCAL
        self._submitit: Any = importlib.import_module("submitit")
        if not self._local and shutil.which("sbatch") is None:
            raise UsageError(
                "--on slurm: sbatch was not found, so this machine submits no jobs to Slurm",
                hint="type it on a login node; or try it with processes on this machine: --on slurm:cluster=local",
            )

    @property
    def gives_gpus(self) -> bool | None:
        """Whether the options request a GPU; None if not, because a partition may provide one by default."""
        requested = any("gpu" in f"{name}={value}" for name, value in self._options.items() if name != "partition")
        return False if self._local else requested or None

    def begin(self, folder: Path) -> None:
        """Create the executor; its files go below ``folder``."""
        files = (folder / self.name).absolute()
        files.mkdir(parents=True, exist_ok=True, mode=0o700)  # a submitted run has the script's arguments, secrets too
        self._files, self._ledger = files, files / "jobs.json"
        self._jobs = read_object(self._ledger)
        if self._local:
            self._executor = self._submitit.LocalExecutor(files, max_num_timeout=0)
            self._executor.update_parameters(timeout_min=_MINUTES)
            return
        self._executor = self._submitit.SlurmExecutor(files, max_num_timeout=0)
        self._executor.update_parameters(
            job_name="mezzo", time=_MINUTES, stderr_to_stdout=True, additional_parameters=self._options
        )

    def submit(self, request: Request, *, output: Path, limit_s: float | None) -> SlurmJob:
        """Submit a run."""
        job = self._executor.submit(run_here, request.model_dump_json(), os.getcwd(), str(output.absolute()), limit_s)
        self._jobs[_key(request)] = job.job_id
        write_whole(json.dumps(self._jobs, indent=1), self._ledger)
        return SlurmJob(job, local=self._local)

    def under_way(self, request: Request) -> SlurmJob | None:
        """Return an earlier command's job for the same run; None if there is none, or it is over."""
        job_id = self._jobs.get(_key(request))
        if job_id is None:
            return None
        job = SlurmJob(self._executor.job_class(self._executor.folder, job_id, [0]), local=self._local)
        return None if job.done() else job

    def end(self) -> None:
        """Delete what the jobs were submitted with: the script's arguments may be secrets. The jobs end by themselves."""
        for path in self._files.glob("*_submitted.pkl"):
            path.unlink(missing_ok=True)


class SlurmJob:
    """A Slurm job."""

    def __init__(self, job: Any, *, local: bool) -> None:
        self._job, self._local = job, local

    def done(self) -> bool:
        """Return whether it is over."""
        if self._local and self._job._process is None:  # started by an earlier command
            return self._job.paths.result_pickle.exists() or not _is_running(int(self._job.job_id))
        return bool(self._job.done())

    def lost(self) -> str:
        """Return why a job that is over did not finish its run; empty if it did."""
        try:
            stopped_by = self._job.result()
        except Exception as error:  # raised by submitit or by the job
            first = next(iter(str(error).splitlines()), "")
            return f"job {self._job.job_id}: {first or type(error).__name__}"
        return f"job {self._job.job_id} was stopped by {stopped_by}" if stopped_by else ""

    def cancel(self) -> None:
        """Cancel it."""
        with suppress(Exception):  # it may just have ended
            self._job.cancel(check=False)


def _key(request: Request) -> str:
    return f"{run_label(request)} {request.digest}"


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, PermissionError):  # it has ended, and another user's process may have its id by now
        return False
    return True
