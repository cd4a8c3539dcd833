"""Steps of frameworks that are not torch."""

from __future__ import annotations

import math

from mezzo.measure.plain_steps import PlainSteps


class Scalar:
    """Stand in for a framework's scalar on a device: count how often it is read."""

    reads = 0

    def __init__(self, value: float) -> None:
        self._value = value

    def __float__(self) -> float:
        type(self).reads += 1
        return self._value


def test_steps_hold_what_was_taken_down_and_read_the_device_at_the_end() -> None:
    recorder = PlainSteps()
    recorder.loss(Scalar(1.0))
    recorder.loss(0.5)
    recorder.close(skipped=False, scale=None, norm=Scalar(2.0))
    recorder.loss(math.inf)
    recorder.loss(-math.inf)
    recorder.close(skipped=True, scale=512.0)
    recorder.close(skipped=False, scale=512.0)
    assert (recorder.num_closed, Scalar.reads) == (3, 0)
    steps = recorder.steps()
    assert Scalar.reads == 2
    assert steps.loss[0] == 1.5
    assert all(map(math.isnan, steps.loss[1:]))
    assert math.isnan(steps.loss_scale[0])
    assert steps.loss_scale[1:] == [512.0, 512.0]
    assert steps.skipped == [False, True, False]
    assert steps.grad_norm[0] == 2.0
    assert all(map(math.isnan, steps.grad_norm[1:]))
    assert len(steps.time_ms) == len(steps.cpu_ms) == 3
    assert min(steps.time_ms) >= 0


def test_steps_without_a_loss_scale_have_none() -> None:
    recorder = PlainSteps()
    recorder.loss(1.0)
    recorder.close(skipped=False, scale=None)
    assert recorder.steps().loss_scale == []


def test_losses_of_optimizers_that_take_turns_are_separated() -> None:
    recorder = PlainSteps()
    for number in range(3):
        for owner in (0, 1):
            recorder.loss(Scalar(10.0 * owner + number))
            recorder.loss(0.5)
            recorder.close(skipped=False, scale=None, made_by=frozenset([owner]))
    steps = recorder.steps({0: "judges", 1: "makes"})
    assert [(loss.name, loss.steps, loss.values) for loss in steps.losses] == [
        ("judges", [1, 3, 5], [0.5, 1.5, 2.5]),
        ("makes", [2, 4, 6], [10.5, 11.5, 12.5]),
    ]
    assert [loss.name for loss in recorder.steps().losses] == ["loss 1", "loss 2"]
