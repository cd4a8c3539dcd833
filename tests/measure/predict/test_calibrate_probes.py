"""The trainings that a calibration times: each runs, and together they have the kinds of operations that models are made of."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from mezzo.measure.predict.calibrate import loss_of, probes
from mezzo.measure.predict.rates import kind_of
from mezzo.measure.predict.training import record_training


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
