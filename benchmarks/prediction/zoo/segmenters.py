"""mmsegmentation's networks: a dilated ResNet with a head and an auxiliary head (``configs/_base_/models``, version 0.x).

FCN, PSPNet, DeepLabV3 and DeepLabV3+ on ResNets of 18, 50 or 101 layers, whose last stages keep an eighth, a sixteenth or a
thirty-second of the resolution. Both losses are computed at the size of the labels.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.prediction.zoo.named import installed

_CLASSES = 19
"""Of Cityscapes."""
_NAME = re.compile(r"(FCN|FCN\(D6\)|PSPNet|DeepLabV3\+?) R-(18|50|101)(b?)-D(8|16|32)$")


def segmenter(name: str) -> Any:
    """Return a function that builds the network of a row; None for other networks."""
    found = _NAME.match(name)
    if found is None:
        return None
    head, depth, plain, stride = found.groups()
    return lambda: Segmenter(head, int(depth), deep_stem=not plain, stride=int(stride))


def pictures(height: int, width: int, n: int) -> dict[str, Tensor]:
    """Return images and a label for each of their points."""
    return {"x": torch.empty(n, 3, height, width), "y": torch.empty(n, height, width, dtype=torch.long)}


def two_losses(model: nn.Module, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Any]:
    """Return the loss of the head and 0.4 of the auxiliary head's."""
    losses = []
    for scores in model(inputs["x"]):
        large = F.interpolate(scores.float(), inputs["y"].shape[-2:], mode="bilinear", align_corners=False)
        losses.append(F.cross_entropy(large, inputs["y"], reduction="none").mean())
    return losses[0] + 0.4 * losses[1], None


def _convolved(
    channels_in: int, channels_out: int, size: int, *, stride: int = 1, dilation: int = 1, groups: int = 1
) -> nn.Sequential:
    padding = dilation * (size // 2)
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, size, stride, padding, dilation, groups, bias=False),
        nn.BatchNorm2d(channels_out),
        nn.ReLU(inplace=True),
    )


def _separable(channels_in: int, channels_out: int, dilation: int = 1) -> nn.Sequential:
    depthwise = _convolved(channels_in, channels_in, 3, dilation=dilation, groups=channels_in)
    return nn.Sequential(depthwise, _convolved(channels_in, channels_out, 1))


def _resized(x: Tensor, size: torch.Size) -> Tensor:
    return F.interpolate(x, size, mode="bilinear", align_corners=False)


class _Fcn(nn.Module):
    def __init__(self, channels: int, width: int, dilation: int, *, convolutions: int) -> None:
        super().__init__()
        widths = [channels, *[width] * convolutions]
        pairs = pairwise(widths)
        self.middle = nn.Sequential(*[_convolved(a, b, 3, dilation=dilation) for a, b in pairs])
        self.joined = _convolved(channels + width, width, 3) if convolutions > 1 else None

    def forward(self, x: Tensor, _: Tensor) -> Tensor:
        found: Tensor = self.middle(x)
        return found if self.joined is None else self.joined(torch.cat([x, found], 1))  # type: ignore[no-any-return]


class _Pyramid(nn.Module):
    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        pools = [nn.Sequential(nn.AdaptiveAvgPool2d(b), _convolved(channels, width, 1)) for b in (1, 2, 3, 6)]
        self.pools = nn.ModuleList(pools)
        self.joined = _convolved(channels + 4 * width, width, 3)

    def forward(self, x: Tensor, _: Tensor) -> Tensor:
        parts = [_resized(pool(x), x.shape[-2:]) for pool in self.pools]
        return self.joined(torch.cat([x, *parts], 1))  # type: ignore[no-any-return]


class _Atrous(nn.Module):
    """Parallel dilated convolutions; with ``early`` channels also a decoder at a quarter of the resolution."""

    def __init__(self, channels: int, width: int, early: int | None) -> None:
        super().__init__()
        self.pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), _convolved(channels, width, 1))
        wide = [
            _convolved(channels, width, 3, dilation=d) if early is None else _separable(channels, width, d)
            for d in (12, 24, 36)
        ]
        self.parts = nn.ModuleList([_convolved(channels, width, 1), *wide])
        self.joined = _convolved(5 * width, width, 3)
        self.narrow = None if early is None else _convolved(early, 48, 1)
        self.decoder = nn.Sequential(_separable(width + 48, width), _separable(width, width)) if early else None

    def forward(self, x: Tensor, early: Tensor) -> Tensor:
        parts = [_resized(self.pool(x), x.shape[-2:]), *(part(x) for part in self.parts)]
        found: Tensor = self.joined(torch.cat(parts, 1))
        if self.narrow is None or self.decoder is None:
            return found
        beside = self.narrow(early)
        return self.decoder(torch.cat([_resized(found, beside.shape[-2:]), beside], 1))  # type: ignore[no-any-return]


class Segmenter(nn.Module):
    """A dilated ResNet with a head and an auxiliary head."""

    def __init__(self, head: str, depth: int, *, deep_stem: bool, stride: int) -> None:
        """Build the network named ``head`` on a ResNet of ``depth`` layers."""
        super().__init__()
        net = installed("timm").create_model(f"resnet{depth}", output_stride=stride)
        small = depth == 18
        stem = [net.conv1, net.bn1, net.act1]
        if deep_stem:
            stem = [_convolved(3, 32, 3, stride=2), _convolved(32, 32, 3), _convolved(32, 64, 3)]
        self.first = nn.Sequential(*stem, net.maxpool, net.layer1)
        self.middle = nn.Sequential(net.layer2, net.layer3)
        self.last = net.layer4
        channels, width = (512, 128) if small else (2048, 512)
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
        """Return the scores of the head and of the auxiliary head."""
        first = self.first(x)
        middle = self.middle(first)
        last = self.last(middle)
        return self.scores(self.head(last, first)), self.auxiliary(self.beside(middle, first))
