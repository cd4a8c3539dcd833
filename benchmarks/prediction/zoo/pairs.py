"""The trainings of gpu_memory_pairs.csv that can be built here, in FP32 and under automatic mixed precision.

- mmsegmentation's networks on a dilated ResNet; mmdetection's, detectron2's and mmrotate's detectors; mmyolo's YOLOv5 and YOLOv8.
- BERT-base on MRPC with transformers' trainer, which updated one parameter after another; the memory that nvidia-smi showed.

All ran before torch 2.0, so gradients stayed allocated as zeros. With several GPUs, the buckets of data parallelism contain
every gradient once more.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.prediction.zoo.detectors import detector, detectron2_model, rotated_detector
from benchmarks.prediction.zoo.segmenters import pictures, segmenter, two_losses
from benchmarks.prediction.zoo.trainings import Inputs, NotBuilt, Training, installed, loss_alone, text
from benchmarks.prediction.zoo.yolo import squares, yolo, yolo_loss
from benchmarks.prediction.zoo.yolov8 import yolov8, yolov8_loss
from mezzo.measure.predict.tape_memory import DRIVER_BYTES, predict_memory
from mezzo.measure.predict.time import HALF_FORMATS
from mezzo.measure.predict.training import record_training
from mezzo.policy import Policy

MMCV = "fp16 (mmcv Fp16OptimizerHook"
PRECISIONS = {
    "fp32": None,
    **dict.fromkeys(("fp16 AMP", "fp16 AMP (--fp16)", "fp16 autocast", f"{MMCV})"), "fp16"),
    f"{MMCV}, O1-like or autocast by torch version)": "fp16-master",
}
"""The policy of a row. mmdetection's of July 2020 is mmcv's own, before torch had autocast: weights in FP16 with masters in FP32."""
NOT_BUILT = {
    "SECOND|PointPillars|MinkUNet": "the number of points and voxels decides every size, and the row does not state it",
    "ReDet": "convolutions that are equivariant to rotations, by a library of their own",
    "tsn|slowonly|swin-tiny|Slow|TPN|TIN": "video: clips or batch are not stated, only named in a configuration",
    "YOLOv5.* mask": "masks of the instances, whose number the row does not state",
    "YOLOX|YOLOv6|YOLOv7": "pictures of sizes that are drawn at random, or another network of mmyolo: not built",
    "COCO Panoptic|Cityscapes": "a segmentation head, other data or another number of classes beside the detector: not built",
    "Swin-giant": "the network's sizes are not stated",
}
"""Reasons by how the name of a row begins."""
_PHOTOGRAPH, _TILE = (800, 1333), (1024, 1024)
_LARGEST_CROP = 1250, 1333
"""The largest size that the multi-scale configurations allow: an enlarged crop of 600x384, in a batch with a photograph."""
_SGD = partial(torch.optim.SGD, lr=0.01, momentum=0.9, foreach=False)


def predicted_bytes(cells: Mapping[str, str]) -> int:
    """Return the predicted peak of a row: what is allocated, or the memory of the device if the row counts that.

    Raises:
        NotBuilt: the row's training cannot be built.
    """
    if cells["compiled"] != "no":
        raise NotBuilt("torch.compile, which fuses operations and keeps other tensors")
    if cells["precision"] not in PRECISIONS:
        raise NotBuilt("weights in 8 or 16 bits, optimizers on the host or by other libraries: not in the predictor")
    policy = PRECISIONS[cells["precision"]]
    zoo, optimizer, of_device = _zoo_of(cells)
    with _trying_algorithms():
        tape = record_training(
            zoo.build,
            zoo.batch_of,
            zoo.loss_of,
            batch=int(cells["batch_per_gpu"]),
            optimizer=partial(zeroing, optimizer),
            policy=None if policy is None else Policy.parse(policy),
        )
    limit_bytes = 32 * 2**30 - DRIVER_BYTES if cells["gpu"] == "V100 32GB" else None
    formats = () if cells["gpu"].startswith("1080 Ti") else HALF_FORMATS  # Pascal has no matrix units
    memory = predict_memory(tape, limit_bytes=limit_bytes, matrix_formats=formats)
    with torch.device("meta"):
        trained = sum(p.numel() for p in zoo.build().parameters() if p.requires_grad)
    # The buckets of data parallelism, and the FP16 and FP32 gradients that mmcv's hook kept during the forward pass.
    masters, alone = policy == "fp16-master", cells["n_gpus"] in ("1", "")  # VOC's rows name no number: one GPU
    beside = (0 if alone else 2 if masters else 4) + (2 + 4 if masters else 0)
    inside = memory.reserved_bytes + DRIVER_BYTES if of_device else memory.allocated_bytes
    return inside + beside * trained


@contextmanager
def _trying_algorithms() -> Iterator[None]:
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


def _zoo_of(cells: Mapping[str, str]) -> tuple[Training, Any, bool]:
    """Return a row's training, its optimizer, and whether the row counts the memory of the whole device."""
    name = cells["model"]
    if cells["pair_id"].startswith("hf-bert-base-mrpc"):
        sentences = partial(text, 128, words=("input_ids",), masked=True, each=("labels",))
        return Training(_bert, sentences, loss_alone), partial(torch.optim.AdamW, lr=2e-5, foreach=False), True
    if (build := segmenter(name)) is not None:
        height, width = map(int, cells["input"].split("x"))
        return Training(build, partial(pictures, height, width), two_losses), _SGD, False
    loss, build = (yolo_loss, yolo(name)) if (later := yolov8(name)) is None else (yolov8_loss, later)
    if build is not None:
        side = int(cells["input"].replace("x", " ").split()[0])
        nesterov = partial(torch.optim.SGD, lr=0.01, momentum=0.937, nesterov=True)
        return Training(build, partial(squares, side), loss), nesterov, "ionogram" in name  # a share of the card
    of_detectron2 = cells["source_repo"].endswith("detectron2")
    size: tuple[int, int] = _PHOTOGRAPH
    optimizer: Any = _SGD
    build = detectron2_model(name) if of_detectron2 else detector(name)
    if build is None and (build := rotated_detector(name)) is not None:
        size = _TILE
    if build is None:
        raise NotBuilt(
            next((why for words, why in NOT_BUILT.items() if re.match(words, name)), "a network that is not built here")
        )
    if "Swin" in name:
        size = size if name.endswith("1x") else _LARGEST_CROP
        optimizer = partial(torch.optim.AdamW, lr=1e-4, foreach=False)
    return Training(build, partial(photographs, *size), model_loss), optimizer, False


def photographs(height: int, width: int, n: int) -> dict[str, Tensor]:
    return {"x": torch.empty(n, 3, -(-height // 32) * 32, -(-width // 32) * 32)}


def model_loss(model: nn.Module, inputs: Inputs) -> tuple[Tensor, Any]:
    """Return the loss, which the model computes; the loop keeps no outputs."""
    return model(inputs["x"]), None


def zeroing(make: Any, parameters: Any) -> torch.optim.Optimizer:
    """Return an optimizer whose ``zero_grad`` fills gradients with zeros, as it did before torch 2.0: all rows are older."""
    made: Any = make(parameters)
    made.zero_grad = partial(made.zero_grad, set_to_none=False)
    return made  # type: ignore[no-any-return]


def _bert() -> nn.Module:
    tr = installed("transformers")
    config = tr.BertConfig(vocab_size=28996, attn_implementation="eager", problem_type="single_label_classification")
    return tr.BertForSequenceClassification(config)  # type: ignore[no-any-return]
