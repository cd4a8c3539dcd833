"""mmyolo's YOLOv8 as it trains (``configs/yolov8``): a network without anchors, whose boxes are distributions of distances.

Each level has two branches. Labels are assigned by a score of all cells with all boxes of an image at once (``BatchTaskAlignedAssigner``),
whose temporaries can be the peak of a small network. The loss sees the classes of every cell, and the boxes of the matched ones.
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
from benchmarks.prediction.zoo.boxes import COCO_BOXES
from benchmarks.prediction.zoo.yolo import Averaged, Bottleneck, Pooled

_SIZES = {
    "n": (0.33, 0.25, 1024),
    "s": (0.33, 0.5, 1024),
    "m": (0.67, 0.75, 768),
    "l": (1.0, 1.0, 512),
    "x": (1.0, 1.25, 512),
}
"""Factors of depth and width, and the last stage's channels before that factor, by letter."""
_NAME = re.compile(r"YOLOv8-([nsmlx]) P5 mask-refine=(?:No|Yes)$")
_CLASSES, _BINS = 80, 16
_MATCHED = 10
"""Cells that are matched with each box: the assigner's ``topk``."""
_convolved = partial(convolved, act=nn.SiLU)


def yolov8(name: str) -> Callable[[], nn.Module] | None:
    """Return a function that builds the network of a row; None for other networks."""
    found = _NAME.match(name)
    return None if found is None else lambda: Averaged(_Yolo(*_SIZES[found[1]]))


def yolov8_loss(model: nn.Module, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Any]:
    scores, distances = model(inputs["x"])
    scores, distances = scores.float(), distances.float()
    n, cells = scores.shape[:2]
    bins = distances.view(n, cells, 4, _BINS)
    corners = bins.softmax(-1) @ torch.arange(_BINS, dtype=torch.float32)
    boxes = torch.cat([corners[..., :2], corners[..., 2:]], -1) * torch.empty(cells, 1)
    target = _assigned(scores.detach(), boxes.detach())
    total = F.binary_cross_entropy_with_logits(scores, target, reduction="none").sum()
    chosen = torch.zeros(
        n * COCO_BOXES, dtype=torch.long
    )  # some cells are matched with several boxes, which keep one of them
    matched, wanted = boxes.flatten(0, 1)[chosen], torch.empty(len(chosen), 4)
    total = total + (_overlaps(matched, wanted) * torch.empty(len(chosen))).sum()
    spread = bins.flatten(0, 1)[chosen].reshape(-1, _BINS)
    places = torch.zeros(len(spread), dtype=torch.long)
    for _ in range(2):
        total = total + (F.cross_entropy(spread, places, reduction="none") * torch.empty(len(spread))).mean()
    return total * n, None


def _assigned(scores: Tensor, boxes: Tensor) -> Tensor:
    """Return the classes that the assigner wants of each cell."""
    (n, cells, _), count = scores.shape, COCO_BOXES
    with torch.no_grad():
        truths = torch.empty(n, count, 1, 4)
        places = torch.empty(cells, 2)
        inside = torch.cat([places - truths[..., :2], truths[..., 2:] - places], -1).amin(-1) > 0
        labels = torch.zeros(n, count, 1, dtype=torch.long)
        fitting = scores.sigmoid().permute(0, 2, 1).gather(1, labels.expand(n, count, cells))
        overlaps = _overlaps(truths, boxes[:, None])
        metric = fitting.pow(0.5) * overlaps.pow(6)
        best, which = (metric * inside).topk(_MATCHED, dim=-1)
        near = torch.zeros_like(metric).scatter(-1, which, best)
        mask = near * inside
        several = mask.sum(-2)[:, None] > 1
        mask = torch.where(several.expand_as(mask), F.one_hot(overlaps.argmax(1), count).permute(0, 2, 1).float(), mask)
        scaled = metric * mask
        share = (scaled / (scaled.amax(-1, keepdim=True) + 1e-9) * (overlaps * mask).amax(-1, keepdim=True)).amax(-2)
        return F.one_hot(mask.argmax(-2), _CLASSES).float() * share[..., None]


def _overlaps(a: Tensor, b: Tensor) -> Tensor:
    low, high = torch.max(a[..., :2], b[..., :2]), torch.min(a[..., 2:], b[..., 2:])
    common = (high - low).clamp(0).prod(-1)
    areas = (a[..., 2:] - a[..., :2]).clamp(0).prod(-1) + (b[..., 2:] - b[..., :2]).clamp(0).prod(-1)
    return common / (areas - common + 1e-9)


class _Split(nn.Module):
    """Half of the channels, then what each bottleneck makes of the last half, all joined at the end."""

    def __init__(self, channels_in: int, channels_out: int, blocks: int, *, adds: bool) -> None:
        super().__init__()
        half = channels_out // 2
        self.first = _convolved(channels_in, 2 * half, 1)
        self.blocks = nn.ModuleList(Bottleneck(half, adds=adds, windows=(3, 3)) for _ in range(blocks))
        self.joined = _convolved((2 + blocks) * half, channels_out, 1)

    def forward(self, x: Tensor) -> Tensor:
        parts = list(self.first(x).chunk(2, 1))
        for block in self.blocks:
            parts.append(block(parts[-1]))
        return self.joined(torch.cat(parts, 1))  # type: ignore[no-any-return]


def _branch(before: int, width: int, after: int) -> nn.Sequential:
    return nn.Sequential(_convolved(before, width, 3), _convolved(width, width, 3), nn.Conv2d(width, after, 1))


class _Yolo(nn.Module):
    """Scores of classes, and bins of distances, of every cell."""

    def __init__(self, deep: float, wide: float, last: int) -> None:
        super().__init__()
        stem, *channels = (int(c * wide) for c in (64, 128, 256, 512, last))
        self.stem = _convolved(3, stem, 3, stride=2)
        self.stages = nn.ModuleList(
            nn.Sequential(_convolved(a, b, 3, stride=2), _Split(b, b, max(round(blocks * deep), 1), adds=True))
            for (a, b), blocks in zip(pairwise([stem, *channels]), (3, 6, 6, 3), strict=True)
        )
        self.stages[-1].append(Pooled(channels[-1]))  # type: ignore[operator]
        levels, num = channels[1:], max(round(3 * deep), 1)
        self.down = nn.ModuleList(_Split(a + b, b, num, adds=False) for a, b in pairwise(reversed(levels)))
        self.halve = nn.ModuleList(_convolved(a, a, 3, stride=2) for a in levels[:-1])
        self.up = nn.ModuleList(_Split(a + b, b, num, adds=False) for a, b in pairwise(levels))
        classes, distances = max(levels[0], _CLASSES), max(16, levels[0] // 4, 4 * _BINS)
        self.classes = nn.ModuleList(_branch(c, classes, _CLASSES) for c in levels)
        self.distances = nn.ModuleList(_branch(c, distances, 4 * _BINS) for c in levels)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = []
        x = self.stem(x)
        for stage in self.stages:
            x = stage(x)
            features.append(x)
        inner = [features.pop()]
        for down in self.down:
            larger = F.interpolate(inner[-1], scale_factor=2, mode="nearest")
            inner.append(down(torch.cat([larger, features.pop()], 1)))
        outputs = [inner.pop()]
        for halve, up in zip(self.halve, self.up, strict=True):
            outputs.append(up(torch.cat([halve(outputs[-1]), inner.pop()], 1)))
        scores, distances = (
            torch.cat([head(found).flatten(2).transpose(1, 2) for head, found in zip(heads, outputs, strict=True)], 1)
            for heads in (self.classes, self.distances)
        )
        return scores, distances
