"""Choose a snapshot: the newest that is whole and fits, with the reasons for refusing newer ones."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mezzo.engine.snapshots import container
from mezzo.engine.snapshots.folder import saved_in
from mezzo.engine.snapshots.structure import put_together
from mezzo.errors import SnapshotError


class RefusedSnapshot(NamedTuple):
    """A snapshot that was not loaded."""

    path: Path
    why: str


class Chosen(NamedTuple):
    """The snapshot that was loaded."""

    path: Path
    contents: Any
    refused: list[RefusedSnapshot]
    """Newer snapshots in the folder."""


def load_newest(path: Path, load: Callable[[Any], None]) -> Chosen | None:
    """Load a snapshot, or the newest loadable one in a folder, like ``load_first``."""
    files = [path] if path.is_file() else [saved.path for saved in saved_in(path)]
    return load_first([(file, functools.partial(contents_at, file)) for file in files], load, folder=path)


def load_first(
    candidates: Sequence[tuple[Path, Callable[[], Any]]], load: Callable[[Any], None], *, folder: Path
) -> Chosen | None:
    """Load the first loadable of several snapshots; a warning names those before it. None if there are no candidates.

    Args:
        candidates: the newest first, each with a function that returns its contents or raises ``SnapshotError``.
        load: loads the contents, or raises ``SnapshotError`` and changes nothing.
        folder: their folder, for messages.

    Raises:
        SnapshotError: none of them can be loaded.
    """
    refused: list[RefusedSnapshot] = []
    for path, read in candidates:
        try:
            contents = read()
            load(contents)
        except SnapshotError as error:
            if len(candidates) == 1:
                raise
            refused.append(RefusedSnapshot(path, error.message))
            continue
        if refused:
            listed = "; ".join(f"{snapshot.path.name}: {snapshot.why}" for snapshot in refused)
            warnings.warn(f"loaded {path.name}; not loaded, though newer: {listed}", UserWarning, stacklevel=3)
        return Chosen(path, contents, refused)
    if not candidates:
        return None
    raise none_loaded(refused, f"in {str(folder)!r}")


def none_loaded(refused: Sequence[RefusedSnapshot], which: str) -> SnapshotError:
    """Return the error that none of the snapshots can be loaded, with the reason for each."""
    listed = "".join(f"\n  {snapshot.path.name}: {snapshot.why}" for snapshot in refused)
    return SnapshotError(
        f"none of the {len(refused)} snapshots {which} can be loaded:{listed}",
        hint="start over in another folder; these files were left as they are",
    )


def contents_at(path: Path) -> Any:
    """Return the contents of the snapshot at ``path``.

    Raises:
        SnapshotError: the file is not whole, or contains no state.
    """
    tree, tensors, _ = container.read(path)
    try:
        return put_together(tree, tensors)
    except Exception as error:  # a file with a correct checksum may still contain anything
        raise SnapshotError(
            f"{str(path)!r} contains no state: {type(error).__name__}: {str(error)[:200]}",
            hint="pass a snapshot that Mezzo wrote",
        ) from None
