"""What to do after each command: up to three commands to paste, the best first, derived from the record."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mezzo.error_texts import leaves_range, refuses_format
from mezzo.records import (
    AS_IS,
    AnyRecord,
    AuditRecord,
    Bottleneck,
    CompareRecord,
    DiagnoseRecord,
    DoctorRecord,
    FallbackRecord,
    Prediction,
    PredictRecord,
    RangesRecord,
    ResumeCheckRecord,
    Row,
    RunRecord,
)
from mezzo.records.run import BATCH, WIDE
from mezzo.report import formatting as fmt
from mezzo.report.commands import (
    TypedScript,
    function_call,
    preset_of,
    resumption,
    row_options,
    typed_policy,
    with_fp32,
    with_scale,
)
from mezzo.report.sheets.compare import best_of

MOST = 3
_MANY_SKIPS = 0.05
_NOTHING_LOWERED = ("A101", "A108")
"""Findings that mixed precision is missing or off: the fix is a policy."""
_BY_SIGNAL = (129, 130, 143)
_CANNOT, _FLOOR, _NOT_FINITE, _NOT_A_TRAINING, _SNAPSHOT, _GUARD = 3, 5, 6, 7, 9, 10
"""Exit codes of Mezzo's own errors: a format that the device lacks, a loss scale at its floor, a first loss that is not finite, a
script that never trained, a refused snapshot, and an alarm that stopped the run."""


@dataclass(frozen=True, kw_only=True)
class NextStep:
    """A command worth typing now."""

    why: str
    command: str
    """A shell line."""


def next_steps(record: AnyRecord) -> list[NextStep]:
    """Return what to do after ``record``, the best first; empty where no command helps."""
    after = _BY_KIND.get(record.kind)
    steps = [] if after is None else after(record)
    unique = {step.command: step for step in reversed([*steps]) if step.command}
    return [*reversed(unique.values())][:MOST]


class _Commands:
    """The commands on the script or function of a record."""

    def __init__(self, run: RunRecord, words: Sequence[str] | None = None) -> None:
        words = run.command if words is None else words
        script = TypedScript.typed(words, run.script)
        self.script = script and replace(script, framework=run.framework, variables=run.environment.variables)
        self._function = "" if words[:1] == ["mezzo"] else run.script

    def step(self, why: str, command: str, **options: str) -> Iterator[NextStep]:
        """Yield a command on the script or function with ``options``; nothing if it does not accept such a script."""
        if self.script is not None and self.script.runs(command):
            yield NextStep(why=fmt.clean(why), command=self.script.under(command, **options))
        elif self._function and command in ("audit", "diagnose", "ranges", "fallback"):
            policy = "" if command == "audit" else options.get("policy", "")
            yield NextStep(why=fmt.clean(why), command=function_call(command, self._function, policy))

    def again(self, why: str) -> Iterator[NextStep]:
        """Yield the recorded command."""
        if self.script is not None:
            yield NextStep(why=fmt.clean(why), command=self.script.under(self.script.command))

    def alone(self, why: str) -> Iterator[NextStep]:
        """Yield the script's own command."""
        if self.script is not None:
            yield NextStep(why=why, command=self.script.alone())


# --- run -------------------------------------------------------------------------------------------------------------------------


def _after_run(record: RunRecord) -> Iterator[NextStep]:
    commands, policy = _Commands(record), typed_policy(record)
    for alarm in record.guardrails.alarms if record.guardrails is not None else []:
        yield NextStep(why=f"{alarm.kind} in step {alarm.step}; see why", command=fmt.clean(alarm.command))
    if record.error is not None or record.exit_code:
        yield from _after_failure(record, commands, policy)
    elif record.changed_nothing:
        yield from commands.step(f"{policy} {record.no_effect}; see why", "audit", policy=policy)
    elif record.steps.loss and not math.isfinite(record.steps.loss[-1]):
        yield from commands.step("the loss is not finite; find where that begins", "diagnose", policy=policy)
        yield from commands.step("see which policies keep it finite", "compare", policies=with_fp32(policy))
    elif record.findings:
        yield from commands.again(f"after fixing {record.findings[0].code}, see whether anything is left")
    elif record.watched and (first := _first_change(record.bottleneck)):
        yield from commands.again(f"change this, then see what holds it back: {first}")
    else:
        yield from _after_training(record, commands, policy)


def _first_change(bottleneck: Bottleneck | None) -> str:
    """Return what to change first; empty where 16 bits are the change, which a comparison tries."""
    if bottleneck is None or bottleneck.limit in ("bandwidth", "arithmetic", "power") or not bottleneck.change:
        return ""
    return bottleneck.change[0]


def _after_training(record: RunRecord, commands: _Commands, policy: str) -> Iterator[NextStep]:
    if _skips_many(record.steps.num_skipped, len(record.steps)):
        share = fmt.share_text(record.steps.num_skipped / len(record.steps))
        yield from commands.step(f"{policy} skipped {share} of its updates; see why", "diagnose", policy=policy)
    lowers = record.policy != AS_IS or record.effective.counted_on_step is None or record.effective.lowered
    if preset_of(record.policy) in ("fp32", "tf32") or not lowers:
        yield from commands.step(
            "see whether 16 bits train as well, and what they save", "compare", policies="fp32,bf16,fp16"
        )
        return
    yield from commands.step(f"see whether {policy} trains like fp32", "compare", policies=with_fp32(policy))
    yield from commands.step("see which operation ran in which format", "audit", policy=policy)


def _after_failure(record: RunRecord, commands: _Commands, policy: str) -> Iterator[NextStep]:
    if record.exit_code in _BY_SIGNAL:
        if options := resumption(record):
            yield from commands.step("continue from its last snapshot", "run", policy=policy, **options)
        return
    # Without an error the exit code is the script's own, and may be any.
    code = record.exit_code if record.error is not None else None
    if preset_of(record.policy) not in WIDE and (known := explained([record.error or ""], policy)):
        yield from commands.step(*known, policy=policy)
    elif code == _CANNOT:
        yield NextStep(why="see which formats each device of this machine computes in", command="mezzo doctor")
    elif code in (_FLOOR, _NOT_FINITE):
        yield from commands.step("find the first value that is not finite", "diagnose", policy=policy)
    elif code not in (_NOT_A_TRAINING, _SNAPSHOT, _GUARD):
        yield from commands.alone("see whether the script also fails without Mezzo")


# --- compare ---------------------------------------------------------------------------------------------------------------------


def _after_compare(record: CompareRecord) -> Iterator[NextStep]:
    if record.shared_files or not record.runs:
        return  # the headline says what to write
    trained = next((run for run in record.runs if len(run.steps)), record.runs[0])
    commands = _Commands(trained, record.command)
    baseline = next((row for row in record.rows if row.compared_as == record.baseline), None)
    if baseline is None:
        return
    if baseline.num_failed == baseline.num_runs:
        yield from commands.alone("no run of the baseline succeeded; see whether the script succeeds without Mezzo")
        return
    equal = [row for row in record.rows if row.verdict == "equivalent"]
    if equal:
        row = best_of(equal)
        real = row_options(row) | {"policy": _EMULATED_PROCESSES.sub("", typed_policy(row))}
        where = "" if real["policy"] == typed_policy(row) else " in several processes"
        slower = row.speedup_high is not None and row.speedup_high < 1 and not row.emulated
        though = ", which is slower here, for its memory" if slower else ""
        shown = _EMULATED_PROCESSES.sub("", row.policy_shown)
        yield from commands.step(f"train with {shown}{where}{though}", "run", **real)
    for row in record.rows:
        if row is baseline:
            continue
        yield from _after_row(row, record, commands)
    yield from _more_seeds(record, baseline, commands)
    skipping = [row for row in equal if _skips_many(row.num_skipped, len(trained.steps))]
    for row in skipping[:1]:
        yield from commands.step(
            f"{row.policy_shown} skips many updates; see why", "diagnose", policy=typed_policy(row)
        )


_EMULATED_PROCESSES = re.compile(r":(world|reduce_order)=\w+")
"""The fields of a policy that emulate several processes; real ones do not need them."""


def _after_row(row: Row, record: CompareRecord, commands: _Commands) -> Iterator[NextStep]:
    if row.checkpoint:
        # The policy without checkpointing has a row of its own, and no command inspects a checkpointed training.
        if row.verdict == "failed":
            yield from commands.step(f"{row.policy_shown} failed; see its output", "run", **row_options(row))
        return
    policy = typed_policy(row)
    if row.verdict == "diverged":
        where = _first_not_finite(record, row.compared_as)
        yield from commands.step(f"{policy} diverged{where}; find the first bad value", "diagnose", policy=policy)
    elif row.verdict == "stopped_learning":
        if preset_of(row.policy).startswith("bf16") and not _first_not_finite(record, row.compared_as):
            # Its range is FP32's, so no value left it: what it loses are digits.
            why = f"{policy} stopped learning; find the modules or operations that lose digits"
            yield from commands.step(why, "fallback", policy=policy)
        else:
            yield from commands.step(f"{policy} stopped learning; find out why", "diagnose", policy=policy)
    elif row.verdict == "failed" and (known := explained(_errors(record, row.compared_as), policy)):
        yield from commands.step(*known, policy=policy)
    elif row.verdict == "failed":
        yield from commands.step(f"{policy} failed; see its output", "run", policy=policy)
    elif row.verdict == "different" and row.policy == AS_IS:
        yield from commands.step(f"{policy} trains to a different result", "audit", policy=policy)
    elif row.verdict == "different":
        yield from commands.step(
            f"{policy} trains to a different result; find the modules to keep in FP32", "fallback", policy=policy
        )


def _errors(record: CompareRecord, policy: str) -> list[str]:
    return [run.error for run in record.runs if run.compared_as == policy and run.error]


def _first_not_finite(record: CompareRecord, policy: str) -> str:
    losses = [run.steps.loss for run in record.runs if run.compared_as == policy]
    firsts = [next((n for n, loss in enumerate(column, 1) if not math.isfinite(loss)), None) for column in losses]
    known = [first for first in firsts if first is not None]
    return f" at step {min(known)}" if known else ""


def _more_seeds(record: CompareRecord, baseline: Row, commands: _Commands) -> Iterator[NextStep]:
    undecided, idle = [], {run.compared_as: run.no_effect for run in record.runs if run.no_effect}
    for row in (row for row in record.rows if row.verdict == "undecided"):
        if no_effect := idle.get(row.compared_as):
            yield from commands.step(f"{row.policy_shown} {no_effect}; see why", "audit", policy=typed_policy(row))
        else:
            undecided.append(row)
    single = all(run.seed in (0, None) for run in record.runs)
    needed = {row.policy_shown: 3 if single else row.seeds_needed for row in undecided if single or row.seeds_needed}
    if not needed:
        return
    most = max(count for count in needed.values() if count)
    names = f"{fmt.listed([*needed])} {'is' if len(needed) == 1 else 'are'}"
    rows = [baseline, *(row for row in undecided if row.policy_shown in needed)]
    policies = ",".join(dict.fromkeys(map(typed_policy, rows)))
    means_s = [_mean([run.duration_s for run in record.runs if run.compared_as == row.compared_as]) for row in rows]
    takes = f" in about {fmt.about_text(most * sum(means_s))}" if all(means_s) else ""
    why = f"{names} undecided; {most} seeds {'may' if single else 'would'} decide{takes}"
    yield from commands.step(why, "compare", policies=policies, seeds=str(most))


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers) if numbers else 0.0


# --- audit, diagnose ---------------------------------------------------------------------------------------------------------------


def _after_audit(record: AuditRecord) -> Iterator[NextStep]:
    commands, policy = _Commands(record.run), typed_policy(record.run)
    if record.run.error is not None or record.run.exit_code:
        yield from _after_failure(record.run, commands, policy)
        return
    if len(record.steps) == 1 and not any(record.flops_by_format.values()) and commands.script:
        why = "that step had no matrix product; if optimizers take turns, audit a whole round"
        yield from commands.step(why, "audit", at=f"{record.steps[0]}-{record.steps[0] + 3}")
    wide = record.run.policy == AS_IS and set(record.flops_by_format) <= set(WIDE)
    if wide:
        yield from commands.step(
            "see whether 16 bits train as well, and what they save", "compare", policies="fp32,bf16,fp16"
        )
    if record.findings and record.findings[0].code not in _NOTHING_LOWERED:
        why = f"after fixing {record.findings[0].code}, see what is left"
        yield from commands.again(why) if commands.script else commands.step(why, "audit")
    if not wide:
        yield from commands.step(f"see whether {policy} trains like fp32", "compare", policies=with_fp32(policy))


def _after_diagnose(record: DiagnoseRecord) -> Iterator[NextStep]:
    commands, policy = _Commands(record.run), typed_policy(record.run)
    if record.verdict == "unfinished" and not record.fix_tried:
        yield from _after_failure(record.run, commands, policy)
    elif record.verdict == "healthy" and record.run.changed_nothing:
        yield from commands.step(f"{policy} {record.run.no_effect}; see why", "audit", policy=policy)
    elif record.verdict == "healthy":
        if record.run.findings:
            yield from commands.again(f"after fixing {record.run.findings[0].code}, see whether anything is left")
        yield from commands.step(f"see whether {policy} trains like fp32", "compare", policies=with_fp32(policy))
        if record.run.policy != AS_IS and commands.script and preset_of(record.run.policy) not in WIDE:
            why = "if it does not, find the modules or operations that lose digits"
            yield from commands.step(why, "fallback", policy=policy)
        if record.run.policy != AS_IS and commands.script:
            why = "if the loss is NaN in the script's own precision, diagnose that"
            yield from commands.step(why, "diagnose", policy=AS_IS)
    elif record.perhaps == "scale_overflow" and record.steps_needed is not None:
        steps = str(record.steps_needed)
        why = f"see where the loss scale settles, in a training of {steps} steps or more"
        yield from commands.step(why, "diagnose", policy=policy, steps=steps)
    elif record.verdict == "undecided" and not record.fix_tried and commands.script:
        if preset_of(record.run.policy) not in WIDE:
            yield from commands.step("see whether the same step is finite in FP32", "diagnose", policy="fp32")
        yield from commands.again("if the script draws from generators of its own, after setting their seeds")
    elif record.fix_policy and (record.fix_tried or record.located):
        fixed = record.fix_policy
        yield from commands.step("train with the fix", "run", policy=fixed)
        yield from commands.step("see whether it trains like fp32", "compare", policies=with_fp32(fixed))
        if not commands.script:
            yield from commands.step("see whether the fix helps", "diagnose", policy=fixed)
    elif record.fix and not record.fix_line and not record.fix_tried and _may_need_several_modules(record):
        why = "no single fix is enough; search for a set of modules to keep in FP32"
        yield from commands.step(why, "fallback", policy=policy)
    elif record.fix:
        why = "after changing the script, see whether anything is left"
        yield from commands.again(why) if commands.script else commands.step(why, "diagnose", policy=policy)
    else:
        yield from commands.again("after setting the script's seeds, so that the step can be inspected")


def _may_need_several_modules(record: DiagnoseRecord) -> bool:
    tried = any(one.tries_fix for one in record.passes)
    return tried and record.run.policy != AS_IS and not (record.own_cast or record.fails_in_fp32)


# --- ranges, fallback, predict, doctor ---------------------------------------------------------------------------------------------


def _after_ranges(record: RangesRecord) -> Iterator[NextStep]:
    commands, policy = _Commands(record.run), record.policy_shown
    window = next((w for w in record.windows if w.format == record.format), None)
    if record.run.error is not None or record.run.exit_code:
        yield from _after_failure(record.run, commands, policy)
        return
    if window is not None and window.empty:
        yield from commands.step("find the modules to keep in FP32", "fallback", policy=policy)
        if record.format == "fp16":
            yield from commands.step("see whether bf16 trains like fp32", "compare", policies="fp32,bf16")
        return
    fits = policy if window is None or window.suggested is None else with_scale(record, window.suggested)
    why = f"see whether {policy} trains like fp32" if fits == policy else "train with a loss scale that fits"
    if fits != policy:
        yield from commands.step(why, "run", policy=fits)
        why = "see whether it trains like fp32"
    yield from commands.step(why, "compare", policies=with_fp32(fits))
    if not commands.script:
        yield from commands.step("see whether any value leaves the format", "diagnose", policy=fits)


def _after_fallback(record: FallbackRecord) -> Iterator[NextStep]:
    commands, policy = _Commands(record.run), record.policy_shown
    if record.helps:
        kept = record.policy_file if record.policy_file and "," not in record.policy_file else record.suggested
        yield from commands.step(
            "train with the modules in FP32" if record.kept else "train with the operations in FP32", "run", policy=kept
        )
        yield from commands.step("see whether it trains like fp32", "compare", policies=with_fp32(kept))
        if not commands.script:
            yield from commands.step("see whether any value leaves the format", "diagnose", policy=kept)
    elif record.verdict == "fp32 fails":
        yield from commands.step("find the operation that is not finite in FP32", "diagnose", policy="fp32")
    elif record.verdict == "not repeatable":
        why = "after setting the script's seeds, so that it reads the same batches in the same order at each start"
        yield from commands.step(why, "fallback", policy=policy)
    elif record.verdict == "does not pay" and record.instead != "fp32":
        why = f"{record.instead} passes on the same batches; see whether it trains like fp32"
        yield from commands.step(why, "compare", policies=with_fp32(record.instead))
    elif record.verdict == "does not pay":
        yield from commands.step("stay in fp32", "run", policy="fp32")
        yield from commands.step(
            f"see whether {policy} trains like it all the same", "compare", policies=with_fp32(policy)
        )
    elif record.verdict == "not needed" and record.error_before == 0:
        yield from commands.step(f"{policy} changed nothing; see why", "audit", policy=policy)
    elif record.verdict in ("not needed", "undecided"):
        yield from commands.step(f"see whether {policy} trains like fp32", "compare", policies=with_fp32(policy))
    else:
        yield from commands.step("find the operation that loses values, and its line", "diagnose", policy=policy)
        if "bf16" not in preset_of(record.policy):
            yield from commands.step(
                "if bf16 passes, the range is the cause, and bf16 the fix", "fallback", policy="bf16"
            )
        why = "after moving that operation into a module of its own: fp32_modules names modules only"
        yield from commands.step(why, "fallback", policy=policy)


def _after_resume_check(record: ResumeCheckRecord) -> Iterator[NextStep]:
    commands = _Commands(record.whole, record.command)
    if record.whole.exit_code:
        yield from commands.alone("see whether the script also fails without Mezzo")
    elif record.verdict == "differs":
        yield from commands.again("after changing the script, see whether anything is left")
    elif record.verdict in ("does_not_resume", "undecided"):
        yield from commands.again(_BEFORE_AGAIN[record.verdict])
    if record.verdict in ("differs", "does_not_resume", "no_checkpoint"):
        yield from commands.step("let Mezzo save and resume the unedited script", "run", policy=AS_IS, snapshot="5m")


_BEFORE_AGAIN = {
    "does_not_resume": "if it needs an argument to resume, pass it with --resume-with",
    "undecided": "after making the script deterministic, check again",
}


def _after_doctor(record: DoctorRecord) -> Iterator[NextStep]:
    yield NextStep(why="get one answer for your script; replace train.py with its name", command="mezzo check train.py")


def _after_predict(record: PredictRecord) -> Iterator[NextStep]:
    for why, command in steps(record):
        yield NextStep(why=fmt.clean(why), command=command)


def _skips_many(num_skipped: float, num_steps: int) -> bool:
    return num_steps > 0 and num_skipped >= _MANY_SKIPS * num_steps and num_skipped >= 3


_BY_KIND: dict[str, Callable[[Any], Iterable[NextStep]]] = {
    "run": _after_run,
    "compare": _after_compare,
    "audit": _after_audit,
    "diagnose": _after_diagnose,
    "ranges": _after_ranges,
    "fallback": _after_fallback,
    "resume_check": _after_resume_check,
    "doctor": _after_doctor,
    "predict": _after_predict,
}


# --- Failures of a run that the format of its policy explains, and the command that finds the cause -----------------------------


def explained(errors: Iterable[str], policy: str) -> tuple[str, str] | None:
    """Return the reason for a command and its name, given the ``errors`` of runs under ``policy``; None if the format is not the cause."""
    errors = tuple(errors)
    if any(map(refuses_format, errors)):
        return (
            f"an operation does not accept the format of {policy}; find the modules that must stay in FP32",
            "fallback",
        )
    if any(map(leaves_range, errors)):
        return f"a number in the script is beyond the range of {policy}; find its line", "diagnose"
    return None


# --- What to type after a prediction: a check of the script for the fastest GPU, and checkpointing where memory is tight --------

_RUNS = ("fp32", "tf32", "fp16", "bf16", "fp16-master", "bf16-master", "fp16-pure", "bf16-pure", "fp8")
"""Policies of a prediction that ``mezzo run`` accepts under the same name."""
_SPARE = 0.13
"""Share of a GPU's memory to leave free for errors of the prediction."""
_MIN_GIB = 0.1
_MUCH = 0.5
"""Above this share of a GPU's memory, checkpointing is worth a slower step."""


def steps(record: PredictRecord) -> Iterator[tuple[str, str]]:
    """Yield reasons and commands to type after a prediction for a script; nothing for a model by name."""
    script = TypedScript.typed(record.command, record.model)
    if script is None:  # a model by name
        return
    arguments = tuple(word.replace(BATCH, str(record.batch)) for word in script.arguments)
    script = replace(script, arguments=arguments, variables=record.environment.variables)
    best = record.best
    if best is not None:
        why = f"see which policy trains like fp32, answered for {best.gpu}"
        yield why, script.under("check", gpu=best.gpu, **_policies(script))
    tight = [
        prediction
        for prediction in record.predictions
        if prediction.possible and not prediction.fits and prediction.gpu != "cpu"
    ]
    budgets = [(prediction, kept) for prediction in tight if (kept := _left_for_activations(prediction)) is not None]
    if budgets:
        prediction, kept = max(budgets, key=lambda pair: pair[0].throughput)
        why = f"it does not fit on {prediction.gpu} in {prediction.policy}; keep less for the backward pass"
        yield why, script.under("run", policy=prediction.policy, checkpoint=kept)
    elif best is not None and best.policy in _RUNS and best.device_bytes > _MUCH * (best.gpu_bytes or 0):
        why = "see what checkpointing costs and saves on this machine, with the same batch"
        yield why, script.under("compare", policies=best.policy, checkpoint="full")


def _policies(script: TypedScript) -> dict[str, str]:
    """Return the policies as typed, if they include one that a check can compare with FP32."""
    typed = script.options.get("--policies", ("",))[-1]
    return {"policies": typed} if {name.strip() for name in typed.split(",")} - {"", "fp32"} else {}


def _left_for_activations(prediction: Prediction) -> str | None:
    """Return how much may be kept for the backward pass if all else is as predicted; None if no memory is left for that."""
    kept = prediction.memory_bytes.get("activations", 0)
    if prediction.gpu_bytes is None or not kept or prediction.policy not in _RUNS:
        return None
    left = prediction.gpu_bytes * (1 - _SPARE) - (prediction.device_bytes - kept)
    gib = left / 2**30
    return None if gib < _MIN_GIB else f"{gib:.2g}GiB" if gib < 10 else f"{int(gib)}GiB"
