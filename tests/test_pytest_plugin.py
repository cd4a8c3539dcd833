"""The pytest plugin as a project's tests use it: skipped without ``--mezzo``, a verdict with it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from forked_processes import in_fork
from mezzo import pytest_plugin
from mezzo.errors import UsageError
from mezzo.records import write_record
from record_builders import compare_record, compare_rows

pytest_plugins = ["pytester"]
TESTS = """
import torch

def train():
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(12):
        inputs = torch.randn(16, 8)
        loss = torch.nn.functional.cross_entropy(model(inputs), inputs[:, :4].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

def test_trains_alike(mezzo_compare):
    record = mezzo_compare(train, policies="fp32,bf16", seeds=3, margin=0.1)
    assert [row.verdict for row in record.rows] == ["baseline", "equivalent"]

def test_other():
    pass
"""
PLUGIN = ("-p", "mezzo.pytest_plugin", "-p", "no:cacheprovider", "-p", "no:xdist")


def test_without_the_flag_tests_that_compare_are_skipped(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(TESTS)
    ran = pytester.runpytest_inprocess(*PLUGIN, "-rs")
    ran.assert_outcomes(passed=1, skipped=1)
    ran.stdout.fnmatch_lines(["*trains under several policies; type pytest --mezzo"])


def test_the_plugin_imports_nothing_of_mezzo_by_itself() -> None:
    code = "import sys, mezzo.pytest_plugin; print(*(n for n in sys.modules if n.startswith(('torch', 'pydantic', 'mezzo.'))))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    allowed = {"mezzo.lazy_names", "mezzo.pytest_plugin", "mezzo.version"}
    assert set(done.stdout.split()) <= allowed


def commands(monkeypatch: pytest.MonkeyPatch, *, code: int, verdict: str) -> list[list[str]]:
    """Let the plugin's command write a record with this verdict and end with this code; return the commands."""
    typed: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        typed.append(command)
        rows = [
            row.model_copy(update={"verdict": verdict}) if row.verdict != "baseline" else row for row in compare_rows()
        ]
        if verdict:
            write_record(compare_record(rows=rows), Path(command[command.index("--out") + 1]) / "record.json")
        return subprocess.CompletedProcess(command, code, stdout="", stderr="mezzo: why")

    monkeypatch.setattr(pytest_plugin.subprocess, "run", run)
    return typed


CALLS = """
def test_calls(mezzo_compare):
    record = mezzo_compare("train.py", ["--epochs", "1"], policies="fp32,fp16", metric="acc=(.*)", fail_on="diverged")
    assert record.kind == "compare"
"""


@pytest.mark.parametrize(
    ("code", "verdict", "lines"),
    [
        (0, "equivalent", []),
        (1, "diverged", ["*diverged*", "*mezzo: why"]),
        (2, "", ["*mezzo compare made no record (exit code 2):", "*mezzo: why"]),
    ],
)
def test_the_verdict_is_the_tests(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, code: int, verdict: str, lines: list[str]
) -> None:
    typed = commands(monkeypatch, code=code, verdict=verdict)
    pytester.makepyfile(CALLS)
    ran = pytester.runpytest_inprocess(*PLUGIN, "--mezzo")
    ran.assert_outcomes(passed=not code, failed=bool(code))
    ran.stdout.fnmatch_lines(lines)
    (command,) = typed
    assert command[1:4] == ["-m", "mezzo", "compare"]
    assert command[4:14] == [
        "--policies",
        "fp32,fp16",
        "--seeds",
        "3",
        "--margin",
        "0.02",
        "--fail-on",
        "diverged",
        "--gpus",
        "none",
    ]
    assert command[-5:] == ["--metric", "acc=(.*)", "train.py", "--epochs", "1"]


def test_a_function_of_a_file_becomes_a_script(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    names: dict[str, object] = {}
    exec(compile(TESTS, str(tmp_path / "test_it.py"), "exec"), names)
    script = pytest_plugin._script_of(names["train"], tmp_path)  # type: ignore[arg-type]
    assert script.name == "train.py"
    ended = in_fork(["run", "--policy", "as-is", "--out", str(tmp_path / "out"), str(script)], folder=tmp_path)
    assert ended.code == 0, ended.printed
    assert "12 steps" in ended.printed


def needs(folder: str) -> None:
    """Stand in for a training that takes an argument."""


@pytest.mark.parametrize(
    ("function", "why"), [(lambda: None, "another process cannot import it"), (needs, "it needs folder")]
)
def test_what_another_process_cannot_call_is_refused(tmp_path: Path, function: object, why: str) -> None:
    with pytest.raises(UsageError, match=f"and {why}; allowed: a script, or a function of a file without arguments"):
        pytest_plugin._script_of(function, tmp_path)  # type: ignore[arg-type]
