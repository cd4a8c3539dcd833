"""A script's gradients under an emulated reduction: every way to compute them, against the same loop by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from helpers_engine import batches, mlp
from mezzo.engine.processes.distributed import EmulatedWorld
from mezzo.engine.session import Session
from mezzo.errors import PolicyError, SessionError
from mezzo.launch.torch import TorchTraining, switched
from mezzo.policy import Policy
from processes import leave_process_group

POLICY = "fp32:reduce=bf16:world=64"
Reduce = Callable[[list[Tensor]], Any]


def nothing(gradients: list[Tensor]) -> None:
    """Leave gradients to the command."""


def reduced(reduce: Reduce, model: nn.Module) -> None:
    reduce([p.grad for p in model.parameters() if p.grad is not None])


def with_optimizer(reduce: Reduce) -> list[Tensor]:
    """Train as scripts do; the norm that clips is that of reduced gradients."""
    model, frozen, found = mlp(6, 9, 3), mlp(3, 3), list[Tensor]()
    optimizer = torch.optim.SGD([*model.parameters(), *frozen.parameters()], lr=0.1)
    for x, y in batches(3):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        reduced(reduce, model)
        found.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        optimizer.step()
    return [*found, *model.parameters()]


def accumulating(reduce: Reduce) -> list[Tensor]:
    """Add up two micro-batches: each backward pass reduces the sum, as without no_sync."""
    model = mlp(6, 9, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number, (x, y) in enumerate(batches(4)):
        (F.cross_entropy(model(x), y) / 2).backward()
        reduced(reduce, model)
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    return list(model.parameters())


def two_models(reduce: Reduce) -> list[Tensor]:
    """Train two models in turns: a backward pass reduces the gradients that it computes."""
    models = [mlp(6, 9, 3), mlp(6, 5, 3, seed=1)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    for x, y in batches(2):
        for model in models:
            F.cross_entropy(model(x), y).backward()
            reduced(reduce, model)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return [p for model in models for p in model.parameters()]


def by_hand(reduce: Reduce) -> list[Tensor]:
    """Update without an optimizer."""
    model = nn.Linear(6, 3, bias=False)
    nn.init.constant_(model.weight, 0.1)
    for x, y in batches(3):
        F.cross_entropy(model(x), y).backward()
        reduced(reduce, model)
        with torch.no_grad():
            model.weight -= 0.1 * model.weight.grad  # type: ignore[operator]
            model.weight.grad = None
    return list(model.parameters())


def by_grad(reduce: Reduce) -> list[Tensor]:
    """Update with what torch.autograd.grad returns."""
    model = mlp(6, 9, 3)
    for x, y in batches(3):
        gradients = list(torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters())))
        reduce(gradients)
        with torch.no_grad():
            for p, gradient in zip(model.parameters(), gradients, strict=True):
                p -= 0.1 * gradient
    return list(model.parameters())


@pytest.mark.parametrize("loop", [with_optimizer, accumulating, two_models, by_hand, by_grad])
def test_every_backward_pass_reduces_what_it_computed(loop: Callable[[Reduce], list[Tensor]]) -> None:
    with switched(Policy.parse(POLICY)):
        found = loop(nothing)
    expected = loop(EmulatedWorld(Policy.parse(POLICY)).reduce)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(found, loop(nothing), strict=True))


def added_in_bf16(gradients: list[Tensor]) -> None:
    for gradient in gradients:
        gradient.copy_(gradient.bfloat16())


@pytest.mark.parametrize("loop", [with_optimizer, accumulating, two_models, by_hand])
def test_every_backward_pass_rounds_the_sums_that_it_added_to(loop: Callable[[Reduce], list[Tensor]]) -> None:
    with switched(Policy.parse("fp32:gradients=bf16")) as (run, _):
        found = loop(nothing)
        assert "gradients bf16" not in run.notes.left_alone
    expected = loop(added_in_bf16)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(found, loop(nothing), strict=True))


def test_sums_of_what_autograd_grad_returns_are_the_scripts_own() -> None:
    with switched(Policy.parse("fp32:gradients=bf16")) as (run, _):
        found = by_grad(nothing)
        left = run.notes.left_alone["gradients bf16"]
    assert left.reason == "the script adds up the results of torch.autograd.grad itself"
    assert all(torch.equal(a, b) for a, b in zip(found, by_grad(nothing), strict=True))


@pytest.mark.parametrize("policy", ["fp32", "bf16", "fp16"])
def test_scripts_and_sessions_add_up_micro_batches_alike(policy: str) -> None:
    """With one optimizer and past the first hundred updates, when little else is recorded; a session also by parts of a batch."""
    parts, policy = batches(4), f"{policy}:gradients=bf16"

    def script(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(110):
            for x, y in parts:
                (F.cross_entropy(model(x).float(), y) / 4).backward()
            optimizer.step()
            optimizer.zero_grad()

    def session(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        one = Session(model, optimizer, policy=policy, accumulate=4)
        for x, y in parts * 110:
            with one.autocast():
                loss = F.cross_entropy(model(x).float(), y)
            one.step(loss)

    def whole_batches(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        one = Session(model, optimizer, policy=policy, micro_batch=len(parts[0][0]))
        x, y = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        for _ in range(110):
            one.train_batch(lambda x, y: F.cross_entropy(model(x).float(), y), x, y)

    trained = []
    for train in (script, session, whole_batches):
        model = mlp(6, 9, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with switched(Policy.parse(policy)) if train is script else nullcontext():
            train(model, optimizer)
        trained.append(list(model.parameters()))
    for others in trained[1:]:
        assert all(torch.equal(a, b) for a, b in zip(trained[0], others, strict=True))


class Product(nn.Module):
    """The product of a weight and a vector, which is the weight's gradient: no list of operations would round it."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, vector: Tensor) -> Tensor:
        return (self.weight * vector).sum()


@pytest.mark.parametrize(("policy", "kept"), [("fp32:reduce=fp16:world=8", False), ("fp16:reduce=fp16:world=8", True)])
def test_fp16_sums_keep_the_scale_of_small_gradients(policy: str, kept: bool) -> None:
    small = torch.full((4,), 2.0**-27)
    with switched(Policy.parse(policy)):
        model = Product(torch.zeros(4))
        torch.optim.SGD(model.parameters(), lr=1.0)
        model(small).backward()
    assert model.weight.grad is not None
    assert torch.allclose(model.weight.grad, small * kept, rtol=0.01, atol=0.0)


def test_an_overflow_of_the_sum_is_skipped() -> None:
    with switched(Policy.parse("fp16:reduce=fp16:world=384:init_scale=1048576")) as (run, _):
        model = Product(torch.zeros(4))
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        model(torch.tensor([8.0, 1e-3, 1e-3, 1e-3])).backward()
        assert model.weight.grad is not None
        assert model.weight.grad.isnan().tolist() == [True, False, False, False]
        optimizer.step()
        assert run.update.skips
        assert model.weight.tolist() == [0.0] * 4
        run.close_update()
        assert run.precision.scale.value() == 524288.0


def test_the_record_says_what_was_emulated_and_what_it_did() -> None:
    with switched(Policy.parse(POLICY)) as (run, counted):
        with_optimizer(nothing)
        training = TorchTraining(run, counted)
        said = {reason.what: reason for reason in training.explanation()}
        effective = training.effective()
    assert said["reduction"].value == "bf16, emulated for 64 processes in a ring"
    assert 0.002 < float(said["rounding of the reduction"].value) < 0.02
    assert effective.emulated  # so that no speed is claimed
    assert effective.num_lowered == 0  # the script itself ran in FP32
    assert effective.left_alone == []


NOBODY = (
    "the script uses neither DistributedDataParallel nor fully_shard in several processes; world=N emulates N processes"
)
UNSHARDED = "the script does not use fully_shard, which in a group of one process rounds weights as in a group of many"
LEFT_ALONE = {
    "bf16:reduce=bf16": [("reduce", "bf16", NOBODY)],
    "bf16:reduce=bf16:world=8:gather=bf16": [("gather", "bf16", UNSHARDED)],
    "fp32": [],
}


@pytest.mark.parametrize("policy", LEFT_ALONE)
def test_what_one_process_cannot_do_is_said(policy: str) -> None:
    with switched(Policy.parse(policy)) as (run, _):
        found = [(r.what, r.value, r.reason) for r in run.notes.left_alone.values()]
    assert found == LEFT_ALONE[policy]


def scales() -> Product:
    return Product(torch.rand(64, generator=torch.Generator().manual_seed(0)))


@pytest.fixture(scope="module")
def group_of_one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    leave_process_group()


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize(
    ("gather", "dtype"), [("bf16", torch.bfloat16), ("fp32", torch.float32), ("auto", torch.float32)]
)
def test_weights_are_gathered_in_the_format_in_one_process_as_in_many(gather: str, dtype: torch.dtype) -> None:
    """Each weight is rounded by itself, so the number of processes does not matter; the oracle rounds by torch's cast."""
    vector, used = torch.rand(64, generator=torch.Generator().manual_seed(1)), []
    policy = f"bf16:gather={gather}:reduce=fp32:world=8"
    with switched(Policy.parse(policy)) as (run, _):
        model, plain = scales(), scales().weight.detach()
        torch.distributed.fsdp.fully_shard(model)
        torch.optim.SGD(model.parameters(), lr=1.0)
        model.register_forward_pre_hook(lambda module, _: used.append(module.weight.detach().clone()))
        model(vector).backward()
        assert "gather" not in {reason.what for reason in run.notes.left_alone.values()}
    assert used[0].dtype is dtype
    assert torch.equal(used[0].float(), plain.to(dtype).float())
    gradient = model.weight.grad
    assert isinstance(gradient, DTensor)
    assert torch.allclose(gradient.to_local(), vector.to(dtype).float(), rtol=1e-5, atol=0.0)
    assert gradient.dtype is torch.float32


@pytest.mark.usefixtures("group_of_one")
def test_a_session_refuses_shards_that_are_gathered_in_another_format() -> None:
    """With an emulated reduction as with a real one: a session cannot change the arguments of fully_shard."""
    model = torch.distributed.fsdp.fully_shard(scales())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with pytest.raises(
        SessionError, match=r"says gather=bf16, and fully_shard was called with param_dtype=torch\.float32"
    ):
        Session(model, optimizer, policy="bf16:gather=bf16:reduce=bf16:world=8")
    Session(model, optimizer, policy="bf16:gather=fp32:reduce=bf16:world=8")  # the reduction is the emulation's


@pytest.mark.usefixtures("group_of_one")
def test_sums_of_sharded_gradients_are_refused() -> None:
    policy, why = "fp32:gradients=bf16", "fully_shard can keep them to itself; allowed: gradients=auto"
    with switched(Policy.parse(policy)), pytest.raises(PolicyError, match=why):
        torch.distributed.fsdp.fully_shard(scales())
    model = torch.distributed.fsdp.fully_shard(scales())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with pytest.raises(PolicyError, match=why):
        Session(model, optimizer, policy=policy)


def test_names_of_torch_are_restored() -> None:
    import torch.distributed.fsdp as fsdp
    from torch.nn.parallel import DistributedDataParallel

    def held() -> list[Any]:
        return [DistributedDataParallel.__init__, fsdp.fully_shard, fsdp.FullyShardedDataParallel.__init__]

    before = held()
    with switched(Policy.parse(POLICY)):
        assert not any(a is b for a, b in zip(before, held(), strict=True))
    assert all(a is b for a, b in zip(before, held(), strict=True))
