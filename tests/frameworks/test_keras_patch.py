"""The patch of a Keras script on both backends, tried against the unpatched script under the policy."""

from __future__ import annotations

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


@pytest.mark.parametrize(
    ("backend", "policy", "tried_as"),
    [
        ("tensorflow", "fp16", "fp16"),
        ("tensorflow", "bf16", "bf16"),
        ("torch", "fp16", "bf16"),  # on a CPU, Keras on torch multiplies FP16 in FP32: BF16's patch is tried after it
    ],
)
def test_a_patched_script_trains_as_under_the_policy(
    backend: str, policy: str, tried_as: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KERAS_BACKEND", backend)
    patch = make_patch(SCRIPT, policy=Policy.parse(policy))
    assert isinstance(patch, Patch)
    request = Request(
        target=str(SCRIPT),
        kind="script",
        framework="keras",
        policy=Policy.parse(policy),
        record_path=str(tmp_path / "record.json"),
        command=("mezzo", "check"),
    )
    outcome = try_patch(request, patch, tmp_path)
    assert outcome.may_be_offered, outcome.reasons
    assert outcome.same_losses
    assert outcome.tried_as == tried_as
