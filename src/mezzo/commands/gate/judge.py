"""Decide whether a script trains as its golden says. Pure: no torch, no files.

The golden holds ten runs, one a seed, and the gate makes five with the first of these seeds. A number that moves is judged by two tests:

* paired by seed: the differences of runs with one seed, by Student's t. The same seed gives the same data and weights, so of an
  unchanged, repeatable script nothing is left of the spread between seeds;
* unpaired: the golden's runs against all new ones, by Student's t with a pooled variance (Student, Biometrika 6, 1908). It finds what
  pairs cannot, as after a change in the order of random numbers, where runs with one seed have nothing in common.

Each test gets half of the error (Bonferroni). All numbers of a gate share an error of 0.5%, and times have as much. A move must also be
larger than the margin: half of the golden's own standard deviation, and never less than a thousandth, which rounding on another machine
may cause.

Without pairs, five runs against ten cannot find a shift of two standard deviations at that error. So while a number is doubtful, five more
runs follow, up to 15, and the test over all runs decides. Rounds that can only acquit do not raise the share of false alarms.

What disturbs a time only makes it longer, so times are compared by the fastest run of each side.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy import special

from mezzo.commands.compare.quantities import Array
from mezzo.records import FormatChange, GateCheck, GateStatus, GateUnit, Golden, GoldenRun, ModuleFormats

FAMILY_ERROR = 0.01
"""The share of gates on unchanged scripts that may fail."""
_NUMBERS_ERROR = FAMILY_ERROR / 2
"""What all losses, metrics and sizes share; the other half is for times."""
_DOUBTFUL_ERROR, _CERTAIN_ERROR = 0.1, 1e-4
"""Of one test: below the first a number is doubtful, below the second no further run is needed."""
_SHARE_OF_SPREAD = 0.5
_ROUNDING_SHARE = 1e-3
_MEMORY_SHARE, TIME_SHARE = 0.01, 0.12
"""The least margins of memory and of time. The second is half-way to the 25% that a gate must find, on a scale of ratios."""
FIRST_RUNS, MORE_RUNS = 5, 15
"""The runs of a round, and how many follow the first one while a number is doubtful."""


@dataclass(frozen=True, kw_only=True)
class WatchedNumber:
    """A number in the runs of a golden and of a gate, by seed."""

    name: str
    golden: Mapping[int, float]
    now: Mapping[int, float]
    worse: int = 0
    """1 if larger is worse, -1 if smaller is, 0 if both are."""
    margin: float
    step: float = 0.0
    """The step of its values, such as printed digits."""
    unit: GateUnit = ""
    may_be_noise: bool = True
    """Whether the runs say how large its noise is."""

    @property
    def moves(self) -> list[NumberMove]:
        """How far it moved: paired if seeds are shared, and unpaired unless no shared seed shows a difference."""
        shared = [seed for seed in self.golden if seed in self.now]
        before, after = np.array([*self.golden.values()]), np.array([*self.now.values()])
        moves = []
        if len(shared) > 1:
            pairs = np.array([(self.golden[seed], self.now[seed]) for seed in shared])
            spread = max(float(np.std(pairs[:, 1] - pairs[:, 0], ddof=1)), self.step / 2.0)
            moves.append(NumberMove.of(pairs[:, 0], pairs[:, 1], spread / math.sqrt(len(shared)), len(shared) - 1))
            if np.array_equal(pairs[:, 0], pairs[:, 1]):
                return moves
        freedom = len(before) + len(after) - 2
        squares = float(np.sum((before - before.mean()) ** 2) + np.sum((after - after.mean()) ** 2))
        spread = max(math.sqrt(squares / freedom), self.step / 2.0)
        return [*moves, NumberMove.of(before, after, spread * math.sqrt(1 / len(before) + 1 / len(after)), freedom)]

    def check(self, *, error: float) -> tuple[GateCheck, bool]:
        """Return what the number shows, and whether it is doubtful; ``error`` is its share of the family's."""
        sides, moves = 1 if self.worse else 2, self.moves
        beyond = [move for move in moves if abs(move.by) > self.margin]
        bad = [move for move in beyond if self.worse * move.by >= 0]
        good = [move for move in beyond if self.worse * move.by < 0 and 2 * move.error < error]
        likeliest = min(bad or moves, key=lambda move: move.error)
        least = sides * 2 * likeliest.error if bad else 1.0
        moved = any(move.by for move in moves)
        passed: GateStatus = "better" if good else "inside" if moved else "same"
        check = GateCheck(
            name=self.name,
            status="failed" if least < error else passed,
            golden=likeliest.golden,
            now=likeliest.now,
            margin=self.margin,
            error=min(least, 1.0) if bad and self.may_be_noise else None,
            unit=self.unit,
        )
        return check, _CERTAIN_ERROR <= least < sides * 2 * _DOUBTFUL_ERROR


@dataclass(frozen=True, kw_only=True)
class NumberMove:
    """How far the mean of a number moved, by one test."""

    golden: float
    now: float
    error: float
    """The one-sided error of the test."""

    @classmethod
    def of(cls, golden: Array, now: Array, deviation: float, freedom: int) -> NumberMove:
        """Return the move between two samples, by Student's t for a move with this standard deviation."""
        means = float(np.mean(golden)), float(np.mean(now))
        return cls(golden=means[0], now=means[1], error=_error(means[1] - means[0], deviation, freedom))

    @property
    def by(self) -> float:
        """The difference of the means."""
        return self.now - self.golden


def _error(moved: float, deviation: float, freedom: int) -> float:
    """Return the one-sided error of Student's t for a mean and its standard deviation."""
    if not moved:
        return 0.5
    return float(special.stdtr(freedom, -abs(moved) / deviation)) if deviation else 0.0


@dataclass(frozen=True, kw_only=True)
class GateJudgement:
    """The checks of the runs so far."""

    checks: list[GateCheck] = field(default_factory=list)
    doubtful: list[str] = field(default_factory=list)
    """Names of the checks that more runs would decide."""

    @property
    def wants_more(self) -> bool:
        """Whether more runs could change the answer: not if something else has failed for certain."""
        failed = {check.name for check in self.checks if check.status == "failed"}
        return bool(self.doubtful) and failed <= set(self.doubtful)

    def undecided(self) -> list[GateCheck]:
        """Return the checks if no further run follows: what is in doubt has not failed."""
        why = "in doubt, and not decided, because something else has failed"
        return [
            check.model_copy(update={"status": "not compared", "reason": why}) if check.name in self.doubtful else check
            for check in self.checks
        ]


def judge(
    golden: Golden, runs: Sequence[GoldenRun], *, worse: int = 0, step: float = 0.0, machine: Mapping[str, str]
) -> GateJudgement:
    """Return the checks of a gate's runs.

    Args:
        golden: what was accepted.
        runs: the gate's own runs, those with the golden's seeds first.
        worse: the direction in which the metric gets worse, as in ``WatchedNumber``.
        step: the step of the metric's values.
        machine: this machine, as in ``Golden.machine``.
    """
    checks = [_steps_check(golden, runs), *_not_finite(golden, runs)]
    broken = {check.name for check in checks if check.status == "failed"}
    numbers = [one for one in _numbers(golden, runs, worse=worse, step=step) if one.name not in broken]
    doubtful, error = [], _NUMBERS_ERROR / max(1, sum(one.may_be_noise for one in numbers))
    for one in numbers:
        if why := _left_out(one, golden, machine):
            checks.append(GateCheck(name=one.name, status="not compared", reason=why))
            continue
        check, is_doubtful = one.check(error=error)
        checks.append(check)
        doubtful += [one.name] if is_doubtful else []
    checks += [GateCheck(name=name, status="not compared", reason=why) for name, why in _missing(golden, runs)]
    timed, slow = _time_check(golden, runs, machine)
    return GateJudgement(checks=[*checks, timed], doubtful=doubtful + ([timed.name] if slow else []))


def _steps_check(golden: Golden, runs: Sequence[GoldenRun]) -> GateCheck:
    before, now = {run.seed: run.num_steps for run in golden.runs}, {run.seed: run.num_steps for run in runs}
    unequal = [seed for seed, number in before.items() if now.get(seed, number) != number]
    if not unequal:
        return GateCheck(
            name="steps", status="same", golden=float(golden.runs[0].num_steps), now=float(runs[0].num_steps)
        )
    varies = len(set(before.values())) > 1
    first = unequal[0]
    why = "the golden's own runs differ in their numbers of steps" if varies else f"with seed {first}"
    status: GateStatus = "inside" if varies else "failed"
    return GateCheck(name="steps", status=status, golden=float(before[first]), now=float(now[first]), reason=why)


def _not_finite(golden: Golden, runs: Sequence[GoldenRun]) -> Iterator[GateCheck]:
    for name in golden.runs[0].losses:
        bad = [run.seed for run in runs if not math.isfinite(run.losses.get(name, 0.0))]
        if bad:
            yield GateCheck(
                name=name, status="failed", now=math.nan, reason=f"not finite at the end with seed {bad[0]}"
            )
        elif any(name not in run.losses for run in runs):
            yield GateCheck(name=name, status="failed", reason="the golden has this loss, and a run of now does not")


def _numbers(golden: Golden, runs: Sequence[GoldenRun], *, worse: int, step: float) -> Iterator[WatchedNumber]:
    names = [name for name in golden.runs[0].losses if all(name in run.losses for run in (*golden.runs, *runs))]
    for name in names:
        before = {run.seed: run.losses[name] for run in golden.runs}
        yield WatchedNumber(
            name=name,
            golden=before,
            now={run.seed: run.losses[name] for run in runs},
            worse=1 if len(golden.runs[0].losses) == 1 else 0,  # of several, as in a GAN, none has to fall
            margin=_margin([*before.values()]),
        )
    metrics = [{run.seed: run.metric for run in side if run.metric is not None} for side in (golden.runs, runs)]
    if all(len(known) > 1 for known in metrics):
        margin = max(_margin([*metrics[0].values()]), step)
        yield WatchedNumber(name="metric", golden=metrics[0], now=metrics[1], worse=worse, margin=margin, step=step)
    sizes = [{run.seed: float(run.memory_bytes) for run in side if run.memory_bytes} for side in (golden.runs, runs)]
    if all(len(known) > 1 for known in sizes):
        margin = _MEMORY_SHARE * float(np.mean([*sizes[0].values()]))
        noisy = len({*sizes[0].values()}) > 1
        yield WatchedNumber(
            name="memory", golden=sizes[0], now=sizes[1], worse=1, margin=margin, unit="bytes", may_be_noise=noisy
        )


def _margin(values: Sequence[float]) -> float:
    """Return the margin of a loss or a metric."""
    return max(_SHARE_OF_SPREAD * float(np.std(values, ddof=1)), _ROUNDING_SHARE * abs(float(np.mean(values))))


def _missing(golden: Golden, runs: Sequence[GoldenRun]) -> Iterator[tuple[str, str]]:
    for name, known in (
        ("metric", [[run.metric for run in side] for side in (golden.runs, runs)]),
        ("memory", [[run.memory_bytes for run in side] for side in (golden.runs, runs)]),
    ):
        sides = [sum(value is not None for value in side) > 1 for side in known]
        if not all(sides) and (name != "metric" or golden.metric):
            where = "in the golden" if not sides[0] else "now"
            yield name, f"not measured {where}"


PLACES = {"memory": ("device", "gpu"), "speed": ("device", "gpu", "cpu", "threads")}
"""What has to be the same of two machines whose memory or times are compared."""
_ROUNDS = ("torch", "cpu", "threads", "device", "gpu", "cuda", "cudnn")
"""What decides how a machine rounds."""


def _left_out(one: WatchedNumber, golden: Golden, machine: Mapping[str, str]) -> str:
    """Return why a number is not compared; empty if it is."""
    if other := other_parts(golden.machine, machine, PLACES.get(one.name, ())):
        return f"the golden is of another {other[0]}"
    if one.name == "memory" or len({*one.golden.values()}) > 1 or {*one.golden.values()} == {*one.now.values()}:
        return ""
    other = other_parts(golden.machine, machine, _ROUNDS)
    if not other:
        return ""
    return f"no seed changes it, so the golden has no noise to judge another {other[0]} by"


def other_parts(before: Mapping[str, str], now: Mapping[str, str], names: Sequence[str]) -> list[str]:
    """Return which of ``names`` differ between two machines."""
    return [name for name in names if before.get(name) != now.get(name)]


def _time_check(golden: Golden, runs: Sequence[GoldenRun], machine: Mapping[str, str]) -> tuple[GateCheck, bool]:
    """Return the check of the time of a step, and whether more runs could find it as fast as the golden's."""
    if other := other_parts(golden.machine, machine, PLACES["speed"]):
        return GateCheck(name="speed", status="not compared", reason=f"the golden is of another {other[0]}"), False
    before, now = (sorted(run.step_time for run in side if run.step_time) for side in (golden.runs, runs))
    if len(before) < 2 or not now:
        return GateCheck(
            name="speed", status="not compared", reason="no time of a step was measured on both sides"
        ), False
    share = max(TIME_SHARE, before[1] / before[0] - 1.0)
    ratio = now[0] / before[0]
    slow = ratio > 1.0 + share
    status: GateStatus = "failed" if slow else "better" if ratio * (1.0 + share) < 1.0 else "inside"
    return (
        GateCheck(
            name="speed",
            status=status,
            golden=before[0],
            now=now[0],
            margin=share * before[0],
            unit=golden.timed_in,
        ),
        slow,
    )


# --- formats and findings --------------------------------------------------------------------------------------------------------


def format_changes(golden: Golden, now: ModuleFormats) -> list[FormatChange]:
    """Return the modules of both sides that compute in other formats; new modules, gone ones and varying ones are left out."""
    return [
        FormatChange(module=module, phase=phase, golden=before.get(phase, []), now=now[module].get(phase, []))
        for module, before in golden.formats.items()
        if module in now and module not in golden.varying
        for phase in dict.fromkeys((*before, *now[module]))
        if before.get(phase) != now[module].get(phase)
    ]


def formats_check(golden: Golden, changes: Sequence[FormatChange], *, why_not: str) -> GateCheck:
    """Return the check of the formats; ``why_not`` says why there are none, and is empty if there are."""
    if why_not or golden.audited_step is None:
        return GateCheck(name="formats", status="not compared", reason=why_not or "the golden has none")
    if not changes:
        return GateCheck(name="formats", status="same")
    modules = list(dict.fromkeys(change.module for change in changes))
    more = f" and {len(modules) - 1} more" if len(modules) > 1 else ""
    first = changes[0]
    text = f"{', '.join(first.golden) or 'nothing'} then, {', '.join(first.now) or 'nothing'} now"
    return GateCheck(
        name="formats", status="failed", reason=f"{first.module or 'the script'}{more}: {text} ({first.phase})"
    )


def findings_check(golden: Golden, codes: Sequence[str], *, why_not: str) -> GateCheck:
    """Return the check of the findings, given the codes of now."""
    if why_not or golden.audited_step is None:
        return GateCheck(name="findings", status="not compared", reason=why_not or "the golden has none")
    new = [code for code in codes if code not in golden.findings]
    gone = [code for code in golden.findings if code not in codes]
    status: GateStatus = "failed" if new else "better" if gone else "same"
    parts = [f"new: {', '.join(new)}"] if new else []
    parts += [f"gone: {', '.join(gone)}"] if gone else []
    return GateCheck(
        name="findings",
        status=status,
        golden=float(len(golden.findings)),
        now=float(len(codes)),
        reason="; ".join(parts),
    )
