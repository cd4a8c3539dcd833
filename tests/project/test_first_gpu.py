"""The script for the first minutes on a GPU: without one it says what it would do; with stubs for everything, what it leaves."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from paths import ROOT

SCRIPT = ROOT / "benchmarks" / "first_gpu.sh"
if not SCRIPT.is_file():
    pytest.skip("the benchmarks are not beside these tests", allow_module_level=True)
sys.path.insert(0, str(ROOT))

from benchmarks.contest import first  # noqa: E402

STEPS = ["tests", "sanitizer", "waits", "benchmark"]
# Every call is noted; ``-c`` asks for the GPU or for pytest, ``-`` prints versions, and one step fails where WRONG names it.
PYTHON = """#!/bin/sh
echo "$@" >> "$CALLS"
case "$*" in
  *"import pytest"*) exit ${NO_PYTEST:-0} ;;
  -) echo "python: 3.12.1" ;;
  *"$WRONG"*) exit 5 ;;
esac
"""


def run(
    tmp_path: Path, *, wrong: str = "nothing", stubs: dict[str, str], **variables: str
) -> subprocess.CompletedProcess[str]:
    folder = tmp_path / "with a space"
    folder.mkdir()
    for name, text in stubs.items():
        (folder / name).write_text(text, encoding="utf-8")
        (folder / name).chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{folder}:{os.environ['PATH']}",
        "CALLS": str(tmp_path / "calls"),
        "WRONG": wrong,
    }
    return subprocess.run(
        ["bash", str(SCRIPT), str(tmp_path / "the results")],
        env={**environment, **variables},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_what_it_would_do(tmp_path: Path) -> None:
    done = run(tmp_path, stubs={}, PYTHON=sys.executable)

    assert done.returncode == 3, done.stderr
    assert done.stdout.startswith("no GPU: torch.cuda.is_available() is false")
    assert [line.split()[0] for line in done.stdout.splitlines()[1:]] == STEPS
    assert not (tmp_path / "the results").exists()


SANITIZER = '#!/bin/sh\nshift 4\nexec "$@"\n'
SMI = "#!/bin/sh\necho NVIDIA-SMI 570.86\n"


def test_it_leaves_one_folder(tmp_path: Path) -> None:
    stubs = {"python3": PYTHON, "nvidia-smi": SMI, "compute-sanitizer": SANITIZER}
    done = run(tmp_path, stubs=stubs, PYTHON=str(tmp_path / "with a space" / "python3"))

    out = tmp_path / "the results"
    assert done.returncode == 0, done.stderr
    rows = [line.split("\t") for line in (out / "steps.tsv").read_text(encoding="utf-8").splitlines()[1:]]
    assert [(row[0], row[1], row[3]) for row in rows] == [(name, "0", f"{name}.log") for name in STEPS]
    where = (out / "where.txt").read_text(encoding="utf-8")
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    assert f"commit: {commit or 'unknown'}" in where
    assert "python: 3.12.1" in where
    assert "NVIDIA-SMI 570.86" in where
    calls = (tmp_path / "calls").read_text(encoding="utf-8").splitlines()
    assert (
        "-m pytest -q -m gpu -p no:cacheprovider -o filterwarnings=default --continue-on-collection-errors tests"
        in calls
    )
    assert "-m benchmarks.contest.first kernels" in calls
    assert "-m benchmarks.contest.first waits" in calls
    assert f"benchmarks/gpu.py --minutes 6 --out {out}" in calls


def test_what_fails_or_is_missing_is_said_and_the_rest_runs(tmp_path: Path) -> None:
    done = run(tmp_path, wrong="first waits", stubs={"python3": PYTHON}, NO_PYTEST="1")

    rows = dict(
        line.split("\t")[:2]
        for line in (tmp_path / "the results" / "steps.tsv").read_text(encoding="utf-8").splitlines()[1:]
    )
    assert done.returncode == 1
    assert rows["tests"] == "not run: pytest is missing"
    assert rows["sanitizer"] in ("not run: compute-sanitizer is missing", "0")
    assert (rows["waits"], rows["benchmark"]) == ("5", "0")


def test_its_programs_run_on_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert first.main(["kernels", "cpu"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "24 updates"
    assert first.main(["waits", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 14
    assert all(line.endswith(": no wait") for line in lines)
