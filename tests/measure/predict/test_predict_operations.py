"""Shapes of products as a tape records them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mezzo.measure.predict.operations import operations_of
from mezzo.measure.predict.tape import ProductSize

aten: Any = torch.ops.aten


@pytest.mark.parametrize(
    ("function", "sizes", "shape"),
    [
        (aten.mm.default, [(2, 3), (3, 5)], ProductSize(1, 2, 5, 3)),
        (aten.bmm.default, [(4, 2, 3), (4, 3, 5)], ProductSize(4, 2, 5, 3)),
        (aten.mv.default, [(2, 3), (3,)], ProductSize(1, 2, 1, 3)),
    ],
    ids=str,
)
def test_products_rows_columns_and_depth(function: Any, sizes: list[tuple[int, ...]], shape: ProductSize) -> None:
    args: list[Tensor] = [torch.ones(size) for size in sizes]
    (found,) = operations_of(function, args, {}, function(*args), "forward", "")
    assert found.shape == shape


@pytest.mark.parametrize(
    ("x", "weight", "transposed", "groups", "shape"),
    [
        ((2, 6, 5, 5), (8, 6, 3, 3), False, 1, ProductSize(1, 2 * 3 * 3, 8, 6 * 9, 9)),
        ((2, 6, 5, 5), (8, 3, 3, 3), False, 2, ProductSize(2, 2 * 3 * 3, 4, 3 * 9, 9)),
        (
            (2, 6, 5, 4),
            (6, 8, 3, 3),
            True,
            1,
            ProductSize(1, 2 * 5 * 4, 8 * 9, 6, 9),
        ),  # as many rows as the input has places
        ((2, 6, 5, 4), (6, 4, 3, 3), True, 2, ProductSize(2, 2 * 5 * 4, 4 * 9, 3, 9)),
    ],
    ids=str,
)
def test_convolutions_as_products(
    x: tuple[int, ...], weight: tuple[int, ...], transposed: bool, groups: int, shape: ProductSize
) -> None:
    args = [torch.ones(x), torch.ones(weight), None, [1, 1], [0, 0], [1, 1], transposed, [0, 0], groups]
    function = aten.convolution.default
    (found,) = operations_of(function, args, {}, function(*args), "forward", "")
    assert found.shape == shape


@pytest.mark.parametrize(
    ("num_tensors", "elements", "num_kernels"),
    [
        (110, 1, 1),
        (111, 1, 2),  # 110 tensors in a kernel
        (2, 65536 * 160, 1),  # 320 chunks in a kernel
        (2, 65536 * 160 + 1, 2),
    ],
)
def test_an_operation_on_lists_is_several_kernels(num_tensors: int, elements: int, num_kernels: int) -> None:
    tensors = [torch.empty(elements, device="meta") for _ in range(num_tensors)]
    function = aten._foreach_add_.Scalar
    found = operations_of(function, [tensors, 1], {}, None, "optimizer", "")
    assert len(found) == num_kernels
    assert sum(one.written_bytes for one in found) == 4 * num_tensors * elements
    two = operations_of(aten._foreach_add_.List, [tensors, tensors], {}, None, "optimizer", "")
    assert len(two) == max(num_kernels, -(-num_tensors // 64))
    assert len(operations_of(function, [tensors, 1], {}, None, "optimizer", "", gpu=False)) == 1


def test_a_counter_of_batches_is_an_operation_and_a_step_counter_is_none() -> None:
    one = torch.zeros((), dtype=torch.int64)
    args = (aten.add_.Tensor, [one, torch.ones((), dtype=torch.int64)], {}, one)
    assert len(operations_of(*args, "forward", "")) == 1
    assert operations_of(*args, "optimizer", "") == []
