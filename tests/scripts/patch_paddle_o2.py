"""The guide's listing of Paddle's own mixed precision at level O2."""

import paddle

paddle.seed(0)
model = paddle.nn.Sequential(paddle.nn.Linear(8, 16), paddle.nn.ReLU(), paddle.nn.Linear(16, 3))
optimizer = paddle.optimizer.SGD(learning_rate=0.05, parameters=model.parameters())
mse = paddle.nn.MSELoss()
scaler = paddle.amp.GradScaler(init_loss_scaling=1024)
model, optimizer = paddle.amp.decorate(models=model, optimizers=optimizer, level="O2")
for step in range(6):
    data, label = paddle.randn([16, 8]), paddle.randn([16, 3])
    with paddle.amp.auto_cast(level="O2"):
        loss = mse(model(data), label)
    scaled = scaler.scale(loss)
    scaled.backward()
    scaler.minimize(optimizer, scaled)
    optimizer.clear_grad()
