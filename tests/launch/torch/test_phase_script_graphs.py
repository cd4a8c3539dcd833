"""CUDA graphs of a script, with a graph that runs on the CPU: what is recorded of captures and replays, and what is noted instead."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from mezzo.errors import ScriptError
from mezzo.launch.torch import switched
from mezzo.policy import Policy
from mezzo.records import Note

WHY = "steps that a graph of the script replays are not recorded: losses, times and verdicts cover the other steps"


class Graph:
    """A graph that runs what it captures, and whose replay does nothing."""

    num_replays = 0

    def capture_begin(self, *args: Any, **kwargs: Any) -> None:
        pass

    def capture_end(self) -> None:
        pass

    def replay(self) -> None:
        Graph.num_replays += 1


@pytest.fixture(autouse=True)
def graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(Graph, "num_replays", 0)


@contextmanager
def capture(graph: Any) -> Iterator[None]:
    graph.capture_begin()
    try:
        yield
    finally:
        graph.capture_end()


class Script:
    """A model, its optimizer, and the parts of a step."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model, self.x = nn.Linear(4, 2), torch.randn(8, 4)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def forward(self) -> None:
        with torch.no_grad():
            self.model(self.x)

    def backward(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.x).square().mean().backward()

    def gradients(self) -> None:
        torch.autograd.grad(self.model(self.x).square().mean(), list(self.model.parameters()))

    def update(self) -> None:
        self.optimizer.step()

    def step(self) -> None:
        self.backward()
        self.update()


@pytest.mark.parametrize("policy", [None, "fp32", "bf16", "bf16:op_lists=device", "bf16-master"])
@pytest.mark.parametrize(
    ("captured", "counted"),
    [(Script.step, 100), (Script.backward, 100), (Script.gradients, 100), (Script.update, 100), (Script.forward, 0)],
)
def test_replays_of_what_trains_are_counted_and_captures_are_no_steps(
    policy: str | None, captured: Callable[[Script], None], counted: int
) -> None:
    with switched(None if policy is None else Policy.parse(policy)) as (run, measured):
        script, graph = Script(), torch.cuda.CUDAGraph()
        for _ in range(3):
            script.step()
        with capture(graph):
            captured(script)
        for _ in range(100):
            graph.replay()
    assert Graph.num_replays == 100
    steps = run.update.recorder.steps()
    assert len(steps) == 3
    assert all(loss == loss for loss in steps.loss)
    assert measured.effective().num_replays == counted
    notes = [one for one in measured.effective().left_alone if one.what == "CUDA graph"]
    assert notes == ([Note(what="CUDA graph", value="100 replays", reason=WHY)] if counted else [])


def test_a_capture_ends_the_steady_state_and_steps_after_it_are_recorded() -> None:
    with switched(None) as (run, measured):
        script, graph = Script(), torch.cuda.CUDAGraph()
        for _ in range(120):
            script.step()
        assert run.steady_state.optimizer() is script.optimizer
        with capture(graph):
            script.step()
        assert run.steady_state.optimizer() is None
        graph.replay()
        for _ in range(7):
            script.step()
    assert len(run.update.recorder.steps()) == 127
    assert [one.value for one in measured.effective().left_alone] == ["1 replay"]


@pytest.mark.parametrize("captured", [Script.step, Script.backward, Script.gradients, Script.update])
def test_a_policy_with_a_loss_scale_refuses_the_capture_with_what_to_do(captured: Callable[[Script], None]) -> None:
    with switched(Policy.parse("fp16")):
        script = Script()
        script.step()
        script.backward()
        with pytest.raises(ScriptError, match="under fp16, whose loss scale reads a flag") as raised, capture(Graph()):
            captured(script)
    assert raised.value.hint.startswith("try --policy bf16, which needs no scale; or train without a graph")


def test_a_forward_pass_may_be_captured_under_a_loss_scale() -> None:
    with switched(Policy.parse("fp16")) as (run, measured):
        script, graph = Script(), torch.cuda.CUDAGraph()
        script.step()
        with capture(graph):
            script.forward()
        graph.replay()
        script.step()
    assert len(run.update.recorder.steps()) == 2
    assert measured.effective().left_alone == []


def test_the_scripts_own_scaler_is_not_read_in_a_capture() -> None:
    with switched(None) as (run, _):
        script, graph = Script(), torch.cuda.CUDAGraph()
        scaler = torch.amp.GradScaler("cpu")

        def step() -> None:
            script.optimizer.zero_grad()
            scaler.scale(script.model(script.x).square().mean()).backward()
            scaler.step(script.optimizer)
            scaler.update()

        for _ in range(3):
            step()
        with capture(graph):
            step()
        graph.replay()
        step()
        findings = run.lint.findings()
    assert len(run.update.recorder.steps()) == 4
    assert findings == []


# --- torch's own passes ----------------------------------------------------------------------------------------------------


def make_graphed_callables(script: Script) -> None:
    torch.cuda.make_graphed_callables(script.model, (script.x,))


def gradcheck(script: Script) -> None:
    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(torch.sin, (x,))
    assert torch.autograd.gradgradcheck(torch.sin, (x,))


def graphed(model: nn.Module, sample: tuple[torch.Tensor, ...]) -> nn.Module:
    """Make the passes of ``torch.cuda.make_graphed_callables``: warm-ups, and a capture of each direction."""
    parameters = list(model.parameters())
    for _ in range(3):
        torch.autograd.grad(model(*sample).square().mean(), parameters)
    with capture(torch.cuda.CUDAGraph()):
        out = model(*sample)
    with capture(torch.cuda.CUDAGraph()):
        torch.autograd.grad(out, parameters, torch.ones_like(out))
    return model


@pytest.mark.parametrize("policy", [None, "bf16", "fp16"])
@pytest.mark.parametrize("made", ["before", "after"])
@pytest.mark.parametrize("call", [make_graphed_callables, gradcheck])
def test_passes_of_torch_are_no_steps(
    monkeypatch: pytest.MonkeyPatch, call: Callable[[Any], None], made: str, policy: str | None
) -> None:
    monkeypatch.setattr(torch.cuda, "make_graphed_callables", graphed)
    with switched(None if policy is None else Policy.parse(policy)) as (run, measured):
        script = Script() if made == "before" else _without_optimizer()
        call(script)
        script.optimizer = torch.optim.SGD(script.model.parameters(), lr=0.1)
        for _ in range(20):
            script.step()
    steps = run.update.recorder.steps()
    assert len(steps) == 20
    assert all(loss == loss for loss in steps.loss)
    assert measured.effective().left_alone == []


def _without_optimizer() -> Script:
    script = Script.__new__(Script)
    torch.manual_seed(0)
    script.model, script.x = nn.Linear(4, 2), torch.randn(8, 4)
    return script
