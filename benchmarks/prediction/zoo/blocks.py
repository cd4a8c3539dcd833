"""Blocks that the model zoos' networks share: ResNets as detectors train them, feature pyramids, convolutions with their norms.

mmdetection's ResNet (``mmdet/models/backbones/resnet.py``): stem and first stage are frozen and save nothing for a backward pass. Every
batch normalisation uses its stored statistics; its weights are trained ("pytorch" style) or not ("caffe" style, where the first
convolution of a block has the stride). detectron2's frozen ones are a product and a sum (``detectron2/layers/batch_norm.py``), and save
only what the next operation needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_BLOCKS = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}


def convolved(
    before: int, after: int, size: int, *, stride: int = 1, dilation: int = 1, groups: int = 1, padding: int | None = None,
    act: type[nn.Module] = nn.ReLU,
) -> nn.Sequential:  # fmt: skip
    """Return a convolution without a bias, its batch normalisation and an activation in place."""
    padding = dilation * (size // 2) if padding is None else padding
    convolution = nn.Conv2d(before, after, size, stride, padding, dilation, groups, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(after), act(inplace=True))


def window(before: int, after: int) -> nn.Conv2d:
    return nn.Conv2d(before, after, 3, padding=1)


class Tower(nn.Sequential):
    """``count`` windows over ``channels``, the first of which reads ``first``, each followed by a ReLU in place."""

    def __init__(self, count: int, channels: int = 256, first: int | None = None) -> None:
        widths = [first or channels, *[channels] * count]
        super().__init__(*[m for a, b in pairwise(widths) for m in (window(a, b), nn.ReLU(inplace=True))])


class _Affine(nn.Module):
    """detectron2's FrozenBatchNorm2d: scale and shift where a gradient passes, one kernel where none does."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        for name in ("weight", "bias", "running_mean", "running_var"):
            self.register_buffer(name, torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        weight, bias, mean, var = self.buffers()
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
    return _Affine(channels) if style == "detectron2" else _Fixed(channels).requires_grad_(style == "pytorch")


class _Bottleneck(nn.Module):
    def __init__(
        self, before: int, width: int, after: int, stride: int, groups: int, style: str, dilation: int
    ) -> None:
        super().__init__()
        early = stride if style != "pytorch" and groups == 1 else 1  # a ResNeXt has its stride at the window
        self.conv1, self.norm1 = nn.Conv2d(before, width, 1, early, bias=False), _norm(style, width)
        self.conv2 = nn.Conv2d(width, width, 3, stride // early, dilation, dilation, groups, bias=False)
        self.norm2 = _norm(style, width)
        self.conv3, self.norm3 = nn.Conv2d(width, after, 1, bias=False), _norm(style, after)
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
    """A ResNet or ResNeXt that returns the results of its stages.

    ``style`` is "pytorch", "caffe" or "detectron2"; ``width`` counts the first stage's windows, all groups together; a ``dilated`` last
    stage keeps the resolution (detectron2's DC5).
    """

    def __init__(
        self, depth: int = 50, *, style: str = "pytorch", groups: int = 1, width: int = 64, stages: int = 4,
        dilated: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 64, 7, 2, 3, bias=False), _norm(style, 64)
        self.stages, before = nn.ModuleList(), 64
        for place, blocks in enumerate(_BLOCKS[depth][:stages]):
            after, last = 256 << place, dilated and place == 3
            strides = [2 if place and not last else 1, *[1] * (blocks - 1)]
            befores = [before, *[after] * (blocks - 1)]
            made = [
                _Bottleneck(b, width << place, after, s, groups, style, 2 if last else 1)
                for b, s in zip(befores, strides, strict=True)
            ]
            self.stages.append(nn.Sequential(*made))
            before = after
        for part in (self.stem, self.norm, self.stages[0]):
            part.requires_grad_(False)

    def forward(self, x: Tensor) -> list[Tensor]:
        x = F.relu(self.norm(self.stem(x)), inplace=True)
        x = F.max_pool2d(x, 3, 2, 1)
        found = []
        for stage in self.stages:
            x = stage(x)
            found.append(x)
        return found


class Pyramid(nn.Module):
    """A feature pyramid (mmdetection's ``necks/fpn.py``): lateral and output convolutions, nearest neighbours downwards.

    The levels above are a pool of the last one, or with ``convolved`` two convolutions over the last feature.
    """

    def __init__(self, channels: Sequence[int], *, convolved: bool = False) -> None:
        super().__init__()
        self.lateral = nn.ModuleList([nn.Conv2d(c, 256, 1) for c in channels])
        self.output = nn.ModuleList([window(256, 256) for _ in channels])
        widths = (channels[-1], 256, 256)
        self.above = nn.ModuleList(nn.Conv2d(a, b, 3, 2, 1) for a, b in pairwise(widths)) if convolved else None

    def forward(self, features: Sequence[Tensor]) -> list[Tensor]:
        inner = [lateral(x) for lateral, x in zip(self.lateral, features, strict=True)]
        for place in range(len(inner) - 1, 0, -1):
            size = inner[place - 1].shape[-2:]
            inner[place - 1] = inner[place - 1] + F.interpolate(inner[place], size=size, mode="nearest")
        found = [output(x) for output, x in zip(self.output, inner, strict=True)]
        if self.above is None:
            return [*found, F.max_pool2d(found[-1], 1, 2)]
        top = features[-1]
        for above in self.above:
            top = above(top)
            found.append(top)
        return found
