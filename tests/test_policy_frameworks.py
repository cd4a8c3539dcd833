"""A policy in Keras' and Paddle's terms, as far as that needs neither of them."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from mezzo import Policy, PolicyError
from mezzo.commands.diagnose import fixes
from mezzo.explain import Choice
from mezzo.frameworks import keras, paddle
from mezzo.frameworks.paddle_lines import in_paddle

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
        found = not_honoured(framework.explain(Policy.parse("bf16:reduce=fp16:world=8:gather=bf16")))
        assert found == {"reduce", "gather"}
    assert not_honoured(paddle.explain(Policy.parse("fp16"))) == {"scale bounds"}


def test_explaining_imports_neither_framework() -> None:
    code = (
        "import sys; from mezzo import Policy; from mezzo.frameworks import keras, paddle; p = Policy.parse('fp16');"
        "keras.explain(p); paddle.explain(p); paddle.to_paddle(p);"
        "print({'keras', 'tensorflow', 'paddle'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


KEEP = 'policy = "fp16:fp32_modules=big"'
IN_PADDLE = [
    # a line of a diagnosis, the policy of the run, and what a Paddle script has to say
    (KEEP, "fp16", f"with paddle.amp.auto_cast(enable=False):  # {KEEP}"),
    ('policy = "bf16"', "fp16", 'paddle.amp.auto_cast(dtype="bfloat16")  # policy = "bf16"'),
    (
        'policy = "fp16:fp32=linear"',
        "fp16",
        'paddle.amp.auto_cast(custom_black_list=["matmul_v2"])  # policy = "fp16:fp32=linear"',
    ),
    (
        'policy = "fp16:init_scale=1024"',
        "fp16",
        'scaler = paddle.amp.GradScaler(init_loss_scaling=1024.0)  # policy = "fp16:init_scale=1024"',
    ),
    (
        "scaler = torch.amp.GradScaler(init_scale=64.0)",
        "as-is",
        "scaler = paddle.amp.GradScaler(init_loss_scaling=64.0)",
    ),
    (
        "torch.autocast(device_type, dtype=torch.bfloat16)  # and no GradScaler",
        "as-is",
        'paddle.amp.auto_cast(dtype="bfloat16")  # and no GradScaler',
    ),
    ("x = x.float()  # before this line", "fp16", 'x = x.astype("float32")  # before this line'),
    ("y = torch.log(x.clamp_min(1e-6))", "fp16", "y = paddle.log(x.clip(min=1e-6))"),
    ("clip_grad_norm_(parameters, 1.0)", "fp16", "paddle.nn.utils.clip_grad_norm_(parameters, 1.0)"),
]


@pytest.mark.parametrize(("line", "before", "expected"), IN_PADDLE)
def test_a_line_to_write_in_paddles_terms(line: str, before: str, expected: str) -> None:
    assert in_paddle(line, before=before) == expected


@pytest.mark.parametrize("line", [line for _, _, line in fixes._INVALID])
def test_no_line_for_paddle_names_torch(line: str) -> None:
    assert "torch" not in in_paddle(line, before="fp16")
    assert "clamp" not in in_paddle(line, before="fp16")
