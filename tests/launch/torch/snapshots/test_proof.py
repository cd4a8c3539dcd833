"""A twin proves the first snapshot of a run: it finds what no snapshot holds, and what a script has differently each time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from helpers_values import existing
from mezzo.launch.torch.snapshots.proof import verdict_of
from mezzo.launch.twin import write_to_copies
from mezzo.records import RunRecord, SnapshotProof, read_record
from resumable_scripts import HEAD, SCRIPTS

_SAME = {"a": "1", "b": "2"}
_WAITS = """
# Updates until this process has no twin any more: their number differs from run to run, what the twin compares does not.
import time
def has_twin():
    children = [c for t in os.listdir("/proc/self/task") for c in open(f"/proc/self/task/{t}/children").read().split()]
    return any("mezzo.launch.twin" in open(f"/proc/{c}/cmdline").read() for c in children)
seen = alone = 0
for _ in range(4000):
    opt.step(); time.sleep(0.1); has = has_twin(); seen += has; alone = 0 if has else alone + 1
    if alone > (10 if seen else 50): break
"""


def allowed() -> bool:
    """Return whether this system gives a process a file system of its own, found out in another process."""
    code = f"from {write_to_copies.__module__} import write_to_copies; write_to_copies()"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize(
    ("twins", "verdict", "names"),
    [
        ([_SAME], "proven", []),
        ([{"a": "1", "b": "3"}], None, []),
        ([{"a": "1", "b": "3"}, _SAME], "proven", []),
        ([{"a": "1", "b": "3"}, {"a": "1", "b": "3"}], "disproven", ["b"]),
        ([{"a": "1", "b": "3"}, {"a": "1", "b": "4"}], "unrepeatable", ["b"]),
        ([{"a": "2", "b": "3"}, {"a": "2", "b": "4"}], "disproven", ["a"]),
        ([{"a": "1"}, {"a": "1"}], "disproven", ["b"]),
        ([{**_SAME, "c": "1"}, {**_SAME, "c": "1"}], "disproven", ["c"]),
    ],
)
def test_the_verdict_follows_from_the_digests(
    twins: list[dict[str, str]], verdict: str | None, names: list[str]
) -> None:
    found = verdict_of(_SAME, twins)
    assert (None if found is None else found.verdict, [] if found is None else found.names) == (verdict, names)


def test_names_are_written_as_a_script_would() -> None:
    own = {"model._modules['0']._parameters['weight'].grad": "1"}
    found = existing(verdict_of(own, [{}, {}]))
    assert found.names == ["model.0.weight.grad"]


def run(
    script: str, folder: Path, *options: str, policy: str = "fp16"
) -> tuple[subprocess.CompletedProcess[str], RunRecord]:
    """Run a script with snapshots as a user would, and return the process and its record."""
    (folder / "train.py").write_text(script)
    command = [sys.executable, "-m", "mezzo", "run", "--policy", policy, *options, "--out", "out", "train.py"]
    env = {**os.environ, "DIE_AT": "0", "SIGNAL": "9"}
    ran = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=600, check=False)
    record: Any = read_record(folder / "out" / "record.json")
    return ran, record


def proof(record: RunRecord) -> SnapshotProof:
    assert record.snapshots is not None
    assert record.snapshots.proof is not None
    return record.snapshots.proof


_LIBRARY = """
import string
string.turns = 1
for epoch in range(2):
    for a, b in loader: string.turns += 1; step(a * (1 + string.turns / 9), b)
"""
_TIMES = """
import time
times = []
for epoch in range(2):
    for a, b in loader: step(a, b); times.append(time.time())
"""
_OWN_OUTPUT = """
if os.path.exists("best.pt"): raise SystemExit("there is a result already")
for epoch in range(2):
    for a, b in loader: step(a, b); torch.save(model.state_dict(), "best.pt")
"""


@pytest.mark.slow
@pytest.mark.skipif(not allowed(), reason="this system gives no process a file system of its own")
@pytest.mark.parametrize(
    ("script", "verdict", "names", "reason"),
    [
        (SCRIPTS["gan"], "proven", [], ""),  # its first update overflows: the scale changes in an update that is open
        (_LIBRARY, "disproven", ["model.0.weight"], ""),
        (_TIMES, "unrepeatable", ["times[1]"], ""),
        (_OWN_OUTPUT, "unproven", [], "there is a result already"),
    ],
)
def test_a_twin_resumes_the_first_snapshot(
    script: str, verdict: str, names: list[str], reason: str, tmp_path: Path
) -> None:
    ran, record = run(HEAD + script + _WAITS, tmp_path, "--snapshot", "1h")
    assert ran.returncode == 0, ran.stderr
    found = proof(record)
    assert (found.verdict, found.names[:1]) == (verdict, names)
    assert reason in found.reason
    assert not (tmp_path / "out" / "snapshots" / "twin").exists()
    if verdict == "disproven":
        again = subprocess.run(
            [sys.executable, "-m", "mezzo", "run", "--policy", "fp16", "--resume", "out", "--out", "again", "train.py"],
            cwd=tmp_path, env={**os.environ, "DIE_AT": "0", "SIGNAL": "9"}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert again.returncode == 9
        assert "differs from it, first in 'model.0.weight'" in again.stderr


@pytest.mark.slow
@pytest.mark.skipif(not allowed(), reason="this system gives no process a file system of its own")
def test_a_log_has_each_line_once_beside_its_twin(tmp_path: Path) -> None:
    ran, record = run(HEAD + SCRIPTS["log append"] + _WAITS, tmp_path, "--snapshot", "1h")
    assert proof(record).verdict == "proven", ran.stderr
    lines = [line for path in tmp_path.rglob("*.txt") for line in path.read_text().splitlines()]
    assert len(lines) == len(set(lines)) > 10, json.dumps(lines)
