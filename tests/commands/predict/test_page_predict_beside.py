"""Predictions beside measurements on the same kind of GPU."""

from __future__ import annotations

import pytest

import record_builders as build
from mezzo.commands.predict.page import beside, beside_text, off_text
from mezzo.records import CompareRecord, Memory, Note, Prediction, RealGpus
from mezzo.report.pages import page_of

H100 = "h100-sxm"
GIB = 2**30


@pytest.mark.parametrize(
    ("predicted", "measured", "text"),
    [
        (23.9, 31.5, "24% off, too fast"),
        (40.0, 32.0, "25% off, too slow"),
        (10.01, 10.0, "0% off"),
    ],
)
def test_how_far_off(predicted: float, measured: float, text: str) -> None:
    assert off_text(predicted, measured, high="too slow", low="too fast") == text
    assert beside_text(predicted, measured).endswith(f": {text}")


def compared(gpu: str, *, emulated: bool = False) -> CompareRecord:
    record = build.compare_record()
    rows = [
        row.model_copy(
            update={
                "step_ms": 31.5,
                "emulated": emulated and row.policy != record.baseline,
                "memory": row.memory.model_copy(update={"cuda_allocated_bytes": 4 * GIB, "of_emulation": False}),
            }
        )
        for row in record.rows
    ]
    facts = {"possible": True, "fits": True, "step_ms": 23.9, "allocated_bytes": 3 * GIB}
    predictions = [
        Prediction.model_validate({"gpu": name, "policy": row.policy_shown, **facts})
        for name in ("h100-sxm", "t4")
        for row in rows
    ]
    found = RealGpus(gpus=["h100-sxm"], predictions=predictions, own_gpu=gpu)
    return record.model_copy(update={"rows": rows, "real_gpus": found})


def test_each_row_of_the_gpu_of_the_runs_has_its_prediction_beside_it() -> None:
    record = compared(H100)
    found = beside(record.real_gpus, record.rows)
    assert [note.what for note in found] == [f"h100-sxm, {row.policy_shown}" for row in record.rows]
    assert found[0] == Note(
        what=found[0].what,
        value="predicted 23.9 ms, measured 31.5 ms: 24% off, too fast",
        reason="allocated: predicted 3.00 GiB, measured 4.00 GiB: 25% off, too little",
    )
    facts = page_of(record).facts("Predicted and measured here")
    assert [fact.what for fact in facts] == [note.what for note in found]


def test_emulated_rows_and_other_gpus_have_nothing_beside_them() -> None:
    record = compared(H100, emulated=True)
    assert len(beside(record.real_gpus, record.rows)) == 1
    for name in ("", "a100-80gb"):
        other = compared(name)
        assert beside(other.real_gpus, other.rows) == []
    assert beside(None, record.rows) == []


def test_a_calibrated_cpu_has_its_prediction_beside_it() -> None:
    record = compared("")
    assert record.real_gpus is not None
    here = Prediction(gpu="cpu", policy="fp32", possible=True, step_ms=30.0, calibrated=True)
    predicted = record.real_gpus.model_copy(update={"here": here})
    rows = [row.model_copy(update={"memory": Memory()}) for row in record.rows]
    assert beside(predicted, rows) == [
        Note(
            what="cpu, fp32",
            value="predicted 30.0 ms, measured 31.5 ms: 5% off, too fast",
            reason="by the clock: whatever else ran on this machine counts",
        )
    ]


def test_a_check_on_that_gpu_says_it_in_its_answer() -> None:
    record = compared(H100)
    check = build.check_record(comparison=record, environment=record.environment)
    lines = [fact.value for fact in page_of(check).answer.boxed if fact.what == "prediction"]
    assert lines[0].endswith("predicted 23.9 ms, measured 31.5 ms: 24% off, too fast.")
