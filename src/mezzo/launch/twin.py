"""The twin of a run: resume the run's first snapshot in another process, for a few updates, on copies of all files and without a network.

Called as ``python -m mezzo.launch.twin REQUEST``. It writes digests of its state into a file that is open already, and ends.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from mezzo.launch.process.copy_on_write import write_to_copies
from mezzo.launch.process.guard import die_with_parent
from mezzo.launch.request import Request

_NICE = 5
"""The training that it runs beside comes first."""
_OFFLINE = {"WANDB_MODE": "offline", "HF_HUB_OFFLINE": "1", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
"""Without these, libraries would wait for the network."""


def main(argv: list[str]) -> int:
    """Run the twin of the request in ``argv``, and return its exit code."""
    die_with_parent()
    os.nice(_NICE)
    request = Request.unpacked(argv[0])
    try:
        write_to_copies()
    except OSError as error:
        why = error.strerror or error
        print(f"mezzo: this system gives no process a file system of its own: {why}", file=sys.stderr)
        return 1
    _copy_snapshot(request)
    os.environ.update(_OFFLINE)
    from mezzo.launch.child import main as run

    return run([request.packed()])


def _copy_snapshot(request: Request) -> None:
    """Fill the twin's folder with the one snapshot and the journals of its files; the run goes on writing to its own."""
    assert request.snapshots is not None
    assert request.snapshots.twin is not None
    saved, folder = Path(request.snapshots.twin.snapshot), Path(request.snapshots.folder)
    folder.mkdir()
    (folder / saved.name).symlink_to(saved)
    for journal in saved.parent.glob("files-*"):
        shutil.copytree(journal, folder / journal.name)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
