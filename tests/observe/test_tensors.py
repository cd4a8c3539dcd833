"""The memory of tensors: of plain ones, views and parts, and those that have none of their own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from mezzo.observe.lint.torch_calls import AverageView, GradientView
from mezzo.observe.tensors import is_finite, operand, region, storage, storage_of
from mezzo.observe.trace import CoveredElements


def test_a_view_has_the_memory_of_what_it_is_a_view_of() -> None:
    whole = torch.ones(4)
    assert storage_of(whole) == storage_of(whole[2:]) == whole.data_ptr()


def test_sparse_tensors_and_wrappers_have_none() -> None:
    """``full_tensor()`` of a shard is such a wrapper until it has arrived."""
    for tensor in (torch.eye(2).to_sparse(), AsyncCollectiveTensor(torch.ones(2))):
        assert storage(tensor) is None
        assert storage_of(tensor) == id(tensor)


def test_a_view_of_gradients_is_shown_wrappers() -> None:
    seen: list[object] = []
    gradients = [torch.ones(2)]
    view = GradientView(
        gradients, gradients, norm_read=lambda: seen.append(True), limited=seen.append, narrow=seen.append
    )
    arriving = AsyncCollectiveTensor(torch.ones(2))
    view.inspect_call("contiguous", [arriving], arriving)
    assert seen == []


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.float8_e5m2], ids=str)
def test_magnitudes_of_every_format_are_its_own(dtype: torch.dtype) -> None:
    extreme = torch.finfo(dtype)
    found = operand(torch.tensor([extreme.max, extreme.tiny, torch.nan], dtype=torch.float64).to(dtype))
    assert (found.largest, found.smallest, found.num_not_finite) == (extreme.max, extreme.tiny, 1)


@pytest.mark.parametrize(
    ("view", "part"),
    [
        (lambda t: t, (0, 4, (1, 24))),
        (lambda t: t.t(), (0, 4, (1, 24))),
        (lambda t: t.view(-1), (0, 4, (1, 24))),
        (lambda t: t.view(4, 1, 6), (0, 4, (1, 24))),
        (lambda t: t[1:3], (6, 4, (1, 12))),
        (lambda t: t[:, 3:], (3, 4, (1, 3), (6, 4))),
        (lambda t: t[::2], (0, 4, (1, 6), (12, 2))),
        (lambda t: t.view(torch.bfloat16)[0], (0, 2, (1, 12))),
        (lambda t: t[0, 0], (0, 4)),
        (lambda t: t.to_sparse(), ()),
    ],
)
def test_the_part_of_a_storage_that_a_tensor_is_made_of(
    view: Callable[[Tensor], Tensor], part: CoveredElements
) -> None:
    assert region(view(torch.zeros(4, 6))) == part


def test_an_average_is_of_the_weight_that_it_reads_where_weights_share_a_storage() -> None:
    flat = torch.zeros(16)
    weights = [flat[:8], flat[8:]]
    found: list[Tensor] = []
    view = AverageView(weights, averaged=lambda weight, average, narrow: found.append(weight))
    average = torch.zeros(8, dtype=torch.bfloat16)
    for weight in weights:
        view.inspect_call("lerp_", (average, weight.detach(), 0.1), average)
    assert [one.data_ptr() for one in found] == [one.data_ptr() for one in weights]


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64])
def test_one_number_that_is_not_finite_is_enough(dtype: torch.dtype, bad: float) -> None:
    largest = torch.finfo(dtype).max
    values = torch.full((5,), largest, dtype=dtype)  # whose sum is infinite
    assert is_finite(values)
    values[3] = bad
    assert not is_finite(values)
    assert is_finite(torch.empty(0, dtype=dtype))
