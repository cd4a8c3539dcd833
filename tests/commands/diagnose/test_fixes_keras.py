"""Fixes in the terms of Keras: each offer for PyTorch, and what a Keras script writes."""

from __future__ import annotations

from typing import Any

import pytest

from mezzo.commands.diagnose.fixes import Offer, in_keras
from mezzo.observe.settings import TrialChanges
from mezzo.policy import Policy

FP16 = Policy.parse("fp16")
SCALER = "optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=1024.0)"


def offer(policy: str = "", line: str = "", **fields: Any) -> Offer:
    return Offer("do it", line, Policy.parse(policy) if policy else None, **fields)


def words(made: Offer, own: Policy | None) -> tuple[str, str] | None:
    known = {"policy": made.policy, "scale": made.changes.loss_scale, "kept": made.kept_beyond(own)}
    return in_keras(made.advice, made.line, own, **known)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("made", "policy", "line"),
    [
        (offer("fp16:fp32_modules=head"), FP16, 'dtype="float32"  # argument of the layer head'),
        (offer("fp16:fp32_modules=head+mid"), FP16, 'dtype="float32"  # argument of the layers head and mid'),
        (offer(changes=TrialChanges(fp32_modules=("head",))), None, 'dtype="float32"  # argument of the layer head'),
        (offer("bf16"), FP16, 'keras.config.set_dtype_policy("mixed_bfloat16")'),
        (offer("bf16"), None, 'keras.config.set_dtype_policy("mixed_bfloat16")'),
        (offer("fp16:init_scale=1024"), FP16, SCALER),
        (offer(changes=TrialChanges(loss_scale=1024.0)), None, SCALER),
        (
            offer("fp16:init_scale=1024:fp32_modules=head"),
            FP16,
            f'{SCALER}; dtype="float32"  # argument of the layer head',
        ),
        (offer(line="y = torch.sqrt(x + 1e-12)"), FP16, "y = keras.ops.sqrt(x + 1e-12)"),
        (offer(line=""), FP16, ""),
    ],
)
def test_lines(made: Offer, policy: Policy | None, line: str) -> None:
    advice = "keep head in FP32" if made.changes.fp32_modules else "do it"
    assert words(made, policy) == (advice, line)


def test_no_single_operation_stays_in_fp32() -> None:
    assert words(offer("fp16:fp32=mul"), FP16) is None


def test_every_line_of_a_torch_fix_has_one_in_keras() -> None:
    from mezzo.commands.diagnose import fixes

    lines = [line for _, _, line in fixes._INVALID]
    assert [line for line in lines if line not in fixes._LINES] == []
    assert [line for line in fixes._LINES.values() if "torch" in line] == []
