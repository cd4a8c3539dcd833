"""The tape of a Keras step on each backend, against torch's of the same model."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from observed_steps import SCRIPTS, flops, in_torch, moved, observed, products, seconds

from mezzo import cli
from mezzo.launch.keras.products import PRODUCTS
from mezzo.measure.predict.script.observed import ObservedTape
from mezzo.measure.predict.tape_memory import predict_memory
from mezzo.records import PredictRecord, read_record

SCRIPT = SCRIPTS / "keras_steps.py"
OVER_TORCH = {
    ("cnn", "tensorflow"): (0.95, 1.08), ("mlp", "tensorflow"): (1.00, 1.14), ("transformer", "tensorflow"): (0.89, 1.06),
    ("cnn", "jax"): (0.94, 1.04), ("mlp", "jax"): (1.00, 1.07), ("transformer", "jax"): (0.89, 1.05),
}  # fmt: skip
"""The bytes and the time of a step over torch's, as docs/details/traced-scripts.md has them: torch's pooling writes 64-bit indices, and its
attention copies what it transposes."""


@cache
def keras_step(model: str, backend: str, policy: str = "fp32") -> ObservedTape:
    return observed(SCRIPT, model, framework="keras", backend=backend, policy=policy)


@pytest.mark.parametrize(("model", "backend"), OVER_TORCH)
def test_a_compiled_step_computes_what_torchs_does(model: str, backend: str) -> None:
    found, expected = keras_step(model, backend).tapes[0], in_torch(model)
    assert found.batch == 8
    assert products(found) == products(expected)
    over = moved(found) / moved(expected), seconds(found) / seconds(expected)
    assert over == pytest.approx(OVER_TORCH[model, backend], abs=0.006)
    norms = [(op.name, op.shape) for op in expected.operations if "native_batch_norm" in op.name]
    assert [(op.name, op.shape) for op in found.operations if "native_batch_norm" in op.name] == norms


def test_a_gather_reads_rows_and_its_gradient_is_the_table_in_jax_and_rows_in_tensorflow() -> None:
    table, rows = 5000 * 64 * 4, 8 * 20 * 64 * 4
    for backend, written in (("jax", table), ("tensorflow", rows)):
        operations = keras_step("embedded", backend).tapes[0].operations
        gather = next(op for op in operations if op.name == "embedding")
        assert gather.written_bytes == rows
        gradients = [op.written_bytes for op in operations if op.phase != "forward" and op.written_bytes >= rows]
        assert max(gradients) == written, backend


@pytest.mark.parametrize("backend", ["jax", "tensorflow"])
def test_a_mixed_policy_halves_what_products_move_and_casts_each_weight(backend: str) -> None:
    wide, half = (keras_step("mlp", backend, policy).tapes[0] for policy in ("fp32", "bf16"))
    assert {op.format for op in half.operations if op.flops} == {"bf16"}
    assert flops(half) == flops(wide)
    wide_bytes, half_bytes = (sum(op.read_bytes for op in t.operations if op.flops) for t in (wide, half))
    assert half_bytes == pytest.approx(wide_bytes / 2, rel=0.01)
    weights = [784 * 256, 256 * 256, 256 * 10]
    casts = [op for op in half.operations if op.read_bytes == 2 * op.written_bytes and op.phase == "forward"]
    assert {op.read_bytes for op in casts} >= {4 * size for size in weights}


def test_jax_traces_another_batch_and_tensorflows_graph_is_of_its_own() -> None:
    assert [tape.batch for tape in keras_step("mlp", "jax").tapes] == [8, 4]
    fixed = keras_step("mlp", "tensorflow")
    assert (len(fixed.tapes), fixed.no_other_batch) == (1, "the batch is fixed in the graph of its step")


def test_on_torch_the_step_is_recorded_as_torchs_with_its_memory() -> None:
    found, expected = keras_step("mlp", "torch"), in_torch("mlp")
    assert not found.no_memory
    tape = found.tapes[0]
    assert products(tape) == products(expected)
    assert moved(tape) == pytest.approx(moved(expected), rel=0.05)
    weights = sum(block.size_bytes for block in tape.blocks if block.kind == "parameters")
    assert weights == 4 * sum(n * m + m for n, m in ((784, 256), (256, 256), (256, 10)))
    allocated = [predict_memory(one, workspace_bytes=0).allocated_bytes for one in (tape, expected)]
    assert allocated[0] == pytest.approx(allocated[1], rel=0.1)


@pytest.mark.parametrize(
    ("model", "backend", "why"),
    [
        ("eager", "tensorflow", "its steps run eagerly on TensorFlow"),
        ("recurrent", "tensorflow", "products are computed in a loop of TensorFlow"),
        ("loop", "jax", "its training loop is its own, and on JAX the operations of fit alone are seen"),
    ],
)
def test_a_step_that_its_backend_does_not_show_is_refused_by_name(model: str, backend: str, why: str) -> None:
    assert keras_step(model, backend).error.startswith(why)


def test_a_loop_of_known_length_runs_as_often_as_it_does() -> None:
    tape = keras_step("recurrent", "jax").tapes[0]
    assert sum(op.flops for op in tape.operations if op.phase == "forward") == 2 * 8 * (7 * (5 * 6 + 6 * 6) + 6 * 10)


def test_the_command_predicts_without_memory_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    assert cli.main(["predict", "--gpus", "t4", "--out", str(tmp_path), "--batch", "64", str(SCRIPT), "mlp"]) == 0
    record = read_record(tmp_path / "record.json")
    assert isinstance(record, PredictRecord)
    assert (record.batch, record.unit, record.optimizer) == (64, "samples", "SGD")
    by_policy = {one.policy: one for one in record.predictions}
    assert not by_policy["bf16"].possible
    for policy in ("fp32", "fp16"):
        one = by_policy[policy]
        assert one.throughput > 0
        assert (one.fits, one.allocated_bytes, one.largest_batch) == (None, 0, None)
        assert one.no_memory.startswith("the compiler plans a step's buffers")
    notes = {note.what: note.value for note in record.assumptions}
    assert notes["operations"] == "of one real step of Keras on this machine"
    assert notes["memory"] == "not predicted"
    assert "too much" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("operation", "inputs", "outputs", "settings", "measured", "flops_of"),
    [
        ("Einsum", [(2, 3, 4, 5), (5, 6)], [(2, 3, 4, 6)], {"equation": b"...ij,jk->...ik"}, ("mm", (1, 24, 6, 5, 0)), 720),
        ("Einsum", [(7, 4, 5), (7, 5, 6)], [(7, 4, 6)], {"equation": "bij,bjk->bik"}, ("bmm", (7, 4, 6, 5, 0)), 840),
        (
            "Conv2DBackpropInput", [(4,), (3, 3, 8, 16), (2, 5, 5, 16)], [(2, 10, 10, 8)], {"data_format": b"NHWC"},
            ("convolution_input_gradient", (1, 200, 8, 144, 9)), 2 * 5 * 5 * 16 * 3 * 3 * 8,  # a stride of 2: one place in four
        ),
        (
            "DepthwiseConv2dNative", [(2, 8, 10, 10), (3, 3, 8, 1)], [(2, 8, 10, 10)], {"data_format": b"NCHW"},
            ("convolution", (8, 200, 1, 9, 9)), 2 * 8 * 10 * 10 * 9,
        ),
    ],
)  # fmt: skip
def test_a_product_of_tensorflow_has_its_size_and_its_flops(
    operation: str, inputs: Any, outputs: Any, settings: dict[str, Any], measured: Any, flops_of: int
) -> None:
    product = PRODUCTS[operation]
    assert product.measured(inputs, outputs, settings.get) == measured
    assert product.flops(inputs, outputs, settings.get) == 2 * flops_of


def test_fp8_is_refused_before_the_script_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["predict", "--policies", "fp8", "--out", str(tmp_path), str(SCRIPT), "mlp"]) == 2
    assert "has no dtype policy in Keras" in capsys.readouterr().err
