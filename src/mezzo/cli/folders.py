"""The folder for a command's record and report; another command's results and the user's own files are never overwritten."""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Any

from mezzo.cli.words import replacing, typed
from mezzo.errors import UsageError
from mezzo.launch.ranks.launched import attempt
from mezzo.readable import readable

try:
    import fcntl
except ImportError:  # no POSIX system
    fcntl = None  # type: ignore[assignment]

_RECORD, _REPORT = "record.json", "report.html"


def new_folder(out: Path | None, name: str, *, leaves: Sequence[str] = ()) -> Path:
    """Return a folder for records, created if need be: ``out``, or a new one under runs/ named after the date and ``name``.

    If ``out`` contains the results of another command, or files that this one would overwrite, or another command is just writing to
    it, the folder is a new one next to it, and standard error says so. The same command repeated in the same folder replaces its own
    results; if a launcher started the job again, the earlier attempt's results move to a folder inside.

    Args:
        out: the requested folder.
        name: the last part of a new folder's name.
        leaves: the files that the command writes in addition to its record and report.

    Raises:
        UsageError: the folder cannot be created or written to.
    """
    if out is None:
        stamp = datetime.now().strftime("%Y-%m-%d-%H%M%S")
        plain = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-")[:60]
        return next(
            folder for folder in _numbered(Path("runs") / f"{stamp}-{plain}") if _create(folder) and _hold(folder)
        )
    folder = _unused_folder(out, leaves)
    attempts = attempt(os.environ)
    if attempts and (folder / _RECORD).exists():
        earlier = folder / f"attempt-{attempts}"
        earlier.mkdir(exist_ok=True)
        for name in (_RECORD, _REPORT):
            with suppress(FileNotFoundError):
                (folder / name).replace(earlier / name)
    (folder / _REPORT).unlink(missing_ok=True)  # it shows the record about to be replaced
    return folder


def resumed_folder(folder: Path, *, out: Path | None) -> Path:
    """Return the folder of ``--resume`` that a command continues in; ``out`` is the folder of ``--out``.

    Raises:
        UsageError: it does not exist, ``out`` is another one, or another command is writing to it.
    """
    if not folder.is_dir():
        raise UsageError(
            f"--resume {str(folder)!r} is not a folder; allowed: the folder that the stopped command wrote to",
            hint="find it with ls runs",
        )
    if out is not None and out.absolute() != folder.absolute():
        raise UsageError(
            f"--resume {str(folder)!r} with --out {str(out)!r}; allowed: one folder, because a command continues where it stopped",
            hint=f"leave out --out {out}",
        )
    _create(folder, "--resume")
    if not _hold(folder):
        raise UsageError(
            f"--resume {str(folder)!r} is being written to by another command; allowed: one command per folder",
            hint="wait until that command has ended",
        )
    (folder / _REPORT).unlink(missing_ok=True)
    return folder


def _unused_folder(out: Path, leaves: Sequence[str]) -> Path:
    """Return the first folder that this command may write to, created and held."""
    why = ""
    for folder in _numbered(out):
        if not folder.is_dir() or _may_overwrite(folder, leaves):
            _create(folder)
            if _hold(folder) and _may_overwrite(folder, leaves):  # another command may just have ended
                break
            why = why or "is being written to by another command"
        why = why or "already contains other results"
    if folder != out:
        print(f"mezzo: {out} {why}; writing to {folder} instead", file=sys.stderr)
    return folder


_HELD: dict[tuple[int, int], int] = {}
"""By device and inode, the open folders that this process holds until it ends, however it ends."""


def _hold(folder: Path) -> bool:
    """Keep other commands out of a folder; return whether none of them holds it. Systems without such locks hold nothing."""
    if fcntl is None:
        return True
    status = folder.stat()
    if (status.st_dev, status.st_ino) in _HELD:
        return True
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except PermissionError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:  # a network's file system may have no such locks
        os.close(descriptor)
        return not isinstance(error, BlockingIOError)
    _HELD[status.st_dev, status.st_ino] = descriptor
    return True


def check_folder(folder: Path | None, option: str) -> None:
    """Create a folder; refuse a file, or a folder that is not writable.

    Raises:
        UsageError: the folder cannot be used.
    """
    if folder is not None:
        _create(folder, option)


def _numbered(folder: Path) -> Iterator[Path]:
    yield folder
    plain = folder if folder.name else folder.resolve()
    yield from (plain.with_name(f"{plain.name}-{number}") for number in count(2))


def _create(folder: Path, option: str = "--out") -> bool:
    """Create the folder if there is none; return whether it is new."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            folder.mkdir()
            return True
        except FileExistsError:
            if not folder.is_dir():
                raise
        with tempfile.TemporaryFile(dir=folder):
            return False
    except OSError as error:
        is_file = isinstance(error, (FileExistsError, NotADirectoryError))
        why = "it is a file" if is_file else f"it is not writable ({error.strerror})"
        raise UsageError(
            f"{option} {str(folder)!r} cannot be used as a folder: {why}",
            hint=_elsewhere(option),
        ) from None


def _elsewhere(option: str) -> str:
    """Return what to type to write to a folder below the user's own."""
    folder = str(Path.home() / "mezzo-runs" / "first")
    if not option.startswith("--"):
        return f"copy it to a folder that you may write to, such as {folder}"
    name, _, tracker = option.partition(" ")
    return f"type: {replacing(name, f'{tracker}{folder}')}"


def _may_overwrite(folder: Path, leaves: Sequence[str]) -> bool:
    """Return whether the folder contains results of the same command, or nothing that this command would overwrite."""
    path = folder / _RECORD
    if not path.exists():
        return not any((folder / name).exists() for name in (_REPORT, *leaves))
    try:
        record: Any = json.loads(path.read_text(encoding="utf-8"))
        run = record.get("run", record)
        place = run.get("environment", {}).get("folder", "")
        words = run.get("command", [])
        if record.get("kind") == "doctor":
            return "doctor" in typed()
        return words == list(typed()) and place in ("", readable(os.getcwd()))
    except (OSError, ValueError, AttributeError):  # not a record, or unreadable for this Mezzo
        return False
