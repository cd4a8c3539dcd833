"""Diagnose a function in this process, as ``mezzo diagnose`` does a script in a process of its own."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from mezzo.errors import ScriptError, SessionError
from mezzo.launch.request import AS_IS
from mezzo.launch.torch import switched
from mezzo.measure.environment import environment
from mezzo.observe.nonfinite import words
from mezzo.observe.observer import StopScript
from mezzo.observe.settings import DiagnoseSettings
from mezzo.policy import Policy
from mezzo.records import DiagnoseRecord, Pass, RunRecord


def diagnose(train: Callable[[], Any], *, policy: Policy | str = AS_IS, steps: int = 20) -> DiagnoseRecord:
    """Return where the first value that is not finite comes from in the training steps that ``train()`` makes.

    A function cannot be run again from where it was, so the operations of every step are looked at, and the cause is
    told from the operation alone. ``train`` is ended by a SystemExit, which goes no further than here, at the first fault or
    after ``steps`` updates. An error of ``train`` in a step that is not finite ends it too, and is in the record.

    Args:
        train: makes training steps, called without arguments.
        policy: what to run them under; ``as-is`` for their own precision.
        steps: how many steps to watch at most.

    Raises:
        SessionError: ``train`` cannot be called, or ``steps`` is below 1.
        ScriptError: ``train`` made no training step.
    """
    if not callable(train) or steps < 1:
        raise SessionError(
            f"diagnose(train={train!r}, steps={steps!r}): train is a function without arguments, steps 1 or more",
            hint="pass a function that trains: mezzo.diagnose(lambda: train(loader))",
        )
    chosen = None if policy == AS_IS else Policy.of(policy)
    wanted = DiagnoseSettings(steps=tuple(range(1, steps + 1)))
    started, error = time.perf_counter(), None
    with switched(chosen, observe=wanted) as (run, _):
        try:
            train()
        except StopScript:
            pass
        except Exception as raised:
            error = raised
        try:
            run.close_update()
        except StopScript:
            pass
    assert run.observer is not None
    whole = RunRecord(
        command=[sys.executable, *sys.argv],
        script=getattr(train, "__qualname__", type(train).__name__),
        script_sha256="",
        policy=AS_IS if chosen is None else str(chosen),
        environment=environment(run.device_type or "cpu"),
        steps=run.recorder.steps(),
        duration_s=time.perf_counter() - started,
        exit_code=int(error is not None),
        error=None if error is None else f"{type(error).__name__}: {error}",
        findings=run.lint.findings(),
    )
    record = run.observer.record(whole)
    assert isinstance(record, DiagnoseRecord)
    if error is not None and not record.located:
        raise error
    if not len(run.recorder) and not record.located:
        raise ScriptError(
            f"{whole.script} ended without a training step",
            hint="pass a function that calls backward() and updates the weights",
        )
    seen = Pass(policy=whole.policy, reason="every step's operations", num_steps=len(run.recorder))
    skips = words.skipped(whole, record.faulty_steps) if record.verdict == "scale_overflow" else ""
    update = {
        "passes": [seen.model_copy(update={"watched": run.observer.watched})],
        "detail": ". ".join(filter(None, [record.detail, skips])),
    }
    return record.model_copy(update=update)
