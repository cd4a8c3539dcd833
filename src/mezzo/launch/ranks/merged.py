"""Merge the records of all processes of a run into one. Pure functions of these records; imports no torch.

The merged record is rank 0's, with the mean of all ranks' losses: each rank has the loss of its own part of the data. What else the
ranks measured is in ``ranks``, and what should be the same in all of them, but is not, in ``between_ranks``.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import PurePath

from mezzo.launch.ranks.blame import ProcessEnd
from mezzo.launch.ranks.differences import differences
from mezzo.records import AnyRecord, AuditRecord, Finding, RankRun, RunRecord, Steps


def merged(
    records: Mapping[int, AnyRecord],
    *,
    ends: Sequence[ProcessEnd],
    blame: tuple[int, str] | None,
    hosts: Mapping[int, str],
    limit_s: float | None = None,
) -> AnyRecord:
    """Return one record of a run.

    Args:
        records: by rank, without the ranks that left none.
        ends: how each process ended, rank 0 first.
        blame: the rank that ended the run, and why; None for a run that ended well.
        hosts: the name of each rank's machine.
        limit_s: the limit at which the run was stopped; None if it ended before.
    """
    lead = records[0]
    runs = {rank: run for rank, record in records.items() if (run := run_of(record)) is not None}
    ranks = [_rank_run(end, runs.get(end.rank), hosts.get(end.rank, "")) for end in ends]
    first = runs[0]
    run = first.model_copy(
        update={
            "steps": _mean_losses(first.steps, [runs[rank].steps for rank in sorted(runs)], len(ends)),
            "metric": next((r.metric for _, r in sorted(runs.items()) if r.metric and r.metric.values), first.metric),
            "findings": findings_of_all({rank: r.findings for rank, r in runs.items()}),
            "ranks": ranks,
            "between_ranks": [] if blame else differences(ranks),
        }
    )
    if blame is not None:
        rank, why = blame
        code = next((end.exit_code for end in ends if end.rank == rank and end.failure == why), 0) or 1
        blamed = runs.get(rank)
        hint = blamed.hint if blamed is not None and blamed.error == why else ""
        oom = None if blamed is None else blamed.out_of_memory
        prefix = "" if limit_s is None else f"stopped at its limit of {limit_s:g} s: "
        ended = {"error": f"{prefix}rank {rank}: {why}", "exit_code": code, "hint": hint, "out_of_memory": oom}
        run = run.model_copy(update={**ended, "stopped_at_limit": limit_s is not None})
    if isinstance(lead, RunRecord):
        return run
    if isinstance(lead, AuditRecord):
        audits = {rank: r.findings for rank, r in records.items() if isinstance(r, AuditRecord)}
        return lead.model_copy(update={"run": run, "findings": findings_of_all(audits)})
    return lead.model_copy(update={"run": run})


def run_of(record: AnyRecord) -> RunRecord | None:
    """Return the run in a record of one run; None for a record of several."""
    run = getattr(record, "run", record)
    return run if isinstance(run, RunRecord) else None


def error_of(record: AnyRecord) -> str | None:
    """Return the error of the run in a record; None if it ended well, or the record is of several runs."""
    run = run_of(record)
    return None if run is None else run.error


def exit_code_of(record: AnyRecord) -> int:
    """Return the exit code of the run in a record; 0 if the record is of several runs."""
    run = run_of(record)
    return 0 if run is None else run.exit_code


def findings_of_all(by_rank: Mapping[int, Sequence[Finding]]) -> list[Finding]:
    """Return every rank's findings, each once; those that rank 0 lacks name the ranks that have them."""
    ranks_of: dict[tuple[str, str, tuple[str, ...]], tuple[Finding, list[int]]] = {}
    for rank, findings in sorted(by_rank.items()):
        for finding in findings:
            key = finding.code, PurePath(finding.lines[0]).name if finding.lines else "", tuple(finding.modules)
            ranks_of.setdefault(key, (finding, []))[1].append(rank)
    return [
        finding
        if 0 in ranks
        else finding.model_copy(update={"title": f"{finding.title} (rank {', '.join(map(str, ranks))})"})
        for finding, ranks in ranks_of.values()
    ]


def _mean_losses(lead: Steps, of_ranks: Sequence[Steps], size: int) -> Steps:
    """Return rank 0's steps with the mean of all ranks' losses, if all ranks made the same steps."""
    if len(of_ranks) != size or any(len(steps.loss) != len(lead.loss) for steps in of_ranks):
        return lead
    keys = [[(loss.name, loss.steps) for loss in steps.losses] for steps in of_ranks]
    same = all(key == keys[0] for key in keys)
    losses = [
        loss.model_copy(update={"values": _means([steps.losses[index].values for steps in of_ranks])})
        for index, loss in enumerate(lead.losses if same else [])
    ]
    mean_loss = _means([steps.loss for steps in of_ranks])
    return lead.model_copy(update={"loss": mean_loss, "losses": losses or lead.losses})


def _means(of_ranks: Sequence[Sequence[float]]) -> list[float]:
    return [sum(values) / len(values) for values in zip(*of_ranks, strict=True)]


def _rank_run(end: ProcessEnd, run: RunRecord | None, host: str) -> RankRun:
    if run is None:
        error = "its process vanished" if end.vanished else end.error or "it left no record"
        return RankRun(rank=end.rank, host=host, exit_code=1, error=error)
    steps = run.steps
    return RankRun(
        rank=end.rank,
        host=host,
        device=run.environment.gpu or run.environment.device,
        num_steps=len(steps),
        skipped_steps=[number for number, skipped in enumerate(steps.skipped, start=1) if skipped],
        final_loss=steps.loss[-1] if steps.loss else None,
        final_scale=run.final_scale,
        step_ms=_median(steps.time_ms[1:]),
        cpu_ms=_median(steps.cpu_ms[1:]),
        total_bytes=run.memory.total_bytes,
        cuda_allocated_bytes=run.memory.cuda_allocated_bytes,
        weights=run.ranks[0].weights if run.ranks else "",
        duration_s=run.duration_s,
        exit_code=run.exit_code,
        error=run.error,
    )


def _median(numbers: Sequence[float]) -> float | None:
    known = [number for number in numbers if number == number]  # without NaN
    return statistics.median(known) if known else None
