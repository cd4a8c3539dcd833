"""The model zoos' trainings, whose memory is predicted: their sizes are the published ones, and what the rows' libraries did is there."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from mezzo.measure.predict.recorder import Recorder
from mezzo.measure.predict.tape_memory import predict_memory
from mezzo.measure.predict.training import record_training
from paths import ROOT

if not (ROOT / "benchmarks").is_dir():
    pytest.skip("the benchmarks are not beside these tests", allow_module_level=True)
from benchmarks.prediction.zoo import trainings
from benchmarks.prediction.zoo.boxes import overlaps, rotated_overlaps
from benchmarks.prediction.zoo.detectors import detector, detectron2_model, rotated_detector
from benchmarks.prediction.zoo.memory_rows import row
from benchmarks.prediction.zoo.pairs import predicted_bytes, zeroing
from benchmarks.prediction.zoo.trainings import NotBuilt, training
from benchmarks.prediction.zoo.transformer_xl import transformer_xl
from benchmarks.prediction.zoo.yolo import Averaged, yolo
from benchmarks.prediction.zoo.yolov8 import yolov8, yolov8_loss

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


def _xl(name: str) -> Any:
    built = transformer_xl(name)
    return built and built[0]


XMEM = {
    "model": "google-t5/t5-small", "library": "transformers (from_config, random init)", "optimizer": "AdamW", "batch": "8",
    "gpu": "RTX 3060", "gpu_total_bytes": str(12 * 2**30), "measured_peak_bytes": "2000000000", "real_oom": "0", "zero_grad_mode": "0",
}  # fmt: skip


def test_t5_is_traced_as_transformers_of_early_2025_ran_it() -> None:
    """4.50.3 itself has 2,192 MiB; version 5, whose kernel keeps no probabilities, 1,992."""
    pytest.importorskip("transformers", reason="transformers builds the model")
    found = row(XMEM)
    assert found.predicted_bytes / 2**20 == pytest.approx(2192, rel=0.005)
    assert found.right == [True]


def test_a_job_that_ran_out_of_memory_has_an_answer() -> None:
    pytest.importorskip("transformers", reason="transformers builds the model")
    found = row(XMEM | {"batch": "256", "real_oom": "1"})
    assert (found.measured_bytes, found.right) == (0, [True])


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
        # ultralytics' table of YOLOv8, and its printed summaries
        (yolov8, "YOLOv8-n P5 mask-refine=No", 3.157),
        (yolov8, "YOLOv8-m P5 mask-refine=Yes", 25.90),
        (yolov8, "YOLOv8-x P5 mask-refine=No", 68.23),
        # transformers' transfo-xl-wt103, and NVIDIA's README of the base size
        (_xl, "transformer-xl base", 192),
        (_xl, "Transformer-XL large", 284),
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
        ({"compiled": "torch.compile"}, "torch.compile, which fuses operations and keeps other tensors"),
        (
            {"precision": "INT8"},
            "weights in 8 or 16 bits, optimizers on the host or by other libraries: not in the predictor",
        ),
        ({"model": "YOLOX-s"}, "pictures of sizes that are drawn at random, or another network of mmyolo: not built"),
        ({"model": "nothing"}, "a network that is not built here"),
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


def test_the_assigner_of_yolov8_sees_all_cells_with_all_boxes() -> None:
    with FakeTensorMode(), Recorder(batch=2) as recorder:
        scores, distances = torch.empty(2, 84, 80, requires_grad=True), torch.empty(2, 84, 64, requires_grad=True)
        recorder.begin("forward")
        loss, _ = yolov8_loss(lambda x: (scores, distances), {"x": torch.empty(2, 3, 64, 64)})  # type: ignore[arg-type]
    assert loss.shape == ()
    assert max(block.size_bytes for block in recorder.tape.blocks) == 2 * 93 * 84 * 4 * 4


@pytest.mark.parametrize(("name", "length"), [("transformer-xl base", "32"), ("t5-small", "32")])
def test_language_models_of_the_throughput_tables_are_traced(name: str, length: str) -> None:
    if name.startswith("t5"):
        for library in ("timm", "transformers"):
            pytest.importorskip(library, reason="timm's names are compared, and transformers builds the model")
    found = training(name, length)
    tape = record_training(found.build, found.batch_of, found.loss_of, batch=2, optimizer=torch.optim.SGD, steps=1)
    products = 6 * 2 * int(length) * sum(block.size_bytes for block in tape.blocks if block.kind == "parameters") // 4
    assert found.kind == "language transformer"
    assert 0 < sum(op.flops for op in tape.operations) < 2 * products


def test_a_model_that_nobody_has_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    no_timm = SimpleNamespace(layers=SimpleNamespace(set_fused_attn=lambda _: None), list_models=list)
    real = trainings.installed
    monkeypatch.setattr(trainings, "installed", lambda name: no_timm if name == "timm" else real(name))
    with pytest.raises(NotBuilt, match="neither timm nor transformers has a model nosuch"):
        training("nosuch", "224")
