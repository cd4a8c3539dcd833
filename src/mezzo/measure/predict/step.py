"""One step of a training on one kind of GPU: how long each operation takes, and what limits it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import takewhile

import numpy as np
from numpy.typing import NDArray

from mezzo.gpus import Gpu
from mezzo.measure.predict.calibration.calibrate import Calibration
from mezzo.measure.predict.calibration.rates import MachineRates
from mezzo.measure.predict.constants import Constants, fitted
from mezzo.measure.predict.fp8 import CASTS, fp8_bounds, fp8_layers
from mezzo.measure.predict.sharding import GpuGroup
from mezzo.measure.predict.tape import TrainingTape
from mezzo.measure.predict.time import Array, Card, Columns, longer_of, operation_bounds
from mezzo.records import ModuleShare

ALONE = GpuGroup()
_SHOWN = 8


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """The conditions of a step: the GPU, how many of them train together, the layout of images, and rates if measured."""

    gpu: Gpu
    channels_last: bool = False
    job: GpuGroup = ALONE
    calibration: Calibration | None = None
    """Rates measured on a GPU of this kind; None for the constants that ship."""

    def rates(self, policy: str) -> MachineRates | None:
        """Return the measured rates of ``policy``; None unless FP32, which it is compared with, was measured as well."""
        if self.calibration is None:
            return None
        measured = self.calibration.rates
        own = policy.split("-")[0]
        if own == "tf32" and own not in measured:
            own = "fp32"  # a GPU without TF32
        return measured[own] if {"fp32", own} <= set(measured) else None

    def covering(self, policy: str) -> Conditions:
        """Return these conditions, without rates if they do not cover ``policy``: compared steps must be priced in the same way."""
        return self if self.rates(policy) is not None else replace(self, calibration=None)

    @property
    def band(self) -> tuple[float, float]:
        """10th and 90th percentile of measured over predicted throughput."""
        known = self.calibration or fitted()
        return known.low, known.high

    def step(self, tape: TrainingTape, policy: str) -> PredictedStep:
        """Return a step of ``tape``, which was recorded on one GPU, under ``policy``."""
        return PredictedStep(tape, self, policy=policy)

    def throughput(self, tape: TrainingTape, policy: str, *, num_batches: int) -> float:
        """Return the samples per second of all GPUs; an update accumulates ``num_batches`` batches of the tape's size."""
        return self.job.num_gpus * tape.batch * num_batches / self.step(tape, policy).seconds


class PredictedStep:
    """One step on one GPU of a job."""

    def __init__(self, tape: TrainingTape, conditions: Conditions, *, policy: str) -> None:
        """Price each operation of ``tape``."""
        job, gpu, channels_last = conditions.job, conditions.gpu, conditions.channels_last
        self.communication_s = job.communication_s(tape, gpu)
        self.tape = job.tape_of_rank(tape)
        ops, constants = Columns.of(self.tape.operations), fitted().constants
        card = Card.of(
            gpu, tf32=policy != "fp32", channels_last=channels_last, tries_algorithms=self.tape.tries_algorithms
        )
        found = operation_bounds(ops, card, constants)
        self.parts = {"arithmetic": found.arithmetic, "bandwidth": found.traffic}
        self.latency = constants.latency_s
        rates = conditions.rates(policy)
        self.operation_s = found.total if rates is None else rates.seconds(self.tape.operations)
        self.note = ""
        """A remark on what the policy means for this model, if there is one."""
        self.num_launches = len(self.tape.operations)
        if policy == "fp8":
            self._in_fp8(gpu, constants, channels_last)
        self.device_s, self.host_s = float(self.operation_s.sum()), self.num_launches * constants.launch_s
        self.seconds = job.step_s(float(longer_of(self.device_s, self.host_s)), self.communication_s, tape)

    def _in_fp8(self, gpu: Gpu, constants: Constants, channels_last: bool) -> None:
        layers = fp8_layers(self.tape.operations)
        self.note = layers.sentence
        indices = np.flatnonzero(layers.chosen)
        if not len(indices):
            return
        operations = [self.tape.operations[index] for index in indices]
        bounds = fp8_bounds(operations, gpu, constants, channels_last=channels_last)
        ratio = self.operation_s[indices].sum() / bounds.total.sum()
        comparison = f"are {ratio:.2g} times as fast as" if ratio >= 1 else f"take {1 / ratio:.2g} times as long as"
        self.note += f". They {comparison} in BF16, casts included"
        self.parts["arithmetic"][indices], self.parts["bandwidth"][indices] = bounds.arithmetic, bounds.traffic
        self.operation_s[indices] = bounds.total
        self.num_launches += CASTS * len(indices)

    def bounds(self) -> dict[str, float]:
        """Return the share of the step by what limits its operations."""
        if self.host_s > self.device_s:
            return {"arithmetic": 0.0, "bandwidth": 0.0, "launch": 1.0}
        return shares_by_kind(self.operation_s, self.kinds())

    def kinds(self) -> NDArray[np.str_]:
        """Return what limits each operation."""
        arithmetic, traffic = self.parts["arithmetic"], self.parts["bandwidth"]
        longer = np.where(arithmetic > traffic, "arithmetic", "bandwidth")
        result: NDArray[np.str_] = np.where(self.operation_s < 2 * self.latency, "launch", longer)
        return result


def shares_by_kind(operation_s: Array, kinds: NDArray[np.str_]) -> dict[str, float]:
    """Return the share of each kind in the seconds of all operations."""
    return {
        kind: float(operation_s[kinds == kind].sum() / operation_s.sum())
        for kind in ("arithmetic", "bandwidth", "launch")
    }


def seconds_by_module(
    tape: TrainingTape, operation_s: Array, kinds: NDArray[np.str_], *, name_of: Callable[[str], str] = str
) -> dict[str, dict[str, float]]:
    """Return the seconds of each module by kind, the longest first; the optimizer counts as one module."""
    found: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for operation, seconds, kind in zip(tape.operations, operation_s, kinds, strict=True):
        name = "(optimizer)" if operation.phase == "optimizer" else name_of(operation.module) or "(model)"
        found[name][str(kind)] += float(seconds)
    return dict(sorted(found.items(), key=lambda item: -sum(item[1].values())))


def module_shares(tape: TrainingTape, operation_s: Array, kinds: NDArray[np.str_]) -> list[ModuleShare]:
    """Return the modules with the largest shares of the step's seconds; names are shortened where the tree is deep."""
    found = [*seconds_by_module(tape, operation_s, kinds, name_of=_shortened).items()][:_SHOWN]
    return [
        ModuleShare(
            module=name,
            share=sum(seconds.values()) / float(operation_s.sum()),
            bound=max(seconds, key=lambda kind: seconds[kind]),
        )
        for name, seconds in found
    ]


def _shortened(module: str) -> str:
    """Return the name up to its first number: ``encoder.layer.3.output`` is part of ``encoder.layer``."""
    return ".".join([*takewhile(lambda part: not part.isdecimal(), module.split("."))][:3])
