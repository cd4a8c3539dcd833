"""The detail of a prediction, from handwritten tapes."""

from __future__ import annotations

import pytest

from mezzo.gpus import gpu_named
from mezzo.measure.predict.plan import module_times, timeline
from mezzo.measure.predict.step import Conditions
from mezzo.measure.predict.tape import CostedOperation, MemoryBlock, TrainingTape


def test_the_timeline_has_the_bytes_of_each_kind_over_the_last_step() -> None:
    blocks = [
        MemoryBlock(100, "parameters"),
        MemoryBlock(10, "activations"),
        MemoryBlock(20, "activations"),
        MemoryBlock(5, "gradients"),
        MemoryBlock(7, "inputs"),
    ]
    events = [0, 1, ~1, 4, 2, 3, ~2, ~4, ~0]
    tape = TrainingTape(
        batch=1, blocks=blocks, events=events, step_starts=[1, 3], backward_starts=[2, 5], optimizer_starts=[7]
    )
    found = timeline(tape)
    assert found.places == [0, 1, 2]  # after the last allocation everything only goes
    assert found.kinds == {
        "parameters": [100, 100, 100],
        "gradients": [0, 0, 5],
        "activations": [0, 20, 20],
        "other": [7, 7, 7],
    }
    assert (found.backward, found.optimizer) == (2, 4)


@pytest.mark.parametrize(("formats", "other"), [((), []), (("fp16", "bf16"), []), (("fp16", "bf16", "fp32"), [0, 50])])
def test_the_timeline_has_copies_where_matrix_units_compute_the_format(
    formats: tuple[str, ...], other: list[int]
) -> None:
    blocks = [MemoryBlock(100, "activations"), MemoryBlock(50, "workspaces", "fp32")]
    tape = TrainingTape(batch=1, blocks=blocks, events=[0, 1, ~1, ~0], step_starts=[0])
    assert timeline(tape, formats).kinds.get("other", []) == other


def test_the_times_of_modules_add_up_to_the_time_on_the_gpu() -> None:
    operations = [
        CostedOperation("add", "forward", "body.0", "fp32", 0, 10**8, 10**8),
        CostedOperation("add", "backward", "body.0", "fp32", 0, 10**8, 10**8),
        CostedOperation("add", "forward", "head", "fp32", 0, 10, 10),
        CostedOperation("add", "optimizer", "", "fp32", 0, 10**6, 10**6),
    ]
    step = Conditions(gpu=gpu_named("t4")).step(TrainingTape(batch=1, operations=operations), "fp32")
    found = {one.module: one.ms for one in module_times(step)}
    assert list(found) == ["body.0", "(optimizer)", "head"]
    assert sum(ms for own in found.values() for ms in own.values()) == pytest.approx(1e3 * step.device_s)
    assert set(found["head"]) == {"launch"}
    assert set(found["body.0"]) == {"bandwidth"}
