"""What the tests of ``mezzo.compat.apex`` share: a clean process state, and a model that says what it was given."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from mezzo.compat.apex import amp
from mezzo.compat.apex.amp import handle
from mezzo.compat.apex.amp.state import AmpState


def clean() -> Iterator[None]:
    """End casts after a test and forget what it registered and initialized."""
    torch.manual_seed(0)
    yield
    if amp._amp_state.handle is not None:
        amp._amp_state.handle._deactivate()
    handle._registered.clear()
    vars(amp._amp_state).clear()
    vars(amp._amp_state).update(vars(AmpState()))


class Small(nn.Module):
    """A convolution, a batch norm, a layer norm and a linear layer; ``given`` is the format of the last input."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 1)
        self.bn = nn.BatchNorm2d(2)
        self.plain_bn = nn.BatchNorm2d(2, affine=False)
        self.ln = nn.LayerNorm(2)
        self.linear = nn.Linear(2, 2)
        self.given: torch.dtype | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.given = x.dtype
        x = self.plain_bn(self.bn(self.conv(x))).flatten(1)
        return self.linear(self.ln(x))


def sample() -> Tensor:
    """Return a batch for ``Small``."""
    return torch.randn(4, 1, 1, 1)


def mean_loss(output: Tensor) -> Tensor:
    """Return a loss whose gradients are neither zero nor large."""
    return output.float().square().mean()
