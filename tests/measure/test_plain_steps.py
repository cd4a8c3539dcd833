"""Steps of frameworks that are not torch."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from helpers_launch import ran
from mezzo.launch.torch import TorchTraining, switched
from mezzo.measure.plain_steps import PlainSteps, SeparateLosses
from mezzo.policy import Policy
from mezzo.records import Loss, Steps


class Scalar:
    """Stand in for a framework's scalar on a device: count how often it is read."""

    reads = 0

    def __init__(self, value: float) -> None:
        self._value = value

    def __float__(self) -> float:
        type(self).reads += 1
        return self._value


def test_steps_hold_what_was_taken_down_and_read_the_device_at_the_end() -> None:
    recorder = PlainSteps()
    recorder.loss(Scalar(1.0))
    recorder.loss(0.5)
    recorder.close(skipped=False, scale=None, norm=Scalar(2.0))
    recorder.loss(math.inf)
    recorder.loss(-math.inf)
    recorder.close(skipped=True, scale=512.0)
    recorder.close(skipped=False, scale=512.0)
    assert (recorder.num_closed, Scalar.reads) == (3, 0)
    steps = recorder.steps()
    assert Scalar.reads == 2
    assert steps.loss[0] == 1.5
    assert all(map(math.isnan, steps.loss[1:]))
    assert math.isnan(steps.loss_scale[0])
    assert steps.loss_scale[1:] == [512.0, 512.0]
    assert steps.skipped == [False, True, False]
    assert steps.grad_norm[0] == 2.0
    assert all(map(math.isnan, steps.grad_norm[1:]))
    assert len(steps.time_ms) == len(steps.cpu_ms) == 3
    assert min(steps.time_ms) >= 0


def test_steps_without_a_loss_scale_have_none() -> None:
    recorder = PlainSteps()
    recorder.loss(1.0)
    recorder.close(skipped=False, scale=None)
    assert recorder.steps().loss_scale == []


def test_losses_of_optimizers_that_take_turns_are_separated() -> None:
    recorder = PlainSteps()
    for number in range(3):
        for owner in (0, 1):
            recorder.loss(Scalar(10.0 * owner + number))
            recorder.loss(0.5)
            recorder.close(skipped=False, scale=None, made_by=frozenset([owner]))
    steps = recorder.steps({0: "judges", 1: "makes"})
    assert [(loss.name, loss.steps, loss.values) for loss in steps.losses] == [
        ("judges", [1, 3, 5], [0.5, 1.5, 2.5]),
        ("makes", [2, 4, 6], [10.5, 11.5, 12.5]),
    ]
    assert [loss.name for loss in recorder.steps().losses] == ["loss 1", "loss 2"]


# --- The several losses of a script: separated by the optimizers that they belong to, or left as one ---


softplus = nn.functional.softplus


def steps_of(train: Callable[[], object], *, policy: str = "fp32") -> Steps:
    with switched(Policy.parse(policy)) as (run, counted):
        train()
    return TorchTraining(run, counted).steps()


def found(steps: Steps) -> dict[str, tuple[list[int], list[float]]]:
    return {loss.name: (loss.steps, loss.values) for loss in steps.losses}


def backward(value: float, *modules: nn.Module) -> None:
    """Make a backward pass whose loss is ``value``, into the weights of ``modules``."""
    loss = sum((p.sum() for module in modules for p in module.parameters()), start=torch.zeros(()))
    (loss - loss.detach() + value).backward()


def sgd(*modules: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for module in modules for p in module.parameters()], lr=1e-3)


@pytest.mark.parametrize(("passes", "owners", "needed"), [(1, 2, False), (2, 1, False), (2, 2, True)])
def test_what_a_pass_reaches_matters_only_to_several_passes_and_optimizers(
    passes: int, owners: int, needed: bool
) -> None:
    losses: SeparateLosses[float] = SeparateLosses(operator.add)
    for _ in range(passes):
        losses.add(1.0)
    losses.close(1, made_by=frozenset(range(owners)))
    assert losses.needs_reach == needed


@pytest.mark.parametrize("first", [0, 1, 2], ids="closed before: {}".format)
@pytest.mark.parametrize("passes", [1, 2])
def test_advance_puts_losses_where_close_and_add_do(passes: int, first: int) -> None:
    advancing, closing = (SeparateLosses[float](operator.add) for _ in range(2))
    both, one = (advancing, closing), frozenset((0,))
    for losses in both:
        for step in range(1, first + 1):
            losses.add(10.0 * step)
            losses.close(step, made_by=one)
        for _ in range(passes):
            losses.add(1.0)
    advancing.advance([2.0, 3.0, 4.0], first + 1, made_by=one)
    for step, value in enumerate([2.0, 3.0, 4.0], start=first + 1):
        closing.close(step, made_by=one)
        closing.add(value)
    for losses in both:
        losses.close(first + 4, made_by=one)
    earlier = [10.0 * step for step in range(1, first + 1)]
    expected = [*earlier, float(passes), 2.0, 3.0, 4.0]
    assert [vars(losses)["_columns"][one].values for losses in both] == [expected] * 2
    assert [vars(losses)["_columns"][one].steps for losses in both] == [list(range(1, first + 5))] * 2


@pytest.mark.parametrize("policy", ["fp32", "fp16"])
def test_a_gans_losses_alternate(policy: str) -> None:
    def train() -> None:
        net_g, net_d = nn.Linear(2, 2), nn.Linear(2, 1)
        update_g, update_d = torch.optim.Adam(net_g.parameters()), torch.optim.Adam(net_d.parameters())
        for step in range(3):
            backward(10.0 + step, net_d)
            backward(0.5, net_d)  # accumulated: real and fake
            update_d.step()
            backward(20.0 + step, net_g, net_d)  # through the critic
            update_g.step()

    steps = steps_of(train, policy=policy)
    assert steps.loss == [10.5, 20.0, 11.5, 21.0, 12.5, 22.0]
    assert found(steps) == {"net_d": ([1, 3, 5], [10.5, 11.5, 12.5]), "net_g": ([2, 4, 6], [20.0, 21.0, 22.0])}


def test_losses_of_one_update_are_separated_by_what_they_reach() -> None:
    def train() -> None:
        net_g, net_d = nn.Linear(2, 2), nn.Linear(2, 1)
        updates = sgd(net_g), sgd(net_d)
        for step in range(5):
            backward(10.0 + step, net_d)
            backward(20.0 + step, net_g, net_d)
            for update in updates:
                update.step()

    steps = steps_of(train)
    assert steps.loss == [30.0 + 2 * step for step in range(5)]
    assert found(steps) == {
        "net_d": ([1, 2, 3, 4, 5], [10.0 + step for step in range(5)]),
        "net_g": ([1, 2, 3, 4, 5], [20.0 + step for step in range(5)]),
    }


def test_a_critic_that_steps_more_often_keeps_its_steps() -> None:
    def train() -> None:
        actor, critic = nn.Linear(2, 2), nn.Linear(2, 1)
        update_actor, update_critic = sgd(actor), sgd(critic)
        for step in range(6):
            backward(float(step), critic)
            update_critic.step()
            if step % 3 == 2:
                backward(-float(step), actor, critic)
                update_actor.step()

    assert found(steps_of(train)) == {
        "critic": ([1, 2, 3, 5, 6, 7], [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]),
        "actor": ([4, 8], [-2.0, -5.0]),
    }


# --- scripts with one loss, however many optimizers ------------------------------------------------------------------------------


def shared(number: int, *values: float) -> Callable[[], None]:
    """Return a training on losses of these values, by as many optimizers as the model has layers."""

    def train() -> None:
        layers = [nn.Linear(2, 2) for _ in range(number)]
        updates = [sgd(layer) for layer in layers]
        for _ in range(3):
            for value in values:
                backward(value, *layers)
            for update in updates:
                update.step()

    return train


def one_of_two_steps_less_often() -> None:
    body, head = nn.Linear(2, 2), nn.Linear(2, 2)
    update_body, update_head = sgd(body), sgd(head)
    for step in range(4):
        backward(3.0, body, head)
        update_head.step()
        if step % 2:
            update_body.step()


def an_optimizer_made_anew() -> None:
    model = nn.Linear(2, 2)
    for _ in range(3):
        update = sgd(model)
        backward(3.0, model)
        update.step()


def one_model_after_the_other() -> None:
    for _ in range(3):
        model = nn.Linear(2, 2)
        update = sgd(model)
        for _ in range(2):
            backward(3.0, model)
            update.step()


def by_hand() -> None:
    model = nn.Linear(2, 2)
    for _ in range(3):
        backward(3.0, model)


@pytest.mark.parametrize(
    "train",
    [
        *(shared(1, 1.0, 2.0), shared(2, 3.0), shared(2, 1.0, 2.0)),
        *(one_of_two_steps_less_often, an_optimizer_made_anew, one_model_after_the_other, by_hand),
    ],
)
def test_one_loss_stays_one(train: Callable[[], None]) -> None:
    steps = steps_of(train)
    assert steps.losses == []
    assert set(steps.loss) == {3.0}


@pytest.mark.parametrize("name", ["two_optimizers", "several_losses", "accumulation", "penalty"])
def test_scripts_with_one_loss_have_records_as_before(name: str) -> None:
    assert ran(name, "fp16").steps.losses == []


# --- names -----------------------------------------------------------------------------------------------------------------------


class Trainer:
    def __init__(self) -> None:
        self.generator, self.critic = nn.Linear(2, 2), nn.Linear(2, 1)
        self.updates = self.build()

    def build(self) -> tuple[torch.optim.Optimizer, ...]:
        return sgd(self.generator), sgd(self.critic)

    def models(self) -> Iterator[nn.Module]:
        yield from (self.generator, self.critic)


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(2, 2), nn.Linear(2, 1)

    def models(self) -> Iterator[nn.Module]:
        yield from (self.encoder, self.decoder)

    def updates(self) -> tuple[torch.optim.Optimizer, ...]:
        return sgd(self.encoder), sgd(self.decoder)


def alternate(models: Iterator[nn.Module], updates: tuple[torch.optim.Optimizer, ...]) -> None:
    pairs = list(zip(models, updates, strict=True))
    for model, update in itertools.chain(pairs, pairs):
        backward(1.0, model)
        update.step()


def from_attributes() -> None:
    trainer = Trainer()
    alternate(trainer.models(), trainer.updates)


def from_submodules() -> None:
    both = Both()
    alternate(both.models(), both.updates())


def without_names() -> None:
    def parameters(number: int) -> Iterator[Tensor]:
        yield from list(whole.children())[number].parameters()

    whole = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    updates = tuple(torch.optim.SGD(parameters(number), lr=0.1) for number in (0, 1))
    alternate(whole.children(), updates)


@pytest.mark.parametrize(
    ("train", "names"),
    [
        (from_attributes, ["generator", "critic"]),
        (from_submodules, ["encoder", "decoder"]),
        (without_names, ["loss 1", "loss 2"]),  # one variable holds both
    ],
)
def test_a_loss_has_the_name_of_what_it_trains(train: Callable[[], None], names: list[str]) -> None:
    assert [loss.name for loss in steps_of(train).losses] == names


def test_the_gan_script_has_both_of_its_losses() -> None:
    steps = ran("gan", "fp16").steps
    assert [(loss.name, loss.steps[:2], len(loss.values)) for loss in steps.losses] == [
        ("loss_d", [1, 3], 10),
        ("loss_g", [2, 4], 10),
    ]
    assert [v for pair in zip(*(loss.values for loss in steps.losses), strict=True) for v in pair] == steps.loss


def test_variables_are_not_kept_alive() -> None:
    import weakref

    with switched(None):
        model = nn.Linear(2, 2)
        gone = weakref.ref(model)
        sgd(model)
        del model
        assert gone() is None


def test_a_function_that_holds_its_variables_keeps_them() -> None:
    with switched(None):
        model = nn.Linear(2, 2)
        held = locals()
        sgd(model)
        assert held["model"] is model


def test_records_hold_losses() -> None:
    loss = Loss(name="net_d", steps=[1, 3], values=[0.5, 0.25])
    assert Steps.model_validate_json(Steps(loss=[0.5, 1.0, 0.25], losses=[loss]).model_dump_json()).losses == [loss]
