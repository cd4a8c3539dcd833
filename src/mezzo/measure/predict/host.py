"""How long a step takes the host: Python, autograd and the launch of each kernel. An eager step takes no less.

The device computes while the host prepares the next operations, so the longer of the two counts. A step that the host bounds is as long on
every GPU with the same host; a captured step (a CUDA graph) launches its kernels at once and needs the host no more.

Limits: one rate stands for all operations of a forward or backward pass, and one for an update's, which have neither modules nor
autograd. Loaders, logging and reading a number from the device come on top.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import nn

from mezzo.gpus import Gpu
from mezzo.measure.predict.calibrate import is_here
from mezzo.measure.predict.tape import CostedOperation
from mezzo.measure.predict.training import record_training
from mezzo.records import Note

_UPDATE = 0.24
"""An operation of an update over one of a forward or backward pass: 3.1 and 13.1 us on one core, in BERT's layers with an AdamW that takes
one tensor after another."""
_REPEATS, _LAYERS, _WIDTH = 15, 8, 8


@dataclass(frozen=True, kw_only=True)
class Host:
    """The processor that drives a GPU."""

    operation_s: float
    """Of one operation of a forward or backward pass on a tape, with the views, casts and modules around it."""
    source: str

    @property
    def note(self) -> Note:
        """What it takes for an operation, and where that is from."""
        return Note(what="host", value=f"{self.operation_s * 1e6:.3g} us for each operation", reason=self.source)

    def seconds(self, operations: Sequence[CostedOperation]) -> float:
        """Return the seconds of a step of ``operations``."""
        updates = sum(op.phase == "optimizer" for op in operations)
        return self.operation_s * (len(operations) - updates + _UPDATE * updates)


SERVER = Host(
    operation_s=36e-6,
    source="a server with an H100: 34.7 ms for the 1,011 operations of BERT-base in BF16, batch 32 of 128 tokens",
)


def host_of(gpu: Gpu) -> Host:
    """Return what drives ``gpu``: this machine, measured, if it has such a GPU, else the server."""
    return _measured_once() if is_here(gpu) else SERVER


@cache
def _measured_once() -> Host:
    return measured()


class _Layer(nn.Module):
    """A layer of a transformer that computes next to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(_WIDTH), nn.LayerNorm(_WIDTH)
        self.joint, self.out = nn.Linear(_WIDTH, 3 * _WIDTH), nn.Linear(_WIDTH, _WIDTH)
        self.wide, self.narrow = nn.Linear(_WIDTH, _WIDTH), nn.Linear(_WIDTH, _WIDTH)
        self.drop, self.act = nn.Dropout(0.1), nn.GELU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.joint(self.first(x)).chunk(3, -1)
        scores = (query @ key.transpose(-1, -2) / 3).softmax(-1)
        x = x + self.drop(self.out(self.drop(scores) @ value))
        found: torch.Tensor = x + self.drop(self.narrow(self.act(self.wide(self.second(x)))))
        return found


def _transformer() -> nn.Module:
    return nn.Sequential(*(_Layer() for _ in range(_LAYERS)))


def measured() -> Host:
    """Return this machine's host, from the steps of a small transformer on the CPU; its arithmetic takes next to no time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        model, x = _transformer(), torch.ones(1, 4, _WIDTH)
        found = []
        for _ in range(_REPEATS):
            begin = time.perf_counter()
            model(x).sum().backward()
            found.append(time.perf_counter() - begin)
    finally:
        torch.set_num_threads(threads)
    tape = record_training(
        _transformer,
        lambda n: {"x": torch.ones(n, 4, _WIDTH)},
        lambda model, inputs: (model(inputs["x"]).sum(), None),
        batch=1,
        optimizer=torch.optim.SGD,
    )
    operations = [op for op in tape.operations if op.phase != "optimizer"]
    return Host(
        operation_s=min(found) / len(operations), source="this machine, one core, a small transformer on the CPU"
    )
