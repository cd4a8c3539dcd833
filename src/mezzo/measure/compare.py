"""Whether two policies train equally well: a verdict from paired runs.

Runs with different seeds end at different losses, so one run under each policy shows nothing. Runs
are paired by seed (those that repeat a seed, or have none, in their order): with the same initial
weights and batches most of that spread cancels in the difference ``d = policy - baseline``. From n
differences with mean m and standard deviation s:

* The 95% confidence interval of the mean is ``m -+ t * s / sqrt(n)``, where t is the 97.5% point of
  Student's t with n - 1 degrees of freedom (Student, Biometrika 6, 1908).
* That a test finds no difference does not show equality: few or noisy runs find none either. Two
  one-sided tests at 5% (TOST) show it up to a margin named beforehand: policies are *equivalent*
  when the 90% interval lies inside [-margin, margin] (Schuirmann, J. Pharmacokinet. Biopharm. 15,
  1987), that of the loss and, where the script prints one, that of the metric.
* They are *different* when the 95% interval of either lies wholly beyond the margin on one side.
* Otherwise they are *undecided*; at the same m and s, ``seeds_needed`` is the n that would decide.

Limits: the differences are taken as independent and about normal. With two or three seeds t is 12.7
or 4.3 and s a rough guess, and so is ``seeds_needed``; from ten seeds on both matter little. Rows
are judged one by one: of many policies that are off by the margin, one in twenty still passes.

A run's final loss is the mean of the finite losses in the last tenth of its steps. The margin is a
share of the loss that the baseline's training took off, from its first tenth to its last, and of
the baseline's metric. Imports no torch and reads no files.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from scipy import stats

from mezzo.errors import MezzoError, PolicyError, nearest
from mezzo.records import CompareRecord, Difference, Row, RunRecord, Verdict

MAX_SEEDS = 1000
"""The largest number of seeds that ``seeds_needed`` looks at."""

_MIN_WARMUP_STEPS = 3
_MIN_SKIPPED_STEPS = 3
_NO_PROGRESS = 1e-6
_CONFIDENCE = 0.95
_TOST_CONFIDENCE = 0.90


def compare(runs: list[RunRecord], *, baseline: str, margin: float, command: list[str]) -> CompareRecord:
    """Return a row and a verdict for each policy among ``runs``, in order of first appearance.

    Args:
        runs: runs of one script, failed ones included.
        baseline: policy text of the runs to compare with.
        margin: difference that counts as equivalent, as a share (see the module's docstring).
        command: what was typed.

    Raises:
        PolicyError: no run has the baseline's policy.
        MezzoError: the margin is not a number above 0.
    """
    groups = _groups(runs)
    if baseline not in groups:
        ran = nearest(baseline, groups) if groups else "there is no run at all"
        raise PolicyError(
            f"baseline {baseline!r} is not a policy that was run; {ran}",
            hint="add it to --policies, or choose a baseline among them",
        )
    if not (math.isfinite(margin) and margin > 0):
        raise MezzoError(
            f"margin={margin!r}; allowed: a number above 0",
            hint="0.02 stands for 2% of the loss that training took off",
        )
    base = _baseline(groups[baseline], margin=margin)
    trained = next((run for group in groups.values() for run in group.trained.values()), runs[0])
    return CompareRecord(
        command=command,
        baseline=baseline,
        margin=margin,
        rows=[_row(group, base=base) for group in groups.values()],
        runs=runs,
        environment=trained.environment,
    )


@dataclass(frozen=True, kw_only=True)
class Paired:
    """Hold one quantity under a policy and under the baseline, pair by pair, with its margin."""

    name: str
    pairs: tuple[tuple[float, float], ...]
    margin: float

    def __len__(self) -> int:
        return len(self.pairs)

    @property
    def differences(self) -> list[float]:
        """Return value minus baseline of each pair."""
        return [value - baseline for value, baseline in self.pairs]

    def interval(self, confidence: float, *, num_pairs: int) -> tuple[float, float]:
        """Return the interval of the mean had ``num_pairs`` this spread; NaN for a single pair."""
        if len(self) < 2:
            return math.nan, math.nan
        mean, spread = statistics.fmean(self.differences), statistics.stdev(self.differences)
        t = float(stats.t.ppf((1.0 + confidence) / 2.0, num_pairs - 1))
        half = t * spread / math.sqrt(num_pairs)
        return mean - half, mean + half

    def is_inside(self, *, num_pairs: int) -> bool:
        """Return whether two one-sided tests at 5% show the difference to be within the margin."""
        low, high = self.interval(_TOST_CONFIDENCE, num_pairs=num_pairs)
        return -self.margin <= low and high <= self.margin

    def is_outside(self, *, num_pairs: int) -> bool:
        """Return whether the 95% interval lies wholly beyond the margin on one side."""
        low, high = self.interval(_CONFIDENCE, num_pairs=num_pairs)
        return low > self.margin or high < -self.margin

    def record(self) -> Difference:
        """Return the quantity as a record holds it."""
        low, high = self.interval(_CONFIDENCE, num_pairs=len(self))
        return Difference(
            value=_mean(value for value, _ in self.pairs),
            baseline=_mean(baseline for _, baseline in self.pairs),
            difference=_mean(self.differences),
            low=low,
            high=high,
            margin=self.margin,
        )

    def text(self) -> str:
        """Return the means, their difference, its interval and where that lies, in words."""
        d = self.record()
        text = f"{self.name} {_short(d.value)} against {_short(d.baseline)}"
        margin = f"the margin of {_short(d.margin)}"
        if len(self) < 2:
            return f"{text} ({_signed(d.difference)}), to be judged by {margin}"
        text += f" ({_signed(d.difference)}, 95% CI {_signed(d.low)} to {_signed(d.high)})"
        if self.is_outside(num_pairs=len(self)):
            return f"{text}, beyond {margin}"
        if not self.is_inside(num_pairs=len(self)):
            return f"{text}, partly beyond {margin}"
        wide = max(-d.low, d.high) > d.margin
        return f"{text}, at 90% inside {margin}" if wide else f"{text}, inside {margin}"


def seeds_needed(quantities: Sequence[Paired]) -> int | None:
    """Return the smallest larger number of pairs that would decide; None above ``MAX_SEEDS``."""
    counts = range(max(map(len, quantities)) + 1, MAX_SEEDS + 1)
    # Intervals only narrow as pairs are added: what is decided stays so, and bisection is exact.
    found = bisect_left(counts, True, key=lambda n: _decided(quantities, num_pairs=n) is not None)
    return counts[found] if found < len(counts) else None


def _decided(quantities: Sequence[Paired], *, num_pairs: int | None = None) -> Verdict | None:
    if any(q.is_outside(num_pairs=num_pairs or len(q)) for q in quantities):
        return "different"
    inside = all(q.is_inside(num_pairs=num_pairs or len(q)) for q in quantities)
    return "equivalent" if inside else None


_Runs = dict[tuple[int | None, int], RunRecord]
"""Runs under their seed and the number of earlier runs with that seed."""


@dataclass(frozen=True, kw_only=True)
class _Group:
    """Hold the runs of one policy: those that trained, and why the others failed."""

    policy: str
    seeds: list[int | None] = field(default_factory=list)
    trained: _Runs = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    @property
    def is_emulated(self) -> bool:
        return any(run.effective.emulated for run in self.trained.values())

    def pairs(self, others: _Runs) -> list[tuple[RunRecord, RunRecord]]:
        return [(run, others[key]) for key, run in self.trained.items() if key in others]


@dataclass(frozen=True, kw_only=True)
class _Baseline:
    """Hold the baseline's runs, those that trained without diverging, and the margins of these."""

    group: _Group
    sound: _Runs
    loss_margin: float
    metric_margin: float


def _groups(runs: Sequence[RunRecord]) -> dict[str, _Group]:
    groups: dict[str, _Group] = {}
    for run in runs:
        group = groups.setdefault(run.policy, _Group(policy=run.policy))
        if run.error is None and len(run.steps) > 0:
            group.trained[run.seed, group.seeds.count(run.seed)] = run
        else:
            group.failures.append(run.error or "the run ended without a training step")
        group.seeds.append(run.seed)
    return groups


def _baseline(group: _Group, *, margin: float) -> _Baseline:
    sound = {k: run for k, run in group.trained.items() if _divergence(run, partner=None) is None}
    return _Baseline(
        group=group,
        sound=sound,
        loss_margin=margin * _progress([_ends(run) for run in sound.values()]),
        metric_margin=margin * abs(_mean(map(_metric, sound.values()))),
    )


def _progress(ends: Sequence[tuple[float, float]]) -> float:
    # A script that starts from trained weights may make no progress to take a share of.
    final, progress = abs(_mean(end for _, end in ends)), abs(_mean(s - end for s, end in ends))
    return progress if progress > _NO_PROGRESS * final else final


def _ends(run: RunRecord) -> tuple[float, float]:
    """Return the mean finite loss of the run's first and last tenth; NaN where none is finite."""
    losses, num = run.steps.loss, _tenth(run)
    return _mean(losses[:num]), _mean(losses[-num:])


def _tenth(run: RunRecord) -> int:
    return max(1, len(run.steps) // 10)


def _mean(values: Iterable[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return statistics.fmean(finite) if finite else math.nan


def _metric(run: RunRecord) -> float:
    return run.metric.values[-1] if run.metric and run.metric.values else math.nan


def _divergence(run: RunRecord, *, partner: RunRecord | None) -> str | None:
    """Return how ``run`` diverged, or None; ``partner`` is the baseline's run of the same seed."""
    tail = run.steps.loss[-_tenth(run) :]
    num_bad = sum(not math.isfinite(loss) for loss in tail)
    if num_bad:
        which = f"{num_bad} of the last {len(tail)} losses" if len(tail) > 1 else "the last loss"
        return f"{which} came out not finite"
    # A dynamic loss scale skips an update now and then: one skipped step is no divergence.
    skipped = run.steps.skipped[-max(_MIN_SKIPPED_STEPS, len(tail)) :]
    if skipped and all(skipped):
        return f"the run ended in skipped updates only ({len(skipped)} looked at)"
    return _divergence_from(partner, run=run) if partner else None


def _divergence_from(partner: RunRecord, *, run: RunRecord) -> str | None:
    (start, end), (base_start, base_end) = _ends(run), _ends(partner)
    if end > start and base_end < base_start:  # false where an end is NaN
        fell = f"fell from {_short(base_start)} to {_short(base_end)}"
        return f"the loss rose from {_short(start)} to {_short(end)} where the baseline's {fell}"
    if run.metric and run.metric.values and not math.isfinite(_metric(run)):
        is_new = math.isfinite(_metric(partner))
        return f"the last {run.metric.name} came out as {_metric(run)}" if is_new else None
    return None


def _divergences(group: _Group, *, base: _Baseline) -> list[str]:
    ways = []
    for key, run in group.trained.items():
        way = _divergence(run, partner=base.sound.get(key))
        if way is not None:
            ways.append(way if run.seed is None else f"with seed {run.seed}, {way}")
    return ways


def _row(group: _Group, *, base: _Baseline) -> Row:
    row = Row(
        policy=group.policy,
        num_runs=len(group.seeds),
        num_failed=len(group.failures),
        verdict="failed",
        reason=group.failures[0] if group.failures else "",
    )
    if not group.trained:
        return row
    first = next(iter(group.trained.values()))
    facts = {
        "emulated": group.is_emulated,
        "memory": first.memory,
        "memory_ratio": _memory_ratio(first, base=base),
        "share_by_format": first.effective.share_by_format,
        "num_skipped": _mean(run.steps.num_skipped for run in group.trained.values()),
        "final_scale": first.final_scale,
    }
    return row.model_copy(update=facts | _times(group, base=base) | _judge(group, base=base))


def _times(group: _Group, *, base: _Baseline) -> dict[str, object]:
    medians = [ms for run in group.trained.values() if math.isfinite(ms := _step_ms(run))]
    step_ms = statistics.median(medians) if medians else None
    pairs = [(_step_ms(run), _step_ms(other)) for run, other in group.pairs(base.group.trained)]
    ratios = [other / ms for ms, other in pairs if ms > 0 and other > 0]
    if group.is_emulated or base.group.is_emulated or not ratios:
        return {"step_ms": step_ms}
    speedup = {"speedup_low": min(ratios), "speedup_high": max(ratios)}
    return {"step_ms": step_ms, "speedup": statistics.median(ratios), **speedup}


def _step_ms(run: RunRecord) -> float:
    """Return the median time of a step after warm-up; of all steps where no more were made."""
    times = run.steps.time_ms
    warm = times[max(_MIN_WARMUP_STEPS, len(times) // 10) :] or times
    finite = [ms for ms in warm if math.isfinite(ms)]
    return statistics.median(finite) if finite else math.nan


def _memory_ratio(run: RunRecord, *, base: _Baseline) -> float | None:
    first = next(iter(base.group.trained.values()), None)
    if first is None:
        return None
    ours, theirs = run.memory.cuda_allocated_bytes, first.memory.cuda_allocated_bytes
    if not (ours and theirs):
        ours, theirs = run.memory.total_bytes, first.memory.total_bytes
    return ours / theirs if ours and theirs else None


def _judge(group: _Group, *, base: _Baseline) -> dict[str, object]:
    pairs = group.pairs(base.sound)
    name = next((run.metric.name for run in group.trained.values() if run.metric), "metric")
    loss = _paired("loss", [(_ends(r)[1], _ends(b)[1]) for r, b in pairs], base.loss_margin)
    metric = _paired(name, [(_metric(r), _metric(b)) for r, b in pairs], base.metric_margin)
    quantities = [q for q in (loss, metric) if q]
    verdict, reason, needed = _verdict(group, base=base, quantities=quantities)
    notes = [reason]
    if group.failures:
        counts = f"{len(group.failures)} of {len(group.seeds)} runs failed"
        notes.append(f"{counts}: {group.failures[0]}")
    if group.is_emulated:
        notes.append("its formats are emulated here, so its times say nothing of a speed-up")
    return {
        "loss": loss.record() if loss else None,
        "metric": metric.record() if metric else None,
        "verdict": verdict,
        "reason": "; ".join(notes),
        "seeds_needed": needed,
    }


def _paired(name: str, pairs: Sequence[tuple[float, float]], margin: float) -> Paired:
    known = tuple(pair for pair in pairs if all(map(math.isfinite, pair)))
    return Paired(name=name, pairs=known, margin=margin)


def _verdict(group: _Group, *, base: _Baseline, quantities: Sequence[Paired]) -> tuple[Verdict, str, int | None]:
    ways = _divergences(group, base=base)
    how = f"{len(ways)} of {len(group.seeds)} runs diverged: {ways[0]}" if ways else ""
    if group.policy == base.group.policy:
        sizes = " and ".join(f"{q.name} {_short(q.record().value)}" for q in quantities)
        return "baseline", how or f"the others are compared with its {sizes}", None
    if how:
        return "diverged", how, None
    if not quantities:
        why = f"no run shares its seed with a run under {base.group.policy} that trained well"
        return "undecided", why, None
    if all(_is_identical(run, other) for run, other in group.pairs(base.sound)):
        return "equivalent", f"every step's loss is identical to {base.group.policy}'s", None
    return _decide(quantities)


def _is_identical(run: RunRecord, other: RunRecord) -> bool:
    last, other_last = (r.metric.values[-1:] if r.metric else [] for r in (run, other))
    return run.steps.loss == other.steps.loss and last == other_last


def _decide(quantities: Sequence[Paired]) -> tuple[Verdict, str, int | None]:
    text = "; ".join(q.text() for q in quantities)
    num_seeds = max(map(len, quantities))
    if num_seeds == 1:
        text += "; one seed has no spread to judge a difference by: run it again with --seeds 3"
        return "undecided", text, None
    verdict = _decided(quantities)
    if verdict is not None:
        return verdict, text, None
    needed = seeds_needed(quantities)
    would = f"{needed} would" if needed else f"nor would {MAX_SEEDS}"
    text += f"; {num_seeds} seeds do not decide, {would} at the same mean and spread"
    return "undecided", text, needed


def _short(value: float) -> str:
    return f"{value:.0f}" if 1e4 <= abs(value) < 1e9 else f"{value:.4g}"


def _signed(value: float) -> str:
    return f"{value:+.0f}" if 1e2 <= abs(value) < 1e9 else f"{value:+.2g}"
