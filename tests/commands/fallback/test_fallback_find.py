"""The modules that have to stay in FP32: planted ones are found among a hundred, and distinguished from other causes."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mezzo
from helpers_backward import BOTH_WAYS, in_ways
from mezzo.commands.fallback.find import _ranked, default_tolerance
from mezzo.errors import PolicyError, ScriptError, SessionError
from mezzo.observe.fallback.evidence import LocalError
from mezzo.policy import Policy
from mezzo.report.pages import page_of

WIDTH = 16


class Underflow(nn.Module):
    """Pass through values that FP16 cannot hold in between; a leaf without weights."""

    def forward(self, x: Tensor) -> Tensor:
        return (x * 1e-9) * 1e9


class Overflow(nn.Module):
    """Overflow in what the container itself computes from a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return (self.lin(x) * 1e6) * 1e-6


class Loud(nn.Linear):
    """Overflow in a layer's own output, which a norm behind it would make small again."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        nn.init.constant_(self.bias, 3e5)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) - self.bias.detach()


class Block(nn.Module):
    def __init__(self, fault: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.norm, self.act, self.drop = nn.LayerNorm(WIDTH), nn.GELU(), nn.Dropout(0.1)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.fault = fault()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fault(self.down(self.drop(self.act(self.up(self.norm(x))))))


class Net(nn.Module):
    def __init__(self, faults: dict[int, Callable[[], nn.Module]], *, blocks: int = 15) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.bn = nn.Linear(8, WIDTH), nn.BatchNorm1d(WIDTH)
        self.blocks = nn.ModuleList(Block(faults.get(number, nn.Identity)) for number in range(blocks))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn(self.first(x))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def batches(count: int = 4) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(16, 8, generator=generator), torch.randn(16, 4, generator=generator)) for _ in range(count)]


def trainer(model: nn.Module) -> Callable[[], None]:
    update = torch.optim.AdamW(model.parameters(), lr=0.01)

    def train() -> None:
        for inputs, targets in batches():
            update.zero_grad()
            F.mse_loss(model(inputs), targets).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            update.step()

    return train


PLANTED: list[dict[int, Callable[[], nn.Module]]] = [
    {9: Underflow},
    {2: Overflow, 11: Underflow},
    {0: Loud, 5: Underflow, 14: Overflow},
    {1: Underflow, 4: Overflow, 8: Loud, 13: Underflow},
]


@pytest.mark.slow
@in_ways("faults", PLANTED, both=lambda faults: len(faults) == 2, ids=lambda faults: f"{len(faults)} planted")
def test_planted_modules_are_found_among_a_hundred(faults: dict[int, Callable[[], nn.Module]]) -> None:
    record = mezzo.fallback(trainer(Net(faults)))

    candidates = [m for m in record.modules if not m.unnamed]
    size, most = len(faults), math.log2(len(candidates)) + 2 * len(faults) + 3
    assert len(candidates) >= 100
    assert record.verdict == "found", record.reason
    assert record.kept == sorted(f"blocks.{number}.fault" for number in faults)
    assert len(record.verifications) <= most
    assert record.error_before == math.inf
    assert record.error_after is not None
    assert record.error_after < record.tolerance
    by_set = {tuple(t.kept): t.passed for t in record.verifications}
    smaller = [tuple(n for n in record.kept if n != name) for name in record.kept]
    assert [by_set[kept] for kept in smaller] == [False] * size  # 1-minimal, as measured
    assert record.verifications[-1].kept == record.kept
    assert record.verifications[-1].steps == [1, 2, 3]
    assert Policy.parse(record.suggested).fp32_modules == tuple(record.kept)
    assert 0 <= record.fp32_share < 0.1


def test_a_session_takes_the_policy() -> None:
    model = Net({9: Underflow})
    record = mezzo.fallback(trainer(model))
    session = mezzo.Session(model, torch.optim.SGD(model.parameters(), lr=0.01), policy=record.suggested)
    inputs, targets = batches()[0]
    with session.autocast():
        loss = F.mse_loss(model(inputs), targets)
    session.step(loss)
    assert math.isfinite(session.grad_norm)


@BOTH_WAYS
def test_everything_is_as_it_was() -> None:
    model = Net({2: Overflow}, blocks=3)
    update = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(update, step_size=1)
    F.mse_loss(model(batches()[0][0]), batches()[0][1]).backward()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    storages = {name: p.data_ptr() for name, p in model.named_parameters()}
    random_numbers, plain_random = torch.get_rng_state(), random.getstate()

    def train() -> None:
        model.train()
        for inputs, targets in batches():
            random.random()
            update.zero_grad()
            F.mse_loss(model(inputs), targets).backward()
            update.step()
            scheduler.step()

    model.eval()
    record = mezzo.fallback(train, policy="fp16-pure", fresh=1)

    assert record.kept == ["blocks.2.fault"]
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == storages
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(torch.equal(p.grad, gradients[name]) for name, p in model.named_parameters() if p.grad is not None)
    assert [name for name, module in model.named_modules() if "forward" in vars(module)] == []
    assert not model.training
    assert (update.param_groups[0]["lr"], scheduler.last_epoch) == (0.1, 0)
    assert torch.equal(torch.get_rng_state(), random_numbers)
    assert random.getstate() == plain_random
    assert not torch.nn.modules.module._has_any_global_hook()
    assert not update.state


# --- precision is not the cause --------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["fp16", "bf16", "fp8"])
def test_a_healthy_model_needs_nothing(policy: str) -> None:
    record = mezzo.fallback(trainer(Net({}, blocks=2)), policy=policy)
    assert (record.verdict, record.kept) == ("not needed", [])
    assert record.reason.endswith("on 3 batches")
    assert [t.steps for t in record.verifications] == [[1, 2, 3]]
    assert record.error_after is not None
    assert 0 < record.error_after < record.tolerance == default_tolerance(Policy.parse(policy))


@pytest.mark.slow
def test_a_fault_outside_every_module_with_a_name() -> None:
    class Outside(Net):
        def forward(self, x: Tensor) -> Tensor:
            return (torch.matmul(super().forward(x) * 1e5, torch.eye(4)) * 1e-5).float()

    record = mezzo.fallback(trainer(Outside({}, blocks=1)))
    assert (record.verdict, record.kept) == ("elsewhere", [])
    assert "in the model's own forward or in the script" in record.reason
    assert [m.module for m in record.modules if m.unnamed] == ["Outside"]
    assert record.modules[0].unnamed
    assert record.operations == ["matmul"]  # mul alone would pass on values that matmul's format does not contain
    assert record.suggested == "fp16:fp32=matmul"
    assert "with matmul in FP32 wherever they run it passes" in record.reason
    passed = [t for t in record.verifications if t.operations == ["matmul"]]
    assert [t.passed for t in passed] == [True]
    assert [step.command for step in page_of(record).steps] == ['mezzo.diagnose(train, policy="fp16:fp32=matmul")']
    assert mezzo.fallback(trainer(Outside({}, blocks=1)), policy=record.suggested).verdict == "not needed"


def test_what_to_do_where_neither_modules_nor_operations_help() -> None:
    class Rounded(Net):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            low = Policy.parse("fp16").storage.dtype if torch.is_autocast_enabled("cpu") else torch.float32
            return (y.float() * 1e9).to(low).float() * 1e-9  # a cast of its own is in no list

    record = mezzo.fallback(trainer(Rounded({}, blocks=1)))
    assert (record.verdict, record.kept, record.operations) == ("elsewhere", [], [])
    assert "nor does any operation in FP32 help" in record.reason
    assert [step.command for step in page_of(record).steps] == [
        'mezzo.diagnose(train, policy="fp16")',
        'mezzo.fallback(train, policy="bf16")',
        'mezzo.fallback(train, policy="fp16")',
    ]
    assert record.suggested == "fp16"


def test_another_batch_each_time_cannot_be_judged() -> None:
    model, data = Net({}, blocks=1), iter(batches(40))
    update = torch.optim.SGD(model.parameters(), lr=0.1)

    def train() -> None:
        for inputs, targets in data:
            F.mse_loss(model(inputs), targets).backward()
            update.step()
            update.zero_grad()

    record = mezzo.fallback(train)
    assert (record.verdict, record.kept, record.verifications) == ("not repeatable", [], [])


@BOTH_WAYS
def test_what_fails_in_fp32_too() -> None:
    class Broken(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return (y - y).sqrt()  # an infinite slope, up and down

    record = mezzo.fallback(trainer(nn.Sequential(nn.Linear(8, 8), Broken(8, 4))))
    assert record.verdict == "fp32 fails"
    assert "precision is not the cause" in record.reason


@BOTH_WAYS
def test_gradients_that_are_rounding_alone_are_not_judged() -> None:
    # The bias before a batch norm has a gradient of zero, but for rounding: no format could get it right.
    model = nn.Sequential(
        nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)
    )
    record = mezzo.fallback(trainer(model))
    assert [i.what for i in record.ignored] == ["0.bias", "3.bias"]
    assert record.verdict == "not needed"


def test_a_module_that_the_policy_keeps_already_stays_kept() -> None:
    record = mezzo.fallback(trainer(Net({1: Underflow, 2: Overflow}, blocks=3)), policy="fp16:fp32_modules=blocks.1.*")
    assert record.kept == ["blocks.2.fault"]
    assert record.suggested == "fp16:fp32_modules=blocks.1.*+blocks.2.fault"
    assert not any(m.module.startswith("blocks.1.") for m in record.modules)


def test_a_fresh_batch_can_need_more() -> None:
    class Sometimes(Underflow):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if x.mean() > self.above else x

        above = math.inf

    model = Net({0: Underflow, 1: Sometimes}, blocks=2)
    seen: list[float] = []
    handle = model.blocks[1].fault.register_forward_pre_hook(lambda _, args: seen.append(float(args[0].mean())))
    model.eval()
    with torch.no_grad():
        for inputs, _ in batches(3):
            model(inputs)
    handle.remove()

    def train() -> None:
        model.eval()  # no dropout: the values are those that were seen
        for (inputs, targets), value in zip(batches(3), seen, strict=True):
            Sometimes.above = math.inf if value == seen[0] else -math.inf
            model.zero_grad()
            F.mse_loss(model(inputs), targets).backward()
            update.step()

    update = torch.optim.SGD(model.parameters(), lr=0.1)
    record = mezzo.fallback(train, fresh=2)
    assert record.kept == ["blocks.0.fault", "blocks.1.fault"]
    assert "searched on 3 batches" in record.reason


# --- what is refused ----------------------------------------------------------------------------------


def lbfgs() -> Callable[[], None]:
    model = nn.Linear(8, 4)
    update = torch.optim.LBFGS(model.parameters(), max_iter=2)

    def closure() -> Tensor:
        update.zero_grad()
        loss = F.mse_loss(model(batches(1)[0][0]), batches(1)[0][1])
        loss.backward()
        return loss

    def train() -> None:
        for _ in range(4):
            update.step(closure)

    return train


REFUSED: list[tuple[Callable[[], Any], dict[str, Any], type[Exception], str]] = [
    (lambda: 3, {}, SessionError, "a function without arguments"),
    (lambda: trainer(nn.Linear(8, 4)), {"policy": "fp32"}, PolicyError, "nothing to keep in FP32"),
    (lambda: trainer(nn.Linear(8, 4)), {"policy": "tf32"}, PolicyError, "nothing to keep in FP32"),
    (lambda: trainer(nn.Linear(8, 4)), {"tolerance": 0.0}, SessionError, "above 0 and below 1"),
    (lambda: trainer(nn.Linear(8, 4)), {"fresh": -1}, SessionError, "0 to 100 batches"),
    (lambda: lambda: None, {}, ScriptError, "made no training step"),
    (lbfgs, {}, ScriptError, "LBFGS moves the weights"),
]


@pytest.mark.parametrize(("made", "settings", "error", "message"), REFUSED)
def test_what_cannot_be_judged_is_refused(
    made: Callable[[], Any], settings: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        mezzo.fallback(made(), **settings)


@pytest.mark.parametrize(
    ("policy", "tolerance"), [("fp16", 0.01953125), ("bf16", 0.15625), ("fp8", 0.5), ("bf16-master", 0.15625)]
)
def test_the_tolerance_suits_the_format(policy: str, tolerance: float) -> None:
    assert default_tolerance(Policy.parse(policy)) == tolerance


RANKED: list[tuple[str, dict[str, dict[str, Any]], list[str]]] = [
    ("by error", {"a": {"output": 0.1}, "b": {"dgrad": 0.3}, "c": {"wgrad": 0.2}}, ["b", "c", "a"]),
    ("above 1 the cheapest", {"a": {"output": 1.9, "flops": 2}, "b": {"output": 1.1, "flops": 1}}, ["b", "a"]),
    ("above 1 the leaf", {"a": {"output": math.inf}, "a.b": {"output": 1.1}}, ["a.b", "a"]),
    ("rounded inputs count half", {"a": {"rounded": 0.3}, "b": {"output": 0.2}}, ["b", "a"]),
    ("at most a half", {"a": {"rounded": 1.8}, "b": {"output": 0.6}, "c": {"rounded": math.nan}}, ["b", "a", "c"]),
    ("unknown before healthy", {"a": {"output": 0.2}, "b": {"reason": "?"}, "c": {"output": 0.3}}, ["c", "b", "a"]),
]


@pytest.mark.parametrize(("measured", "names"), [row[1:] for row in RANKED], ids=[row[0] for row in RANKED])
def test_the_most_suspect_module_is_first(measured: dict[str, dict[str, Any]], names: list[str]) -> None:
    local = [LocalError.model_validate({"module": name, "type": "Linear"} | own) for name, own in measured.items()]
    assert [one.module for one in _ranked(local, Policy.parse("fp16"))] == names
