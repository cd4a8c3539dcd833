"""Folders for temporary files end with their process; those of a killed one end with the next."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from mezzo.temporary import began, folder_of_process, namespace, temporary_folder

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc")
HOLDS = "from mezzo import temporary\nimport os, sys\nprint(temporary.folder_of_process(), flush=True)\n{}\nsys.stdin.read()"


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def test_a_folder_ends_with_its_block() -> None:
    with temporary_folder() as folder:
        assert folder.is_dir()
    assert not folder.exists()


@pytest.mark.parametrize(("end", "left"), [("sys.exit()", False), ("os.fork() or sys.exit()", True), ("", True)])
def test_the_folder_of_a_process(end: str, left: bool, tmp_path: Path) -> None:
    """It ends with the process, not with a fork of it; that of a killed one is removed when the next is made."""
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    words = [sys.executable, "-c", HOLDS.format(end)]
    with subprocess.Popen(words, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        folder = Path(process.stdout.readline().strip())
        if left:
            with temporary_folder():
                assert folder.is_dir()  # its process lives
            process.send_signal(signal.SIGKILL)
        process.wait()
        assert folder.exists() is left
        with temporary_folder():
            assert not folder.exists()


def test_folders_of_others_stay(tmp_path: Path) -> None:
    own = folder_of_process()
    names = [f"mezzo-of-{namespace()}1-1-1-x", "mezzo-of-x", "mezzo-0-job"]
    for name in names:
        (tmp_path / name).mkdir()
    with temporary_folder():
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([own.name, *names])
    assert began(os.getpid()) in own.name
