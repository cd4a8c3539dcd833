"""What the launcher of several processes tells each in environment variables: which one it is, and where it reports its error.

Each launcher has its own variables. ``torchrun`` and the launchers built on it (``accelerate launch``, ``deepspeed``) set torch's own,
which take precedence, and then Paddle's launcher's: another launcher may have started one of these, once per machine.
Imports no torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Launched:
    """One process of several."""

    rank: int
    size: int
    """Number of processes of the job."""
    local_rank: int
    launcher: str
    one_machine: bool
    """Whether all processes are known to run on one machine."""
    job: str
    """A text that is the same in all processes of a job, and that no other job has at the same time."""


@dataclass(frozen=True, kw_only=True)
class _Variables:
    """The variables of one launcher; of several names for the same number, the first that is set counts."""

    launcher: str
    rank: str
    size: str
    local_rank: tuple[str, ...]
    local_size: tuple[str, ...]
    """Processes on this machine."""
    machines: tuple[str, ...] = ()
    """Number of machines."""
    job: tuple[str, ...]
    """The variables that together identify a job."""


PADDLE_STORE = "PADDLE_MASTER"
"""Paddle's variable for the address of the store through which the script's processes find each other."""

_TABLE = (
    _Variables(
        launcher="torchrun",
        rank="RANK",
        size="WORLD_SIZE",
        local_rank=("LOCAL_RANK",),
        local_size=("LOCAL_WORLD_SIZE",),
        job=("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT"),
    ),
    _Variables(
        launcher="paddle.distributed.launch",
        rank="PADDLE_TRAINER_ID",
        size="PADDLE_TRAINERS_NUM",
        local_rank=("PADDLE_LOCAL_RANK", "PADDLE_RANK_IN_NODE"),
        local_size=("PADDLE_LOCAL_SIZE",),
        machines=("PADDLE_NNODES",),
        job=(PADDLE_STORE, "PADDLE_TRAINER_ENDPOINTS"),
    ),
    _Variables(
        launcher="srun",
        rank="SLURM_PROCID",
        size="SLURM_STEP_NUM_TASKS",  # not SLURM_NTASKS: the batch script, one process, has that too
        local_rank=("SLURM_LOCALID",),
        local_size=(),
        machines=("SLURM_STEP_NUM_NODES", "SLURM_NNODES"),
        job=("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
    ),
    _Variables(
        launcher="mpirun",
        rank="OMPI_COMM_WORLD_RANK",
        size="OMPI_COMM_WORLD_SIZE",
        local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
        local_size=("OMPI_COMM_WORLD_LOCAL_SIZE",),
        job=("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_hnp_uri"),
    ),
    _Variables(
        launcher="mpiexec",  # MPICH, Intel MPI, MVAPICH
        rank="PMI_RANK",
        size="PMI_SIZE",
        local_rank=("MPI_LOCALRANKID",),
        local_size=("MPI_LOCALNRANKS",),
        job=("PMI_ID_JOB", "PMI_JOBID", "HYDI_CONTROL_FD"),
    ),
)


def launched(variables: Mapping[str, str], *, command: Sequence[str] = ()) -> Launched | None:
    """Return which process of several this one is; None if it is the only one.

    Args:
        variables: the environment.
        command: Mezzo's command line: it identifies a job whose launcher does not.
    """
    for names in _TABLE:
        rank, size = _number(variables, (names.rank,)), _number(variables, (names.size,))
        if rank is None or size is None:
            continue
        if size < 2 or not 0 <= rank < size:
            return None
        return Launched(
            rank=rank,
            size=size,
            local_rank=_number(variables, names.local_rank) or 0,
            launcher=names.launcher,
            one_machine=_number(variables, names.local_size) == size or _number(variables, names.machines) == 1,
            job=_job(variables, names, command),
        )
    return None


def attempt(variables: Mapping[str, str]) -> int:
    """Return how many times the launcher has started this job before."""
    return _number(variables, ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")) or 0


def _number(variables: Mapping[str, str], names: Sequence[str]) -> int | None:
    text = next((variables[name] for name in names if variables.get(name)), "")
    return int(text) if text.isdecimal() else None


def _job(variables: Mapping[str, str], names: _Variables, command: Sequence[str]) -> str:
    known = [f"{name}={variables[name]}" for name in names.job if variables.get(name)]
    # Processes with unequal commands must meet, too, to say so.
    text = "\0".join([names.launcher, variables.get(names.size, ""), *(known or command)])
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:16]


# torchrun ends with a table of the processes that failed. Without that file the table gives no reason, and torchrun's own traceback
# hides the reason that Mezzo has printed. The same is true of ``accelerate launch``, which is built on torchrun. Imports no torch.

_FILE = "TORCHELASTIC_ERROR_FILE"


@dataclass
class FailureReason:
    """Why this process's command failed."""

    text: str = ""
    """Empty if nothing failed: a verdict may have an exit code other than 0 as well."""
    rank: int | None = None
    """The process to blame, if there are several."""

    def tell(self, text: str, *, rank: int | None = None) -> None:
        """Print why the command fails, and keep it, with the process to blame."""
        self.found(text, rank=rank)
        print(f"mezzo: {text}", file=sys.stderr)

    def found(self, text: str | None, *, rank: int | None) -> None:
        """Keep an error that has been printed, and the process to blame; None for what is not known."""
        self.text, self.rank = text or self.text, self.rank if rank is None else rank


REASON = FailureReason()
"""The reason why the only command of this process failed."""


def report_failure(
    exit_code: int, command: str, *, own_rank: int | None = None, variables: Mapping[str, str] = os.environ
) -> None:
    """Write the reason for torchrun, unless the command succeeded or the script itself has written one.

    Args:
        exit_code: the command's.
        command: its name.
        own_rank: the rank of this process; torchrun names the process that failed first, which should be the one to blame.
        variables: the environment.
    """
    path = variables.get(_FILE, "")
    if not exit_code or not path or Path(path).exists():
        return
    text = REASON.text or f"exit code {exit_code}, which is an answer, not a crash: see the report above"
    text = f"mezzo {command}: {text}"
    failed_at_s = int(time.time()) - (own_rank == REASON.rank)  # the process to blame a second before the others
    extra = {"py_callstack": text, "timestamp": str(failed_at_s)}
    with suppress(OSError):  # the folder is gone: torchrun then prints its table without a reason
        Path(path).write_text(json.dumps({"message": {"message": text, "extraInfo": extra}}), encoding="utf-8")
