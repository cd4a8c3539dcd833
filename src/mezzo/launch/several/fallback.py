"""Find the modules of a script that have to stay in FP32, by running its first steps in child processes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from mezzo.launch.process.command_signals import stoppable
from mezzo.launch.ranks.leading import leader
from mezzo.launch.ranks.requests import folder_beside
from mezzo.launch.request import Request
from mezzo.launch.runner import run_child
from mezzo.observe.fallback.evidence import Measured, checked, of_all, read_measured
from mezzo.observe.fallback.find import find
from mezzo.observe.settings import FallbackSettings
from mezzo.policy import Policy
from mezzo.records import FallbackRecord, RunRecord

_RUNS = "runs"


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
        policy = request.policy
        assert policy is not None
        return find(measure, policy, folder=str(runs), tolerance=tolerance, fresh=fresh, note=note)
    finally:
        for gradients in (*runs.rglob("*.pt"), *runs.rglob("*.npz")):
            gradients.unlink()


class _Children:
    """Runs of a script's first steps, each in a process of its own."""

    def __init__(self, request: Request, folder: Path) -> None:
        self._request, self._folder = request, folder

    def __call__(self, policy: Policy, settings: FallbackSettings) -> tuple[Measured, RunRecord]:
        output = self._folder / f"{settings.name}.log"
        request = self._request.model_copy(
            update={
                "policy": policy,
                "policy_typed": "",
                "observe": settings,
                "record_path": str(self._folder / f"{settings.name}.record.json"),
            }
        )
        with stoppable() as stop:
            run = run_child(request, output=output)
            stop.check(run)
        where = f"what it printed is in {output}"
        measured = of_all([read_measured(own) for own in _of_ranks(settings)])
        return checked(measured, run, where=where, role=settings.role), run


def _of_ranks(settings: FallbackSettings) -> list[FallbackSettings]:
    """Return the settings of every process of a run, rank 0's first."""
    lead, folder = leader(), Path(settings.folder)
    others = range(1, 1 if lead is None else lead.size)
    return [settings, *(settings.model_copy(update={"folder": str(folder_beside(folder, rank))}) for rank in others)]
