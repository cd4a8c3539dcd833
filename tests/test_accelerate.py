"""Accelerate with Mezzo's accelerator: real small trainings against a session's or exact values.

The model of the exact cases is linear with weights 0.5: the gradient of its mean output is its input, so that an update
with a rate of 1 shows the gradient that was used.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mezzo
from helpers_trainers import Batch, assert_same, batches, network, sgd
from mezzo.errors import SessionError
from mezzo.records import read_record, write_record

accelerate = pytest.importorskip("accelerate")
from accelerate.state import AcceleratorState, GradientState  # noqa: E402

from mezzo.compat.accelerate import MezzoAccelerator  # noqa: E402

OVERFLOWS = "fp16:init_scale=1048576"


@pytest.fixture(autouse=True)
def _anew() -> Iterator[None]:
    """Forget what Accelerate keeps for the whole process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


class Training:
    """Hold what a loop of Accelerate's trains with."""

    def __init__(self, policy: str, **settings: Any) -> None:
        self.room = MezzoAccelerator(cpu=True, policy=policy, **settings)
        self.bare = network()
        optimizer = sgd(self.bare.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        self.model, self.optimizer, self.scheduler = self.room.prepare(self.bare, optimizer, scheduler)
        self.rates: list[float] = []

    def train(self, data: list[Batch], *, scheduled: bool = False) -> list[Tensor]:
        losses = []
        for inputs, targets in data:
            output = self.model(inputs)
            assert output.dtype is torch.float32
            loss = F.mse_loss(output, targets)
            self.room.backward(loss)
            self.rates.append(self.optimizer.param_groups[0]["lr"])
            self.optimizer.step()
            if scheduled:
                self.scheduler.step()
            self.optimizer.zero_grad()
            losses.append(loss.detach())
        return losses


@pytest.mark.parametrize("policy", ["fp32", "bf16", "fp16", OVERFLOWS, "fp16-master", "bf16-master"])
def test_it_trains_as_a_session_does(policy: str) -> None:
    training = Training(policy)
    losses = training.train(batches(12), scheduled=True)
    model = network()
    optimizer = sgd(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    session, rates = mezzo.Session(model, optimizer, policy=policy, scheduler=schedule), []
    for number, (inputs, targets) in enumerate(batches(12)):
        with session.autocast():
            output = model(inputs)
        loss = F.mse_loss(output.float(), targets)
        rates.append(optimizer.param_groups[0]["lr"])
        session.step(loss)
        assert torch.equal(losses[number], loss.detach())
    assert_same(training.bare.parameters(), model.parameters())
    assert training.rates == rates  # held on a skipped update
    assert training.room.driven.session.loss_scale == session.loss_scale
    assert training.room.record().steps.num_skipped == session.skipped
    assert (session.skipped > 2) == (policy == OVERFLOWS)
    if policy.endswith("-master"):
        assert {p.dtype for p in training.bare.parameters()} == {policy_dtype(policy)}
        held = training.optimizer.param_groups[0]["params"]
        assert {p.dtype for p in held} == {torch.float32}
        assert_same(held, optimizer.param_groups[0]["params"])


def policy_dtype(policy: str) -> torch.dtype:
    return mezzo.Policy.parse(policy).storage.dtype


@pytest.mark.parametrize(
    ("policy", "inside"),
    [("fp16", torch.float16), ("fp16:fp32_modules=2", torch.float32), ("fp16:fp32=linear", torch.float32)],
)
def test_it_honours_lists_and_fp32_modules(policy: str, inside: torch.dtype) -> None:
    training = Training(policy)
    seen: list[torch.dtype] = []
    training.bare[2].register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    training.train(batches(1))
    assert seen == [inside]


def test_a_region_of_ones_own_is_under_the_policy() -> None:
    room = MezzoAccelerator(cpu=True, policy="fp16:lower=softmax")
    model = room.prepare(network())
    with room.autocast():
        assert F.softmax(torch.ones(2, 2), -1).dtype is torch.float16
    assert model(torch.ones(1, 6)).dtype is torch.float32


def linear() -> nn.Linear:
    layer = nn.Linear(4, 1, bias=False)
    nn.init.constant_(layer.weight, 0.5)
    return layer


@pytest.mark.parametrize("policy", ["fp32", "bf16", "fp16:init_scale=256", "fp16-master:init_scale=256"])
def test_a_short_last_window_is_averaged_over_what_it_holds(policy: str) -> None:
    room = MezzoAccelerator(cpu=True, policy=policy, gradient_accumulation_steps=4)
    layer, values = linear(), (1, 2, 3, 2, 1, 3)
    loader = torch.utils.data.DataLoader([torch.full((2, 4), float(v)) for v in values], batch_size=None)
    model, optimizer, loader = room.prepare(layer, torch.optim.SGD(layer.parameters(), lr=1.0), loader)
    weights = []
    for inputs in loader:
        with room.accumulate(model):
            room.backward(model(inputs).mean())
            if room.sync_gradients:
                norm = room.clip_grad_norm_(model.parameters(), 1e6)
                assert norm.item() == 4.0
            optimizer.step()
            optimizer.zero_grad()
        weights.append(layer.weight[0, 0].item())
    assert weights == [0.5, 0.5, 0.5, -1.5, -1.5, -3.5]  # Accelerate's own last: -2.5
    assert room.record().steps.grad_norm == [4.0, 4.0]


@pytest.mark.parametrize("clips", [True, False])
@pytest.mark.parametrize("policy", ["fp32", "fp16:init_scale=256", "fp16-master:init_scale=256"])
def test_two_optimizers_are_unscaled_once(policy: str, clips: bool) -> None:
    room = MezzoAccelerator(cpu=True, policy=policy)
    pairs = [room.prepare(layer, torch.optim.SGD(layer.parameters(), lr=1.0)) for layer in (linear(), linear())]
    room.backward(sum(model(torch.ones(2, 4)).mean() for model, _ in pairs))
    for model, _ in pairs if clips else []:
        assert room.clip_grad_norm_(model.parameters(), 1e6).item() == 2.0
    for _, optimizer in pairs:
        optimizer.step()
    for model, _ in pairs:
        assert model.weight.tolist() == [[-0.5] * 4]  # Accelerate's own: 0.496 for the second, or an error
    assert len(room.record().steps) == 1


@pytest.mark.parametrize("how", ["norm", "value"])
@pytest.mark.parametrize("policy", ["fp32", "fp16:init_scale=256", "fp16-master:init_scale=256"])
def test_it_clips_true_gradients(policy: str, how: str) -> None:
    room = MezzoAccelerator(cpu=True, policy=policy)
    layer = linear()
    model, optimizer = room.prepare(layer, torch.optim.SGD(layer.parameters(), lr=1.0))
    room.backward(model(torch.full((2, 4), 2.0)).mean())
    if how == "norm":
        assert room.clip_grad_norm_(model.parameters(), 1.0).item() == 4.0
    else:
        room.clip_grad_value_(model.parameters(), 0.5)
    optimizer.step()
    assert layer.weight.tolist()[0] == pytest.approx([0.0] * 4, abs=2**-20)


@pytest.mark.parametrize("policy", [OVERFLOWS, "fp16-master", "bf16-master"])
def test_it_goes_on_from_a_checkpoint(policy: str, tmp_path: Path) -> None:
    first = Training(policy)
    first.train(batches(8)[:5], scheduled=True)
    first.room.save_state(str(tmp_path))
    rest = first.train(batches(8)[5:], scheduled=True)
    AcceleratorState._reset_state(reset_partial_state=True)
    second = Training(policy)
    second.room.load_state(str(tmp_path))
    assert_same(second.train(batches(8)[5:], scheduled=True), rest)
    assert_same(second.bare.parameters(), first.bare.parameters())
    assert second.rates == first.rates[5:]
    assert second.room.driven.session.loss_scale == first.room.driven.session.loss_scale


def test_a_record_is_kept_and_read(tmp_path: Path) -> None:
    training = Training(OVERFLOWS)
    losses = training.train(batches(6))
    record = training.room.record()
    write_record(record, tmp_path / "record.json")
    assert read_record(tmp_path / "record.json").model_dump_json() == record.model_dump_json()
    assert record.steps.loss == [float(x) for x in losses]
    assert record.steps.skipped[:3] == [True] * 3
    assert record.framework == f"torch {torch.__version__} in accelerate {accelerate.__version__}"


def test_what_cannot_work_is_refused_with_its_reason() -> None:
    with pytest.raises(SessionError, match="mixed_precision='bf16' beside policy=fp16; allowed: one of the two"):
        MezzoAccelerator(cpu=True, mixed_precision="bf16")
    training = Training("fp16")
    training.train(batches(1))
    with pytest.raises(SessionError, match=r"optimizer.step\(\) got a closure; allowed: none"):
        training.optimizer.step(lambda: None)
    with pytest.raises(SessionError, match="a Linear is set up after training began with 1 other models"):
        training.room.prepare(linear())
