"""What tests of a diagnosis share: diagnose a function of ``tests/faults`` in this process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import families
import reports
import updates

import faults
from mezzo.launch.request import Request, policy_text
from mezzo.launch.several.passes import diagnose_script
from mezzo.launch.torch import switched
from mezzo.measure.environment import environment
from mezzo.observe.observer import StopScript
from mezzo.records import AnyRecord, DiagnoseRecord, RunRecord

MODULES = (faults, families, updates, reports)


def run_here(script: Callable[[], None], request: Request) -> AnyRecord:
    """Run ``script`` in this process as the child process would."""
    error: Exception | None = None
    with switched(request.policy, observe=request.observe) as (run, _):
        for action in (script, run.close_update):
            try:
                action()
            except StopScript:
                pass
            except Exception as raised:
                error = raised
    whole = RunRecord(
        command=[],
        script=request.target,
        script_sha256="",
        policy=policy_text(request.policy),
        environment=environment("cpu"),
        steps=run.recorder.steps(),
        exit_code=int(error is not None),
        error=None if error is None else f"{type(error).__name__}: {error}",
    )
    assert run.observer is not None
    return run.observer.record(whole)


def diagnosed(name: str, policy: str, tmp_path: Path, *, steps: int = 20) -> DiagnoseRecord:
    request = Request(
        target=name, kind="script", policy=policy, record_path=str(tmp_path / "record.json"), command=("mezzo",)
    )
    script = next(getattr(module, name) for module in MODULES if hasattr(module, name))
    record = diagnose_script(request, steps=steps, child=lambda asked, **_: run_here(script, asked))
    assert isinstance(record, DiagnoseRecord)
    assert not [note for note in record.notes if note.what == "not inspected"]
    return record
