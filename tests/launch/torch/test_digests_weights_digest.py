"""A digest of weights: the same for the same bits, another for any other."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from mezzo.launch.patches import Patches
from mezzo.launch.torch import training
from mezzo.launch.torch.digests import digest

BASE = [torch.arange(6.0).reshape(2, 3), torch.ones(2, dtype=torch.bfloat16)]


def test_the_same_bits_have_one_digest() -> None:
    assert digest(BASE) == digest([weight.clone() for weight in BASE])
    assert digest([torch.tensor([float("nan")])]) == digest([torch.tensor([float("nan")])])


@pytest.mark.parametrize(
    "other",
    [
        [BASE[0] + torch.tensor([0.0, 0.0, 1e-6]), BASE[1]],  # the last bits of two numbers
        [BASE[0].flip(0), BASE[1]],  # the same numbers in other places
        [BASE[0].reshape(3, 2), BASE[1]],
        [BASE[0], BASE[1].half()],
        [BASE[1], BASE[0]],
        [BASE[0]],
    ],
)
def test_other_weights_have_another(other: list[Tensor]) -> None:
    assert digest(other) != digest(BASE)


def test_complex_and_strided_weights() -> None:
    weight = torch.arange(6.0).reshape(2, 3)
    assert digest([weight.t()]) == digest([weight.t().contiguous()])
    assert digest([torch.complex(weight, weight)]) != digest([torch.complex(weight, -weight)])


def test_the_digest_is_taken_only_where_it_is_read() -> None:
    destroy, patches = dist.destroy_process_group, Patches()
    with training(None, seed=None, observe=None) as script:
        assert dist.destroy_process_group is destroy
        weight = nn.Parameter(torch.ones(3))
        weight.sum().backward()
        optimizer = torch.optim.SGD([weight], lr=0.5)
        optimizer.step()
        assert script.weights() == ""
        script.keep_weights(patches)
        assert dist.destroy_process_group is not destroy
        patches.undo()
        assert dist.destroy_process_group is destroy
        assert script.weights() == digest([torch.full((3,), 0.5)])


@pytest.mark.parametrize("places", [[0], [1], [2], [0, 1], [1, 3], [0, 1, 2, 3]])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_sign_of_every_element_counts(dtype: torch.dtype, places: list[int]) -> None:
    weight = torch.tensor([1.0, -2.0, -3.0, 4.0], dtype=dtype)
    other = weight.clone()
    other[places] *= -1
    assert digest([other]) != digest([weight])
