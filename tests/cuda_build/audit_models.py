"""Audit a step of healthy scripts under CUDA's autocast, on fake tensors: print the findings, as JSON, by model and format.

The tensors have no values, so a step costs no time; GPUs that compute nothing give autograd its thread.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from helpers_audit import traced_step
from mezzo.observe.audit import observer
from mezzo.observe.audit.findings import AuditedSteps, findings

WORDS, WIDTH, LENGTH, HEADS = 512, 128, 256, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.three, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = [part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.three(self.before(x)).chunk(3, -1)]
        x = x + self.out(F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.between(x))))


class Norm(nn.Module):
    """An RMSNorm as language models write it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).type_as(x) * self.weight


class WrittenOut(nn.Module):
    """Attention without torch's own function; its softmax in FP32 by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.three, self.out = Norm(), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.three(self.norm(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        scores = F.softmax((q @ k.transpose(-2, -1) / 8).float(), -1).type_as(q)
        return x + self.out((F.dropout(scores, 0.1) @ v).transpose(1, 2).flatten(2))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (
            nn.Conv2d(64, 64, 3, padding=1, bias=False),
            nn.Conv2d(64, 64, 3, padding=1, bias=False),
        )
        self.norm, self.again = nn.BatchNorm2d(64), nn.BatchNorm2d(64)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.again(self.second(F.relu(self.norm(self.first(x))))))


def language_model(*blocks: nn.Module) -> nn.Module:
    model = nn.Sequential(nn.Embedding(WORDS, WIDTH), *blocks, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False))
    model[-1].weight = model[0].weight
    return model


def encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, batch_first=True, activation="gelu")


def images() -> Tensor:
    return torch.empty(64, 64, 56, 56).contiguous(memory_format=torch.channels_last)


def words() -> Tensor:
    return torch.empty(64, LENGTH, dtype=torch.long)


def by_word(outputs: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), labels.flatten())


def by_hand(outputs: Tensor, labels: Tensor) -> Tensor:
    return -F.log_softmax(outputs, -1).gather(-1, labels[..., None]).mean()


Case = tuple[Callable[[], nn.Module], Callable[[], Tensor], Callable[[], Tensor], Callable[[Tensor, Tensor], Tensor]]
CASES: dict[str, Case] = {
    "gpt": (lambda: language_model(Block(), Block()), words, words, by_word),
    "bert": (lambda: language_model(encoder(), encoder()), words, words, by_word),
    "written out": (lambda: language_model(WrittenOut(), WrittenOut()), words, words, by_hand),
    "resnet": (
        lambda: nn.Sequential(
            nn.Conv2d(64, 64, 1), Residual(), Residual(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 1000)
        ),
        images,
        lambda: torch.empty(64, dtype=torch.long),
        F.cross_entropy,
    ),
    "perceptron": (
        lambda: nn.Sequential(nn.Linear(128, 512), nn.BatchNorm1d(512), nn.ReLU(), nn.Linear(512, 64)),
        lambda: torch.empty(4096, 128),
        lambda: torch.empty(4096, 64),
        F.binary_cross_entropy_with_logits,
    ),
}


def found(case: Case, low: torch.dtype) -> list[str]:
    """Return the findings in the second step."""
    make, give, aim, loss_of = case
    with FakeTensorMode():
        with torch.device("cuda"):
            model, x, y = make(), give(), aim()
        for weight in model.parameters():
            if weight.dim() == 4:
                weight.data = weight.data.contiguous(memory_format=torch.channels_last)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)

        def step() -> None:
            with torch.autocast("cuda", low):
                loss = loss_of(model(x), y)
            (loss * 1024).backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        seen, names = traced_step(step, optimizers=[optimizer], device_type="cuda")
    assert {one.phase for one in seen} == {"forward", "dgrad", "wgrad", "optimizer"}
    watched = AuditedSteps(
        operations=seen,
        wide=observer.wide_products([seen], policy=None, names=names),
        trips=observer.round_trips(seen),
        products=observer.products(seen),
        device_type="cuda",
        capability=(9, 0),
    )
    return [f"{one.code} {one.detail}" for one in findings(watched)]


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.UntypedStorage.data_ptr = lambda storage: storage._cdata  # type: ignore[method-assign]
    told = {
        f"{name}, {low}": found(case, low) for name, case in CASES.items() for low in (torch.float16, torch.bfloat16)
    }
    print(json.dumps(told))
