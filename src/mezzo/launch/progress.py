"""The way of a training's latest numbers from the process that runs the script to the command that waits for it.

The child writes a small file beside its record, twice a second at most; the command reads it when it draws, and deletes it when the
run has ended. The file is opened anew for each report: a script may close every descriptor and reuse their numbers. Imports no torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Protocol

from mezzo.launch.request import Request
from mezzo.measure.live import Latest, Report

EVERY_S = 0.5
"""Least time between two reports of a child."""


class Watcher(Protocol):
    """A display of runs in progress."""

    def following(self, request: Request, *, passes_output: bool) -> AbstractContextManager[None]:
        """Follow the run of ``request`` inside; ``passes_output``: the script prints to the terminal meanwhile."""


_WATCHER: ContextVar[Watcher | None] = ContextVar("watcher", default=None)


def watcher() -> Watcher | None:
    """Return the display that runs are shown on; None for none."""
    return _WATCHER.get()


@contextmanager
def shown_on(display: Watcher) -> Iterator[None]:
    """Show the runs inside on ``display``, beside what shows them already."""
    outer = _WATCHER.get()
    token = _WATCHER.set(display if outer is None else _Both(outer, display))
    try:
        yield
    finally:
        _WATCHER.reset(token)


class _Both:
    """Two displays of the same runs."""

    def __init__(self, first: Watcher, second: Watcher) -> None:
        self._first, self._second = first, second

    @contextmanager
    def following(self, request: Request, *, passes_output: bool) -> Iterator[None]:
        """Follow the run on both."""
        with (
            self._first.following(request, passes_output=passes_output),
            self._second.following(request, passes_output=passes_output),
        ):
            yield


@contextmanager
def followed(request: Request, *, passes_output: bool) -> Iterator[Request]:
    """Yield ``request`` for a run that reports its progress if somebody watches; no file of it is left at the end."""
    display = watcher()
    if display is None:
        yield request
        return
    request = request.model_copy(update={"reports_progress": True})
    try:
        with display.following(request, passes_output=passes_output):
            yield request
    finally:
        request.progress_file.unlink(missing_ok=True)


def read_latest(path: Path) -> Latest | None:
    """Return the latest report; None before the first, or while one is being written."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    whole = isinstance(found, list) and len(found) == len(Latest._fields)
    return Latest(*found) if whole else None


def reports_to(path: Path, *, first: Path | None = None) -> Report:
    """Return what writes this process's reports to ``path``; a process that the script forks writes none.

    Args:
        path: the file for the latest report.
        first: a file to make at the first report, unless it is there.
    """
    process, marked = os.getpid(), first is None

    def report(latest: Latest) -> None:
        nonlocal marked
        if os.getpid() != process:
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
