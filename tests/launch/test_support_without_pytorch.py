"""What only PyTorch scripts have is refused by name in other frameworks, and is empty where nobody asked for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from helpers_values import existing
from mezzo.errors import ScriptError
from mezzo.launch.request import ModelChanges, ScriptFile
from mezzo.launch.support import WithoutPyTorch, refusal
from mezzo.launch.training import StepLimit


class Training(WithoutPyTorch):
    stage = "Paddle"


REFUSED: list[tuple[Callable[[Any], Any], str]] = [
    (lambda training: training.begin_snapshots(object(), ScriptFile("train.py", ".", None, "")), "--snapshot"),
    (lambda training: training.begin_trace(object()), "mezzo resume-check"),
    (lambda training: training.begin_guard(object()), "--guard"),
    (lambda training: training.change_models(ModelChanges(channels_last=True)), "--channels-last"),
    (lambda training: training.change_models(ModelChanges(compiles=True)), "--compile"),
    (lambda training: training.change_models(ModelChanges(checkpoint="all")), "--checkpoint"),
]


@pytest.mark.parametrize(("ask", "feature"), REFUSED, ids=[feature for _, feature in REFUSED])
def test_what_is_asked_for_is_refused_as_before_the_script_runs(ask: Callable[[Any], Any], feature: str) -> None:
    with pytest.raises(ScriptError) as caught:
        ask(Training())
    before = existing(refusal(feature, "Paddle"))
    assert (caught.value.message, caught.value.hint) == (before.message, before.hint)


def test_a_step_limit_is_refused() -> None:
    with pytest.raises(ScriptError) as caught:
        Training().stop_after(StepLimit(steps=3, seconds=None))
    assert caught.value.message == "a step limit was set for a Paddle script; allowed: PyTorch scripts"


def test_what_nobody_asked_for_is_empty() -> None:
    training = Training()
    training.begin_snapshots(None, ScriptFile("train.py", ".", None, ""))
    training.begin_trace(None)
    assert (training.not_resumed, training.stopped_by_guard) == (None, None)
    assert (training.end_snapshots(), training.guardrails(), training.bottleneck()) == (None, None, None)  # type: ignore[func-returns-value]
    assert (training.findings(), training.weights()) == ([], "")
