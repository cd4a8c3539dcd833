"""Frozen objects are collected only if something else is left to finalise."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mezzo.children.fork_server import collect_all_if_needed, ids_to_finalise


class Deleted:
    """Does something at its end."""

    def __del__(self) -> None:
        pass


class Holder:
    """Keeps one object."""

    kept: Any = None


def suspended() -> Iterator[int]:
    yield 1


def started() -> Iterator[int]:
    generator = suspended()
    next(generator)
    return generator


def test_frozen_objects_are_collected_only_if_something_is_left(tmp_path: Path) -> None:
    gc.collect()
    for name in ("nothing", "closed file", "ended generator", "file", "generator", "object"):
        gc.freeze()
        before, left = ids_to_finalise(), Holder()
        if "file" in name:
            left.kept = (tmp_path / "file").open("w")
        if "generator" in name:
            left.kept = started()
        if name.startswith(("closed", "ended")):
            left.kept.close()
        if name == "object":
            left.kept = Deleted()
            left.kept.itself = left.kept
        collect_all_if_needed(before)
        assert (gc.get_freeze_count() == 0) == (name in ("file", "generator", "object")), name
        gc.unfreeze()
        if name == "file":
            left.kept.close()
