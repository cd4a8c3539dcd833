"""Which of several processes this is, by launcher, as a table of environments."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from helpers_values import existing
from mezzo import cli
from mezzo.launch.ranks.launched import REASON, launched, report_failure

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
}
SRUN = {
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
MPICH = {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
PADDLE = {
    "PADDLE_TRAINER_ID": "1",
    "PADDLE_TRAINERS_NUM": "4",
    "PADDLE_LOCAL_RANK": "1",
    "PADDLE_LOCAL_SIZE": "2",
    "PADDLE_NNODES": "2",
    "PADDLE_MASTER": "10.0.0.1:51832",
}

FOUND = [
    # environment: launcher, rank, size, local rank, on one machine
    (TORCHRUN, ("torchrun", 3, 4, 1, False)),
    ({**TORCHRUN, "LOCAL_WORLD_SIZE": "4", "LOCAL_RANK": "3"}, ("torchrun", 3, 4, 3, True)),
    ({"RANK": "0", "WORLD_SIZE": "2"}, ("torchrun", 0, 2, 0, False)),  # set by hand
    (SRUN, ("srun", 5, 8, 1, False)),
    ({**SRUN, "SLURM_STEP_NUM_NODES": "1"}, ("srun", 5, 8, 1, True)),
    (OPEN_MPI, ("mpirun", 1, 2, 1, True)),
    (MPICH, ("mpiexec", 2, 4, 0, False)),
    (PADDLE, ("paddle.distributed.launch", 1, 4, 1, False)),
    ({**PADDLE, "PADDLE_LOCAL_SIZE": "4"}, ("paddle.distributed.launch", 1, 4, 1, True)),
    ({**SRUN, **PADDLE}, ("paddle.distributed.launch", 1, 4, 1, False)),
    ({**SRUN, **TORCHRUN}, ("torchrun", 3, 4, 1, False)),  # srun starts torchrun once a machine
]
ALONE = [
    {},
    {"RANK": "0"},
    {"RANK": "0", "WORLD_SIZE": "1"},
    {"PADDLE_TRAINER_ID": "0", "PADDLE_TRAINERS_NUM": "1"},
    {"RANK": "", "WORLD_SIZE": "2"},
    {"RANK": "x", "WORLD_SIZE": "2"},
    {"RANK": "2", "WORLD_SIZE": "2"},  # no such rank
    {"SLURM_PROCID": "0", "SLURM_NTASKS": "8"},  # the batch script itself, which is one process
    {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},  # an interactive shell
    {**SRUN, "RANK": "0", "WORLD_SIZE": "1"},  # one process of torchrun inside a job
]


@pytest.mark.parametrize(("variables", "found"), FOUND)
def test_each_launcher(variables: dict[str, str], found: tuple[str, int, int, int, bool]) -> None:
    one = existing(launched(variables))
    assert (one.launcher, one.rank, one.size, one.local_rank, one.one_machine) == found


@pytest.mark.parametrize("variables", ALONE)
def test_one_process(variables: dict[str, str]) -> None:
    assert launched(variables) is None


@pytest.mark.parametrize(
    ("changed", "same"),
    [
        ({"RANK": "0", "LOCAL_RANK": "0"}, True),
        ({"MASTER_PORT": "29501"}, False),
        ({"TORCHELASTIC_RUN_ID": "b"}, False),
        ({"TORCHELASTIC_RESTART_COUNT": "1"}, False),
    ],
)
def test_the_processes_of_a_job_know_each_other(changed: dict[str, str], same: bool) -> None:
    one, other = launched(TORCHRUN, command=["run", "t.py"]), launched({**TORCHRUN, **changed}, command=["run", "t.py"])
    assert one is not None
    assert other is not None
    assert (one.job == other.job) is same


def test_another_command_is_the_same_job() -> None:
    one, other = launched(TORCHRUN, command=["run", "a.py"]), launched(TORCHRUN, command=["run", "b.py"])
    assert one is not None
    assert other is not None
    assert one.job == other.job  # so that they meet, and say so


# --- The reason that a command leaves for torchrun, read by torchrun's own code ---


@pytest.fixture(autouse=True)
def _no_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(REASON, "text", "")
    monkeypatch.setattr(REASON, "rank", None)


def variables(folder: Path, rank: int = 0) -> dict[str, str]:
    return {"TORCHELASTIC_ERROR_FILE": str(folder / f"{rank}.json")}


def failure(folder: Path, rank: int) -> ProcessFailure:
    return ProcessFailure(rank, 10 + rank, 1, str(folder / f"{rank}.json"))


def test_torchrun_names_the_process_to_blame_and_its_reason(tmp_path: Path) -> None:
    REASON.text, REASON.rank = "rank 1: ValueError: bad label", 1
    for rank in (0, 1):
        report_failure(1, "run", own_rank=rank, variables=variables(tmp_path, rank))
    error = ChildFailedError("mezzo", {rank: failure(tmp_path, rank) for rank in (0, 1)})
    rank, first = error.get_first_failure()
    assert rank == 1
    assert first.message["message"] == "mezzo run: rank 1: ValueError: bad label"  # type: ignore[index]
    assert str(error).count("traceback : mezzo run: rank 1: ValueError: bad label\n") == 2


def test_a_verdict_is_no_crash(tmp_path: Path) -> None:
    report_failure(4, "compare", own_rank=0, variables=variables(tmp_path))
    expected = "mezzo compare: exit code 4, which is an answer, not a crash: see the report above"
    assert failure(tmp_path, 0).message["message"] == expected  # type: ignore[index]


@pytest.mark.parametrize("exit_code", [0, 1])
def test_nothing_is_left_after_success_or_over_the_scripts_own_reason(exit_code: int, tmp_path: Path) -> None:
    if exit_code:
        (tmp_path / "0.json").write_text("the script's", encoding="utf-8")
    report_failure(exit_code, "run", variables=variables(tmp_path))
    left = [path.read_text(encoding="utf-8") for path in tmp_path.iterdir()]
    assert left == (["the script's"] if exit_code else [])
    report_failure(1, "run", variables={})


def test_a_command_that_is_refused_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "0.json"))
    assert cli.main(["run", "nowhere.py"]) == 2
    said = capfd.readouterr().err.removeprefix("mezzo: ").strip()
    assert failure(tmp_path, 0).message["message"] == f"mezzo run: {said}"  # type: ignore[index]
