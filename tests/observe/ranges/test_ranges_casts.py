"""Counting by exponent against real casts, in every implementation; and what follows from the counts: loss, window, suggestion."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from helpers_values import existing
from mezzo.engine.kernels import cpu, exponents
from mezzo.engine.kernels.exponent_bins import CUTS
from mezzo.formats import BF16, E4M3, E5M2, FP16, Format
from mezzo.observe.ranges.table import LITTLE, SCALES, Counts, suggested

FORMATS = {f.name: f for f in (FP16, BF16, E4M3, E5M2)}
every_format = pytest.mark.parametrize("target", [pytest.param(f, id=n) for n, f in FORMATS.items()])
needs_compiler = pytest.mark.skipif(cpu.library()[0] is None, reason=cpu.library()[1])
COUNTERS = {"compiled": exponents._compiled, "torch": exponents.reference}
every_counter = pytest.mark.parametrize(
    "count", [pytest.param(c, id=n, marks=needs_compiler if n == "compiled" else ()) for n, c in COUNTERS.items()]
)


def counted(values: Tensor, count: exponents.CountExponents = exponents.reference) -> Counts:
    table = exponents.tables(1)
    count([values], [table[0]])
    return Counts(table[0].tolist())


def cast(values: Tensor, target: Format, scale: int) -> dict[str, int]:
    """Return what torch's own cast does to finite non-zero values; FP64 represents every product of an FP32 value and a scale exactly."""
    finite = values[values.isfinite() & (values != 0)].double() * 2.0**scale
    # Out of FP32's range a cast by way of FP32 does what a cast of the product would do.
    result = finite.float().to(target.dtype).double().abs()
    gone, over = result == 0, ~result.isfinite()
    if not target.has_inf:  # torch 2.13 clamps to 448 what older ones make NaN: what rounds beyond it is out of range
        over = finite.abs() > 464
    return {
        "zeroed": int(gone.sum()),
        "subnormal": int((~gone & ~over & (result < target.min_normal)).sum()),
        "overflowed": int(over.sum()),
    }


def counts_of(counts: Counts, target: Format, scale: int) -> dict[str, int]:
    return {name: getattr(counts, name)(target, scale) for name in ("zeroed", "subnormal", "overflowed")}


def test_a_row_is_cut_where_a_format_draws_a_line() -> None:
    fractions = [1 + cut / 2**23 for cut in CUTS]
    tiny = 2.0**-23
    assert fractions == [
        1 + tiny,  # more than half the smallest subnormal
        2 - 2.0**-2,  # e5m2's subnormals end
        1.8125 + tiny,  # more than 464 / 256: e4m3 overflows; 464 itself goes to 448, which is even
        2 - 2.0**-3,  # e4m3's subnormals end, e5m2 overflows
        2 - 2.0**-7,
        2 - 2.0**-8,  # bf16
        2 - 2.0**-10,
        2 - 2.0**-11,  # fp16
    ]


@pytest.fixture(scope="module")
def many() -> Tensor:
    """Return 4 M values as wide as gradients are: a log-normal with a fifth of zeros."""
    generator = torch.Generator().manual_seed(0)
    magnitude = torch.exp2(torch.randn(2**22, generator=generator) * 8 - 14)
    sign = torch.randint(-1, 2, magnitude.shape, generator=generator) + 0.0
    return magnitude * torch.where(torch.rand(magnitude.shape, generator=generator) < 0.4, sign, 1.0)


@pytest.mark.slow
@every_counter
@every_format
def test_counts_of_4_m_values_are_those_of_real_casts_at_8_scales(
    many: Tensor, target: Format, count: exponents.CountExponents
) -> None:
    counts = counted(many, count)
    assert counts.table[0] == int((many == 0).sum())
    for scale in (-12, -4, 0, 3, 8, 15, 20, 24):
        assert counts_of(counts, target, scale) == cast(many, target, scale), scale


@every_counter
@every_format
def test_values_on_and_beside_every_line_of_a_format_fall_on_the_side_of_a_cast(
    target: Format, count: exponents.CountExponents
) -> None:
    lines = [target.min_subnormal / 2, target.min_subnormal, target.min_normal, target.max, target.max * 2]
    lines += [target.min_normal - target.min_subnormal / 2, target.max * (1 + target.eps / 4)]
    lines += [target.max + target.max / (2 - target.eps) * target.eps / 2]
    # FP32, the way to BF16, would round scaled-down ones first.
    for scale in (0, 1, 14) if target is BF16 else (-9, 0, 1, 14):
        on = torch.tensor(lines, dtype=torch.double) * 2.0**-scale
        on = on[on < 2.0**127].float()
        beside = torch.cat([torch.nextafter(on, torch.tensor(side)) for side in (0.0, float("inf"))])
        values = torch.cat([on, beside])
        values = values[values.isfinite()]
        for value in values.split(1):
            assert counts_of(counted(value, count), target, scale) == cast(value, target, scale), value.item().hex()


@needs_compiler
@settings(max_examples=200, deadline=None, derandomize=True)
@given(bits=st.lists(st.integers(0, 2**32 - 1), max_size=40), scale=st.integers(-40, 40))
def test_any_bits_are_counted_alike_and_as_a_cast_takes_them(bits: list[int], scale: int) -> None:
    values = torch.from_numpy(np.array(bits, dtype=np.uint32).view(np.float32))
    counts = counted(values)
    assert counts.table == counted(values, exponents._compiled).table
    assert sum(counts.table) == len(bits)
    histogram = counts.histogram()
    assert (histogram.infinite, histogram.nan) == (int(values.isinf().sum()), int(values.isnan().sum()))
    assert (histogram.zeros, histogram.total) == (int((values == 0).sum()), len(bits))
    for target in FORMATS.values():
        if scale + target.mantissa_bits < 20:  # FP32 itself rounds products below 2**-126, which a cast rounds again
            safe = values[(values.abs() * 2.0**scale >= 2.0**-126) | (values == 0) | ~values.isfinite()]
            assert counts_of(counted(safe), target, scale) == cast(safe, target, scale)


@every_counter
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_format_and_layout_of_a_tensor_is_counted(dtype: torch.dtype, count: exponents.CountExponents) -> None:
    generator = torch.Generator().manual_seed(3)
    shapes = [(), (0,), (1,), (7, 5), (1023,), (1024,), (1025,), (300, 40)]
    tensors = [(torch.randn(shape, generator=generator) * 1e-5).to(dtype) for shape in shapes]
    tables = exponents.tables(len(tensors))
    count(tensors, list(tables))
    for tensor, table in zip(tensors, tables, strict=True):
        powers = np.frexp(tensor.double().abs().numpy())[1].reshape(-1) - 1
        expected = Counts(table.tolist()).histogram()
        zeros = int((tensor == 0).sum())
        assert expected.zeros == zeros
        assert expected.total == tensor.numel()
        for exponent in set(powers.tolist()):
            number = int((powers == exponent).sum()) - (zeros if exponent == -1 else 0)
            if number:
                assert expected.counts[exponent - expected.first_exponent] == number


def test_add_takes_fp64_gaps_and_shared_tables() -> None:
    table = exponents.tables(1)[0]
    wide = torch.full((4, 6), 3.0, dtype=torch.double)
    exponents.add([wide[:, ::2], torch.full((5,), 0.25)], [table, table])
    histogram = Counts(table.tolist()).histogram()
    assert (histogram.first_exponent, histogram.counts) == (-2, [5, 0, 0, 12])


@needs_compiler
def test_threads_and_long_tensors_count_everything_once(monkeypatch: pytest.MonkeyPatch) -> None:
    values = [torch.randn(700_001, generator=torch.Generator().manual_seed(k)) for k in range(3)]
    values.insert(1, torch.randn(9))
    shared, alone = exponents.tables(1)[0], exponents.tables(1)[0]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    exponents._compiled(values, [shared] * 4)
    exponents.reference(values, [alone] * 4)
    assert torch.equal(shared, alone)


@pytest.mark.parametrize("bits", [0x7F800001, 0x7FC00000, 0x7FFFFFFF])
def test_every_nan_is_counted_whatever_its_payload(bits: int) -> None:
    values = torch.tensor([bits], dtype=torch.int32).view(torch.float32)
    histogram = counted(values).histogram()
    assert (histogram.nan, histogram.infinite, histogram.zeros, histogram.counts) == (1, 0, 0, [])


def test_the_triton_kernel_counts_alike_under_the_interpreter() -> None:
    pytest.importorskip("triton")
    code = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import torch
from mezzo.engine.kernels import exponents, gpu
bits = torch.randint(-2**31, 2**31 - 1, (9001,), generator=torch.Generator().manual_seed(0))
low = torch.arange(64, dtype=torch.int32).view(torch.float32)
ends = torch.tensor([float("inf"), -float("inf"), float("nan"), 0.0, -0.0])
tensors = [bits.int().view(torch.float32), low, ends, torch.randn(777).half() * 1e-5, torch.randn(33).bfloat16(), torch.empty(0)]
tensors.append(torch.tensor(3.0))
ours, other = exponents.tables(len(tensors)), exponents.tables(len(tensors))
gpu.count(tensors, list(ours))
exponents.reference(tensors, list(other))
assert torch.equal(ours, other)
print("identical", int(ours.sum()))
"""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == f"identical {9001 + 64 + 5 + 777 + 33 + 1}", done.stderr[-3000:]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_triton_kernel_counts_alike_on_a_gpu() -> None:
    count, reason = exponents.counter("cuda")
    assert reason.startswith("a Triton kernel"), reason
    bits = torch.randint(-(2**31), 2**31 - 1, (100_001,), generator=torch.Generator().manual_seed(0))
    low = torch.arange(64, dtype=torch.int32).view(torch.float32)
    values = [bits.int().view(torch.float32), low, torch.ones(9).half()]
    ours, other = exponents.tables(3, "cuda"), exponents.tables(3)
    count([v.cuda() for v in values], list(ours))
    exponents.reference(values, list(other))
    assert torch.equal(ours.cpu(), other)


# --- what follows from the counts --------------------------------------------------------------------------------------------


def ssd() -> Tensor:
    """Return activation gradients like those of Multibox SSD (arXiv:1710.03740, section 3.2 and figure 3).

    Two thirds are zero; 31% of all lie where FP16 has nothing, most of these between 2**-38 and 2**-25, a few below;
    the rest reaches up to 2**-1.
    """
    count = 2**20
    generator = torch.Generator().manual_seed(5)

    def between(low: float, high: float, share: float) -> Tensor:
        drawn = torch.rand(round(share * count), generator=generator)
        return torch.exp2(low + (high - low) * drawn)

    parts = [between(-46, -40, 0.0005), between(-40, -25, 0.3095), between(-25, -1, 0.022)]
    zeros = torch.zeros(count - sum(part.numel() for part in parts))
    return torch.cat([zeros, *parts])


def test_a_distribution_like_that_of_ssd_loses_a_third_unscaled_and_a_thousandth_at_32768() -> None:
    values = ssd()
    counts = counted(values)
    assert counts.zeroed(FP16, 0) / values.numel() == pytest.approx(0.31, abs=0.001)
    assert counts.zeroed(FP16, 15) / values.numel() < 0.001
    assert counts.overflowed(FP16, 15) == 0
    assert counts.zeroed(FP16, 0) == int(((values != 0) & (values.half() == 0)).sum())
    assert counts.highest(FP16) == 16  # the largest lies between 2**-2 and 2**-1
    lowest = existing(counts.lowest(FP16))
    assert counts.lost(FP16, lowest) <= LITTLE < counts.lost(FP16, lowest - 1)
    assert suggested(counts, FP16)[0] == lowest == 15  # 2**15 as in the paper; the headroom gives way to the lower end


WINDOWS: list[tuple[list[float], Format, int | None, int | None, int | None]] = [
    # values, format, lowest, highest, suggested (exponents)
    ([1.0], FP16, -24, 15, 0),
    ([2.0**-24], FP16, 0, 39, 24),  # it stays, with one bit: no reason to stop at 1
    ([2.0**-25], FP16, 1, 40, 24),  # a tie goes to zero, so twice is needed; never above 2**24
    ([65504.0], FP16, -40, 0, 0),
    ([65519.996], FP16, -40, 0, 0),
    ([65520.0], FP16, -40, -1, -3),
    ([2.0**-30, 2.0**12], FP16, 6, 3, None),  # half of the values would be lost
    ([2.0**-30, 2.0**12], BF16, -103, 115, 0),
    ([448.0, 2.0**-9], E4M3, 0, 0, 0),
    ([464.0], E4M3, -18, 0, 0),
    ([465.0], E4M3, -18, -1, -3),
    ([0.0, float("inf"), float("nan")], FP16, None, None, None),
]


@pytest.mark.parametrize(("values", "target", "lowest", "highest", "begin"), WINDOWS)
def test_window_and_suggestion(
    values: list[float], target: Format, lowest: int | None, highest: int | None, begin: int | None
) -> None:
    counts = counted(torch.tensor(values))
    exponent, reason = suggested(counts, target)
    assert (counts.lowest(target), counts.highest(target), exponent) == (lowest, highest, begin)
    if exponent:  # 0 and None say something else
        assert highest is not None
        assert reason.startswith(f"{highest - exponent} doublings below the first overflow")


def test_a_window_that_is_empty_says_what_is_lost() -> None:
    counts = counted(torch.tensor([2.0**-30, 2.0**12]))
    reason = "at 2^3, the largest scale without overflow, 50.0% of the non-zero values become zero"
    assert suggested(counts, FP16)[1] == reason


@every_format
def test_casts_hold_every_scale_of_the_record(target: Format) -> None:
    counts = counted(ssd()[-300_000:])
    casts = counts.casts(target)
    assert len(casts.zeroed) == len(casts.subnormal) == len(casts.overflowed) == len(SCALES)
    at = SCALES.index(8)
    assert {n: getattr(casts, n)[at] for n in ("zeroed", "subnormal", "overflowed")} == counts_of(counts, target, 8)


def test_counts_together_are_the_sum() -> None:
    parts = [counted(torch.tensor(values)) for values in ([1.0, 2.0], [0.0], [3.0])]
    together = Counts.merged(parts)
    assert together.table == counted(torch.tensor([1.0, 2.0, 0.0, 3.0])).table
    assert Counts.merged([]).nonzero == 0
