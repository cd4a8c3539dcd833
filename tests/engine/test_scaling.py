"""Loss scales against torch.amp.GradScaler, step by step, and against the state machine of the module's docstring in plain Python."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from helpers_engine import through_a_file
from mezzo import DynamicScale, NoScale, PolicyError, StaticScale
from mezzo.devices import this_device
from mezzo.engine.casts.casting import Casting
from mezzo.engine.scaling import KnownScale, scale_for
from mezzo.policy import Policy

FLAGS = {False: torch.tensor(0.0), True: torch.tensor(1.0)}

# --- the trajectory of GradScaler -------------------------------------------------------------------------------------


def grad_scaler(init_scale: float, **chosen: Any) -> torch.amp.GradScaler:
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, **chosen)
    scaler.scale(torch.ones(()))  # it makes its tensors on first use
    return scaler


def advance(scaler: torch.amp.GradScaler, found: Tensor) -> None:
    """Let GradScaler learn of one update, by the state that ``unscale_`` leaves for ``update``."""
    scaler._per_optimizer_states[0]["found_inf_per_device"] = {found.device: found}
    scaler.update()


def test_random_trajectories_are_grad_scalers() -> None:
    draw = random.Random(20261121)
    updates = grown = backed_off = 0
    for _ in range(500):
        chosen = {
            "growth_factor": draw.choice([1.0, 1.5, 2.0, 3.7, 4.0, 1.001]) + draw.choice([0.0, 0.25]),
            "backoff_factor": draw.choice([0.5, 0.25, 0.75, 0.9, 1 / 3]),
            "growth_interval": draw.choice([1, 2, 3, 5, 8]),
        }
        chosen["growth_factor"] = max(chosen["growth_factor"], 1.0001)
        init_scale = draw.choice([1.0, 65536.0, 2.0**24, 3e-5, 1234.5, 7e9])
        theirs = grad_scaler(init_scale, **chosen)
        ours = DynamicScale(init_scale, **chosen, min_scale=2.0**-149, max_scale=math.inf)
        often = draw.random()
        for _ in range(draw.randint(4, 16)):
            found = FLAGS[draw.random() < often]
            before = ours.value()
            advance(theirs, found)
            ours.update(found)
            after = theirs.get_scale()
            assert (ours.value(), int(ours._growth_tracker)) == (after, theirs._get_growth_tracker())
            updates, grown, backed_off = updates + 1, grown + (after > before), backed_off + (after < before)
    assert updates > 4_000
    assert min(grown, backed_off) > 500


def test_scaling_and_its_inverse_are_grad_scalers() -> None:
    for value in (1.0, 65536.0, 3.0, 1e-3, 12345.678):
        theirs, ours = grad_scaler(value), DynamicScale(value)
        loss = torch.tensor(0.7)
        assert torch.equal(theirs.scale(loss), ours.scale(loss))
        inverse = ours.inverse()
        assert inverse is not None
        assert torch.equal(inverse, theirs._scale.double().reciprocal().float())  # type: ignore[union-attr]


# --- a scale of updates that the host knows -----------------------------------------------------------------------------------


@pytest.mark.parametrize("hysteresis", [1, 2, 3])
def test_a_known_scale_is_the_dynamic_one_number_for_number(hysteresis: int) -> None:
    draw = random.Random(hysteresis)
    for _ in range(20):
        chosen: dict[str, Any] = {
            "growth_factor": draw.choice([1.5, 2.0, 3.7]),
            "backoff_factor": draw.choice([0.5, 0.9, 1 / 3]),
            "growth_interval": draw.choice([1, 2, 5, 8]),
            "hysteresis": hysteresis,
            "min_scale": draw.choice([2.0**-24, 100.0]),
            "max_scale": draw.choice([2.0**24, 5000.0]),
        }
        known, dynamic = KnownScale(1234.5, **chosen), DynamicScale(1234.5, **chosen)
        there = known.on_device()
        for step in range(60):
            skipped = draw.random() < 0.15
            if not skipped and known.calm and draw.random() < 0.5:
                known.calm -= 1
            else:
                known.updated(skipped=skipped)
            dynamic.update(FLAGS[skipped])
            assert known.value() == dynamic.value() == there.item()
            assert torch.equal(known.inverse(), dynamic.inverse())
            assert known.at_floor() == dynamic.at_floor()
            if step % 7 == 0:
                assert known.state_dict() == dynamic.state_dict()
                assert repr(known)[len("KnownScale") :] == repr(dynamic)[len("DynamicScale") :]
            if step == 30:
                saved = known.state_dict()
                known = KnownScale()
                known.load_state_dict(saved)
                there = known.on_device()
        theirs = grad_scaler(1.0)
        theirs.load_state_dict({k: v for k, v in known.state_dict().items() if k in theirs.state_dict()})
        assert (theirs.get_scale(), theirs._get_growth_tracker()) == (dynamic.value(), int(dynamic._growth_tracker))


def test_the_value_of_a_static_scale_is_rounded_as_on_the_device() -> None:
    scale = StaticScale(1000.1)
    assert scale.value() == scale.on_device().item()
    scale.load_state_dict({"scale": 3.3})
    assert scale.value() == scale.on_device().item() == torch.tensor(3.3).item()


@pytest.mark.parametrize("scale", [KnownScale, StaticScale])
def test_a_scale_made_inside_a_region_that_casts_a_reciprocal_is_not_cast(scale: Any) -> None:
    """2^16 overflows in FP16, and 1 / inf is 0: a script under fp16-master was trained with gradients of 0."""
    with Casting(Policy.parse("fp16:lower=reciprocal"), this_device("cpu")).region():
        assert torch.tensor(65536.0).reciprocal().item() == 0.0  # the region is such a one
        inside = scale(65536.0)
        assert inside.inverse().item() == 2.0**-16
    assert (inside.value(), inside.inverse().item()) == (65536.0, 2.0**-16)


# --- hysteresis, floor and ceiling --------------------------------------------------------------------------------------


@dataclass
class Reference:
    """The state machine of the module's docstring, in Python numbers rounded to FP32."""

    scale: float
    growth_factor: float
    backoff_factor: float
    growth_interval: int
    hysteresis: int
    min_scale: float
    max_scale: float
    growth_tracker: int = 0

    def __post_init__(self) -> None:
        self.left = self.hysteresis

    def update(self, overflow: bool) -> None:
        if overflow:
            self.growth_tracker = 0
            self.left -= 1
            if self.left <= 0:
                self.scale = max(fp32(self.scale * self.backoff_factor), self.min_scale)
        else:
            self.left = self.hysteresis
            self.growth_tracker += 1
            if self.growth_tracker == self.growth_interval:
                self.scale = min(fp32(self.scale * self.growth_factor), self.max_scale)
                self.growth_tracker = 0


def fp32(x: float) -> float:
    return torch.tensor(x, dtype=torch.float64).float().item()


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    overflows=st.lists(st.booleans(), min_size=1, max_size=40),
    exponents=st.tuples(st.integers(-4, 4), st.integers(-10, 3), st.integers(4, 10)),
    factors=st.sampled_from([(2.0, 0.5), (4.0, 0.25), (8.0, 0.5), (1.0, 1.0)]),
    growth_interval=st.integers(1, 5),
    hysteresis=st.integers(1, 4),
)
def test_the_state_machine(
    overflows: list[bool],
    exponents: tuple[int, int, int],
    factors: tuple[float, float],
    growth_interval: int,
    hysteresis: int,
) -> None:
    start, low, high = (2.0**e for e in exponents)
    reference = Reference(max(start, low), *factors, growth_interval, hysteresis, low, high)
    counts = {"growth_interval": growth_interval, "hysteresis": hysteresis}
    ours = DynamicScale(
        start, growth_factor=factors[0], backoff_factor=factors[1], **counts, min_scale=low, max_scale=high
    )
    for overflow in overflows:
        ours.update(FLAGS[overflow])
        reference.update(overflow)
        assert ours.value() == reference.scale
        state = ours.state_dict()
        assert state["_growth_tracker"] == reference.growth_tracker
        assert hysteresis == 1 or state["hysteresis_left"] == reference.left  # with 1 there is nothing to count
        assert ours.at_floor() == (reference.scale <= low)
        assert float(ours.floor_flag()) == float(reference.scale <= low)


@pytest.mark.parametrize(("asked", "got"), [(1e9, 1024.0), (1e-9, 0.5), (64.0, 64.0)])
def test_the_first_scale_lies_between_floor_and_ceiling(asked: float, got: float) -> None:
    assert DynamicScale(asked, min_scale=0.5, max_scale=1024.0).value() == got


def test_two_hundred_overflows_leave_a_scale_above_zero() -> None:
    """torch.amp.GradScaler goes to 0 there, after which every gradient is NaN."""
    scale, theirs = DynamicScale(), grad_scaler(65536.0)
    for _ in range(200):
        scale.update(FLAGS[True])
        advance(theirs, FLAGS[True])
    assert (scale.value(), scale.at_floor()) == (2.0**-24, True)
    assert theirs.get_scale() == 0.0


# --- the other two ---------------------------------------------------------------------------------------------------------


def test_no_scale_does_nothing() -> None:
    scale, loss = NoScale(), torch.tensor(3.0)
    assert scale.scale(loss) is loss
    assert (scale.inverse(), scale.value(), scale.skips_overflows, scale.at_floor()) == (None, 1.0, False, False)
    scale.update(FLAGS[True])
    assert scale.value() == 1.0
    assert scale.state_dict() == {}
    scale.load_state_dict({"scale": 8.0})
    assert scale.value() == 1.0


def test_a_static_scale_stays() -> None:
    scale = StaticScale(128.0)
    scale.update(FLAGS[True])
    assert (scale.value(), scale.skips_overflows, scale.at_floor()) == (128.0, True, False)
    assert scale.scale(torch.tensor(3.0)).item() == 384.0
    inverse = scale.inverse()
    assert inverse is not None
    assert (inverse.item(), inverse.dtype) == (1 / 128, torch.float32)
    half = torch.tensor(2.0, dtype=torch.float16)
    assert StaticScale(2.0**16).scale(half).item() == 2.0**17  # beyond FP16: the product is FP32
    other = StaticScale(1.0)
    other.load_state_dict(scale.state_dict())
    assert other.value() == 128.0


POLICIES = [
    ("fp32", NoScale, 1.0),
    ("bf16", NoScale, 1.0),
    ("fp16", DynamicScale, 65536.0),
    ("fp16:loss_scale=static:init_scale=128", StaticScale, 128.0),
    ("fp16:init_scale=8", DynamicScale, 8.0),
    ("fp16-pure", NoScale, 1.0),
    ("bf16:loss_scale=dynamic:init_scale=4", DynamicScale, 4.0),
]


@pytest.mark.parametrize(("policy", "kind", "value"), POLICIES)
def test_the_scale_of_a_policy(policy: str, kind: type, value: float) -> None:
    scale = scale_for(Policy.parse(policy), "cpu")
    assert type(scale) is kind
    assert scale.value() == value


def test_every_setting_of_a_policy_reaches_the_scale() -> None:
    text = (
        "fp16:init_scale=32:growth_factor=4:backoff_factor=0.25:growth_interval=3:hysteresis=2:min_scale=2:max_scale=64"
    )
    state = scale_for(Policy.parse(text), "cpu").state_dict()
    assert state == {
        "scale": 32.0,
        "growth_factor": 4.0,
        "backoff_factor": 0.25,
        "growth_interval": 3,
        "_growth_tracker": 0,
        "hysteresis": 2,
        "hysteresis_left": 2,
        "min_scale": 2.0,
        "max_scale": 64.0,
    }


# --- state -------------------------------------------------------------------------------------------------------------------


def used_scale() -> DynamicScale:
    factors = {"growth_factor": 3.0, "backoff_factor": 0.25, "min_scale": 0.125, "max_scale": 2048.0}
    scale = DynamicScale(64.0, **factors, growth_interval=7, hysteresis=3)
    for update in "....x..":
        scale.update(FLAGS[update == "x"])
    scale.update(FLAGS[True])
    return scale


def test_a_state_goes_through_a_file_whole() -> None:
    scale = used_scale()
    other = DynamicScale()
    other.load_state_dict(through_a_file(scale.state_dict()))
    assert other.state_dict() == scale.state_dict()
    assert other.state_dict()["hysteresis_left"] == 2
    for update in "xx......":
        scale.update(FLAGS[update == "x"])
        other.update(FLAGS[update == "x"])
        assert other.state_dict() == scale.state_dict()
    assert scale.value() != 64.0


def test_we_take_grad_scalers_state() -> None:
    theirs = grad_scaler(512.0, growth_factor=3.0, backoff_factor=0.25, growth_interval=4)
    for found in (True, False, False):
        advance(theirs, FLAGS[found])
    ours = DynamicScale()
    ours.load_state_dict(theirs.state_dict())
    assert {k: ours.state_dict()[k] for k in theirs.state_dict()} == theirs.state_dict()
    for found in (False, False, True, False):
        ours.update(FLAGS[found])
        advance(theirs, FLAGS[found])
        assert (ours.value(), int(ours._growth_tracker)) == (theirs.get_scale(), theirs._get_growth_tracker())


def test_the_state_of_a_disabled_scaler_changes_nothing() -> None:
    scale = used_scale()
    before = scale.state_dict()
    scale.load_state_dict(torch.amp.GradScaler("cpu", enabled=False).state_dict())
    scale.load_state_dict(NoScale().state_dict())
    assert scale.state_dict() == before


def test_a_static_scales_state_sets_the_scale_and_nothing_else() -> None:
    scale = used_scale()
    before = scale.state_dict()
    scale.load_state_dict(StaticScale(128.0).state_dict())
    assert scale.state_dict() == {**before, "scale": 128.0, "_growth_tracker": 0, "hysteresis_left": 3}


def test_a_state_of_something_else_is_refused() -> None:
    with pytest.raises(PolicyError) as caught:
        DynamicScale().load_state_dict({"step": 3, "lr": 0.1})
    assert caught.value.message == "the state of a loss scale has no 'scale', only lr, step"
    assert caught.value.hint == "pass what state_dict() of a mezzo scale or of torch.amp.GradScaler returned"


def test_update_never_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    scale = DynamicScale(64.0, hysteresis=2, growth_interval=3)

    def refuse(*_: object) -> None:
        raise AssertionError("the host read a tensor")

    for name in ("item", "__bool__", "__float__", "__int__", "tolist", "cpu"):
        monkeypatch.setattr(Tensor, name, refuse)
    for found in (False, True, True, False):
        scale.update(FLAGS[found])
        scale.scale(FLAGS[True])
        scale.inverse()
        scale.floor_flag()
    monkeypatch.undo()
    assert scale.value() == 32.0
