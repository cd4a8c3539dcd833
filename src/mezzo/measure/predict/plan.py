"""Predictions of one training on many GPUs under many policies, from a few tapes."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from mezzo.errors import UsageError
from mezzo.gpus import Gpu
from mezzo.measure.predict.calibrate import Calibration
from mezzo.measure.predict.constants import fitted
from mezzo.measure.predict.memory import (
    CUBLAS_WORKSPACE_BYTES,
    CUBLAS_WORKSPACE_HOPPER_BYTES,
    DRIVER_BYTES,
    PredictedMemory,
    predict_memory,
)
from mezzo.measure.predict.rates import Rates
from mezzo.measure.predict.sharding import Job
from mezzo.measure.predict.tape import Tape, check_same_steps
from mezzo.measure.predict.time import Card, Columns, longer_of, operation_bounds
from mezzo.records import ModuleShare, Prediction

HEADROOM = 0.13
"""Of 65 measured trainings none needed more than 1 / (1 - 0.13) times the prediction."""
PREDICTED = ("fp32", "tf32", "fp16", "bf16", "fp16-pure", "bf16-pure")
"""Policies that can be predicted."""
ALONE = Job()
_WORTH, _EVEN = 1.15, 1.03
_MOST = 1 << 16
_SHOWN = 8


@dataclass(frozen=True)
class Tapes:
    """A training under one policy at two batch sizes; ``other`` is None if other sizes do not follow."""

    one: Tape
    other: Tape | None

    def at(self, batch: int) -> Tape:
        """Return the tape at ``batch``."""
        if batch == self.one.batch:
            return self.one
        if self.other is None:
            raise UsageError(
                f"batch {batch} does not follow from the step at batch {self.one.batch}",
                hint=f"predict batch {self.one.batch}",
            )
        return self.one.at_batch(self.other, batch)

    @classmethod
    def record(cls, record: Callable[[int], Tape], batch: int) -> Tapes:
        """Record at ``batch`` and at another size, and check that the steps are the same."""
        one = record(batch)
        try:
            other = record(batch + max(1, batch // 2))
            check_same_steps(one, other)
        except UsageError:
            return cls(one, None)
        return cls(one, other)


def to_record(policies: Sequence[str]) -> list[str]:
    """Return the policies whose tapes predictions for ``policies`` need; FP32's is the baseline of all."""
    return list(dict.fromkeys(["fp32", *map(recorded_as, policies)]))


def recorded_as(policy: str) -> str:
    """Return the policy whose tape ``policy`` shares: TF32 runs what FP32 runs."""
    return "fp32" if policy == "tf32" else policy


def predict(
    tapes: dict[str, Tapes],
    gpu: Gpu,
    policy: str,
    *,
    batch: int,
    channels_last: bool,
    headroom: float = HEADROOM,
    job: Job = ALONE,
    calibration: Calibration | None = None,
) -> Prediction:
    """Return the prediction for ``policy`` on ``gpu``.

    Args:
        tapes: by recorded policy; FP32's must be there.
        gpu: the GPU.
        policy: one of ``PREDICTED``.
        batch: the batch size.
        channels_last: whether images are stored channels-last.
        headroom: share of the memory that the largest batch leaves free.
        job: how many GPUs train together; ``batch`` is that of each.
        calibration: rates measured on a GPU of this kind; None for the constants that ship.
    """
    why = impossible(gpu, policy)
    if why:
        return Prediction(gpu=gpu.name, policy=policy, possible=False, reason=why)
    own = tapes[recorded_as(policy)]
    tape, wide = own.at(batch), tapes["fp32"].at(batch)
    pace = _Pace(gpu, channels_last, job, calibration)
    step = pace.step(tape, policy)
    over_fp32 = pace.step(wide, "fp32").seconds / step.seconds
    has_tf32 = gpu.tf32_flops_per_s is not None
    over_tf32 = pace.step(wide, "tf32").seconds / step.seconds if has_tf32 else None
    rank = job.tape_of_rank(tape)
    memory, throughput = _memory(rank, gpu), job.num_gpus * batch / step.seconds
    largest = _largest_batch(own, gpu, headroom, job)
    low, high = pace.band
    made = Prediction(
        gpu=gpu.name,
        policy=policy,
        possible=True,
        reason="" if policy != "tf32" or has_tf32 else f"{gpu.label} has no TF32: this is FP32",
        validated=job == ALONE and fitted().covers(gpu.architecture, policy.removesuffix("-pure")),
        calibrated=pace.is_calibrated(policy),
        step_ms=step.seconds * 1e3,
        communication_ms=step.communication_s * 1e3,
        throughput=throughput,
        throughput_low=throughput * low,
        throughput_high=throughput * high,
        bounds=step.bounds(),
        modules=step.modules(),
        allocated_bytes=memory.allocated_bytes,
        reserved_bytes=memory.reserved_bytes,
        device_bytes=memory.reserved_bytes + DRIVER_BYTES,
        memory_bytes=memory.by_kind_bytes,
        fits=memory_under_limit(rank, gpu, 0.0).fits,
        largest_batch=largest,
        over_fp32=over_fp32,
        over_tf32=over_tf32,
    )
    if largest:
        seconds = pace.step(own.at(largest), policy).seconds
        made = made.model_copy(update={"largest_throughput": job.num_gpus * largest / seconds})
    share = memory.reserved_bytes / _memory(job.tape_of_rank(wide), gpu).reserved_bytes
    return made.model_copy(update={"verdict": verdict(policy, over_fp32, over_tf32, share)})


def predict_cpu(tape: Tape, calibration: Calibration, *, batch: int) -> Prediction:
    """Return the prediction for this machine's CPU in FP32, from a tape of CPU operations and its calibration."""
    each = calibration.rates["fp32"].seconds(tape.operations)
    seconds, memory = float(each.sum()), predict_memory(tape, workspace_bytes=0)
    kinds = np.array(["arithmetic" if op.flops else "bandwidth" for op in tape.operations])
    return Prediction(
        gpu="cpu",
        policy="fp32",
        possible=True,
        calibrated=True,
        step_ms=seconds * 1e3,
        throughput=batch / seconds,
        throughput_low=batch / seconds * calibration.low,
        throughput_high=batch / seconds * calibration.high,
        bounds={kind: float(each[kinds == kind].sum() / seconds) for kind in ("arithmetic", "bandwidth", "launch")},
        modules=_modules(tape, each, kinds),
        allocated_bytes=memory.allocated_bytes,
        reserved_bytes=memory.allocated_bytes,  # the C library's allocator keeps little
        device_bytes=memory.allocated_bytes,
        memory_bytes=memory.by_kind_bytes,
        fits=memory.allocated_bytes < os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        over_fp32=1.0,
        verdict=f"This machine, {calibration.threads} threads.",
    )


def impossible(gpu: Gpu, policy: str) -> str:
    """Return why ``gpu`` cannot run ``policy``; empty if it can."""
    half = policy.split("-")[0]
    if half in ("fp16", "bf16") and gpu.flops_per_s(half) is None:
        return f"{gpu.label} has no units for {half}"
    return ""


def verdict(policy: str, over_fp32: float, over_tf32: float | None, memory_share: float) -> str:
    """Return in one sentence whether ``policy`` is worth it."""
    if policy == "fp32":
        if over_tf32 is None or over_tf32 * _EVEN > 1:
            return "The baseline." if over_tf32 is None else "The baseline: TF32 is no faster here."
        return f"Strict FP32: TF32 is {1 / over_tf32:.2g} times as fast."
    against = "TF32" if over_tf32 is not None and policy != "tf32" else "FP32"
    gain = over_tf32 if against == "TF32" and over_tf32 is not None else over_fp32
    memory = "" if policy == "tf32" else f", with {memory_share:.0%} of FP32's memory"
    if gain >= _WORTH:
        return f"Worth it: {gain:.2g} times as fast as {against}{memory}."
    if gain >= _EVEN:
        return f"Perhaps: {gain:.2f} times {against}'s speed is within the error of the prediction{memory}."
    if memory_share < 0.9 and policy != "tf32":
        return f"Not for speed ({gain:.2f} times {against}'s), but for memory: {memory_share:.0%} of FP32's."
    return f"Not worth it: {gain:.2f} times {against}'s speed{memory}."


@dataclass(frozen=True)
class _Pace:
    """How fast steps run on one kind of GPU."""

    gpu: Gpu
    channels_last: bool
    job: Job
    calibration: Calibration | None

    def is_calibrated(self, policy: str) -> bool:
        """Return whether steps under ``policy``, and the FP32 that they are compared with, have measured rates."""
        needed = {"fp32", policy.removesuffix("-pure"), *(["tf32"] if self.gpu.tf32_flops_per_s is not None else [])}
        return self.calibration is not None and needed - {"tf32"} <= set(self.calibration.rates)

    @property
    def band(self) -> tuple[float, float]:
        """10th and 90th percentile of measured over predicted throughput."""
        known = self.calibration or fitted()
        return known.low, known.high

    def step(self, tape: Tape, policy: str) -> _Step:
        """Return a step of ``tape``."""
        rates = None
        if self.calibration is not None and self.is_calibrated(policy):
            rates = self.calibration.rates.get(policy.removesuffix("-pure"), self.calibration.rates["fp32"])
        return _Step(tape, self, tf32=policy != "fp32", rates=rates)


class _Step:
    """One step on one GPU of a job."""

    def __init__(self, tape: Tape, pace: _Pace, *, tf32: bool, rates: Rates | None) -> None:
        job, gpu = pace.job, pace.gpu
        self.communication_s = job.communication_s(tape, gpu)
        self.tape = job.tape_of_rank(tape)
        ops, constants = Columns.of(self.tape.operations), fitted().constants
        found = operation_bounds(ops, Card.of(gpu, tf32=tf32, channels_last=pace.channels_last), constants)
        self.parts = {"arithmetic": found.arithmetic, "bandwidth": found.traffic}
        self.latency = constants.latency_s
        self.each = found.total if rates is None else rates.seconds(self.tape.operations)
        self.device_s, self.host_s = float(self.each.sum()), len(self.tape.operations) * constants.launch_s
        self.seconds = job.step_s(float(longer_of(self.device_s, self.host_s)), self.communication_s, tape)

    def bounds(self) -> dict[str, float]:
        """Return the share of the step by what its operations wait for."""
        if self.host_s > self.device_s:
            return {"arithmetic": 0.0, "bandwidth": 0.0, "launch": 1.0}
        kinds = self._kinds()
        return {
            kind: float(self.each[kinds == kind].sum() / self.device_s)
            for kind in ("arithmetic", "bandwidth", "launch")
        }

    def _kinds(self) -> np.ndarray:
        arithmetic, traffic = self.parts["arithmetic"], self.parts["bandwidth"]
        longer = np.where(arithmetic > traffic, "arithmetic", "bandwidth")
        return np.where(self.each < 2 * self.latency, "launch", longer)

    def modules(self) -> list[ModuleShare]:
        """Return the modules with the largest shares."""
        return _modules(self.tape, self.each, self._kinds())


def _modules(tape: Tape, each: np.ndarray, kinds: np.ndarray) -> list[ModuleShare]:
    """Return the modules with the largest shares of ``each``; names are cut where the tree is deep."""
    found: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for operation, seconds, kind in zip(tape.operations, each, kinds, strict=True):
        name = "(optimizer)" if operation.phase == "optimizer" else _cut(operation.module)
        found[name][str(kind)] += float(seconds)
    order = sorted(found, key=lambda name: -sum(found[name].values()))
    return [
        ModuleShare(
            module=name,
            share=sum(found[name].values()) / float(each.sum()),
            bound=max(found[name], key=lambda kind: found[name][kind]),
        )
        for name in order[:_SHOWN]
    ]


def _cut(module: str) -> str:
    """Return the name up to its first number: ``encoder.layer.3.output`` is part of ``encoder.layer``."""
    parts: list[str] = []
    for part in module.split("."):
        if part.isdecimal():
            break
        parts.append(part)
    return ".".join(parts[:3]) or "(model)"


def memory_under_limit(tape: Tape, gpu: Gpu, headroom: float) -> PredictedMemory:
    """Return the memory of ``tape`` replayed under what ``gpu`` has for the allocator, ``headroom`` left free."""
    limit = int((gpu.memory_bytes - DRIVER_BYTES) * (1 - headroom))
    return predict_memory(tape, limit_bytes=limit, workspace_bytes=_workspace_bytes(gpu))


def _memory(tape: Tape, gpu: Gpu) -> PredictedMemory:
    return predict_memory(tape, workspace_bytes=_workspace_bytes(gpu))


def _workspace_bytes(gpu: Gpu) -> int:
    return CUBLAS_WORKSPACE_HOPPER_BYTES if gpu.compute_capability == "9.0" else CUBLAS_WORKSPACE_BYTES


def _largest_batch(tapes: Tapes, gpu: Gpu, headroom: float, job: Job) -> int | None:
    """Return the largest batch size that fits, 0 if none does; found by doubling and halving, replayed each time."""

    def fits(batch: int) -> bool:
        return memory_under_limit(job.tape_of_rank(tapes.at(batch)), gpu, headroom).fits

    if tapes.other is None:
        return None
    low, high = 0, 1
    while high <= _MOST and fits(high):
        low, high = high, 2 * high
    while high - low > max(1, low // 64):  # within 2%
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def check_policies(names: Sequence[str]) -> list[str]:
    """Return ``names``, each one that can be predicted.

    Raises:
        UsageError: one cannot.
    """
    for name in names:
        if name not in PREDICTED:
            raise UsageError(f"--policies {name!r} cannot be predicted", hint=f"choose from {', '.join(PREDICTED)}")
    return list(names)
