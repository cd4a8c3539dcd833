"""Audit, diagnose, ranges and fallback of Keras on PyTorch: against planted faults, counts by hand and NumPy's own arithmetic.

All cases share one process, which ``scripts/keras_observed.py`` is: importing Keras takes seconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from keras_runs import SCRIPTS, answers

pytest.importorskip("keras")
pytest.importorskip("torch")
SCRIPT = SCRIPTS / "keras_observed.py"
B, D, H = 8, 4, 16
HIDDEN, HEAD = 2 * B * D * H, 2 * B * H
"""Operations of one product of each layer of the network."""

Case = tuple[str, str, str, int]
Find = Callable[[str, str, str, int], dict[str, Any]]
CASES: list[Case] = [
    ("audit", "plain", "as-is", 3),
    ("audit", "plain", "bf16", 3),
    ("audit", "plain", "fp16", 3),
    ("audit", "own_head", "bf16", 3),
    ("audit", "recurrent", "bf16", 2),
    ("diagnose", "healthy", "fp16", 10),
    ("diagnose", "healthy", "bf16", 10),
    ("diagnose", "recurrent", "fp16", 10),
    ("diagnose", "gan", "fp16", 20),
    ("diagnose", "large_gradients", "fp16", 30),
    ("diagnose", "compiled_step", "fp16", 4),
    ("diagnose", "squared", "fp16", 10),
    ("diagnose", "squared_later", "fp16", 10),
    ("diagnose", "nested", "fp16", 10),
    ("diagnose", "own_mixed", "as-is", 10),
    ("diagnose", "not_a_number", "fp16", 10),
    ("diagnose", "steep", "fp16:loss_scale=static:init_scale=1048576", 10),
    ("diagnose", "own_loop", "fp16", 10),
    ("ranges", "counted", "fp16", 1),
    ("ranges", "own_head", "fp16", 2),
    ("fallback", "squared", "fp16", 0),
    ("fallback", "nested", "fp16", 0),
    ("fallback", "healthy", "bf16", 0),
    ("fallback", "recurrent", "bf16", 0),
]


@pytest.fixture(scope="module")
def find() -> Find:
    found = dict(zip(CASES, answers(SCRIPT.name, CASES), strict=True))
    return lambda *case: found[case]


# --- audit ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("policy", "form"), [("as-is", "fp32"), ("bf16", "bf16"), ("fp16", "fp16")])
def test_products_by_phase_are_those_counted_by_hand(find: Find, policy: str, form: str) -> None:
    """The first layer needs no gradient of its input. FP16 is counted as FP16 on a CPU too, as it will run on a GPU."""
    by_phase = find("audit", "plain", policy, 3)["flops_by_phase"]
    expected = {"forward": HIDDEN + HEAD, "dgrad": HEAD, "wgrad": HIDDEN + HEAD}
    assert by_phase == {phase: {form: flops} for phase, flops in expected.items()}


def test_products_belong_to_layers_by_name(find: Find) -> None:
    operations = find("audit", "plain", "bf16", 3)["operations"]
    assert sorted((o["module"], o["phase"], o["flops"]) for o in operations if o["flops"]) == [
        ("head", "dgrad", HEAD),
        ("head", "forward", HEAD),
        ("head", "wgrad", HEAD),
        ("hidden", "forward", HIDDEN),
        ("hidden", "wgrad", HIDDEN),
    ]


def test_every_weight_is_cast_once(find: Find) -> None:
    found = find("audit", "plain", "bf16", 3)
    casts = [(c["module"], c["target"], c["count"]) for c in found["casts"] if c["of"] == "weight"]
    assert sorted(casts) == [("head", "bf16", 2), ("hidden", "bf16", 2)]  # kernel and bias
    assert "A302" not in [f["code"] for f in found["findings"]]


def test_cells_have_their_own_names(find: Find) -> None:
    found = find("audit", "recurrent", "bf16", 2)
    assert {o["module"] for o in found["operations"] if o["flops"]} == {"memory.lstm_cell", "head"}


def test_findings_are_in_the_terms_of_keras(find: Find) -> None:
    (off,) = [f for f in find("audit", "plain", "as-is", 3)["findings"] if f["code"] == "A101"]
    assert "set_dtype_policy" in off["fix"]
    assert off["share"] == 1.0
    (own,) = [f for f in find("audit", "own_head", "bf16", 3)["findings"] if f["code"] == "A103"]
    assert own["modules"] == ["head"]
    assert own["detail"].startswith("the dtype policy of head computes in float32")
    assert own["fix"].startswith('leave out dtype="float32" of this layer')
    assert own["share"] == pytest.approx(3 * HEAD / (2 * HIDDEN + 3 * HEAD))


# --- diagnose ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "policy", "steps"),
    [
        ("healthy", "fp16", 10),
        ("healthy", "bf16", 10),
        ("recurrent", "fp16", 10),
        ("gan", "fp16", 20),
        ("large_gradients", "fp16", 30),
        ("compiled_step", "fp16", 4),
        ("own_loop", "fp16", 10),
    ],
)
def test_healthy_training_has_no_fault(find: Find, case: str, policy: str, steps: int) -> None:
    found = find("diagnose", case, policy, steps)
    assert (found["verdict"], found["faulty_steps"]) == ("healthy", [])
    assert set(found["run"]["effective"]["flops_by_format"]) == {policy}


def test_skips_of_the_first_steps_are_normal(find: Find) -> None:
    found = find("diagnose", "large_gradients", "fp16", 30)
    assert found["num_skipped"] == sum(found["run"]["steps"]["skipped"]) > 2


def test_two_models_in_one_training_step_make_two_steps(find: Find) -> None:
    steps = find("diagnose", "gan", "fp16", 20)["run"]["steps"]
    assert len(steps["loss"]) == 12
    assert [loss["name"] for loss in steps["losses"]] == ["judge", "maker"]


@pytest.mark.parametrize(
    ("case", "policy", "layer", "step"),
    [
        ("squared", "fp16", "power", 1),
        ("squared_later", "fp16", "power", 3),
        ("nested", "fp16", "block.power", 1),
        ("own_mixed", "as-is", "power", 1),
    ],
)
def test_a_planted_overflow_is_named(find: Find, case: str, policy: str, layer: str, step: int) -> None:
    found = find("diagnose", case, policy, 10)
    named = (found["verdict"], found["module"], found["op"], found["phase"], found["step"])
    assert named == ("range_overflow", layer, "pow", "forward", step)
    file, _, line = found["line"].rpartition(":")
    assert Path(file) == SCRIPT
    assert "keras.ops.square(x * factor)" in SCRIPT.read_text(encoding="utf-8").splitlines()[int(line) - 1]
    assert (found["fix"], found["fix_tried"]) == (f"keep {layer} in FP32", True)
    assert found["fix_line"] == f'dtype="float32"  # argument of the layer {layer}'


def test_a_loss_scale_that_is_too_large_is_the_cause(find: Find) -> None:
    found = find("diagnose", "steep", "fp16:loss_scale=static:init_scale=1048576", 10)
    assert (found["verdict"], found["phase"], found["step"]) == ("scale_overflow", "backward", 1)
    assert found["loss_scale"] == 2.0**20
    assert found["fix_tried"]
    assert found["fix_line"].startswith("optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=")


def test_bad_data_is_not_the_fault_of_precision(find: Find) -> None:
    found = find("diagnose", "not_a_number", "fp16", 10)
    assert (found["verdict"], found["module"], found["step"]) == ("invalid_operation", "hidden", 4)
    assert (found["origin"], found["fix"]) == ("entered", "clean the data: no precision helps")


def test_compiled_steps_are_said_to_run_eagerly(find: Find) -> None:
    found = find("diagnose", "compiled_step", "fp16", 4)
    assert found["forced_eager"]


# --- ranges -----------------------------------------------------------------------------------------------------------------------


def by_hand(weights: list[list[Any]]) -> dict[tuple[str, str], np.ndarray]:
    """Return the values of one step of the network in FP64."""
    random = np.random.RandomState(7)
    x, y = random.normal(size=(6 * B, D)).astype("float32")[:B], random.normal(size=6 * B).astype("float32")[:B]
    kernel, bias, last, offset = (np.array(w) for w in weights)
    before = x @ kernel + bias
    hidden = np.maximum(before, 0)
    head = hidden @ last + offset
    of_head = 2 * (head - y[:, None]) / B
    of_hidden = of_head @ last.T
    return {
        ("activations", "net (input)"): x,
        ("activations", "hidden"): hidden,
        ("activations", "head"): head,
        ("activation gradients", "head"): of_head,
        ("activation gradients", "hidden"): of_hidden,
        ("weight gradients", "head.kernel"): hidden.T @ of_head,
        ("weight gradients", "hidden.kernel"): x.T @ (of_hidden * (before > 0)),
        ("weights", "hidden.kernel"): kernel,
        ("updates", "head.kernel"): 0.01 * hidden.T @ of_head,
    }


def test_values_are_counted_as_numpy_counts_them(find: Find) -> None:
    found = find("ranges", "counted", "fp16", 1)
    counted = {(t["kind"], t["name"]): t["histogram"] for t in found["tensors"]}
    for key, values in by_hand(found["last"]["weights"]).items():
        exponents = np.frexp(np.abs(values[values != 0]))[1] - 1
        histogram = counted[key]
        expected = np.bincount(exponents - histogram["first_exponent"], minlength=len(histogram["counts"]))
        assert histogram["counts"] == expected.tolist(), key


def test_a_layer_with_its_own_dtype_is_not_judged(find: Find) -> None:
    tensors = find("ranges", "own_head", "fp16", 2)["tensors"]
    kept = {t["name"]: t["kept_fp32"] for t in tensors if t["kind"] == "activations"}
    assert kept == {"net (input)": False, "hidden": False, "head": True}


# --- fallback ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("case", "layer"), [("squared", "power"), ("nested", "block.power")])
def test_only_the_planted_layer_stays_in_fp32(find: Find, case: str, layer: str) -> None:
    found = find("fallback", case, "fp16", 0)
    assert (found["verdict"], found["kept"], found["suggested"]) == ("found", [layer], f"fp16:fp32_modules={layer}")
    assert math.isinf(float(found["error_before"]))
    assert found["error_after"] <= found["tolerance"]
    assert ("in the script", 'dtype="float32"') in [(n["what"], n["value"]) for n in found["notes"]]


@pytest.mark.parametrize("case", ["healthy", "recurrent"])
def test_healthy_layers_need_no_fp32(find: Find, case: str) -> None:
    found = find("fallback", case, "bf16", 0)
    assert (found["verdict"], found["kept"]) == ("not needed", [])
    assert [m["reason"] for m in found["modules"] if m["reason"]] == []
    assert 0 < found["error_before"] <= found["tolerance"]
