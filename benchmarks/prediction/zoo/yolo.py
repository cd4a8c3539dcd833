"""mmyolo's YOLOv5 as it trains (``configs/yolov5``): a CSPDarknet, a path-aggregating pyramid and three or four anchor heads.

Convolutions are followed by batch normalisation and SiLU in place. The loss sees the objectness of every anchor, and boxes and
classes of the anchors that are matched; a hook of the configurations keeps a moving average of the model.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.prediction.zoo.blocks import convolved

_SIZES = {"n": (0.33, 0.25), "s": (0.33, 0.5), "m": (0.67, 0.75), "l": (1.0, 1.0), "x": (1.33, 1.25)}
"""Factors of depth and width by letter."""
_CHANNELS = {"P5": (128, 256, 512, 1024), "P6": (128, 256, 512, 768, 1024)}
_BLOCKS = {"P5": (3, 6, 9, 3), "P6": (3, 6, 9, 3, 3)}
_PRIORS = 3
_MATCHED = 100
"""The assumed number of matched anchors per level and image: the rows do not state the number of boxes, and these take little memory."""
_NAME = re.compile(r"YOLOv5-([nsmlx])( P5| P6)?( mask-refine=(?:No|Yes)| \(ionogram, 1 GPU\)|  pose)?$")
_COCO = 80
_convolved = partial(convolved, act=nn.SiLU)


def yolo(name: str) -> Callable[[], nn.Module] | None:
    """Return a function that builds the network of a row; None for other networks."""
    found = _NAME.match(name)
    if found is None:
        return None
    letter, arch, data = found.groups(default="")
    classes = _COCO if arch else 1  # CrowdHuman's rows name no level
    classes = {"pose": 20, "(ionogram, 1 GPU)": 6}.get(data.strip(), classes)  # VOC's rows are called "pose"
    return lambda: Averaged(_Yolo(letter, arch.strip() or "P5", classes))


def squares(side: int, n: int) -> dict[str, Tensor]:
    return {"x": torch.empty(n, 3, side, side)}


def yolo_loss(model: nn.Module, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Any]:
    total = torch.zeros(())
    for boxes, objectness, classes in model(inputs["x"]):
        target = torch.zeros_like(objectness)
        matched = torch.empty(_MATCHED * len(objectness), dtype=torch.long)
        chosen = _of_matched(boxes, matched).sigmoid()
        corners = torch.cat([chosen[:, :2] * 2 - 0.5, (chosen[:, 2:] * 2) ** 2], 1)
        total = total + F.smooth_l1_loss(corners, torch.empty_like(corners))
        total = total + F.binary_cross_entropy_with_logits(objectness.float(), target.float(), reduction="none").mean()
        scores = _of_matched(classes, matched)
        total = total + F.binary_cross_entropy_with_logits(scores.float(), torch.empty_like(scores).float())
    return total * len(inputs["x"]), None


def _of_matched(values: Tensor, matched: Tensor) -> Tensor:
    n, _, height, width = values.shape
    return values.reshape(n, _PRIORS, -1, height, width)[matched, matched, :, matched, matched]


class Bottleneck(nn.Module):
    """Two convolutions, of 1x1 and 3x3 unless ``windows`` says otherwise, added to their input if ``adds``."""

    def __init__(self, channels: int, *, adds: bool, windows: tuple[int, int] = (1, 3)) -> None:
        super().__init__()
        self.body = nn.Sequential(*(_convolved(channels, channels, window) for window in windows))
        self.adds = adds

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.body(x)
        return found + x if self.adds else found


class _Crossed(nn.Module):
    """Two halves of the channels, one of which passes bottlenecks."""

    def __init__(self, channels_in: int, channels_out: int, blocks: int, *, adds: bool) -> None:
        super().__init__()
        half = channels_out // 2
        self.short = _convolved(channels_in, half, 1)
        inner = [Bottleneck(half, adds=adds) for _ in range(blocks)]
        self.main = nn.Sequential(_convolved(channels_in, half, 1), *inner)
        self.joined = _convolved(2 * half, channels_out, 1)

    def forward(self, x: Tensor) -> Tensor:
        short = self.short(x)
        return self.joined(torch.cat([self.main(x), short], 1))  # type: ignore[no-any-return]


class Pooled(nn.Module):
    """The input and three poolings of it, one after another, joined."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.narrow = _convolved(channels, channels // 2, 1)
        self.pool = nn.MaxPool2d(5, 1, 2)
        self.joined = _convolved(2 * channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        parts = [self.narrow(x)]
        for _ in range(3):
            parts.append(self.pool(parts[-1]))
        return self.joined(torch.cat(parts, 1))  # type: ignore[no-any-return]


class _Yolo(nn.Module):
    """A size with three levels (``P5``) or four (``P6``): boxes, objectness and classes of each, separately as the loss needs them."""

    def __init__(self, letter: str, arch: str, classes: int) -> None:
        super().__init__()
        deep, wide = _SIZES[letter]
        stem, *channels = (int(-(-c * wide // 8) * 8) for c in (64, *_CHANNELS[arch]))
        self.stem = _convolved(3, stem, 6, stride=2, padding=2)
        self.stages = nn.ModuleList()
        for before, after, blocks in zip([stem, *channels], channels, _BLOCKS[arch], strict=False):
            crossed = _Crossed(after, after, _times(blocks, deep), adds=True)
            self.stages.append(nn.Sequential(_convolved(before, after, 3, stride=2), crossed))
        self.stages[-1].append(Pooled(channels[-1]))
        levels, num = channels[1:], _times(3, deep)
        falling, rising = list(pairwise(reversed(levels))), list(pairwise(levels))
        self.narrow = nn.ModuleList([_convolved(high, low, 1) for high, low in falling])
        self.down = nn.ModuleList([_Crossed(2 * low, low, num, adds=False) for _, low in falling])
        self.halve = nn.ModuleList([_convolved(low, low, 3, stride=2) for low, _ in rising])
        self.up = nn.ModuleList([_Crossed(2 * low, high, num, adds=False) for low, high in rising])
        self.heads = nn.ModuleList([nn.Conv2d(c, _PRIORS * (5 + classes), 1) for c in levels])

    def forward(self, x: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
        x = self.stem(x)
        features = []
        for stage in self.stages:
            x = stage(x)
            features.append(x)
        del features[0]
        inner = []
        for narrow, down, lower in zip(self.narrow, self.down, reversed(features[:-1]), strict=True):
            inner.append(narrow(x))
            x = down(torch.cat([F.interpolate(inner[-1], scale_factor=2, mode="nearest"), lower], 1))
        outputs = [x]
        for halve, up, beside in zip(self.halve, self.up, reversed(inner), strict=True):
            outputs.append(up(torch.cat([halve(outputs[-1]), beside], 1)))
        return [_parts(head(found)) for head, found in zip(self.heads, outputs, strict=True)]


def _times(blocks: int, deep: float) -> int:
    return max(round(blocks * deep), 1)


def _parts(scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    n, _, height, width = scores.shape
    by_prior = scores.view(n, _PRIORS, -1, height, width)
    parts = by_prior[:, :, :4], by_prior[:, :, 4:5], by_prior[:, :, 5:]
    boxes, objectness, classes = (part.reshape(n, -1, height, width) for part in parts)
    return boxes, objectness, classes


class Averaged(nn.Module):
    """A network and the moving average of its weights and statistics, as in EMAHook."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network, self.average = network, copy.deepcopy(network).requires_grad_(False)

    def forward(self, x: Tensor) -> Any:
        return self.network(x)
