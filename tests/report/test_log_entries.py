"""What is logged of each kind of record, and which tracker a destination names."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

import record_builders as build
from mezzo.records import AuditRecord, DiagnoseRecord, FallbackRecord, Finding, Loss, ModuleError, Steps
from mezzo.report.log_entries import log_entry
from mezzo.report.terminal import text_of
from mezzo.report.tracking import TrackedRecord

FINDING = Finding(code="A601", title="t", modules=["a"], detail="", gain="", fix="do", share=0.25)
RUN = build.run_record("fp16", num_steps=5, seed=3)


def test_steps_are_numbered_from_one_and_unmeasured_norms_are_left_out() -> None:
    steps = Steps(
        loss=[3.0, 2.0, 1.0],
        skipped=[True, False, False],
        grad_norm=[math.nan, math.nan, 0.5],
        losses=[Loss(name="critic", steps=[1, 3], values=[0.1, 0.2])],
    )
    found = log_entry(RUN.model_copy(update={"steps": steps, "metric": None}))
    assert [(c.name, list(c.steps), [str(v) for v in c.values]) for c in found.curves] == [
        ("step/loss", [1, 2, 3], ["3.0", "2.0", "1.0"]),
        ("step/skipped", [1, 2, 3], ["1.0", "0.0", "0.0"]),
        ("step/grad_norm", [1, 3], ["nan", "0.5"]),
        ("loss/critic", [1, 3], ["0.1", "0.2"]),
    ]
    assert found.numbers["skipped_updates"] == 1.0
    assert found.settings["seed"] == 3
    assert (found.settings["policy"], found.settings["device"]) == ("fp16", "NVIDIA H100 80GB HBM3")


def test_a_failed_run_says_so_and_names_its_findings() -> None:
    found = log_entry(RUN.model_copy(update={"error": "ValueError: x", "findings": [FINDING, FINDING]}))
    assert found.failed
    assert found.tags == {"kind": "run", "findings": "A601"}
    assert not log_entry(RUN).failed


def test_a_comparison_has_a_verdict_a_row_and_its_runs() -> None:
    record = build.compare_record(num_seeds=2, num_steps=3)
    found = log_entry(record)
    assert found.tags == {
        "kind": "compare",
        "verdict fp32": "baseline",
        "verdict bf16": "equivalent",
        "verdict fp16": "undecided",
        "verdict fp16-pure": "diverged",
    }
    assert found.settings["policies"] == "fp32,bf16,fp16,fp16-pure"
    (table,) = found.tables
    assert [row[:2] for row in table.rows] == [[row.policy, row.verdict] for row in record.rows]
    assert all(len(row) == len(table.columns) for row in table.rows)
    assert [run.name for run in found.runs] == [f"{r.policy}-seed{r.seed}" for r in record.runs]


def test_a_check_has_its_answer_and_the_comparison_behind_it() -> None:
    record = build.check_record()
    assert record.comparison is not None
    found, compared = log_entry(record), log_entry(record.comparison)
    assert found.tags == {**compared.tags, "kind": "check", "decision": "use", "use": "bf16"}
    assert (found.numbers, found.runs, found.record.kind) == (compared.numbers, compared.runs, "check")
    alone = log_entry(build.check_record(comparison=None))
    assert (alone.tags, alone.runs) == ({"kind": "check", "decision": "use", "use": "bf16"}, [])


def test_no_speed_is_logged_of_emulated_formats() -> None:
    found = log_entry(build.emulated_record(num_steps=3))
    assert [name for name in found.numbers if name.startswith("speedup")] == ["speedup/fp32"]
    speedups = {row[0]: row[2] for row in found.tables[0].rows}
    assert {policy for policy, speedup in speedups.items() if speedup is not None} == {"fp32"}


def test_the_other_kinds() -> None:
    audit = log_entry(
        AuditRecord(run=RUN, steps=[3], flops_by_phase={"forward": {"fp16": 3, "fp32": 1}}, findings=[FINDING])
    )
    assert audit.numbers == {"share_of_flops/fp16": 0.75, "share_of_flops/fp32": 0.25}
    assert audit.tags == {"kind": "audit", "findings": "A601"}
    assert audit.tables[0].rows == [["A601", "t", 0.25, "a", "do"]]
    module = ModuleError(module="head", type="Linear", output=0.5, kept=True)
    fallback = FallbackRecord(
        run=RUN, policy="bf16", tolerance=0.1, verdict="found", reason="", error_after=0.01, modules=[module]
    )
    found = log_entry(fallback)
    assert (found.settings["policy"], found.tags["verdict"], found.numbers) == ("bf16", "found", {"error_after": 0.01})
    assert found.tables[0].rows == [["head", "Linear", 0.5, None, None, 1]]
    assert log_entry(DiagnoseRecord(run=RUN, verdict="healthy")).curves == []
    doctor = log_entry(build.doctor_record())
    assert (doctor.script, doctor.tags, doctor.settings["torch"]) == ("", {"kind": "doctor"}, "2.13.0")
    assert all("Environment" in text_of(each.record) for each in (audit, found, doctor))


@pytest.mark.parametrize(
    ("record", "name"),
    [
        ("runs/2026-train-compare/record.json", "2026-train-compare"),
        ("runs/demo/rank3/record.json", "demo-rank3"),
        ("runs/demo/fp16.json", "demo-fp16"),
    ],
)
def test_names_of_logged_records(record: str, name: str, tmp_path: Path) -> None:
    assert TrackedRecord(record=tmp_path / record, page=tmp_path).name == name
