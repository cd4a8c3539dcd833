"""The guide's listing of Keras' mixed precision: a policy object in FP32, until the patch."""

# ruff: noqa: E401, I001
import sys

import numpy as np
import tensorflow as tf, keras
from keras import layers, mixed_precision

policy = mixed_precision.Policy("float32")
mixed_precision.set_global_policy(policy)
keras.utils.set_random_seed(0)
inputs = keras.Input(shape=(8,), name="digits")
x = layers.Dense(16, activation="relu", name="dense_1")(inputs)
x = layers.Dense(3, name="dense_logits")(x)
outputs = layers.Activation("softmax", dtype="float32", name="predictions")(x)
model = keras.Model(inputs=inputs, outputs=outputs)
model.compile(loss="sparse_categorical_crossentropy", optimizer=keras.optimizers.RMSprop(), metrics=["accuracy"])
draw = np.random.RandomState(0)
data = tf.data.Dataset.from_tensor_slices((draw.randn(64, 8).astype("float32"), draw.randint(0, 3, 64))).batch(16)
model.fit(data, epochs=2, verbose=0)
sys.stdout.flush()
