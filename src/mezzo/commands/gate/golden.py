"""The golden file: read, written whole, and made from the records of runs. Imports no torch."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from pydantic import ValidationError

from mezzo.commands.compare.pairing import final, last_metric, losses_of
from mezzo.commands.compare.trends import not_finite
from mezzo.commands.gate.judge import other_parts
from mezzo.errors import HOW_TO_UPDATE, ScriptError, UsageError
from mezzo.formats import FORMATS
from mezzo.records import AuditRecord, Finding, Golden, GoldenRun, ModuleFormats, Note, RunRecord
from mezzo.records.files import without_secrets, write_whole
from mezzo.records.run import WIDE_POLICIES

GOLDEN_VERSION = 1
_FLOATS = (*FORMATS, *WIDE_POLICIES)
_MACHINE = ("mezzo", "python", "torch", "os", "cpu", "threads", "device", "gpu", "driver", "cuda", "cudnn")
"""Fields of an environment that a golden keeps."""


def read_golden(path: Path, *, accept: str) -> Golden:
    """Return the golden in a file.

    Args:
        path: the file.
        accept: the command that writes a new one.

    Raises:
        UsageError: the file cannot be read, is no golden, or was written by a newer Mezzo.
    """
    try:
        text = path.read_text(encoding="utf-8")
        data = json.loads(text)
    except OSError as error:
        raise UsageError(
            f"cannot read the golden file {str(path)!r}: {error.strerror}", hint=f"to make one, type: {accept}"
        ) from None
    except (ValueError, RecursionError) as error:
        raise _not_a_golden(path, str(error), accept) from None
    version = data.get("golden_version") if isinstance(data, dict) else None
    if isinstance(version, int) and version > GOLDEN_VERSION:
        raise UsageError(
            f"the golden file {str(path)!r} has version {version}; this Mezzo reads up to {GOLDEN_VERSION}",
            hint=HOW_TO_UPDATE,
        )
    try:
        golden = Golden.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "the file"
        raise _not_a_golden(path, f"{place}: {first['msg']}", accept) from None
    if len(golden.runs) < 2 or not all(run.losses.keys() == golden.runs[0].losses.keys() for run in golden.runs):
        raise _not_a_golden(path, "it needs two runs or more, all with the same losses", accept)
    return golden


def _not_a_golden(path: Path, why: str, accept: str) -> UsageError:
    return UsageError(
        f"{str(path)!r} is not a golden file: {why}",
        hint=f"take it from version control again, or make a new one: {accept}",
    )


def write_golden(golden: Golden, path: Path) -> None:
    """Write a golden as sorted JSON for a review, without secrets: what fits into a line is one."""
    data = json.loads(without_secrets(golden).model_dump_json())
    write_whole(_lines(data, 0) + "\n", path)


_LINE = 120


def _lines(value: object, depth: int) -> str:
    """Return a JSON value in one line if it fits, else with an element a line."""
    text = json.dumps(value, sort_keys=True)
    if not isinstance(value, (dict, list)) or not value or (depth and len(text) + depth <= _LINE):
        return text
    inner, outer = " " * (depth + 1), " " * depth
    if isinstance(value, dict):
        parts = [f"{inner}{json.dumps(key)}: {_lines(value[key], depth + 1)}" for key in sorted(value)]
    else:
        parts = [f"{inner}{_lines(one, depth + 1)}" for one in value]
    left, right = "{}" if isinstance(value, dict) else "[]"
    return f"{left}\n" + ",\n".join(parts) + f"\n{outer}{right}"


def run_summary(run: RunRecord, *, step_time: float | None) -> GoldenRun:
    """Return what a golden keeps of a run."""
    return GoldenRun(
        seed=run.seed or 0,
        num_steps=len(run.steps),
        losses={name: _end(values) for name, values in losses_of(run).items()},
        metric=last_metric(run),
        memory_bytes=run.memory.cuda_allocated_bytes or run.memory.total_bytes,
        step_time=None if step_time is None else float(f"{step_time:.4g}"),
    )


def _end(losses: Sequence[float]) -> float:
    """Return the level at which a loss ended; NaN if it ends in values that are not finite."""
    return math.nan if not_finite(losses, name="") else final(losses)


def machine_of(run: RunRecord) -> dict[str, str]:
    """Return the machine and the versions of a run, as a golden keeps them."""
    known = {name: getattr(run.environment, name) for name in _MACHINE}
    return {name: str(value) for name, value in known.items() if value is not None}


def formats_of(record: AuditRecord) -> ModuleFormats:
    """Return the formats in which each module computed, by phase: of its products, and of all floating-point results."""
    found: dict[str, dict[str, set[str]]] = {}
    for one in record.operations:
        formats = {name for name in (one.format, *one.outputs) if name in _FLOATS}
        if formats:
            found.setdefault(one.module, {}).setdefault(one.phase, set()).update(formats)
    return {module: {phase: sorted(names) for phase, names in phases.items()} for module, phases in found.items()}


def varying_modules(one: ModuleFormats, other: ModuleFormats) -> list[str]:
    """Return the modules that two audits of one script do not show alike."""
    return sorted(module for module in {*one, *other} if one.get(module) != other.get(module))


def modules_by_code(findings: Iterable[Finding]) -> dict[str, list[str]]:
    """Return the modules of each finding, by code."""
    found: dict[str, set[str]] = {}
    for finding in findings:
        found.setdefault(finding.code, set()).update(finding.modules)
    return {code: sorted(found[code]) for code in sorted(found)}


def check_runs(runs: Sequence[RunRecord]) -> None:
    """Refuse runs from which no golden can be made.

    Raises:
        ScriptError: one failed, made no step, or ended at a loss that is not finite.
    """
    for run in runs:
        bad = [name for name, values in losses_of(run).items() if not math.isfinite(_end(values))]
        if why := run.error or ("it recorded no training step" if not len(run.steps) else ""):
            raise ScriptError(
                f"no golden was written: the run with seed {run.seed} failed: {why}",
                hint=run.hint or "run the script by itself first",
            )
        if bad:
            raise ScriptError(
                f"no golden was written: {bad[0]} is not finite at the end of the run with seed {run.seed}",
                hint="mezzo diagnose finds the first value that is not finite",
            )


def differences(golden: Golden, *, machine: Mapping[str, str], script_sha256: str) -> list[Note]:
    """Return what differs from the golden besides its numbers, each with what follows."""
    notes = []
    if golden.script_sha256 != script_sha256:
        notes.append(Note(what="script", value="changed", reason="its text or its own modules are not the golden's"))
    for name in other_parts(golden.machine, machine, sorted({*golden.machine, *machine} - {"mezzo", "os", "driver"})):
        change = f"{golden.machine.get(name, 'none')} then, {machine.get(name, 'none')} now"
        notes.append(Note(what=name, value="another", reason=change))
    if golden.varying:
        few = ", ".join(golden.varying[:3]) + (" and more" if len(golden.varying) > 3 else "")
        notes.append(Note(what="formats", value="not compared", reason=f"the golden's own runs differ in {few}"))
    return notes


def module_notes(golden: Golden, now: ModuleFormats) -> list[Note]:
    """Return which modules are new and which are gone."""
    if golden.audited_step is None or not now:
        return []
    before, after = {*golden.formats, *golden.varying}, {*now, *golden.varying}
    sides = (("new modules", sorted(after - before)), ("gone modules", sorted(before - after)))
    return [Note(what=what, value=str(len(names)), reason=", ".join(names[:5])) for what, names in sides if names]
