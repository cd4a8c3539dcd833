"""Patches of Keras scripts against the unpatched scripts under the policy: a whole trial on torch, gradients to the bit on TensorFlow."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from keras_runs import printed

from paths import SCRIPTS

pytest.importorskip("keras")
pytest.importorskip("tensorflow")


def test_a_patched_script_trains_as_under_the_policy(tmp_path: Path) -> None:
    """On a CPU, Keras on torch multiplies FP16 in FP32: BF16's patch is tried after it."""
    words = [str(SCRIPTS / "patch_keras.py"), "fp16", str(tmp_path)]
    lines = printed("keras_patch_trial.py", *words, KERAS_BACKEND="torch")
    offered, same_losses, tried_as, reasons = json.loads(lines[-1])
    assert offered, reasons
    assert same_losses
    assert tried_as == "bf16"


CASES = [("keras_objects", "fp16"), ("keras_loop", "fp16"), ("keras_step", "fp16"), ("keras_loop", "bf16")]


@pytest.fixture(scope="module")
def runs() -> list[list[dict[str, object]]]:
    """Return the runs of each case, unpatched under the policy and patched as it is, from one process."""
    lines = printed("keras_patched.py", *(word for case in CASES for word in case), KERAS_BACKEND="tensorflow")
    return [json.loads(line) for line in lines if line.startswith("[")]


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_a_patched_script_has_the_gradients_of_the_policy(
    case: tuple[str, str], runs: list[list[dict[str, object]]]
) -> None:
    under_policy, patched = runs[CASES.index(case)]
    assert under_policy["loss"]
    assert under_policy == patched
