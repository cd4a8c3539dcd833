"""Devices without FP64 (Apple's GPUs, Intel's Arc A-series): sessions on a CPU that refuses FP64 tensors stand for them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import mezzo
from mezzo.engine import gradients, session
from mezzo.engine.kernels import fused
from mezzo.engine.optimizers import one_pass
from mezzo.engine.scaling import StaticScale
from mezzo.observe import tensors as values


class WithoutFloat64(TorchDispatchMode):
    """Refuse FP64 tensors, in and out, as MPS does."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(isinstance(t, Tensor) and t.dtype is torch.float64 for t in tree_leaves((args, kwargs, result))):
            raise TypeError(f"{func}: the device has no float64")
        return result


@pytest.fixture
def without_float64(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make the CPU such a device, with the kernels that MPS and XPU have."""
    for module in (fused, gradients):
        monkeypatch.setattr(module, "has_fp64", lambda device: False)
    for module in (one_pass, session):
        monkeypatch.setattr(module, "choose", lambda device_type: (fused, "as on a device without FP64"), raising=False)
    with WithoutFloat64():
        yield


def trained(policy: str, kind: Any, **settings: Any) -> tuple[list[float], mezzo.Session]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4))
    optimizer = kind(model.parameters(), lr=0.01, **settings)
    trains = mezzo.Session(model, optimizer, policy=policy, clip_norm=1.0)
    losses = []
    for _ in range(4):
        with trains.autocast():
            loss = model(torch.randn(6, 8)).float().square().mean()
        trains.step(loss)
        losses.append(float(loss.detach()))
    assert float(trains.grad_norm) > 0
    return losses, trains


CASES = [
    # policy, optimizer, its settings
    ("fp16", mezzo.AdamW, {}),
    ("bf16", mezzo.AdamW, {}),
    ("fp16-master", mezzo.AdamW, {}),
    ("bf16-master", mezzo.AdamW, {"moments": "8bit"}),
    ("bf16-pure", mezzo.AdamW, {"moments": "bf16"}),
    ("fp16:init_scale=1000", mezzo.SGD, {"momentum": 0.9}),
    ("fp16", torch.optim.AdamW, {}),
    ("fp16-master", torch.optim.SGD, {}),
    ("fp8", mezzo.AdamW, {}),
]
IDS = [f"{policy}-{kind.__module__.split('.')[0]}.{kind.__name__}" for policy, kind, _ in CASES]


@pytest.mark.parametrize(("policy", "kind", "settings"), CASES, ids=IDS)
def test_a_session_trains_without_float64(
    policy: str, kind: Any, settings: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    expected, _ = trained(policy, kind, **settings)
    request.getfixturevalue("without_float64")
    found, trains = trained(policy, kind, **settings)

    assert found == pytest.approx(expected, rel=1e-4)
    assert trains.skipped == 0
    restored = trains.state_dict()
    trains.load_state_dict(restored)


INF, NAN = float("inf"), float("nan")
SUMS = [
    # gradients, sum of squares
    ([[3.0, 4.0]], 25.0),
    ([[3.0], [4.0]], 25.0),
    ([[0.0, 0.0]], 0.0),
    ([[3e18, 4e18]], 2.5e37),
    ([[3e38, 0.0]], torch.finfo(torch.float32).max),  # finite: its square is FP32's largest value
    ([[3e-18, 4e-18]], 2.5e-35),
    ([[1.0], [INF]], INF),
    ([[1.0], [-INF]], INF),
    ([[NAN], [1.0]], NAN),
    ([[NAN, INF]], NAN),
]


@pytest.mark.parametrize(("rows", "wanted"), SUMS)
@pytest.mark.usefixtures("without_float64")
def test_the_sum_of_squares_is_finite_where_gradients_are(rows: list[list[float]], wanted: float) -> None:
    found = float(fused.sum_of_squares([torch.tensor(row) for row in rows]))
    assert found == pytest.approx(wanted, rel=1e-6, nan_ok=True)


@pytest.mark.parametrize("scale", [2.0**k for k in range(-24, 25, 4)] + [1000.0, 3.0, 0.1, 65535.0, 1e-20, 1e20])
@pytest.mark.usefixtures("without_float64")
def test_the_inverse_of_a_scale_is_rounded_once(scale: float) -> None:
    inverse = StaticScale(scale).inverse()
    assert inverse is not None
    stored = torch.tensor(scale).item()  # FP32
    assert inverse.item() == torch.tensor([1.0 / stored]).item()


def test_norms_of_a_diagnosis_are_computed_on_the_cpu_there(monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[Tensor] = []
    monkeypatch.setattr(values, "has_fp64", lambda device: False)
    monkeypatch.setattr(Tensor, "cpu", lambda self: (moved.append(self), self)[1])

    assert values.norm(torch.tensor([3.0, 4.0])) == 5.0
    assert values.difference(torch.tensor([4.0]), torch.tensor([1.0])) == 3.0
    assert len(moved) == 3
