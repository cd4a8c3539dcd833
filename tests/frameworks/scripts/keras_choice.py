"""A script that chooses its backend itself, before it imports Keras."""

import os

os.environ["KERAS_BACKEND"] = "torch"

import keras
import numpy as np

model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile("sgd", loss="mse")
model.fit(np.ones((8, 4)), np.ones(8), batch_size=4, verbose=0)
print("backend", keras.backend.backend())
