"""A policy that lowers nothing is never reported as tried: every command says what stayed in FP32, and why."""

from __future__ import annotations

import html
import io
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn

import mezzo
from helpers_launch import observed_record, run_record
from mezzo.devices import this_device
from mezzo.errors import ScriptError
from mezzo.launch.torch import TorchTraining, switched
from mezzo.observe.observer import StopScript
from mezzo.observe.settings import AnySettings, AuditSettings, DiagnoseSettings
from mezzo.policy import Policy
from mezzo.records import AuditRecord
from mezzo.report import terminal
from mezzo.report.html import render_html
from mezzo.report.pages import page_of

ROWS, WIDTH, INNER = 16, 4, 8
PRODUCT_FLOPS = 2 * ROWS * (WIDTH * INNER + INNER)  # of the forward pass
STEP_FLOPS = PRODUCT_FLOPS + 2 * ROWS * (WIDTH * INNER + 2 * INNER)  # the input needs no gradient


class Functional(nn.Module):
    """Compute with functions of torch alone."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(INNER, WIDTH) * 0.3)
        self.v = nn.Parameter(torch.randn(1, INNER) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.relu(F.linear(x, self.w)), self.v)


class SwitchesOff(nn.Module):
    """Turn autocast off around all that it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, INNER, bias=False), nn.ReLU(), nn.Linear(INNER, 1, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            output: Tensor = self.body(x)
            return output


class WithoutProducts(nn.Module):
    """Multiply elements and add them up, which FP16 keeps in FP32."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.w).sum(1, keepdim=True)


def trainer(model: nn.Module, call: Callable[[Tensor], Tensor], *, steps: int = 4) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = torch.randn(steps, ROWS, WIDTH, generator=torch.Generator().manual_seed(0))

    def train() -> None:
        for x in data:
            optimizer.zero_grad()
            ((call(x) - x.sum(1, keepdim=True)) ** 2).mean().backward()
            optimizer.step()

    return train


class Case(NamedTuple):
    name: str
    make: Callable[[], Callable[[], None]]
    flops: dict[str, int]
    """Of one step."""
    left_alone: list[tuple[str, str]]
    """What a run left alone, and how much of it."""
    fallback: str
    """The headline of ``fallback``, or the error that it ends with."""


def _functional() -> Callable[[], None]:
    model = Functional()
    return trainer(model, model.forward)


def _plain() -> Callable[[], None]:
    model = Functional()

    def call(x: Tensor) -> Tensor:
        return torch.relu(x @ model.w.T) @ model.v.T

    return trainer(model, call)


def _of(model: Callable[[], nn.Module]) -> Callable[[], Callable[[], None]]:
    def make() -> Callable[[], None]:
        made = model()
        return trainer(made, made)

    return make


SHARE = f"{PRODUCT_FLOPS / STEP_FLOPS:.0%} of FLOPs and their backward pass"
WIDE = {"fp32": STEP_FLOPS}
NO_MODULE = "calls no module whose parameters get gradients, so there is none to keep in FP32"
SAME_BITS = "fp16 does not change a single bit of any gradient of train, so nothing was tried"
CASES = [
    Case("forward_by_name", _functional, WIDE, [("FP32 code", SHARE)], NO_MODULE),
    Case("plain_functions", _plain, WIDE, [("FP32 code", SHARE)], NO_MODULE),
    Case("own_autocast_off", _of(SwitchesOff), WIDE, [("FP32 inside modules", SHARE)], SAME_BITS),
    Case("no_products", _of(WithoutProducts), {}, [("nothing to lower", "no products")], SAME_BITS),
]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def shown(record: object) -> str:
    console = Console(file=io.StringIO(), width=200, color_system=None, force_terminal=False)
    terminal.render(record, console)  # type: ignore[arg-type]
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def audited_under(policy: str | None, train: Callable[[], None]) -> AuditRecord:
    """Return the audit of a function's third step."""
    record = observed_record(train, policy, AuditSettings(steps=(3,)))
    assert isinstance(record, AuditRecord)
    return record


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_diagnose_says_that_nothing_was_tried(case: Case) -> None:
    record = mezzo.diagnose(case.make(), policy="fp16")
    effective = record.run.effective
    assert record.verdict == "healthy"
    assert record.run.changed_nothing
    inspected = len(record.passes[0].watched)
    assert inspected == 4
    assert effective.flops_by_format == {name: inspected * flops for name, flops in case.flops.items()}
    assert (effective.num_lowered, effective.emulated) == (0, False)
    assert [(left.what, left.value) for left in effective.left_alone] == case.left_alone
    page = page_of(record)
    assert page.answer.sentence.endswith("every loss and gradient is finite in 4 steps, but fp16 changed nothing")
    assert (page.answer.word, page.answer.tone) == ("healthy", "open")
    ran = "100% fp32 ran" if case.flops else "no operation ran below 32 bits"
    assert f"healthy: but this says nothing about fp16, which changed nothing: {ran}" in shown(record)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_run_says_what_was_left_alone(case: Case) -> None:
    with switched(Policy.parse("fp16")) as (run, counted):
        case.make()()
    training = TorchTraining(run, counted)
    seen = {"steps": training.steps(), "effective": training.effective()}
    record = run_record("fp16").model_copy(update=seen)
    assert record.changed_nothing
    assert record.effective.flops_by_format == case.flops
    assert (record.effective.num_lowered, record.effective.emulated) == (0, False)
    assert [(left.what, left.value) for left in record.effective.left_alone] == case.left_alone
    assert "fp16 changed nothing: " in page_of(record).answer.sentence


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_audit_shows_what_was_left_alone(case: Case) -> None:
    record = audited_under("fp16", case.make())
    effective = record.run.effective
    assert (effective.num_lowered, record.run.changed_nothing) == (0, True)
    assert [(left.what, left.value) for left in effective.left_alone] == case.left_alone
    page = page_of(record)
    assert "; fp16 changed nothing; " in page.answer.sentence
    assert [(fact.what, fact.value) for fact in page.facts("Notes")] == [
        ("below 32 bits", "no operation"),
        *case.left_alone,
        ("kernels", "not recorded"),
    ]
    page = " ".join(html.unescape(render_html(record)).split())
    terminal = " ".join(shown(record).split())
    for left in effective.left_alone:
        assert left.value in page
        assert left.reason in page
        assert left.value in terminal


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_fallback_does_not_call_it_harmless(case: Case) -> None:
    train = case.make()
    if case.fallback == NO_MODULE:
        with pytest.raises(ScriptError, match=NO_MODULE):
            mezzo.fallback(train)
        return
    record = mezzo.fallback(train)
    script = record.run.script.rpartition(".")[2]
    assert page_of(record).answer.sentence.replace(record.run.script.rpartition("/")[2], script) == case.fallback
    assert "so this says nothing about it" in record.reason
    assert [step.command.partition("(")[0] for step in page_of(record).steps] == ["mezzo.audit"]


def test_ranges_counts_gradients_that_a_policy_keeps() -> None:
    record = mezzo.ranges(_of(WithoutProducts)(), policy="fp16")
    headline = page_of(record).answer.sentence
    assert headline.startswith("fp16 keeps every gradient of ")
    assert {window.reason for window in record.windows} == {"fp16 keeps every gradient in FP32"}


def test_ranges_says_that_no_module_was_called() -> None:
    record = mezzo.ranges(_functional(), policy="fp16")
    note = next(note for note in record.notes if note.what == "activations")
    assert note.reason.endswith("fp16 lowers none of them. Call a model as model(x), not as model.forward(x)")


@pytest.mark.parametrize("policy", ["fp16", "bf16", "fp16-master", "fp8"])
def test_a_policy_that_lowers_says_so(policy: str) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, INNER), nn.ReLU(), nn.Linear(INNER, 1))
    record = mezzo.diagnose(trainer(model, model), policy=policy)
    assert not record.run.changed_nothing
    assert record.run.effective.left_alone == []
    assert record.run.effective.num_lowered
    arithmetic, _ = Policy.parse(policy).arithmetic_on(this_device("cpu"))
    assert record.run.effective.emulated == (arithmetic == "emulated")
    assert sum(record.run.effective.flops_by_format.values()) == 4 * STEP_FLOPS
    assert page_of(record).answer.sentence.endswith("nothing wrong in 4 steps")


@pytest.mark.parametrize("policy", ["fp32", "as-is"])
def test_a_policy_that_is_not_asked_to_lower_has_changed_nothing_to_tell(policy: str) -> None:
    record = mezzo.diagnose(_functional(), policy=policy)
    assert not record.run.changed_nothing
    assert record.run.effective.left_alone == []


def test_audit_sees_products_outside_modules() -> None:
    # Between an update and the next forward pass a function mode sees the script's calls: these still count as the script's own.
    record = audited_under(None, _functional())
    assert record.flops_by_phase["forward"] == {"fp32": PRODUCT_FLOPS}
    assert record.flops_by_format == WIDE


@pytest.mark.parametrize("command", ["diagnose", "audit"])
def test_counts_are_those_of_the_thread_that_trains(command: str) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, INNER), nn.ReLU(), nn.Linear(INNER, 1))
    first, done = threading.Event(), threading.Event()

    def evaluate() -> None:
        with torch.no_grad():
            while not done.is_set():
                model(torch.ones(ROWS, WIDTH))
                first.set()

    def train() -> None:
        thread = threading.Thread(target=evaluate)
        thread.start()
        assert first.wait(60)  # the other thread calls the model first
        try:
            trainer(model, model)()
        finally:
            done.set()
            thread.join()

    settings: AnySettings = AuditSettings(steps=(1,)) if command == "audit" else DiagnoseSettings(steps=(1, 2))
    with switched(Policy.parse("bf16"), observe=settings) as (run, _), suppress(StopScript):
        train()
    assert run.listeners.observer is not None
    record = run.listeners.observer.record(run_record("bf16"))
    effective = record.run.effective if isinstance(record, AuditRecord) else record.effective  # type: ignore[union-attr]
    assert effective.flops_by_format == {"bf16": STEP_FLOPS * len(settings.steps)}
    assert run.listeners.observer.watched == list(settings.steps)
