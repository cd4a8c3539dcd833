"""Predictions of one training on many GPUs under many policies, from a few tapes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from mezzo.errors import UsageError, nearest
from mezzo.gpus import Gpu
from mezzo.measure.predict.constants import Constants, fitted
from mezzo.measure.predict.fp8 import CASTS, fp8_bounds, fp8_layers
from mezzo.measure.predict.memory import (
    CUBLAS_WORKSPACE_BYTES,
    CUBLAS_WORKSPACE_HOPPER_BYTES,
    DRIVER_BYTES,
    PredictedMemory,
    predict_memory,
)
from mezzo.measure.predict.tape import Tape, check_same_steps
from mezzo.measure.predict.time import Card, Columns, longer_of, operation_bounds
from mezzo.records import ModuleShare, Prediction

HEADROOM = 0.13
"""Of 65 measured trainings none needed more than 1 / (1 - 0.13) times the prediction."""
PREDICTED = ("fp32", "tf32", "fp16", "bf16", "fp16-master", "bf16-master", "fp16-pure", "bf16-pure", "fp8")
"""Policies that can be predicted."""
_WORTH, _EVEN = 1.15, 1.03
_MOST = 1 << 24
"""Largest batch that is looked for."""
_SHOWN = 8


@dataclass(frozen=True)
class Tapes:
    """A training under one policy at two batch sizes; ``other`` is None if other sizes do not follow."""

    one: Tape
    other: Tape | None
    num_batches: int = 1
    """Batches that one update accumulates."""
    _made: dict[int, Tape] = field(default_factory=dict, repr=False, compare=False)
    largest: dict[tuple[int, int, float], int] = field(default_factory=dict, repr=False, compare=False)
    """The largest batch by memory, workspace and headroom: GPUs and policies that share these share it."""

    def at(self, batch: int) -> Tape:
        """Return the tape at ``batch``."""
        if batch == self.one.batch:
            return self.one
        if self.other is None:
            raise UsageError(
                f"batch {batch} does not follow from the step at batch {self.one.batch}",
                hint=f"predict batch {self.one.batch}",
            )
        if batch not in self._made:
            self._made[batch] = self.one.at_batch(self.other, batch)
        return self._made[batch]

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
    """Return the policy whose tape ``policy`` shares: TF32 runs what FP32 runs, and both 16-bit formats run the same."""
    if policy == "fp8":
        return "fp16"
    return "fp32" if policy == "tf32" else policy.replace("bf16", "fp16")


def predict(
    tapes: dict[str, Tapes], gpu: Gpu, policy: str, *, batch: int, channels_last: bool, headroom: float = HEADROOM
) -> Prediction:
    """Return the prediction for ``policy`` on ``gpu``.

    Args:
        tapes: by recorded policy; FP32's must be there.
        gpu: the GPU.
        policy: one of ``PREDICTED``.
        batch: the batch size.
        channels_last: whether images are stored channels-last.
        headroom: share of the memory that the largest batch leaves free.
    """
    why = impossible(gpu, policy)
    if why:
        return Prediction(gpu=gpu.name, gpu_bytes=gpu.memory_bytes, policy=policy, possible=False, reason=why)
    own = tapes[recorded_as(policy)]
    tape = own.at(batch)
    step = Step(tape, gpu, policy=policy, channels_last=channels_last)
    wide = tapes["fp32"].at(batch)
    over_fp32 = Step(wide, gpu, policy="fp32", channels_last=channels_last).seconds / step.seconds
    has_tf32 = gpu.tf32_flops_per_s is not None
    over_tf32 = Step(wide, gpu, policy="tf32", channels_last=channels_last).seconds / step.seconds if has_tf32 else None
    memory, known, samples = _memory(tape, gpu), fitted(), batch * own.num_batches
    largest = _largest_batch(own, gpu, headroom)
    made = Prediction(
        gpu=gpu.name,
        gpu_bytes=gpu.memory_bytes,
        policy=policy,
        possible=True,
        reason=step.note if policy != "tf32" or has_tf32 else f"{gpu.label} has no TF32: this is FP32",
        validated=known.covers(gpu.architecture, policy),
        step_ms=step.seconds * 1e3,
        throughput=samples / step.seconds,
        throughput_low=samples / step.seconds * known.low,
        throughput_high=samples / step.seconds * known.high,
        bounds=step.bounds(),
        modules=step.modules(),
        allocated_bytes=memory.allocated_bytes,
        reserved_bytes=memory.reserved_bytes,
        device_bytes=memory.reserved_bytes + DRIVER_BYTES,
        memory_bytes=memory.by_kind_bytes,
        fits=memory_under_limit(tape, gpu, 0.0).fits,
        largest_batch=largest,
        over_fp32=over_fp32,
        over_tf32=over_tf32,
    )
    if largest:
        rate = throughput(own, gpu, policy, batch=largest, channels_last=channels_last)
        made = made.model_copy(update={"largest_throughput": rate})
    if policy == "tf32" and not has_tf32:
        return made.model_copy(update={"validated": known.covers(gpu.architecture, "fp32")})
    share = memory.reserved_bytes / _memory(wide, gpu).reserved_bytes
    over_bf16 = None
    if policy == "fp8":
        over_bf16 = Step(tape, gpu, policy="bf16", channels_last=channels_last).seconds / step.seconds
    return made.model_copy(update={"verdict": verdict(policy, over_fp32, over_tf32, share, over_bf16=over_bf16)})


def throughput(tapes: Tapes, gpu: Gpu, policy: str, *, batch: int, channels_last: bool) -> float:
    """Return the samples a second of ``policy``'s own tapes at ``batch``."""
    return batch * tapes.num_batches / Step(tapes.at(batch), gpu, policy=policy, channels_last=channels_last).seconds


def impossible(gpu: Gpu, policy: str) -> str:
    """Return why ``gpu`` cannot run ``policy``; empty if it can."""
    half = policy.split("-")[0]
    if half in ("fp16", "bf16", "fp8") and gpu.flops_per_s(half) is None:
        return f"{gpu.label} has no units for {half}"
    return ""


def verdict(
    policy: str, over_fp32: float, over_tf32: float | None, memory_share: float, *, over_bf16: float | None = None
) -> str:
    """Return in one sentence whether ``policy`` is worth it; FP8 must be worth it over BF16."""
    if over_bf16 is not None and over_bf16 < _EVEN:
        return f"Not worth it: {over_bf16:.2f} times BF16's speed, with BF16's memory."
    if over_bf16 is not None:
        word = "Worth it" if over_bf16 >= _WORTH else "Perhaps"
        return f"{word}: {over_bf16:.2f} times BF16's speed, with BF16's memory."
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


class Step:
    """One step on one GPU."""

    def __init__(self, tape: Tape, gpu: Gpu, *, policy: str, channels_last: bool) -> None:
        """Price each operation of ``tape``."""
        self.tape = tape
        ops, constants = Columns.of(tape.operations), fitted().constants
        found = operation_bounds(ops, Card.of(gpu, tf32=policy != "fp32", channels_last=channels_last), constants)
        self.parts = {"arithmetic": found.arithmetic, "bandwidth": found.traffic}
        self.latency = constants.latency_s
        self.each = found.total
        self.note = ""
        """What the policy becomes for this model, if that is not plain."""
        self.num_launches = len(tape.operations)
        if policy == "fp8":
            self._in_fp8(gpu, constants, channels_last)
        self.device_s, self.host_s = float(self.each.sum()), self.num_launches * constants.launch_s
        self.seconds = float(longer_of(self.device_s, self.host_s))

    def _in_fp8(self, gpu: Gpu, constants: Constants, channels_last: bool) -> None:
        layers = fp8_layers(self.tape.operations)
        self.note = layers.sentence
        places = np.flatnonzero(layers.chosen)
        if not len(places):
            return
        own = [self.tape.operations[place] for place in places]
        found = fp8_bounds(own, gpu, constants, channels_last=channels_last)
        times = self.each[places].sum() / found.total.sum()
        how = f"are {times:.2g} times as fast as" if times >= 1 else f"take {1 / times:.2g} times as long as"
        self.note += f". They {how} in BF16, casts included"
        self.parts["arithmetic"][places], self.parts["bandwidth"][places] = found.arithmetic, found.traffic
        self.each[places] = found.total
        self.num_launches += CASTS * len(places)

    def bounds(self) -> dict[str, float]:
        """Return the share of the step by what its operations wait for."""
        if self.host_s > self.device_s:
            return {"arithmetic": 0.0, "bandwidth": 0.0, "launch": 1.0}
        kinds = self.kinds()
        return {
            kind: float(self.each[kinds == kind].sum() / self.device_s)
            for kind in ("arithmetic", "bandwidth", "launch")
        }

    def kinds(self) -> NDArray[np.str_]:
        """Return what each operation waits for."""
        arithmetic, traffic = self.parts["arithmetic"], self.parts["bandwidth"]
        longer = np.where(arithmetic > traffic, "arithmetic", "bandwidth")
        result: NDArray[np.str_] = np.where(self.each < 2 * self.latency, "launch", longer)
        return result

    def modules(self) -> list[ModuleShare]:
        """Return the modules with the largest shares; names are cut where the tree is deep."""
        kinds = self.kinds()
        found: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        for operation, seconds, kind in zip(self.tape.operations, self.each, kinds, strict=True):
            name = "(optimizer)" if operation.phase == "optimizer" else _cut(operation.module)
            found[name][str(kind)] += float(seconds)
        order = sorted(found, key=lambda name: -sum(found[name].values()))
        return [
            ModuleShare(
                module=name,
                share=sum(found[name].values()) / self.device_s,
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


def _largest_batch(tapes: Tapes, gpu: Gpu, headroom: float) -> int | None:
    """Return the largest batch size that fits, 0 if none does; found by doubling and halving, replayed each time."""

    def fits(batch: int) -> bool:
        return memory_under_limit(tapes.at(batch), gpu, headroom).fits

    if tapes.other is None:
        return None
    key = gpu.memory_bytes, _workspace_bytes(gpu), headroom
    if key in tapes.largest:
        return tapes.largest[key]
    low, high = 0, 1
    while high <= _MOST and fits(high):
        low, high = high, 2 * high
    while high - low > max(1, low // 64):  # within 2%
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    tapes.largest[key] = low
    return low


def check_policies(names: Sequence[str]) -> list[str]:
    """Return ``names``, each one that can be predicted.

    Raises:
        UsageError: one cannot.
    """
    for name in names:
        if name not in PREDICTED:
            raise UsageError(f"--policies {name!r} cannot be predicted", hint=nearest(name, PREDICTED))
    return list(names)
