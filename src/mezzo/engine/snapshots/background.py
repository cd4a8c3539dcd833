"""Write snapshots while training continues: copy the state first, then write the copy in a thread.

Cost: the training thread waits for the copy (memory bandwidth: about 0.1 s per GB), and the host keeps one copy of the
state, which the next save reuses. Checksum, writing and fsync run in the other thread, without Python's lock.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mezzo.engine.processes.agreement import Agreement, save_is_due
from mezzo.engine.processes.distributed import OneProcess
from mezzo.engine.snapshots import container
from mezzo.engine.snapshots.folder import Folder
from mezzo.errors import MezzoError, SnapshotError

_FAILED: dict[Path, str] = {}
"""By folder, why its last save failed: said once, until a save succeeds."""


class Saving:
    """A snapshot that is being written."""

    def __init__(self, path: Path, tree: Any, tensors: Mapping[str, Tensor], then: Callable[[], None]) -> None:
        """Begin to write; ``then`` is called once the file is whole."""
        self.path = path
        """The path of the whole file."""
        self._state, self._then = (tree, tensors), then
        self._error: MezzoError | None = None
        self._thread = threading.Thread(target=self._run, name="mezzo-snapshot")  # not a daemon: Python waits for it
        self._thread.start()

    def _run(self) -> None:
        try:
            container.write(self.path, *self._state)
            self._then()
            _FAILED.pop(self.path.parent, None)
        except MezzoError as error:
            self._error = error
        except Exception as error:  # any other would end the thread, and ``wait`` would report success
            why = (error.strerror or error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
            self._error = SnapshotError(
                f"could not write a snapshot to {str(self.path.parent)!r}: {why}; the snapshots before it are untouched",
                hint="free space on that disk or choose another folder; training can continue",
            )
        if self._error is not None and _FAILED.get(self.path.parent) != self._error.message:
            _FAILED[self.path.parent] = self._error.message
            print(f"mezzo: {self._error.message}", file=sys.stderr, flush=True)  # the script may never call ``wait``

    @property
    def is_running(self) -> bool:
        """Whether the file is still being written: a save that is due by time comes after it, so that a slow disk holds no training."""
        return self._thread.is_alive()

    def wait(self) -> Path:
        """Wait until the snapshot is on the disk, and return its path.

        Raises:
            SnapshotError: it could not be written.
        """
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self.path


class Copies:
    """Host memory for one copy of a state, reused by each save: new memory takes twice as long to fill."""

    def __init__(self) -> None:
        self._copies: dict[str, Tensor] = {}

    def of(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return copies of ``tensors`` on the host; they overwrite the last call's."""
        before, self._copies = self._copies, {}
        devices: set[torch.device] = set()
        for name, tensor in tensors.items():
            copy = before.get(name)
            if copy is None or (copy.shape, copy.dtype, copy.stride()) != (tensor.shape, tensor.dtype, tensor.stride()):
                copy = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
            copy.copy_(tensor, non_blocking=tensor.is_cuda)
            if tensor.is_cuda:
                devices.add(tensor.device)
            self._copies[name] = copy
        for device in devices:  # a wait without a device is for the current one
            torch.cuda.synchronize(device)
        return self._copies


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
