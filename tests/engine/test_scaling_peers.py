"""The loss scales of other people's tests: DeepSpeed's traces, and what torch's own tests ask of a GradScaler.

DeepSpeed's are the traces of tests/unit/runtime/half_precision/test_dynamic_loss_scale.py, gradients set by hand. torch's
are the cases of test/test_torch.py that need no private name: four batches, an infinity in the third one's gradients, and
a control that is trained without a scale.
"""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mezzo
import mezzo.formats
from mezzo.compat.grad_scaler import GradScaler

INF, NAN, GOOD = float("inf"), float("nan"), 0.05
OVERFLOWS = [INF, -INF, *[NAN] * 6]

# --- DeepSpeed's traces ----------------------------------------------------------------------------------------------------

EVERY_2, RARELY = {"growth_interval": 2}, {"init_scale": 2.0**8, "growth_interval": 1000}
GROWING = [2.0**k for k in (8, 9, 9, 10, 10, 11, 11, 12, 12, 13)]
TRACES: dict[str, tuple[dict[str, Any], list[float], list[float]]] = {
    # name: settings, gradients, the scale after each update
    "no overflow": ({"init_scale": 2.0**8, **EVERY_2}, [GOOD] * 10, GROWING),
    "floor 1": ({"init_scale": 16.0, **EVERY_2, "min_scale": 1.0}, OVERFLOWS, [8.0, 4.0, 2.0, *[1.0] * 5]),
    "floor 2": ({"init_scale": 16.0, **EVERY_2, "min_scale": 2.0}, OVERFLOWS, [8.0, 4.0, *[2.0] * 6]),
    "some": ({"init_scale": 2.0**8, **EVERY_2}, [INF, NAN, *[GOOD] * 3, INF], [128.0, 64.0, 64.0, 128.0, 128.0, 64.0]),
    "hysteresis 3": ({**RARELY, "hysteresis": 3}, [INF] * 4, [256.0, 256.0, 128.0, 64.0]),
    "consecutive hysteresis 2": ({**RARELY, "hysteresis": 2}, [INF, GOOD] * 4, [256.0] * 8),
}


@pytest.mark.parametrize("master", [False, True])
@pytest.mark.parametrize(("settings", "gradients", "scales"), TRACES.values(), ids=list(TRACES))
def test_deepspeeds_traces_through_a_session(
    settings: dict[str, Any], gradients: list[float], scales: list[float], master: bool
) -> None:
    """Gradients come from a backward pass that starts from the wanted gradient; at its floor a session raises."""
    policy = mezzo.Policy.parse("fp16-master" if master else "fp16").replace(**settings)
    model = nn.Linear(1, 1)
    optimizer = mezzo.AdamW(model.parameters(), lr=0.00015)
    session = mezzo.Session(model, optimizer, policy=policy)
    seen = []
    for gradient in gradients:
        with session.autocast():
            output = model(torch.ones(1, 1)).float()
        output.register_hook(lambda incoming, wanted=gradient: torch.full_like(incoming, wanted))
        loss = output.sum()
        try:
            session.step(loss)
        except mezzo.ScaleFloorError:
            assert session.loss_scale == settings["min_scale"]
        seen.append(session.loss_scale)
    assert seen == scales


# --- what torch's tests ask of a GradScaler -------------------------------------------------------------------------------------

SKIPPED_BATCH = 2
KINDS = [
    (torch.optim.SGD, {"lr": 1.0, "foreach": False}),
    (torch.optim.SGD, {"lr": 1.0, "foreach": True}),
    (torch.optim.SGD, {"lr": 1.0, "fused": True}),
    (torch.optim.Adam, {"foreach": True}),
    (torch.optim.AdamW, {"fused": True}),
]


def models(seed: int = 0) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(seed)
    control = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    scaled = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    scaled.load_state_dict(control.state_dict())
    return control, scaled


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [tuple(torch.randn(2, 8, 8, generator=generator)) for _ in range(4)]  # type: ignore[misc]


Loop = Callable[..., None]


def check(loop: Loop, kind: tuple[Any, dict[str, Any]] = KINDS[0], *, unskipped: int = 3, skipped: int = 1) -> None:
    """Train with a scaler and without; compare the scale exactly and the weights to FP32's last bits."""
    control, scaled = models()
    factory, settings = kind
    for enabled in (True, False):
        scaler = GradScaler("cpu", init_scale=128.0, growth_interval=1, enabled=enabled)
        loop(control, factory(control.parameters(), **settings), GradScaler("cpu", enabled=False), drop=enabled)
        loop(scaled, factory(scaled.parameters(), **settings), scaler, drop=False)
        assert scaler.get_scale() == (128.0 * 2.0**unskipped * 0.5**skipped if enabled else 1.0)
        assert scaler.skipped == (skipped if enabled else 0)
        for expected, got in zip(control.parameters(), scaled.parameters(), strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-7)


def spoil(model: nn.Module, scaler: GradScaler, batch: int) -> None:
    if batch == SKIPPED_BATCH and scaler.is_enabled():
        model[1].weight.grad.fill_(INF)  # type: ignore[index]


def mean_loss(model: nn.Module, scaler: GradScaler, inputs: Tensor, target: Tensor) -> None:
    scaler.scale((model(inputs) - target).pow(2).mean()).backward()


def penalised(model: nn.Module, scaler: GradScaler, inputs: Tensor, target: Tensor) -> None:
    loss = (model(inputs) - target).pow(2).mean()
    gradients = torch.autograd.grad(scaler.scale(loss), model.parameters(), create_graph=True)
    norm = torch.stack([(g / scaler.get_scale()).pow(2).sum() for g in gradients]).sum().sqrt()
    scaler.scale(loss + norm).backward()


def nothing(model: nn.Module, optimizer: Any, scaler: GradScaler) -> None: ...


def clip_scaled(model: nn.Module, optimizer: Any, scaler: GradScaler) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.2 * scaler.get_scale())


def clip_unscaled(model: nn.Module, optimizer: Any, scaler: GradScaler) -> None:
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 0.2)


def pickle_it(model: nn.Module, optimizer: Any, scaler: GradScaler) -> None:
    assert pickle.loads(pickle.dumps(scaler)).state_dict() == scaler.state_dict()


def loop_of(backward: Any = mean_loss, *, before: Any = nothing, after: Any = nothing, last: Any = nothing) -> Loop:
    """Return a loop that does something before and after a batch's gradients are spoilt, and last."""

    def loop(model: nn.Module, optimizer: Any, scaler: GradScaler, *, drop: bool) -> None:
        for number, (inputs, target) in enumerate(batches()):
            optimizer.zero_grad()
            backward(model, scaler, inputs, target)
            before(model, optimizer, scaler)
            spoil(model, scaler, number)
            after(model, optimizer, scaler)
            if not (drop and number == SKIPPED_BATCH):
                scaler.step(optimizer)
                scaler.update()
            last(model, optimizer, scaler)

    return loop


LOOPS: dict[str, Loop] = {
    "plain": loop_of(),
    "pickled after each batch": loop_of(last=pickle_it),
    "clipped after unscaling": loop_of(after=clip_unscaled),
    "clipped at the scaled norm": loop_of(before=clip_scaled),
    "a penalty on gradients": loop_of(penalised),
}


@pytest.mark.parametrize(
    ("name", "kind"),
    [*((name, KINDS[0]) for name in LOOPS), *(("clipped after unscaling", kind) for kind in KINDS[1:])],
)
def test_an_overflow_skips_its_batch(name: str, kind: tuple[Any, dict[str, Any]]) -> None:
    check(LOOPS[name], kind)


def test_accumulation_updates_every_second_batch() -> None:
    def loop(model: nn.Module, optimizer: Any, scaler: GradScaler, *, drop: bool) -> None:
        for number, (inputs, target) in enumerate(batches()):
            scaler.scale((model(inputs) - target).pow(2).mean() / 2).backward()
            if number % 2:
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()

    check(loop, unskipped=2, skipped=0)


def test_two_optimizers_share_one_scale_and_one_backs_it_off() -> None:
    (control, scaled), (other_control, other_scaled) = models(), models(seed=3)
    for first, second, spoils in ((control, other_control, False), (scaled, other_scaled, True)):
        scaler = GradScaler("cpu", init_scale=128.0, growth_interval=1, enabled=spoils)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (first, second)]
        for number, (inputs, target) in enumerate(batches()):
            for optimizer in optimizers:
                optimizer.zero_grad()
            a, b = ((m(inputs) - target).pow(2).mean() for m in (first, second))
            scaler.scale(0.6 * a + 0.4 * b).backward(retain_graph=True)
            scaler.scale(0.6 * b - 0.4 * a).backward()
            spoil(first, scaler, number)
            scaler.unscale_(optimizers[0])
            for optimizer, model in zip(optimizers, (first, second), strict=True):
                if spoils or not (number == SKIPPED_BATCH and model is first):
                    scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == (128.0 * 2.0**3 * 0.5 if spoils else 1.0)
    for one, two in ((control, scaled), (other_control, other_scaled)):
        for expected, got in zip(one.parameters(), two.parameters(), strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-7)


def test_the_scale_never_becomes_infinite() -> None:
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    scaler = GradScaler("cpu", init_scale=1e38, growth_factor=2.0**4, growth_interval=1)
    scaler.scale(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == torch.tensor(1e38).item()


@pytest.mark.parametrize(("kind", "fused"), [*itertools.product((torch.optim.Adam, torch.optim.AdamW), (False, True))])
def test_gradients_spoilt_after_unscaling_reach_the_weights(kind: Any, fused: bool) -> None:
    model, _ = models()
    optimizer = kind(model.parameters(), fused=fused)
    scaler = GradScaler("cpu", init_scale=128.0)
    inputs, target = batches()[0]
    scaler.scale((model(inputs) - target).pow(2).mean()).backward()
    scaler.unscale_(optimizer)
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.copy_(parameter.grad * NAN)
    scaler.step(optimizer)
    scaler.update()
    assert all(bool(p.isnan().all() | p.isinf().all()) for p in model.parameters())


def sparse(places: list[int], values: list[float]) -> Tensor:
    return torch.sparse_coo_tensor(torch.tensor([places]), torch.tensor(values), (4,), check_invariants=True)


def test_sparse_gradients_are_added_up_before_they_are_checked() -> None:
    parameter = nn.Parameter(torch.zeros(4))
    scaler = GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    parameter.grad = sparse([1, 1, 3], [8.0, 4.0, 2.0])
    scaler.unscale_(optimizer)
    assert parameter.grad.to_dense().tolist() == [0.0, 3.0, 0.0, 0.5]
    scaler.step(optimizer)
    scaler.update()
    parameter.grad = sparse([1, 1], [3e38, 3e38])  # each is finite, their sum is not
    scaler.step(optimizer)
    scaler.update()
    assert parameter.tolist() == [0.0, -3.0, 0.0, -0.5]
    assert scaler.skipped == 1


def test_scaled_outputs_keep_their_structure() -> None:
    scaler = GradScaler("cpu", init_scale=2.0)
    one, two, three = (torch.tensor(v) for v in (1.0, 2.0, 3.0))
    assert scaler.scale([one, (two, [three])]) == [2.0, (4.0, [6.0])]
    assert [float(v) for v in scaler.scale(iter([one, two]))] == [2.0, 4.0]


def test_without_cuda_the_default_scaler_is_off_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.warns(UserWarning, match="CUDA is not available"):
        scaler = GradScaler()
    assert (scaler.is_enabled(), scaler.get_scale()) == (False, 1.0)
