"""Keras on the torch backend."""

import os

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras
import numpy as np

keras.utils.set_random_seed(0)
model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(2)])
model.compile(optimizer=keras.optimizers.SGD(0.1), loss="mse")
inputs, targets = np.random.randn(32, 6), np.random.randn(32, 2)
model.fit(inputs, targets, batch_size=8, epochs=2, verbose=0)
