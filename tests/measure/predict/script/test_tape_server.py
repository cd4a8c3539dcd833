"""The process that records all tapes of a command: it is one, it is replaced when it ends, and it ends with the command."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import pytest

from mezzo.measure.predict.script import process, tape_server
from mezzo.measure.predict.script.tape_server import TapeServer, current_server, shared_imports

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="without fork there is no such process")

RECORDER = """
import os, socket, sys, time
connection = socket.socket(fileno=int(sys.argv[2]))
for line in connection.makefile():
    name = line.strip()
    if name == "dies":
        os._exit(7)
    if name == "hangs":
        time.sleep(600)
    print(name, os.getpid(), *sys.argv[3:], os.environ.get("RANK"), flush=True)
    connection.sendall(b".")
"""


@pytest.fixture(autouse=True)
def _without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "recorder.py").write_text(RECORDER, encoding="utf-8")
    monkeypatch.setattr(tape_server, "PROGRAM", "recorder")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


def _recorded(name: str, *, limit_s: float | None = None) -> tuple[str, int] | None:
    server = current_server()
    assert server is not None
    return server.record(name, deadline_s=None if limit_s is None else time.monotonic() + limit_s)


def _printed(name: str) -> list[str]:
    ended = _recorded(name)
    assert ended is not None
    assert ended[1] == 0
    return ended[0].split()


def test_one_process_records_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    with shared_imports(["scipy"], folder="/here"):
        first, second = _printed("a b"), _printed("c")
    assert (first[:2], second[:1]) == (["a", "b"], ["c"])
    assert first[2:] == second[1:]
    assert first[3:] == ["/here", "scipy", "None"]
    assert not Path(f"/proc/{first[2]}").exists()
    assert current_server() is None


def test_a_process_that_ends_is_replaced() -> None:
    with shared_imports([], folder="/"):
        before = _printed("a")
        assert _recorded("dies") == ("", 7)
        assert _printed("a")[1] != before[1]


def test_one_that_is_not_in_time_is_ended() -> None:
    with shared_imports([], folder="/"):
        before = _printed("a")
        assert _recorded("hangs", limit_s=0.05) is None
        assert not Path(f"/proc/{before[1]}").exists()


def test_it_ends_with_an_error_of_the_command() -> None:
    servers: list[TapeServer | None] = []

    def command() -> None:
        with shared_imports([], folder="/"):
            servers.append(current_server())
            raise ValueError("the command's")

    with pytest.raises(ValueError, match="the command's"):
        command()
    assert servers[0] is not None
    assert servers[0]._process is None


@pytest.mark.parametrize(("beside", "replaced"), [("other.py", False), ("needed.py", True)])
def test_a_file_of_the_script_is_not_hidden_by_a_library(
    beside: str, replaced: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    libraries, own = tmp_path / "libraries", tmp_path / "own"
    for folder in (libraries, own):
        folder.mkdir()
    (libraries / "library.py").write_text("import needed\n", encoding="utf-8")
    (libraries / "needed.py").touch()
    (own / beside).touch()
    monkeypatch.setattr("sys.path", ["", str(libraries)])
    for name in ("library", "needed"):
        monkeypatch.delitem(process.sys.modules, name, raising=False)
    assert process._replaced(["library"], str(own)) is replaced
    for name in ("library", "needed"):
        monkeypatch.delitem(process.sys.modules, name)


def test_forks_do_not_collect_what_was_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    ours, theirs = socket.socketpair()
    monkeypatch.setattr(process.gc, "freeze", lambda: done.append("frozen"))
    monkeypatch.setattr(process, "_record_all", lambda path, _: done.append(path.name))
    with ours:
        ours.sendall(b"/requests\n")
        ours.shutdown(socket.SHUT_WR)
        process.main(["--socket", str(theirs.detach()), "/"])
        assert ours.recv(1) == tape_server.RECORDED
    assert done == ["frozen", "requests"]
