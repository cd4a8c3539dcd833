"""Seconds of single operations, against the formulas worked out by hand, and what must hold whatever the constants."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from mezzo.gpus import gpu_named
from mezzo.measure.predict.step import Conditions
from mezzo.measure.predict.tape import CostedOperation, ProductSize, TrainingTape
from mezzo.measure.predict.time import Card, Columns, Constants, family, fitted, longer_of, operation_bounds

V100, A100, MI210 = gpu_named("v100-16gb"), gpu_named("a100-80gb"), gpu_named("mi210")
ALL_OF_IT = dict.fromkeys(("half", "tf32", "fp32", "grouped", "winograd", "bandwidth", "waiting"), 1.0)
NONE_OF_IT = dict.fromkeys(("layout_copies", "norm_passes", "l2_share", "depth_latency", "latency_s", "launch_s"), 0.0)
NO_LIMIT = dict.fromkeys(("issue_bytes", "block_elements", "feed_bytes"), 1e9)
# An overlap of 60: the longer of the two.
IDEAL = Constants(**ALL_OF_IT, **NONE_OF_IT, **NO_LIMIT, depthwise=0.5, full_clock_w=1e-9, overlap=60)
NO_SHAPE = ProductSize()


def _operation(
    form: str, *, flops: int = 0, moved: int = 0, shape: ProductSize = NO_SHAPE, name: str = "mm"
) -> CostedOperation:
    return CostedOperation(name, "forward", "", form, flops, moved, 0, shape)


def seconds_of(operation: CostedOperation, card: Card, **constants: float) -> float:
    return float(operation_bounds(Columns.of([operation]), card, dataclasses.replace(IDEAL, **constants)).total[0])


def step_seconds(ops: Columns, card: Card, constants: Constants) -> float:
    device = float(operation_bounds(ops, card, constants).total.sum())
    return float(longer_of(device, len(ops.flops) * constants.launch_s))


# 80 x 1 tiles of 128 x 64 on the V100's 80 multiprocessors: nothing is wasted.
FULL = ProductSize(1, 80 * 128, 64, 4096)
SHORT = ProductSize(1, 80 * 128, 64, 256)
FLOPS = 2 * 80 * 128 * 64 * 4096


@pytest.mark.parametrize(
    ("operation", "gpu", "tf32", "seconds"),
    [
        (_operation("fp32", flops=FLOPS, shape=FULL), V100, False, FLOPS / 15.7e12),
        (_operation("fp16", flops=FLOPS, shape=FULL), V100, False, FLOPS / 125e12),
        (_operation("fp32", flops=FLOPS, shape=FULL), V100, True, FLOPS / 15.7e12),  # no TF32 there
        (_operation("fp32", flops=FLOPS, shape=FULL), A100, True, FLOPS / 156e12),  # the sum is split over all 108
        (_operation("fp32", flops=FLOPS, shape=SHORT), A100, False, FLOPS / (19.5e12 * 80 / 108)),  # 28 are idle
        (
            _operation("fp16", flops=FLOPS // 2, shape=ProductSize(1, 80 * 128, 32, 4096)),
            V100,
            False,
            FLOPS / 125e12,
        ),  # half a tile
        (_operation("fp16", moved=9 * 10**11, name="add"), V100, False, 1.0),
        (
            _operation("fp32", flops=FLOPS, shape=ProductSize(64, 9, 1, 1, 1), name="convolution"),
            V100,
            False,
            FLOPS / 7.85e12,
        ),
    ],
    ids=["fp32", "fp16", "no TF32", "TF32", "strict FP32", "edge", "traffic", "depthwise"],
)
def test_seconds_of_one_operation(operation: CostedOperation, gpu: object, tf32: bool, seconds: float) -> None:
    card = Card.of(gpu, tf32=tf32, channels_last=True)  # type: ignore[arg-type]
    assert seconds_of(operation, card) == pytest.approx(seconds, rel=1e-6)


@pytest.mark.parametrize(
    ("window", "tries", "seconds"),
    [(9, True, FLOPS / 2 / 15.7e12), (9, False, FLOPS / 15.7e12), (1, True, FLOPS / 15.7e12)],
)
def test_winograd_multiplies_less_where_cudnn_may_try_it(window: int, tries: bool, seconds: float) -> None:
    one = _operation("fp32", flops=FLOPS, shape=FULL._replace(window=window), name="convolution")
    card = Card.of(V100, tf32=False, channels_last=True, tries_algorithms=tries)
    assert seconds_of(one, card, winograd=2) == pytest.approx(seconds, rel=1e-6)


def test_clock_and_matrix_units_of_a_card() -> None:
    assert Card.of(V100, tf32=False, channels_last=False).clock_hz == pytest.approx(1.53e9, rel=0.01)
    assert Card.of(MI210, tf32=False, channels_last=False).single_flops_per_s == 45.3e12


def test_a_board_without_the_power_keeps_a_lower_clock() -> None:
    # The L4 has 72 W for 58 multiprocessors at 2.04 GHz: 0.608 W each a GHz. A quarter of the wanted power halves the clock.
    one = _operation("fp32", flops=FLOPS, shape=ProductSize(1, 58 * 128, 64, 256))
    card = Card.of(gpu_named("l4"), tf32=False, channels_last=True)
    assert card.power_w == pytest.approx(72 / (58 * 2.041), rel=1e-3)
    fast, slow = (seconds_of(one, card, full_clock_w=watts) for watts in (card.power_w, 4 * card.power_w))
    assert fast == pytest.approx(FLOPS / 30.3e12)
    assert slow == pytest.approx(2 * fast)


def test_channels_first_convolutions_in_16_bits_are_copied() -> None:
    one = _operation("fp16", moved=9 * 10**8, shape=ProductSize(1, 1, 1, 1, 9), name="convolution")
    cards = [Card.of(V100, tf32=False, channels_last=layout) for layout in (True, False)]
    last, first = (seconds_of(one, card, layout_copies=0.5) for card in cards)
    assert (last, first) == (pytest.approx(1e-3), pytest.approx(2e-3))


def test_normalisation_reads_twice_unless_the_cache_holds_its_channels() -> None:
    card, moved = Card.of(V100, tf32=False, channels_last=True), 9 * 10**8

    def seconds(channels: int) -> float:
        shape = ProductSize(1, channels, moved // 4 // channels, 0)
        return seconds_of(_operation("fp32", moved=moved, shape=shape, name="native_batch_norm"), card, norm_passes=1.0)

    assert seconds(10) == pytest.approx(2e-3, rel=0.01)
    assert seconds(100_000) == pytest.approx(1e-3)


@pytest.mark.parametrize(("form", "element_bytes"), [("fp32", 4), ("fp16", 2), ("bf16", 2)])
def test_channels_first_normalisation_is_as_slow_in_16_bits(form: str, element_bytes: int) -> None:
    # 10 channels have 10 blocks of threads, each of one element a cycle at 1.53 GHz: 16 bits move half the bytes in the same time.
    shape = ProductSize(1, 10, 10**8, 0)
    one = _operation(form, moved=10**9 * element_bytes, shape=shape, name="native_batch_norm")
    cards = [Card.of(V100, tf32=False, channels_last=layout) for layout in (False, True)]
    first, last = (seconds_of(one, card, block_elements=1.0) for card in cards)
    assert first == pytest.approx(10**9 / (10 * 1.53e9), rel=0.01)
    assert last == pytest.approx(10**9 * element_bytes / 900e9, rel=1e-6)


def test_launching_bounds_a_step_of_small_operations() -> None:
    ops = Columns.of([_operation("fp32", moved=4, name="add")] * 1000)
    constants = dataclasses.replace(IDEAL, launch_s=5e-6)
    assert step_seconds(ops, Card.of(A100, tf32=False, channels_last=True), constants) == pytest.approx(5e-3)


def test_shipped_constants_are_physical() -> None:
    found = fitted()
    shares = [getattr(found.constants, name) for name in ("half", "tf32", "fp32", "bandwidth", "l2_share")]
    assert all(0 < share <= 1 for share in shares)
    assert all(value > 0 for value in dataclasses.astuple(found.constants))
    assert found.low < 1 < found.high
    assert found.num_rows > 300


FAMILIES = {
    "Ampere GA102": "GA10x",
    "Ampere GA104": "GA10x",
    "Ampere GA100": "GA100",
    "Ada AD102": "Ada",
    "Hopper": "Hopper",
}


@pytest.mark.parametrize(("architecture", "name"), FAMILIES.items())
def test_families(architecture: str, name: str) -> None:
    assert family(architecture) == name


def test_what_was_measured_is_validated() -> None:
    found = fitted()
    assert found.covers("Hopper", "fp16")
    assert not found.covers("Hopper", "bf16")
    assert not found.covers("Blackwell", "fp16")


def test_faster_memory_and_arithmetic_are_never_slower() -> None:
    rng = np.random.default_rng(0)
    ops = Columns.of(
        [_operation("fp16", flops=int(f), moved=int(b), shape=FULL) for f, b in rng.integers(1, 10**10, (50, 2))]
    )
    faster = dataclasses.replace(V100, bandwidth_bytes_per_s=2e12, fp16_flops_per_s=300e12)
    slow, fast = (
        step_seconds(ops, Card.of(g, tf32=False, channels_last=True), fitted().constants) for g in (V100, faster)
    )
    assert fast < slow


@pytest.mark.parametrize(("policy", "tf32"), [("fp32", False), ("tf32", True), ("bf16", True), ("fp16-pure", True)])
def test_every_policy_but_fp32_lets_fp32_products_use_tf32(policy: str, tf32: bool) -> None:
    tape = TrainingTape(batch=1, operations=[_operation("fp32", flops=FLOPS, shape=FULL)])
    (seconds,) = Conditions(gpu=A100).step(tape, policy).parts["arithmetic"]
    card = Card.of(A100, tf32=tf32, channels_last=False)
    (expected,) = operation_bounds(Columns.of(tape.operations), card, fitted().constants).arithmetic
    assert seconds == expected
    assert (seconds < FLOPS / 19.5e12) == tf32  # beyond the peak of FP32
