"""``--log-to`` during a run: every few seconds, a thread of the command logs the numbers that the run's process reports."""

from __future__ import annotations

import shlex
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mezzo.cli import results

if TYPE_CHECKING:
    from mezzo.launch.request import Request
    from mezzo.measure.live import Latest
    from mezzo.report.tracking import LiveRun, Writer

EVERY_S = 5.0
"""Seconds between two logged steps."""


def live_logging(places: Sequence[str] | None) -> AbstractContextManager[None]:
    """Log the runs inside the block to trackers while they run, if any are named."""
    from mezzo.launch.progress import shown_on

    return shown_on(LiveLog(places)) if places else nullcontext()


class LiveLog:
    """The trackers that a run is logged to (``launch.progress.Watcher``)."""

    def __init__(self, places: Sequence[str], *, every_s: float = EVERY_S) -> None:
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
        from mezzo.launch.progress import EVERY_S as REPORTED_EVERY_S

        wait_s = REPORTED_EVERY_S  # log the first report soon: a run may be short
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
