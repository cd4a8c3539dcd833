"""The first minutes on a GPU, without one: what is measured once stays, wherever the process was cut, and the stages name what exists."""

from __future__ import annotations

import ast
import csv
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from paths import ROOT, TESTS

SCRIPT = ROOT / "benchmarks" / "first_gpu.sh"
if not SCRIPT.is_file():
    pytest.skip("the benchmarks are not beside these tests", allow_module_level=True)
sys.path.insert(0, str(ROOT))

from benchmarks.__main__ import benchmarks  # noqa: E402
from benchmarks.gpu import gpu_checks  # noqa: E402
from benchmarks.gpu.contest.cases import plan  # noqa: E402
from benchmarks.gpu.first_gpu import __main__ as program  # noqa: E402
from benchmarks.gpu.first_gpu.running import BUDGET_S, Case, Results, Stage  # noqa: E402
from benchmarks.gpu.first_gpu.stages import FAILURES, STAGES, TEST_FILES, dry  # noqa: E402

ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}", "PYTHON": sys.executable}


# --- cut and started again ------------------------------------------------------------------------

MEASURE = """
import pathlib, sys, time
with open(sys.argv[1], "a") as calls:
    print("begin", sys.argv[2], file=calls, flush=True)
    time.sleep(float(sys.argv[3]))
    print("end", sys.argv[2], file=calls, flush=True)
pathlib.Path(sys.argv[4], "measured").write_text(sys.argv[2])
"""
RUN = """
import json, math, sys
from pathlib import Path
from benchmarks.gpu.first_gpu.running import Case, Results, Stage
folder, calls, measure, seconds, num = sys.argv[1:]
command = ("python", "-S", "-c", measure, calls)
cases = tuple(Case(f"case{n}", (*command, f"case{n}", seconds, "{out}"), 10.0) for n in range(int(num)))
Results(Path(folder)).run(Stage("stage", "", cases), math.inf)
"""


def started(tmp_path: Path, *, seconds: float, num: int) -> subprocess.Popen[str]:
    words = [str(tmp_path / "out"), str(tmp_path / "calls"), MEASURE, str(seconds), str(num)]
    return subprocess.Popen(
        [sys.executable, "-c", RUN, *words], cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.DEVNULL, text=True
    )


def results_below(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*.json")}


def killed_after(process: subprocess.Popen[str], seconds: float) -> bool:
    """Return whether the process was still running when it was killed."""
    try:
        process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return True
    return False


def test_killed_at_any_moment_nothing_is_lost_and_nothing_is_measured_twice(tmp_path: Path) -> None:
    moments = random.Random(7)
    out, calls, num, kills = tmp_path / "out", tmp_path / "calls", 6, 0
    kept: dict[Path, bytes] = {}
    for _ in range(6):
        kills += killed_after(started(tmp_path, seconds=0.03, num=num), moments.uniform(0.1, 0.4))
        assert kept.items() <= results_below(out).items()
        kept = results_below(out)
    assert started(tmp_path, seconds=0.03, num=num).wait() == 0

    found = results_below(out)
    assert kept.items() <= found.items()
    assert {path.stem for path in found} == {f"case{n}" for n in range(num)}
    assert all(json.loads(text)["exit_code"] == 0 for text in found.values())
    for number in range(num):
        assert (out / "stage" / f"case{number}" / "measured").read_text(encoding="utf-8") == f"case{number}"
    begun = Counter(line for line in calls.read_text(encoding="utf-8").splitlines() if line.startswith("begin"))
    assert kills >= 1
    assert num <= begun.total() <= num + kills  # a kill costs the case that was running, and no other


def test_a_case_dies_with_the_process_that_started_it(tmp_path: Path) -> None:
    process, calls = started(tmp_path, seconds=1.0, num=1), tmp_path / "calls"
    while not calls.exists() or not calls.read_text(encoding="utf-8"):
        time.sleep(0.01)
    process.kill()
    process.wait()
    with Results(tmp_path / "out"):  # waits until the case has gone
        time.sleep(1.2)
    assert calls.read_text(encoding="utf-8") == "begin case0\n"
    assert started(tmp_path, seconds=0.0, num=1).wait() == 0
    assert [path.name for path in (tmp_path / "out" / "cut").iterdir()] == ["stage-case0-0", "stage-case0.log-1"]


@pytest.mark.slow
def test_a_dry_run_killed_at_random_moments_has_each_row_once(tmp_path: Path) -> None:
    moments, kept = random.Random(3), dict[Path, bytes]()
    command = ["bash", str(SCRIPT), "--dry-run", "--out", str(tmp_path), "host", "trainings"]

    kills = 0
    for _ in range(2):
        begun = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.DEVNULL, text=True)
        kills += killed_after(begun, moments.uniform(1.0, 5.0))
        assert kept.items() <= results_below(tmp_path).items()
        kept = results_below(tmp_path)
    last = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False)

    assert last.returncode == 0, last.stdout + last.stderr
    assert kills >= 1
    (folder,) = (path.parent for path in tmp_path.glob("*/where.json"))
    assert kept.items() <= results_below(tmp_path).items()
    assert {path.relative_to(folder).as_posix() for path in results_below(folder)} == {
        "where.json",
        "host/operations.json",
        "trainings/tiny.json",
    }
    for name, columns, num in (("host/operations/operations.csv", 2, 78), ("trainings/tiny/zoo.csv", 5, 3)):
        rows = [tuple(row[:columns]) for row in csv.reader((folder / name).read_text(encoding="utf-8").splitlines())]
        assert len(set(rows)) == len(rows) == 1 + num


# --- budgets, limits and what is missing ----------------------------------------------------------


def sleeping(name: str, seconds: float, limit_s: float = 60.0) -> Case:
    return Case(
        name, ("python", "-S", "-c", f"import time; print('at work', flush=True); time.sleep({seconds})"), limit_s
    )


def test_a_case_that_is_cut_begins_again_and_what_it_printed_stays(tmp_path: Path) -> None:
    stage = Stage("stage", "", (sleeping("long", 30.0),))
    with Results(tmp_path) as results:
        results.run(stage, time.monotonic() + 0.5)
        assert results.left(stage) == list(stage.cases)
        assert (tmp_path / "stage" / "long.log").read_text(encoding="utf-8") == "at work\n"
        results.run(replace(stage, cases=(sleeping("long", 0.0),)), time.monotonic() + 60)
        assert results.left(stage) == []
    assert (tmp_path / "cut" / "stage-long.log-1").read_text(encoding="utf-8") == "at work\n"


def test_a_case_over_its_limit_has_a_result_and_one_that_does_not_fit_waits(tmp_path: Path) -> None:
    stage = Stage(
        "stage", "", (sleeping("hangs", 30.0, 0.3), sleeping("long", 0.0, 400.0), sleeping("short", 0.0, 5.0))
    )
    with Results(tmp_path) as results:
        results.run(stage, time.monotonic() + 60)
        found = results.of(stage, stage.cases[0])
        assert found is not None
        assert (found["status"], found["exit_code"]) == ("killed at its limit of 0 s", None)
        assert results.left(stage) == [stage.cases[1]]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> list[Case]:
    """Cases that a dry run's first stage has instead of its own."""
    cases = [sleeping("works", 0.0)]
    monkeypatch.setattr(program, "dry", lambda _: (Stage("failures", "", tuple(cases)),))
    monkeypatch.setattr(program, "_code", lambda: "0123456789")
    return cases


def test_exit_codes_and_the_summary(tmp_path: Path, quick: list[Case], capsys: pytest.CaptureFixture[str]) -> None:
    command = ["--dry-run", "--out", str(tmp_path)]
    quick.append(Case("absent", ("python",), program="no-such-program"))
    assert program.main(command) == 0
    assert "failures/absent: not run: missing no-such-program" in capsys.readouterr().out
    quick.append(Case("fails", ("python", "-S", "-c", "raise SystemExit(5)")))
    assert program.main([*command, "--minutes", "0"]) == program.LEFT
    assert "left: failures. The same command continues there." in capsys.readouterr().out
    assert program.main(command) == program.main(command) == program.FAILED
    (path,) = tmp_path.glob("*/summary.tsv")
    rows = [line.split("\t")[:2] for line in path.read_text(encoding="utf-8").splitlines()[1:]]
    assert rows == [
        ["failures/works", "passed"],
        ["failures/absent", "not run: missing no-such-program"],
        ["failures/fails", "failed: ended, 5"],
    ]


def test_other_code_is_measured_again_in_another_folder(
    tmp_path: Path, quick: list[Case], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["--dry-run", "--out", str(tmp_path)]
    assert program.main(command) == 0
    before = results_below(tmp_path)
    capsys.readouterr()
    monkeypatch.setattr(program, "_code", lambda: "9876543210")
    assert program.main(command) == 0
    assert "has results with other conditions (code was 0123456789): all is measured again" in capsys.readouterr().out
    assert before.items() <= results_below(tmp_path).items()
    assert len(results_below(tmp_path)) == 2 * len(before)


def test_two_at_once_are_refused(
    tmp_path: Path, quick: list[Case], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("benchmarks.gpu.first_gpu.running._LOCK_S", 0.0)
    assert program.main(["--dry-run", "--out", str(tmp_path)]) == 0
    (folder,) = tmp_path.iterdir()
    process = started_in(folder)
    try:
        capsys.readouterr()
        assert program.main(["--dry-run", "--out", str(tmp_path)]) == program.BUSY
        assert capsys.readouterr().out.startswith("another process measures in ")
    finally:
        process.kill()
        process.communicate()


def started_in(folder: Path) -> subprocess.Popen[str]:
    """Return a process that works in the folder."""
    holds = "import sys, time, pathlib; from benchmarks.gpu.first_gpu.running import Results\n"
    holds += "kept = Results(pathlib.Path(sys.argv[1])); print('here', flush=True); time.sleep(60)"
    process = subprocess.Popen(
        [sys.executable, "-c", holds, str(folder)], env=ENVIRONMENT, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "here\n"
    return process


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_what_it_would_do(tmp_path: Path) -> None:
    command = ["bash", str(SCRIPT), "--out", str(tmp_path / "out")]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=60, check=False)

    assert done.returncode == program.NO_GPU, done.stderr
    assert done.stdout.startswith("no GPU: torch.cuda.is_available() is false")
    assert [line.split(":")[0].strip() for line in done.stdout.splitlines()[2:]] == [stage.name for stage in STAGES]
    assert not (tmp_path / "out").exists()


# --- one file a test ------------------------------------------------------------------------------

OWN_TESTS = """
import os, time
import pytest

def note(name):
    with open("calls", "a") as file:
        print(name, file=file)

def test_passes():
    note("passes")

def test_fails():
    note("fails")
    print("printed before")
    seen = 41
    assert seen == 42

@pytest.mark.skip(reason="not today")
def test_skipped():
    pass

def test_dies():
    note("dies")
    os._exit(139)

def test_waits():
    note("waits")
    time.sleep(float(open("seconds").read()))
"""


def own_tests(tmp_path: Path, seconds: float) -> subprocess.Popen[bytes]:
    (tmp_path / "test_own.py").write_text(OWN_TESTS, encoding="utf-8")
    (tmp_path / "seconds").write_text(str(seconds), encoding="utf-8")
    command = [sys.executable, "-m", "benchmarks.gpu.first_gpu.pytest_results", "results", "test_own.py"]
    return subprocess.Popen(
        command,
        cwd=tmp_path,
        env=ENVIRONMENT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


@pytest.mark.slow
def test_each_test_has_its_result_at_once_and_runs_once(tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    process = own_tests(tmp_path, 60.0)
    while not calls.exists() or "waits" not in calls.read_text(encoding="utf-8"):
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()

    folder = tmp_path / "results" / "test_own"
    outcomes = {"passes": "passed", "fails": "failed", "skipped": "skipped", "dies": "died"}
    found = {path: json.loads(text) for path, text in results_below(folder).items()}
    assert {one["test"]: one["outcome"] for one in found.values()} == {
        f"test_own.py::test_{name}": outcome for name, outcome in outcomes.items()
    }
    why = {one["test"].partition("_own.py::test_")[2]: one["why"] for one in found.values()}
    assert why["dies"] == "the process ended in this test, with exit code 139"
    (log,) = folder.glob("test_fails-*.log")
    assert "assert 41 == 42" in log.read_text(encoding="utf-8")
    assert "printed before" in log.read_text(encoding="utf-8")

    before = results_below(folder)
    assert own_tests(tmp_path, 0.0).wait() == 1  # of the one that failed before
    assert before.items() <= results_below(folder).items()
    assert len(results_below(folder)) == len(before) + 1
    assert calls.read_text(encoding="utf-8").split() == ["passes", "fails", "dies", "waits", "waits"]


# --- the stages -----------------------------------------------------------------------------------


def test_the_stages_name_what_exists() -> None:
    marked = {
        path.relative_to(ROOT).as_posix()
        for path in TESTS.rglob("test_*.py")
        if re.search(r"mark\.gpu\b|^from gpu_jobs import", path.read_text(encoding="utf-8"), re.MULTILINE)
    } - {"tests/project/test_first_gpu.py"}
    assert set(TEST_FILES) == marked
    for test in FAILURES.values():
        file, _, name = test.partition("::")
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        assert name.partition("[")[0] in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert [stage.name for stage in STAGES] == [stage.name for stage in dry(STAGES)]
    assert len({stage.name for stage in STAGES}) == len(STAGES) == 7
    planned, names = [case.name for case in plan(tiny=False)], set(benchmarks())
    for stage in (*STAGES, *dry(STAGES)):
        assert stage.cases
        assert len({case.name for case in stage.cases}) == len(stage.cases)
        for case in stage.cases:
            assert case.limit_s <= BUDGET_S
            begun = case.command[case.command.index("python") :]
            assert begun[:3] == ("python", "-m", "benchmarks") or begun[2] == "benchmarks.gpu.first_gpu.pytest_results"
            assert begun[3] in names or begun[2] != "benchmarks"
    for case in next(stage for stage in STAGES if stage.name == "rivals").cases:
        only = case.command[case.command.index("--only") + 1]
        assert len([name for name in planned if re.search(only, name)]) == 1


@pytest.mark.slow
def test_nine_tests_failed_on_the_h100() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-m", "gpu", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *FAILURES.values()], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert sum("::test_" in line for line in done.stdout.splitlines()) == 9, done.stdout + done.stderr


def test_its_programs_run_on_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_checks.main(["kernels", "cpu"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "24 updates"
    assert gpu_checks.main(["waits", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 14
    assert all(line.endswith(": no wait") for line in lines)
