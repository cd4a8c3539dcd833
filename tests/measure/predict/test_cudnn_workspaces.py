"""The buffers of Winograd's convolution, counted by hand, and where a tape has them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mezzo.measure.predict.memory import predict_memory
from mezzo.measure.predict.tape import Tape
from mezzo.measure.predict.training import record_training
from mezzo.policy import Policy

# Two images of 8x8: 2 x 2 x 2 tiles of 4x4, each with 36 values a channel; 36 values a pair of channels.
VALUES = 36 * (8 * (4 + 6) + 4 * 6)


def _loss(model: nn.Module, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Any]:
    return model(inputs["x"]).float().sum(), None


def _tape(layer: nn.Module, policy: str, size: int = 8) -> Tape:
    return record_training(
        lambda: nn.Sequential(nn.Conv2d(3, 4, 1), layer),
        lambda n: {"x": torch.empty(n, 3, size, size)},
        _loss,
        batch=2,
        optimizer=partial(torch.optim.SGD, lr=0.1),
        policy=Policy.parse(policy),
    )


def _tried_bytes(tape: Tape) -> list[int]:
    return [block.size_bytes for block in tape.blocks if block.kind == "workspaces" and block.size_bytes]


@pytest.fixture
def trying(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)


@pytest.mark.usefixtures("trying")
@pytest.mark.parametrize(
    ("policy", "found"),
    [
        # forward and backward of two steps: FP32 goes on with this algorithm
        ("fp32", [4 * VALUES] * 4),
        # 16 bits only try it in the first step
        ("bf16", [2 * VALUES] * 2),
    ],
)
def test_a_convolution_of_three_by_three_has_winograds_buffers(policy: str, found: list[int]) -> None:
    assert _tried_bytes(_tape(nn.Conv2d(4, 6, 3, padding=1), policy)) == found


@pytest.mark.usefixtures("trying")
def test_a_tile_that_is_not_full_counts_whole() -> None:
    # 9x9 without padding leaves 7x7: again 2 x 2 tiles
    assert _tried_bytes(_tape(nn.Conv2d(4, 6, 3), "fp32", size=9)) == [4 * VALUES] * 4


@pytest.mark.usefixtures("trying")
@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(4, 6, 1),
        nn.Conv2d(4, 6, 3, stride=2),
        nn.Conv2d(4, 6, 3, dilation=2),
        nn.Conv2d(4, 4, 3, groups=4),
        nn.ConvTranspose2d(4, 6, 3),
        nn.Conv2d(4, 6, (3, 1)),
    ],
    ids=str,
)
def test_other_convolutions_have_none(layer: nn.Module) -> None:
    assert _tried_bytes(_tape(layer, "fp32")) == []


def test_nothing_is_tried_unless_the_training_lets_cudnn() -> None:
    assert _tried_bytes(_tape(nn.Conv2d(4, 6, 3, padding=1), "fp32")) == []


def test_the_buffers_count_at_the_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.Conv2d(4, 256, 3, padding=1)
    plain = predict_memory(_tape(layer, "fp32"), workspace_bytes=0).allocated_bytes
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    tape = _tape(layer, "fp32")
    assert plain < max(_tried_bytes(tape)) < predict_memory(tape, workspace_bytes=0).allocated_bytes
