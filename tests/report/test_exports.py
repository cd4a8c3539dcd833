"""Records as JUnit XML, SARIF and Markdown: what the formats require, by hand, and nothing of this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from every_page import audit

import record_builders as build
from mezzo.cli import main
from mezzo.records import AnyRecord, Finding, write_record
from mezzo.report.exports import junit, markdown, sarif

BAD = 'a <b> & "c" | `d` \x1b[31m \x00 ]]>'


def finding(**fields: Any) -> Finding:
    known = {"code": "A601", "title": "a title", "modules": ["net"], "detail": BAD, "gain": "", "fix": "change it"}
    return Finding(**{**known, **fields})


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with a script, from whose folder below the command is typed."""
    (tmp_path / ".git").mkdir()
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "train me.py").write_text("import torch\n")
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work"


def parsed(record: AnyRecord) -> ElementTree.Element:
    return ElementTree.fromstring(junit(record))


def outcomes(record: AnyRecord) -> dict[str, str]:
    """Return what became of each test case, by its name."""
    return {
        case.attrib["name"]: next((child.tag for child in case), "passed") for case in parsed(record).iter("testcase")
    }


def test_a_gate_has_a_case_for_each_check(here: Path) -> None:
    record = build.gate_record()
    assert outcomes(record) == {
        "steps": "passed",
        "loss": "failure",
        "memory": "passed",
        "speed": "skipped",
        "formats": "failure",
        "findings": "failure",
        "A103 a module opts out of autocast": "failure",
    }
    root = parsed(record)
    assert {name: root.attrib[name] for name in ("tests", "failures", "errors", "skipped")} == {
        "tests": "7",
        "failures": "4",
        "errors": "0",
        "skipped": "1",
    }
    (suite,) = root
    assert (suite.tag, suite.attrib["name"], suite.attrib["time"]) == ("testsuite", "mezzo gate", "12.000")


def test_a_comparison_has_a_case_for_each_policy() -> None:
    assert outcomes(build.compare_record()) == {
        row.policy_shown: {"equivalent": "passed", "undecided": "skipped"}.get(row.verdict, "failure")
        for row in build.compare_rows()
        if row.verdict != "baseline"
    }


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (build.resume_check_record(), {"mezzo resume-check": "failure"}),
        (build.doctor_record(), {"mezzo doctor": "passed"}),
        (build.run_record(findings=[finding(severity="info")]), {"mezzo run": "passed", "A601 a title": "skipped"}),
        (build.run_record(error="it broke"), {"mezzo run": "failure"}),
    ],
)
def test_other_records_are_one_case(record: AnyRecord, expected: dict[str, str]) -> None:
    assert outcomes(record) == expected


def test_sarif_names_files_of_the_repository_and_lines(here: Path) -> None:
    findings = [
        finding(severity="error", lines=[f"{here}/train me.py:3", "/usr/lib/other.py:9"]),
        finding(code="A602", severity="warning", lines=["train me.py:5", "train me.py:7"]),
        finding(code="A603", severity="info"),
        finding(code="A101", modules=["other"], lines=["/etc/passwd:1"]),
    ]
    data = json.loads(sarif(build.run_record(script="train me.py", findings=findings)))
    assert (data["version"], data["$schema"].rpartition("/")[2]) == ("2.1.0", "sarif-schema-2.1.0.json")
    (run,) = data["runs"]
    assert run["tool"]["driver"]["name"] == "mezzo"
    assert [rule["id"] for rule in run["tool"]["driver"]["rules"]] == ["A601", "A602", "A603", "A101"]
    shown = []
    for result in run["results"]:
        assert result["message"]["text"]
        assert run["tool"]["driver"]["rules"][result["ruleIndex"]]["id"] == result["ruleId"]
        (location,) = result["locations"]
        place = location["physicalLocation"]
        assert place["artifactLocation"]["uriBaseId"] == "%SRCROOT%"
        line = place["region"]["startLine"] if "region" in place else None
        shown.append((result["ruleId"], result["level"], place["artifactLocation"]["uri"], line))
    script = "work/train%20me.py"
    assert shown == [
        ("A601", "error", script, 3),
        ("A602", "warning", script, 5),
        ("A602", "warning", script, 7),
        ("A603", "note", script, None),
        ("A101", "note", script, None),
    ]
    assert str(here) not in sarif(build.run_record(script="train me.py", findings=findings))


def test_sarif_of_a_gate_tells_new_findings() -> None:
    results = json.loads(sarif(build.gate_record()))["runs"][0]["results"]
    assert {one["ruleId"]: one["baselineState"] for one in results} == {"A101": "unchanged", "A103": "new"}


def test_an_audit_names_the_line_of_a_findings_module(here: Path) -> None:
    record = audit(here)
    located = [found.model_copy(update={"lines": []}) for found in record.findings]
    record = record.model_copy(update={"findings": located})
    wide = [one.model_copy(update={"module": located[0].modules[0]}) for one in record.wide_products]
    record = record.model_copy(update={"wide_products": wide, "casts": [], "round_trips": []})
    (case,) = parsed(record).iter("testcase")
    file, line = wide[0].line.rsplit(":", 1)
    assert (case.attrib["file"], case.attrib["line"]) == (f"work/{Path(file).name}", line)


def test_nothing_in_a_text_is_markup(here: Path) -> None:
    record = build.run_record(script="train me.py", findings=[finding(severity="error")])
    assert "\x1b" not in junit(record) + sarif(record) + markdown(record)
    assert parsed(record) is not None
    (result,) = json.loads(sarif(record))["runs"][0]["results"]
    assert 'a <b> & "c"' in result["message"]["text"]
    assert "\\<b\\>" in markdown(record)
    assert "\\`d\\`" in markdown(record)


def test_markdown_has_the_table_of_a_gate() -> None:
    lines = markdown(build.gate_record()).splitlines()
    assert lines[0] == "### train.py is not as in golden.json: loss, formats and findings"
    assert "| check | golden | now | change | margin | verdict | why |" in lines
    assert "| memory | 1.00 MiB | 1.00 MiB |  | 1.0% | same |  |" in lines
    assert "| module | phase | golden | now |" in lines
    assert "| encoder | forward | bf16 | fp32 |" in lines


def test_the_command_writes_all_three(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "record.json"
    write_record(build.gate_record(), path)
    files = [tmp_path / name for name in ("a.xml", "b.sarif", "c.md")]
    assert main(["report", *(word for file in files for word in ("--export", str(file))), str(path)]) == 0
    assert all(file.stat().st_size > 100 for file in files)
    assert main(["report", "--export", str(tmp_path / "a.txt"), str(path)]) == 2
    assert "ends in '.txt'; allowed: .xml, .sarif, .md" in capsys.readouterr().err
    assert main(["report", "--export", str(files[0]), str(path), str(path)]) == 2
    assert "--export takes one record; 2 were given" in capsys.readouterr().err
