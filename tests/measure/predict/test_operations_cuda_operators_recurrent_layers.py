"""Recurrent layers in a trace without numbers: cuDNN's products, the same in every format, and packed batches as padded ones."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from helpers_predict import recorded, tape_of
from mezzo.measure.predict.operations import cuda_operators
from mezzo.measure.predict.script.batches import longest_sequences
from mezzo.measure.predict.tape import TrainingTape

STEPS, BATCH, WIDTH, HIDDEN, LAYERS = 7, 4, 5, 6, 2

SCRIPT = """
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.{kind}(5, 6, batch_first=True, bidirectional={directions} == 2)
        self.head = nn.Linear(6 * {directions}, 2)

    def forward(self, x, lengths):
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        out, _ = self.rnn(packed)
        return self.head(pad_packed_sequence(out, batch_first=True)[0])

net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(4):
    loss = net(torch.randn(4, 7, 5), torch.randint(1, 8, (4,))).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def _shapes(value: Any) -> Any:
    if isinstance(value, PackedSequence):
        return tuple(value.data.shape), tuple(value.batch_sizes.shape)
    return tuple(value.shape) if isinstance(value, Tensor) else tuple(map(_shapes, value))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize(
    "settings", [{}, {"batch_first": True}, {"bidirectional": True, "dropout": 0.5, "bias": False}]
)
@pytest.mark.parametrize("packed", [False, True])
def test_results_and_gradients_have_the_shapes_of_the_layer(
    kind: type[nn.RNNBase], settings: dict[str, bool], packed: bool
) -> None:
    """All sequences are as long as the batch, so the shapes are those of torch's own layer on numbers."""
    layer = kind(WIDTH, HIDDEN, num_layers=LAYERS, **settings)
    first = settings.get("batch_first", False)

    def run(layer: nn.Module, x: Tensor) -> tuple[Any, Any]:
        given = pack_padded_sequence(x, torch.tensor([STEPS] * BATCH), batch_first=first) if packed else x
        out, state = layer(given)
        padded = pad_packed_sequence(out, batch_first=first)[0] if packed else out
        padded.sum().backward()
        return (_shapes(out), _shapes(padded), _shapes(state)), [p.grad.shape for p in layer.parameters()]

    x = torch.randn((BATCH, STEPS, WIDTH) if first else (STEPS, BATCH, WIDTH))
    expected = run(layer, x)
    with FakeTensorMode() as mode, cuda_operators(), longest_sequences(lambda: None):
        fake = kind(WIDTH, HIDDEN, num_layers=LAYERS, **settings)
        assert run(fake, mode.from_tensor(x)) == expected


def _products(tape: TrainingTape, *formats: str) -> Counter[tuple[int, int]]:
    """Count products by their number of results and their depth."""
    found = [op.shape for op in tape.operations if op.module == "rnn" and op.shape.depth and op.format in formats]
    return Counter((shape.products * shape.rows * shape.columns, shape.depth) for shape in found)


@pytest.mark.parametrize(
    ("kind", "gates", "policy", "directions"),
    [
        ("LSTM", 4, "fp32", 1),
        ("LSTM", 4, "fp16", 2),
        ("GRU", 3, "bf16", 1),
        ("GRU", 3, "fp32", 2),
        ("RNN", 1, "fp16", 2),
    ],
)
def test_a_layer_is_cudnns_products_in_every_format(
    tmp_path: Path, kind: str, gates: int, policy: str, directions: int
) -> None:
    text = SCRIPT.replace("{kind}", kind).replace("{directions}", str(directions))
    made = recorded(tmp_path, text, policy=policy, steps=2)
    width, positions = gates * HIDDEN, BATCH * STEPS
    expected = Counter({(positions * width, WIDTH): 1})  # the inputs of all positions
    expected[(BATCH * width, HIDDEN)] += STEPS  # the state of each
    expected[(BATCH * HIDDEN, width)] += STEPS  # its gradient
    expected[(width * WIDTH, positions)] += 1  # the gradients of the weights
    expected[(width * HIDDEN, positions)] += 1
    assert _products(tape_of(made), policy) == Counter({shape: directions * count for shape, count in expected.items()})
    assert made.sized_at == ["train.py:13"]
