"""What a check does next, given what it knows: a pure function, so that every course of a check is a row of a test.

1. The baseline with the first seed: whether the script trains at all, and how long a run takes. If it goes wrong, its other seeds;
   if all do, its diagnosis, and nothing else.
2. All policies with every seed, one seed after another, as far as the time allows. A policy that goes wrong gets no more seeds,
   unless the baseline itself goes wrong; nor does a policy that has no effect on the script.
3. A diagnosis of each policy that went wrong.
4. While no policy trains like the baseline: possible repairs, the cheapest first (the diagnosis's fix, a loss scale from the
   ranges, modules that stay in FP32), each tried over the same seeds.
5. A better loss scale for the policy that would be the answer, if it skips many updates.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from mezzo.commands.check.answer import WENT_WRONG, Repair, skipped_share
from mezzo.commands.check.worth import simplest_first
from mezzo.commands.compare.baseline import Baseline
from mezzo.commands.compare.costs import WORTH_SAYING
from mezzo.commands.compare.judge import compare
from mezzo.commands.compare.pairing import grouped
from mezzo.devices import Device
from mezzo.formats import BF16, E4M3, FP16, FP32, TF32
from mezzo.policy import Policy
from mezzo.records import (
    AS_IS,
    CompareRecord,
    DiagnoseRecord,
    Effective,
    FallbackRecord,
    Note,
    RangesRecord,
    RunRecord,
)
from mezzo.records.run import INSPECTING

MARGIN = 0.02
_FOR_RUNS = 0.7
"""Share of the budget for the runs that are compared; the rest is for finding out why one went wrong."""
_DIAGNOSIS_RUNS, _FALLBACK_RUNS = 3.0, 12.0
"""How many runs of the script each needs, roughly; a fallback search makes short ones. Ranges need one run."""
_FALLBACK_STEPS = 5

StageKind = Literal["run", "diagnose", "ranges", "fallback"]


@dataclass(frozen=True, kw_only=True)
class NextStage:
    """What a check is to do next."""

    kind: StageKind
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
    """How long runs took, by policy and seed, including the start of their process."""
    diagnosed: Mapping[str, DiagnoseRecord | None] = field(default_factory=dict)
    """By policy; None if the diagnosis was not possible."""
    ranged: Mapping[str, RangesRecord | None] = field(default_factory=dict)
    searched: Mapping[str, FallbackRecord | None] = field(default_factory=dict)
    at_once: int = 1
    """The most runs at once."""
    inspecting: tuple[str, ...] = INSPECTING
    """Which of the commands that inspect operations support the script's framework."""

    @property
    def baseline(self) -> str:
        """The policy that all others are compared with."""
        return self.policies[0]

    def run(self, policy: str, seed: int) -> RunRecord | None:
        """Return the run of a policy with a seed; None if there is none."""
        return next((run for run in self.runs if (run.policy, run.seed) == (policy, seed)), None)

    def is_over(self, policy: str, seed: int) -> bool:
        """Return whether a run has ended, or was stopped."""
        return self.run(policy, seed) is not None or (policy, seed) in self.lost

    def seconds(self, policy: str) -> float:
        """Return how long the next run of a policy may take: as long as its longest so far, or as the longest of any policy."""
        took = [(run.policy, self.took_s.get((run.policy, run.seed or 0), run.duration_s)) for run in self.runs]
        of_policy = [seconds for name, seconds in took if name == policy]
        return max(of_policy or [seconds for _, seconds in took], default=0.0)

    def compared(self) -> CompareRecord:
        """Return the comparison of the runs made so far."""
        return compare(list(self.runs), baseline=self.baseline, margin=MARGIN, command=[])

    def seconds_together(self, policies: Sequence[str]) -> float:
        """Return how long the next runs of some policies may take together, at most ``at_once`` at a time."""
        each = [self.seconds(policy) for policy in policies]
        return max([sum(each) / self.at_once, *each])


def first_run_limit_s(budget_s: float, *, num_policies: int, seeds: int, at_once: int = 1) -> float:
    """Return how long the first run may take, so that every policy can run with every seed; longer scripts are stopped after some steps.

    The first run is alone, since everything that follows depends on it.
    """
    return _FOR_RUNS * budget_s / (1 + math.ceil((num_policies * seeds - 1) / at_once))


def next_stage(known: CheckState) -> NextStage | None:
    """Return what to do next; None if the answer is known, or there is no time for what is missing."""
    first = known.run(known.baseline, 0)
    if first is None:
        why = "the baseline: whether the script trains at all, and how long a run takes"
        return None if known.is_over(known.baseline, 0) else NextStage(kind="run", policy=known.baseline, why=why)
    if first.error is not None or not len(first.steps):
        return None
    if not _base(known).sound:
        return _after_broken_baseline(known)
    stage = _next_run(known, known.policies, seeds=known.seeds)
    if stage is not None:
        return stage
    wrong = gone_wrong(known)
    return next(_diagnoses(known, wrong), None) or _repair(known, wrong)


def expected_runs(known: CheckState) -> Iterator[NextStage]:
    """Yield the runs that follow the next one if each ends like the first run of the baseline; none before that run."""
    first, number = known.run(known.baseline, 0), 0
    while first is not None and (stage := next_stage(known)) is not None and stage.kind == "run":
        if number and stage.policy not in known.policies:
            return  # a repair, which may not be needed
        if number:
            yield stage
        assumed = first.model_copy(update={"policy": stage.policy, "seed": stage.seed, "effective": Effective()})
        known, number = replace(known, runs=(*known.runs, assumed)), number + 1


def _base(known: CheckState) -> Baseline:
    return Baseline.of(grouped(known.runs)[known.baseline], runs=list(known.runs), margin=MARGIN)


def _after_broken_baseline(known: CheckState) -> NextStage | None:
    """Return what to do while every run of the baseline goes wrong: its other seeds, then a diagnosis; no other policy can be judged."""
    seed = next((seed for seed in range(known.seeds) if not known.is_over(known.baseline, seed)), None)
    if seed is not None and known.seconds(known.baseline) <= known.left_s:
        why = f"{known.baseline} itself went wrong: to see whether it does with another seed"
        return NextStage(kind="run", policy=known.baseline, seed=seed, why=why)
    if "diagnose" not in known.inspecting or known.baseline in known.diagnosed or known.left_s <= 0:
        return None
    return NextStage(kind="diagnose", policy=known.baseline, why=f"to find why {known.baseline} itself goes wrong")


def undone(known: CheckState) -> str:
    """Return what would be done next if there were more time; empty if nothing is left to do."""
    stage = next_stage(replace(known, left_s=math.inf, lost=frozenset()))
    if stage is None:
        return ""
    if stage.kind == "run":
        return f"{stage.policy} with seed {stage.seed}"
    return f"mezzo {stage.kind} --policy {stage.policy}"


def gone_wrong(known: CheckState) -> list[str]:
    """Return the policies that diverged, stopped learning or failed; none while as large a share of the baseline's runs did."""
    groups, base = grouped(known.runs), _base(known)
    if base.faults or base.group.failed:  # an unstable script: only all seeds together can be judged
        return [row.policy for row in known.compared().rows if row.verdict in WENT_WRONG]
    return [
        policy
        for policy, group in groups.items()
        if policy != known.baseline and (group.failed or base.faults_of(group))
    ]


def _next_run(known: CheckState, policies: Sequence[str], *, seeds: int) -> NextStage | None:
    """Return the next run of some policies: seed by seed, each seed beginning with another policy."""
    wrong = [] if _base(known).faults else gone_wrong(known)
    eliminated = {*wrong, *(run.policy for run in known.runs if run.changed_nothing)}
    for seed in range(seeds):
        remaining = [policy for policy in policies if policy not in eliminated]
        if remaining == [known.baseline] and len(policies) > 1:
            return None
        start = seed % len(remaining) if remaining else 0
        missing = [policy for policy in remaining[start:] + remaining[:start] if not known.is_over(policy, seed)]
        if not missing:
            continue
        reserve = known.seconds(known.baseline) * _DIAGNOSIS_RUNS if wrong else 0.0
        if seed and known.seconds_together(missing) + reserve > known.left_s:
            return None
        if known.left_s <= 0:
            return None
        return NextStage(kind="run", policy=missing[0], seed=seed, why=_why_run(known, missing[0], seed))
    return None


def _why_run(known: CheckState, policy: str, seed: int) -> str:
    if seed:
        return "a difference shows only against the spread between seeds"
    reasons = (f"to judge it like the others; {repair.how}" for repair in repairs(known) if repair.policy == policy)
    return next(reasons, f"to compare it with {known.baseline}")


def _diagnoses(known: CheckState, wrong: Sequence[str]) -> Iterator[NextStage]:
    """Yield the diagnoses that are missing."""
    for policy in wrong:
        if "diagnose" not in known.inspecting or policy in known.diagnosed or policy not in known.policies:
            continue
        if _DIAGNOSIS_RUNS * known.seconds(known.baseline) <= known.left_s:
            seed = _seed_of_fault(known, policy)
            yield NextStage(kind="diagnose", policy=policy, seed=seed, why=f"to find why {policy} went wrong")


def _seed_of_fault(known: CheckState, policy: str) -> int:
    groups, base = grouped(known.runs), _base(known)
    keys = [*base.faults_of(groups[policy]), *groups[policy].failed]
    return (keys[0].seed or 0) if keys else 0


def repairs(known: CheckState) -> list[Repair]:
    """Return the changed policies that diagnoses, ranges and searches suggest, the cheapest first."""
    suggested = [*_from_diagnoses(known), *_from_ranges(known), *_from_searches(known)]
    by_policy = {repair.policy: repair for repair in reversed(suggested) if repair.policy not in known.policies}
    return list(by_policy.values())[::-1]


def _from_diagnoses(known: CheckState) -> Iterator[Repair]:
    for policy, record in known.diagnosed.items():
        if record is not None and record.fix_tried and record.passes:
            yield Repair(of=policy, policy=record.passes[-1].policy, how=f"mezzo diagnose found the fix: {record.fix}")


def _from_ranges(known: CheckState) -> Iterator[Repair]:
    for policy, record in known.ranged.items():
        window = None if record is None else next((w for w in record.windows if w.format == record.format), None)
        if window is None or window.empty or window.suggested is None or policy == AS_IS:
            continue
        changed = Policy.parse(policy).replace(init_scale=2.0**window.suggested)
        how = f"mezzo ranges suggests an initial loss scale of 2^{window.suggested}"
        yield Repair(of=policy, policy=str(changed), how=how)


def _from_searches(known: CheckState) -> Iterator[Repair]:
    for policy, record in known.searched.items():
        if record is not None and record.suggested and record.helps:
            kept = ", ".join([*record.kept, *record.operations])
            yield Repair(of=policy, policy=record.suggested, how=f"mezzo fallback found what to keep in FP32: {kept}")


def _repair(known: CheckState, wrong: Sequence[str]) -> NextStage | None:
    """Return the next stage towards a policy that trains like the baseline."""
    comparison = known.compared()
    rows = {row.policy: row for row in comparison.rows if row.policy != known.baseline}
    alike = [policy for policy in simplest_first(list(rows)) if rows[policy].verdict == "equivalent"]
    if comparison.shared_files:
        return None
    suggested = repairs(known)
    for repair in suggested:  # one seed may agree by chance: a repair that was begun is run with every seed
        begun = repair.policy in rows
        stage = _next_run(known, [known.baseline, repair.policy], seeds=known.seeds) if begun else None
        if stage is not None:
            return stage
    if alike:
        return _better_scale(known, comparison, alike[0]) if len(alike) == 1 else None
    for policy in simplest_first([p for p in known.policies[1:] if p in rows]):
        if policy in wrong or rows[policy].verdict == "different":
            tried = [rows[r.policy].verdict for r in suggested if r.of == policy and r.policy in rows]
            if "undecided" in tried:
                continue  # a repair trains: more seeds decide about it, not another repair
            stage = next(_stages_to_repair(known, policy, rows[policy].verdict), None)
            if stage is not None:
                return stage
    return None


def _stages_to_repair(known: CheckState, policy: str, verdict: str) -> Iterator[NextStage]:
    """Yield the stages that may still repair one policy, the next one first."""
    for repair in repairs(known):
        if repair.of == policy:
            stage = _next_run(known, [known.baseline, repair.policy], seeds=known.seeds)
            if stage is not None:
                yield stage
    if "ranges" not in known.inspecting or policy == AS_IS or not Policy.parse(policy).lowers:
        return
    in_time = known.seconds(known.baseline) <= known.left_s
    if _scale_may_help(known, policy) and policy not in known.ranged and in_time:
        why = f"to find a loss scale that suits {Policy.parse(policy).name}'s gradients"
        yield NextStage(kind="ranges", policy=policy, why=why)
    if policy not in known.searched and _search_s(known) <= known.left_s:
        why = f"to find modules that {policy} must keep in FP32, because it {_what_went_wrong(verdict)}"
        yield NextStage(kind="fallback", policy=policy, why=why)


def _better_scale(known: CheckState, comparison: CompareRecord, policy: str) -> NextStage | None:
    """Return the next stage towards a loss scale that skips fewer updates, for the only policy that trains like the baseline."""
    too_few = skipped_share(comparison, policy) < WORTH_SAYING
    if too_few or not _has_scale(policy) or "ranges" not in known.inspecting:
        return None
    for repair in repairs(known):
        if repair.of == policy:
            return _next_run(known, [known.baseline, repair.policy], seeds=known.seeds)
    if policy in known.ranged or known.seconds(known.baseline) > known.left_s:
        return None
    return NextStage(kind="ranges", policy=policy, why="to find a loss scale that skips fewer updates")


def _scale_may_help(known: CheckState, policy: str) -> bool:
    record = known.diagnosed.get(policy)
    scale_at_fault = record is not None and (record.verdict == "scale_overflow" or record.origin == "vanished")
    skips_often = skipped_share(known.compared(), policy) >= WORTH_SAYING
    return _has_scale(policy) and (scale_at_fault or skips_often)


def _has_scale(policy: str) -> bool:
    return policy != AS_IS and Policy.parse(policy).loss_scale != "none"


def _search_s(known: CheckState) -> float:
    """Return how long a fallback search takes: some runs of a few steps."""
    run = known.run(known.baseline, 0)
    assert run is not None
    steps_s = sum(ms for ms in run.steps.time_ms if math.isfinite(ms)) / 1e3
    start_s = max(known.seconds(known.baseline) - steps_s, 0.0)
    return _FALLBACK_RUNS * (start_s + _FALLBACK_STEPS * steps_s / len(run.steps))


def _what_went_wrong(verdict: str) -> str:
    words = {"different": "trains to a different result", "failed": "failed", "diverged": "diverged"}
    return words.get(verdict, "stopped learning")


BASELINE = FP32.name


class Offered(NamedTuple):
    """A policy that a check considers."""

    policy: str
    tried: bool
    reason: str

    @property
    def note(self) -> Note:
        """The choice in words."""
        return Note(what=self.policy, value="tried" if self.tried else "left out", reason=self.reason)


THE_BASELINE = Offered(BASELINE, True, "the baseline: all others are compared with it")


def offered(here: Device, *, target: Device | None = None, own_amp: str = "") -> list[Offered]:
    """Return the policies to consider, the baseline first.

    Args:
        here: the device that the script runs on.
        target: the device that the answer is for, if different.
        own_amp: the call or argument by which the script asks for mixed precision; empty if it does not.
    """
    target = target or here
    fp8 = target.support(E4M3)
    offers = [THE_BASELINE, _tf32(here, target), *_sixteen_bits(here, target)]
    offers.append(Offered("fp8", fp8.level == "native", f"{target.name}: {fp8.reason}"))
    if own_amp:
        why = f"the script asks for mixed precision itself ({own_amp}), which the other policies replace"
        offers.append(Offered(AS_IS, True, why))
    return offers


def tried(offers: Sequence[Offered]) -> list[str]:
    """Return the policies to run, the baseline first."""
    return [offer.policy for offer in offers if offer.tried]


def _tf32(here: Device, target: Device) -> Offered:
    target_support, here_support = target.support(TF32), here.support(TF32)
    if target_support.level != "native":
        return Offered(TF32.name, False, f"{target.name}: {target_support.reason}")
    if here_support.level != "native":
        return Offered(TF32.name, False, f"{target.name} has it, but it cannot be tried here: {here_support.reason}")
    return Offered(TF32.name, True, f"{target.name}: {target_support.reason}")


def _sixteen_bits(here: Device, target: Device) -> list[Offered]:
    """Offer both 16-bit formats, unless an accelerator has units for only one; a CPU emulates a format it has no units for."""
    formats = (BF16, FP16)
    native = [fmt for fmt in formats if target.support(fmt).level == "native"]
    offers = []
    for fmt in formats:
        left_out = len(native) == 1 and target.kind != "cpu" and fmt not in native
        reason = f"{target.name}: {target.support(fmt).reason}"
        if here.support(fmt).level != "native":
            reason += "; emulated here, which shows what it does to training, not how fast it is"
        offers.append(Offered(fmt.name, not left_out, reason))
    return offers


_CALLS = ("autocast", "GradScaler")
_PRECISION = ("precision", "mixed_precision")
_OFF = ("no", "none", "false", "32", "32-true", "64", "64-true", "fp32", "float32", "highest", "high", "medium")
_FLAGS = ("fp16", "bf16")


def own_amp(sources: Iterable[str]) -> str:
    """Return the call or argument by which files ask for mixed precision: ``GradScaler``, ``precision='16-mixed'``; empty if none does."""
    for source in sources:
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError):
            continue
        if found := next(_requests(tree), ""):
            return found
    return ""


def _requests(tree: ast.AST) -> Iterator[str]:
    if any(_is_session(node) for node in ast.walk(tree)):  # named before the autocast() that it contains
        yield "mezzo.Session"
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        keywords = {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg}
        if name in _CALLS and not _is(keywords.get("enabled"), False):
            yield name
        for option in _PRECISION:
            value = keywords.get(option)
            if isinstance(value, ast.Constant) and _lowers(value.value):
                yield f"{option}={value.value!r}"
        yield from (f"{flag}=True" for flag in _FLAGS if _is(keywords.get(flag), True))


def _is_session(node: ast.AST) -> bool:
    """Return whether ``node`` is ``mezzo.Session``, or its import."""
    if isinstance(node, ast.ImportFrom):
        return node.module == "mezzo" and any(name.name == "Session" for name in node.names)
    if not isinstance(node, ast.Attribute) or node.attr != "Session":
        return False
    return isinstance(node.value, ast.Name) and node.value.id == "mezzo"


def _is(node: ast.AST | None, value: bool) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def _lowers(value: object) -> bool:
    return (isinstance(value, str) and value.lower() not in _OFF and any(c in value for c in "168")) or value == 16
