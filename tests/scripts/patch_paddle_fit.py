"""Paddle's own training loop."""

import numpy as np
import paddle

paddle.seed(0)
draw = np.random.RandomState(0)
data = paddle.io.TensorDataset(
    [paddle.to_tensor(draw.randn(32, 8).astype("float32")), paddle.to_tensor(draw.randint(0, 3, (32, 1)))]
)
network = paddle.nn.Sequential(paddle.nn.Linear(8, 16), paddle.nn.ReLU(), paddle.nn.Linear(16, 3))
model = paddle.Model(network)
model.prepare(paddle.optimizer.SGD(0.05, parameters=model.parameters()), paddle.nn.CrossEntropyLoss())
model.fit(data, batch_size=8, epochs=1, shuffle=False, verbose=0)
