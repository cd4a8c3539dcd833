"""Diagnosis of Keras scripts on TensorFlow: planted faults are named by layer, operation, phase, step and line; their twins are healthy."""

from __future__ import annotations

import json

import pytest
from keras_runs import SCRIPTS, printed

from mezzo.records import DiagnoseRecord

pytest.importorskip("keras")
pytest.importorskip("tensorflow")
SCRIPT = SCRIPTS / "keras_diagnosed.py"

FAULTS: dict[str, tuple[str, str, str, str, int, str, str]] = {
    # the training: the verdict, layer, operation, phase, step and format, and a part of the script's line
    "log of 0": ("invalid_operation", "planted", "log", "forward", 3, "bf16", "tf.math.log(x * 0)"),
    "division by 0": ("invalid_operation", "(script)", "divide", "forward", 1, "fp32", "p / (p - p)"),
    "root at 0": ("invalid_operation", "(script)", "sqrt", "backward", 1, "bf16", "tf.sqrt(p * 0)"),
    "product beyond FP16": ("range_overflow", "head", "matmul", "forward", 5, "fp16", "model.fit("),
    "loss beyond FP16": ("range_overflow", "(script)", "square", "forward", 1, "fp16", "tf.square(predicted * 3e3"),
    "NaN in the data": ("invalid_operation", "first", "cast", "forward", 4, "fp32", "model.fit("),
    "NaN in data of an own loop": ("invalid_operation", "first", "cast", "forward", 6, "fp32", "loss(model(inputs)"),
    "eps of 0": ("range_overflow", "planted", "divide", "forward", 2, "fp16", "tf.cast(eps, x.dtype)"),
    "learning rate too high": ("invalid_operation", "(script)", "square", "forward", 2, "fp32", "model.fit("),
    "update of a weight": ("invalid_operation", "first", "SGD.step", "update", 1, "fp32", "model.fit("),
    "row all masked": ("invalid_operation", "planted", "softmax", "forward", 2, "fp16", "tf.nn.softmax("),
    "guarded outside": ("invalid_operation", "planted", "log", "backward", 3, "fp32", "tf.math.log("),
    "scale of 2 to the 24": ("scale_overflow", "(script)", "cast", "backward", 1, "fp16", "model.fit("),
    "scale that never settles": ("scale_overflow", "(script)", "cast", "backward", 1, "fp16", "model.fit("),
    "own loss scale": ("range_overflow", "planted", "cast", "forward", 4, "fp16", "tf.cast(factor, x.dtype)"),
    "one replica": ("invalid_operation", "planted", "log", "forward", 2, "fp16", "tf.math.log(x * 0)"),
    "two optimizers": ("invalid_operation", "(script)", "sqrt", "backward", 6, "fp32", "tf.sqrt(predicted * 0)"),
}
HEALTHY = (
    *("log of 1", "division by 1", "root at 1", "product beyond FP16 in BF16", "loss in FP32", "sound data"),
    *("eps above 0", "learning rate", "masked by a large number", "validation", "images", "attention", "masked"),
    *("guarded inside", "own loss scale that is right", "embedding and GRU", "own loop", "own step"),
)


@pytest.fixture(scope="module")
def records() -> dict[str, dict[str, object]]:
    return dict(map(json.loads, printed(SCRIPT.name, KERAS_BACKEND="tensorflow")))


def _record(records: dict[str, dict[str, object]], name: str) -> DiagnoseRecord:
    return DiagnoseRecord.model_validate(records[name])


def test_every_training_of_the_script_is_judged(records: dict[str, dict[str, object]]) -> None:
    assert {*FAULTS, *HEALTHY, "replicas"} == {*records}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_named(name: str, records: dict[str, dict[str, object]]) -> None:
    found = _record(records, name)
    *place, code = FAULTS[name]
    assert [found.verdict, found.module, found.op, found.phase, found.step, found.format] == place
    file, _, number = found.line.rpartition(":")
    assert file == str(SCRIPT)
    assert code in SCRIPT.read_text(encoding="utf-8").splitlines()[int(number) - 1]


@pytest.mark.parametrize("name", HEALTHY)
def test_its_twin_is_healthy(name: str, records: dict[str, dict[str, object]]) -> None:
    found = _record(records, name)
    assert (found.verdict, found.faulty_steps, found.run.error) == ("healthy", [], None)
    assert len(found.run.steps) == 8


def test_normal_skips_are_no_fault(records: dict[str, dict[str, object]]) -> None:
    assert _record(records, "own loop").run.steps.skipped[:3] == [True, True, True]


@pytest.mark.parametrize("name", ["product beyond FP16", "loss beyond FP16", "eps of 0", "own loss scale"])
def test_an_overflow_of_the_range_has_a_finite_run_in_fp32_behind_it(
    name: str, records: dict[str, dict[str, object]]
) -> None:
    assert [p.outcome for p in _record(records, name).passes if p.policy == "fp32"] == ["finite"]


def test_the_cause_of_a_fault_is_shown_with_its_numbers(records: dict[str, dict[str, object]]) -> None:
    found = _record(records, "own loss scale")
    assert (found.largest, found.own_scaler) == (1e5, True)
    assert (found.fix_line, found.fix_tried) == ('dtype="float32"  # argument of the layer planted', True)
    assert _record(records, "two optimizers").operands[0].largest == 0.0


def test_what_tensorflow_cannot_give_is_said_once(records: dict[str, dict[str, object]]) -> None:
    notes = [note.value for note in _record(records, "sound data").notes]
    assert notes == ["inspected steps ran eagerly", "not judged on TensorFlow"]


def test_several_replicas_are_refused(records: dict[str, dict[str, object]]) -> None:
    assert "several replicas on TensorFlow; allowed: one" in str(records["replicas"]["error"])
