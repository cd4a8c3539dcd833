"""Detectors of boxes as three libraries train them: mmdetection 2, mmrotate 0.x and detectron2's baselines of 2019.

mmdetection (``configs/_base_/models``, ``configs/swin``): two pictures of 1333x800, padded to multiples of 32. A proposal network passes
2,000 regions of an image on, of which 512 are sampled, 128 of them on objects; masks are predicted for these.

mmrotate (``configs``): DOTA's tiles of 1024x1024. The proposal networks compute overlaps with horizontal boxes, whose temporaries are 36
bytes for each pair of an anchor and a box; a tile has hundreds of boxes, so these are the peak of a run. The others use a kernel for
rotated boxes, which has no temporaries.

detectron2 (``MODEL_ZOO.md``): a ResNet whose normalisations are frozen to a product and a sum, and three ways to use it: C4 pools regions
from the fourth stage and computes the fifth for each, DC5 keeps the fifth at a sixteenth of the resolution, FPN has a pyramid.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.prediction.zoo.blocks import Pyramid, ResNet, Tower, window
from benchmarks.prediction.zoo.boxes import (
    COCO_BOXES,
    assigned,
    assigned_by_detectron2,
    dense_loss,
    focal_loss_of_detectron2,
    overlaps,
    points,
    pooled,
    proposal_loss,
    rotated_overlaps,
)
from benchmarks.prediction.zoo.swin import CHANNELS as SWIN_CHANNELS
from benchmarks.prediction.zoo.swin import DEPTHS, Swin

SAMPLED, ON_OBJECTS, PROPOSALS = 512, 128, 2000
COCO, LVIS, DOTA = 80, 1230, 15
"""Numbers of classes."""
CHANNELS = (256, 512, 1024, 2048)
TILE_BOXES = 636
"""The largest number of boxes in a tile. No source states it; Rotated Faster R-CNN's published 8.46 GB imply it here."""
_ANCHORS = 9
"""Of each point of RetinaNet's maps."""
_KEYPOINTS = 17
Build = Callable[[], nn.Module]


class Dense(nn.Module):
    """RetinaNet: a dense head on a pyramid from an eighth of the resolution; ``numbers`` describe a box, 5 of them a rotated one."""

    def __init__(self, body: nn.Module, *, classes: int = COCO, numbers: int = 4) -> None:
        super().__init__()
        self.body, self.neck = body, Pyramid(CHANNELS[1:], convolved=True)
        self.classify, self.locate = Tower(4), Tower(4)
        self.scores, self.boxes = window(256, _ANCHORS * classes), window(256, _ANCHORS * numbers)
        self.classes, self.numbers = classes, numbers

    def forward(self, x: Tensor) -> Tensor:
        levels = self.neck(self.body(x)[1:])
        scores = [self.scores(self.classify(level)) for level in levels]
        boxes = [self.boxes(self.locate(level)) for level in levels]
        return self.loss([s.float() for s in scores], [b.float() for b in boxes])

    def loss(self, scores: Sequence[Tensor], boxes: Sequence[Tensor]) -> Tensor:
        rotated = {"boxes": TILE_BOXES, "measure": rotated_overlaps} if self.numbers == 5 else {}
        assigned(points(scores) * _ANCHORS, len(scores[0]), **rotated)  # type: ignore[arg-type]
        return dense_loss(scores, boxes, classes=self.classes, numbers=self.numbers)


class DenseOfDetectron2(Dense):
    """RetinaNet with a focal loss of separate operations."""

    def loss(self, scores: Sequence[Tensor], boxes: Sequence[Tensor]) -> Tensor:
        assigned_by_detectron2(points(scores) * _ANCHORS, len(scores[0]))
        return focal_loss_of_detectron2(scores, boxes, classes=self.classes)


class Proposals(nn.Module):
    """A proposal network; ``numbers`` describe a proposal, and ``assign`` the anchors of all images."""

    def __init__(
        self, channels: int = 256, *, anchors: int = 3, numbers: int = 4, assign: Callable[[int, int], None] = assigned
    ) -> None:
        super().__init__()
        self.window = window(channels, channels)
        self.scores, self.boxes = nn.Conv2d(channels, anchors, 1), nn.Conv2d(channels, anchors * numbers, 1)
        self.anchors, self.numbers, self.assign = anchors, numbers, assign

    def forward(self, levels: Sequence[Tensor]) -> Tensor:
        scores, boxes = [], []
        for level in levels:
            found = F.relu(self.window(level), inplace=True)
            scores.append(self.scores(found))
            boxes.append(self.boxes(found))
            del found
        return self.loss([s.float() for s in scores], [b.float() for b in boxes])

    def loss(self, scores: Sequence[Tensor], boxes: Sequence[Tensor]) -> Tensor:
        self.assign(points(scores) * self.anchors, len(scores[0]))
        return proposal_loss(scores, boxes, numbers=self.numbers)


class _Head(nn.Module):
    """What is computed from ``count`` regions of an image, pooled to ``side`` x ``side``."""

    count, side = ON_OBJECTS, 14

    def forward(self, levels: Sequence[Tensor], images: int) -> Tensor:
        return self.loss(pooled(levels[:4], self.count * images, self.side))

    def loss(self, regions: Tensor) -> Tensor:
        raise NotImplementedError


class _Boxes(_Head):
    """Two dense layers, then scores and ``boxes`` numbers, by default a box for each class."""

    count, side = SAMPLED, 7

    def __init__(
        self,
        *,
        classes: int,
        boxes: int | None = None,
        channels: int = 256,
        assign: Callable[[int], None] | None = None,
    ) -> None:
        super().__init__()
        self.dense = nn.ModuleList([nn.Linear(channels * 7 * 7, 1024), nn.Linear(1024, 1024)])
        self.scores = nn.Linear(1024, classes + 1)
        self.boxes = nn.Linear(1024, classes * 4 if boxes is None else boxes)
        self.assign = assign

    def forward(self, levels: Sequence[Tensor], images: int) -> Tensor:
        if self.assign is not None:
            self.assign(images)
        return super().forward(levels, images)

    def loss(self, regions: Tensor) -> Tensor:
        found = regions.flatten(1)
        for layer in self.dense:
            found = F.relu(layer(found), inplace=True)
        scores, boxes = self.scores(found).float(), self.boxes(found).float()
        each = F.cross_entropy(scores, torch.empty(len(scores), dtype=torch.long), reduction="none")
        moved = boxes.reshape(len(boxes), -1)[: len(boxes) // 4]
        return each.mean() + F.smooth_l1_loss(moved, torch.empty_like(moved))


class _Masks(_Head):
    """Four convolutions, twice the resolution, a mask for each class."""

    def __init__(self, *, classes: int, channels: int = 256) -> None:
        super().__init__()
        self.tower, self.larger = Tower(4, 256, channels), nn.ConvTranspose2d(256, 256, 2, 2)
        self.masks = nn.Conv2d(256, classes, 1)

    def loss(self, regions: Tensor) -> Tensor:
        masks = self.masks(F.relu(self.larger(self.tower(regions)), inplace=True)).float()
        rows, classes = (torch.empty(len(masks), dtype=torch.long) for _ in range(2))
        found = masks[rows, classes]
        return F.binary_cross_entropy_with_logits(found, torch.empty_like(found))


class _Keypoints(_Head):
    """detectron2's: eight convolutions, four times the resolution, a map for each keypoint."""

    def __init__(self) -> None:
        super().__init__()
        self.tower, self.larger = Tower(8, 512, 256), nn.ConvTranspose2d(512, _KEYPOINTS, 4, 2, 1)

    def loss(self, regions: Tensor) -> Tensor:
        maps = F.interpolate(self.larger(self.tower(regions)), scale_factor=2, mode="bilinear", align_corners=False)
        return F.cross_entropy(maps.flatten(2).flatten(0, 1), torch.empty(len(maps) * _KEYPOINTS, dtype=torch.long))


class _WholeStage(_Head):
    """detectron2's C4: the fifth stage runs on each region."""

    count = SAMPLED

    def __init__(self, *, classes: int, masks: bool) -> None:
        super().__init__()
        self.last = ResNet(50, style="detectron2").stages[3]
        self.scores, self.boxes, self.masks = nn.Linear(2048, classes + 1), nn.Linear(2048, 4 * classes), None
        if masks:
            self.masks = nn.Sequential(nn.ConvTranspose2d(2048, 256, 2, 2), nn.ReLU(), nn.Conv2d(256, classes, 1))

    def loss(self, regions: Tensor) -> Tensor:
        regions = self.last(regions)
        on_objects = len(regions) * ON_OBJECTS // SAMPLED
        found = regions.mean((2, 3))
        total = F.cross_entropy(self.scores(found), torch.empty(len(found), dtype=torch.long))
        moved = self.boxes(found)[:on_objects]
        total = total + F.smooth_l1_loss(moved, torch.empty_like(moved))
        if self.masks is not None:
            chosen = torch.empty(on_objects, dtype=torch.long)
            maps = self.masks(regions[chosen])
            one = maps[chosen, chosen]
            total = total + F.binary_cross_entropy_with_logits(one, torch.empty_like(one))
        return total


class Regional(nn.Module):
    """Proposals and heads over the levels of a neck, or without one over the last features."""

    def __init__(
        self, body: nn.Module, neck: nn.Module | None, proposals: nn.Module | None, heads: Sequence[nn.Module]
    ) -> None:
        super().__init__()
        self.body, self.neck, self.proposals, self.heads = body, neck, proposals, nn.ModuleList(heads)

    def forward(self, x: Tensor) -> Tensor:
        features = self.body(x)
        levels = features[-1:] if self.neck is None else self.neck(features)
        del features
        total = torch.zeros(()) if self.proposals is None else self.proposals(levels)
        for head in self.heads:
            total = total + head(levels, len(x))
        return total  # type: ignore[no-any-return]


# --- mmdetection ----------------------------------------------------------------------------------

_DETECTOR = re.compile(r"(RetinaNet|Faster R-CNN|Mask R-CNN) (R|X)-(50|101)(?:-(32x4d|64x4d))?-FPN( caffe)?$")
_SWIN = re.compile(r"Mask R-CNN Swin-([TS])( 1x| 3x ms-crop)$")
_GROUPS = {None: (1, 64), "32x4d": (32, 128), "64x4d": (64, 256)}
"""Groups and width of the windows by the name of a ResNeXt."""


def detector(name: str) -> Build | None:
    """Return a function that builds the network of a row; None for other networks."""
    if found := _SWIN.match(name):
        depths = DEPTHS[found[1]]
        return lambda: _two_stage(Swin(depths), SWIN_CHANNELS, masks=True)
    if not (found := _DETECTOR.match(name)):
        return None
    head, _, depth, resnext, caffe = found.groups()
    groups, width = _GROUPS[resnext]
    style = "caffe" if caffe else "pytorch"
    body = partial(ResNet, int(depth), style=style, groups=groups, width=width)
    if head == "RetinaNet":
        return lambda: Dense(body())
    return lambda: _two_stage(body(), CHANNELS, masks=head.startswith("Mask"))


def _two_stage(body: nn.Module, channels: Sequence[int], *, masks: bool) -> Regional:
    neck, proposals = Pyramid(channels), Proposals()
    heads: list[nn.Module] = [_Boxes(classes=COCO, assign=partial(assigned, PROPOSALS + COCO_BOXES))]
    return Regional(body, neck, proposals, [*heads, _Masks(classes=COCO)] if masks else heads)


# --- mmrotate -------------------------------------------------------------------------------------


def _rotated(*, numbers: int, heads: Sequence[int]) -> Regional:
    """Return proposals of ``numbers`` numbers, and heads of so many; the first of two assigns horizontal boxes."""
    body, neck = ResNet(), Pyramid(CHANNELS)
    proposals = Proposals(numbers=numbers, assign=partial(assigned, boxes=TILE_BOXES))
    measures = [overlaps, rotated_overlaps][-len(heads) :]
    found = partial(assigned, PROPOSALS + TILE_BOXES, boxes=TILE_BOXES)
    pairs = zip(heads, measures, strict=True)
    regions = [_Boxes(classes=DOTA, boxes=boxes, assign=partial(found, measure=measure)) for boxes, measure in pairs]
    return Regional(body, neck, proposals, regions)


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


class _S2ANet(nn.Module):
    """A dense head that refines its anchors, a convolution aligned with them, and a dense head of oriented filters."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.neck = ResNet(), Pyramid(CHANNELS[1:], convolved=True)
        self.first = nn.ModuleList([Tower(2), Tower(2)])
        self.first_out = nn.ModuleList([nn.Conv2d(256, DOTA, 1), nn.Conv2d(256, 5, 1)])
        self.aligned = nn.ParameterList([torch.empty(256, 256, 3, 3) for _ in range(5)])
        self.oriented = nn.Parameter(torch.empty(32, 256, 3, 3))
        self.second = nn.ModuleList([Tower(2, 256, 32), Tower(2)])
        self.second_out = nn.ModuleList([window(256, DOTA), window(256, 5)])

    def forward(self, x: Tensor) -> Tensor:
        levels = self.neck(self.body(x)[1:])
        scores = [self.first_out[0](self.first[0](level)) for level in levels]
        boxes = [self.first_out[1](self.first[1](level)) for level in levels]
        total = _loss_of_both(scores, boxes)
        again_scores, again_boxes = [], []
        for level, weight in zip(levels, self.aligned, strict=True):
            offset = torch.empty(len(level), 18, *level.shape[-2:])
            straight = F.relu(_Deformed.apply(level.float(), offset, weight), inplace=True)
            oriented = F.conv2d(straight, self.oriented.repeat(8, 1, 1, 1), padding=1)
            best = oriented.view(len(x), 32, 8, *oriented.shape[-2:]).max(2)[0]
            again_scores.append(self.second_out[0](self.second[0](best)))
            again_boxes.append(self.second_out[1](self.second[1](oriented)))
            del straight, oriented, best
        return total + _loss_of_both(again_scores, again_boxes)


def _loss_of_both(scores: Sequence[Tensor], boxes: Sequence[Tensor]) -> Tensor:
    scores, boxes = [s.float() for s in scores], [b.float() for b in boxes]
    assigned(points(scores), len(scores[0]), boxes=TILE_BOXES, measure=rotated_overlaps)
    return dense_loss(scores, boxes, classes=DOTA, numbers=5)


_ROTATED: dict[str, Build] = {
    "S2A-Net R50": _S2ANet,
    "Oriented R-CNN R50": lambda: _rotated(numbers=6, heads=(5,)),
    "RoI Transformer R50": lambda: _rotated(numbers=4, heads=(5, 5 * DOTA)),
    "Rotated Faster R-CNN R50": lambda: _rotated(numbers=4, heads=(5,)),
    "Rotated RetinaNet R50": lambda: Dense(ResNet(), classes=DOTA, numbers=5),
}


def rotated_detector(name: str) -> Build | None:
    """Return a function that builds the network of a row; None for other networks."""
    return next((build for start, build in _ROTATED.items() if name.startswith(start)), None)


# --- detectron2 -----------------------------------------------------------------------------------

_OF_DETECTRON2 = re.compile(
    r"(?:.*[:&] |.* with )?(Faster R-CNN|Mask R-CNN|Keypoint R-CNN|RetinaNet|RPN|Fast R-CNN):? "
    r"(R50|R101|X101)(?:-(C4|DC5|FPN))? [13]x$"
)


def detectron2_model(name: str) -> Build | None:
    """Return a function that builds the network of a row; None for other networks."""
    found = _OF_DETECTRON2.match(name)
    if found is None:
        return None
    head, body, kind = found.groups()
    classes = LVIS if name.startswith("LVIS") else 1 if head.startswith("Keypoint") else COCO
    groups, width = (32, 256) if body == "X101" else (1, 64)
    masks, pyramid = head == "Mask R-CNN", kind not in ("C4", "DC5")
    channels = {"C4": 1024, "DC5": 2048}.get(kind, 256)
    make = partial(ResNet, 50 if body == "R50" else 101, style="detectron2", groups=groups, width=width)

    def build() -> nn.Module:
        made = make(stages=3 if kind == "C4" else 4, dilated=kind == "DC5")
        if head == "RetinaNet":
            return DenseOfDetectron2(made)
        neck, proposals = Pyramid(CHANNELS) if pyramid else None, None
        if head != "Fast R-CNN":
            proposals = Proposals(channels, anchors=3 if pyramid else 15, assign=assigned_by_detectron2)
        heads: list[nn.Module] = []
        if head != "RPN" and kind == "C4":
            heads.append(_WholeStage(classes=classes, masks=masks))
        elif head != "RPN":
            heads.append(_Boxes(classes=classes, channels=channels))
            if masks:
                heads.append(_Masks(classes=classes, channels=channels))
            if head == "Keypoint R-CNN":
                heads.append(_Keypoints())
        return Regional(made, neck, proposals, heads)

    return build
