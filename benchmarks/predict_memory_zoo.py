"""The trainings of gpu_memory_pairs.csv that can be built here, in FP32 and under automatic mixed precision.

- mmsegmentation's FCN and PSPNet on a dilated ResNet (``configs/_base_/models``): a stem of three convolutions, a head, an auxiliary
  head, both losses at the size of the labels. Data parallel: its buckets hold every gradient once more.
- BERT-base on MRPC with transformers' trainer, which updated one parameter after another; what nvidia-smi showed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mezzo.measure.predict.training import record_training
from mezzo.policy import Policy
from predict_models import NotBuilt, installed

_CLASSES = 19
"""Of Cityscapes."""
_SEGMENTATION = re.compile(r"(FCN|PSPNet) R-(50|101)(b?)-D8$")


class Training:
    """A row's training as a tape, and what lies beside it."""

    def __init__(self, cells: Mapping[str, str]) -> None:
        """Trace the row.

        Raises:
            NotBuilt: the row's training cannot be built.
        """
        if cells["compiled"] != "no":
            raise NotBuilt("torch.compile")
        policy = {"fp32": None, "fp16 AMP": "fp16", "fp16 AMP (--fp16)": "fp16"}.get(cells["precision"], "")
        if policy == "":
            raise NotBuilt("a precision that is neither FP32 nor automatic mixed precision")
        self.of_device = cells["pair_id"].startswith("hf-bert-base-mrpc")
        optimizer: Any
        if self.of_device:
            parts: Any = (_bert, _sentences, _own_loss)
            optimizer = partial(torch.optim.AdamW, lr=2e-5, foreach=False)
        elif (found := _SEGMENTATION.match(cells["model"])) is not None:
            height, width = map(int, cells["input"].split("x"))
            head, depth, plain = found.groups()
            parts = (partial(_Segmenter, head, int(depth), not plain), partial(_pictures, height, width), _two_losses)
            optimizer = partial(torch.optim.SGD, lr=0.01, momentum=0.9)
        else:
            raise NotBuilt("the model zoo of the row is not built here")
        self.tape = record_training(
            *parts,
            batch=int(cells["batch_per_gpu"]),
            optimizer=optimizer,
            policy=None if policy is None else Policy.parse(policy),
        )
        self.bucket_bytes = sum(block.size_bytes for block in self.tape.blocks if block.kind == "parameters")


def _bert() -> nn.Module:
    tr = installed("transformers")
    config = tr.BertConfig(vocab_size=28996, attn_implementation="eager", problem_type="single_label_classification")
    made: nn.Module = tr.BertForSequenceClassification(config)
    return made


def _sentences(n: int) -> dict[str, Tensor]:
    ids = torch.empty(n, 128, dtype=torch.long)
    return {
        "input_ids": ids,
        "attention_mask": torch.empty(n, 1, 1, 128),
        "labels": torch.empty(n, dtype=torch.long),
    }


def _own_loss(model: nn.Module, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Any]:
    return model(**inputs).loss, None


def _pictures(height: int, width: int, n: int) -> dict[str, Tensor]:
    return {"x": torch.empty(n, 3, height, width), "y": torch.empty(n, height, width, dtype=torch.long)}


def _two_losses(model: nn.Module, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Any]:
    losses = []
    for scores in model(inputs["x"]):
        large = F.interpolate(scores.float(), inputs["y"].shape[-2:], mode="bilinear", align_corners=False)
        losses.append(F.cross_entropy(large, inputs["y"], reduction="none").mean())
    return losses[0] + 0.4 * losses[1], None


def _convolved(channels_in: int, channels_out: int, size: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, size, stride=stride, padding=size // 2, bias=False),
        nn.BatchNorm2d(channels_out),
        nn.ReLU(inplace=True),
    )


class _Segmenter(nn.Module):
    """A ResNet at an eighth of the resolution with a head and an auxiliary head."""

    def __init__(self, head: str, depth: int, deep_stem: bool) -> None:
        super().__init__()
        models = installed("torchvision").models
        net = getattr(models, f"resnet{depth}")(replace_stride_with_dilation=[False, True, True])
        stem = [net.conv1, net.bn1, net.relu]
        if deep_stem:
            stem = [_convolved(3, 32, 3, stride=2), _convolved(32, 32, 3), _convolved(32, 64, 3)]
        self.early = nn.Sequential(*stem, net.maxpool, net.layer1, net.layer2, net.layer3)
        self.last = net.layer4
        self.pools = nn.ModuleList(
            nn.Sequential(nn.AdaptiveAvgPool2d(bins), _convolved(2048, 512, 1))
            for bins in ((1, 2, 3, 6) if head == "PSPNet" else ())
        )
        self.middle = (
            nn.Identity() if head == "PSPNet" else nn.Sequential(*[_convolved(w, 512, 3) for w in (2048, 512)])
        )
        self.joined = _convolved(4096 if head == "PSPNet" else 2560, 512, 3)
        self.scores = nn.Sequential(nn.Dropout2d(0.1), nn.Conv2d(512, _CLASSES, 1))
        self.auxiliary = nn.Sequential(_convolved(1024, 256, 3), nn.Dropout2d(0.1), nn.Conv2d(256, _CLASSES, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scores of the head and of the auxiliary head."""
        early = self.early(x)
        last = self.last(early)
        if len(self.pools) > 0:
            size = last.shape[-2:]
            parts = [F.interpolate(pool(last), size, mode="bilinear", align_corners=False) for pool in self.pools]
        else:
            parts = [self.middle(last)]
        return self.scores(self.joined(torch.cat([last, *parts], 1))), self.auxiliary(early)
