"""Rows of public throughput tables: what their trainings are, and which rows were held out."""

from __future__ import annotations

import re

import pytest
from benchmarks.prediction.predict_held_out import HELD_OUT, trusted
from benchmarks.prediction.rows import Row, bound_by_host, measured, row_of
from benchmarks.prediction.zoo.trainings import NotBuilt
from benchmarks.shared import csv_rows

from mezzo.measure.predict.time import Constants

CELLS = {
    "model": "bert-large-uncased seqcls", "img_or_seq": "512", "n_gpus": "1", "layout": "", "optimizer": "AdamW unless noted",
    "batch_per_gpu": "1", "framework": "PyTorch", "gpu": "V100-SXM2-16GB", "effective_math": "fp32", "throughput_per_gpu": "6.0",
}  # fmt: skip


@pytest.mark.parametrize(
    ("notes", "math", "row"),
    [
        ("vanilla AdamW", "fp32", ("fp32", "adam", False, 1)),
        ("grad accumulation 4", "fp32", ("fp32", "adam", False, 4)),
        ("accum 4 + gradient checkpointing", "fp32", ("fp32", "adam", True, 4)),
        ("accum4+ckpt+fp16+adafactor", "fp16 autocast", ("fp16", "adafactor", True, 4)),
        ("8-bit Adam", "fp32", ("fp32", "adam-8bit", False, 1)),
        ("", "fp16 weights", ("fp16-pure", "adam", False, 1)),
    ],
)
def test_a_rows_notes_are_part_of_its_training(notes: str, math: str, row: tuple[object, ...]) -> None:
    pytest.importorskip("transformers", reason="it builds the model")
    found, batch, kind = row_of({**CELLS, "effective_math": math, "notes": notes})
    assert (found.precision, found.optimizer, found.checkpointed, found.num_batches) == row
    assert (batch, kind) == (1, "language transformer")


def test_an_update_accumulates_batches_and_8_bit_adam_has_a_kernel_for_each_weight() -> None:
    pytest.importorskip("transformers", reason="it builds the model")
    one, four = (Row("bert_base", "16", "fp32", "nchw", "adam-8bit", num_batches=num) for num in (1, 4))
    updates = [op for op in one.operations(4) if op.phase == "optimizer"]
    assert {op.name for op in updates} == {"adam_8bit"}
    assert len(four.operations(4)) == 4 * len(one.operations(4)) - 3 * len(updates)


def test_rows_are_trusted_as_predictions_are() -> None:
    pytest.importorskip("transformers", reason="it builds the model")
    cells = {**CELLS, "model": "bert_base", "img_or_seq": "16", "notes": ""}
    kinds = [{"gpu": "V100-SXM2-16GB"}, {"gpu": "RTX 5090"}, {"batch_per_gpu": "4096"}]
    rows = [measured({**cells, **kind}) for kind in kinds]
    assert bound_by_host(rows, Constants()).tolist() == [True, True, False]
    assert trusted(rows) == ["not validated, bound by the host", "not validated, not measured", "validated"]


def test_rows_that_are_held_out_have_a_source_and_an_unknown_gpu_a_reason() -> None:
    rows = list(csv_rows.read(HELD_OUT))
    assert len({row["id"] for row in rows}) == len(rows)
    assert all(re.fullmatch(r"[0-9a-f]{40}", row["commit"]) for row in rows)
    assert all(row["source_path"].startswith(f"{row['source']}/") for row in rows)
    old = next(row for row in rows if row["gpu"] == "GTX 1080 Ti")
    with pytest.raises(NotBuilt, match="no facts about the GPU GTX 1080 Ti"):
        measured(old)
