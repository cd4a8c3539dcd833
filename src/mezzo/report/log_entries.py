"""What an experiment tracker logs of a record: one description, which each tracker writes in its own terms.

Numbers by step are curves. Trackers find, sort and compare runs by settings, verdicts and numbers that were counted once.
A comparison is one entry for its table and one for each run behind it.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path, PurePath
from typing import Any, Protocol, TypeAlias

from mezzo.records import AnyRecord, Environment, Finding, Histogram, RunRecord

TableValue: TypeAlias = str | float | int | None


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A number by training step, counted from 1."""

    name: str
    steps: Sequence[int]
    values: Sequence[float]


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table of numbers and words."""

    name: str
    columns: list[str]
    rows: list[list[TableValue]]


@dataclass(frozen=True, kw_only=True)
class LogEntry:
    """What is logged of one record."""

    record: AnyRecord
    script: str = ""
    """The script's name without its suffix; empty for ``doctor``."""
    name: str = ""
    """For a run in a comparison: its policy and seed."""
    failed: bool = False
    settings: dict[str, str | int]
    """What was requested, and where it ran."""
    tags: dict[str, str] = field(default_factory=dict)
    """Kind, verdicts and codes of findings."""
    curves: list[Curve] = field(default_factory=list)
    numbers: dict[str, float] = field(default_factory=dict)
    """Numbers that were counted or compared once."""
    tables: list[Table] = field(default_factory=list)
    histograms: dict[str, Histogram] = field(default_factory=dict)
    runs: list[LogEntry] = field(default_factory=list)
    """The runs behind a comparison."""


def log_entry(record: AnyRecord) -> LogEntry:
    """Return what is logged of ``record``, as its command says."""
    entry: LogEntry = import_module(f"mezzo.commands.{record.kind}.page").log_entry(record)
    return entry


def plain_entry(record: AnyRecord) -> LogEntry:
    """Return what every kind of record has: the machine, and the script and verdict if it has them."""
    tags = {"kind": record.kind} | ({"verdict": str(record.verdict)} if hasattr(record, "verdict") else {})
    environment = getattr(record, "environment", None)
    return LogEntry(
        record=record,
        script=stem(getattr(record, "script", "")),
        settings=machine(environment) if isinstance(environment, Environment) else {},
        tags=tags,
    )


def run_entry(run: RunRecord, record: AnyRecord, *, tags: Mapping[str, str], **figures: Any) -> LogEntry:
    """Return the entry of a record about one run.

    Args:
        run: the run.
        record: the record with it.
        tags: verdict and codes of findings.
        **figures: curves, numbers, tables and histograms.
    """
    return LogEntry(
        record=record,
        script=stem(run.script),
        failed=bool(run.error),
        settings=settings_of(run) | {"policy": getattr(record, "policy", run.policy)},
        tags={"kind": record.kind, **tags},
        **figures,
    )


def codes_of(findings: Sequence[Finding]) -> dict[str, str]:
    """Return the codes of findings as a tag."""
    codes = dict.fromkeys(finding.code for finding in findings)
    return {"findings": " ".join(codes)} if codes else {}


def settings_of(run: RunRecord) -> dict[str, str | int]:
    """Return what was requested of a run, and where it ran."""
    settings: dict[str, str | int] = {
        "command": shlex.join(run.command),
        "script": run.script,
        "framework": run.framework,
        "policy": run.policy,
    }
    return settings | ({} if run.seed is None else {"seed": run.seed}) | machine(run.environment)


def machine(environment: Environment) -> dict[str, str | int]:
    """Return the machine and the versions."""
    return {
        "device": environment.gpu or environment.cpu,
        "torch": environment.torch,
        "mezzo": environment.mezzo,
        "date": environment.date,
    }


def stem(script: str) -> str:
    """Return a script's name without its suffix."""
    return PurePath(script).name.removesuffix(".py")  # a module has no suffix: pkg.train


@dataclass(frozen=True, kw_only=True)
class TrackedRecord:
    """A record on disk and its page."""

    record: Path
    page: Path

    @property
    def folder(self) -> Path:
        """The folder of the record."""
        return self.record.parent

    @property
    def name(self) -> str:
        """The name of the record's folder, which is unique to a command; a rank's folder is prefixed with rank 0's."""
        folder = self.folder.resolve()
        name = f"{folder.parent.name}-{folder.name}" if re.fullmatch(r"rank\d+", folder.name) else folder.name
        return name if self.record.name == "record.json" else f"{name}-{self.record.stem}"


# --- Runs logged while they run --------------------------------------------------------------------------------------------------

SUFFIX = "-live"
"""The end of the name of a run that is logged while it runs."""


@dataclass(frozen=True, kw_only=True)
class LiveRun:
    """A run that is logged while it runs."""

    name: str
    """The name of its record's folder."""
    script: str
    """The script's name without .py, or the module's."""
    folder: Path
    """The folder of its record."""
    settings: Mapping[str, str]


class Writer(Protocol):
    """A run in a tracker, written while it runs."""

    where: str

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log the values of a step durably: they survive if every process is killed right after."""

    def close(self) -> None:
        """End the run."""
