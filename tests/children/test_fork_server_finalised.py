"""Frozen objects are collected only if something else is left to finalise."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mezzo.children.fork_server import collect_all_if_needed, ids_to_finalise


class Deleted:
    """Does something at its end."""

    def __del__(self) -> None:
        pass


def suspended() -> Iterator[int]:
    yield 1


def started() -> Iterator[int]:
    generator = suspended()
    next(generator)
    return generator


@pytest.mark.parametrize("name", ["nothing", "closed file", "ended generator", "file", "generator", "object"])
def test_frozen_objects_are_collected_only_if_something_is_left(name: str, tmp_path: Path) -> None:
    gc.collect()
    gc.freeze()
    before = ids_to_finalise()
    left: Any = {"kept": None}
    if name in ("file", "closed file"):
        left["kept"] = (tmp_path / "file").open("w")
    if name in ("generator", "ended generator"):
        left["kept"] = started()
    if name == "object":
        left["kept"] = Deleted()
        left["kept"].itself = left["kept"]
    if name == "closed file":
        left["kept"].close()
    if name == "ended generator":
        left["kept"].close()
    collect_all_if_needed(before)
    frozen = gc.get_freeze_count()
    gc.unfreeze()
    if name == "file":
        left["kept"].close()
    assert (frozen == 0) == (name in ("file", "generator", "object"))
