"""The snapshots that one session writes: its folder, the save in progress, and when the next one is due."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path
from typing import Any

from mezzo.engine.processes.agreement import Agreement, save_is_due
from mezzo.engine.processes.distributed import OneProcess
from mezzo.engine.snapshots.background import Copies, Saving
from mezzo.engine.snapshots.folder import Folder


class Snapshots:
    """The snapshots that one session writes: its folder, its copy of the state, and the save in progress."""

    def __init__(self) -> None:
        self.folder: Folder | None = None
        self.copies = Copies()
        self.saving: Saving | None = None
        self.last_s = time.monotonic()
        self.notice = _Notice()
        self._agreement: Agreement | None = None
        self._calls = 0

    def agreement(self, processes: OneProcess) -> Agreement | None:
        """Return the agreement with the other processes that train the same model; None if there are none."""
        if self._agreement is None and processes.several:
            self._agreement = Agreement(within=processes.group)
        return self._agreement

    def due(self, every_s: float | None, agreement: Agreement | None) -> bool:
        """Return whether to save: ``every_s`` seconds have passed and the last save is written, or a process was asked to end.

        All processes return the same.
        """
        self._calls += 1
        if every_s is None:
            return True
        self.notice.listen()
        due = time.monotonic() - self.last_s >= every_s
        is_writing = every_s > 0 and self.saving is not None and self.saving.is_running
        asked = self.notice.received
        saves, ends = save_is_due(agreement, self._calls, due=due, is_writing=is_writing, asked=asked)
        self.notice.received |= ends  # it may have come in between
        return saves

    def count_from_now(self) -> None:
        """Measure the time to the next save from now."""
        self.last_s = time.monotonic()

    def begin_saving(self, saving: Saving) -> None:
        """Keep the save that begins, for the next one to wait for."""
        self.saving = saving
        self.count_from_now()

    def begin(self, path: Path) -> Folder:
        """Wait for the save in progress, and return the locked folder.

        Raises:
            SnapshotError: that save failed, or the folder cannot be used.
        """
        saving, self.saving = self.saving, None
        if saving is not None:
            saving.wait()
        if self.folder is None or self.folder.path != path:
            if self.folder is not None:
                self.folder.release()
            self.folder = Folder(path)
        return self.folder


class _Notice:
    """SIGTERM, which a cluster's scheduler sends some seconds before it ends a process."""

    def __init__(self) -> None:
        self.received = False
        self._listens = False

    def listen(self) -> None:
        """Handle SIGTERM from now on, unless the script has its own handler."""
        if self._listens or threading.current_thread() is not threading.main_thread():
            return
        self._listens = True
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._receive)

    def _receive(self, number: int, frame: Any) -> None:
        self.received = True
