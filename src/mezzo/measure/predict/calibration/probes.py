"""Small trainings that a calibration times: kinds of layers, each at several sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Probe:
    """A training of a few steps."""

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Tensor, Tensor]]
    """The input, and the classes it belongs to."""
    optimizer: Callable[[Any], torch.optim.Optimizer]


class _Block(nn.Module):
    """A bottleneck of depthwise and pointwise convolutions with a gate on its channels."""

    def __init__(self, width: int, window: int, stride: int = 1) -> None:
        super().__init__()
        self.whole = stride == 1
        wide = 4 * width
        act = nn.SiLU if window == 3 else nn.Hardswish
        self.widen = nn.Sequential(nn.Conv2d(width, wide, 1, bias=False), nn.BatchNorm2d(wide), act())
        self.mix = nn.Sequential(
            nn.Conv2d(wide, wide, window, stride=stride, padding=window // 2, groups=wide, bias=False),
            nn.BatchNorm2d(wide),
            act(inplace=True),
        )
        self.gate = nn.Sequential(
            nn.AdaptiveAvgPool2d(1),
            nn.Conv2d(wide, width, 1),
            act(),
            nn.Conv2d(width, wide, 1),
            nn.Sigmoid() if window == 3 else nn.Hardsigmoid(),
        )
        self.narrow = nn.Sequential(nn.Conv2d(wide, width, 1, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.mix(self.widen(x))
        found: Tensor = self.narrow(y * self.gate(y))
        return x + found if self.whole else found


class _Attention(nn.Module):
    """A layer of a transformer."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.joint, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        size = (*x.shape[:2], self.heads, x.shape[2] // self.heads)
        query, key, value = (t.view(size).transpose(1, 2) for t in self.joint(self.first(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).reshape(x.shape)
        x = x + self.drop(self.out(mixed))
        result: Tensor = x + self.drop(self.wide(self.second(x)))
        return result


class _Language(nn.Module):
    """An embedding, layers of a transformer and a product over the vocabulary."""

    def __init__(self, width: int, words: int, dropout: float) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.layers = nn.Sequential(*(_Attention(width, width // 32, dropout) for _ in range(2)))
        self.head = nn.Linear(width, words)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.layers(self.words(x))).flatten(0, 1)
        return result


class _Recurrent(nn.Module):
    """A recurrent layer, whose last state is classified."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer, self.head = nn.LSTM(width, width, batch_first=True), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.layer(x)[0][:, -1])
        return result


def _part(a: int, b: int, window: int, stride: int) -> list[nn.Module]:
    conv = nn.Conv2d(a, b, window, stride=stride, padding=window // 2, bias=False)
    return [conv, nn.BatchNorm2d(b), nn.ReLU(inplace=True)]


def _bottlenecks(width: int) -> nn.Module:
    layers = [
        *_part(3, width, 7, 4),
        *_part(width, 4 * width, 1, 1),
        *_part(4 * width, 2 * width, 1, 1),
        *_part(2 * width, 2 * width, 3, 2),
        *_part(2 * width, 8 * width, 1, 1),
        *_part(8 * width, 4 * width, 1, 1),
        *_part(4 * width, 4 * width, 3, 2),
        *_part(4 * width, 16 * width, 1, 2),
    ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16 * width, 10))


def _convolutional(width: int) -> nn.Module:
    return nn.Sequential(
        *_part(3, width, 7, 2),
        nn.MaxPool2d(3, 2, 1),
        *_part(width, 2 * width, 3, 1),
        *_part(2 * width, 2 * width, 1, 1),
        *_part(2 * width, 4 * width, 3, 2),
        *_part(4 * width, 8 * width, 3, 2),
        nn.MaxPool2d(2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8 * width, 10),
    )


def _mobile(width: int, window: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, width, 3, stride=2, padding=1),
        _Block(width, window),
        _Block(width, window, stride=2),
        nn.AvgPool2d(2),
        _Block(width, window),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(width, 10),
    )


def _dense(width: int, activation: Callable[[], nn.Module], depth: int) -> nn.Module:
    layers = [part for _ in range(depth) for part in (nn.Linear(width, width), activation(), nn.Dropout(0.1))]
    return nn.Sequential(*layers, nn.Linear(width, 10))


def _pictures(batch: int, size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, 3, size, size), torch.randint(10, (batch,))


def _vectors(*size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(*size), torch.randint(10, size[:1])


def _words(batch: int, length: int, words: int) -> tuple[Tensor, Tensor]:
    return torch.randint(words, (batch, length)), torch.randint(words, (batch * length,))


def probes(scale: int = 1) -> Iterator[Probe]:
    """Yield the trainings, their batches ``scale`` times as large: what keeps a CPU's core busy does not fill a GPU."""
    sgd: Any = partial(torch.optim.SGD, lr=1e-3, momentum=0.9)
    adam: Any = partial(torch.optim.AdamW, lr=1e-4)
    for width, batch, size in ((16, 4, 64), (32, 4, 96), (32, 16, 64), (64, 8, 64)):
        yield Probe("convolutional", partial(_convolutional, width), partial(_pictures, batch * scale, size), sgd)
    for width, batch, size in ((32, 8, 96), (64, 4, 64), (128, 4, 64)):
        yield Probe("bottlenecks", partial(_bottlenecks, width), partial(_pictures, batch * scale, size), adam)
    for width, batch, size, window in ((8, 8, 64, 3), (16, 4, 64, 3), (24, 8, 96, 5), (48, 16, 32, 3), (96, 16, 32, 5)):
        yield Probe("mobile", partial(_mobile, width, window), partial(_pictures, batch * scale, size), adam)
    for width, batch, length, words, dropout in (
        (128, 4, 32, 1000, 0.0),
        (192, 8, 128, 2000, 0.1),
        (384, 4, 128, 8000, 0.1),
    ):
        yield Probe(
            "transformer",
            partial(_Language, width, words, dropout),
            partial(_words, batch * scale, length, words),
            adam,
        )
    for width, batch, depth in ((256, 32, 3), (1024, 16, 3), (2048, 128, 3), (4096, 4, 1)):
        yield Probe("dense", partial(_dense, width, nn.ReLU, depth), partial(_vectors, batch * scale, width), sgd)
        yield Probe("dense", partial(_dense, width, nn.Tanh, depth), partial(_vectors, batch * scale, width), adam)
    yield Probe("large", partial(nn.Linear, 6144, 6144), partial(_vectors, 4 * scale, 6144), adam)
    for width, batch, length in ((64, 16, 16), (128, 16, 32), (256, 32, 32)):
        yield Probe("recurrent", partial(_Recurrent, width), partial(_vectors, batch * scale, length, width), adam)


def loss_of(model: nn.Module, inputs: tuple[Tensor, Tensor]) -> Tensor:
    """Return the loss of ``model``."""
    return F.cross_entropy(model(inputs[0]), inputs[1])
