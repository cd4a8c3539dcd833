"""Profiles of audited steps: a script that profiles itself keeps its own, and nothing that is open ends under a second profile."""

from __future__ import annotations

import contextlib
import io
import json
import runpy
import traceback
from collections.abc import Callable

import pytest
import torch

from helpers_launch import as_script
from mezzo.launch.torch import switched
from mezzo.observe.audit import observer
from mezzo.observe.settings import AuditSettings
from paths import TESTS

SCRIPT = str(TESTS / "gpu" / "profiler_script.py")


@pytest.fixture
def profiled_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Profile audited steps here, too; return whether each was."""
    began: list[bool] = []

    def watch(self: observer.Audit) -> None:
        self._kernels.start()
        began.append(self._kernels._profiler is not None)

    monkeypatch.setattr(observer.Audit, "_watch_kernels", watch)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return began


@pytest.mark.usefixtures("profiled_on_a_cpu")
@pytest.mark.filterwarnings("ignore:CUDA is not available")
@pytest.mark.parametrize("steps", [(1,), (2, 3, 4, 5), (3, 8), (7,)], ids=str)
@pytest.mark.parametrize(
    ("kind", "in_way"),
    # A step lasts until the next one's backward pass begins: the first is still observed when a profile begins after its update.
    [
        ("whole", {1, 2, 3, 4, 5}),
        ("schedule", {1, 2, 3, 4, 5}),
        ("autograd", {1, 2, 3, 4, 5}),
        ("step", {1, 2, 3, 4, 5, 6, 7}),
    ],
)
def test_a_script_keeps_its_own_profile(kind: str, in_way: set[int], steps: tuple[int, ...]) -> None:
    printed = io.StringIO()
    with (
        as_script(SCRIPT, ["cpu", kind]),
        contextlib.redirect_stdout(printed),
        switched(None, observe=AuditSettings(steps=(*steps, 9))) as (run, _),  # not the last step: the script continues
    ):
        runpy.run_path(SCRIPT, run_name="__main__")
        assert isinstance(run.listeners.observer, observer.Audit)
        assert run.listeners.observer._kernels.gave_way == bool(in_way & set(steps))
    assert json.loads(printed.getvalue())["products"] is True


def products(watch: observer.KernelWatch) -> list[str]:
    """Return which products a profile has after it has discarded the earlier events."""
    profiler = watch._profiler
    watch.drop()
    return [
        event.name
        for event, _ in observer.calls(observer._after_restart(profiler.events()))
        if event.name.endswith("mm")
    ]


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_a_restarted_profile_has_only_what_follows() -> None:
    watch, x = observer.KernelWatch(), torch.ones(2, 2)
    watch.start()
    torch.addmm(x, x, x)
    watch.restart()
    torch.mm(x, x)
    watch.restart()
    torch.bmm(x[None], x[None])
    torch.mm(x, x)
    assert products(watch) == ["aten::bmm", "aten::mm"]


@pytest.mark.usefixtures("profiled_on_a_cpu")
@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_no_profile_ends_inside_an_optimizers_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """``Optimizer.step`` is an event of the profile: torch wrote its end into freed memory if a second profile had begun before that."""
    inside: list[str] = []
    for name in ("start", "drop"):
        original = getattr(observer.KernelWatch, name)

        def noted(self: observer.KernelWatch, name: str = name, original: Callable[..., None] = original) -> None:
            functions = [frame.name for frame in traceback.extract_stack() if frame.filename.endswith("optimizer.py")]
            inside.extend(f"{name} in {function}" for function in functions)
            original(self)

        monkeypatch.setattr(observer.KernelWatch, name, noted)
    with (
        as_script(SCRIPT, ["cpu", "none"]),
        contextlib.redirect_stdout(io.StringIO()),
        switched(None, observe=AuditSettings(steps=(2, 3, 5, 9))),
    ):
        runpy.run_path(SCRIPT, run_name="__main__")
    assert inside == []
