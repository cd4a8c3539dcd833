"""Fingerprints: what a hash tells apart, how well a sketch estimates a distance, and what becomes of other layouts."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from mezzo.observe.values.fingerprints import Fingerprints, dense
from mezzo.observe.values.log import BUCKETS, Event, Output, ValuesLog, distances, rounding

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.uint8, torch.bool)


def logged(*tensors: Tensor) -> ValuesLog:
    """Return a log with one event for each tensor."""
    fingerprints = Fingerprints()
    outputs = [fingerprints.add(tensor) for tensor in tensors]
    hashes, numbers = fingerprints.read()
    events = [Event("operation", 1, "forward", "op", "", "", outputs=(o,), row=n) for n, o in enumerate(outputs)]
    return ValuesLog(events, np.array(hashes, np.int64), numbers)


def apart(one: Tensor, other: Tensor) -> float:
    log = logged(one, other)
    return float(distances(log, log, 0, 1)[0])


def true_distance(one: Tensor, other: Tensor) -> float:
    norms = one.double().norm(), other.double().norm()
    return float((one.double() - other.double()).norm() / max(norms))


@pytest.mark.parametrize("size", [1, 2, 63, 64])
def test_up_to_64_elements_are_compared_exactly(size: int) -> None:
    one = torch.randn(size, generator=torch.Generator().manual_seed(size))
    other = one + 0.1 * torch.randn(size, generator=torch.Generator().manual_seed(size + 1))
    assert apart(one, other) == pytest.approx(true_distance(one, other), rel=1e-12)


@pytest.mark.parametrize("size", [65, 1000, 100_000])
def test_larger_distances_are_estimated_without_bias(size: int) -> None:
    ratios = []
    for seed in range(200):
        generator = torch.Generator().manual_seed(seed)
        one = torch.randn(size, generator=generator)
        other = one + 1e-3 * torch.randn(size, generator=generator)
        ratios.append((apart(one, other) / true_distance(one, other)) ** 2)
    assert np.std(np.sqrt(ratios)) < 0.095  # the docstring says 9%
    assert abs(np.mean(ratios) - 1) < 3 * np.std(ratios) / np.sqrt(len(ratios))


def test_a_difference_in_one_element_is_not_lost_in_a_large_tensor() -> None:
    one = torch.ones(1_000_000)
    other = one.clone()
    other[654_321] += 2**-23
    assert apart(one, other) == pytest.approx(2**-23 / 1000, rel=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_other_bit_is_another_hash(dtype: torch.dtype) -> None:
    values = torch.arange(300).to(dtype)
    bits = values.view(torch.uint8).clone()
    bits[200 * values.element_size()] ^= 1
    log = logged(values, bits.view(dtype), values.clone())
    assert log.hashes[0] == log.hashes[2] != log.hashes[1]


@pytest.mark.parametrize("bit", range(0, 32, 5))
@pytest.mark.parametrize("place", [0, 1, 77, 299])
def test_every_bit_of_every_place_counts(place: int, bit: int) -> None:
    values = torch.linspace(-1, 1, 300)
    other = values.clone()
    other.view(torch.int32)[place] ^= 1 << bit
    log = logged(values, other)
    assert log.hashes[0] != log.hashes[1]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_other_signs_never_cancel(dtype: torch.dtype) -> None:
    """All sets of up to four of twelve neighbours change their signs, whatever their signs were."""
    values = torch.randn(12, generator=torch.Generator().manual_seed(0)).to(dtype)
    changed = [values.clone()]
    for size in (1, 2, 3, 4):
        for places in itertools.combinations(range(12), size):
            changed.append(values.clone())
            changed[-1][list(places)] *= -1
    assert len(set(logged(*changed).hashes.tolist())) == len(changed) == 794


def test_the_place_of_an_element_counts() -> None:
    values = torch.randn(128, generator=torch.Generator().manual_seed(0))
    log = logged(values, values.flip(0))
    assert log.hashes[0] != log.hashes[1]
    assert apart(values, values.flip(0)) > 0.5


@pytest.mark.parametrize(
    "other",
    [
        lambda x: x.t().contiguous().t(),
        lambda x: torch.cat([x, x])[:7],
        lambda x: x.to_sparse(),
        lambda x: torch.view_as_complex(x.view(7, 5, 2)),
    ],
    ids=["strides", "a part", "sparse", "complex"],
)
def test_the_layout_does_not_count(other: object) -> None:
    values = 1 + torch.rand(7, 10, generator=torch.Generator().manual_seed(0))
    log = logged(values, other(values))  # type: ignore[operator]
    assert log.hashes[0] == log.hashes[1]
    np.testing.assert_allclose(log.numbers[0], log.numbers[1], rtol=1e-12)


def test_a_conjugate_is_its_values() -> None:
    values = torch.view_as_complex(torch.randn(4, 3, 2, generator=torch.Generator().manual_seed(0)))
    assert dense(values.conj()).tolist() == dense(values.conj().clone()).tolist()


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ([0.0, 0.0], [0.0, -0.0], 0.0),  # other bits, and no distance
        ([0.0, 0.0], [3.0, 4.0], 1.0),
        ([3.0, 4.0], [-3.0, -4.0], 2.0),
        ([1.0, float("nan")], [1.0, float("nan")], 0.0),
        ([1.0, float("nan")], [1.0, 2.0], float("inf")),
        ([1.0, float("inf")], [1.0, 2.0], float("inf")),
    ],
)
def test_distances_of_small_values(one: list[float], other: list[float], expected: float) -> None:
    assert apart(torch.tensor(one), torch.tensor(other)) == expected


def test_formats_differ_even_where_values_do_not() -> None:
    ones = torch.ones(4)
    log = logged(ones, ones.bfloat16())
    assert distances(log, log, 0, 1).tolist() == [0.0]
    assert [event.outputs[0].format for event in log.events] == ["fp32", "bf16"]


@pytest.mark.parametrize(("dtype", "unit"), [(torch.float32, 2.0**-24), (torch.bfloat16, 2.0**-8), (torch.int32, 0.0)])
def test_the_rounding_of_a_format(dtype: torch.dtype, unit: float) -> None:
    log = logged(torch.ones(100, dtype=dtype))
    assert rounding(log, 0).tolist() == pytest.approx([unit])


def test_the_rounding_of_what_was_added_to() -> None:
    fingerprints = Fingerprints()
    change, weights = torch.full((100,), 1e-3), torch.ones(100)
    assert fingerprints.add(change, rounding_of=weights) == Output("fp32", (100,))
    hashes, numbers = fingerprints.read()
    event = Event("update", 1, "update", "SGD", "", "", outputs=(Output("fp32", (100,)),), row=0)
    log = ValuesLog([event], np.array(hashes), numbers)
    assert rounding(log, 0).tolist() == pytest.approx([1e3 * 2.0**-24])


def test_rows_are_forgotten_from_the_end() -> None:
    fingerprints = Fingerprints()
    for value in range(5):
        fingerprints.add(torch.tensor(value))
    fingerprints.forget_after(2)
    fingerprints.add(torch.tensor(9))
    hashes, numbers = fingerprints.read()
    assert len(fingerprints) == 3
    assert hashes == [int(hashed) for hashed in logged(*map(torch.tensor, (0, 1, 9))).hashes]
    assert numbers[:, 0].tolist() == [0.0, 1.0, 81.0]
    assert numbers.shape == (3, BUCKETS + 3)
