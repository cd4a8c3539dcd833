"""Measure the rates of this machine and save them: ``mezzo predict --calibrate``.

Small trainings run on the device. Each of their operations is timed separately, and the fastest of several repeats counts: the thread's
CPU time on a CPU, so that other programs matter little, and events on a GPU. Lines through these times are the rates; whole steps,
timed without a recorder, show the time between operations. The rates are in the user's cache folder, one file for each device.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mezzo.devices import cpu_name, this_device
from mezzo.formats import BF16, FP16
from mezzo.gpus import GPUS, Gpu, find_gpu
from mezzo.library_files import cache_home
from mezzo.measure.predict.operations import operations_of
from mezzo.measure.predict.rates import CostLine, MachineRates, TimedOperation
from mezzo.measure.predict.recorder import Recorder
from mezzo.measure.predict.tape import CostedOperation
from mezzo.records import Note, Prediction
from mezzo.records.files import write_whole

_REPEATS = 5
_STEADY = 1.02
"""Repeats end when the two fastest differ by no more than this factor: another would change the least by less."""
_LEAST_S = 0.1
"""The least time for the repeats of a step: the first ones of a step of a millisecond fill caches, and agree with each other."""
_PROBE_S = 2.5
"""The most time for one probe's repeats; each probe is repeated in two ways."""
_ALL_S = 100.0
"""The most time for one policy's repeats; each probe gets an equal share of what is left, so a busy machine repeats less."""
_GPU_SCALE = 16


@dataclass(frozen=True)
class Calibration:
    """Measured rates, and the device and versions they were measured with."""

    device: str
    threads: int
    date: str
    torch: str
    rates: dict[str, MachineRates]
    """By policy."""
    low: float
    """10th percentile of measured over predicted speed of the probes' steps."""
    high: float
    """90th percentile."""

    @property
    def path(self) -> Path:
        """The file of the calibration."""
        return path_of(self.device)

    def save(self) -> None:
        """Write the calibration to its file, in place of an earlier one of the device."""
        write_whole(json.dumps(asdict(self), indent=1) + "\n", self.path)


def path_of(device: str) -> Path:
    """Return the file of the device with that name."""
    folder = cache_home() / "mezzo" / "calibration"
    return folder / ("-".join("".join(c if c.isalnum() else " " for c in device.lower()).split()) + ".json")


def saved_calibration(device: str) -> Calibration | None:
    """Return the saved calibration of the device with that name; None if there is none."""
    path = path_of(device)
    if not path.exists():
        return None
    data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    rates = {
        policy: MachineRates({kind: CostLine(*line) for kind, line in fields.pop("lines").items()}, **fields)
        for policy, fields in data.pop("rates").items()
    }
    return Calibration(**data, rates=rates)


def calibration_of(gpu: Gpu) -> Calibration | None:
    """Return the saved calibration of this machine's GPU if that is a ``gpu``."""
    return saved_calibration(device_name("cuda")) if is_here(gpu) else None


def is_here(gpu: Gpu) -> bool:
    """Return whether this machine has a GPU of the kind ``gpu``."""
    if not torch.cuda.is_available():
        return False
    found = find_gpu(device_name("cuda"))
    return found is not None and found.name == gpu.name


def rates_used(predictions: Sequence[Prediction]) -> list[Note]:
    """Return the files of the measured rates behind predictions, by GPU."""
    reasons = []
    for name in dict.fromkeys(one.gpu for one in predictions if one.calibrated):
        calibration = saved_calibration(device_name("cpu")) if name == "cpu" else calibration_of(GPUS[name])
        if calibration is not None:
            why = f"measured on {calibration.device}, {calibration.date}, torch {calibration.torch}"
            reasons.append(Note(what=f"rates of {name}", value=str(calibration.path), reason=why))
    return reasons


def this_kind() -> str:
    """Return the device type that a calibration of this machine measures: ``cuda`` if it has a GPU."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def device_name(kind: str) -> str:
    """Return the name of a calibration's device; a CPU's includes the number of torch's threads.

    Rates of two threads predicted trainings on one thread 39% too fast.
    """
    if kind != "cpu":
        return str(this_device(kind).name)
    threads = torch.get_num_threads()
    return f"{cpu_name()}, {threads} thread{'s' * (threads != 1)}"


def calibrate(kind: str, *, note: Callable[[str], None] = lambda _: None) -> Calibration:
    """Measure the rates of torch's device type ``kind`` on this machine.

    Args:
        kind: ``cpu`` or ``cuda``.
        note: called with a line about each probe before it runs.
    """
    rates: dict[str, MachineRates] = {}
    speeds: list[float] = []
    for policy in _policies(kind):
        timed: list[TimedOperation] = []
        steps: list[tuple[list[CostedOperation], float]] = []
        chosen, end = list(probes(1 if kind == "cpu" else _GPU_SCALE)), time.monotonic() + _ALL_S
        for number, probe in enumerate(chosen):
            note(f"calibrating {device_name(kind)} in {policy}: {probe.name}, {number + 1} of {len(chosen)}")
            most_s = min(_PROBE_S, max(0.0, end - time.monotonic()) / (2 * (len(chosen) - number)))
            running = _ProbeRun(probe, kind, policy)
            found = running.operations(most_s)
            timed += found
            steps.append(([one.operation for one in found], least_seconds(running.step, kind, most_s=most_s)))
        rates[policy] = MachineRates.fitted(timed).with_steps(steps)
        speeds += [float(rates[policy].seconds(operations).sum()) / seconds for operations, seconds in steps]
    low, high = np.quantile(speeds, [0.1, 0.9])
    return Calibration(
        device=device_name(kind),
        threads=torch.get_num_threads(),
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        torch=str(torch.__version__),
        rates=rates,
        low=round(float(low), 3),
        high=round(float(high), 3),
    )


def _policies(kind: str) -> list[str]:
    """Return the policies that the device computes natively."""
    if kind == "cpu":
        return ["fp32"]
    return ["fp32", *(["tf32", "bf16"] if torch.cuda.get_device_capability() >= (8, 0) else []), "fp16"]


@contextmanager
def _precision(policy: str, kind: str) -> Iterator[None]:
    """Run the block under ``policy``, with TF32 off under FP32."""
    backends: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.cudnn) if kind == "cuda" else ()
    own = [backend.allow_tf32 for backend in backends]
    dtype = {form.name: form.dtype for form in (FP16, BF16)}.get(policy)
    try:
        for backend in backends:
            backend.allow_tf32 = policy != "fp32"
        with nullcontext() if dtype is None else torch.autocast(kind, dtype):
            yield
    finally:
        for backend, allowed in zip(backends, own, strict=True):
            backend.allow_tf32 = allowed


class _ProbeRun:
    """A probe on its device."""

    def __init__(self, probe: Probe, kind: str, policy: str) -> None:
        torch.manual_seed(0)
        self.kind, self.policy = kind, policy
        self.model = probe.build().to(kind)
        self.inputs: Any = tuple(t.to(kind) for t in probe.inputs())
        self.optimizer = probe.optimizer(self.model.parameters())
        self.step()  # creates the optimizer's state

    def step(self) -> None:
        """Run one step."""
        self.optimizer.zero_grad()
        with _precision(self.policy, self.kind):
            loss = loss_of(self.model, self.inputs)
        with _precision("tf32" if self.policy != "fp32" else "fp32", self.kind):
            loss.backward()
        self.optimizer.step()

    def operations(self, most_s: float) -> list[TimedOperation]:
        """Return the operations of a step, each with its least seconds over repeats of ``most_s`` in all."""
        found: list[list[TimedOperation]] = []
        stop = time.monotonic() + most_s
        totals: list[float] = []
        while len(found) < 2 or (len(found) < _REPEATS and time.monotonic() < stop and not _steady(totals)):
            with Stopwatch(self.kind) as watch:
                self.step()
            found.append(watch.timed)
            totals.append(sum(one.seconds for one in watch.timed))
        least = np.min([[one.seconds for one in repeat] for repeat in found], axis=0)
        return [TimedOperation(one.operation, float(s)) for one, s in zip(found[0], least, strict=True) if s > 0]


def _steady(seconds: Sequence[float]) -> bool:
    """Return whether at least three repeats have shown the least time: the two fastest agree."""
    fastest = sorted(seconds)
    return len(fastest) > 2 and fastest[1] <= _STEADY * fastest[0]


def least_seconds(step: Callable[[], Any], kind: str, *, most_s: float) -> float:
    """Return the least seconds of ``step`` over repeats of ``most_s`` in all: CPU time of the thread, or elapsed on a GPU."""
    found: list[float] = []
    begun = time.monotonic()
    least, stop = begun + min(_LEAST_S, most_s), begun + most_s

    def goes_on() -> bool:
        now = time.monotonic()
        return now < least or (len(found) < 4 * _REPEATS and now < stop and not _steady(found))

    while len(found) < 3 or goes_on():
        clock = time.thread_time if kind == "cpu" else time.perf_counter
        begin = clock()
        step()
        if kind != "cpu":
            torch.cuda.synchronize()
        found.append(clock() - begin)
    return min(found)


class Stopwatch(Recorder):
    """A recorder of a running step that times each operation."""

    def __init__(self, kind: str) -> None:
        """Start for torch's device type ``kind``."""
        super().__init__(batch=1, gpu=kind != "cpu")
        self.timed: list[TimedOperation] = []
        self._kind = kind

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Run one operation and time it."""
        seconds, result = self._timed(func, args, kwargs or {})
        parts = operations_of(func, args, kwargs, result, "forward", "", gpu=self._gpu)
        # A convolution's backward pass is one call and two products of equally many operations.
        flops = sum(part.flops for part in parts)
        self.timed += [
            TimedOperation(part, seconds * (part.flops / flops if flops else 1 / len(parts))) for part in parts
        ]
        return result

    def _timed(self, func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[float, Any]:
        if self._kind == "cpu":
            begin = time.thread_time()
            result = func(*args, **kwargs)
            return time.thread_time() - begin, result
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        result = func(*args, **kwargs)
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3, result


@dataclass(frozen=True)
class Probe:
    """A training of a few steps."""

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Tensor, Tensor]]
    """The input, and the classes it belongs to."""
    optimizer: Callable[[Any], torch.optim.Optimizer]


class _Block(nn.Module):
    """A bottleneck of depthwise and pointwise convolutions with a gate on its channels."""

    def __init__(self, width: int, window: int, stride: int = 1) -> None:
        super().__init__()
        self.whole = stride == 1
        wide = 4 * width
        act = nn.SiLU if window == 3 else nn.Hardswish
        self.widen = nn.Sequential(nn.Conv2d(width, wide, 1, bias=False), nn.BatchNorm2d(wide), act())
        self.mix = nn.Sequential(
            nn.Conv2d(wide, wide, window, stride=stride, padding=window // 2, groups=wide, bias=False),
            nn.BatchNorm2d(wide),
            act(inplace=True),
        )
        self.gate = nn.Sequential(
            nn.AdaptiveAvgPool2d(1),
            nn.Conv2d(wide, width, 1),
            act(),
            nn.Conv2d(width, wide, 1),
            nn.Sigmoid() if window == 3 else nn.Hardsigmoid(),
        )
        self.narrow = nn.Sequential(nn.Conv2d(wide, width, 1, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.mix(self.widen(x))
        found: Tensor = self.narrow(y * self.gate(y))
        return x + found if self.whole else found


class _Attention(nn.Module):
    """A layer of a transformer."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.joint, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        size = (*x.shape[:2], self.heads, x.shape[2] // self.heads)
        query, key, value = (t.view(size).transpose(1, 2) for t in self.joint(self.first(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).reshape(x.shape)
        x = x + self.drop(self.out(mixed))
        result: Tensor = x + self.drop(self.wide(self.second(x)))
        return result


class _Language(nn.Module):
    """An embedding, layers of a transformer and a product over the vocabulary."""

    def __init__(self, width: int, words: int, dropout: float) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.layers = nn.Sequential(*(_Attention(width, width // 32, dropout) for _ in range(2)))
        self.head = nn.Linear(width, words)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.layers(self.words(x))).flatten(0, 1)
        return result


class _Recurrent(nn.Module):
    """A recurrent layer, whose last state is classified."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer, self.head = nn.LSTM(width, width, batch_first=True), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.layer(x)[0][:, -1])
        return result


def _part(a: int, b: int, window: int, stride: int) -> list[nn.Module]:
    conv = nn.Conv2d(a, b, window, stride=stride, padding=window // 2, bias=False)
    return [conv, nn.BatchNorm2d(b), nn.ReLU(inplace=True)]


def _bottlenecks(width: int) -> nn.Module:
    layers = [
        *_part(3, width, 7, 4),
        *_part(width, 4 * width, 1, 1),
        *_part(4 * width, 2 * width, 1, 1),
        *_part(2 * width, 2 * width, 3, 2),
        *_part(2 * width, 8 * width, 1, 1),
        *_part(8 * width, 4 * width, 1, 1),
        *_part(4 * width, 4 * width, 3, 2),
        *_part(4 * width, 16 * width, 1, 2),
    ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16 * width, 10))


def _convolutional(width: int) -> nn.Module:
    return nn.Sequential(
        *_part(3, width, 7, 2),
        nn.MaxPool2d(3, 2, 1),
        *_part(width, 2 * width, 3, 1),
        *_part(2 * width, 2 * width, 1, 1),
        *_part(2 * width, 4 * width, 3, 2),
        *_part(4 * width, 8 * width, 3, 2),
        nn.MaxPool2d(2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8 * width, 10),
    )


def _mobile(width: int, window: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, width, 3, stride=2, padding=1),
        _Block(width, window),
        _Block(width, window, stride=2),
        nn.AvgPool2d(2),
        _Block(width, window),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(width, 10),
    )


def _dense(width: int, activation: Callable[[], nn.Module], depth: int) -> nn.Module:
    layers = [part for _ in range(depth) for part in (nn.Linear(width, width), activation(), nn.Dropout(0.1))]
    return nn.Sequential(*layers, nn.Linear(width, 10))


def _pictures(batch: int, size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, 3, size, size), torch.randint(10, (batch,))


def _vectors(*size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(*size), torch.randint(10, size[:1])


def _words(batch: int, length: int, words: int) -> tuple[Tensor, Tensor]:
    return torch.randint(words, (batch, length)), torch.randint(words, (batch * length,))


def probes(scale: int = 1) -> Iterator[Probe]:
    """Yield the trainings, their batches ``scale`` times as large: what keeps a CPU's core busy does not fill a GPU.

    Of each kind of layer one is tiny, which shows what an operation costs however small it is.
    """
    sgd: Any = partial(torch.optim.SGD, lr=1e-3, momentum=0.9)
    adam: Any = partial(torch.optim.AdamW, lr=1e-4)
    for width, batch, size in ((4, 2, 32), (16, 4, 64), (32, 4, 96), (32, 16, 64), (64, 8, 64)):
        yield Probe("convolutional", partial(_convolutional, width), partial(_pictures, batch * scale, size), sgd)
    for width, batch, size in ((32, 8, 96), (64, 4, 64), (128, 4, 64)):
        yield Probe("bottlenecks", partial(_bottlenecks, width), partial(_pictures, batch * scale, size), adam)
    for width, batch, size, window in ((8, 8, 64, 3), (16, 4, 64, 3), (24, 8, 96, 5), (48, 16, 32, 3), (96, 16, 32, 5)):
        yield Probe("mobile", partial(_mobile, width, window), partial(_pictures, batch * scale, size), adam)
    for width, batch, length, words, dropout in (
        (32, 2, 8, 64, 0.0),
        (128, 4, 32, 1000, 0.0),
        (192, 8, 128, 2000, 0.1),
        (384, 4, 128, 8000, 0.1),
    ):
        yield Probe(
            "transformer",
            partial(_Language, width, words, dropout),
            partial(_words, batch * scale, length, words),
            adam,
        )
    for width, batch, depth in ((24, 4, 2), (256, 32, 3), (1024, 16, 3), (2048, 128, 3), (4096, 4, 1)):
        yield Probe("dense", partial(_dense, width, nn.ReLU, depth), partial(_vectors, batch * scale, width), sgd)
        yield Probe("dense", partial(_dense, width, nn.Tanh, depth), partial(_vectors, batch * scale, width), adam)
    yield Probe("large", partial(nn.Linear, 6144, 6144), partial(_vectors, 4 * scale, 6144), adam)
    for width, batch, length in ((24, 2, 6), (64, 16, 16), (128, 16, 32), (256, 32, 32)):
        yield Probe("recurrent", partial(_Recurrent, width), partial(_vectors, batch * scale, length, width), adam)


def loss_of(model: nn.Module, inputs: tuple[Tensor, Tensor]) -> Tensor:
    """Return the loss of ``model``."""
    return F.cross_entropy(model(inputs[0]), inputs[1])
