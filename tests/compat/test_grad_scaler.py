"""The face of torch's GradScaler against torch's class: what both refuse, what both accept, and what others ask of a scaler."""

from __future__ import annotations

import copy
import math
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers_engine import spoil
from mezzo.compat.grad_scaler import GradScaler
from mezzo.errors import MezzoError, PolicyError, SessionError
from mezzo.launch.torch import switched
from mezzo.policy import Policy

Torchs = torch.amp.GradScaler
INF = math.inf


def outcome(run: Callable[[], Any]) -> Any:
    """Return what ``run`` returns, or "refused"."""
    try:
        return run()
    except Exception:
        return "refused"


# --- what others ask ---------------------------------------------------------------------------------------------------


def test_it_is_torchs_scaler_to_who_asks() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the classes of torch.cuda.amp and torch.cpu.amp say that they are deprecated
        scaler = GradScaler("cpu")
    kinds = (torch.amp.GradScaler, torch.GradScaler, torch.cuda.amp.GradScaler, torch.cpu.amp.grad_scaler.GradScaler)
    assert all(isinstance(scaler, kind) for kind in kinds)
    assert not isinstance(Torchs("cpu"), GradScaler)


def test_what_other_libraries_read_of_a_scaler_is_there() -> None:
    ours, theirs = GradScaler("cpu", init_scale=8.0), Torchs("cpu", init_scale=8.0)
    for scaler in (ours, theirs):
        assert scaler._scale is None
        scaler.scale(torch.ones(()))
    assert torch.equal(ours._scale, theirs._scale)  # type: ignore[arg-type]
    assert set(vars(theirs)) <= set(vars(ours))
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.tensor([INF, 1.0])
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    assert float(ours._check_inf_per_device(optimizer)[torch.device("cpu")]) == 1.0


# --- constructors ------------------------------------------------------------------------------------------------------

CONSTRUCTORS: list[dict[str, Any]] = [
    {},
    *({"growth_factor": v} for v in (-1.0, 0.0, 0.5, 1.0, 1.0 + 1e-9, 1.5, 2.0, 1e30, INF, -INF, math.nan)),
    *({"backoff_factor": v} for v in (-0.5, 0.0, 0.25, 0.999, 1.0, 1.5, INF, -INF, math.nan)),
    *({"init_scale": v} for v in (1e-30, 0.5, 3.0, 65536.0, 3.4e38, 1e39, 1e300, INF, math.nan)),
    *({"growth_interval": v} for v in (-1, 0, 1, 2000)),
    {"growth_factor": 0.5, "enabled": False},
    {"init_scale": 1e39, "enabled": False},
    {"backoff_factor": 2.0, "growth_factor": 0.1},
]


@pytest.mark.parametrize("arguments", CONSTRUCTORS, ids=str)
def test_constructors_refuse_what_torchs_refuses(arguments: dict[str, Any]) -> None:
    """Torch refuses a scale beyond FP32 when the first loss is scaled; here it is refused when it is given."""

    def used(kind: type[Torchs], **more: Any) -> tuple[bool, float]:
        scaler = kind("cpu", **arguments, **more)
        scaler.scale(torch.ones(()))
        scale = scaler.get_scale()
        return scaler.is_enabled(), 0.0 if math.isnan(scale) else scale

    assert outcome(lambda: used(GradScaler, min_scale=2.0**-140)) == outcome(lambda: used(Torchs))


MESSAGES: list[tuple[dict[str, Any], str]] = [
    ({"growth_factor": 1.0}, "growth_factor=1.0; allowed: above 1"),
    ({"backoff_factor": 1.0}, "backoff_factor=1.0; allowed: below 1"),
    ({"init_scale": 1e39}, "init_scale=1e+39; allowed: up to 3.40282e+38"),
    ({"hysteresis": 0}, "hysteresis=0; allowed: a whole number of 1 or more"),
    ({"hysteresis": 1.5}, "hysteresis=1.5; allowed: a whole number of 1 or more"),
    ({"min_scale": 0.0}, "min_scale=0.0; allowed: above 0, up to max_scale=inf"),
    ({"min_scale": 4.0, "max_scale": 2.0}, "min_scale=4.0; allowed: above 0, up to max_scale=2"),
]


@pytest.mark.parametrize(("arguments", "text"), MESSAGES, ids=lambda v: str(v)[:40])
def test_what_a_constructor_says(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(PolicyError) as caught:
        GradScaler("cpu", **arguments)
    assert str(caught.value) == f"{text}\n  hint: choose {next(iter(arguments))} inside that range"


# --- calls in every order ----------------------------------------------------------------------------------------------


class Loop:
    """A scaler and an optimizer with one weight."""

    def __init__(self, kind: type[Torchs], *, enabled: bool = True, gradient: Tensor | None = None) -> None:
        self.scaler = kind("cpu", init_scale=4.0, growth_interval=1, enabled=enabled)
        self.weight = nn.Parameter(torch.ones(2))
        self.weight.grad = torch.ones(2) if gradient is None else gradient
        self.optimizer = torch.optim.SGD([self.weight], lr=0.5)


Call = Callable[[Loop], Any]
CALLS: dict[str, Call] = {
    "scale": lambda loop: loop.scaler.scale(torch.ones(())),
    "unscale": lambda loop: loop.scaler.unscale_(loop.optimizer),
    "step": lambda loop: loop.scaler.step(loop.optimizer),
    "update": lambda loop: loop.scaler.update(),
    "set": lambda loop: loop.scaler.update(8.0),
    "zero": lambda loop: loop.optimizer.zero_grad(),
    "pickle": lambda loop: pickle.dumps(loop.scaler),
}
ORDERS = [
    *((name,) for name in CALLS),
    *(("scale", name) for name in CALLS),
    *(("scale", first, second) for first in CALLS for second in CALLS),
    *(("scale", "step", "update", first, second) for first in CALLS for second in CALLS),
    *((first, "scale", "step", "update") for first in CALLS),
    ("scale", "unscale", "step", "unscale"),
    ("scale", "unscale", "step", "step"),
    ("scale", "unscale", "zero", "step", "update"),
    ("scale", "step", "set", "step", "update"),
]


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("order", ORDERS, ids="-".join)
def test_calls_are_refused_in_the_orders_in_which_torchs_are(order: tuple[str, ...], enabled: bool) -> None:
    def seen(kind: type[Torchs]) -> list[Any]:
        loop, found = Loop(kind, enabled=enabled), []
        for name in order:
            ended = outcome(lambda name=name: CALLS[name](loop))
            found.append(ended == "refused" if isinstance(ended, (str, bytes)) or ended is None else float(ended))
            found.append((loop.weight.tolist(), loop.scaler.get_scale()))
        return found

    assert seen(GradScaler) == seen(Torchs)


SETS: list[Any] = [
    *(2.0, INF, 0.0, 3, "2", torch.tensor(2.0), torch.tensor([2.0]), torch.tensor([1.0, 2.0])),
    *(torch.tensor(2.0, requires_grad=True), torch.tensor(2.0, device="meta")),
]


@pytest.mark.parametrize("new", SETS, ids=str)
def test_a_new_scale_is_refused_where_torchs_is(new: Any) -> None:
    def seen(kind: type[Torchs]) -> Any:
        loop = Loop(kind)
        loop.scaler.scale(torch.ones(()))
        return outcome(lambda: (loop.scaler.update(new), loop.scaler.get_scale())[1])

    assert seen(GradScaler) == seen(Torchs)


WHOLE = {"scale": 8.0, "growth_factor": 3.0, "backoff_factor": 0.25, "growth_interval": 5, "_growth_tracker": 2}
STATES: list[dict[str, Any]] = [
    *({}, {"scale": 8.0}, WHOLE),
    *({key: value for key, value in WHOLE.items() if key != missing} for missing in ("_growth_tracker", "scale")),
]


@pytest.mark.parametrize("before", [True, False], ids=["used", "new"])
@pytest.mark.parametrize("state", STATES, ids=str)
def test_a_state_is_refused_where_torchs_is(state: dict[str, Any], before: bool) -> None:
    def seen(kind: type[Torchs]) -> Any:
        scaler = kind("cpu", init_scale=2.0)
        if before:
            scaler.scale(torch.ones(()))
        ended = outcome(lambda: scaler.load_state_dict(dict(state)))
        own = scaler.state_dict()
        return ended, [own[name] for name in ("scale", "growth_factor", "growth_interval", "_growth_tracker")]

    found, wanted = seen(GradScaler), seen(Torchs)
    assert found[0] == wanted[0]
    if wanted[0] != "refused":  # torch changes what it reads before it misses an entry
        assert found == wanted


ODD: dict[str, Call] = {
    "a closure by name": lambda loop: loop.scaler.step(loop.optimizer, closure=lambda: 1.0),
    "a number": lambda loop: loop.scaler.scale(3.0),  # type: ignore[call-overload]
    "None": lambda loop: loop.scaler.scale(None),  # type: ignore[call-overload]
    "a dict": lambda loop: loop.scaler.scale({"a": torch.ones(())}),  # type: ignore[call-overload]
    "FP16 gradients": lambda loop: loop.scaler.unscale_(half()),
    "growth": lambda loop: (loop.scaler.set_growth_factor(0.5), loop.scaler.get_growth_factor())[1],
    "a copy": lambda loop: copy.deepcopy(loop.scaler).get_scale(),
    "an empty state": lambda loop: loop.scaler.load_state_dict({}),
}


def half() -> torch.optim.Optimizer:
    parameter = nn.Parameter(torch.zeros(2, dtype=torch.float16))
    parameter.grad = torch.ones_like(parameter)
    return torch.optim.SGD([parameter])


@pytest.mark.parametrize("name", ODD)
def test_odd_calls_are_refused_where_torchs_are(name: str) -> None:
    def seen(kind: type[Torchs]) -> Any:
        loop = Loop(kind)
        loop.scaler.scale(torch.ones(()))
        ended = outcome(lambda: ODD[name](loop))
        return "iterable" if isinstance(ended, map) else ended

    assert seen(GradScaler) == seen(Torchs)


FIRST = "{}() before any loss was scaled; allowed: after scale(loss) and its backward pass"
NO_GRADIENTS = "the optimizer's parameters have no gradients; allowed: gradients of a backward pass since zero_grad()"
ALONE = "update() without a check of gradients; allowed: after step() or unscale_() of an optimizer"
PICKLED = "a GradScaler is pickled between step() and update(); allowed: at the beginning of an iteration"
CLOSURE = "step() got a closure; allowed: none, since a closure's gradients cannot be checked before the step"
NARROW = "unscale_() with FP16 gradients; allowed: FP32 ones, since FP16 would lose what the scale kept from underflow"
TEXTS: list[tuple[str, str]] = [
    ("update", FIRST.format("update")),
    ("set", FIRST.format("update")),
    ("step", FIRST.format("step")),
    ("unscale", FIRST.format("unscale_")),
    ("scale, unscale, unscale", "unscale_(SGD) after unscale_() in the same update; allowed: once, before step()"),
    ("scale, step, unscale", "unscale_(SGD) after step() in the same update; allowed: once, before step()"),
    ("scale, step, step", "step(SGD) was called twice in one update; allowed: once"),
    ("scale, zero, step", NO_GRADIENTS),
    ("scale, update", ALONE),
    ("scale, step, pickle", PICKLED),
    ("scale, a closure by name", CLOSURE),
    ("scale, FP16 gradients", NARROW),
    ("a number", "scale(3.0); allowed: a tensor, or a list or tuple of tensors"),
    ("an empty state", "load_state_dict({}): the state is a disabled scaler's; allowed: a state with a scale"),
]


@pytest.mark.parametrize(("order", "text"), TEXTS, ids=[order for order, _ in TEXTS])
def test_what_a_wrong_call_says(order: str, text: str) -> None:
    *before, last = ({**CALLS, **ODD}[name] for name in order.split(", "))
    loop = Loop(GradScaler)
    for call in before:
        call(loop)
    with pytest.raises(SessionError) as caught:
        last(loop)
    assert caught.value.message == text
    assert isinstance(caught.value, MezzoError)


# --- optimizers that scale by themselves ---------------------------------------------------------------------------------


class TakesScaler(torch.optim.SGD):
    """As torch's contract has it: ``step`` takes the scaler, unscales and skips by itself."""

    _step_supports_amp_scaling = True

    def step(self, closure: Any = None, *, grad_scaler: Any = None) -> Any:  # type: ignore[override]
        self.given = grad_scaler
        grad_scaler.unscale_(self)
        found = grad_scaler._found_inf_per_device(self).values()
        if not any(bool(f) for f in found):
            super().step(closure)
        return "stepped"


class TakesTensors(torch.optim.SGD):
    """The newer contract: the scale and the flag are attributes while ``step`` runs."""

    _step_supports_amp_scaling = True
    grad_scale: Tensor | None
    found_inf: Tensor

    def step(self, closure: Any = None) -> Any:
        self.given = (None if self.grad_scale is None else float(self.grad_scale), float(self.found_inf))
        return "stepped"


@pytest.mark.filterwarnings("ignore:GradScaler is going to stop passing itself:FutureWarning")
@pytest.mark.parametrize("gradient", [2.0, INF])
@pytest.mark.parametrize(("build", "unscaled"), [(TakesScaler, False), (TakesTensors, False), (TakesTensors, True)])
def test_an_optimizer_that_scales_itself_is_given_what_torch_gives(build: Any, gradient: float, unscaled: bool) -> None:
    def seen(kind: type[Torchs]) -> Any:
        loop = Loop(kind, gradient=torch.full((2,), gradient))
        optimizer = build([loop.weight], lr=0.5)
        loop.scaler.scale(torch.ones(()))
        if unscaled:
            loop.scaler.unscale_(optimizer)
        returned = loop.scaler.step(optimizer)
        given = optimizer.given is loop.scaler if build is TakesScaler else optimizer.given
        loop.scaler.update()
        assert not hasattr(optimizer, "grad_scale")
        return returned, given, loop.weight.tolist(), loop.scaler.get_scale()

    ours = seen(GradScaler)
    assert ours == seen(Torchs)
    assert ours[0] == "stepped"
    assert ours[3] == (2.0 if gradient == INF else 8.0)


def test_a_scaler_that_is_handed_on_says_what_torchs_says() -> None:
    loop = Loop(GradScaler)
    loop.scaler.scale(torch.ones(()))
    with pytest.warns(FutureWarning, match="GradScaler is going to stop passing itself"):
        loop.scaler.step(TakesScaler([loop.weight], lr=0.5))


def test_a_product_of_scales_is_handed_to_a_fused_optimizer_that_has_one() -> None:
    for kind in (GradScaler, Torchs):
        loop = Loop(kind)
        optimizer = TakesTensors([loop.weight], lr=0.5)
        optimizer.grad_scale = torch.tensor(3.0)
        loop.scaler.scale(torch.ones(()))
        loop.scaler.step(optimizer)
        assert optimizer.given == (12.0, 0.0)


# --- beyond torch's ------------------------------------------------------------------------------------------------------


def test_hysteresis_floor_and_ceiling_through_real_steps() -> None:
    loop = Loop(GradScaler)
    bounds = {"init_scale": 8.0, "min_scale": 4.0, "max_scale": 16.0}
    loop.scaler = scaler = GradScaler("cpu", **bounds, growth_interval=2, hysteresis=2)
    scales = []
    for bad in (True, False, True, True, True, True, False, False, False, False, False, False):
        scaler.scale(torch.ones(()))
        loop.weight.grad = torch.full((2,), INF if bad else 1.0)
        scaler.step(loop.optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    assert scales == [8.0, 8.0, 8.0, 4.0, 4.0, 4.0, 4.0, 8.0, 8.0, 16.0, 16.0, 16.0]
    assert scaler.skipped == 5


@pytest.mark.parametrize("way", [copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))])
def test_a_copy_continues_with_everything(way: Callable[[Any], Any]) -> None:
    loop = Loop(GradScaler, gradient=torch.full((2,), INF))
    loop.scaler = GradScaler("cpu", init_scale=8.0, hysteresis=2)
    loop.scaler.scale(torch.ones(()))
    loop.scaler.step(loop.optimizer)
    loop.scaler.update()
    twin = way(loop.scaler)
    assert (twin.get_scale(), twin.skipped, twin.state_dict()) == (8.0, 1, loop.scaler.state_dict())
    twin.scale(torch.ones(()))
    loop.weight.grad = torch.full((2,), INF)
    twin.step(loop.optimizer)
    twin.update()
    assert (twin.get_scale(), twin.skipped, loop.scaler.skipped) == (4.0, 2, 1)


# --- under mezzo run ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [GradScaler, Torchs])
@pytest.mark.parametrize("command", [None, "fp32", "fp16:init_scale=64"])
def test_a_launched_script_is_recorded_with_either(command: str | None, kind: type[Torchs]) -> None:
    with switched(None if command is None else Policy.parse(command)) as (run, _):
        model = nn.Linear(4, 1, bias=False)
        nn.init.constant_(model.weight, 0.5)
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=1.0), kind("cpu", init_scale=256.0)
        for number in range(3):
            loss = model(torch.ones(2, 4)).float().mean()
            optimizer.zero_grad()
            scaler.scale(spoil(loss) if number == 1 and command is None else loss).backward()
            scaler.step(optimizer)
            scaler.update()
    steps = run.update.recorder.steps()
    assert steps.loss == ([2.0, -2.0, -2.0] if command is None else [2.0, -2.0, -6.0])
    assert steps.skipped == [command is None and number == 1 for number in range(3)]
    assert scaler.is_enabled() == (command is None)
    assert steps.loss_scale == {None: [256.0, 128.0, 128.0], "fp32": []}.get(command, [64.0] * 3)
