"""Pass a training's latest numbers from the process that runs the script to the command that waits for it.

The child writes a small file next to its record, at most twice a second; the command reads it whenever it redraws its display, and
deletes it when the run has ended. The file is reopened for each report: a script may close every descriptor and reuse the numbers.
Imports no torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Protocol

from mezzo.launch.request import Request
from mezzo.measure.live import Latest, Report

REPORT_EVERY_S = 0.5
"""Least time between two reports of a child."""


class Watcher(Protocol):
    """A display of runs in progress."""

    def following(self, request: Request, *, passes_output: bool) -> AbstractContextManager[None]:
        """Follow the run of ``request`` inside; ``passes_output``: whether the script prints to the terminal at the same time."""


_WATCHERS: ContextVar[tuple[Watcher, ...]] = ContextVar("watchers", default=())


@contextmanager
def shown_on(display: Watcher) -> Iterator[None]:
    """Show the runs inside on ``display``, as well as on the displays of outer contexts."""
    token = _WATCHERS.set((*_WATCHERS.get(), display))
    try:
        yield
    finally:
        _WATCHERS.reset(token)


@contextmanager
def followed(request: Request, *, passes_output: bool) -> Iterator[Request]:
    """Yield ``request``, changed to report its progress if a display shows it; the progress file is deleted at the end."""
    displays = _WATCHERS.get()
    if not displays:
        yield request
        return
    request = request.model_copy(update={"reports_progress": True})
    try:
        with ExitStack() as stack:
            for display in displays:
                stack.enter_context(display.following(request, passes_output=passes_output))
            yield request
    finally:
        request.progress_file.unlink(missing_ok=True)


def read_latest(path: Path) -> Latest | None:
    """Return the latest report; None before the first, or while one is being written."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    complete = isinstance(values, list) and len(values) == len(Latest._fields)
    return Latest(*values) if complete else None


def reports_to(path: Path, *, first: Path | None = None) -> Report:
    """Return a function that writes this process's reports to ``path``; in a process that the script forks it writes nothing.

    Args:
        path: the file for the latest report.
        first: a file to create at the first report, unless it exists.
    """
    pid, marked = os.getpid(), first is None

    def report(latest: Latest) -> None:
        nonlocal marked
        if os.getpid() != pid:
            return
        if first is not None and not marked:
            marked = True
            with suppress(OSError):
                first.touch(exist_ok=False)
        with suppress(OSError):  # the folder may be gone, or the disk full: the training continues
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            try:
                os.write(file, json.dumps(latest).encode())
            finally:
                os.close(file)

    return report
