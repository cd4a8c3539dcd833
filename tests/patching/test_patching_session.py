"""Loops patched for ``mezzo.Session``: what it takes over, and the loops that it cannot run."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers_patching import patch_of, refusal_of

HEAD = """import torch
from torch import nn
model, head = nn.Linear(2, 2), nn.Linear(2, 1)
first = torch.optim.SGD(model.parameters(), lr=0.1)
second = torch.optim.SGD(head.parameters(), lr=0.1)
"""
LOOP = f"""{HEAD}for x, y in data:
    loss = head(model(x)).mean()
    loss.backward()
    first.step()
    second.step()
"""


def test_updates_without_a_backward_pass_between_are_one(tmp_path: Path) -> None:
    patch = patch_of(LOOP, "fp16", tmp_path, "mezzo")
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
    patch = patch_of(source, "fp16", tmp_path, "mezzo")
    assert "import mezzo" not in patch.patched.splitlines()
    assert 'session = mz.Session([model, head], [first, second], policy="fp16")' in patch.patched.splitlines()


def test_retained_graphs_and_a_loss_in_the_call(tmp_path: Path) -> None:
    source = LOOP.replace(
        "    loss = head(model(x)).mean()\n    loss.backward()", "    head(model(x)).mean().backward(retain_graph=True)"
    )
    patch = patch_of(source, "fp16", tmp_path, "mezzo")
    assert "    session.backward(loss, retain_graph=True)" in patch.patched.splitlines()


TWICE, SEVERAL = "    first.step()\n    second.step()", "    for o in (first, second):\n        o.step()"
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
    ("old", "new", "policy", "reason"),
    [
        ("first.step()", "first.step(closure)", "bf16", "line 9 passes a closure to step()"),
        (TWICE, SEVERAL, "fp16", "line 10 updates several optimizers in a loop"),
        ("SGD(head.parameters()", "SGD(groups", "fp16", "the model that second updates was not found"),
        ("loss.backward()", "loss.backward(weight)", "fp16", "line 8 passes arguments to backward()"),
        (
            "loss.backward()",
            "torch.autograd.backward([loss])",
            "fp16",
            "line 8 differentiates several losses in one call",
        ),
    ],
)
def test_loops_that_a_session_cannot_run(old: str, new: str, policy: str, reason: str, tmp_path: Path) -> None:
    assert refusal_of(LOOP.replace(old, new), policy, tmp_path, "mezzo").reason.startswith(reason)


def test_a_format_that_needs_no_session_gets_none(tmp_path: Path) -> None:
    assert "Session" not in patch_of(LOOP, "tf32", tmp_path, "mezzo").patched


def test_a_model_in_16_bits_must_be_evaluated_in_the_session(tmp_path: Path) -> None:
    source = (
        "import torch\n"
        + EVALUATED.replace("m(x)", "model(x)").replace("(m, x)", "(model, x)")
        + "def main():\n    model = torch.nn.Linear(1, 1)\n    optimizer = torch.optim.SGD(model.parameters())\n"
        + "    for x in data:\n        loss = model(x).mean()\n        loss.backward()\n        optimizer.step()\n"
    )
    refused = refusal_of(source, "bf16-master", tmp_path, "mezzo")
    assert refused.reason.startswith("line 3 evaluates the model where the session cannot be reached")
    patch = patch_of(source, "bf16:fp32_modules=head", tmp_path, "mezzo")
    assert [r.reason for r in patch.reasons if r.value == "validation left as it is"] == [
        "session cannot be reached from here"
    ]


def test_a_schedule_made_elsewhere(tmp_path: Path) -> None:
    patch = patch_of(SCHEDULED, "fp16", tmp_path, "mezzo")
    made = '    session = mezzo.Session(net, adam, policy="fp16", scheduler=schedules)'
    assert made in patch.patched.splitlines()


@pytest.mark.parametrize("metric", ["loss", "metrics=loss"])
def test_a_schedule_that_follows_a_metric_stays_in_the_script(metric: str, tmp_path: Path) -> None:
    patch = patch_of(SCHEDULED.replace("schedule.step()", f"schedule.step({metric})"), "fp16", tmp_path, "mezzo")
    lines = patch.patched.splitlines()
    assert '    session = mezzo.Session(net, adam, policy="fp16")' in lines
    assert f"        schedule.step({metric})" in lines
