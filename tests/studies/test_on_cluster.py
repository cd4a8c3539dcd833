"""Runs on a cluster: a lost one is tried again once, then fails by name; a signal cancels all. With the real libraries where installed."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest

from mezzo.children.signals import stoppable
from mezzo.launch.request import Request
from mezzo.records import CheckRecord, CompareRecord, FallbackRecord, RunRecord, read_record, write_record
from mezzo.studies import on_cluster as engine
from paths import SCRIPTS
from record_builders import run_record


class FakeJob:
    """A job that is over when it is asked the second time."""

    def __init__(self, cluster: FakeCluster, name: str, why_lost: str) -> None:
        self._cluster, self.name, self._why_lost, self._asked = cluster, name, why_lost, 0
        self.cancelled = False

    def done(self) -> bool:
        self._asked += 1
        over = self.cancelled or (self._asked > 1 and not self._cluster.hangs)
        if over and self.name in self._cluster.now:
            self._cluster.now.remove(self.name)
        return over

    def lost(self) -> str:
        return self._why_lost

    def cancel(self) -> None:
        self.cancelled = True


class FakeCluster:
    """A cluster that loses the workers of some runs, so many times each."""

    name: Literal["slurm", "ray"] = "slurm"
    gives_gpus: bool | None = None

    def __init__(self, *, loses: dict[str, int] | None = None, leaves_no_record: str = "", hangs: bool = False) -> None:
        self._loses, self._leaves_no_record, self.hangs = dict(loses or {}), leaves_no_record, hangs
        self.begun: list[Path] = []
        self.submitted: list[str] = []
        self.now: list[str] = []
        self.most, self.ends = 0, 0
        self.jobs: list[FakeJob] = []
        self.known: dict[str, FakeJob] = {}

    def begin(self, folder: Path) -> None:
        self.begun.append(folder)

    def submit(self, request: Request, *, output: Path, limit_s: float | None) -> FakeJob:
        path = Path(request.record_path)
        assert path.is_absolute()
        assert output.parent.is_dir()
        name = path.parent.name
        self.submitted.append(name)
        self.now.append(name)
        self.most = max(self.most, len(self.now))
        left = self._loses.get(name, 0)
        self._loses[name] = left - 1
        if left < 1 and name != self._leaves_no_record:
            write_record(run_record("fp32", placement=request.placement, seed=request.seed), path)
        self.jobs.append(FakeJob(self, name, "the node failed" if left > 0 else ""))
        return self.jobs[-1]

    def under_way(self, request: Request) -> FakeJob | None:
        return self.known.get(Path(request.record_path).parent.name)

    def end(self) -> None:
        self.ends += 1


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_POLL_S", 0.001)
    monkeypatch.setattr(engine, "_CANCEL_S", 1.0)


def requests(folder: Path, num: int) -> list[Request]:
    return [
        Request(
            target="train.py",
            kind="script",
            policy="fp32",
            seed=seed,
            record_path=str(folder / f"fp32-seed{seed}" / "record.json"),
            command=(),
        )
        for seed in range(num)
    ]


def ended(
    folder: Path, cluster: FakeCluster, *, num: int, jobs: int | None = None, notes: list[str] | None = None
) -> dict[int | None, RunRecord]:
    note = ([] if notes is None else notes).append
    run, found = engine.OnCluster(cluster, jobs=jobs, note=note), dict[int | None, RunRecord]()
    with run.opened(folder):
        for request, record in run(requests(folder, num), lambda: None):
            assert isinstance(record, RunRecord)
            found[request.seed] = record
    return found


@pytest.mark.parametrize(("jobs", "most", "known"), [(None, 5, 0), (2, 2, 2)])
def test_runs_go_out_at_most_so_many_at_once(tmp_path: Path, jobs: int | None, most: int, known: int) -> None:
    cluster = FakeCluster()
    records = ended(tmp_path, cluster, num=5, jobs=jobs)
    assert sorted(map(str, records)) == ["0", "1", "2", "3", "4"]
    assert (cluster.most, cluster.begun, cluster.ends) == (most, [tmp_path], 1)
    for record in records.values():
        assert record.placement is not None
        assert (record.placement.jobs, record.placement.through, record.placement.attempts) == (known, "slurm", 1)


def test_a_lost_run_is_tried_again_once(tmp_path: Path) -> None:
    cluster, notes = FakeCluster(loses={"fp32-seed1": 1}), list[str]()
    records = ended(tmp_path, cluster, num=3, notes=notes)
    assert [records[seed].error for seed in range(3)] == [None, None, None]
    again = records[1].placement
    assert again is not None
    assert again.attempts == 2
    assert sorted(cluster.submitted) == ["fp32-seed0", "fp32-seed1", "fp32-seed1", "fp32-seed2"]
    assert notes == ["fp32-seed1 was lost and is tried again: the node failed"]


def test_a_run_that_is_lost_twice_fails_by_name_and_leaves_the_others(tmp_path: Path) -> None:
    cluster = FakeCluster(loses={"fp32-seed1": 9})
    records = ended(tmp_path, cluster, num=3)
    assert [records[seed].error for seed in (0, 2)] == [None, None]
    assert records[1].error == "fp32-seed1 was lost 2 times; the node failed"
    assert cluster.submitted.count("fp32-seed1") == 2
    assert read_record(tmp_path / "fp32-seed1" / "record.json") == records[1]


def test_a_worker_that_leaves_no_record_is_lost(tmp_path: Path) -> None:
    record = ended(tmp_path, FakeCluster(leaves_no_record="fp32-seed0"), num=1)[0]
    assert "fp32-seed0 was lost 2 times; it left no record" in (record.error or "")


def test_a_job_of_an_earlier_command_is_waited_for(tmp_path: Path) -> None:
    cluster, notes = FakeCluster(), list[str]()
    cluster.known["fp32-seed0"] = FakeJob(cluster, "fp32-seed0", "")
    write_record(run_record("fp32", seed=0), tmp_path / "fp32-seed0" / "record.json")
    records = ended(tmp_path, cluster, num=2, notes=notes)
    assert (len(records), cluster.submitted) == (2, ["fp32-seed1"])
    assert notes == ["fp32-seed0 is already in progress; waiting for it"]


def test_a_signal_cancels_what_is_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = FakeCluster(hangs=True)
    polls = iter([False, True])

    def sleep(_: float) -> None:
        if next(polls, False):
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(engine.time, "sleep", sleep)
    with stoppable() as stop:
        assert ended(tmp_path, cluster, num=3, jobs=2) == {}
        assert stop.name == "SIGTERM"
    assert [job.cancelled for job in cluster.jobs] == [True, True]
    assert cluster.ends == 1


def test_nothing_to_run_needs_no_cluster(tmp_path: Path) -> None:
    cluster = FakeCluster()
    assert ended(tmp_path, cluster, num=0) == {}
    assert (cluster.begun, cluster.ends) == ([], 0)


# --- with the real libraries, in their local modes -----------------------------------------------------------------------------------

SCRIPT = """
import os, sys, torch
from pathlib import Path
name = sys.argv[1]
torch.manual_seed(0)
inputs, model = torch.randn(16, 4), torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
if name == "fp32-seed1" and not Path("killed").exists():
    Path("killed").touch()
    guard = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()
    os.kill(int(guard[1]), 9)  # its worker
for step in range(6):
    loss = (model(inputs) - 1).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
with open("ended.txt", "a") as file:
    print(name, file=file)
"""
LIBRARIES = {"slurm:cluster=local": "submitit", "ray": "ray"}
SEEDS = int(os.environ.get("MEZZO_CLUSTER_SEEDS", "2"))
"""Of two policies: 12 for a test of 24 runs."""


def facts(record: CompareRecord) -> list[object]:
    """Return what does not depend on the clock."""
    rows = [(row.policy, row.verdict, row.loss, row.num_runs, row.memory) for row in record.rows]
    return [record.command[:1], rows, [(run.policy, run.seed, run.steps.loss, run.error) for run in record.runs]]


def comparison(*options: str, out: str) -> list[str]:
    words = ["--policies", "fp32,bf16", "--seeds", str(SEEDS), "--gpus", "none", "--out", out]
    return [sys.executable, "-m", "mezzo", "compare", *options, *words, "train.py", "{run}"]


def read(out: str) -> CompareRecord:
    record = read_record(Path(out) / "record.json")
    assert isinstance(record, CompareRecord)
    return record


def killed_after(ended: Callable[[], list[Path]], command: list[str], log: Path) -> list[Path]:
    """Run a command, kill it when two of its runs have ended, and return the records of those that had."""
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file)
        last = time.monotonic() + 300
        while len(ended()) < 2 and process.poll() is None and time.monotonic() < last:
            time.sleep(0.1)
        process.kill()
        process.wait()
    assert ended(), log.read_text()
    return ended()


def skip_without(cluster: str) -> None:
    if importlib.util.find_spec(LIBRARIES[cluster]) is None:
        pytest.skip(f"{LIBRARIES[cluster]} is not installed: pip install {LIBRARIES[cluster]}")


@pytest.mark.slow
@pytest.mark.parametrize("cluster", LIBRARIES)
def test_a_worker_killed_and_the_command_killed_the_record_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cluster: str
) -> None:
    skip_without(cluster)
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT, encoding="utf-8")
    options = ("--on", cluster, "--jobs", "2")
    first = comparison(*options, out="out")
    records = killed_after(lambda: [*Path("out").glob("*/record.json")], first, Path("first.log"))
    finished = {path.parent.name for path in records}
    told = subprocess.run(
        comparison("--resume", "out", *options, out="out"), capture_output=True, text=True, timeout=900
    )
    assert told.returncode == 0, told.stderr
    names = [f"{policy}-seed{seed}" for policy in ("fp32", "bf16") for seed in range(SEEDS)]
    ended = Path("ended.txt").read_text().split()
    assert sorted(set(ended)) == sorted(names)
    assert [name for name in finished if ended.count(name) > 1] == []
    assert Path("killed").exists()
    assert [*Path("out").rglob("*_submitted.pkl")] == []  # it has the script's arguments
    assert {run.placement.through for run in read("out").runs if run.placement} == {cluster.partition(":")[0]}
    Path("ended.txt").unlink()
    subprocess.run(comparison(out="alone"), capture_output=True, check=True, timeout=900)
    assert facts(read("out")) == facts(read("alone"))


def search(*options: str, out: str) -> list[str]:
    words = ["--fresh", "1", "--out", out]
    return [sys.executable, "-m", "mezzo", "fallback", *options, *words, str(SCRIPTS / "fragile.py")]


@pytest.mark.slow
@pytest.mark.parametrize("cluster", LIBRARIES)
def test_a_search_and_a_check_on_a_cluster_end_as_in_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cluster: str
) -> None:
    skip_without(cluster)
    monkeypatch.chdir(tmp_path)
    options, name = ("--on", cluster, "--jobs", "2"), cluster.partition(":")[0]
    first = search(*options, out="out")
    records = killed_after(lambda: [*Path("out/runs").glob("*.record.json")], first, Path("first.log"))
    before = {path: path.stat().st_mtime_ns for path in records}
    told = subprocess.run(search("--resume", "out", *options, out="out"), capture_output=True, text=True, timeout=900)
    assert told.returncode == 0, told.stderr
    assert {path: path.stat().st_mtime_ns for path in before} == before  # nothing that had finished ran again
    subprocess.run(search(out="alone"), capture_output=True, check=True, timeout=900)
    found, alone = (read_record(Path(out) / "record.json") for out in ("out", "alone"))
    assert isinstance(found, FallbackRecord)
    assert isinstance(alone, FallbackRecord)
    assert (found.verdict, found.kept, found.verifications) == (alone.verdict, alone.kept, alone.verifications)
    assert found.run.placement is not None
    assert (found.run.placement.through, found.run.placement.jobs) == (name, 2)
    words = [
        "check",
        *options,
        "--seeds",
        "1",
        "--policies",
        "bf16",
        "--out",
        "checked",
        str(SCRIPTS / "plain.py"),
        "6",
    ]
    subprocess.run([sys.executable, "-m", "mezzo", *words], capture_output=True, timeout=900, check=False)
    checked = read_record(Path("checked/record.json"))
    assert isinstance(checked, CheckRecord)
    assert [stage.what for stage in checked.stages] == [f"a worker of {name}", "fp32, seed 0", "bf16, seed 0"]
    assert checked.device.kind == "cpu"
    assert checked.comparison is not None
    assert {run.placement.through for run in checked.comparison.runs if run.placement} == {name}
    assert [row.speedup for row in checked.comparison.rows] == [None, None]


SBATCH = """#!/bin/sh
cp "$1" "{copy}"
echo "Submitted batch job 71"
"""


def test_a_job_of_slurms_has_sbatchs_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the real submitit, and an sbatch that only keeps the script: there is no Slurm here."""
    pytest.importorskip("submitit", reason="submitit is not installed: pip install submitit")
    from mezzo.studies.on_cluster import Slurm

    programs, copy = tmp_path / "bin", tmp_path / "job.sh"
    programs.mkdir()
    for name in ("sbatch", "srun", "squeue", "sacct"):
        (programs / name).write_text(SBATCH.format(copy=copy))
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    cluster = Slurm({"partition": "gpu", "gres": "gpu:1"})
    cluster.begin(tmp_path)
    (request,) = requests(tmp_path, 1)
    cluster.submit(request, output=tmp_path / "output.log", limit_s=None)
    lines = copy.read_text().splitlines()
    for line in ("--partition=gpu", "--gres=gpu:1", "--time=720", "--job-name=mezzo"):
        assert f"#SBATCH {line}" in lines
    again = Slurm({"time": "02:00:00"})
    again.begin(tmp_path)
    assert again._jobs == {"fp32-seed0 ": "71"}
    again.submit(request, output=tmp_path / "output.log", limit_s=None)
    assert "#SBATCH --time=02:00:00" in copy.read_text().splitlines()
