"""Lightning's Trainer and Fabric with Mezzo's precision plugins: small real runs against a session's or exact values.

The model of the exact cases is linear with weights 0.5: the gradient of its mean output is its input, so that an update
with a rate of 1 shows the gradient that was used.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mezzo
from helpers_trainers import Batch, assert_same, batches, linear, network, sgd
from mezzo.errors import SessionError
from mezzo.records import RunRecord, read_record, write_record

lightning = pytest.importorskip("lightning")
from lightning.fabric import Fabric  # noqa: E402

from mezzo.compat.lightning import MezzoFabricPrecision, MezzoPrecision  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:::lightning", "ignore:.*LeafSpec:FutureWarning")

OVERFLOWS = "fp16:init_scale=1048576"
OFF = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
SCALED = pytest.mark.parametrize("policy", ["fp16:init_scale=256", "fp16-master:init_scale=256"])


def by_session(policy: str, data: list[Batch], **settings: Any) -> tuple[nn.Sequential, mezzo.Session, list[Tensor]]:
    """Train with a session: the oracle."""
    model, losses = network(), []
    session = mezzo.Session(model, sgd(model.parameters()), policy=policy, **settings)
    for inputs, targets in data:
        with session.autocast():
            loss = F.mse_loss(model(inputs), targets)
        session.step(loss)
        losses.append(loss.detach())
    return model, session, losses


class Regression(lightning.LightningModule):  # type: ignore[misc,name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.net = network()
        self.losses: list[Tensor] = []
        self.rates: list[float] = []
        self.kinds: list[torch.dtype] = []

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        output = self.net(batch[0])
        loss = F.mse_loss(output, batch[1])
        self.losses.append(loss.detach())
        self.rates.append(self.optimizers().param_groups[0]["lr"])
        self.kinds += [output.dtype, F.softmax(output, -1).dtype]
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = sgd(self.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Constant(Regression):
    def configure_optimizers(self) -> Any:
        return sgd(self.parameters())


def fit(
    module: Any, policy: str, data: list[Any], *, resume: Path | None = None, epochs: int = 1, **settings: Any
) -> tuple[Any, MezzoPrecision]:
    plugin = MezzoPrecision(policy)
    trainer = lightning.Trainer(max_epochs=epochs, accelerator="cpu", plugins=plugin, **OFF, **settings)
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=None), ckpt_path=resume)
    return trainer, plugin


# --- Trainer -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["fp32", "bf16", OVERFLOWS, "fp16-master"])
def test_trainer_trains_as_a_session_does(policy: str) -> None:
    data = batches(12)
    module = Constant()
    _, plugin = fit(module, policy, data)
    model, session, losses = by_session(policy, data)
    assert_same(module.losses, losses)
    assert_same(module.net.parameters(), model.parameters())
    steps = plugin.record().steps
    assert (plugin.driven.session.loss_scale, steps.num_skipped) == (session.loss_scale, session.skipped)
    assert (session.skipped > 2) == (policy == OVERFLOWS)


def test_trainer_keeps_fp32_masters_of_16_bit_weights() -> None:
    module = Constant()
    trainer, plugin = fit(module, "fp16-master", batches(3))
    _, session, _ = by_session("fp16-master", batches(3))
    assert {p.dtype for p in module.parameters()} == {torch.float16}
    held = trainer.optimizers[0].param_groups[0]["params"]
    assert {p.dtype for p in held} == {torch.float32}
    assert_same(held, session.optimizers[0].param_groups[0]["params"])
    state = plugin.state_dict()["masters"][0]
    assert_same(state.values(), held)


@pytest.mark.parametrize(
    ("policy", "kinds"),
    [
        ("fp16", [torch.float16, torch.float32]),
        ("fp16:fp32_modules=net.2", [torch.float32, torch.float32]),
        ("fp16:lower=softmax", [torch.float16, torch.float16]),
        ("fp16:fp32=linear", [torch.float32, torch.float32]),
    ],
)
def test_trainer_honours_lists_and_fp32_modules(policy: str, kinds: list[torch.dtype]) -> None:
    module = Constant()
    fit(module, policy, batches(1))
    assert module.kinds == kinds


def test_the_trainers_schedule_waits_on_a_skip() -> None:
    module = Regression()
    _, plugin = fit(module, OVERFLOWS, batches(1) * 10)
    skipped = plugin.record().steps.num_skipped
    assert skipped > 2
    assert module.rates == [0.1] * skipped + [0.1 * 0.5**k for k in range(10 - skipped)]
    assert_same(module.losses[: skipped + 1], [module.losses[0]] * (skipped + 1))


class Unseen(lightning.LightningModule):  # type: ignore[misc,name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()
        self.seen: list[Tensor] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        output: Tensor = self.layer(batch)
        return output.mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


class Linear(Unseen):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen += [p.grad.clone() for p in optimizer.param_groups[0]["params"]]


def constants(*values: float) -> list[Tensor]:
    return [torch.full((2, 4), float(value)) for value in values]


@pytest.mark.parametrize("policy", ["fp32", "fp16-master:init_scale=256"])
def test_trainer_averages_a_short_last_window_over_its_micro_batches(policy: str) -> None:
    module = Linear()
    _, plugin = fit(module, policy, constants(1, 2, 3, 2, 1, 3), accumulate_grad_batches=4)
    assert [g[0, 0].item() for g in module.seen] == [2.0, 2.0]  # the peers' second one is 1.0
    assert torch.equal(module.layer.weight.float(), torch.full((1, 4), 0.5 - 2 - 2))
    assert plugin.record().steps.grad_norm == [4.0, 4.0]


@SCALED
@pytest.mark.parametrize(
    ("settings", "step"),
    [({"gradient_clip_val": 1.0}, 0.5), ({"gradient_clip_val": 1.5, "gradient_clip_algorithm": "value"}, 1.5), ({}, 2)],
)
@pytest.mark.parametrize("kind", [Linear, Unseen])
def test_trainer_clips(policy: str, settings: dict[str, Any], step: float, kind: type[Linear | Unseen]) -> None:
    module = kind()
    _, plugin = fit(module, policy, constants(2), **settings)  # a norm of 4
    if isinstance(module, Linear):
        assert module.seen[0].tolist() == [[2.0] * 4]
    assert module.layer.weight.tolist()[0] == pytest.approx([0.5 - step] * 4, abs=2**-10)
    assert plugin.record().steps.grad_norm == [4.0]  # before it was clipped


class Halving(lightning.Callback):  # type: ignore[misc,name-defined]
    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        for p in optimizer.param_groups[0]["params"]:
            p.grad.mul_(0.5)


@pytest.mark.parametrize("settings", [{}, {"gradient_clip_val": 100.0}])
def test_trainer_records_the_norm_before_a_callback_changes_gradients(settings: dict[str, Any]) -> None:
    module = Unseen()
    _, plugin = fit(module, "fp16:init_scale=256", constants(2), callbacks=[Halving()], **settings)
    assert module.layer.weight.tolist() == [[-0.5] * 4]
    assert plugin.record().steps.grad_norm == [4.0]


class TwoPlayers(lightning.LightningModule):  # type: ignore[misc,name-defined]
    automatic_optimization = False

    def __init__(self, largest: float) -> None:
        super().__init__()
        self.largest = largest
        self.first, self.second = linear(), linear()

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        self.manual_backward((self.first(batch) + self.second(batch)).mean())
        for optimizer in self.optimizers():
            self.clip_gradients(optimizer, gradient_clip_val=self.largest, gradient_clip_algorithm="norm")
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(layer.parameters(), lr=1.0) for layer in (self.first, self.second)]


@pytest.mark.parametrize(("largest", "weight"), [(1e6, -0.5), (1.0, 0.0)])
@SCALED
def test_trainer_unscales_two_optimizers_once(policy: str, largest: float, weight: float) -> None:
    module = TwoPlayers(largest)
    _, plugin = fit(module, policy, constants(1))
    for layer in (module.first, module.second):
        assert layer.weight.tolist()[0] == pytest.approx([weight] * 4, abs=2**-10)
    assert plugin.record().steps.grad_norm == pytest.approx([8**0.5])  # of both, before they were clipped


@pytest.mark.parametrize("policy", ["fp16:init_scale=1048576:growth_interval=3", "fp16-master"])
def test_trainer_resumes_from_a_checkpoint(policy: str, tmp_path: Path) -> None:
    whole, first, second = Regression(), Regression(), Regression()
    data = batches(8)
    _, straight = fit(whole, policy, data, epochs=2)
    trainer, _ = fit(first, policy, data)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    _, resumed = fit(second, policy, data, epochs=2, resume=tmp_path / "half.ckpt")
    assert_same(second.losses, whole.losses[8:])
    assert_same(second.parameters(), whole.parameters())
    assert resumed.driven.session.loss_scale == straight.driven.session.loss_scale


def test_trainer_fits_evaluates_and_fits_again() -> None:
    module = Constant()
    plugin = MezzoPrecision("fp16-master")
    loader = torch.utils.data.DataLoader(batches(3), batch_size=None)
    for _ in range(2):
        lightning.Trainer(max_epochs=1, accelerator="cpu", plugins=plugin, **OFF).fit(module, loader)
    assert {p.dtype for p in module.parameters()} == {torch.float16}
    assert len(plugin.record().steps) == 6
    assert all(later < earlier for earlier, later in zip(module.losses[:3], module.losses[3:], strict=True))


def test_a_record_is_kept_and_read(tmp_path: Path) -> None:
    module = Constant()
    _, plugin = fit(module, OVERFLOWS, batches(6))
    record = plugin.record()
    write_record(record, tmp_path / "record.json")
    read = read_record(tmp_path / "record.json")
    assert isinstance(read, RunRecord)
    assert read.model_dump_json() == record.model_dump_json()  # NaN is not equal to NaN
    assert read.steps.loss == [float(x) for x in module.losses]
    assert read.steps.loss_scale[-1] == plugin.driven.session.loss_scale == read.final_scale
    assert read.framework == f"torch {torch.__version__} in lightning {lightning.__version__}"
    assert read.policy == OVERFLOWS
    assert read.effective.emulated
    parameters = 4 * (6 * 16 + 16 + 16 * 2 + 2)
    assert (read.memory.parameters_bytes, read.memory.optimizer_bytes) == (parameters, parameters)


# --- Fabric ------------------------------------------------------------------------------------------------------------------


def fabric(policy: str) -> tuple[Any, MezzoFabricPrecision]:
    plugin = MezzoFabricPrecision(policy)
    return Fabric(accelerator="cpu", devices=1, plugins=plugin), plugin


@pytest.mark.parametrize("policy", ["fp32", "bf16", OVERFLOWS, "fp16-master"])
def test_fabric_trains_as_a_session_does(policy: str) -> None:
    room, plugin = fabric(policy)
    bare, losses, rates = network(), [], []
    model, optimizer = room.setup(bare, sgd(bare.parameters()))
    scheduler = plugin.hold(torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5))
    for inputs, targets in batches(12):
        optimizer.zero_grad()
        output = model(inputs)
        assert output.dtype is torch.float32
        loss = F.mse_loss(output, targets)
        room.backward(loss)
        optimizer.step()
        rates.append(optimizer.param_groups[0]["lr"])
        scheduler.step()
        losses.append(loss.detach())
    reference = network()
    own = sgd(reference.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(own, 1, gamma=0.5)
    session, expected = mezzo.Session(reference, own, policy=policy, scheduler=schedule), []
    for number, (inputs, targets) in enumerate(batches(12)):
        with session.autocast():
            output = reference(inputs)
        loss = F.mse_loss(output.float(), targets)
        expected.append(own.param_groups[0]["lr"])
        session.step(loss)
        assert torch.equal(losses[number], loss.detach())
    assert_same(bare.parameters(), reference.parameters())
    assert plugin.driven.session.loss_scale == session.loss_scale
    assert plugin.record().steps.num_skipped == session.skipped
    assert rates == expected


@pytest.mark.parametrize("clips", [True, False])
@SCALED
def test_fabric_unscales_two_optimizers_once(policy: str, clips: bool) -> None:
    room, plugin = fabric(policy)
    pairs = [room.setup(layer, torch.optim.SGD(layer.parameters(), lr=1.0)) for layer in (linear(), linear())]
    room.backward(sum(model(torch.ones(2, 4)).mean() for model, _ in pairs))
    for model, optimizer in pairs if clips else []:
        norm = room.clip_gradients(model, optimizer, max_norm=1e6)
        assert norm.item() == 2.0
    for _, optimizer in pairs:
        optimizer.step()
    for model, _ in pairs:
        assert model.weight.tolist() == [[-0.5] * 4]  # Fabric's own: 0.496 for the second
    assert len(plugin.record().steps) == 1


@pytest.mark.parametrize("how", [{"max_norm": 1.0}, {"clip_val": 0.5}])
@SCALED
def test_fabric_clips_true_gradients(policy: str, how: dict[str, float]) -> None:
    room, _ = fabric(policy)
    layer = linear()
    model, optimizer = room.setup(layer, torch.optim.SGD(layer.parameters(), lr=1.0))
    room.backward(model(torch.full((2, 4), 2.0)).mean())
    room.clip_gradients(model, optimizer, **how)
    optimizer.step()
    assert layer.weight.tolist()[0] == pytest.approx([0.0] * 4, abs=2**-20)


@pytest.mark.parametrize("how", [{"max_norm": 1.0}, {"clip_val": 0.5}])
def test_fabric_clips_an_update_that_is_skipped_without_an_error(how: dict[str, float]) -> None:
    room, plugin = fabric("fp16:init_scale=16777216")
    layer = linear()
    model, optimizer = room.setup(layer, torch.optim.SGD(layer.parameters(), lr=1.0))
    for _ in range(3):
        optimizer.zero_grad()
        room.backward(model(torch.full((2, 4), 100.0)).mean())
        room.clip_gradients(model, optimizer, **how)
        optimizer.step()
    assert plugin.record().steps.skipped == [True] * 3
    assert layer.weight.tolist() == [[0.5] * 4]


def test_gradients_left_by_another_optimizer_stay_true() -> None:
    """As in a GAN: the second backward pass also reaches the first player, whose gradients were unscaled already."""
    room, _ = fabric("fp16:init_scale=256")
    first, second = linear(), linear()
    (one, own), (two, other) = (room.setup(m, torch.optim.SGD(m.parameters(), lr=0.0)) for m in (first, second))
    room.backward(one(torch.full((2, 4), 2.0)).mean())
    own.step()
    assert first.weight.grad is not None
    assert first.weight.grad.tolist() == [[2.0] * 4]
    room.backward((one(torch.full((2, 4), 3.0)) + two(torch.ones(2, 4))).mean())
    other.step()
    assert first.weight.grad.tolist() == [[5.0] * 4]
    assert second.weight.grad is not None
    assert second.weight.grad.tolist() == [[1.0] * 4]


@pytest.mark.parametrize("policy", ["fp16:init_scale=1048576", "fp16-master"])
def test_fabric_resumes_from_a_checkpoint(policy: str, tmp_path: Path) -> None:
    def begin() -> tuple[Any, dict[str, Any]]:
        room, plugin = fabric(policy)
        bare = network()
        model, optimizer = room.setup(bare, sgd(bare.parameters()))
        return room, {"model": model, "optimizer": optimizer, "precision": plugin}

    def train(room: Any, state: dict[str, Any], data: list[Batch]) -> list[Tensor]:
        losses = []
        for inputs, targets in data:
            loss = F.mse_loss(state["model"](inputs), targets)
            room.backward(loss)
            state["optimizer"].step()
            state["optimizer"].zero_grad()
            losses.append(loss.detach())
        return losses

    room, state = begin()
    train(room, state, batches(8)[:5])
    room.save(tmp_path / "half", state)
    rest = train(room, state, batches(8)[5:])
    again, loaded = begin()
    again.load(tmp_path / "half", loaded)
    assert_same(train(again, loaded, batches(8)[5:]), rest)
    assert_same(loaded["model"].parameters(), state["model"].parameters())
    assert loaded["precision"].driven.session.loss_scale == state["precision"].driven.session.loss_scale


# --- refused -----------------------------------------------------------------------------------------------------------------


class OwnBackward(Linear):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward()


class LineSearch(Linear):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


def test_what_cannot_work_is_refused_with_its_reason() -> None:
    with pytest.raises(SessionError, match="LBFGS evaluates the loss several times per update"):
        fit(LineSearch(), "fp16", constants(1))
    with pytest.raises(SessionError, match=r"OwnBackward has a backward\(\) of its own"):
        fit(OwnBackward(), "fp16", constants(1))
    room, _ = fabric("fp16")
    model, optimizer = room.setup(layer := linear(), torch.optim.SGD(layer.parameters(), lr=1.0))
    loss = model(torch.ones(2, 4)).mean()
    with pytest.raises(
        SessionError, match=r"backward\(\) got create_graph; allowed in addition to the loss: retain_graph"
    ):
        room.backward(loss, create_graph=True)
    room.backward(loss)
    with pytest.raises(SessionError, match=r"optimizer.step\(\) got a closure; allowed: none"):
        optimizer.step(closure=lambda: loss)
    with pytest.raises(SessionError, match="a Linear is set up after training began with 1 other models"):
        room.setup(linear())
    assert math.isfinite(loss.item())
