"""Audit a small Keras network on TensorFlow under each policy given, and once eagerly; then train it with TensorFlow's own checks.

Prints one JSON line for each.
"""

# ruff: noqa: ANN001, ANN201, ANN204
import json
import sys
from contextlib import suppress

import keras
import numpy as np
import tensorflow as tf

from mezzo.errors import ScriptError
from mezzo.launch.keras import training
from mezzo.measure.environment import environment_without_torch
from mezzo.observe.settings import AuditSettings, StopScript
from mezzo.policy import Policy
from mezzo.records import RunRecord


class Block(keras.layers.Layer):
    """Calls one layer twice."""

    def __init__(self):
        super().__init__(name="block")
        self.inner = keras.layers.Dense(8, activation="relu", name="inner")

    def call(self, x):
        return self.inner(x) + self.inner(x)


def fit(*, eagerly):
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Conv2D(4, 3, name="conv"), keras.layers.Flatten(), Block()]
    head = keras.layers.Dense(1, name="head", dtype="float32")
    net = keras.Sequential([keras.Input((8, 8, 1)), *layers, head], name="net")
    net.compile("adam", "mse", run_eagerly=eagerly)
    net.fit(np.ones((64, 8, 8, 1)), np.ones((64, 1)), batch_size=8, verbose=0)


def audited(text, *, eagerly=False):
    keras.backend.clear_session()
    policy = None if text == "as-is" else Policy.parse(text)
    error = None
    with training(policy, seed=None, observe=AuditSettings(steps=(2,))) as told:
        try:
            with suppress(StopScript):
                fit(eagerly=eagerly)
        except ScriptError as refused:
            error = refused.message
        told.close_update()
    run = RunRecord(
        command=["mezzo"],
        script="train.py",
        script_sha256="",
        framework=told.framework,
        policy=text,
        environment=environment_without_torch(),
        steps=told.steps(),
        effective=told.effective(),
        exit_code=0,
        error=error,
    )
    return told.observer.record(run)


for text in sys.argv[1:]:
    print(audited(text).model_dump_json(), flush=True)
print(json.dumps(audited("as-is", eagerly=True).run.error), flush=True)
tf.debugging.enable_check_numerics()
with training(Policy.parse("fp32"), seed=None, observe=None) as told:
    fit(eagerly=False)
    told.close_update()
print(json.dumps(len(told.steps())), flush=True)
