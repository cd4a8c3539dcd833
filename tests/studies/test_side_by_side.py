"""Runs side by side: each with a place of its own; a failure leaves the others running, a signal stops all."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers_waiting import LONGEST_S, until
from mezzo.children.signals import stoppable
from mezzo.errors import ScriptError, UsageError
from mezzo.launch.request import Request
from mezzo.records import Placement, RunRecord
from mezzo.studies import side_by_side as engine
from mezzo.studies.side_by_side import Slot, listed_gpus, slots, visible_gpus
from record_builders import run_record

TWO_GPUS = """GPU 0: NVIDIA H100 PCIe (UUID: GPU-aa11)
GPU 1: NVIDIA H100 PCIe (UUID: GPU-bb22)
"""
DIVIDED = """GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-aa11)
  MIG 3g.20gb     Device  0: (UUID: MIG-1)
  MIG 3g.20gb     Device  1: (UUID: MIG-2)
GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-bb22)
"""


@pytest.mark.parametrize(
    ("text", "found"),
    [(TWO_GPUS, ["GPU-aa11", "GPU-bb22"]), (DIVIDED, ["MIG-1", "MIG-2", "GPU-bb22"]), ("No devices found\n", [])],
)
def test_gpus_are_named_by_their_uuid(text: str, found: list[str]) -> None:
    assert listed_gpus(text) == found


@pytest.mark.parametrize(("value", "found"), [("2, 3", ["2", "3"]), ("", []), ("GPU-aa", ["GPU-aa"])])
def test_the_shell_says_which_gpus(value: str, found: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert visible_gpus() == found


def test_each_run_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    found = slots(2)
    assert [place.variables["CUDA_VISIBLE_DEVICES"] for place in found] == ["4", "5"]
    assert [place.variables["OMP_NUM_THREADS"] for place in found] == ["4", "4"]
    assert found[1].placement == Placement(jobs=2, host=socket.gethostname(), gpus="5", threads=4)
    with pytest.raises(
        UsageError, match=r"--jobs 4: each run has a GPU of its own, and 3 can be used; allowed: 1 to 3"
    ):
        slots(4)


@pytest.mark.parametrize(
    ("cores", "asked", "jobs", "threads"), [(8, None, 4, 2), (8, "4", 2, 2), (2, None, 4, 1), (7, "many", 3, 2)]
)
def test_runs_on_a_cpu_share_its_threads(
    cores: int, asked: str | None, jobs: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if asked is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", asked)
    found = slots(jobs)
    assert [place.placement.threads for place in found] == [threads] * jobs
    assert not any("CUDA_VISIBLE_DEVICES" in place.variables for place in found)


# --- the runs ----------------------------------------------------------------------------------------------------------------------

Run = Callable[[Request], RunRecord]


def requests(folder: Path, num: int, target: str = "train.py") -> list[Request]:
    made = (folder / str(seed) / "record.json" for seed in range(num))
    return [
        Request(target=target, kind="script", policy="fp32", seed=seed, record_path=str(path), command=())
        for seed, path in enumerate(made)
    ]


def ended(folder: Path, monkeypatch: pytest.MonkeyPatch, run: Run, *, num: int, jobs: int) -> Iterator[int | None]:
    def run_child(request: Request, *, output: Path, limit_s: float | None) -> RunRecord:
        return run(request)

    monkeypatch.setattr(engine.runner, "observe_child", run_child)
    given = [Slot({"PLACE": str(k)}, Placement(jobs=jobs, gpus=str(k))) for k in range(jobs)]
    for request, _ in made(given, folder, requests(folder, num), limit_s=None):
        yield request.seed


def made(
    given: list[Slot], folder: Path, asked: list[Request], *, limit_s: float | None
) -> Iterator[engine.RequestAndRecord]:
    jobs = engine.SideBySide(given)
    with jobs.opened(folder):
        yield from jobs(asked, lambda: limit_s)


def test_as_many_runs_at_once_each_in_a_place_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    together, seen = threading.Barrier(3, timeout=LONGEST_S), list[tuple[str, Any]]()
    now = set[str]()

    def run(request: Request) -> RunRecord:
        place = request.variables["PLACE"]
        assert place not in now
        now.add(place)
        together.wait()
        seen.append((place, request.placement))
        together.wait()
        now.remove(place)
        return run_record("fp32")

    assert sorted(filter(lambda s: s is not None, ended(tmp_path, monkeypatch, run, num=6, jobs=3))) == [*range(6)]
    assert sorted(place for place, _ in seen) == ["0", "0", "1", "1", "2", "2"]
    assert all(placement.gpus == place for place, placement in seen)


def test_an_error_of_ours_starts_nothing_more_and_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, withdrawn = list[int | None](), threading.Event()
    withdraw = engine.SideBySide._withdraw

    def noted(jobs: engine.SideBySide) -> int:
        num = withdraw(jobs)
        withdrawn.set()
        return num

    def run(request: Request) -> RunRecord:
        made.append(request.seed)
        if request.seed == 0:
            raise ScriptError("the disk is full", hint="make room")
        assert withdrawn.wait(LONGEST_S)
        return run_record("fp32")

    monkeypatch.setattr(engine.SideBySide, "_withdraw", noted)
    with pytest.raises(ScriptError, match="the disk is full"):
        list(ended(tmp_path, monkeypatch, run, num=9, jobs=2))
    assert set(made) <= {0, 1, 2}  # the third may begin before the error is known


def test_an_error_before_the_first_run_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def shared_imports(**_: Any) -> Any:
        raise ScriptError("no more processes", hint="end some")

    monkeypatch.setattr(engine.runner, "shared_imports", shared_imports)
    with pytest.raises(ScriptError, match="no more processes"):
        list(ended(tmp_path, monkeypatch, lambda request: run_record("fp32"), num=5, jobs=2))


def test_an_open_engine_makes_round_after_round_in_the_same_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The processes that share imports belong to a thread: they live as long as it does."""
    threads = []

    def run_child(request: Request, **_: Any) -> RunRecord:
        threads.append((threading.current_thread().name, request.variables["PLACE"]))
        return run_record("fp32", seed=request.seed)

    monkeypatch.setattr(engine.runner, "observe_child", run_child)
    jobs = engine.SideBySide([Slot({"PLACE": str(k)}, Placement(jobs=2, gpus=str(k))) for k in range(2)])
    asked = requests(tmp_path, 7)
    with jobs.opened(tmp_path):
        rounds = [
            [request.seed for request, _ in jobs(part, lambda: None)] for part in (asked[:1], asked[1:5], asked[5:])
        ]
    assert [sorted(map(str, seeds)) for seeds in rounds] == [["0"], ["1", "2", "3", "4"], ["5", "6"]]
    assert set(threads) <= {("mezzo-job-0", "0"), ("mezzo-job-1", "1")}
    assert not any(thread.name.startswith("mezzo-job") for thread in threading.enumerate())


def test_a_signal_starts_nothing_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both = threading.Barrier(2, timeout=LONGEST_S)

    def run(request: Request) -> RunRecord:
        if both.wait() == 0:
            os.kill(os.getpid(), signal.SIGINT)
        until(lambda: stop.stopped)  # the main thread has it
        return run_record("fp32")

    with stoppable() as stop:
        assert list(ended(tmp_path, monkeypatch, run, num=6, jobs=2)) == []
        assert stop.name == "SIGINT"


SHOWS = """
import os, threading
print(os.environ["OMP_NUM_THREADS"], os.environ.get("CUDA_VISIBLE_DEVICES"))
import sys, torch
print("threads", torch.get_num_threads())
if os.path.basename(os.environ.get("FAILS", "")) and "--fail" in sys.argv:
    os.kill(os.getpid(), 11)
w = torch.nn.Linear(2, 1)
o = torch.optim.SGD(w.parameters(), 0.1)
for step in range(3):
    w(torch.ones(1, 2)).sum().backward()
    o.step()
"""


@pytest.mark.slow
def test_a_run_that_crashes_leaves_the_others_running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In processes of their own: each finds its variables before its first line."""
    (tmp_path / "shows.py").write_text(SHOWS)
    monkeypatch.setenv("FAILS", "yes")
    given = [
        Slot({"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": str(k)}, Placement(jobs=2, gpus=str(k), threads=1))
        for k in range(2)
    ]
    asked = requests(tmp_path, 4, str(tmp_path / "shows.py"))
    asked[1] = asked[1].model_copy(update={"arguments": ("--fail",)})
    records = {request.seed: record for request, record in made(given, tmp_path, asked, limit_s=60.0)}
    assert sorted(records) == [0, 1, 2, 3]
    assert [records[k].error is None for k in range(4)] == [True, False, True, True]
    assert "SIGSEGV" in (records[1].error or "")
    for number, record in records.items():
        assert record.placement is not None
        printed = (tmp_path / str(number) / "output.log").read_text().splitlines()
        assert printed[:2] == [f"1 {record.placement.gpus}", "threads 1"]


@pytest.mark.slow
def test_an_interrupt_stops_all(tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text("import time, torch\nprint('waits', flush=True)\ntime.sleep(1000)\n")
    asked = requests(tmp_path, 4, str(tmp_path / "waits.py"))
    given = [Slot({"OMP_NUM_THREADS": "1"}, Placement(jobs=2, threads=1))] * 2

    def interrupt() -> None:
        logs = [tmp_path / str(k) / "output.log" for k in range(2)]
        until(lambda: all(log.exists() and "waits" in log.read_text() for log in logs))
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with stoppable() as stop:
        assert list(made(given, tmp_path, asked, limit_s=None)) == []
        assert stop.name == "SIGINT"
    stopped = [(tmp_path / str(k) / "record.json").exists() for k in range(4)]
    assert stopped == [True, True, False, False]
