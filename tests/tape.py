"""A stand-in for CUDA graphs on a CPU: what a capture enqueues is taken down operation by operation, and replayed in place.

Like a graph it replays into the same memory, refuses to read a value while it captures, leaves no trace of the capture itself, and
draws new random numbers in every replay. Kernel launches are taken down too: Triton's interpreter runs them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

READS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default, torch.ops.aten.nonzero.default}


class Tape(TorchDispatchMode):
    current: Tape | None = None

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[Callable[[], None]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in READS:
            raise RuntimeError(f"operation not permitted when stream is capturing: {func}")
        outputs = func(*args, **kwargs)
        returned = [r.alias_info for r in func._schema.returns]
        view = any(a is not None and not a.is_write for a in returned)
        if not view:  # a view of memory that stays needs no replay
            in_place = any(a is not None for a in returned) or not returned
            self.entries.append(functools.partial(repeat, func, args, kwargs, None if in_place else outputs))
        return outputs

    def replay(self) -> None:
        with torch.no_grad():
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
    """What ``mezzo.engine.graphs.CudaGraphs`` is for CUDA."""

    def __init__(self, everything: Callable[[], list[Tensor]]) -> None:
        self._everything = everything

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        state = torch.get_rng_state()
        yield
        torch.set_rng_state(state)

    def capture(self, run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        state, places = torch.get_rng_state(), self._everything()
        saved = [t.detach().clone() for t in places]
        tape = Tape()
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
