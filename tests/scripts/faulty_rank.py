"""A training in several processes with a fault: ``faulty_rank.py [WHAT RANK]``; each process writes the file ``step-RANK`` as it goes.

WHAT happens in the process of RANK, at the fifth of 12 steps unless its name says when; without it the training takes minutes. The file
``fault`` says when it happened.
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

what, where = [*sys.argv[1:], "", ""][:2]


def raises() -> None:
    raise ValueError("bad batch")


def kills(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


def fails_once() -> None:
    if not Path("failed").exists():
        Path("failed").touch()
        raise ValueError("the first attempt")


def fills_disk() -> None:
    with open("/dev/full", "w", encoding="utf-8") as file:
        file.write("weights")


FAULTS: dict[str, Callable[[], object]] = {
    "nothing": lambda: None,
    "raise before the group": raises,
    "hang before the group": lambda: time.sleep(1000),
    "raise": raises,
    "raise after the last step": raises,
    "fail once": fails_once,
    "sys.exit(0)": lambda: sys.exit(0),
    "sys.exit(3)": lambda: sys.exit(3),
    "os._exit(0)": lambda: os._exit(0),
    "os._exit(3)": lambda: os._exit(3),
    "killed": kills(signal.SIGKILL),
    "crash": kills(signal.SIGSEGV),
    "memory": lambda: torch.empty(1 << 60),
    "disk": fills_disk,
    "hang in forward": lambda: time.sleep(1000),
    "another collective": dist.barrier,
}


def fault_at(step: int) -> None:
    """``step`` 0 is before the group, 13 after the training."""
    at = 0 if "before" in what else 13 if "after" in what else 5
    if what and step == at and rank == int(where):
        Path("fault").touch()
        FAULTS[what]()


rank = int(os.environ["RANK"])
fault_at(0)
dist.init_process_group("gloo", timeout=timedelta(seconds=5))
model = nn.parallel.DistributedDataParallel(nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(1, 13 if what else 3000):
    loss = model(torch.randn(8, 8)).square().mean()
    fault_at(step)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    Path(f"step-{rank}").touch()
    time.sleep(0 if what else 0.1)
fault_at(13)
dist.destroy_process_group()
