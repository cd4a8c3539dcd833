"""Snapshots of a job that torchrun started: a process is lost and torchrun restarts all, or the job is asked to end and is resumed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from forked_processes import in_forks
from paths import SCRIPTS

pytestmark = pytest.mark.slow

_ENDS = re.compile(r"RANK (\d) steps (\d+) seen (\S+) weights (\S+)")
Ends = set[tuple[str, ...]]


def start(folder: Path, how: str, kind: str, *words: str, restarts: int = 0) -> subprocess.Popen[str]:
    """Start a training in two processes under ``mezzo run``."""
    launch = ["--standalone", "--nproc-per-node", "2", "--max-restarts", str(restarts), "-m", "mezzo", "run"]
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *launch, "--policy", "fp16", *words, *script(how, kind)],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def script(how: str, kind: str) -> list[str]:
    """Return the script, and the arguments that ``restarted.py`` explains."""
    return [str(SCRIPTS / "restarted.py"), how, "marker", kind]


def ends_of(printed: str) -> Ends:
    """Return what each process ended with."""
    ends = {found.groups() for found in _ENDS.finditer(printed)}
    assert len(ends) == 2, printed
    return ends


def ended(job: subprocess.Popen[str]) -> tuple[Ends, str]:
    """Wait for a job that ends well; return what each process ended with, and the output."""
    printed, _ = job.communicate(timeout=300)
    assert job.returncode == 0, printed
    return ends_of(printed), printed


@pytest.fixture(scope="module")
def undisturbed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Ends]:
    words = ["run", "--policy", "fp16", "--out", "out", *script("no", request.param)]
    ranks = in_forks(words, folder=tmp_path_factory.mktemp("undisturbed"))
    assert [rank.code for rank in ranks] == [0, 0], ranks
    return request.param, ends_of("".join(rank.printed for rank in ranks))


# How weights lie in the processes and how a process is lost do not touch each other: each of both is there, and not each pair.
@pytest.mark.parametrize(
    ("undisturbed", "how"), [("ddp", "kill"), ("fsdp", "kill mezzo"), ("ddp", "hang")], indirect=["undisturbed"]
)
def test_torchrun_restarts_a_job_from_its_last_snapshot(
    how: str, undisturbed: tuple[str, Ends], tmp_path: Path
) -> None:
    kind, expected = undisturbed
    words = ["--snapshot", "0.2s", "--resume", "out", "--out", "out"]
    ends, printed = ended(start(tmp_path, how, kind, *words, restarts=1))
    assert "starting over" in printed
    assert printed.count("mezzo: resuming from") == 2, printed
    assert ends == expected  # losses of each rank and weights, to the bit


@pytest.mark.parametrize(
    ("undisturbed", "told"), [("ddp", "torchrun"), ("fsdp", "every process")], indirect=["undisturbed"]
)
def test_a_job_that_is_told_to_end_saves_the_same_step_in_all_processes(
    told: str, undisturbed: tuple[str, Ends], tmp_path: Path
) -> None:
    kind, expected = undisturbed
    job = start(tmp_path, "told", kind, "--snapshot", "5m", "--out", "out")
    while not (tmp_path / "marker").exists():
        assert job.poll() is None, job.communicate()[0]
        time.sleep(0.05)
    asked = [job.pid] if told == "torchrun" else [job.pid, *_below(job.pid)]
    for number in asked:
        os.kill(number, signal.SIGTERM)
    printed, _ = job.communicate(timeout=300)
    saved = [sorted(path.name for path in folder.glob("*.safetensors")) for folder in _folders(tmp_path / "out")]
    assert len(saved) == 2, printed
    assert saved[0] == saved[1], printed
    assert len(saved[0]) == 2, printed  # after the first update, and when it was told to end
    assert job.returncode != 0
    assert "stopped by SIGTERM" in printed
    said = "mezzo: the snapshots are not proven: several processes are not resumed beside themselves"
    assert printed.count(said) == 1, printed

    words = ["run", "--policy", "fp16", "--snapshot", "5m", "--resume", "out", "--out", "out", *script("told", kind)]
    ranks = in_forks(words, folder=tmp_path)
    assert [rank.code for rank in ranks] == [0, 0], ranks
    again = "".join(rank.printed for rank in ranks)
    assert again.count("mezzo: resuming from") == 2, again
    assert ends_of(again) == expected


def _below(process: int) -> Iterator[int]:
    """Yield the processes that a process and its own have started, as a scheduler finds those of a job."""
    children = Path(f"/proc/{process}/task/{process}/children")
    for child in children.read_text().split():
        yield int(child)
        yield from _below(int(child))


def _folders(out: Path) -> list[Path]:
    return sorted(path for path in (out / "snapshots").glob("rank-*") if path.is_dir())
