"""Time how long a PyTorch script waits for its data loaders, and for other processes in torch.distributed."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.data.dataloader as loaders

from mezzo.launch.patches import Patches
from mezzo.measure.watch.verdict import Loader
from mezzo.measure.watch.waits import Waits

COLLECTIVES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "monitored_barrier",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "scatter_object_list",
    "send",
)
"""Functions of torch.distributed that wait for other processes. An asynchronous one waits in ``Work.wait``."""


class ScriptWaits:
    """The waits of one script."""

    def __init__(self) -> None:
        self.input, self.communication = Waits(), Waits()
        self.loader: Loader | None = None
        """The settings of the data loader that was iterated last; None if there is none."""
        self._replicas: list[weakref.ref[Any]] = []

    def install(self, patches: Patches) -> None:
        """Time waits until ``patches`` are undone."""
        patches.wrap(loaders._BaseDataLoaderIter, "__next__", self.input.timed)
        patches.wrap(loaders.DataLoader, "__iter__", self.input.timed)  # starts the workers
        patches.around(loaders.DataLoader, "__iter__", self._iterate)
        distributed: Any = torch.distributed
        if not distributed.is_available():
            return
        for name in COLLECTIVES:
            patches.wrap(distributed, name, self.communication.timed)
        patches.wrap(distributed.Work, "wait", self.communication.timed)
        patches.around(torch.nn.parallel.DistributedDataParallel, "__init__", self._replicate)

    def exchange_s(self) -> float:
        """Return the seconds per step in which DistributedDataParallel exchanged gradients while nothing else ran.

        It exchanges them in C++, where no call can be timed, and records the times of a few steps itself.
        """
        waited_ns = 0
        for reference in self._replicas:
            replica = reference()
            if replica is not None and replica.logger is not None:
                times = replica._get_ddp_logging_data()
                overlapped_ns = int(times.get("avg_backward_compute_comm_overlap_time", 0))
                waited_ns += max(int(times.get("avg_backward_comm_time", 0)) - overlapped_ns, 0)
        return waited_ns * 1e-9

    def _iterate(self, original: Callable[..., Any], loader: Any) -> Any:
        self.loader = Loader(
            num_workers=loader.num_workers,
            pin_memory=bool(loader.pin_memory),
            persistent_workers=bool(loader.persistent_workers),
        )
        return original(loader)

    def _replicate(self, original: Callable[..., Any], replica: Any, *args: Any, **kwargs: Any) -> None:
        with self.communication.paused():
            original(replica, *args, **kwargs)
        self._replicas.append(weakref.ref(replica))
