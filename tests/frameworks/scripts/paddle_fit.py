"""Train by paddle.Model with its own mixed precision, and print the accuracy."""

import numpy as np
import paddle
from paddle import nn

paddle.seed(0)
draw = np.random.default_rng(0)
labels = draw.integers(0, 3, 96)
inputs = (draw.standard_normal((96, 6)) + 2 * labels[:, None]).astype("float32")
data = paddle.io.TensorDataset([paddle.to_tensor(inputs), paddle.to_tensor(labels)])
model = paddle.Model(nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3)))
optimizer = paddle.optimizer.Adam(0.02, parameters=model.parameters())
model.prepare(optimizer, nn.CrossEntropyLoss(), paddle.metric.Accuracy(), amp_configs="O1")
model.fit(data, batch_size=16, epochs=4, verbose=0)
print(f"acc {model.evaluate(data, verbose=0)['acc']:.4f}")
