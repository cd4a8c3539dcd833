"""What an audit records about every operation: FLOPs against hand counts, modules against torch's ModuleTracker, phases."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.utils.checkpoint import checkpoint
from torch.utils.module_tracker import ModuleTracker

import mezzo
from mezzo.errors import SessionError
from mezzo.measure.flops import OperandFormats
from mezzo.observe.audit.operations import TracedOperation, interpret, listed_precision, weights_of
from mezzo.observe.module_names import Names
from mezzo.observe.observer import ModuleTree
from mezzo.observe.trace import LAST_NUMBER, NOWHERE, GraphNode, RawOperation, Trace
from mezzo.observe.tracer import Tracer
from mezzo.records import AuditRecord

pytestmark = pytest.mark.usefixtures("backward_way")

Forward = Callable[..., Tensor]


class Function(nn.Module):
    """A module whose weight is a parameter and whose forward is a function."""

    def __init__(self, function: Forward, *weight: int) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.randn(weight))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight)


def conv(**settings: int) -> Forward:
    return lambda x, w: F.conv2d(x, w, **settings)


PRODUCTS: dict[str, tuple[Forward, tuple[int, ...], tuple[int, ...], int]] = {
    "linear in three dimensions": (F.linear, (2, 5, 7), (3, 7), 2 * 2 * 5 * 7 * 3),
    "bmm": (torch.bmm, (3, 4, 6), (3, 6, 5), 2 * 3 * 4 * 6 * 5),
    "square matmul": (torch.matmul, (6, 6), (6, 6), 2 * 6 * 6 * 6),
    "strided convolution": (conv(stride=2), (2, 4, 9, 9), (6, 4, 3, 3), 2 * 2 * 6 * 4 * 9 * 16),
    "convolution in two groups": (conv(padding=1, groups=2), (2, 4, 8, 8), (6, 2, 3, 3), 2 * 2 * 6 * 2 * 9 * 64),
    "transposed convolution": (F.conv_transpose2d, (2, 4, 5, 5), (4, 6, 3, 3), 2 * 2 * 4 * 6 * 9 * 25),
}
"""Each way to find out what a product is of; ``measure/test_flops.py`` counts more kinds."""


@pytest.mark.parametrize("needs_dgrad", [True, False], ids=["input with a gradient", "input without"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_flops_by_phase_count_as_by_hand(name: str, needs_dgrad: bool) -> None:
    function, shape, weight, flops = PRODUCTS[name]
    model, x = Function(function, *weight), torch.randn(shape, requires_grad=needs_dgrad)
    record = mezzo.audit(lambda: model(x).sum().backward())
    phases = ("forward", "dgrad", "wgrad") if needs_dgrad else ("forward", "wgrad")
    assert record.flops_by_phase == {phase: {"fp32": flops} for phase in phases}
    assert {o.module for o in record.operations if o.flops} == {"Function"}


def test_attention_has_two_products_forward_and_five_backward_all_dgrad() -> None:
    q, k, v = (torch.randn(2, 3, n, 8, requires_grad=True) for n in (5, 7, 7))
    record = mezzo.audit(lambda: F.scaled_dot_product_attention(q, k, v).sum().backward())
    flops = 2 * 2 * 3 * 5 * 7 * (8 + 8)
    assert record.flops_by_phase == {"forward": {"fp32": flops}, "dgrad": {"fp32": flops * 5 // 2}}


def test_recomputed_products_are_a_phase_of_their_own() -> None:
    # The activation keeps its result: without it, checkpointing need not compute the product again.
    model, x = nn.Sequential(nn.Linear(7, 3), nn.Sigmoid()), torch.randn(5, 7, requires_grad=True)
    for reentrant in (False, True):
        record = mezzo.audit(lambda reentrant=reentrant: checkpoint(model, x, use_reentrant=reentrant).sum().backward())
        once = {"fp32": 2 * 5 * 7 * 3}
        assert record.flops_by_phase == {"forward": once, "recompute": once, "dgrad": once, "wgrad": once}
        assert {o.module for o in record.operations if o.flops} == {"0"}


def test_an_emulated_policy_counts_as_the_format_it_stands_for() -> None:
    model, x = nn.Linear(16, 8), torch.randn(4, 16)
    session = mezzo.Session(model, torch.optim.SGD(model.parameters(), lr=0.1), policy="bf16:arithmetic=emulated")

    def step() -> None:
        with session.autocast():
            loss = model(x).square().mean()
        session.step(loss)

    once = {"bf16": 2 * 4 * 16 * 8}
    record = mezzo.audit(step)
    assert record.flops_by_phase == {"forward": once, "wgrad": once}
    casts = Counter((c.phase, c.of, c.source, c.target) for c in record.casts)
    assert casts["forward", "weight", "fp32", "bf16"] == 1


# --- modules -------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, ins: int, outs: int) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(ins, outs, 3, padding=1), nn.BatchNorm2d(outs)
        self.second = nn.Conv2d(outs, outs, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm(self.first(x)))
        return F.relu(self.second(y) * 2 + y)


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class WithLoss(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net, self.criterion = net, nn.CrossEntropyLoss()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = self.criterion(self.net(x), y)
        return loss


def resnet() -> tuple[nn.Module, Tensor, Tensor]:
    net = nn.Sequential(Block(3, 8), Block(8, 8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))
    return WithLoss(net), torch.randn(2, 3, 8, 8), torch.randint(0, 5, (2,))


def gpt() -> tuple[nn.Module, Tensor, Tensor]:
    net = nn.Sequential(nn.Embedding(11, 16), Attention(16), Attention(16), nn.LayerNorm(16), nn.Linear(16, 11))
    last = nn.Sequential(net, nn.Flatten(0, 1))
    return WithLoss(last), torch.randint(0, 11, (2, 6)), torch.randint(0, 11, (12,))


class Tracked(Tracer):
    """A tracer that also records the modules that torch's ModuleTracker has for every operation."""

    def __init__(self, tracker: ModuleTracker) -> None:
        super().__init__(OperandFormats(), device_type="cpu")
        self.tracker = tracker
        self.said: list[set[str]] = []

    def _note(self, raw: tuple[Any, ...]) -> None:
        if not RawOperation._make(raw).hidden:
            self.said.append(set(self.tracker.parents))
        super()._note(raw)


def traced(make: Callable[[], tuple[nn.Module, Tensor, Tensor]]) -> list[tuple[TracedOperation, set[str]]]:
    torch.manual_seed(0)
    model, x, y = make()
    tracer = Tracked(ModuleTracker())
    tracer.start()
    with tracer.tracker:
        model(x, y).backward()
    tracer.stop()
    names = Names(tracer.trace.roots, ModuleTree())
    seen = interpret(tracer.trace, names, weights_of(names.roots, []))
    once = {id(one.raw): one for one in seen}
    assert len(once) == len(tracer.said)
    return list(zip(once.values(), tracer.said, strict=True))


@pytest.mark.parametrize("make", [resnet, gpt])
def test_every_operation_of_the_backward_pass_has_the_module_that_torch_tracks(
    make: Callable[[], tuple[nn.Module, Tensor, Tensor]],
) -> None:
    backward = [(one, said) for one, said in traced(make) if one.raw.node is not None]
    compared = 0
    for one, said in backward:
        assert one.module in dict(make()[0].named_modules()) or one.module == "WithLoss", one.op
        known = sorted(said - {"Global"}, key=len)
        if not known:
            continue
        chain = all(longer.startswith(f"{shorter}.") for shorter, longer in pairwise(known))
        name = "WithLoss" if one.module == "WithLoss" else f"WithLoss.{one.module}"
        assert name in known, f"{one.op}: {name} against {known}"
        if chain:  # torch's tracker leaves a module late where two branches have one input
            assert name == known[-1], one.op
            compared += 1
    assert compared > 0.6 * len(backward)


def test_the_forward_pass_has_the_modules_that_torch_tracks() -> None:
    for one, said in traced(gpt):
        if one.raw.node is None and one.module != "(script)":
            assert max(said - {"Global"}, key=len) == f"WithLoss.{one.module}"


def test_gradients_are_added_in_the_module_that_holds_the_parameter() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(2, 4)

    def step() -> None:
        for _ in range(2):
            model(x).sum().backward()
        for p in model.parameters():
            p.grad = None

    added = [o for o in mezzo.audit(step).operations if o.op == "add_" and o.phase == "wgrad"]
    assert {(o.module, o.count) for o in added} == {("0", 2), ("1", 2)}


# --- phases and bytes ----------------------------------------------------------------------------


def rows(record: AuditRecord, **wanted: str) -> list[tuple[str, int, int]]:
    found = [o for o in record.operations if all(getattr(o, k) == v for k, v in wanted.items())]
    return [(o.op, o.count, o.bytes) for o in found]


def test_every_operation_of_a_step_with_its_phase_and_bytes() -> None:
    model, x = nn.Linear(4, 2), torch.randn(3, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)

    def step() -> None:
        model(x).relu().sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9, foreach=False)
        optimizer.step()
        optimizer.zero_grad()

    record = mezzo.audit(step)
    weight, bias, out = 2 * 4 * 4, 2 * 4, 3 * 2 * 4
    assert rows(record, phase="forward") == [
        ("addmm", 1, bias + 3 * 4 * 4 + weight + out),
        ("relu", 1, 2 * out),
        ("sum", 1, out + 4),
        ("ones_like", 1, 4 + 4),
    ]
    assert [op for op, _, _ in rows(record, phase="dgrad")] == ["threshold_backward"]
    assert [op for op, _, _ in rows(record, phase="wgrad")] == ["mm", "sum"]
    assert [(op, n) for op, n, _ in rows(record, phase="optimizer", op="add_")] == [("add_", 2)]
    assert rows(record, phase="optimizer", op="mul_"), "clipping counts as the optimizer's"
    assert record.bytes == sum(o.bytes for o in record.operations)


def test_dtypes_in_and_out_under_autocast() -> None:
    model, x = nn.Linear(16, 8), torch.randn(4, 16)

    def step() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = model(x)
        y.float().sum().backward()

    operations = {(o.op, o.phase, o.module): o for o in mezzo.audit(step).operations}
    product = operations["addmm", "forward", "Linear"]
    assert (product.inputs, product.outputs, product.format) == (["bf16"], ["bf16"], "bf16")
    cast = operations["_to_copy", "wgrad", "Linear"]
    assert (cast.inputs, cast.outputs, cast.count) == (["bf16"], ["fp32"], 2)


ROUND_TRIPS: list[tuple[Callable[[Tensor], Tensor], list[tuple[str, bool]]]] = [
    (lambda x: x.float().to(torch.bfloat16), [("bf16 > fp32 > bf16", True)]),
    (lambda x: x.float().relu().to(torch.bfloat16), [("bf16 > fp32 > bf16", True)]),
    (lambda x: x.float().t().contiguous().to(torch.bfloat16), [("bf16 > fp32 > bf16", True)]),
    (lambda x: x.float().softmax(-1).to(torch.bfloat16), [("bf16 > fp32 > bf16", False)]),
    (lambda x: (x.float() * torch.tensor(2.0)).to(torch.bfloat16), [("bf16 > fp32 > bf16", True)]),
    (lambda x: x.float().masked_fill(torch.ones(4) > 0, 0).to(torch.bfloat16), [("bf16 > fp32 > bf16", True)]),
    (lambda x: (x.float() + torch.ones(4)).to(torch.bfloat16), []),
    (lambda x: (x.float() @ torch.ones(4, 4)).to(torch.bfloat16), []),
    (lambda x: x.float().to(torch.float16), []),
    (lambda x: x.float(), []),
]


@pytest.mark.parametrize(("function", "found"), ROUND_TRIPS)
def test_round_trips(function: Callable[[Tensor], Tensor], found: list[tuple[str, bool]]) -> None:
    x = torch.randn(4, 4, dtype=torch.bfloat16)
    record = mezzo.audit(lambda: function(x))
    assert [(t.formats, t.needless) for t in record.round_trips] == found
    assert all(t.bytes == 2 * (16 * 2 + 16 * 4) for t in record.round_trips)


@pytest.mark.parametrize(
    ("op", "precision"),
    [
        ("_softmax", "fp32"),
        ("_log_softmax_backward_data", "fp32"),
        ("native_layer_norm", "fp32"),
        ("native_layer_norm_backward", "fp32"),
        ("nll_loss_forward", "fp32"),
        ("linalg_vector_norm", "fp32"),
        ("pow", "fp32"),
        ("native_batch_norm", "follow"),
        ("add_", "follow"),
        ("mm", "lower"),
        ("never_heard_of", "follow"),
    ],
)
def test_the_precision_that_the_lists_give_an_operation_of_the_dispatcher(op: str, precision: str) -> None:
    assert listed_precision(op) == precision


@pytest.mark.parametrize("warmup", [0, 1])
def test_nothing_is_left_behind(warmup: int) -> None:
    model, x = nn.Linear(4, 2), torch.randn(3, 4)
    modules = torch.nn.modules.module
    hooks = [modules._global_forward_hooks, modules._global_forward_pre_hooks, _global_optimizer_pre_hooks]
    before = [len(h) for h in hooks]

    def broken() -> None:
        model(x)
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        mezzo.audit(broken, warmup=warmup)
    assert [len(h) for h in hooks] == before
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


def test_the_callers_stance_of_the_compiler_comes_back() -> None:
    model, x = nn.Linear(4, 2), torch.randn(3, 4)
    with torch.compiler.set_stance("eager_on_recompile"):
        mezzo.audit(lambda: model(x).sum().backward())
        assert torch._dynamo.eval_frame._stance.stance == "eager_on_recompile"


def test_audit_refuses_what_is_no_step() -> None:
    with pytest.raises(
        SessionError, match=r"audit\(step=3, warmup=1\): step is a function without arguments"
    ) as caught:
        mezzo.audit(3)  # type: ignore[arg-type]
    assert "mezzo.audit(lambda: train(batch))" in caught.value.hint


# --- memory that is used again ---------------------------------------------------------------------------------------------------

L = LAST_NUMBER
USED_AGAIN: dict[str, tuple[list[tuple[str, int | None, str, str]], list[str]]] = {
    # operations: name, number of the graph node, the memory that it reads and writes; the phases of those in backward passes
    "by another result of an operation": (
        [("mse_loss_backward", 3, "o", "a"), ("native_batch_norm_backward", 2, "a", "xab"), ("detach", L, "a", "a")],
        ["dgrad", "dgrad", "wgrad"],
    ),
    "by a gradient that is unscaled": (
        [("tanh_backward", 3, "o", "a"), ("sum", 2, "a", "g"), ("mul", L, "gs", "a"), ("detach", L, "a", "a")],
        ["dgrad", "wgrad", "wgrad", "wgrad"],
    ),
    "by the script, between two passes": (
        [("tanh_backward", 3, "o", "a"), ("add", None, "o", "a"), ("detach", L, "a", "a")],
        ["dgrad", "wgrad"],
    ),
    "through a cast": (
        [("sum", 3, "o", "a"), ("_to_copy", 2, "a", "b"), ("tanh_backward", 1, "o", "a"), ("add_", L, "pb", "p")],
        ["wgrad", "wgrad", "dgrad", "wgrad"],
    ),
}


@pytest.mark.parametrize(("operations", "phases"), USED_AGAIN.values(), ids=USED_AGAIN)
def test_memory_that_is_used_again_makes_no_gradient_of_a_weight(
    operations: list[tuple[str, int | None, str, str]], phases: list[str]
) -> None:
    def metas(places: str) -> list[tuple[int, torch.dtype, int]]:
        return [(ord(place), torch.float32, 64) for place in places]

    traced = []
    for name, number, reads, writes in operations:
        node = None if number is None else GraphNode(number, 0)
        packet = getattr(torch.ops.aten, name)
        func = packet.default if "default" in packet.overloads() else packet.Tensor
        rest = (False, False, None, "", False, False, (), "")
        traced.append(tuple(RawOperation(func, NOWHERE, node, metas(reads), metas(writes), *rest)))
    seen = interpret(Trace(traced, {1: NOWHERE}), Names([], ModuleTree()), set())
    assert [one.phase for one in seen if one.raw.node is not None] == phases
