"""Ten updates of Keras under a policy, against Keras' own mixed precision without Mezzo: the same weights and momenta, to the bit.

Scales are powers of two, so that gradients that Mezzo divides for the script to see, and multiplies again for
``LossScaleOptimizer``, are exactly those that Keras scales and divides. The runs of a backend share one process,
``scripts/keras_updates.py``.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
from keras_runs import answers

pytest.importorskip("keras")
TF, JAX, TORCH = "tensorflow", "jax", "torch"
for _backend in (TF, JAX, TORCH):
    pytest.importorskip(_backend)

UPDATES = 10
FP16, OVERFLOWS = ("fp16", 2.0**16), ("fp16:init_scale=16777216", 2.0**24)
EVERYWHERE = ["fit", "step", "step_scaled", "step_clips", "step_clips_scaled", "accumulated", "clipnorm", "global"]
EVERYWHERE += ["loop_scaled"]
CASES: dict[str, list[str]] = {
    TF: [*EVERYWHERE, "loop", "loop_eager", "loop_share_scaled", "one_device", "replicas", "two_strategies"],
    JAX: [*EVERYWHERE, "loop_share_scaled"],
    TORCH: [*EVERYWHERE, "loop", "loop_grad", "loop_adversarial", "loop_share_scaled"],
}
OVERFLOWING = ["overflow", "step_overflow"]
SEVERAL_WORKERS = ["MultiWorkerMirroredStrategy", "ParameterServerStrategy"]
ONLY_FOUND = {TF: ["replicas_second_overflows", "embedding", *SEVERAL_WORKERS], JAX: ["loop"], TORCH: []}


class Runs:
    """What every run of a backend gave: Keras' own and Mezzo's."""

    def __init__(self, backend: str) -> None:
        lines: list[tuple[str, str | None, float | None]] = [("fit", None, None), ("fit", "bf16", None)]
        for case in CASES[backend]:
            lines += [(case, None, FP16[1]), (case, FP16[0], None)]
        for case in OVERFLOWING:
            lines += [(case, None, OVERFLOWS[1]), (case, OVERFLOWS[0], None)]
        lines += [(case, FP16[0], None) for case in ONLY_FOUND[backend]]
        self._found = dict(zip(lines, answers("keras_updates.py", lines, KERAS_BACKEND=backend), strict=True))

    def __call__(self, case: str, policy: str | None, scale: float | None = None) -> dict[str, Any]:
        found: dict[str, Any] = self._found[case, policy, scale]
        return found


runs_of = functools.cache(Runs)


@pytest.fixture(params=[TF, JAX, TORCH])
def backend(request: pytest.FixtureRequest) -> tuple[str, Runs]:
    return request.param, runs_of(request.param)


def test_updates_are_those_of_keras_itself(backend: tuple[str, Runs]) -> None:
    name, runs = backend
    for case in CASES[name]:
        plain, found = runs(case, None, FP16[1]), runs(case, FP16[0])
        assert len(plain["rows"]) == UPDATES, case
        assert found["rows"] == plain["rows"], case
        assert plain["rows"][0] != plain["rows"][-1], case
        assert set(found["steps"]["loss_scale"]) == {FP16[1]}, case
    assert runs("fit", "bf16")["rows"] == runs("fit", None)["rows"]


def test_a_scale_that_overflows_skips_the_same_updates(backend: tuple[str, Runs]) -> None:
    _, runs = backend
    for case in OVERFLOWING:
        plain, found = runs(case, None, OVERFLOWS[1]), runs(case, OVERFLOWS[0])
        assert found["rows"] == plain["rows"], case
        skipped = found["steps"]["skipped"]
        pairs = zip(plain["rows"], plain["rows"][1:], skipped[1:], strict=False)
        assert [a == b for a, b, _ in pairs] == skipped[1:], case
        assert 0 < sum(skipped) < UPDATES, case


def test_replicas_skip_together_and_the_norm_is_of_their_sum() -> None:
    """Keras itself asks only the first replica whether its gradients are finite."""
    runs = runs_of(TF)
    plain, found = runs("replicas", None, FP16[1]), runs("replicas", FP16[0])
    assert found["steps"]["grad_norm"] == pytest.approx(plain["norms"], rel=1e-6)
    found = runs("replicas_second_overflows", FP16[0])
    assert found["steps"]["skipped"] == [k == 2 for k in range(UPDATES)]
    assert found["rows"][2] == found["rows"][1]
    assert all(map(math.isfinite, found["rows"][-1]))


def test_the_norm_of_an_embeddings_gradient_sums_its_rows() -> None:
    found = runs_of(TF)("embedding", FP16[0])
    assert found["steps"]["grad_norm"] == pytest.approx(found["norms"], rel=1e-6)


@pytest.mark.parametrize("name", SEVERAL_WORKERS)
def test_strategies_of_several_processes_are_refused(name: str) -> None:
    assert runs_of(TF)(name, FP16[0]) == {
        "error": f"{name} trains in 2 processes, each with a mezzo command of its own; allowed: strategies of one process"
    }


def test_a_loop_on_jax_that_scales_nothing_is_refused_before_its_first_update() -> None:
    assert runs_of(JAX)("loop", FP16[0]) == {
        "error": "a SGD gets gradients of an unscaled loss: on JAX, mezzo run scales only for the optimizer of compile; "
        "allowed under a policy with a loss scale: a LossScaleOptimizer"
    }
