"""Steps of frameworks that are not torch."""

from __future__ import annotations

import math

from mezzo.measure.plainsteps import PlainSteps


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
    assert (len(recorder), Scalar.reads) == (3, 0)
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
