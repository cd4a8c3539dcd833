"""A policy as Keras' objects and back, and what Keras cannot honour; scripts under ``mezzo run``; patches taken off again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mezzo.errors import PolicyError, ScriptError
from mezzo.frameworks.keras import explain, from_keras, not_honoured, to_keras
from mezzo.launch.keras import _backend_of, training
from mezzo.launch.keras.state import KerasRun
from mezzo.policy import Policy

os.environ.setdefault("KERAS_BACKEND", "torch")  # read by Keras when it is imported
keras = pytest.importorskip("keras")
SCRIPTS = Path(__file__).parent / "scripts"


@pytest.mark.parametrize(
    ("text", "name", "loss_scale", "factor", "tf32"),
    [
        ("fp32", "float32", None, None, False),
        ("tf32", "float32", None, None, True),
        ("fp16", "mixed_float16", {"initial_scale": 65536.0, "dynamic_growth_steps": 2000}, None, None),
        (
            "fp16:init_scale=8:growth_interval=3",
            "mixed_float16",
            {"initial_scale": 8.0, "dynamic_growth_steps": 3},
            None,
            None,
        ),
        ("fp16:loss_scale=static:init_scale=4", "mixed_float16", None, 4.0, None),
        ("fp16:loss_scale=none", "mixed_float16", None, None, None),
        ("bf16", "mixed_bfloat16", None, None, None),
        ("fp16-pure", "float16", None, None, None),
        ("bf16-pure", "bfloat16", None, None, None),
    ],
)
def test_policy_as_keras_objects_and_back(
    text: str, name: str, loss_scale: dict[str, float] | None, factor: float | None, tf32: bool | None
) -> None:
    policy = Policy.parse(text)
    found = to_keras(policy)
    assert found.dtype_policy == keras.DTypePolicy(name)
    assert (found.loss_scale, found.loss_scale_factor, found.tf32) == (loss_scale, factor, tf32)
    assert from_keras(found) == policy
    optimizer = found.wrap(keras.optimizers.SGD())
    assert (type(optimizer).__name__ == "LossScaleOptimizer") == (loss_scale is not None)
    if loss_scale is None:
        assert optimizer.loss_scale_factor == factor
    else:
        assert (optimizer.initial_scale, optimizer.dynamic_growth_steps) == tuple(loss_scale.values())


@pytest.mark.parametrize(("text", "name"), [("fp16-master", "mixed_float16"), ("bf16-master", "mixed_bfloat16")])
def test_master_weights_are_what_mixed_policies_keep(text: str, name: str) -> None:
    assert to_keras(Policy.parse(text)).dtype_policy.name == name


def test_policy_of_keras_own_objects() -> None:
    assert from_keras("mixed_bfloat16") == from_keras(keras.DTypePolicy("mixed_bfloat16")) == Policy.parse("bf16")
    scaler = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(), initial_scale=16.0, dynamic_growth_steps=5)
    keras.config.set_dtype_policy("mixed_float16")
    try:
        assert from_keras(scaler) == Policy.parse("fp16:init_scale=16:growth_interval=5")
    finally:
        keras.config.set_dtype_policy("float32")


def test_a_dtype_policy_that_no_policy_stands_for() -> None:
    with pytest.raises(PolicyError) as error:
        from_keras("float64")
    assert error.value.message == (
        "the Keras dtype policy 'float64' stands for no policy; "
        "allowed: bfloat16, float16, mixed_bfloat16, mixed_float16, float32"
    )


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("fp16", []),
        ("bf16:arithmetic=emulated", ["arithmetic not honoured: emulated"]),
        ("bf16:fp32=softmax+sum:lower=gelu", ["lower not honoured: gelu", "fp32 not honoured: softmax+sum"]),
        ("bf16:hysteresis=2", []),  # nothing is scaled
        (
            "fp16:growth_factor=4:backoff_factor=0.25:hysteresis=2",
            ["growth_factor not honoured: 4.0", "backoff_factor not honoured: 0.25", "hysteresis not honoured: 2"],
        ),
    ],
)
def test_what_keras_cannot_honour(text: str, lines: list[str]) -> None:
    policy = Policy.parse(text)
    assert [f"{choice.what} {choice.value}" for choice in not_honoured(policy)] == lines
    told = [f"{choice.what} {choice.value}" for choice in explain(policy)]
    assert [line for line in told if line in lines] == lines
    with training(policy, seed=None, observe=None) as trained:
        pass
    assert [f"{r.what} {r.value}" for r in trained.effective().left_alone] == lines


def test_explanation_of_fp16() -> None:
    told = [f"{choice.what}: {choice.value}" for choice in explain(Policy.parse("fp16:fp32_modules=head"))]
    assert told == [
        "compute: fp16: dtype policy mixed_float16",
        "weights: fp32",
        "loss scale: dynamic from 65536, grows every 2000 updates",
        "modules: head in fp32",
        "bounds of the loss scale: not honoured by Keras itself: 5.96046e-08 to 1.67772e+07",
    ]


def test_patches_are_taken_off() -> None:
    owners = [keras.Layer, keras.optimizers.Optimizer, keras.optimizers.LossScaleOptimizer, keras.Model]
    names = ["__init__", "__call__", "apply", "scale_loss", "build", "compile"]
    before = [getattr(owner, name, None) for owner in owners for name in names]
    with training(Policy.parse("fp16"), seed=3, observe=None):
        assert [getattr(owner, name, None) for owner in owners for name in names] != before
        assert keras.config.dtype_policy().name == "mixed_float16"
    assert [getattr(owner, name, None) for owner in owners for name in names] == before
    assert keras.config.dtype_policy().name == "float32"
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", loss="mse")
    model.fit(np.ones((8, 4)), np.ones(8), verbose=0)
    assert model.layers[0].compute_dtype == "float32"


def record_of(folder: Path, *arguments: str) -> dict[str, Any]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    environment.pop("KERAS_BACKEND", None)
    command = [sys.executable, "-m", "mezzo", "run", "--out", str(folder), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (folder / "record.json").exists(), done.stderr
    record: dict[str, Any] = json.loads((folder / "record.json").read_text())
    printed, _, _ = done.stdout.partition("\n\n")  # the summary follows
    return record | {"printed": printed}


def test_a_script_chooses_its_backend(tmp_path: Path) -> None:
    record = record_of(tmp_path, "--policy", "bf16", str(SCRIPTS / "keras_choice.py"))
    assert record["printed"] == "backend torch"
    assert " on torch " in record["framework"]
    assert record["effective"]["flops_by_format"] == {"bf16": 2 * 2 * 4 * 4}
    assert (record["error"], len(record["steps"]["loss"])) == (None, 2)
    assert record["explanation"][0]["value"] == "bf16: dtype policy mixed_bfloat16"


def test_keras_by_tensorflows_name(tmp_path: Path) -> None:
    pytest.importorskip("tensorflow")
    script = str(SCRIPTS / "keras_in_tensorflow.py")
    none, one = (
        record_of(tmp_path / name, "--policy", "fp16", *seed, script)
        for name, seed in (("none", []), ("one", ["--seed", "1"]))
    )
    assert none["effective"]["flops_by_format"] == {"fp16": 2 * 2 * 4 * 4}
    assert len(none["steps"]["loss"]) == 2
    assert none["printed"] != one["printed"]


def test_another_backend_is_refused() -> None:
    with pytest.raises(ScriptError) as error:
        _backend_of("openvino", KerasRun(None))
    assert error.value.message == "Keras runs on the backend 'openvino' here; allowed: tensorflow, torch, jax"
