"""Reports of a running training: only from the host's own numbers, and no more often than requested."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mezzo.measure.live import Latest, Reports
from mezzo.measure.plain_steps import PlainSteps
from mezzo.measure.steps import StepRecorder


class Silence(TorchDispatchMode):
    """Fails at any call of torch: an observer's mode would record it as the script's."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} was called")


def test_nobody_listens_by_default() -> None:
    assert Reports().due_s == math.inf


def test_a_report_is_due_again_after_its_interval() -> None:
    found: list[Latest] = []
    reports = Reports()
    reports.begin(found.append, every_s=0.5)
    for now_s in (10.0, 10.2, 10.4, 10.5, 10.9, 11.1):
        if now_s >= reports.due_s:
            reports.send(now_s, loss=now_s, skipped=[False])
    assert [latest.loss for latest in found] == [10.0, 10.5, 11.1]


@pytest.mark.parametrize(("flags", "expected"), [([True, False], 1), ([False], 0), ([], 0), ([True, object()], None)])
def test_skips_are_counted_where_the_host_knows_them(flags: list[object], expected: int | None) -> None:
    found: list[Latest] = []
    reports = Reports()
    reports.begin(found.append, every_s=0.0)
    for num in range(1, len(flags) + 1):
        reports.send(float(num), loss=None, skipped=flags[:num])
    reports.send(99.0, loss=None, skipped=flags)
    assert found[-1] == Latest(step=len(flags), num_skipped=expected)


def test_torchs_recorder_reports_each_step_without_a_call_of_torch() -> None:
    found: list[Latest] = []
    recorder = StepRecorder()
    recorder.reports.begin(found.append, every_s=0.0)
    values = np.float32([0.1, 2.5, -3.0])
    for number, value in enumerate(values):
        recorder.loss(torch.tensor(value))
        recorder.loss(torch.tensor(1.0))
        recorder.weigh(0.5)
        with Silence():  # nothing of the loss is read by an operation
            recorder.close(skipped=number == 1, scale=None)
    recorder.loss(torch.tensor(7.0))
    recorder.prepare_advance(frozenset())
    recorder.advance(torch.tensor(8.0))
    losses = [0.5 * float(value + np.float32(0)) + 0.5 for value in values]
    assert [latest.loss for latest in found] == pytest.approx([*losses, 7.0], rel=1e-6)
    assert [(latest.step, latest.num_skipped) for latest in found] == [(1, 0), (2, 1), (3, 1), (4, 1)]


def test_what_only_a_device_knows_is_not_read() -> None:
    found: list[Latest] = []
    recorder = StepRecorder()
    recorder.reports.begin(found.append, every_s=0.0)
    recorder.loss(torch.ones((), device="meta"))
    recorder.close(skipped=torch.zeros(()), scale=None)
    assert found == [Latest(step=1, loss=None, num_skipped=None)]


def test_other_frameworks_report_numbers_and_leave_scalars_of_a_device_alone() -> None:
    class OnDevice:
        def __float__(self) -> float:
            raise AssertionError("the device was read")

    found: list[Latest] = []
    steps = PlainSteps()
    steps.reports.begin(found.append, every_s=0.0)
    steps.loss(0.25)
    steps.loss(0.5)
    steps.close(skipped=False, scale=None)
    steps.loss(OnDevice())
    steps.close(skipped=True, scale=None)
    assert found == [Latest(1, 0.75, 0), Latest(2, None, 1)]
