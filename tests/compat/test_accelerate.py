"""Accelerate with Mezzo's accelerator: small real runs against a session's or exact values.

The model of the exact cases is linear with weights 0.5: the gradient of its mean output is its input, so that an update
with a rate of 1 shows the gradient that was used.
"""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mezzo
from helpers_engine import copied
from helpers_trainers import Batch, assert_same, batches, forgotten, linear, network, sgd
from mezzo.errors import SessionError

accelerate = pytest.importorskip("accelerate")
from accelerate.state import AcceleratorState  # noqa: E402

from mezzo.compat.accelerate import MezzoAccelerator  # noqa: E402

OVERFLOWS = "fp16:init_scale=1048576"


@pytest.fixture(autouse=True)
def _anew() -> Iterator[None]:
    with forgotten():
        yield


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


@pytest.mark.parametrize("policy", ["fp32", "bf16", OVERFLOWS, "fp16-master"])
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
    assert training.rates == rates  # the scheduler waits on a skipped update
    assert training.room.driven.session.loss_scale == session.loss_scale
    assert training.room.record().steps.num_skipped == session.skipped
    assert (session.skipped > 2) == (policy == OVERFLOWS)
    assert training.room.record().framework == f"torch {torch.__version__} in accelerate {accelerate.__version__}"
    if policy.endswith("-master"):
        assert {p.dtype for p in training.bare.parameters()} == {policy_dtype(policy)}
        held = training.optimizer.param_groups[0]["params"]
        assert {p.dtype for p in held} == {torch.float32}
        assert_same(held, optimizer.param_groups[0]["params"])


def policy_dtype(policy: str) -> torch.dtype:
    return mezzo.Policy.parse(policy).storage.dtype


def test_a_region_of_ones_own_is_under_the_policy() -> None:
    room = MezzoAccelerator(cpu=True, policy="fp16:lower=softmax")
    model = room.prepare(network())
    with room.autocast():
        assert F.softmax(torch.ones(2, 2), -1).dtype is torch.float16
    assert model(torch.ones(1, 6)).dtype is torch.float32


@pytest.mark.parametrize("policy", ["fp32", "fp16-master:init_scale=256"])
def test_a_short_last_window_is_averaged_over_its_micro_batches(policy: str) -> None:
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
@pytest.mark.parametrize("policy", ["fp16:init_scale=256", "fp16-master:init_scale=256"])
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
@pytest.mark.parametrize("policy", ["fp16:init_scale=256", "fp16-master:init_scale=256"])
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
def test_it_resumes_from_a_checkpoint(policy: str, tmp_path: Path) -> None:
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


def test_what_cannot_work_is_refused_with_its_reason() -> None:
    with pytest.raises(SessionError, match="mixed_precision='bf16' together with policy=fp16; allowed: one of the two"):
        MezzoAccelerator(cpu=True, mixed_precision="bf16")
    training = Training("fp16")
    training.train(batches(1))
    with pytest.raises(SessionError, match=r"optimizer.step\(\) got a closure; allowed: none"):
        training.optimizer.step(lambda: None)
    with pytest.raises(SessionError, match="a Linear is set up after training began with 1 other models"):
        training.room.prepare(linear())


# --- the model's face, and copies ---------------------------------------------------------------------------------------------


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 16), nn.Linear(16, 2)

    def forward(self, inputs: Tensor, *, scale: float = 1.0) -> Tensor:
        return self.last(torch.tanh(self.first(inputs))) * scale  # type: ignore[no-any-return]


def prepared(policy: str, updates: int = 2) -> tuple[MezzoAccelerator, Any, Any]:
    room, bare = MezzoAccelerator(cpu=True, policy=policy), Named()
    model, optimizer = room.prepare(bare, sgd(bare.parameters()))
    for inputs, targets in batches(updates):
        room.backward(F.mse_loss(model(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()
    return room, model, optimizer


EVERY = ["fp32", "fp16", "fp16:fp32_modules=last", "fp16-master", "bf16-master"]


@pytest.mark.parametrize(("policy", "updates"), [*((policy, 2) for policy in EVERY), ("fp16-master", 0)])
def test_a_prepared_model_has_its_own_signature(policy: str, updates: int) -> None:
    _, model, _ = prepared(policy, updates)
    assert inspect.signature(model.forward) == inspect.signature(Named().forward)


@pytest.mark.parametrize(
    ("policy", "way"),
    [*((policy, "pickle") for policy in EVERY), ("fp16-master", "deepcopy"), (EVERY[2], "torch.save")],
)
def test_a_prepared_model_copies_and_pickles_without_its_training(policy: str, way: str) -> None:
    room, model, _ = prepared(policy)
    (x, _), *_ = batches(1)
    ours = model(x)
    twin = copied(model, way)
    assert len(pickle.dumps(model)) < 12_000  # the weights alone: no session, no optimizer
    assert torch.equal(twin(x), ours)
    for p in twin.parameters():
        p.data.zero_()
    assert twin(x).abs().max() == 0
    assert torch.equal(model(x), ours)
    room.backward(model(x).square().mean())  # and continues


@pytest.mark.parametrize("policy", EVERY)
def test_an_unwrapped_model_is_the_model(policy: str) -> None:
    room, model, _ = prepared(policy)
    (x, _), *_ = batches(1)
    assert room.unwrap_model(model) is model
    under = model(x)
    bare = room.unwrap_model(model, keep_fp32_wrapper=False)
    assert bare is model
    assert inspect.signature(bare.forward) == inspect.signature(Named().forward)
    exact = Named()
    exact.load_state_dict({k: v.float() for k, v in bare.state_dict().items()})
    if not policy.endswith("-master"):  # weights that stay in 16 bits compute in 16 bits
        if "modules" not in policy:
            assert "forward" not in vars(bare)
        torch.testing.assert_close(bare(x), exact(x), rtol=1e-6, atol=1e-6)
        assert torch.equal(bare(x), under) == (policy == "fp32")
    with pytest.raises(SessionError) as caught:
        room.backward(bare(x).square().mean())
    assert str(caught.value) == (
        "backward() after unwrap_model(model, keep_fp32_wrapper=False): the model's calls no longer run under the policy\n"
        "  hint: leave keep_fp32_wrapper out, unwrap a copy, or call accelerator.prepare(model) again"
    )
    again = room.prepare(bare)
    assert torch.equal(again(x), under)
    room.backward(again(x).square().mean())


@pytest.mark.parametrize("policy", EVERY)
def test_a_trained_model_continues_under_another_accelerator(policy: str) -> None:
    first, model, _ = prepared(policy)
    (x, y), *_ = batches(1)
    second = MezzoAccelerator(cpu=True, policy="fp32" if policy in ("fp32", "fp16") else policy)
    again, other = second.prepare(model, sgd(model.parameters()))
    for _ in range(2):
        second.backward(F.mse_loss(again(x), y))
        other.step()
        other.zero_grad()
    assert second.record().steps.num_skipped == 0
    if policy == "fp16":
        exact = Named()
        exact.load_state_dict(again.state_dict())
        assert torch.equal(again(x), exact(x))  # the first accelerator's region is gone
    with pytest.raises(SessionError, match="a session whose model was passed to another session since"):
        first.backward(F.mse_loss(model(x), y))


@pytest.mark.parametrize(("policy", "way"), [("fp32", "deepcopy"), ("fp16", "pickle"), ("fp16-master", "pickle")])
def test_a_prepared_optimizer_copies_and_pickles(policy: str, way: str) -> None:
    room, model, optimizer = prepared(policy)
    twin = copied(optimizer, way)
    assert type(twin) is type(optimizer)
    assert twin.accelerator is None
    assert optimizer.accelerator is room
    ours, theirs = optimizer.state_dict(), twin.state_dict()
    assert ours["param_groups"] == theirs["param_groups"]
    for number, state in ours["state"].items():
        assert torch.equal(state["momentum_buffer"], theirs["state"][number]["momentum_buffer"])
    with pytest.raises(SessionError) as caught:
        twin.step()
    assert caught.value.message == "step() of a copy of a prepared optimizer; allowed: of the prepared optimizer itself"
    assert room.prepare(twin).accelerator is room
    (x, y), *_ = batches(1)
    room.backward(F.mse_loss(model(x), y))
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.step()  # the one that was copied continues
    assert not all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_a_short_windows_loss_is_the_mean_of_its_micro_batches() -> None:
    room = MezzoAccelerator(cpu=True, policy="fp16:init_scale=256", gradient_accumulation_steps=4)
    layer, values = linear(), (1, 2, 3, 2, 4)
    loader = torch.utils.data.DataLoader([torch.full((2, 4), float(v)) for v in values], batch_size=None)
    model, optimizer, loader = room.prepare(layer, torch.optim.SGD(layer.parameters(), lr=0.0), loader)
    for inputs in loader:
        with room.accumulate(model):
            room.backward(model(inputs).mean())
            optimizer.step()
            optimizer.zero_grad()
    assert room.record().steps.loss == [4.0, 8.0]  # 2 a unit of input; the last window has one micro-batch of four


def test_parameters_that_are_added_later_are_unscaled() -> None:
    room = MezzoAccelerator(cpu=True, policy="fp16:init_scale=256")
    model, late = linear(), linear()
    whole = nn.ModuleList([model, late])
    late.requires_grad_(False)
    prepared_model, optimizer = room.prepare(whole, torch.optim.SGD(model.parameters(), lr=1.0))
    for step in range(2):
        if step:
            late.requires_grad_(True)
            optimizer.add_param_group({"params": list(late.parameters()), "lr": 1.0})
        with room.autocast():
            loss = (model(torch.ones(2, 4)) + late(torch.ones(2, 4))).float().mean()
        room.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    assert prepared_model is whole
    assert model.weight.tolist() == [[-1.5] * 4]
    assert late.weight.tolist() == [[-0.5] * 4]


def test_torchs_adam_is_refused_where_its_eps_is_zero() -> None:
    room, bare = MezzoAccelerator(cpu=True, policy="fp16-pure"), Named()
    model, optimizer = room.prepare(bare, torch.optim.Adam(bare.parameters()))
    (x, y), *_ = batches(1)
    room.backward(F.mse_loss(model(x), y))
    with pytest.raises(
        SessionError, match=r"Adam keeps its state in torch\.float16 under policy fp16-pure, and eps=1e-08"
    ):
        optimizer.step()


# --- models of Hugging Face -------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*:FutureWarning")
@pytest.mark.parametrize("policy", ["fp16", "bf16-master"])
def test_generate_gives_the_tokens_of_the_model_itself(policy: str) -> None:
    """Left-padded prompts: generate reads from the signature that forward takes positions."""
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    shape = {"vocab_size": 100, "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 64}
    config = transformers.GPT2Config(**shape, bos_token_id=0, eos_token_id=1, pad_token_id=2)
    room, bare = MezzoAccelerator(cpu=True, policy=policy), transformers.GPT2LMHeadModel(config)
    model, optimizer = room.prepare(bare, torch.optim.AdamW(bare.parameters(), lr=1e-3))
    tokens = torch.randint(3, 100, (4, 16))
    for _ in range(3):
        room.backward(model(input_ids=tokens, labels=tokens).loss)
        optimizer.step()
        optimizer.zero_grad()
    padded = torch.cat([torch.full((2, 6), 2), tokens[:2, :6]], 1)
    mask = (padded != 2).long()
    unwrapped = room.unwrap_model(model).eval()
    reference = transformers.GPT2LMHeadModel(config).eval()
    reference.load_state_dict({k: v.float() for k, v in unwrapped.state_dict().items()})
    settings = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False}
    assert torch.equal(unwrapped.generate(padded, **settings), reference.generate(padded, **settings))
    unwrapped.generate(padded, token_type_ids=torch.zeros_like(padded), **settings)  # taken, as forward takes it
