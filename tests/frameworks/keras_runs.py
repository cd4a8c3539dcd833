"""What Keras' tests share: scripts in a process for each backend, which Keras chooses once, when it is imported."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).parent / "scripts"


def printed(script: str, *words: str, lines: Iterable[Any] = (), **variables: str) -> list[str]:
    """Run one of these tests' scripts with JSON lines for input; return the lines that it prints."""
    known = {"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / script), *words],
        input="\n".join(map(json.dumps, lines)),
        env={**os.environ, **known, **variables},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def answers(script: str, lines: Iterable[Any], **variables: str) -> list[Any]:
    """Return what a script answers to each line."""
    return [json.loads(line) for line in printed(script, lines=lines, **variables)]


def close(found: list[float], expected: list[float], tolerance: float) -> bool:
    """Return whether numbers, which may be written as text, agree."""
    pairs = zip(map(float, found), map(float, expected), strict=True)
    return all(math.isclose(a, b, rel_tol=tolerance, abs_tol=tolerance) for a, b in pairs)
