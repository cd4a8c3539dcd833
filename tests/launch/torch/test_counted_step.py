"""The counted step has its formats and bytes even if its update is skipped."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from helpers_launch import ran
from mezzo.launch.torch import switched

ROWS, INPUTS, OUTPUTS = 16, 8, 4
ONCE = 2 * ROWS * INPUTS * OUTPUTS
"""FLOPs of a linear layer forward; its backward pass has as many again for the weight, and none for the input."""


@pytest.mark.parametrize(
    ("skipped", "counted_on_step"),
    [((), 2), ((2,), 2), ((1,), 3), ((1, 2), 4), ((2, 3), 2)],
    ids=lambda value: str(value),
)
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_step_that_the_scripts_own_scaler_skips_is_counted(
    skipped: tuple[int, ...], counted_on_step: int, micro_batches: int
) -> None:
    torch.manual_seed(0)
    with switched(None) as (run, counted):
        model = nn.Linear(INPUTS, OUTPUTS)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
        for step in range(1, 7):
            optimizer.zero_grad()
            for _ in range(micro_batches):
                with torch.autocast("cpu", dtype=torch.float16):
                    loss = model(torch.randn(ROWS, INPUTS)).square().mean()
                scaler.scale(loss).backward()
            if step in skipped:
                assert model.weight.grad is not None
                model.weight.grad.fill_(torch.inf)
            scaler.step(optimizer)
            scaler.update()
    assert [step for step, flag in enumerate(run.recorder.steps().skipped, 1) if flag] == list(skipped)
    found = counted.effective()
    assert found.counted_on_step == counted_on_step
    assert found.flops_by_format == {"fp16": 2 * ONCE * micro_batches}
    assert counted.memory().gradients_bytes == 4 * (INPUTS + 1) * OUTPUTS


@pytest.mark.parametrize("policy", ["fp16", "bf16"])
@pytest.mark.parametrize("own", [(), ("wide",)], ids=["16 bits", "FP32"])
def test_an_optimizers_own_products_are_counted_and_are_no_forward_code(policy: str, own: tuple[str, ...]) -> None:
    effective = ran("muon", policy, *own).effective
    assert effective.left_alone == []
    assert set(effective.flops_by_format) == {policy, "fp32" if own else "bf16"}
