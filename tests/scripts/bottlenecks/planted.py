"""Ten trainings with one planted bottleneck each, and five healthy ones, by name in the first argument."""

import sys
import threading
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

NAME, SECONDS = sys.argv[1], float(sys.argv[2]) if len(sys.argv) > 2 else 1.5
torch.manual_seed(0)


class Slow(Dataset):
    """Samples that take a while, asleep or computing."""

    def __init__(self, seconds, width, *, computing=False):
        self.seconds, self.width, self.computing = seconds, width, computing

    def __len__(self):
        return 40

    def __getitem__(self, index):
        if self.computing:
            until = time.thread_time() + self.seconds
            while time.thread_time() < until:
                pass
        else:
            time.sleep(self.seconds)
        return torch.ones(self.width)


def until_over(make):
    """Yield batches, epoch after epoch, until the time is over."""
    end = time.thread_time() + SECONDS, time.perf_counter() + 12 * SECONDS, time.perf_counter() + SECONDS
    times = []
    while True:
        for batch in make():
            yield batch
            now = time.perf_counter()
            times.append(now)
            judged = (
                now - times[len(times) // 10]
            )  # the first tenth is left out of the verdict: a machine may stall there
            if (
                len(times) >= 12
                and judged > SECONDS / 2
                and now > end[2]
                and (time.thread_time() > end[0] / 2 or now > end[1])
            ):
                return


def train(model, batches, *, optimizer=None, before_step=lambda: None, loss_of=lambda y: y.square().mean()):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=1e-6)
    for batch in batches:
        optimizer.zero_grad()
        loss_of(model(batch)).backward()
        before_step()
        optimizer.step()


def same(*shape):
    """Return a maker of endless equal batches."""
    batch = torch.ones(shape)
    return lambda: iter(lambda: batch, None)


def products(width=512, layers=4):
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)])


class Wide(nn.Module):
    """Element-wise operations on tensors larger than caches."""

    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x):
        y = x * self.weight
        for _ in range(3):
            y = y + x
        return y


def wait_for_lock():
    ready = threading.Event()
    threading.Timer(0.03, ready.set).start()
    ready.wait()


class Loop(nn.Module):
    """A recurrent model of tiny operations, step by step in Python."""

    def __init__(self):
        super().__init__()
        self.cell = nn.Linear(8, 8)

    def forward(self, x):
        for _ in range(100):
            x = torch.tanh(self.cell(x))
        return x


def late_barrier():
    if dist.get_rank() != 0:
        time.sleep(0.03)
    dist.barrier()


if NAME == "slow_dataset":
    train(products(64), until_over(lambda: DataLoader(Slow(0.01, 64), batch_size=2)))
elif NAME == "slow_workers":
    loader = DataLoader(Slow(0.02, 64), batch_size=2, num_workers=1, persistent_workers=True)
    train(products(64), until_over(lambda: loader))
elif NAME == "computing_dataset":
    train(products(64), until_over(lambda: DataLoader(Slow(0.005, 64, computing=True), batch_size=4)))
elif NAME == "tiny_layers":
    train(nn.Sequential(*[nn.Linear(4, 4) for _ in range(40)]), until_over(same(2, 4)))
elif NAME == "loop_in_python":
    train(Loop(), until_over(same(2, 8)))
elif NAME == "elementwise":
    train(Wide(1 << 22), until_over(same(1 << 22)))
elif NAME == "large_optimizer":
    model = nn.Embedding(120_000, 64)
    train(
        model, until_over(lambda: iter(lambda: torch.arange(8), None)), optimizer=torch.optim.Adam(model.parameters())
    )
elif NAME == "lock":
    train(products(64), until_over(same(8, 64)), before_step=wait_for_lock)
elif NAME == "sleep":
    train(products(64), until_over(same(8, 64)), before_step=lambda: time.sleep(0.03))
elif NAME == "communication":
    dist.init_process_group("gloo")
    train(products(64), [torch.ones(8, 64)] * 40, before_step=late_barrier)
    dist.destroy_process_group()
elif NAME == "healthy_products":
    train(products(), until_over(same(256, 512)))
elif NAME == "healthy_convolutions":
    model = nn.Sequential(nn.Conv2d(32, 64, 3), nn.ReLU(), nn.Conv2d(64, 64, 3))
    train(model, until_over(same(8, 32, 32, 32)))
elif NAME == "healthy_loader":
    data = TensorDataset(torch.ones(1024, 512))
    model = nn.Sequential(*products())
    train(model, (x for (x,) in until_over(lambda: DataLoader(data, batch_size=256))))
elif NAME == "healthy_workers":
    data = TensorDataset(torch.ones(4096, 512))
    loader = DataLoader(data, batch_size=256, num_workers=1, persistent_workers=True)
    train(products(), (x for (x,) in until_over(lambda: loader)))
elif NAME == "healthy_adam":
    model = products(768, 2)
    train(model, until_over(same(1024, 768)), optimizer=torch.optim.Adam(model.parameters()))
else:
    sys.exit(f"{NAME} is not one of these trainings")
