"""Observers take a product in blocks for one operation on the operands that its unit is given: phases, FLOPs, and values that are lost."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from helpers_diagnose import diagnosed
from helpers_launch import observed_record
from mezzo.observe.settings import AuditSettings
from mezzo.records import AuditRecord

POLICIES = ["mxfp8", "nvfp4", "mxfp4:hadamard=wgrad:gradient_rounding=stochastic"]


class Broken(nn.Module):
    """An operation without a finite result between two layers."""

    def forward(self, x: Tensor) -> Tensor:
        return x / (x - x)


def train(between: nn.Module, *, steps: int = 2) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(32, 64), nn.Linear(64, 96), between, nn.Linear(96, 64), nn.Linear(64, 32)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for batch in torch.randn(steps, 128, 32):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("policy", POLICIES)
def test_an_audit_has_every_product_in_its_phase(policy: str) -> None:
    record = observed_record(lambda: train(nn.Identity(), steps=3), policy, AuditSettings(steps=(2,)))
    assert isinstance(record, AuditRecord)
    name, rows = policy.partition(":")[0], 2 * 128
    ends, blocks = 2 * rows * 32 * 64, 2 * rows * 64 * 96
    assert record.flops_by_phase == {
        "forward": {"bf16": ends, name: blocks},
        "dgrad": {"bf16": ends // 2, name: blocks},
        "wgrad": {"bf16": ends, name: blocks},
    }
    products = [(one.module, one.phase, one.flops) for one in record.operations if one.format == name]
    expected = [(layer, phase, blocks // 2) for phase in ("forward", "dgrad", "wgrad") for layer in ("1", "3")]
    assert sorted(products) == sorted(expected)


@pytest.mark.parametrize("policy", [*POLICIES, "bf16"])
def test_a_diagnosis_names_the_operation_and_no_layer_behind_it(policy: str, tmp_path: Path) -> None:
    record = diagnosed("broken", policy, tmp_path, steps=1, script=lambda: train(Broken(), steps=1))
    assert (record.verdict, record.module, record.op) == ("invalid_operation", "2", "div")
