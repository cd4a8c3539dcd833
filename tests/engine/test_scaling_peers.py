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
from mezzo.engine.scaling import DynamicScale
from mezzo.errors import SessionError

INF, NAN, GOOD = float("inf"), float("nan"), 0.05
OVERFLOWS = [INF, -INF, *[NAN] * 6]

# --- DeepSpeed's traces ----------------------------------------------------------------------------------------------------

TRACES = {
    # name: settings, gradients, the scale after each update
    "no overflow": (
        {"init_scale": 2.0**8, "growth_interval": 2},
        [GOOD] * 10,
        [2.0**k for k in (8, 9, 9, 10, 10, 11, 11, 12, 12, 13)],
    ),
    "all overflow, floor 1": (
        {"init_scale": 2.0**4, "growth_interval": 2, "min_scale": 1.0},
        OVERFLOWS,
        [8.0, 4.0, 2.0, 1.0, 1.0, 1.0, 1.0, 1.0],
    ),
    "all overflow, floor 2": (
        {"init_scale": 2.0**4, "growth_interval": 2, "min_scale": 2.0},
        OVERFLOWS,
        [8.0, 4.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0],
    ),
    "some overflow": (
        {"init_scale": 2.0**8, "growth_interval": 2},
        [INF, NAN, GOOD, GOOD, GOOD, INF],
        [128.0, 64.0, 64.0, 128.0, 128.0, 64.0],
    ),
    "hysteresis 3": (
        {"init_scale": 2.0**8, "growth_interval": 1000, "hysteresis": 3},
        [INF] * 4,
        [256.0, 256.0, 128.0, 64.0],
    ),
    "consecutive hysteresis 2": (
        {"init_scale": 2.0**8, "growth_interval": 1000, "hysteresis": 2},
        [INF, GOOD] * 4,
        [256.0] * 8,
    ),
}


@pytest.mark.parametrize(("settings", "gradients", "scales"), TRACES.values(), ids=list(TRACES))
def test_deepspeeds_traces(settings: dict[str, Any], gradients: list[float], scales: list[float]) -> None:
    scale = DynamicScale(**settings)
    seen = []
    for gradient in gradients:
        scale.update((~torch.tensor(gradient).isfinite()).float())
        seen.append(scale.value())
    assert seen == scales


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


def test_deepspeeds_hysteresis_survives_a_checkpoint() -> None:
    one, two = (DynamicScale(256.0, growth_interval=100, hysteresis=2) for _ in range(2))
    one.update(torch.tensor(1.0))
    two.load_state_dict(one.state_dict())
    two.update(torch.tensor(1.0))
    assert (one.value(), two.value()) == (256.0, 128.0)


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
        scaler = GradScaler(
            "cpu", init_scale=128.0, growth_interval=1, growth_factor=2.0, backoff_factor=0.5, enabled=enabled
        )
        loop(control, factory(control.parameters(), **settings), GradScaler("cpu", enabled=False), drop=enabled)
        loop(scaled, factory(scaled.parameters(), **settings), scaler, drop=False)
        assert scaler.get_scale() == (128.0 * 2.0**unskipped * 0.5**skipped if enabled else 1.0)
        assert scaler.skipped == (skipped if enabled else 0)
        for expected, got in zip(control.parameters(), scaled.parameters(), strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-7)


def spoil(model: nn.Module, scaler: GradScaler, batch: int) -> None:
    if batch == SKIPPED_BATCH and scaler.is_enabled():
        model[1].weight.grad.fill_(INF)  # type: ignore[index]


@pytest.mark.parametrize("pickled", [False, True])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind[0].__name__} {kind[1]}")
def test_an_overflow_skips_its_batch(kind: tuple[Any, dict[str, Any]], pickled: bool) -> None:
    def loop(model: nn.Module, optimizer: Any, scaler: GradScaler, *, drop: bool) -> None:
        for number, (inputs, target) in enumerate(batches()):
            optimizer.zero_grad()
            scaler.scale((model(inputs) - target).pow(2).mean()).backward()
            spoil(model, scaler, number)
            if not (drop and number == SKIPPED_BATCH):
                scaler.step(optimizer)
                scaler.update()
            if pickled:
                again = pickle.loads(pickle.dumps(scaler))
                assert again.state_dict() == scaler.state_dict()

    check(loop, kind)


@pytest.mark.parametrize("kind", KINDS[:3], ids=lambda kind: str(kind[1]))
def test_clipping_after_unscaling(kind: tuple[Any, dict[str, Any]]) -> None:
    def loop(model: nn.Module, optimizer: Any, scaler: GradScaler, *, drop: bool) -> None:
        for number, (inputs, target) in enumerate(batches()):
            optimizer.zero_grad()
            scaler.scale((model(inputs) - target).pow(2).mean()).backward()
            spoil(model, scaler, number)
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.2)
            if not (drop and number == SKIPPED_BATCH):
                scaler.step(optimizer)
                scaler.update()

    check(loop)


def test_clipping_without_unscaling_at_the_scaled_norm() -> None:
    def loop(model: nn.Module, optimizer: Any, scaler: GradScaler, *, drop: bool) -> None:
        for number, (inputs, target) in enumerate(batches()):
            optimizer.zero_grad()
            scaler.scale((model(inputs) - target).pow(2).mean()).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.2 * scaler.get_scale())
            spoil(model, scaler, number)
            if not (drop and number == SKIPPED_BATCH):
                scaler.step(optimizer)
                scaler.update()

    check(loop)


def test_a_penalty_on_gradients() -> None:
    def loop(model: nn.Module, optimizer: Any, scaler: GradScaler, *, drop: bool) -> None:
        for number, (inputs, target) in enumerate(batches()):
            optimizer.zero_grad()
            loss = (model(inputs) - target).pow(2).mean()
            gradients = torch.autograd.grad(scaler.scale(loss), model.parameters(), create_graph=True)
            norm = torch.stack([(g / scaler.get_scale()).pow(2).sum() for g in gradients]).sum().sqrt()
            scaler.scale(loss + norm).backward()
            spoil(model, scaler, number)
            if not (drop and number == SKIPPED_BATCH):
                scaler.step(optimizer)
                scaler.update()

    check(loop)


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


def test_sparse_gradients_are_added_up_before_they_are_checked() -> None:
    parameter = nn.Parameter(torch.zeros(4))
    scaler = GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    parameter.grad = torch.sparse_coo_tensor(
        torch.tensor([[1, 1, 3]]), torch.tensor([8.0, 4.0, 2.0]), (4,), check_invariants=True
    )
    scaler.unscale_(optimizer)
    assert parameter.grad.to_dense().tolist() == [0.0, 3.0, 0.0, 0.5]
    scaler.step(optimizer)
    scaler.update()
    largest = 3e38  # each is finite, their sum is not
    parameter.grad = torch.sparse_coo_tensor(
        torch.tensor([[1, 1]]), torch.tensor([largest, largest]), (4,), check_invariants=True
    )
    scaler.step(optimizer)
    scaler.update()
    assert parameter.tolist() == [0.0, -3.0, 0.0, -0.5]
    assert scaler.skipped == 1


def test_states_go_to_torch_and_back() -> None:
    ours = GradScaler("cpu", init_scale=3.0, growth_factor=4.0, backoff_factor=0.25, growth_interval=2)
    theirs = torch.amp.GradScaler("cpu")
    theirs.load_state_dict(ours.state_dict())
    assert (theirs.get_scale(), theirs.get_growth_factor(), theirs.get_backoff_factor()) == (3.0, 4.0, 0.25)
    assert theirs.get_growth_interval() == 2
    theirs = torch.amp.GradScaler("cpu", init_scale=6.0, growth_factor=7.0, backoff_factor=0.8, growth_interval=1)
    ours.load_state_dict(theirs.state_dict())
    got = ours.get_scale(), ours.get_growth_factor(), ours.get_backoff_factor(), ours.get_growth_interval()
    assert got == (6.0, 7.0, 0.8, 1)
    assert GradScaler("cpu", enabled=False).state_dict() == {}


def test_scaled_outputs_keep_their_structure() -> None:
    scaler = GradScaler("cpu", init_scale=2.0)
    one, two, three = (torch.tensor(v) for v in (1.0, 2.0, 3.0))
    assert scaler.scale([one, (two, [three])]) == [2.0, (4.0, [6.0])]
    assert [float(v) for v in scaler.scale(iter([one, two]))] == [2.0, 4.0]


MISUSE: dict[str, tuple[Callable[[GradScaler, Any], Any], str]] = {
    "update first": (lambda s, o: s.update(), "update\\(\\) without a check of gradients"),
    "unscaled twice": (
        lambda s, o: (s.unscale_(o), s.unscale_(o)),
        "unscale_\\(SGD\\) after unscale_\\(\\) in the same update",
    ),
    "unscaled late": (lambda s, o: (s.step(o), s.unscale_(o)), "unscale_\\(SGD\\) after step\\(\\) in the same update"),
    "stepped twice": (lambda s, o: (s.step(o), s.step(o)), "step\\(SGD\\) was called twice"),
    "closure": (lambda s, o: s.step(o, closure=lambda: None), "step\\(\\) got a closure"),
    "no gradients": (lambda s, o: (o.zero_grad(), s.step(o)), "have no gradients"),
    "FP16 gradients": (lambda s, o: s.unscale_(half()), "unscale_\\(\\) with FP16 gradients"),
    "no tensor": (lambda s, o: s.scale(3.0), "scale\\(3.0\\); allowed: a tensor"),
    "an empty state": (lambda s, o: s.load_state_dict({}), "the state is a disabled scaler's"),
    "pickled halfway": (lambda s, o: (s.step(o), pickle.dumps(s)), "pickled between step\\(\\) and update\\(\\)"),
}


def half() -> torch.optim.Optimizer:
    parameter = nn.Parameter(torch.zeros(2, dtype=mezzo.formats.FP16.dtype))
    parameter.grad = torch.ones_like(parameter)
    return torch.optim.SGD([parameter])


@pytest.mark.parametrize(("misuse", "message"), MISUSE.values(), ids=list(MISUSE))
def test_misuse_is_refused(misuse: Callable[[GradScaler, Any], Any], message: str) -> None:
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.ones(2)
    scaler = GradScaler("cpu")
    scaler.scale(torch.zeros(1))
    with pytest.raises(SessionError, match=message):
        misuse(scaler, torch.optim.SGD([parameter]))


def test_without_cuda_the_default_scaler_is_off_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.warns(UserWarning, match="CUDA is not available"):
        scaler = GradScaler()
    assert (scaler.is_enabled(), scaler.get_scale()) == (False, 1.0)


def test_a_scale_can_be_set() -> None:
    scaler = GradScaler("cpu")
    scaler.scale(torch.zeros(1))
    scaler.update(8.0)
    assert scaler.get_scale() == 8.0
    scaler.update(torch.tensor(16.0))
    assert scaler.get_scale() == 16.0
