"""Which linear layers run in FP8, and the seconds of their products against the formula by hand."""

from __future__ import annotations

import dataclasses

import pytest

from mezzo.gpus import gpu_named
from mezzo.measure.predict.step import fp8_bounds, fp8_layers
from mezzo.measure.predict.tape import CostedOperation, ProductSize, TapePhase
from mezzo.measure.predict.time import LATENCY_S, Constants


def product(module: str, rows: int, columns: int, depth: int, phase: TapePhase = "forward") -> CostedOperation:
    flops, read, written = 2 * rows * columns * depth, 2 * depth * (rows + columns), 2 * rows * columns
    return CostedOperation("mm", phase, module, "fp16", flops, read, written, ProductSize(1, rows, columns, depth))


def test_layers_are_chosen_as_the_policy_chooses_them() -> None:
    operations = [
        product("small", 4096, 1024, 1024),
        product("odd", 4096, 4100, 4096),
        product("large", 4096, 4096, 4096),
        product("head", 4096, 32000, 4096),
        product("large", 4096, 4096, 4096, "backward"),
    ]
    found = fp8_layers(operations)
    assert found.chosen.tolist() == [False, False, True, False, True]
    assert (found.num_layers, found.num_chosen) == (4, 1)
    assert found.sentence.startswith("1 of 4 linear layers runs in FP8, the others in BF16 (")
    for reason in ("1: too small to gain", "1: a size is not a multiple of 16", "1: the last layer"):
        assert reason in found.sentence


@pytest.mark.parametrize(
    ("name", "form", "phase", "runs"),
    [
        ("addmm", "fp16", "forward", True),
        ("mm", "bf16", "backward", True),
        ("bmm", "fp16", "forward", False),  # a product of activations
        ("mm", "fp32", "forward", False),
        ("mm", "fp16", "optimizer", False),
    ],
)
def test_only_16_bit_products_of_linear_layers_run_in_fp8(name: str, form: str, phase: TapePhase, runs: bool) -> None:
    layers = [product("large", 4096, 4096, 4096), product("head", 4096, 4096, 4096)]
    other = product("large", 4096, 4096, 4096, phase)
    found = fp8_layers([*layers, dataclasses.replace(other, name=name, format=form)])
    assert found.chosen.tolist() == [True, False, runs]


def test_a_model_without_linear_layers() -> None:
    assert fp8_layers([]).sentence == "It has no linear layers, so FP8 is BF16"


@pytest.mark.parametrize(("size", "gains"), [(8192, True), (512, False)])
def test_casts_cost_more_than_small_products_gain(size: int, gains: bool) -> None:
    gpu, constants = gpu_named("h100-sxm"), Constants(overlap=50.0)  # the longer of arithmetic and traffic
    op = product("layer", size, size, size)
    found = fp8_bounds([op], gpu, constants)
    casts = 2 * size * size * 5 / (gpu.bandwidth_bytes_per_s * constants.bandwidth)
    alone = fp8_bounds(
        [CostedOperation(op.name, op.phase, op.module, op.format, op.flops, op.read_bytes, op.written_bytes)],
        gpu,
        constants,
    )
    assert alone.total[0] > 5 * LATENCY_S  # its own launch, and four of casts
    assert found.traffic[0] > casts
    in_16 = op.flops / (gpu.fp16_flops_per_s or 1)
    assert (found.total[0] < in_16) == gains
