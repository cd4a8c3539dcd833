"""Diagnose a function in this process, as the commands diagnose a script in a process of its own."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from mezzo.errors import ScriptError, SessionError
from mezzo.launch.torch import switched
from mezzo.launch.torch.premade import amp_off, existing
from mezzo.measure.environment import environment
from mezzo.observe.observer import StopScript
from mezzo.observe.settings import RangesSettings
from mezzo.policy import Policy
from mezzo.records import RangesRecord, RunRecord


def ranges(train: Callable[[], Any], *, policy: Policy | str = "fp16", steps: int = 20) -> RangesRecord:
    """Count by exponent where the values of the training steps lie that ``train()`` makes, and judge a policy by it.

    The steps run in FP32: autocast and GradScaler do nothing inside, and compiled code runs eagerly. After ``steps``
    updates ``train`` is ended by a SystemExit that goes no further than here. What it trained stays as it is then.

    Args:
        train: makes training steps, called without arguments.
        policy: whose formats, initial loss scale and FP32 modules are judged.
        steps: how many steps to watch.

    Raises:
        SessionError: ``steps`` is below 1.
        ScriptError: ``train`` made no training step.
    """
    if steps < 1:
        raise SessionError(f"steps={steps!r}; allowed: whole numbers from 1", hint="watch 20 steps: steps=20")
    judged = str(Policy.of(policy))
    wanted = RangesSettings(steps=tuple(range(1, steps + 1)), policy=judged)
    started = time.perf_counter()
    with amp_off(), switched(Policy.parse("fp32"), observe=wanted) as (run, _):
        # Made before the launcher could see it: without any, each backward pass would count as an update by hand.
        run.optimizers.update(dict.fromkeys(*existing(torch.optim.Optimizer)))
        for action in (train, run.close_update):
            try:
                action()
            except StopScript:
                pass
    assert run.observer is not None
    if not run.observer.watched:
        raise ScriptError(
            f"{_name(train)} ended without a training step that could be watched; {len(run.recorder)} were made",
            hint="pass a function that calls backward() and updates the weights",
        )
    whole = RunRecord(
        command=[sys.executable, *sys.argv],
        script=_name(train),
        script_sha256="",
        policy="fp32",
        environment=environment(run.device_type or "cpu"),
        steps=run.recorder.steps(),
        duration_s=time.perf_counter() - started,
    )
    record = run.observer.record(whole)
    assert isinstance(record, RangesRecord)
    return record


def _name(train: Callable[[], Any]) -> str:
    return getattr(train, "__qualname__", type(train).__name__)
