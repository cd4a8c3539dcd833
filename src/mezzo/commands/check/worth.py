"""Whether a policy that trains like the baseline is worth a switch: its certain gains, its possible gains, and its costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mezzo.commands.compare.costs import SLOWER, WORTH_SAYING
from mezzo.commands.compare.pairing import listed
from mezzo.formats import FP32, TF32
from mezzo.gpus import Gpu
from mezzo.records import AS_IS, WORTH_SWITCHING, CompareRecord, Gain, Prediction, RealGpus, Row, RunRecord

FASTER = 1.05
"""A measured speed-up, or a ceiling, below this is no gain."""
_LITTLE, _LITTLE_BYTES = 0.05, 20 << 20
"""Savings of memory below these are no gain: too little to enlarge a batch, or less than one segment of torch's CUDA allocator."""


@dataclass(frozen=True, kw_only=True)
class Worth:
    """The arguments for and against a policy."""

    gained: list[str]
    """Each measured or predicted gain: ``is 2x as fast on a CPU``."""
    possible: str
    """A gain that is neither shown nor ruled out; empty if there is none."""
    missing: list[str]
    """Each figure that shows no gain: ``0.95x to 1.08x the speed on a CPU``."""
    slower: str
    """How much longer a step takes on the device that the answer is for; empty unless it is longer beyond the spread."""

    @property
    def no_gain(self) -> bool:
        """Whether there is no gain, and as far as is known none is possible."""
        return not self.gained and not self.possible


def worth_of(row: Row, gains: Sequence[Gain], *, for_gpu: bool) -> Worth:
    """Return what a policy is worth.

    Args:
        row: the policy's row of the comparison.
        gains: its gains in speed, as measured, predicted or bounded.
        for_gpu: whether the answer is for a GPU that is not here, so that times measured here do not apply.
    """
    kinds = {gain.kind: gain for gain in gains}
    measured = None if for_gpu else kinds.get("measured")
    on_gpu = kinds.get("predicted") or kinds.get("bound")
    gained, missing, possible, slower = list[str](), list[str](), "", ""
    if measured is not None and measured.times < SLOWER and (measured.high or measured.times) < 1.0:
        slower = f"a step takes {1 / measured.times:.3g} times as long on {measured.device}"
    elif measured is not None and measured.times >= FASTER and row.num_runs < 2:
        possible = f"{measured.times:.3g}x in speed on {measured.device}, by one seed"
    elif measured is not None and measured.times >= FASTER and (measured.low or 0.0) > 1.0:
        gained.append(f"is {measured.times:.3g}x as fast on {measured.device}")
    elif measured is not None:
        missing.append(f"{_spread(measured, row.num_runs)} the speed on {measured.device}")
    elif not for_gpu:
        missing.append("no measured speed" + " (it is emulated here)" * row.emulated)
    if on_gpu is not None:
        times, over = on_gpu.over_what_is_free
        if on_gpu.kind == "bound":
            most = f"at most {times:.3g}x {over}'s speed on {on_gpu.device}"
            possible = most if for_gpu and times >= FASTER else possible
            missing += [most] if for_gpu and times < FASTER else []
        elif times >= WORTH_SWITCHING:
            gained.append(f"is predicted to be {times:.3g}x as fast as {over} on {on_gpu.device}")
        elif for_gpu and on_gpu.times < 1 / WORTH_SWITCHING:
            slower = f"a step is predicted to take {1 / on_gpu.times:.3g} times as long on {on_gpu.device}"
        else:
            missing.append(f"a predicted {times:.3g}x {over}'s speed on {on_gpu.device}")
    elif for_gpu:
        possible = "speed, but how much is not known"
    saved = saved_memory(row)
    if saved:
        gained.append(f"{'would save' if row.emulated else 'saves'} {saved:.0%} of the memory")
    else:
        missing.append(_memory(row))
    return Worth(gained=gained, possible=possible, missing=missing, slower=slower)


def saved_memory(row: Row) -> float:
    """Return the share of the memory that a policy saves; 0 if it is too little to use, or unknown."""
    if row.memory_ratio is None or 1.0 - row.memory_ratio < _LITTLE:
        return 0.0
    saved_bytes = _saved_bytes(row, row.memory_ratio)
    return 0.0 if saved_bytes is not None and saved_bytes < _LITTLE_BYTES else 1.0 - row.memory_ratio


def missing_text(worth: Worth) -> str:
    """Return the figures that show no gain, to follow ``bf16 trains like fp32, but``."""
    return f"shows no gain: {listed(worth.missing)}"


def _spread(gain: Gain, num_runs: int) -> str:
    if num_runs < 2 or gain.low is None or gain.high is None:
        return f"{gain.times:.3g}x"
    return f"{gain.low:.3g}x to {gain.high:.3g}x"


def _memory(row: Row) -> str:
    """Return the difference in memory in words, if it is no gain."""
    if row.memory.of_emulation:
        return "memory that only a GPU can show"
    if row.memory_ratio is None:
        return "memory that was not counted"
    saved, saved_bytes = 1.0 - row.memory_ratio, _saved_bytes(row, row.memory_ratio)
    share = f"{abs(saved):.0%} {'less' if saved >= 0 else 'more'}"
    if saved < _LITTLE or saved_bytes is None:
        return "the same memory" if share.startswith("0%") else f"{share} memory"
    return f"{share} memory, {saved_bytes / 2**20:.2g} MiB a step"


def _saved_bytes(row: Row, ratio: float) -> float | None:
    size = row.memory.cuda_allocated_bytes or row.memory.total_bytes
    return None if size is None else size / ratio - size


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
    # One statement of trust: the band comes from measured rows, which not every GPU and format has.
    trust = _band(prediction) if prediction.validated else "no measurement has checked it"
    parts = [
        trust,
        "the batch does not fit" if prediction.fits is False else _A_LARGER_BATCH if bound == "launch" else "",
    ]
    over_tf32 = None if _is_tf32(policy) else prediction.over_tf32
    note = "; ".join(filter(None, parts))
    return Gain(kind="predicted", times=prediction.over_fp32, times_over_tf32=over_tf32, device=gpu.label, note=note)


def _band(prediction: Prediction) -> str:
    low, high = (end / prediction.throughput for end in (prediction.throughput_low, prediction.throughput_high))
    return f"8 of 10 measured trainings had {low:.0%} to {high:.0%} of their predicted speed"


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
    fast = [name for name in run.effective.flops_by_format if found.rates[name] > (_rate(gpu, FP32.name) or 0.0)]
    return " and ".join(
        f"in {name.upper()} at {found.rates[name] / (_rate(gpu, FP32.name) or 1.0):.3g} times FP32's peak rate"
        for name in fast
    )


_ALIKE = 0.05
"""Bounds within this share of the highest count as equal."""
_ORDER = (AS_IS, "bf16", "fp16", "tf32", "fp8")
"""Policies from simple to use to less simple: the script unchanged, then no loss scale."""


@dataclass(frozen=True, kw_only=True)
class EligiblePolicy:
    """A policy that trains like the baseline."""

    policy: str
    measured: Gain | None = None
    bound: Gain | None = None
    skipped: float = 0.0
    """The share of updates that were skipped."""


def preferred(candidates: Sequence[EligiblePolicy], *, by_bound: bool) -> EligiblePolicy | None:
    """Return the policy to use; None without candidates.

    Args:
        candidates: policies that train like the baseline.
        by_bound: whether the answer is for a device other than the runs', so that measured times do not apply.
    """
    if not candidates:
        return None
    timed = [] if by_bound else [(one, one.measured) for one in candidates if one.measured is not None]
    if timed:
        _, fastest = max(timed, key=lambda pair: pair[1].times)
        least = fastest.low or fastest.times
        alike = [one for one, gain in timed if (gain.high or gain.times) >= least]  # the spreads overlap
    else:  # FP8's bound leaves out its scaling, which is not free
        known = [one for one in candidates if one.policy.split(":")[0] != "fp8"] or list(candidates)
        most = max(_times(one.bound) for one in known)
        alike = [one for one in known if _times(one.bound) >= most * (1.0 - _ALIKE)]
    return min(alike, key=_simplicity)


def simplest_first(policies: Sequence[str]) -> list[str]:
    """Return policies in the order in which a person would want them to work: the simplest to use first."""
    return sorted(policies, key=_place)


def _simplicity(candidate: EligiblePolicy) -> tuple[bool, int, int]:
    return candidate.skipped >= WORTH_SAYING, _place(candidate.policy), candidate.policy.count(":")


def _place(policy: str) -> int:
    name = policy.split(":")[0]
    return _ORDER.index(name) if name in _ORDER else len(_ORDER)


def _times(gain: Gain | None) -> float:
    return 1.0 if gain is None else gain.times


# A roofline (Williams, Waterman and Patterson, CACM 52, 2009) of the whole step, with Amdahl's law inside::
#
#     compute time   sum over formats of FLOPs / the GPU's peak rate in that format
#     memory time    2 x the bytes of the four kinds / bandwidth: each is written once and read once
#     step time      the larger of the two, at least
#
# The bound is the ratio of the two step times or of the bytes, whichever is larger: traffic beyond the counted bytes only
# draws the ratio of times towards the ratio of bytes. It assumes that kernels reach the same share of the peak under both policies,
# and that everything else (launches, casts, the optimizer's arithmetic, the input pipeline) takes no time. So it is a ceiling, never
# an estimate. A pure function; imports no torch.

_WRITTEN_AND_READ = 2
LAUNCH_BOUND_MS = 1.0
"""A step whose counted work takes less than this at peak mostly waits for the host: 36 us for an operation (``predict.host``)."""


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """The counted work of one step."""

    flops_by_format: Mapping[str, int]
    bytes: int | None
    """The four kinds together; None where they were not measured."""


@dataclass(frozen=True, kw_only=True)
class Bound:
    """The most that a policy can gain over the baseline."""

    times: float
    """How many times as fast as the baseline, at most."""
    share: float
    """Share of the FLOPs that run at a higher peak rate than FP32's."""
    policy_ms: float
    """The policy's step at peak rates."""
    limit: str
    """What limits the policy's step at peak rates: ``compute`` or ``memory``."""
    rates: dict[str, float]
    """Peak FLOP/s by format, of the formats that were counted."""


def bound(baseline: StepWork, policy: StepWork, gpu: Gpu) -> Bound | None:
    """Return the most that ``policy`` can gain over ``baseline`` on ``gpu``.

    Returns:
        None where nothing was counted, or ``gpu`` has no rate for a format that was.
    """
    theirs, ours = _compute_s(baseline, gpu), _compute_s(policy, gpu)
    if theirs is None or ours is None:
        return None
    known = bool(baseline.bytes and policy.bytes)
    moved = [_WRITTEN_AND_READ * (work.bytes or 0) if known else 0 for work in (baseline, policy)]
    memories = [bytes_moved / gpu.bandwidth_bytes_per_s for bytes_moved in moved]
    steps = max(theirs, memories[0]), max(ours, memories[1])
    rates = {name: _rate(gpu, name) or 0.0 for name in (*baseline.flops_by_format, *policy.flops_by_format)}
    faster = sum(n for name, n in policy.flops_by_format.items() if rates[name] > (_rate(gpu, FP32.name) or 0.0))
    return Bound(
        times=max(steps[0] / steps[1], memories[0] / memories[1] if known else 0.0),
        share=faster / sum(policy.flops_by_format.values()),
        policy_ms=steps[1] * 1e3,
        limit="memory" if known and memories[1] > ours else "compute",
        rates=rates,
    )


def _rate(gpu: Gpu, format_name: str) -> float | None:
    """Return the peak rate of products in a format, as the predictor has it: AMD's matrix units compute FP32 too."""
    in_matrix_units = gpu.fp32_matrix_flops_per_s if format_name == FP32.name else None
    return in_matrix_units or gpu.flops_per_s(format_name)


def _compute_s(work: StepWork, gpu: Gpu) -> float | None:
    rates = {name: _rate(gpu, name) for name in work.flops_by_format}
    if not any(work.flops_by_format.values()) or not all(rates.values()):
        return None
    return sum(n / (rates[name] or 1.0) for name, n in work.flops_by_format.items())
