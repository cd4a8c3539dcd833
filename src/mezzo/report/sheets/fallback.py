"""A fallback search as display strings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath

from mezzo.records import FallbackRecord, FallbackVerdict, ModuleError, Verification, clear_error
from mezzo.report import formatting as fmt
from mezzo.report.sheets import shared
from mezzo.report.sheets.shared import Fact, Grid, ScriptSheet

_TONES: dict[FallbackVerdict, str] = {
    "found": "warn",
    "does not pay": "bad",
    "not needed": "good",
    "elsewhere": "bad",
    "undecided": "open",
    "not repeatable": "open",
    "fp32 fails": "bad",
}
_NAMED = 6
_MOST_DIGITS = 6


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
        suggested=fmt.clean(record.suggested) if record.helps else "",
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


def error_texts(error: float | None, allowed: float | None) -> tuple[str, str]:
    """Return an error and what is allowed for it, with as many digits as it takes to tell them apart, two or more."""
    for digits in range(2, _MOST_DIGITS):
        texts = fmt.number_text(error, digits=digits), fmt.number_text(allowed, digits=digits)
        if texts[0] != texts[1]:
            break
    return texts


def _headline(record: FallbackRecord, script: str) -> str:
    policy = fmt.clean(record.policy_shown)
    if record.operations:
        named = ", ".join(map(fmt.clean, record.operations))
        return f"Keeping modules of {script} in FP32 does not help under {policy}; keeping these operations in FP32 does: {named}"
    more, share = fmt.plural(len(record.kept), "module"), fmt.share_text(record.fp32_share)
    if record.verdict == "found":
        if record.error_before is None or not record.error_before < clear_error(record.tolerance):
            return f"{more} of {script} must stay in FP32 under {policy}, {share} of the FLOPs"
        first = next(iter(record.verifications), None)
        error, allowed = error_texts(record.error_before, None if first is None else first.allowed)
        return (
            f"Under {policy} a gradient of {script} is off by {error}, where {allowed} is allowed; with {more} in FP32, {share} of the "
            "FLOPs, every gradient passes"
        )
    if record.verdict == "does not pay":
        rest = "stay in FP32" if record.instead == "fp32" else f"use {fmt.clean(record.instead)}"
        return (
            f"{policy} does not pay for {script}: {more} with {share} of the FLOPs would have to stay in FP32; {rest}"
        )
    if record.verdict == "not needed" and record.error_before == 0:
        return f"{policy} does not change a single bit of any gradient of {script}, so nothing was tried"
    if record.verdict == "not needed" and record.verifications and not record.verifications[0].passed:
        return f"No module of {script} needs FP32 under {policy}: none makes more than rounding on its own"
    return {
        "not needed": f"No module of {script} needs FP32 under {policy}: rounding explains the error of every gradient",
        "elsewhere": f"Keeping modules of {script} in FP32 does not help under {policy}",
        "undecided": f"Single gradients of {script} cannot tell what {policy} needs; whole trainings can",
        "not repeatable": f"{script} does not compute the same result twice, so precision cannot be judged",
        "fp32 fails": f"{script} fails in FP32 too: precision is not the cause",
    }[record.verdict]


def _facts(record: FallbackRecord) -> list[Fact]:
    named = ", ".join(map(fmt.clean, record.kept[:_NAMED]))
    more = f" and {len(record.kept) - _NAMED} more" if len(record.kept) > _NAMED else ""
    known = [
        ("policy", fmt.policy_text(record.policy, record.policy_typed) if record.policy_typed else ""),
        ("keep in FP32" if record.helps else "would be kept in FP32", named + more),
        ("instead", fmt.clean(record.instead)),
        ("operations in FP32", ", ".join(map(fmt.clean, record.operations))),
        ("error before", _error_of(record, [])),
        ("error with them", _error_of(record, record.kept) if record.kept else ""),
        ("tolerance", error_text(record.tolerance)),
        ("error of rounding alone", error_text(record.rounding) if record.rounding is not None else ""),
        ("error of FP32's last bit", error_text(record.noise) if record.noise is not None else ""),
        ("verifications", str(len(record.verifications))),
        ("modules run by themselves", str(len(record.modules))),
        ("policy file", fmt.clean(record.policy_file)),
    ]
    return [Fact(what=what, value=value) for what, value in known if value]


def _error_of(record: FallbackRecord, kept: Sequence[str]) -> str:
    """Return the error with a set kept, on as many batches as it was checked on, and what is allowed for that gradient."""
    trials = [t for t in record.verifications if t.kept == list(kept) and not t.operations]
    if not trials:
        return ""
    trial = max(trials, key=lambda t: len(t.steps))
    error, allowed = error_texts(trial.error, trial.allowed)
    of = f", of {fmt.clean(trial.tensor)}" if trial.tensor else ""
    return error + (f" ({allowed} allowed{of})" if trial.allowed is not None else of)


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
                *error_texts(trial.error, trial.allowed),
                fmt.clean(trial.tensor),
                fmt.scale_text(trial.init_scale),
                ", ".join(map(str, trial.steps)),
                "passes" if trial.passed else "fails",
            )
        )
    heads = ("run", "kept in FP32", "error", "allowed", "gradient of", "scale", "batches", "")
    return Grid(heads=heads, rows=rows, numbers=(2, 3))
