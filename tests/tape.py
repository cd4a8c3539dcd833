"""A stand-in for CUDA graphs on a CPU: what a capture enqueues is recorded operation by operation, and replayed in place.

Like a graph it replays into the same memory, leaves no trace of the capture itself, and draws new random numbers in every replay. It
refuses what a capture refuses: reading a value, sending one from the host, pinning memory, the generator's state. Before a replay
all memory of the graphs' pool is overwritten: what a step needs from a replay before must have been allocated outside. Kernel
launches are recorded too: Triton's interpreter runs them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

READS = {"_local_scalar_dense", "equal", "nonzero", "masked_select", "_unique2", "unique_dim", "bincount"}
"""Operations whose result, or its size, the host waits for."""
TRANSFERS = {"lift_fresh", "_pin_memory"}
"""What a tensor of Python numbers on a GPU, and a copy of a host's tensor to it, take."""
NOT_PERMITTED = "CUDA error: operation not permitted when stream is capturing"


def refuse_in_a_capture(function: Callable[..., Any], message: str) -> Callable[..., Any]:
    """Return ``function`` as it is outside of captures; inside, it raises."""

    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        if Tape.current is not None:
            raise RuntimeError(message)
        return function(*args, **kwargs)

    return guarded


def refuse_an_old_interpreter() -> None:
    """Skip a test under an interpreter that cannot run loops: Triton's before 3.7 makes numbers of arrays, which NumPy 2.5 refuses."""
    import numpy
    import triton

    def version(module: Any) -> tuple[int, ...]:
        return tuple(map(int, module.__version__.split(".")[:2]))

    if version(triton) < (3, 7) and version(numpy) >= (2, 5):
        pytest.skip(f"Triton {triton.__version__}'s interpreter does not run with NumPy {numpy.__version__}")


class Tape(TorchDispatchMode):
    current: Tape | None = None

    def __init__(self, pool: list[Tensor]) -> None:
        super().__init__()
        self.entries: list[Callable[[], None]] = []
        self._pool = pool

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.split("::")[1]
        if name in READS or (name == "index" and any(i is not None and i.dtype is torch.bool for i in args[1])):
            raise RuntimeError(f"{NOT_PERMITTED}: {func}")
        if name in TRANSFERS:
            raise RuntimeError(f"Cannot copy between CPU and CUDA tensors during CUDA graph capture: {func}")
        outputs = func(*args, **kwargs)
        returned = [r.alias_info for r in func._schema.returns]
        view = any(a is not None and not a.is_write for a in returned)
        if not view:  # a view of memory that stays needs no replay
            in_place = any(a is not None for a in returned) or not returned
            self.entries.append(functools.partial(repeat, func, args, kwargs, None if in_place else outputs))
            if not in_place:
                self._pool += [t for t in pytree.tree_leaves(outputs) if isinstance(t, Tensor)]
        return outputs

    def replay(self) -> None:
        with torch.no_grad():
            for tensor in self._pool:
                torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).fill_(0xFF)  # NaN, -1, True
            for entry in self.entries:
                entry()


def repeat(func: Any, args: Any, kwargs: Any, outputs: Any) -> None:
    fresh = func(*args, **kwargs)
    if outputs is not None:
        for old, new in zip(pytree.tree_leaves(outputs), pytree.tree_leaves(fresh), strict=True):
            if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                old.copy_(new)


class Kernel:
    """A Triton kernel whose launches go onto the tape, too."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: Any) -> Any:
        def launch(*args: Any, **kwargs: Any) -> None:
            run = functools.partial(self.kernel[grid], *args, **kwargs)
            if Tape.current is None:
                run()
            else:  # not run: its table is sent after the capture
                Tape.current.entries.append(run)

        return launch


class TapeGraphs:
    """What ``mezzo.engine.captured_step.CudaGraphs`` is for CUDA."""

    def __init__(self, everything: Callable[[], list[Tensor]]) -> None:
        self._everything = everything
        self._pool: list[Tensor] = []

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        state = torch.get_rng_state()
        yield
        torch.set_rng_state(state)

    def capture(self, run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        state, places = torch.get_rng_state(), self._everything()
        saved = [t.detach().clone() for t in places]
        tape = Tape(self._pool)
        Tape.current = tape
        try:
            with tape:
                outputs = run()
        finally:
            Tape.current = None
        with torch.no_grad():
            for place, value in zip(places, saved, strict=True):
                place.copy_(value)
        torch.set_rng_state(state)
        return tape.replay, outputs
