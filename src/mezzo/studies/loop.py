"""The one loop of runs: do what a command's plan wants next, until it wants nothing more. Imports no torch.

A plan is a function of what the command knows. If several runs are possible at once, the next requests of a plan are guessed and run in
advance. A guessed run that is wanted later is ready by then; a run that is never wanted does not count. So the course and the answer
are the same as with one run at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from mezzo.children.signals import stoppable
from mezzo.launch.request import Request
from mezzo.records import AnyRecord, RunRecord, record_at
from mezzo.studies.finished import Finished, with_digest
from mezzo.studies.side_by_side import Engine, LimitS

_WIDEST = 32
"""Most guessed runs at once if the cluster sets no limit."""

Ahead = Callable[[], Iterable[Request]]
"""Yields the requests that will probably follow, the likeliest first."""
Reuse = Callable[[Request], AnyRecord | None]
"""Returns the record of a run that an earlier command finished; None if there is none."""


class Done(NamedTuple):
    """What became of a part of a command."""

    record: AnyRecord | None
    """None if it has none, or does not count."""
    took_s: float
    resumed: bool
    """Whether an interrupted command had finished it."""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What a plan wants next: a run of the script, or work that takes several runs."""

    do: Callable[[], AnyRecord | None]
    """Runs the script; returns the record, None if there is none or it does not count."""
    learn: Callable[[Done], str] = lambda _: ""
    """Adds the result to what is known; returns it in a few words."""
    name: str = ""
    """The name of its folder, by which an interrupted command lists it."""
    title: str = ""
    """Its name in messages."""
    says: str = ""
    """What to print before it begins."""


class Study:
    """The runs of one command on an engine."""

    def __init__(self, engine: Engine, finished: Finished) -> None:
        """Prepare to run.

        Args:
            engine: executes the runs; it is open.
            finished: what an interrupted command with the same script and versions has finished.
        """
        self.finished = finished
        self._engine = engine
        self._ready: dict[str, AnyRecord] = {}
        """Records of runs that have not been wanted yet, by their path."""
        self.reused: set[str] = set()
        """Names of the folders of wanted runs that an interrupted command had finished."""

    @property
    def at_once(self) -> int:
        """The most runs at once."""
        return self._engine.at_once or _WIDEST

    def record(
        self,
        request: Request,
        *,
        limit_s: LimitS = lambda: None,
        together: Sequence[Request] = (),
        ahead: Ahead = tuple,
        reuse: Reuse = lambda _: None,
        ended: Callable[[Request, AnyRecord], None] = lambda request, record: None,
    ) -> AnyRecord:
        """Return the record of a run, which is executed now unless its record is ready.

        Args:
            request: what to run.
            limit_s: returns the seconds after which a run that begins now is stopped; None for no limit.
            together: what to run as well.
            ahead: yields what will probably be wanted next.
            reuse: finds a run of an earlier command.
            ended: called when a run has ended.

        Raises:
            Stopped: a signal has stopped the command; it carries the record that the run left, if it is a run's.
        """
        with stoppable() as stop:
            stop.check()
            request = with_digest(request, self.finished.identity)
            if request.record_path not in self._ready:
                earlier = reuse(request)
                if earlier is not None:
                    self.reused.add(Path(request.record_path).parent.name)
                    return earlier
                others = [with_digest(other, self.finished.identity) for other in (*together, *self._guessed(ahead))]
                missing = [other for other in others if other.record_path not in self._ready and reuse(other) is None]
                for run, record in self._engine([request, *missing], limit_s):
                    self._ready[run.record_path] = record
                    ended(run, record)
            left = record_at(request.record_path) if stop.stopped else None
            stop.check(left if isinstance(left, RunRecord) else None)
        return self._ready.pop(request.record_path)

    def _guessed(self, ahead: Ahead) -> Iterable[Request]:
        return () if self.at_once == 1 else islice(ahead(), self.at_once - 1)


def carry_out(
    plan: Callable[[], Wanted | None], *, study: Study | None = None, say: Callable[[str], None] = lambda _: None
) -> None:
    """Do what a plan wants next, until it wants nothing more.

    Args:
        plan: returns the next part, given what all parts before it have led to.
        study: lists the parts that are finished, so that an interrupted command continues; None where each begins anew.
        say: prints a line.

    Raises:
        Stopped: a signal has stopped the command.
    """
    with stoppable() as stop:
        while (part := plan()) is not None:
            stop.check()
            began_s = time.monotonic()
            record = None if study is None else study.finished.record(part.name)
            ran = record is None
            if ran:
                if part.says:
                    say(part.says)
                record = part.do()
            resumed = not ran or (study is not None and part.name in study.reused)
            outcome = part.learn(Done(record, time.monotonic() - began_s, resumed))
            if study is None:
                continue
            if ran and record is not None:
                study.finished.add(part.name)
            say(f"{part.title}: {outcome}" + (f" (from the interrupted {study.finished.what})" if resumed else ""))
