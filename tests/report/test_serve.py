"""Pages over HTTP: what is below the folder and nothing else, for this machine and nobody else."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import record_builders as build
from mezzo import cli
from mezzo.records import write_record
from mezzo.report.serve import HOST, names_of, serving

SECRET = "secret"


@pytest.fixture
def port(tmp_path: Path) -> Iterator[int]:
    runs = tmp_path / "runs"
    (runs / "one").mkdir(parents=True)
    (runs / ".hidden").mkdir()
    for path, text in {
        "index.html": "the index",
        "one/report.html": "<script>hostile</script>",
        "one/record.json": "{}",
        "one/output.log": SECRET,
        "one/run.py": SECRET,
        ".hidden/report.html": SECRET,
        "../outside.html": SECRET,
        "../runs-beside.html": SECRET,
    }.items():
        (runs / path).write_text(text)
    (runs / "link.html").symlink_to(tmp_path / "outside.html")
    (runs / "up").symlink_to(tmp_path, target_is_directory=True)
    (runs / "inside.html").symlink_to(runs / "index.html")
    os.mkfifo(runs / "pipe.html")
    with serving(runs) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


def ask(port: int, target: str, *, method: str = "GET", host: str | None = None) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection(HOST, port, timeout=10)
    connection.putrequest(method, target, skip_host=True)
    connection.putheader("Host", host or f"{HOST}:{port}")
    connection.endheaders()
    answer = connection.getresponse()
    found = answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
    connection.close()
    return found


SERVED = [
    ("/", b"the index", "text/html; charset=utf-8"),
    ("/index.html?x=1", b"the index", "text/html; charset=utf-8"),
    ("/inside.html", b"the index", "text/html; charset=utf-8"),
    ("/one/report.html", b"<script>hostile</script>", "text/html; charset=utf-8"),
    ("/one//record.json", b"{}", "application/json; charset=utf-8"),
    ("/%6fne/record%2ejson", b"{}", "application/json; charset=utf-8"),
]


@pytest.mark.parametrize(("target", "body", "kind"), SERVED)
def test_pages_and_records_are_served(port: int, target: str, body: bytes, kind: str) -> None:
    status, headers, data = ask(port, target)
    assert (status, data, headers["content-type"]) == (200, body, kind)
    assert headers["x-content-type-options"] == "nosniff"
    assert "default-src 'none'" in headers["content-security-policy"]
    assert "frame-ancestors 'none'" in headers["content-security-policy"]
    status, headers, data = ask(port, target, method="HEAD")
    assert (status, data, headers["content-length"]) == (200, b"", str(len(body)))


@pytest.mark.parametrize(
    "target",
    [
        "/../outside.html",
        "/%2e%2e/outside.html",
        "/one/../../outside.html",
        "/..%2foutside.html",
        "/one/..%2f..%2foutside.html",
        "/..%5coutside.html",
        "//outside.html",
        "/../runs-beside.html",
        "/link.html",
        "/up/outside.html",
        "/pipe.html",
        "/.hidden/report.html",
        "/one/output.log",
        "/one/run.py",
        "/one",
        "/one/",
        "/etc/passwd",
        "/one/report.html%00.json",
        "/%ff%fe.html",
        "/" + "x" * 5000 + ".html",
        "/<script>alert(1)</script>.html",
    ],
)
def test_nothing_else_is(port: int, target: str) -> None:
    status, headers, data = ask(port, target.replace("<", "%3C").replace(">", "%3E"))
    assert (status, data) == (404, b"404 Not Found\n")
    assert headers["content-type"].startswith("text/plain")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH", "<b>"])
def test_other_methods_are_refused(port: int, method: str) -> None:
    status, _, data = ask(port, "/one/record.json", method=method)
    assert (status, data) == (501, b"")


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", f"{HOST}:1", "localhost"])
def test_another_name_for_this_machine_is_refused(port: int, host: str) -> None:
    assert ask(port, "/", host=host)[0] == 403
    assert ask(port, "/", host=f"localhost:{port}")[0] == 200


def test_browsers_leave_out_the_port_of_http() -> None:
    assert names_of(80) == {"127.0.0.1:80", "localhost:80", "127.0.0.1", "localhost"}
    assert names_of(8000) == {"127.0.0.1:8000", "localhost:8000"}


def test_a_broken_request_is_not_repeated(port: int) -> None:
    with socket.create_connection((HOST, port), timeout=10) as connection:
        connection.sendall(b"GET /<script> HTTP/9.9<script>\r\n\r\n")
        answer = b"".join(iter(lambda: connection.recv(4096), b""))
    assert b"script>" not in answer


def test_it_listens_on_this_machine_alone(port: int) -> None:
    own = {address[4][0] for address in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)} - {HOST}
    for address in own:
        if address.startswith("127."):
            continue
        with pytest.raises(OSError, match=r"refused|timed out|unreachable"):
            socket.create_connection((address, port), timeout=2).close()


def test_a_port_that_is_taken_is_refused(port: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a" / "record.json"
    write_record(build.doctor_record(), path)
    assert cli.main(["report", "--serve", "--port", str(port), str(path)]) == 2
    said = capsys.readouterr().err
    assert f"--port {port} cannot be used" in said
    assert "leave --port out" in said


def test_the_command_serves_until_it_is_interrupted(tmp_path: Path) -> None:
    write_record(build.doctor_record(), tmp_path / "one" / "record.json")
    command = [sys.executable, "-m", "mezzo", "report", "--serve", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = next(line for line in process.stdout if line.startswith("serving "))
        number = int(line.split(f"http://{HOST}:")[1].split("/")[0])
        assert b"What this machine can do" in ask(number, "/one/report.html")[2]
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert (process.returncode, err.replace("\n", "")) == (
        0,
        err.replace("\n", "") if "pages were missing" in err else "",
    )
    assert "Traceback" not in out + err
