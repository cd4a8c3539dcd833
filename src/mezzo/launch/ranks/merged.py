"""A run of several processes as one: a request for each, and one record of all. Pure functions; imports no torch.

The merged record is rank 0's, with the mean of all ranks' losses: each rank has the loss of its own part of the data. What else the
ranks measured is in ``ranks``, and what should be the same in all of them, but is not, in ``between_ranks``.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePath

from mezzo.launch.ranks.blame import ProcessEnd
from mezzo.launch.request import Request
from mezzo.observe.contracts.contract import formats_of_all_ranks, of_all_ranks
from mezzo.records import AnyRecord, AuditRecord, CheckedContract, Finding, Note, RankRun, RunRecord, Steps
from mezzo.records.files import file_of_rank


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
        contract = _contract_of_all({rank: r.contract for rank, r in records.items() if isinstance(r, AuditRecord)})
        return lead.model_copy(update={"run": run, "findings": findings_of_all(audits), "contract": contract})
    return lead.model_copy(update={"run": run})


def _contract_of_all(by_rank: Mapping[int, CheckedContract | None]) -> CheckedContract | None:
    """Return what all ranks found of a contract; None if none was checked."""
    known = {rank: contract for rank, contract in by_rank.items() if contract is not None}
    if not known:
        return None
    found = formats_of_all_ranks({rank: contract.formats for rank, contract in known.items()})
    broken = of_all_ranks({rank: contract.breaches for rank, contract in known.items()})
    return CheckedContract(file=next(iter(known.values())).file, breaches=broken, formats=found)


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


_SLOWER, _LARGER = 1.5, 1.25
"""Least ratio between the ranks' CPU times per step, and between their memory, that is worth a line."""
_FEW_STEPS = 10
_SHOWN = 5


def differences(ranks: Sequence[RankRun]) -> list[Note]:
    """Return where the ranks of a run differ, the most serious difference first."""
    return [*_weights(ranks), *_steps(ranks), *_skips(ranks), *_scales(ranks), *_times(ranks), *_memory(ranks)]


def _weights(ranks: Sequence[RankRun]) -> Iterator[Note]:
    if len({rank.weights for rank in ranks}) > 1 and all(rank.weights for rank in ranks):
        value = _by_value({rank.rank: rank.weights for rank in ranks})
        why = "nothing kept them equal: wrap the model in DistributedDataParallel or fully_shard, unless each rank is to have its own model"
        yield Note(what="weights", value=value, reason=why)


def _steps(ranks: Sequence[RankRun]) -> Iterator[Note]:
    counts = {rank.rank: rank.num_steps for rank in ranks}
    if len(set(counts.values())) > 1:
        few, many = min(counts, key=lambda r: counts[r]), max(counts, key=lambda r: counts[r])
        value = f"{counts[few]} on rank {few}, {counts[many]} on rank {many}"
        yield Note(what="steps", value=value, reason="the ranks did not make the same number of updates")


def _skips(ranks: Sequence[RankRun]) -> Iterator[Note]:
    sets = {rank.rank: set(rank.skipped_steps) for rank in ranks}
    everywhere, anywhere = set.intersection(*sets.values()), set.union(*sets.values())
    for step in sorted(anywhere - everywhere)[:_SHOWN]:
        skipped = [rank for rank, steps in sets.items() if step in steps]
        value = f"step {step}, by rank {', '.join(map(str, skipped))} only"
        why = "the other ranks made that update: their weights are no longer the same"
        yield Note(what="skipped", value=value, reason=why)


def _scales(ranks: Sequence[RankRun]) -> Iterator[Note]:
    scales = {rank.rank: f"{rank.final_scale:g}" for rank in ranks if rank.final_scale is not None}
    if len(set(scales.values())) > 1:
        yield Note(what="loss scale", value=_by_value(scales), reason="the ranks saw different overflows")


def _times(ranks: Sequence[RankRun]) -> Iterator[Note]:
    """Compare CPU times: wall times are the same in all ranks, which wait for the slowest one."""
    times = {r.rank: r.cpu_ms for r in ranks if r.cpu_ms and r.device == "cpu" and r.num_steps >= _FEW_STEPS}
    if len(times) < 2:
        return
    slow, fast = max(times, key=lambda r: times[r]), min(times, key=lambda r: times[r])
    if times[slow] > _SLOWER * times[fast]:
        value = f"rank {slow} computes {times[slow] / times[fast]:.1f} times as long as rank {fast}"
        why = "the others wait for it in every step: give it less data, or the same kind of device"
        yield Note(what="time a step", value=value, reason=why)


def _memory(ranks: Sequence[RankRun]) -> Iterator[Note]:
    sizes = {r.rank: size for r in ranks if (size := r.cuda_allocated_bytes or r.total_bytes)}
    if len(sizes) < 2:
        return
    large, small = max(sizes, key=lambda r: sizes[r]), min(sizes, key=lambda r: sizes[r])
    if sizes[large] > _LARGER * sizes[small]:
        value = f"rank {large} has {sizes[large] / sizes[small]:.2f} times the bytes of rank {small}"
        yield Note(what="memory", value=value, reason="the largest rank limits the batch")


def _by_value(values: dict[int, str]) -> str:
    """Return which ranks have which value: ``1024 on rank 0; 512 on ranks 1, 2``."""
    ranks_of: dict[str, list[int]] = {}
    for rank, value in values.items():
        ranks_of.setdefault(value, []).append(rank)
    return "; ".join(
        f"{value} on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}" for value, ranks in ranks_of.items()
    )


def record_path(folder: Path, number: int) -> Path:
    """Return where a process writes its record of a run, in the process's folder of the meeting."""
    return folder / f"run-{number}.json"


def counts_path(folder: Path, number: int) -> Path:
    """Return where a process writes the values that it counted."""
    return folder / f"run-{number}.counts.json"


def for_rank(request: Request, rank: int, *, folder: Path, number: int, ranks: int) -> Request:
    """Return the request of one rank, whose observer writes next to the files of rank 0, or into the rank's folder of the meeting.

    Args:
        request: rank 0's.
        rank: the rank.
        folder: the rank's folder of the meeting.
        number: the number of the run.
        ranks: the number of processes of the job.
    """
    observe = request.observe
    if observe is not None and observe.kind == "ranges":
        observe = observe.model_copy(update={"counts_path": str(counts_path(folder, number))})
    if rank and observe is not None and observe.kind == "diagnose" and observe.evidence_path:
        observe = observe.model_copy(update={"evidence_path": str(file_of_rank(Path(observe.evidence_path), rank))})
    if rank and observe is not None and observe.kind == "fallback":
        observe = observe.model_copy(update={"folder": str(folder_of_rank(Path(observe.folder), rank))})
        Path(observe.folder).mkdir(exist_ok=True)
    snapshots = request.snapshots
    if snapshots is not None:
        meeting = folder.parent / f"run-{number}-snapshots"
        meeting.mkdir(exist_ok=True)
        snapshots = snapshots.for_rank(rank, ranks=ranks, meeting=str(meeting))
    guard = None if request.guard is None else request.guard.model_copy(update={"together": ranks > 1})
    return request.model_copy(update={"rank": rank, "observe": observe, "snapshots": snapshots, "guard": guard})


def folder_of_rank(folder: Path, rank: int) -> Path:
    """Return a rank's own folder, inside rank 0's."""
    return folder / f"rank{rank}"
