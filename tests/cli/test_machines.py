"""The machine of the runs: this one or a worker; how runs were placed, and where times cannot be measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from mezzo.cli.machines import check_times, how_placed, machine_of, name_of
from mezzo.devices import Device
from mezzo.errors import ScriptError, UsageError
from mezzo.launch.request import Request
from mezzo.measure.doctor import Facts
from mezzo.records import Placement
from mezzo.studies.on_cluster import OnCluster
from mezzo.studies.side_by_side import RequestAndRecord, SideBySide, Slot, one_after_another
from record_builders import run_record

H100 = Device(kind="cuda", name="NVIDIA H100", capability=(9, 0), flags=frozenset({"a"}))


class Cluster:
    name = "slurm"

    def __init__(self, gives_gpus: bool | None) -> None:
        self.gives_gpus = gives_gpus


class Worker(OnCluster):
    """A cluster whose worker writes what it can compute, or fails."""

    def __init__(self, says: Facts | None) -> None:
        super().__init__(Cluster(None), jobs=None, note=print)  # type: ignore[arg-type]
        self._says = says

    def __call__(self, requests: Sequence[Request], limit_s: Callable[[], float | None]) -> Iterator[RequestAndRecord]:
        (request,) = requests
        assert request.target == "mezzo.cli.machines"
        file = Path(request.arguments[0])
        assert file.is_absolute()
        if self._says is not None:
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(TypeAdapter(Facts).dump_json(self._says))
        yield request, run_record("fp32", error=None if self._says else "no torch there")


def test_a_worker_says_what_it_can_compute(tmp_path: Path) -> None:
    found = machine_of(Worker(Facts(devices=(H100,), driver="570")), tmp_path)
    assert (found.device, found.facts.driver, found.name) == (H100, "570", "a worker of slurm")
    with pytest.raises(ScriptError, match="a worker did not report what it can compute: no torch there"):
        machine_of(Worker(None), tmp_path)


def test_here_it_is_this_machine(tmp_path: Path) -> None:
    found = machine_of(one_after_another, tmp_path)
    assert (found.device.kind, found.name) == ("cpu", "this machine")
    assert name_of(one_after_another) == "this machine"
    assert how_placed(one_after_another) == []
    assert not list(tmp_path.iterdir())


def jobs(gpus: list[str | None]) -> SideBySide:
    return SideBySide([Slot({}, Placement(jobs=len(gpus), gpus=gpu)) for gpu in gpus])


def test_the_record_says_how_runs_were_placed() -> None:
    (own,) = how_placed(jobs(["0", "1"]))
    assert (own.value, own.reason) == ("2 at once", "--jobs: each had a GPU of its own")
    (share,) = how_placed(jobs([None, None]))
    assert share.reason == "--jobs: each had its share of the CPU's threads"
    (there,) = how_placed(Worker(None))
    assert (there.value, there.reason) == (
        "placed by slurm",
        "as many at once as it allowed; each record has its placement",
    )


def test_times_need_a_gpu_for_each_run() -> None:
    check_times(one_after_another)
    check_times(jobs(["0", "1"]))
    check_times(OnCluster(Cluster(True), jobs=2, note=print))  # type: ignore[arg-type]
    check_times(OnCluster(Cluster(None), jobs=2, note=print))  # type: ignore[arg-type]
    with pytest.raises(
        UsageError, match="--jobs 2 without a GPU for each run; allowed: one run at a time, because times"
    ):
        check_times(jobs([None, None]))
    with pytest.raises(
        UsageError, match="--on slurm without a GPU for each run; allowed: a GPU of its own for each run, because"
    ):
        check_times(OnCluster(Cluster(False), jobs=2, note=print))  # type: ignore[arg-type]
