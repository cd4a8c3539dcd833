"""A GPU made of fake tensors: sessions run on ``cuda:0`` and ``cuda:1`` without a device, and every operation is recorded.

Torch's fake tensors have shapes, formats, devices and memory, but no values. So what an operation computes is not tested here; where
it runs, what it allocates and whether the host waits is. Kernels are a stand-in that is given its tensors and does nothing, backward
passes give every parameter an empty gradient: autograd has no thread for a device that is not there.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mezzo import devices
from mezzo.engine import arguments, captured_step, session
from mezzo.engine.casts import casting
from mezzo.engine.gradients import all_parameters
from mezzo.engine.kernels import reference
from mezzo.engine.optimizers import one_pass

READS = ("_local_scalar_dense", "equal", "nonzero", "is_nonzero", "item")
"""Operations whose result the host waits for."""
_ACROSS = ("_to_copy", "copy_")
"""Operations that bring a tensor from one device to another."""


class Event:
    """Stands for ``torch.cuda.Event``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def record(self, *args: Any) -> None: ...

    def synchronize(self) -> None:
        raise AssertionError("the host waits for an event")


class Operations(TorchDispatchMode):
    """Record every operation; collect host reads, transfers that wait, and operations on tensors of several devices."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.reads: list[str] = []
        self.mixed: list[str] = []
        self.transfers: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        outputs = func(*args, **kwargs)
        name = func._schema.name.split("::")[1]
        self.names.append(name)
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        made = [t for t in tree_leaves(outputs) if isinstance(t, Tensor)]
        # A number of no dimensions may come from the CPU: it goes along as an argument of the launch.
        placed = {str(t.device) for t in given if t.dim() or t.device.type != "cpu"}
        where = {str(t.device) for t in (*given, *made)}
        if name in READS and any(t.device.type != "cpu" for t in given):
            self.reads.append(name)
        elif name in _ACROSS and len(where) > 1:
            waits = not (kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2]))
            self.transfers.append(f"{name} {' '.join(sorted(where))}{' waits' if waits else ''}")
        elif len(placed) > 1:
            self.mixed.append(f"{name}: {', '.join(sorted(placed))}")
        return outputs


class DeviceBytes(TorchDispatchMode):
    """Count bytes of CUDA tensors that are made inside: those that live now, and the most that lived at once."""

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    @property
    def live(self) -> int:
        return sum(size for reference, size in self._known.values() if not reference.expired())

    def _note(self, tensors: Any, *, new: bool) -> None:
        for tensor in tree_leaves(tensors):
            if isinstance(tensor, Tensor) and tensor.device.type == "cuda":
                storage = tensor.untyped_storage()
                known = self._known.get(storage._cdata)
                if known is None or known[0].expired():
                    self._known[storage._cdata] = StorageWeakRef(storage), storage.nbytes() if new else 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._note((args, kwargs), new=False)  # what an operation is given and nobody counted was there before
        outputs = func(*args, **(kwargs or {}))
        self._note(outputs, new=True)
        self.peak = max(self.peak, self.live)
        return outputs


def _kernels() -> types.ModuleType:
    made = types.ModuleType("kernels of a GPU that is not there")
    made.sum_of_squares = reference.sum_of_squares  # type: ignore[attr-defined]
    made.adamw = made.sgd = lambda batch, settings, factor, found_inf: None  # type: ignore[attr-defined]
    return made


@torch.no_grad()
def _gradients(self: session.Session, loss: Tensor, share: float, *, loss_id: int = 0, **_: Any) -> None:
    self.scales[loss_id].scale(loss if share == 1.0 else loss * share)
    for parameter in all_parameters(self.models, self.optimizers):
        fresh = torch.empty_like(parameter)
        parameter.grad = fresh if parameter.grad is None else parameter.grad + fresh


@contextmanager
def fake_gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let sessions inside run on fake H100s."""
    h100 = devices.Device(kind="cuda", name="H100", capability=(9, 0))
    cpu = devices.Device(kind="cpu", name="cpu")
    kernels, zeros, numpy = _kernels(), torch.zeros, Tensor.numpy
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: None)
    monkeypatch.setattr(torch, "zeros", lambda *args, pin_memory=False, **kwargs: zeros(*args, **kwargs))
    monkeypatch.setattr(Tensor, "numpy", lambda t: np.zeros(()) if isinstance(t, FakeTensor) else numpy(t))
    monkeypatch.setattr(session.Session, "_differentiate", _gradients)
    for module in (casting, captured_step, one_pass, arguments, session):
        if hasattr(module, "this_device"):
            monkeypatch.setattr(module, "this_device", lambda kind: h100 if kind == "cuda" else cpu)
        if hasattr(module, "choose"):
            monkeypatch.setattr(module, "choose", lambda kind: (kernels, "fake"))
    # Below autograd, which on torch's CPU build has no streams for such tensors; its own ``copy_`` looks for the device first.
    monkeypatch.setattr(
        Tensor, "copy_", lambda to, source, non_blocking=False: torch.ops.aten.copy_(to, source, non_blocking)
    )
    with FakeTensorMode(allow_non_fake_inputs=True), torch._C._AutoDispatchBelowAutograd():
        yield


class Linear(nn.Module):
    """A linear layer whose weight begins as memory: fake tensors draw no random numbers."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool = True, device: str = "cuda:0") -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, device=device))
        self.bias = nn.Parameter(torch.empty(outputs, device=device)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias)


def step(one: session.Session, device: str = "cuda:0") -> None:
    """Run one micro-batch without a forward pass: torch's CPU build cannot record one for a GPU."""
    one.step(torch.empty((), device=device, requires_grad=True))
