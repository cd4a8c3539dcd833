"""The memory of a detector's operations on boxes: overlaps, losses of anchors, pooled regions.

Numbers of anchors, samples and boxes are fixed, so nothing here depends on data: matching another anchor does not change a size.
Overlaps are computed on the GPU for all anchors and boxes of an image, and their temporaries can be the peak of a run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

COCO_BOXES = 93
"""The largest number of boxes in a picture of COCO's train2017, as usually given; not checked against the annotations."""


def overlaps(boxes: Tensor, anchors: Tensor) -> Tensor:
    """Return the intersection over union of each box with each anchor, computed as mmdetection's ``bbox_overlaps`` does."""
    sizes = (boxes[:, 2:] - boxes[:, :2]).prod(1), (anchors[:, 2:] - anchors[:, :2]).prod(1)
    low = torch.max(boxes[:, None, :2], anchors[None, :, :2])
    high = torch.min(boxes[:, None, 2:], anchors[None, :, 2:])
    extent = (high - low).clamp(min=0)
    common = extent[..., 0] * extent[..., 1]
    union = sizes[0][:, None] + sizes[1][None, :] - common
    union = torch.max(union, union.new_tensor([1e-6]))
    return common / union


def rotated_overlaps(boxes: Tensor, anchors: Tensor) -> Tensor:
    """Return an empty matrix: mmcv's kernel for rotated boxes has no temporaries."""
    return anchors.new_empty(len(boxes), len(anchors))


def assign(matrix: Tensor) -> Tensor:
    best, which = matrix.max(0)
    closest, _ = matrix.max(1)
    found = torch.full_like(which, -1)
    found = torch.where(best >= 0.5, which + 1, found)
    return torch.where((matrix == closest[:, None]).any(0), which + 1, found)


def assigned(
    count: int, images: int, *, boxes: int = COCO_BOXES, measure: Callable[[Tensor, Tensor], Tensor] = overlaps
) -> None:
    """Assign ``count`` anchors to ``boxes`` boxes in each image."""
    width = 5 if measure is rotated_overlaps else 4
    anchors = torch.empty(count, width)
    for _ in range(images):
        assign(measure(torch.empty(boxes, width), anchors))


def assigned_by_detectron2(count: int, images: int) -> None:
    """Assign ``count`` anchors to boxes in each image; the overlaps have fewer temporaries than mmdetection's."""
    anchors = torch.empty(count, 4)
    for _ in range(images):
        boxes = torch.empty(COCO_BOXES, 4)
        extent = torch.min(boxes[:, None, 2:], anchors[:, 2:]) - torch.max(boxes[:, None, :2], anchors[:, :2])
        common = extent.clamp_(min=0).prod(2)
        del extent
        union = torch.empty(COCO_BOXES, 1) + torch.empty(count) - common
        assign(torch.where(common > 0, common / union, torch.zeros(1)))


def flat(scores: Tensor, columns: int) -> Tensor:
    """Return the scores of a level with one row per anchor."""
    return scores.permute(0, 2, 3, 1).reshape(-1, columns)


def points(levels: Sequence[Tensor]) -> int:
    return sum(level[0, 0].numel() for level in levels)


class _Focal(torch.autograd.Function):
    """mmcv's sigmoid focal loss: one kernel each way, which keeps the scores."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor) -> Tensor:
        ctx.save_for_backward(scores)
        return torch.empty_like(scores)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (scores,) = ctx.saved_tensors
        return torch.empty_like(scores)


def dense_loss(scores: Sequence[Tensor], boxes: Sequence[Tensor], *, classes: int, numbers: int) -> Tensor:
    """Return the focal loss of every anchor and the L1 loss of its box, level by level."""
    total = torch.zeros(())
    for score, box in zip(scores, boxes, strict=True):
        each = _Focal.apply(flat(score, classes))
        total = total + (each * each.new_empty(len(each), 1)).sum()
        found = flat(box, numbers)
        target, weight = torch.empty_like(found), torch.empty_like(found)
        total = total + ((found - target).abs() * weight).sum()
    return total


def focal_loss_of_detectron2(scores: Sequence[Tensor], boxes: Sequence[Tensor], *, classes: int) -> Tensor:
    """Return the same of separate operations over all levels together."""
    images = len(scores[0])
    found = torch.cat([flat(score, classes).view(images, -1, classes) for score in scores], 1).view(-1, classes)
    moved = torch.cat([flat(box, 4).view(images, -1, 4) for box in boxes], 1).view(-1, 4)
    target, kept = torch.zeros_like(found), torch.empty(len(found), dtype=torch.long)  # few anchors are left out
    scored, wanted = found[kept], target[kept]
    chance = scored.sigmoid()
    each = F.binary_cross_entropy_with_logits(scored, wanted, reduction="none")
    right = chance * wanted + (1 - chance) * (1 - wanted)
    each = each * (1 - right) ** 2.0
    each = (0.25 * wanted + 0.75 * (1 - wanted)) * each
    matched = moved[torch.empty(10 * COCO_BOXES, dtype=torch.long)]
    return each.sum() + F.smooth_l1_loss(matched, torch.empty_like(matched))


def proposal_loss(scores: Sequence[Tensor], boxes: Sequence[Tensor], *, numbers: int) -> Tensor:
    """Return the loss of a proposal network: weights of anchors that are not sampled are zero."""
    total = torch.zeros(())
    for score, box in zip(scores, boxes, strict=True):
        found = flat(score, 1)
        each = F.binary_cross_entropy_with_logits(found, torch.empty_like(found), reduction="none")
        total = total + (each * torch.empty_like(each)).sum()
        moved = flat(box, numbers)
        each = F.smooth_l1_loss(moved, torch.empty_like(moved), reduction="none", beta=1 / 9)
        total = total + (each * torch.empty_like(each)).sum()
    return total


class _Aligned(torch.autograd.Function):
    """Regions of a map, pooled; the gradient fills a whole map."""

    @staticmethod
    def forward(ctx: Any, features: Tensor, count: int, side: int) -> Tensor:
        ctx.features = features.shape
        return features.new_empty(count, features.shape[1], side, side)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient.new_zeros(ctx.features), None, None


def pooled(levels: Sequence[Tensor], count: int, side: int) -> Tensor:
    """Return ``count`` regions pooled in FP32, an equal share from each level, in the format of the features."""
    features = [level.float() for level in levels]
    found = features[0].new_zeros(count, features[0].shape[1], side, side)
    share = count // len(features)
    for level in features:
        found[torch.empty(share, dtype=torch.long)] = _Aligned.apply(level, share, side)
    return found.to(levels[0].dtype)
