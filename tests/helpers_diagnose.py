"""What tests of a diagnosis share: diagnose a function of ``tests/faults`` in this process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import beyond_fp32
import families
import reports
import updates
from fixed import FIXED, Fixed

import faults
from mezzo.commands.diagnose.plan import diagnose_script
from mezzo.launch.request import Request, policy_text
from mezzo.launch.torch import switched
from mezzo.measure.environment import environment
from mezzo.observe.observer import StopScript
from mezzo.records import AnyRecord, DiagnoseRecord, RunRecord

CLEAN = "assert torch.isfinite(batch).all()"
"""A printed check that finds bad data, and mends nothing."""
MODULES = (faults, families, updates, beyond_fp32, reports)


def run_here(script: Callable[[], None], request: Request) -> AnyRecord:
    """Run ``script`` in this process as the child process would."""
    error: Exception | None = None
    with switched(request.policy, observe=request.observe) as (run, _):
        for action in (script, run.close_update):
            try:
                action()
            except StopScript:
                pass
            except ModuleNotFoundError:  # the script's library is not installed: the test is left out
                raise
            except Exception as raised:
                error = raised
    whole = RunRecord(
        command=[],
        script=request.target,
        script_sha256="",
        policy=policy_text(request.policy),
        environment=environment("cpu"),
        steps=run.update.recorder.steps(),
        exit_code=int(error is not None),
        error=None if error is None else f"{type(error).__name__}: {error}",
    )
    assert run.listeners.observer is not None
    if error is not None:
        run.listeners.observer.failed(error)
    return run.listeners.observer.record(whole)


def diagnosed(
    name: str, policy: str, tmp_path: Path, *, steps: int = 20, script: Callable[[], None] | None = None
) -> DiagnoseRecord:
    """Return the diagnosis of a planted fault, or of ``script`` in its place."""
    request = Request(
        target=name, kind="script", policy=policy, record_path=str(tmp_path / "record.json"), command=("mezzo",)
    )
    function = script or getattr(module_of(name), name)
    record = diagnose_script(request, steps=steps, child=lambda asked, **_: run_here(function, asked))
    assert isinstance(record, DiagnoseRecord)
    assert not [note for note in record.notes if note.what == "not inspected"]
    return record


def place_of(record: DiagnoseRecord) -> tuple[str, str, str, str, int]:
    """Return what is wrong, and where."""
    return record.verdict, record.module, record.op, record.phase, record.step


def source_of(line: str) -> str:
    """Return the text of a line that is named as ``file:number``."""
    file, number = line.rsplit(":", 1)
    return Path(file).read_text(encoding="utf-8").splitlines()[int(number) - 1]


def module_of(name: str) -> ModuleType:
    """Return the file of ``tests/faults`` that has a fault."""
    return next(module for module in MODULES if hasattr(module, name))


def assert_printed(record: DiagnoseRecord, name: str) -> None:
    """Check that a printed line can be applied: a policy ran the script, any other is written into the fault by ``fixed.py``."""
    if record.fix_line.startswith("policy = "):
        assert record.fix_tried
    elif record.fix_line not in ("", CLEAN):
        assert record.fix_line == fixed(name, record.run.policy).printed


def fixed(name: str, policy: str) -> Fixed:
    """Return how the printed line is written into a fault."""
    return FIXED.get(f"{name}-{policy}") or FIXED[name]
