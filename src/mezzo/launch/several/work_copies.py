"""Copies of the folder that a command was typed in, so that each run writes its own files. Imports no torch."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from mezzo.errors import ScriptError

MOST_BYTES = 2 * 10**9
_LEFT_OUT = ("runs", "wandb", "mlruns", "__pycache__", "node_modules", "site-packages")


def copy_folder(source: Path, place: Path, *, without: Path) -> Path:
    """Copy a folder to ``place`` and return ``place``; hidden folders, environments, results of runs and ``without`` are left out.

    Links to folders stay links: their targets are not copied.

    Raises:
        ScriptError: there is too much to copy.
    """
    files, total = [], 0
    for file in _files(source, without.resolve()):
        total += file.stat().st_size
        files.append(file)
        if total > MOST_BYTES:
            raise ScriptError(
                f"{source} has more than {MOST_BYTES / 1e9:g} GB, and the script would run in copies of it",
                hint="write {run} into the script's arguments where they name the folder of its checkpoints, "
                "as in --output {run}: then nothing is copied",
            )
    for file in files:
        target = place / file.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        if file.is_symlink():
            target.symlink_to(file.resolve())
        else:
            shutil.copy2(file, target)
    place.mkdir(parents=True, exist_ok=True)
    return place


def _files(source: Path, without: Path) -> Iterator[Path]:
    """Yield the files in a folder, and the links to folders."""
    for folder, inner, names in os.walk(source):
        here = Path(folder)
        links = [name for name in inner if (here / name).is_symlink()]
        inner[:] = [name for name in inner if name not in links and not _is_left_out(here / name, without)]
        yield from (here / name for name in links)
        yield from (here / name for name in names if (here / name).is_file())


def _is_left_out(folder: Path, without: Path) -> bool:
    name = folder.name
    return name.startswith(".") or name in _LEFT_OUT or (folder / "pyvenv.cfg").exists() or folder.resolve() == without
