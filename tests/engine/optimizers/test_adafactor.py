"""Adafactor against torch's in float64 and counts by hand; its eps under 16-bit weights; states, sessions, two processes."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import distributed_runs
import mezzo
from helpers_engine import batches, mlp, randn, same_bits, spoil, through_a_file
from mezzo.engine.kernels.storage import round_to_bf16, streams
from mezzo.errors import PolicyError
from processes import left_by_ranks

BF16, FP32 = torch.bfloat16, torch.float32
SHAPES = [(6, 9), (5,), (4, 3, 2, 2), (1, 7), (3, 1)]
SETTINGS: list[dict[str, Any]] = [
    {},
    {"lr": 0.3, "weight_decay": 0.1, "maximize": True},
    {"eps": (0.5, 0.2), "d": 3.0, "beta2_decay": -0.3},
    {"eps": (0.0, 0.0), "lr": 1.0},
    {"eps": (None, 5.0), "lr": 0.1},
]


def new(*shapes: tuple[int, ...], dtype: torch.dtype = FP32) -> list[nn.Parameter]:
    return [nn.Parameter(randn(*shape, seed=7 + number).to(dtype)) for number, shape in enumerate(shapes)]


def run(optimizer: torch.optim.Optimizer, steps: range, *, size: float = 1.0, form: torch.dtype = FP32) -> None:
    for step in steps:
        for number, p in enumerate(p for group in optimizer.param_groups for p in group["params"]):
            p.grad = (size * randn(*p.shape, seed=100 * step + number)).to(form).to(p.dtype)
        optimizer.step()


def in_float64(parameters: list[nn.Parameter], **settings: Any) -> tuple[torch.optim.Optimizer, list[nn.Parameter]]:
    """Take torch's Adafactor over float64 copies, with the eps that FP32 weights have."""
    wide = [nn.Parameter(p.detach().double()) for p in parameters]
    floor, smallest = settings.pop("eps", (None, 1e-3))
    eps = (torch.finfo(FP32).eps if floor is None else floor, smallest)
    return torch.optim.Adafactor(wide, eps=eps, **settings), wide


@pytest.mark.parametrize("changed", SETTINGS, ids=str)
@pytest.mark.parametrize("dtype", [FP32, torch.float16, BF16])
def test_updates_are_those_of_float64(changed: dict[str, Any], dtype: torch.dtype) -> None:
    ours = new(*SHAPES, dtype=dtype)
    optimizer = mezzo.Adafactor(ours, **changed)
    exact, wide = in_float64(ours, **changed)
    run(optimizer, range(5), form=dtype)
    run(exact, range(5), form=dtype)
    for p, expected in zip(ours, wide, strict=True):
        master = p.detach() if dtype is FP32 else optimizer.master(p)
        assert master is not None
        torch.testing.assert_close(master.double(), expected.detach(), rtol=2e-6, atol=2e-6)
        for name, kept in exact.state[expected].items():
            found = optimizer.state[p][name].double()
            torch.testing.assert_close(found, kept.double().reshape(found.shape), rtol=2e-6, atol=0)


def test_a_first_update_by_hand() -> None:
    """Gradients 3 and 4 in a row: mean squares 9 and 16, of the row 12.5; each estimate is its own square, so the update is 1 and 1."""
    weight = nn.Parameter(torch.tensor([[2.0, 2.0]]))
    weight.grad = torch.tensor([[3.0, 4.0]])
    optimizer = mezzo.Adafactor([weight], lr=0.5, weight_decay=0.25)
    optimizer.step()
    state = optimizer.state[weight]
    assert (state["row_var"].tolist(), state["col_var"].tolist()) == ([[12.5]], [[9.0, 16.0]])
    # 2 - 0.5 * 0.25 * 2 - 0.5 * (root mean square of the weight, 2) * 1
    assert weight.tolist() == [pytest.approx([0.75, 0.75], abs=1e-6)]


@pytest.mark.parametrize("policy", ["bf16-master", "bf16-pure"])
def test_eps_does_not_depend_on_the_weights_format(policy: str) -> None:
    """Gradients of 1e-4: torch's eps for BF16 weights is 0.0078, so its update is 78 times too small."""
    torchs, ours = nn.Parameter(torch.ones(4, 4, dtype=BF16)), nn.Parameter(torch.ones(4, 4, dtype=BF16))
    exact, (wide,) = in_float64([ours], lr=0.25)
    optimizer = mezzo.Adafactor([ours], lr=0.25)
    optimizer.master_weights = policy == "bf16-master"
    theirs = torch.optim.Adafactor([torchs], lr=0.25)
    for p in (torchs, ours, wide):
        p.grad = torch.full((4, 4), 1e-4, dtype=BF16).to(p.dtype)
    for each in (theirs, optimizer, exact):
        each.step()
    assert torch.equal(ours, wide.to(BF16))
    assert ours.unique().tolist() == [0.75]
    assert (
        torchs.unique().tolist() == [1 - 0.25 * round(1e-4 / 2**-7, 4)] == [pytest.approx(0.9968)]
        or torchs.unique().item() > 0.99
    )


# --- arguments and states ---------------------------------------------------------------------------------------------


def test_arguments_are_torch_s_with_torch_s_defaults() -> None:
    ours, theirs = (inspect.signature(cls).parameters for cls in (mezzo.Adafactor, torch.optim.Adafactor))
    assert set(ours) == {*theirs, "moments", "rounding"}
    for name in theirs:
        assert (ours[name].default, ours[name].kind) == (theirs[name].default, theirs[name].kind), name


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"lr": -1.0}, "lr=-1.0; allowed: 0 or more"),
    ({"beta2_decay": 0.1}, "beta2_decay=0.1; allowed: 0 or less"),
    ({"eps": (-1e-3, 1e-3)}, "eps1=-0.001; allowed: 0 or more"),
    ({"eps": (None, -1.0)}, "eps2=-1.0; allowed: 0 or more"),
    ({"d": 0.5}, "d=0.5; allowed: 1 or more"),
    ({"weight_decay": -0.1}, "weight_decay=-0.1; allowed: 0 or more"),
]


@pytest.mark.parametrize(("changed", "text"), WRONG)
def test_wrong_arguments(changed: dict[str, Any], text: str) -> None:
    with pytest.raises(PolicyError) as caught:
        mezzo.Adafactor(new((2,)), **changed)
    assert str(caught.value) == f"{text}\n  hint: choose {text.partition('=')[0]} inside that range"
    with pytest.raises(ValueError):  # noqa: PT011 - torch refuses the same calls, in other words
        torch.optim.Adafactor(new((2,)), **changed)


@pytest.mark.parametrize("to_torch", [True, False])
def test_states_pass_between_torch_and_here(to_torch: bool) -> None:
    classes: list[Any] = [mezzo.Adafactor, torch.optim.Adafactor]
    first, second = classes if to_torch else reversed(classes)
    begun = new(*SHAPES)
    exact, wide = in_float64(begun, weight_decay=0.1)
    before = first(begun, weight_decay=0.1)
    run(before, range(3))
    after = second(begun, lr=99.0)  # every setting has to come from the state
    saved = through_a_file(before.state_dict())
    assert [sorted(state) for state in saved["state"].values()][:2] == [
        ["col_var", "row_var", "step"],
        ["step", "variance"],
    ]
    after.load_state_dict(saved)
    run(after, range(3, 6))
    run(exact, range(6))
    for p, expected in zip(begun, wide, strict=True):
        torch.testing.assert_close(p.detach().double(), expected.detach(), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("moments", ["fp32", "bf16", "8bit"])
@pytest.mark.parametrize("policy", ["fp16-master", "bf16-master"])
def test_a_loaded_session_goes_on_bit_for_bit(policy: str, moments: Any) -> None:
    session, model = session_of(policy, moments=moments)
    train(session, model, range(3))
    saved = through_a_file(session.state_dict())
    again, twin = session_of(policy, moments=moments)
    again.load_state_dict(saved)
    train(session, model, range(3, 6))
    train(again, twin, range(3, 6))
    assert same_bits([p.detach() for p in model.parameters()], [p.detach() for p in twin.parameters()])


def test_a_snapshot_has_its_factors(tmp_path: Any) -> None:
    session, model = session_of("bf16-master")
    train(session, model, range(1))
    session.save(tmp_path).wait()
    again, twin = session_of("bf16-master")
    again.load(tmp_path)
    train(session, model, range(1, 3))
    train(again, twin, range(1, 3))
    assert same_bits([p.detach() for p in model.parameters()], [p.detach() for p in twin.parameters()])


BYTES = {
    # weight + gradient + master + factors of 256 x 256 weights: 2 numbers for each 256 weights.
    ("fp16-master", "fp32", "nearest"): 2 + 2 + 4 + 8 / 256,
    ("bf16-master", "fp32", "nearest"): 2 + 2 + 2 + 8 / 256,
    ("bf16-master", "8bit", "nearest"): 2 + 2 + 2 + 2 * (1 + 1 / 128) / 256,
    ("bf16-pure", "bf16", "stochastic"): 2 + 2 + 4 / 256,
}


@pytest.mark.parametrize(("policy", "moments", "rounding"), BYTES)
def test_persistent_bytes_a_parameter(policy: str, moments: Any, rounding: Any) -> None:
    model = nn.Linear(256, 256, bias=False)
    optimizer = mezzo.Adafactor(model.parameters(), moments=moments, rounding=rounding)
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


def test_rows_and_columns_are_rounded_by_bits_of_their_own() -> None:
    """By the same bits, the errors of a row and a column would add up in their product."""
    first, second = new((6, 9), (6, 9))
    optimizer = mezzo.Adafactor([first, second], beta2_decay=0.0, moments="bf16")
    run(optimizer, range(1))
    assert second.grad is not None
    _, for_rows, for_columns = streams(54, 1, torch.tensor(1.0))
    square = second.grad.double().square()
    for name, exact, bits in (("row_var", square.mean(1), for_rows), ("col_var", square.mean(0), for_columns)):
        expected = round_to_bf16(exact.float(), bits[: len(exact)])
        assert torch.equal(optimizer.state[second][name].flatten(), expected)


@pytest.mark.parametrize("moments", ["bf16", "8bit"])
def test_factors_of_few_bits_are_right_on_average(moments: Any) -> None:
    """A stored factor is at most one step of its format away, and 40 rounds of 64 rows leave no bias."""
    kept, exact = [], []
    for stored, values in ((moments, kept), ("fp32", exact)):
        weight = nn.Parameter(torch.ones(64, 32))
        optimizer = mezzo.Adafactor([weight], lr=0.0, beta2_decay=0.0, moments=stored)
        for step in range(40):
            weight.grad = 1 + 0.1 * randn(64, 32, seed=step)
            optimizer.step()
            values.append(optimizer.state_dict()["state"][0]["row_var"].clone())
    ratio = torch.stack(kept) / torch.stack(exact)
    step = {"bf16": 2.0**-7, "8bit": 2.0**-3}[moments]
    assert float((ratio - 1).abs().max()) < 1.01 * step
    assert float(ratio.mean() - 1) == pytest.approx(0, abs=4 * step / math.sqrt(12 * ratio.numel()))


# --- sessions ---------------------------------------------------------------------------------------------------------


def session_of(policy: str, **settings: Any) -> tuple[mezzo.Session, nn.Module]:
    model = mlp(6, 9, 3)
    return mezzo.Session(model, mezzo.Adafactor(model.parameters(), lr=0.05, **settings), policy=policy), model


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


@pytest.mark.parametrize("policy", ["fp32", "fp16:init_scale=64", "fp16-master:init_scale=64", "bf16-master"])
def test_a_session_makes_float64_s_updates_of_fp32_masters(policy: str) -> None:
    session, model = session_of(policy, weight_decay=0.1)
    exact, wide = in_float64(list(mlp(6, 9, 3).parameters()), lr=0.05, weight_decay=0.1)
    for gradients in train(session, model, range(6), overflow=2 if "fp16" in policy else None):
        if all(bool(g.isfinite().all()) for g in gradients):
            for p, gradient in zip(wide, gradients, strict=True):
                p.grad = gradient.double()
            exact.step()
    assert session.skipped == ("fp16" in policy)
    for p, expected in zip(model.parameters(), wide, strict=True):
        master = session.masters.values(p)
        found = p.detach() if master is None else master
        torch.testing.assert_close(found.double(), expected.detach(), rtol=2e-6, atol=2e-6)
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


@pytest.mark.parametrize("moments", ["fp32", "8bit"])
def test_a_skipped_update_changes_nothing(moments: str) -> None:
    session, model = session_of("fp16-master:init_scale=64", moments=moments)
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


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize("optimizer", ["mezzo.Adafactor", "mezzo.Adafactor 8bit"])
def test_two_processes_give_one_s_bits(
    kind: str, optimizer: str, tmp_path_factory: pytest.TempPathFactory, worker_id: str
) -> None:
    weights, _, factors, skipped = distributed_runs.matrices("one", optimizer)
    assert len(factors) == 4
    for found in left_by_ranks(distributed_runs.__file__, distributed_runs.WORLD, tmp_path_factory, worker_id):
        said = found[f"matrices {kind} {optimizer}"]
        assert not isinstance(said, str), said
        assert same_bits(said[0] + said[2], weights + factors)
        assert said[3] == skipped == 1
        (kept, restored), counts, _ = found[f"state {kind} {optimizer}"]
        assert same_bits(kept, restored)
        assert counts[0] == counts[1]
        assert same_bits(*found[f"snapshot {kind} {optimizer}"])
