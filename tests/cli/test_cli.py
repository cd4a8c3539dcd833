"""The command line as a user types it: a few real runs in processes of their own, and where their results go."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from helpers_launch import read_values
from mezzo import cli
from mezzo.records import SCHEMA_VERSION, CompareRecord, RunRecord, read_record, write_record
from paths import SCRIPTS

PLAIN = str(SCRIPTS / "plain.py")


def mezzo(*words: str, cwd: Path, given: str | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mezzo", *words]
    return subprocess.run(command, cwd=cwd, input=given, capture_output=True, text=True, timeout=120, check=False)


def run_record(path: Path) -> RunRecord:
    record = read_record(path)
    assert isinstance(record, RunRecord)
    return record


# --- existing records --------------------------------------------------------------------------------------------------------


def test_a_record_of_a_newer_mezzo_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "record.json"
    path.write_text(json.dumps({"kind": "run", "schema_version": SCHEMA_VERSION + 1}))
    assert cli.main(["report", str(path)]) == 8
    assert f"schema version {SCHEMA_VERSION + 1}" in capsys.readouterr().err
    path.write_text("[]")
    assert cli.main(["report", str(path)]) == 8


# --- real runs ---------------------------------------------------------------------------------------------------------------


def test_a_run_leaves_a_record_and_a_page_and_passes_output_through(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(SCRIPTS)!r})\n" + Path(PLAIN).read_text() + "print(sys.argv[2:])"
    )
    done = mezzo(
        "run",
        "--policy",
        "bf16",
        "--out",
        "there",
        "--",
        "train.py",
        "4",
        "--policy",
        "x",
        "--out",
        "y",
        "--help",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert len(read_values(done.stdout)["losses"]) == 4
    output, _, summary = done.stdout.partition("\n\n")
    assert output.splitlines()[-1] == "['--policy', 'x', '--out', 'y', '--help']"
    assert summary.startswith("train.py trained 4 steps under bf16")
    assert done.stderr == ""
    record = run_record(tmp_path / "there" / "record.json")
    assert len(record.steps) == 4
    assert record.command == [
        "mezzo",
        "run",
        "--policy",
        "bf16",
        "--out",
        "there",
        "--",
        "train.py",
        "4",
        *done.args[-5:],
    ]
    assert (tmp_path / "there" / "report.html").stat().st_size > 1000
    assert sorted(p.name for p in tmp_path.iterdir()) == ["there", "train.py"]


@pytest.mark.slow
def test_json_is_alone_on_standard_output(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    chatter = "import os, subprocess, sys\nos.system('echo shell')\nprint('python', input())\nos.write(1, b'raw\\n')\n"
    script.write_text(f"import sys; sys.path.insert(0, {str(SCRIPTS)!r})\n{chatter}" + Path(PLAIN).read_text())
    words = ["run", "--json", "--policy", "fp32", "--metric", "losses.: .([0-9.]+)", "--seed", "3", "train.py"]
    done = mezzo(*words, cwd=tmp_path, given="from standard input\n")
    assert done.returncode == 0, done.stderr
    record = RunRecord.model_validate_json(done.stdout)
    assert record.seed == 3
    assert record.metric is not None
    assert record.metric.values == pytest.approx(record.steps.loss[:1])
    for said in ("shell", "python from standard input", "raw", '{"losses"'):
        assert said in done.stderr


LEFT = "called os._exit, or replaced itself by os.exec,"


@pytest.mark.parametrize(
    ("dies", "code", "said"),
    [
        ("os.abort()", 134, "died with signal SIGABRT"),
        pytest.param("os._exit(9)", 9, "died with exit code 9", marks=pytest.mark.slow),
        pytest.param("os._exit(0)", 1, LEFT, marks=pytest.mark.slow),
        ("os.execl('/bin/true', 'true')", 1, LEFT),
    ],
)
def test_a_process_that_dies_leaves_a_record_that_says_so(dies: str, code: int, said: str, tmp_path: Path) -> None:
    (tmp_path / "dies.py").write_text(f"import os\n{dies}\n")
    done = mezzo("run", "--out", "out", "dies.py", cwd=tmp_path)
    assert done.returncode == code
    record = run_record(tmp_path / "out" / "record.json")
    assert record.exit_code == code
    assert record.error == f"the process {said} before it could write a record"


@pytest.mark.slow
def test_ctrl_c_reaches_the_script_and_keeps_the_record(tmp_path: Path) -> None:
    text = """
        import time, torch
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(100_000):
            model(torch.ones(2, 2)).mean().backward()
            optimizer.step()
            if step == 4:
                print("ready", flush=True)
            if step >= 4:
                time.sleep(0.05)
    """
    (tmp_path / "long.py").write_text(textwrap.dedent(text))
    command = [sys.executable, "-m", "mezzo", "run", "--out", "out", "long.py"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    record = run_record(tmp_path / "out" / "record.json")
    assert record.exit_code == 130
    assert record.error == "KeyboardInterrupt"
    assert 5 <= len(record.steps) < 200
    assert errors.startswith('Traceback (most recent call last):\n  File "')
    assert "launch" not in errors.split("KeyboardInterrupt")[0]


@pytest.mark.slow
def test_an_error_and_an_exit_code_of_a_module_pass_through(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(
        f"import sys; sys.path.insert(0, {str(SCRIPTS)!r})\n"
        + Path(PLAIN).read_text()
        + "if __spec__.name == 'package.__main__': sys.exit(3)\n"
    )
    done = mezzo("run", "--policy", "fp32", "--out", "out", "-m", "package", "5", cwd=tmp_path)
    assert done.returncode == 3, done.stderr
    assert len(run_record(tmp_path / "out" / "record.json").steps) == 5


def test_a_comparison_interleaves_runs_and_judges_them(tmp_path: Path) -> None:
    words = [
        "compare",
        "--policies",
        "fp32,bf16",
        "--seeds",
        "1",
        "--gpus",
        "none",
        "--out",
        "out",
        "--json",
        PLAIN,
        "4",
    ]
    done = mezzo(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    record = CompareRecord.model_validate_json(done.stdout)
    assert [(row.policy, row.num_runs, row.num_failed) for row in record.rows] == [("fp32", 1, 0), ("bf16", 1, 0)]
    assert record.rows[0].verdict == "baseline"
    assert [len(run.steps) for run in record.runs] == [4, 4]
    logs = sorted(p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("output.log"))
    assert logs == ["out/bf16-seed0/output.log", "out/fp32-seed0/output.log"]
    assert len(read_values((tmp_path / logs[0]).read_text())["losses"]) == 4


def test_a_comparison_whose_baseline_fails_says_where_to_look(tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text("raise SystemError('broken')\n")
    done = mezzo("compare", "--policies", "fp32,bf16", "--seeds", "1", "--out", "out", "fails.py", cwd=tmp_path)
    assert done.returncode == 7
    assert "no run of the baseline fp32 succeeded: SystemError: broken" in done.stderr
    assert "broken" in (tmp_path / "out" / "fp32-seed0" / "output.log").read_text()
    record = CompareRecord.model_validate_json((tmp_path / "out" / "record.json").read_text())
    reasons = [(row.verdict, row.num_failed, row.reason) for row in record.rows]
    assert reasons == [("failed", 1, "SystemError: broken")] * 2


def test_report_shows_what_was_recorded_before(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "runs" / "record.json"
    write_record(run_record_of(tmp_path), path)
    assert cli.main(["report", str(path), "--out", str(tmp_path / "pages")]) == 0
    assert (tmp_path / "pages" / "runs.html").stat().st_size > 1000
    assert "train.py" in capsys.readouterr().out
    assert cli.main(["report", "--json", str(path)]) == 0
    assert RunRecord.model_validate_json(capsys.readouterr().out) == run_record(path)


def run_record_of(folder: Path) -> RunRecord:
    from mezzo.measure.environment import environment_without_torch

    return RunRecord(
        command=["mezzo", "run", "train.py"],
        script=os.fspath(folder / "train.py"),
        script_sha256="",
        policy="fp16",
        environment=environment_without_torch(),
    )
