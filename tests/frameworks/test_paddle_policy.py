"""A policy to Paddle's own arguments and back, and the tables of operations against the Paddle that is installed."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from typing import Any

import pytest
from paddle_runs import paddle

from mezzo.errors import PolicyError
from mezzo.frameworks import paddle as paddle_policy
from mezzo.frameworks.paddle import explain, from_paddle, to_paddle
from mezzo.launch.paddle.state import HostScale
from mezzo.policy import PRESETS, Policy

WHITE = ["addmm", "baddbmm", "bmm", "conv2d_transpose", "conv3d", "conv3d_transpose", "depthwise_conv2d"]
WHITE += ["depthwise_conv2d_transpose", "memory_efficient_attention", "mv", "prelu", "rnn"]
BLACK = ["bce_loss", "elementwise_pow", "kldiv_loss", "log1p", "logsumexp", "p_norm", "rms_norm"]


def test_a_policy_becomes_paddles_arguments() -> None:
    text = (
        "fp16:init_scale=1024:growth_factor=4:backoff_factor=0.25:growth_interval=7:hysteresis=3:lower=softmax:fp32=bmm"
    )
    native = to_paddle(Policy.parse(text))
    white = sorted({*WHITE, "softmax", "log_softmax"} - {"bmm"})
    assert native.auto_cast == {
        "enable": True,
        "custom_white_list": white,
        "custom_black_list": sorted([*BLACK, "bmm"]),
        "level": "O1",
        "dtype": "float16",
    }
    assert native.grad_scaler == {
        "enable": True,
        "use_dynamic_loss_scaling": True,
        "init_loss_scaling": 1024.0,
        "incr_ratio": 4.0,
        "decr_ratio": 0.25,
        "incr_every_n_steps": 7,
        "decr_every_n_nan_or_inf": 3,
    }
    assert native.decorate is None


def test_paddles_model_takes_the_amp_configs() -> None:
    model = paddle.Model(paddle.nn.Linear(2, 1))
    model.prepare(amp_configs=to_paddle(PRESETS["fp16"].replace(init_scale=8.0)).amp_configs)
    assert model._adapter._amp_level == "O1"
    assert model._adapter._amp_configs["init_loss_scaling"] == 8.0
    assert model._adapter._amp_custom_lists["custom_white_list"] == WHITE
    with pytest.raises(PolicyError, match="at O1, and the policy asks for BF16; allowed: policies in FP16 or FP32"):
        assert to_paddle(PRESETS["bf16"]).amp_configs


@pytest.mark.parametrize(
    ("text", "level", "dtype", "masters", "scales"),
    [
        ("fp32", "O0", "float16", None, False),
        ("bf16", "O1", "bfloat16", None, False),
        ("fp16-master", "O2", "float16", True, True),
        ("bf16-pure", "O2", "bfloat16", False, False),
    ],
)
def test_presets(text: str, level: str, dtype: str, masters: bool | None, scales: bool) -> None:
    native = to_paddle(Policy.parse(text))
    assert (native.auto_cast["level"], native.auto_cast["dtype"]) == (level, dtype)
    assert (native.decorate or {}).get("master_weight") is masters
    assert native.grad_scaler["enable"] is scales


@pytest.mark.parametrize(
    "text",
    [
        *("fp32", "fp16", "bf16", "fp16-master", "bf16-master"),
        *("fp16:loss_scale=static:init_scale=128", "fp16:loss_scale=none"),
        "fp16:init_scale=8:growth_factor=4:backoff_factor=0.25:growth_interval=7:hysteresis=3:lower=log_softmax:fp32=conv",
    ],
)
def test_a_policy_comes_back(text: str) -> None:
    assert from_paddle(to_paddle(Policy.parse(text))) == Policy.parse(text)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("O1", "fp16"),
        ({"level": "O2", "dtype": "bfloat16"}, "bf16-master"),
        ({"enable": False}, "fp32"),
        # matmul_v2 stands for matmul and linear, not for the whole family
        ({"init_loss_scaling": 128.0, "custom_black_list": ["matmul_v2"]}, "fp16:init_scale=128:fp32=linear+matmul"),
        ({"use_dynamic_loss_scaling": False}, "fp16:loss_scale=static"),
    ],
)
def test_paddles_settings_become_a_policy(given: Any, text: str) -> None:
    assert from_paddle(given) == Policy.parse(text)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"levle": "O1"}, "Paddle's mixed precision has no setting 'levle'; did you mean level"),
        ({"level": "O4"}, "Paddle's level='O4' stands for no policy; did you mean "),
        ({"dtype": "float64"}, "Paddle's dtype='float64' stands for no policy; did you mean float16"),
        ({"custom_white_list": ["conv4d"]}, "custom_white_list names 'conv4d', which is in no family of a policy; did"),
    ],
)
def test_settings_that_stand_for_nothing(given: dict[str, Any], message: str) -> None:
    with pytest.raises(PolicyError) as error:
        from_paddle(given)
    assert error.value.message.startswith(message)


def test_fp8_is_refused() -> None:
    with pytest.raises(
        PolicyError, match=r"asks for FP8, which paddle\.amp does not train in; allowed: fp32, tf32, fp16"
    ):
        to_paddle(PRESETS["fp8"])


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("fp32", []),
        ("tf32", ["tf32"]),
        ("bf16", []),
        ("fp16", ["scale bounds"]),
        ("bf16:loss_scale=dynamic:hysteresis=2", ["scale bounds", "hysteresis", "loss scale"]),
        ("bf16:fp32_modules=head:arithmetic=emulated", ["fp32_modules", "arithmetic"]),
        ("bf16-pure", ["norms"]),
        ("bf16:lower=tensordot:widest=add", ["lower list", "widest list"]),
    ],
)
def test_explain_names_what_paddle_cannot_honour(text: str, what: list[str]) -> None:
    choices = explain(Policy.parse(text))
    assert [c.what for c in choices if c.value.startswith("not honoured")] == what
    assert {"compute", "weights", "loss scale"} <= {c.what for c in choices}
    assert all(c.reason for c in choices)


def test_paddles_own_lists_are_those_that_are_installed() -> None:
    lists = paddle.amp.amp_lists
    ours = {paddle_policy.amp_name(op) for ops in paddle_policy.OPS.values() for op in ops} | {"linear_v2"}
    assert lists.WHITE_LIST & ours == paddle_policy.PADDLE_WHITE
    assert (lists.FP16_BLACK_LIST | lists.EXTRA_BLACK_LIST) & (
        ours | paddle_policy.PADDLE_BLACK
    ) == paddle_policy.PADDLE_BLACK


F = paddle.nn.functional
X = paddle.ones([4, 4]) * 0.5
BATCH, IMAGE, VOLUME = X[None], X[None, None], X[None, None, None]
LABELS = paddle.to_tensor([0, 1, 2, 3])
CALLS: dict[str, Callable[[], Any]] = {
    "matmul": lambda: paddle.matmul(X, X),
    "linear": lambda: F.linear(X, X),
    "bmm": lambda: paddle.bmm(BATCH, BATCH),
    "mv": lambda: paddle.mv(X, X[0]),
    "addmm": lambda: paddle.addmm(X, X, X),
    "baddbmm": lambda: paddle.baddbmm(BATCH, BATCH, BATCH),
    "einsum": lambda: paddle.einsum("ij,jk->ik", X, X),
    "conv2d": lambda: F.conv2d(IMAGE, IMAGE),
    "conv3d": lambda: F.conv3d(VOLUME, VOLUME),
    "conv2d_transpose": lambda: F.conv2d_transpose(IMAGE, IMAGE),
    "conv3d_transpose": lambda: F.conv3d_transpose(VOLUME, VOLUME),
    "prelu": lambda: F.prelu(X, paddle.ones([1])),
    "exp": lambda: paddle.exp(X),
    "log1p": lambda: paddle.log1p(X),
    "pow": lambda: X**2,
    "elementwise_pow": lambda: paddle.pow(X, X),
    "rsqrt": lambda: paddle.rsqrt(X),
    "softmax": lambda: F.softmax(X),
    "log_softmax": lambda: F.log_softmax(X),
    "logsumexp": lambda: paddle.logsumexp(X),
    "softplus": lambda: F.softplus(X),
    "layer_norm": lambda: F.layer_norm(X, [4]),
    "group_norm": lambda: F.group_norm(BATCH, 2),
    "p_norm": lambda: paddle.linalg.norm(X),
    "dist": lambda: paddle.dist(X, X),
    "cross_entropy_with_softmax": lambda: F.cross_entropy(X, LABELS),
    "nll_loss": lambda: F.nll_loss(X, LABELS),
    "huber_loss": lambda: F.smooth_l1_loss(X, X),
    "kldiv_loss": lambda: F.kl_div(X, X),
    "sigmoid_cross_entropy_with_logits": lambda: F.binary_cross_entropy_with_logits(X, X),
    "bce_loss": lambda: F.binary_cross_entropy(X, X),
    "sum": lambda: paddle.sum(X),
    "prod": lambda: paddle.prod(X),
    "cumsum": lambda: paddle.cumsum(X),
    "bilinear_interp": lambda: F.interpolate(IMAGE, scale_factor=2, mode="bilinear"),
    "nearest_interp": lambda: F.interpolate(IMAGE, scale_factor=2),
    "gelu": lambda: F.gelu(X),
    "mean": lambda: paddle.mean(X),
    "mean_all": lambda: F.cross_entropy(X, LABELS),
    "add": lambda: X + X,
    "multiply": lambda: X * X,
    "divide": lambda: X / X,
    "embedding": lambda: F.embedding(LABELS, X),
}


@pytest.mark.parametrize("op", CALLS)
def test_amp_names_are_those_that_paddle_counts(op: str) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        paddle.amp.debugging.enable_operator_stats_collection()
        CALLS[op]()
        counted = set(paddle.base.core.get_low_precision_op_list())
        paddle.amp.debugging.disable_operator_stats_collection()
    assert paddle_policy.amp_name(op) in counted
    assert any(op in ops for ops in paddle_policy.OPS.values())


@pytest.mark.parametrize(
    "text",
    [
        "fp16:init_scale=1024:growth_interval=3",
        "fp16:init_scale=1024:growth_interval=3:hysteresis=2",
        "fp16:init_scale=1000:growth_factor=1.7:backoff_factor=0.3:growth_interval=2:hysteresis=3",
        "fp16:init_scale=8:min_scale=4:max_scale=16:growth_interval=2",
        "fp16:loss_scale=static:init_scale=100",
        "fp32",
    ],
)
def test_the_scale_goes_the_way_of_the_engines(text: str) -> None:
    import numpy as np
    import torch

    from mezzo.engine.scaling import scale_for

    policy = Policy.parse(text)
    ours, theirs = HostScale(policy), scale_for(policy, "cpu")
    for overflow in np.random.Generator(np.random.PCG64(5)).random(300) < 0.3:
        assert (ours.value, ours.skips_overflows, ours.at_floor()) == (
            theirs.value(),
            theirs.skips_overflows,
            theirs.at_floor(),
        )
        inverse = theirs.inverse()
        assert ours.inverse == (1.0 if inverse is None else inverse.item())
        ours.update(overflow=bool(overflow))
        theirs.update(torch.tensor(float(overflow)))
