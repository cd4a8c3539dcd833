"""What a plan keeps and computes again, against counts of what a real step keeps and runs."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

import mezzo
from mezzo.engine import checkpointing
from mezzo.engine.casts.casting import Casting
from mezzo.measure.checkpointing.plan import CheckpointPlan
from mezzo.policy import Policy

WIDTH, HEADS, TOKENS, BATCH = 16, 4, 6, 3


class Block(nn.Module):
    """A transformer's block."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mixed, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.feed = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(0.2), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor, *, mask: Tensor | None = None) -> Tensor:
        shape = (x.shape[0], x.shape[1], HEADS, -1)
        q, k, v = (part.reshape(shape).transpose(1, 2) for part in self.mixed(self.first(x)).chunk(3, -1))
        scores = q @ k.transpose(-1, -2)
        if mask is not None:
            scores = scores + mask
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).reshape(x.shape)
        x = x + self.out(mixed)
        return x + self.feed(self.second(x))


class Transformer(nn.Module):
    """Blocks with a mask that all share."""

    def __init__(self, num_blocks: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.zeros(TOKENS, TOKENS).masked_fill(torch.ones(TOKENS, TOKENS).triu(1).bool(), -1e4)
        for block in self.blocks:
            x = block(x, mask=mask)
        result: Tensor = self.head(x)
        return result


def residual(channels: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU(), nn.Dropout2d(0.1)
    )


class Shared(nn.Module):
    """One block that runs three times."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = Block(), nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.block(x)
        result: Tensor = self.head(x)
        return result


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "transformer": (Transformer, (BATCH, TOKENS, WIDTH)),
    "convolutional": (
        lambda: nn.Sequential(*(residual(4) for _ in range(3)), nn.Flatten(), nn.Linear(256, 2)),
        (2, 4, 8, 8),
    ),
    "shared": (Shared, (BATCH, TOKENS, WIDTH)),
}
PLANS: list[dict[str, Any]] = [
    {"plan": "none"},
    {"plan": "full"},
    {"plan": "every-2"},
    {"plan": "selective"},
    {"budget": 0.7},
    {"budget": 0.3},
    {"budget": 0.02},
]


class AliveStorages(TorchDispatchMode):
    """Every storage that an operation made, for as long as it lives; nothing of Mezzo's."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.own = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}
        self.alive: dict[int, tuple[Any, int]] = {}
        self.counted, self.after_next = True, False
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        if self.after_next and self.counted is False:
            self.peak, self.after_next = max(self.peak, self.total()), False
        result = func(*args, **(kwargs or {}))
        if self.counted:
            for tensor in tree_leaves(result):
                if isinstance(tensor, Tensor) and tensor.dtype is not torch.uint8:  # the states of random generators
                    storage = tensor.untyped_storage()
                    key = storage._cdata
                    if key not in self.alive and key not in self.own:
                        gone = weakref.ref(storage, lambda _, key=key: self.alive.pop(key, None))
                        self.alive[key] = (gone, storage.nbytes())
        return result

    def total(self) -> int:
        return sum(size for _, size in self.alive.values())


def counted(model: nn.Module, shape: tuple[int, ...], policy: str, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Return the bytes that a step keeps when its backward pass begins, and the most that it keeps at any second pass."""
    casting, mode = Casting.of(Policy.parse(policy), "cpu"), AliveStorages(model)
    enter, leave = checkpointing._Recompute.__enter__, checkpointing._Recompute.__exit__

    def begins(again: Any) -> None:
        mode.counted = True
        enter(again)

    def ends(again: Any, *error: Any) -> None:
        leave(again, *error)
        mode.counted, mode.after_next = False, True  # what the second pass left is counted when its frames are gone

    with monkeypatch.context() as patched, mode:
        patched.setattr(checkpointing._Recompute, "__enter__", begins)
        patched.setattr(checkpointing._Recompute, "__exit__", ends)
        with casting.region():
            outputs = model(torch.randn(shape))
            loss = outputs.sum()
        mine = outputs.untyped_storage().nbytes() + loss.untyped_storage().nbytes()
        kept, mode.counted = mode.total() - mine, False
        with casting.backward():
            loss.backward()
    return kept, max(kept, mode.peak - mine)


def planned(model: nn.Module, shape: tuple[int, ...], policy: str, how: dict[str, Any]) -> CheckpointPlan:
    sample = torch.randn(shape)
    if "budget" not in how:
        return mezzo.checkpoint(model, sample, policy=policy, **how)
    plan = mezzo.checkpoint(model, sample, plan="full", policy=policy)
    budget = int(plan.peak_bytes + how["budget"] * (plan.plain_bytes - plan.peak_bytes))
    return mezzo.checkpoint(model, sample, budget=budget, policy=policy)


CASES = [("fp32", how) for how in PLANS] + [("fp16:arithmetic=native", how) for how in PLANS[3::2]]


@pytest.mark.parametrize(("policy", "how"), CASES, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_bytes_are_those_counted(name: str, policy: str, how: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    build, shape = MODELS[name]
    model = build()
    plan = planned(model, shape, policy, how)
    kept, peak = counted(model, shape, policy, monkeypatch)
    assert plan.kept_bytes == kept
    if name == "convolutional":  # the second pass's copies of running statistics are gone when it has ended
        assert 0 <= plan.peak_bytes - peak <= 2 * 4 * 4 + 8
    elif "products" in plan.regions.values():
        assert plan.peak_bytes - 2 * 4 * BATCH * TOKENS * WIDTH <= peak <= plan.peak_bytes
    else:
        assert plan.peak_bytes == peak


@pytest.mark.parametrize("how", PLANS[1::2], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_recomputed_flops_are_those_that_torch_counts(name: str, how: dict[str, Any]) -> None:
    build, shape = MODELS[name]
    model = build()
    plan = planned(model, shape, "fp32", how)

    def flops() -> int:
        with FlopCounterMode(display=False) as counter:
            model(torch.randn(shape)).sum().backward()
        return int(counter.get_total_flops())

    recomputing = flops()
    plan.remove(model)
    assert recomputing - flops() == plan.recomputed_flops
    if plan.name == "full":
        assert plan.recomputed_flops > 0
