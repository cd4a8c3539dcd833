"""ResNets as detectors train them, and feature pyramids (mmdetection's ``mmdet/models/backbones/resnet.py`` and ``necks/fpn.py``).

Stem and first stages are frozen: they save nothing for a backward pass. Every batch normalisation uses its stored statistics; its weights
are trained ("pytorch" style) or not ("caffe" style, where the first convolution of a block has the stride). detectron2's frozen ones
are a product and a sum (``detectron2/layers/batch_norm.py``), and save only what the next operation needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_BLOCKS = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}
STYLES = ("pytorch", "caffe", "detectron2")


class _Affine(nn.Module):
    """detectron2's FrozenBatchNorm2d: scale and shift where a gradient passes, one kernel where none does."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        for name in ("weight", "bias", "running_mean", "running_var"):
            self.register_buffer(name, torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        weight, bias, mean, var = (getattr(self, n) for n in ("weight", "bias", "running_mean", "running_var"))
        if not x.requires_grad:
            return F.batch_norm(x, mean, var, weight, bias, training=False)
        scale = weight * (var + 1e-5).rsqrt()
        shift = bias - mean * scale
        return x * scale.reshape(1, -1, 1, 1) + shift.reshape(1, -1, 1, 1)


class _Fixed(nn.BatchNorm2d):
    """A batch normalisation that stays in evaluation."""

    def train(self, mode: bool = True) -> _Fixed:
        return super().train(False)


def _norm(style: str, channels: int) -> nn.Module:
    if style == "detectron2":
        return _Affine(channels)
    made = _Fixed(channels)
    return made.requires_grad_(style == "pytorch")


class _Bottleneck(nn.Module):
    def __init__(
        self, before: int, width: int, after: int, *, stride: int, groups: int, style: str, dilation: int = 1
    ) -> None:
        super().__init__()
        early = stride if style != "pytorch" and groups == 1 else 1  # a ResNeXt has its stride at the window
        self.conv1 = nn.Conv2d(before, width, 1, early, bias=False)
        self.norm1 = _norm(style, width)
        self.conv2 = nn.Conv2d(width, width, 3, stride // early, dilation, dilation, groups, bias=False)
        self.norm2 = _norm(style, width)
        self.conv3 = nn.Conv2d(width, after, 1, bias=False)
        self.norm3 = _norm(style, after)
        self.short: nn.Module = nn.Identity()
        if before != after or stride != 1:
            self.short = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), _norm(style, after))

    def forward(self, x: Tensor) -> Tensor:
        found = F.relu(self.norm1(self.conv1(x)), inplace=True)
        found = F.relu(self.norm2(self.conv2(found)), inplace=True)
        found = self.norm3(self.conv3(found))
        found += self.short(x)
        return F.relu(found, inplace=True)


class ResNet(nn.Module):
    """A ResNet or ResNeXt that returns the results of its four stages."""

    def __init__(
        self, depth: int, *, style: str, groups: int = 1, width: int = 64, stages: int = 4, dilated: bool = False
    ) -> None:
        """Build the network.

        Args:
            depth: 50 or 101.
            style: one of ``STYLES``.
            groups: of the middle convolutions; 1 for a ResNet.
            width: of the first stage's middle convolutions, all groups together.
            stages: the number of stages.
            dilated: whether the last stage keeps the resolution (detectron2's DC5).
        """
        super().__init__()
        self.stem = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.norm = _norm(style, 64)
        self.stages = nn.ModuleList()
        before = 64
        for place, blocks in enumerate(_BLOCKS[depth][:stages]):
            after, wide = 256 << place, width << place
            last = dilated and place == 3
            made = []
            for block in range(blocks):
                stride = 2 if block == 0 and place and not last else 1
                made.append(
                    _Bottleneck(
                        before, wide, after, stride=stride, groups=groups, style=style, dilation=2 if last else 1
                    )
                )
                before = after
            self.stages.append(nn.Sequential(*made))
        for part in (self.stem, self.norm, self.stages[0]):
            part.requires_grad_(False)

    def forward(self, x: Tensor) -> list[Tensor]:
        """Return the result of each stage."""
        x = F.relu(self.norm(self.stem(x)), inplace=True)
        x = F.max_pool2d(x, 3, 2, 1)
        found = []
        for stage in self.stages:
            x = stage(x)
            found.append(x)
        return found


class Pyramid(nn.Module):
    """A feature pyramid: lateral and output convolutions, nearest neighbours downwards, extra levels above."""

    def __init__(self, channels: Sequence[int], *, extra: str) -> None:
        """Build a pyramid over features of ``channels``.

        Args:
            channels: of the features, beginning with the largest map.
            extra: the levels above: a "pool" of the last, or two convolutions "on_input" or "on_output".
        """
        super().__init__()
        self.lateral = nn.ModuleList([nn.Conv2d(c, 256, 1) for c in channels])
        self.output = nn.ModuleList([nn.Conv2d(256, 256, 3, padding=1) for _ in channels])
        self.above = nn.ModuleList()
        self.extra = extra
        if extra != "pool":
            widths = (channels[-1] if extra == "on_input" else 256, 256, 256)
            self.above.extend(nn.Conv2d(a, b, 3, 2, 1) for a, b in pairwise(widths))

    def forward(self, features: Sequence[Tensor]) -> list[Tensor]:
        """Return the pyramid's levels, the largest first."""
        inner = [lateral(x) for lateral, x in zip(self.lateral, features, strict=True)]
        for place in range(len(inner) - 1, 0, -1):
            inner[place - 1] = inner[place - 1] + F.interpolate(
                inner[place], size=inner[place - 1].shape[-2:], mode="nearest"
            )
        found = [output(x) for output, x in zip(self.output, inner, strict=True)]
        if self.extra == "pool":
            found.append(F.max_pool2d(found[-1], 1, 2))
            return found
        top = features[-1] if self.extra == "on_input" else found[-1]
        for place, above in enumerate(self.above):
            top = above(F.relu(top) if place and self.extra == "on_output" else top)
            found.append(top)
        return found
