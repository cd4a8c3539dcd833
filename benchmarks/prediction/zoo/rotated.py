"""mmrotate's detectors of rotated boxes on DOTA's tiles of 1024x1024 (``configs``, version 0.x), 15 classes, ResNet-50.

Oriented R-CNN, RoI Transformer, Rotated Faster R-CNN, S2A-Net and Rotated RetinaNet. The proposal networks compute overlaps
with horizontal boxes, whose temporaries are 36 bytes for each pair of an anchor and a box; a tile has hundreds of boxes, so these are
the peak of a run. The others use a kernel for rotated boxes, which has no temporaries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.prediction.zoo.boxes import assigned, dense_loss, pooled
from benchmarks.prediction.zoo.detectors import SAMPLED, Proposals, RegionHead, RetinaNet, Tower, points
from benchmarks.prediction.zoo.resnet import Pyramid, ResNet

TILE_BOXES = 636
"""The largest number of boxes in a tile. No source states it; Rotated Faster R-CNN's published 8.46 GB imply it here."""
_CHANNELS = (256, 512, 1024, 2048)
_CLASSES, _PROPOSALS = 15, 2000


def rotated_detector(name: str) -> Callable[[], nn.Module] | None:
    """Return a function that builds the network of a row; None for other networks."""
    return next((build for start, build in _BUILDERS.items() if name.startswith(start)), None)


def _body() -> ResNet:
    return ResNet(50, style="pytorch")


class RotatedTwoStage(nn.Module):
    """Proposals of horizontal or oriented boxes, then one head of regions or two."""

    def __init__(self, *, numbers: int, heads: Sequence[int]) -> None:
        """Build the heads.

        Args:
            numbers: how many numbers describe a proposal.
            heads: how many numbers each head of regions predicts.
        """
        super().__init__()
        self.body = _body()
        self.neck = Pyramid(_CHANNELS, extra="pool")
        self.proposals = Proposals(numbers=numbers, boxes=TILE_BOXES)
        self.regions = nn.ModuleList([RegionHead(classes=_CLASSES, boxes=boxes) for boxes in heads])

    def forward(self, x: Tensor) -> Tensor:
        """Return the loss."""
        levels = self.neck(self.body(x))
        total: Tensor = self.proposals(levels)
        for place, head in enumerate(self.regions):
            horizontal = place == 0 and len(self.regions) > 1
            assigned(_PROPOSALS + TILE_BOXES, TILE_BOXES, len(x), rotated=not horizontal)
            total = total + head(pooled(levels[:4], SAMPLED * len(x), 7))
        return total


class _Deformed(torch.autograd.Function):
    """mmcv's deformable convolution: both passes unfold all windows of the batch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, offset: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, offset, weight)
        columns, result = _unfolded(x, weight), torch.empty_like(x)
        buffer = torch.empty_like(result)
        del columns, buffer
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, offset, weight = ctx.saved_tensors
        found = torch.empty_like(x), torch.empty_like(offset), torch.empty_like(weight)
        columns, buffer = _unfolded(x, weight), torch.empty_like(gradient)
        del columns, buffer
        return found


def _unfolded(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(weight[0].numel(), len(x) * x[0, 0].numel())


class S2ANet(nn.Module):
    """A dense head that refines its anchors, a convolution aligned with them, and a dense head of oriented filters."""

    def __init__(self) -> None:
        """Build the network."""
        super().__init__()
        self.body = _body()
        self.neck = Pyramid(_CHANNELS[1:], extra="on_input")
        self.first = nn.ModuleList([Tower(2), Tower(2)])
        self.first_out = nn.ModuleList([nn.Conv2d(256, _CLASSES, 1), nn.Conv2d(256, 5, 1)])
        self.aligned = nn.ParameterList([torch.empty(256, 256, 3, 3) for _ in range(5)])
        self.oriented = nn.Parameter(torch.empty(32, 256, 3, 3))
        self.second = nn.ModuleList([Tower(2, 256, 32), Tower(2)])
        self.second_out = nn.ModuleList([nn.Conv2d(256, _CLASSES, 3, padding=1), nn.Conv2d(256, 5, 3, padding=1)])

    def forward(self, x: Tensor) -> Tensor:
        """Return the loss of both heads."""
        levels = self.neck(self.body(x)[1:])
        scores = [self.first_out[0](self.first[0](level)) for level in levels]
        boxes = [self.first_out[1](self.first[1](level)) for level in levels]
        total = _both(scores, boxes)
        again_scores, again_boxes = [], []
        for level, weight in zip(levels, self.aligned, strict=True):
            offset = torch.empty(len(level), 18, *level.shape[-2:])
            straight = F.relu(_Deformed.apply(level.float(), offset, weight), inplace=True)
            oriented = F.conv2d(straight, self.oriented.repeat(8, 1, 1, 1), padding=1)
            best = oriented.view(len(x), 32, 8, *oriented.shape[-2:]).max(2)[0]
            again_scores.append(self.second_out[0](self.second[0](best)))
            again_boxes.append(self.second_out[1](self.second[1](oriented)))
            del straight, oriented, best
        return total + _both(again_scores, again_boxes)


def _both(scores: Sequence[Tensor], boxes: Sequence[Tensor]) -> Tensor:
    scores, boxes = [s.float() for s in scores], [b.float() for b in boxes]
    assigned(points(scores), TILE_BOXES, len(scores[0]), rotated=True)
    return dense_loss(scores, boxes, classes=_CLASSES, numbers=5)


_BUILDERS: dict[str, Callable[[], nn.Module]] = {
    "S2A-Net R50": S2ANet,
    "Oriented R-CNN R50": lambda: RotatedTwoStage(numbers=6, heads=(5,)),
    "RoI Transformer R50": lambda: RotatedTwoStage(numbers=4, heads=(5, 5 * _CLASSES)),
    "Rotated Faster R-CNN R50": lambda: RotatedTwoStage(numbers=4, heads=(5,)),
    "Rotated RetinaNet R50": lambda: RetinaNet(_body(), _CHANNELS, classes=_CLASSES, numbers=5, boxes=TILE_BOXES),
}
