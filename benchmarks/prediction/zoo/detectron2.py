"""detectron2's baselines of 2019 (``MODEL_ZOO.md``): Faster, Mask and Keypoint R-CNN, RetinaNet, RPN and Fast R-CNN.

Two pictures, at most 1333x800. A ResNet whose normalisations are frozen to a product and a sum, and three ways to use it: C4 pools
regions from the fourth stage and computes the fifth for each, DC5 keeps the fifth at a sixteenth of the resolution, FPN has a pyramid.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.prediction.zoo.boxes import COCO_BOXES, assign, flat, pooled, proposal_loss
from benchmarks.prediction.zoo.detectors import (
    ANCHORS,
    CLASSES,
    ON_OBJECTS,
    SAMPLED,
    MaskHead,
    Proposals,
    RegionHead,
    Tower,
    points,
)
from benchmarks.prediction.zoo.resnet import Pyramid, ResNet

_NAME = re.compile(
    r"(?:.*[:&] |.* with )?(Faster R-CNN|Mask R-CNN|Keypoint R-CNN|RetinaNet|RPN|Fast R-CNN):? "
    r"(R50|R101|X101)(?:-(C4|DC5|FPN))? [13]x$"
)
_LVIS_CLASSES = 1230
_CHANNELS = (256, 512, 1024, 2048)
_KEYPOINTS = 17


def detectron2_model(name: str) -> Callable[[], nn.Module] | None:
    """Return a function that builds the network of a row; None for other networks."""
    found = _NAME.match(name)
    if found is None:
        return None
    head, body, kind = found.groups()
    classes = _LVIS_CLASSES if name.startswith("LVIS") else 1 if head.startswith("Keypoint") else CLASSES
    depth = 50 if body == "R50" else 101
    groups, width = (32, 256) if body == "X101" else (1, 64)

    def build() -> nn.Module:
        stages = 3 if kind == "C4" else 4
        made = ResNet(depth, style="detectron2", groups=groups, width=width, stages=stages, dilated=kind == "DC5")
        if head == "RetinaNet":
            return DenseModel(made)
        if kind == "C4":
            return EarlyModel(made, head, classes)
        return RegionModel(made, head, classes, pyramid=kind != "DC5")

    return build


def _assigned(count: int, images: int) -> None:
    """Assign ``count`` anchors to boxes in each image; the overlaps have fewer temporaries than mmdetection's."""
    anchors = torch.empty(count, 4)
    for _ in range(images):
        boxes = torch.empty(COCO_BOXES, 4)
        extent = torch.min(boxes[:, None, 2:], anchors[:, 2:]) - torch.max(boxes[:, None, :2], anchors[:, :2])
        common = extent.clamp_(min=0).prod(2)
        del extent
        union = torch.empty(COCO_BOXES, 1) + torch.empty(count) - common
        assign(torch.where(common > 0, common / union, torch.zeros(1)))


class _Proposals(Proposals):
    def loss(self, scores: Sequence[Tensor], boxes: Sequence[Tensor]) -> Tensor:
        _assigned(points(scores) * self.num_anchors, len(scores[0]))
        return proposal_loss(scores, boxes, numbers=4)


class _KeypointHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tower = Tower(8, 512, 256)
        self.larger = nn.ConvTranspose2d(512, _KEYPOINTS, 4, 2, 1)

    def forward(self, regions: Tensor) -> Tensor:
        maps = F.interpolate(self.larger(self.tower(regions)), scale_factor=2, mode="bilinear", align_corners=False)
        return F.cross_entropy(maps.flatten(2).flatten(0, 1), torch.empty(len(maps) * _KEYPOINTS, dtype=torch.long))


class RegionModel(nn.Module):
    """A pyramid, or a dilated fifth stage, under heads of regions."""

    def __init__(self, body: nn.Module, head: str, classes: int, *, pyramid: bool) -> None:
        """Build the heads that ``head`` names over ``body``."""
        super().__init__()
        self.body = body
        self.neck = Pyramid(_CHANNELS, extra="pool") if pyramid else None
        channels = 256 if pyramid else 2048
        self.proposals = None if head == "Fast R-CNN" else _Proposals(channels, anchors=3 if pyramid else 15)
        self.regions = None if head == "RPN" else RegionHead(classes=classes, channels=channels)
        self.parts: nn.Module | None = None
        if head == "Mask R-CNN":
            self.parts = MaskHead(classes=classes, channels=channels)
        elif head == "Keypoint R-CNN":
            self.parts = _KeypointHead()

    def forward(self, x: Tensor) -> Tensor:
        """Return the loss."""
        features = self.body(x)
        levels = features[-1:] if self.neck is None else self.neck(features)
        del features
        total = torch.zeros(())
        if self.proposals is not None:
            total = total + self.proposals(levels)
        if self.regions is not None:
            total = total + self.regions(pooled(levels[:4], SAMPLED * len(x), 7))
        if self.parts is not None:
            total = total + self.parts(pooled(levels[:4], ON_OBJECTS * len(x), 14))
        return total


class EarlyModel(nn.Module):
    """C4: the fifth stage runs on each region."""

    def __init__(self, body: nn.Module, head: str, classes: int) -> None:
        """Build the heads that ``head`` names over three stages."""
        super().__init__()
        self.body, self.proposals = body, _Proposals(1024, anchors=15)
        self.last = self.scores = self.boxes = self.masks = None
        if head == "RPN":
            return
        self.last = ResNet(50, style="detectron2").stages[3]
        self.scores, self.boxes = nn.Linear(2048, classes + 1), nn.Linear(2048, 4 * classes)
        if head == "Mask R-CNN":
            self.masks = nn.Sequential(nn.ConvTranspose2d(2048, 256, 2, 2), nn.ReLU(), nn.Conv2d(256, classes, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Return the loss."""
        levels = self.body(x)[-1:]
        total: Tensor = self.proposals(levels)
        if self.last is None or self.scores is None or self.boxes is None:
            return total
        regions = self.last(pooled(levels, SAMPLED * len(x), 14))
        found = regions.mean((2, 3))
        total = total + F.cross_entropy(self.scores(found), torch.empty(len(found), dtype=torch.long))
        moved = self.boxes(found)[: ON_OBJECTS * len(x)]
        total = total + F.smooth_l1_loss(moved, torch.empty_like(moved))
        if self.masks is not None:
            chosen = torch.empty(ON_OBJECTS * len(x), dtype=torch.long)
            maps = self.masks(regions[chosen])
            one = maps[chosen, chosen]
            total = total + F.binary_cross_entropy_with_logits(one, torch.empty_like(one))
        return total


class DenseModel(nn.Module):
    """RetinaNet, with a focal loss of separate operations over all levels together."""

    def __init__(self, body: nn.Module) -> None:
        """Build the head over ``body``."""
        super().__init__()
        self.body = body
        self.neck = Pyramid(_CHANNELS[1:], extra="on_input")
        self.classify, self.locate = Tower(4), Tower(4)
        self.scores = nn.Conv2d(256, ANCHORS * CLASSES, 3, padding=1)
        self.boxes = nn.Conv2d(256, ANCHORS * 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the loss."""
        levels = self.neck(self.body(x)[1:])
        scores = [self.scores(self.classify(level)) for level in levels]
        boxes = [self.boxes(self.locate(level)) for level in levels]
        _assigned(points(levels) * ANCHORS, len(x))
        found = torch.cat([flat(score, CLASSES).view(len(x), -1, CLASSES) for score in scores], 1).view(-1, CLASSES)
        moved = torch.cat([flat(box, 4).view(len(x), -1, 4) for box in boxes], 1).view(-1, 4)
        target, kept = torch.zeros_like(found), torch.empty(len(found), dtype=torch.long)  # few anchors are left out
        scored, wanted = found[kept], target[kept]
        chance = scored.sigmoid()
        each = F.binary_cross_entropy_with_logits(scored, wanted, reduction="none")
        right = chance * wanted + (1 - chance) * (1 - wanted)
        each = each * (1 - right) ** 2.0
        each = (0.25 * wanted + 0.75 * (1 - wanted)) * each
        matched = moved[torch.empty(10 * COCO_BOXES, dtype=torch.long)]
        return each.sum() + F.smooth_l1_loss(matched, torch.empty_like(matched))
