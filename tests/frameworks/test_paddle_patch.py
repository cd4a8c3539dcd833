"""Patches of Paddle scripts: they run as they are, train as under the policy to the last bit, and pass the policy's own settings."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from paddle_runs import AS_IS, Ran, numbers, paddle, ran

from mezzo.frameworks.paddle import from_paddle
from mezzo.patching import Patch, make_patch
from mezzo.policy import Policy

SCRIPTS = Path(__file__).parents[1] / "scripts"
CASES = [
    ("plain", "fp16"),
    ("plain", "bf16"),
    ("plain", "fp16-master"),
    ("minimize", "fp16"),
    ("minimize", "bf16-master"),
    ("fit", "fp16"),
    ("own", "bf16"),
    ("o2", "bf16-master"),
]


def trained(source: str, policy: str) -> tuple[Ran, list[Any]]:
    """Run a script's text; return its run and the weights of its network."""

    def code() -> Any:
        random.seed(0)
        np.random.seed(0)
        names: dict[str, Any] = {"__name__": "__main__"}
        exec(compile(source, "script.py", "exec"), names)
        return next(names[name] for name in ("network", "net", "model") if name in names)

    run = ran(code, policy)
    return run, [numbers(p) for p in run.value.parameters()]


def patch_of(name: str, policy: str) -> Patch:
    patch = make_patch(SCRIPTS / f"patch_paddle_{name}.py", policy=Policy.parse(policy))
    assert isinstance(patch, Patch), patch
    return patch


@pytest.mark.parametrize(("name", "policy"), CASES)
@pytest.mark.parametrize("under", ["the policy", AS_IS])  # as it is on a CPU, Paddle's mixed precision is off: in FP32
def test_a_patched_script_trains_as_the_unpatched_one(name: str, policy: str, under: str) -> None:
    patch = patch_of(name, policy)
    chosen = policy if under != AS_IS else AS_IS
    (before, weights), (after, patched) = trained(patch.source, chosen), trained(patch.patched, chosen)
    # A loss's own arithmetic, such as / 2, is in the patch's region, and outside of Mezzo's: one rounding of BF16, and no other gradient.
    np.testing.assert_allclose(after.steps.loss, before.steps.loss, rtol=2**-8 if policy == "bf16-master" else 0)
    assert before.steps.grad_norm == after.steps.grad_norm
    assert before.effective.flops_by_format == after.effective.flops_by_format
    assert before.steps.loss_scale == after.steps.loss_scale
    for one, other in zip(weights, patched, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(("name", "policy"), [case for case in CASES if case[0] in ("plain", "minimize")])
def test_a_patched_script_passes_the_settings_of_the_policy(
    name: str, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed: dict[str, dict[str, Any]] = {}

    def spied(kind: str) -> None:
        original = getattr(paddle.amp, kind)

        def spy(*args: Any, **kwargs: Any) -> Any:
            passed[kind] = kwargs
            return original(*args, **kwargs)

        monkeypatch.setattr(paddle.amp, kind, spy)

    for kind in ("auto_cast", "decorate", "GradScaler"):
        spied(kind)
    trained(patch_of(name, policy).patched, AS_IS)
    given = {k: v for kwargs in passed.values() for k, v in kwargs.items() if k not in ("models", "optimizers")}
    assert from_paddle(given) == Policy.parse(policy)
