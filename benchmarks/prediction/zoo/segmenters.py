"""mmsegmentation's networks: a dilated ResNet with a head and an auxiliary head (``configs/_base_/models``, version 0.x).

FCN, PSPNet, DeepLabV3 and DeepLabV3+ on ResNets of 18, 50 or 101 layers, whose last stages keep an eighth, a sixteenth or a
thirty-second of the resolution. Both losses are computed at the size of the labels.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.prediction.zoo.blocks import convolved
from benchmarks.prediction.zoo.trainings import installed

_CLASSES = 19
"""Of Cityscapes."""
_NAME = re.compile(r"(FCN|FCN\(D6\)|PSPNet|DeepLabV3\+?) R-(18|50|101)(b?)-D(8|16|32)$")


def segmenter(name: str) -> Callable[[], nn.Module] | None:
    """Return a function that builds the network of a row; None for other networks."""
    found = _NAME.match(name)
    if found is None:
        return None
    head, depth, plain, stride = found.groups()
    return lambda: _Segmenter(head, int(depth), deep_stem=not plain, stride=int(stride))


def pictures(height: int, width: int, n: int) -> dict[str, Tensor]:
    return {"x": torch.empty(n, 3, height, width), "y": torch.empty(n, height, width, dtype=torch.long)}


def two_losses(model: nn.Module, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Any]:
    """Return the loss of the head and 0.4 of the auxiliary head's."""
    losses = []
    for scores in model(inputs["x"]):
        large = _resized(scores.float(), inputs["y"].shape[-2:])
        losses.append(F.cross_entropy(large, inputs["y"], reduction="none").mean())
    return losses[0] + 0.4 * losses[1], None


def _resized(x: Tensor, size: torch.Size) -> Tensor:
    return F.interpolate(x, size, mode="bilinear", align_corners=False)


def _separable(before: int, after: int, dilation: int = 1) -> nn.Sequential:
    return nn.Sequential(convolved(before, before, 3, dilation=dilation, groups=before), convolved(before, after, 1))


def _pool(size: int, channels: int, width: int) -> nn.Sequential:
    return nn.Sequential(nn.AdaptiveAvgPool2d(size), convolved(channels, width, 1))


class _Fcn(nn.Module):
    def __init__(self, channels: int, width: int, dilation: int, *, convolutions: int) -> None:
        super().__init__()
        pairs = pairwise([channels, *[width] * convolutions])
        self.middle = nn.Sequential(*[convolved(a, b, 3, dilation=dilation) for a, b in pairs])
        self.joined = convolved(channels + width, width, 3) if convolutions > 1 else None

    def forward(self, x: Tensor, _: Tensor) -> Any:
        found = self.middle(x)
        return found if self.joined is None else self.joined(torch.cat([x, found], 1))


class _Pyramid(nn.Module):
    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.pools = nn.ModuleList([_pool(size, channels, width) for size in (1, 2, 3, 6)])
        self.joined = convolved(channels + 4 * width, width, 3)

    def forward(self, x: Tensor, _: Tensor) -> Any:
        parts = [_resized(pool(x), x.shape[-2:]) for pool in self.pools]
        return self.joined(torch.cat([x, *parts], 1))


class _Atrous(nn.Module):
    """Parallel dilated convolutions; with ``early`` channels also a decoder at a quarter of the resolution."""

    def __init__(self, channels: int, width: int, early: int | None) -> None:
        super().__init__()
        self.pool = _pool(1, channels, width)
        made = partial(convolved, channels, width, 3) if early is None else partial(_separable, channels, width)
        wide = [made(dilation=dilation) for dilation in (12, 24, 36)]
        self.parts = nn.ModuleList([convolved(channels, width, 1), *wide])
        self.joined = convolved(5 * width, width, 3)
        self.narrow = None if early is None else convolved(early, 48, 1)
        self.decoder = nn.Sequential(_separable(width + 48, width), _separable(width, width)) if early else None

    def forward(self, x: Tensor, early: Tensor) -> Any:
        parts = [_resized(self.pool(x), x.shape[-2:]), *(part(x) for part in self.parts)]
        found = self.joined(torch.cat(parts, 1))
        if self.narrow is None or self.decoder is None:
            return found
        beside = self.narrow(early)
        return self.decoder(torch.cat([_resized(found, beside.shape[-2:]), beside], 1))


class _Segmenter(nn.Module):
    """A dilated ResNet of timm with the head of a name and an auxiliary head."""

    def __init__(self, head: str, depth: int, *, deep_stem: bool, stride: int) -> None:
        super().__init__()
        net = installed("timm").create_model(f"resnet{depth}", output_stride=stride)
        stem = [net.conv1, net.bn1, net.act1]
        if deep_stem:
            stem = [convolved(3, 32, 3, stride=2), convolved(32, 32, 3), convolved(32, 64, 3)]
        self.first = nn.Sequential(*stem, net.maxpool, net.layer1)
        self.middle, self.last = nn.Sequential(net.layer2, net.layer3), net.layer4
        channels, width = (512, 128) if depth == 18 else (2048, 512)
        dilation = 6 if "D6" in head else 1
        if head.startswith("FCN"):
            self.head: nn.Module = _Fcn(channels, width, dilation, convolutions=2)
        elif head == "PSPNet":
            self.head = _Pyramid(channels, width)
        else:
            self.head = _Atrous(channels, width, channels // 8 if head.endswith("+") else None)
        self.scores = nn.Sequential(nn.Dropout2d(0.1), nn.Conv2d(width, _CLASSES, 1))
        self.beside = _Fcn(channels // 2, width // 2, dilation, convolutions=1)
        self.auxiliary = nn.Sequential(nn.Dropout2d(0.1), nn.Conv2d(width // 2, _CLASSES, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first = self.first(x)
        middle = self.middle(first)
        last = self.last(middle)
        return self.scores(self.head(last, first)), self.auxiliary(self.beside(middle, first))
