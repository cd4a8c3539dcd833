"""The answer to "which precision should this script train in?", from everything a check found."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from mezzo.commands.check.worth import (
    FASTER,
    EligiblePolicy,
    Worth,
    bounded_gain,
    measured_gain,
    missing_text,
    predicted_gain,
    preferred,
    saved_memory,
    simplest_first,
    worth_of,
)
from mezzo.commands.compare.baseline import Baseline
from mezzo.commands.compare.pairing import grouped, listed
from mezzo.formats import FP64
from mezzo.gpus import Gpu
from mezzo.records import AS_IS, Answer, CompareRecord, Decision, DiagnoseRecord, Gain, Note, Row, RunRecord
from mezzo.records.run import WIDE_POLICIES

WriteCommand = Callable[..., str]
"""Returns the command line of a Mezzo command on the same script, from the command's name and its options."""

WENT_WRONG = ("diverged", "stopped_learning", "failed")
FEWEST_STEPS = 30
"""Steps below which runs that were stopped early show nothing: a dynamic loss scale alone takes up to 16 to settle."""
_MOSTLY = 0.5
"""Share of FLOPs below 32 bits from which a baseline no longer counts as an FP32 run."""

MOST_SEEDS = 30
"""Above this many seeds, deciding a policy is suggested only if no other policy needs fewer."""


@dataclass(frozen=True, kw_only=True)
class Repair:
    """A policy that was changed because it did not train like the baseline."""

    of: str
    """The policy before the change."""
    policy: str
    how: str
    """What was changed, and how the need for it was found, in a sentence."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """Everything an answer is based on."""

    comparison: CompareRecord
    device: str
    """Name of the device of the runs."""
    command: WriteCommand
    gpu: Gpu | None = None
    """The GPU for which gains are predicted or bounded."""
    for_gpu: bool = False
    """Whether the answer is for that GPU instead of the device of the runs."""
    diagnosed: Mapping[str, DiagnoseRecord] = field(default_factory=dict)
    repairs: Sequence[Repair] = ()
    undone: str = ""
    """The work that did not fit the budget; empty if everything was done."""
    more_time: str = "1h"
    """A budget several times as long as this one."""
    too_slow: bool = False
    """Whether the first run made no step in half of the budget."""

    @property
    def baseline(self) -> str:
        """The baseline's policy."""
        return self.comparison.baseline

    @property
    def rows(self) -> list[Row]:
        """The rows of all other policies, the simplest to use first."""
        found = {row.policy: row for row in self.comparison.rows if row.policy != self.baseline}
        return [found[policy] for policy in simplest_first(list(found))]

    @property
    def in_double(self) -> bool:
        """Whether every counted product of the script runs in float64, which no policy lowers."""
        counted = [run.effective.flops_by_format for run in self.comparison.runs]
        return any(counted) and all(set(formats) <= {FP64.name} for formats in counted)

    @property
    def own_formats(self) -> dict[str, float]:
        """The formats that the script's own casts leave the baseline's passes in, with their shares of the FLOPs."""
        runs = [run for run in self.comparison.runs if run.policy == self.baseline]
        return next((run.own_formats for run in runs if run.own_formats), {})

    def gains(self, row: Row) -> list[Gain]:
        """Return a policy's gains: as measured, and on the GPU as predicted, or as an upper bound if it cannot be predicted."""
        measured = measured_gain(row, device=self.device)
        bound = None
        if self.gpu is not None:
            bound = predicted_gain(self.comparison.real_gpus, row.policy, self.gpu)
            bound = bound or bounded_gain(self.comparison, row.policy, self.gpu)
        order = (bound, measured) if self.for_gpu else (measured, bound)
        return [gain for gain in order if gain is not None]

    def worth(self, row: Row) -> Worth:
        """Return what a policy is worth on the device that the answer is for."""
        return worth_of(row, self.gains(row), for_gpu=self.for_gpu)


def answered(case: Case) -> Answer:
    """Return the answer."""
    if case.comparison.shared_files:
        return _dependent(case)
    if fault := baseline_fault(case.comparison):
        return _failed(case, fault)
    if (replayed := next((run for run in case.comparison.runs if run.replays), None)) is not None:
        return _replayed(case, replayed)
    first_steps = max((run.first_steps or 0 for run in case.comparison.runs), default=0)
    if 0 < first_steps < FEWEST_STEPS and case.rows:
        return _too_few_steps(case, first_steps)
    if sum(share for name, share in case.own_formats.items() if name not in WIDE_POLICIES) >= _MOSTLY:
        return _own_precision(case)
    alike = [row for row in case.rows if row.verdict == "equivalent" and not _is_void(case, row)]
    best = preferred([_candidate(case, row) for row in alike], by_bound=case.for_gpu)
    if best is not None:
        row = next(row for row in alike if row.policy == best.policy)
        return _stay(case, why, row) if (why := _why_no_gain(case, row)) else _use(case, row, alike)
    open_rows = [row for row in case.rows if row.verdict == "undecided" and not _is_void(case, row)]
    if not open_rows:
        return _in_double(case) if case.in_double else _stay(case, _none_trains_alike(case), None)
    promising = [row for row in open_rows if not (case.gains(row) and case.worth(row).no_gain)]
    if not promising:
        row = open_rows[0]
        why = f"{row.policy} may or may not train like {case.baseline}, but {missing_text(case.worth(row))}"
        return _stay(case, why, row)
    return _undecided(case, promising)


def baseline_fault(comparison: CompareRecord) -> str:
    """Return how the baseline's own runs went wrong, if none is sound; empty if any is."""
    groups = grouped(comparison.runs)
    base = Baseline.of(groups[comparison.baseline], runs=comparison.runs, margin=comparison.margin)
    if base.sound:
        return ""
    faults = [fault.text for fault in base.faults.values()] or list(base.group.failed.values())
    return faults[0] if faults else "it recorded no step"


def skipped_share(comparison: CompareRecord, policy: str) -> float:
    """Return the share of updates that a policy's runs skipped."""
    runs = [run for run in comparison.runs if run.policy == policy]
    steps = sum(len(run.steps) for run in runs)
    return sum(run.steps.num_skipped for run in runs) / steps if steps else 0.0


def _use(case: Case, row: Row, alike: Sequence[Row]) -> Answer:
    is_own_amp = row.policy == AS_IS
    others = [one.policy for one in alike if one is not row]
    worth = case.worth(row)
    gained = worth.gained or ([f"may gain {worth.possible}"] if worth.possible else [])
    why = f"{row.policy} {listed([f'trains like {case.baseline}', *gained])}"
    if is_own_amp:
        why = f"the script's own mixed precision trains like {case.baseline}, so there is nothing to change"
        why += f"; but {worth.slower} as in {case.baseline}" if worth.slower else ""
    elif others:
        why += f"; {listed(others)} {'does' if len(others) == 1 else 'do'} too, but {_preference(case, row, alike)}"
    outcome = "trains under it, with the script unedited" if not is_own_amp else "trains as before"
    command = case.command("python") if is_own_amp else case.command("run", "--policy", row.policy)
    evidence, changed = _reason_of(row), _changed(case, row)
    return _answer(case, "use", why, (command, outcome), row=row, policy=row.policy, evidence=evidence, changed=changed)


def _preference(case: Case, row: Row, alike: Sequence[Row]) -> str:
    """Return why one of several policies that train alike is preferred."""
    name = row.policy.split(":")[0]
    gain = next(iter(case.gains(row)), None)
    rivals = [one for other in alike if other is not row for one in case.gains(other)[:1]]
    if gain is not None and all(gain.kind == one.kind and gain.times > one.times * FASTER for one in rivals):
        best = {
            "measured": "is the fastest",
            "predicted": "has the highest prediction",
            "bound": "has the highest ceiling",
        }
        return f"{name} {best[gain.kind]}"
    if gain is not None and gain.kind == "measured" and any(one.kind != "measured" for one in rivals):
        return f"only {name} has units here, so only its speed was measured"
    return f"{name} has FP32's range and needs no loss scale" if name == "bf16" else f"{name} is the simplest to use"


def _stay(case: Case, why: str, row: Row | None) -> Answer:
    evidence = "" if row is None else _reason_of(row)
    return _answer(case, "stay", why, _after_staying(case, row), row=row, evidence=evidence)


def _in_double(case: Case) -> Answer:
    return Answer(
        decision="stay",
        policy=FP64.name,
        why="the script computes in float64, which no policy lowers, so mixed precision changes nothing; if float32 is accurate "
        "enough for it, convert model and data (model.float(), torch.set_default_dtype) and check again",
        next_command=case.command("audit"),
        next_why="shows which operations run in float64",
    )


def _own_precision(case: Case) -> Answer:
    """Answer for a script whose baseline is not an FP32 run, because no policy undoes the script's own casts."""
    shares = listed([f"{share:.0%} of its FLOPs in {name.upper()}" for name, share in case.own_formats.items()])
    why = (
        f"the script converts its model or data itself: {case.baseline}, with which the other verdicts compare, computes {shares} too. "
        "To compare with FP32, remove the conversions from the script"
    )
    next_step = (case.command("python"), "trains as before")
    return _answer(case, "stay", why, next_step, policy=AS_IS)


def _after_staying(case: Case, row: Row | None) -> tuple[str, str]:
    """Return the command to suggest after the answer "stay", and what it does."""
    failing = next((one.policy for one in case.rows if one.verdict in WENT_WRONG), None)
    if row is None and failing is not None and failing not in case.diagnosed:
        return case.command("diagnose", "--policy", failing), f"shows why {failing} fails"
    if row is None and case.undone:
        return case.command("check", "--budget", case.more_time), f"has time for what was left out: {case.undone}"
    if case.gpu is not None and not case.for_gpu:
        return case.command("check", "--gpu", case.gpu.name), "answers for a GPU instead of this machine"
    return case.command("run", "--policy", case.baseline), "records a training without mixed precision"


def _undecided(case: Case, rows: Sequence[Row]) -> Answer:
    row = rows[0]
    if (row.seeds_needed or 0) > MOST_SEEDS:  # that takes hours, and another policy may be decided in minutes
        row = min(rows, key=lambda one: one.seeds_needed or math.inf)
    why = f"{row.policy} is not decided: {_reason_of(row)}"
    return _answer(case, "undecided", why, _deciding(case, row), row=row, changed=_changed(case, row))


def _changed(case: Case, row: Row) -> list[Note]:
    return [Note(what=one.of, value=one.policy, reason=one.how) for one in case.repairs if one.policy == row.policy]


def _too_few_steps(case: Case, num_steps: int) -> Answer:
    why = f"only {num_steps} step{'s' * (num_steps != 1)} a run fit the budget, and fewer than {FEWEST_STEPS} show nothing"
    outcome = "has time for more steps; arguments that make a step shorter help as well"
    return _answer(case, "undecided", why, (case.command("check", "--budget", case.more_time), outcome))


def _replayed(case: Case, run: RunRecord) -> Answer:
    why = f"only {len(run.steps)} steps were recorded; {run.replays} of a CUDA graph train as well and are not recorded"
    outcome = "once the script trains without its graph, which computes the same"
    return _answer(case, "undecided", why, (case.command("check"), outcome))


def _deciding(case: Case, row: Row) -> tuple[str, str]:
    """Return the command that would decide an open row, and what it does."""
    needed = row.seeds_needed or (3 if row.num_runs < 2 else None)
    if needed is not None:
        budget = f"{max(1, math.ceil(_minutes(case, needed)))}m"
        command = case.command("check", "--policies", row.policy, "--seeds", str(needed), "--budget", budget)
        if not row.seeds_needed:
            return command, "shows the spread over seeds"
        longer = "; runs with more steps spread less, and need fewer" if needed > MOST_SEEDS else ""
        return command, f"{needed} seeds decide it in four cases out of five{longer}"
    if row.seeds_cannot_decide:
        gpu = ("--gpu", case.gpu.name) if case.gpu is not None and case.for_gpu else ()
        command = case.command("compare", "--policies", f"{case.baseline},{row.policy}", "--margin", "0.05", *gpu)
        return command, "accepts a difference of 5% instead of 2%, if that is small enough for you"
    return case.command("diagnose", "--policy", row.policy), "shows whether a value leaves its format's range"


def _minutes(case: Case, seeds: int) -> float:
    """Return the minutes that this many seeds of the baseline and one other policy take, plus a third."""
    longest = max((run.duration_s for run in case.comparison.runs), default=0.0)
    return 2 * seeds * longest / 60.0 * 4 / 3


def _failed(case: Case, fault: str) -> Answer:
    trained = any(len(run.steps) for run in case.comparison.runs)
    why = f"its first run, in {case.baseline}, failed: {fault}"
    command, outcome = case.command("python"), "shows the failure without Mezzo"
    if case.too_slow:
        why, command = f"its first run, in {case.baseline}: {fault}", case.command("check", "--budget", case.more_time)
        outcome = "gives it more time; arguments that make the script start training sooner help more"
    elif trained:
        cause = _cause(case, case.baseline)
        where = f"{listed([name.upper() for name in case.own_formats])} by its own casts" if case.own_formats else ""
        why = f"it goes wrong in {where or f'{case.baseline} itself'}, so nothing can be compared with it: {cause or fault}"
        command = case.command("check") if cause else case.command("diagnose", "--policy", case.baseline)
        outcome = "answers once that is fixed" if cause else "shows the first value that is not finite, if there is one"
    return _answer(case, "failed", why, (command, outcome))


def _dependent(case: Case) -> Answer:
    shared = case.comparison.shared_files[0]
    why = f"the runs are not independent: the run of {shared.read_by} read {shared.path}, which the run of {shared.written_by} had written"
    outcome = "once each run has a path of its own: write {run} in the script's arguments, as in --output_dir out/{run}"
    return _answer(case, "undecided", why, (case.command("check"), outcome))


def _answer(
    case: Case,
    decision: Decision,
    why: str,
    next_step: tuple[str, str],
    *,
    row: Row | None = None,
    policy: str = "",
    evidence: str = "",
    changed: Sequence[Note] = (),
) -> Answer:
    """Return an answer with the facts of ``row``; its policy is the baseline's unless ``policy`` names another."""
    command, why_command = next_step
    return Answer(
        decision=decision,
        policy=policy or case.baseline,
        own_formats=list(case.own_formats),
        why=why,
        evidence=evidence,
        evidence_of="" if row is None or not evidence else row.policy,
        gains=[] if row is None else case.gains(row),
        memory_saved=None if row is None or row.memory_ratio is None else 1.0 - row.memory_ratio,
        changed=list(changed),
        others=_others(case, "" if row is None else row.policy),
        next_command=command,
        next_why=why_command,
    )


def _others(case: Case, answer: str) -> list[Note]:
    return [
        Note(what=row.policy, value=row.verdict, reason=_why_not(case, row))
        for row in case.rows
        if row.policy != answer
    ]


def _why_not(case: Case, row: Row) -> str:
    """Return why a policy is not the answer: its verdict's reason, and the cause if it was found."""
    if _is_void(case, row) and row.policy == AS_IS:
        return "nothing ran below 32 bits, so the script's own mixed precision was off in these runs"
    cause = "" if row.verdict == "equivalent" else _cause(case, row.policy)
    return f"{_reason_of(row)}; cause: {cause}" if cause else _reason_of(row)


def _cause(case: Case, policy: str) -> str:
    """Return where and why a policy went wrong according to its diagnosis; empty if unknown."""
    diagnosis = case.diagnosed.get(policy)
    if diagnosis is None or not diagnosis.located:
        return ""
    where = f"step {diagnosis.step}, {diagnosis.phase} pass of {diagnosis.module}" + (
        f", {diagnosis.line}" if diagnosis.line else ""
    )
    fix = f"; fix: {diagnosis.fix}{' (tried)' if diagnosis.fix_tried else ''}" if diagnosis.fix else ""
    return f"{diagnosis.verdict.replace('_', ' ')} in {where}: {diagnosis.detail.rstrip('.')}{fix}"


def _none_trains_alike(case: Case) -> str:
    if not case.rows:
        return "no other policy was tried"
    if all(_is_void(case, row) for row in case.rows):
        return f"mixed precision changes nothing here: {_why_not(case, case.rows[0])}"
    words = {"diverged": "diverged", "stopped_learning": "stopped learning", "failed": "failed"}
    tried = [row for row in case.rows if not _is_void(case, row)]
    outcomes = [f"{row.policy} {words.get(row.verdict, 'trains to a different result')}" for row in tried]
    return f"no other policy trains like {case.baseline}: {listed(outcomes)}"


def _why_no_gain(case: Case, row: Row) -> str:
    """Return why a policy that trains like the baseline is still not worth using; empty if it is worth it."""
    if row.policy == AS_IS:
        return ""
    worth = case.worth(row)
    if worth.slower:
        saved = saved_memory(row)
        memory = f"; it saves {saved:.0%} of the memory, if that is what you need" if saved else ""
        return f"{row.policy} trains like {case.baseline}, but {worth.slower}" + memory
    return f"{row.policy} trains like {case.baseline}, but {missing_text(worth)}" if worth.no_gain else ""


def _is_void(case: Case, row: Row) -> bool:
    """Return whether a policy lowered nothing, so that its runs say nothing about it."""
    runs = [run for run in case.comparison.runs if run.policy == row.policy and len(run.steps)]
    if row.policy == AS_IS:
        return bool(runs) and not any(run.effective.lowered or run.effective.num_lowered for run in runs)
    return bool(runs) and all(run.changed_nothing for run in runs)


def _candidate(case: Case, row: Row) -> EligiblePolicy:
    gains = {gain.kind: gain for gain in case.gains(row)}
    return EligiblePolicy(
        policy=row.policy,
        measured=gains.get("measured"),
        bound=gains.get("predicted") or gains.get("bound"),
        skipped=skipped_share(case.comparison, row.policy),
    )


def _reason_of(row: Row) -> str:
    """Return a row's reason without time and memory, which the answer states elsewhere."""
    return row.reason if row.evidence is None else row.evidence
