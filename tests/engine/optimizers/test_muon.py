"""Muon against torch's own and its author's arithmetic: updates, what is trained how, states, sessions, two processes."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.optim._muon import _zeropower_via_newtonschulz as torchs_newton_schulz

import distributed_runs
import mezzo
from helpers_engine import batches, mlp, randn, same_bits, spoil, through_a_file
from mezzo.engine.optimizers import muon as module
from mezzo.engine.optimizers.muon import orthogonalized
from mezzo.errors import PolicyError, SessionError
from oracles import muon as author
from processes import left_by_ranks

BF16 = torch.bfloat16
ITERATION: dict[str, Any] = {"coefficients": (author.A, author.B, author.C), "steps": 5, "eps": 1e-7}
SHAPES = [(8, 8), (1, 9), (9, 1), (16, 48), (64, 24), (128, 128), (200, 77)]


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> None:
    """Multiply in torch's own BF16 kernels, whatever this machine's units: then the arithmetic is torch's."""
    monkeypatch.setattr(module, "_units", lambda device_type: (True, "as torch does"))


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Multiply in FP32, so that results do not depend on this machine's units."""
    monkeypatch.setattr(module, "_units", lambda device_type: (False, "as without units"))


def feed(parameters: list[nn.Parameter], step: int) -> None:
    for number, p in enumerate(parameters):
        p.grad = randn(*p.shape, seed=100 * step + number).to(p.dtype)


def run(optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        feed([p for group in optimizer.param_groups for p in group["params"]], step)
        optimizer.step()


def new(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(randn(*shape, seed=7 + number).to(dtype)) for number, shape in enumerate(shapes)]


# --- Newton-Schulz ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
def test_native_products_give_torch_s_bits(shape: tuple[int, int]) -> None:
    matrix = randn(*shape)
    expected = torchs_newton_schulz(matrix, *ITERATION.values())
    assert same_bits([orthogonalized(matrix.to(BF16), **ITERATION, native=True)], [expected])


def units(matrix: Tensor) -> Tensor:
    """What BF16 units make of a matrix that accumulate exactly: each product in float64, rounded once."""
    a, b, c = ITERATION["coefficients"]
    wide = matrix if matrix.size(0) <= matrix.size(1) else matrix.mT
    x = (wide / wide.norm().clamp(min=1e-7)).double()
    for _ in range(5):
        gram = (x @ x.mT).to(BF16).double()
        polynomial = (b * gram + c * gram @ gram).to(BF16).double()
        x = (a * x + polynomial @ x).to(BF16).double()
    return x if matrix.size(0) <= matrix.size(1) else x.mT


@pytest.mark.parametrize("shape", SHAPES)
def test_emulated_products_are_those_of_exact_units_but_for_single_roundings(shape: tuple[int, int]) -> None:
    matrix = randn(*shape).to(BF16)
    found, expected = orthogonalized(matrix, **ITERATION, native=False), units(matrix)
    assert found.dtype is BF16
    # FP32 sums that fall on the other side of a tie: one step of BF16 in a product, which five iterations amplify.
    assert float((found.double() - expected).norm() / expected.norm()) < 0.012


def error(found: Tensor, matrix: Tensor) -> float:
    exact = author.straightened(matrix.double())
    return float((found.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if 1 not in shape])
def test_it_is_nearer_to_float64_than_the_author_s_reference(shape: tuple[int, int]) -> None:
    matrix = randn(*shape).to(BF16)
    ours, theirs = orthogonalized(matrix, **ITERATION, native=False), author.straightened(matrix)
    assert error(ours, matrix) < 0.7 * error(theirs, matrix)  # which rounds each term of a sum
    assert error(ours, matrix) < 0.025


def test_a_matrix_of_zeros_stays() -> None:
    for native in (True, False):
        assert not orthogonalized(torch.zeros(3, 5, dtype=BF16), **ITERATION, native=native).any()


def with_values(singular: list[float], columns: int) -> Tensor:
    """A matrix with known singular values."""
    left, right = (torch.linalg.qr(randn(n, n, seed=n).double())[0] for n in (len(singular), columns))
    return (left @ torch.diag(torch.tensor(singular)).double() @ right[: len(singular)]).float()


@pytest.mark.parametrize("native", [True, False])
def test_singular_values_follow_the_polynomial(native: bool) -> None:
    singular = [1.0, 0.5, 0.2, 0.05]
    expected = [s / math.sqrt(sum(v * v for v in singular)) for s in singular]
    for _ in range(5):
        expected = [author.A * s + author.B * s**3 + author.C * s**5 for s in expected]
    found = orthogonalized(with_values(singular, 7).to(BF16), **ITERATION, native=native)
    # A matrix of these, rounded to BF16, has singular values of its own, 0.002 off.
    assert torch.linalg.svdvals(found.double()).tolist() == pytest.approx(sorted(expected, reverse=True), abs=0.05)


# --- one update -------------------------------------------------------------------------------------------------------

SETTINGS: list[dict[str, Any]] = [
    {"weight_decay": 0.0},
    {"weight_decay": 0.0, "nesterov": False, "momentum": 0.8},
    {"weight_decay": 0.0, "adjust_lr_fn": "match_rms_adamw", "ns_steps": 3, "ns_coefficients": (2.0, -1.5, 0.5)},
    {"weight_decay": 0.0, "adjust_lr_fn": "original", "lr": 0.3, "eps": 100.0},
    {},
    {"lr": 0.02, "weight_decay": 0.5},
]


@pytest.mark.parametrize("changed", SETTINGS, ids=str)
def test_torch_s_bits_before_and_after_newton_schulz(changed: dict[str, Any], native: None) -> None:
    ours, theirs = new((12, 20), (20, 12), (9, 9), (1, 5)), new((12, 20), (20, 12), (9, 9), (1, 5))
    mine, other = mezzo.Muon(ours, **changed), torch.optim.Muon(theirs, **changed)
    for steps in (range(1), range(1, 6)):
        run(mine, steps)
        run(other, steps)
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(mine.state[a]["momentum_buffer"], other.state[b]["momentum_buffer"])
            if changed.get("weight_decay") == 0.0:
                assert torch.equal(a, b)
            else:  # torch rounds the decayed weight as well: half a step of FP32 for each update
                torch.testing.assert_close(a, b, rtol=0, atol=2 * steps.stop * torch.finfo(torch.float32).eps)


@pytest.mark.parametrize("shape", [(12, 20), (20, 12), (9, 9)])
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_the_author_s_momentum_to_the_bit_and_his_step_but_for_rounding(
    shape: tuple[int, int], dtype: torch.dtype, emulated: None
) -> None:
    """Masters are FP32: BF16 gradients lose nothing more, whereas the reference's momentum is in the weight's format."""
    (weight,) = new(shape, dtype=dtype)
    values, momentum = weight.detach().float().clone(), torch.zeros(shape)
    optimizer = mezzo.Muon([weight], lr=0.02, weight_decay=0.1)
    for step in range(4):
        run(optimizer, range(step, step + 1))
        assert weight.grad is not None
        settings = {"lr": 0.02, "weight_decay": 0.1, "beta": 0.95, "form": torch.float64}
        before, (values, momentum) = values, author.updated(values, weight.grad.float(), momentum, **settings)
        assert torch.equal(optimizer.state[weight]["momentum_buffer"], momentum)
        kept = weight.detach() if dtype is torch.float32 else optimizer.master(weight)
        assert kept is not None
        moved = (values - before).norm()
        assert float((kept - values).norm() / moved) < 0.03 * (step + 1)


def test_it_runs_once_an_update_on_whole_matrices() -> None:
    model = mlp(6, 5, 3)
    groups = mezzo.Muon.groups(model, adamw_names=[], adamw={"lr": 0.01})
    session = mezzo.Session(model, mezzo.Muon(groups), policy="bf16-master", accumulate=3)
    with mock.patch.object(module, "orthogonalized", wraps=orthogonalized) as newton_schulz:
        for x, y in batches(6):
            with session.autocast():
                loss = nn.functional.cross_entropy(model(x), y)
            session.step(loss)
    assert [tuple(call.args[0].shape) for call in newton_schulz.call_args_list] == [(5, 6), (3, 5)] * 2


def test_a_step_inside_autocast_is_the_same(emulated: None) -> None:
    inside, outside = new((6, 9)), new((6, 9))
    run(mezzo.Muon(outside), range(3))
    optimizer = mezzo.Muon(inside)
    with torch.autocast("cpu", dtype=torch.float16):
        run(optimizer, range(2))
    model = nn.Linear(2, 2)
    with mezzo.Session(model, mezzo.SGD(model.parameters()), policy="fp16").autocast():
        run(optimizer, range(2, 3))
    assert torch.equal(inside[0], outside[0])


@pytest.mark.parametrize("last", [torch.contiguous_format, torch.channels_last])
def test_a_convolution_s_kernel_is_a_matrix_with_a_row_for_each_output_channel(last: Any, emulated: None) -> None:
    (kernel,), (matrix,) = new((4, 3, 2, 2)), new((4, 12))
    kernel.data = matrix.detach().view(4, 3, 2, 2).contiguous(memory_format=last)
    first, second = mezzo.Muon([kernel]), mezzo.Muon([matrix])
    for step in range(3):
        matrix.grad = randn(4, 12, seed=step)
        kernel.grad = matrix.grad.view(4, 3, 2, 2)
        first.step()
        second.step()
    assert torch.equal(kernel.flatten(1), matrix)
    assert kernel.is_contiguous(memory_format=last)


# --- arguments, and what is trained how ------------------------------------------------------------------------------


def test_arguments_are_torch_s_with_torch_s_defaults() -> None:
    ours, theirs = (inspect.signature(cls).parameters for cls in (mezzo.Muon, torch.optim.Muon))
    assert list(ours) == [*theirs, "moments", "rounding"]
    for name in theirs:
        assert (ours[name].default, ours[name].kind) == (theirs[name].default, theirs[name].kind), name


NAMED = (
    "the parameter{} of shape {} is no matrix; allowed for Muon: 2 dimensions, or the 4 or 5 of a convolution's kernel"
)
TO_ADAMW = "give it to AdamW, in a group with use_muon=False; mezzo.Muon.groups(model, ...) makes both groups"
NO_RATE = "a group with use_muon=False has no lr; allowed: AdamW's own, since Muon's is many times larger"
REFUSED: list[tuple[Callable[[], Any], type[Exception], str, str]] = [
    (lambda: mezzo.Muon(new((3,))), SessionError, NAMED.format("", (3,)), TO_ADAMW),
    (lambda: mezzo.Muon(new((3, 4, 2))), SessionError, NAMED.format("", (3, 4, 2)), TO_ADAMW),
    (lambda: mezzo.Muon(nn.Linear(2, 3).named_parameters()), SessionError, NAMED.format(" 'bias'", (3,)), TO_ADAMW),
    (
        lambda: mezzo.Muon([{"params": new((3,)), "use_muon": False}]),
        SessionError,
        NO_RATE,
        "add it to the group: {'params': ..., 'use_muon': False, 'lr': 3e-4}",
    ),
    (
        lambda: mezzo.Muon.groups(mlp(2, 2), adamw_names=["0", "head"], adamw={"lr": 1.0}),
        SessionError,
        "adamw_names has 'head', which is no module or parameter of Sequential",
        "print the names: [name for name, _ in model.named_parameters()]",
    ),
    (
        lambda: mezzo.Muon.groups(mlp(2, 2), adamw_names=["*"], adamw={"lr": 1.0}),
        SessionError,
        "Sequential has no matrix that adamw_names=['*'] leaves to Muon",
        "take names out of adamw_names, or train with mezzo.AdamW",
    ),
    (
        lambda: mezzo.Muon(new((2, 2)), momentum=1.0),
        PolicyError,
        "momentum=1.0; allowed: from 0 to below 1",
        "choose momentum inside that range",
    ),
    (
        lambda: mezzo.Muon(new((2, 2)), ns_steps=0),
        PolicyError,
        "ns_steps=0; allowed: from 1 to below 100",
        "choose ns_steps inside that range",
    ),
    (
        lambda: mezzo.Muon(new((2, 2)), ns_coefficients=(1.0, 2.0)),  # type: ignore[arg-type]
        PolicyError,
        "ns_coefficients=(1.0, 2.0); allowed: three numbers",
        "pass the factors of the first, third and fifth power",
    ),
    (
        lambda: mezzo.Muon(new((2, 2)), adjust_lr_fn="rms"),  # type: ignore[arg-type]
        PolicyError,
        "adjust_lr_fn='rms'; allowed: None, original, match_rms_adamw",
        "choose adjust_lr_fn from these",
    ),
]


@pytest.mark.parametrize(("build", "kind", "text", "hint"), REFUSED, ids=[text[:40] for _, _, text, _ in REFUSED])
def test_refused(build: Callable[[], Any], kind: type[Exception], text: str, hint: str) -> None:
    with pytest.raises(kind) as caught:
        build()
    assert str(caught.value) == f"{text}\n  hint: {hint}"


def test_a_refused_group_is_not_added() -> None:
    optimizer = mezzo.Muon(new((2, 2)))
    with pytest.raises(SessionError):
        optimizer.add_param_group({"params": new((3,))})
    assert len(optimizer.param_groups) == 1


class Net(nn.Module):
    """One parameter of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 6)
        self.place = nn.Parameter(torch.zeros(4, 6))
        self.patches = nn.Conv2d(6, 6, 2, bias=False)
        self.signal = nn.Conv1d(6, 6, 2, bias=False)
        self.attend = nn.MultiheadAttention(6, 2)
        self.norm = nn.LayerNorm((4, 6))
        self.last = nn.Linear(6, 11)
        self.tied = nn.Linear(6, 11, bias=False)
        self.tied.weight = self.words.weight


MATRICES = ["patches.weight", "attend.in_proj_weight", "attend.out_proj.weight"]
GROUPS: list[tuple[list[str], list[str]]] = [
    ([], ["place", *MATRICES, "last.weight"]),
    (["place", "last"], MATRICES),
    (["place", "la*", "attend.*_proj*"], ["patches.weight"]),
]


@pytest.mark.parametrize(("named", "expected"), GROUPS)
def test_groups_of_a_model(named: list[str], expected: list[str]) -> None:
    model = Net()
    by_muon, by_adamw = mezzo.Muon.groups(model, adamw_names=named, adamw={"lr": 3e-4, "betas": (0.8, 0.95)})
    names = [name for name, _ in model.named_parameters()]
    assert [name for name, _ in by_muon["params"]] == expected
    assert [name for name, _ in by_adamw["params"]] == [name for name in names if name not in expected]
    groups = mezzo.Muon([by_muon, by_adamw], lr=0.02).param_groups
    settings = [{key: group[key] for key in ("lr", "weight_decay", "eps", "use_muon")} for group in groups]
    assert settings == [
        {"lr": 0.02, "weight_decay": 0.1, "eps": 1e-7, "use_muon": True},
        {"lr": 3e-4, "weight_decay": 0.01, "eps": 1e-8, "use_muon": False},
    ]
    assert groups[1]["betas"] == (0.8, 0.95)


def test_the_rest_is_trained_by_mezzo_s_adamw() -> None:
    rest, alone = new((5,), (3, 4)), new((5,), (3, 4))
    settings = {"lr": 0.01, "betas": (0.8, 0.95), "amsgrad": True}
    optimizer = mezzo.Muon([{"params": rest, "use_muon": False, **settings}, {"params": new((4, 4))}])
    run(optimizer, range(4))
    run(mezzo.AdamW(alone, **settings), range(4))  # type: ignore[arg-type]
    assert same_bits([p.detach() for p in rest], [p.detach() for p in alone])


def test_a_session_says_who_trains_what_and_how(emulated: None) -> None:
    model = mlp(6, 9, 3)
    optimizer = mezzo.Muon(mezzo.Muon.groups(model, adamw_names=["2"], adamw={"lr": 0.01}))
    said = mezzo.Session(model, optimizer, policy="bf16-master").explain()
    of_interest = ("update", "Muon", "AdamW", "Newton-Schulz")
    assert [(c.what, c.value, c.reason) for c in said if c.what in of_interest] == [
        ("update", "one pass", "plain torch operations: Muon has no kernel for cpu"),
        ("Muon", "1 parameter", "use_muon=True: 0.weight"),
        ("Newton-Schulz", "BF16, emulated: FP32 products of BF16 values, rounded", "as without units"),
        ("AdamW", "3 parameters", "use_muon=False: 0.bias, 2.weight, 2.bias"),
    ]


# --- states -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("to_torch", [True, False])
def test_states_pass_between_torch_and_here(to_torch: bool, native: None) -> None:
    classes: list[Any] = [mezzo.Muon, torch.optim.Muon]
    first, second = classes if to_torch else reversed(classes)
    whole, begun = new((4, 6), (7, 3)), new((4, 6), (7, 3))
    run(torch.optim.Muon(whole, weight_decay=0.0, momentum=0.8), range(6))
    before = first(begun, weight_decay=0.0, momentum=0.8)
    run(before, range(3))
    after = second(begun, lr=99.0)  # every setting has to come from the state
    after.load_state_dict(through_a_file(before.state_dict()))
    run(after, range(3, 6))
    assert same_bits([p.detach() for p in begun], [p.detach() for p in whole])


def test_a_state_of_the_author_s_reference_loads(native: None) -> None:
    """Its groups have fewer settings, and its counts of steps are numbers."""
    shapes: list[list[tuple[int, ...]]] = [[(5,)], [(4, 6)]]
    old, young = ([new(*some) for some in shapes] for _ in range(2))

    def build(parameters: list[list[nn.Parameter]]) -> mezzo.Muon:
        adamw: dict[str, Any] = {
            "params": parameters[0],
            "use_muon": False,
            "lr": 0.01,
            "betas": (0.8, 0.95),
            "eps": 1e-10,
        }
        return mezzo.Muon([adamw, {"params": parameters[1]}], momentum=0.8, weight_decay=0.0)

    before, after = build(old), build(young)
    run(before, range(3))
    state = before.state_dict()
    kept = (
        {"params", "lr", "betas", "eps", "weight_decay", "use_muon"},
        {"params", "lr", "momentum", "weight_decay", "use_muon"},
    )
    groups = [
        {k: v for k, v in group.items() if k in names} for group, names in zip(state["param_groups"], kept, strict=True)
    ]
    states = {0: {**state["state"][0], "step": 3}, 1: {"momentum_buffer": state["state"][1]["momentum_buffer"]}}
    for p, q in zip([*old[0], *old[1]], [*young[0], *young[1]], strict=True):
        q.data.copy_(p)
    after.load_state_dict(through_a_file({"state": states, "param_groups": groups}))
    run(before, range(3, 6))
    run(after, range(3, 6))
    assert same_bits([old[0][0].detach(), old[1][0].detach()], [young[0][0].detach(), young[1][0].detach()])


def test_a_state_of_groups_in_another_order_is_refused() -> None:
    vector, matrix = ({"params": new((3,)), "use_muon": False, "lr": 0.1}, {"params": new((2, 2))})
    saved = mezzo.Muon([dict(vector), dict(matrix)]).state_dict()
    with pytest.raises(SessionError) as caught:
        mezzo.Muon([dict(matrix), dict(vector)]).load_state_dict(saved)
    assert str(caught.value) == (
        "group 0 of the state has use_muon=False, and this optimizer's has use_muon=True\n"
        "  hint: build the groups in the order of the run that saved the state"
    )


def session_of(policy: str, *, hooked: bool = False, **settings: Any) -> tuple[mezzo.Session, nn.Module]:
    model = mlp(6, 9, 3)
    optimizer = mezzo.Muon(mezzo.Muon.groups(model, adamw_names=[], adamw={"lr": 0.01}), lr=0.02, **settings)
    if hooked:
        optimizer.register_step_post_hook(lambda *_: None)
    return mezzo.Session(model, optimizer, policy=policy), model


def train(
    session: mezzo.Session, model: nn.Module, numbers: range, *, overflow: int | None = None
) -> list[list[Tensor]]:
    """Train on numbered batches; return each one's gradients, unscaled, in FP32."""
    seen = []
    for number in numbers:
        x, y = batches(8)[number]
        scale = session.loss_scale
        with session.autocast():
            loss = nn.functional.cross_entropy(model(x), y)
        session.backward(spoil(loss) if number == overflow else loss)
        seen.append([p.grad.detach().float() / scale for p in model.parameters() if p.grad is not None])
        session.update()
    return seen


STORED = [
    ("fp16-master", {"moments": "8bit"}),
    ("bf16-master", {"moments": "bf16"}),
    ("bf16-pure", {"moments": "8bit", "rounding": "stochastic"}),
]


@pytest.mark.parametrize(("policy", "settings"), STORED)
def test_a_loaded_session_goes_on_bit_for_bit(policy: str, settings: dict[str, Any]) -> None:
    session, model = session_of(policy, **settings)
    train(session, model, range(3))
    saved = through_a_file(session.state_dict())
    again, twin = session_of(policy, **settings)
    again.load_state_dict(saved)
    train(session, model, range(3, 6))
    train(again, twin, range(3, 6))
    assert same_bits([p.detach() for p in model.parameters()], [p.detach() for p in twin.parameters()])


BYTES = {
    # weight + gradient + master + momentum, in bytes a parameter; a block's exponent adds 1/128.
    ("fp16-master", "fp32", "nearest"): 2 + 2 + 4 + 4,
    ("bf16-master", "fp32", "nearest"): 2 + 2 + 2 + 4,
    ("bf16-master", "8bit", "nearest"): 2 + 2 + 2 + 1 + 1 / 128,
    ("bf16-pure", "bf16", "stochastic"): 2 + 2 + 2,
    ("bf16-pure", "8bit", "stochastic"): 2 + 2 + 1 + 1 / 128,
}


@pytest.mark.parametrize(("policy", "moments", "rounding"), BYTES)
def test_persistent_bytes_a_parameter(policy: str, moments: Any, rounding: Any) -> None:
    model = nn.Linear(256, 256, bias=False)
    optimizer = mezzo.Muon(model.parameters(), moments=moments, rounding=rounding)
    session = mezzo.Session(model, optimizer, policy=policy)
    with session.autocast():
        loss = model(torch.ones(2, 256)).float().square().mean()
    session.backward(loss)
    weight = model.weight
    assert weight.grad is not None
    kept = [weight, weight.grad]
    optimizer.step()
    kept += [tensor for name, tensor in optimizer.state[weight].items() if name != "step"]
    assert sum(tensor.nbytes for tensor in kept) / weight.numel() == BYTES[policy, moments, rounding]


# --- sessions ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hooked", [False, True], ids=["one pass", "the optimizer's own step"])
@pytest.mark.parametrize("policy", ["fp32", "fp16:init_scale=64", "fp16-master:init_scale=64", "bf16-master"])
def test_a_session_makes_torch_s_updates_of_fp32_masters(policy: str, hooked: bool, native: None) -> None:
    """By hand: torch's Muon and mezzo's AdamW over FP32 weights, from the gradients that the session's model got."""
    session, model = session_of(policy, hooked=hooked, weight_decay=0.0)
    ours = list(model.parameters())
    wide = [nn.Parameter(p.detach().float()) for p in mlp(6, 9, 3).parameters()]
    by_hand = [
        torch.optim.Muon([p for p in wide if p.ndim == 2], lr=0.02, weight_decay=0.0),
        mezzo.AdamW([p for p in wide if p.ndim == 1], lr=0.01),
    ]
    for gradients in train(session, model, range(6), overflow=2 if "fp16" in policy else None):
        if not all(bool(g.isfinite().all()) for g in gradients):
            continue
        for p, gradient in zip(wide, gradients, strict=True):
            p.grad = gradient
        for optimizer in by_hand:
            optimizer.step()
    assert session.skipped == ("fp16" in policy)
    for p, expected in zip(ours, wide, strict=True):
        master = session.masters.values(p)
        assert torch.equal(p if master is None else master, expected)
        assert (master is None) == ("master" not in policy)


@pytest.mark.parametrize("moments", ["fp32", "8bit"])
def test_an_update_reads_nothing_back(moments: str) -> None:
    session, model = session_of("fp16-master:init_scale=64", moments=moments)
    train(session, model, range(2))
    with session.autocast():
        loss = model(batches(1)[0][0]).square().mean()
    session.backward(loss)
    with distributed_runs.Watch() as watch:
        session.update()
    assert watch.host_reads == 0


@pytest.mark.parametrize("policy", ["fp16", "fp16-master"])
@pytest.mark.parametrize("moments", ["fp32", "8bit"])
def test_a_skipped_update_changes_nothing(policy: str, moments: str) -> None:
    session, model = session_of(f"{policy}:init_scale=64", moments=moments)
    train(session, model, range(2))

    def everything() -> list[Tensor]:
        kept = [t for state in session.optimizers[0].state.values() for t in state.values()]
        return [t.detach().clone() for t in [*model.parameters(), *kept]]

    before = everything()
    train(session, model, range(2, 3), overflow=2)
    assert session.skipped == 1
    assert same_bits(everything(), before)
    train(session, model, range(3, 4))
    assert not same_bits(everything(), before)


# --- two processes ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> list[dict[str, Any]]:
    return left_by_ranks(distributed_runs.__file__, distributed_runs.WORLD, tmp_path_factory, worker_id)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp", "hsdp"])
def test_two_processes_give_one_s_bits(kind: str, results: list[dict[str, Any]]) -> None:
    weights, momenta, _, skipped = distributed_runs.matrices("one", "mezzo.Muon")
    assert len(momenta) == 2
    assert skipped == 1
    for found in results:
        said = found[f"matrices {kind} mezzo.Muon"]
        assert not isinstance(said, str), said
        assert same_bits(said[0] + said[1], weights + momenta)
        assert said[3] == skipped


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize("optimizer", ["mezzo.Muon", "mezzo.Muon 8bit"])
def test_a_state_of_two_processes_resumes_bit_for_bit(kind: str, optimizer: str, results: list[dict[str, Any]]) -> None:
    for found in results:
        said = found[f"state {kind} {optimizer}"]
        assert not isinstance(said, str), said
        (kept, restored), counts, _ = said
        assert same_bits(kept, restored)
        assert counts[0] == counts[1]
        assert same_bits(*found[f"snapshot {kind} {optimizer}"])


def test_one_text_is_no_list_of_names() -> None:
    with pytest.raises(SessionError) as caught:
        mezzo.Muon.groups(nn.Linear(4, 4), adamw_names="head", adamw={"lr": 1e-3})
    assert (caught.value.message, caught.value.hint) == (
        "adamw_names='head' is one text; allowed: a list of names",
        "write adamw_names=['head']",
    )
