"""Watch a PyTorch script while it trains, in a thread that wakes ten times a second, and report at the end what held it back."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.data.dataloader as loaders

from mezzo.gpus import find_gpu
from mezzo.launch.patches import Patches
from mezzo.launch.torch.counted_step import CountedStep
from mezzo.launch.torch.state import TorchRun
from mezzo.measure.bottleneck import DeviceRates, Loader, RunMeasurements, bottleneck, cpu_rates, too_short
from mezzo.measure.environment import usable_cores
from mezzo.measure.host import GpuCounters, HostSamples, Waits, open_counters
from mezzo.records import Bottleneck, Effective, Note, Steps

POWER = "GPU power, W"
"""The only entry of ``Watch.shares`` that is not a share."""
UTILIZATION = "GPU"
_OF_GPU = (POWER, UTILIZATION)
_EVERY_S = 0.1
_GPU_EVERY = 10
"""Samples of the host between two of the GPU."""
_WARM_UP = 0.1
"""Share of the steps that is left out at the start."""


class Watch:
    """The measurements of one script."""

    def __init__(self, run: TorchRun, counted: CountedStep) -> None:
        self._run, self._counted = run, counted
        self.waits, self.host = ScriptWaits(), HostSamples()
        self._gpu: GpuCounters | str | None = None
        """The counters, or why there are none; None before the first sample."""
        self._over = threading.Event()
        self._began_s = time.perf_counter()

    def sample(self) -> None:
        """Sample until ``stop``; runs in a thread of its own."""
        taken = 0
        while not self._over.wait(_EVERY_S):
            self.host.take()
            if (
                taken % _GPU_EVERY == 0
                and self._run.precision.device_type == "cuda"
                and self._run.update.recorder.num_closed
            ):
                self._sample_gpu()
            taken += 1

    def stop(self) -> None:
        """End ``sample``."""
        self._over.set()

    def now(self) -> str:
        """Return the measurements so far, in a few words; waits of less than 1% are left out."""
        shares = [(name, share) for name, share in self.shares().items() if share >= 0.01 or name in _OF_GPU]
        return ", ".join(f"{share:.0f} W" if name == POWER else f"{name} {share:.0%}" for name, share in shares)

    def shares(self) -> dict[str, float]:
        """Return waits as shares of the time so far, and the latest counters of the GPU."""
        end_s = time.perf_counter()
        wall_s = max(end_s - self._began_s, 1e-9)
        shares = {"input": self.waits.input.total_s / wall_s}
        if len(self.waits.communication):
            shares["communication"] = self.waits.communication.total_s / wall_s
        host = self.host.shares(self._began_s, end_s)
        if host is not None:
            shares["thread asleep"] = host.slept
        if isinstance(self._gpu, GpuCounters) and self._gpu.samples:
            last = self._gpu.samples[-1]
            shares |= {} if last.utilization is None else {UTILIZATION: last.utilization}
            shares |= {} if last.power_w is None else {POWER: last.power_w}
        return shares

    def bottleneck(self, steps: Steps, effective: Effective) -> Bottleneck:
        """Return what held the script back, measured over the steps after the first tenth and the counted one."""
        on_gpu = self._run.precision.device_type == "cuda"
        clock = self._run.update.recorder.clock
        first = min(max(2, int(len(steps) * _WARM_UP)), len(steps))
        begin_s = clock.began_s + sum(steps.time_ms[:first]) / 1e3
        wall_s = sum(steps.time_ms[first:]) / 1e3
        end_s = begin_s + wall_s
        num_steps = len(steps) - first
        waits, host, gpu = self.waits, self.host.shares(begin_s, end_s), self._gpu
        missing: list[Note] = []
        try:
            exchanged_s = waits.exchange_s() * num_steps
        except RuntimeError as error:  # of DDP's own log
            exchanged_s = 0.0
            missing.append(Note(what="DDP's exchanges", value="not measured", reason=str(error).partition("\n")[0]))
        waited_s = waits.communication.between(begin_s, end_s) + exchanged_s
        operations = self._counted.operations()
        missing += self._missing(effective, has_host=host is not None)
        emulated = effective.emulated
        no_rates = emulated or not operations or too_short(num_steps, wall_s)
        return bottleneck(
            RunMeasurements(
                num_steps=num_steps,
                wall_s=wall_s,
                input_s=waits.input.between(begin_s, end_s) if len(waits.input) else None,
                communication_s=waited_s if len(waits.communication) or exchanged_s else None,
                idle_share=None if host is None else host.slept,
                preempted_share=0.0 if host is None else host.preempted,
                operations=[] if emulated else operations,
                rates=None if no_rates else self._rates(effective),
                on_gpu=on_gpu,
                compiled=self._counted.was_compiled,
                emulated=emulated,
                loader=waits.loader,
                num_cores=usable_cores(),
                sleeping_line=max(self.host.sleeping, key=self.host.sleeping.__getitem__, default=""),
                gpu=gpu.use() if isinstance(gpu, GpuCounters) else None,
                not_measured=missing,
            )
        )

    def _missing(self, effective: Effective, *, has_host: bool) -> list[Note]:
        missing = []
        if isinstance(self._gpu, str):
            missing.append(("GPU counters", self._gpu))
        if not has_host:
            missing.append(("sleep of the thread", "the run was too short to sample it"))
        if effective.emulated:
            why = "lower formats were emulated, so their times say nothing; watch the script as it is"
            missing.append(("operations", why))
        elif self._counted.was_compiled:
            missing.append(("operations", "compiled code's operations are not seen"))
        if not len(self.waits.input):
            missing.append(("input", "the script has no DataLoader in its training thread"))
        return [Note(what=what, value="not measured", reason=why) for what, why in missing]

    def _rates(self, effective: Effective) -> DeviceRates | None:
        if self._run.precision.device_type != "cuda":
            return cpu_rates(torch.get_num_threads()) if self._run.precision.device_type in (None, "cpu") else None
        gpu = find_gpu(torch.cuda.get_device_name())
        if gpu is None:
            return None
        form = max(effective.flops_by_format, key=lambda f: effective.flops_by_format[f], default="fp32")
        return DeviceRates(gpu.flops_per_s(form) or gpu.fp32_flops_per_s, gpu.bandwidth_bytes_per_s)

    def _sample_gpu(self) -> None:
        if self._gpu is None:
            device = self._run.update.recorder.clock.device  # the current device is this thread's
            index = 0 if device is None or device.index is None else device.index
            uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)
            self._gpu = open_counters(None if uuid is None else str(uuid), index)
        if isinstance(self._gpu, GpuCounters):
            self._gpu.take()


@contextmanager
def watched(run: TorchRun, counted: CountedStep) -> Iterator[Watch]:
    """Watch the code inside from a thread of its own."""
    watch, patches = Watch(run, counted), Patches()
    thread = threading.Thread(target=watch.sample, name="mezzo-watch", daemon=True)
    try:
        watch.waits.install(patches)
        thread.start()
        yield watch
    finally:
        watch.stop()
        thread.join()
        patches.undo()


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
