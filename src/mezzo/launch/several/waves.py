"""Runs that a plan requests one by one, executed in waves: the next run together with those that will probably be requested after it.

A check and a search decide what to run next from what they know. If several runs are possible at once, their next requests are guessed
and run in advance. A guessed run that is requested later is ready by then; one that is never requested does not count. So the course
and the answer are the same as with one run at a time. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from pathlib import Path

from mezzo.launch.process.command_signals import stoppable
from mezzo.launch.request import Request
from mezzo.launch.several.resuming import with_digest
from mezzo.launch.several.side_by_side import Engine
from mezzo.records import AnyRecord, RunRecord, record_at

_WIDEST = 32
"""Most runs of a wave if the cluster sets no limit."""

Ahead = Callable[[], Iterable[Request]]
"""Yields the requests that will probably follow, the likeliest first."""
Reuse = Callable[[Request], AnyRecord | None]
"""Returns the record of a run that an earlier command finished; None if there is none."""


class Waves:
    """The runs of one command."""

    def __init__(self, engine: Engine, identity: Mapping[str, str]) -> None:
        """Prepare to run.

        Args:
            engine: executes the runs; it is open.
            identity: what must be the same for an earlier command's run to be used: script text, versions.
        """
        self._engine, self._identity = engine, identity
        self._ready: dict[str, AnyRecord] = {}
        """Records of runs that have not been requested yet, by their path."""
        self.reused: set[str] = set()
        """Names of the folders of requested runs that an interrupted command had finished."""

    @property
    def at_once(self) -> int:
        """The most runs of a wave."""
        return self._engine.at_once or _WIDEST

    def record(
        self,
        request: Request,
        *,
        limit_s: float | None = None,
        ahead: Ahead = tuple,
        reuse: Reuse = lambda _: None,
    ) -> AnyRecord:
        """Return the record of a run, which is executed now unless its record is ready.

        Args:
            request: what to run.
            limit_s: seconds after which each run of the wave is stopped; None for no limit.
            ahead: yields what will probably be run next.
            reuse: finds a run of an earlier command.

        Raises:
            Stopped: a signal has stopped the command; it carries the record that the run left, if it is a run's.
        """
        with stoppable() as stop:
            stop.check()
            request = with_digest(request, self._identity)
            if request.record_path not in self._ready:
                earlier = reuse(request)
                if earlier is not None:
                    self.reused.add(Path(request.record_path).parent.name)
                    return earlier
                wave = [request, *self._in_advance(ahead, reuse)]
                for ended, record in self._engine(wave, lambda: limit_s):
                    self._ready[ended.record_path] = record
            left = record_at(request.record_path) if stop.stopped else None
            stop.check(left if isinstance(left, RunRecord) else None)
        return self._ready.pop(request.record_path)

    def _in_advance(self, ahead: Ahead, reuse: Reuse) -> Iterable[Request]:
        """Return what to run together with the requested run."""
        if self.at_once == 1:
            return []
        likely = (with_digest(request, self._identity) for request in islice(ahead(), self.at_once - 1))
        return [request for request in likely if request.record_path not in self._ready and reuse(request) is None]
