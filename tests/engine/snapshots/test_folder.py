"""One run per folder, whatever happens to the folder; nothing that was saved is harmed."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers_waiting import until
from mezzo import SnapshotError
from mezzo.engine.snapshots import container
from mezzo.engine.snapshots import folder as folders
from mezzo.engine.snapshots.folder import LOCK, Folder, saved_in
from snapshot_runs import built, train


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != LOCK)


def test_names_say_when_and_in_which_order(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    paths = [folder.next_path(updates=12, calls=0), folder.next_path(updates=3, calls=2)]
    for path in paths:
        path.touch()
    (tmp_path / "notes.txt").touch()

    second = "000002-update-00000003+2.safetensors"
    assert names(tmp_path) == ["000001-update-00000012.safetensors", second, "notes.txt"]
    assert [saved[:3] for saved in saved_in(tmp_path)] == [(2, 3, 2), (1, 12, 0)]
    assert saved_in(tmp_path / "none") == []
    folder.prune(1)
    assert names(tmp_path) == [second, "notes.txt"]


def test_numbers_go_on_and_what_an_interrupted_write_left_goes(tmp_path: Path) -> None:
    (tmp_path / "000041-update-00000007.safetensors").touch()
    (tmp_path / ".000042-update-00000008.safetensors.77.part").touch()
    (tmp_path / ".bashrc.part").touch()

    folder = Folder(tmp_path)

    assert folder.next_path(updates=8, calls=0).name == "000042-update-00000008.safetensors"
    assert names(tmp_path) == [".bashrc.part", "000041-update-00000007.safetensors"]


def test_two_sessions_of_one_process(tmp_path: Path) -> None:
    first = Folder(tmp_path)
    with pytest.raises(SnapshotError, match="another session of this process is writing snapshots to"):
        Folder(tmp_path / ".." / tmp_path.name)
    first.release()
    second = Folder(tmp_path)
    del second
    Folder(tmp_path)


def test_another_process_is_named_and_its_lock_ends_with_it(tmp_path: Path) -> None:
    other = os.fork()
    if other == 0:
        kept = Folder(tmp_path)
        (tmp_path / "locked").write_text(kept.path.name)
        signal.pause()
    try:
        until(lambda: (tmp_path / "locked").exists(), "the lock")
        with pytest.raises(SnapshotError, match=rf"process {other} on .* \(.*\) is writing snapshots to"):
            Folder(tmp_path)
    finally:
        os.kill(other, signal.SIGKILL)
        os.waitpid(other, 0)
    Folder(tmp_path)
    assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()


def test_a_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    """Data loader workers outlive a killed training for some seconds."""
    holder = os.fork()
    if holder == 0:
        folder = Folder(tmp_path)
        worker = os.fork()
        if worker == 0:
            signal.pause()
        (tmp_path / "pid").write_text(f"{worker} {folder.path.name}")
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(holder, 0)
    worker = int((tmp_path / "pid").read_text().split()[0])
    try:
        Folder(tmp_path)
        assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()
    finally:
        os.kill(worker, signal.SIGKILL)


def test_a_folder_that_cannot_be_made_or_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SnapshotError, match=r"cannot use .*file' for snapshots: File exists"):
        Folder(tmp_path / "file")
    with pytest.raises(SnapshotError, match="cannot use '/proc/mezzo' for snapshots"):
        Folder(Path("/proc/mezzo"))
    monkeypatch.setattr(folders.os, "open", read_only)
    with pytest.raises(SnapshotError, match="for snapshots: Read-only file system"):
        Folder(tmp_path)


def read_only(*_: object) -> int:
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))


# --- a session whose folder fails -----------------------------------------------------------------


def full_disk(folder: Path) -> Callable[[], None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def vanished(folder: Path) -> Callable[[], None]:
    kept = folder.with_name("kept")
    folder.rename(kept)

    def back() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        kept.rename(folder)

    return back


def replaced(folder: Path) -> Callable[[], None]:
    back = vanished(folder)
    folder.mkdir()
    return back


FAILURES = [
    (full_disk, "could not write a snapshot .*: File too large; the snapshots before it are untouched"),
    (vanished, "the folder .* was removed or replaced while this run was writing"),
    (replaced, "the folder .* was removed or replaced while this run was writing"),
]


@pytest.mark.parametrize(("break_it", "message"), FAILURES)
def test_a_failed_save_is_an_error_and_harms_nothing(
    break_it: Callable[[Path], Callable[[], None]], message: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "snapshots"
    session, loader = built()
    train(session, loader, calls=4, after=lambda s, _: s.save(folder, keep=2) and None)
    session.state.snapshots.saving.wait()  # type: ignore[union-attr]
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    mend = break_it(folder)
    try:
        with pytest.raises(SnapshotError, match=message):
            session.save(folder, keep=1).wait()  # type: ignore[union-attr]
    finally:
        mend()

    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    told = capfd.readouterr().err
    assert ("could not write a snapshot" in told) == (break_it is full_disk)
    again, _ = built()
    assert again.load(folder) is not None


def test_a_failed_save_is_raised_by_the_next_too(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    session, _ = built()
    session.save(tmp_path).wait()  # type: ignore[union-attr]
    mend = full_disk(tmp_path)
    saving = session.save(tmp_path)
    assert saving is not None
    saving._thread.join()
    mend()

    with pytest.raises(SnapshotError, match="could not write a snapshot"):
        session.save(tmp_path)
    session.save(tmp_path).wait()  # type: ignore[union-attr]

    assert len(saved_in(tmp_path)) == 2
    assert "mezzo: could not write a snapshot" in capfd.readouterr().err


def test_a_full_disk_is_said_once_until_a_save_succeeds(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    session, _ = built()
    for failures in (3, 2):
        mend = full_disk(tmp_path)
        for _ in range(failures):
            with pytest.raises(SnapshotError):
                session.save(tmp_path).wait()  # type: ignore[union-attr]
            session.state.snapshots.saving = None
        mend()
        assert capfd.readouterr().err.count("mezzo: could not write a snapshot") == 1
        session.save(tmp_path).wait()  # type: ignore[union-attr]


def test_any_error_of_the_writing_thread_fails_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(path: Path, *_: object) -> None:
        raise MemoryError("no room for the header")

    session, _ = built()
    monkeypatch.setattr(container, "write", write)
    saving = session.save(tmp_path)
    assert saving is not None
    with pytest.raises(SnapshotError, match=r"could not write a snapshot .*: MemoryError: no room for the header"):
        saving.wait()
