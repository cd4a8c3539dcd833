"""Find the modules of a script that have to stay in FP32, by running its first steps in child processes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from mezzo.children.signals import Stopped
from mezzo.commands.fallback.find import find
from mezzo.commands.fallback.search import TrialsAhead
from mezzo.launch.ranks.leading import leader
from mezzo.launch.ranks.merged import folder_of_rank
from mezzo.launch.request import Request
from mezzo.observe.fallback.evidence import Measured, checked, failed_by_format, measured_path, of_all, read_measured
from mezzo.observe.settings import FallbackSettings
from mezzo.policy import Policy
from mezzo.records import FallbackRecord, RunRecord, record_at
from mezzo.studies.loop import Study, named_arguments
from mezzo.studies.side_by_side import output_of

_RUNS = "runs"


def fallback_of_script(
    request: Request,
    *,
    folder: Path,
    study: Study,
    resume: bool = False,
    tolerance: float | None = None,
    fresh: int = 2,
    per_gemm: bool = False,
    note: Callable[[str], None] = lambda _: None,
) -> FallbackRecord:
    """Return which modules of a script have to stay in FP32 under the policy of ``request``.

    Each run's record and output stay under ``runs`` in ``folder``. The reference's gradients are deleted at the end, unless a signal
    stopped the search: a resumed search needs them.

    Args:
        request: the script, its arguments and the policy.
        folder: where the runs' files go.
        study: executes the runs.
        resume: whether to use the finished runs that a stopped search left in ``folder``.
        tolerance: the largest relative error of a parameter's gradient that passes; None to follow the format.
        fresh: on how many more batches the set of modules is checked.
        per_gemm: whether products of layers in blocks are searched for.
        note: called with each message.
    """
    runs = (folder / _RUNS).absolute()
    if not resume:
        shutil.rmtree(runs, ignore_errors=True)
    runs.mkdir(parents=True, exist_ok=True)
    measure = _Children(request, runs, study)
    policy = request.policy
    assert policy is not None
    resumable = False
    try:
        return find(measure, policy, folder=str(runs), tolerance=tolerance, fresh=fresh, per_gemm=per_gemm, note=note)
    except Stopped:
        resumable = True
        raise
    finally:
        for gradients in [] if resumable else _gradients(runs):
            gradients.unlink()


class _Children:
    """Runs of a script's first steps, each in a process of its own."""

    def __init__(self, request: Request, folder: Path, study: Study) -> None:
        self._request, self._folder, self._study = request, folder, study

    def __call__(self, policy: Policy, settings: FallbackSettings, ahead: TrialsAhead) -> tuple[Measured, RunRecord]:
        request = self._request_for(policy, settings)
        run = self._study.record(
            request, ahead=lambda: (self._request_for(*trial) for trial in ahead()), reuse=_finished
        )
        assert isinstance(run, RunRecord)
        where = f"what it printed is in {output_of(request)}"
        measured = of_all([read_measured(of_rank) for of_rank in _of_ranks(settings)])
        return checked(measured, run, where=where, role=settings.role), run

    def _request_for(self, policy: Policy, settings: FallbackSettings) -> Request:
        return self._request.model_copy(
            update={
                "policy": policy,
                "policy_typed": "",
                "observe": settings,
                "arguments": named_arguments(self._request.arguments, settings.name),
                "record_path": str(self._folder / f"{settings.name}.record.json"),
            }
        )


def _finished(request: Request) -> RunRecord | None:
    """Return the record of a run that left its measurements, and its gradients if it is the reference; None if the run is still to do."""
    settings, path = request.observe, Path(request.record_path)
    assert isinstance(settings, FallbackSettings)
    run = record_at(path)
    if not isinstance(run, RunRecord) or run.request_sha256 != request.digest:
        return None
    if run.error is not None and not failed_by_format(run):
        return None
    if settings.role == "reference" and not _gradients(path.parent):
        return None
    return run if all(measured_path(of_rank).is_file() for of_rank in _of_ranks(settings)) else None


def _gradients(folder: Path) -> list[Path]:
    return [*folder.rglob("*.pt"), *folder.rglob("*.npz")]


def _of_ranks(settings: FallbackSettings) -> list[FallbackSettings]:
    """Return the settings of every process of a run, rank 0's first."""
    lead, folder = leader(), Path(settings.folder)
    others = range(1, 1 if lead is None else lead.size)
    return [settings, *(settings.model_copy(update={"folder": str(folder_of_rank(folder, rank))}) for rank in others)]
