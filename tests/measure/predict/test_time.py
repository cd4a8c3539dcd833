"""Seconds of single operations, against the formulas worked out by hand, and what must hold whatever the constants."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from mezzo.gpus import Gpu, gpu_named
from mezzo.measure.predict.step import Conditions
from mezzo.measure.predict.tape import CostedOperation, ProductSize, TapePhase, TrainingTape
from mezzo.measure.predict.time import LATENCY_S, Card, Columns, Constants, family, fitted, operation_bounds

V100, A100, H100, MI210 = (gpu_named(name) for name in ("v100-16gb", "a100-80gb", "h100-sxm", "mi210"))
ALL_OF_IT = dict.fromkeys(("half", "tf32", "fp32", "winograd", "bandwidth", "waiting"), 1.0)
NO_LIMIT = dict.fromkeys(("issue_elements", "block_elements", "feed_bytes", "l2_bytes"), 1e9)
NOTHING = {"layout_copies": 0.0, "fill_cycles": 0.0, "l2_share": 1e-12, "full_clock_w": 1e-9}
# An overlap of 40: the longer of the two.
IDEAL = Constants(**ALL_OF_IT, **NO_LIMIT, **NOTHING, depthwise=0.5, overlap=40)
NO_SHAPE = ProductSize()


def _operation(
    form: str,
    *,
    flops: int = 0,
    moved: int = 0,
    shape: ProductSize = NO_SHAPE,
    name: str = "mm",
    phase: TapePhase = "forward",
    channels_last: bool = True,
    unaligned: bool = False,
) -> CostedOperation:
    return CostedOperation(name, phase, "", form, flops, moved, 0, shape, channels_last, unaligned)


def seconds_of(operation: CostedOperation, card: Card, **constants: float) -> float:
    """Return the seconds without the latency."""
    bounds = operation_bounds(Columns.of([operation]), card, dataclasses.replace(IDEAL, **constants))
    return float(bounds.total[0]) - LATENCY_S


# 80 tiles of 128 x 64 on the V100's 80 multiprocessors: nothing is wasted.
FULL = ProductSize(1, 80 * 128, 64, 4096)
FLOPS = 2 * 80 * 128 * 64 * 4096
THIN = ProductSize(1, 80 * 128, 16, 4096)
GROUPS = ProductSize(64, 9, 1, 1, 1)


@pytest.mark.parametrize(
    ("operation", "gpu", "tf32", "seconds"),
    [
        (_operation("fp32", flops=FLOPS, shape=FULL), V100, False, FLOPS / 15.7e12),
        (_operation("fp16", flops=FLOPS, shape=FULL), V100, False, FLOPS / 125e12),
        (_operation("fp32", flops=FLOPS, shape=FULL), V100, True, FLOPS / 15.7e12),  # no TF32 there
        (_operation("fp32", flops=FLOPS, shape=FULL), A100, True, FLOPS / 156e12),  # its steps are dealt out to all 108
        (_operation("fp32", flops=FLOPS, shape=FULL), A100, False, FLOPS / 19.5e12),
        (_operation("fp16", flops=FLOPS // 4, shape=THIN), V100, False, FLOPS / 2 / 125e12),  # half a tile of 32
        (_operation("fp16", moved=9 * 10**11, name="add"), V100, False, 1.0),
        (
            _operation("fp32", flops=FLOPS, shape=GROUPS, name="convolution", channels_last=False),
            V100,
            False,
            FLOPS / 7.85e12,
        ),
        # in gradients, Hopper has no wgmma for TF32 operands that do not lie along the sum
        (_operation("fp32", flops=FLOPS, shape=FULL, phase="backward"), A100, True, FLOPS / 156e12),
        (_operation("fp32", flops=FLOPS, shape=FULL), H100, True, FLOPS / 494.7e12),
        (_operation("fp32", flops=FLOPS, shape=FULL, phase="backward"), H100, True, FLOPS / 494.7e12 / 0.629),
        (_operation("fp32", flops=FLOPS, shape=FULL, phase="backward"), H100, False, FLOPS / 66.9e12),
        (_operation("bf16", flops=FLOPS, shape=FULL, phase="backward"), H100, True, FLOPS / 989.4e12),
        (  # computed again by checkpointing
            _operation("fp32", flops=FLOPS, shape=FULL, name="convolution", phase="backward"),
            H100,
            True,
            FLOPS / 494.7e12,
        ),
        # rows that do not begin at multiples of 16 bytes; lanes of FP32 load one element at a time anyway
        (_operation("bf16", flops=FLOPS, shape=FULL, unaligned=True), A100, True, 3 * FLOPS / 312e12),
        (_operation("fp32", flops=FLOPS, shape=FULL, unaligned=True), A100, True, 3 * FLOPS / 156e12),
        (_operation("fp32", flops=FLOPS, shape=FULL, unaligned=True), A100, False, FLOPS / 19.5e12),
        (_operation("fp8", flops=FLOPS, shape=FULL), H100, True, FLOPS / 1979e12 / 0.75),
    ],
)
def test_seconds_of_one_operation(operation: CostedOperation, gpu: Gpu, tf32: bool, seconds: float) -> None:
    assert seconds_of(operation, Card.of(gpu, tf32=tf32)) == pytest.approx(seconds, rel=1e-6, abs=1e-12)


@pytest.mark.parametrize(
    ("form", "channels_last", "own_kernel"),
    [("fp32", False, True), ("fp32", True, False), ("fp16", False, True), ("fp16", True, True)],
)
def test_depthwise_convolutions_of_fp32_have_no_kernel_channels_last(
    form: str, channels_last: bool, own_kernel: bool
) -> None:
    shape = ProductSize(64, 80 * 256, 1, 9, 9)
    one = _operation(form, flops=2 * 64 * 80 * 256 * 9, shape=shape, name="convolution", channels_last=channels_last)
    assert Columns.of([one]).depthwise.tolist() == [own_kernel]


@pytest.mark.parametrize(
    ("window", "tries", "seconds"),
    [(9, True, FLOPS / 2 / 15.7e12), (9, False, FLOPS / 15.7e12), (1, True, FLOPS / 15.7e12)],
)
def test_winograd_multiplies_less_where_cudnn_may_try_it(window: int, tries: bool, seconds: float) -> None:
    one = _operation("fp32", flops=FLOPS, shape=FULL._replace(window=window), name="convolution")
    card = Card.of(V100, tf32=False, tries_algorithms=tries)
    assert seconds_of(one, card, winograd=2) == pytest.approx(seconds, rel=1e-6)


def test_clock_and_matrix_units_of_a_card() -> None:
    assert Card.of(V100, tf32=False).clock_hz == pytest.approx(1.53e9, rel=0.01)
    assert Card.of(MI210, tf32=False).single_flops_per_s == 45.3e12


def test_a_board_without_the_power_keeps_a_lower_clock() -> None:
    # The L4 has 72 W for 58 multiprocessors at 2.04 GHz: 0.608 W each a GHz. A quarter of the wanted power halves the clock.
    one = _operation("fp32", flops=FLOPS, shape=ProductSize(1, 58 * 128, 64, 4096))
    card = Card.of(gpu_named("l4"), tf32=False)
    assert card.power_w == pytest.approx(72 / (58 * 2.041), rel=1e-3)
    fast, slow = (seconds_of(one, card, full_clock_w=watts) for watts in (card.power_w, 4 * card.power_w))
    assert fast == pytest.approx(58 / 80 * FLOPS / 30.3e12)
    assert slow == pytest.approx(2 * fast)


@pytest.mark.parametrize(
    ("form", "tf32", "channels_last", "copied"),
    [
        ("fp16", False, True, False),
        ("fp16", False, False, True),
        ("fp32", True, False, True),
        ("fp32", False, False, False),
    ],
)
def test_channels_first_convolutions_on_matrix_units_are_copied(
    form: str, tf32: bool, channels_last: bool, copied: bool
) -> None:
    shape = ProductSize(1, 1, 1, 1, 9)
    one = _operation(form, moved=2039 * 10**6, shape=shape, name="convolution", channels_last=channels_last)
    seconds = seconds_of(one, Card.of(A100, tf32=tf32), layout_copies=0.5)
    assert seconds == pytest.approx(2e-3 if copied else 1e-3)


@pytest.mark.parametrize(
    ("form", "name", "elements"),
    [("fp32", "add", True), ("fp16", "add", True), ("fp16", "mm", False)],
)
def test_kernels_other_than_products_move_few_elements_in_a_cycle(form: str, name: str, elements: bool) -> None:
    # 80 multiprocessors at 1.53 GHz, an element each: 16 bits move half the bytes in the same time
    size = {"fp32": 4, "fp16": 2}[form]
    one = _operation(form, moved=10**9 * size, name=name, flops=0 if elements else 1, shape=ProductSize(1, 1, 1, 1))
    seconds = seconds_of(one, Card.of(V100, tf32=False), issue_elements=1.0)
    bandwidth_s = 10**9 * size / 900e9
    issue_s = 10**9 / (80 * 1.533e9)
    assert seconds == pytest.approx((bandwidth_s**4 + issue_s**4) ** 0.25 if elements else bandwidth_s, rel=1e-3)


def test_an_operation_finds_what_fits_in_the_cache_but_not_a_weight() -> None:
    card = Card.of(A100, tf32=False)  # 40 MiB
    mib = 2**20
    for moved, rows, columns, from_memory in [
        (10 * mib, 0, 0, 0),
        (30 * mib, 0, 0, 15 * mib),  # half of what is twice as much as the share
        (40 * mib, 0, 0, 40 * mib),
        (14 * mib, 1, 2 * mib, 8 * mib),  # a weight of 8 MiB of FP32
    ]:
        one = _operation("fp32", moved=moved, name="add", shape=ProductSize(1, rows, columns, 1))
        seconds = seconds_of(one, card, l2_share=0.5)
        assert seconds == pytest.approx(from_memory / 2039e9, abs=1e-9)


@pytest.mark.parametrize(
    ("name", "times"), [("native_layer_norm", 2), ("_softmax", 2), ("_log_softmax_backward_data", 2), ("add", 1)]
)
def test_normalisations_of_rows_read_twice(name: str, times: int) -> None:
    assert seconds_of(_operation("fp32", moved=9 * 10**8, name=name), Card.of(V100, tf32=False)) == pytest.approx(
        times * 1e-3
    )


def test_normalisation_of_a_batch_reads_twice_unless_the_cache_holds_its_channels() -> None:
    card, moved = Card.of(V100, tf32=False), 9 * 10**8

    def seconds(channels: int) -> float:
        shape = ProductSize(1, channels, moved // 4 // channels, 0)
        return seconds_of(_operation("fp32", moved=moved, shape=shape, name="native_batch_norm"), card)

    assert seconds(10) == pytest.approx(2e-3, rel=0.01)
    assert seconds(100_000) == pytest.approx(1e-3)


@pytest.mark.parametrize(
    ("form", "name", "bf16", "passes"),
    [
        ("fp32", "", False, 2),
        ("fp16", "", False, 2),
        ("fp32", "_backward", False, 2),
        ("fp32", "", True, 2),  # what autocast leaves in FP32 is cuDNN's
        ("fp16", "", True, 2),  # one pass, of twice the time
        ("fp16", "_backward", True, 4),
    ],
)
def test_a_block_of_threads_passes_over_each_channel(form: str, name: str, bf16: bool, passes: int) -> None:
    # 100,000 channels of 10,000 elements; a block of threads takes 1,000 cycles for one
    size = 4 if form == "fp32" else 2
    shape, card = ProductSize(1, 100_000, 10**4, 0), Card.of(V100, tf32=False, bf16=bf16)
    first, last = (
        _operation(form, moved=10**9 * size, shape=shape, name=f"native_batch_norm{name}", channels_last=layout)
        for layout in (False, True)
    )
    assert seconds_of(first, card, block_elements=1e-3) == pytest.approx(passes * 10**7 / 1.533e9, rel=0.01)
    assert seconds_of(last, card, block_elements=1e-3) == pytest.approx(10**9 * size / 900e9, rel=1e-6)
    # all of it in the L2 cache, from which it comes sooner
    found = seconds_of(first, card, block_elements=1e-3, l2_share=1e9)
    assert found == pytest.approx(0.55 * passes * 10**7 / 1.533e9, rel=0.01)


@pytest.mark.parametrize(
    ("name", "form", "tf32", "share"),
    [
        ("_scaled_dot_product_efficient_attention", "fp32", False, 495 / 989 / 3 * 0.629),
        ("_scaled_dot_product_efficient_attention", "fp32", True, 495 / 989 / 3 * 0.629),
        ("_scaled_dot_product_flash_attention", "bf16", True, 0.629),
    ],
)
def test_attention_on_hopper_runs_with_older_instructions(name: str, form: str, tf32: bool, share: float) -> None:
    shape = ProductSize(132, 128, 10**6, 128)
    one = _operation(form, flops=1, shape=shape, name=name)
    clock_hz = Card.of(H100, tf32=tf32).clock_hz
    per_cycle = share * (H100.fp16_flops_per_s or 0.0) / 132 / clock_hz
    cycles = 128 * 10**6 * (4 * 128 / per_cycle + 1 / 16)
    assert seconds_of(one, Card.of(H100, tf32=tf32)) == pytest.approx(cycles / clock_hz, rel=2e-3)
    third = Card.of(H100, tf32=tf32, flash_3=True)
    assert (seconds_of(one, third) < seconds_of(one, Card.of(H100, tf32=tf32))) == (form == "bf16")


def test_attention_multiplies_twice_and_takes_exponentials_between() -> None:
    # one block of 128 queries on each of the 108 multiprocessors, each of which meets 1,024 keys of depth 64
    shape = ProductSize(108, 128, 1024, 64)
    card = Card.of(A100, tf32=True)
    scores = 128 * 1024
    for name, phase, products in (("", "forward", 2), ("_backward", "backward", 5)):
        one = _operation("bf16", flops=1, shape=shape, name=f"_scaled_dot_product_flash_attention{name}", phase=phase)
        cycles = scores * (products * 2 * 64 / (312e12 / 108 / 1.41e9) + 1 / 16)
        assert seconds_of(one, card) == pytest.approx(cycles / 1.41e9, rel=1e-3)
        again = dataclasses.replace(one, phase="backward")  # as checkpointing does
        assert seconds_of(again, card) == seconds_of(one, card)


def test_shipped_constants_are_physical() -> None:
    found = fitted()
    shares = [getattr(found.constants, name) for name in ("half", "tf32", "fp32", "bandwidth", "l2_share")]
    assert all(0 < share <= 1 for share in shares)
    assert all(value > 0 for value in dataclasses.astuple(found.constants))
    assert found.low < 1 < found.high
    assert found.num_rows > 300
    assert len(dataclasses.fields(Constants)) < 19


def test_an_architecture_with_enough_rows_has_its_own_band() -> None:
    found = fitted()
    assert {"GA100", "GA10x", "Hopper", "Turing"} == set(found.bands)
    assert found.band("Hopper") == found.bands["Hopper"]
    assert found.band("Blackwell") == (found.low, found.high)
    assert all(low < 1 < high for low, high in found.bands.values())


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
    slow, fast = (operation_bounds(ops, Card.of(g, tf32=False), fitted().constants).total.sum() for g in (V100, faster))
    assert fast < slow


@pytest.mark.parametrize(("policy", "tf32"), [("fp32", False), ("tf32", True), ("bf16", True), ("fp16-pure", True)])
def test_every_policy_but_fp32_lets_fp32_products_use_tf32(policy: str, tf32: bool) -> None:
    tape = TrainingTape(batch=1, operations=[_operation("fp32", flops=FLOPS, shape=FULL)])
    (seconds,) = Conditions(gpu=A100).step(tape, policy).parts["arithmetic"]
    card = Card.of(A100, tf32=tf32)
    (expected,) = operation_bounds(Columns.of(tape.operations), card, fitted().constants).arithmetic
    assert seconds == expected
    assert (seconds < FLOPS / 19.5e12) == tf32  # beyond the peak of FP32
