"""Standard input of scripts that run several times: each run reads all of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="a file's position is its own on Linux only")

PARENT = """
import os, subprocess, sys
from mezzo.measure.standard_input import digest_of_input, keep_input
keep_input([sys.argv[1]], say=print)
child = "from mezzo.measure.standard_input import reopen_input; reopen_input(); import sys; print(repr(sys.stdin.read()))"
if sys.argv[2] == "read first":
    os.read(0, 4)
for _ in range(2):
    subprocess.run([sys.executable, "-c", child], check=True)
print(len(digest_of_input([sys.argv[1]])))
"""


@pytest.mark.parametrize(
    ("source", "from_file", "first", "printed"),
    [
        ("sys.stdin.read()", False, "", ["'one\\ntwo\\n'"] * 2 + ["64"]),
        ("name = input('name? ')", False, "", ["'one\\ntwo\\n'"] * 2 + ["64"]),
        ("from sys import stdin", False, "", ["'one\\ntwo\\n'"] * 2 + ["64"]),
        ("layer.input(x)  # no stdin", False, "", ["'one\\ntwo\\n'", "''", "0"]),
        ("print(1)", False, "", ["'one\\ntwo\\n'", "''", "0"]),  # a pipe that no script reads may never end
        ("print(1)", True, "", ["'one\\ntwo\\n'"] * 2 + ["0"]),
        ("input()", True, "read first", ["'two\\n'"] * 2 + ["64"]),  # what was read before the command stays read
    ],
)
def test_each_run_reads_all(source: str, from_file: bool, first: str, printed: list[str], tmp_path: Path) -> None:
    words = [sys.executable, "-c", PARENT, source, first]
    if from_file:
        given = tmp_path / "given"
        given.write_bytes(b"one\ntwo\n")
        with given.open("rb") as file:
            done = subprocess.run(words, stdin=file, stdout=subprocess.PIPE, check=True)
    else:
        done = subprocess.run(words, input=b"one\ntwo\n", stdout=subprocess.PIPE, check=True)
    assert done.stdout.decode().splitlines() == printed


def test_a_closed_standard_input_is_left_alone() -> None:
    words = (
        "import os; os.close(0); from mezzo.measure.standard_input import digest_of_input, keep_input, reopen_input; "
    )
    words += "keep_input(['input()'], say=print); reopen_input(); print(repr(digest_of_input(['input()'])))"
    assert subprocess.run([sys.executable, "-c", words], stdout=subprocess.PIPE, check=True).stdout == b"''\n"


@pytest.mark.slow
def test_a_message_says_what_the_command_waits_for() -> None:
    words = [sys.executable, "-c", PARENT, "input()", ""]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert "if it needs none, add < /dev/null" in process.stdout.readline()
        assert process.communicate("one\n")[0].splitlines() == ["'one\\n'"] * 2 + ["64"]
