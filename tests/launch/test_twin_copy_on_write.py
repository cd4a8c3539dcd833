"""A process that writes to copies changes nothing that another one sees, and reaches no network."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from mezzo.launch.twin import _own_folder, write_to_copies

_CHILD = """
import os, socket, sqlite3
from pathlib import Path
from mezzo.launch.twin import write_to_copies
try:
    write_to_copies()
except OSError as error:
    print("refused", error)
    raise SystemExit
Path("kept.txt").write_text("changed")
Path("new.txt").write_text("new")
os.remove("gone.txt")
os.rename("moved.txt", "moved")
database = sqlite3.connect("rows.db")  # code in C
database.execute("create table rows (n)")
database.commit()
print(Path("kept.txt").read_text(), Path("new.txt").exists(), Path("gone.txt").exists(), sorted(os.listdir()))
with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname(), timeout=5):
    print("reaches itself")
try:
    socket.create_connection(("192.0.2.1", 80), timeout=5)
except OSError as error:
    print(error.strerror)
"""


def test_what_it_writes_is_seen_by_itself_alone(tmp_path: Path) -> None:
    folder = tmp_path / "a, b:c"
    folder.mkdir()
    for name in ("kept", "gone", "moved"):
        (folder / f"{name}.txt").write_text(name)
    ran = subprocess.run([sys.executable, "-c", _CHILD], cwd=folder, capture_output=True, text=True, check=True)
    if ran.stdout.startswith("refused"):
        pytest.skip(f"this system gives no process a file system of its own: {ran.stdout}")
    assert ran.stdout.splitlines() == [
        "changed True False ['kept.txt', 'moved', 'new.txt', 'rows.db']",
        "reaches itself",
        "Network is unreachable",
    ]
    assert {path.name: path.read_text() for path in folder.iterdir()} == {
        f"{name}.txt": name for name in ("kept", "gone", "moved")
    }


_USER = """
import ctypes, encodings.ascii, os, sys  # all that is imported: that user may not read this Python
from mezzo.launch.twin import write_to_copies
os.chdir("own/deep")
os.setgid(65534)
os.setuid(65534)
ctypes.CDLL(None).prctl(4, 1)  # who was root may read /proc/self again
try:
    write_to_copies(sys.argv[1])
except OSError as error:
    print("refused", error)
    raise SystemExit
for name in ("kept.txt", sys.argv[1] + "/kept.txt"):
    with open(name, "w") as file:
        file.write("changed")
    print(open(name).read())
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make folders of two users")
def test_a_user_writes_to_copies_below_folders_of_others() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # where that user may go
        Path(folder).chmod(0o755)
        for inner in ("own/deep", "results/own"):
            (Path(folder) / inner).mkdir(parents=True)
            (Path(folder) / inner / "kept.txt").write_text("kept")
            for path in (Path(folder) / inner, Path(folder) / inner / "kept.txt"):
                os.chown(path, 65534, 65534)
        command = [sys.executable, "-c", _USER, f"{folder}/results/own"]
        ran = subprocess.run(
            command, cwd=folder, env=os.environ | {"TMPDIR": "/tmp"}, capture_output=True, text=True, check=False
        )
        if ran.stdout.startswith("refused"):
            pytest.skip(f"this system gives no process a file system of its own: {ran.stdout}")
        assert (ran.stdout, ran.stderr) == ("changed\nchanged\n", "")
        assert {path.read_text() for path in Path(folder).rglob("kept.txt")} == {"kept"}


def test_a_users_overlay_begins_where_nothing_of_others_is_in_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = tmp_path / "own" / "deep"
    inner.mkdir(parents=True)
    monkeypatch.setattr("os.access", lambda path, _: str(path).startswith(str(tmp_path)))
    assert _own_folder(str(inner), []) == str(tmp_path)
    assert _own_folder(str(inner), [str(inner.parent)]) == str(inner.parent)  # a mount begins there
    monkeypatch.setattr("os.getgid", lambda: -1)  # every folder is of another group
    assert _own_folder(str(inner), []) == str(inner)


def test_another_system_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    with pytest.raises(OSError, match="only Linux"):
        write_to_copies()
