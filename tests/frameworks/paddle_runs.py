"""What Paddle's tests share: Paddle itself, imported without its warnings, and code run under a policy."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of its import: a compiler cache that is not there
    paddle: Any = importlib.import_module("paddle")

from mezzo.errors import MezzoError
from mezzo.launch.paddle import training
from mezzo.measure.environment import environment_without_torch
from mezzo.observe.settings import AnySettings, StopScript
from mezzo.policy import Policy
from mezzo.records import Effective, Memory, Note, RunRecord, Steps

AS_IS = "as-is"


@dataclass(frozen=True)
class Ran:
    """Hold what code returned, and what was recorded of it."""

    value: Any
    steps: Steps
    effective: Effective
    memory: Memory
    explanation: list[Note]

    @property
    def reasons(self) -> dict[str, str]:
        """Return what was left alone: what and value, with the reason."""
        return {f"{r.what} {r.value}": r.reason for r in self.effective.left_alone}


def ran(code: Callable[[], Any], policy: str, *, seed: int | None = 0) -> Ran:
    """Run ``code`` under ``policy``, as the process of a script does; warnings of Paddle's own are not errors in it."""
    chosen = None if policy == AS_IS else Policy.parse(policy)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with training(chosen, seed=seed) as told:
            value = code()
            told.close_update()
    return Ran(value, told.steps(), told.effective(), told.memory(), told.explanation())


def numbers(tensor: Any) -> np.ndarray[Any, Any]:
    """Return a tensor's values."""
    return np.array(tensor.numpy())


def network() -> Any:
    """Return a small network with a convolution, a normalisation and a linear layer, from the global seed."""
    nn = paddle.nn
    return nn.Sequential(
        nn.Conv2D(1, 4, 3, bias_attr=False), nn.BatchNorm2D(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)
    )


def batches(count: int) -> list[tuple[Any, Any]]:
    """Return ``count`` batches of eight images of 4 x 4 pixels with one of three labels, from a seed of their own."""
    draw = np.random.Generator(np.random.PCG64(7))
    labels = draw.integers(0, 3, (count, 8))
    images = draw.standard_normal((count, 8, 1, 4, 4)) + labels[:, :, None, None, None]
    return [(paddle.to_tensor(x.astype(np.float32)), paddle.to_tensor(y)) for x, y in zip(images, labels, strict=True)]


def observed(code: Callable[[], Any], policy: str, settings: AnySettings) -> tuple[Any, RunRecord]:
    """Run ``code`` under an observer, as the process of a script does; return the observer and the run's record."""
    chosen = None if policy == AS_IS else Policy.parse(policy)
    error: MezzoError | None = None
    paddle.seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with training(chosen, seed=0, observe=settings) as told:
            try:
                code()
                told.close_update()
            except StopScript:
                pass
            except MezzoError as raised:
                error = raised
    run = RunRecord(
        command=["mezzo"],
        script="train.py",
        script_sha256="",
        framework=told.framework,
        policy=policy,
        environment=environment_without_torch(),
        steps=told.steps(),
        exit_code=0 if error is None else error.exit_code,
        error=None if error is None else error.message,
    )
    return told.observer, run


def fit(loss_of: Callable[[int], Any], parameters: list[Any], *, steps: int = 6, optimizer: Any = None) -> None:
    """Train ``steps`` steps, numbered from 1, by plain gradient descent or ``optimizer``, or several of them."""
    update = optimizer or paddle.optimizer.SGD(1e-2, parameters=parameters)
    updates = update if isinstance(update, list) else [update]
    for step in range(1, steps + 1):
        loss_of(step).backward()
        for one in updates:
            one.step()
            one.clear_grad()
