"""What only PyTorch scripts have is refused by name in other frameworks, and is empty where nobody asked for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mezzo.errors import ScriptError
from mezzo.launch.without_pytorch import WithoutPyTorch


class Training(WithoutPyTorch):
    framework_shown = "Fortran"


REFUSED: list[tuple[Callable[[Any], Any], str]] = [
    (lambda training: training.stop_after(3), "a step limit was set for"),
    (lambda training: training.begin_snapshots(object()), "snapshots were requested of"),
    (lambda training: training.begin_trace(object()), "mezzo resume-check was given"),
    (lambda training: training.begin_guard(object()), "a guard was requested of"),
    (lambda training: training.change_models(object()), "--channels-last or --compile was given for"),
]


@pytest.mark.parametrize(("ask", "said"), REFUSED, ids=[said for _, said in REFUSED])
def test_what_is_asked_for_is_refused(ask: Callable[[Any], Any], said: str) -> None:
    with pytest.raises(ScriptError) as caught:
        ask(Training())
    assert caught.value.message == f"{said} a Fortran script; allowed: PyTorch scripts"


def test_what_nobody_asked_for_is_empty() -> None:
    training = Training()
    training.begin_snapshots(None)
    training.begin_trace(None)
    assert (training.not_resumed, training.stopped_by_guard) == (None, None)
    assert (training.end_snapshots(), training.guardrails(), training.bottleneck()) == (None, None, None)  # type: ignore[func-returns-value]
    assert (training.findings(), training.weights()) == ([], "")
