"""Which process of a failed run is to blame: most of them fail because another one did. A pure function. Imports no torch."""

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
"""Words of errors with which a process notices that another one is missing."""


@dataclass(frozen=True, kw_only=True)
class End:
    """How one process of a run ended."""

    rank: int
    error: str | None
    at_s: float = 0.0
    """When rank 0 learned of it, on its own clock."""
    stopped: bool = False
    """Whether it was still running when the run was ended for all."""
    vanished: bool = False
    """Whether its mezzo process is gone, so that nothing more is known of it."""
    where: str = ""
    """Where its script was when the run was ended for all; empty if that is not known."""
    waiting: bool = False
    """Whether it was waiting for other processes there."""


def noticed_others(error: str) -> bool:
    """Return whether an error is how a process notices that another one is missing."""
    return _OF_OTHERS.search(error) is not None


def blamed(ends: Sequence[End]) -> tuple[int, str] | None:
    """Return the rank that ended a run, and the reason in a sentence; None if all ended well.

    First comes a process that vanished, then the first that failed for a reason of its own; else one that was still running elsewhere
    while the others waited for it; else the first that failed at all.
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
    busy = [end for end in running if not end.waiting and end.where] or ([] if failed else running)
    if busy:
        places = Counter(end.where for end in running)
        hung = min(busy, key=lambda end: places[end.where])
        return hung.rank, _no_progress(hung, running)
    return (failed[0].rank, failed[0].error or "") if failed else (running[0].rank, _no_progress(running[0], running))


def _no_progress(hung: End, running: Sequence[End]) -> str:
    others: dict[str, list[str]] = {}
    for end in running:
        if end.rank != hung.rank and end.where:
            others.setdefault(end.where, []).append(str(end.rank))
    waited = [f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)} at {where}" for where, ranks in others.items()]
    at = f" at {hung.where}" if hung.where else ""
    return f"it made no progress{at}" + (f", with {'; '.join(waited)}" if waited else "")
