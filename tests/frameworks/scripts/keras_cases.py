"""Train a small Keras network in many ways; ``python keras_cases.py CASE POLICY`` ... prints one JSON line a run.

``plain`` in place of a policy trains without Mezzo. The runs share one process: importing TensorFlow takes seconds.
"""

# ruff: noqa: ANN001, ANN002, ANN003, ANN201, ANN202, ANN204, ANN205, E402
import json
import sys
from contextlib import nullcontext, suppress

import keras
import numpy as np

TF = keras.backend.backend() == "tensorflow"
JAX = keras.backend.backend() == "jax"
if TF:
    import tensorflow as tf
elif JAX:
    import jax
else:
    import torch

from mezzo.errors import MezzoError
from mezzo.launch.keras import training
from mezzo.launch.request import ModelChanges
from mezzo.launch.training import StepLimit
from mezzo.observe.settings import StopScript
from mezzo.policy import Policy

B, D, H, C = 8, 4, 16, 3
STEPS = 6


def data():
    random = np.random.RandomState(7)
    return random.normal(size=(B * STEPS, D)).astype("float32"), random.randint(0, C, B * STEPS)


def net(last=None, first=None):
    keras.utils.set_random_seed(3)
    return keras.Sequential(
        [
            keras.Input((D,)),
            keras.layers.Dense(H, activation="relu", name="hidden", dtype=first),
            keras.layers.Dense(C, name="head", dtype=last),
        ]
    )


class Watch(keras.callbacks.Callback):
    """Read what Keras itself tells after every batch."""

    def __init__(self):
        super().__init__()
        self.scales, self.iterations = [], []

    def on_train_batch_end(self, batch, logs=None):
        optimizer = self.model.optimizer
        self.scales.append(float(getattr(optimizer, "dynamic_scale", 0.0)))
        self.iterations.append(int(optimizer.iterations))


def loss_function():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def result(model, **more):
    weights = np.concatenate(
        [np.ravel(keras.ops.convert_to_numpy(w)).astype("float64") for w in model.trainable_variables]
    )
    dtypes = {layer.name: layer.compute_dtype for layer in model.layers}
    variables = sorted({str(keras.backend.standardize_dtype(v.dtype)) for v in model.trainable_variables})
    return {"weights": weights.tolist(), "compute": dtypes, "variables": variables} | more


def fitted(model, optimizer=None, epochs=1, **settings):
    x, y = data()
    watch = Watch()
    metric = settings.pop("metrics", None)
    model.compile(optimizer or keras.optimizers.SGD(0.1), loss=loss_function(), metrics=metric, **settings)
    model.fit(x, y, B, epochs, shuffle=False, verbose=0, callbacks=[watch])
    return result(model, scales=watch.scales, iterations=watch.iterations)


def fit():
    return fitted(net())


def stopped():
    """The same, which is stopped after 3 of its steps."""
    return fit()


def batch_losses():
    x, y = data()
    model = net()
    model.compile(keras.optimizers.SGD(0.1), loss=loss_function())
    losses = []
    for k in range(STEPS):
        model.reset_metrics()
        losses.append(float(model.train_on_batch(x[k * B :][:B], y[k * B :][:B])))
    return result(model, losses=losses)


def own_policy():
    keras.config.set_dtype_policy("mixed_float16")
    try:
        return fitted(net())
    finally:
        keras.config.set_dtype_policy("float32")


def own_scaler():
    scaler = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.1), initial_scale=2.0**40, dynamic_growth_steps=2
    )
    return fitted(net(), scaler, epochs=8)


def long_fit():
    return fitted(net(), epochs=8)


def own_dtype():
    return fitted(net(last="float32"))


def mixed_layer():
    return fitted(net(first="mixed_bfloat16"))


def eager():
    return fitted(net(), run_eagerly=True)


def several_a_call():
    return fitted(net(), steps_per_execution=4)


def compiled_by_xla():
    return fitted(net(), jit_compile=True)


def accumulating():
    return fitted(net(), keras.optimizers.SGD(0.1, gradient_accumulation_steps=2))


def two_epochs_adam():
    return fitted(net(), keras.optimizers.Adam(0.01), epochs=2)


def norms():
    keras.utils.set_random_seed(3)
    layers = [
        keras.Input((D,)),
        keras.layers.Dense(H),
        keras.layers.BatchNormalization(name="norm"),
        keras.layers.Dense(C),
    ]
    return fitted(keras.Sequential(layers))


def convolutions():
    keras.utils.set_random_seed(3)
    x, y = data()
    images = np.repeat(x[:, None, None, :2], 6, 1).repeat(5, 2)  # 6 x 5, 2 channels
    model = keras.Sequential(
        [
            keras.Input((6, 5, 2)),
            keras.layers.Conv2D(4, 3, padding="same", strides=2),
            keras.layers.Conv2D(6, 2, groups=1 if TF or JAX else 2),
            keras.layers.DepthwiseConv2D(2, depth_multiplier=3, padding="same"),
            keras.layers.Flatten(),
            keras.layers.Dense(C),
        ]
    )
    model.compile(keras.optimizers.SGD(0.01), loss=loss_function())
    model.fit(images, y, B, 1, shuffle=False, verbose=0)
    return result(model)


class OwnStep(keras.Model):
    """Override the training step as Keras' guides do, without ``scale_loss``."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.loss_of = inner, loss_function()

    def call(self, x, training=False):
        return self.inner(x)

    def train_step(self, data):
        x, y = data
        if TF:
            with tf.GradientTape() as tape:
                loss = self.loss_of(y, self(x, training=True))
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply(gradients, self.trainable_variables)
        else:
            self.zero_grad()
            loss = self.loss_of(y, self(x, training=True))
            loss.backward()
            with torch.no_grad():
                self.optimizer.apply([v.value.grad for v in self.trainable_variables], self.trainable_variables)
        return {"loss": loss}


def own_step():
    model = OwnStep(net())
    x, y = data()
    model.compile(keras.optimizers.SGD(0.1), loss=None)
    model.fit(x, y, B, 1, shuffle=False, verbose=0)
    return result(model.inner)


def loop(traced=False, overflow_at=None, inside=False):
    """Train by hand, with clipping: the script reads its gradients, which may be computed inside the backward pass."""
    x, y = data()
    model, optimizer, loss_of = net(), keras.optimizers.SGD(0.1), loss_function()
    norms, losses = [], []

    def gradients(a, b, factor):
        if TF:
            with tf.GradientTape() as tape:
                loss = loss_of(b, model(a, training=True)) * factor
            return loss, tape.gradient(loss, model.trainable_variables)
        model.zero_grad()
        out = recomputed(model, torch.tensor(a)) if inside else model(torch.tensor(a), training=True)
        loss = loss_of(torch.tensor(b), out) * factor
        loss.backward()
        return loss.detach(), [v.value.grad for v in model.trainable_variables]

    def step(a, b, factor):
        loss, found = gradients(a, b, factor)
        norm = keras.ops.sqrt(sum(keras.ops.sum(keras.ops.square(g)) for g in found))
        found = [g * keras.ops.minimum(1.0, 0.5 / norm) for g in found]
        if TF:
            optimizer.apply(found, model.trainable_variables)
        else:
            with torch.no_grad():
                optimizer.apply(found, model.trainable_variables)
        return loss, norm

    run = tf.function(step) if TF and traced else step
    for k in range(STEPS):
        factor = np.float32(1e30 if k == overflow_at else 1.0)
        loss, norm = run(x[k * B :][:B], y[k * B :][:B], tf.constant(factor) if TF else float(factor))
        losses.append(float(loss))
        norms.append(float(norm))
    return result(model, norms=norms, losses=losses, iterations=[int(optimizer.iterations)])


def recomputed(model, x):
    """Call a model that keeps no activations: its gradients are computed inside the backward pass."""

    class Recomputed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *weights):
            ctx.save_for_backward(*weights)
            return model(x)

        @staticmethod
        def backward(ctx, gradient):
            with torch.enable_grad():
                return torch.autograd.grad(model(x), ctx.saved_tensors, gradient)

    return Recomputed.apply(*[v.value for v in model.trainable_variables])


def inside_loop():
    return loop(inside=True)


def traced_loop():
    return loop(traced=True)


def overflowing_loop():
    return loop(traced=TF, overflow_at=2)


def two_optimizers():
    x, y = data()
    model, loss_of = net(), loss_function()
    first, second = keras.optimizers.SGD(0.1), keras.optimizers.SGD(0.1)
    for k in range(STEPS):
        a, b = x[k * B :][:B], y[k * B :][:B]
        variables = model.trainable_variables
        if TF:
            with tf.GradientTape() as tape:
                loss = loss_of(b, model(a))
            found = tape.gradient(loss, variables)
        else:
            model.zero_grad()
            loss_of(torch.tensor(b), model(torch.tensor(a))).backward()
            found = [v.value.grad for v in variables]
            torch.set_grad_enabled(False)
        first.apply(found[:2], variables[:2])
        second.apply(found[2:], variables[2:])
        if not TF:
            torch.set_grad_enabled(True)
    return result(model)


def gan():
    """Two models, each with an optimizer and a loss of its own, in turn."""
    keras.utils.set_random_seed(3)
    makes = keras.Sequential([keras.Input((D,)), keras.layers.Dense(D)], name="makes")
    judges = keras.Sequential([keras.Input((D,)), keras.layers.Dense(1)], name="judges")
    optimizers = {id(makes): keras.optimizers.SGD(0.01), id(judges): keras.optimizers.SGD(0.01)}
    x, losses = data()[0], []

    def turn(model, batch, sign):
        if TF:
            with tf.GradientTape() as tape:
                loss = sign * keras.ops.mean(judges(makes(batch)))
            found = tape.gradient(loss, model.trainable_variables)
        else:
            model.zero_grad()
            loss = sign * keras.ops.mean(judges(makes(batch)))
            loss.backward()
            found = [v.value.grad for v in model.trainable_variables]
            torch.set_grad_enabled(False)
        optimizers[id(model)].apply(found, model.trainable_variables)
        if not TF:
            torch.set_grad_enabled(True)
        return loss

    turns = [tf.function(turn) if TF else turn for _ in range(2)]
    for k in range(STEPS):
        batch = keras.ops.convert_to_tensor(x[k * B :][:B])
        losses.append(float(turns[0](judges, batch, 1.0)))
        losses.append(float(turns[1](makes, batch, -1.0)))
    return result(makes, losses=losses)


def given_gradients():
    """Start backward passes of a loss of 2 from nothing, from -1, and from 0.25 and nothing for two losses."""
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, kernel_initializer="ones", use_bias=False)])
    optimizer = keras.optimizers.SGD(0.0)
    batch = keras.ops.ones((4, 2))
    for starts in ([None], [-1.0], [0.25, None]):
        if TF:
            with tf.GradientTape() as tape:
                losses = [keras.ops.mean(model(batch)) for _ in starts]
            given = [tf.constant(1.0 if start is None else start) for start in starts]
            found = tape.gradient(
                losses, model.trainable_variables, output_gradients=None if starts == [None] else given
            )
        else:
            model.zero_grad()
            losses = [keras.ops.mean(model(batch)) for _ in starts]
            torch.autograd.backward(losses, [None if start is None else torch.tensor(start) for start in starts])
            found = [v.value.grad for v in model.trainable_variables]
        with nullcontext() if TF else torch.no_grad():
            optimizer.apply(found, model.trainable_variables)
    return result(model)


def random_layers():
    keras.utils.set_random_seed(3)
    layers = [keras.Input((D,)), keras.layers.Dense(H), keras.layers.Dropout(0.5, seed=1), keras.layers.Dense(C)]
    return fitted(keras.Sequential(layers))


def embedding():
    keras.utils.set_random_seed(3)
    _, y = data()
    model = keras.Sequential(
        [keras.Input((5,)), keras.layers.Embedding(7, 4), keras.layers.Flatten(), keras.layers.Dense(C)]
    )
    model.compile(keras.optimizers.SGD(0.1), loss=loss_function())
    model.fit(np.arange(B * STEPS * 5).reshape(-1, 5) % 7, y, B, 1, shuffle=False, verbose=0)
    return result(model)


def stateless_loop():
    """Train by hand on JAX, as Keras' guide does: a jitted step, whose state goes in and comes out."""
    x, y = data()
    model, optimizer, loss_of = net(), keras.optimizers.SGD(0.1), loss_function()
    optimizer.build(model.trainable_variables)

    def loss_and_state(trained, others, a, b):
        found, others = model.stateless_call(trained, others, a, training=True)
        return loss_of(b, found), others

    @jax.jit
    def step(trained, others, held, a, b):
        (loss, others), grads = jax.value_and_grad(loss_and_state, has_aux=True)(trained, others, a, b)
        trained, held = optimizer.stateless_apply(held, grads, trained)
        return loss, trained, others, held

    trained, others, held = (
        [v.value for v in vs] for vs in (model.trainable_variables, model.non_trainable_variables, optimizer.variables)
    )
    losses = []
    for k in range(STEPS):
        loss, trained, others, held = step(trained, others, held, x[k * B :][:B], y[k * B :][:B])
        losses.append(float(loss))
    for variable, value in zip(model.trainable_variables, trained, strict=True):
        variable.assign(value)
    return result(model, losses=losses)


def run(case, policy, seed=None):
    keras.backend.clear_session()
    made = globals()[case]
    if policy == "plain":
        return {"script": made()}
    chosen = None if policy == "as-is" else Policy.parse(policy)
    try:
        with training(chosen, seed=seed, observe=None) as trained:
            elements = trained.change_models(ModelChanges(counts_inputs=True))
            trained.stop_after(StepLimit(steps=3 if case == "stopped" else None, seconds=None))
            script = {}
            with suppress(StopScript):
                script = made()
            trained.close_update()
    except MezzoError as error:
        return {"error": f"{type(error).__name__}: {error.message}"}
    effective, memory = trained.effective(), trained.memory()
    return {
        "script": script,
        "steps": trained.steps().model_dump(mode="json"),
        "flops": effective.flops_by_format,
        "counted_on_step": effective.counted_on_step,
        "left_alone": [f"{r.what} {r.value}: {r.reason}" for r in effective.left_alone],
        "memory": memory.model_dump(),
        "framework": trained.framework,
        "input_elements": elements(),
    }


if __name__ == "__main__":
    for line in sys.stdin:
        case, policy, seed = json.loads(line)
        print(json.dumps(run(case, policy, seed)), flush=True)
