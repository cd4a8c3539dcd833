"""A loop of the script's own in TensorFlow, in a tf.function."""

import numpy as np
import tensorflow as tf

tf.keras.utils.set_random_seed(0)
model = tf.keras.Sequential(
    [tf.keras.Input((8,)), tf.keras.layers.Dense(16, "relu"), tf.keras.layers.Dense(3, dtype="float32")]
)
optimizer = tf.keras.optimizers.Adam(1e-2)
loss_object = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)


@tf.function
def train_step(x, y):
    with tf.GradientTape() as tape:
        predictions = model(x, training=True)
        loss = loss_object(y, predictions)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    return loss


draw = np.random.RandomState(0)
data = tf.data.Dataset.from_tensor_slices((draw.randn(64, 8).astype("float32"), draw.randint(0, 3, 64))).batch(16)
for x, y in data:
    train_step(x, y)
