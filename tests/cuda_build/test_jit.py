"""All GPU kernels through Triton's own JIT, for GPUs that are not there: registers, spills, and no second compilation."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.cuda_build, pytest.mark.slow]
PROGRAM = Path(__file__).with_name("jit_program.py")
GPUS = {"V100": 70, "T4": 75, "A100": 80, "RTX 3090": 86, "L4": 89, "H100": 90, "B200": 100, "RTX 5090": 120}


@pytest.mark.parametrize("gpu", GPUS)
def test_kernels_fit_and_are_compiled_once(gpu: str, tmp_path: Path) -> None:
    # In a process without Triton's interpreter, with a cache of its own so that everything is compiled.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, str(PROGRAM), str(GPUS[gpu])]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    made: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert len(made["kernels"]) == 18
    assert [k for k in made["kernels"] if k[1] > 80 or k[2] > 0] == []
    assert made["compiled_later"] == []  # it could happen inside a capture
    assert made["empty_launches"] == 0
    flushed = {
        line.split()[0] for path in tmp_path.rglob("*.ptx") for line in path.read_text().splitlines() if ".ftz" in line
    }
    assert flushed == set()  # subnormal numbers are kept
