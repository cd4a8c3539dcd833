"""What the audit's tests share: audit a script of ``tests/scripts`` in this process."""

from __future__ import annotations

import contextlib
import io
import runpy
from collections.abc import Callable, Iterable

import torch

from helpers_launch import AS_IS, as_script, observed_record
from mezzo.measure.flops import OperandFormats
from mezzo.observe.audit.operations import TracedOperation, interpret, weights_of
from mezzo.observe.module_names import Names
from mezzo.observe.observer import ModuleTree
from mezzo.observe.settings import AuditSettings
from mezzo.observe.tracer import Tracer
from mezzo.records import AuditRecord
from paths import SCRIPTS


def audited(name: str, *arguments: str, policy: str = "as-is", steps: tuple[int, ...] = (2,)) -> AuditRecord:
    """Run ``tests/scripts/<name>.py`` and return the audit of ``steps``."""
    path = str(SCRIPTS / f"{name}.py")

    def script() -> None:
        with contextlib.suppress(SystemExit):
            runpy.run_path(path, run_name="__main__")

    with as_script(path, arguments), contextlib.redirect_stdout(io.StringIO()):
        record = observed_record(script, None if policy == AS_IS else policy, AuditSettings(steps=steps))
    assert isinstance(record, AuditRecord)
    return record


def traced_operations(step: Callable[[], object], *, device_type: str = "cpu") -> list[TracedOperation]:
    """Return the operations of ``step``, as an audit understands them."""
    return traced_step(step, device_type=device_type)[0]


def traced_step(
    step: Callable[[], object], *, optimizers: Iterable[torch.optim.Optimizer] = (), device_type: str = "cpu"
) -> tuple[list[TracedOperation], Names]:
    """Return the operations of ``step``, as an audit understands them, and the names of its modules."""
    tracer = Tracer(OperandFormats(), device_type=device_type)
    tracer.start()
    try:
        step()
    finally:
        tracer.stop()
    names = Names(tracer.trace.roots, ModuleTree())
    return interpret(tracer.trace, names, weights_of(names.roots, optimizers)), names
