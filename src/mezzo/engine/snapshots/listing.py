"""List what a folder of snapshots holds: each file, and of the newest its position and its tensors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mezzo.engine.snapshots import container
from mezzo.engine.snapshots.folder import SavedSnapshot, saved_in
from mezzo.errors import SnapshotError


def snapshots_below(folder: Path) -> list[SavedSnapshot]:
    """Return the snapshots in ``folder``, and in those of the processes of a run below it; the newest first."""
    folders = [folder, *sorted(folder.glob("rank-*-of-*"))]
    return sorted((saved for each in folders for saved in saved_in(each)), key=lambda saved: -saved.number)


def listing(folder: Path) -> Iterator[str]:
    """Yield the lines of a sheet of the snapshots in ``folder``; every byte of the newest is checked."""
    saved = snapshots_below(folder)
    yield f"{len(saved)} snapshots in {folder}"
    for snapshot in saved:
        calls = f", {snapshot.calls} micro-batches of the next" if snapshot.calls else ""
        size = snapshot.path.stat().st_size
        yield f"  {snapshot.path.relative_to(folder)}   {size:,} bytes   after {snapshot.updates} updates{calls}"
    try:
        contents = container.read(saved[0].path)
    except SnapshotError as error:
        yield f"the newest cannot be read: {error.message}"
        return
    yield f"in {saved[0].path.relative_to(folder)}: {_position(contents.tree)}; file version {container.VERSION}, {contents.written_by}"
    width = max(map(len, map(_shown, contents.tensors)), default=0)
    for name, tensor in contents.tensors.items():
        shape = "x".join(map(str, tensor.shape)) or "one number"
        dtype = str(tensor.dtype).removeprefix("torch.")
        yield f"  {_shown(name):{width}}   {dtype}   {shape}   {tensor.nbytes:,} bytes"


def _position(tree: Any) -> str:
    position = tree.get("position") if isinstance(tree, dict) else None
    counts = [position.get(name) for name in ("epoch", "batch")] if isinstance(position, dict) else []
    if not counts or not all(type(count) is int for count in counts):
        return "no position in the data"
    return f"{counts[0]} finished passes over the data and {counts[1]} batches"


def _shown(name: str) -> str:
    """Return a name without characters that a terminal would obey."""
    return name.encode("unicode_escape").decode()
