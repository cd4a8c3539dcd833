"""What formats in blocks lose: by hand, and in training steps against torchao's quantised operands."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import mezzo
from helpers_engine import randn
from mezzo.engine.matrix_units.block_formats import transformed
from mezzo.formats import E2M1, E4M3, E8M0, MX_BLOCK, Format, ScaleRule, in_blocks, nvfp4_recipe
from mezzo.observe.ranges.block_losses import JUDGED, losses
from mezzo.records import BlockLoss, RangesRecord


def mx(elements: Format, rule: ScaleRule) -> Format:
    return in_blocks(elements, MX_BLOCK, rule, scales=E8M0)


NVFP4 = nvfp4_recipe(rule="exact", square=True, hadamard=True, stochastic=False).values
BY_HAND = [
    # format, one row, then values, zeroed, saturated, at the end of the scales, sum of squares of errors, and of values
    (mx(E2M1, "rceil"), [6.0, 0.25, 1.0, 0.0], (3, 1, 0, 0, 0.0625, 37.0625)),
    (mx(E2M1, "floor"), [7.0, 0.5, 5.0, 0.0], (3, 0, 1, 0, 1.0 + 1.0, 74.25)),  # 7 saturates at 6; 5 is a tie, to 4
    (mx(E4M3, "rceil"), [448.0, 2.0**-10, 1.0], (3, 1, 0, 0, 2.0**-20, 448.0**2 + 1 + 2.0**-20)),
    (mx(E4M3, "rceil"), [2.0**-122, 0.0], (1, 1, 0, 1, 2.0**-244, 2.0**-244)),  # the smallest scale is 2**-127
    # The tensor's largest is 2688: its scale is 1, and a block's is in E4M3. 2**-9 / 6 is below the smallest normal one, 2**-6.
    (NVFP4, [2688.0, *[0.0] * 15, 2.0**-9, 0.0], (2, 1, 0, 1, 2.0**-18, 2688.0**2 + 2.0**-18)),
]


@pytest.mark.parametrize(("form", "row", "expected"), BY_HAND)
def test_one_row_by_hand(form: Format, row: list[float], expected: tuple[float, ...]) -> None:
    found = losses(torch.tensor([row]).bfloat16(), form, along=1).tolist()
    assert found == pytest.approx(list(expected), rel=1e-12)
    by_columns = losses(torch.tensor([row]).bfloat16().mT.contiguous(), form, along=0).tolist()
    assert by_columns == found


def seen_in(policy: str) -> tuple[RangesRecord, Tensor, Tensor, Tensor]:
    """Return the record of one step of two layers, and the middle layer's input, weight and gradient."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 96), nn.Linear(96, 10))
    kept: dict[str, Tensor] = {}

    def keep(module: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
        if "x" not in kept:  # of the first step
            kept["x"] = args[0]
            output.register_hook(partial(kept.__setitem__, "dy"))

    model[1].register_forward_hook(keep)
    weight = model[1].weight.detach().clone()

    def train() -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            model(randn(48, 32)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    record = mezzo.ranges(train, policy=policy, steps=1)
    return record, kept["x"].detach(), weight, kept["dy"]


def test_a_layers_operands_are_counted_for_every_format() -> None:
    record, x, weight, dy = seen_in("mxfp8:end_layers=compute")
    found = {(one.layer, one.product, one.operand, one.policy): one for one in record.blocks}
    assert {one.layer for one in record.blocks} == {"0", "1"}  # the last layer's 10 outputs fill no block
    assert {one.policy for one in record.blocks} == {
        "mxfp8:end_layers=compute",
        *(policy for policy in JUDGED if "fp8-block" not in policy),
    }
    assert len(found) == 7 * (6 + 4)  # the first layer's input needs no gradient

    def check(one: BlockLoss, operand: Tensor, form: Format, along: int) -> None:
        sums = losses(operand.bfloat16(), form, along=along).tolist()
        assert [one.values, one.zeroed, one.saturated, one.at_end] == sums[:4]
        assert (one.error, one.square) == pytest.approx(tuple(sums[4:]))
        assert one.relative_error == pytest.approx(math.sqrt(sums[4] / sums[5]))

    for policy, elements, rule in (
        ("mxfp8", E4M3, "rceil"),
        ("mxfp8:scale_rule=floor", E4M3, "floor"),
        ("mxfp4", E2M1, "rceil"),
    ):
        for product, operand, values, along in (
            ("forward", "activation", x, 1),
            ("forward", "weight", weight, 1),
            ("dgrad", "weight", weight, 0),
        ):
            check(found["1", product, operand, policy], values, mx(elements, rule), along)  # type: ignore[index, arg-type]
    mixed = transformed(x.bfloat16())
    check(found["1", "wgrad", "activation", "nvfp4"], mixed, NVFP4, 0)
    gradient = found["1", "dgrad", "gradient", "mxfp8"]
    assert gradient.values == int((dy.bfloat16() != 0).sum())


def test_a_policy_of_its_own_is_judged_beside_them() -> None:
    record, *_ = seen_in("nvfp4:hadamard=none")
    assert {one.policy for one in record.blocks} >= {"nvfp4:hadamard=none", "nvfp4", "mxfp8"}


def test_what_stays_in_bf16_is_left_out() -> None:
    record, *_ = seen_in("mxfp8:bf16_products=1.wgrad")
    assert {(one.layer, one.product) for one in record.blocks} == {("1", "forward"), ("1", "dgrad")}


def test_other_policies_count_no_blocks() -> None:
    record, *_ = seen_in("bf16")
    assert record.blocks == []
