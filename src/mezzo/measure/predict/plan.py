"""Predictions of one training on many GPUs under many policies, from a few tapes."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from mezzo.errors import UsageError, nearest
from mezzo.gpus import Gpu
from mezzo.measure.environment import host_bytes
from mezzo.measure.predict.calibrate import Calibration
from mezzo.measure.predict.host import SERVER, Host
from mezzo.measure.predict.sharding import GpuGroup, link_of
from mezzo.measure.predict.step import (
    ALONE,
    Conditions,
    PredictedStep,
    module_shares,
    seconds_by_module,
    shares_by_kind,
)
from mezzo.measure.predict.tape import TrainingTape, check_same_steps, stored_channels_last
from mezzo.measure.predict.tape_memory import (
    CUBLAS_WORKSPACE_BYTES,
    CUBLAS_WORKSPACE_HOPPER_BYTES,
    DRIVER_BYTES,
    PredictedMemory,
    predict_memory,
)
from mezzo.measure.predict.time import HALF_FORMATS, fitted
from mezzo.policy import PRESETS, canonical
from mezzo.records import (
    WORTH_SWITCHING,
    BatchCurve,
    DataSet,
    LoaderRate,
    MemoryTimeline,
    ModuleTime,
    Prediction,
    PredictionDetail,
)

MEMORY_HEADROOM = 0.13
"""Of 65 measured trainings none needed more than 1 / (1 - 0.13) times the prediction."""
_EVEN = 1.03
MOST_MEASURED = 2560
"""The largest batch of a public measurement, ResNet-50 on an H200: larger ones are predicted only up to a known data set."""

LEAST_OF_IMAGES = 32
"""The smallest batch of a convolutional network behind the constants: at 12, a source that was held out is predicted 61% too fast."""


@dataclass(frozen=True)
class Tapes:
    """A training under one policy at two batch sizes; ``second`` is None if other sizes do not follow."""

    first: TrainingTape
    second: TrainingTape | None
    num_batches: int = 1
    """Batches that one update accumulates."""
    of_measured_framework: bool = True
    """Whether the measurements behind the constants are of its framework, PyTorch."""
    no_memory: str = ""
    """Why the tapes show no memory; empty if they do."""
    _derived: dict[int, TrainingTape] = field(default_factory=dict, repr=False, compare=False)
    largest: dict[tuple[object, ...], int] = field(default_factory=dict, repr=False, compare=False)
    """The largest batch by memory, workspace, matrix formats and job: GPUs and policies with equal values share it."""
    peaks: dict[tuple[object, ...], PredictedMemory] = field(default_factory=dict, repr=False, compare=False)
    """The memory without a limit by batch, workspace, matrix formats and job, shared in the same way."""

    def at(self, batch: int) -> TrainingTape:
        """Return the tape at ``batch``."""
        if batch == self.first.batch:
            return self.first
        if self.second is None:
            raise UsageError(
                f"batch {batch} does not follow from the step at batch {self.first.batch}",
                hint=f"predict batch {self.first.batch}",
            )
        if batch not in self._derived:
            self._derived[batch] = self.first.at_batch(self.second, batch)
        return self._derived[batch]

    def stored_channels_last(self) -> Tapes:
        """Return the tapes of the same training with its images stored channels-last."""
        second = None if self.second is None else stored_channels_last(self.second)
        return replace(self, first=stored_channels_last(self.first), second=second, _derived={})  # memory is the same

    @classmethod
    def record(cls, record: Callable[[int], TrainingTape], batch: int) -> Tapes:
        """Record at ``batch`` and at another size, and check that the steps are the same."""
        first = record(batch)
        try:
            second = record(batch + max(1, batch // 2))
            check_same_steps(first, second)
        except UsageError:
            return cls(first, None)
        return cls(first, second)


def to_record(policies: Sequence[str]) -> list[str]:
    """Return the policies whose tapes predictions for ``policies`` need; FP32's is the baseline of all."""
    return list(dict.fromkeys(["fp32", *map(recorded_as, policies)]))


def recorded_as(policy: str) -> str:
    """Return the policy whose tape ``policy`` shares: TF32 runs what FP32 runs, and both 16-bit formats run the same."""
    if PRESETS[policy].in_layers:
        return "fp16"
    return "fp32" if policy == "tf32" else policy.replace("bf16", "fp16")


def predict(
    tapes: dict[str, Tapes],
    gpu: Gpu,
    policy: str,
    *,
    batch: int,
    job: GpuGroup = ALONE,
    calibration: Calibration | None = None,
    host: Host = SERVER,
    refused: Mapping[str, str] | None = None,
    data: DataSet | None = None,
    loader: LoaderRate | None = None,
) -> Prediction:
    """Return the prediction for ``policy`` on ``gpu``.

    Args:
        tapes: by recorded policy; FP32's must be there.
        gpu: the GPU.
        policy: the name of a preset.
        batch: the batch size.
        job: how many GPUs train together, each on a batch of ``batch``.
        calibration: rates measured on a GPU of this kind; None for the constants that ship.
        host: the processor that drives the GPU.
        refused: the script's error by policy, where it fails.
        data: the script's data set; None where it is not known.
        loader: what the script's loader delivers here; None where it is not known.
    """
    why = impossible(gpu, policy) or failure(policy, refused or {})
    if why:
        return Prediction(gpu=gpu.name, gpu_bytes=gpu.memory_bytes, policy=policy, possible=False, reason=why)
    conditions = Conditions(gpu=gpu, job=job, calibration=calibration, host=host).covering(policy)
    policy_tapes = tapes[recorded_as(policy)]
    tape, fp32_tape = policy_tapes.at(batch), tapes["fp32"].at(batch)
    step = conditions.step(tape, policy)
    over_fp32 = conditions.step(fp32_tape, "fp32").seconds / step.seconds
    has_tf32 = gpu.tf32_flops_per_s is not None
    over_tf32 = conditions.step(fp32_tape, "tf32").seconds / step.seconds if has_tf32 else None
    is_fp32 = policy == "tf32" and not has_tf32
    memory = None if policy_tapes.no_memory else _unlimited(policy_tapes, batch, conditions, policy)
    rate = conditions.throughput(tape, policy, num_batches=policy_tapes.num_batches)
    limit = limit_of(policy_tapes, batch, data, num_gpus=job.num_gpus)
    largest = None if memory is None else _largest_batch(policy_tapes, conditions, policy, most=limit.most)
    low, high = conditions.band
    copy_s = copied_bytes(tape) / link_of(gpu, to="host").bytes_per_s
    copies = tape.batch * policy_tapes.num_batches / copy_s if copy_s else math.inf
    largest_throughput, sentence = None, ""
    if largest:
        largest_throughput = conditions.throughput(
            policy_tapes.at(largest), policy, num_batches=policy_tapes.num_batches
        )
    if not is_fp32:
        in_fp32 = None if memory is None else _unlimited(tapes["fp32"], batch, conditions, "fp32")
        share = None if memory is None or in_fp32 is None else memory.reserved_bytes / in_fp32.reserved_bytes
        over_bf16 = conditions.step(tape, "bf16").seconds / step.seconds if PRESETS[policy].in_layers else None
        sentence = verdict(policy, over_fp32, over_tf32, share, over_bf16=over_bf16)
    return Prediction(
        gpu=gpu.name,
        gpu_bytes=gpu.memory_bytes,
        policy=policy,
        possible=True,
        reason=f"{gpu.label} has no TF32: this is FP32" if is_fp32 else step.note,
        validated=not (why_not := _not_validated(step, conditions, policy_tapes, "fp32" if is_fp32 else policy)),
        not_validated=why_not,
        calibrated=conditions.calibration is not None,
        step_ms=step.seconds * 1e3,
        captured_ms=step.captured_s * 1e3,
        communication_ms=step.communication_s * 1e3,
        throughput=rate,
        throughput_low=rate * low,
        throughput_high=rate * high,
        bounds=step.bounds(),
        modules=module_shares(step.tape, step.operation_s, step.kinds()),
        **_of_memory(memory),
        no_memory=policy_tapes.no_memory,
        fits=None if memory is None else _fits(policy_tapes, batch, conditions, policy, headroom=0.0),
        largest_batch=largest,
        largest_limit=limit.kind if largest == limit.most else "memory",
        copy_ms=copy_s * 1e3,
        slower=slower_than(rate / job.num_gpus, copies, loader),
        largest_throughput=largest_throughput,
        over_fp32=over_fp32,
        over_tf32=over_tf32,
        verdict=sentence,
    )


def _not_validated(
    step: PredictedStep, conditions: Conditions, tapes: Tapes, precision: str
) -> Literal["", "measurements", "host", "batch"]:
    """Return why the measurements behind the constants do not vouch for ``step``; empty if they do."""
    covered = fitted().covers(conditions.gpu.architecture, precision)
    if conditions.job != ALONE or not tapes.of_measured_framework or not covered:
        return "measurements"
    if step.is_bound_by_host:
        return "host"
    return "batch" if step.tape.batch < LEAST_OF_IMAGES and _is_convolutional(step.tape) else ""


def _is_convolutional(tape: TrainingTape) -> bool:
    """Return whether convolutions have most of a step's FLOPs."""
    flops = [(operation.flops, "conv" in operation.name) for operation in tape.operations]
    return 2 * sum(count for count, of_convolution in flops if of_convolution) > sum(count for count, _ in flops)


@dataclass(frozen=True, kw_only=True)
class BatchLimit:
    """What ends the largest batch where memory does not."""

    most: int
    kind: Literal["data set", "measured"]


def limit_of(tapes: Tapes, batch: int, data: DataSet | None, *, num_gpus: int) -> BatchLimit:
    """Return the largest batch to predict for one GPU: one pass of the data set if its size is known, else what measurements have."""
    if data is not None and data.samples is not None:
        return BatchLimit(most=max(1, data.samples // max(num_gpus, data.processes)), kind="data set")
    traced = [batch, tapes.first.batch, *([tapes.second.batch] if tapes.second is not None else ())]
    return BatchLimit(most=max(MOST_MEASURED, *traced), kind="measured")


def copied_bytes(tape: TrainingTape) -> int:
    """Return the bytes of a step's inputs, which the host sends if they are not on the GPU."""
    begin = tape.step_starts[-1] if tape.step_starts else 0
    blocks = (tape.blocks[event] for event in tape.events[begin:] if event >= 0)
    return sum(block.size_bytes for block in blocks if block.kind == "inputs")


def slower_than(rate: float, copies: float, loader: LoaderRate | None) -> Literal["", "loader", "copies"]:
    """Return what delivers fewer samples a second than one GPU's ``rate``; the slower, if both do."""
    delivered = math.inf if loader is None or loader.samples_per_s is None else loader.samples_per_s
    if rate <= min(delivered, copies):
        return ""
    return "loader" if delivered <= copies else "copies"


def _of_memory(memory: PredictedMemory | None) -> dict[str, Any]:
    """Return the fields of a prediction's memory; empty if it is not known."""
    if memory is None:
        return {}
    return {
        "allocated_bytes": memory.allocated_bytes,
        "reserved_bytes": memory.reserved_bytes,
        "device_bytes": memory.reserved_bytes + DRIVER_BYTES,
        "memory_bytes": memory.by_kind_bytes,
    }


def predict_cpu(tape: TrainingTape, calibration: Calibration, *, batch: int) -> Prediction:
    """Return the prediction for this machine's CPU in FP32, from a tape of CPU operations and its calibration."""
    operation_s = calibration.rates["fp32"].seconds(tape.operations)
    seconds, memory = float(operation_s.sum()), predict_memory(tape, workspace_bytes=0)
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
        bounds=shares_by_kind(operation_s, kinds),
        modules=module_shares(tape, operation_s, kinds),
        allocated_bytes=memory.allocated_bytes,
        reserved_bytes=memory.allocated_bytes,  # the C library's allocator keeps little
        device_bytes=memory.allocated_bytes,
        memory_bytes=memory.by_kind_bytes,
        fits=memory.allocated_bytes < host_bytes(),
        over_fp32=1.0,
        verdict=f"This machine, {calibration.threads} threads.",
    )


def impossible(gpu: Gpu, policy: str) -> str:
    """Return why ``gpu`` cannot run ``policy``; empty if it can."""
    compute = PRESETS[policy].compute
    if PRESETS[policy].lowers and gpu.flops_per_s(compute) is None:
        return f"{gpu.label} has no units for {compute}"
    return ""


def failure(policy: str, refused: Mapping[str, str]) -> str:
    """Return how a script fails under ``policy``, from its errors under recorded policies; empty if it does not."""
    in_16_bits = "bf16" if PRESETS[policy].in_layers else policy  # few bits leave the other operations in BF16
    own = refused.get(in_16_bits, "")
    if own:
        return f"fails under {policy}: {own}"
    traced = recorded_as(policy)
    error = refused.get(traced, "")
    return f"fails under {policy}{'' if traced == policy else f', traced as {traced}'}: {error}" if error else ""


def verdict(
    policy: str,
    over_fp32: float,
    over_tf32: float | None,
    memory_share: float | None,
    *,
    over_bf16: float | None = None,
) -> str:
    """Return in one sentence whether ``policy`` is worth using; 8 and 4 bits must be worth using instead of BF16."""
    if over_bf16 is not None:
        word = "Worth it" if over_bf16 >= WORTH_SWITCHING else "Perhaps" if over_bf16 >= _EVEN else "Not worth it"
        same = "" if memory_share is None else ", with BF16's memory"
        return f"{word}: {over_bf16:.2f} times BF16's speed{same}."
    if policy == "fp32":
        if over_tf32 is None or over_tf32 * _EVEN > 1:
            return "The baseline." if over_tf32 is None else "The baseline: TF32 is no faster here."
        return f"Strict FP32: TF32 is {1 / over_tf32:.3g} times as fast."
    against, gain = ("FP32", over_fp32) if over_tf32 is None or policy == "tf32" else ("TF32", over_tf32)
    memory = "" if policy == "tf32" or memory_share is None else f", with {memory_share:.0%} of FP32's memory"
    if gain >= WORTH_SWITCHING:
        return f"Worth it: {gain:.3g} times as fast as {against}{memory}."
    if gain >= _EVEN:
        return f"Perhaps: {gain:.2f} times {against}'s speed is within the error of the prediction{memory}."
    if memory_share is not None and memory_share < 0.9 and policy != "tf32":
        return f"Not for speed ({gain:.2f} times {against}'s), but for memory: {memory_share:.0%} of FP32's."
    return f"Not worth it: {gain:.2f} times {against}'s speed{memory}."


def memory_on(tape: TrainingTape, gpu: Gpu, policy: str, *, headroom: float | None = None) -> PredictedMemory:
    """Return the memory of ``tape`` under ``policy`` on ``gpu``, of which ``headroom`` stays free; None for unlimited memory."""
    limit = None if headroom is None else _limit_bytes(gpu, headroom)
    formats = matrix_formats(gpu, policy)
    return predict_memory(tape, limit_bytes=limit, workspace_bytes=_workspace_bytes(gpu), matrix_formats=formats)


def _limit_bytes(gpu: Gpu, headroom: float) -> int:
    return int((gpu.memory_bytes - DRIVER_BYTES) * (1 - headroom))


def _unlimited(tapes: Tapes, batch: int, conditions: Conditions, policy: str) -> PredictedMemory:
    """Return the memory at ``batch`` of a GPU without a limit."""
    gpu, job = conditions.gpu, conditions.job
    key = batch, _workspace_bytes(gpu), matrix_formats(gpu, policy), job
    if key not in tapes.peaks:
        tapes.peaks[key] = memory_on(job.tape_of_rank(tapes.at(batch)), gpu, policy)
    return tapes.peaks[key]


def _fits(tapes: Tapes, batch: int, conditions: Conditions, policy: str, *, headroom: float) -> bool:
    """Return whether ``batch`` fits.

    It does if a replay without a limit stays below the limit. If not, the allocator may still make room by returning free segments, so
    the step is replayed with the limit.
    """
    gpu = conditions.gpu
    if _unlimited(tapes, batch, conditions, policy).reserved_bytes <= _limit_bytes(gpu, headroom):
        return True
    return memory_on(conditions.job.tape_of_rank(tapes.at(batch)), gpu, policy, headroom=headroom).fits


def matrix_formats(gpu: Gpu, policy: str) -> tuple[str, ...]:
    """Return the formats whose convolutions cuDNN computes on matrix units under ``policy``: FP32 only as TF32."""
    if not gpu.compute_capability[0].isdigit():
        return ()  # not NVIDIA's: no cuDNN
    in_tf32 = policy != "fp32" and gpu.tf32_flops_per_s is not None
    return (*HALF_FORMATS, "fp32") if in_tf32 else HALF_FORMATS


def _workspace_bytes(gpu: Gpu) -> int:
    return CUBLAS_WORKSPACE_HOPPER_BYTES if gpu.compute_capability == "9.0" else CUBLAS_WORKSPACE_BYTES


def _largest_batch(tapes: Tapes, conditions: Conditions, policy: str, *, most: int) -> int | None:
    """Return the largest batch size up to ``most`` that fits, 0 if none does; by doubling and bisection, with a replay each time."""
    gpu, job = conditions.gpu, conditions.job

    def fits(batch: int) -> bool:
        return _fits(tapes, batch, conditions, policy, headroom=MEMORY_HEADROOM)

    if tapes.second is None:
        return None
    key = gpu.memory_bytes, _workspace_bytes(gpu), matrix_formats(gpu, policy), job, most
    if key in tapes.largest:
        return tapes.largest[key]
    low, high = 0, 1
    while low < most and fits(high):
        low, high = high, min(most, 2 * high)
    while high - low > max(1, low // 64):  # within 2%
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    tapes.largest[key] = low
    return low


def check_policies(names: Sequence[str]) -> list[str]:
    """Return the presets of ``names``, if all of them can be predicted.

    Raises:
        UsageError: one cannot.
    """
    found = [canonical(name) for name in names]
    for name in found:
        if name not in PRESETS:
            raise UsageError(f"--policies {name!r} cannot be predicted", hint=nearest(name, PRESETS))
    return list(dict.fromkeys(found))


_POINTS = 200
_MOST_MODULES = 400
_SHOWN_KINDS = ("parameters", "gradients", "optimizer", "activations", "temporaries")


def detail_of(
    tapes: Mapping[str, Tapes], best: Prediction, others: Sequence[Prediction], *, batch: int, conditions: Conditions
) -> PredictionDetail:
    """Return the details of ``best``, with the curves of ``others`` on the same GPU."""
    tape = tapes[recorded_as(best.policy)].at(batch)
    return PredictionDetail(
        gpu=best.gpu,
        policy=best.policy,
        checkpoint=best.checkpoint,
        limit_bytes=conditions.gpu.memory_bytes - DRIVER_BYTES,
        curves=[_curve(tapes[recorded_as(one.policy)], one, conditions) for one in others],
        timeline=timeline(conditions.job.tape_of_rank(tape), matrix_formats(conditions.gpu, best.policy)),
        modules=module_times(conditions.covering(best.policy).step(tape, best.policy)),
    )


def _curve(tapes: Tapes, one: Prediction, conditions: Conditions) -> BatchCurve:
    """Return the throughput at powers of two up to the largest batch that fits, and at that batch."""
    largest = one.largest_batch or 0
    sizes = [2**power for power in range(20) if 2**power < largest]
    sizes += [largest] if largest else []
    known = conditions.covering(one.policy)
    rates = [known.throughput(tapes.at(size), one.policy, num_batches=tapes.num_batches) for size in sizes]
    return BatchCurve(policy=one.policy, batches=sizes, throughput=rates)


def timeline(tape: TrainingTape, formats: Collection[str] = ()) -> MemoryTimeline:
    """Return the allocated bytes by kind over the last step, at the largest moment of each stretch of allocations.

    Args:
        tape: the training.
        formats: the formats that the device's matrix units compute.
    """
    alive: dict[str, int] = {}
    begin = tape.step_starts[-1] if tape.step_starts else 0
    points: list[tuple[int, dict[str, int]]] = []
    # After the last allocation blocks are only freed.
    end = max((index + 1 for index, event in enumerate(tape.events) if event >= 0), default=0)
    stretch = max(1, -(-(end - begin) // _POINTS))
    highest = -1
    for index, event in enumerate(tape.events[:end]):
        block = tape.blocks[event if event >= 0 else ~event]
        kind = block.kind if block.kind in _SHOWN_KINDS else "other"
        size = block.size_bytes if block.is_taken(formats) else 0
        alive[kind] = alive.get(kind, 0) + (size if event >= 0 else -size)
        if index < begin:
            continue
        total = sum(alive.values())
        if (index - begin) % stretch == 0:
            points.append((index - begin, dict(alive)))
            highest = total
        elif total > highest:
            points[-1], highest = (points[-1][0], dict(alive)), total
    kinds = [kind for kind in (*_SHOWN_KINDS, "other") if any(found.get(kind) for _, found in points)]
    return MemoryTimeline(
        places=[index for index, _ in points],
        kinds={kind: [found.get(kind, 0) for _, found in points] for kind in kinds},
        backward=_after(tape.backward_starts, begin),
        optimizer=_after(tape.optimizer_starts, begin),
    )


def _after(starts: Sequence[int], begin: int) -> int | None:
    return next((start - begin for start in starts if start >= begin), None)


def module_times(step: PredictedStep) -> list[ModuleTime]:
    """Return the milliseconds of each module's own operations by what limits them, the longest first."""
    modules = [*seconds_by_module(step.tape, step.operation_s, step.kinds()).items()][:_MOST_MODULES]
    return [ModuleTime(module=name, ms={kind: 1e3 * s for kind, s in seconds.items()}) for name, seconds in modules]
