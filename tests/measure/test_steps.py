"""The norm of several norms, and losses of steps that only turn."""

from __future__ import annotations

import math

import pytest
import torch

from mezzo.measure.numbers import CHUNK
from mezzo.measure.steps import StepRecorder, _together


@pytest.mark.parametrize(("norms", "together"), [([3.0, 4.0], 5.0), ([2.0], 2.0), ([0.0], 0.0)])
def test_norms_of_several_optimizers_make_one(norms: list[float], together: float) -> None:
    assert _together(norms) == together


def test_a_step_without_a_norm_has_none() -> None:
    assert math.isnan(_together([]))


@pytest.mark.parametrize(
    "value",
    [0.1, 1e-45, 3.4e38, -2.5, math.inf, math.nan, 1e300, 1 / 3 + 0.5j],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex128], ids=str)
def test_a_turns_loss_is_kept_as_torch_copies_it(value: complex, dtype: torch.dtype) -> None:
    loss = torch.tensor(value if dtype.is_complex else complex(value).real, dtype=dtype, requires_grad=True)
    recorder = StepRecorder()
    recorder.loss(torch.tensor(0.0))
    recorder.close(skipped=False, scale=None)
    recorder.begin_turns(frozenset())
    assert recorder.turn(loss)
    assert recorder.turn(loss)
    expected = torch.empty(()).copy_(loss.detach().real).item()
    assert recorder.steps().loss[-1] == pytest.approx(expected, rel=0, abs=0, nan_ok=True)


class NotInHostMemory(torch.Tensor):
    """A buffer that the recorder may not write into as an array of C, as on a GPU."""


@pytest.mark.parametrize("also", [0, 1, 2])
@pytest.mark.parametrize("on_device", [False, True])
def test_turns_record_what_close_and_loss_do(monkeypatch: pytest.MonkeyPatch, also: int, on_device: bool) -> None:
    if on_device:
        empty = torch.empty
        monkeypatch.setattr(torch, "empty", lambda *a, **k: empty(*a, **k).as_subclass(NotInHostMemory))
    turning, closing = StepRecorder(), StepRecorder()
    for recorder in (turning, closing):
        recorder.loss(torch.tensor(2.0))
        recorder.close(skipped=False, scale=8.0, made_by=frozenset((0,)))
        recorder.loss(torch.tensor(3.0))
    turning.begin_turns(frozenset((0,)), scale=None if also else 8.0, also=also)
    for step in range(1, 1200):
        scale, skipped, loss = (
            torch.tensor(float(step % 7)),
            torch.tensor(float(step % 5 == 0)),
            torch.tensor(1.0 / step),
        )
        if step % 100 == 0:
            for recorder in (turning, closing):
                recorder.norm(torch.tensor(float(step)))
        assert turning.turn(loss, (skipped, scale)[2 - also :])
        closing.close(skipped=skipped if also == 2 else False, scale=scale if also else 8.0, made_by=frozenset((0,)))
        closing.loss(loss)
    found, expected = turning.steps(), closing.steps()
    assert (turning._numbers[torch.device("cpu")].cells is None) is on_device
    assert len(found) == 1200
    for column in ("loss", "loss_scale", "skipped", "grad_norm"):
        assert repr(getattr(found, column)) == repr(getattr(expected, column))  # NaN is equal to itself


def test_a_norm_is_kept_without_its_graph() -> None:
    weight = torch.ones(2, requires_grad=True)
    recorder = StepRecorder()
    recorder.norm(weight.square().sum())  # as after a backward pass with create_graph
    recorder.close(skipped=False, scale=None)
    assert recorder.steps().grad_norm == [2.0]
    assert not recorder._norm[0][0].where.row(0).requires_grad


def test_turns_fill_a_chunk_before_they_begin_another() -> None:
    recorder = StepRecorder()
    recorder.loss(torch.tensor(0.0))
    recorder.close(skipped=False, scale=None)
    recorder.begin_turns(frozenset())
    chunks = []
    for step in range(1, 2 * CHUNK):
        assert recorder.turn(torch.tensor(float(step)))
        chunks.append(recorder._numbers[torch.device("cpu")].first // CHUNK)
    assert chunks == [step // CHUNK for step in range(1, 2 * CHUNK)]
