"""Gradient accumulation in Paddle, in a function that is passed the optimizer; updates with minimize."""

import paddle as P
from paddle.nn import CrossEntropyLoss, Layer, Linear


class Net(Layer):
    def __init__(self):
        super().__init__()
        self.first, self.second = Linear(8, 16), Linear(16, 3)

    def forward(self, x):
        return self.second(P.tanh(self.first(x)))


def train(model, optimizer, steps):
    criterion = CrossEntropyLoss()
    for step in range(steps):
        x, y = P.randn([16, 8]), P.randint(0, 3, [16])
        loss = criterion(model(x), y) / 2
        loss.backward()
        if step % 2:
            optimizer.minimize(loss)
            optimizer.clear_gradients()


P.seed(0)
net = Net()
adam = P.optimizer.Adam(learning_rate=0.01, parameters=net.parameters())
train(net, adam, steps=8)
