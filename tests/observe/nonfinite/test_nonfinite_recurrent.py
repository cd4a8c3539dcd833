"""An overflow inside an emulated recurrent layer is located as in torch: the module, its operation, the line that calls it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import mezzo
from helpers_diagnose import source_of

ROWS, LENGTHS, WIDTH, HIDDEN = 3, [5, 3, 2], 4, 6
STEEP = 3e4  # a weight whose product with the gradient of 100 of each output leaves FP16


class Net(nn.Module):
    """A layer that gives zeros, and a recurrent layer that is fine unless a fault is planted."""

    def __init__(self, rnn: nn.Module, *, packed: bool) -> None:
        super().__init__()
        self.first, self.rnn = nn.Linear(WIDTH, WIDTH, bias=False), rnn
        self.cell, self.packed = isinstance(rnn, nn.RNNCellBase), packed
        self.shift = 0.0
        with torch.no_grad():
            self.first.weight.zero_()
            for weight in rnn.parameters():
                weight.mul_(0.3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) + self.shift
        if self.cell:
            state: Any = None
            for place in range(x.shape[1]):
                state = self.rnn(x[:, place], state)  # here
            output: Tensor = state[0] if isinstance(state, tuple) else state
            return output
        if self.packed:
            packed = pack_padded_sequence(x, LENGTHS, batch_first=True)
            padded: Tensor = pad_packed_sequence(self.rnn(packed)[0])[0]  # here
            return padded
        returned: Tensor = self.rnn(x)[0]  # here
        return returned


def _reads_the_input(name: str) -> bool:
    return name.startswith("weight_ih_l0") or name == "weight_ih"


def plant_dgrad(model: Net) -> None:
    """The gradient of the layer's input overflows: steep weights, and an input of zeros that hides them from the forward pass."""
    with torch.no_grad():
        for name, weight in model.rnn.named_parameters():
            if _reads_the_input(name):
                weight.fill_(STEEP)


def plant_wgrad(model: Net) -> None:
    """The gradient of the layer's weights overflows: large inputs that weights of zero hide from the forward pass."""
    model.shift = 6e4
    with torch.no_grad():
        for name, weight in model.rnn.named_parameters():
            if _reads_the_input(name):
                weight.zero_()


def plant_forward(model: Net) -> None:
    """The layer's output overflows, where nothing bounds it."""
    model.shift = 100.0
    plant_dgrad(model)


class Planted(NamedTuple):
    kind: Callable[..., nn.Module]
    op: str
    settings: dict[str, Any] = {}
    packed: bool = False


LAYERS = [
    Planted(nn.LSTM, "lstm"),
    Planted(nn.GRU, "gru"),
    Planted(nn.RNN, "rnn_tanh"),
    Planted(nn.RNN, "rnn_relu", {"nonlinearity": "relu"}),
    Planted(nn.LSTM, "lstm", {"bidirectional": True}),
    Planted(nn.GRU, "gru", {"bidirectional": True}),
    Planted(nn.LSTM, "lstm", {"num_layers": 2}),
    Planted(nn.GRU, "gru", {"num_layers": 2, "dropout": 0.2}),
    Planted(nn.LSTM, "lstm", packed=True),
    Planted(nn.GRU, "gru", packed=True),
    Planted(nn.RNN, "rnn_tanh", packed=True),
    Planted(nn.LSTMCell, "lstm_cell"),
    Planted(nn.GRUCell, "gru_cell"),
    Planted(nn.RNNCell, "rnn_tanh_cell"),
    Planted(nn.RNNCell, "rnn_relu_cell", {"nonlinearity": "relu"}),
]
CASES = [
    *(
        (layer, plant, "backward")
        for layer in LAYERS
        for plant in (plant_dgrad, plant_wgrad)[: 1 + (not layer.settings)]
    ),
    *((layer, plant_forward, "forward") for layer in LAYERS if "relu" in layer.op),
]


def _name(value: Any) -> str:
    if isinstance(value, Planted):
        return "-".join([value.op, *map(str, value.settings), *(["packed"] if value.packed else [])])
    return value if isinstance(value, str) else value.__name__.removeprefix("plant_")


@pytest.mark.parametrize(("layer", "plant", "phase"), CASES, ids=_name)
def test_an_overflow_inside_a_recurrent_layer_is_the_layers(
    layer: Planted, plant: Callable[[Net], None], phase: str
) -> None:
    torch.manual_seed(0)
    cell = layer.kind.__name__.endswith("Cell")  # type: ignore[attr-defined]
    rnn = layer.kind(WIDTH, HIDDEN, **({} if cell else {"batch_first": True}), **layer.settings)
    model = Net(rnn, packed=layer.packed)
    plant(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def train() -> None:
        (100 * model(torch.ones(ROWS, LENGTHS[0], WIDTH)).float()).sum().backward()
        optimizer.step()

    record = mezzo.diagnose(train, policy="fp16:arithmetic=emulated:loss_scale=none")
    found = record.perhaps, record.module, record.op, record.phase, record.step
    assert found == ("range_overflow", "rnn", layer.op, phase, 1), record.detail
    assert source_of(record.line).endswith("# here")
    where = f"the backward pass of {layer.op}()" if phase == "backward" else f"{layer.op}()"
    assert record.detail.startswith(f"{where} reaches ")
