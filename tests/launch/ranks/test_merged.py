"""One record of what all processes recorded."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from helpers_launch import request_for
from mezzo.launch.ranks.blame import ProcessEnd
from mezzo.launch.ranks.merged import differences, for_rank, merged
from mezzo.observe.settings import AnySettings, DiagnoseSettings, FallbackSettings, RangesSettings
from mezzo.records import AuditRecord, Finding, Loss, Metric, OutOfMemory, RankRun, RunRecord, Steps
from record_builders import environment

NAN = float("nan")


def run(rank: int, *, loss: list[float], **fields: Any) -> RunRecord:
    steps = Steps(
        loss=loss,
        losses=fields.pop("losses", []),
        skipped=fields.pop("skipped", [False] * len(loss)),
        time_ms=[100.0, 2.0, 4.0][: len(loss)],
        cpu_ms=[90.0, 1.0, 3.0][: len(loss)],
        loss_scale=[1024.0] * len(loss),
    )
    known: dict[str, Any] = {"command": ["mezzo"], "script": "t.py", "script_sha256": "", "policy": "fp16"}
    return RunRecord(
        **known, environment=environment(), steps=steps, ranks=[RankRun(rank=rank, weights="abc")], **fields
    )


def of(*runs: RunRecord, blame: tuple[int, str] | None = None) -> RunRecord:
    ends = [ProcessEnd(rank=rank, error=one.error, exit_code=one.exit_code) for rank, one in enumerate(runs)]
    record = merged(dict(enumerate(runs)), ends=ends, blame=blame, hosts={0: "here", 1: "there"})
    assert isinstance(record, RunRecord)
    return record


def test_the_loss_is_the_mean_and_each_rank_keeps_its_own() -> None:
    record = of(run(0, loss=[4.0, 2.0, 1.0]), run(1, loss=[2.0, 2.0, 3.0], skipped=[True, False, False]))
    assert record.steps.loss == [3.0, 2.0, 2.0]
    first, second = record.ranks
    assert (first.final_loss, second.final_loss, second.skipped_steps) == (1.0, 3.0, [1])
    assert (first.step_ms, first.cpu_ms, first.final_scale) == (3.0, 2.0, 1024.0)  # medians without the first step
    assert (first.host, second.host, second.weights) == ("here", "there", "abc")
    assert [one.what for one in record.between_ranks] == ["skipped"]
    assert RunRecord.model_validate_json(record.model_dump_json()) == record


def test_a_loss_that_is_lost_on_one_rank_is_lost() -> None:
    assert math.isnan(of(run(0, loss=[1.0]), run(1, loss=[NAN])).steps.loss[0])


def test_ranks_with_other_steps_leave_rank_0s_losses() -> None:
    assert of(run(0, loss=[1.0, 2.0]), run(1, loss=[5.0])).steps.loss == [1.0, 2.0]


@pytest.mark.parametrize(("name", "values"), [("d", [2.0, 3.0]), ("other", [1.0, 2.0])])
def test_several_losses_are_averaged_if_they_are_the_same(name: str, values: list[float]) -> None:
    one, other = (Loss(name=label, steps=[1, 2], values=own) for label, own in (("d", [1.0, 2.0]), (name, [3.0, 4.0])))
    record = of(run(0, loss=[1.0], losses=[one]), run(1, loss=[1.0], losses=[other]))
    assert record.steps.losses[0].values == values


def test_a_metric_that_another_rank_prints() -> None:
    metric = Metric(name="acc", pattern="acc=(.*)", steps=[1], values=[0.5])
    assert of(run(0, loss=[1.0]), run(1, loss=[1.0], metric=metric)).metric == metric


def test_a_run_that_failed_has_the_reason_and_the_hint_of_the_rank_to_blame() -> None:
    oom = OutOfMemory(step=1, message="none left")
    record = of(
        run(0, loss=[1.0], error="RuntimeError: connection reset", hint="check the network", exit_code=1),
        run(1, loss=[1.0], error="ValueError: bad", hint="mend it", exit_code=3, out_of_memory=oom),
        blame=(1, "ValueError: bad"),
    )
    assert (record.error, record.exit_code, record.hint) == ("rank 1: ValueError: bad", 3, "mend it")
    assert (record.out_of_memory, record.stopped_at_limit) == (oom, False)
    assert [rank.error for rank in record.ranks] == ["RuntimeError: connection reset", "ValueError: bad"]
    assert record.between_ranks == []  # a failed run differs anyway


def test_a_rank_without_a_record() -> None:
    ends = [ProcessEnd(rank=0, error=None), ProcessEnd(rank=1, error=None, vanished=True)]
    first = run(0, loss=[1.0], error="RuntimeError: connection reset", hint="check the network")
    record = merged({0: first}, ends=ends, blame=(1, "its process vanished"), hosts={}, limit_s=9.0)
    assert isinstance(record, RunRecord)
    assert record.error == "stopped at its limit of 9 s: rank 1: its process vanished"
    assert (record.exit_code, record.hint, record.stopped_at_limit) == (1, "", True)
    assert record.ranks[1].error == "its process vanished"


def finding(code: str, line: str) -> Finding:
    return Finding(code=code, title=code.lower(), modules=["m"], detail="", gain="", fix="", lines=[line])


def test_findings_of_all_ranks_once_and_those_of_others_with_their_ranks() -> None:
    shared, own = finding("A601", "/a/t.py:1"), finding("A602", "/a/t.py:2")
    audits = {
        rank: AuditRecord(run=run(rank, loss=[1.0]), steps=[3], findings=found)
        for rank, found in enumerate(([shared], [shared, own], [own]))
    }
    ends = [ProcessEnd(rank=rank, error=None) for rank in audits]
    record = merged(dict(audits), ends=ends, blame=None, hosts={})
    assert isinstance(record, AuditRecord)
    assert [one.title for one in record.findings] == ["a601", "a602 (rank 1, 2)"]
    assert len(record.run.ranks) == 3


# --- Each rank's own files ---


def asked(observe: AnySettings, rank: int, folder: Path) -> AnySettings:
    request = request_for(folder, "t.py", policy="fp16", observe=observe)
    found = for_rank(request, rank, folder=folder, number=4, ranks=3)
    assert found.rank == rank
    assert found.observe is not None
    return found.observe


def test_no_two_ranks_write_one_file(tmp_path: Path) -> None:
    diagnose = [
        asked(DiagnoseSettings(evidence_path=str(tmp_path / "run.evidence.json")), r, tmp_path) for r in range(3)
    ]
    assert [Path(o.evidence_path).name for o in diagnose if o.kind == "diagnose"] == [
        "run.evidence.json",
        "run.evidence.rank1.json",
        "run.evidence.rank2.json",
    ]
    fallback = [asked(FallbackSettings(folder=str(tmp_path)), rank, tmp_path) for rank in range(2)]
    assert [o.folder for o in fallback if o.kind == "fallback"] == [str(tmp_path), str(tmp_path / "rank1")]
    assert (tmp_path / "rank1").is_dir()
    ranges = asked(RangesSettings(), 1, tmp_path)
    assert ranges.kind == "ranges"
    assert ranges.counts_path == str(tmp_path / "run-4.counts.json")


# --- What differs between ranks, as a table ---


def ranks(**columns: list[Any]) -> list[RankRun]:
    """Return ranks that are alike but for these fields."""
    count = len(next(iter(columns.values())))
    same: dict[str, Any] = {"device": "cpu", "num_steps": 20, "weights": "a", "cpu_ms": 10.0, "total_bytes": 1000}
    rows = [{name: values[rank] for name, values in columns.items()} for rank in range(count)]
    return [RankRun(rank=rank, **{**same, **row}) for rank, row in enumerate(rows)]


CASES = [
    (ranks(num_steps=[20, 20]), []),
    (ranks(weights=["a", "b", "b"]), [("weights", "a on rank 0; b on ranks 1, 2")]),
    (ranks(weights=["a", ""]), []),  # one had lost its model by then
    (ranks(num_steps=[20, 19]), [("steps", "19 on rank 1, 20 on rank 0")]),
    (ranks(skipped_steps=[[1, 3], [1, 3]]), []),
    (ranks(skipped_steps=[[1, 3], [3]]), [("skipped", "step 1, by rank 0 only")]),
    (ranks(final_scale=[1024.0, 1024.0, 512.0]), [("loss scale", "1024 on ranks 0, 1; 512 on rank 2")]),
    (ranks(cpu_ms=[10.0, 14.9]), []),
    (ranks(cpu_ms=[10.0, 20.0]), [("time a step", "rank 1 computes 2.0 times as long as rank 0")]),
    (ranks(cpu_ms=[10.0, 20.0], device=["NVIDIA H100", "NVIDIA H100"]), []),  # the host of a GPU waits busily
    (ranks(cpu_ms=[10.0, 20.0], num_steps=[5, 5]), []),
    (ranks(total_bytes=[1000, 1500]), [("memory", "rank 1 has 1.50 times the bytes of rank 0")]),
    (ranks(cuda_allocated_bytes=[1000, 1100]), []),
]


@pytest.mark.parametrize(("given", "found"), CASES)
def test_differences(given: list[RankRun], found: list[tuple[str, str]]) -> None:
    assert [(one.what, one.value) for one in differences(given)] == found
