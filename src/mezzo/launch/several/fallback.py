"""Find the modules of a training that have to stay in FP32: of a script in child processes, of a function in this one.

A function is called again and again, so each time it finds what it found at first: random numbers, weights, gradients,
buffers, learning rates and schedules are put back. What else it changes, such as an iterator that it reads from, it
would find changed: the search then says that no two runs see the same.
"""

from __future__ import annotations

import contextlib
import copy
import random
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from mezzo.errors import NonFiniteLossError, ScaleFloorError, ScriptError, SessionError
from mezzo.launch.process.command_signals import stoppable
from mezzo.launch.request import Request
from mezzo.launch.runner import run_child
from mezzo.observe.fallback.evidence import Measured
from mezzo.observe.fallback.find import find
from mezzo.observe.settings import FallbackSettings
from mezzo.policy import Policy
from mezzo.records import FallbackRecord, RunRecord

_OVERFLOWS = (NonFiniteLossError.exit_code, ScaleFloorError.exit_code)
_RUNS = "runs"


def fallback(
    train: Callable[[], Any],
    *,
    policy: Policy | str = "fp16",
    tolerance: float | None = None,
    fresh: int = 2,
) -> FallbackRecord:
    """Return which modules have to stay in FP32 for the training steps that ``train()`` makes, verified.

    ``train`` is called some ten times, from the same state each time. Its updates are held back, and it is ended by a
    SystemExit after ``1 + fresh`` steps. Afterwards everything is as it was before.

    Args:
        train: makes training steps, called without arguments; the same ones at every call.
        policy: what is judged; modules that it keeps in FP32 stay kept.
        tolerance: the largest relative error of a parameter's gradient that passes; None for one that suits the format.
        fresh: how many more batches the set is checked on.

    Raises:
        PolicyError: the policy computes nothing below FP32.
        SessionError: ``train`` cannot be called, or a number is out of range.
        ScriptError: ``train`` made no training step that can be compared.
    """
    if not callable(train):
        raise SessionError(
            f"train={train!r}; allowed: a function without arguments",
            hint="pass a function that makes training steps, as mezzo.fallback(train)",
        )
    with tempfile.TemporaryDirectory(prefix="mezzo-") as folder:
        measure = _Calls(train)
        name = getattr(train, "__qualname__", type(train).__name__)

        def command(kind: str, under: str) -> str:
            return f'mezzo.{kind}({name}, policy="{under}")'

        return find(measure, Policy.of(policy), folder=folder, tolerance=tolerance, command=command, fresh=fresh)


def fallback_of_script(
    request: Request,
    *,
    folder: Path,
    tolerance: float | None = None,
    fresh: int = 2,
    note: Callable[[str], None] = lambda _: None,
) -> FallbackRecord:
    """Return which modules of a script have to stay in FP32 under the policy of ``request``.

    Each run's record and output stay under ``runs`` in ``folder``; the reference's gradients are deleted.

    Args:
        request: the script, its arguments and the policy.
        folder: where the runs' files go.
        tolerance: the largest relative error of a parameter's gradient that passes; None for one that suits the format.
        fresh: how many more batches the set is checked on.
        note: is told what happens.
    """
    runs = (folder / _RUNS).absolute()
    shutil.rmtree(runs, ignore_errors=True)
    runs.mkdir(parents=True)
    try:
        measure = _Children(request, runs)
        policy = Policy.of(request.policy)

        def command(kind: str, under: str) -> str:
            module = ["-m"] if request.kind == "module" else []
            return shlex.join(["mezzo", kind, "--policy", under, *module, request.target, *request.arguments])

        return find(measure, policy, folder=str(runs), tolerance=tolerance, command=command, fresh=fresh, note=note)
    finally:
        for gradients in runs.glob("*.pt"):
            gradients.unlink()


def _read(settings: FallbackSettings) -> Measured:
    path = Path(settings.folder) / f"{settings.name}.measured.json"
    return Measured.model_validate_json(path.read_text(encoding="utf-8")) if path.is_file() else Measured()


def _checked(measured: Measured, run: RunRecord, *, where: str, role: str) -> Measured:
    """Refuse a run that shows nothing; one in lower precision may fail for what is searched."""
    if measured.problem:
        raise ScriptError(
            f"the gradients of {run.script} cannot be compared between precisions: {measured.problem}",
            hint="train with an optimizer that needs no closure while modules are searched",
        )
    overflowed = role == "check" and run.exit_code in _OVERFLOWS
    if not measured.steps and not overflowed:
        raise ScriptError(
            f"{run.script} made no training step that could be compared: {run.error or 'it ended before'}",
            hint=f"run it by itself first; {where}",
        )
    return measured


class _Children:
    """Run a script's first steps in a process of its own each time."""

    def __init__(self, request: Request, folder: Path) -> None:
        self._request, self._folder = request, folder

    def __call__(self, policy: Policy, settings: FallbackSettings) -> tuple[Measured, RunRecord]:
        output = self._folder / f"{settings.name}.log"
        request = self._request.model_copy(
            update={
                "policy": str(policy),
                "observe": settings,
                "record_path": str(self._folder / f"{settings.name}.record.json"),
            }
        )
        with stoppable() as stop:
            run = run_child(request, output=output)
            stop.check(run)
        where = f"what it printed is in {output}"
        return _checked(_read(settings), run, where=where, role=settings.role), run


class _Calls:
    """Call a function each time, from the same state."""

    def __init__(self, train: Callable[[], Any]) -> None:
        self._train = train
        self._name = getattr(train, "__qualname__", type(train).__name__)

    def __call__(self, policy: Policy, settings: FallbackSettings) -> tuple[Measured, RunRecord]:
        from mezzo.launch.torch.premade import amp_off
        from mezzo.measure.environment import environment

        started = time.perf_counter()
        with _state_put_back() as optimizers, amp_off():
            run, ending = self._run(policy, settings, optimizers)
            record = RunRecord(
                command=[sys.executable, *sys.argv],
                script=self._name,
                script_sha256="",
                policy=str(policy),
                environment=environment(run.device_type or "cpu"),
                steps=run.recorder.steps(),
                duration_s=time.perf_counter() - started,
                exit_code=0 if ending is None else ending.exit_code,
                error=None if ending is None else ending.message,
            )
            run.observer.record(record)
        return _checked(_read(settings), record, where="it was called as a function", role=settings.role), record

    def _run(
        self, policy: Policy, settings: FallbackSettings, optimizers: list[Any]
    ) -> tuple[Any, NonFiniteLossError | ScaleFloorError | None]:
        from mezzo.launch.torch import switched
        from mezzo.observe.observer import StopScript

        ending: NonFiniteLossError | ScaleFloorError | None = None
        with switched(policy, observe=settings) as (run, _):
            # Made before the launcher could see it: without any, each backward pass would count as an update by hand.
            run.optimizers.update(dict.fromkeys(optimizers))
            for action in (self._train, run.close_update):
                try:
                    action()
                except StopScript:
                    pass
                except (NonFiniteLossError, ScaleFloorError) as error:
                    ending = ending or error
        return run, ending


@contextlib.contextmanager
def _state_put_back() -> Iterator[list[Any]]:
    """Put back the state of every module, optimizer and scheduler there is, and of random numbers; give the optimizers."""
    import torch
    from torch import nn
    from torch.optim.lr_scheduler import LRScheduler

    from mezzo.launch.torch.premade import existing

    optimizers, modules, schedulers = existing(torch.optim.Optimizer, nn.Module, LRScheduler)
    with ExitStack() as stack:
        _put_back_random_numbers(stack)
        for module in modules:
            _put_back_module(stack, module)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                stack.callback(group.update, {k: copy.copy(v) for k, v in group.items() if k != "params"})
        for scheduler in schedulers:
            stack.callback(scheduler.__dict__.update, _plain_state(scheduler))
        yield optimizers


def _plain_state(scheduler: Any) -> dict[str, Any]:
    kept = {k: v for k, v in vars(scheduler).items() if isinstance(v, (int, float, str, list, tuple, dict))}
    return {k: copy.copy(v) for k, v in kept.items()}


def _put_back_random_numbers(stack: ExitStack) -> None:
    import torch

    stack.callback(random.setstate, random.getstate())
    stack.callback(torch.set_rng_state, torch.get_rng_state())
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        stack.callback(torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all())
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        stack.callback(numpy.random.set_state, numpy.random.get_state())


def _put_back_module(stack: ExitStack, module: Any) -> None:
    own = module.__dict__
    if not isinstance(own.get("_parameters"), dict):  # one that is being made, or a stand-in
        return
    forward = own.get("forward")
    if forward is None:
        stack.callback(own.pop, "forward", None)
    else:
        stack.callback(own.__setitem__, "forward", forward)
    stack.callback(own.__setitem__, "training", own.get("training", True))
    for parameter in own["_parameters"].values():
        if parameter is not None:
            gradient = None if parameter.grad is None else parameter.grad.clone()
            stack.callback(_restore, parameter, parameter.data, gradient)
    for buffer in own["_buffers"].values():
        if buffer is not None:
            stack.callback(_assign, buffer, buffer.data, buffer.detach().clone())


def _restore(parameter: Any, storage: Any, gradient: Any) -> None:
    parameter.grad = None  # one of another format would not go with the weight
    parameter.data = storage
    parameter.grad = gradient


def _assign(buffer: Any, storage: Any, value: Any) -> None:
    buffer.data = storage  # its own again, where it was cast
    buffer.data.copy_(value)
