"""A policy's gains over the baseline: measured on the device of the runs, and predicted or bounded on a named GPU."""

from __future__ import annotations

from collections.abc import Sequence

from mezzo.formats import TF32
from mezzo.gpus import Gpu
from mezzo.measure.gain import LAUNCH_BOUND_MS, Bound, StepWork, bound
from mezzo.records import AS_IS, CompareRecord, Gain, RealGpus, Row, RunRecord

_A_LARGER_BATCH = "kernel launches bound the step: a larger batch gains more"


def measured_gain(row: Row, *, device: str) -> Gain | None:
    """Return the gain that was measured; None for emulated formats, which are not timed."""
    if row.speedup is None or row.emulated:
        return None
    note = f"median step, {row.num_runs} seed" + "s" * (row.num_runs != 1)
    return Gain(
        kind="measured", times=row.speedup, low=row.speedup_low, high=row.speedup_high, device=device, note=note
    )


def bounded_gain(comparison: CompareRecord, policy: str, gpu: Gpu) -> Gain | None:
    """Return the most that ``policy`` can gain on ``gpu``; None if the counts or the GPU's rates are unknown."""
    baseline, run = _counted(comparison.runs, comparison.baseline), _counted(comparison.runs, policy)
    if baseline is None or run is None:
        return None
    found = bound(_work(baseline), _work(run), gpu)
    if found is None:
        return None
    over_tf32 = None if policy == AS_IS or _is_tf32(policy) else _over_tf32(baseline, run, gpu)
    note = _note(found, run=run, gpu=gpu)
    return Gain(kind="bound", times=found.times, times_over_tf32=over_tf32, device=gpu.label, note=note)


def predicted_gain(real_gpus: RealGpus | None, policy: str, gpu: Gpu) -> Gain | None:
    """Return the predicted gain over strict FP32 on ``gpu``; None without a prediction."""
    predictions = real_gpus.predictions if real_gpus else []
    prediction = next(
        (prediction for prediction in predictions if (prediction.gpu, prediction.policy) == (gpu.name, policy)), None
    )
    if prediction is None or not prediction.possible or prediction.over_fp32 is None:
        return None
    bound = max(prediction.bounds, key=lambda kind: prediction.bounds[kind], default="")
    # One statement of trust: the mean error is that of measured rows, which not every GPU and format has.
    trust = "such predictions are off by 12% on average" if prediction.validated else "no measurement has checked it"
    parts = [trust, "the batch does not fit" if not prediction.fits else _A_LARGER_BATCH if bound == "launch" else ""]
    over_tf32 = None if _is_tf32(policy) else prediction.over_tf32
    note = "; ".join(filter(None, parts))
    return Gain(kind="predicted", times=prediction.over_fp32, times_over_tf32=over_tf32, device=gpu.label, note=note)


def _is_tf32(policy: str) -> bool:
    return policy.split(":")[0] == TF32.name


def _counted(runs: Sequence[RunRecord], policy: str) -> RunRecord | None:
    return next((run for run in runs if run.policy == policy and run.effective.flops_by_format), None)


def _work(run: RunRecord) -> StepWork:
    return StepWork(
        flops_by_format=run.effective.flops_by_format, bytes=None if run.memory.of_emulation else run.memory.total_bytes
    )


def _over_tf32(baseline: RunRecord, run: RunRecord, gpu: Gpu) -> float | None:
    """Return the bound against the baseline's products in TF32; None where the GPU has no TF32 or the baseline ran in it."""
    flops = baseline.effective.flops_by_format
    if gpu.tf32_flops_per_s is None or TF32.name in flops:
        return None
    in_tf32 = {TF32.name if name == "fp32" else name: n for name, n in flops.items()}
    found = bound(StepWork(flops_by_format=in_tf32, bytes=baseline.memory.total_bytes), _work(run), gpu)
    return None if found is None else found.times


def _note(found: Bound, *, run: RunRecord, gpu: Gpu) -> str:
    """Return the basis of the bound, its limit, and a warning if the step is too small to come near it."""
    fast = f"{found.share:.0%} of the FLOPs are in products that it runs {_rates(found, run, gpu)}"
    if not found.share:
        fast = "no product runs in a format that it has faster units for"
    parts = [fast + ("; memory traffic sets the limit" if found.limit == "memory" else "")]
    if found.policy_ms < LAUNCH_BOUND_MS:
        parts.append(
            f"a step this small ({found.policy_ms:.2g} ms of counted work at peak) mostly waits for kernels to be launched: "
            "expect little of this bound, and more with a larger batch"
        )
    return ". ".join(part[0].upper() + part[1:] if n else part for n, part in enumerate(parts))


def _rates(found: Bound, run: RunRecord, gpu: Gpu) -> str:
    fast = [name for name in run.effective.flops_by_format if found.rates[name] > gpu.fp32_flops_per_s]
    return " and ".join(
        f"in {name.upper()} at {found.rates[name] / gpu.fp32_flops_per_s:.3g} times FP32's peak rate" for name in fast
    )
