"""Loops patched for ``mezzo.Session``: what it takes over, and the loops that it cannot run."""

from __future__ import annotations

from pathlib import Path

import pytest

from mezzo.patching import Patch, Refused, make_patch
from mezzo.policy import Policy

HEAD = """import torch
from torch import nn
model, head = nn.Linear(2, 2), nn.Linear(2, 1)
first = torch.optim.SGD(model.parameters(), lr=0.1)
second = torch.optim.SGD(head.parameters(), lr=0.1)
"""
LOOP = (
    HEAD
    + """for x, y in data:
    loss = head(model(x)).mean()
    loss.backward()
    first.step()
    second.step()
"""
)


def outcome_of(source: str, tmp_path: Path, policy: str = "fp16") -> Patch | Refused:
    path = tmp_path / "script.py"
    path.write_text(source, encoding="utf-8")
    return make_patch(path, policy=Policy.parse(policy), style="mezzo")


def test_updates_without_a_backward_pass_between_are_one(tmp_path: Path) -> None:
    patch = outcome_of(LOOP, tmp_path)
    assert isinstance(patch, Patch), patch
    assert patch.patched.splitlines() == [
        "import mezzo",
        *HEAD.splitlines(),
        'session = mezzo.Session([model, head], [first, second], policy="fp16")',
        "for x, y in data:",
        "    with session.autocast():",
        "        loss = head(model(x)).mean()",
        "    session.backward(loss)",
        "    session.update()",
    ]


def test_the_session_has_the_scripts_own_name_of_mezzo(tmp_path: Path) -> None:
    source = LOOP.replace("import torch\n", "import torch\nimport mezzo as mz\n", 1).replace(
        "torch.optim.SGD", "mz.SGD"
    )
    patch = outcome_of(source, tmp_path)
    assert isinstance(patch, Patch), patch
    assert "import mezzo" not in patch.patched.splitlines()
    assert 'session = mz.Session([model, head], [first, second], policy="fp16")' in patch.patched.splitlines()


def test_retained_graphs_and_a_loss_in_the_call(tmp_path: Path) -> None:
    source = LOOP.replace(
        "    loss = head(model(x)).mean()\n    loss.backward()", "    head(model(x)).mean().backward(retain_graph=True)"
    )
    patch = outcome_of(source, tmp_path)
    assert isinstance(patch, Patch), patch
    assert "    session.backward(loss, retain_graph=True)" in patch.patched.splitlines()


EVALUATED = "def evaluate(m, x):\n    with torch.no_grad():\n        return m(x)\n"
SCHEDULED = """import torch
def train(model, optimizer, schedule):
    for x in data:
        loss = model(x).mean()
        loss.backward()
        optimizer.step()
        schedule.step()
def main():
    net = torch.nn.Linear(1, 1)
    adam = torch.optim.Adam(net.parameters())
    schedules = make(adam)
    train(net, adam, schedules)
"""


@pytest.mark.parametrize(
    ("source", "policy", "reason"),
    [
        (LOOP.replace("first.step()", "first.step(closure)"), "bf16", "line 9 passes a closure to step()"),
        (
            LOOP.replace("    first.step()\n    second.step()", "    for o in (first, second):\n        o.step()"),
            "fp16",
            "line 10 updates several optimizers in a loop",
        ),
        (LOOP.replace("SGD(head.parameters()", "SGD(groups"), "fp16", "the model that second updates was not found"),
        (LOOP.replace("loss.backward()", "loss.backward(weight)"), "fp16", "line 8 passes arguments to backward()"),
        (
            LOOP.replace("loss.backward()", "torch.autograd.backward([loss])"),
            "fp16",
            "line 8 differentiates several losses in one call",
        ),
        (LOOP, "tf32", ""),
    ],
)
def test_loops_that_a_session_cannot_run(source: str, policy: str, reason: str, tmp_path: Path) -> None:
    outcome = outcome_of(source, tmp_path, policy)
    if not reason:
        assert isinstance(outcome, Patch)
        assert "Session" not in outcome.patched
        return
    assert isinstance(outcome, Refused), outcome.diff
    assert outcome.reason.startswith(reason)


def test_a_model_in_16_bits_must_be_evaluated_in_the_session(tmp_path: Path) -> None:
    source = (
        "import torch\n"
        + EVALUATED.replace("m(x)", "model(x)").replace("(m, x)", "(model, x)")
        + "def main():\n    model = torch.nn.Linear(1, 1)\n    optimizer = torch.optim.SGD(model.parameters())\n"
        + "    for x in data:\n        loss = model(x).mean()\n        loss.backward()\n        optimizer.step()\n"
    )
    refused = outcome_of(source, tmp_path, "bf16-master")
    assert isinstance(refused, Refused)
    assert refused.reason.startswith("line 3 evaluates the model where the session cannot be reached")
    patch = outcome_of(source, tmp_path, "bf16:fp32_modules=head")
    assert isinstance(patch, Patch), patch
    assert [r.reason for r in patch.reasons if r.value == "validation left as it is"] == [
        "session cannot be reached from here"
    ]


def test_a_schedule_made_elsewhere(tmp_path: Path) -> None:
    patch = outcome_of(SCHEDULED, tmp_path)
    assert isinstance(patch, Patch), patch
    made = '    session = mezzo.Session(net, adam, policy="fp16", scheduler=schedules)'
    assert made in patch.patched.splitlines()


@pytest.mark.parametrize("metric", ["loss", "metrics=loss"])
def test_a_schedule_that_follows_a_metric_stays_in_the_script(metric: str, tmp_path: Path) -> None:
    patch = outcome_of(SCHEDULED.replace("schedule.step()", f"schedule.step({metric})"), tmp_path)
    assert isinstance(patch, Patch), patch
    lines = patch.patched.splitlines()
    assert '    session = mezzo.Session(net, adam, policy="fp16")' in lines
    assert f"        schedule.step({metric})" in lines
