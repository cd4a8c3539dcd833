"""Keras' fit, on the backend that KERAS_BACKEND names, with BackupAndRestore."""

import sys

import keras
from digits_data import BATCH_SIZE, EPOCHS, digest, digits

keras.utils.set_random_seed(0)
images, labels = digits()
model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(128, activation="relu"), keras.layers.Dense(10)])
model.compile(
    keras.optimizers.AdamW(3e-3), keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"]
)
backup = keras.callbacks.BackupAndRestore(sys.argv[1], delete_checkpoint=False)
model.fit(images, labels, BATCH_SIZE, EPOCHS, verbose=0, shuffle=False, callbacks=[backup])
loss, accuracy = model.evaluate(images, labels, verbose=0)
print(f"loss {loss:.4f}  acc {accuracy:.4f}")
print("weights", digest(model.get_weights()))
