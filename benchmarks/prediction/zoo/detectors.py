"""mmdetection's RetinaNet, Faster R-CNN and Mask R-CNN on ResNets (``configs/_base_/models``, version 2).

Two pictures of 1333x800, padded to multiples of 32. A proposal network passes 2,000 regions of an image on, of which 512 are sampled,
128 of them on objects; masks are predicted for these.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.prediction.zoo.boxes import COCO_BOXES, assigned, dense_loss, pooled, proposal_loss
from benchmarks.prediction.zoo.resnet import Pyramid, ResNet

CLASSES = 80
SAMPLED, ON_OBJECTS = 512, 128
_PROPOSALS = 2000
ANCHORS = 9
"""Of each point of RetinaNet's maps."""
_NAME = re.compile(r"(RetinaNet|Faster R-CNN|Mask R-CNN) (R|X)-(50|101)(?:-(32x4d|64x4d))?-FPN( caffe)?$")
_GROUPS = {None: (1, 64), "32x4d": (32, 128), "64x4d": (64, 256)}
"""Groups and width of the middle convolutions by the name of a ResNeXt."""


def detector(name: str) -> Callable[[], nn.Module] | None:
    """Return a function that builds the network of a row; None for other networks."""
    found = _NAME.match(name)
    if found is None:
        return None
    head, _, depth, resnext, caffe = found.groups()
    groups, width = _GROUPS[resnext]

    def build() -> nn.Module:
        body = ResNet(int(depth), style="caffe" if caffe else "pytorch", groups=groups, width=width)
        channels = (256, 512, 1024, 2048)
        if head == "RetinaNet":
            return RetinaNet(body, channels)
        return TwoStage(body, channels, masks=head.startswith("Mask"))

    return build


def photographs(height: int, width: int, n: int) -> dict[str, Tensor]:
    """Return padded images."""
    return {"x": torch.empty(n, 3, -(-height // 32) * 32, -(-width // 32) * 32)}


def own_loss(model: nn.Module, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Any]:
    """Return the loss, which the model computes; the loop keeps no outputs."""
    return model(inputs["x"]), None


def points(levels: Sequence[Tensor]) -> int:
    """Return the number of points of all levels."""
    return sum(level[0, 0].numel() for level in levels)


class Tower(nn.Sequential):
    """Convolutions of 3x3 with biases, each followed by a ReLU in place."""

    def __init__(self, count: int, channels: int = 256, first: int | None = None) -> None:
        """Build ``count`` convolutions over ``channels``, the first of which reads ``first``."""
        parts: list[nn.Module] = []
        for place in range(count):
            before = channels if place or first is None else first
            parts += [nn.Conv2d(before, channels, 3, padding=1), nn.ReLU(inplace=True)]
        super().__init__(*parts)


class RetinaNet(nn.Module):
    """A dense head on a pyramid that begins at an eighth of the resolution."""

    def __init__(
        self,
        body: nn.Module,
        channels: Sequence[int],
        *,
        classes: int = CLASSES,
        numbers: int = 4,
        boxes: int = COCO_BOXES,
    ) -> None:
        """Build the head over ``body``; ``numbers`` describe a box, 5 of them a rotated one."""
        super().__init__()
        self.body = body
        self.neck = Pyramid(channels[1:], extra="on_input")
        self.classify, self.locate = Tower(4), Tower(4)
        self.scores = nn.Conv2d(256, ANCHORS * classes, 3, padding=1)
        self.boxes = nn.Conv2d(256, ANCHORS * numbers, 3, padding=1)
        self.num_classes, self.numbers, self.num_boxes = classes, numbers, boxes

    def forward(self, x: Tensor) -> Tensor:
        """Return the loss."""
        levels = self.neck(self.body(x)[1:])
        scores = [self.scores(self.classify(level)) for level in levels]
        boxes = [self.boxes(self.locate(level)) for level in levels]
        return self.loss([s.float() for s in scores], [b.float() for b in boxes])

    def loss(self, scores: Sequence[Tensor], boxes: Sequence[Tensor]) -> Tensor:
        """Return the loss of scores and boxes in FP32."""
        assigned(points(scores) * ANCHORS, self.num_boxes, len(scores[0]), rotated=self.numbers == 5)
        return dense_loss(scores, boxes, classes=self.num_classes, numbers=self.numbers)


class Proposals(nn.Module):
    """A proposal network."""

    def __init__(self, channels: int = 256, *, anchors: int = 3, numbers: int = 4, boxes: int = COCO_BOXES) -> None:
        """Build the network; ``numbers`` describe a proposal."""
        super().__init__()
        self.window = nn.Conv2d(channels, channels, 3, padding=1)
        self.scores = nn.Conv2d(channels, anchors, 1)
        self.boxes = nn.Conv2d(channels, anchors * numbers, 1)
        self.num_anchors, self.numbers, self.num_boxes = anchors, numbers, boxes

    def forward(self, levels: Sequence[Tensor]) -> Tensor:
        """Return the loss of the proposals."""
        scores, boxes = [], []
        for level in levels:
            found = F.relu(self.window(level), inplace=True)
            scores.append(self.scores(found))
            boxes.append(self.boxes(found))
            del found
        return self.loss([s.float() for s in scores], [b.float() for b in boxes])

    def loss(self, scores: Sequence[Tensor], boxes: Sequence[Tensor]) -> Tensor:
        """Return the loss of scores and boxes in FP32."""
        assigned(points(scores) * self.num_anchors, self.num_boxes, len(scores[0]))
        return proposal_loss(scores, boxes, numbers=self.numbers)


class RegionHead(nn.Module):
    """Two dense layers over pooled regions, then scores and boxes."""

    def __init__(self, *, classes: int = CLASSES, boxes: int | None = None, channels: int = 256) -> None:
        """Build the head; it predicts ``boxes`` numbers per region, by default a box for each class."""
        super().__init__()
        self.dense = nn.ModuleList([nn.Linear(channels * 7 * 7, 1024), nn.Linear(1024, 1024)])
        self.scores = nn.Linear(1024, classes + 1)
        self.boxes = nn.Linear(1024, classes * 4 if boxes is None else boxes)

    def forward(self, regions: Tensor) -> Tensor:
        """Return the loss of pooled regions."""
        found = regions.flatten(1)
        for layer in self.dense:
            found = F.relu(layer(found), inplace=True)
        scores, boxes = self.scores(found).float(), self.boxes(found).float()
        each = F.cross_entropy(scores, torch.empty(len(scores), dtype=torch.long), reduction="none")
        moved = boxes.reshape(len(boxes), -1)[: len(boxes) // 4]
        return each.mean() + F.smooth_l1_loss(moved, torch.empty_like(moved))


class MaskHead(nn.Module):
    """Four convolutions, twice the resolution, a mask for each class."""

    def __init__(self, *, classes: int = CLASSES, channels: int = 256) -> None:
        """Build the head over regions of ``channels``."""
        super().__init__()
        self.tower = Tower(4, 256, channels)
        self.larger = nn.ConvTranspose2d(256, 256, 2, 2)
        self.masks = nn.Conv2d(256, classes, 1)

    def forward(self, regions: Tensor) -> Tensor:
        """Return the loss of pooled regions."""
        masks = self.masks(F.relu(self.larger(self.tower(regions)), inplace=True)).float()
        rows, classes = (torch.empty(len(masks), dtype=torch.long) for _ in range(2))
        found = masks[rows, classes]
        return F.binary_cross_entropy_with_logits(found, torch.empty_like(found))


class TwoStage(nn.Module):
    """Faster R-CNN, or Mask R-CNN."""

    def __init__(self, body: nn.Module, channels: Sequence[int], *, masks: bool) -> None:
        """Build the heads over ``body``."""
        super().__init__()
        self.body = body
        self.neck = Pyramid(channels, extra="pool")
        self.proposals = Proposals()
        self.regions = RegionHead()
        self.masks = MaskHead() if masks else None

    def forward(self, x: Tensor) -> Tensor:
        """Return the loss."""
        levels = self.neck(self.body(x))
        total: Tensor = self.proposals(levels)
        assigned(_PROPOSALS + COCO_BOXES, COCO_BOXES, len(x))
        total = total + self.regions(pooled(levels[:4], SAMPLED * len(x), 7))
        if self.masks is not None:
            total = total + self.masks(pooled(levels[:4], ON_OBJECTS * len(x), 14))
        return total
