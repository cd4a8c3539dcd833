"""A loop in Paddle: clipping, a schedule that steps with each update, and validation."""

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import nn

paddle.seed(0)
draw = np.random.RandomState(0)
inputs, labels = draw.randn(64, 8).astype("float32"), draw.randint(0, 3, 64)
model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1D(16), nn.ReLU(), nn.Linear(16, 3))
schedule = paddle.optimizer.lr.StepDecay(0.05, step_size=3)
optimizer = paddle.optimizer.Adam(schedule, parameters=model.parameters())
data = paddle.io.TensorDataset([paddle.to_tensor(inputs), paddle.to_tensor(labels)])
for epoch in range(2):
    model.train()
    for x, y in paddle.io.DataLoader(data, batch_size=16):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.clear_grad()
        schedule.step()
    model.eval()
    with paddle.no_grad():
        right = (model(paddle.to_tensor(inputs)).argmax(1) == paddle.to_tensor(labels)).sum()
    print("right", int(right))
