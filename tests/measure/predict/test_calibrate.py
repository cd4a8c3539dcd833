"""Rates of this machine: measured on a few probes, saved, read again; a step's operations are those of its tape."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from helpers_predict import trained_tape
from mezzo.measure.predict import calibrate as module
from mezzo.measure.predict.calibrate import (
    Probe,
    Stopwatch,
    calibrate,
    device_name,
    least_seconds,
    loss_of,
    path_of,
    probes,
    saved_calibration,
)
from mezzo.measure.predict.rates import kind_of
from mezzo.measure.predict.training import record_training


def _small(width: int) -> Probe:
    return Probe(
        "dense",
        lambda: nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 4)),
        lambda: (torch.randn(8, width), torch.zeros(8, dtype=torch.long)),
        partial(torch.optim.SGD, lr=0.1),
    )


def test_a_calibration_is_kept_and_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(module, "probes", lambda scale: [_small(16), _small(64)])
    monkeypatch.setattr(module, "_PROBE_S", 0.05)
    assert saved_calibration(device_name("cpu")) is None
    notes: list[str] = []
    found = calibrate("cpu", note=notes.append)
    found.save()
    assert saved_calibration(found.device) == found
    assert found.path == path_of(found.device)
    assert found.path.is_relative_to(tmp_path / "mezzo" / "calibration")
    assert "addmm fp32 thin rows" in found.rates["fp32"].lines
    assert notes[-1].endswith("dense, 2 of 2")


def test_the_file_is_named_by_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert path_of("NVIDIA A100-SXM4-80GB").name == "nvidia-a100-sxm4-80gb.json"


def test_a_cpu_has_a_calibration_for_each_number_of_threads() -> None:
    before = torch.get_num_threads()
    try:
        names = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            names.append(device_name("cpu"))
    finally:
        torch.set_num_threads(before)
    assert [name.rpartition(", ")[2] for name in names] == ["1 thread", "2 threads"]
    assert len({path_of(name) for name in names}) == 2


def test_the_stopwatch_sees_the_operations_of_the_tape() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4))

    tape = trained_tape(build, 3, 8, 8, batch=2, gpu=False, loss=lambda model, x: (model(x["x"]).sum(), None))
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(2, 3, 8, 8)).sum().backward()
        optimizer.step()

    step()
    with Stopwatch("cpu") as watch:
        step()
    names = [one.operation.name for one in watch.timed if one.operation.name != "randn"]
    assert names == [op.name for op in tape.operations]
    assert [one.operation.flops for one in watch.timed if one.operation.flops] == [
        op.flops for op in tape.operations if op.flops
    ]
    assert all(one.seconds >= 0 for one in watch.timed)


def test_the_seconds_of_a_step_are_those_of_the_fastest_repeat() -> None:
    a = torch.randn(128, 128)
    assert 0 < least_seconds(lambda: a @ a, "cpu", most_s=0.01) < 1


# --- The trainings that a calibration times: each runs, and together they have the kinds of operations that models are made of ---


def _kinds() -> set[str]:
    found: set[str] = set()
    for probe in probes():
        with FakeTensorMode():
            sizes = [(t.shape, t.dtype) for t in probe.inputs()]
        tape = record_training(
            probe.build,
            lambda n, sizes=sizes: {str(i): torch.empty(s, dtype=d) for i, (s, d) in enumerate(sizes)},
            lambda model, inputs: (loss_of(model, (inputs["0"], inputs["1"])), None),
            batch=1,
            optimizer=probe.optimizer,
            steps=1,
            gpu=False,
        )
        found.update(kind_of(op) for op in tape.operations)
    return found


@pytest.mark.slow
def test_the_kinds_that_models_are_made_of_are_timed() -> None:
    assert {
        "convolution fp32 window",
        "convolution_weight_gradient fp32 depthwise strided",
        "convolution fp32 pointwise thin rows",
        "native_batch_norm_backward fp32",
        "native_layer_norm fp32",
        "addmm fp32",
        "mm fp32 large thin depth",
        "gelu fp32",
        "silu_backward fp32",
        "max_pool2d_with_indices fp32",
        "embedding fp32",
        "addcdiv_ fp32",
    } <= _kinds()
