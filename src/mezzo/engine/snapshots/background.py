"""Write snapshots while training continues: copy the state first, then write the copy in a thread.

Cost: the training thread waits for the copy (memory bandwidth: about 0.1 s per GB), and the host keeps one copy of the
state, which the next save reuses. Checksum, writing and fsync run in the other thread, without Python's lock.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mezzo.engine.snapshots import container
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
        """Return copies of ``tensors`` on the host; those of the last call are overwritten."""
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
