"""The steps of the GitHub Action, run by bash as a runner does, on a machine without GitHub."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import record_builders as build
from mezzo.records import write_record
from paths import ROOT

ACTION = ROOT / "action.yml"
if not ACTION.is_file():
    pytest.skip("the action is not beside these tests", allow_module_level=True)
PARSED: dict[str, Any] = yaml.safe_load(ACTION.read_text(encoding="utf-8"))
STEPS: list[dict[str, Any]] = PARSED["runs"]["steps"]
BASH = ["bash", "--noprofile", "--norc", "-eo", "pipefail"]
"""As a runner starts ``shell: bash``."""
FAKE = """#!/usr/bin/env bash
printf '%s\\n' "$#" "$@" >> "$LOG"
if [ "$1 $2 $3" = "-m mezzo report" ]; then exec "$REAL_PYTHON" "$@"; fi
if [ "$1 $2" = "-m pip" ]; then exit 0; fi
if [ -n "$RECORD" ]; then mkdir -p "$5" && cp "$RECORD" "$5/record.json"; fi
exit "$CODE"
"""
"""A Python that notes its words; Mezzo's command writes a record and ends with a code, and its report is the real one."""


def run_steps(
    place: Path, *, record: str = "", code: int = 0, **inputs: str
) -> tuple[list[list[str]], str, dict[str, str], int]:
    """Run the steps in a folder; return the words of each call of Python, the summary, the outputs and the last exit code."""
    fake = place / "python"
    fake.write_text(FAKE)
    fake.chmod(fake.stat().st_mode | stat.S_IEXEC)
    known = (
        {name: str(one.get("default", "")) for name, one in PARSED["inputs"].items()} | {"python": str(fake)} | inputs
    )
    values = {f"inputs.{name}": value for name, value in known.items()} | {"github.action_path": str(ROOT)}
    summary, log = place / "summary", place / "log"
    ended = 0
    for step in STEPS:
        outputs = place / f"output-{step.get('id', 'none')}"
        if ended or "uses" in step or (step.get("if") == "inputs.install != ''" and not known["install"]):
            continue
        given = {name: filled(text, values) for name, text in step.get("env", {}).items()}
        env = {
            **os.environ,
            **given,
            "GITHUB_OUTPUT": str(outputs),
            "GITHUB_STEP_SUMMARY": str(summary),
            "LOG": str(log),
            "RECORD": record,
            "CODE": str(code),
            "REAL_PYTHON": sys.executable,
        }
        script = place / "step.sh"
        script.write_text(step["run"])
        ended = subprocess.run([*BASH, str(script)], cwd=place, env=env, check=False, capture_output=True).returncode
        for line in outputs.read_text().splitlines() if outputs.exists() else []:
            name, _, value = line.partition("=")
            values[f"steps.{step.get('id')}.outputs.{name}"] = value
    return calls(log), summary.read_text() if summary.exists() else "", values, ended


def filled(text: str, values: dict[str, str]) -> str:
    return re.sub(r"\$\{\{ (\S+) \}\}", lambda match: values[match[1]], text)


def calls(log: Path) -> list[list[str]]:
    words, found = log.read_text().splitlines(), []
    while words:
        count = int(words.pop(0))
        found.append(words[:count])
        words = words[count:]
    return found


def test_a_gate_that_fails_fails_the_job_with_its_table(tmp_path: Path) -> None:
    record = tmp_path / "kept.json"
    write_record(build.gate_record(), record)
    typed, summary, values, code = run_steps(
        tmp_path, record=str(record), code=1, command="gate --golden golden.json train.py --name 'two words'"
    )
    assert typed[0] == ["-m", "pip", "install", str(ROOT)]
    expected = [
        "-m",
        "mezzo",
        "gate",
        "--out",
        "mezzo-results",
        "--golden",
        "golden.json",
        "train.py",
        "--name",
        "two words",
    ]
    assert typed[1] == expected
    assert summary.startswith("### train.py is not as in golden.json: loss, formats and findings")
    assert "| encoder | forward | bf16 | fp32 |" in summary
    assert (values["steps.mezzo.outputs.exit-code"], code) == ("1", 1)
    results = json.loads((tmp_path / "mezzo-results" / "findings.sarif").read_text())["runs"][0]["results"]
    assert [one["ruleId"] for one in results] == ["A101", "A103"]
    assert (tmp_path / "mezzo-results" / "junit.xml").is_file()


def test_a_command_that_passes_passes(tmp_path: Path) -> None:
    record = tmp_path / "kept.json"
    write_record(build.compare_record(), record)
    typed, summary, values, code = run_steps(
        tmp_path, record=str(record), install="", command="compare train.py", folder="out"
    )
    assert typed[0] == ["-m", "mezzo", "compare", "--out", "out", "train.py"]
    assert "| policy | verdict |" in summary
    assert (code, values["steps.mezzo.outputs.record"]) == (0, "out/record.json")


def test_a_command_without_a_record_says_so(tmp_path: Path) -> None:
    _, summary, _, code = run_steps(tmp_path, code=2, install="", command="gate train.py")
    assert summary == "mezzo wrote no record: exit code 2, see the log\n"
    assert code == 2


def test_a_folder_that_exists_is_refused(tmp_path: Path) -> None:
    """The command would write beside it, and the summary would be of an older record."""
    (tmp_path / "mezzo-results").mkdir()
    (tmp_path / "log").touch()
    typed, summary, _, code = run_steps(tmp_path, install="", command="gate train.py")
    assert (typed, summary, code) == ([], "", 2)


def test_what_a_person_typed_is_no_shell_code(tmp_path: Path) -> None:
    typed, *_ = run_steps(
        tmp_path, code=2, install="", command='run train.py "$(touch hacked)" `touch hacked`;touch hacked'
    )
    assert typed[0][5:] == ["train.py", "$(touch hacked)", "`touch", "hacked`;touch", "hacked"]
    assert not (tmp_path / "hacked").exists()


def test_inputs_reach_the_shell_as_variables_alone() -> None:
    for step in STEPS:
        assert "${{" not in step.get("run", ""), step["name"]
        assert step.get("shell") == "bash" or "uses" in step
    used = set(re.findall(r"inputs\.([\w-]+)", ACTION.read_text(encoding="utf-8")))
    assert used == set(PARSED["inputs"])
