"""Train a network one of whose layers is given values beyond FP16 from the sixth step on."""

import paddle
from paddle import nn

paddle.seed(0)


class Net(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.big, self.head = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 1)
        self.num_calls = 0

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        hidden = paddle.tanh(self.first(x))
        self.num_calls += 1
        if self.num_calls < 6:
            return self.head(self.big(hidden))
        return self.head(self.big(3e5 * paddle.sign(hidden)) * 1e-6)


net = Net()
optimizer = paddle.optimizer.SGD(0.01, parameters=net.parameters())
x = paddle.randn([32, 8])
for step in range(12):
    loss = ((net(x) - x.sum(axis=1, keepdim=True)) ** 2).mean()
    loss.backward()
    optimizer.step()
    optimizer.clear_grad()
    print(f"step {step + 1} loss {float(loss):.4f}")
