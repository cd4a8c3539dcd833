"""FP32 activations that norms keep: the bytes of the finding are those that autograd keeps less without them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from helpers_launch import observed_record
from helpers_values import existing
from mezzo.launch.torch import switched
from mezzo.observe.settings import AuditSettings
from mezzo.policy import Policy
from mezzo.records import AuditRecord

ROWS, WIDTH, NORMS = 512, 64, 4
WANTED = NORMS * ROWS * WIDTH * (4 - 2)


class Block(nn.Module):
    """A block with a norm, perhaps checkpointed."""

    def __init__(self, *, checkpointed: bool) -> None:
        super().__init__()
        self.norm, self.linear, self.checkpointed = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), checkpointed

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False) if self.checkpointed else self.inner(x)  # type: ignore[no-any-return]

    def inner(self, x: Tensor) -> Tensor:
        return x + self.linear(self.norm(x))


def train(*, checkpointed: bool = False) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *[Block(checkpointed=checkpointed) for _ in range(NORMS)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(ROWS, WIDTH)).square().mean().backward()
        optimizer.step()


def found(policy: str, *, checkpointed: bool = False) -> dict[str, int]:
    """Return the bytes of each finding of an audit, without the one on the many casts of so small a model."""
    record = observed_record(lambda: train(checkpointed=checkpointed), policy, AuditSettings(steps=(2,)))
    assert isinstance(record, AuditRecord)
    return {finding.code: finding.bytes for finding in record.findings if finding.code != "A303"}


def kept_bytes(policy: str) -> int:
    """Return what autograd keeps, by its own hooks."""
    with switched(Policy.parse(policy)) as (_, counted):
        train()
    return existing(counted.memory().activations_bytes)


def test_the_bytes_are_those_that_autograd_keeps_less() -> None:
    assert found("bf16") == {"A305": WANTED}
    means_and_deviations = NORMS * ROWS * 2 * 4
    saved = kept_bytes("bf16") - kept_bytes("bf16:lower=layer_norm")
    assert WANTED <= saved <= WANTED + means_and_deviations


def test_the_fix_leads_to_no_other_finding() -> None:
    assert found("bf16:lower=layer_norm") == {}
    assert found("fp16:lower=layer_norm").keys() == {"A402"}


def test_what_checkpointing_drops_is_no_finding() -> None:
    assert found("bf16", checkpointed=True) == {}
