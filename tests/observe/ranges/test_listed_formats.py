"""Which gradients count as 16-bit: those that the op lists leave in 16 bits, however the script writes its loss."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mezzo
from helpers_engine import casting
from mezzo.observe.ranges.listed_formats import ListedFormats
from mezzo.policy import Policy
from mezzo.records import RangesRecord

Loss = Callable[[Tensor, Tensor], Tensor]


def trained(loss: Loss) -> RangesRecord:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [(torch.randn(16, 8), torch.randint(0, 4, (16,))) for _ in range(3)]

    def train() -> None:
        for x, y in batches:
            optimizer.zero_grad()
            loss(model(x), y).backward()
            optimizer.step()

    return mezzo.ranges(train)


class InsideModel(nn.Module):
    """A loss that is a module, in a module."""

    def __init__(self) -> None:
        super().__init__()
        self.loss = nn.CrossEntropyLoss()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(x, y)  # type: ignore[no-any-return]


def test_a_loss_module_gives_the_window_of_a_loss_function() -> None:
    window = trained(F.cross_entropy).windows[0]
    for loss in (nn.CrossEntropyLoss(), InsideModel()):
        record = trained(loss)
        assert record.windows[0].highest == window.highest
        assert [name.removeprefix("Sequential.") for name in record.windows[0].at_top] == window.at_top
        kept = {t.name for t in record.tensors if t.kept_fp32}
        names = {name.removeprefix("Sequential.") for name in kept}
        assert {"1", "1.weight", "1.bias"} <= names  # the norm and its weights


LINEAR, NORM, TABLE = nn.Linear(4, 4), nn.LayerNorm(4), nn.Embedding(5, 4)
BATCH_NORM, X = nn.BatchNorm1d(4), torch.randn(6, 4)
VALUES: dict[str, Callable[[], Tensor]] = {
    "a product": lambda: LINEAR(X),
    "relu of a product": lambda: LINEAR(X).relu(),
    "a view of a product": lambda: LINEAR(X).view(3, 8).t(),
    "batch norm of a product": lambda: BATCH_NORM(LINEAR(X)),
    "a norm": lambda: NORM(LINEAR(X)),
    "softmax": lambda: LINEAR(X).softmax(-1),
    "square": lambda: LINEAR(X).square(),
    "a sum": lambda: LINEAR(X).sum(),
    "a mean": lambda: LINEAR(X).mean(),
    "an embedding": lambda: TABLE(torch.tensor([0, 1])),
    "an embedding and a product": lambda: TABLE(torch.tensor([0, 1])) + LINEAR(X[:2]),
    "two products": lambda: LINEAR(X) * LINEAR(X),
    "attention": lambda: F.scaled_dot_product_attention(*[LINEAR(X)[None, None]] * 3),
    "convolution": lambda: F.conv1d(X[None], LINEAR.weight[:, :, None][:, :1].expand(4, 6, 1)),
    "mse_loss": lambda: F.mse_loss(LINEAR(X), X),
    "interpolation": lambda: F.interpolate(LINEAR(X)[None], size=2),
    "prelu": lambda: F.prelu(LINEAR(X), torch.tensor([0.1], requires_grad=True)),
}


@pytest.mark.parametrize("policy", ["fp16", "fp16:lower=softmax", "fp16:fp32=matmul"])
@pytest.mark.parametrize("name", VALUES)
def test_formats_are_those_of_a_region(name: str, policy: str) -> None:
    """The oracle is the region itself: what has 16 bits there."""
    run = VALUES[name]
    with casting(f"{policy}:arithmetic=emulated").region():
        expected = run().dtype
    formats = ListedFormats(Policy.parse(policy))
    assert formats.is_wide(run(), LINEAR) is (expected is torch.float32)


def test_parameters_by_who_reads_them() -> None:
    formats = ListedFormats(Policy.parse("fp16"))
    formats.is_wide(NORM(LINEAR(X)).sum() + TABLE(torch.tensor([1])).sum(), LINEAR)
    wide = [formats.gradient_is_wide(p) for p in (LINEAR.weight, LINEAR.bias, NORM.weight, NORM.bias, TABLE.weight)]
    assert wide == [False, False, True, True, True]
    assert not formats.gradient_is_wide(nn.Parameter(torch.ones(1)))  # not met: it may be anything
