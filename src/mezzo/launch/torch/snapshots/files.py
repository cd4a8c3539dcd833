"""The files that a script writes: brought back to what they were at a snapshot, before a resumed run goes on from it.

Before a file changes for the first time since a snapshot, its contents go into that snapshot's journal; of a file that only grows, the
length does. A resumed run first undoes these changes. Then its set-up may write what it wrote in the first run, into a journal of its
own, which is undone when the loop is reached. Contents return into the same file, so that open files stay valid, and go on at their
positions. Limits: files of other processes are not seen, nor are files that are written by C code without Python's ``open``, but for
``torch.save`` and ``safetensors``.
"""

from __future__ import annotations

import builtins
import io
import json
import os
import shutil
import sys
import tempfile
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from mezzo.launch.patches import Patches, after_import

_SYSTEM = ("/dev", "/proc", "/sys")
SET_UP = 10**9
"""The number of the journal of what a resumed run's set-up writes."""


class FileJournal:
    """The journals of a run, by the numbers of their snapshots."""

    def __init__(self, folder: Path, *, without: Sequence[Path], report: Callable[[str, str], None]) -> None:
        """Begin without a journal.

        Args:
            folder: where the journals are.
            without: folders whose files are not the script's.
            report: reports what has failed and why, if a file cannot be kept.
        """
        self._folder, self._number = folder, 0
        self._report, self._failed = report, False
        self._without = [str(path.resolve()) for path in without]
        temporary, here = Path(tempfile.gettempdir()).resolve(), Path.cwd().resolve()
        self._without += [] if temporary in [here, *here.parents] else [str(temporary)]
        self._without += [str(Path.home() / name) for name in (".cache", ".triton", ".nv")]
        self._noted = set[str]()
        self._opened: list[tuple[Any, str, int, str, int]] = []
        """Files opened to be written: a weak reference, the path, how often it had been opened before, the mode, the place among all."""
        self._num_opened = 0
        self._times: Counter[str] = Counter()
        self._local = threading.local()  # a snapshot's thread deletes journals while the script writes

    def install(self, patches: Patches) -> None:
        """Watch what the script writes until ``patches`` are undone."""
        patches.around(builtins, "open", self._open)
        patches.around(io, "open", self._open)
        patches.around(os, "open", self._low_open)
        for name in ("remove", "unlink", "truncate", "rmdir"):
            patches.around(os, name, self._before_change)
        for name in ("rename", "replace"):
            patches.around(os, name, self._move)
        patches.around(os, "mkdir", self._mkdir)
        patches.around(shutil, "rmtree", self._remove_tree)
        patches.around(torch, "save", self._save)
        after_import("safetensors.torch", lambda: self._watch_safetensors(patches), patches)

    def _watch_safetensors(self, patches: Patches) -> None:
        module: Any = sys.modules["safetensors.torch"]
        for name in ("serialize_file", "save_file"):
            patches.around(module, name, self._save)

    # --- journals --------------------------------------------------------------------------------------------------------

    def begin(self, number: int) -> list[list[Any]]:
        """Begin the journal of a snapshot; return the files that are open: path, number of the opening, position."""
        self._number, self._noted = number, set()
        shutil_folder = self._journal(number)
        self._without_watching(lambda: shutil.rmtree(shutil_folder, ignore_errors=True))
        found = list[list[Any]]()
        self._opened = [row for row in self._opened if (file := row[0]()) is not None and not file.closed]
        for reference, path, times, mode, place in self._opened:
            file = reference()
            with suppress(OSError):  # its own disk is full, as the script will hear
                file.flush()
            found.append([path, times, file.tell(), place])
            self.note(path, only_grows="+" not in mode)
        return found

    def drop_before(self, number: int) -> None:
        """Delete the journals of snapshots that no longer exist."""
        for journal, path in self._journals():
            if journal < number:
                self._without_watching(lambda path=path: shutil.rmtree(path, ignore_errors=True))  # type: ignore[misc]

    def roll_back(self, number: int) -> None:
        """Undo all changes since a snapshot, the newest first."""
        for journal, path in sorted(self._journals(), reverse=True):
            if journal >= number:
                self._without_watching(lambda path=path: self._undo(path))  # type: ignore[misc]

    def begin_set_up(self) -> None:
        """Begin the journal of what set-up writes again."""
        self._number, self._noted = SET_UP, set()

    def end_set_up(self, number: int, opened: Sequence[Sequence[Any]]) -> None:
        """Undo what set-up has written, move the files that it opened to their positions, and go on from a snapshot."""
        files = [row for row in self._opened if (file := row[0]()) is not None and not file.closed]
        for row in files:
            row[0]().flush()
        self.roll_back(SET_UP)
        here, there = {row[1:3]: row for row in files}, {(path, times) for path, times, *_ in opened}
        others = {row[4]: row for row in files if row[1:3] not in there}
        for path, times, position, place in opened:
            found = here.get((path, times))
            # Set-up may have named it otherwise: after the time, or after the files that were there.
            if found is None and place in others:
                reference, _, _, mode, _ = others[place]
                found = reference, path, times, mode, place
                self._opened[self._opened.index(others[place])] = found
                file = reference()
                self._without_watching(lambda file=file, path=path, mode=mode: _redirect(file, path, mode))  # type: ignore[misc]
            if found is not None:
                found[0]().seek(position)
        self.begin(number)

    def _journal(self, number: int) -> Path:
        return self._folder / f"files-{number:010d}"

    def _journals(self) -> list[tuple[int, Path]]:
        return [(int(path.name.removeprefix("files-")), path) for path in self._folder.glob("files-*")]

    def _undo(self, journal: Path) -> None:
        log = journal / "changes.jsonl"
        lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
        for line in reversed([line for line in lines if line.endswith("}")]):  # the last one may not be whole
            change = json.loads(line)
            _undo_change(change["path"], change, journal)
        shutil.rmtree(journal, ignore_errors=True)

    def note(self, path: str, *, only_grows: bool = False) -> None:
        """Keep a file as it is now, before its first change since the snapshot."""
        key = f"{path} grows" if only_grows else path
        if path in self._noted or key in self._noted or not self._is_own(path):
            return
        self._noted.add(key)
        try:
            self._without_watching(lambda: self._keep(path, only_grows=only_grows))
        except OSError as error:  # a full disk must not end the training
            if not self._failed:
                self._failed = True
                why = f"could not keep {path!r} as it was at the last snapshot: {error.strerror}"
                self._report(
                    "files", f"{why}; a resumed run finds it, and what was written after it, as the stopped run left it"
                )

    def _keep(self, path: str, *, only_grows: bool) -> None:
        journal = self._journal(self._number)
        journal.mkdir(parents=True, exist_ok=True, mode=0o700)
        change: dict[str, Any] = {"path": path, "was": "absent"}
        if os.path.isdir(path):
            change["was"] = "folder"
        elif only_grows and os.path.exists(path):
            change |= {"was": "shorter", "length": os.path.getsize(path)}
        elif os.path.isfile(path):
            name = f"{len(self._noted)}.data"
            shutil.copy2(path, journal / name)
            change |= {"was": "file", "copy": name}
        elif os.path.exists(path):
            return
        with (journal / "changes.jsonl").open("a", encoding="utf-8") as log:
            log.write(json.dumps(change) + "\n")
            log.flush()
            os.fsync(log.fileno())

    def _is_own(self, path: str) -> bool:
        inside = any(path == folder or path.startswith(folder + os.sep) for folder in [*self._without, *_SYSTEM])
        return not inside and f"{os.sep}__pycache__{os.sep}" not in path and ".tfevents." not in path

    def _without_watching(self, action: Callable[[], Any]) -> None:
        before, self._local.busy = self._busy, True
        try:
            action()
        finally:
            self._local.busy = before

    @property
    def _busy(self) -> bool:
        return getattr(self._local, "busy", False)

    # --- what the script calls -------------------------------------------------------------------------------------------

    @property
    def _is_set_up(self) -> bool:
        return self._number == SET_UP

    def _open(self, original: Callable[..., Any], file: Any, mode: Any = "r", *args: Any, **kwargs: Any) -> Any:
        path = _path_of(file)
        if self._busy or path is None or not isinstance(mode, str) or not set(mode) & set("wax+"):
            return original(file, mode, *args, **kwargs)
        self.note(path, only_grows="a" in mode and "+" not in mode)
        if self._is_set_up and "x" in mode and os.path.exists(path):
            mode = mode.replace("x", "w")
        opened = original(file, mode, *args, **kwargs)
        if self._is_own(path):
            self._opened.append((weakref.ref(opened), path, self._times[path], mode, self._num_opened))
            self._times[path] += 1
            self._num_opened += 1
        return opened

    def _low_open(self, original: Callable[..., Any], path: Any, flags: int, *args: Any, **kwargs: Any) -> Any:
        self._changes(path, kwargs, if_=flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
        return original(path, flags, *args, **kwargs)

    def _changes(self, path: Any, kwargs: dict[str, Any], *, if_: Any = True) -> None:
        full = _path_of(path)
        if if_ and full is not None and not self._busy and kwargs.get("dir_fd") is None:
            self.note(full)

    def _save(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Note the file that is a function's second argument."""
        self._changes(args[1] if len(args) > 1 else kwargs.get("f", kwargs.get("filename")), {})
        return original(*args, **kwargs)

    def _before_change(self, original: Callable[..., Any], path: Any, *args: Any, **kwargs: Any) -> Any:
        self._changes(path, kwargs)
        return original(path, *args, **kwargs)

    def _move(self, original: Callable[..., Any], old: Any, new: Any, **kwargs: Any) -> Any:
        if not self._busy and (source := _path_of(old)) is not None and os.path.isdir(source):
            self._note_tree(source)
            for inside in _files_below(source):
                self._changes(os.path.join(os.fspath(new), os.path.relpath(inside, source)), {})
        self._changes(old, {})
        self._changes(new, {})
        return original(old, new, **kwargs)

    def _mkdir(self, original: Callable[..., Any], path: Any, *args: Any, **kwargs: Any) -> None:
        full = _path_of(path)
        if self._is_set_up and not self._busy and full is not None and os.path.isdir(full):
            return  # the first run made it
        self._changes(path, kwargs)
        original(path, *args, **kwargs)

    def _remove_tree(self, original: Callable[..., Any], path: Any, *args: Any, **kwargs: Any) -> None:
        full = _path_of(path)
        if not self._busy and full is not None:
            self._note_tree(full)
        self._without_watching(lambda: original(path, *args, **kwargs))

    def _note_tree(self, folder: str) -> None:
        self.note(folder)
        for inside in _files_below(folder):
            self.note(inside)


def _files_below(folder: str) -> list[str]:
    return [os.path.join(at, name) for at, folders, files in os.walk(folder) for name in [*folders, *files]]


def _path_of(file: Any) -> str | None:
    if not isinstance(file, (str, os.PathLike)):
        return None
    path = os.fspath(file)
    return os.path.abspath(path) if isinstance(path, str) else None


def _redirect(file: Any, path: str, mode: str) -> None:
    """Have an open file go on in another one."""
    flags = (os.O_RDWR if "+" in mode else os.O_WRONLY) | (os.O_APPEND if "a" in mode else 0) | os.O_CREAT
    descriptor = os.open(path, flags, 0o666)
    os.dup2(descriptor, file.fileno())
    os.close(descriptor)


def _undo_change(path: str, change: dict[str, Any], journal: Path) -> None:
    """Bring one file back."""
    was = change["was"]
    if was == "absent":
        if os.path.isdir(path):
            if not os.listdir(path):
                os.rmdir(path)
        elif os.path.exists(path):
            os.remove(path)
    elif was == "folder":
        os.makedirs(path, exist_ok=True)
    elif was == "shorter":
        if os.path.exists(path):
            os.truncate(path, change["length"])
    else:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with (journal / change["copy"]).open("rb") as old, open(path, "r+b" if os.path.exists(path) else "wb") as file:
            shutil.copyfileobj(old, file)
            file.truncate()
        shutil.copystat(journal / change["copy"], path)
