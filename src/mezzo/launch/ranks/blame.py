"""Which process of a failed run is to blame: most fail only because another one did. A pure function. Imports no torch."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

_OF_OTHERS = re.compile(
    r"connection (?:was )?(?:closed|reset|refused)|closed by peer|broken pipe|socket|gloo|nccl|watchdog|distbackenderror"
    r"|storage? timeout|time[d ]*-?out|heartbeat|tcpstore|rendezvous|store->|destroy_process_group",
    re.IGNORECASE,
)
"""Words of errors that a process raises because another one is missing."""


@dataclass(frozen=True, kw_only=True)
class ProcessEnd:
    """How one process of a run ended."""

    rank: int
    error: str | None
    at_s: float = 0.0
    """When rank 0 learned of it, on its own clock."""
    stopped: bool = False
    """Whether it was still running when the run was ended for all."""
    vanished: bool = False
    """Whether its mezzo process is gone, so that nothing more is known about it."""
    where: str = ""
    """Where its script was when the run was ended for all; empty if that is not known."""
    waiting: bool = False
    """Whether it was waiting for other processes there."""
    updates: int | None = None
    """Updates that it made; None if they are not known."""


def noticed_others(error: str) -> bool:
    """Return whether a process raised an error because another one is missing."""
    return _OF_OTHERS.search(error) is not None


def blamed(ends: Sequence[ProcessEnd]) -> tuple[int, str] | None:
    """Return the rank that ended a run, and the reason in a sentence; None if all ended well.

    A process that vanished comes first, then the first that failed for a reason of its own; else one that was still running elsewhere
    while the others waited for it; else one whose script had ended, perhaps because it has fewer batches; else the first that failed.
    """
    if all(end.error is None and not end.stopped and not end.vanished for end in ends):
        return None
    vanished = [end for end in ends if end.vanished]
    if vanished:
        return vanished[0].rank, "its process vanished"
    failed = sorted((end for end in ends if end.error is not None and not end.stopped), key=lambda end: end.at_s)
    own = [end for end in failed if not noticed_others(end.error or "")]
    if own:
        return own[0].rank, own[0].error or ""
    running = [end for end in ends if end.stopped]
    busy = [end for end in running if not end.waiting and end.where]
    early = None if busy else _ended_early(ends)
    if early is not None:
        return early
    busy = busy or ([] if failed else running)
    if busy:
        places = Counter(end.where for end in running)
        hung = min(busy, key=lambda end: places[end.where])
        return hung.rank, _no_progress(hung, running)
    return (failed[0].rank, failed[0].error or "") if failed else (running[0].rank, _no_progress(running[0], running))


def _ended_early(ends: Sequence[ProcessEnd]) -> tuple[int, str] | None:
    """Return the process that ended well after no more updates than those that failed or waited, and why that stopped them."""
    well = [end for end in ends if end.error is None and not end.stopped and end.updates is not None]
    left = [end for end in ends if (end.waiting if end.stopped else end.error is not None)]
    if not well or not left:
        return None
    first = min(well, key=lambda end: end.updates or 0)
    made = [end.updates or 0 for end in left]
    if (first.updates or 0) > min(made):
        return None
    others = ", ".join(str(end.rank) for end in left)
    some = f"rank{'s' * (len(left) > 1)} {others} still waited for it"
    error = next((end.error for end in left if not end.stopped), None)
    why = f"its script ended after {first.updates} updates, while {some}: give all processes as many batches, or use join()"
    return first.rank, why + ("" if error is None else f" ({error})")


def _no_progress(hung: ProcessEnd, running: Sequence[ProcessEnd]) -> str:
    others: dict[str, list[str]] = {}
    for end in running:
        if end.rank != hung.rank and end.where:
            others.setdefault(end.where, []).append(str(end.rank))
    waited = [f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)} at {where}" for where, ranks in others.items()]
    at = f" at {hung.where}" if hung.where else ""
    return f"it made no progress{at}" + (f", with {'; '.join(waited)}" if waited else "")
