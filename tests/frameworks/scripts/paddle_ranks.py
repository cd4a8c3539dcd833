"""Train with paddle.DataParallel in the processes that a launcher, or with ``spawn`` the script itself, started."""

import sys

import numpy as np
import paddle
import paddle.distributed as dist
from paddle import nn


def train(overflow_at: int) -> None:
    """Train ten steps on data of this process's own; in process 1 the loss of one step is infinite."""
    dist.init_parallel_env()
    rank = dist.get_rank()
    paddle.seed(0)
    model = paddle.DataParallel(nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3)))
    optimizer = paddle.optimizer.AdamW(0.05, parameters=model.parameters())
    draw = np.random.RandomState(1 + rank)
    for step in range(10):
        x, y = paddle.to_tensor(draw.randn(8, 6).astype("float32")), paddle.to_tensor(draw.randint(0, 3, 8))
        with paddle.amp.auto_cast():
            loss = nn.functional.cross_entropy(model(x), y)
        if step == overflow_at and rank == 1:
            loss = loss * float("inf")
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()


if __name__ == "__main__":
    if sys.argv[1] == "spawn":
        dist.spawn(train, args=(4,), nprocs=2, backend="gloo")
    else:
        train(int(sys.argv[1]))
