"""Patches of Keras scripts against the unpatched scripts under the policy: a whole trial on torch, gradients to the bit on TensorFlow."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from paths import SCRIPTS

pytest.importorskip("keras")
pytest.importorskip("tensorflow")
HERE = Path(__file__).parent / "scripts"


def printed_by(script: str, words: Sequence[str], **variables: str) -> list[str]:
    """Return what one of these tests' scripts prints."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TF_CPP_MIN_LOG_LEVEL": "2", **variables}
    command = [sys.executable, str(HERE / script), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_patched_script_trains_as_under_the_policy(tmp_path: Path) -> None:
    """On a CPU, Keras on torch multiplies FP16 in FP32: BF16's patch is tried after it."""
    words = [str(SCRIPTS / "patch_keras.py"), "fp16", str(tmp_path)]
    offered, same_losses, tried_as, reasons = json.loads(
        printed_by("keras_patch_trial.py", words, KERAS_BACKEND="torch")[-1]
    )
    assert offered, reasons
    assert same_losses
    assert tried_as == "bf16"


CASES = [("keras_objects", "fp16"), ("keras_loop", "fp16"), ("keras_step", "fp16"), ("keras_loop", "bf16")]


@pytest.fixture(scope="module")
def runs() -> list[list[dict[str, object]]]:
    """Return the runs of each case, unpatched under the policy and patched as it is, from one process."""
    lines = printed_by("keras_patched.py", [word for case in CASES for word in case], KERAS_BACKEND="tensorflow")
    return [json.loads(line) for line in lines if line.startswith("[")]


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_a_patched_script_has_the_gradients_of_the_policy(
    case: tuple[str, str], runs: list[list[dict[str, object]]]
) -> None:
    under_policy, patched = runs[CASES.index(case)]
    assert under_policy["loss"]
    assert under_policy == patched
