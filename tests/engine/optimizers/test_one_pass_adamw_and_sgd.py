"""One-pass AdamW and SGD against torch's: arguments, states, layouts, missing gradients and long runs."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import mezzo
from helpers_engine import through_a_file
from mezzo.engine.gradients import not_finite
from mezzo.engine.kernels import reference
from mezzo.engine.optimizers import one_pass as module
from mezzo.engine.optimizers.one_pass import choose
from mezzo.errors import PolicyError, SessionError

FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
PAIRS: dict[str, tuple[Any, Any]] = {"AdamW": (mezzo.AdamW, torch.optim.AdamW), "SGD": (mezzo.SGD, torch.optim.SGD)}
both = pytest.mark.parametrize("name", list(PAIRS))
CASES: list[tuple[str, dict[str, Any]]] = [
    ("AdamW", {"lr": 1e-2}),
    ("AdamW", {"lr": 1e-2, "amsgrad": True, "maximize": True, "weight_decay": 0.1, "betas": (0.7, 0.9)}),
    ("SGD", {"lr": 1e-2}),
    ("SGD", {"lr": 1e-2, "momentum": 0.9, "dampening": 0.4, "weight_decay": 0.1}),
    ("SGD", {"lr": 1e-2, "momentum": 0.9, "nesterov": True, "maximize": True}),
]
every_case = pytest.mark.parametrize(("name", "changed"), CASES, ids=[f"{n} {c}" for n, c in CASES])


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def close(a: Tensor, b: Tensor, tolerance: float = 1e-6) -> None:
    torch.testing.assert_close(a.detach().double(), b.detach().double(), rtol=tolerance, atol=tolerance)


def new(*values: Tensor, dtype: torch.dtype | None = None) -> list[nn.Parameter]:
    return [nn.Parameter(v.detach().clone().to(v.dtype if dtype is None else dtype)) for v in values]


def feed(parameters: list[nn.Parameter], step: int) -> None:
    for i, p in enumerate(parameters):
        p.grad = normal(*p.shape, seed=100 * step + i).to(p.dtype)


def run(optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        feed([p for group in optimizer.param_groups for p in group["params"]], step)
        optimizer.step()


# --- arguments -------------------------------------------------------------------------------------------------------


@both
def test_arguments_are_torch_s_with_torch_s_defaults(name: str) -> None:
    ours, theirs = (inspect.signature(cls).parameters for cls in PAIRS[name])
    own = ["moments", "rounding"]  # what torch has no word for
    assert list(ours) == [*theirs, *own]
    for n in theirs:
        assert (ours[n].default, ours[n].kind) == (theirs[n].default, theirs[n].kind), n


HOW = {"AdamW": ("foreach", "capturable", "differentiable", "fused"), "SGD": ("foreach", "differentiable", "fused")}


@both
def test_torch_s_ways_to_compute_are_taken_and_have_no_effect(name: str) -> None:
    plain, told = new(normal(5)), new(normal(5))
    build = PAIRS[name][0]
    asked = build(told, lr=0.1, **dict.fromkeys(HOW[name], True))
    run(build(plain, lr=0.1), range(3))
    run(asked, range(3))
    assert torch.equal(plain[0], told[0])
    assert all(asked.param_groups[0][how] is True for how in HOW[name])
    group = PAIRS[name][1](new(normal(5))).state_dict()["param_groups"][0]
    assert set(group) - {"decoupled_weight_decay"} <= set(asked.state_dict()["param_groups"][0])


NESTEROV = "Nesterov's momentum needs a momentum above 0 and no dampening"
WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("AdamW", {"lr": -1.0}, "lr=-1.0; allowed: 0 or more"),
    ("AdamW", {"lr": float("nan")}, "lr=nan; allowed: 0 or more"),
    ("AdamW", {"eps": -1e-8}, "eps=-1e-08; allowed: 0 or more"),
    ("AdamW", {"weight_decay": -0.5}, "weight_decay=-0.5; allowed: 0 or more"),
    ("AdamW", {"betas": (1.0, 0.999)}, "beta1=1.0; allowed: from 0 to below 1"),
    ("AdamW", {"betas": (0.9, -0.1)}, "beta2=-0.1; allowed: from 0 to below 1"),
    ("SGD", {"lr": -0.1}, "lr=-0.1; allowed: 0 or more"),
    ("SGD", {"momentum": -0.9}, "momentum=-0.9; allowed: 0 or more"),
    ("SGD", {"weight_decay": -1}, "weight_decay=-1; allowed: 0 or more"),
    ("SGD", {"nesterov": True}, "nesterov=True with momentum=0.0 and dampening=0.0"),
    ("SGD", {"nesterov": True, "momentum": 0.9, "dampening": 0.1}, "nesterov=True with momentum=0.9 and dampening=0.1"),
]


@pytest.mark.parametrize(("name", "changed", "text"), WRONG)
def test_wrong_arguments(name: str, changed: dict[str, Any], text: str) -> None:
    ours, theirs = PAIRS[name]
    with pytest.raises(PolicyError) as error:
        ours(new(torch.ones(2)), **changed)
    hint = NESTEROV if "nesterov" in changed else f"choose {text.partition('=')[0]} inside that range"
    assert str(error.value) == f"{text}\n  hint: {hint}"
    if changed.get("lr") == changed.get("lr"):  # torch's SGD lets NaN pass
        with pytest.raises(ValueError):  # noqa: PT011 - torch refuses the same calls, in other words
            theirs(new(torch.ones(2)), **changed)


@both
@pytest.mark.parametrize("dtype", [FP64, torch.complex64])
def test_formats_that_the_kernels_do_not_know(name: str, dtype: torch.dtype) -> None:
    optimizer = PAIRS[name][0](new(torch.ones(2)))
    with pytest.raises(SessionError) as error:
        optimizer.add_param_group({"params": new(torch.ones(2, 3), dtype=dtype)})
    assert str(error.value) == (
        f"a parameter of shape (2, 3) is {dtype}; allowed: torch.float32, torch.float16, torch.bfloat16\n"
        f"  hint: use torch.optim.{name} for it"
    )
    assert len(optimizer.param_groups) == 1


@both
def test_a_closure_is_refused(name: str) -> None:
    with pytest.raises(SessionError) as error:
        PAIRS[name][0](new(torch.ones(2))).step(lambda: 1.0)
    assert str(error.value) == (
        f"{name}.step() got a closure; it updates from the gradients that are there\n"
        "  hint: call the closure yourself before step(), or use torch's optimizer of the same name"
    )


@both
def test_a_sparse_gradient_is_refused(name: str) -> None:
    table = nn.Embedding(5, 3, sparse=True)
    optimizer = PAIRS[name][0](table.parameters())
    table(torch.tensor([1, 2])).sum().backward()
    before = table.weight.detach().clone()
    for call in (optimizer.step, lambda: choose("cpu")[0].sum_of_squares([table.weight.grad])):
        with pytest.raises(SessionError) as error:
            call()
        assert str(error.value) == (
            "a gradient of shape (5, 3) is torch.sparse_coo; allowed: dense gradients\n"
            "  hint: build the embedding with sparse=False, or use torch.optim.SparseAdam for it"
        )
    assert torch.equal(table.weight, before)


@both
def test_a_weight_with_gaps_is_refused_and_its_neighbours_stay(name: str) -> None:
    whole = torch.ones(4, 8)
    part = nn.Parameter(whole[:, :4])
    part.grad = torch.ones(4, 8)[:, :4]
    with pytest.raises(SessionError) as error:
        PAIRS[name][0]([part], lr=1.0).step()
    assert str(error.value) == (
        "a parameter of shape (4, 4) has strides (8, 1); allowed: weights that fill one stretch of memory\n"
        "  hint: give it memory of its own: parameter.data = parameter.data.contiguous()"
    )
    assert torch.equal(whole, torch.ones(4, 8))


# --- states ----------------------------------------------------------------------------------------------------------


@every_case
@pytest.mark.parametrize("to_torch", [True, False])
def test_states_pass_between_torch_and_here(name: str, changed: dict[str, Any], to_torch: bool) -> None:
    ours, theirs = PAIRS[name]
    first, second = (ours, theirs) if to_torch else (theirs, ours)
    start = [normal(3, 4), normal(1030), normal(1).squeeze()]
    whole, begun = new(*start), new(*start)
    uninterrupted, before = theirs(whole, **changed), first(begun, **changed)
    run(uninterrupted, range(8))
    run(before, range(4))
    goes_on = new(*begun)
    after = second(goes_on, lr=99.0)  # every setting has to come from the state
    after.load_state_dict(through_a_file(before.state_dict()))
    run(after, range(4, 8))
    for a, b in zip(goes_on, whole, strict=True):
        close(a, b)
    assert after.param_groups[0]["lr"] == changed["lr"]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_copies_and_pickles_go_on_alike(copied: Callable[[Any], Any]) -> None:
    parameters = new(normal(5), dtype=BF16)
    optimizer = mezzo.AdamW(parameters, lr=0.1)
    optimizer.master_weights = False
    run(optimizer, range(2))
    twin = copied(optimizer)
    assert twin.master_weights is False
    run(optimizer, range(2, 4))
    run(twin, range(2, 4))
    assert torch.equal(twin.parameters()[0], parameters[0])
    assert twin.parameters()[0] is not parameters[0]


def test_a_state_of_a_torch_without_newer_settings_loads() -> None:
    parameters = new(normal(5))
    theirs = torch.optim.AdamW(parameters)
    run(theirs, range(1))
    state = theirs.state_dict()
    del state["param_groups"][0]["maximize"], state["param_groups"][0]["amsgrad"]
    ours = mezzo.AdamW(new(normal(5)))
    ours.load_state_dict(state)
    run(ours, range(1, 2))
    assert ours.param_groups[0]["maximize"] is False


def test_state_is_not_shared_with_what_was_loaded() -> None:
    source = mezzo.AdamW(new(normal(5)))
    run(source, range(2))
    state = source.state_dict()
    kept = copy.deepcopy(state)
    target = mezzo.AdamW(new(normal(5)))
    target.load_state_dict(state)
    run(target, range(2, 4))
    for key, value in kept["state"][0].items():
        assert torch.equal(source.state_dict()["state"][0][key], value), key


def test_settings_switched_on_later_begin_their_state() -> None:
    ours, theirs = new(normal(9)), new(normal(9))
    mine, other = mezzo.SGD(ours, lr=0.1), torch.optim.SGD(theirs, lr=0.1)
    for optimizer in (mine, other):
        run(optimizer, range(2))
        optimizer.param_groups[0].update(momentum=0.9, dampening=0.5)
        run(optimizer, range(2, 5))
    close(ours[0], theirs[0])
    adam = mezzo.AdamW(new(normal(9)))
    run(adam, range(1))
    adam.param_groups[0]["amsgrad"] = True
    run(adam, range(1, 2))
    state = adam.state[adam.parameters()[0]]
    assert torch.equal(state["max_exp_avg_sq"], state["exp_avg_sq"])


# --- which parameters, in which layout -------------------------------------------------------------------------------


@every_case
def test_late_frozen_missing_empty_and_tied_parameters(name: str, changed: dict[str, Any]) -> None:
    ours, theirs = PAIRS[name]

    def train(build: Any) -> list[nn.Parameter]:
        used, frozen, empty, late = new(normal(4, 5), normal(6), torch.empty(0, 3), normal(7))
        frozen.requires_grad_(False)
        tied = nn.ModuleList([nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)])
        tied[1].weight = tied[0].weight
        tied[0].weight.data.fill_(0.5)
        optimizer = build([{"params": [used, frozen, empty]}, {"params": list(tied.parameters())}], **changed)
        for step in range(7):
            if step == 3:
                optimizer.add_param_group({"params": [late], "lr": 0.5})
            used.grad = None if step in (0, 4) else normal(4, 5, seed=step)
            empty.grad = torch.zeros(0, 3)
            late.grad = normal(7, seed=step)
            optimizer.zero_grad() if step == 6 else None
            (tied[0](torch.ones(1)) * tied[1](torch.ones(1))).sum().backward()
            optimizer.step()
        return [used, frozen, empty, late, tied[0].weight]

    for a, b in zip(train(ours), train(theirs), strict=True):
        close(a, b)
    assert train(ours)[1].equal(normal(6))


@every_case
def test_groups_have_their_own_settings_and_formats(name: str, changed: dict[str, Any]) -> None:
    ours, theirs = PAIRS[name]
    start = [normal(5, seed=i) for i in range(4)]
    mixed = [nn.Parameter(v.to(d)) for v, d in zip(start, (FP32, FP16, BF16, FP32), strict=True)]
    wide = [nn.Parameter(p.detach().double()) for p in mixed]
    other = {"lr": 0.3, "weight_decay": 0.0, "maximize": True}
    for parameters, build in ((mixed, ours), (wide, theirs)):
        optimizer = build([{"params": parameters[:3]}, {"params": parameters[3:], **other}], **changed)
        for step in range(4):
            for i, p in enumerate(parameters):
                p.grad = normal(5, seed=10 * step + i).to(mixed[i].dtype).to(p.dtype)
            optimizer.step()
        if build is ours:
            masters = [optimizer.master(p) for p in mixed]
    for parameter, master, expected in zip(mixed, masters, wide, strict=True):
        close(parameter if master is None else master, expected)
    assert [m is None for m in masters] == [True, False, False, True]


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda t: t.contiguous(),
    "channels last": lambda t: t.contiguous(memory_format=torch.channels_last),
    "transposed": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "permuted": lambda t: t.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0),
    "with gaps": lambda t: torch.stack([t, t])[1:].expand(1, *t.shape).squeeze(0).repeat_interleave(2, -1)[..., ::2],
}


@pytest.mark.parametrize(("name", "changed"), [CASES[1], CASES[3]], ids=list(PAIRS))
@pytest.mark.parametrize("dtype", [FP32, FP16, BF16])
@pytest.mark.parametrize(
    ("of_weight", "of_gradient"),
    [(w, g) for w in list(LAYOUTS)[:4] for g in LAYOUTS if "contiguous" in (w, g) or w == g],
)
def test_any_layout(name: str, changed: dict[str, Any], dtype: torch.dtype, of_weight: str, of_gradient: str) -> None:
    results = []
    for weight_layout, gradient_layout in ((of_weight, of_gradient), ("contiguous", "contiguous")):
        parameter = nn.Parameter(LAYOUTS[weight_layout](normal(4, 3, 5, 2).to(dtype)))
        optimizer = PAIRS[name][0]([parameter], **changed)
        for step in range(3):
            parameter.grad = LAYOUTS[gradient_layout](normal(4, 3, 5, 2, seed=step).to(dtype))
            optimizer.step()
        assert parameter.is_contiguous() == (weight_layout == "contiguous")
        results.append((parameter, *(v.float() for v in optimizer.state_dict()["state"][0].values())))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@every_case
@pytest.mark.parametrize("dtype", [FP32, FP16, BF16])
@pytest.mark.parametrize("how", ["in training", "by a state"])
def test_a_layout_may_change(name: str, changed: dict[str, Any], dtype: torch.dtype, how: str) -> None:
    plain, moved = (nn.Parameter(normal(4, 3, 5, 2).to(dtype)) for _ in range(2))
    first, second = (PAIRS[name][0]([p], **changed) for p in (plain, moved))
    run(first, range(2))
    run(second, range(2))
    moved.data = LAYOUTS["channels last"](moved.data)
    if how == "by a state":
        again = PAIRS[name][0]([moved], **changed)
        again.load_state_dict(first.state_dict())
        second = again
    run(first, range(2, 4))
    run(second, range(2, 4))
    assert torch.equal(plain, moved)
    assert not moved.is_contiguous()


def test_a_master_belongs_to_its_format() -> None:
    parameter = nn.Parameter(normal(9).to(BF16))
    optimizer = mezzo.SGD([parameter], lr=0.1)
    run(optimizer, range(1))
    for dtype in (FP16, FP32, BF16):
        parameter.grad = None
        parameter.data = parameter.data.to(dtype)
        expected = parameter.detach().float() - 0.1 * normal(9, seed=0).to(dtype).float()
        run(optimizer, range(1))
        close(parameter.detach().float(), expected.to(dtype).float())
        master = optimizer.master(parameter)
        assert (master is None) == (dtype is FP32)


# --- learning rates --------------------------------------------------------------------------------------------------


@both
def test_the_rate_may_be_a_tensor(name: str) -> None:
    results = []
    for lr in (torch.tensor(0.1), 0.1):
        parameters = new(normal(6))
        optimizer = PAIRS[name][0](parameters, lr=lr)
        run(optimizer, range(3))
        if isinstance(lr, Tensor):
            lr.mul_(0.5)
        else:
            optimizer.param_groups[0]["lr"] = 0.05
        before = parameters[0].detach().clone()
        run(optimizer, range(3, 5))
        results.append((parameters[0], parameters[0].detach() - before))
    (tensor, _), (number, moved) = results
    close(tensor, number)
    unchanged = new(normal(6))
    optimizer = PAIRS[name][0](unchanged, lr=0.1)
    run(optimizer, range(3))
    before = unchanged[0].detach().clone()
    run(optimizer, range(3, 5))
    ratio = (moved / (unchanged[0].detach() - before)).abs()
    assert float(ratio.median()) == pytest.approx(0.5, rel=0.01), "half the rate moves half as far"


# --- fuzzing ---------------------------------------------------------------------------------------------------------

RATES, DECAYS = st.sampled_from([0.0, 1e-4, 0.1]), st.sampled_from([0.0, 0.3])
SHARED = {
    "lr": RATES,
    "weight_decay": DECAYS,
    "maximize": st.booleans(),
    "moments": st.sampled_from(["fp32", "bf16", "8bit"]),
}
BETAS = st.sampled_from([(0.9, 0.999), (0.0, 0.5), (0.4, 0.0)])
SETTINGS = {
    "AdamW": st.fixed_dictionaries({**SHARED, "betas": BETAS, "amsgrad": st.booleans()}),
    "SGD": st.fixed_dictionaries({**SHARED, "momentum": st.sampled_from([0.0, 0.9]), "dampening": DECAYS}),
}
PARAMETER = st.fixed_dictionaries(
    {
        "shape": st.lists(st.integers(0, 5), max_size=3).map(tuple) | st.integers(1020, 2052).map(lambda n: (n,)),
        "dtype": st.sampled_from([FP32, FP16, BF16]),
        "flipped": st.booleans(),
        "gradient_flipped": st.booleans(),
        "group": st.integers(0, 1),
        "given": st.lists(st.booleans(), min_size=5, max_size=5),
    }
)


def flip(tensor: Tensor, flipped: bool) -> Tensor:
    order = tuple(reversed(range(tensor.ndim)))
    return tensor.permute(order).contiguous().permute(order) if flipped else tensor


class Fuzz:
    """Run one drawn history with the kernels of ``choose`` or with the reference."""

    def __init__(self, plan: dict[str, Any], with_reference: bool) -> None:
        self.plan, self.with_reference = plan, with_reference
        self.parameters = [
            nn.Parameter(flip(normal(*p["shape"], seed=i).to(p["dtype"]), p["flipped"]))
            for i, p in enumerate(plan["parameters"])
        ]
        self.optimizer = self.build()

    def build(self) -> Any:
        groups = [
            [p for p, d in zip(self.parameters, self.plan["parameters"], strict=True) if d["group"] == g]
            for g in (0, 1)
        ]
        own = [{"params": ps, **s} for ps, s in zip(groups, self.plan["settings"], strict=True) if ps]
        optimizer = PAIRS[self.plan["name"]][0](own)
        optimizer.master_weights = self.plan["masters"]
        return optimizer

    def run(self) -> list[Tensor]:
        for step in range(5):
            if step == self.plan["resume"]:
                saved = through_a_file(self.optimizer.state_dict())
                self.optimizer = self.build()
                self.optimizer.load_state_dict(saved)
            self.one(step)
        state = self.optimizer.state_dict()["state"]
        return [*(p.detach() for p in self.parameters), *(t for k in sorted(state) for t in state[k].values())]

    def one(self, step: int) -> None:
        overflows = self.plan["overflows"][step]
        for i, (p, drawn) in enumerate(zip(self.parameters, self.plan["parameters"], strict=True)):
            gradient = normal(*p.shape, seed=50 * step + i).to(p.dtype) * 256
            if overflows and gradient.numel():
                gradient.view(-1)[-1] = float("inf") if i % 2 else float("nan")
            p.grad = flip(gradient, drawn["gradient_flipped"]) if drawn["given"][step] else None
        kernels = reference if self.with_reference else choose("cpu")[0]
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        found = not_finite(kernels.sum_of_squares(gradients)) if gradients else torch.zeros(())
        expected = any(not bool(g.isfinite().all()) for g in gradients)
        assert bool(found) == expected
        with mock.patch.object(module, "choose", return_value=(kernels, "")):
            self.optimizer.update(torch.tensor(0.7 / 256), found)


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
@both
def test_any_history_gives_the_reference_s_bits(name: str, data: st.DataObject) -> None:
    # The compiled kernels are exact: the same FP32 operations in the same order, uncontracted. torch's fused ones contract.
    plan = data.draw(
        st.fixed_dictionaries(
            {
                "name": st.just(name),
                "parameters": st.lists(PARAMETER, min_size=1, max_size=5),
                "settings": st.lists(SETTINGS[name], min_size=2, max_size=2),
                "overflows": st.lists(st.sampled_from([False, False, True]), min_size=5, max_size=5),
                "resume": st.integers(0, 5),
                "masters": st.booleans(),
            }
        )
    )
    fast, exact = Fuzz(plan, False).run(), Fuzz(plan, True).run()
    for a, b in zip(fast, exact, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        if choose("cpu")[0].__name__.endswith("cpu"):
            assert torch.equal(a, b)
        elif all(s["moments"] == "fp32" for s in plan["settings"]):  # a last bit may turn the rounding of smaller ones
            torch.testing.assert_close(a, b, rtol=1e-2 if a.element_size() == 2 else 1e-5, atol=1e-5)


# --- a long run ------------------------------------------------------------------------------------------------------


def overflow_at(step: int) -> float | None:
    return {37: float("inf"), 38: float("nan"), 39: -float("inf")}.get(step % 101)


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_ten_thousand_updates_follow_grad_scaler_and_float64() -> None:
    generator = torch.Generator().manual_seed(1)
    start, goal = torch.randn(2, 64, generator=generator)
    slopes = torch.logspace(-2, 1, 64)
    half, single, exact = nn.Parameter(start.half()), nn.Parameter(start.clone()), nn.Parameter(start.double())
    for p in (single, exact):
        p.data.copy_(half.data)  # all begin from the same values
    ours = mezzo.AdamW([half], lr=1e-3)
    torch_s, oracle = (
        torch.optim.AdamW([single], lr=1e-3, foreach=False),
        torch.optim.AdamW([exact], lr=1e-3, foreach=False),
    )
    scale = mezzo.DynamicScale(2.0**16, growth_interval=20)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=20)
    scaler.scale(torch.zeros(()))  # a scaler that has scaled nothing does not step
    ours_path, torch_path, skips, injected = [], [], 0, 0
    noise, now = torch.randn(10_000, 64, generator=generator), scaler.get_scale()
    for step in range(10_000):
        gradient = (slopes * (exact.detach().float() - goal) + noise[step]) * now
        gradient = gradient.half()  # overflows by itself where the scale has grown too far
        bad = overflow_at(step)
        if bad is not None:
            gradient[step % 64] = bad
            injected += 1
        half.grad, single.grad = gradient, gradient.float()
        exact.grad = gradient.double() / now
        found = not_finite(choose("cpu")[0].sum_of_squares([gradient]))
        factor = scale.inverse()
        assert factor is not None
        ours.update(factor, found)
        scale.update(found)
        finite = bool(gradient.isfinite().all())
        skips += not finite
        if finite:
            oracle.step()
        scaler.step(torch_s)
        scaler.update()
        ours_path.append(scale._scale.item())
        torch_path.append(now := scaler.get_scale())
    assert ours_path == torch_path
    assert len(set(ours_path)) > 5
    assert skips > injected + 50  # some found by the scale itself
    assert float(ours.state[half]["step"]) == 10_000 - skips
    master = ours.master(half)
    assert master is not None
    apart, torch_s_apart = (float((w.double() - exact).norm().detach()) for w in (master, single))
    assert 0 < apart <= torch_s_apart / 4, (apart, torch_s_apart)  # 1 - lr * decay in FP32 costs torch that much
    assert torch.equal(half, master.half())


@both
def test_a_learning_rate_on_another_device_is_refused(name: str) -> None:
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    optimizer = PAIRS[name][0]([weight], lr=0.1)
    optimizer.param_groups[0]["lr"] = torch.tensor(0.1)
    optimizer.step()
    optimizer.param_groups[0]["lr"] = torch.tensor(0.1, device="meta")
    with pytest.raises(mezzo.SessionError, match="lr is a tensor on meta; allowed: a number, or a tensor on the CPU"):
        optimizer.step()
