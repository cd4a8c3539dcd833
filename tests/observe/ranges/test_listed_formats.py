"""Which gradients count as 16-bit: those that the op lists leave in 16 bits, however the script writes its loss."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mezzo
from helpers_engine import casting
from mezzo.launch.torch import switched
from mezzo.observe.ranges.listed_formats import ListedFormats, OffRegions
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


# --- What a script computes where it turns autocast off itself counts as FP32, as under mezzo run ---


OFF = functools.partial(torch.autocast, "cpu", enabled=False)
ON = functools.partial(torch.autocast, "cpu", dtype=torch.bfloat16)
Forward = Callable[["Net", Tensor], Tensor]


class Net(nn.Module):
    """Two layers, and a tail of one more that a case computes as it likes."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.first, self.tail, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self._as_asked = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self._as_asked(self, self.first(x)))  # type: ignore[no-any-return]


def plain(net: Net, h: Tensor) -> Tensor:
    return net.tail(h)  # type: ignore[no-any-return]


def inside(net: Net, h: Tensor) -> Tensor:
    with OFF():
        return net.tail(h.float())  # type: ignore[no-any-return]


def nested_off(net: Net, h: Tensor) -> Tensor:
    with ON(), OFF(), OFF():
        return net.tail(h.float())  # type: ignore[no-any-return]


def on_again(net: Net, h: Tensor) -> Tensor:
    with OFF(), ON():
        return net.tail(h)  # type: ignore[no-any-return]


def after_inner(net: Net, h: Tensor) -> Tensor:
    with OFF():
        with ON():
            h = h * 2
        return net.tail(h.float())  # type: ignore[no-any-return]


def after_error(net: Net, h: Tensor) -> Tensor:
    try:
        with OFF():
            raise ValueError
    except ValueError:
        return net.tail(h)  # type: ignore[no-any-return]


@torch.autocast("cpu", enabled=False)
def decorated(net: Net, h: Tensor) -> Tensor:
    return net.tail(h.float())  # type: ignore[no-any-return]


def of_cuda(net: Net, h: Tensor) -> Tensor:
    with torch.autocast("cuda", enabled=False):
        return net.tail(h.float())  # type: ignore[no-any-return]


class Doubled(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx: Any, h: Tensor) -> Tensor:
        return 2 * h

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


class Same(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx: Any, h: Tensor) -> Tensor:
        return 2 * h

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


class Case(NamedTuple):
    name: str
    forward: Forward
    kept: bool
    """Whether the tail is FP32 under the policy."""


CASES = [
    Case("plain", plain, False),
    Case("inside", inside, True),
    Case("nested", nested_off, True),
    Case("on again", on_again, False),
    Case("after an inner region", after_inner, True),
    Case("after an error", after_error, False),
    Case("decorator", decorated, True),
    Case("CUDA, for which the CPU stands in", of_cuda, not torch.cuda.is_available()),
]


def steps_of(net: nn.Module, loss: Callable[[Tensor], Tensor], *, around: Callable[[], Any] | None = None) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for x in torch.randn(3, 16, 8, generator=torch.Generator().manual_seed(0)):
        optimizer.zero_grad()
        with around() if around is not None else ON():
            value = loss(net(x))
        value.backward()
        optimizer.step()


def kept_of(net: nn.Module, loss: Callable[[Tensor], Tensor] = torch.sum, **more: Any) -> dict[tuple[str, str], bool]:
    record = mezzo.ranges(lambda: steps_of(net, loss, **more), policy="fp16")
    return {(t.kind, t.name.removeprefix("Net.")): t.kept_fp32 for t in record.tensors}


@contextmanager
def formats(module: nn.Module) -> Iterator[set[torch.dtype]]:
    """Collect the formats of a module's outputs in training steps under FP16."""
    found: set[torch.dtype] = set()
    with switched(Policy.parse("fp16")):
        handle = module.register_forward_hook(lambda _, __, output: found.add(output.dtype))
        yield found
        handle.remove()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.filterwarnings("ignore:.*CUDA is not available.*:UserWarning")
def test_a_region_without_autocast_counts_as_fp32(case: Case) -> None:
    torch.manual_seed(0)
    net = Net(case.forward)
    kept = kept_of(net)
    for kind, name in (
        ("activations", "tail"),
        ("activation gradients", "tail"),
        ("weight gradients", "tail.weight"),
        ("weight gradients", "tail.bias"),
    ):
        assert kept[kind, name] == case.kept, (kind, name)
    for name in ("first", "last"):
        assert not kept["activations", name]
        assert not kept["weight gradients", f"{name}.weight"]
    with formats(net.tail) as found:  # the same script under the policy
        steps_of(net, torch.sum)
    assert found == {torch.float32 if case.kept else torch.float16}


@pytest.mark.parametrize(("function", "kept"), [(Doubled, True), (Same, False)])
def test_a_function_that_casts_its_inputs_is_fp32(function: type[torch.autograd.Function], kept: bool) -> None:
    class Custom(nn.Module):
        def forward(self, h: Tensor) -> Tensor:
            return function.apply(h)  # type: ignore[no-any-return,no-untyped-call]

    net = Net(plain)
    net.tail = Custom()  # type: ignore[assignment]
    assert kept_of(net)["activations", "tail"] == kept
    with formats(net.tail) as found:
        steps_of(net, torch.sum)
    assert found == {torch.float32 if kept else torch.float16}


def test_a_loss_without_autocast_is_fp32() -> None:
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Linear(4, 4)

        def forward(self, y: Tensor) -> Tensor:
            with OFF():
                return F.mse_loss(self.scale(y.float()), torch.zeros(16, 4))

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.loss = nn.Linear(8, 4), Loss()

        def forward(self, x: Tensor) -> Tensor:
            return self.loss(self.net(x))  # type: ignore[no-any-return]

    kept = kept_of(Whole())
    assert not kept["activations", "net"]
    assert kept["activations", "loss.scale"]
    assert kept["weight gradients", "loss.scale.weight"]
    assert kept["activation gradients", "loss.scale"]


def test_a_policy_opens_its_own_region_in_a_module_that_is_called_without_autocast() -> None:
    net = Net(plain)
    kept = kept_of(net, around=OFF)
    assert not any(kept["activations", name] for name in ("first", "tail", "last"))
    with formats(net.tail) as found:
        steps_of(net, torch.sum, around=OFF)
    assert found == {torch.float16}


def test_a_frozen_module_without_autocast_is_fp32() -> None:
    net = Net(inside)
    net.first.requires_grad_(False)
    net.tail.requires_grad_(False)
    kept = kept_of(net)
    assert kept["activations", "tail"]
    assert not kept["activations", "first"]


def test_regions_that_are_over_are_dropped() -> None:
    regions = OffRegions()
    for _ in range(100):
        regions.leave(regions.enter(off=True, in_module=True))
    made = (torch.ones(1, requires_grad=True) * 2).grad_fn
    assert not regions.cover(made)
    regions.enter(off=True, in_module=True)
    regions.forget()
    assert len(regions._numbers) == 1
    assert regions.cover((torch.ones(1, requires_grad=True) * 2).grad_fn)
