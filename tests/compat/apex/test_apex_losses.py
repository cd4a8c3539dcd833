"""``amp.scale_loss``: scaled once and unscaled once, accumulation, skipped steps, several losses, state."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from helpers_apex import clean
from mezzo.compat.apex import amp
from mezzo.compat.apex.amp.state import LossScaler

HALF, FLOAT = torch.float16, torch.float32
LEVELS = ("O0", "O1", "O2", "O3")


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    yield from clean()


def started(
    level: str, *, weight: float = 1.0, momentum: float = 0.0, **keywords: Any
) -> tuple[nn.Linear, torch.optim.SGD]:
    """Return a layer of one weight under a level; ``backward`` gives it any gradient."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=momentum)
    amp.initialize(model, optimizer, opt_level=level, verbosity=keywords.pop("verbosity", 0), **keywords)
    return model, optimizer


def backward(model: nn.Module, optimizer: Any, value: float, **keywords: Any) -> torch.Tensor:
    with amp.scale_loss(model(torch.ones(1, 1)).sum() * value, optimizer, **keywords) as loss:
        loss.backward()
    return loss.detach()


def master_gradient(optimizer: Any) -> float | None:
    gradient = next(amp.master_params(optimizer)).grad
    return None if gradient is None else gradient.item()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("scale", [1.0, 4.0, "dynamic"])
def test_gradients_are_unscaled_and_accumulate(level: str, scale: Any) -> None:
    model, optimizer = started(level, loss_scale=scale)
    factor = 65536.0 if scale == "dynamic" else scale
    # Small enough for FP16 to represent the scaled gradient.
    assert backward(model, optimizer, 2**-4).item() == factor * 2**-4
    assert master_gradient(optimizer) == 2**-4
    amp._amp_state.loss_scalers[0]._loss_scale = 8.0  # accumulation survives a change of the scale
    assert backward(model, optimizer, 3.0).item() == 24.0
    assert master_gradient(optimizer) == 3.0 + 2**-4
    optimizer.step()
    assert next(amp.master_params(optimizer)).item() == pytest.approx(1 - 0.5 * (3 + 2**-4), rel=2**-10)
    assert torch.equal(model.weight.float(), next(amp.master_params(optimizer)).to(model.weight.dtype).float())


def test_scaled_gradients_of_16_bit_weights_stay_while_masters_are_unscaled() -> None:
    model, optimizer = started("O2", loss_scale=4.0)
    backward(model, optimizer, 3.0)
    assert model.weight.grad is not None
    assert (model.weight.grad.item(), model.weight.grad.dtype) == (12.0, HALF)
    assert master_gradient(optimizer) == 3.0
    optimizer.zero_grad()
    assert model.weight.grad is None
    assert master_gradient(optimizer) is None
    backward(model, optimizer, 3.0)
    optimizer.zero_grad(set_to_none=False)
    assert model.weight.grad.item() == 0.0
    backward(model, optimizer, 3.0)
    optimizer.step()
    assert master_gradient(optimizer) is None  # model.zero_grad() would not reach it


@pytest.mark.parametrize("level", LEVELS)
def test_delay_unscale_leaves_scaled_gradients_for_the_next_backward_pass(level: str) -> None:
    model, optimizer = started(level, loss_scale=4.0)
    backward(model, optimizer, 3.0, delay_unscale=True)
    assert model.weight.grad is not None
    assert model.weight.grad.item() == 12.0
    backward(model, optimizer, 2.0)
    assert master_gradient(optimizer) == 5.0
    optimizer.step()
    assert next(amp.master_params(optimizer)).item() == 1 - 0.5 * 5


OVERFLOW = 2.0**14
"""A gradient that leaves FP16's range at every scale from 4 on."""


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_an_overflow_skips_one_step_and_halves_the_scale(level: str, capsys: pytest.CaptureFixture[str]) -> None:
    model, optimizer = started(level, loss_scale="dynamic", verbosity=1, momentum=0.5)
    capsys.readouterr()
    backward(model, optimizer, OVERFLOW)
    assert amp._amp_state.loss_scalers[0].loss_scale() == 32768.0
    assert capsys.readouterr().out == ""  # said when the step is skipped
    assert optimizer.step() is None
    assert capsys.readouterr().out == (
        "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 32768.0\n"
    )
    assert model.weight.item() == 1.0
    assert not optimizer.state[next(amp.master_params(optimizer))]
    optimizer.zero_grad()
    backward(model, optimizer, 1.0)
    optimizer.step()
    assert model.weight.item() == 0.5
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 32768.0, "unskipped": 1}}


def test_a_static_scale_checks_nothing() -> None:
    model, optimizer = started("O2", loss_scale=8.0)
    backward(model, optimizer, OVERFLOW)
    optimizer.step()
    assert model.weight.item() == -float("inf")
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 8.0, "unskipped": 1}}


def test_large_finite_gradients_are_no_overflow() -> None:
    # Apex's fallback added all elements of a gradient up and called an infinite sum an overflow.
    model = nn.Linear(4, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    amp.initialize(model, optimizer, opt_level="O0", loss_scale="dynamic", verbosity=0)
    amp._amp_state.loss_scalers[0]._loss_scale = 1.0
    with amp.scale_loss(model(torch.full((1, 4), 3e38)).sum() * 0 + model.weight.sum(), optimizer) as loss:
        loss.backward()
        assert model.weight.grad is not None
        model.weight.grad.fill_(3e38)
    assert amp._amp_state.loss_scalers[0].loss_scale() == 1.0
    assert optimizer._amp_stash.skipping is None


def test_delay_overflow_check_neither_skips_nor_changes_the_scale() -> None:
    model, optimizer = started("O2")
    backward(model, optimizer, OVERFLOW, delay_overflow_check=True)
    assert amp._amp_state.loss_scalers[0].loss_scale() == 65536.0
    optimizer.step()
    assert not model.weight.isfinite().all()


def test_each_loss_has_its_own_scale_and_one_overflow_skips_its_optimizers() -> None:
    first, second = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (first, second)]
    amp.initialize([first, second], optimizers, opt_level="O2", num_losses=3, verbosity=0)
    before = [first.weight.item(), second.weight.item()]
    backward(first, optimizers[0], OVERFLOW, loss_id=1)
    backward(second, optimizers[1], 0.25, loss_id=2)
    for optimizer in optimizers:
        optimizer.step()
    assert first.weight.item() == before[0]
    assert second.weight.item() != before[1]
    assert [s.loss_scale() for s in amp._amp_state.loss_scalers] == [65536.0, 32768.0, 65536.0]
    assert [s._unskipped for s in amp._amp_state.loss_scalers] == [0, 0, 1]
    backward(first, optimizers, OVERFLOW, loss_id=1)
    assert all(optimizer._amp_stash.skipping for optimizer in optimizers)
    with pytest.raises(IndexError, match="loss_id=3; allowed: 0 to 2"):
        backward(first, optimizers, 1.0, loss_id=3)


def test_calls_in_the_wrong_order_are_refused() -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(RuntimeError, match=r"has not been initialized. Call model, optimizer = amp.initialize"):
        backward(model, optimizer, 1.0)
    started("O2")
    with pytest.raises(RuntimeError, match=r"did not come from amp.initialize"):
        backward(model, optimizer, 1.0)
    model, optimizer = started("O2")
    with pytest.raises(RuntimeError, match="does not support closure use"):
        optimizer.step(lambda: 0.0)


def test_a_failing_backward_pass_loses_no_gradient() -> None:
    model, optimizer = started("O0", loss_scale=4.0)
    backward(model, optimizer, 3.0)
    with pytest.raises(ZeroDivisionError), amp.scale_loss(model(torch.ones(1, 1)).sum(), optimizer):
        raise ZeroDivisionError
    assert master_gradient(optimizer) == 3.0


@pytest.mark.parametrize("level", LEVELS)
def test_a_group_that_is_added_is_trained(level: str) -> None:
    model, optimizer = started(level, loss_scale=4.0)
    other = nn.Linear(1, 1, bias=False)
    nn.init.constant_(other.weight, 2.0)
    if level in ("O2", "O3"):
        other.half()
    optimizer.add_param_group({"params": other.weight, "lr": 0.25})
    with amp.scale_loss(model(torch.ones(1, 1)).sum() + other.weight.float().sum(), optimizer) as loss:
        loss.backward()
    optimizer.step()
    assert (model.weight.item(), other.weight.item()) == (0.5, 1.75)
    assert {p.dtype for p in amp.master_params(optimizer)} == {HALF if level == "O3" else FLOAT}
    with pytest.raises(TypeError, match="in a set"):
        optimizer.add_param_group({"params": {nn.Parameter(torch.ones(1))}})
    with pytest.raises(TypeError, match=r"must be FP32, FP16 or BF16. Received torch.DoubleTensor"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1).double())]})


def test_masters_take_up_the_weights_and_state_of_a_checkpoint_loaded_after_initialize() -> None:
    model, optimizer = started("O2", momentum=0.5)
    backward(model, optimizer, 0.5)
    optimizer.step()
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), amp.state_dict()))
    again, resumed = started("O2", momentum=0.5, weight=7.0)
    again.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    amp.load_state_dict(saved[2])
    for m, o in ((model, optimizer), (again, resumed)):
        m.zero_grad()
        backward(m, o, 0.25)
        o.step()
    assert again.weight.item() == model.weight.item() == 0.75 - 0.5 * (0.5 * 0.5 + 0.25)
    assert next(iter(resumed.state.values()))["momentum_buffer"].dtype is FLOAT


def test_a_schedule_takes_a_skipped_step_for_one_that_was_called() -> None:
    # Warnings are errors here: torch's scheduler warns of a step that came before the optimizer's.
    for build_before in (False, True):
        model = nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        made = [torch.optim.lr_scheduler.StepLR(optimizer, 1)] if build_before else []
        amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
        schedule = made[0] if made else torch.optim.lr_scheduler.StepLR(optimizer, 1)
        backward(model, optimizer, OVERFLOW)
        optimizer.step()
        schedule.step()
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05)


def scales_after(scaler: LossScaler, overflows: list[bool]) -> list[float]:
    found = []
    for overflow in overflows:
        scaler.clear_overflow_state()
        gradient = torch.tensor([float("inf") if overflow else 1.0])
        scaler.unscale_([gradient])
        assert scaler.update_scale() is overflow
        found.append(scaler.loss_scale())
    return found


def test_the_dynamic_scale_follows_apex_rule() -> None:
    scaler = LossScaler("dynamic", init_scale=8.0, scale_window=2, min_loss_scale=2.0, max_loss_scale=16.0)
    overflows = [True, True, True, False, False, False, True, False, False, False, False, False, False]
    expected = [4.0, 2.0, 2.0, 2.0, 4.0, 4.0, 2.0, 2.0, 4.0, 4.0, 8.0, 8.0, 16.0]
    assert scales_after(scaler, overflows) == expected
    assert scales_after(scaler, [False] * 2) == [16.0, 16.0]
    assert LossScaler("dynamic", max_loss_scale=1024.0).loss_scale() == 1024.0
    assert scales_after(LossScaler("dynamic", init_scale=4.0), [True] * 3) == [2.0, 1.0, 0.5]  # no floor unless given


def test_bounds_of_initialize_reach_the_scale() -> None:
    model, optimizer = started("O2", min_loss_scale=32768.0, max_loss_scale=65536.0)
    for _ in range(3):
        backward(model, optimizer, OVERFLOW)
        optimizer.step()
        optimizer.zero_grad()
    assert amp._amp_state.loss_scalers[0].loss_scale() == 32768.0


def test_state_of_scales_round_trips_and_tolerates_another_count(capsys: pytest.CaptureFixture[str]) -> None:
    started("O2", num_losses=2)
    state = {
        "loss_scaler0": {"loss_scale": 64.0, "unskipped": 7},
        "loss_scaler1": {"loss_scale": 2.0, "unskipped": 1999},
    }
    amp.load_state_dict(state)
    assert amp.state_dict() == state
    into: dict[str, Any] = {"mine": 1}
    assert amp.state_dict(into) is into
    assert into == {"mine": 1, **state}
    assert capsys.readouterr().out == ""
    started("O2")
    amp.load_state_dict(state)
    assert amp.state_dict() == {"loss_scaler0": state["loss_scaler0"]}
    assert "state_dict contains 2 entries, while 1 loss_scalers are used" in capsys.readouterr().out
    with pytest.raises(RuntimeError, match=r"Unexpected key\(s\): mine"):
        amp.load_state_dict({**amp.state_dict(), "mine": 1})


def test_sparse_gradients_are_unscaled() -> None:
    model = nn.Embedding(4, 2, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    amp.initialize(model, optimizer, opt_level="O0", loss_scale="dynamic", verbosity=0)
    before = model.weight.detach().clone()
    with amp.scale_loss(model(torch.tensor([1, 1])).sum(), optimizer) as loss:
        loss.backward()
    optimizer.step()
    torch.testing.assert_close(before - model.weight, torch.tensor([[0.0, 0], [2, 2], [0, 0], [0, 0]]))
