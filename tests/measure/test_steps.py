"""The combined norm of several optimizers, and steps that ``advance`` records."""

from __future__ import annotations

import math

import pytest
import torch

from mezzo.measure.steps import CHUNK_LENGTH, StepRecorder, _combined_norm


@pytest.mark.parametrize(("norms", "expected"), [([3.0, 4.0], 5.0), ([2.0], 2.0), ([0.0], 0.0)])
def test_norms_of_several_optimizers_are_combined(norms: list[float], expected: float) -> None:
    assert _combined_norm(norms) == expected


def test_a_step_without_a_norm_has_none() -> None:
    assert math.isnan(_combined_norm([]))


@pytest.mark.parametrize("value", [0.1, 1e-45, 3.4e38, -2.5, math.inf, math.nan, 1e300, 1 / 3 + 0.5j], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex128], ids=str)
def test_advance_stores_a_loss_as_torch_copies_it(value: complex, dtype: torch.dtype) -> None:
    loss = torch.tensor(value if dtype.is_complex else complex(value).real, dtype=dtype, requires_grad=True)
    recorder = StepRecorder()
    recorder.loss(torch.tensor(0.0))
    recorder.close(skipped=False, scale=None)
    recorder.prepare_advance(frozenset())
    assert recorder.advance(loss)
    assert recorder.advance(loss)
    expected = torch.empty(()).copy_(loss.detach().real).item()
    assert recorder.steps().loss[-1] == pytest.approx(expected, rel=0, abs=0, nan_ok=True)


class NotInHostMemory(torch.Tensor):
    """A buffer that the recorder may not write into as an array of C, as on a GPU."""


@pytest.mark.parametrize("num_extras", [0, 1, 2])
@pytest.mark.parametrize("on_device", [False, True])
def test_advance_records_what_close_and_loss_do(
    monkeypatch: pytest.MonkeyPatch, num_extras: int, on_device: bool
) -> None:
    if on_device:
        empty = torch.empty
        monkeypatch.setattr(torch, "empty", lambda *a, **k: empty(*a, **k).as_subclass(NotInHostMemory))
    advancing, closing = StepRecorder(), StepRecorder()
    for recorder in (advancing, closing):
        recorder.loss(torch.tensor(2.0))
        recorder.close(skipped=False, scale=8.0, made_by=frozenset((0,)))
        recorder.loss(torch.tensor(3.0))
    advancing.prepare_advance(frozenset((0,)), scale=None if num_extras else 8.0, num_extras=num_extras)
    for step in range(1, 1200):
        scale, skipped, loss = (torch.tensor(float(value)) for value in (step % 7, step % 5 == 0, 1.0 / step))
        if step % 100 == 0:
            for recorder in (advancing, closing):
                recorder.norm(torch.tensor(float(step)))
        assert advancing.advance(loss, (skipped, scale)[2 - num_extras :])
        closing.close(
            skipped=skipped if num_extras == 2 else False, scale=scale if num_extras else 8.0, made_by=frozenset((0,))
        )
        closing.loss(loss)
    found, expected = advancing.steps(), closing.steps()
    assert (advancing._numbers[torch.device("cpu")].cells is None) is on_device
    assert len(found) == 1200
    for column in ("loss", "loss_scale", "skipped", "grad_norm"):
        assert repr(getattr(found, column)) == repr(getattr(expected, column))  # NaN is equal to itself


def test_a_norm_is_kept_without_its_graph() -> None:
    weight = torch.ones(2, requires_grad=True)
    recorder = StepRecorder()
    recorder.norm(weight.square().sum())  # as after a backward pass with create_graph
    recorder.close(skipped=False, scale=None)
    assert recorder.steps().grad_norm == [2.0]
    assert not recorder._norm[0][0].buffer.tensor_at(0).requires_grad


def test_advance_fills_a_chunk_before_it_begins_another() -> None:
    recorder = StepRecorder()
    recorder.loss(torch.tensor(0.0))
    recorder.close(skipped=False, scale=None)
    recorder.prepare_advance(frozenset())
    chunks = []
    for step in range(1, 2 * CHUNK_LENGTH):
        assert recorder.advance(torch.tensor(float(step)))
        chunks.append(recorder._numbers[torch.device("cpu")].chunk_start // CHUNK_LENGTH)
    assert chunks == [step // CHUNK_LENGTH for step in range(1, 2 * CHUNK_LENGTH)]
