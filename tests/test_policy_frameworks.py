"""A policy in Keras' and Paddle's terms, as far as that needs neither of them."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from mezzo import Policy, PolicyError
from mezzo.explain import Choice
from mezzo.frameworks import keras, paddle

KERAS = {
    "float32": "fp32",
    "mixed_float16": "fp16",
    "mixed_bfloat16": "bf16",
    "float16": "fp16-pure",
    "bfloat16": "bf16-pure",
}


@pytest.mark.parametrize(("name", "policy"), KERAS.items())
def test_the_names_of_keras(name: str, policy: str) -> None:
    assert keras.from_keras(name) == Policy.parse(policy)


def test_a_name_that_keras_has_not() -> None:
    with pytest.raises(PolicyError, match="mixed_float8"):
        keras.from_keras("mixed_float8")


@pytest.mark.parametrize(
    "text",
    [
        "fp32",
        "fp16",
        "bf16",
        "fp16-master",
        "bf16-master",
        "fp16:init_scale=1024:growth_interval=10:hysteresis=2",
        "fp16:lower=softmax",
    ],
)
def test_paddles_arguments_go_there_and_back(text: str) -> None:
    policy = Policy.parse(text)
    assert paddle.from_paddle(paddle.to_paddle(policy)) == policy


@pytest.mark.parametrize(
    ("arguments", "policy"),
    [
        ({"level": "O1", "dtype": "float16", "init_loss_scaling": 1024.0}, "fp16:init_scale=1024"),
        ({"level": "O2", "dtype": "bfloat16"}, "bf16-master"),
        ({"enable": False}, "fp32"),
    ],
)
def test_paddles_own_arguments(arguments: dict[str, Any], policy: str) -> None:
    assert paddle.from_paddle(arguments).replace(lower=(), fp32=()) == Policy.parse(policy)


def not_honoured(choices: list[Choice]) -> set[str]:
    return {c.what for c in choices if c.value.startswith("not honoured")}


def test_what_frameworks_cannot_honour_is_named() -> None:
    assert "growth_factor" in not_honoured(keras.explain(Policy.parse("fp16:growth_factor=4")))
    assert "growth_factor" not in not_honoured(keras.explain(Policy.parse("fp16")))
    assert not_honoured(paddle.explain(Policy.parse("fp32"))) == set()
    for framework in (keras, paddle):
        found = not_honoured(framework.explain(Policy.parse("bf16:reduce=fp16:world=8:gather=bf16:gradients=bf16")))
        assert found == {"reduce", "gather", "gradients"}
    assert not_honoured(paddle.explain(Policy.parse("fp16"))) == {"scale bounds"}


def test_explaining_imports_neither_framework() -> None:
    code = (
        "import sys; from mezzo import Policy; from mezzo.frameworks import keras, paddle; p = Policy.parse('fp16');"
        "keras.explain(p); paddle.explain(p); paddle.to_paddle(p);"
        "print({'keras', 'tensorflow', 'paddle'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


IN_PADDLE = [
    # the policy with a fix, and what a Paddle script that trained under fp16 writes
    ("fp16:fp32_modules=big", "with paddle.amp.auto_cast(enable=False):"),
    ("bf16", 'paddle.amp.auto_cast(dtype="bfloat16")'),
    ("fp16:fp32=linear", 'paddle.amp.auto_cast(custom_black_list=["matmul_v2"])'),
    ("fp16:init_scale=1024", "scaler = paddle.amp.GradScaler(init_loss_scaling=1024.0)"),
    ("fp16", ""),
]


@pytest.mark.parametrize("before", ["fp16", "as-is"])
@pytest.mark.parametrize(("policy", "expected"), IN_PADDLE)
def test_a_policy_in_paddles_terms(policy: str, before: str, expected: str) -> None:
    assert paddle.script_lines(before, Policy.parse(policy)) == expected


PARTS = {
    "layer": ('dtype="float32"  # argument of the layer head', "where the layer is created"),
    "layers": ('dtype="float32"  # argument of the layers head and mid', "where the layer is created"),
    "bf16": ('keras.config.set_dtype_policy("mixed_bfloat16")', "before the first layer is created"),
    "scaler": (
        "optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=1024.0)",
        "where the optimizer is created, before model.compile()",
    ),
}
IN_KERAS = [
    # the policy of the run, with the fix, the script's own new scale, the layers in FP32, and the lines
    ("fp16", "fp16:fp32_modules=head", None, ("head",), ["layer"]),
    ("fp16", "fp16:fp32_modules=head+mid", None, ("head", "mid"), ["layers"]),
    (None, None, None, ("head",), ["layer"]),
    ("fp16", "bf16", None, (), ["bf16"]),
    (None, "bf16", None, (), ["bf16"]),
    ("bf16", "bf16", None, (), []),
    ("fp16", "fp16:init_scale=1024", None, (), ["scaler"]),
    (None, None, 1024.0, (), ["scaler"]),
    ("fp16", "fp16:init_scale=1024:fp32_modules=head", None, ("head",), ["scaler", "layer"]),
    ("fp16", None, None, (), []),
]


@pytest.mark.parametrize(("own", "policy", "scale", "kept", "parts"), IN_KERAS)
def test_a_policy_in_keras_terms(
    own: str | None, policy: str | None, scale: float | None, kept: tuple[str, ...], parts: list[str]
) -> None:
    policies = [None if text is None else Policy.parse(text) for text in (own, policy)]
    assert keras.script_lines(*policies, scale=scale, kept=kept) == [PARTS[part] for part in parts]
