"""Runs as jobs of Slurm, through submitit: each is a job of its own, which may outlive the command. Imports no torch.

submitit's files are in the subfolder ``slurm`` of the command's folder, next to ``jobs.json``, which lists the jobs by the digest of
their request: a resumed command waits for a job that an earlier one submitted, instead of running it a second time.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from mezzo.errors import UsageError
from mezzo.launch.request import Request
from mezzo.launch.several.on_cluster import run_here
from mezzo.launch.several.resuming import read_object
from mezzo.launch.several.side_by_side import run_label
from mezzo.records.files import write_whole

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
