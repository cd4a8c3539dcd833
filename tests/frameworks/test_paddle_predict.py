"""The tape of a Paddle step against torch's of the same model, and its backward pass against the nodes of Paddle's own graph."""

from __future__ import annotations

import warnings
from contextlib import suppress
from functools import cache
from pathlib import Path

import pytest
from observed_steps import SAME, flops, in_torch, moved, observed, products, seconds
from paddle_runs import batches, network, paddle

from mezzo import cli
from mezzo.measure.predict.script.observed import ObservedTape
from mezzo.observe.settings import StopScript
from mezzo.policy import Policy
from mezzo.records import PredictRecord, read_record

OVER_TORCH = {"cnn": (0.95, 1.12), "mlp": (1.00, 1.20), "embedded": (0.99, 1.17), "transformer": (1.00, 1.17)}
"""The bytes and the time of a step over torch's, as docs/details/traced-scripts.md has them: torch's pooling writes 64-bit indices."""
LOOP = """
import sys
import paddle

batch = int(sys.argv[1])
model = paddle.nn.Sequential(paddle.nn.Linear(20, 30), paddle.nn.ReLU(), paddle.nn.Linear(30, 5))
optimizer = paddle.optimizer.Adam(parameters=model.parameters())
for _ in range(6):
    for _ in range({batches}):
        paddle.nn.functional.cross_entropy(model(paddle.rand([batch, 20])), paddle.randint(0, 5, [batch])).backward()
    optimizer.step()
    optimizer.clear_grad()
"""


@cache
def step(model: str, policy: str = "fp32") -> ObservedTape:
    return observed(SAME, "paddle", model, framework="paddle", policy=policy)


@pytest.mark.parametrize("model", OVER_TORCH)
def test_a_step_computes_what_torchs_does(model: str) -> None:
    found, expected = step(model), in_torch(model)
    assert (found.backward, found.tapes[0].batch, found.num_batches) == ("derived", 8, 1)
    assert products(found.tapes[0]) == products(expected)
    over = moved(found.tapes[0]) / moved(expected), seconds(found.tapes[0]) / seconds(expected)
    assert over == pytest.approx(OVER_TORCH[model], abs=0.006)


def test_under_o1_listed_operations_are_recast_and_every_operand_is_cast() -> None:
    wide, half = (step("mlp", policy).tapes[0] for policy in ("fp32", "bf16"))
    assert {op.format for op in half.operations if op.flops} == {"bf16"}
    assert flops(half) == flops(wide)
    assert moved(half) == pytest.approx(moved(in_torch("mlp", "fp16")), rel=0.02)
    casts = [
        op.read_bytes for op in half.operations if op.name == "cast" and op.phase == "forward" and op.format == "fp32"
    ]
    assert {4 * 784 * 256, 4 * 256 * 256, 4 * 256 * 10} <= set(casts)


NODES = {
    "Conv2d": "convolution_weight_gradient",
    "BatchNorm": "native_batch_norm_backward",
    "Relu": "relu_grad",
    "Flatten": "",
    "Linear": "mm",
    "Matmul": "mm",
    "Add": "",
    "CrossEntropy": "cross_entropy_with_softmax_grad",
    "Mean": "mean_all_grad",
}
"""What a node of Paddle's graph computes, by a part of its name; views and sums of biases have no kernel of their own."""


def test_the_derived_backward_pass_is_that_of_paddles_graph(tmp_path: Path) -> None:
    nodes: dict[int, str] = {}

    def train() -> None:
        model = network()
        optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())
        for images, labels in batches(3):
            loss = paddle.nn.functional.cross_entropy(model(images), labels)
            waiting = [loss.grad_fn]
            while waiting:
                node = waiting.pop()
                if node is not None and node.node_ptr() not in nodes:
                    nodes[node.node_ptr()] = node.name()
                    waiting += node.next_functions
            loss.backward()
            optimizer.step()
            optimizer.clear_grad()

    from mezzo.launch.paddle import training

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with training(Policy.parse("fp32"), seed=0) as told, suppress(StopScript):
            told.begin_tape(tmp_path / "tape")
            train()
        told.close_update()
    found = ObservedTape.read(tmp_path / "tape")
    assert found is not None
    names = {name for name in nodes.values() if "Accumulation" not in name}
    expected = {next(op for part, op in NODES.items() if part in name) for name in names} - {""}
    derived = {op.name for op in found.tapes[0].operations if op.phase == "backward"}
    assert expected <= derived
    assert derived - expected <= {"sum", "add_grad"}


@pytest.mark.parametrize("num_batches", [1, 2])
def test_a_script_whose_argument_sets_the_batch_is_predicted_at_any(
    num_batches: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(LOOP.format(batches=num_batches), encoding="utf-8")
    words = ["predict", "--gpus", "a100", "--policies", "fp32,bf16", "--out", str(tmp_path / "out")]
    assert cli.main([*words, "--batch", "4096", str(script), "{batch}"]) == 0
    record = read_record(tmp_path / "out" / "record.json")
    assert isinstance(record, PredictRecord)
    assert (record.batch, record.optimizer, record.no_other_batch) == (4096, "Adam", "")
    one = record.predictions[0]
    assert (one.fits, one.largest_batch) == (None, None)
    assert one.no_memory.startswith("Paddle's allocator")
    assert one.throughput == pytest.approx(num_batches * 4096 / one.step_ms * 1e3)
    assert "-" in capsys.readouterr().out
    words = ["predict", "--gpus", "a100", "--out", str(tmp_path / "other"), "--batch", "64", str(script), "16"]
    assert cli.main(words) == 2
    assert "its own batch has 16 samples" in capsys.readouterr().err


def test_a_recurrent_layer_is_refused_by_name(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    text = LOOP.format(batches=1).replace(
        "paddle.nn.Linear(20, 30), paddle.nn.ReLU(),", "Last(), paddle.nn.Linear(20, 30),"
    )
    layer = "class Last(paddle.nn.Layer):\n    def __init__(self):\n        super().__init__()\n        self.rnn = paddle.nn.GRU(20, 20)\n"
    call = "    def forward(self, x):\n        return self.rnn(x.unsqueeze(1))[0].squeeze(1)\n"
    script.write_text(text.replace("batch = ", f"{layer}{call}\nbatch = "), encoding="utf-8")
    assert observed(script, "8", framework="paddle").error.startswith("a recurrent layer is one operation of Paddle")
