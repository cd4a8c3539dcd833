"""A healthy script under CUDA's autocast has no finding, forward and backward, in either format."""

from __future__ import annotations

import json
from pathlib import Path

import null_gpu
import pytest

pytestmark = [
    pytest.mark.cuda_build,
    pytest.mark.slow,
    pytest.mark.skipif(bool(null_gpu.missing()), reason=f"a GPU that computes nothing {null_gpu.missing()}"),
]


def test_healthy_scripts_have_no_finding(tmp_path: Path) -> None:
    done = null_gpu.run(str(Path(__file__).with_name("audit_models.py")), folder=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 10
    assert {name: findings for name, findings in found.items() if findings} == {}
