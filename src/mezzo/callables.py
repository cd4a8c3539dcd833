"""Audit, diagnose, ranges and fallback of a function in this process; the commands do the same for a script in a child process.

A function cannot be restarted from its first line, so each of the four says what it requires of the function.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

from mezzo.commands.diagnose.verdict import ScriptRun, diagnosis
from mezzo.commands.fallback.find import find
from mezzo.commands.fallback.search import TrialsAhead
from mezzo.errors import MezzoError, NonFiniteLossError, ScaleFloorError, ScriptError, SessionError
from mezzo.launch.recording import hint_of
from mezzo.launch.request import policy_text
from mezzo.launch.torch import TorchTraining, training
from mezzo.launch.torch.script_objects import amp_off, find_existing, state_restored
from mezzo.measure.environment import environment
from mezzo.measure.flops import OperandFormats
from mezzo.observe.audit.observer import KernelWatch, audit_record
from mezzo.observe.audit.operations import interpret, weights_of
from mezzo.observe.fallback.evidence import Measured, checked, read_measured
from mezzo.observe.module_names import Names
from mezzo.observe.nonfinite.observer import NonFinite
from mezzo.observe.observer import ModuleTree
from mezzo.observe.settings import AnySettings, DiagnoseSettings, FallbackSettings, RangesSettings, StopScript
from mezzo.observe.tracer import Tracer
from mezzo.policy import Policy
from mezzo.records import AS_IS, AuditRecord, DiagnoseRecord, Environment, FallbackRecord, RangesRecord, RunRecord
from mezzo.secrets import hidden
from mezzo.temporary import temporary_folder


def audit(step: Callable[[], Any], *, warmup: int = 1) -> AuditRecord:
    """Return which operation of a training step runs in which format, and what to change.

    Args:
        step: runs one training step: forward, backward, update.
        warmup: how often to call it before the recorded call, so that optimizers have their state and the device is known.

    Raises:
        SessionError: ``step`` cannot be called, or ``warmup`` is negative.
    """
    if not callable(step) or warmup < 0:
        raise SessionError(
            f"audit(step={step!r}, warmup={warmup}): step is a function without arguments, warmup 0 or more",
            hint="pass a function that runs one training step: mezzo.audit(lambda: train(batch))",
        )
    started = time.perf_counter()
    optimizers: dict[torch.optim.Optimizer, None] = {}
    with register_optimizer_step_pre_hook(lambda o, *_: optimizers.setdefault(o)):
        device_type = _warmed_up(step, warmup)
        tracer = Tracer(OperandFormats(), device_type=device_type)
        profiler = KernelWatch() if device_type == "cuda" else None
        with _eagerly() as forced_eager:
            tracer.start()
            if profiler is not None:
                profiler.start()
            try:
                step()
            finally:
                launches = profiler.stop() if profiler is not None else []
                tracer.stop()
    names = Names(tracer.trace.roots, ModuleTree())
    return audit_record(
        _run_record(step, None, started, environment(device_type)),
        [warmup + 1],
        [interpret(tracer.trace, names, weights_of(names.roots, optimizers))],
        names=names,
        policy=None,
        device_type=device_type,
        launches=launches,
        forced_eager=forced_eager,
    )


def diagnose(train: Callable[[], Any], *, policy: Policy | str = AS_IS, steps: int = 20) -> DiagnoseRecord:
    """Return where the first value that is not finite comes from in the training steps that ``train()`` runs.

    The operations of every step are inspected. A function cannot be run again, so one that computes in 16 bits is
    ``undecided``, and ``perhaps`` is what the operation suggests. A SystemExit, caught here, ends ``train`` at the first
    fault or after ``steps`` updates. An error of ``train`` in a step that is not finite ends it too, and is in the record.

    Args:
        train: runs training steps, called without arguments.
        policy: the policy to run them under; ``as-is`` for their own precision.
        steps: how many steps to inspect at most.

    Raises:
        SessionError: ``train`` cannot be called, or ``steps`` is below 1.
        ScriptError: ``train`` ran no training step.
    """
    if not callable(train) or steps < 1:
        raise SessionError(
            f"diagnose(train={train!r}, steps={steps!r}): train is a function without arguments, steps 1 or more",
            hint="pass a function that trains: mezzo.diagnose(lambda: train(loader))",
        )
    chosen = None if policy == AS_IS else Policy.of(policy)
    settings = DiagnoseSettings(steps=tuple(range(1, steps + 1)), from_start=True)
    trained, run, error = _trained(
        train, chosen, settings, find_existing(torch.optim.Optimizer)[0], catches=(Exception,)
    )
    assert isinstance(trained.observer, NonFinite)
    run = trained.observer.record(run)
    evidence = trained.observer.evidence(run)
    if error is not None and evidence.located is None:
        raise error
    if not trained.num_updates and evidence.located is None:
        raise ScriptError(
            f"{run.script} ended without a training step",
            hint="pass a function that calls backward() and updates the weights",
        )
    why = "every step's operations"
    only = ScriptRun(role="first", reason=why, policy=chosen, settings=settings, run=run, evidence=evidence)
    return diagnosis([only], untried="a function cannot be run again from its initial state", caller="function")


def ranges(train: Callable[[], Any], *, policy: Policy | str = "fp16", steps: int = 20) -> RangesRecord:
    """Count the values of ``train()``'s training steps by exponent, and judge a policy by the counts.

    The steps run in FP32: autocast and GradScaler do nothing inside, and compiled code runs eagerly. A SystemExit, caught
    here, ends ``train`` after ``steps`` updates. Whatever it trained stays trained.

    Args:
        train: runs training steps, called without arguments.
        policy: whose formats, initial loss scale and FP32 modules are judged.
        steps: how many steps to record.

    Raises:
        SessionError: ``train`` cannot be called, or ``steps`` is below 1.
        ScriptError: ``train`` ran no training step.
    """
    if not callable(train) or steps < 1:
        raise SessionError(
            f"ranges(train={train!r}, steps={steps!r}): train is a function without arguments, steps 1 or more",
            hint="pass a function that trains: mezzo.ranges(lambda: train(loader))",
        )
    settings = RangesSettings(steps=tuple(range(1, steps + 1)), policy=Policy.of(policy))
    with amp_off():
        trained, run, _ = _trained(train, Policy.parse("fp32"), settings, find_existing(torch.optim.Optimizer)[0])
    assert trained.observer is not None
    if not trained.observer.watched:
        raise ScriptError(
            f"{run.script} ended without a training step that could be recorded; {trained.num_updates} were made",
            hint="pass a function that calls backward() and updates the weights",
        )
    record = trained.observer.record(run)
    assert isinstance(record, RangesRecord)
    return record


def fallback(
    train: Callable[[], Any],
    *,
    policy: Policy | str = "fp16",
    tolerance: float | None = None,
    fresh: int = 2,
    per_gemm: bool = False,
) -> FallbackRecord:
    """Return which modules have to stay in FP32, or products in BF16, for the training steps that ``train()`` runs, verified.

    ``train`` is called some ten times, from the same state each time. Its updates are held back, and a SystemExit ends it after
    ``1 + fresh`` steps. Afterwards modules, optimizers, schedules and random numbers are as before. Anything else that it
    changes, such as an iterator that it reads from, stays changed: the search then reports that no two runs see the same data.

    Args:
        train: runs training steps, called without arguments; the same ones at every call.
        policy: the policy to judge; modules that it keeps in FP32 stay in FP32.
        tolerance: the largest relative error of a parameter's gradient that passes; None for the format's default.
        fresh: how many more batches the set is checked on.
        per_gemm: whether single products of linear layers are searched for, under a policy in blocks (``mxfp8``), not modules.

    Raises:
        PolicyError: the policy computes nothing below FP32, or with ``per_gemm`` no layer in blocks.
        SessionError: ``train`` cannot be called, or a number is out of range.
        ScriptError: ``train`` ran no training step that can be compared.
    """
    if not callable(train):
        raise SessionError(
            f"train={train!r}; allowed: a function without arguments",
            hint="pass a function that runs training steps: mezzo.fallback(train)",
        )

    def measure(policy: Policy, settings: FallbackSettings, ahead: TrialsAhead) -> tuple[Measured, RunRecord]:
        with state_restored() as optimizers, amp_off():
            trained, run, _ = _trained(
                train, policy, settings, optimizers, catches=(NonFiniteLossError, ScaleFloorError)
            )
            assert trained.observer is not None
            trained.observer.record(run)
        return checked(read_measured(settings), run, where="it was called as a function", role=settings.role), run

    with temporary_folder() as folder:
        return find(measure, Policy.of(policy), folder=str(folder), tolerance=tolerance, fresh=fresh, per_gemm=per_gemm)


def _trained(
    train: Callable[[], Any],
    policy: Policy | None,
    settings: AnySettings,
    optimizers: list[Any],
    *,
    catches: tuple[type[Exception], ...] = (),
) -> tuple[TorchTraining, RunRecord, Exception | None]:
    """Call ``train`` under a policy and an observer; return the training, its record and the error of a kind in ``catches``.

    ``optimizers`` were created before the launcher could see them: without any, each backward pass would count as a manual update.
    """
    started = time.perf_counter()
    error: Exception | None = None
    with training(policy, seed=None, observe=settings) as trained:
        trained.adopt(optimizers)
        for action in (train, trained.close_update):
            try:
                action()
            except StopScript:
                pass
            except catches as raised:
                error = error or raised
    run = _run_record(train, policy, started, trained.environment(), error=error)
    return trained, run.model_copy(update={"steps": trained.steps(), "findings": trained.findings()}), error


def _run_record(
    called: Callable[[], Any],
    policy: Policy | None,
    started: float,
    where: Environment,
    *,
    error: Exception | None = None,
) -> RunRecord:
    """Return the record of a function's run; ``started`` is a value of ``time.perf_counter``."""
    message = error.message if isinstance(error, MezzoError) else f"{type(error).__name__}: {error}"
    return RunRecord(
        command=[sys.executable, *hidden(sys.argv)],
        script=getattr(called, "__qualname__", type(called).__name__),
        script_sha256="",
        policy=policy_text(policy),
        environment=where,
        duration_s=time.perf_counter() - started,
        exit_code=error.exit_code if isinstance(error, MezzoError) else int(error is not None),
        error=None if error is None else message,
        hint=hint_of(error),
    )


def _warmed_up(step: Callable[[], Any], times: int) -> str:
    """Call ``step``; return the device type of the modules that it calls, or of existing optimizers if it is not called.

    Of several, an accelerator's.
    """
    device_types: dict[str, None] = {}

    def note(module: nn.Module, args: Any) -> None:
        device_types.update(dict.fromkeys(p.device.type for p in module.parameters(recurse=False)))

    with register_module_forward_pre_hook(note):
        for _ in range(times):
            step()
    if not times:  # no module has run: the optimizers that exist know the device
        groups = (group for optimizer in find_existing(torch.optim.Optimizer)[0] for group in optimizer.param_groups)
        device_types.update(dict.fromkeys(p.device.type for group in groups for p in group["params"]))
    return next((device_type for device_type in device_types if device_type != "cpu"), "cpu")


@contextmanager
def _eagerly() -> Iterator[bool]:
    """Run compiled code eagerly; yield whether any was compiled."""
    if "torch._dynamo" not in sys.modules:
        yield False
        return
    with torch.compiler.set_stance("force_eager"):
        yield bool(torch._dynamo.utils.counters["frames"])
