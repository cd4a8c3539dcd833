"""Commands and sessions on torch's CUDA build, whose Triton, devices and defaults are those of a GPU server, without a GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.cuda_build, pytest.mark.slow]
SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "plain.py"
COMMANDS = {
    "run under bf16": ["run", "--policy", "bf16"],
    "run under fp16": ["run", "--policy", "fp16"],
    "run under fp32": ["run", "--policy", "fp32"],
    "run under tf32": ["run", "--policy", "tf32"],
    "run as it is": ["run", "--policy", "as-is"],
    "audit": ["audit"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_run_a_script(command: str, tmp_path: Path) -> None:
    arguments = [sys.executable, "-m", "mezzo", *COMMANDS[command], "--out", str(tmp_path / "out"), str(SCRIPT)]
    done = subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def test_doctor_says_that_there_is_no_gpu() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mezzo", "doctor"], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert torch.__version__ in done.stdout
