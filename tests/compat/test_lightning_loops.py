"""Loops of Lightning that are not the plainest: closures, callbacks, evaluation, tuning; against its own FP32, or exact values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from helpers_trainers import Batch, assert_same, batches, linear, network, sgd
from mezzo.errors import SessionError

lightning = pytest.importorskip("lightning")
from lightning.fabric import Fabric  # noqa: E402
from lightning.fabric.plugins.precision import MixedPrecision as FabricsOwn  # noqa: E402
from lightning.pytorch import callbacks  # noqa: E402
from lightning.pytorch.tuner import Tuner  # noqa: E402

from mezzo.compat.lightning import MezzoFabricPrecision, MezzoPrecision  # noqa: E402

pytestmark = pytest.mark.filterwarnings(
    "ignore:::lightning",
    "ignore:.*LeafSpec:FutureWarning",
    "ignore:::torch.optim.lr_scheduler",
    "ignore:::torch.optim.swa_utils",
)
POLICIES = ["fp32", "fp16:init_scale=256", "fp16-master:init_scale=256"]
OFF = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}


class Regression(lightning.LightningModule):  # type: ignore[misc,name-defined]
    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        self.net, self.lr = network(), lr

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        loss = F.mse_loss(self.net(batch[0]).float(), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("val", F.mse_loss(self.net(batch[0]).float(), batch[1]))

    def test_step(self, batch: Batch, batch_idx: int) -> Any:
        return self.net(batch[0])

    def predict_step(self, batch: Batch, batch_idx: int) -> Any:
        return self.net(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


def loader(data: list[Any]) -> Any:
    return torch.utils.data.DataLoader(data, batch_size=None)


def trainer(policy: str | None, folder: Path | None = None, **settings: Any) -> tuple[Any, MezzoPrecision | None]:
    plugin = None if policy is None else MezzoPrecision(policy)
    own = {} if plugin is None else {"plugins": plugin}
    more = {**OFF, "max_epochs": 1, "accelerator": "cpu", "default_root_dir": folder, **own, **settings}
    return lightning.Trainer(**more), plugin


def fitted(module: Any, policy: str | None, data: list[Any], **settings: Any) -> tuple[Any, Any]:
    made, plugin = trainer(policy, **settings)
    made.fit(module, loader(data), loader(data[:1]))
    return made, plugin


def as_lightnings(build: Callable[[], Any], data: list[Any], **settings: Any) -> None:
    """Fit under policy fp32 and in Lightning's own FP32: the same weights to the bit."""
    ours, theirs = build(), build()
    fitted(ours, "fp32", data, **settings)
    fitted(theirs, None, data, **settings)
    assert_same(ours.parameters(), theirs.parameters())
    trained = [not torch.equal(a, b) for a, b in zip(ours.parameters(), build().parameters(), strict=True)]
    assert any(trained), "two modules that do not train are the same, too"


# --- closures -------------------------------------------------------------------------------------------------------------------


class OwnClosure(Regression):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer_closure()
        optimizer.step()


class PassedClosure(Regression):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        self.returned = optimizer.step(closure=optimizer_closure)


class EverySecond(Regression):
    """Update on every second batch; run the closure on all, as Lightning's documentation shows."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if batch_idx % 2:
            optimizer.step(closure=optimizer_closure)
        else:
            optimizer_closure()


@pytest.mark.parametrize("settings", [{}, {"accumulate_grad_batches": 2}, {"gradient_clip_val": 0.1}], ids=str)
@pytest.mark.parametrize("kind", [OwnClosure, PassedClosure, EverySecond])
def test_a_step_of_the_modules_own_updates(kind: type[Regression], settings: dict[str, Any]) -> None:
    as_lightnings(kind, batches(8), **settings)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_ways_to_call_the_closure_are_one(policy: str) -> None:
    plain, own, passed = Regression(), OwnClosure(), PassedClosure()
    for module in (plain, own, passed):
        _, plugin = fitted(module, policy, batches(6), gradient_clip_val=0.5)
        assert len(plugin.record().steps) == 6
    assert_same(own.parameters(), plain.parameters())
    assert_same(passed.parameters(), plain.parameters())
    assert passed.returned is not None  # the loss, as Lightning's own step returns it


class Sometimes(Regression):
    """Return no loss for a batch now and then."""

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        return None if batch_idx in (1, 2, 5) else super().training_step(batch, batch_idx)


@pytest.mark.parametrize("policy", POLICIES)
def test_batches_without_a_loss_update_nothing(policy: str) -> None:
    data = batches(7)
    module, plain = Sometimes(), Regression()
    _, plugin = fitted(module, policy, data)
    fitted(plain, policy, [b for i, b in enumerate(data) if i not in (1, 2, 5)])
    assert_same(module.parameters(), plain.parameters())
    assert len(plugin.record().steps) == 4


class TakesMore(torch.optim.SGD):
    def step(self, closure: Any = None, *, factor: float = 1.0) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            group["lr"] = factor
        return super().step(closure)


class Manual(lightning.LightningModule):  # type: ignore[misc,name-defined]
    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.layer(batch).mean())
        optimizer.step(factor=2.0)

    def configure_optimizers(self) -> Any:
        return TakesMore(self.parameters(), lr=1.0)


@pytest.mark.parametrize("policy", POLICIES)
def test_what_step_is_given_reaches_the_optimizer(policy: str) -> None:
    module = Manual()
    made, _ = trainer(policy)
    made.fit(module, loader([torch.ones(2, 4)]))
    assert module.layer.weight.tolist() == [[0.5 - 2.0] * 4]


class Twice(Manual):
    """Two updates in one training step: the second forward pass has to see the first one's weights."""

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer, self.seen = self.optimizers(), []
        for _ in range(3):
            output = self.layer(batch).float().mean()
            self.seen.append(output.item())
            optimizer.zero_grad()
            self.manual_backward(output)
            optimizer.step(factor=1.0)


@pytest.mark.parametrize("policy", [*POLICIES, "fp16:op_lists=device:init_scale=256", "bf16:op_lists=device"])
def test_updates_inside_a_training_step_are_seen_by_what_follows(policy: str) -> None:
    module = Twice()
    made, _ = trainer(policy)
    made.fit(module, loader([torch.ones(2, 4)]))
    assert module.seen == [2.0, -2.0, -6.0]


# --- evaluation ------------------------------------------------------------------------------------------------------------------


class Frozen(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)


class NoParameters(lightning.LightningModule):  # type: ignore[misc,name-defined]
    def validation_step(self, batch: Batch, batch_idx: int) -> Any:
        return batch[0].sum()

    def predict_step(self, batch: Batch, batch_idx: int) -> Any:
        return (batch[0] @ batch[0].T).dtype

    test_step = validation_step


@pytest.mark.parametrize(
    ("what", "policy"), [("validate", "fp32"), ("test", "bf16-master"), ("test", "fp16-pure"), ("predict", "fp16")]
)
@pytest.mark.parametrize("kind", [Frozen, NoParameters])
def test_modules_with_nothing_to_train_are_evaluated(kind: Any, policy: str, what: str) -> None:
    made, _ = trainer(policy)
    quiet = {} if what == "predict" else {"verbose": False}
    found = getattr(made, what)(kind(), loader(batches(2)), **quiet)
    if what == "predict" and kind is NoParameters and policy == "fp16":
        assert found == [torch.float16] * 2  # under the policy


def test_a_backbone_that_is_frozen_trains_its_head() -> None:
    class Head(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.net[0].requires_grad_(False)

    as_lightnings(Head, batches(6))
    module = Head()
    before = module.net[0].weight.detach().clone()
    fitted(module, "fp16", batches(6))
    assert torch.equal(before, module.net[0].weight)


class Backbone(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head = self.net[0], self.net[2]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(filter(lambda p: p.requires_grad, self.parameters()), lr=0.1)


@pytest.mark.parametrize("policy", POLICIES[:2])  # the callback looks the optimizer's parameters up: no masters
def test_layers_that_are_unfrozen_later_get_true_gradients(policy: str) -> None:
    """BackboneFinetuning adds their parameters to the optimizer between two epochs: a loss scale must not reach them."""
    settings = {"max_epochs": 3, "gradient_clip_val": 1e6}

    def tuned(chosen: str | None) -> tuple[Backbone, Any]:
        module = Backbone()
        finetuning = callbacks.BackboneFinetuning(1, lambda epoch: 1.0, backbone_initial_ratio_lr=1.0, verbose=False)
        _, plugin = fitted(module, chosen, batches(4), callbacks=[finetuning], **settings)
        return module, plugin

    (ours, plugin), (theirs, _) = tuned(policy), tuned(None)
    assert plugin.record().steps.num_skipped == 0
    start = network()[0].weight
    assert not torch.equal(start, ours.backbone.weight.float())
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a.float(), b, rtol=0, atol=0 if policy == "fp32" else 2e-2)


def test_evaluating_before_and_after_a_fit_changes_nothing() -> None:
    ours, theirs = Regression(), Regression()
    made, _ = trainer("fp16-master")
    made.validate(ours, loader(batches(2)), verbose=False)
    made.fit(ours, loader(batches(4)))
    made.test(ours, loader(batches(2)), verbose=False)
    made.predict(ours, loader(batches(2)))
    fitted(theirs, "fp16-master", batches(4))
    assert_same(ours.parameters(), theirs.parameters())


# --- callbacks --------------------------------------------------------------------------------------------------------------------


class Normed(Regression):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9), "interval": "step"}]


@pytest.mark.parametrize(("kind", "accumulate"), [(Regression, 1), (Regression, 3), (Normed, 2)])
def test_stochastic_weight_averaging_is_lightnings(kind: type[Regression], accumulate: int) -> None:
    """It passes over the data once more, without a backward pass, for batch norms' statistics."""
    ours, theirs = kind(), kind()
    for module, policy in ((ours, "fp32"), (theirs, None)):
        averaging = callbacks.StochasticWeightAveraging(1e-2, swa_epoch_start=1, annealing_epochs=1)
        fitted(module, policy, batches(6), max_epochs=3, accumulate_grad_batches=accumulate, callbacks=[averaging])
    for (name, a), b in zip(ours.state_dict().items(), theirs.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("policy", POLICIES)
def test_stochastic_weight_averaging_gives_the_mean_of_the_epochs(policy: str) -> None:
    class Noting(callbacks.Callback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.weights: list[Tensor] = []

        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            self.weights.append(pl_module.net[0].weight.detach().float().clone())

    module, noting = Regression(), Noting()
    averaging = callbacks.StochasticWeightAveraging(1e-2, swa_epoch_start=1, annealing_epochs=1)
    fitted(module, policy, batches(6), max_epochs=4, callbacks=[noting, averaging])
    mean = torch.stack(noting.weights).mean(0)
    torch.testing.assert_close(
        module.net[0].weight.float(), mean, rtol=0, atol=1e-6 if "master" not in policy else 1e-3
    )


def test_a_weight_average_is_lightnings() -> None:
    ours, theirs = Regression(), Regression()
    for module, policy in ((ours, "fp32"), (theirs, None)):
        fitted(module, policy, batches(6), max_epochs=2, callbacks=[callbacks.WeightAveraging()])
    assert_same(ours.parameters(), theirs.parameters())


@pytest.mark.parametrize(
    "policy", ["fp16:init_scale=256", "bf16-master"]
)  # of FP16 weights torch averages no FP32 copy
def test_an_average_that_is_copied_into_the_model_is_where_the_next_fit_begins(policy: str) -> None:
    module = Regression(lr=1e-3)
    made, plugin = trainer(policy, callbacks=[callbacks.WeightAveraging()], max_epochs=2)
    made.fit(module, loader(batches(6)))
    averaged = [p.detach().float().clone() for p in module.parameters()]
    again = lightning.Trainer(**OFF, max_epochs=1, accelerator="cpu", plugins=plugin)
    module.lr = 0.0
    again.fit(module, loader(batches(2)))
    for a, b in zip(module.parameters(), averaged, strict=True):
        assert torch.equal(a.float(), b)


def test_the_learning_rate_finder_finds_what_it_finds_without() -> None:
    found = []
    for policy in ("fp32", None):
        module = Regression(lr=1e-4)
        made, _ = trainer(policy, max_epochs=10)
        tuned = Tuner(made).lr_find(module, loader(batches(60)), num_training=40, update_attr=False)
        found.append((tuned.results["lr"], tuned.results["loss"], tuned.suggestion()))
    assert found[0] == found[1]
    assert found[0][2] is not None


@pytest.mark.parametrize("policy", ["fp16", "fp16-master"])
def test_callbacks_of_every_day(policy: str, tmp_path: Path) -> None:
    """Checkpoints of the best, early stopping, the learning rate's monitor, and a fit that continues from the best."""

    class Stepping(Regression):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]

    module = Stepping()
    best = callbacks.ModelCheckpoint(tmp_path, monitor="val", save_top_k=1)
    stopping, monitor = callbacks.EarlyStopping("val", patience=3), callbacks.LearningRateMonitor()
    settings = {**OFF, "enable_checkpointing": True, "logger": lightning.pytorch.loggers.CSVLogger(tmp_path)}
    made, plugin = trainer(policy, tmp_path, max_epochs=3, callbacks=[best, stopping, monitor], **settings)
    made.fit(module, loader(batches(6)), loader(batches(2)))
    assert plugin is not None
    assert len(plugin.record().steps) == 18
    assert module.optimizers().param_groups[0]["lr"] == 0.1 * 0.5**3
    again, second = Stepping(), trainer(policy, tmp_path, max_epochs=5)[0]
    second.fit(again, loader(batches(6)), loader(batches(2)), ckpt_path=best.best_model_path)
    assert second.current_epoch == 5


@pytest.mark.parametrize("policy", POLICIES)
def test_the_loss_of_a_short_window_is_the_mean_of_its_micro_batches(policy: str) -> None:
    class Fixed(Manual):
        automatic_optimization = True

        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            return self.layer(batch).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.0)

    data = [torch.full((2, 4), float(v)) for v in (1, 2, 3, 2, 1, 3, 4, 5, 6)]
    made, plugin = trainer(policy, accumulate_grad_batches=4)
    made.fit(Fixed(), loader(data))
    assert plugin is not None
    assert plugin.record().steps.loss == [4.0, 6.5, 12.0]  # twice the mean input: of 4, of 4, and of what is left


# --- Fabric ---------------------------------------------------------------------------------------------------------------------------


class Seeing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.seen: list[Any] = []

    def forward(self, x: Tensor, *, index: Tensor, more: dict[str, Any]) -> Tensor:
        self.seen = [x.dtype, index.dtype, more["wide"].dtype, more["text"]]
        return self.layer(x)  # type: ignore[no-any-return]


def seen_by(plugin: Any) -> list[Any]:
    room = Fabric(accelerator="cpu", devices=1, plugins=plugin)
    bare = Seeing()
    model = room.setup(bare)
    out = model(torch.ones(2, 4), index=torch.tensor([1]), more={"wide": torch.ones(1).double(), "text": "x"})
    return [*bare.seen, out.dtype]


@pytest.mark.parametrize(("policy", "precision"), [("bf16", "bf16-mixed"), ("fp16", "16-mixed")])
def test_fabrics_inputs_are_those_of_its_own_mixed_precision(policy: str, precision: str) -> None:
    scaler = torch.amp.GradScaler("cpu") if precision == "16-mixed" else None
    theirs = seen_by(FabricsOwn(precision, "cpu", scaler=scaler))  # type: ignore[arg-type]
    assert seen_by(MezzoFabricPrecision(policy)) == theirs
    low = torch.bfloat16 if policy == "bf16" else torch.float16
    assert theirs == [low, torch.int64, low, "x", torch.float32]


def test_fabrics_inputs_stay_where_nothing_is_lowered() -> None:
    assert seen_by(MezzoFabricPrecision("fp32")) == seen_by(None)


@pytest.mark.parametrize("policy", ["fp32", "fp16", "fp16-master"])
def test_fabric_runs_a_frozen_model(policy: str) -> None:
    room = Fabric(accelerator="cpu", devices=1, plugins=MezzoFabricPrecision(policy))
    model = room.setup(nn.Linear(2, 2).requires_grad_(False))
    assert model(torch.randn(1, 2)).dtype is torch.float32


def test_fabric_refuses_torchs_adam_where_its_eps_is_zero() -> None:
    room, bare = Fabric(accelerator="cpu", devices=1, plugins=MezzoFabricPrecision("fp16-pure")), network()
    model, optimizer = room.setup(bare, torch.optim.AdamW(bare.parameters()))
    room.backward(model(batches(1)[0][0]).square().mean())
    with pytest.raises(SessionError, match=r"AdamW keeps its state in torch\.float16"):
        optimizer.step()


def test_fabric_optimizers_step_hooks_run_once_an_update() -> None:
    room, bare = Fabric(accelerator="cpu", devices=1, plugins=MezzoFabricPrecision("fp16:init_scale=256")), network()
    raw, calls = sgd(bare.parameters()), []
    raw.register_step_pre_hook(lambda o, a, k: calls.append(float(bare[0].weight.grad.abs().max())))  # type: ignore[union-attr, func-returns-value]
    model, optimizer = room.setup(bare, raw)
    for number, (x, y) in enumerate(batches(4)):
        loss = F.mse_loss(model(x), y)
        room.backward(loss * (float("inf") if number == 1 else 1.0))
        optimizer.step()
        optimizer.zero_grad()
    assert len(calls) == 3
    assert all(value < 10 for value in calls)
