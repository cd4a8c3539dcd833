"""Keras on JAX under ``mezzo run``: what traced, stateless steps record, against what Keras itself and a count by hand say."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("keras")
pytest.importorskip("jax")
SCRIPT = Path(__file__).parent / "scripts" / "keras_cases.py"
B, STEPS = 8, 6
HIDDEN, HEAD = 2 * B * 4 * 16, 2 * B * 16 * 3
STRESSED = "fp16:init_scale=16777216:growth_interval=8"

Case = tuple[str, str, int | None]
Ran = Callable[..., dict[str, Any]]
CASES: list[Case] = [
    ("fit", "plain", None),
    ("fit", "fp32", None),
    ("fit", "fp32", 1),
    ("fit", "tf32", None),
    ("fit", "fp16", None),
    ("fit", "bf16-pure", None),
    ("fit", "fp16:loss_scale=none", None),
    ("fit", "fp16:loss_scale=static:init_scale=1024", None),
    ("fit", "bf16:loss_scale=dynamic:init_scale=8:max_scale=16:growth_interval=2", None),
    ("fit", "fp16:fp32_modules=he*", None),
    ("own_policy", "plain", None),
    ("own_policy", "as-is", None),
    ("own_scaler", "fp32", None),
    ("own_scaler", "as-is", None),
    ("long_fit", STRESSED, None),
    ("long_fit", "fp16:init_scale=16777216:min_scale=16777216", None),
    ("batch_losses", "fp16", None),
    ("accumulating", "fp32", None),
    ("convolutions", "fp32", None),
    ("eager", "fp16", None),
    ("several_a_call", "fp16", None),
    ("stateless_loop", "plain", None),
    ("stateless_loop", "fp32", None),
]


@pytest.fixture(scope="module")
def ran() -> Ran:
    done = subprocess.run(
        [sys.executable, str(SCRIPT)],
        input="\n".join(map(json.dumps, CASES)),
        env={**os.environ, "KERAS_BACKEND": "jax", "OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = dict(zip(CASES, map(json.loads, done.stdout.splitlines()), strict=True))
    return lambda case, policy, seed=None: found[case, policy, seed]


def close(found: list[float], expected: list[float], tolerance: float) -> bool:
    pairs = zip(map(float, found), map(float, expected), strict=True)
    return all(math.isclose(a, b, rel_tol=tolerance, abs_tol=tolerance) for a, b in pairs)


def test_fp32_trains_as_plain_keras_does(ran: Ran) -> None:
    for policy in ("fp32", "tf32"):
        found = ran("fit", policy)
        assert close(found["script"]["weights"], ran("fit", "plain")["script"]["weights"], 1e-6)
        assert found["left_alone"] == []


def test_fp16_is_keras_own_mixed_precision(ran: Ran) -> None:
    plain, found = ran("own_policy", "plain")["script"], ran("fit", "fp16")
    assert plain["compute"] == found["script"]["compute"] == {"hidden": "float16", "head": "float16"}
    assert close(found["script"]["weights"], plain["weights"], 1e-6)
    assert not close(found["script"]["weights"], ran("fit", "plain")["script"]["weights"], 1e-6)


def test_loss_of_a_step_is_the_batchs_without_the_scale(ran: Ran) -> None:
    found = ran("batch_losses", "fp16")
    assert close(found["steps"]["loss"], found["script"]["losses"], 1e-6)


@pytest.mark.parametrize(
    ("case", "policy", "scales"),
    [
        ("fit", "fp32", []),
        ("fit", "fp16", [65536.0] * STEPS),
        ("fit", "fp16:loss_scale=none", []),
        ("fit", "fp16:loss_scale=static:init_scale=1024", [1024.0] * STEPS),
        ("fit", "bf16:loss_scale=dynamic:init_scale=8:max_scale=16:growth_interval=2", [8.0, *[16.0] * 5]),
        ("own_policy", "as-is", [32768.0] * STEPS),
        ("own_scaler", "fp32", []),
        ("own_scaler", "as-is", [2.0 ** (40 + (k + 1) // 2) for k in range(48)]),
    ],
)
def test_loss_scales(ran: Ran, case: str, policy: str, scales: list[float]) -> None:
    assert ran(case, policy)["steps"]["loss_scale"] == scales


def test_scale_and_skips_are_those_of_the_optimizer(ran: Ran) -> None:
    found = ran("long_fit", STRESSED)
    script, steps = found["script"], found["steps"]
    iterations = script["iterations"]
    assert steps["loss_scale"] == script["scales"]
    assert steps["skipped"] == [now == before for now, before in zip(iterations, [0, *iterations[:-1]], strict=True)]
    assert sum(steps["skipped"]) == len(iterations) - iterations[-1] > 5
    assert all(math.isfinite(float(n)) != s for n, s in zip(steps["grad_norm"], steps["skipped"], strict=True))


def test_a_scale_at_its_floor_ends_the_script(ran: Ran) -> None:
    message = "ScaleFloorError: gradients overflow at the loss scale's floor of 1.67772e+07, update 1"
    assert ran("long_fit", "fp16:init_scale=16777216:min_scale=16777216") == {"error": message}


@pytest.mark.parametrize(
    ("policy", "flops"),
    [
        ("fp32", {"fp32": 2 * HIDDEN + 3 * HEAD}),
        ("fp16", {"fp16": 2 * HIDDEN + 3 * HEAD}),
        ("bf16-pure", {"bf16": 2 * HIDDEN + 3 * HEAD}),
        ("fp16:fp32_modules=he*", {"fp16": 2 * HIDDEN, "fp32": 3 * HEAD}),
    ],
)
def test_operations_by_format(ran: Ran, policy: str, flops: dict[str, int]) -> None:
    """The first layer needs no gradient of its input."""
    assert ran("fit", policy)["flops"] == flops


def test_convolutions_are_counted(ran: Ran) -> None:
    first = 2 * B * (3 * 3 * 4) * (3 * 3 * 2)
    second, depthwise, dense = 2 * B * (2 * 2 * 6) * (2 * 2 * 4), 2 * B * (2 * 2 * 18) * (2 * 2), 2 * B * 72 * 3
    assert ran("convolutions", "fp32")["flops"] == {"fp32": 2 * first + 3 * (second + depthwise + dense)}


def test_accumulated_gradients_make_one_step(ran: Ran) -> None:
    found = ran("accumulating", "fp32")
    assert len(found["steps"]["loss"]) == STEPS // 2
    losses = ran("fit", "fp32")["steps"]["loss"]
    assert found["steps"]["loss"][0] == pytest.approx(losses[1], abs=0.1)


@pytest.mark.parametrize("case", ["eager", "several_a_call"])
def test_every_way_of_running_a_step_gives_the_same(ran: Ran, case: str) -> None:
    found, expected = ran(case, "fp16"), ran("fit", "fp16")
    assert close(found["script"]["weights"], expected["script"]["weights"], 1e-6)
    for column in ("loss", "grad_norm", "loss_scale", "skipped"):
        assert close(found["steps"][column], expected["steps"][column], 1e-5), column


def test_own_jitted_loop(ran: Ran) -> None:
    plain, found = ran("stateless_loop", "plain"), ran("stateless_loop", "fp32")
    assert close(found["script"]["weights"], plain["script"]["weights"], 1e-6)
    assert close(found["steps"]["loss"], plain["script"]["losses"], 1e-6)
    assert found["left_alone"] == []


def test_seeds(ran: Ran) -> None:
    none, one = (ran("fit", "fp32", seed)["steps"]["loss"] for seed in (None, 1))
    assert all(abs(a - b) > 1e-3 for a, b in zip(none[:2], one[:2], strict=True))


def test_framework_is_named_with_its_backend(ran: Ran) -> None:
    assert " on jax " in ran("fit", "fp32")["framework"]
