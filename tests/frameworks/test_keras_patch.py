"""Patches of Keras scripts against the unpatched scripts under the policy: a whole trial on torch, gradients to the bit on TensorFlow."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mezzo.launch.request import Request
from mezzo.launch.several.patched import try_patch
from mezzo.patching import Patch, make_patch
from mezzo.policy import Policy
from paths import SCRIPTS

pytest.importorskip("keras")
pytest.importorskip("tensorflow")
SCRIPT = SCRIPTS / "patch_keras.py"


def test_a_patched_script_trains_as_under_the_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    patch = make_patch(SCRIPT, policy=Policy.parse("fp16"))
    assert isinstance(patch, Patch)
    request = Request(
        target=str(SCRIPT),
        kind="script",
        framework="keras",
        policy=Policy.parse("fp16"),
        record_path=str(tmp_path / "record.json"),
        command=("mezzo", "check"),
    )
    outcome = try_patch(request, patch, tmp_path)
    assert outcome.may_be_offered, outcome.reasons
    assert outcome.same_losses
    assert (
        outcome.tried_as == "bf16"
    )  # on a CPU, Keras on torch multiplies FP16 in FP32: BF16's patch is tried after it


CASES = [("keras_objects", "fp16"), ("keras_loop", "fp16"), ("keras_step", "fp16"), ("keras_loop", "bf16")]


@pytest.fixture(scope="module")
def runs() -> list[list[dict[str, object]]]:
    """Return the runs of each case, unpatched under the policy and patched as it is, from one process."""
    here = Path(__file__).parent / "scripts" / "keras_patched.py"
    command = [sys.executable, str(here), *(word for case in CASES for word in case)]
    environment = {**os.environ, "KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "2"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_a_patched_script_has_the_gradients_of_the_policy(
    case: tuple[str, str], runs: list[list[dict[str, object]]]
) -> None:
    under_policy, patched = runs[CASES.index(case)]
    assert under_policy["loss"]
    assert under_policy == patched
