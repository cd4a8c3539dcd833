"""Ways to train in Paddle, each written as in a script, for tests that compare what reaches the optimizers with and without Mezzo."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from paddle_runs import numbers, paddle

Array = np.ndarray[Any, Any]
nn, F, optimizers = paddle.nn, paddle.nn.functional, paddle.optimizer
STEPS = 10


@dataclass
class Seen:
    """What a loop saw: the gradients before each update; state and weights after it; whatever else it read."""

    gradients: list[list[Array]] = field(default_factory=list)
    states: list[list[Array]] = field(default_factory=list)
    weights: list[list[Array]] = field(default_factory=list)
    others: list[Array] = field(default_factory=list)

    def before(self, parameters: list[Any]) -> None:
        """Keep the gradients of parameters."""
        self.gradients.append([dense(p.grad) for p in parameters if p.grad is not None])

    def after(self, parameters: list[Any], *of: Any) -> None:
        """Keep the weights, and the state of optimizers."""
        self.weights.append([numbers(p) for p in parameters])
        state = [t for optimizer in of for _, t in sorted(optimizer.state_dict().items()) if hasattr(t, "numpy")]
        self.states.append([numbers(t) for t in state])

    def arrays(self) -> list[Array]:
        """Return everything in order."""
        nested = [*self.gradients, *self.states, *self.weights, self.others]
        return [array for arrays in nested for array in arrays]


def dense(gradient: Any) -> Array:
    """Return a gradient's values, those of a sparse one with its rows added up."""
    if not gradient.is_selected_rows():
        return numbers(gradient)
    merged = paddle.nn.clip.merge_selected_rows(gradient)
    return numbers(paddle.nn.clip.get_tensor_from_selected_rows(merged))


def data(steps: int = STEPS) -> list[tuple[Any, Any]]:
    """Return batches of eight vectors of six numbers, with one of three labels."""
    draw = np.random.Generator(np.random.PCG64(11))
    pairs = [(draw.standard_normal((8, 6)).astype(np.float32), draw.integers(0, 3, 8)) for _ in range(steps)]
    return [(paddle.to_tensor(x), paddle.to_tensor(y)) for x, y in pairs]


def mlp() -> Any:
    """Return a small network, the same each time."""
    paddle.seed(3)
    return nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 3))


def scaler_for(scale: float) -> Any:
    """Return Paddle's own scaler, which is off on a CPU unless a test makes it believe otherwise."""
    return paddle.amp.GradScaler(init_loss_scaling=scale, incr_every_n_steps=2000)


def by_scaler(
    *,
    region: str | None = "O1",
    how: str = "step",
    accumulate: int = 1,
    clip: float | None = None,
    overflows: tuple[int, ...] = (),
    skips: bool = False,
    optimizer: Callable[..., Any] = optimizers.AdamW,
    scale: float = 65536.0,
) -> Callable[[], Seen]:
    """Return a loop with the script's own region and scaler.

    Args:
        region: the level of ``auto_cast``, with ``decorate`` for O2; None for no region.
        how: ``step``, ``minimize`` or ``unscale`` (with clipping by hand).
        accumulate: micro-batches in an update.
        clip: the norm at which the optimizer clips.
        overflows: steps whose loss is infinite.
        skips: leave out the update of these steps by hand instead, with a finite loss.
        optimizer: the optimizer's class.
        scale: the scaler's first scale.
    """

    def train() -> Seen:
        seen, model = Seen(), mlp()
        parameters = model.parameters()
        grad_clip = None if clip is None else nn.ClipGradByGlobalNorm(clip)
        update = optimizer(0.05, parameters=parameters, grad_clip=grad_clip)
        if region == "O2":
            model, update = paddle.amp.decorate(model, update, level="O2")
        scaler = scaler_for(scale)
        for step, (x, y) in enumerate(data()):
            for part in range(accumulate):
                rows = slice(part * 8 // accumulate, (part + 1) * 8 // accumulate)
                with paddle.amp.auto_cast(enable=region is not None, level=region or "O1"):
                    loss = F.cross_entropy(model(x[rows]), y[rows]) / accumulate
                if step in overflows and not skips:
                    loss = loss * math.inf
                scaled = scaler.scale(loss)
                scaled.backward()
            if step in overflows and skips:
                update.clear_grad()
                continue
            if how == "unscale":
                scaler.unscale_(update)
                nn.utils.clip_grad_norm_(parameters, 0.1)
            if step not in overflows and not scaler.is_enable():
                seen.before(parameters)
            if how == "minimize":
                scaler.minimize(update, scaled)
            else:
                scaler.step(update)
                scaler.update()
            update.clear_grad()
            if step not in overflows:
                seen.after(parameters, update)
        return seen

    return train


def plain(
    loss_of: Callable[[Any, Any, Any, int], Any],
    *,
    optimizer: Callable[..., Any] = optimizers.AdamW,
    model_of: Callable[[], Any] = mlp,
    minimize: bool = False,
) -> Callable[[], Seen]:
    """Return a loop without a scaler whose loss is ``loss_of(model, x, y, step)``; its model may have weights of its own."""

    def train() -> Seen:
        seen, model = Seen(), model_of()
        parameters = model.parameters()
        update = optimizer(0.05, parameters=parameters)
        for step, (x, y) in enumerate(data()):
            loss = loss_of(model, x, y, step)
            loss.backward()
            seen.before(parameters)
            if minimize:
                update.minimize(loss)
            else:
                update.step()
            update.clear_grad()
            seen.after(parameters, update)
        return seen

    return train


def _cross_entropy(model: Any, x: Any, y: Any, step: int = 0) -> Any:
    return F.cross_entropy(model(x), y)


def _in_region(model: Any, x: Any, y: Any, step: int) -> Any:
    with paddle.amp.auto_cast():
        return F.cross_entropy(model(x), y)


def _penalised(model: Any, x: Any, y: Any, step: int) -> Any:
    x.stop_gradient = False
    (slope,) = paddle.grad(paddle.tanh(model[0](x)).sum(), [x], create_graph=True)
    return F.cross_entropy(model(x), y) + 0.1 * (slope**2).sum()


def _adversarial(model: Any, x: Any, y: Any, step: int) -> Any:
    near = paddle.to_tensor(numbers(x), stop_gradient=False)
    F.cross_entropy(model(near), y).backward()
    moved = (near + 10.0 * near.grad).detach()  # in proportion to the gradient, and not only by its sign
    model.clear_gradients()
    return F.cross_entropy(model(moved), y)


def _cut(model: Any, x: Any, y: Any, step: int) -> Any:
    lower = model[1](model[0](x))
    upper = lower.detach()
    upper.stop_gradient = False
    F.cross_entropy(model[3](model[2](upper)), y).backward()
    return (lower * upper.grad).sum()


def _two_losses(model: Any, x: Any, y: Any, step: int) -> Any:
    result = model(x)
    paddle.autograd.backward([F.cross_entropy(result, y), 0.5 * result.mean()])
    return F.cross_entropy(model(x), y)


def _frozen_first(model: Any, x: Any, y: Any, step: int) -> Any:
    for parameter in model[0].parameters():
        parameter.stop_gradient = step < 4
    return F.cross_entropy(model(x), y)


def _regulariser_first(model: Any, x: Any, y: Any, step: int) -> Any:
    (1e-3 * sum((p**2).sum() for p in model.parameters())).backward()
    return F.cross_entropy(model(x), y)


class Square(paddle.autograd.PyLayer):  # type: ignore[misc]
    """A function of the script's own, with its own gradient."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        (x,) = ctx.saved_tensor()
        return 2 * x * gradient


class _OwnByGrad(paddle.autograd.PyLayer):  # type: ignore[misc]
    """A function that computes its gradients by ``paddle.grad``, as a checkpoint of the script's own does."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any) -> Any:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        x, weight = ctx.saved_tensor()
        with paddle.enable_grad():
            again = x.detach()
            again.stop_gradient = False
            return tuple(paddle.grad(again @ weight, [again, weight], gradient))


def _own_function(model: Any, x: Any, y: Any, step: int) -> Any:
    return F.cross_entropy(model[3](Square.apply(model[1](model[0](x)))), y)


def _own_grad(model: Any, x: Any, y: Any, step: int) -> Any:
    return F.cross_entropy(model[3](_OwnByGrad.apply(model[1](model[0](x)), model.inner)), y)


def _with_inner() -> Any:
    model = mlp()
    model.inner = paddle.create_parameter([16, 16], "float32")
    return model


def _checkpointed(model: Any, x: Any, y: Any, step: int) -> Any:
    lower = lambda value: model[1](model[0](value))  # noqa: E731
    x.stop_gradient = False
    return F.cross_entropy(model[3](paddle.distributed.fleet.utils.recompute(lower, x)), y)


def words() -> Any:
    """Return an embedding with sparse gradients, and a layer on it."""
    paddle.seed(3)
    return nn.Sequential(nn.Embedding(12, 6, sparse=True), nn.Flatten(), nn.Linear(12, 3))


def _of_words(model: Any, x: Any, y: Any, step: int) -> Any:
    rows = paddle.to_tensor([[1, 1], [2, 3], [step % 12, 4], [0, 1]])
    return F.cross_entropy(model(rows), y[:4])


def hooks() -> Seen:
    """Train with hooks that the script sets before its first backward pass, on a weight and inside the graph."""
    seen, model = Seen(), mlp()
    update = optimizers.Adam(0.05, parameters=model.parameters())
    model[0].weight.register_hook(lambda g: paddle.clip(g, -0.01, 0.01))
    model[3].weight.register_hook(lambda g: seen.others.append(numbers(g)))
    for x, y in data():
        middle = model[1](model[0](x))
        middle.register_hook(lambda g: g.clip(-0.02, 0.02))
        middle.register_hook(lambda g: seen.others.append(numbers(g)))
        result = model[3](middle)
        result.retain_grads()
        loss = ((result - F.one_hot(y, 3)) ** 2).mean()  # Paddle's cross entropy cannot be differentiated twice
        loss.backward(retain_graph=True)
        loss.backward()
        seen.others.append(numbers(result.grad))
        seen.before(model.parameters())
        update.step()
        update.clear_grad()
        seen.after(model.parameters(), update)
    return seen


def two_optimizers() -> Seen:
    """Train two halves of a model, each by an optimizer of its own, of which AdamW's class is no ordinary one."""
    seen, model = Seen(), mlp()
    halves = [optimizers.AdamW(0.05, parameters=model[:2].parameters())]
    halves += [optimizers.Momentum(0.05, parameters=model[3].parameters())]
    scaler = scaler_for(65536.0)
    for x, y in data():
        with paddle.amp.auto_cast():
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        seen.before(model.parameters())
        for half in halves:
            scaler.step(half)
        scaler.update()
        for half in halves:
            half.clear_grad()
        seen.after(model.parameters(), *halves)
    return seen


def no_optimizer() -> Seen:
    """Train by hand, without any optimizer and outside any layer."""
    paddle.seed(3)
    seen, weight = Seen(), paddle.create_parameter([6, 3], "float32")
    for x, y in data():
        F.cross_entropy(x @ weight, y).backward()
        seen.before([weight])
        with paddle.no_grad():
            weight.set_value(weight - 0.1 * weight.grad)
        weight.clear_gradient()
        seen.after([weight])
    return seen


def new_optimizer() -> Seen:
    """Train with an optimizer that is made anew in the middle."""
    seen, model = Seen(), mlp()
    for start in (0, 5):
        update = optimizers.AdamW(0.05, parameters=model.parameters())
        for x, y in data()[start : start + 5]:
            _in_region(model, x, y, 0).backward()
            seen.before(model.parameters())
            update.step()
            update.clear_grad()
            seen.after(model.parameters(), update)
    return seen


def fit(amp: str | None) -> Callable[[], Seen]:
    """Return a training by ``Model.fit``."""

    def train() -> Seen:
        seen, network = Seen(), mlp()
        model = paddle.Model(network)
        update = optimizers.AdamW(0.05, parameters=network.parameters())
        model.prepare(update, nn.CrossEntropyLoss(), amp_configs=amp)

        class Watch(paddle.callbacks.Callback):  # type: ignore[misc]
            def on_train_batch_end(self, step: int, logs: Any = None) -> None:
                seen.after(network.parameters(), update)

        rows = paddle.io.TensorDataset([paddle.concat([x for x, _ in data()]), paddle.concat([y for _, y in data()])])
        model.fit(rows, batch_size=8, epochs=1, verbose=0, shuffle=False, callbacks=[Watch()])
        return seen

    return train


def lbfgs(*, overflow_at: tuple[int, int] | None = None, left_out: int | None = None) -> Callable[[], Seen]:
    """Return a training by LBFGS.

    Args:
        overflow_at: a step, and which of its evaluations of the loss is infinite.
        left_out: a step that is not made, or none of whose evaluations counts if one is infinite.
    """

    def train() -> Seen:
        seen, model = Seen(), nn.Linear(6, 3, weight_attr=nn.initializer.Constant(0.1))
        update = optimizers.LBFGS(0.5, max_iter=4, parameters=model.parameters())
        for step, (x, y) in enumerate(data()):
            evaluations = 0

            def closure(x: Any = x, y: Any = y, step: int = step) -> Any:
                nonlocal evaluations
                update.clear_grad()
                loss = F.cross_entropy(model(x), y)
                if (step, evaluations) == overflow_at:
                    (loss * math.inf).backward()
                else:
                    loss.backward()
                    seen.others += [dense(p.grad) for p in model.parameters()] if step != left_out else []
                evaluations += 1
                return loss

            if step == left_out and overflow_at is None:
                continue
            update.step(closure)
            update.clear_grad()
            if step != left_out:
                seen.after(model.parameters())
        return seen

    return train


LOOPS: dict[str, Callable[[], Seen]] = {
    "own region, scaler.minimize": by_scaler(how="minimize"),
    "own region, scaler.step and update": by_scaler(),
    "decorate O2": by_scaler(region="O2"),
    "decorate O2, scaler.minimize": by_scaler(region="O2", how="minimize"),
    "no region": by_scaler(region=None),
    "unscale_ and clipping by hand": by_scaler(how="unscale"),
    "accumulation": by_scaler(accumulate=4),
    "accumulation, clipping by the optimizer": by_scaler(accumulate=2, clip=0.05),
    "two optimizers": two_optimizers,
    "no scaler": plain(_in_region),
    "no scaler, no region": plain(_cross_entropy),
    "optimizer.minimize": plain(_in_region, minimize=True),
    "own function": plain(_own_function),
    "own function that uses paddle.grad": plain(_own_grad, model_of=_with_inner),
    "gradient penalty": plain(_penalised),
    "gradients of inputs": plain(_adversarial),
    "a graph in two parts": plain(_cut),
    "two losses at once": plain(_two_losses),
    "unfrozen later": plain(_frozen_first),
    "a backward pass before the first region": plain(_regulariser_first),
    "activation checkpointing": plain(_checkpointed),
    "sparse gradients": plain(_of_words, model_of=words, optimizer=optimizers.SGD),
    "hooks and retained gradients": hooks,
    "no optimizer": no_optimizer,
    "an optimizer made anew": new_optimizer,
    "Model.fit": fit(None),
    "Model.fit at O1": fit("O1"),
    "LBFGS": lbfgs(),
    **{
        f"{name}, own region": plain(_in_region, optimizer=getattr(optimizers, name))
        for name in ("SGD", "Momentum", "Adam", "Adamax", "Adagrad", "Adadelta", "RMSProp", "Lamb", "NAdam", "RAdam")
    },
}
