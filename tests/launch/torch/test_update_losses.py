"""The loss of an update with several backward passes is what the script shows: each loop returns the values that it would print."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mezzo
from mezzo.launch.torch import TorchTraining, switched
from mezzo.policy import Policy
from mezzo.records import AS_IS, Note, Steps

POLICIES = (AS_IS, "fp32", "fp16", "bf16")
UPDATES = 4
Loop = Callable[[], Iterator[float]]


def ran(loop: Loop, policy: str = AS_IS) -> tuple[list[float], Steps, list[Note]]:
    """Return what a loop shows, the steps that are recorded, and what the record says about its losses."""
    torch.manual_seed(0)
    with switched(None if policy == AS_IS else Policy.parse(policy)) as (run, counted):
        shown = list(loop())
    training = TorchTraining(run, counted)
    return shown, training.steps(), [one for one in training.explanation() if one.what == "loss of an update"]


class Net:
    """A small model with its optimizer and endless batches."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.inputs: Callable[[], Tensor] = lambda: torch.randn(16, 8)

    @property
    def weights(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    def loss(self) -> Tensor:
        return F.cross_entropy(self.model(self.inputs()), torch.randint(0, 4, (16,)))

    def passes(self, number: int, *, divided: Callable[[Tensor], Tensor] = lambda loss: loss) -> float:
        """Run backward passes from one line; return the mean of the losses."""
        losses = []
        for _ in range(number):
            loss = self.loss()
            divided(loss).backward()
            losses.append(loss.item())
        return mean(losses)

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def updates() -> Iterator[Net]:
    net = Net()
    return itertools.repeat(net, UPDATES)


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


# --- accumulation, and several losses ----------------------------------------------------------------------------------------


def plain() -> Iterator[float]:
    for net in updates():
        yield net.passes(1)
        net.step()


def divided() -> Iterator[float]:
    for net in updates():
        yield net.passes(3, divided=lambda loss: loss / 3)
        net.step()


def undivided() -> Iterator[float]:
    for net in updates():
        yield net.passes(3)
        net.step()


def undivided_with_scaler() -> Iterator[float]:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for net in updates():
        yield net.passes(2, divided=scaler.scale)
        scaler.step(net.optimizer)
        scaler.update()
        net.optimizer.zero_grad()


def summed() -> Iterator[float]:
    """Each loss is a sum over its samples, and so is that of the whole batch."""
    for net in updates():
        total = 0.0
        for _ in range(2):
            loss = F.mse_loss(net.model(torch.randn(16, 8)), torch.zeros(16, 4), reduction="sum")
            loss.backward()
            total += loss.item()
        net.step()
        yield total


def two_tasks() -> Iterator[float]:
    for net in updates():
        first = net.loss()
        first.backward()
        second = net.loss()
        second.backward()
        net.step()
        yield first.item() + second.item()


def two_tasks_undivided() -> Iterator[float]:
    for net in updates():
        firsts, seconds = [], []
        for _ in range(3):
            first = net.loss()
            first.backward()
            firsts.append(first.item())
            second = 0.5 * net.loss() + net.loss()
            second.backward()
            seconds.append(second.item())
        net.step()
        yield mean(firsts) + mean(seconds)


def heads_in_turn() -> Iterator[float]:
    """One line, but each pass trains a head of its own: several losses."""
    body, heads = nn.Linear(8, 8), nn.ModuleList([nn.Linear(8, 4), nn.Linear(8, 4)])
    optimizer = torch.optim.SGD([*body.parameters(), *heads.parameters()], lr=0.1)
    for _ in range(UPDATES):
        total = 0.0
        for head in heads:
            loss = head(body(torch.randn(16, 8))).square().mean()
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        yield total


def losses_of_one_graph() -> Iterator[float]:
    for net in updates():
        outputs = net.model(torch.randn(16, 8))
        losses = [outputs.square().mean(), outputs.abs().mean()]
        for loss in losses:
            loss.backward(retain_graph=True)
        net.step()
        yield sum(loss.item() for loss in losses)


def max_norm() -> Iterator[float]:
    """An embedding renormalizes its weights in each forward pass: that is no other point to measure the loss at."""
    net, embedding = Net(), nn.Embedding(32, 8, max_norm=0.5)
    net.optimizer = torch.optim.SGD([*embedding.parameters(), *net.weights], lr=0.1)
    net.inputs = lambda: embedding(torch.randint(0, 32, (16,)))
    for _ in range(UPDATES):
        yield net.passes(2, divided=lambda loss: loss / 2)
        net.step()


def session() -> Iterator[float]:
    net = Net()
    trained = mezzo.Session(net.model, net.optimizer, policy="fp32", accumulate=2)
    for _ in range(UPDATES):
        losses = []
        for _ in range(2):
            with trained.autocast():
                loss = net.loss()
            trained.step(loss)
            losses.append(loss.item())
        yield mean(losses)


# --- passes at other weights -------------------------------------------------------------------------------------------------


def perturb(weights: list[nn.Parameter]) -> list[Tensor]:
    """Move weights as SAM does; return them as they were."""
    before = [p.detach().clone() for p in weights]
    with torch.no_grad():
        for p in weights:
            p.add_(0.5 * p.grad)  # type: ignore[arg-type]
    return before


def restore(weights: list[nn.Parameter], before: list[Tensor]) -> None:
    for p, value in zip(weights, before, strict=True):
        p.data = value


def sam(*, clears: bool = True, micro_batches: int = 1, first: int = 0) -> Loop:
    def loop() -> Iterator[float]:
        net = Net()
        for _ in range(first):
            yield net.passes(1)
            net.step()
        for _ in range(UPDATES):
            yield net.passes(micro_batches)
            before = perturb(net.weights)
            if clears:
                net.optimizer.zero_grad()
            for _ in range(micro_batches):
                net.loss().backward()
            restore(net.weights, before)
            net.step()

    return loop


def sam_through_data() -> Iterator[float]:
    for net in updates():
        yield net.passes(2, divided=lambda loss: loss / 2)
        moves = [0.5 * p.grad for p in net.weights if p.grad is not None]
        for p, move in zip(net.weights, moves, strict=True):
            p.data.add_(move)
        net.optimizer.zero_grad()
        net.loss().backward()
        for p, move in zip(net.weights, moves, strict=True):
            p.data.sub_(move)
        net.step()


class ClosureSam(torch.optim.Optimizer):
    """SAM whose step takes the second pass as a closure."""

    def __init__(self, weights: list[nn.Parameter]) -> None:
        super().__init__(weights, {"lr": 0.1})
        self.base = torch.optim.SGD(weights, lr=0.1)

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor]) -> None:  # type: ignore[override]
        weights = self.param_groups[0]["params"]
        before = perturb(weights)
        self.zero_grad()
        with torch.enable_grad():
            closure()
        restore(weights, before)
        self.base.step()


def sam_with_closure() -> Iterator[float]:
    net = Net()
    optimizer = ClosureSam(net.weights)

    def again() -> Tensor:
        loss = net.loss()
        loss.backward()
        return loss

    for _ in range(UPDATES):
        loss = net.loss()
        loss.backward()
        optimizer.step(again)
        optimizer.zero_grad()
        yield loss.item()


# --- passes whose gradients are in no update ---------------------------------------------------------------------------------


def attack(*, set_to_none: bool = True, frozen: bool = False) -> Loop:
    """Train on inputs that were moved along their gradients, as adversarial training does."""

    def loop() -> Iterator[float]:
        for net in updates():
            inputs, labels = torch.randn(16, 8, requires_grad=True), torch.randint(0, 4, (16,))
            net.model.requires_grad_(not frozen)
            for _ in range(2):
                F.cross_entropy(net.model(inputs), labels).backward()
            net.model.requires_grad_(True)
            net.optimizer.zero_grad(set_to_none=set_to_none)
            moved = (inputs + 0.1 * inputs.grad.sign()).detach()  # type: ignore[union-attr]
            loss = F.cross_entropy(net.model(moved), labels)
            loss.backward()
            net.optimizer.step()
            net.optimizer.zero_grad(set_to_none=set_to_none)
            yield loss.item()

    return loop


def dropped_batch() -> Iterator[float]:
    for net in updates():
        net.loss().backward()  # an outlier, say
        net.optimizer.zero_grad()
        yield net.passes(1)
        net.step()


def two_optimizers() -> Iterator[float]:
    """Each clears its gradients after its step, before the other steps."""
    net = Net()
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (net.model[0], net.model[2])]
    for _ in range(UPDATES):
        net.loss().backward()
        net.model.zero_grad()
        yield net.passes(1)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def combined_by_hand() -> Iterator[float]:
    """Gradients are taken task by task and set together, as PCGrad does: all losses are in the update."""
    for net in updates():
        first = net.loss()
        first.backward()
        kept = [p.grad for p in net.weights]
        net.optimizer.zero_grad()
        second = net.loss()
        second.backward()
        for p, gradient in zip(net.weights, kept, strict=True):
            p.grad = gradient + p.grad  # type: ignore[operator]
        net.step()
        yield first.item() + second.item()


# --- gradient caching --------------------------------------------------------------------------------------------------------


def cached(continue_pass: Callable[[Tensor, Tensor], None]) -> Loop:
    """Train a contrastive loss over two chunks, each of which a second pass continues from the cached gradient of its embeddings."""

    def loop() -> Iterator[float]:
        net = Net()
        temperature = nn.Parameter(torch.ones(()))
        optimizer = torch.optim.SGD([*net.weights, temperature], lr=0.1)
        for _ in range(UPDATES):
            chunks = [torch.randn(8, 8), torch.randn(8, 8)]
            with torch.no_grad():
                embedded = [net.model(chunk).float() for chunk in chunks]
            leaves = [one.clone().requires_grad_() for one in embedded]
            both = torch.cat(leaves)
            loss = F.cross_entropy(temperature * both @ both.T, torch.arange(16))
            loss.backward()
            for chunk, leaf in zip(chunks, leaves, strict=True):
                continue_pass(net.model(chunk).float(), leaf.grad)  # type: ignore[arg-type]
            optimizer.step()
            optimizer.zero_grad()
            yield loss.item()

    return loop


def product(embedded: Tensor, gradient: Tensor) -> None:
    (embedded * gradient).sum().backward()


def dot(embedded: Tensor, gradient: Tensor) -> None:
    torch.dot(embedded.flatten(), gradient.flatten()).backward()


def product_with_copy(embedded: Tensor, gradient: Tensor) -> None:
    (gradient.clone() * embedded).sum().backward()


def given(embedded: Tensor, gradient: Tensor) -> None:
    embedded.backward(gradient)


def weighted_sums() -> Iterator[float]:
    """A product with weights as many as inputs with gradients, in the size of these: a loss of its own."""
    for net in updates():
        inputs = torch.randn(16, 4, requires_grad=True)
        first = (net.model(torch.cat([inputs, inputs], 1)) * torch.rand(16, 4)).sum()
        first.backward()
        second = (net.model(torch.randn(16, 8)) * torch.rand(16, 4)).sum()
        second.backward()
        net.step()
        yield first.item() + second.item()


# --- the record --------------------------------------------------------------------------------------------------------------

LOOPS: dict[str, tuple[Loop, str]] = {
    "plain": (plain, ""),
    "divided": (divided, "sum of 3 backward passes"),
    "undivided": (undivided, "mean of 3 backward passes"),
    "undivided with a scaler": (undivided_with_scaler, "mean of 2 backward passes"),
    "summed": (summed, "sum of 2 backward passes"),
    "two tasks": (two_tasks, "sum of 2 backward passes"),
    "two tasks, undivided": (two_tasks_undivided, "sum of 2 means of 3 backward passes"),
    "heads in turn": (heads_in_turn, "sum of 2 backward passes"),
    "losses of one graph": (losses_of_one_graph, "sum of 2 backward passes"),
    "max norm": (max_norm, "sum of 2 backward passes"),
    "session": (session, "sum of 2 backward passes"),
    "SAM": (sam(), "1 of 2 backward passes"),
    "SAM that keeps gradients": (sam(clears=False), "1 of 2 backward passes"),
    "SAM over micro-batches": (sam(micro_batches=2), "mean of 2 of 4 backward passes"),
    "SAM through data": (sam_through_data, "sum of 2 of 3 backward passes"),
    "SAM with a closure": (sam_with_closure, "1 of 2 backward passes"),
    "attack": (attack(), "1 of 3 backward passes"),
    "attack, gradients set to zero": (attack(set_to_none=False), "1 of 3 backward passes"),
    "attack, weights frozen": (attack(frozen=True), "1 of 3 backward passes"),
    "dropped batch": (dropped_batch, "1 of 2 backward passes"),
    "combined by hand": (combined_by_hand, "sum of 2 backward passes"),
    "cached, product": (cached(product), "1 of 3 backward passes"),
    "cached, dot": (cached(dot), "1 of 3 backward passes"),
    "cached, copies": (cached(product_with_copy), "1 of 3 backward passes"),
    "cached, given": (cached(given), "1 of 3 backward passes"),
    "weighted sums": (weighted_sums, "sum of 2 backward passes"),
    "two optimizers, dropped batch": (two_optimizers, "1 of 2 backward passes"),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", LOOPS)
def test_the_recorded_loss_is_the_one_that_the_script_shows(name: str, policy: str) -> None:
    loop, expected = LOOPS[name]
    shown, steps, said = ran(loop, policy)
    assert steps.loss == pytest.approx(shown, rel=1e-5)
    assert len(steps.loss) == UPDATES
    assert [one.value for one in said] == ([expected] if expected else [])


REASONS = {
    "divided": "the gradients of all are in the update",
    "undivided": "one line runs them, each from a mean over a batch, and nothing divides it by their number: the script's loss is "
    "their mean",
    "SAM": "the script changes its weights between them, as SAM does: losses at the changed weights are left out",
    "attack": "left out are those whose gradients the script clears before the update, or that reach no weight that it trains",
    "cached, dot": "left out are those that start from gradients of another, as in gradient caching",
}


@pytest.mark.parametrize("name", REASONS)
def test_the_record_says_why(name: str) -> None:
    assert [one.reason for one in ran(LOOPS[name][0])[2]] == [REASONS[name]]


@pytest.mark.parametrize("first", [3, 20, 120], ids="after {}".format)
def test_passes_that_become_several_are_told_apart_from_their_second_update_on(first: int) -> None:
    shown, steps, _ = ran(sam(first=first))
    late = first >= 8
    assert steps.loss[: first + (0 if late else UPDATES)] == pytest.approx(shown[: first + (0 if late else UPDATES)])
    assert steps.loss[first + 1 :] == pytest.approx(shown[first + 1 :])
