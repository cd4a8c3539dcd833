"""Loss scales against torch.amp.GradScaler and a state machine in plain Python."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mezzo.engine.scaling import DynamicScale, NoScale, StaticScale, scale_for
from mezzo.errors import PolicyError
from mezzo.policy import Policy

FREE = {"min_scale": 1e-38, "max_scale": 3e38}


def flag(value: bool) -> torch.Tensor:
    return torch.tensor(float(value))


class TorchScaler:
    """Drive torch's own scaler: what its ``unscale_`` would find is put where it keeps it."""

    def __init__(self, **settings: Any) -> None:
        self.scaler = torch.amp.GradScaler("cpu", **settings)
        self.scaler.scale(torch.ones(()))  # makes the scale and the tracker

    def update(self, found: bool) -> float:
        state = self.scaler._per_optimizer_states[0]
        state["found_inf_per_device"] = {torch.device("cpu"): flag(found)}
        self.scaler.update()
        return self.scaler.get_scale()


def test_trajectory_is_grad_scalers_over_10000_random_patterns() -> None:
    draw = random.Random(0)
    for pattern in range(10_000):
        setting = {
            "init_scale": draw.choice([1.0, 2.0, 7.5, 2.0**10, 2.0**16, 2.0**24, 3e30]),
            "growth_factor": draw.choice([2.0, 1.5, 4.0, 16.0]),
            "backoff_factor": draw.choice([0.5, 0.25, 0.9]),
            "growth_interval": draw.choice([1, 2, 3, 5, 2000]),
        }
        share = draw.choice([0.0, 0.1, 0.5, 0.9, 1.0])
        theirs = TorchScaler(**setting)
        ours = DynamicScale(setting.pop("init_scale"), **setting, **FREE)
        for _ in range(12):
            found = draw.random() < share
            ours.update(flag(found))
            assert ours.value() == theirs.update(found), (pattern, setting)


@settings(max_examples=200, deadline=None)
@given(
    pattern=st.lists(st.booleans(), max_size=40),
    interval=st.integers(1, 5),
    hysteresis=st.integers(1, 4),
    floor=st.sampled_from([2.0**-4, 1.0, 2.0**10]),
    ceiling=st.sampled_from([2.0**10, 2.0**12]),
)
def test_hysteresis_floor_and_ceiling(
    pattern: list[bool], interval: int, hysteresis: int, floor: float, ceiling: float
) -> None:
    scale = DynamicScale(2.0**10, growth_interval=interval, hysteresis=hysteresis, min_scale=floor, max_scale=ceiling)
    value, tracker, left = 2.0**10, 0, hysteresis
    for found in pattern:
        scale.update(flag(found))
        if found:
            tracker, left = 0, left - 1
            if left <= 0:
                value = max(value / 2, floor)
        else:
            tracker, left = tracker + 1, hysteresis
            if tracker == interval:
                value, tracker = min(value * 2, ceiling), 0
        assert scale.value() == value
        assert scale.at_floor() == (value <= floor)
        assert bool(scale.floor_flag()) == (value <= floor)


def test_state_goes_to_torch_and_back() -> None:
    ours = DynamicScale(2.0**12, growth_factor=4.0, backoff_factor=0.25, growth_interval=3, **FREE)
    for found in (False, True, False, False):
        ours.update(flag(found))
    theirs = TorchScaler()
    theirs.scaler.load_state_dict(ours.state_dict())
    assert theirs.scaler.get_scale() == 2.0**10
    again = DynamicScale()
    again.load_state_dict(theirs.scaler.state_dict())
    again.max_scale = FREE["max_scale"]
    for found in (False, False, True, False, False, False):
        ours.update(flag(found))
        again.update(flag(found))
        assert again.value() == ours.value() == theirs.update(found)


def test_state_round_trips_with_values_that_are_not_the_defaults() -> None:
    scale = DynamicScale(
        48.0, growth_factor=3.0, backoff_factor=0.125, growth_interval=7, hysteresis=5, min_scale=2.0, max_scale=96.0
    )
    for found in (False, False, True, False, True, True):
        scale.update(flag(found))
    other = DynamicScale()
    other.load_state_dict(scale.state_dict())
    assert other.state_dict() == scale.state_dict()
    assert scale.state_dict() == {
        "scale": 48.0,
        "growth_factor": 3.0,
        "backoff_factor": 0.125,
        "growth_interval": 7,
        "_growth_tracker": 0,
        "hysteresis": 5,
        "hysteresis_left": 3,
        "min_scale": 2.0,
        "max_scale": 96.0,
    }


def test_a_state_that_is_none_is_refused() -> None:
    with pytest.raises(PolicyError, match="the state of a loss scale has no 'scale', only a, b"):
        DynamicScale().load_state_dict({"b": 2.0, "a": 1})


@pytest.mark.parametrize(
    ("text", "kind", "value", "checks"),
    [
        ("fp32", NoScale, 1.0, False),
        ("bf16", NoScale, 1.0, False),
        ("fp16", DynamicScale, 65536.0, True),
        ("fp16:init_scale=8", DynamicScale, 8.0, True),
        ("fp16:loss_scale=static:init_scale=128", StaticScale, 128.0, True),
    ],
)
def test_policy_chooses(text: str, kind: type, value: float, checks: bool) -> None:
    scale = scale_for(Policy.parse(text), "cpu")
    assert type(scale) is kind
    assert (scale.value(), scale.checks) == (value, checks)


def test_scale_and_inverse() -> None:
    loss = torch.tensor(1.5)
    assert NoScale().scale(loss) is loss
    assert NoScale().inverse() is None
    scale = StaticScale(3.0)
    assert scale.scale(loss).item() == 4.5
    inverse = scale.inverse()
    assert inverse is not None
    assert inverse.item() == torch.tensor(1 / 3).item()
    half = torch.tensor(2.0, dtype=torch.float16)
    assert StaticScale(2.0**16).scale(half).item() == 2.0**17  # beyond FP16: the product is FP32
