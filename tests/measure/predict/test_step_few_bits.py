"""Which linear layers run in 8 and 4 bits, and the seconds of their products against the formula by hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest

from mezzo.formats import Recipe
from mezzo.gpus import gpu_named
from mezzo.measure.predict.step import LowLayers, low_bounds, low_layers, passes_of
from mezzo.measure.predict.tape import CostedOperation, ProductSize, TapePhase
from mezzo.measure.predict.time import FEW_BITS, LATENCY_S, Constants
from mezzo.policy import Policy
from mezzo.policyfields import recipe_of


def few(operations: Sequence[CostedOperation], policy: str = "fp8") -> LowLayers:
    return low_layers(operations, Policy.parse(policy), recipe(policy))


def recipe(policy: str) -> Recipe:
    found = recipe_of(Policy.parse(policy))
    assert found is not None
    return found


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
    found = few(operations)
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
    found = few([*layers, dataclasses.replace(other, name=name, format=form)])
    assert found.chosen.tolist() == [True, False, runs]


def test_a_model_without_linear_layers() -> None:
    assert few([]).sentence == "It has no linear layers, so FP8 is BF16"


@pytest.mark.parametrize(("size", "gains"), [(8192, True), (512, False)])
def test_casts_cost_more_than_small_products_gain(size: int, gains: bool) -> None:
    gpu, constants = gpu_named("h100-sxm"), Constants(overlap=50.0)  # the longer of arithmetic and traffic
    op = product("layer", size, size, size)
    found = low_bounds([op], gpu, recipe("fp8"), constants)
    casts = 2 * size * size * 5 / (gpu.bandwidth_bytes_per_s * constants.bandwidth)
    alone = low_bounds(
        [CostedOperation(op.name, op.phase, op.module, op.format, op.flops, op.read_bytes, op.written_bytes)],
        gpu,
        recipe("fp8"),
        constants,
    )
    assert alone.total[0] > 5 * LATENCY_S  # its own launch, and four of casts
    assert found.traffic[0] > casts
    in_16 = op.flops / ((gpu.fp16_flops_per_s or 1) * constants.half)
    assert (found.total[0] < in_16) == gains


def test_layers_in_blocks_leave_both_ends_and_other_sizes() -> None:
    operations = [product(name, 4096, *sizes) for name, sizes in (("first", (4096, 4096)), ("odd", (4112, 4096)))]
    operations += [product(f"block.{n}", 4096, 128, 256) for n in range(2)]
    operations += [product("head", 4096, 32000, 4096)]
    chosen = {
        "mxfp8": [False, False, True, True, False],
        "nvfp4": [False, True, True, True, False],  # 4112 is a multiple of 16
        "fp8-block": [False, False, True, True, False],
    }
    assert {policy: few(operations, policy).chosen.tolist() for policy in chosen} == chosen
    sentence = few(operations, "mxfp8").sentence
    reasons = "1: the first layer; 1: a size is not a multiple of 32; 1: the last layer"
    assert sentence == f"2 of 5 linear layers run in MXFP8, the others in BF16 ({reasons})"


CASTS = [
    # policy, GPU, peak, passes over an operand, bytes of an element
    ("fp8", "b200-sxm", 4500e12, 2, 1.0),
    ("fp8-block", "b200-sxm", 4500e12, 1, 8.25 / 8),
    ("mxfp8", "b200-sxm", 4500e12, 1, 8.25 / 8),
    ("mxfp4", "b200-sxm", 9000e12, 1, 4.25 / 8),
    ("nvfp4", "b200-sxm", 9000e12, 2, 4.5 / 8),  # the tensor's scale needs its largest magnitude first
    ("nvfp4", "rtx-5090", 1676e12, 2, 4.5 / 8),
]


@pytest.mark.parametrize(("policy", "name", "peak", "passes", "element_bytes"), CASTS)
def test_a_product_and_its_casts_by_hand(
    policy: str, name: str, peak: float, passes: int, element_bytes: float
) -> None:
    gpu, constants, size = gpu_named(name), Constants(overlap=50.0), 2**14
    found = low_bounds([product("layer", size, size, size)], gpu, recipe(policy), constants)
    casts = 2 * size**2 * (2 * passes + element_bytes) / (gpu.bandwidth_bytes_per_s * constants.bandwidth)
    assert passes_of(recipe(policy)) == passes
    assert gpu.flops_per_s(Policy.parse(policy).compute if policy != "fp8-block" else "e4m3") == peak
    at_peak = 2 * size**3 / (peak * constants.half * FEW_BITS)
    assert (
        at_peak <= found.arithmetic[0] <= 1.8 * at_peak
    )  # the last tiles, and the clock that the board's power allows
    assert found.total[0] == pytest.approx(found.arithmetic[0] + casts + (1 + 2 * passes) * LATENCY_S, rel=1e-3)


def test_units_for_blocks_came_with_blackwell() -> None:
    formats = ("e4m3", "mxfp8", "mxfp4", "nvfp4")
    assert [gpu_named("h100").flops_per_s(name) for name in formats] == [1979e12, None, None, None]
    assert [gpu_named("b200").flops_per_s(name) for name in formats] == [4500e12, 4500e12, 9000e12, 9000e12]
