"""The processes of a run in words."""

from __future__ import annotations

from mezzo.records import RankRun, RunRecord
from mezzo.report import formatting as fmt
from mezzo.report.pages import shared
from mezzo.report.sections import Fact

_SHOWN = 64


def rank_facts(record: RunRecord) -> list[Fact]:
    """Return one line for each process of a run; empty for a run in one process."""
    lines = [_rank(rank) for rank in record.ranks[:_SHOWN]]
    left = len(record.ranks) - len(lines)
    return [*lines, Fact(what="more", value=f"{left} ranks", reason="record.json has all")] if left else lines


def difference_facts(*runs: RunRecord) -> list[Fact]:
    """Return what should be the same in all processes and is not; for several runs, with the run that shows it."""
    differences = []
    for run in runs:
        where = f"{fmt.clean(run.policy_shown)}, seed {run.seed}: " if len(runs) > 1 else ""
        differences += [
            Fact(what=f"{where}{fact.what}", value=fact.value, reason=fact.reason, tone="warn")
            for fact in shared.facts(run.between_ranks)
        ]
    return differences


def _rank(rank: RankRun) -> Fact:
    parts = [fmt.plural(rank.num_steps, "step")]
    if rank.step_ms is not None:
        parts.append(f"{fmt.ms_text(rank.step_ms)} a step")
    memory = rank.cuda_allocated_bytes or rank.total_bytes
    if memory is not None:
        parts.append(fmt.bytes_text(memory))
    if rank.final_loss is not None:
        parts.append(f"final loss {fmt.number_text(rank.final_loss)}")
    if rank.skipped_steps:
        parts.append(f"{len(rank.skipped_steps)} skipped")
    failed = fmt.clean(rank.error or "")
    where = [fmt.clean(rank.host), fmt.clean(rank.device), failed]
    return Fact(
        what=f"rank {rank.rank}",
        value=", ".join(parts),
        reason=", ".join(filter(None, where)),
        tone="bad" if failed else "",
    )
