"""Public reports rebuilt (``tests/faults/reports.py``): each command says what was written down before it ran, or is known not to."""

from __future__ import annotations

import contextlib
import inspect
import re
from pathlib import Path
from typing import NamedTuple

import pytest
import reports

from helpers_diagnose import diagnosed, place_of, source_of
from helpers_launch import observed_record
from mezzo.launch.torch import switched
from mezzo.observe.settings import AuditSettings
from mezzo.records import AS_IS, AuditRecord
from paths import ROOT

PAGE = ROOT / "docs" / "public-reports.md"
# The rebuilt report steps its schedule first, at which torch warns once.
pytestmark = pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning")


class Diagnosed(NamedTuple):
    name: str
    verdict: str
    module: str
    op: str
    phase: str
    step: int
    line: str
    """Text of the source line."""
    fix: str
    """Part of the fix that was tried and helped; empty where none can be tried."""


RANGE, INVALID, SILENT = "range_overflow", "invalid_operation", "silent_saturation"
DIAGNOSED = [
    Diagnosed("soft_prompt", RANGE, "(script)", "Adam.step", "update", 1, "optimizer.step()", "eps=0.0001"),
    Diagnosed("dice", RANGE, "(script)", "sum", "forward", 1, "seen * mask", "bfloat16"),
    Diagnosed("unit_channels", RANGE, "1", "div", "forward", 1, "F.normalize", "bfloat16"),
    Diagnosed("running_mean", RANGE, "0", "conv1d", "forward", 4, "model(x)", "enabled=False"),
    Diagnosed("unit_rows", RANGE, "(script)", "rsqrt", "backward", 1, "rsqrt()", "enabled=False"),
    Diagnosed("huge_norm", SILENT, "(script)", "linalg.vector_norm", "forward", 1, "linalg.norm", ""),
    Diagnosed("masked_entropy", INVALID, "(script)", "mul", "forward", 1, "logs.exp()", ""),
]


@pytest.mark.parametrize("report", DIAGNOSED, ids=lambda r: r.name)
def test_a_report_is_diagnosed(report: Diagnosed, tmp_path: Path) -> None:
    record = diagnosed(report.name, AS_IS, tmp_path)
    assert place_of(record) == report[1:6], record.detail
    assert report.line in source_of(record.line)
    assert record.fix_tried is bool(report.fix)
    assert report.fix in record.fix_line


class Found(NamedTuple):
    name: str
    codes: dict[str, str]
    """The text of the first source line of each finding, by its code."""


FOUND = [
    Found("lip_reading", {"A601": "clip_grad_norm_", "A611": "schedule.step()"}),
    Found("dreambooth_average", {"A612": "slow.sub_"}),
    Found("large_norms_left_out", {"A605": "unscale_(optimizer)"}),
    Found("scaled_only", {"A603": "optimizer.step()"}),
    Found("steps_twice", {"A605": "optimizer.step()"}),
    Found("loaded_in_half", {"A616": "scaler.step(optimizer)"}),
    Found("resumed_without_scaler", {"A617": "torch.save"}),
    Found("rounded_times", {"A623": "t.to(torch.bfloat16)"}),
    Found("rotary_tables", {"A621": "type_as", "A623": "angles.cos()"}),
]


@pytest.mark.parametrize("report", FOUND, ids=lambda r: r.name)
def test_a_report_is_found_by_run(report: Found) -> None:
    with switched(None) as (run, _), contextlib.suppress(RuntimeError, ValueError):
        getattr(reports, report.name)()
    found = {finding.code: finding for finding in run.lint.findings()}
    assert found.keys() == report.codes.keys()
    assert all(line in source_of(found[code].lines[0]) for code, line in report.codes.items())


def test_a_report_is_found_by_audit() -> None:
    record = observed_record(reports.lost_updates, None, AuditSettings(steps=(2,)))
    assert isinstance(record, AuditRecord)
    assert "A401" in {finding.code for finding in record.findings}


def test_the_page_has_every_report() -> None:
    rows = re.findall(
        r"^\| \[.*?\]\(https://github.com/(\S+?)\) \|.*\| `(\w+)` \|.*\|$", PAGE.read_text(encoding="utf-8"), re.M
    )
    names = [*(r.name for r in DIAGNOSED), *(r.name for r in FOUND), "lost_updates"]
    assert sorted(name for _, name in rows) == sorted(names)
    for address, name in rows:
        told = inspect.getdoc(getattr(reports, name)) or ""
        assert told.startswith(f"{address}: ")
        assert "\nRight: " in told
