"""Choose a snapshot: the newest that is whole and fits, with the reasons why newer ones were passed over."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from mezzo.engine.snapshots import container
from mezzo.engine.snapshots.folder import saved_in
from mezzo.engine.snapshots.structure import put_together
from mezzo.errors import SnapshotError

T = TypeVar("T")


class Refused(NamedTuple):
    """A snapshot that was not loaded."""

    path: Path
    why: str


class Chosen(NamedTuple):
    """The snapshot that was loaded."""

    path: Path
    contents: Any
    refused: list[Refused]
    """Newer ones in the folder."""


def load_newest(path: Path, take: Callable[[Any], None]) -> Chosen | None:
    """Load a snapshot, or the newest one in a folder that can be; a warning names those that cannot. None if there is none.

    Args:
        path: a snapshot or a folder.
        take: puts the contents in place, or raises ``SnapshotError`` and changes nothing.

    Raises:
        SnapshotError: none of them can be loaded.
    """
    candidates = [path] if path.is_file() else [saved.path for saved in saved_in(path)]
    refused: list[Refused] = []
    for candidate in candidates:
        try:
            contents = contents_at(candidate)
            take(contents)
        except SnapshotError as error:
            if len(candidates) == 1:
                raise
            refused.append(Refused(candidate, error.message))
            continue
        if refused:
            listed = "; ".join(f"{one.path.name}: {one.why}" for one in refused)
            warnings.warn(f"loaded {candidate.name}; not loaded, though newer: {listed}", UserWarning, stacklevel=4)
        return Chosen(candidate, contents, refused)
    if not candidates:
        return None
    listed = "".join(f"\n  {one.path.name}: {one.why}" for one in refused)
    raise SnapshotError(
        f"none of the {len(refused)} snapshots in {str(path)!r} can be loaded:{listed}",
        hint="begin anew in another folder; these files were left as they are",
    )


def contents_at(path: Path) -> Any:
    """Return the contents of the snapshot at ``path``.

    Raises:
        SnapshotError: it is not whole, or no state.
    """
    tree, tensors = container.read(path)
    try:
        return put_together(tree, tensors)
    except Exception as error:  # whatever somebody wrote into a file whose checksum is right
        raise SnapshotError(
            f"{str(path)!r} holds no state: {type(error).__name__}: {str(error)[:200]}",
            hint="pass a snapshot that Mezzo wrote",
        ) from None
