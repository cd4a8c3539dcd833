"""Modules of operations where autograd has a thread of its own, which numbers its nodes independently of the script's.

The oracle is the shape: no two layers of a model have the same widths, so that a product's operands say which layer it belongs to.
"""

from __future__ import annotations

import _thread
import functools
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mezzo
from helpers_audit import traced_operations
from helpers_backward import WAYS, DeviceThread, LastingThread, backward_in
from mezzo.measure.flops import OperandFormats
from mezzo.observe.audit.operations import TracedOperation
from mezzo.observe.location import PlacingTracer
from mezzo.observe.tracer import Tracer
from paths import TESTS

ROWS, WIDTH = 3, 7
Call = Callable[..., Any]


class Block(nn.Module):
    """Two layers, the second one wider by one."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden + 1, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.pad(torch.relu(self.up(x)), (0, 1)))


class Doubled(torch.autograd.Function):
    """Multiply by 2 by operations that belong to a node of the script's own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (x + x).clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad + grad


class Net(nn.Module):
    """Layers of which no two have the same widths, some of them computed again in the backward pass."""

    def __init__(self, way: str, *, plain: int) -> None:
        super().__init__()
        self.way, self.reentrant = way, "non-" not in way
        self.first, self.last = nn.Linear(5, WIDTH), nn.Linear(WIDTH, 4)
        self.a, self.b, self.c = Block(11), Block(13), Block(17)
        self.plain = nn.ModuleList(nn.Linear(WIDTH, 23 + 2 * i, bias=False) for i in range(plain))

    def again(self, function: Call, x: Tensor) -> Tensor:
        if "reentrant" not in self.way:
            return cast(Tensor, function(x))
        return cast(Tensor, checkpoint(function, x, use_reentrant=self.reentrant))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.plain:
            x = x + layer(x).mean(-1, keepdim=True)
        if "inside" in self.way:
            x = self.again(lambda x: self.a(self.again(self.b, x)).sin(), x)
        elif "node" in self.way:
            x = self.again(lambda x: self.a(Doubled.apply(self.b(x))), x)
        elif "in place" in self.way:
            x = self.again(lambda x: self.b(written(self.a(x))), x)
        elif "implicit" in self.way:
            x = self.implicit(x)
        else:
            x = self.again(self.b, self.again(self.a, x))
        y: Tensor = self.last(self.again(lambda x: torch.relu(self.c(x)).sin(), x))
        return y

    def implicit(self, x: Tensor) -> Tensor:
        """Run nodes of the forward pass again from inside a node, as an implicit layer does."""
        start = x.detach().requires_grad_()
        once = self.a(start)
        fixed: Tensor = self.b(once.detach() + 0 * x)
        fixed.register_hook(lambda g: g + torch.autograd.grad(once, start, g, retain_graph=True)[0])
        return fixed


def written(x: Tensor) -> Tensor:
    """Write into views: nodes without an operation of their own."""
    y = x.clone()
    y[:, 0] *= 2
    y[:, 1:3].add_(1)
    return y


def plain_loss(net: Net) -> None:
    net(torch.randn(ROWS, 5)).square().mean().backward()


def penalised_loss(net: Net) -> None:
    x = torch.randn(ROWS, 5, requires_grad=True)
    (gradient,) = torch.autograd.grad(net(x).square().sum(), x, create_graph=True)
    (gradient.square().sum(-1).sqrt().mean() + net(x).square().mean()).backward()


CASES: dict[str, tuple[str, Callable[[Net], None]]] = {
    "no checkpointing": ("", plain_loss),
    "reentrant": ("reentrant", plain_loss),
    "not reentrant": ("non-reentrant", plain_loss),
    "reentrant in reentrant": ("reentrant inside", plain_loss),
    "not reentrant in not reentrant": ("non-reentrant inside", plain_loss),
    "reentrant over a node of the script's": ("reentrant over a node", plain_loss),
    "reentrant over writes into views": ("reentrant in place", plain_loss),
    "nodes of the forward pass inside a node": ("implicit", plain_loss),
    "the same beside reentrant": ("reentrant implicit", plain_loss),
    "a gradient's gradient": ("", penalised_loss),
    "a gradient's gradient of what is computed again": ("non-reentrant", penalised_loss),
    "a gradient's gradient through writes into views": ("in place", penalised_loss),
}


def traced(step: Callable[[], None], warm: int) -> list[TracedOperation]:
    """Return the operations of a step that follows ``warm`` others."""
    for _ in range(warm):
        step()
    return traced_operations(step)


def strangers(net: Net, seen: list[TracedOperation]) -> tuple[int, list[tuple[str, str, str, str]]]:
    """Return how many products there are, and those whose module is not the layer that their shapes indicate."""
    known = {frozenset(m.weight.shape): name for name, m in net.named_modules() if isinstance(m, nn.Linear)}
    products = [one for one in seen if one.product is not None]
    wrong = []
    for one in products:
        assert one.product is not None
        wanted = known[frozenset(width for shape, *_ in one.product.operands for width in shape) - {ROWS}]
        if one.module != wanted:
            wrong.append((one.op, one.phase, one.module, wanted))
    return len(products), wrong


def check(case: str, way: str, own: DeviceThread | None = None, *, warmups: Sequence[int] = (0, 1, 2, 3, 5)) -> None:
    """Compare modules at different distances between the numbers of both threads."""
    name, step = CASES[case]
    for plain, warm in itertools.product((0, 4), warmups):
        script = LastingThread()  # threads of their own, so that numbers begin at 0 in both and lie over each other
        torch.manual_seed(0)
        net = Net(name, plain=plain)

        def measure(net: Net = net, warm: int = warm) -> list[TracedOperation]:
            return traced(lambda: step(net), warm)

        with backward_in(way, own or LastingThread()):
            count, wrong = strangers(net, script.call(measure))
        assert not wrong, f"{plain} plain layers, {warm} steps before: {len(wrong)} of {count}: {wrong[:4]}"
        assert count >= 12


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", CASES)
def test_every_product_belongs_to_the_layer_of_its_shape(case: str, way: str) -> None:
    check(case, way)


ALL_CASES = """
import helpers_backward
thread = helpers_backward.DeviceThread()
import test_observe_threads as tests
for case in tests.CASES:
    tests.check(case, helpers_backward.WAYS[1], thread, warmups=(0, 2))
print(len(tests.CASES), "cases in the device's thread")
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(torch._C, "_acc"), reason="this torch makes no accelerator from Python")
def test_autograds_own_thread_gives_the_same_modules() -> None:
    """The engine itself, with the thread that it has for an accelerator; what the other tests have is a thread that is made like it."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ALL_CASES],
        env=os.environ | {"PYTHONPATH": os.pathsep.join((str(TESTS), str(Path(__file__).parent)))},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.splitlines()[-1:] == [f"{len(CASES)} cases in the device's thread"], done.stderr


@pytest.mark.parametrize("kind", [Tracer, PlacingTracer])
def test_an_operation_that_nothing_of_python_called_is_noted(
    monkeypatch: pytest.MonkeyPatch, kind: type[Tracer]
) -> None:
    """The thread that autograd has for a GPU runs no Python: there the mode is the outermost call of the stack."""
    tracer: Any = kind(OperandFormats(), device_type="cpu", flags=SimpleNamespace(recomputing=False))
    x = torch.ones(2, 2)
    raised: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda broken: raised.append(broken.exc_value))
    calls: list[tuple[Any, Any, Any]] = [
        (torch.ops.aten.mm.default, (x, x), {}),
        (torch.ops.aten._to_copy.default, (x,), {"dtype": torch.float16}),
        (torch.ops.aten.relu.default, (x,), {}),
    ]
    for number, (func, args, kwargs) in enumerate(calls, start=1):
        tracer._running = (func, args)
        _thread.start_new_thread(functools.partial(tracer.__torch_dispatch__, func, (), args, kwargs), ())
        for _ in range(1000):
            if len(tracer.trace.operations) + len(raised) == number:
                break
            time.sleep(0.01)
    assert raised == []
    assert {raw[0] for raw in tracer.trace.operations} == {func for func, _, _ in calls}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # what torch's compiler warns of differs by version
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", ["no checkpointing", "reentrant", "not reentrant", "reentrant in reentrant"])
def test_a_compiled_model_has_its_modules(case: str, way: str) -> None:
    name, _ = CASES[case]
    torch.manual_seed(0)
    net = Net(name, plain=2)
    net.compile(backend="aot_eager")
    x = torch.randn(ROWS, 5)
    with backward_in(way):
        record = mezzo.audit(lambda: net(x).square().mean().backward(), warmup=2)
    assert record.forced_eager
    layers = {name for name, m in net.named_modules() if isinstance(m, nn.Linear)}
    for phase in ("forward", "wgrad"):
        products = {o.module: o.count for o in record.operations if o.flops and o.phase == phase}
        assert products == dict.fromkeys(layers, 1), phase
