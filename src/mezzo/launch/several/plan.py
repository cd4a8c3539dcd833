"""What a check does next, from what it knows so far: a pure function, so that every course of a check is a row of a test.

1. The baseline with the first seed: whether the script trains at all, and how long a run takes. If it goes wrong, its other seeds;
   if all do, its diagnosis, and nothing else.
2. All policies with every seed, one seed after the other, as far as the time goes. A policy that goes wrong gets no more seeds,
   unless the baseline itself does; nor does one that has no effect on the script.
3. A diagnosis of each policy that went wrong.
4. While no policy trains like the baseline: what may repair one, from the cheapest on (the diagnosis's fix, a loss scale from the
   ranges, modules that stay in FP32), and the repaired policy over the same seeds.
5. A loss scale for the policy that would be the answer, if it skips many updates.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from mezzo.measure.check.answer import WENT_WRONG, Repair, skipped_share
from mezzo.measure.check.preference import simplest_first
from mezzo.measure.compare import compare
from mezzo.measure.compare.baseline import Baseline
from mezzo.measure.compare.pairing import grouped
from mezzo.measure.compare.skips import WORTH_SAYING
from mezzo.policy import Policy
from mezzo.records import AS_IS, CompareRecord, DiagnoseRecord, Effective, FallbackRecord, RangesRecord, RunRecord

MARGIN = 0.02
_FOR_RUNS = 0.7
"""Share of the budget for the runs that are compared; the rest is for finding out why one failed."""
_DIAGNOSIS_RUNS, _FALLBACK_RUNS = 3.0, 12.0
"""How many runs of the script each takes, roughly; a fallback's are short ones. Ranges take one run."""
_FEW_STEPS = 5

Stage = Literal["run", "diagnose", "ranges", "fallback"]


@dataclass(frozen=True, kw_only=True)
class NextStage:
    """The next thing to do."""

    stage: Stage
    policy: str
    why: str
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class CheckState:
    """Everything that a check knows."""

    policies: tuple[str, ...]
    """The policies to compare, the baseline first."""
    seeds: int
    left_s: float
    runs: tuple[RunRecord, ...] = ()
    lost: frozenset[tuple[str, int]] = frozenset()
    """Runs, by policy and seed, that were stopped because the time was over."""
    took_s: Mapping[tuple[str, int], float] = field(default_factory=dict)
    """How long runs took, by policy and seed, their process's start included."""
    diagnosed: Mapping[str, DiagnoseRecord | None] = field(default_factory=dict)
    """By policy; None where the diagnosis could not be made."""
    ranged: Mapping[str, RangesRecord | None] = field(default_factory=dict)
    searched: Mapping[str, FallbackRecord | None] = field(default_factory=dict)
    at_once: int = 1
    """The most runs at once."""
    observable: bool = True
    """Whether diagnosis, ranges and fallback support the script's framework."""

    @property
    def baseline(self) -> str:
        """The policy that all others are compared with."""
        return self.policies[0]

    def run(self, policy: str, seed: int) -> RunRecord | None:
        """Return the run of a policy with a seed; None if there is none."""
        return next((run for run in self.runs if (run.policy, run.seed) == (policy, seed)), None)

    def is_over(self, policy: str, seed: int) -> bool:
        """Return whether a run was made, or was stopped."""
        return self.run(policy, seed) is not None or (policy, seed) in self.lost

    def seconds(self, policy: str) -> float:
        """Return how long the next run of a policy may take: as long as its longest, or as the longest of all."""
        took = [(run.policy, self.took_s.get((run.policy, run.seed or 0), run.duration_s)) for run in self.runs]
        own = [seconds for name, seconds in took if name == policy]
        return max(own or [seconds for _, seconds in took], default=0.0)

    def compared(self) -> CompareRecord:
        """Return the comparison of the runs so far."""
        return compare(list(self.runs), baseline=self.baseline, margin=MARGIN, command=[])

    def seconds_together(self, policies: Sequence[str]) -> float:
        """Return how long the next runs of some policies may take, as many at once as there are places."""
        own = [self.seconds(policy) for policy in policies]
        return max([sum(own) / self.at_once, *own])


def first_run_limit_s(budget_s: float, *, num_policies: int, seeds: int, at_once: int = 1) -> float:
    """Return how long the first run may take, so that every policy can run with every seed; longer scripts are stopped after some steps.

    The first run has no other beside it, since all that follows depends on it.
    """
    return _FOR_RUNS * budget_s / (1 + math.ceil((num_policies * seeds - 1) / at_once))


def next_asked(known: CheckState) -> NextStage | None:
    """Return what to do next; None if the answer is known, or there is no time for what is missing."""
    first = known.run(known.baseline, 0)
    if first is None:
        why = "the baseline: whether the script trains at all, and how long a run takes"
        return None if known.is_over(known.baseline, 0) else NextStage(stage="run", policy=known.baseline, why=why)
    if first.error is not None or not len(first.steps):
        return None
    if not _base(known).sound:
        return _of_broken_baseline(known)
    asked = _next_run(known, known.policies, seeds=known.seeds)
    if asked is not None:
        return asked
    wrong = gone_wrong(known)
    return next(_diagnoses(known, wrong), None) or _repair(known, wrong)


def expected_runs(known: CheckState) -> Iterator[NextStage]:
    """Yield the runs that follow the next one if each ends as the baseline's first one did; none while nothing is known."""
    like, number = known.run(known.baseline, 0), 0
    while like is not None and (asked := next_asked(known)) is not None and asked.stage == "run":
        if number and asked.policy not in known.policies:
            return  # a repair, which may not be needed
        if number:
            yield asked
        made = like.model_copy(update={"policy": asked.policy, "seed": asked.seed, "effective": Effective()})
        known, number = replace(known, runs=(*known.runs, made)), number + 1


def _base(known: CheckState) -> Baseline:
    return Baseline.of(grouped(known.runs)[known.baseline], runs=list(known.runs), margin=MARGIN)


def _of_broken_baseline(known: CheckState) -> NextStage | None:
    """Return what to do while every run of the baseline went wrong: its other seeds, then its cause; no other policy can be judged."""
    seed = next((seed for seed in range(known.seeds) if not known.is_over(known.baseline, seed)), None)
    if seed is not None and known.seconds(known.baseline) <= known.left_s:
        why = f"{known.baseline} itself went wrong: whether it does with another seed"
        return NextStage(stage="run", policy=known.baseline, seed=seed, why=why)
    if not known.observable or known.baseline in known.diagnosed or known.left_s <= 0:
        return None
    return NextStage(stage="diagnose", policy=known.baseline, why=f"to find why {known.baseline} itself goes wrong")


def undone(known: CheckState) -> str:
    """Return what would be done next if there were time; empty if nothing is left to do."""
    asked = next_asked(replace(known, left_s=math.inf, lost=frozenset()))
    if asked is None:
        return ""
    if asked.stage == "run":
        return f"{asked.policy} with seed {asked.seed}"
    return f"mezzo {asked.stage} --policy {asked.policy}"


def gone_wrong(known: CheckState) -> list[str]:
    """Return the policies that diverged, stopped learning or failed; none while as large a share of the baseline's runs did."""
    groups, base = grouped(known.runs), _base(known)
    if base.faults or base.group.failed:  # an unstable script: only all seeds together tell
        return [row.policy for row in known.compared().rows if row.verdict in WENT_WRONG]
    return [
        policy
        for policy, group in groups.items()
        if policy != known.baseline and (group.failed or base.faults_of(group))
    ]


# --- runs --------------------------------------------------------------------------------------------------------------------


def _next_run(known: CheckState, policies: Sequence[str], *, seeds: int) -> NextStage | None:
    """Return the next run of some policies: seed by seed, each seed beginning with another policy."""
    wrong = [] if _base(known).faults else gone_wrong(known)
    out = {*wrong, *(run.policy for run in known.runs if run.changed_nothing)}
    for seed in range(seeds):
        playing = [policy for policy in policies if policy not in out]
        if playing == [known.baseline] and len(policies) > 1:
            return None
        start = seed % len(playing) if playing else 0
        missing = [policy for policy in playing[start:] + playing[:start] if not known.is_over(policy, seed)]
        if not missing:
            continue
        reserve = known.seconds(known.baseline) * _DIAGNOSIS_RUNS if wrong else 0.0
        if seed and known.seconds_together(missing) + reserve > known.left_s:
            return None
        if known.left_s <= 0:
            return None
        return NextStage(stage="run", policy=missing[0], seed=seed, why=_why_run(known, missing[0], seed))
    return None


def _why_run(known: CheckState, policy: str, seed: int) -> str:
    if seed:
        return "a difference shows only against the spread between seeds"
    found = (f"to judge it like the others; {one.how}" for one in repairs(known) if one.policy == policy)
    return next(found, f"to compare it with {known.baseline}")


# --- causes ------------------------------------------------------------------------------------------------------------------


def _diagnoses(known: CheckState, wrong: Sequence[str]) -> Iterator[NextStage]:
    """Yield the diagnoses that are missing."""
    for policy in wrong:
        if not known.observable or policy in known.diagnosed or policy not in known.policies:
            continue
        if _DIAGNOSIS_RUNS * known.seconds(known.baseline) <= known.left_s:
            seed = _seed_of_fault(known, policy)
            yield NextStage(stage="diagnose", policy=policy, seed=seed, why=f"to find why {policy} went wrong")


def _seed_of_fault(known: CheckState, policy: str) -> int:
    groups, base = grouped(known.runs), _base(known)
    keys = [*base.faults_of(groups[policy]), *groups[policy].failed]
    return (keys[0].seed or 0) if keys else 0


# --- repairs -----------------------------------------------------------------------------------------------------------------


def repairs(known: CheckState) -> list[Repair]:
    """Return the changed policies that diagnoses, ranges and searches suggest, the cheapest first."""
    found = [*_fixes(known), *_scales(known), *_kept(known)]
    return list({one.policy: one for one in reversed(found) if one.policy not in known.policies}.values())[::-1]


def _fixes(known: CheckState) -> Iterator[Repair]:
    for policy, record in known.diagnosed.items():
        if record is not None and record.fix_tried and record.passes:
            yield Repair(of=policy, policy=record.passes[-1].policy, how=f"mezzo diagnose found the fix: {record.fix}")


def _scales(known: CheckState) -> Iterator[Repair]:
    for policy, record in known.ranged.items():
        window = None if record is None else next((w for w in record.windows if w.format == record.format), None)
        if window is None or window.empty or window.suggested is None or policy == AS_IS:
            continue
        changed = Policy.parse(policy).replace(init_scale=2.0**window.suggested)
        how = f"mezzo ranges suggests a loss scale of 2^{window.suggested} to begin with"
        yield Repair(of=policy, policy=str(changed), how=how)


def _kept(known: CheckState) -> Iterator[Repair]:
    for policy, record in known.searched.items():
        if record is not None and record.suggested and (record.kept or record.operations):
            kept = ", ".join([*record.kept, *record.operations])
            yield Repair(of=policy, policy=record.suggested, how=f"mezzo fallback found what to keep in FP32: {kept}")


def _repair(known: CheckState, wrong: Sequence[str]) -> NextStage | None:
    """Return the next step towards a policy that trains like the baseline."""
    comparison = known.compared()
    rows = {row.policy: row for row in comparison.rows if row.policy != known.baseline}
    alike = [policy for policy in simplest_first(list(rows)) if rows[policy].verdict == "equivalent"]
    if comparison.shared_files:
        return None
    suggested = repairs(known)
    for one in suggested:  # one seed may be identical by chance: what was begun is run with every seed
        asked = _next_run(known, [known.baseline, one.policy], seeds=known.seeds) if one.policy in rows else None
        if asked is not None:
            return asked
    if alike:
        return _better_scale(known, comparison, alike[0]) if len(alike) == 1 else None
    for policy in simplest_first([p for p in known.policies[1:] if p in rows]):
        if policy in wrong or rows[policy].verdict == "different":
            tried = [rows[one.policy].verdict for one in suggested if one.of == policy and one.policy in rows]
            if "undecided" in tried:
                continue  # it trains: seeds decide it, not another repair
            asked = next(_steps_to_repair(known, policy, rows[policy].verdict), None)
            if asked is not None:
                return asked
    return None


def _steps_to_repair(known: CheckState, policy: str, verdict: str) -> Iterator[NextStage]:
    """Yield what may still repair one policy, the next step first."""
    for one in repairs(known):
        if one.of == policy:
            asked = _next_run(known, [known.baseline, one.policy], seeds=known.seeds)
            if asked is not None:
                yield asked
    if not known.observable or policy == AS_IS or not Policy.parse(policy).lowers:
        return
    in_time = known.seconds(known.baseline) <= known.left_s
    if _scale_may_help(known, policy) and policy not in known.ranged and in_time:
        why = f"to find a loss scale that suits {Policy.parse(policy).name}'s gradients"
        yield NextStage(stage="ranges", policy=policy, why=why)
    if policy not in known.searched and _short_runs_s(known) <= known.left_s:
        why = f"to find modules that {policy} must keep in FP32, because it {_went(verdict)}"
        yield NextStage(stage="fallback", policy=policy, why=why)


def _better_scale(known: CheckState, comparison: CompareRecord, policy: str) -> NextStage | None:
    """Return the next step towards a loss scale that skips fewer updates, for the only policy that trains alike."""
    if skipped_share(comparison, policy) < WORTH_SAYING or not _has_scale(policy) or not known.observable:
        return None
    for one in repairs(known):
        if one.of == policy:
            return _next_run(known, [known.baseline, one.policy], seeds=known.seeds)
    if policy in known.ranged or known.seconds(known.baseline) > known.left_s:
        return None
    return NextStage(stage="ranges", policy=policy, why="to find a loss scale that skips fewer updates")


def _scale_may_help(known: CheckState, policy: str) -> bool:
    record = known.diagnosed.get(policy)
    of_scale = record is not None and (record.verdict == "scale_overflow" or record.origin == "vanished")
    skips = skipped_share(known.compared(), policy) >= WORTH_SAYING
    return _has_scale(policy) and (of_scale or skips)


def _has_scale(policy: str) -> bool:
    return policy != AS_IS and Policy.parse(policy).loss_scale != "none"


def _short_runs_s(known: CheckState) -> float:
    """Return how long a search takes: some runs of a few steps."""
    run = known.run(known.baseline, 0)
    assert run is not None
    steps_s = sum(ms for ms in run.steps.time_ms if math.isfinite(ms)) / 1e3
    return _FALLBACK_RUNS * (max(known.seconds(known.baseline) - steps_s, 0.0) + _FEW_STEPS * steps_s / len(run.steps))


def _went(verdict: str) -> str:
    words = {"different": "trains to another result", "failed": "failed", "diverged": "diverged"}
    return words.get(verdict, "stopped learning")
