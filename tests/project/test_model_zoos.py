"""The model zoos' trainings, whose memory is predicted: their sizes are the published ones, and what the rows' libraries did is there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from mezzo.measure.predict.recorder import Recorder
from mezzo.measure.predict.tape_memory import predict_memory
from paths import ROOT

if not (ROOT / "benchmarks").is_dir():
    pytest.skip("the benchmarks are not beside these tests", allow_module_level=True)
from benchmarks.prediction.zoo.boxes import overlaps, rotated_overlaps
from benchmarks.prediction.zoo.detectors import detector, detectron2_model, rotated_detector
from benchmarks.prediction.zoo.memory_rows import row
from benchmarks.prediction.zoo.pairs import predicted_bytes, zeroing
from benchmarks.prediction.zoo.trainings import NotBuilt
from benchmarks.prediction.zoo.yolo import Averaged, yolo

ROW = {
    "pair_id": "",
    "model": "RetinaNet R-50-FPN",
    "source_repo": "open-mmlab/mmdetection",
    "gpu": "V100",
    "n_gpus": "8",
    "batch_per_gpu": "2",
    "input": "1333x800 (short side 800, long <=1333)",
    "precision": "fp32",
    "compiled": "no",
    "measured_mib": "3891",
}


@pytest.mark.parametrize(
    ("find", "name", "millions"),
    [
        # mmdetection's get_flops.py, which leaves out what is frozen
        (detector, "RetinaNet R-50-FPN", 37.74),
        (detector, "RetinaNet R-101-FPN", 56.74),
        (detector, "Faster R-CNN R-50-FPN", 41.53),
        (detector, "Mask R-CNN R-50-FPN", 44.17),
        # the tables of MMRotate's followers, such as LSKNet's (2023): one decimal
        (rotated_detector, "Oriented R-CNN R50-FPN le90", 41.1),
        (rotated_detector, "RoI Transformer R50-FPN le90", 55.1),
        (rotated_detector, "Rotated Faster R-CNN R50", 41.1),
        (rotated_detector, "S2A-Net R50-FPN le135", 38.6),
        # Liu and others, "Swin Transformer" (2021), table 2
        (detector, "Mask R-CNN Swin-T 1x", 48),
        (detector, "Mask R-CNN Swin-S 3x ms-crop", 69),
        # ultralytics/yolov5's README, and mmyolo's page on ionograms
        (yolo, "YOLOv5-n P5 mask-refine=No", 1.9),
        (yolo, "YOLOv5-s P5 mask-refine=No", 7.2),
        (yolo, "YOLOv5-m P5 mask-refine=No", 21.2),
        (yolo, "YOLOv5-l P5 mask-refine=No", 46.6),
        (yolo, "YOLOv5-x P5 mask-refine=No", 86.7),
        (yolo, "YOLOv5-s P6 mask-refine=No", 12.6),
        (yolo, "YOLOv5-l P6 mask-refine=No", 76.8),
        (yolo, "YOLOv5-s (ionogram, 1 GPU)", 7.036),
    ],
)
def test_networks_have_the_published_number_of_weights(find: Callable[[str], Any], name: str, millions: float) -> None:
    with torch.device("meta"):
        network = find(name)()
    decimals = len(str(millions).partition(".")[2])
    trained = sum(p.numel() for p in network.parameters() if p.requires_grad)
    assert round(trained / 1e6, decimals) == millions


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("Faster R-CNN: R50-C4 1x", ["Proposals", "_WholeStage"]),
        ("Faster R-CNN: R50-DC5 3x", ["Proposals", "_Boxes"]),
        ("RetinaNet: R101 3x", []),
        ("RPN & Fast R-CNN: Fast R-CNN R50-FPN 1x", ["Pyramid", "_Boxes"]),
        (
            "COCO Person Keypoint Detection Baselines with Keypoint R-CNN X101-FPN 3x",
            ["Pyramid", "Proposals", "_Boxes", "_Keypoints"],
        ),
        ("COCO Panoptic Segmentation Baselines with Panoptic FPN R50-FPN 1x", None),
        ("Cityscapes & Pascal VOC Baselines R50-C4, VOC", None),
    ],
)
def test_rows_of_detectron2_are_told_apart(name: str, parts: list[str] | None) -> None:
    build = detectron2_model(name)
    if build is None:
        assert parts is None
        return
    with torch.device("meta"):
        network: Any = build()
    if not parts:
        assert type(network).__name__ == "DenseOfDetectron2"
        return
    found = [part for part in (network.neck, network.proposals, *network.heads) if part is not None]
    assert [type(part).__name__ for part in found] == parts


@pytest.mark.parametrize(("measure", "numbers", "bytes_a_pair"), [(overlaps, 4, 36), (rotated_overlaps, 5, 4)])
def test_overlaps_take_their_temporaries(measure: Callable[..., Tensor], numbers: int, bytes_a_pair: int) -> None:
    """Three pairs of numbers, three numbers: 36 bytes for each box and anchor, and one number by the kernel."""
    boxes, anchors = 64, 4096
    recorder = Recorder(batch=1)
    with FakeTensorMode(), recorder:
        recorder.begin("forward")
        measure(torch.empty(boxes, numbers), torch.empty(anchors, numbers))
    inputs = (boxes + anchors) * numbers * 4
    small = anchors * 64  # areas, and what stands for the boxes
    peak = predict_memory(recorder.tape).allocated_bytes - inputs
    assert bytes_a_pair * boxes * anchors <= peak <= bytes_a_pair * boxes * anchors + small


def test_gradients_stay_as_zeros() -> None:
    layer = nn.Linear(2, 1)
    optimizer = zeroing(torch.optim.SGD, layer.parameters())
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.zero_grad()
    assert layer.weight.grad is not None
    assert layer.weight.grad.tolist() == [[0.0, 0.0]]


def test_the_average_of_a_model_is_not_trained() -> None:
    model = Averaged(nn.Linear(3, 2))
    assert [name for name, p in model.named_parameters() if p.requires_grad] == ["network.weight", "network.bias"]
    assert [p.numel() for p in model.average.parameters()] == [6, 2]


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"compiled": "torch.compile"}, "torch.compile"),
        ({"precision": "bf16"}, "a precision that is neither FP32 nor automatic mixed precision"),
        ({"model": "YOLOX-s"}, "the model zoo of the row is not built here"),
    ],
)
def test_rows_that_are_not_built_say_why(changed: dict[str, str], reason: str) -> None:
    with pytest.raises(NotBuilt) as error:
        predicted_bytes({**ROW, **changed})
    assert str(error.value) == reason


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changed", "mib"),
    [
        ({}, 3775),
        ({"precision": "fp16 (mmcv Fp16OptimizerHook, O1-like or autocast by torch version)"}, 2737),
        ({"model": "Mask R-CNN Swin-T 1x"}, 7048),
        ({"model": "Oriented R-CNN R50-FPN le90", "gpu": "1080 Ti", "n_gpus": "1"}, 8668),
        ({"model": "RetinaNet: R50 1x", "source_repo": "facebookresearch/detectron2"}, 3814),
        (
            {
                "model": "YOLOv5-s P5 mask-refine=No",
                "input": "640 square",
                "batch_per_gpu": "16",
                "precision": "fp16 AMP",
            },
            2825,
        ),
    ],
)
def test_predicted_memory_stays(changed: dict[str, str], mib: int) -> None:
    """The figures of docs/predict.md stand on these; a change of the predictor shows here."""
    assert row({**ROW, **changed}).predicted_bytes >> 20 == mib
