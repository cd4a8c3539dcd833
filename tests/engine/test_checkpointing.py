"""Checkpointed modules: the same training, bit for bit, under every policy."""

from __future__ import annotations

import copy
import functools
import pickle
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mezzo
from mezzo import Session, SessionError
from mezzo.engine import checkpointing
from mezzo.engine.checkpointing import Keeps
from mezzo.measure.flops import FLOP_COUNTS

POLICIES = ["fp32", "tf32", "fp16", "bf16", "fp16-master", "bf16-master", "fp16-pure", "bf16-pure", "fp8"]
NATIVE = ["fp16:arithmetic=native", "bf16:op_lists=device", "fp16:fp32_modules=blocks.1.feed"]
PLANS: dict[str, dict[str, Keeps]] = {
    "full": {"blocks.0": "inputs", "blocks.1": "inputs", "convolved": "inputs"},
    "selective": {"blocks.0": "products", "blocks.1": "products", "convolved": "products"},
    "mixed": {"blocks.0.feed": "inputs", "blocks.1": "products", "convolved.2": "inputs"},
    "whole": {"": "inputs"},
}


class Block(nn.Module):
    """Hand-written attention, with dropout and a keyword argument."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.mixed = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.feed = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(0.3), nn.Linear(2 * width, width))

    def forward(self, x: Tensor, *, scale: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        q, k, v = self.mixed(self.norm(x)).chunk(3, -1)
        scores = F.dropout((q @ k.transpose(-1, -2) * scale).softmax(-1), 0.1, self.training)
        x = x + scores @ v
        return x + self.feed(x), {"scores": scores}


class Model(nn.Module):
    """Convolutions with running statistics, then attention; spectral norm changes buffers that its result depends on."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.convolved = nn.Sequential(nn.Conv1d(4, 8, 3, padding=1), nn.BatchNorm1d(8), nn.ReLU(), nn.Conv1d(8, 8, 1))
        self.blocks = nn.ModuleList([Block(8) for _ in range(depth)])
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.convolved(x).transpose(1, 2)
        scale = torch.full((), 0.5)
        total = hidden.new_zeros(())
        for block in self.blocks:
            hidden, more = block(hidden, scale=scale)
            total = total + more["scores"].float().mean()
        result: Tensor = self.head(hidden.mean(1)) + total
        return result


def trained(
    policy: str,
    regions: dict[str, Keeps],
    *,
    build: Callable[[], nn.Module] = Model,
    before: bool = True,
    compiled: str | None = None,
    shape: tuple[int, ...] = (6, 4, 5),
) -> list[Tensor]:
    """Train for three updates; return losses, weights and buffers."""
    torch.manual_seed(0)
    model = build()
    changed = [name for name, _ in model.named_buffers()]
    if before:
        checkpointing.apply(model, regions, changed=changed)
    session = Session(model, mezzo.AdamW(model.parameters(), lr=1e-2, eps=1e-4), policy=policy, accumulate=2)
    if not before:
        checkpointing.apply(model, regions, changed=changed)
    run = torch.compile(model, backend=compiled) if compiled else model
    found: list[Tensor] = []
    for _ in range(6):
        with session.autocast():
            loss = run(torch.randn(shape)).float().square().mean()
        session.step(loss)
        found.append(loss.detach())
    assert session.updates == 3
    return [*found, *(p.detach().clone() for p in model.parameters()), *(b.clone() for b in model.buffers())]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@functools.cache
def plain(policy: str) -> list[Tensor]:
    return trained(policy, {})


@pytest.mark.filterwarnings("ignore::mezzo.PrecisionWarning")
@pytest.mark.parametrize(
    "before", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["before the session", "after it"]
)
@pytest.mark.parametrize(
    ("policy", "plan"), [*((policy, "mixed") for policy in (*POLICIES, *NATIVE)), *(("fp16", plan) for plan in PLANS)]
)
def test_training_is_the_same_to_the_bit(policy: str, plan: str, before: bool) -> None:
    assert same(trained(policy, PLANS[plan], before=before), plain(policy))


FEEDS: list[dict[str, Keeps]] = [{}, {"1": "products"}]


def feed() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.3)), nn.Linear(8, 3))


COMPILED = [
    # policy, backend, model, plans
    ("fp16", "aot_eager", feed, FEEDS),
    pytest.param("fp16", "aot_eager", Model, [{}, PLANS["selective"]], marks=pytest.mark.slow),
    pytest.param("fp32", "aot_eager", Model, [{}, PLANS["full"]], marks=pytest.mark.slow),
    pytest.param("fp16", "inductor", feed, FEEDS, marks=pytest.mark.slow),
]
"""``aot_eager`` partitions as for inductor, whose C++ compiler takes a second for each kernel of a few layers, twice."""


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::mezzo.PrecisionWarning")
@pytest.mark.parametrize(("policy", "backend", "build", "plans"), COMPILED)
def test_compiled_training_is_the_same_to_the_bit(
    policy: str, backend: str, build: Callable[[], nn.Module], plans: list[dict[str, Keeps]]
) -> None:
    results = []
    for regions in plans:
        torch._dynamo.reset()
        results.append(trained(policy, regions, compiled=backend, build=build))
    assert same(*results)


class Draws(nn.Module):
    """Decides by Python's and NumPy's generators."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) * random.uniform(0.5, 2) if np.random.random() < 0.8 else x + layer(x)
        return x


def spectral() -> nn.Module:
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
    return nn.Sequential(nn.Sequential(layer, nn.Tanh()), nn.Linear(8, 2))


@pytest.mark.parametrize("keeps", ["inputs", "products"])
def test_other_generators_draw_the_same_numbers_again(keeps: Keeps) -> None:
    results = []
    for regions in ({}, {"0": keeps}):
        random.seed(0)
        np.random.seed(0)
        results.append(trained("fp32", regions, build=lambda: nn.Sequential(Draws(), nn.Linear(8, 2)), shape=(4, 8)))
        results[-1].append(torch.tensor([random.random(), np.random.random()]))
    assert same(*results)


@pytest.mark.parametrize("keeps", ["inputs", "products"])
def test_buffers_begin_again_as_they_began(keeps: Keeps) -> None:
    """Spectral normalisation improves its vectors in each pass: the second must not start from the first's."""
    plain, again = (trained("fp32", regions, build=spectral, shape=(4, 8)) for regions in ({}, {"0": keeps}))
    assert same(plain, again)


def test_a_second_backward_pass_through_the_graph() -> None:
    for keeps in ("inputs", "products"):
        torch.manual_seed(0)
        model = Model()
        checkpointing.apply(model, {"convolved": keeps}, changed=[n for n, _ in model.named_buffers()])
        loss = model(torch.randn(2, 4, 5)).square().mean()
        first = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        second = torch.autograd.grad(loss, list(model.parameters()))
        assert same(list(first), list(second))


def test_nothing_is_kept_for_a_backward_pass_that_never_runs() -> None:
    model = Model()
    checkpointing.apply(model, PLANS["full"])
    with torch.no_grad():
        assert model(torch.randn(2, 4, 5)).grad_fn is None


@pytest.mark.parametrize("policy", ["fp32", "fp16:fp32_modules=blocks.*"])
def test_copies_and_pickles_are_checkpointed_on_their_own(policy: str) -> None:
    model = Model()
    checkpointing.apply(model, PLANS["full"])
    Session(model, torch.optim.SGD(model.parameters(), lr=0.1), policy=policy)  # may wrap them again
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        how = checkpointing._checkpointed(other.blocks[0])
        assert how is not None
        assert (how.module, how.keeps) == (other.blocks[0], "inputs")
        checkpointing.remove(other)
        assert how.keeps is None
    kept = checkpointing._checkpointed(model.blocks[0])  # type: ignore[arg-type]
    assert kept is not None
    assert kept.keeps == "inputs"
    assert list(model.state_dict()) == list(Model().state_dict())


def test_a_new_plan_replaces_the_old_one() -> None:
    model = Model()
    checkpointing.apply(model, PLANS["full"])
    checkpointing.apply(model, {"blocks.0": "products"})
    found = {
        name: how.keeps
        for name, module in model.named_modules()
        if (how := checkpointing._checkpointed(module)) is not None
    }
    assert found == {"blocks.0": "products"}
    checkpointing.remove(model)
    assert all("forward" not in vars(module) for module in model.modules())


def test_a_buffer_that_changes_unannounced_is_an_error() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.seen += 1
            return self.layer(x) * self.seen  # type: ignore[no-any-return]

    model = nn.Sequential(Counts())
    checkpointing.apply(model, {"0": "inputs"})
    with pytest.raises(SessionError, match="Counts changed its buffer 'seen'"):
        model(torch.randn(2, 3)).sum().backward()


def test_a_kept_product_that_is_changed_in_place_is_an_error() -> None:
    model = nn.Sequential(nn.Sequential(nn.Conv1d(2, 2, 1), nn.ReLU(inplace=True), nn.Conv1d(2, 2, 1)))
    checkpointing.apply(model, {"0": "products"})
    with pytest.raises(SessionError, match="a product's result was changed in place"):
        model(torch.randn(2, 2, 3)).sum().backward()


def test_products_are_what_flops_are_counted_of() -> None:
    """Apart from backward passes, recurrent layers and the sparse products, whose results are not tensors that can be returned again."""
    packets = {op.overloadpacket for op in checkpointing.PRODUCT_OVERLOADS}
    left = {packet.__name__ for packet in set(FLOP_COUNTS) - packets}
    assert packets <= set(FLOP_COUNTS)
    assert {name for name in left if "backward" not in name} == {
        *("_cudnn_rnn", "mkldnn_rnn_layer", "_sparse_addmm", "_sparse_sparse_matmul"),
        *("vdot", "addr", "_euclidean_dist"),
    }


def test_keywords_of_torchs_checkpoint_reach_the_module() -> None:
    class Takes(nn.Module):
        def forward(self, x: Tensor, *, debug: float, context_fn: Any = None) -> Tensor:
            return x.square() * debug

    model = nn.Sequential(Takes())
    checkpointing.apply(model, {"0": "inputs"})
    x = torch.ones(2, requires_grad=True)
    model[0](x, debug=3.0).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [6.0, 6.0]
