"""A model with a train_step of its own, as in the guide."""

import keras
import numpy as np
import tensorflow as tf


class CustomModel(keras.Model):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=y_pred)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        for metric in self.metrics:
            metric.update_state(loss) if metric.name == "loss" else metric.update_state(y, y_pred)
        return {m.name: m.result() for m in self.metrics}


keras.utils.set_random_seed(0)
inputs = keras.Input((8,))
model = CustomModel(inputs, keras.layers.Dense(1)(keras.layers.Dense(16, "tanh")(inputs)))
model.compile(optimizer="adam", loss="mse")
draw = np.random.RandomState(0)
model.fit(draw.randn(64, 8), draw.randn(64, 1), batch_size=16, epochs=2, verbose=0)
