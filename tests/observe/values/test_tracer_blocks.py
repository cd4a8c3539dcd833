"""Products in blocks in a run's values: what they read, their phases and FLOPs, and the error of all their roundings."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from helpers_diff import place, values_of
from helpers_in_blocks import in_mxfp8
from mezzo.commands.diff.answer import verdict_of
from mezzo.commands.diff.judge import judge
from mezzo.observe.values.log import Event, ValuesLog, distances

MODEL = """
import torch
from torch import nn

torch.manual_seed(0)
layers = [nn.Linear(64, 64, bias=False), nn.Linear(64, 96, bias=False), nn.Linear(96, 64, bias=False)]
model = nn.Sequential(*layers)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for batch in torch.randn(2, 128, 64):
    optimizer.zero_grad()
    model(batch).pow(2).mean().backward()
    optimizer.step()
"""
ALL, SOME = "mxfp8:end_layers=compute", "mxfp8"
POLICIES = [ALL, "nvfp4:end_layers=compute", "mxfp4:end_layers=compute:hadamard=wgrad:gradient_rounding=stochastic"]


def products(log: ValuesLog) -> list[Event]:
    return [event for event in log.events if event.step == 1 and event.flops]


def origin(log: ValuesLog, number: int) -> str:
    """Return where a value comes from, through casts."""
    while log.events[number].kind == "cast":
        number = log.events[number].reads[0].event
    event = log.events[number]
    return f"{event.kind} {event.module}" if event.kind in ("weight", "data") else place(event)


@pytest.mark.parametrize("policy", POLICIES)
def test_what_products_read_and_where_they_run(policy: str) -> None:
    log = values_of(MODEL, policy=policy)
    found = [(place(one), [origin(log, read.event) for read in one.reads], one.flops) for one in products(log)]
    first, second, third = "linear 0 forward 1", "linear 1 forward 1", "linear 2 forward 1"
    loss, of_third, of_second = "pow backward 1", "linear 2 backward 1", "linear 1 backward 1"
    small, large = 2 * 128 * 64 * 64, 2 * 128 * 64 * 96
    reads = [[origin(log, read.event) for read in one.reads] for one in products(log)]
    assert [place for place, _, _ in found] == [
        first,
        second,
        third,
        *[of_third] * 2,
        *[of_second] * 2,
        "linear 0 backward 1",
    ]
    assert [flops for _, _, flops in found] == [small, *[large] * 6, small]
    assert reads[:3] == [["data (script)", "weight 0.weight"], [first, "weight 1.weight"], [second, "weight 2.weight"]]
    assert [one[1] for one in reads[3:]] == ["weight 2.weight", second, "weight 1.weight", first, "data (script)"]
    assert [one[0] for one in reads[5:]] == [of_third, of_third, of_second]
    assert reads[3][0] == reads[4][0] == loss.replace("pow", "pow (script)")
    # the only values that nothing made: the batches and the loss's own constants
    assert [event.op for event in log.events if event.kind == "data" and event.step == 1] == ["data"]


def errors(policy: str, module: str = "0") -> list[float]:
    found = [one.error for one in with_errors(policy) if one.module == module]
    assert None not in found
    return [float(error or 0) for error in found]


def test_the_error_of_a_product_is_the_one_of_all_its_roundings() -> None:
    names: dict[str, Tensor] = {}
    exec(MODEL.partition("for batch")[0], names)
    layer, x = names["layers"][0], torch.randn(2, 128, 64)[0].bfloat16()
    weight = layer.weight.detach().bfloat16()
    exact = x.double() @ weight.double().T
    low = (in_mxfp8(x, along=1) @ in_mxfp8(weight, along=1).T).bfloat16().double()
    expected = float((low - exact).norm() / exact.norm())
    assert expected > 0.03
    assert errors(ALL)[0] == pytest.approx(expected, rel=5e-3)


KEPT = [("forward", [False, True]), ("wgrad", [True, False]), ("*", [False, False])]


@pytest.mark.parametrize(("product", "coarse"), KEPT)
def test_products_in_bf16_have_its_error(product: str, coarse: list[bool]) -> None:
    found = errors(f"{ALL}:bf16_products=0.{product}")
    assert [error > 0.02 for error in found] == coarse
    assert all(error < 0.0025 for error, one in zip(found, coarse, strict=True) if not one)


def test_mirrored_rounding_moves_a_product_as_far_as_blocks_do() -> None:
    plain, moved = (values_of(MODEL, policy=ALL, mirrored=mirrored, steps=(1,)) for mirrored in (False, True))
    number = next(n for n, event in enumerate(plain.events) if event.flops)
    apart = float(distances(plain, moved, number, number).max())
    # half of the elements move by twice their error
    assert apart == pytest.approx(2**0.5 * errors(ALL)[0], rel=0.25)


SEQUENCES = MODEL.replace(", bias=False", "").replace("torch.randn(2, 128, 64)", "torch.randn(2, 4, 32, 64)")


@pytest.mark.parametrize(
    "policy", [ALL, "nvfp4:end_layers=compute:bf16_products=1.forward", "bf16:arithmetic=emulated"]
)
def test_a_bias_and_the_shape_of_a_batch_belong_to_the_product(policy: str) -> None:
    log = values_of(SEQUENCES, policy=policy, in_fp64=True)
    forward = [one for one in products(log) if one.phase == "forward"]
    assert [(one.op, one.module, one.outputs[0].format, one.outputs[0].shape) for one in forward] == [
        ("linear", module, "bf16", (128, width)) for module, width in (("0", 64), ("1", 96), ("2", 64))
    ]
    for before, one in zip([None, *forward], forward, strict=False):
        read = {origin(log, each.event) for each in one.reads}
        given = "data (script)" if before is None else place(before)
        assert read == {given, f"weight {one.module}.weight", f"weight {one.module}.bias"}
    assert [
        e.op for e in log.events if e.step == 1 and e.phase == "forward" and e.kind == "operation" and not e.flops
    ] == ["pow", "mean", "ones_like"]


IN_BF16 = "bf16:arithmetic=emulated"
FIRST: list[tuple[str, str, tuple[int, ...], str]] = [
    ("mxfp8", "linear 1 forward 1", (128, 96), MODEL),
    ("mxfp8", "linear 1 forward 1", (128, 96), SEQUENCES),
    (ALL, "linear 0 forward 1", (128, 64), MODEL),
    ("nvfp4", "linear 1 forward 1", (128, 96), SEQUENCES),
    ("nvfp4:bf16_products=1.forward", "linear 1 backward 1", (128, 64), MODEL),
    ("mxfp4:bf16_products=1.forward+1.dgrad", "linear 1 backward 1", (96, 64), MODEL),
]


@pytest.mark.parametrize(
    ("policy", "first", "shape", "script"), FIRST, ids=lambda one: "" if "import" in one else str(one)
)
def test_bf16_and_blocks_part_at_the_first_product_in_blocks(
    policy: str, first: str, shape: tuple[int, ...], script: str
) -> None:
    a, b = values_of(script, policy=IN_BF16), values_of(script, policy=policy)
    again, control = values_of(script, policy=IN_BF16), values_of(script, policy=policy, mirrored=True)
    found = judge(a, b, again=again, control=control, control_of_b=True, same_formats=False)
    assert verdict_of(a, found) == "rounding"
    assert found.first is not None
    event = b.events[found.first[1]]
    assert (place(event), event.outputs[0].shape) == (first, shape)
    error = next(e.error for e in with_errors(policy, script) if (place(e), e.outputs[0].shape) == (first, shape))
    assert found.distance[found.first[0]] == pytest.approx(error, rel=0.35)  # estimated by a sketch


def with_errors(policy: str, script: str = MODEL) -> list[Event]:
    return products(values_of(script, policy=policy, in_fp64=True))


def test_where_no_layer_has_whole_blocks_nothing_differs() -> None:
    a, b = (values_of(MODEL, policy=policy) for policy in (IN_BF16, "fp8-block"))
    assert judge(a, b, same_formats=False).identical
