"""Whether an infinity that disappears again matters is decided as FP32 decides it: by the gradients.

The oracle is the same training step in FP32, without any of Mezzo's true values: a step whose gradients are finite in FP16 and
those of FP32 is healthy, one whose gradients are finite and others is silent saturation.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_reduce
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import mezzo
from helpers_backward import in_ways
from mezzo.launch.torch import switched
from mezzo.observe.replay import wait_for_exchange
from mezzo.policy import Policy
from processes import leave_process_group

POLICY = "fp16:loss_scale=static:init_scale=16"
HARMLESS, WRONG = 0.02, 0.1


class Computes(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def made(function: Callable[[Tensor], Tensor]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), Computes(function), nn.Linear(16, 4))


def train(model: nn.Module, exchange: Callable[[Tensor], object] = lambda grad: None) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(32, 8, generator=generator), torch.randn(32, 4, generator=generator)
    F.mse_loss(model(x), y).backward()
    for p in model.parameters():
        exchange(p.grad)  # type: ignore[arg-type]
    optimizer.step()


def gradients(function: Callable[[Tensor], Tensor], policy: str) -> list[Tensor]:
    model = made(function)
    with switched(Policy.parse(policy)), contextlib.suppress(mezzo.NonFiniteLossError):
        train(model)
    return [p.grad.double() for p in model.parameters() if p.grad is not None]


def error(function: Callable[[Tensor], Tensor]) -> float:
    """Return how far the gradient that is furthest off is from FP32's; infinite for one that is not finite."""
    exact, found = gradients(function, "fp32"), gradients(function, POLICY)
    if not found:
        return math.inf
    pairs = zip(exact, found, strict=True)
    errors = [float((a - b).norm() / a.norm()) if a.norm() > 0 else float((a - b).norm()) for a, b in pairs]
    return max(e if math.isfinite(e) else math.inf for e in errors)


def sq(h: Tensor) -> Tensor:
    """Return a square that is beyond FP16 for some of the elements: up to 4e5."""
    h = h * 400
    return h * h


def masked(scores: Tensor, value: float) -> Tensor:
    mask = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores + mask.to(scores.dtype) * value


FUNCTIONS: dict[str, Callable[[Tensor], Any]] = {
    # an infinity that is divided by
    "1 / (c + inf)": lambda h: 3e4 / (3e4 + sq(h)),
    "x / inf": lambda h: h * 400 / sq(h).mean(-1, keepdim=True).sqrt(),
    "x * rsqrt(inf)": lambda h: h * 400 * torch.rsqrt(sq(h).mean(-1, keepdim=True) + 1e-5),
    "x / std of inf": lambda h: h * 400 / (sq(h).mean(0) + 1).sqrt(),
    "x / sum of inf": lambda h: sq(h)[:, :1].float().clamp(max=1e4) / sq(h).sum(-1, keepdim=True) + h,
    "reciprocal of a small part": lambda h: h + 1 / (1 + sq(h)),
    # bounded functions
    "exp(-inf)": lambda h: torch.exp(-sq(h)) + h,
    "exp(-inf / large)": lambda h: torch.exp(-sq(h) / 1e5) + h,
    "tanh(inf)": lambda h: torch.tanh(sq(h)) + h,
    "sigmoid(inf)": lambda h: torch.sigmoid(sq(h)) * h,
    "atan(inf / large)": lambda h: torch.atan(sq(h) / 3e4) + h,
    "erf(inf / large)": lambda h: torch.erf(sq(h) / 1e5) + h,
    # clamps and choices
    "clamp(inf, 1)": lambda h: sq(h).clamp(max=1.0) + h,
    "relu6(inf)": lambda h: F.relu6(sq(h)) * h,
    "clamp(inf, 60000)": lambda h: sq(h).clamp(max=6e4) * 1e-4 + h,
    "clamp in FP32": lambda h: sq(h).float().clamp(max=3e5) * 1e-5 + h,
    "minimum": lambda h: torch.minimum(sq(h), h + 100) * 0.01,
    "where larger than 1e4": lambda h: torch.where(sq(h) > 1e4, h, h * 2),
    "where larger than 3e5": lambda h: torch.where(sq(h) > 3e5, h, h * 5),
    "where infinite, else as it is": lambda h: torch.where(sq(h).isinf(), h, h * 5),
    "where infinite, masked": lambda h: h * ~sq(h).isinf(),
    "nan_to_num": lambda h: sq(h).nan_to_num() * 1e-5 + h,
    "sign": lambda h: sq(h).sign() * h,
    "argmax": lambda h: h.gather(-1, sq(h).argmax(-1, keepdim=True)) + h,
    "topk": lambda h: h.gather(-1, sq(h).topk(3).indices).sum(-1, keepdim=True) + h,
    # masks
    "softmax(-1e9)": lambda h: masked(h @ h.mT, -1e9).softmax(-1) @ h,
    "softmax(-7e4)": lambda h: masked(h @ h.mT, -7e4).softmax(-1) @ h,
    "logsumexp(-1e9)": lambda h: masked(h @ h.mT, -1e9).logsumexp(-1, keepdim=True) + h,
    "softmax(-1e5) against 1e5": lambda h: (masked(h @ h.mT, -7e4) / 3e4).softmax(-1) @ h,
    "exp(log_softmax(-1e9))": lambda h: masked(h @ h.mT, -1e9).log_softmax(-1).exp() @ h,
    # values that become too small
    "x * 1e-9 * 1e9": lambda h: h * 1e-9 * 1e9,
    "squares that vanish": lambda h: h / ((h * 1e-4) * (h * 1e-4)).mean(-1, keepdim=True).add(1e-9).sqrt() * 1e-4,
    "a small part vanishes": lambda h: h + h * 1e-9,
    "gelu": F.gelu,
    "softmax with tiny parts": lambda h: (h * 20).softmax(-1) @ torch.ones(16, 16, dtype=h.dtype) + h,
}


IN_BOTH_WAYS = ("clamp(inf, 1)", "nan_to_num", "sign", "softmax(-1e9)", "squares that vanish", "gelu")


@in_ways("name", FUNCTIONS, both=lambda name: name in IN_BOTH_WAYS, ids=str)
def test_an_infinity_matters_as_it_does_to_fp32(name: str) -> None:
    function = FUNCTIONS[name]
    off = error(function)
    model = made(function)
    record = mezzo.diagnose(lambda: train(model), policy=POLICY, steps=1)
    expected = "healthy" if off < HARMLESS else "silent_saturation" if math.isfinite(off) else "range_overflow"
    assert not HARMLESS <= off <= WRONG, "too close to call: take another function"
    assert (record.perhaps or record.verdict) == expected, f"gradients are off by {off:.3g}: {record.detail}"
    if expected == "silent_saturation":
        assert record.gradient_error is not None
        assert record.gradient_error == pytest.approx(off, rel=0.25)
        assert record.line.startswith(str(Path(__file__)))


class Model(nn.Module):
    """A model whose loss has a part that ``of`` computes from the hidden values, detached: no gradient depends on it."""

    def __init__(self, of: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.of = nn.Linear(8, 16), nn.Linear(16, 4), of

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.first(x)
        return F.mse_loss(self.second(h), y) + self.of(h.detach()).mean()


BESIDE: dict[str, tuple[Callable[[Tensor], Tensor], str, str]] = {
    # name: (part of the loss, verdict, what the note says, or "")
    "a ratio": (lambda h: 3e4 / (3e4 + sq(h)), "silent_saturation", ""),
    "nan_to_num": (lambda h: sq(h).nan_to_num() * 1e-5, "silent_saturation", ""),
    "nothing reads it": (lambda h: (sq(h), h)[1], "healthy", "neither the loss nor"),
    "clamp": (lambda h: sq(h).clamp(max=1.0), "healthy", "clamp() returns the same for both"),
    "log 0, not chosen": (lambda h: torch.where(h > 1e4, h.mul(0).log(), h), "healthy", "not finite in FP32 either"),
    "a mask": (lambda h: masked(h @ h.mT, -1e9).softmax(-1), "healthy", "softmax() returns the same for both"),
    "a mask of -inf": (lambda h: (h @ h.mT).masked_fill(h @ h.mT > 1, -math.inf).softmax(-1), "healthy", ""),
}


@pytest.mark.parametrize("name", BESIDE)
def test_a_loss_that_an_infinity_makes_wrong_is_a_fault_and_one_that_changes_nothing_is_a_note(name: str) -> None:
    of, verdict, note = BESIDE[name]
    losses: list[float] = []

    def trained() -> None:
        torch.manual_seed(0)
        model = Model(of)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        loss = model(torch.randn(32, 8), torch.randn(32, 4))
        losses.append(loss.item())
        loss.backward()
        optimizer.step()

    record = mezzo.diagnose(trained, policy=POLICY, steps=1)
    with switched(Policy.parse("fp32")):
        trained()
    off = abs(losses[0] / losses[1] - 1)
    assert record.verdict == verdict, record.detail
    if verdict == "silent_saturation":
        assert (record.gradient, record.gradient_error) == ("", None)
        assert record.loss_error == pytest.approx(off, rel=0.1)
        assert "the gradients are right" in record.detail
    else:
        assert off < HARMLESS
        harmless = [found.reason for found in record.notes if found.what == "harmless"]
        assert len(harmless) == bool(note)
        assert all(note in reason for reason in harmless)


def test_there_are_functions_of_either_kind() -> None:
    found = [error(function) < HARMLESS for function in FUNCTIONS.values()]
    assert min(found.count(True), found.count(False)) >= 10


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    leave_process_group()


EXCHANGES: dict[str, Callable[[Tensor], Any]] = {
    "all_reduce": dist.all_reduce,
    "like two processes": lambda grad: dist.all_gather([grad], 2 * grad),  # writes into it what a sum of two would
}


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize(
    ("name", "verdict"), [("where larger than 3e5", "silent_saturation"), ("tanh(inf)", "healthy")]
)
def test_gradients_that_processes_exchange_are_judged_as_they_were_sent(
    alone: None, name: str, verdict: str, exchange: str
) -> None:
    """Of what an exchange changes the true values are unknown."""
    model = made(FUNCTIONS[name])
    record = mezzo.diagnose(lambda: train(model, EXCHANGES[exchange]), policy=POLICY, steps=1)
    assert record.verdict == verdict


class Exchanged(TorchDispatchMode):
    """Reads the last element of a tensor when an exchange of it returns, and when it has been waited for."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        self.tensor = tensor
        self.last: list[float] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if "c10d" in func.namespace:
            wait_for_exchange(func, result)
            self.last.append(float((result if isinstance(result, Tensor) else self.tensor)[-1]))
        return result


@pytest.mark.parametrize(
    ("exchange", "last"),
    [
        (lambda t: dist.all_gather([t], 2 * t), [2.0]),
        (lambda t: dist.all_reduce(t, async_op=True).wait(), [1.0]),
        (lambda t: all_reduce(t, "sum", dist.group.WORLD).sum(), [1.0, 1.0]),
        (lambda t: dist.barrier(), [1.0]),
    ],
    ids=["gathered", "reduced", "functional", "no tensor"],
)
def test_results_of_an_exchange_are_read_when_they_are_written(
    alone: None, exchange: Callable[[Tensor], Any], last: list[float]
) -> None:
    """The exchange of 64 MB takes its thread milliseconds."""
    tensor = torch.ones(2**24)
    with Exchanged(tensor) as exchanged:
        exchange(tensor)
    assert exchanged.last == last


@pytest.mark.parametrize("value", [-1e9, torch.tensor(-1e9)], ids=["number", "tensor"])
def test_a_number_that_torch_refuses_to_write_is_named(value: float | Tensor) -> None:
    model = made(lambda h: h.masked_fill(h > 0, value))
    record = mezzo.diagnose(lambda: train(model), policy=POLICY, steps=1)
    assert (record.perhaps, record.module, record.op, record.phase) == ("range_overflow", "1", "masked_fill", "forward")
    assert "1e+09" in record.detail


A, B = torch.full((4, 4), 300.0), torch.full((4, 4), 200.0)
PRODUCTS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "addmm": torch.addmm,
    "linear": lambda c, a, b: F.linear(a, b, c[0]),
    "matmul": lambda c, a, b: a @ b,
    "bmm": lambda c, a, b: torch.bmm(a[None], b[None]),
    "einsum": lambda c, a, b: torch.einsum("ij,jk->ik", a, b),
    "conv1d": lambda c, a, b: F.conv1d(a[None], b[:, :, None], c[0]),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_the_operands_of_an_emulated_product_are_those_of_the_product(name: str) -> None:
    """Its result is computed in FP32 and then rounded: the operand of that last part is the result."""
    model = made(
        lambda h: h + 0 * PRODUCTS[name](torch.ones_like(A, dtype=h.dtype), A.to(h.dtype), B.to(h.dtype)).sum()
    )
    record = mezzo.diagnose(lambda: train(model), policy=f"{POLICY}:arithmetic=emulated", steps=1)
    assert (record.op, record.phase, record.largest) == (name, "forward", pytest.approx(4 * 300 * 200, abs=1))
    assert [o.largest for o in record.operands if o.largest != 1] == [300.0, 200.0]
    assert {o.format for o in record.operands} == {"fp16"}
