"""The trainings of gpu_memory_pairs.csv that can be built here, in FP32 and under automatic mixed precision.

- mmsegmentation's networks on a dilated ResNet; mmdetection's, detectron2's and mmrotate's detectors; mmyolo's YOLOv5.
- BERT-base on MRPC with transformers' trainer, which updated one parameter after another; the memory that nvidia-smi showed.

All ran before torch 2.0, so gradients stayed allocated as zeros. With several GPUs, the buckets of data parallelism contain
every gradient once more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.prediction.zoo.detectors import detector, own_loss, photographs
from benchmarks.prediction.zoo.detectron2 import detectron2_model
from benchmarks.prediction.zoo.named import NotBuilt, installed
from benchmarks.prediction.zoo.rotated import rotated_detector
from benchmarks.prediction.zoo.segmenters import pictures, segmenter, two_losses
from benchmarks.prediction.zoo.swin import swin_detector
from benchmarks.prediction.zoo.yolo import squares, yolo, yolo_loss
from mezzo.measure.predict.tape_memory import DRIVER_BYTES
from mezzo.measure.predict.time import HALF_FORMATS
from mezzo.measure.predict.training import record_training
from mezzo.policy import Policy

PRECISIONS = {
    "fp32": None,
    "fp16 AMP": "fp16",
    "fp16 AMP (--fp16)": "fp16",
    "fp16 autocast": "fp16",
    "fp16 (mmcv Fp16OptimizerHook)": "fp16",
    "fp16 (mmcv Fp16OptimizerHook, O1-like or autocast by torch version)": "fp16-master",
}
"""The policy of a row. mmdetection's of July 2020 is mmcv's own, before torch had autocast: weights in FP16 with masters in FP32."""
_PHOTOGRAPH = 800, 1333
_LARGEST_CROP = 1250, 1333
"""The largest size that the multi-scale configurations allow: an enlarged crop of 600x384, in a batch with a photograph."""
_TILE = 1024, 1024


@dataclass(frozen=True)
class _Zoo:
    """A row's training without its batch and precision."""

    parts: tuple[Any, Any, Any]
    optimizer: Any
    of_device: bool = False
    """Whether the row counts the memory of the whole device."""


class Training:
    """A row's training as a tape, and the memory that the tape does not contain."""

    def __init__(self, cells: Mapping[str, str]) -> None:
        """Trace the row.

        Raises:
            NotBuilt: the row's training cannot be built.
        """
        if cells["compiled"] != "no":
            raise NotBuilt("torch.compile")
        if cells["precision"] not in PRECISIONS:
            raise NotBuilt("a precision that is neither FP32 nor automatic mixed precision")
        policy = PRECISIONS[cells["precision"]]
        zoo = _zoo_of(cells)
        self.of_device = zoo.of_device
        with _winograd():
            self.tape = record_training(
                *zoo.parts,
                batch=int(cells["batch_per_gpu"]),
                optimizer=partial(_zeroing, zoo.optimizer),
                policy=None if policy is None else Policy.parse(policy),
            )
        trained = _num_trained(zoo.parts[0])
        size = 2 if policy == "fp16-master" else 4
        alone = cells["n_gpus"] in ("1", "")  # VOC's rows name no number: configurations of one GPU
        self.beside_bytes = 0 if alone else size * trained
        """The buckets of data parallelism, and the FP16 and FP32 gradients that mmcv's hook kept during the forward pass."""
        if policy == "fp16-master":
            self.beside_bytes += (2 + 4) * trained
        self.matrix_formats = () if cells["gpu"].startswith("1080 Ti") else HALF_FORMATS
        """The formats of the card's matrix units: Volta's and Ampere's FP16; Pascal has none."""
        self.limit_bytes = 32 * 2**30 - DRIVER_BYTES if cells["gpu"] == "V100 32GB" else None


def _zoo_of(cells: Mapping[str, str]) -> _Zoo:
    name, momentum = cells["model"], partial(torch.optim.SGD, lr=0.01, momentum=0.9, foreach=False)
    if cells["pair_id"].startswith("hf-bert-base-mrpc"):
        optimizer = partial(torch.optim.AdamW, lr=2e-5, foreach=False)
        return _Zoo((_bert, _sentences, _loss_of_bert), optimizer, of_device=True)
    if (build := segmenter(name)) is not None:
        height, width = map(int, cells["input"].split("x"))
        return _Zoo((build, partial(pictures, height, width), two_losses), momentum)
    if (build := yolo(name)) is not None:
        side = int(cells["input"].replace("x", " ").split()[0])
        nesterov = partial(torch.optim.SGD, lr=0.01, momentum=0.937, nesterov=True)
        shares = "ionogram" in name  # the row is the share of the card
        return _Zoo((build, partial(squares, side), yolo_loss), nesterov, of_device=shares)
    build = detectron2_model(name) if cells["source_repo"].endswith("detectron2") else detector(name)
    if build is not None:
        return _Zoo((build, partial(photographs, *_PHOTOGRAPH), own_loss), momentum)
    if (build := swin_detector(name)) is not None:
        size = _PHOTOGRAPH if name.endswith("1x") else _LARGEST_CROP
        adamw = partial(torch.optim.AdamW, lr=1e-4, foreach=False)
        return _Zoo((build, partial(photographs, *size), own_loss), adamw)
    if (build := rotated_detector(name)) is not None:
        return _Zoo((build, partial(photographs, *_TILE), own_loss), momentum)
    raise NotBuilt("the model zoo of the row is not built here")


def _num_trained(build: Any) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in build().parameters() if p.requires_grad)


def _zeroing(make: Any, parameters: Any) -> torch.optim.Optimizer:
    """Return an optimizer whose ``zero_grad`` fills gradients with zeros, as it did before torch 2.0: all rows are older."""
    made: Any = make(parameters)
    made.zero_grad = partial(made.zero_grad, set_to_none=False)
    return made  # type: ignore[no-any-return]


@contextmanager
def _winograd() -> Iterator[None]:
    """Let FP32 convolutions use Winograd's buffers in the block.

    mmsegmentation and mmyolo let cuDNN try its algorithms (``cudnn_benchmark=True``). The detectors do not, but cuDNN 7 apparently chose
    this one by itself: nothing else explains the peak of detectron2's Fast R-CNN, which has neither proposals to learn nor a mask.
    """
    own = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = own


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


def _loss_of_bert(model: nn.Module, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Any]:
    return model(**inputs).loss, None
