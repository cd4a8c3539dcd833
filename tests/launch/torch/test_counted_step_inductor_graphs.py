"""Operations of a traced graph are counted as the dispatch mode counts them while they run."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._higher_order_ops import cond
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from helpers_compare import run
from mezzo.launch.torch.counted_step import counts_of
from mezzo.measure.flops import Counted, FlopCounter, effective
from mezzo.policy import Policy
from mezzo.records import Effective

Function = Callable[[Tensor, Tensor], Tensor]
FUNCTIONS: dict[str, Function] = {
    "product": lambda a, b: a @ b,
    "two formats": lambda a, b: (a @ b).half() @ b.half().T,
    "rounded": lambda a, b: (a * 2).bfloat16().float(),
    "convolution": lambda a, b: F.conv1d(a.T[None], b[:, :, None]),
    "attention": lambda a, b: F.scaled_dot_product_attention(a[None, None], a[None, None], a[None, None]),
    "nothing": lambda a, b: a + 1,
}


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
@pytest.mark.parametrize("tracing", ["fake", "symbolic"])
def test_a_graph_counts_as_its_operations_do(function: Function, tracing: str) -> None:
    a, b = torch.ones(8, 16), torch.ones(16, 16)
    ran, traced = (FlopCounter(in_region=lambda: True) for _ in range(2))
    with ran:
        function(a, b)
    for operation in counts_of(make_fx(function, tracing_mode=tracing)(a, b)).operations:
        traced.count(*operation)
    assert (traced.by_format, traced.num_lowered) == (ran.by_format, ran.num_lowered)
    assert all(type(flops) is int for flops in traced.by_format.values())


def test_an_operation_whose_sizes_depend_on_values_is_listed() -> None:
    def function(a: Tensor, b: Tensor) -> Tensor:
        return (a.nonzero().half() @ b.half()).sum() + (b @ b).sum()

    counter = FlopCounter(in_region=lambda: True)
    found = counts_of(make_fx(function, tracing_mode="symbolic")(torch.ones(4, 5), torch.ones(2, 2)))
    for operation in found.operations:
        counter.count(*operation)
    assert counter.by_format == {"fp32": 2 * 2 * 2 * 2}
    assert found.uncounted == {"mm": "its sizes depend on values"}
    assert found.num_lowered == 3  # the conversion, the product and its sum


def test_a_higher_order_operator_is_listed() -> None:
    def function(a: Tensor) -> Tensor:
        out: Tensor = cond(a.sum() > 0, lambda x: x @ x, lambda x: x + x, (a,))
        return out

    found = counts_of(make_fx(function, tracing_mode="symbolic")(torch.ones(4, 4)))
    assert found.uncounted == {"cond": "it is compiled as a whole"}


@pytest.mark.parametrize(
    ("uncounted", "no_effect"), [({}, "changed nothing"), ({"mm": "its sizes depend on values"}, "")]
)
def test_a_policy_is_not_judged_by_a_part_of_the_products(uncounted: dict[str, str], no_effect: str) -> None:
    for by_format in ({}, {"fp32": 8}):
        counted = Counted(by_format=by_format, num_lowered=0, outside=0, switched_off=0, step=2, uncounted=uncounted)
        found = effective(counted, Policy.parse("bf16"), emulates=False, uncounted=Effective())
        assert run("bf16", [1.0], effective=found).no_effect == no_effect
        listed = {(one.value, one.reason) for one in found.left_alone if one.what == "FLOPs not counted"}
        assert listed == set(uncounted.items())
        assert found.uncounted == sorted(uncounted)
