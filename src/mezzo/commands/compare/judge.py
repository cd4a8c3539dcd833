"""Decide whether two policies train equally well, from paired runs.

Runs with different seeds end at different losses, so one run per policy shows nothing. Runs are paired by seed (in their order, if they
repeat a seed or have none), and each policy is compared with the baseline over the seeds that trained under both.

``pairing``      which runs belong together
``series``       a run's losses by name, its final loss, its last metric
``dependence``   runs that read what an earlier run wrote
``trends``       runs that diverged or stopped learning
``scales``       the scales on which values are compared; ``kinds``: the scale that suits a metric, and the step of its values
``margins``      the largest difference that still counts as equivalent
``quantities``   what pairs show: intervals, tests for a difference and for equivalence; ``gathering``: quantities from runs
``seeds``        how many seeds would decide
``skips``        skipped updates, in words; ``costs``: time and memory
``baseline``     the runs with which all others are compared
``verdicts``     the verdict and its reasons; ``words``: numbers in them

A run's final loss is the mean of the finite losses in the last tenth of its steps. Imports no torch and reads no files. The design
decisions are explained in docs/design/comparing.md.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from scipy import special

from mezzo.commands.compare.baseline import Baseline
from mezzo.commands.compare.costs import cost_notes, memory_ratio, skip_note, time_facts, why_not_timed
from mezzo.commands.compare.pairing import (
    LOSS,
    Group,
    Pair,
    RunKey,
    grouped,
    last_metric,
    listed,
    losses_of,
    mean,
    percent,
    sentence,
    short,
    title_of,
)
from mezzo.commands.compare.quantities import PairStatistics, Quantity, spread_errors
from mezzo.commands.compare.trends import Fault, loss_quantity
from mezzo.errors import MezzoError, PolicyError, nearest
from mezzo.records import CompareRecord, Row, RunRecord, Verdict


def compare(runs: list[RunRecord], *, baseline: str, margin: float, command: list[str]) -> CompareRecord:
    """Return a row and a verdict for each policy among ``runs``, in order of first appearance.

    Args:
        runs: runs of one script, failed ones included.
        baseline: policy text of the runs to compare with.
        margin: difference that counts as equivalent, as a share of the baseline's value (see ``margins``).
        command: what was typed.

    Raises:
        PolicyError: no run has the baseline's policy.
        MezzoError: the margin is not a number above 0.
    """
    groups = grouped(runs)
    if baseline not in groups:
        ran = nearest(baseline, groups) if groups else "there is no run at all"
        raise PolicyError(
            f"baseline {baseline!r} is not a policy that was run; {ran}",
            hint="add it to --policies, or choose a baseline among them",
        )
    if not (math.isfinite(margin) and margin > 0):
        raise MezzoError(
            f"margin={margin!r}; allowed: a number above 0",
            hint="0.02 stands for 2% of the baseline's final loss",
        )
    base = Baseline.of(groups[baseline], runs=runs, margin=margin)
    trained = next((run for group in groups.values() for run in group.trained.values()), runs[0])
    return CompareRecord(
        command=command,
        baseline=baseline,
        margin=margin,
        rows=[_row(group, base=base) for group in groups.values()],
        runs=runs,
        shared_files=[dependence.record() for dependence in base.dependences],
        environment=trained.environment,
    )


def _row(group: Group, *, base: Baseline) -> Row:
    judged = judge(group, base=base)
    row = Row(
        policy=group.policy,
        policy_typed=group.typed,
        checkpoint=group.checkpoint,
        num_runs=group.num_runs,
        num_failed=len(group.failed),
        verdict=judged.verdict,
        reason="; ".join(judged.reasons),
        evidence="; ".join(judged.reasons),
        seeds_cannot_decide=judged.seeds_cannot_decide,
        seeds_needed=judged.seeds_needed,
    )
    if not group.trained:
        return row
    facts = _facts(group, base=base)
    notes = [] if group is base.group or judged.is_void else cost_notes(facts, baseline=base.group.name)
    untimed = "" if facts["emulated"] else why_not_timed(group.pairs(base.group.trained))
    others = [untimed] if untimed else []
    said = {
        "reason": "; ".join([*judged.reasons, *notes, *others]),
        "evidence": "; ".join([*judged.reasons, *others]),
    }
    return row.model_copy(update=facts | _compared(judged) | said)


def _facts(group: Group, *, base: Baseline) -> dict[str, Any]:
    """Return the facts of a row besides its verdict, over the seeds that also trained under the baseline; times over all that trained."""
    pairs = group.pairs(base.group.trained)
    runs = [pair.run for pair in pairs] or list(group.trained.values())
    facts = {
        "emulated": any(run.effective.emulated for run in runs),
        "memory": runs[0].memory,
        "memory_ratio": memory_ratio(pairs),
        "share_by_format": runs[0].effective.share_by_format,
        "num_skipped": mean(run.steps.num_skipped for run in runs),
        "final_scale": runs[0].final_scale,
    }
    return facts | time_facts(list(group.trained.values()), list(base.group.trained.values()), pairs)


def _compared(judged: Judged) -> dict[str, Any]:
    losses = {q.name: q.record() for q in judged.quantities if not q.is_metric}
    metric: Quantity | None = next((q for q in judged.quantities if q.is_metric), None)
    return {
        "loss": losses.get(LOSS) if len(losses) < 2 else None,
        "losses": losses if len(losses) > 1 or LOSS not in losses else {},
        "metric": None if metric is None else metric.record(),
    }


# The first rule that applies decides:
#
# 1. ``undecided`` if runs depend on each other, because they show nothing.
# 2. ``failed`` if no run succeeded.
# 3. ``diverged`` or ``stopped_learning``: one run is enough, unless as large a share of the baseline's runs went wrong.
# 4. ``failed`` if a run failed with a seed with which the baseline succeeded.
# 5. ``different`` if a quantity is shown to lie beyond its margin.
# 6. Objections to ``equivalent``: runs that went wrong as some of the baseline's did (``undecided``); a number of steps other than the
#    baseline's with that seed (``different`` if all the baseline's seeds make the same number, else ``undecided``); a policy under which
#    nothing ran in a lower format, so that it was not really tried (``undecided``); steps missing from the record because a CUDA graph
#    of the script replayed them (``undecided``); a requested metric that is missing in a run (``undecided``).
# 7. ``equivalent`` if every quantity is shown to lie within its margin, or nothing differs in any step; else ``undecided``, with the
#    number of seeds that would decide.

_WENT_WRONG = {"diverged": "diverged", "stopped_learning": "stopped learning"}


@dataclass(frozen=True, kw_only=True)
class Judged:
    """The verdict on a policy, its reasons (the most important first), and the quantities that it is based on."""

    verdict: Verdict
    reasons: list[str]
    seeds_needed: int | None = None
    seeds_cannot_decide: bool = False
    quantities: list[Quantity] = field(default_factory=list)
    is_void: bool = False
    """Whether runs depend on each other, so that their numbers say nothing."""


def judge(group: Group, *, base: Baseline) -> Judged:
    """Return the verdict on the policy whose runs are ``group``; for the baseline itself, how it trained."""
    if group is not base.group and (void := _void(group, base=base)) is not None:
        return void
    if not group.trained:
        return Judged(verdict="failed", reasons=[next(iter(group.failed.values()))])
    pairs = group.pairs(base.sound)
    quantities = _quantities(pairs, base=base)
    is_base = group is base.group
    judged = _judge_baseline(base, quantities) if is_base else _judge_other(group, pairs, quantities, base=base)
    keys = [pair.key for pair in pairs] or list(group.trained)
    note = skip_note([group.trained[key] for key in keys], policy=group.policy)
    first, *others = judged.reasons
    return replace(judged, reasons=[first, *([note] if note else []), *others], quantities=quantities)


def _void(group: Group, *, base: Baseline) -> Judged | None:
    """Return ``undecided`` if one of the policy's or of the baseline's runs depends on another; else None."""
    policies = {group.compared_as, base.group.compared_as}
    dependent = [d.text() for d in base.dependences if d.reader.compared_as in policies]
    if not dependent:
        return None
    reasons = [dependent[0], *_describe_failures(group, list(group.failed))]
    quantities = _quantities(group.pairs(base.sound), base=base)
    return Judged(verdict="undecided", reasons=reasons, quantities=quantities, is_void=True)


def _quantities(pairs: Sequence[Pair], *, base: Baseline) -> list[Quantity]:
    losses = [loss_quantity(pairs, name, learning=base.learning[name], margin=base.margin) for name in base.names]
    metric = base.metric.quantity(pairs, margin=base.margin) if base.metric else None
    return [quantity for quantity in (*losses, metric) if quantity is not None]


def _judge_baseline(base: Baseline, quantities: Sequence[Quantity]) -> Judged:
    group = base.group
    reasons = [d.text() for d in base.dependences if d.reader.compared_as == group.compared_as][:1]
    reasons += _describe_faults(base.faults, group)
    reasons += _describe_failures(group, list(group.failed))
    names = [q.name if q.is_metric else title_of(q.name) for q in quantities]
    sizes = " and ".join(f"{n} {short(q.record().value)}" for n, q in zip(names, quantities, strict=True))
    reasons.append(f"the others are compared with its {sizes}" if sizes else "no run of it can serve for comparison")
    return Judged(verdict="baseline", reasons=reasons)


def _judge_other(group: Group, pairs: Sequence[Pair], quantities: Sequence[Quantity], *, base: Baseline) -> Judged:
    shown = [sentence(q, num_quantities=len(quantities), baseline=base.group.name) for q in quantities]
    failures = _describe_failures(group, list(group.failed))
    faults = base.faults_of(group)
    if faults and not base.explains(len(faults), len(group.trained)):
        first = next((fault for fault in faults.values() if fault.verdict == "diverged"), next(iter(faults.values())))
        return Judged(verdict=first.verdict, reasons=[*_describe_faults(faults, group, base=base), *failures])
    new_failures = [key for key in group.failed if key not in base.group.failed]
    if new_failures:
        rest = _describe_failures(group, [key for key in group.failed if key in base.group.failed])
        sentences = _describe_failures(group, new_failures, where=f" where {base.group.name} did not")
        return Judged(verdict="failed", reasons=[*sentences, *rest, *shown])
    objections = _objections(group, pairs, faults, base=base)
    reasons = [*(text for text, _ in objections), *shown, *failures]
    if own_16_bits := _describe_own_16_bits(pairs, base=base):
        return Judged(verdict="undecided", reasons=[own_16_bits, *reasons])
    if any(q.is_beyond(num_quantities=len(quantities)) for q in quantities):
        return Judged(verdict="different", reasons=reasons)
    if objections:
        return Judged(verdict=objections[0][1], reasons=reasons)
    return _equivalent_or_not(pairs, quantities, shown=shown, baseline=base.group.name, failures=failures)


def _equivalent_or_not(
    pairs: Sequence[Pair], quantities: Sequence[Quantity], *, shown: list[str], baseline: str, failures: list[str]
) -> Judged:
    if not quantities:
        why = f"no run shares its seed with a run under {baseline} that trained well"
        return Judged(verdict="undecided", reasons=[why, *failures])
    if all(map(_is_identical, pairs)):
        return Judged(verdict="equivalent", reasons=[f"every step's loss is identical to {baseline}'s", *failures])
    if all(quantity.is_inside() for quantity in quantities):
        return Judged(verdict="equivalent", reasons=[*shown, *failures])
    if len(pairs) == 1:
        why = "one seed has no spread to judge a difference by"
        return Judged(verdict="undecided", reasons=[*shown, why, *failures])
    needed, coarse = seeds_needed(quantities), _too_coarse(quantities, len(pairs))
    reasons = [*shown, _describe_seeds(coarse, len(pairs), needed), *failures]
    never = needed is None or coarse is not None
    return Judged(verdict="undecided", reasons=reasons, seeds_needed=needed, seeds_cannot_decide=never)


def _objections(
    group: Group, pairs: Sequence[Pair], faults: Mapping[RunKey, Fault], *, base: Baseline
) -> list[tuple[str, Verdict]]:
    """Return the reasons why a policy cannot be called equivalent, each with the verdict that applies instead."""
    objections: list[tuple[str, Verdict]] = [(text, "undecided") for text in _describe_faults(faults, group, base=base)]
    unequal = [pair for pair in pairs if len(pair.run.steps) != len(pair.baseline.steps)]
    if unequal:
        first, same = unequal[0], len({len(run.steps) for run in base.sound.values()}) == 1
        counts = f"{len(first.run.steps)} steps where {base.group.name} ran {len(first.baseline.steps)}"
        more = f", and {len(unequal) - 1} more like it" if len(unequal) > 1 else ""
        objections.append((f"ran {counts} with {first.key}{more}", "different" if same else "undecided"))
    if pairs and all(pair.run.changed_nothing for pair in pairs):
        objections.append((_describe_no_effect(pairs[0].run), "undecided"))
    objections += [(text, "undecided") for text in replayed(pairs)]
    if base.metric is not None:
        gap = base.metric.gap(pairs, policy=group.name, baseline=base.group.name)
        objections += [(gap, "undecided")] if gap else []
    return objections


def replayed(pairs: Sequence[Pair]) -> list[str]:
    """Return a sentence if steps of some runs are missing from their records because a CUDA graph replayed them; else nothing."""
    runs_with_replays = [(pair, run) for pair in pairs for run in (pair.run, pair.baseline) if run.replays]
    if not runs_with_replays:
        return []
    pair, run = runs_with_replays[0]
    recorded = f"{len(run.steps)} recorded step{'s' * (len(run.steps) != 1)}"
    return [
        f"{run.replays} of a CUDA graph are missing from the {recorded} with {pair.key}: what the script trains in them is not compared"
    ]


def _describe_no_effect(run: RunRecord) -> str:
    shares = [f"{share:.0%} {name}" for name, share in run.effective.share_by_format.items()]
    why = "".join(f" ({reason.what}: {reason.reason})" for reason in run.effective.left_alone[:1])
    what = f"{listed(shares)} ran" if shares else "no operation ran below 32 bits"
    return f"{run.policy_shown} {run.no_effect}, so this shows nothing about it: {what}{why}"


def _describe_own_16_bits(pairs: Sequence[Pair], *, base: Baseline) -> str:
    """Return why an FP32 baseline is no basis for a verdict, because the script itself trains in 16 bits; empty if it does not."""
    models = [pair.baseline.own_16_bits for pair in pairs if pair.baseline.own_16_bits]
    if not models:
        return ""
    keeps = f"the script itself keeps the weights of {models[0]} in 16 bits, and may scale its losses by itself"
    return f"{base.group.name} is not an FP32 run: {keeps}"


def _is_identical(pair: Pair) -> bool:
    same_losses = losses_of(pair.run) == losses_of(pair.baseline)
    return same_losses and last_metric(pair.run) == last_metric(pair.baseline)


def _describe_faults(faults: Mapping[RunKey, Fault], group: Group, *, base: Baseline | None = None) -> list[str]:
    sentences = []
    for verdict, verb in _WENT_WRONG.items():
        found = [(key, fault) for key, fault in faults.items() if fault.verdict == verdict]
        if found:
            key, fault = found[0]
            sentences.append(f"{_share(len(found), group)} {verb}: with {key}, {fault.text}")
    if sentences and base is not None and base.faults:
        sentences.append(f"{_share(len(base.faults), base.group)} under {base.group.name} went wrong too")
    return sentences


def _describe_failures(group: Group, keys: Sequence[RunKey], *, where: str = "") -> list[str]:
    if not keys:
        return []
    return [f"{_share(len(keys), group)} failed{where}: with {keys[0]}, {group.failed[keys[0]]}"]


def _share(number: int, group: Group) -> str:
    return "the only run" if group.num_runs == 1 else f"{number} of {group.num_runs} runs"


def _too_coarse(quantities: Sequence[Quantity], num_seeds: int) -> Quantity | None:
    """Return the first quantity whose values come in steps that are too large for its margin."""
    return next((q for q in quantities if q.grid and q.rounding >= q.margin.lower_bound(num_seeds)), None)


def _describe_seeds(coarse: Quantity | None, num_seeds: int, needed: int | None) -> str:
    if coarse is not None and coarse.grid is not None:
        return (
            f"{coarse.name} comes in steps of {short(coarse.grid.step)}, too coarse for its margin: print more digits, evaluate on more "
            "examples, or choose a wider --margin"
        )
    if needed is None:
        return f"{num_seeds} seeds do not decide; more than {MAX_SEEDS} would be needed"
    return f"{num_seeds} seeds do not decide; {needed} would, in {percent(DECIDED_SHARE)} of cases or more"


# The observed pairs only estimate the true mean and spread: with three seeds, the true spread may well be twice the estimate. So
# true values that fit the observed pairs are drawn (mean and variance from their posterior under Jeffreys' prior, the baseline's
# spread likewise), future pairs are drawn for each, and the tests run on all pairs together. The result is the smallest number of pairs
# that decides 85% of the cases. If the spread was underestimated by chance, that number is too small, so the true rate of decided
# cases is lower: four of five or more, as ``python -m benchmarks verdicts`` shows. The draws are the same each time.

MAX_SEEDS = 1000
"""The largest number of seeds that is considered."""
DECIDED_SHARE = 0.8
"""The smallest share of cases that the returned number decides."""
_ESTIMATED_SHARE = 0.85
"""The share that is asked of the estimate, which may be too optimistic."""
_DRAWS = 2000


def seeds_needed(quantities: Sequence[Quantity]) -> int | None:
    """Return the smallest larger number of pairs that decides; None if above ``MAX_SEEDS``, or for a single pair."""
    if min(map(len, quantities)) < 2:
        return None
    rng = np.random.default_rng(0)
    futures = [Future(quantity, rng) for quantity in quantities]
    counts = range(max(map(len, quantities)) + 1, MAX_SEEDS + 1)
    found = bisect_left(
        counts, True, key=lambda n: _chance(futures, n) >= _ESTIMATED_SHARE
    )  # more seeds decide more cases
    return counts[found] if found < len(counts) else None


def _chance(futures: Sequence[Future], num_pairs: int) -> float:
    inside, beyond = np.ones(_DRAWS, dtype=bool), np.zeros(_DRAWS, dtype=bool)
    for future in futures:
        seen = future.seen(num_pairs)
        inside &= future.quantity.inside(seen, num_pairs)
        beyond |= future.quantity.beyond(seen, num_pairs, num_quantities=len(futures))
    return float(np.mean(inside | beyond))


class Future:
    """Samples of what further pairs of a quantity may show."""

    def __init__(self, quantity: Quantity, rng: np.random.Generator) -> None:
        self.quantity, self._num = quantity, len(quantity)
        # The absolute mean, because the sign of a difference must not matter.
        self._observed = replace(quantity.seen, mean=np.abs(quantity.seen.mean))
        freedom = self._num - 1
        self._deviation = self._observed.deviation * np.sqrt(
            freedom / (2 * special.gammaincinv(freedom / 2, rng.random(_DRAWS)))
        )
        self._mean = self._observed.mean + self._deviation / math.sqrt(self._num) * rng.standard_normal(_DRAWS)
        self._spread = self._observed.spread / spread_errors(rng.random(_DRAWS), self._num)
        self._draws = rng.standard_normal(_DRAWS), rng.random(_DRAWS), rng.random(_DRAWS)

    def seen(self, num_pairs: int) -> PairStatistics:
        """Return the statistics of ``num_pairs`` pairs, including those already seen."""
        more = num_pairs - self._num
        normal, uniform, spread_uniform = self._draws
        mean = self._mean + self._deviation / math.sqrt(more) * normal
        squares = (
            self._deviation**2 * 2 * special.gammaincinv((more - 1) / 2, uniform) if more > 1 else np.zeros(_DRAWS)
        )
        between = self._num * more / num_pairs * (mean - self._observed.mean) ** 2
        total = (self._num - 1) * self._observed.deviation**2 + squares + between
        deviation = np.maximum(np.sqrt(total / (num_pairs - 1)), self.quantity.step / 2.0)
        return PairStatistics(
            mean=(self._num * self._observed.mean + more * mean) / num_pairs,
            deviation=deviation,
            spread=self._spread * spread_errors(spread_uniform, num_pairs),
            rounding=self._observed.rounding,
        )
