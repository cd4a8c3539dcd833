"""The norm of several norms, and losses of steps that only turn."""

from __future__ import annotations

import math

import pytest
import torch

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
