"""The cost of a policy relative to the baseline: time per step, bytes and skipped updates, over the seeds that both trained with."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import pairwise, takewhile
from typing import Any

from mezzo.commands.compare.pairing import Pair, percent
from mezzo.formats import FP32, TF32
from mezzo.policy import Policy
from mezzo.records import AS_IS, RunRecord

SLOWER, _LARGER = 0.95, 1.02
"""The speed-up below which a policy is called slower, and the memory ratio above which it is called larger."""


def _median_ms(*runs: RunRecord) -> float | None:
    """Return the median time of a step over ``runs``; None if no step was timed."""
    times_ms = [ms for run in runs for ms in run.steps.warm_ms]
    return statistics.median(times_ms) if times_ms else None


def why_not_timed(pairs: Sequence[Pair]) -> str:
    """Return why times are not compared, such as unlike devices or different numbers of concurrent runs; empty if they are compared."""
    return next((why for pair in pairs if (why := why_unlike(pair.run, pair.baseline, pair.key))), "")


def why_unlike(run: RunRecord, baseline: RunRecord, name: object) -> str:
    """Return why the times of two runs are not compared; ``name`` is the name of the pair. Empty if they are compared."""
    if replays := run.replays or baseline.replays:
        return f"times are not compared, because {replays} of a CUDA graph are not timed"
    if run.kept != baseline.kept:
        return "times are not compared, because the baseline's runs are of an earlier comparison"
    if _differ_in_nothing(run, baseline):
        return "times are not compared, because no product ran in TF32: both compute the same"
    if any(_shared_cpu_unknown(one) for one in (run, baseline)):
        return "times are not compared, because the cluster may have run other work on the same CPU"
    for (what, ours), (_, theirs) in zip(_timing_conditions(run), _timing_conditions(baseline), strict=True):
        if ours != theirs:
            here = f"{name}: {what} {ours}, the baseline's {theirs}"
            return f"times are not compared, because the runs were not timed under the same conditions ({here})"
    return ""


def _differ_in_nothing(run: RunRecord, baseline: RunRecord) -> bool:
    """Return whether one policy is ``tf32`` and the other ``fp32`` on a device without TF32: any speed-up between them is noise."""
    formats = [set(one.effective.flops_by_format) for one in (run, baseline)]
    policies = {one.policy.split(":")[0] for one in (run, baseline)}
    return policies == {FP32.name, TF32.name} and bool(formats[0]) and formats[0] == formats[1]


def _shared_cpu_unknown(run: RunRecord) -> bool:
    """Return whether a cluster placed a run without a GPU of its own: what else ran on its CPU is not known."""
    return run.placement is not None and bool(run.placement.through) and run.placement.gpus is None


def _timing_conditions(run: RunRecord) -> list[tuple[str, str]]:
    """Return what has to be the same in two runs whose times are compared."""
    environment, placement = run.environment, run.placement
    return [
        ("device", environment.gpu or environment.device),
        ("CPU", environment.cpu),
        ("threads", str(environment.threads)),
        ("runs at once", "1" if placement is None else str(placement.jobs or "not known")),
        ("placed by", "mezzo" if placement is None or not placement.through else placement.through),
    ]


def time_facts(runs: Sequence[RunRecord], baselines: Sequence[RunRecord], pairs: Sequence[Pair]) -> dict[str, Any]:
    """Return a row's times: the median step, and the speed-up unless either side emulated formats or the runs are not alike.

    The speed-up is the ratio of the two rows' medians, as they are shown; its range, what each seed by itself would give.
    """
    ours_ms, theirs_ms = _median_ms(*runs), _median_ms(*baselines)
    facts: dict[str, Any] = {"step_ms": ours_ms}
    if why_not_timed(pairs) or any(run.effective.emulated for pair in pairs for run in (pair.run, pair.baseline)):
        return facts
    times = [(_median_ms(pair.run), _median_ms(pair.baseline)) for pair in pairs]
    ratios = [theirs / ours for ours, theirs in times if ours and theirs]
    if not ratios or not ours_ms or not theirs_ms:
        return facts
    facts["speedup"] = theirs_ms / ours_ms
    if len(ratios) > 1:  # one ratio has no spread
        facts |= {"speedup_low": min(*ratios, facts["speedup"]), "speedup_high": max(*ratios, facts["speedup"])}
    return facts


def memory_ratio(pairs: Sequence[Pair]) -> float | None:
    """Return a policy's bytes over the baseline's in the first pair: the allocator's peak, or else the four kinds.

    None if unknown, or if either run was emulated.
    """
    if not pairs:
        return None
    ours, theirs = pairs[0].run.memory, pairs[0].baseline.memory
    if ours.of_emulation or theirs.of_emulation:
        return None
    sizes = [(ours.cuda_allocated_bytes, theirs.cuda_allocated_bytes), (ours.total_bytes, theirs.total_bytes)]
    return next((a / b for a, b in sizes if a and b), None)


def cost_notes(facts: dict[str, Any], *, baseline: str) -> list[str]:
    """Return notes on a policy that is slower or larger than the baseline."""
    notes = []
    speedup, high = facts.get("speedup"), facts.get("speedup_high")
    if speedup is not None and high is not None and high < 1.0 and speedup < SLOWER:
        notes.append(f"slower: a step takes {1.0 / speedup:.3g} times as long as {baseline}'s")
    ratio = facts.get("memory_ratio")
    if ratio is not None and ratio > _LARGER:
        notes.append(f"larger: it takes {ratio:.3g} times {baseline}'s memory")
    return notes


WORTH_SAYING = 0.05
"""The share of skipped updates from which they are mentioned."""
MIN_AT_END = 3
"""A dynamic loss scale skips an update now and then; this many in a row at the end are a failure."""


def skipped_at_the_end(run: RunRecord) -> int:
    """Return the number of updates skipped at the end, if these are all of the last tenth and at least three; else 0."""
    at_end = sum(1 for _ in takewhile(bool, reversed(run.steps.skipped)))
    needed = max(MIN_AT_END, len(run.steps) // 10)
    return at_end if at_end >= min(needed, len(run.steps)) > 0 else 0


def skip_note(runs: Sequence[RunRecord], *, policy: str) -> str | None:
    """Return a note on the skipped updates of a policy's ``runs``; None if they are few."""
    steps, skipped = sum(len(run.steps) for run in runs), sum(run.steps.num_skipped for run in runs)
    if not steps or skipped < WORTH_SAYING * steps:
        return None
    text = f"skipped {percent(skipped / steps)} of its updates"
    settled = _settled_scale(runs, skipped)
    at_the_start = f"{text}, most at the start until its loss scale was found"
    if policy == AS_IS:
        return text if settled is None else f"{at_the_start}: try GradScaler(init_scale={settled:g})"
    parsed = Policy.parse(policy)
    if parsed.loss_scale == "static":
        return f"{text}: try a loss scale that adapts, {parsed.replace(loss_scale='dynamic')}"
    if settled is not None:
        return f"{at_the_start}: try {parsed.replace(init_scale=settled)}"
    return f"{text}: try bf16, which has FP32's range"


def _skipped_at_the_start(skipped: Sequence[bool]) -> int:
    first_pair_made = (i for i, pair in enumerate(pairwise(skipped)) if not any(pair))
    return sum(skipped[: next(first_pair_made, len(skipped))])


def _settled_scale(runs: Sequence[RunRecord], num_skipped: int) -> float | None:
    """Return the loss scale that runs ended with, if most of their skips came before two updates in a row; else None."""
    at_start = sum(_skipped_at_the_start(run.steps.skipped) for run in runs)
    if 2 * at_start <= num_skipped or any(map(skipped_at_the_end, runs)):
        return None
    return next((run.final_scale for run in runs if run.final_scale is not None), None)
