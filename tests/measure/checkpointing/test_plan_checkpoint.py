"""``mezzo.checkpoint``: plans by name and by budget, what it leaves alone, and what it refuses."""

from __future__ import annotations

import gc
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import mezzo
from forked_processes import in_forks
from mezzo.engine import checkpointing
from mezzo.errors import UsageError
from mezzo.measure.checkpointing.optimum import Costs
from mezzo.measure.checkpointing.plan import CheckpointPlan
from mezzo.measure.checkpointing.wanted import bytes_of_text, bytes_text

WIDTH = 16


class Block(nn.Module):
    """What a plan can do something for."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(nn.functional.dropout(torch.tanh(self.up(self.norm(x))), 0.1))
        return result


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *(Block() for _ in range(5)), nn.Linear(WIDTH, 2))


SAMPLE = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(0))


def gradients(net: nn.Module, x: Tensor = SAMPLE) -> list[Tensor]:
    torch.manual_seed(1)
    net.zero_grad()
    net(x).square().mean().backward()
    return [p.grad.clone() for p in net.parameters() if p.grad is not None]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


NAMED: dict[str, list[str]] = {
    "none": [],
    "full": ["1", "2", "3", "4", "5"],
    "every-1": ["1", "2", "3", "4", "5"],
    "every-2": ["1", "3", "5"],
    "every-3": ["1", "4"],
    "selective": ["1", "2", "3", "4", "5"],
}


@pytest.mark.parametrize(("name", "regions"), NAMED.items())
def test_named_plans(name: str, regions: list[str]) -> None:
    net = model()
    expected = gradients(net)
    plan = mezzo.checkpoint(net, SAMPLE, plan=name)
    assert plan.regions == dict.fromkeys(regions, "products" if name == "selective" else "inputs")
    assert same(gradients(net), expected)
    assert (plan.recomputed_flops == 0) == (name in ("none", "selective"))
    assert plan.kept_bytes <= plan.peak_bytes <= plan.plain_bytes
    wrapped = [name for name, module in net.named_modules() if checkpointing._checkpointed(module) is not None]
    assert wrapped == regions


@pytest.mark.parametrize("policy", ["fp32", "bf16"])
def test_a_smaller_budget_keeps_less_and_recomputes_more(policy: str) -> None:
    net = model()
    full = mezzo.checkpoint(net, SAMPLE, plan="full", policy=policy)
    span, found = full.plain_bytes - full.peak_bytes, []
    for share in (1.0, 0.8, 0.6, 0.4, 0.2, 0.0):
        budget = full.peak_bytes + int(share * span)
        plan = mezzo.checkpoint(net, SAMPLE, budget=budget, policy=policy)
        assert plan.peak_bytes <= budget
        found.append(plan.costs)
    costs = [c.recomputed_flops + 156 * c.recomputed_moved_bytes for c in found]
    assert costs == sorted(costs)
    assert costs[0] == 0
    assert found[-1].recomputed_flops <= full.recomputed_flops


def test_budget_plans_change_no_bit_and_can_be_removed() -> None:
    net = model()
    buffers = [b.clone() for b in net.buffers()]
    expected = gradients(net)
    after = [b.clone() for b in net.buffers()]
    for now, before in zip(net.buffers(), buffers, strict=True):
        now.copy_(before)
    plan = mezzo.checkpoint(net, SAMPLE, budget="40KiB")
    assert plan.regions
    assert same(gradients(net), expected)
    assert same(list(net.buffers()), after)
    plan.remove(net)
    assert all("forward" not in vars(module) for module in net.modules())
    plan.apply(net)
    assert "forward" in vars(net.get_submodule(next(iter(plan.regions))))


def test_tracing_leaves_everything_as_it_was() -> None:
    net = model()
    before = [t.clone() for t in (*net.parameters(), *net.buffers())]
    identities = [id(b) for b in net.buffers()]
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    drawn = [torch.rand(1).item()]
    torch.manual_seed(5)
    mezzo.checkpoint(net, SAMPLE, plan="full")
    assert torch.rand(1).item() == drawn[0]
    assert same(before, [*net.parameters(), *net.buffers()])
    assert identities == [id(b) for b in net.buffers()]
    assert all(p.grad is None for p in net.parameters())


def test_tracing_keeps_no_activations() -> None:
    """A model whose training does not fit is traced where its evaluation fits: saved tensors are gone at once."""
    alive: list[int] = []

    class Watches(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            wide = sum(issubclass(type(t), Tensor) and t.numel() == 32 * 1000 for t in gc.get_objects())
            alive.append(wide)
            return x

    layers = [nn.Sequential(nn.Linear(WIDTH, 1000), nn.Tanh(), nn.Linear(1000, WIDTH), Watches()) for _ in range(4)]
    mezzo.checkpoint(nn.Sequential(*layers), SAMPLE, plan="full")
    assert alive == [0, 0, 0, 0]


@pytest.mark.parametrize("count", [0, 3, 4, 6])
def test_the_plan_prints_three_modules_that_it_leaves_out(count: int) -> None:
    costs = Costs(kept_bytes=0, peak_bytes=0, recomputed_flops=0, recomputed_moved_bytes=0)
    plan = CheckpointPlan(
        name="none",
        regions={},
        costs=costs,
        plain_bytes=0,
        forward_flops=0,
        guarantee="",
        refused={f"m{n}": f"reason {n}" for n in range(count)},
    )
    listed = [f"  left out: m{n}: reason {n}" for n in range(min(count, 3))]
    more = {4: ["  left out: 1 more"], 6: ["  left out: 3 more"]}.get(count, [])
    assert [line for line in repr(plan).splitlines() if "left out" in line] == [*listed, *more]


def test_the_plan_prints_what_it_costs_and_saves() -> None:
    plan = mezzo.checkpoint(model(), SAMPLE, plan="full")
    lines = repr(plan).splitlines()
    assert lines[0] == "Checkpointing: full. 5 of 5 blocks (Block)."
    assert [line.split()[0] for line in lines[1:5]] == ["none", "every-2", "selective", "*"]
    assert lines[4].startswith(
        "* full       keeps  14.7 KiB of 145 KiB, at most  38.9 KiB in the backward pass; recomputes 49% "
    )
    assert lines[5] == "  keep their inputs: 1, 2, 3, 4, 5"


SAMPLES: dict[str, tuple[Callable[..., Any], Any]] = {
    "a tensor": (lambda x: x, torch.ones(4, 3)),
    "a tuple": (lambda x, y: x + y, (torch.ones(4, 3), torch.ones(4, 3))),
    "keywords": (lambda x, *, more: x + more, {"x": torch.ones(4, 3), "more": torch.ones(4, 3)}),
}


@pytest.mark.parametrize(("use", "sample"), SAMPLES.values(), ids=SAMPLES)
def test_samples(use: Callable[..., Tensor], sample: Any) -> None:
    class Takes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(3, 50), nn.Tanh(), nn.Linear(50, 3))

        def forward(self, *args: Any, **kwargs: Any) -> Tensor:
            result: Tensor = self.layers(use(*args, **kwargs))
            return result

    assert mezzo.checkpoint(Takes(), sample, plan="full").regions == {"layers": "inputs"}


class Cache:
    """An object that a module may change."""


class Given(Block):
    def forward(self, x: Tensor, cache: Any = None) -> Tensor:
        return super().forward(x)


class WithCache(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Given() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, Cache())
        return x


def in_place() -> nn.Module:
    wide = 4 * WIDTH
    return nn.Sequential(
        *(
            nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, wide), nn.LayerNorm(wide), nn.Linear(wide, WIDTH))
            for _ in range(3)
        )
    )


def product_in_place() -> nn.Module:
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH)) for _ in range(3))
    )


REFUSED: list[tuple[Callable[[], nn.Module], str, str, str]] = [
    (WithCache, "full", "layers.0", "it receives a Cache, which it may change"),
    (in_place, "full", "1", "an input is changed in place later"),
    (product_in_place, "selective", "0", "the output of a product is changed in place"),
]


@pytest.mark.parametrize(("build", "name", "refused", "reason"), REFUSED)
def test_what_cannot_be_computed_again_is_left_out(
    build: Callable[[], nn.Module], name: str, refused: str, reason: str
) -> None:
    net = build()
    expected = gradients(net, SAMPLE.clone())
    plan = mezzo.checkpoint(net, SAMPLE.clone(), plan=name)
    assert plan.refused[refused] == reason
    assert refused not in plan.regions
    assert same(gradients(net, SAMPLE.clone()), expected)
    assert f"left out: {refused}: {reason}" in repr(plan)


class Penalty(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(x.square().sum(), x)[0]


WRONG: list[tuple[Callable[[], object], str]] = [
    (lambda: mezzo.checkpoint(model(), SAMPLE), "budget=None and plan=None; allowed: one of the two"),
    (
        lambda: mezzo.checkpoint(model(), SAMPLE, plan="full", budget=1),
        "budget=1 and plan='full'; allowed: one of the two",
    ),
    (lambda: mezzo.checkpoint(model(), SAMPLE, plan="every-0"), "there is no checkpointing plan 'every-0'"),
    (lambda: mezzo.checkpoint(model(), SAMPLE, plan="all"), "allowed: none, full, every-K with a number, selective"),
    (lambda: mezzo.checkpoint(model(), SAMPLE, budget="12 apples"), "budget '12 apples' is not a size"),
    (lambda: mezzo.checkpoint(model().eval(), SAMPLE, plan="full"), "got a model in evaluation mode"),
    (
        lambda: mezzo.checkpoint(model(), SAMPLE, budget="1KiB"),
        "no plan keeps what waits for the backward pass within 1 KiB",
    ),
    (lambda: mezzo.checkpoint(Penalty(), SAMPLE, plan="full"), "runs a backward pass of its own"),
]


@pytest.mark.parametrize(("call", "message"), WRONG)
def test_wrong_calls(call: Callable[[], object], message: str) -> None:
    with pytest.raises(mezzo.MezzoError, match=re.escape(message)):
        call()


def test_an_error_leaves_no_plan_behind() -> None:
    net = model()
    with pytest.raises(UsageError):
        mezzo.checkpoint(net, SAMPLE, budget="1KiB")
    assert all("forward" not in vars(module) for module in net.modules())


@pytest.mark.parametrize(
    ("text", "number"), [("12GiB", 12 * 2**30), ("800 MB", 800 * 10**6), ("1.5kib", 1536), ("7B", 7), (9, 9)]
)
def test_bytes_as_text(text: str | int, number: int) -> None:
    assert bytes_of_text(text) == number


@pytest.mark.parametrize(("number", "text"), [(0, "0 B"), (999, "999 B"), (1536, "1.5 KiB"), (12 * 2**30, "12 GiB")])
def test_bytes_in_words(number: int, text: str) -> None:
    assert bytes_text(number) == text


TWO = """
import sys, torch, torch.distributed as dist, mezzo
from torch.nn.parallel import DistributedDataParallel
sys.path.insert(0, sys.argv[1])
from test_plan_checkpoint import Block, model, same
dist.init_process_group("gloo")
rank = dist.get_rank()
found = []
for name in ("none", "full", "selective", "60KiB"):
    net = DistributedDataParallel(model())
    how = {"budget": name} if name == "60KiB" else {"plan": name}
    plan = mezzo.checkpoint(net, torch.randn(32 + rank, 16), **how)  # other samples, and still one plan
    session = mezzo.Session(net, torch.optim.SGD(net.parameters(), lr=0.1), policy="fp16", accumulate=2)
    torch.manual_seed(rank)
    for _ in range(4):
        with session.autocast():
            loss = net(torch.randn(32, 16)).square().mean()
        session.step(loss)
    found.append([t.detach().clone() for t in (*net.parameters(), *net.buffers())])
    plans = [None, None]
    dist.all_gather_object(plans, plan.regions)
    assert plans[0] == plans[1] and (plans[0] or name == "none"), plans
    assert session.updates == 2
assert all(same(found[0], one) for one in found[1:])
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_under_distributed_data_parallel(tmp_path: Path) -> None:
    script = tmp_path / "two.py"
    script.write_text(TWO)
    ended = in_forks([str(Path(__file__).parent)], program=[str(script)])
    assert [one.code for one in ended] == [0, 0], ended
