"""The most that a policy can gain on a GPU, from the counted FLOPs by format and the bytes of a step.

A roofline (Williams, Waterman and Patterson, CACM 52, 2009) of the whole step, with Amdahl's law inside::

    compute time   sum over formats of FLOPs / the GPU's peak rate in that format
    memory time    2 x the bytes of the four kinds / bandwidth: each is written once and read once
    step time      the larger of the two, at least

The bound is the ratio of the two step times, or that of the bytes, whichever is larger: traffic beyond the counted bytes only
draws the ratio of times towards that of the bytes. It assumes that kernels reach the same share of the peak under both policies,
and that everything else (launches, casts, the optimizer's arithmetic, the input pipeline) takes no time. So it is a ceiling, never
an estimate. A pure function; imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mezzo.gpus import Gpu

_WRITTEN_AND_READ = 2
LAUNCH_BOUND_MS = 1.0
"""A step whose counted work takes less than this at peak mostly launches kernels: a hundred or more, at 5 to 10 us each."""


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
    rates = {name: gpu.flops_per_s(name) or 0.0 for name in (*baseline.flops_by_format, *policy.flops_by_format)}
    faster = sum(n for name, n in policy.flops_by_format.items() if rates[name] > gpu.fp32_flops_per_s)
    return Bound(
        times=max(steps[0] / steps[1], memories[0] / memories[1] if known else 0.0),
        share=faster / sum(policy.flops_by_format.values()),
        policy_ms=steps[1] * 1e3,
        limit="memory" if known and memories[1] > ours else "compute",
        rates=rates,
    )


def _compute_s(work: StepWork, gpu: Gpu) -> float | None:
    rates = {name: gpu.flops_per_s(name) for name in work.flops_by_format}
    if not any(work.flops_by_format.values()) or not all(rates.values()):
        return None
    return sum(n / (rates[name] or 1.0) for name, n in work.flops_by_format.items())
