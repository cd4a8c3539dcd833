"""A fallback search as display strings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath

from mezzo.records import FallbackRecord, FallbackVerdict, ModuleError, Verification
from mezzo.report import formatting as fmt
from mezzo.report.sheets import shared
from mezzo.report.sheets.shared import Fact, Grid, ScriptSheet

_TONES: dict[FallbackVerdict, str] = {
    "found": "warn",
    "not needed": "good",
    "elsewhere": "bad",
    "not repeatable": "open",
    "fp32 fails": "bad",
}
_NAMED = 6
_FAR = 5
"""An error below this many tolerances is no evidence that the training suffers."""


@dataclass(frozen=True, kw_only=True)
class FallbackSheet(ScriptSheet):
    """The words and tables of a fallback search, ready for any view."""

    verdict: str
    tone: str
    reason: str
    error: str
    suggested: str
    facts: list[Fact]
    modules: Grid
    """The most suspect first."""
    verifications: Grid
    ignored: list[Fact]
    notes: list[Fact]


def fallback_sheet(record: FallbackRecord) -> FallbackSheet:
    """Return the sheet of ``record``."""
    script = fmt.clean(PurePath(record.run.script).name)
    return FallbackSheet(
        title=f"FP32 modules of {script}",
        script=fmt.clean(record.run.script),
        headline=_headline(record, script),
        verdict=record.verdict,
        tone=_TONES[record.verdict],
        reason=fmt.clean(record.reason),
        error=shared.error_and_hint(record.run) if record.run.error else "",
        suggested=fmt.clean(record.suggested) if record.kept or record.operations else "",
        facts=_facts(record),
        modules=_modules(record.modules),
        verifications=_verifications(record.verifications),
        ignored=shared.facts(record.ignored),
        notes=shared.facts(record.notes),
        environment=shared.environment_facts(record.run.environment),
        command=shared.command_text(record.run.command, record.run.environment),
    )


def error_text(error: float | None) -> str:
    """Return a relative error with two significant digits."""
    return fmt.number_text(error, digits=2)


def _headline(record: FallbackRecord, script: str) -> str:
    policy = fmt.clean(record.policy_shown)
    if record.operations:
        named = ", ".join(map(fmt.clean, record.operations))
        return f"Keeping modules of {script} in FP32 does not help under {policy}; keeping these operations in FP32 does: {named}"
    if record.verdict == "found":
        more, share = fmt.plural(len(record.kept), "module"), fmt.share_text(record.fp32_share)
        if record.error_before is not None and record.error_before < _FAR * record.tolerance:
            errors = error_text(record.error_before), error_text(record.tolerance)
            return (
                f"Under {policy} a gradient of {script} is off by {errors[0]}; with {more} in FP32, {share} of the FLOPs, none is "
                f"off by more than {errors[1]}"
            )
        return f"{more} of {script} must stay in FP32 under {policy}, {share} of the FLOPs"
    if record.verdict == "not needed" and record.error_before == 0:
        return f"{policy} does not change a single bit of any gradient of {script}, so nothing was tried"
    return {
        "not needed": f"No module of {script} needs FP32 under {policy}: no gradient is off by more than the tolerance",
        "elsewhere": f"Keeping modules of {script} in FP32 does not help under {policy}",
        "not repeatable": f"{script} does not compute the same result twice, so precision cannot be judged",
        "fp32 fails": f"{script} fails in FP32 too: precision is not the cause",
    }[record.verdict]


def _facts(record: FallbackRecord) -> list[Fact]:
    named = ", ".join(map(fmt.clean, record.kept[:_NAMED]))
    more = f" and {len(record.kept) - _NAMED} more" if len(record.kept) > _NAMED else ""
    known = [
        ("policy", fmt.policy_text(record.policy, record.policy_typed) if record.policy_typed else ""),
        ("keep in FP32", named + more),
        ("operations in FP32", ", ".join(map(fmt.clean, record.operations))),
        ("largest error before", error_text(record.error_before) if record.error_before is not None else ""),
        ("largest error with them", error_text(record.error_after) if record.error_after is not None else ""),
        ("tolerance", error_text(record.tolerance)),
        ("error of FP32's own rounding", error_text(record.noise) if record.noise is not None else ""),
        ("verifications", str(len(record.verifications))),
        ("modules run by themselves", str(len(record.modules))),
        ("policy file", fmt.clean(record.policy_file)),
    ]
    return [Fact(what=what, value=value) for what, value in known if value]


def _modules(modules: Sequence[ModuleError]) -> Grid:
    rows = [
        (
            fmt.clean(m.module) + (" (the model)" if m.unnamed else ""),
            fmt.clean(m.type),
            *(error_text(e) for e in (m.output, m.dgrad, m.wgrad, None if m.reason else m.rounded)),
            fmt.flops_text(m.flops),
            "kept in FP32" if m.kept else fmt.clean(m.reason),
        )
        for m in modules
    ]
    heads = ("module", "type", "output", "dgrad", "wgrad", "rounded in", "FLOPs", "")
    return Grid(heads=heads, rows=rows, numbers=(2, 3, 4, 5, 6))


def _verifications(trials: Sequence[Verification]) -> Grid:
    rows = []
    for number, trial in enumerate(trials, start=1):
        kept = [*trial.kept, *trial.operations]
        names = ", ".join(map(fmt.clean, kept[:_NAMED])) or "nothing"
        more = f" and {len(kept) - _NAMED} more" if len(kept) > _NAMED else ""
        rows.append(
            (
                str(number),
                names + more,
                error_text(trial.error),
                fmt.clean(trial.tensor),
                fmt.scale_text(trial.init_scale),
                ", ".join(map(str, trial.steps)),
                "passes" if trial.passed else "fails",
            )
        )
    heads = ("run", "kept in FP32", "largest error", "gradient of", "scale", "batches", "")
    return Grid(heads=heads, rows=rows, numbers=(2,))
