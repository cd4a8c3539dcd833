"""Tapes that a command records share the imports of one process, which ends with the command."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from mezzo.measure.predict.script.tapes import TapeRequest, recorded_tapes, shared_imports

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere, native libraries do not survive a fork")

SCRIPT = """
import os
import torch
with open("/proc/%d/stat" % os.getppid()) as stat, open("servers", "a") as servers:
    print(stat.read().rpartition(")")[2].split()[1], os.environ.get("RANK"), file=servers)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    model(torch.ones(8, 4)).sum().backward()
    optimizer.step()
"""


def test_all_tapes_of_a_command_come_from_one_process_without_a_launchers_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RANK", "3")
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
    request = TapeRequest(script="train.py", arguments=(), policy="fp32")
    with shared_imports("train.py", kind="script"):
        found = [*recorded_tapes([request]), *recorded_tapes([request])]
    assert [one.num_steps for one in found] == [2, 2]
    (first, rank), second = (line.split() for line in (tmp_path / "servers").read_text().splitlines())
    assert second == [first, rank]
    assert rank == "None"
    assert not Path(f"/proc/{first}").exists()
