"""Compare points: nothing without a listener, and what a run keeps of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import mezzo
from helpers_diff import values_of
from mezzo.callables import _trained
from mezzo.observe.compare_points import listen
from mezzo.observe.settings import ValuesSettings
from mezzo.observe.values import observer

SCORES = """
import torch, mezzo
from torch import nn

torch.manual_seed(0)
model = nn.Linear(3, 2)
with torch.no_grad():
    x = model(torch.ones(4, 3))
    mezzo.compare_point("scores", x)
    mezzo.compare_point("scores", x.bfloat16())
    mezzo.compare_point("other", x.t())
"""


def test_nothing_happens_without_a_listener() -> None:
    values = torch.ones(3, requires_grad=True)
    mezzo.compare_point("scores", values)
    mezzo.compare_point("scores", "no tensor")
    assert values._version == 0


def test_a_listener_hears_until_it_ends() -> None:
    heard: list[tuple[str, object]] = []
    end = listen(lambda name, values: heard.append((name, values)))
    mezzo.compare_point("one", 1)
    end()
    mezzo.compare_point("two", 2)
    assert heard == [("one", 1)]


def test_the_values_of_a_run_are_kept_by_name_and_number() -> None:
    log = values_of(SCORES)
    torch.manual_seed(0)
    scores = torch.nn.Linear(3, 2)(torch.ones(4, 3)).detach()
    assert {name: values.shape for name, values in log.points.items()} == {
        "scores#1": (4, 2),
        "scores#2": (4, 2),
        "other#1": (2, 4),
    }
    np.testing.assert_array_equal(log.points["scores#1"], scores.double())
    np.testing.assert_array_equal(log.points["scores#2"], scores.bfloat16().double())
    points = [event for event in log.events if event.kind == "point"]
    assert [event.op for event in points] == ["scores", "scores", "other"]
    assert [event.line for event in points] == [f"/diff/train.py:{line}" for line in (9, 10, 11)]


def test_what_is_not_kept_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observer, "_MOST_ELEMENTS", 3)

    def score() -> None:
        x = torch.nn.Linear(3, 2)(torch.ones(4, 3))
        mezzo.compare_point("large", x)
        mezzo.compare_point("list", x.tolist())

    trained, run, _ = _trained(score, None, ValuesSettings(steps=(1,)), [])
    assert isinstance(trained.observer, observer.RecordedValues)
    log = trained.observer.log(run)
    assert log.problems == {
        "compare point large": "it has 8 elements, and at most 3 are kept: its norm alone is compared",
        "compare point list": "a list was passed; allowed: a tensor",
    }
    assert log.points == {}
    assert [event.op for event in log.events if event.kind == "point"] == ["large"]
