"""What reaches the optimizers of Paddle scripts under a loss scale, against the same loop without Mezzo, bit by bit.

``arithmetic=native`` on a CPU computes in FP32 and scales as FP16 does. Scales are powers of two, so a plain loop has the same bits.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
from paddle_loops import LOOPS, STEPS, Seen, by_scaler, data, lbfgs, mlp
from paddle_runs import numbers, paddle, ran

from mezzo.errors import ScriptError

nn, F, optimizers = paddle.nn, paddle.nn.functional, paddle.optimizer
SCALED = "fp16:arithmetic=native:init_scale=65536"


def alone(code: Callable[[], Seen]) -> Seen:
    """Run a loop without Mezzo; Paddle warns that its own scaler is off."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return code()


def same(found: Seen, wanted: Seen) -> None:
    ones, others = found.arrays(), wanted.arrays()
    assert len(ones) == len(others) > 0
    for one, other in zip(ones, others, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("code", LOOPS.values(), ids=LOOPS)
def test_gradients_state_and_weights_have_a_plain_loops_bits(code: Callable[[], Seen]) -> None:
    found, wanted = ran(code, SCALED, seed=None), alone(code)
    assert len(wanted.weights) == STEPS
    same(found.value, wanted)
    assert not any(found.steps.skipped)


class _Half(paddle.autograd.PyLayer):  # type: ignore[misc]
    """NumPy's rounding to FP16, forward and backward."""

    @staticmethod
    def forward(ctx: Any, tensor: Any) -> Any:
        return paddle.to_tensor(numbers(tensor).astype(np.float16).astype(np.float32))

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return _Half.forward(ctx, gradient)


def rounded_by_hand() -> Seen:
    """Train in FP16 products with the loss scaled and the gradients unscaled by hand."""
    seen, model, scale = Seen(), mlp(), 65536.0
    parameters = model.parameters()
    update = optimizers.AdamW(0.05, parameters=parameters)

    def product(layer: Any, x: Any) -> Any:
        return _Half.apply(F.linear(*map(_Half.apply, (x, layer.weight, layer.bias))))

    for x, y in data():
        (F.cross_entropy(product(model[3], model[2](model[1](product(model[0], x)))), y) * scale).backward()
        for parameter in parameters:
            parameter.grad = parameter.grad / scale
        seen.before(parameters)
        update.step()
        update.clear_grad()
        seen.after(parameters, update)
    return seen


def test_rounded_updates_have_the_bits_of_a_loop_that_rounds_and_scales_by_hand() -> None:
    found = ran(by_scaler(), "fp16:init_scale=65536", seed=None)
    same(found.value, alone(rounded_by_hand))


OVERFLOWS = (2, 3, 7)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("how", ["step", "minimize", "unscale"])
def test_an_overflow_leaves_out_one_update_and_nothing_else(how: str, accumulate: int) -> None:
    loop = by_scaler(how=how, accumulate=accumulate, overflows=OVERFLOWS)
    found = ran(loop, SCALED, seed=None)
    same(found.value, alone(by_scaler(how=how, accumulate=accumulate, overflows=OVERFLOWS, skips=True)))
    assert found.steps.skipped == [step in OVERFLOWS for step in range(STEPS)]
    assert found.steps.loss_scale == [2.0 ** (16 - sum(o <= step for o in OVERFLOWS)) for step in range(STEPS)]


@pytest.mark.parametrize("region", ["O1", "O2"])
@pytest.mark.parametrize("how", ["step", "minimize"])
def test_weights_and_scale_are_those_under_paddles_own_scaler(how: str, region: str) -> None:
    """On a CPU it works only where Paddle is made to believe that it runs a static graph; regions are off."""
    scales: list[float] = []
    make = paddle.amp.GradScaler

    def working(*args: Any, **kwargs: Any) -> Any:
        with mock.patch("paddle.amp.grad_scaler.in_dynamic_mode", return_value=False):
            scaler = make(*args, **kwargs)
        update = scaler._update
        scaler._update = lambda: (update(), scales.append(float(scaler._scale)))
        return scaler

    loop = by_scaler(how=how, region=region, overflows=(3,))
    with mock.patch.object(paddle.amp, "GradScaler", working):
        wanted = alone(loop)
    found = ran(loop, SCALED, seed=None)
    found.value.gradients.clear()  # its own scaler's are scaled until its step
    same(found.value, wanted)
    assert found.steps.loss_scale == scales


@pytest.mark.parametrize("evaluation", [0, 2])
def test_an_overflow_inside_lbfgs_undoes_its_step(evaluation: int) -> None:
    found = ran(lbfgs(overflow_at=(4, evaluation), left_out=4), SCALED, seed=None)
    wanted = alone(lbfgs(left_out=4))
    same(found.value, wanted)


NORMS = ["own region, scaler.step and update", "accumulation, clipping by the optimizer", "two optimizers"]


@pytest.mark.parametrize("name", [*NORMS, "sparse gradients", "decorate O2"])
def test_the_recorded_norm_is_of_the_gradients_before_clipping(name: str) -> None:
    found = ran(LOOPS[name], SCALED, seed=None)
    wanted = [np.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in step)) for step in found.value.gradients]
    assert found.steps.grad_norm == pytest.approx(wanted, rel=1e-6)


def test_a_leaf_that_nothing_has_shown_is_refused_by_name() -> None:
    hidden = vars(paddle.Tensor)["stop_gradient"]

    def train() -> None:
        model, weight = mlp(), paddle.ones([6])
        hidden.__set__(weight, False)
        F.cross_entropy(model(data()[0][0] * weight), data()[0][1]).backward()

    with pytest.raises(ScriptError, match="depends on an unknown tensor that takes gradients"):
        ran(train, SCALED)


def test_layers_in_the_scripts_own_region_obey_the_policy() -> None:
    """Layers to keep in FP32 are found there, and weights without masters are rounded before the first pass."""

    def train() -> tuple[list[Any], Any]:
        model = mlp()
        with paddle.amp.auto_cast():
            result = model(data()[0][0])
        return [numbers(p) for p in model.parameters()], numbers(result)

    _, kept = ran(train, "bf16:fp32_modules=0").value
    assert not np.array_equal(kept, ran(train, "bf16").value[1])
    weights, _ = ran(train, "bf16-pure").value
    for weight in weights:
        np.testing.assert_array_equal(weight, numbers(paddle.to_tensor(weight).astype("bfloat16").astype("float32")))


def test_what_a_gradient_penalty_keeps_is_not_invented() -> None:
    penalised, without = ran(LOOPS["gradient penalty"], "bf16"), ran(LOOPS["no scaler"], "bf16")
    assert penalised.memory.activations_bytes is None
    assert without.memory.activations_bytes
