"""What a debugger or a notebook prints for sessions, optimizers, scales and masters; nothing waits for a device."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim.lr_scheduler import StepLR

import mezzo
from helpers_engine import batches, train
from mezzo import Session
from mezzo.engine.descriptions import host_value
from mezzo.engine.matrix_units.native_units import fp32_products_as_they_were
from mezzo.engine.scaling import DynamicScale, NoScale, StaticScale


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def test_a_session_says_what_it_trains_and_how_far_it_is() -> None:
    net = model()
    optimizer = mezzo.AdamW(net.parameters(), lr=0.25)
    with fp32_products_as_they_were():
        session = Session(net, optimizer, accumulate=2, clip_norm=1.5, scheduler=StepLR(optimizer, 1, gamma=0.5))
        train(session, net, batches(3))
    assert repr(session).splitlines() == [
        "Session(policy='fp16') on cpu",
        "  trains   Sequential: 83 values in 4 tensors, fp32",
        "  with     mezzo.AdamW(lr=0.125), StepLR",
        "  window   2 micro-batches, 1 of them done, clip_norm=1.5",
        "  so far   1 updates, 0 skipped; loss scale 65536",
    ]


def test_several_of_everything() -> None:
    first, second = model(), nn.Linear(2, 2, dtype=torch.float64)
    one = torch.optim.SGD([{"params": first[0].parameters()}, {"params": first[2].parameters(), "lr": 0.5}], lr=0.1)  # type: ignore[index]
    two = torch.optim.Adam(second.parameters(), lr=torch.tensor(0.75))
    with fp32_products_as_they_were():
        session = Session([first, second], [one, two], policy="fp32")
    assert repr(session).splitlines() == [
        "Session(policy='fp32') on cpu",
        "  trains   Sequential, Linear: 89 values in 6 tensors, fp32, fp64",
        "  with     SGD(lr=0.1/0.5), Adam(lr=0.75)",
        "  window   1 micro-batch",
        "  so far   0 updates, 0 skipped; no loss scale",
    ]


def test_what_is_on_a_device_is_not_read() -> None:
    net = model()
    with fp32_products_as_they_were():
        session = Session(net, torch.optim.SGD(net.parameters(), lr=0.1), policy="fp32")
    session.state.progress.skips = torch.zeros((), device="meta")  # reading it would raise, where a GPU's would wait
    vars(session)["device"] = torch.device("cuda", 1)
    assert repr(session).splitlines()[-1] == (
        "  so far   0 updates, skipped ones included; .skipped, .loss_scale and .grad_norm are on cuda:1: reading one waits"
    )
    assert repr(StaticScale(8.0, "meta")) == "StaticScale(on meta)"
    assert repr(DynamicScale(device="meta")).startswith(
        "DynamicScale(on meta; x2 after 2000 good updates, on meta so far;"
    )
    with FakeTensorMode():
        assert host_value(torch.ones(())) is None


def test_a_session_that_is_being_made_can_be_printed() -> None:
    assert repr(Session.__new__(Session)) == "Session()"
    assert repr(mezzo.AdamW.__new__(mezzo.AdamW)) == "AdamW()"


SCALES = [
    (NoScale(), "NoScale()"),
    (StaticScale(1024.0), "StaticScale(1024)"),
    (
        DynamicScale(),
        "DynamicScale(65536; x2 after 2000 good updates, 0 so far; x0.5 after an overflow; 5.96046e-08 to 1.67772e+07)",
    ),
    (
        DynamicScale(32.0, growth_factor=4, backoff_factor=0.25, growth_interval=7, hysteresis=3, min_scale=1, max_scale=64),
        "DynamicScale(32; x4 after 7 good updates, 0 so far; x0.25 after 3 overflows in a row; 1 to 64)",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("scale", "text"), SCALES)
def test_scales(scale: NoScale, text: str) -> None:
    assert repr(scale) == text


def test_optimizers_say_settings_and_how_groups_differ() -> None:
    weights = [nn.Parameter(torch.zeros(1000, 2))]
    kept = "moments='fp32', rounding='nearest'"
    assert repr(mezzo.SGD(weights, lr=0.1, momentum=0.9, nesterov=True)) == (
        f"SGD(lr=0.1, momentum=0.9, dampening=0.0, weight_decay=0.0, nesterov=True, {kept}): 2,000 values in 1 tensor, fp32"
    )
    groups = [{"params": [nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))], "lr": 0.1 * n} for n in range(1, 7)]
    groups[1]["nesterov"] = True
    text = repr(mezzo.SGD([{"params": weights, "lr": 0.0}, *groups], lr=1.0, momentum=0.5))
    assert text.splitlines() == [
        f"SGD(lr=0.0, momentum=0.5, dampening=0.0, weight_decay=0.0, {kept}): 2,012 values in 7 tensors, fp32, bf16",
        "  group 1: lr=0.1",
        "  group 2: lr=0.2, nesterov=True",
        "  group 3: lr=0.30000000000000004",
        "  and 3 more groups",
    ]


@pytest.mark.parametrize(
    ("policy", "optimizer", "text"),
    [
        ("fp16", mezzo.AdamW, "NoMasters()"),
        ("bf16-master", mezzo.AdamW, "OptimizerMasters(in AdamW: of 83 values in 4 tensors, bf16)"),
        ("bf16-master", torch.optim.AdamW, "MasterWeights(83 values in 4 tensors, fp32)"),
    ],
)
def test_masters(policy: str, optimizer: type[torch.optim.Optimizer], text: str) -> None:
    net = model()
    with fp32_products_as_they_were():
        assert repr(Session(net, optimizer(net.parameters()), policy=policy).masters) == text
