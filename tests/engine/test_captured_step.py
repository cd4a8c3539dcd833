"""Whole-step graphs: replayed steps are the eager ones bit for bit, on a tape that stands in for CUDA's graphs, and on CUDA where it is."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mezzo
from mezzo.engine import arguments, captured_step, session
from mezzo.engine.optimizers import one_pass
from mezzo.engine.state import Schedules
from tape import Kernel, TapeGraphs, refuse_an_old_interpreter, refuse_in_a_capture

INF = float("inf")
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in multiply:RuntimeWarning")  # the hash is to wrap


def test_a_captured_step_uses_nothing_private_of_its_session() -> None:
    private = r"(?:session|parts|window|progress)\._\w+"
    assert re.findall(private, "self._session._close() parts._norm window.calls") == ["session._close", "parts._norm"]
    assert re.findall(private, Path(captured_step.__file__).read_text()) == []


@pytest.fixture
def tape(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("the tape's kernels run under Triton's interpreter, which is off where there is a GPU")
    refuse_an_old_interpreter()
    gpu = importlib.import_module("mezzo.engine.kernels.gpu")
    for kernel in ("square_kernel", "begin_kernel", "adamw_kernel", "sgd_kernel"):
        monkeypatch.setattr(gpu, kernel, Kernel(getattr(gpu, kernel)))
    monkeypatch.setattr(gpu, "_send", refuse_in_a_capture(gpu._send, "a table was sent in a capture"))
    for module in (captured_step, one_pass, arguments, session):
        if hasattr(module, "choose"):
            monkeypatch.setattr(module, "choose", lambda device_type: (gpu, "Triton's interpreter"))


class Model(nn.Module):
    """Small, with what a replay has to keep going: running statistics and dropout."""

    def __init__(self, *, dropout: float = 0.25) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.unused = nn.Linear(2, 2)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.norm(self.first(x)))
        return self.last(nn.functional.dropout(hidden, self.dropout, self.training))


OPTIMIZERS: dict[str, Callable[[Any], mezzo.AdamW | mezzo.SGD]] = {
    "AdamW": lambda p: mezzo.AdamW(p, lr=0.01),
    "AdamW 8bit": lambda p: mezzo.AdamW(p, lr=0.01, moments="8bit", amsgrad=True),
    "SGD": lambda p: mezzo.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
}


def built(
    policy: str, optimizer: str, *, device: str = "cpu", scheduled: bool = False, **settings: Any
) -> mezzo.Session:
    torch.manual_seed(0)
    model = Model().to(device)
    made = OPTIMIZERS[optimizer](model.parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(made, 0.7) if scheduled else None
    return mezzo.Session(model, made, policy=policy, scheduler=scheduler, **settings)


def batches(
    count: int, *, poison: tuple[int, ...] = (), size: int = 5, device: str = "cpu"
) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    made = []
    for number in range(count):
        x = torch.randn(size, 6, generator=generator)
        y = torch.randint(3, (size,), generator=generator)
        if number in poison:
            x[0, 0] = INF
        made.append((x.to(device), y.to(device)))
    return made


def loss_of(one: mezzo.Session) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, y: nn.functional.cross_entropy(one.models[0](x).float(), y)


def eager_step(one: mezzo.Session, x: Tensor, y: Tensor) -> Tensor:
    with one.autocast():
        loss = loss_of(one)(x, y)
    one.step(loss)
    return loss.detach()


def everything(one: mezzo.Session) -> list[Tensor]:
    states = [t for o in one.optimizers for s in o.state.values() for t in s.values() if isinstance(t, Tensor)]
    return [*one.models[0].parameters(), *one.models[0].buffers(), *states]


def captured(one: mezzo.Session, monkeypatch: pytest.MonkeyPatch, **how: Any) -> captured_step.CapturedStep:
    if one.device.type == "cpu":
        held = lambda: [*everything(one), *(p.grad for p in one.models[0].parameters() if p.grad is not None)]  # noqa: E731
        monkeypatch.setattr(captured_step, "graphs_for", lambda device: TapeGraphs(held))
    return one.capture(loss_of(one), *batches(1, device=str(one.device))[0], **how)


def assert_same(one: mezzo.Session, other: mezzo.Session) -> None:
    for a, b in zip(everything(one), everything(other), strict=True):
        torch.testing.assert_close(
            a, b, rtol=0, atol=0, equal_nan=True
        )  # an infinite input leaves NaN running statistics
    assert one.loss_scale == other.loss_scale
    assert (one.skipped, one.updates) == (other.skipped, other.updates)
    assert one.grad_norm == other.grad_norm or (one.grad_norm != one.grad_norm) == (other.grad_norm != other.grad_norm)


CASES = [
    ("fp16-master:arithmetic=emulated:growth_interval=3", "AdamW", {"clip_norm": 0.5}),
    ("fp16-master:arithmetic=emulated:growth_interval=3", "SGD", {"clip_norm": 0.5, "accumulate": 3}),
    ("fp16:arithmetic=emulated:growth_interval=2", "AdamW", {"accumulate": 2, "scheduled": True}),
    ("bf16-master:arithmetic=emulated", "AdamW 8bit", {"clip_norm": 0.5, "accumulate": 5}),
    ("fp32", "SGD", {"scheduled": True}),
]


@pytest.mark.parametrize(
    ("policy", "optimizer", "settings"),
    [pytest.param(*case, marks=pytest.mark.slow) if "8bit" in case[1] else case for case in CASES],
)
def test_replayed_steps_are_the_eager_ones(
    tape: None, monkeypatch: pytest.MonkeyPatch, policy: str, optimizer: str, settings: dict[str, Any]
) -> None:
    scaled = "fp16" in policy
    one, other = (built(policy, optimizer, **settings) for _ in range(2))
    step = captured(one, monkeypatch)
    data = batches(3 * settings.get("accumulate", 1) + 1, poison=(2, 5) if scaled else ())
    losses = []
    for run in (step, lambda x, y: eager_step(other, x, y)):
        torch.manual_seed(7)
        losses.append([run(x, y) for x, y in data])
    assert [loss.item() for loss in losses[0]] == pytest.approx([loss.item() for loss in losses[1]], abs=0, nan_ok=True)
    assert_same(one, other)
    assert (one.skipped > 0) == scaled
    assert [g["lr"] for g in one.optimizers[0].param_groups] == [g["lr"] for g in other.optimizers[0].param_groups]
    if one.accumulate > 1 and len(data) % one.accumulate:
        one.update()  # a short window closes outside the graph
        other.update()
        assert_same(one, other)
        torch.manual_seed(8)
        for x, y in data[: one.accumulate]:
            step(x, y)
        torch.manual_seed(8)
        for x, y in data[: one.accumulate]:
            eager_step(other, x, y)
        assert_same(one, other)


def test_capturing_changes_nothing(tape: None, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = (built("fp16-master:arithmetic=emulated", "AdamW", clip_norm=1.0, accumulate=2) for _ in range(2))
    torch.manual_seed(3)
    before = torch.get_rng_state()
    captured(one, monkeypatch)
    assert torch.equal(torch.get_rng_state(), before)
    for a, b in zip(one.models[0].state_dict().values(), other.models[0].state_dict().values(), strict=True):
        torch.testing.assert_close(
            a, b, rtol=0, atol=0, equal_nan=True
        )  # an infinite input leaves NaN running statistics
    assert one.loss_scale == other.loss_scale
    assert (one.skipped, one.updates) == (0, 0)
    assert all(p.grad is None for p in one.models[0].parameters())
    assert all((s["step"] == 0) and (s["exp_avg"] == 0).all() for s in one.optimizers[0].state.values())


def test_settings_that_change_reach_the_graph(tape: None, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = (built("fp32", "AdamW") for _ in range(2))
    step = captured(one, monkeypatch)
    for number, (x, y) in enumerate(batches(4)):
        for s in (one, other):
            s.optimizers[0].param_groups[0].update(lr=0.01 / (number + 1), betas=(0.8 + number / 100, 0.99), eps=1e-6)
        torch.manual_seed(number)
        step(x, y)
        torch.manual_seed(number)
        eager_step(other, x, y)
    assert_same(one, other)
    one.optimizers[0].param_groups[0]["betas"] = (0.3, 0.99)
    with pytest.raises(mezzo.SessionError, match=r"settings of a captured step changed .* beta1 across 0\.5"):
        step(*batches(1)[0])


def test_a_loss_comes_back_as_a_copy_and_more_outputs_along(tape: None, monkeypatch: pytest.MonkeyPatch) -> None:
    one = built("fp32", "SGD")
    monkeypatch.setattr(captured_step, "graphs_for", lambda device: TapeGraphs(lambda: everything(one)))

    def compute(batch: dict[str, Tensor], label: str) -> tuple[Tensor, dict[str, Any]]:
        logits = one.models[0](batch["x"])
        return nn.functional.cross_entropy(logits, batch["y"]), {
            "hits": (logits.argmax(1) == batch["y"]).sum(),
            "of": len(batch["y"]),
        }

    first, second = ({"x": x, "y": y} for x, y in batches(2))
    step = one.capture(compute, first, "train")
    loss, extra = step(first, "train")
    kept = loss.clone(), extra["hits"].clone()
    step(second, "train")
    assert torch.equal(loss, kept[0])
    assert torch.equal(extra["hits"], kept[1])
    assert extra["of"] == 5
    with pytest.raises(mezzo.SessionError, match="an input that is not a tensor is 'valid'; captured: 'train'"):
        step(first, "valid")
    with pytest.raises(mezzo.SessionError, match="an input is of type int; captured: Tensor"):
        step({**first, "y": 1}, "train")
    with pytest.raises(mezzo.SessionError, match="an input is of type Tensor; captured: str"):
        step(first, first["y"])


def test_other_shapes_raise_or_run_without_a_graph(tape: None, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"accumulate": 2, "clip_norm": 0.5}
    policy = "fp16-master:arithmetic=emulated"
    one, other, strict = (built(policy, "AdamW", **settings) for _ in range(3))
    short = batches(1, size=3)[0]
    with pytest.raises(
        mezzo.SessionError, match=r"an input is torch.float32 of shape \(3, 6\); captured: torch.float32 of \(5, 6\)"
    ):
        captured(strict, monkeypatch)(*short)
    step = captured(one, monkeypatch, other_shapes="eager")
    a, b, c, d = batches(4)
    for number, (x, y) in enumerate([a, short, short, b, c, d, short, short, a, b]):
        torch.manual_seed(number)
        mine = step(x, y)
        torch.manual_seed(number)
        assert torch.equal(mine, eager_step(other, x, y))
    assert_same(one, other)


def test_a_step_without_a_graph_returns_what_one_with_a_graph_does(tape: None, monkeypatch: pytest.MonkeyPatch) -> None:
    one = built("fp32", "SGD")
    monkeypatch.setattr(captured_step, "graphs_for", lambda device: TapeGraphs(lambda: everything(one)))

    def compute(x: Tensor, y: Tensor) -> tuple[Tensor, dict[str, Any]]:
        logits = one.models[0](x)
        return nn.functional.cross_entropy(logits, y), {"logits": logits, "of": len(y)}

    step = one.capture(compute, *batches(1)[0], other_shapes="eager")
    for size in (5, 3):
        loss, extra = step(*batches(1, size=size)[0])
        assert (loss.requires_grad, extra["logits"].requires_grad) == (False, False)
        assert (extra["logits"].shape, extra["of"]) == ((size, 3), size)


def test_a_step_that_reads_is_refused_and_training_continues(tape: None, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = (built("fp16-master:arithmetic=emulated", "AdamW") for _ in range(2))
    monkeypatch.setattr(captured_step, "graphs_for", lambda device: TapeGraphs(lambda: everything(one)))
    x, y = batches(1)[0]

    def reads(x: Tensor, y: Tensor) -> Tensor:
        loss = loss_of(one)(x, y)
        return loss * 2 if loss.item() > 100 else loss

    with pytest.raises(mezzo.SessionError, match="the step could not be captured: CUDA error: operation not permitted"):
        one.capture(reads, x, y)
    for s in (one, other):
        torch.manual_seed(1)
        eager_step(s, x, y)
    assert_same(one, other)


def test_state_that_was_loaded_needs_a_new_capture(tape: None, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = (built("fp16-master:arithmetic=emulated", "AdamW") for _ in range(2))
    step = captured(one, monkeypatch)
    data = batches(6)
    for x, y in data[:3]:
        step(x, y)
    saved = one.state_dict()
    other.load_state_dict(saved)
    one.load_state_dict(saved)
    with pytest.raises(mezzo.SessionError, match="state that the captured step refers to was replaced"):
        step(*data[3])
    step = captured(one, monkeypatch)
    for number, (x, y) in enumerate(data[3:]):
        torch.manual_seed(number)
        step(x, y)
        torch.manual_seed(number)
        eager_step(other, x, y)
    assert_same(one, other)


def open_window(one: mezzo.Session) -> None:
    x, y = batches(1)[0]
    with one.autocast():
        loss = loss_of(one)(x, y)
    one.backward(loss)


def test_capture_on_a_cpu_says_what_to_do() -> None:
    with pytest.raises(mezzo.SessionError, match="capture\\(\\) for a model on cpu; allowed: cuda") as caught:
        built("fp32", "SGD").capture(lambda x: x.sum(), torch.ones(1))
    assert "train with step(loss)" in caught.value.hint


REFUSED: dict[str, tuple[Callable[[], mezzo.Session], str]] = {
    "torch's optimizer": (
        lambda: mezzo.Session(m := Model(), torch.optim.SGD(m.parameters(), lr=0.1), policy="fp32"),
        "capture() with not all optimizers are Mezzo's own",
    ),
    "no kernel": (
        lambda: mezzo.Session(m := Model(), mezzo.Adafactor(m.parameters()), policy="fp32"),
        "capture() with plain torch operations: Adafactor has no kernel for cpu; allowed: one process, one loss scale, one-pass "
        "updates by Triton kernels, a closed window\n  hint: use mezzo.AdamW or mezzo.SGD, or train with step(loss)",
    ),
    "clip_value": (lambda: built("fp32", "SGD", clip_value=1.0), "capture() with clip_value changes single elements"),
    "several scales": (lambda: built("fp16:arithmetic=emulated", "SGD", num_losses=2), "capture() with num_losses=2"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_sessions_that_cannot_be_captured(tape: None, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    make, message = REFUSED[case]
    one = make()
    with pytest.raises(mezzo.SessionError) as caught:
        captured(one, monkeypatch)
    assert str(caught.value).startswith(message)


def test_an_open_window_cannot_be_captured(tape: None, monkeypatch: pytest.MonkeyPatch) -> None:
    one = built("fp32", "SGD", accumulate=2)
    open_window(one)
    with pytest.raises(mezzo.SessionError, match="1 backward passes of an open window"):
        captured(one, monkeypatch)


def test_kernels_that_cannot_be_captured_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    one = built("fp32", "SGD")
    with pytest.raises(
        mezzo.SessionError, match="allowed: one process, one loss scale, one-pass updates by Triton kernels"
    ):
        captured(one, monkeypatch)


@pytest.mark.usefixtures("tape")
def test_an_eager_step_s_table_is_sent_once_and_settings_when_they_change(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = importlib.import_module("mezzo.engine.kernels.gpu")
    sent: list[int] = []
    send = gpu._send
    monkeypatch.setattr(gpu, "_send", lambda numbers, to: (sent.append(len(numbers)), send(numbers, to)))
    weights = [nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(3, 2))]
    optimizer = mezzo.AdamW(weights, lr=0.5, weight_decay=0.0)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    gpu._chunks((5, 6), torch.device("cpu"))
    moved, rows = [], 3 + 4 + 2  # sizes, numbers, corrections; weight, gradient, master, step; two moments
    for lr in (0.5, 0.5, 0.25, 0.25):
        optimizer.param_groups[0]["lr"] = lr
        before, sent[:] = float(weights[0].detach()[0]), []
        optimizer.step()
        moved.append((round(before - float(weights[0].detach()[0]), 6), list(sent)))
    assert moved == [(0.5, [8 + 2 * rows, 8]), (0.5, []), (0.25, [8]), (0.25, [])]
    sent[:] = []
    weights[0].grad = torch.ones(5)  # in another place: it was made before the old one was freed
    optimizer.step()
    assert sent == [8 + 2 * rows, 8]


class Arrived:
    """An event that is over."""

    def record(self, stream: object) -> None: ...

    def synchronize(self) -> None: ...


def test_schedulers_step_when_the_flag_has_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: device)
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    optimizer.step()
    schedules = Schedules([scheduler], torch.device("cpu"))
    schedules._device = torch.device("meta")  # any that is not the CPU
    schedules._sent = Arrived()  # type: ignore[assignment]
    rates = []
    for skipped in (0.0, 1.0, 0.0, 0.0):
        schedules.settle()
        rates.append(optimizer.param_groups[0]["lr"])
        schedules.follow([optimizer], torch.tensor(skipped))
    schedules.settle()
    schedules.settle()
    # The rate of each update, in its time: the second was skipped, so the third has its rate again.
    assert rates == [1.0, 0.5, 0.5, 0.25]
    assert optimizer.param_groups[0]["lr"] == 0.125


needs_a_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_schedulers_read_a_flag_that_has_arrived_where_there_are_no_events(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[bool] = []
    copy = Tensor.copy_

    def noted(to: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        waits.append(not non_blocking)
        return copy(to, source)

    monkeypatch.setattr(Tensor, "copy_", noted)
    for sent in (None, Arrived()):
        schedules = Schedules([], torch.device("cpu"))
        schedules._device, schedules._sent = torch.device("mps"), sent  # type: ignore[assignment]
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: device)
        schedules.follow([], torch.tensor(1.0))
    assert waits == [True, False]


@pytest.mark.parametrize(
    ("policy", "optimizer", "settings", "device"),
    [
        pytest.param(*CASES[0], "cpu", marks=pytest.mark.slow),
        *(pytest.param(*case, "cuda", marks=needs_a_gpu) for case in CASES),
    ],
)
def test_graphs_replay_the_eager_steps(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    policy: str,
    optimizer: str,
    settings: dict[str, Any],
    device: str,
) -> None:
    """The test for a GPU, which the tape passes too, so that what fails there is not the test."""
    if device == "cpu":
        request.getfixturevalue("tape")
    else:
        policy = policy.replace(":arithmetic=emulated", "")
    one, other = (built(policy, optimizer, device=device, **settings) for _ in range(2))
    for s in (one, other):
        s.models[0].dropout = 0.0  # a graph's random numbers are others than an eager step's
    step = captured(one, monkeypatch)
    data = batches(4 * settings.get("accumulate", 1) + 2, poison=(2, 5) if "fp16" in policy else (), device=device)
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        losses = [step(x, y) for x, y in data]
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    assert [x.item() for x in losses] == pytest.approx([eager_step(other, x, y).item() for x, y in data], nan_ok=True)
    assert one.loss_scale == other.loss_scale
    assert one.skipped == other.skipped
    for a, b in zip(everything(one), everything(other), strict=True):
        torch.testing.assert_close(a, b, equal_nan=True)  # an infinite input leaves NaN running statistics
