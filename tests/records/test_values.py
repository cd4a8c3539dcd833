"""A record prints as one line, whatever it contains; its figures are those of its fields."""

from __future__ import annotations

from typing import get_args

import pytest
from rich.console import Console

import record_builders as build
from mezzo import records
from mezzo.records import (
    AuditRecord,
    DiagnoseRecord,
    FallbackRecord,
    Finding,
    RangesRecord,
    RunRecord,
    ScaleWindow,
    Steps,
)
from mezzo.records.values import WholeRecord

RUN = build.run_record("fp16", num_steps=5, script="/home/me/train.py").model_copy(
    update={"steps": Steps(loss=[2.5, 1.0, 0.123456], skipped=[True, False, True])}
)
FINDING = Finding(code="A601", title="t", modules=[], detail="", gain="", fix="")


def windows(*, lowest: int | None = 3, highest: int | None = 9, suggested: int | None = 8) -> RangesRecord:
    wide = ScaleWindow(format="bf16", reason="")
    own = ScaleWindow(format="fp16", lowest=lowest, highest=highest, suggested=suggested, reason="")
    return RangesRecord(run=RUN, policy="O1", format="fp16", first_scale=0, little=0.01, windows=[wide, own])


SHOWN: list[tuple[WholeRecord, str]] = [
    (RUN, "RunRecord train.py under fp16: 3 steps, loss 2.5 to 0.1235, 2 skipped"),
    (
        RUN.model_copy(update={"steps": Steps(), "error": "ValueError: no data"}),
        "RunRecord train.py under fp16: 0 steps; ValueError: no data",
    ),
    (
        build.compare_record(num_seeds=1, num_steps=5),
        "CompareRecord train.py: bf16 equivalent, fp16 undecided, fp16-pure diverged, compared with fp32",
    ),
    (
        AuditRecord(run=RUN, steps=[3], flops_by_phase={"forward": {"fp16": 3}, "dgrad": {"fp32": 1}}, findings=[FINDING]),
        "AuditRecord train.py under fp16: products 75% fp16, 25% fp32; 1 finding",
    ),
    (AuditRecord(run=RUN, steps=[3]), "AuditRecord train.py under fp16: products none; 0 findings"),
    (DiagnoseRecord(run=RUN, verdict="healthy"), "DiagnoseRecord train.py under fp16: healthy"),
    (
        DiagnoseRecord(
            run=RUN,
            verdict="range_overflow",
            step=4,
            located=True,
            phase="forward",
            module="encoder.0",
            line="train.py:7",
        ),
        "DiagnoseRecord train.py under fp16: range overflow, step 4, forward pass of encoder.0, train.py:7",
    ),
    (windows(), "RangesRecord train.py for O1: loss scales 2^3 to 2^9 fit fp16, begin with 2^8"),
    (windows(lowest=9, highest=3, suggested=None), "RangesRecord train.py for O1: no loss scale fits fp16"),
    (windows(lowest=None, suggested=None), "RangesRecord train.py for O1: no scale window"),
    (
        FallbackRecord(run=RUN, policy="O1", tolerance=0.1, verdict="found", reason="", kept=["a", "b"], operations=["bmm"]),
        "FallbackRecord train.py under O1: found, a, b, bmm in fp32",
    ),
    (
        FallbackRecord(run=RUN, policy="O1", tolerance=0.1, verdict="not needed", reason=""),
        "FallbackRecord train.py under O1: not needed",
    ),
    (build.gate_record(), "GateRecord train.py: regressed; loss, formats, findings"),
    (build.diff_record(), "DiffRecord train.py, old.py and new.py: beyond rounding from layer_norm in norm on (forward, step 1)"),
    (build.predict_record(), "PredictRecord timm:resnet50, batch 256: 2471 images/s on a100-80gb in bf16"),
    (build.predict_record(predictions=[]), "PredictRecord timm:resnet50, batch 256: fits none"),
    (build.check_record(), "CheckRecord train.py: use bf16"),
    (build.tune_record(), "TuneRecord train.py: use bf16, batch-size 64, compiled, 1.69x as fast"),
    (build.resume_check_record(), "ResumeCheckRecord train.py: differs; not restored: optimizer"),
    (build.doctor_record(), "DoctorRecord AMD EPYC 9554: fp32 native; NVIDIA H100 80GB HBM3: fp16 native"),
]  # fmt: skip


@pytest.mark.parametrize(("record", "text"), SHOWN)
def test_a_record_prints_as_one_line(record: WholeRecord, text: str) -> None:
    assert repr(record) == str(record) == f"<{text}>"
    assert f"[{record!r}]" == str([record])


def test_every_kind_of_record_has_its_line() -> None:
    assert {type(record) for record, _ in SHOWN} == set(get_args(get_args(records.Record)[0]))


def test_a_line_stays_a_line() -> None:
    hostile = RUN.model_copy(update={"script": "/tmp/a\n\x1b[31mb.py"})
    assert repr(hostile) == "<RunRecord a  [31mb.py under fp16: 3 steps, loss 2.5 to 0.1235, 2 skipped>"


def test_steps_print_their_ends() -> None:
    assert repr(RUN.steps) == "<Steps 3 steps, loss 2.5 to 0.1235, 2 skipped>"
    assert repr(Steps(loss=[1.0])) == "<Steps 1 step, loss 1 to 1>"


def test_rich_prints_the_same_words() -> None:
    console = Console(width=200, record=True)
    with console.capture() as printed:
        console.print([RUN])
    assert printed.get().strip() == f"[RunRecord({RUN.summary!r})]"
    assert isinstance(RUN, RunRecord)
