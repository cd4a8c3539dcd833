"""Gradients of many parameters: scaling them, adding them up in fewer bits and dropping them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mezzo.engine.gradients import any_not_finite, drop_gradients, finite_each, multiply, round_sums
from mezzo.formats import FORMATS

FP32 = torch.float32
KINDS = [[torch.float32], [torch.float16], [torch.float64], [torch.float32, torch.float16], []]


@pytest.mark.parametrize("factor", [2.0**-16, 1 / 3, 1.0, 0.0])
@pytest.mark.parametrize("kinds", KINDS)
def test_a_product_is_one_rounding_of_the_product(kinds: list[torch.dtype], factor: float) -> None:
    torch.manual_seed(0)
    tensors = [(torch.randn(5, 7) * 2.0**16).clamp(-6e4, 6e4).to(kind) for kind in kinds]
    if tensors:
        tensors[0][0, :2] = torch.tensor([float("inf"), float("nan")])
    one = torch.tensor(factor)
    expected = [(tensor.double() * one.double()).to(tensor.dtype) for tensor in tensors]
    multiply(tensors, one)
    torch.testing.assert_close(tensors, expected, rtol=0, atol=0, equal_nan=True)


def test_each_gradient_is_checked_by_itself() -> None:
    inf, nan, beyond_squares = float("inf"), float("nan"), torch.full((3,), 3e38)
    gradients = [
        torch.tensor([1.0, inf]),
        torch.empty(0),
        beyond_squares,
        torch.tensor([nan]).half(),
        torch.empty(0, 4),
    ]
    assert finite_each(gradients).tolist() == [False, True, True, False, True]
    assert any_not_finite(gradients).item() == 1
    assert any_not_finite([torch.empty(0), beyond_squares]).item() == 0


class Told(torch.optim.SGD):
    told = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.told += 1
        super().zero_grad(set_to_none)


@pytest.mark.parametrize("kind", [torch.optim.SGD, Told])
def test_gradients_are_dropped_by_an_optimizers_own_method_where_it_has_one(kind: Any) -> None:
    weights = [torch.ones(2, requires_grad=True), torch.ones(3, requires_grad=True)]
    weights[0].grad = torch.ones(2)
    optimizer = kind(weights, lr=1.0)
    drop_gradients([optimizer])
    assert [weight.grad for weight in weights] == [None, None]
    assert getattr(optimizer, "told", 1) == 1


def test_a_replaced_zero_grad_is_called() -> None:
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=1.0)
    asked: list[bool] = []
    optimizer.zero_grad = lambda set_to_none=True: asked.append(set_to_none)  # type: ignore[method-assign]
    drop_gradients([optimizer])
    assert asked == [True]


# what is added one after the other, and the sum in BF16, which has 8 significant bits
SUMS: dict[str, tuple[list[float], float]] = {
    "256 is the last whole number that 1 can be added to": ([256.0, 1.0], 256.0),
    "but not before it": ([255.0, 1.0], 256.0),
    "a tie goes to the even number": ([258.0, 1.0], 260.0),
    "many small ones are all lost": ([256.0] + [1.0] * 63, 256.0),
    "and kept if they come first": ([1.0] * 63 + [256.0], 320.0),
    "FP32 keeps what BF16 has no bits for": ([1.0, 2.0**-9], 1.0),
    "infinities stay": ([1.0, float("inf")], float("inf")),
}


@pytest.mark.parametrize("kind", ["dense", "complex", "FP64", "BF16"])
@pytest.mark.parametrize("name", SUMS)
def test_sums_in_bf16(name: str, kind: str) -> None:
    added, expected = SUMS[name]
    dtype = {"dense": FP32, "complex": torch.complex64, "FP64": torch.float64, "BF16": torch.bfloat16}[kind]
    total = torch.zeros(3, dtype=dtype)
    place = total.data_ptr()
    for value in added:
        total += value
        round_sums([total], FORMATS["bf16"])
    assert total.real.tolist() == [expected] * 3
    assert (total.dtype, total.data_ptr()) == (dtype, place)
