"""What the plugins share: true gradients and their norm, once an update."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from mezzo.compat.driven import Driven
from mezzo.measure.steps import StepRecorder


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Parameter(torch.ones(4))
        self.wide = nn.Parameter(torch.ones(4, dtype=torch.float64))

    def forward(self, factor: float) -> Tensor:
        return self.narrow.sum() * 3 * factor + self.wide.sum().float() * 4 * factor


def driven(policy: str) -> tuple[Driven, Two, torch.optim.SGD]:
    model, whole = Two(), Driven(policy)
    whole.add(model)
    return whole, model, torch.optim.SGD(model.parameters(), lr=1.0)


@pytest.mark.parametrize("policy", ["fp32", "fp16:init_scale=256"])
def test_gradients_of_several_formats_become_true_and_have_one_norm(policy: str) -> None:
    whole, model, optimizer = driven(policy)
    whole.backward(model(1.0))
    whole.unscale(optimizer)
    assert model.narrow.grad is not None
    assert model.wide.grad is not None
    assert (model.narrow.grad.tolist(), model.wide.grad.tolist()) == ([3.0] * 4, [4.0] * 4)
    whole.step(optimizer, optimizer.step)
    assert (model.narrow.tolist(), model.wide.tolist()) == ([-2.0] * 4, [-3.0] * 4)
    assert whole.recorder.steps().grad_norm == [10.0]  # 4 * (9 + 16) = 100


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_one_overflow_in_either_format_skips_the_update(value: float) -> None:
    for name in ("narrow", "wide"):
        whole, model, optimizer = driven("fp16:init_scale=256")
        whole.backward(model(1.0))
        gradient = getattr(model, name).grad
        gradient[2] = value
        whole.step(optimizer, optimizer.step)
        assert whole.skipped
        assert (model.narrow.tolist(), model.wide.tolist()) == ([1.0] * 4, [1.0] * 4)


def test_a_norm_is_not_that_of_gradients_that_were_dropped() -> None:
    whole, model, optimizer = driven("fp32")
    whole.backward(model(1.0))
    whole.unscale(optimizer)
    optimizer.zero_grad()  # the loop thinks better of it
    whole.backward(model(2.0))
    whole.step(optimizer, optimizer.step)
    assert whole.recorder.steps().grad_norm == [20.0]


def test_a_recorded_norm_keeps_no_graph() -> None:
    recorder, weight = StepRecorder(), torch.ones(2, requires_grad=True)
    recorder.loss(weight.sum())
    recorder.norm(torch.linalg.vector_norm(weight * 2))
    recorder.close(skipped=False, scale=None)
    kept = [*recorder._loss[0], *recorder._norm[0]]
    assert [one.buffer.tensor_at(one.position).requires_grad for one in kept] == [False, False]
