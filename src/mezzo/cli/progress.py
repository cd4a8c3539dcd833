"""Progress of a command's runs, on standard error: in a terminal, a line that updates itself; in a pipe or log, a plain line now and then.

A script that prints to the terminal itself would garble the updating line, so its run gets plain lines, too.
"""

from __future__ import annotations

import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from mezzo.cli import results
from mezzo.report import formatting as fmt

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live

    from mezzo.launch.request import Request
    from mezzo.measure.live import Latest
    from mezzo.records import RunRecord
    from mezzo.report.tracking import LiveRun, Writer


_PLAIN_EVERY_S, _WATCH_EVERY_S = 10.0, 2.0
"""Seconds between two plain lines: usually, and under ``mezzo watch``."""
_LONGEST_NAME = 48
_BAR = 12


class EndedRun(NamedTuple):
    """A run that has ended."""

    policy: str
    duration_s: float


class _Current:
    """The run in progress."""

    def __init__(self, request: Request, name: str, *, passes_output: bool) -> None:
        self.request, self.name, self.passes_output = request, name, passes_output
        self.began_s = time.monotonic()
        self.latest: Latest | None = None
        self.first: tuple[float, int] | None = None
        """Time and step of the first report."""

    def read_report(self) -> None:
        """Read the latest report, if there is one."""
        from mezzo.launch.progress import read_latest

        latest = read_latest(self.request.progress_file)
        if latest is None:
            return
        self.latest = latest
        self.first = self.first or (time.monotonic(), latest.step)


class ProgressDisplay:
    """The display of a command's runs (``launch.progress.Watcher``)."""

    def __init__(self, console: Console, planned: Sequence[Request] = ()) -> None:
        """Begin with no run.

        Args:
            console: standard error.
            planned: all runs to come, if they are known: only then is the whole command's time left known.
        """
        self.console, self._planned = console, list(planned)
        # Only a terminal can update a line, even if colours are forced into a log.
        self.moves = sys.stderr.isatty() and not console.is_dumb_terminal
        self._ended: list[EndedRun] = []
        self._known_steps: set[int] = set()
        """The numbers of steps of runs that have ended."""
        self._running: list[_Current] = []
        """The runs in progress, the oldest first."""
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._last_line_s = 0.0
        """When a plain line was last printed, or a run began."""

    @contextmanager
    def following(self, request: Request, *, passes_output: bool) -> Iterator[None]:
        """Follow the run of ``request`` inside."""
        began_s = self._last_line_s = time.monotonic()
        run = _Current(request, run_name(request), passes_output=passes_output)
        with self._lock:
            self._running.append(run)
        try:
            yield
        finally:
            with self._lock:
                self._running.remove(run)
            self._ended.append(EndedRun(run_policy(request), time.monotonic() - began_s))

    def say_ended(self, request: Request, record: RunRecord) -> None:
        """Note how many steps a run had, and print how it ended if it failed or there is no updating line."""
        self._known_steps |= {len(record.steps)} - {0}
        if not record.error and self.moves:
            return
        outcome = record.error or fmt.plural(len(record.steps), "step")
        left_s = None if record.error else self._left_s()
        rest = f"; {_left_text(left_s)}" if left_s else ""
        self.console.print(f"{run_name(request)}: {outcome}{rest}", markup=False, soft_wrap=True)

    @property
    def _current(self) -> _Current | None:
        """The run that the line shows."""
        return self._running[0] if self._running else None

    def draw(self, live: Live | None) -> None:
        """Draw until the command is over; runs in a thread of its own."""
        from mezzo.launch.progress import REPORT_EVERY_S

        while not self._over.wait(REPORT_EVERY_S):
            with self._lock:
                current = self._current
            if current is not None:
                current.read_report()
            if live is not None and (current is None or not current.passes_output):
                if not live.is_started:
                    live.start()  # not earlier: it hides the cursor, which belongs to a script that prints here
                live.update(self._line(current), refresh=True)
            elif current is not None and time.monotonic() - self._last_line_s >= (
                _WATCH_EVERY_S if current.request.watches else _PLAIN_EVERY_S
            ):
                self._last_line_s = time.monotonic()
                self.console.print(f"mezzo: {', '.join(self._parts(current))}", markup=False, soft_wrap=True)

    def stop(self) -> None:
        """End ``draw``."""
        self._over.set()

    def _line(self, current: _Current | None) -> RenderableType:
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        line = Table.grid(padding=(0, 1))
        text = Text("" if current is None else ", ".join(self._parts(current)), no_wrap=True, overflow="ellipsis")
        if len(self._planned) < 2:
            line.add_row(text)
        else:
            line.add_row(ProgressBar(total=len(self._planned), completed=len(self._ended), width=_BAR), text)
        return line

    def _parts(self, current: _Current) -> list[str]:
        number = f" ({len(self._ended) + 1} of {len(self._planned)})" if len(self._planned) > 1 else ""
        parts = [f"{current.name}{number}", *(["running"] if current.latest is None else [])]
        if current.latest is not None:
            total = self._total_steps(current)
            parts.append(f"step {current.latest.step}" + (f" of {total}" if total else ""))
            if current.latest.loss is not None:
                parts.append(f"loss {fmt.number_text(current.latest.loss, digits=3)}")
            if current.latest.num_skipped:
                parts.append(f"{current.latest.num_skipped} skipped")
            if current.request.watches and current.latest.waits:
                parts.append(current.latest.waits)
        if len(self._running) > 1:
            parts.append(f"{fmt.plural(len(self._running) - 1, 'other run')} in parallel")
        left_s = self._left_s()
        return [*parts, _time_text(time.monotonic() - current.began_s) if left_s is None else _left_text(left_s)]

    def _total_steps(self, current: _Current) -> int | None:
        """Return the steps that the run will have: up to the last observed one, or as many as every earlier run; None if unknown."""
        observe = current.request.observe
        if observe is not None:
            ends = observe.kind == "ranges" or (observe.kind == "audit" and observe.contract is None)
            return observe.steps[-1] if ends else None
        total = max(self._known_steps) if len(self._known_steps) == 1 else 0
        return total if current.latest is not None and total >= current.latest.step else None

    def _left_s(self) -> float | None:
        """Return the time left: of this run from its rate, of later runs from finished ones; None if either is unknown."""
        if len(self._running) > 1:
            return None  # nothing is known about how simultaneous runs slow each other down
        current = self._current
        here = 0.0 if current is None else self._left_of(current)
        if here is None or not self._planned:
            return here if current is not None else None
        num_begun = len(self._ended) + (current is not None)
        later = [self._expected_s(run_policy(request)) for request in self._planned[num_begun:]]
        known = [time_s for time_s in later if time_s is not None]
        return here + sum(known) if len(known) == len(later) else None

    def _left_of(self, current: _Current) -> float | None:
        total, latest, first = self._total_steps(current), current.latest, current.first
        if total is not None and latest is not None and first is not None and latest.step > first[1]:
            return (total - latest.step) * (time.monotonic() - first[0]) / (latest.step - first[1])
        expected_s = self._expected_s(run_policy(current.request)) if self._planned else None
        return None if expected_s is None else max(expected_s - (time.monotonic() - current.began_s), 0.0)

    def _expected_s(self, policy: str) -> float | None:
        """Return the mean time of finished runs: those under the policy, or else all of them."""
        of_policy = [ended.duration_s for ended in self._ended if ended.policy == policy]
        times = of_policy or [ended.duration_s for ended in self._ended]
        return sum(times) / len(times) if times else None


def run_policy(request: Request) -> str:
    """Return a run's policy as it was typed."""
    from mezzo.launch.request import policy_text
    from mezzo.records import varied

    checkpoint = "" if request.models is None else request.models.checkpoint
    return varied(request.policy_typed or policy_text(request.policy), checkpoint)


def run_name(request: Request) -> str:
    """Return a run's name: its policy, and its seed if it has one."""
    name = fmt.shortened(fmt.clean(run_policy(request)), length=_LONGEST_NAME)
    return name if request.seed is None else f"{name}, seed {request.seed}"


def _time_text(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def _left_text(seconds: float) -> str:
    """Return a time left, rounded to what an estimate can resolve."""
    coarse = round(seconds) if seconds < 10 else 5 * round(seconds / 5) if seconds < 60 else 60 * round(seconds / 60)
    return f"about {_time_text(max(coarse, 1)).removesuffix(' 00 s')} left"


_PROGRESS: ContextVar[ProgressDisplay | None] = ContextVar("progress", default=None)


@contextmanager
def shown(planned: Sequence[Request] = ()) -> Iterator[ProgressDisplay]:
    """Show the progress of the runs inside; if the command already shows progress, that display is used.

    Args:
        planned: all runs to come, if they are known.
    """
    from mezzo.launch.progress import shown_on

    outer = _PROGRESS.get()
    if outer is not None:
        yield outer
        return
    progress = ProgressDisplay(results.console(stderr=True), planned)
    token = _PROGRESS.set(progress)
    try:
        with shown_on(progress), _drawn(progress):
            yield progress
    finally:
        _PROGRESS.reset(token)


@contextmanager
def _drawn(progress: ProgressDisplay) -> Iterator[None]:
    from rich.live import Live

    live = Live(console=progress.console, auto_refresh=False, transient=True) if progress.moves else None
    thread = threading.Thread(target=progress.draw, args=(live,), name="mezzo-progress", daemon=True)
    try:
        thread.start()
        yield
    finally:
        progress.stop()
        thread.join()
        if live is not None:
            live.stop()


LOG_EVERY_S = 5.0
"""Seconds between two logged steps."""


def live_logging(places: Sequence[str] | None) -> AbstractContextManager[None]:
    """Log the runs inside the block to trackers while they run, if any are named."""
    from mezzo.launch.progress import shown_on

    return shown_on(LiveLog(places)) if places else nullcontext()


class LiveLog:
    """The trackers that a run is logged to (``launch.progress.Watcher``)."""

    def __init__(self, places: Sequence[str], *, every_s: float = LOG_EVERY_S) -> None:
        self._places, self._every_s = places, every_s
        self._writers: dict[str, Writer] = {}
        self._last_step = 0
        """The last step that was logged."""

    @contextmanager
    def following(self, request: Request, *, passes_output: bool) -> Iterator[None]:
        """Log the run of ``request`` while the block runs."""
        over = threading.Event()
        thread = threading.Thread(target=self._follow, args=(request, over), name="mezzo-log", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _follow(self, request: Request, over: threading.Event) -> None:
        """Log until the run is over, then once more."""
        from mezzo.launch.progress import REPORT_EVERY_S

        wait_s = REPORT_EVERY_S  # log the first report soon: a run may be short
        while not over.wait(wait_s):
            if self._log(request):
                wait_s = self._every_s
        self._log(request)
        for text, writer in [*self._writers.items()]:
            self._attempt(text, writer.close)

    def _log(self, request: Request) -> bool:
        """Log the latest report; return whether there was one."""
        from mezzo.launch.progress import read_latest

        latest = read_latest(request.progress_file)
        if latest is None or latest.step == self._last_step:
            return False
        if not self._last_step:
            self._begin(request)
        self._last_step = latest.step
        for text, writer in [*self._writers.items()]:
            self._attempt(text, partial(writer.log, numbers_of(latest), latest.step))
        return True

    def _begin(self, request: Request) -> None:
        from mezzo.launch.request import policy_text
        from mezzo.report.tracking import LiveRun

        folder = Path(request.record_path).absolute().parent
        run = LiveRun(
            name=folder.name,
            script=Path(request.target).name.removesuffix(".py"),
            folder=folder,
            settings={"command": shlex.join(request.command), "policy": policy_text(request.policy)},
        )
        for text in self._places:
            self._attempt(text, partial(self._open, text, run))

    def _open(self, text: str, run: LiveRun) -> None:
        from mezzo.report.tracking import destination

        to = destination(text)
        self._writers[text] = to.tracker.live_writer(run, to.place)

    def _attempt(self, text: str, action: Callable[[], None]) -> None:
        """Call a tracker. One that fails is reported once and dropped: the training continues, and its result is logged at the end."""
        try:
            action()
        except Exception as error:  # from a library, its server or its disk
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            results.note(f"--log-to {text} failed during the run ({reason}); the result will be logged at its end")
            self._writers.pop(text, None)


def numbers_of(latest: Latest) -> dict[str, float]:
    """Return the known numbers of the latest step, by their names in trackers."""
    known = {
        "live/loss": latest.loss,
        "live/loss_scale": latest.loss_scale,
        "live/grad_norm": latest.grad_norm,
        "live/skipped_updates": latest.num_skipped,
    }
    shares = {
        f"live/{name.replace(', ', '_').replace(' ', '_')}": value for name, value in (latest.shares or {}).items()
    }
    return {name: float(value) for name, value in known.items() if value is not None} | shares
