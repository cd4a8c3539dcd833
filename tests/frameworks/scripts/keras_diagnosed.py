"""Diagnose Keras trainings on TensorFlow with planted faults, and their healthy twins; print one record a line.

Run as ``KERAS_BACKEND=tensorflow python keras_diagnosed.py``; a word of the command line chooses the cases whose names contain it.
"""

# ruff: noqa: ANN001, ANN002, ANN003, ANN201, ANN202, ANN204

import json
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from mezzo.commands.diagnose.plan import diagnose_script
from mezzo.launch.keras import training
from mezzo.launch.request import Request
from mezzo.measure.environment import environment_without_torch
from mezzo.observe.settings import StopScript
from mezzo.policy import Policy
from mezzo.records import RunRecord

tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
)
X = np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32)
Y = X.sum(axis=1, keepdims=True)
STEPS = 8


class Planted(keras.Layer):
    """A layer with what a case plants, from a step on; ``x`` passes as it is before."""

    def __init__(self, does, first=1, **kwargs):
        super().__init__(name="planted", **kwargs)
        self.does, self.first = does, first
        self.seen = self.add_weight(name="seen", shape=(), dtype="int32", trainable=False, initializer="zeros")

    def call(self, x):
        self.seen.assign_add(1)
        return tf.cond(self.seen.value >= self.first, lambda: self.does(x), lambda: x)


def net(*planted):
    layers = [keras.layers.Dense(16, name="first"), *planted, keras.layers.Dense(1, name="head")]
    return keras.Sequential([keras.Input((8,)), *layers], name="net")


def fit(does=None, *, first=1, x=X, y=Y, model=None, optimizer=None, loss="mse", jit_compile=False):
    model = model or net(*([] if does is None else [Planted(does, first)]))
    model.compile(optimizer or keras.optimizers.SGD(1e-3), loss, jit_compile=jit_compile)
    model.fit(x, y, batch_size=8, epochs=1, shuffle=False, verbose=0)


class OwnStep(keras.Model):
    """A model with a step function of its own, whose loss a case plants."""

    def __init__(self, loss):
        super().__init__(name="own")
        self.body, self.planted = net(), loss

    def call(self, x):
        return self.body(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.planted(self(x, training=True), y)
            scaled = self.optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


def validated():
    """Train with a validation after each epoch; its functions are traced, and its values are NaN."""
    traced = []

    def seen(x):
        traced.append(tf.executing_eagerly())
        return x

    model = net(Planted(seen, 1))
    model.compile(keras.optimizers.SGD(1e-3), "mse")
    model.fit(X, Y, batch_size=8, verbose=0, shuffle=False, validation_data=(X * np.nan, Y))
    assert set(traced) == {True, False}


def own_step(loss):
    fit(model=OwnStep(loss))


def own_loop(loss, *, x=X, optimizer=None, model=None):
    model, optimizer = model or net(), optimizer or keras.optimizers.SGD(1e-3)

    @tf.function(jit_compile=True)
    def step(inputs, targets):
        assert tf.is_tensor(inputs)
        with tf.GradientTape() as tape:
            value = loss(model(inputs), targets)
        gradients = tape.gradient(value, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        return value

    for k in range(STEPS):
        step(x[8 * k : 8 * k + 8], Y[8 * k : 8 * k + 8])


def squares(predicted, y):
    return tf.reduce_mean(tf.square(tf.cast(predicted, tf.float32) - y))


def overflowing(predicted, y):
    return tf.cast(tf.reduce_mean(tf.square(predicted * 3e3 + 3e3)), tf.float32) * 1e-6


def overflowing_in_fp32(predicted, y):
    return tf.reduce_mean(tf.square(tf.cast(predicted, tf.float32) * 3e3 + 3e3)) * 1e-6


def with_nan(step):
    x = X.copy()
    x[8 * step - 8 + 3, 2] = np.nan
    return x


def masked(x, *, rows):
    mask = tf.concat([tf.ones((rows, 16), tf.bool), tf.range(16)[None, :] + tf.zeros((8 - rows, 1), tf.int32) > 3], 0)
    return tf.nn.softmax(tf.where(mask, tf.constant(-np.inf, x.dtype), x)) * x


def normalized(x, *, eps):
    still = tf.stop_gradient(x)
    return x * (still - still) / (tf.reduce_sum(tf.abs(still - still), -1, keepdims=True) + tf.cast(eps, x.dtype))


def guarded(x, *, inside):
    positive = x > 0
    return tf.where(positive, tf.math.log(inside(x * tf.cast(positive, x.dtype))), tf.zeros_like(x))


def own_mixed(factor):
    keras.config.set_dtype_policy("mixed_float16")
    fit(lambda x: tf.tanh(x * tf.cast(factor, x.dtype)), first=4)


def two_optimizers():
    """Train two models in turn, as a GAN does; the second one's loss has no finite gradient in step 6, its third update."""
    models = [net(), net()]
    optimizers = [keras.optimizers.Adam(1e-3), keras.optimizers.Adam(1e-3)]
    for k in range(STEPS):
        with tf.GradientTape() as tape:
            predicted = models[k % 2](X[:8])
            loss = squares(predicted, Y[:8]) + (tf.reduce_sum(tf.sqrt(predicted * 0)) if k == 5 else 0.0)
        optimizers[k % 2].apply(
            tape.gradient(loss, models[k % 2].trainable_variables), models[k % 2].trainable_variables
        )


def images():
    layers = [
        keras.layers.Conv2D(4, 3, name="conv"),
        keras.layers.BatchNormalization(name="norm"),
        keras.layers.MaxPooling2D(name="pool"),
        keras.layers.Dropout(0.2, name="drop"),
        keras.layers.Flatten(name="flat"),
        keras.layers.Dense(3, name="head", activation="softmax"),
    ]
    x, y = np.random.default_rng(0).normal(size=(64, 8, 8, 1)), np.arange(64) % 3
    model = keras.Sequential([keras.Input((8, 8, 1)), *layers], name="images")
    fit(x=x, y=y, model=model, loss="sparse_categorical_crossentropy", optimizer=keras.optimizers.AdamW(1e-3))


def attention():
    words = keras.Input((6,), dtype="int32")
    x = keras.layers.Embedding(20, 8, name="table")(words)
    x = keras.layers.MultiHeadAttention(2, 4, name="attention")(x, x, use_causal_mask=True)
    x = keras.layers.Dense(20, name="head")(keras.layers.LayerNormalization(name="norm")(x))
    tokens = np.random.default_rng(0).integers(0, 20, (64, 6))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    fit(
        x=tokens,
        y=tokens,
        model=keras.Model(words, x, name="words"),
        loss=loss,
        optimizer=keras.optimizers.Adam(1e-3, clipnorm=1.0),
    )


def mirrored(*devices):
    with tf.distribute.MirroredStrategy(devices).scope():
        model = net(Planted(lambda x: tf.math.log(x * 0), 2))
        model.compile("sgd", "mse")
    model.fit(X, Y, batch_size=8, verbose=0)


def embedded():
    layers = [keras.layers.Embedding(20, 8, name="table"), keras.layers.GRU(8, name="gru"), keras.layers.Dense(1)]
    tokens = np.random.default_rng(0).integers(0, 20, (64, 6))
    fit(x=tokens, model=keras.Sequential([keras.Input((6,)), *layers], name="words"))


TRAININGS = {
    "log of 0": ("bf16", lambda: fit(lambda x: tf.math.log(x * 0), first=3)),
    "log of 1": ("bf16", lambda: fit(lambda x: tf.math.log(x * 0 + 1), first=3)),
    "division by 0": ("fp32", lambda: own_loop(lambda p, y: squares(p / (p - p), y))),
    "division by 1": ("fp32", lambda: own_loop(lambda p, y: squares(p / (p - p + 1), y))),
    "root at 0": ("bf16", lambda: own_step(lambda p, y: squares(tf.sqrt(p * 0) + p, y))),
    "root at 1": ("bf16", lambda: own_step(lambda p, y: squares(tf.sqrt(p * 0 + 1) + p, y))),
    "product beyond FP16": ("fp16", lambda: fit(lambda x: x * 0 + 6e4, first=5, optimizer=keras.optimizers.SGD(0.0))),
    "product beyond FP16 in BF16": (
        "bf16",
        lambda: fit(lambda x: x * 0 + 6e4, first=5, optimizer=keras.optimizers.SGD(0.0)),
    ),
    "loss beyond FP16": ("fp16", lambda: own_loop(overflowing)),
    "loss in FP32": ("fp16", lambda: own_loop(overflowing_in_fp32)),
    "NaN in the data": ("fp16", lambda: fit(x=with_nan(4))),
    "NaN in data of an own loop": ("fp16", lambda: own_loop(squares, x=with_nan(6))),
    "sound data": ("fp16", lambda: fit()),
    "eps of 0": ("fp16", lambda: fit(lambda x: normalized(x, eps=1e-8), first=2)),
    "eps above 0": ("fp16", lambda: fit(lambda x: normalized(x, eps=1.0), first=2)),
    "learning rate too high": ("fp32", lambda: fit(optimizer=keras.optimizers.SGD(1e12))),
    "update of a weight": ("fp32", lambda: fit(optimizer=keras.optimizers.SGD(3e38))),
    "learning rate": ("fp32", lambda: fit(optimizer=keras.optimizers.SGD(1e-2))),
    "row all masked": ("fp16", lambda: fit(lambda x: masked(x, rows=1), first=2)),
    "masked by a large number": (
        "fp16",
        lambda: fit(lambda x: tf.nn.softmax(x + tf.cast(-1e9 * tf.cast(x > 0, tf.float32), x.dtype)) * x, first=2),
    ),
    "validation": ("bf16", validated),
    "images": ("fp16:init_scale=1024", images),
    "attention": ("fp16", attention),
    "masked": ("fp16", lambda: fit(lambda x: masked(x, rows=0), first=2)),
    "guarded outside": ("fp32", lambda: fit(lambda x: guarded(x, inside=lambda v: v), first=3)),
    "guarded inside": (
        "fp32",
        lambda: fit(lambda x: guarded(x, inside=lambda v: tf.where(v > 0, v, tf.ones_like(v))), first=3),
    ),
    "scale of 2 to the 24": ("fp16:loss_scale=static:init_scale=16777216", lambda: fit()),
    "scale that never settles": ("fp16:init_scale=16777216", lambda: fit()),
    "own loss scale": ("as-is", lambda: own_mixed(1e5)),
    "own loss scale that is right": ("as-is", lambda: own_mixed(1.0)),
    "embedding and GRU": ("fp16", embedded),
    "two optimizers": ("fp32", two_optimizers),
    "one replica": ("fp16", lambda: mirrored("CPU:0")),
    "replicas": ("fp32", lambda: mirrored("CPU:0", "CPU:1")),
    "own loop": ("fp16:init_scale=1048576", lambda: own_loop(squares)),
    "own step": ("fp16", lambda: own_step(squares)),
}


def child_of(train):
    def child(request, *, output=None):
        keras.backend.clear_session()
        keras.config.set_dtype_policy("float32")
        keras.utils.set_random_seed(0)
        error = None
        with training(request.policy, seed=None, observe=request.observe) as told:
            try:
                with suppress(StopScript):
                    train()
            except Exception as raised:
                error = f"{type(raised).__name__}: {raised}"
            told.close_update()
            run = RunRecord(
                command=["mezzo"],
                script="train.py",
                script_sha256="",
                framework=told.framework,
                policy="as-is" if request.policy is None else str(request.policy),
                environment=environment_without_torch(),
                steps=told.steps(),
                effective=told.effective(),
                exit_code=1 if error else 0,
                error=error,
            )
            if not told.observer.too_short():
                told.observer.record(run)
        return run

    return child


def diagnosed(policy, train):
    with tempfile.TemporaryDirectory() as folder:
        request = Request(
            target="train.py",
            kind="script",
            arguments=(),
            framework="keras",
            policy=None if policy == "as-is" else Policy.parse(policy),
            record_path=str(Path(folder, "record.json")),
            command=("mezzo",),
        )
        return diagnose_script(request, steps=STEPS, child=child_of(train))


for name, (policy, train) in TRAININGS.items():
    if not sys.argv[1:] or any(word in name for word in sys.argv[1:]):
        print(json.dumps([name, json.loads(diagnosed(policy, train).model_dump_json())]), flush=True)
