"""A script that knows Keras by TensorFlow's name for it, and sets TensorFlow's seed before."""

import numpy as np
import tensorflow as tf

tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()]
)  # refused once TensorFlow has begun to use its devices
tf.random.set_seed(1)
print("draw", float(tf.random.uniform([])))
model = tf.keras.Sequential([tf.keras.Input((4,)), tf.keras.layers.Dense(1)])
model.compile("sgd", loss="mse")
model.fit(np.ones((8, 4)), np.ones(8), batch_size=4, verbose=0)
